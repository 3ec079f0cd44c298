"""The backward kernels of parts_triton.py: one over tiles of queries, one over tiles of keys.

Both compute the attention weights of a tile anew, from the logits and the logsumexp `lse` that the forward pass left
(`top` where it is loaded). With `delta`, the rows' o . do, the gradient of the scaled logits is
weights * (do . v - delta), called `slope` here.

The tuples that functions take are those of parts_triton_tiles.py, and in the kernel of keys:

    tile      the keys and values of a program, the positions of the keys, and that of the first one
    sums      dk and dv of the tile so far
    rows      of all queries: the pair of q and do, lse, deltas, where a head begins in those two, t0, q0, queries and
              skip of `places`, added, see, whose
    see       the bounds of queries, the first near key and the end, since and until, and where a batch row begins there
    whose     batch row, head, T, and slab and columns of a table of distances
    far       sums that keys have had as far keys, where theirs stand there, which keys are far, whether any can be
"""

# Triton's compiler reads these bodies, in which types are not those of Python.
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from typing import Any, NamedTuple

import triton.language as tl

from regard.kernels.jit_triton import jit
from regard.kernels.parts_triton_tiles import (
    CHANGING,
    Added,
    Bounds,
    FarKeys,
    Pair,
    Relations,
    Rounding,
    Size,
    Walk,
    between,
    beyond,
    blocks,
    distance_rows,
    distance_tile,
    far_end,
    far_shift,
    high_bound,
    load_at,
    load_distances,
    load_far_pair,
    load_pair,
    load_relations,
    load_rows,
    logits_of,
    low_bound,
    of_relations,
    over_keys,
    own_split,
    own_tile,
    places,
    scale_left,
    share,
)


class Kind(NamedTuple):
    """What the kernel of keys is compiled for, beside sizes."""

    relations: Any  # of a table, as a power of two
    far_apart: Any
    of_far: Any  # the keys are far ones
    hole: Any
    unbounded: Any  # queries that others skip see all
    eights: Any  # all begins at multiples of eight queries


