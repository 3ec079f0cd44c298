"""What the kernels of parts_triton.py share on the device: bounds and places, loads of tiles, logits.

Functions take what belongs together as tuples, in the order that the kernels make them:

    row       the rows of a tile: which of them are inside, their relations (of a table of distances their places)
    bias      head, scale, slopes, table, origin, gaps, related: what positions add to logits
    HOW       DISTANCE, GLOBALS, SEGMENT, OF_GLOBALS, ALIGNED: the relations of runs.py, known when a kernel is
              compiled; the distance is -1 for a table of all distances, whose tiles may begin at multiples of 8
    pair      two tensors with the same rows: where the one lies and its stride, and the other's
    SIZE      rows of a tile of a pair, width and block of the one, width and block of the other, FOLD
    carry     what a walk over tiles of keys carries along
    place     of a tile of queries: b, h, H, T, S, its first row, the positions of its ends, and s0, k0, first, end of
              `places`
    bounds    of single rows since when and until when, add and plus of the lower bound and of the upper
    k, v      where a tensor begins, and its strides of batch, head and token; far_k and far_v alike
    far       the number of far keys, their stride, add and plus of their bound; strides and ends of rows
    EVERY     EVERY and TIMES of the lower bound and of the upper
    WALK      HOLE, MASKED, SPLITS, BLOCK, LISTED, ONCE
    rows      of a tile of queries their positions, and whatever else STEP takes: it adds a tile of keys to the carry
    FAR       EVERY, TIMES, START, INNER, SPAN, APART of the far keys; in `over_keys` whether there are any before
              these, and CLIP behind INNER
    shift     by how much the far keys stand behind their numbers, for each query where they are SHIFTED

What is known when a kernel is compiled stays so only where it is not unpacked: those tuples are read by number.
"""

# Triton's compiler reads these bodies, in which types are not those of Python.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false

import triton.language as tl

from regard.kernels.jit_triton import jit

# Numbers that change from call to call: a kernel is not compiled anew for each of them.
CHANGING = [
    *(
        "T",
        "S",
        "q0",
        "k0",
        "first",
        "skip",
        "lines",
        "origin",
        "gaps",
        "columns",
        "slab",
        "low_add",
        "low_plus",
        "high_add",
        "high_plus",
    ),
    *("far_count", "far_add", "far_plus", "far_stride"),
]


