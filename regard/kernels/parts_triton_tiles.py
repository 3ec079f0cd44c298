"""What the kernels of parts_triton.py share on the device: bounds and places, loads of tiles, logits.

A program has a tile of queries and walks over tiles of keys, or the other way round. What belongs together are the
named tuples below. HOW is a `Relations`, SIZE a `Size` and EVERY a `Rounding`: upper-case names are known when a kernel
is compiled. Their fields stay so; to unpack such a tuple would make numbers of the device of them. Other tuples that
functions take:

    row       the rows of a tile: which of them are inside, their relations (of a table of distances their places)
    carry     what a walk over tiles of keys carries along
    rows      of a tile of queries their positions, and whatever else STEP takes: it adds a tile of keys to the carry
    place     of a tile of queries: b, h, H, T, S, its first row, the positions of its ends, and s0, k0, first, end of
              `places`
    k, v      where a tensor begins, and its strides of batch, head and token; far_k and far_v alike
    far       the number of far keys, their stride, add and plus of their bound; strides and ends of rows
    shift     by how much the far keys stand behind their numbers, for each query where they are SHIFTED
"""

# Triton's compiler reads these bodies, in which types are not those of Python.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false

from typing import Any, NamedTuple

import triton.language as tl

from regard.kernels.jit_triton import jit

# Numbers that change from call to call: a kernel is not compiled anew for each of them.
CHANGING = [
    *("T", "S", "q0", "k0", "first", "skip", "lines", "origin", "gaps", "columns", "slab"),
    *("low_add", "low_plus", "high_add", "high_plus", "far_count", "far_add", "far_plus", "far_stride"),
]


class Relations(NamedTuple):
    """The relations of runs.py."""

    distance: Any  # the largest; 0: there are none, -1: there is a table of all distances
    globals: Any
    segment: Any
    of_globals: Any
    aligned: Any  # tiles of a table of distances may begin at multiples of 8


class Size(NamedTuple):
    """A tile of a pair of tensors with the same rows."""

    rows: Any
    width: Any
    block: Any  # the width as a power of two
    other_width: Any
    other_block: Any
    fold: Any  # tokens from one row to the next


class Pair(NamedTuple):
    """Two tensors with the same rows: where each lies, and its stride from token to token."""

    x: Any
    x_stride: Any
    y: Any
    y_stride: Any


class Rounding(NamedTuple):
    """`every` and `times` of the lower and of the upper bound of near keys (runs.Bound)."""

    low_every: Any
    low_times: Any
    high_every: Any
    high_times: Any


class Bounds(NamedTuple):
    """`add` and `plus` of the same bounds."""

    low_add: Any
    low_plus: Any
    high_add: Any
    high_plus: Any


class FarKeys(NamedTuple):
    """runs.Far, and `every` and `times` of its bound."""

    any: Any
    every: Any
    times: Any
    start: Any
    inner: Any
    clip: Any  # they are keys of the row: those behind its end do not exist
    span: Any
    apart: Any


class Walk(NamedTuple):
    """How a tile of queries goes over keys."""

    hole: Any  # a query does not see the key at its own position
    masked: Any  # all tiles are masked, in one loop
    splits: Any
    block: Any
    listed: Any
    once: Any  # masks are made by one comparison, which is faster in the backward pass


class Added(NamedTuple):
    """What positions add to logits; None: nothing."""

    head: Any
    scale: Any
    slopes: Any
    table: Any
    origin: Any
    gaps: Any
    related: Any


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
def low_bound(i, bounds, first, EVERY):
    """The first near key that queries at positions i see."""
    return tl.maximum(bound(i, bounds.low_add, bounds.low_plus, EVERY.low_every, EVERY.low_times), first)


@jit
def high_bound(i, bounds, end, EVERY):
    """The first key behind those that queries at positions i see."""
    return tl.minimum(bound(i, bounds.high_add, bounds.high_plus, EVERY.high_every, EVERY.high_times), end)


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
    if HOW.aligned:
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
def logits_of(a, b, i, j, row, added, HOW, FAR: tl.constexpr, AXIS: tl.constexpr):
    """a b^T; where positions add something also scaled, and with that, but for a table of distances. i and j have its
    shape; relations lie on AXIS of theirs."""
    logits = tl.dot(a, tl.trans(b), input_precision="ieee")
    if added.slopes is not None or added.table is not None:
        logits *= added.scale
    if added.slopes is not None:
        logits -= tl.load(added.slopes + added.head) * tl.abs(j - i).to(tl.float32)
    if added.table is not None:
        at = j - i + added.origin
        logits += tl.load(added.table + added.head * added.gaps + at, mask=(at >= 0) & (at < added.gaps), other=0.0)
    if HOW.distance < 0:
        logits *= added.scale
    if HOW.distance > 0:
        logits = add_relations(
            logits, added.scale, row[1], i, j, HOW.distance, HOW.globals, HOW.segment, FAR, HOW.of_globals, AXIS
        )
    return logits