@jit(do_not_specialize=CHANGING)
def queries_kernel(
    q, k, v, far_k, far_v, q0_at, k0_at, end_at, since, until, last_at, stride_at, slopes, table,
    lists, list_starts, list_rows, related,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, fk_b, fk_h, fk_t, fv_b, fv_h, fv_t,
    H, T, S, q0, k0, first, skip, origin, gaps, columns, slab, low_add, low_plus, high_add, high_plus,
    far_count, far_add, far_plus, far_stride,
    o, grad_o, lse, deltas, out, before, out_related,
    o_b, o_h, o_t, g_b, g_h, g_t, out_b, out_h, out_t, out_split, lines, scale, natural,
    RATIO: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, FAR_KEYS: tl.constexpr, LOW_EVERY: tl.constexpr, LOW_TIMES: tl.constexpr,
    HIGH_EVERY: tl.constexpr, HIGH_TIMES: tl.constexpr, FAR: tl.constexpr, FAR_EVERY: tl.constexpr,
    FAR_TIMES: tl.constexpr, FAR_START: tl.constexpr, FAR_INNER: tl.constexpr, FAR_CLIP: tl.constexpr,
    FAR_SPAN: tl.constexpr, FAR_APART: tl.constexpr, FOLD: tl.constexpr, HOLE: tl.constexpr, MASKED: tl.constexpr,
    BLOCK: tl.constexpr, LISTED: tl.constexpr,
    DISTANCE: tl.constexpr, GLOBALS: tl.constexpr, SEGMENT: tl.constexpr, OF_GLOBALS: tl.constexpr,
    ALIGNED: tl.constexpr, RELATIONS: tl.constexpr, FLAT: tl.constexpr, SPLITS: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """dq, what relations get, and the rows' o . do where this is the first pass."""
    tiles = ((T + FOLD - 1) // FOLD + ROWS - 1) // ROWS
    tile, one, b, h = own_tile(tiles, H, FOLD, FLAT)
    row0 = (tiles - 1 - tile) * ROWS
    t0, s0, queries, _, q0, k0, first, end = places(
        b, one % FOLD, q0, k0, q0_at, k0_at, end_at, last_at, first, T, S, FOLD, False
    )
    r = row0 + tl.arange(0, ROWS)
    t = t0 + r * FOLD
    inside, i = (r < queries) & (t >= skip), r + q0
    ends = (row0 + q0, tl.minimum(row0 + ROWS, queries) - 1 + q0)
    at0 = t0 + row0.to(tl.int64) * FOLD
    query = load_rows(q + b * q_b + h * q_h + at0 * q_t, q_t * FOLD, inside, ROWS, D, BLOCK_D, True)
    grad = load_rows(grad_o + b * g_b + h * g_h + at0 * g_t, g_t * FOLD, inside, ROWS, E, BLOCK_E, True)
    rows_at = (b * H + h) * lines + t
    top = tl.load(lse + rows_at, mask=inside, other=float("inf"))
    BY_ROW: tl.constexpr = q0_at is not None or k0_at is not None
    HOW: tl.constexpr = Relations(DISTANCE, GLOBALS, SEGMENT, OF_GLOBALS, ALIGNED and not BY_ROW)
    relations = 0
    if DISTANCE > 0:
        relations = load_relations(related, rows_at, inside, RELATIONS, DISTANCE, False)
    if DISTANCE < 0:
        relations = distance_rows(t, b, h, q0, T, slab, columns, HOW.aligned)
    if FIRST:
        seen = load_rows(o + b * o_b + h * o_h + at0 * o_t, o_t * FOLD, inside, ROWS, E, BLOCK_E, True)
        delta = tl.sum(seen.to(tl.float32) * grad.to(tl.float32), 1)
        tl.store(deltas + rows_at, delta, mask=inside)
    else:
        delta = tl.load(deltas + rows_at, mask=inside, other=0.0)
    added = Added(h, scale, slopes, table, origin, gaps, related)
    rows = (i, query, grad, top, delta, (inside, relations), added, out_related)
    carry = (tl.zeros([ROWS, BLOCK_D], tl.float32), tl.zeros([ROWS, RELATIONS], tl.float32))
    carry = over_keys(
        *(carry, rows, (b, h, H, T, S, row0, ends, s0, k0, first, end)),
        *(i, b * T + t, inside, since, until, Bounds(low_add, low_plus, high_add, high_plus)),
        *((k, k_b, k_h, k_t), (v, v_b, v_h, v_t), (far_k, fk_b, fk_h, fk_t), (far_v, fv_b, fv_h, fv_t)),
        *((far_count, far_stride, far_add, far_plus, stride_at, end_at), lists, HOW),
        *(Size(KEYS, D, BLOCK_D, E, BLOCK_E, FOLD), Size(FAR_KEYS, D, BLOCK_D, E, BLOCK_E, 1)),
        FarKeys(FAR, FAR_EVERY, FAR_TIMES, FAR_START, FAR_INNER, FAR_CLIP, FAR_SPAN, FAR_APART),
        Rounding(LOW_EVERY, LOW_TIMES, HIGH_EVERY, HIGH_TIMES),
        *(Walk(HOLE, MASKED, SPLITS, BLOCK, LISTED, True), RATIO, _descend),
    )
    acc, acc_r = carry

    # rows that were skipped get zeros
    exist, split = (r < queries)[:, None], own_split(FLAT)
    if DISTANCE > 0:
        p, WIDE = tl.arange(0, RELATIONS)[None, :], 2 * DISTANCE + 3
        to = out_related + (split * (tl.num_programs(0) // tiles) * T + rows_at)[:, None] * WIDE + p
        tl.store(to, acc_r.to(out_related.dtype.element_ty), mask=exist & (p < WIDE))
    acc *= natural
    out_at, column = b * out_b + h * out_h + at0 * out_t, tl.arange(0, BLOCK_D)[None, :]
    if before is not None:
        acc += load_rows(before + out_at, out_t * FOLD, inside, ROWS, D, BLOCK_D, True)
    to = out + split * out_split + out_at + tl.arange(0, ROWS)[:, None] * (out_t * FOLD) + column
    tl.store(to, acc.to(out.dtype.element_ty), mask=exist & (column < D))


@jit
def _descend(
    carry, rows, key, value, at, j, shift, visible, HOW, KEYS: tl.constexpr, FAR: tl.constexpr,
    SHIFTED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What a tile of keys gives to dq, and to relations."""
    acc, acc_r = carry
    i, query, grad, top, delta, row, added, out_related = rows
    if SHIFTED:
        i -= shift
    logits = logits_of(query, key, i[:, None], j[None, :], row, added, HOW, FAR, 1)
    if HOW.distance < 0:
        logits += load_distances(added.related, row, at, shift, HOW, KEYS, SHIFTED, MASKED)
    weights = tl.exp2(logits * scale_left(added) - top[:, None])
    if MASKED:
        weights = tl.where(visible, weights, 0.0)
    slope = weights * (tl.dot(grad, tl.trans(value), input_precision="ieee") - delta[:, None])
    acc = tl.dot(slope.to(key.dtype), key, acc, input_precision="ieee")
    if HOW.distance < 0:
        to, _ = distance_tile(row, at, shift, HOW, KEYS, SHIFTED)
        if MASKED:
            # beside those that a query sees stand entries of its far keys
            tl.store(out_related + to, slope.to(out_related.dtype.element_ty), mask=row[0][:, None] & visible)
        else:
            tl.store(out_related + to, slope.to(out_related.dtype.element_ty), mask=row[0][:, None])
    if HOW.distance > 0:
        acc_r = of_relations(acc_r, slope, i, at, HOW.distance, HOW.globals, HOW.segment, FAR, HOW.of_globals, KEYS)
    return acc, acc_r


@jit
def _of_lists(
    sums, tile, rows, lists_at, HOW, SIZE, EVERY, KIND, BLOCK: tl.constexpr, LISTED: tl.constexpr
):  # fmt: skip
    """The queries of blocks that list the block of these keys."""
    list_starts, list_rows, one, size, slot0 = lists_at
    TILES: tl.constexpr = BLOCK // SIZE.rows  # of a block
    start_at = list_starts + one * (size + 1) + slot0 // BLOCK
    start, last = tl.load(start_at).to(tl.int32), tl.load(start_at + 1).to(tl.int32)
    for n in range((last - start) * TILES):
        block = tl.load(list_rows + one * size * LISTED + start + n // TILES).to(tl.int32)
        row0 = block * BLOCK + n % TILES * SIZE.rows
        sums = _of_rows(sums, tile, rows, row0, False, HOW, SIZE, EVERY, KIND, True, False)
    return sums


@jit(do_not_specialize=CHANGING)
def keys_kernel(
    q, k, v, far_k, far_v, q0_at, k0_at, end_at, since, until, last_at, stride_at, slopes, table,
    lists, list_starts, list_rows, related,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, fk_b, fk_h, fk_t, fv_b, fv_h, fv_t,
    H, T, S, q0, k0, first, skip, origin, gaps, columns, slab, low_add, low_plus, high_add, high_plus,
    far_count, far_add, far_plus, far_stride,
    grad_o, lse, deltas, out_k, out_v, before_k, before_v, sums_k, sums_v,
    g_b, g_h, g_t, ok_b, ok_h, ok_t, ov_b, ov_h, ov_t, ok_split, ov_split, scale, natural,
    RATIO: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, FAR_KEYS: tl.constexpr, LOW_EVERY: tl.constexpr, LOW_TIMES: tl.constexpr,
    HIGH_EVERY: tl.constexpr, HIGH_TIMES: tl.constexpr, FAR: tl.constexpr, FAR_EVERY: tl.constexpr,
    FAR_TIMES: tl.constexpr, FAR_START: tl.constexpr, FAR_INNER: tl.constexpr, FAR_CLIP: tl.constexpr,
    FAR_SPAN: tl.constexpr, FAR_APART: tl.constexpr, FOLD: tl.constexpr, HOLE: tl.constexpr, MASKED: tl.constexpr,
    BLOCK: tl.constexpr, LISTED: tl.constexpr,
    DISTANCE: tl.constexpr, GLOBALS: tl.constexpr, SEGMENT: tl.constexpr, OF_GLOBALS: tl.constexpr,
    ALIGNED: tl.constexpr, RELATIONS: tl.constexpr, FLAT: tl.constexpr, SPLITS: tl.constexpr, EIGHTS: tl.constexpr,
    OF_FAR: tl.constexpr, UNBOUNDED: tl.constexpr,
):  # fmt: skip
    """dk and dv of near keys, or of far ones. UNBOUNDED: the queries that others skip see all near keys here."""
    tiles = ((far_count if OF_FAR else (S + FOLD - 1) // FOLD) + KEYS - 1) // KEYS
    G = H // RATIO
    number, one, b, g = own_tile(tiles, G, FOLD, FLAT)
    slot0 = number * KEYS
    t0, s0, queries, slots, q0, k0, first, end = places(
        b, one % FOLD, q0, k0, q0_at, k0_at, end_at, last_at, first, T, S, FOLD, True
    )
    if stride_at is not None:
        far_stride = tl.load(stride_at + b).to(tl.int32)
    slot = slot0 + tl.arange(0, KEYS)
    SIZE: tl.constexpr = Size(KEYS, D, BLOCK_D, E, BLOCK_E, FOLD)
    if OF_FAR:
        s0, slots, k0, first = slot0 * 0, far_count, slot0 * 0, slot0 * 0
        far_count = far_end(b, far_count, end_at, S, FAR_START, FAR_INNER, far_stride, FAR_CLIP)
        end = far_count
        bounds = Bounds(far_add, far_plus - FAR_SPAN if FAR_SPAN > 0 else -(1 << 30), far_add, far_plus)
        EVERY: tl.constexpr = Rounding(FAR_EVERY, FAR_TIMES if FAR_SPAN > 0 else 0, FAR_EVERY, FAR_TIMES)
        least = first
        pair = Pair(far_k + b * fk_b + g * fk_h, fk_t, far_v + b * fv_b + g * fv_h, fv_t)
        key, value = load_far_pair(pair, slot, far_count, far_stride, SIZE, FAR_START, FAR_INNER)
    else:
        least = first
        bounds = Bounds(low_add, low_plus, high_add, high_plus)
        EVERY: tl.constexpr = Rounding(LOW_EVERY, LOW_TIMES, HIGH_EVERY, HIGH_TIMES)
        pair = Pair(k + b * k_b + g * k_h + s0 * k_t, k_t, v + b * v_b + g * v_h + s0 * v_t, v_t)
        if UNBOUNDED:
            least = tl.maximum(k0, 0)
        key, value = load_pair(pair, slot0, (slot + k0 >= least) & (slot + k0 < end), SIZE, True)
    j = slot + k0
    real = (j >= least) & (j < end)
    begin, count, first_whole, last_whole = _rows_seeing(
        *(tl.maximum(slot0 + k0, first), tl.minimum(slot0 + KEYS + k0, end), q0, queries, skip, bounds, EVERY),
        *(FOLD, ROWS, SPLITS, MASKED or since is not None or until is not None, EIGHTS),
    )
    leading = 0
    if UNBOUNDED:
        leading = (skip + ROWS - 1) // ROWS
        # what a query that sees the tile from `first` on would add to the keys before is not to be kept
        last_whole = tl.where(slot0 + k0 < first, first_whole, last_whole)
    tile = (key, value, j, slot0 + k0)
    sums = (tl.zeros([KEYS, BLOCK_D], tl.float32), tl.zeros([KEYS, BLOCK_E], tl.float32))
    KIND: tl.constexpr = Kind(RELATIONS, FAR_APART, OF_FAR, HOLE, UNBOUNDED, EIGHTS)
    BY_ROW: tl.constexpr = q0_at is not None or k0_at is not None
    HOW: tl.constexpr = Relations(DISTANCE, GLOBALS, SEGMENT, OF_GLOBALS, ALIGNED and not BY_ROW)
    ROW_SIZE: tl.constexpr = Size(ROWS, D, BLOCK_D, E, BLOCK_E, FOLD)
    see = (bounds, first, end, since, until, b * T)
    for member in range(RATIO):
        h = g * RATIO + member
        pair = Pair(q + b * q_b + h * q_h + t0 * q_t, q_t, grad_o + b * g_b + h * g_h + t0 * g_t, g_t)
        added = Added(h, scale, slopes, table, origin, gaps, related)
        # the compiler sees that it is a multiple of eight
        rows_at = (b * H + h) * (T // 8 * 8 if EIGHTS else T)
        rows = (pair, lse, deltas, rows_at, t0, q0, queries, skip, added, see, (b, h, T, slab, columns))
        for step in range(leading + count - (last_whole - first_whole)):
            n = step - leading
            row0 = begin + tl.where(n < first_whole, n, n + last_whole - first_whole) * ROWS
            if UNBOUNDED:
                row0 = tl.where(n < 0, step * ROWS, row0)
            sums = _of_rows(sums, tile, rows, row0, n < 0, HOW, ROW_SIZE, EVERY, KIND, True, True)
        if not MASKED:
            for n in range(first_whole, last_whole):
                sums = _of_rows(sums, tile, rows, begin + n * ROWS, False, HOW, ROW_SIZE, EVERY, KIND, False, False)
        if LISTED > 0 and not OF_FAR:
            lists_at = (list_starts, list_rows, b * H + h, (T + BLOCK - 1) // BLOCK, slot0)
            sums = _of_lists(sums, tile, rows, lists_at, HOW, ROW_SIZE, EVERY, KIND, BLOCK, LISTED)
    # beside the keys that exist a tile that all see whole has any numbers
    acc_k, acc_v = tl.where(real[:, None], sums[0] * natural, 0.0), tl.where(real[:, None], sums[1], 0.0)
    sums_at, is_far, some_far = slot, real, True
    if sums_k is not None:
        number, is_far = _far_number(s0 + slot * FOLD - FAR_START, far_count, far_stride, FAR_INNER)
        sums_at, is_far = (b * G + g) * far_count + number, is_far & (slot < slots)
        if FAR_INNER == 0:
            some_far = s0 + slot0 * FOLD < FAR_START + far_count
    at = s0 + slot.to(tl.int64) * FOLD
    split = own_split(FLAT)
    far = (sums_k, sums_at, is_far, some_far)
    _write(out_k, before_k, acc_k, b * ok_b + g * ok_h + at * ok_t, split * ok_split, slot < slots, far, D, BLOCK_D)
    far = (sums_v, sums_at, is_far, some_far)
    _write(out_v, before_v, acc_v, b * ov_b + g * ov_h + at * ov_t, split * ov_split, slot < slots, far, E, BLOCK_E)


@jit
def _rows_seeing(
    j_low, j_high, q0, queries, skip, bounds, EVERY,
    FOLD: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, MASKED: tl.constexpr, EIGHTS: tl.constexpr,
):  # fmt: skip
    """The rows of queries that see one of the keys j_low ... j_high: the first, how many tiles they are, and from which
    to which tile they see all of these keys."""
    begin = beyond(j_low, bounds.high_add, bounds.high_plus, EVERY.high_every, EVERY.high_times)
    whole_begin = beyond(j_high - 1, bounds.high_add, bounds.high_plus, EVERY.high_every, EVERY.high_times)
    stop = beyond(j_high - 1, bounds.low_add, bounds.low_plus, EVERY.low_every, EVERY.low_times)
    whole_stop = beyond(j_low, bounds.low_add, bounds.low_plus, EVERY.low_every, EVERY.low_times)
    # the skipped rows and those of other documents do not count as seeing a tile whole
    begin = tl.maximum(begin - q0, skip // FOLD)
    if EIGHTS:
        begin = begin // 8 * 8
    stop = tl.where(j_low < j_high, tl.minimum(stop - q0, queries), begin)
    whole_begin, whole_stop = tl.maximum(whole_begin - q0, (skip + FOLD - 1) // FOLD), tl.minimum(whole_stop - q0, stop)
    if MASKED:
        whole_begin = stop
    begin, stop, whole_begin, whole_stop = share(begin, stop, whole_begin, whole_stop, SPLITS, ROWS)
    count, first_whole, last_whole = blocks(begin, whole_begin, whole_stop, stop, ROWS)
    return begin, count, first_whole, last_whole


@jit
def _of_rows(
    sums, tile, rows, row0, leads, HOW, SIZE, EVERY, KIND, CHECKED: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """What a tile of queries from row0 on adds to the sums, dk and dv of a tile of keys. Logits are [KEYS, ROWS].
    `leads`: of the queries that others skip, which see all."""
    acc_k, acc_v = sums
    key, value, j, at = tile
    pair, lse, deltas, rows_at, t0, q0, queries, skip, added, see, whose = rows
    bounds, first, end, since, until, row_of = see
    if KIND.eights:
        # all three are multiples of eight, and now the compiler knows
        row0, queries, skip = tl.multiple_of(row0, 8), queries // 8 * 8, skip // 8 * 8
    r = row0 + tl.arange(0, SIZE.rows)
    t, i = t0 + r * SIZE.fold, r + q0
    inside = (r < queries) & (t >= skip)
    if KIND.unbounded and MASKED:
        inside = (r < queries) & ((t < skip) == leads)
    query, grad = load_pair(pair, row0, inside, SIZE, CHECKED)
    if CHECKED:
        top = tl.load(lse + rows_at + t, mask=inside, other=float("inf"))
        delta = tl.load(deltas + rows_at + t, mask=inside, other=0.0)
    else:
        top, delta = tl.load(lse + rows_at + t), tl.load(deltas + rows_at + t)
    relations = 0
    if HOW.distance > 0:
        relations = load_relations(added.related, rows_at + t, inside, KIND.relations, HOW.distance, True)
    SHIFTED: tl.constexpr = KIND.of_far and KIND.far_apart > 0
    shift, stand = 0, i
    if SHIFTED:
        shift = far_shift(i, bounds.high_add, EVERY.high_every, KIND.far_apart)
        stand = i - shift
    logits = logits_of(key, query, stand[None, :], j[:, None], (inside, relations), added, HOW, KIND.of_far, 0)
    if HOW.distance < 0:
        b, h, T, slab, columns = whose
        row = (inside, distance_rows(t, b, h, q0, T, slab, columns, HOW.aligned))
        logits += tl.trans(load_distances(added.related, row, at, shift, HOW, key.shape[0], SHIFTED, CHECKED))
    weights = tl.exp2(logits * scale_left(added) - top[None, :])
    if MASKED:
        low, high = low_bound(i, bounds, first, EVERY), high_bound(i, bounds, end, EVERY)
        if since is not None and not KIND.of_far:
            low = tl.maximum(low, tl.load(since + row_of + t, mask=inside, other=0).to(tl.int32))
        if until is not None and not KIND.of_far:
            high = tl.minimum(high, tl.load(until + row_of + t, mask=inside, other=0).to(tl.int32))
        visible = between(j[:, None], low[None, :], high[None, :])
        if KIND.hole:
            visible &= j[:, None] != i[None, :]
        if KIND.unbounded:
            visible |= leads
        weights = tl.where(visible, weights, 0.0)
    acc_v = tl.dot(weights.to(grad.dtype), grad, acc_v, input_precision="ieee")
    slope = weights * (tl.dot(value, tl.trans(grad), input_precision="ieee") - delta[None, :])
    acc_k = tl.dot(slope.to(query.dtype), query, acc_k, input_precision="ieee")
    return acc_k, acc_v


@jit
def _far_number(token, far_count, far_stride, INNER: tl.constexpr):
    """Which far key a token is, counted from the first one, and whether it is one."""
    if INNER == 0:
        return token, (token >= 0) & (token < far_count)
    else:
        number = token // far_stride * INNER + token % far_stride
        return number, (token >= 0) & (token % far_stride < INNER) & (number < far_count)


@jit
def _write(out, before, acc, at, split_at, exist, far, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of a gradient, with what an earlier pass left of them and what they have had as far keys."""
    sums, sums_at, is_far, some_far = far
    if sums is not None:  # noqa: SIM102  (this is known when a kernel is compiled, the next is not)
        if some_far:
            acc += load_at(sums, sums_at * WIDTH, is_far, WIDTH, BLOCK)
    if before is not None:
        acc += load_at(before, at, exist, WIDTH, BLOCK)
    column = tl.arange(0, BLOCK)[None, :]
    to = out + split_at + at[:, None] + column
    tl.store(to, acc.to(out.dtype.element_ty), mask=exist[:, None] & (column < WIDTH))