@jit
def floored(x, EVERY: tl.constexpr):
    """x // EVERY rounded down, where Triton rounds towards zero."""
    if EVERY == 1:
        return x
    else:
        return tl.where(x >= 0, x // EVERY, -((EVERY - 1 - x) // EVERY))


@jit
def bound(i, add, plus, EVERY: tl.constexpr, TIMES: tl.constexpr):
    if TIMES == 0:
        return i * 0 + plus
    else:
        return floored(i + add, EVERY) * TIMES + plus


@jit
def beyond(n, add, plus, EVERY: tl.constexpr, TIMES: tl.constexpr):
    """The first i with bound(i) > n."""
    if TIMES == 0:
        return tl.where(plus > n, -(1 << 30), 1 << 30)
    else:
        return (floored(n - plus, TIMES) + 1) * EVERY - add


@jit
def own_tile(tiles, H, FOLD: tl.constexpr, FLAT: tl.constexpr):
    """Which tile a program has, its class among those of all heads and rows, its batch row and its head. A grid has
    tiles, heads and batch rows as its axes; a FLAT one has all of them as its first, and splits as its second."""
    if FLAT:
        tile, one = tl.program_id(0) % tiles, tl.program_id(0) // tiles
        b, h = (one // (H * FOLD)).to(tl.int64), (one // FOLD % H).to(tl.int64)
    else:
        tile, one, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
        h = (one // FOLD).to(tl.int64)
    return tile, one, b, h


@jit
def own_split(FLAT: tl.constexpr):
    """Which share of the keys a program has, or of the queries for far keys. Only a flat grid has shares."""
    return tl.program_id(1).to(tl.int64) if FLAT else tl.zeros([], tl.int64)


@jit
def places(b, one, q0, k0, q0_at, k0_at, end_at, last_at, first, T, S, FOLD: tl.constexpr, BY_KEY: tl.constexpr):
    """Class `one` of a row: its first query and slot; how many of both; their positions; the keys that exist."""
    if q0_at is not None:
        q0 += tl.load(q0_at + b).to(tl.int32)
    if k0_at is not None:
        k0 += tl.load(k0_at + b).to(tl.int32)
    end = k0 + S
    if end_at is not None:
        end = tl.minimum(end, tl.load(end_at + b).to(tl.int32))
    if last_at is not None:
        end = tl.minimum(end, tl.load(last_at + b).to(tl.int32))
    first = tl.maximum(tl.maximum(first, k0), 0)
    if FOLD == 1:
        return one * 0, one * 0, T, S, q0, k0, first, end
    else:
        if BY_KEY:
            slot = one
            rest = ((k0 + slot) % FOLD + FOLD) % FOLD
            query = ((rest - q0) % FOLD + FOLD) % FOLD
        else:
            query = one
            rest = (q0 + query) % FOLD
            slot = ((rest - k0) % FOLD + FOLD) % FOLD
        up = FOLD - 1
        queries, slots = (T - query + up) // FOLD, (S - slot + up) // FOLD
        first, end = (first - rest + up) // FOLD, (end - rest + up) // FOLD
        return query, slot, queries, slots, (q0 + query) // FOLD, (k0 + slot - rest) // FOLD, first, end


@jit
def far_end(b, count, end_at, S, START: tl.constexpr, INNER: tl.constexpr, stride, CLIP: tl.constexpr):
    """How many far keys exist, where they are keys of the row."""
    if CLIP:
        end = S
        if end_at is not None:
            end = tl.minimum(end, tl.load(end_at + b).to(tl.int32))
        end = tl.maximum(end - START, 0)
        if INNER > 0:
            end = end // stride * INNER + tl.minimum(end % stride, INNER)
        count = tl.minimum(count, end)
    return count


@jit
def blocks(low_min, low_max, high_min, high_max, SIZE: tl.constexpr):
    """Blocks from low_min on: how many there are, and from which to which they lie in low_max ... high_min."""
    count = tl.maximum(high_max - low_min + SIZE - 1, 0) // SIZE
    whole = tl.minimum(count, tl.maximum(low_max - low_min + SIZE - 1, 0) // SIZE)
    stop = tl.maximum(whole, tl.minimum(count, tl.maximum(high_min - low_min, 0) // SIZE))
    return count, whole, stop


@jit
def share(low, high, low_max, high_min, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    """The part of a range that this program takes."""
    if SPLITS > 1:
        size = (tl.maximum(high - low + SIZE - 1, 0) // SIZE + SPLITS - 1) // SPLITS * SIZE
        low = low + tl.program_id(1) * size
        high = tl.minimum(high, low + size)
        low_max, high_min = tl.maximum(low, low_max), tl.minimum(high, high_min)
    return low, high, low_max, high_min


@jit
def load_rows(
    base, stride, inside, COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr
):
    """COUNT rows from base on, [COUNT, BLOCK]; zeros where a row is not `inside`."""
    column = tl.arange(0, BLOCK)[None, :]
    at = base + tl.arange(0, COUNT)[:, None] * stride + column
    if CHECKED:
        if WIDTH == BLOCK:
            return tl.load(at, mask=inside[:, None], other=0.0)
        else:
            return tl.load(at, mask=inside[:, None] & (column < WIDTH), other=0.0)
    else:
        if WIDTH == BLOCK:
            return tl.load(at)
        else:
            return tl.load(at, mask=column < WIDTH, other=0.0)


@jit
def far_slot(j, stride, START: tl.constexpr, INNER: tl.constexpr):
    if INNER == 0:
        return j + START
    else:
        return j // INNER * stride + j % INNER + START


@jit
def far_shift(i, add, EVERY: tl.constexpr, APART: tl.constexpr):
    """How far the far keys stand behind their numbers, as queries at positions i see them."""
    if APART == 0:
        return 0
    else:
        return floored(i + add, EVERY) * APART


@jit
def load_at(x, at, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The rows that begin at these numbers of x, [., BLOCK]; zeros where one is not `inside`."""
    column = tl.arange(0, BLOCK)[None, :]
    return tl.load(x + at[:, None] + column, mask=inside[:, None] & (column < WIDTH), other=0.0)


@jit
def distance_rows(t, b, h, q0, T, slab, columns, ALIGNED: tl.constexpr):
    """Of queries t: where their rows of the table of distances begin, in which column of them the key at position 0
    stands, and how wide they are. `columns` counts by 8, and `slab` rows lie between two residues modulo 8."""
    begin = ((h * 8 + t % 8) * slab + b * ((T + 7) // 8) + t // 8) * columns * 8
    column = (columns - 1 - t // 8 - q0 // 8) * 8 if ALIGNED else (columns - 1 - t // 8) * 8 - q0
    return begin, column, columns * 8


@jit
def distance_tile(row, at, shift, HOW, KEYS: tl.constexpr, SHIFTED: tl.constexpr):
    """Where the entries of some queries and of the keys from `at` on lie, [ROWS, KEYS], and which are in their rows."""
    inside, places = row
    begin, column, width = places
    if HOW[4]:
        column += at // 8 * 8
    else:
        column += at
    if SHIFTED:
        column += shift
    columns = column[:, None] + tl.arange(0, KEYS)[None, :]
    return begin[:, None] + columns, inside[:, None] & (columns >= 0) & (columns < width)


@jit
def load_distances(related, row, at, shift, HOW, KEYS: tl.constexpr, SHIFTED: tl.constexpr, CHECKED: tl.constexpr):
    """What distances add to a tile of logits [ROWS, KEYS], in units of base 2."""
    to, within = distance_tile(row, at, shift, HOW, KEYS, SHIFTED)
    if CHECKED:
        added = tl.load(related + to, mask=within, other=0.0)
    else:
        added = tl.load(related + to, mask=row[0][:, None], other=0.0)
    return added.to(tl.float32) * 1.4426950408889634


@jit
def load_relations(related, rows_at, inside, RELATIONS: tl.constexpr, DISTANCE: tl.constexpr, BY_ROW: tl.constexpr):
    """The table of some queries, [ROWS, RELATIONS], or the other way round."""
    p = tl.arange(0, RELATIONS)
    if BY_ROW:
        at, mask = rows_at[None, :] * (2 * DISTANCE + 3) + p[:, None], inside[None, :] & (p < 2 * DISTANCE + 3)[:, None]
    else:
        at, mask = rows_at[:, None] * (2 * DISTANCE + 3) + p[None, :], inside[:, None] & (p < 2 * DISTANCE + 3)[None, :]
    return tl.load(related + at, mask=mask, other=0.0).to(tl.float32)


@jit
def linked(i, j, GLOBALS: tl.constexpr, SEGMENT: tl.constexpr):
    """Whether one is the global token of the other's segment."""
    return tl.maximum(tl.maximum(i, j) - GLOBALS, 0) // SEGMENT == tl.minimum(i, j)


@jit
def add_relations(
    logits, scale, tile, i, j, DISTANCE: tl.constexpr, GLOBALS: tl.constexpr, SEGMENT: tl.constexpr,
    FAR: tl.constexpr, OF_GLOBALS: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Scaled logits, and the entry of their relation in `tile`, which has the relations on an axis."""
    if FAR or OF_GLOBALS:
        across = i * 0 + j * 0 + (2 * DISTANCE + 1)
        if SEGMENT > 0:
            across += linked(i, j, GLOBALS, SEGMENT).to(tl.int32)
    if FAR:
        index = across
    else:
        gap = j - i
        index = tl.minimum(tl.abs(gap), DISTANCE) + tl.where(gap < 0, DISTANCE, 0)
        if OF_GLOBALS:
            index = tl.where(j + gap * 0 < GLOBALS, index, across)
    return logits * scale + tl.gather(tile, index, AXIS) * 1.4426950408889634


@jit
def of_relations(
    acc, slope, i, at, DISTANCE: tl.constexpr, GLOBALS: tl.constexpr, SEGMENT: tl.constexpr, FAR: tl.constexpr,
    OF_GLOBALS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """What a tile of gradients of logits [ROWS, KEYS], of the keys from `at` on, adds to those of relations."""
    p = tl.arange(0, acc.shape[1])[None, :]
    i, j = i[:, None], (at + tl.arange(0, KEYS))[None, :]
    if not FAR:
        # below the largest distance a relation is that of one key
        gap = tl.where(p > DISTANCE, DISTANCE - p, p)
        key = i + gap
        inner = (p < 2 * DISTANCE) & (p != DISTANCE) & (key >= at) & (key < at + KEYS)
        right, left = j - i >= DISTANCE, i - j >= DISTANCE
        if OF_GLOBALS:
            inner, right = inner & (key < GLOBALS), right & (j < GLOBALS)
        acc += tl.where(inner, tl.gather(slope, tl.minimum(tl.maximum(key - at, 0), KEYS - 1), 1), 0.0)
        acc += tl.where(p == DISTANCE, tl.sum(tl.where(right, slope, 0.0), 1)[:, None], 0.0)
        acc += tl.where(p == 2 * DISTANCE, tl.sum(tl.where(left, slope, 0.0), 1)[:, None], 0.0)
    if FAR or OF_GLOBALS:
        if OF_GLOBALS:
            slope = tl.where(j >= GLOBALS, slope, 0.0)
        if SEGMENT > 0:
            own = linked(i, j, GLOBALS, SEGMENT)
            acc += tl.where(p == 2 * DISTANCE + 2, tl.sum(tl.where(own, slope, 0.0), 1)[:, None], 0.0)
            slope = tl.where(own, 0.0, slope)
        acc += tl.where(p == 2 * DISTANCE + 1, tl.sum(slope, 1)[:, None], 0.0)
    return acc


@jit
def logits_of(a, b, i, j, row, bias, HOW, FAR: tl.constexpr, AXIS: tl.constexpr):
    """a b^T; where positions add something also scaled, and with that, but for a table of distances. i and j have its
    shape; relations lie on AXIS of theirs."""
    h, scale, slopes, table, origin, gaps, _ = bias
    logits = tl.dot(a, tl.trans(b), input_precision="ieee")
    if slopes is not None or table is not None:
        logits *= scale
    if slopes is not None:
        logits -= tl.load(slopes + h) * tl.abs(j - i).to(tl.float32)
    if table is not None:
        at = j - i + origin
        logits += tl.load(table + h * gaps + at, mask=(at >= 0) & (at < gaps), other=0.0)
    if HOW[0] < 0:
        logits *= scale
    if HOW[0] > 0:
        logits = add_relations(logits, scale, row[1], i, j, HOW[0], HOW[1], HOW[2], FAR, HOW[3], AXIS)
    return logits


@jit
def scale_left(bias):
    """What logits are still to be multiplied by: the scale, where positions add nothing."""
    _, scale, slopes, table, _, _, related = bias
    return scale if slopes is None and table is None and related is None else 1.0


@jit
def load_pair(pair, at, inside, SIZE, CHECKED: tl.constexpr):
    """Tiles of both tensors of a pair, from row `at` on."""
    x, x_t, y, y_t = pair
    FOLD: tl.constexpr = SIZE[5]
    at = at.to(tl.int64) * FOLD
    first = load_rows(x + at * x_t, x_t * FOLD, inside, SIZE[0], SIZE[1], SIZE[2], CHECKED)
    return first, load_rows(y + at * y_t, y_t * FOLD, inside, SIZE[0], SIZE[3], SIZE[4], CHECKED)


@jit
def load_far_pair(pair, j, count, far_stride, SIZE, START: tl.constexpr, INNER: tl.constexpr):
    """Tiles of both tensors of a pair at far keys j."""
    x, x_t, y, y_t = pair
    slot = far_slot(j, far_stride, START, INNER).to(tl.int64)
    return load_at(x, slot * x_t, j < count, SIZE[1], SIZE[2]), load_at(y, slot * y_t, j < count, SIZE[3], SIZE[4])


@jit
def load_far_tile(pair, at, far_stride, SIZE, START: tl.constexpr, INNER: tl.constexpr):
    """`load_far_pair` of a tile that exists, whose first key is a multiple of INNER: where its keys lie beside the
    first one is the same for all such tiles."""
    x, x_t, y, y_t = pair
    slot = far_slot(tl.arange(0, SIZE[0]), far_stride, START, INNER).to(tl.int64)
    first = (at if INNER == 0 else at // INNER * far_stride).to(tl.int64)
    key = _load_rows_at(x + first * x_t, slot * x_t, SIZE[1], SIZE[2])
    return key, _load_rows_at(y + first * y_t, slot * y_t, SIZE[3], SIZE[4])


@jit
def _load_rows_at(x, at, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    if WIDTH == BLOCK:
        return tl.load(x + (at[:, None] + column))
    else:
        return tl.load(x + (at[:, None] + column), mask=column < WIDTH, other=0.0)


@jit
def rows_see(
    i, i_first, i_last, rows_at, inside, since, until, first, end, low_add, low_plus, high_add, high_plus,
    LOW_EVERY: tl.constexpr, LOW_TIMES: tl.constexpr, HIGH_EVERY: tl.constexpr, HIGH_TIMES: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The bounds of each row, and the least and the largest of either."""
    low = tl.maximum(bound(i, low_add, low_plus, LOW_EVERY, LOW_TIMES), first)
    high = tl.minimum(bound(i, high_add, high_plus, HIGH_EVERY, HIGH_TIMES), end)
    if since is not None:
        low = tl.maximum(low, tl.load(since + rows_at, mask=inside, other=0).to(tl.int32))
        low_min = tl.min(tl.where(inside, low, 1 << 30), 0)
        low_max = tl.max(tl.where(inside, low, -(1 << 30)), 0)
    else:
        low_min = tl.maximum(bound(i_first, low_add, low_plus, LOW_EVERY, LOW_TIMES), first)
        low_max = tl.maximum(bound(i_last, low_add, low_plus, LOW_EVERY, LOW_TIMES), first)
    if until is not None:
        high = tl.minimum(high, tl.load(until + rows_at, mask=inside, other=0).to(tl.int32))
        high_min = tl.min(tl.where(inside, high, 1 << 30), 0)
        high_max = tl.max(tl.where(inside, high, -(1 << 30)), 0)
    else:
        high_min = tl.minimum(bound(i_first, high_add, high_plus, HIGH_EVERY, HIGH_TIMES), end)
        high_max = tl.minimum(bound(i_last, high_add, high_plus, HIGH_EVERY, HIGH_TIMES), end)
    if MASKED:
        # no tile counts as seen whole
        low_max = high_max
    return low, high, low_min, low_max, high_min, high_max


@jit
def between(j, low, high):
    """low <= j < high, by one comparison of unsigned integers."""
    return (j - low).to(tl.uint32) < tl.maximum(high - low, 0).to(tl.uint32)


@jit
def over_far(carry, rows, far, count, stride, add, plus, ends, HOW, SIZE, FAR, STEP: tl.constexpr):
    """The far keys: first those that all queries from position ends[0] to ends[1] see."""
    KEYS: tl.constexpr = SIZE[0]
    high = bound(rows[0], add, plus, FAR[0], FAR[1])
    high_min, high_max = bound(ends[0], add, plus, FAR[0], FAR[1]), bound(ends[1], add, plus, FAR[0], FAR[1])
    low, low_min, low_max = 0, 0, 0
    if FAR[4] > 0:
        low = high - FAR[4]
        low_min, low_max = tl.maximum(high_min - FAR[4], 0) // 8 * 8, tl.maximum(high_max - FAR[4], 0)
    high, high_min, high_max = tl.minimum(high, count), tl.minimum(high_min, count), tl.minimum(high_max, count)
    shift = far_shift(rows[0], add, FAR[0], FAR[5])
    tiles, whole, stop = blocks(low_min, low_max, high_min, high_max, KEYS)
    for n in range(whole, stop):
        at = low_min + n * KEYS
        j = at + tl.arange(0, KEYS)
        if FAR[4] == 0 and (FAR[3] == 0 or KEYS % FAR[3] == 0):
            key, value = load_far_tile(far, at, stride, SIZE, FAR[2], FAR[3])
        else:
            key, value = load_far_pair(far, j, count, stride, SIZE, FAR[2], FAR[3])
        carry = STEP(carry, rows, key, value, at, j, shift, None, HOW, KEYS, True, FAR[5] > 0, False)
    # without a span all tiles that some do not see whole stand behind the others
    for n in range(0 if FAR[4] > 0 else stop, tiles - (stop - whole) if FAR[4] > 0 else tiles):
        at = low_min + (tl.where(n < whole, n, n + stop - whole) if FAR[4] > 0 else n) * KEYS
        j = at + tl.arange(0, KEYS)
        key, value = load_far_pair(far, j, count, stride, SIZE, FAR[2], FAR[3])
        visible = j[None, :] < high[:, None]
        if FAR[4] > 0:
            visible &= j[None, :] >= low[:, None]
        carry = STEP(carry, rows, key, value, at, j, shift, visible, HOW, KEYS, True, FAR[5] > 0, True)
    return carry


@jit
def over_near(
    carry, rows, near, see, first, end, HOW, SIZE,
    HOLE: tl.constexpr, MASKED: tl.constexpr, SPLITS: tl.constexpr, ONCE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The near keys of `rows_see`: first those that not all queries see. ONCE: masks are made by one comparison, which
    is faster in the backward pass."""
    KEYS: tl.constexpr = SIZE[0]
    low, high, low_min, low_max, high_min, high_max = see
    if HOW[0] < 0:
        low_min = low_min // 8 * 8
    low_min, high_max, low_max, high_min = share(low_min, high_max, low_max, high_min, SPLITS, KEYS)
    tiles, whole, stop = blocks(low_min, low_max, high_min, high_max, KEYS)
    for n in range(tiles - (stop - whole)):
        at = low_min + tl.where(n < whole, n, n + stop - whole) * KEYS
        j = at + tl.arange(0, KEYS)
        key, value = load_pair(near, at, (j >= first) & (j < end), SIZE, True)
        if ONCE:
            visible = between(j[None, :], low[:, None], high[:, None])
        else:
            visible = (j[None, :] >= low[:, None]) & (j[None, :] < high[:, None])
        if HOLE:
            visible &= j[None, :] != rows[0][:, None]
        carry = STEP(carry, rows, key, value, at, j, 0, visible, HOW, KEYS, False, False, True)
    if not MASKED:
        for n in range(whole, stop):
            at = low_min + n * KEYS
            key, value = load_pair(near, at, None, SIZE, False)
            carry = STEP(carry, rows, key, value, at, at + tl.arange(0, KEYS), 0, None, HOW, KEYS, False, False, False)
    return carry


@jit
def over_listed(
    carry, rows, near, listed, S, HOW, SIZE, BLOCK: tl.constexpr, LISTED: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """The keys of the blocks in a list."""
    KEYS: tl.constexpr = SIZE[0]
    for n in range(LISTED * (BLOCK // KEYS)):
        at = tl.load(listed + n // (BLOCK // KEYS)).to(tl.int32) * BLOCK + n % (BLOCK // KEYS) * KEYS
        j = at + tl.arange(0, KEYS)
        real = (j >= 0) & (j < S)
        key, value = load_pair(near, at, real, SIZE, True)
        carry = STEP(carry, rows, key, value, at, j, 0, real[None, :], HOW, KEYS, False, False, True)
    return carry


@jit
def over_keys(
    carry, rows, place, i, rows_at, inside, bounds, k, v, far_k, far_v, far, lists, HOW, SIZE, FAR_SIZE, FAR, EVERY,
    WALK, RATIO: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """All keys that a tile of queries sees: the far ones, the near ones, those of blocks in lists."""
    b, h, H, T, S, row0, ends, s0, k0, first, end = place
    far_count, far_stride, far_add, far_plus, stride_at, end_at = far
    if FAR[0]:
        key = far_k[0] + b * far_k[1] + h // RATIO * far_k[2]
        pair = (key, far_k[3], far_v[0] + b * far_v[1] + h // RATIO * far_v[2], far_v[3])
        if stride_at is not None:
            far_stride = tl.load(stride_at + b).to(tl.int32)
        far_count = far_end(b, far_count, end_at, S, FAR[3], FAR[4], far_stride, FAR[5])
        FAR_BOUND: tl.constexpr = (FAR[1], FAR[2], FAR[3], FAR[4], FAR[6], FAR[7])
        carry = over_far(
            carry, rows, pair, far_count, far_stride, far_add, far_plus, ends, HOW, FAR_SIZE, FAR_BOUND, STEP
        )
    see = rows_see(
        *(i, ends[0], ends[1], rows_at, inside, bounds[0], bounds[1], first, end, bounds[2], bounds[3], bounds[4]),
        *(bounds[5], EVERY[0], EVERY[1], EVERY[2], EVERY[3], WALK[1]),
    )
    shift = s0 - k0.to(tl.int64) * SIZE[5]
    key = k[0] + b * k[1] + h // RATIO * k[2] + shift * k[3]
    near = (key, k[3], v[0] + b * v[1] + h // RATIO * v[2] + shift * v[3], v[3])
    carry = over_near(carry, rows, near, see, first, end, HOW, SIZE, WALK[0], WALK[1], WALK[2], WALK[5], STEP)
    if WALK[4] > 0:
        BLOCK: tl.constexpr = WALK[3]
        LISTED: tl.constexpr = WALK[4]
        listed = lists + ((b * H + h) * ((T + BLOCK - 1) // BLOCK) + row0 // BLOCK) * LISTED
        carry = over_listed(carry, rows, near, listed, S, HOW, SIZE, BLOCK, LISTED, STEP)
    return carry