@jit
def scale_left(added):
    """What logits are still to be multiplied by: the scale, where positions add nothing."""
    return added.scale if added.slopes is None and added.table is None and added.related is None else 1.0


@jit
def load_pair(pair, at, inside, SIZE, CHECKED: tl.constexpr):
    """Tiles of both tensors of a pair, from row `at` on."""
    at = at.to(tl.int64) * SIZE.fold
    x = pair.x + at * pair.x_stride
    first = load_rows(x, pair.x_stride * SIZE.fold, inside, SIZE.rows, SIZE.width, SIZE.block, CHECKED)
    y = pair.y + at * pair.y_stride
    return first, load_rows(
        y, pair.y_stride * SIZE.fold, inside, SIZE.rows, SIZE.other_width, SIZE.other_block, CHECKED
    )


@jit
def load_far_pair(pair, j, count, far_stride, SIZE, START: tl.constexpr, INNER: tl.constexpr):
    """Tiles of both tensors of a pair at far keys j."""
    slot = far_slot(j, far_stride, START, INNER).to(tl.int64)
    first = load_at(pair.x, slot * pair.x_stride, j < count, SIZE.width, SIZE.block)
    return first, load_at(pair.y, slot * pair.y_stride, j < count, SIZE.other_width, SIZE.other_block)


@jit
def load_far_tile(pair, at, far_stride, SIZE, START: tl.constexpr, INNER: tl.constexpr):
    """`load_far_pair` of a tile that exists, whose first key is a multiple of INNER: where its keys lie beside the
    first one is the same for all such tiles."""
    slot = far_slot(tl.arange(0, SIZE.rows), far_stride, START, INNER).to(tl.int64)
    first = (at if INNER == 0 else at // INNER * far_stride).to(tl.int64)
    key = _load_rows_at(pair.x + first * pair.x_stride, slot * pair.x_stride, SIZE.width, SIZE.block)
    y = pair.y + first * pair.y_stride
    return key, _load_rows_at(y, slot * pair.y_stride, SIZE.other_width, SIZE.other_block)


@jit
def _load_rows_at(x, at, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    if WIDTH == BLOCK:
        return tl.load(x + (at[:, None] + column))
    else:
        return tl.load(x + (at[:, None] + column), mask=column < WIDTH, other=0.0)


@jit
def rows_see(
    i, i_first, i_last, rows_at, inside, since, until, first, end, bounds, EVERY, MASKED: tl.constexpr
):  # fmt: skip
    """The bounds of each row, and the least and the largest of either."""
    low, high = low_bound(i, bounds, first, EVERY), high_bound(i, bounds, end, EVERY)
    if since is not None:
        low = tl.maximum(low, tl.load(since + rows_at, mask=inside, other=0).to(tl.int32))
        low_min = tl.min(tl.where(inside, low, 1 << 30), 0)
        low_max = tl.max(tl.where(inside, low, -(1 << 30)), 0)
    else:
        low_min, low_max = low_bound(i_first, bounds, first, EVERY), low_bound(i_last, bounds, first, EVERY)
    if until is not None:
        high = tl.minimum(high, tl.load(until + rows_at, mask=inside, other=0).to(tl.int32))
        high_min = tl.min(tl.where(inside, high, 1 << 30), 0)
        high_max = tl.max(tl.where(inside, high, -(1 << 30)), 0)
    else:
        high_min, high_max = high_bound(i_first, bounds, end, EVERY), high_bound(i_last, bounds, end, EVERY)
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
    KEYS: tl.constexpr = SIZE.rows
    high = bound(rows[0], add, plus, FAR.every, FAR.times)
    high_min, high_max = (
        bound(ends[0], add, plus, FAR.every, FAR.times),
        bound(ends[1], add, plus, FAR.every, FAR.times),
    )
    low, low_min, low_max = 0, 0, 0
    if FAR.span > 0:
        low = high - FAR.span
        low_min, low_max = tl.maximum(high_min - FAR.span, 0) // 8 * 8, tl.maximum(high_max - FAR.span, 0)
    high, high_min, high_max = tl.minimum(high, count), tl.minimum(high_min, count), tl.minimum(high_max, count)
    shift = far_shift(rows[0], add, FAR.every, FAR.apart)
    tiles, whole, stop = blocks(low_min, low_max, high_min, high_max, KEYS)
    for n in range(whole, stop):
        at = low_min + n * KEYS
        j = at + tl.arange(0, KEYS)
        if FAR.span == 0 and (FAR.inner == 0 or KEYS % FAR.inner == 0):
            key, value = load_far_tile(far, at, stride, SIZE, FAR.start, FAR.inner)
        else:
            key, value = load_far_pair(far, j, count, stride, SIZE, FAR.start, FAR.inner)
        carry = STEP(carry, rows, key, value, at, j, shift, None, HOW, KEYS, True, FAR.apart > 0, False)
    # without a span all tiles that some do not see whole stand behind the others
    for n in range(0 if FAR.span > 0 else stop, tiles - (stop - whole) if FAR.span > 0 else tiles):
        at = low_min + (tl.where(n < whole, n, n + stop - whole) if FAR.span > 0 else n) * KEYS
        j = at + tl.arange(0, KEYS)
        key, value = load_far_pair(far, j, count, stride, SIZE, FAR.start, FAR.inner)
        visible = j[None, :] < high[:, None]
        if FAR.span > 0:
            visible &= j[None, :] >= low[:, None]
        carry = STEP(carry, rows, key, value, at, j, shift, visible, HOW, KEYS, True, FAR.apart > 0, True)
    return carry


@jit
def over_near(
    carry, rows, near, see, first, end, HOW, SIZE, WALK, STEP: tl.constexpr
):  # fmt: skip
    """The near keys of `rows_see`: first those that not all queries see."""
    KEYS: tl.constexpr = SIZE.rows
    low, high, low_min, low_max, high_min, high_max = see
    if HOW.distance < 0:
        low_min = low_min // 8 * 8
    low_min, high_max, low_max, high_min = share(low_min, high_max, low_max, high_min, WALK.splits, KEYS)
    tiles, whole, stop = blocks(low_min, low_max, high_min, high_max, KEYS)
    for n in range(tiles - (stop - whole)):
        at = low_min + tl.where(n < whole, n, n + stop - whole) * KEYS
        j = at + tl.arange(0, KEYS)
        key, value = load_pair(near, at, (j >= first) & (j < end), SIZE, True)
        if WALK.once:
            visible = between(j[None, :], low[:, None], high[:, None])
        else:
            visible = (j[None, :] >= low[:, None]) & (j[None, :] < high[:, None])
        if WALK.hole:
            visible &= j[None, :] != rows[0][:, None]
        carry = STEP(carry, rows, key, value, at, j, 0, visible, HOW, KEYS, False, False, True)
    if not WALK.masked:
        for n in range(whole, stop):
            at = low_min + n * KEYS
            key, value = load_pair(near, at, None, SIZE, False)
            carry = STEP(carry, rows, key, value, at, at + tl.arange(0, KEYS), 0, None, HOW, KEYS, False, False, False)
    return carry


@jit
def over_listed(
    carry, rows, near, listed, S, HOW, SIZE, WALK, STEP: tl.constexpr
):  # fmt: skip
    """The keys of the blocks in a list."""
    KEYS: tl.constexpr = SIZE.rows
    TILES: tl.constexpr = WALK.block // KEYS  # of a block
    for n in range(WALK.listed * TILES):
        at = tl.load(listed + n // TILES).to(tl.int32) * WALK.block + n % TILES * KEYS
        j = at + tl.arange(0, KEYS)
        real = (j >= 0) & (j < S)
        key, value = load_pair(near, at, real, SIZE, True)
        carry = STEP(carry, rows, key, value, at, j, 0, real[None, :], HOW, KEYS, False, False, True)
    return carry


@jit
def over_keys(
    carry, rows, place, i, rows_at, inside, since, until, bounds, k, v, far_k, far_v, far, lists,
    HOW, SIZE, FAR_SIZE, FAR, EVERY, WALK, RATIO: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """All keys that a tile of queries sees: the far ones, the near ones, those of blocks in lists."""
    b, h, H, T, S, row0, ends, s0, k0, first, end = place
    far_count, far_stride, far_add, far_plus, stride_at, end_at = far
    if FAR.any:
        key = far_k[0] + b * far_k[1] + h // RATIO * far_k[2]
        pair = Pair(key, far_k[3], far_v[0] + b * far_v[1] + h // RATIO * far_v[2], far_v[3])
        if stride_at is not None:
            far_stride = tl.load(stride_at + b).to(tl.int32)
        far_count = far_end(b, far_count, end_at, S, FAR.start, FAR.inner, far_stride, FAR.clip)
        carry = over_far(carry, rows, pair, far_count, far_stride, far_add, far_plus, ends, HOW, FAR_SIZE, FAR, STEP)
    see = rows_see(i, ends[0], ends[1], rows_at, inside, since, until, first, end, bounds, EVERY, WALK.masked)
    shift = s0 - k0.to(tl.int64) * SIZE.fold
    key = k[0] + b * k[1] + h // RATIO * k[2] + shift * k[3]
    near = Pair(key, k[3], v[0] + b * v[1] + h // RATIO * v[2] + shift * v[3], v[3])
    carry = over_near(carry, rows, near, see, first, end, HOW, SIZE, WALK, STEP)
    if WALK.listed > 0:
        number = (b * H + h) * ((T + WALK.block - 1) // WALK.block) + row0 // WALK.block
        carry = over_listed(carry, rows, near, lists + number * WALK.listed, S, HOW, SIZE, WALK, STEP)
    return carry
