"""The forward kernel of parts_triton.py: a tile of queries goes over the tiles of keys that one of them sees."""

# Triton's compiler reads these bodies, in which types are not those of Python.
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false

import triton.language as tl

from regard.kernels.jit_triton import jit
from regard.kernels.parts_triton_tiles import (
    CHANGING,
    Added,
    Bounds,
    FarKeys,
    Relations,
    Rounding,
    Size,
    Walk,
    distance_rows,
    load_distances,
    load_relations,
    load_rows,
    logits_of,
    over_keys,
    own_split,
    own_tile,
    places,
    scale_left,
)


@jit(do_not_specialize=CHANGING)
def forward_kernel(
    q, k, v, far_k, far_v, q0_at, k0_at, end_at, since, until, last_at, stride_at, slopes, table,
    lists, list_starts, list_rows, related,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, fk_b, fk_h, fk_t, fv_b, fv_h, fv_t,
    H, T, S, q0, k0, first, skip, origin, gaps, columns, slab, low_add, low_plus, high_add, high_plus,
    far_count, far_add, far_plus, far_stride,
    o, lse, before, o_b, o_h, o_t, o_split, lines, scale,
    RATIO: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, FAR_KEYS: tl.constexpr, LOW_EVERY: tl.constexpr, LOW_TIMES: tl.constexpr,
    HIGH_EVERY: tl.constexpr, HIGH_TIMES: tl.constexpr, FAR: tl.constexpr, FAR_EVERY: tl.constexpr,
    FAR_TIMES: tl.constexpr, FAR_START: tl.constexpr, FAR_INNER: tl.constexpr, FAR_CLIP: tl.constexpr,
    FAR_SPAN: tl.constexpr, FAR_APART: tl.constexpr, FOLD: tl.constexpr, HOLE: tl.constexpr, MASKED: tl.constexpr,
    BLOCK: tl.constexpr, LISTED: tl.constexpr,
    DISTANCE: tl.constexpr, GLOBALS: tl.constexpr, SEGMENT: tl.constexpr, OF_GLOBALS: tl.constexpr,
    ALIGNED: tl.constexpr, RELATIONS: tl.constexpr, FLAT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    # of causal patterns the later tiles are longer: they begin first
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
    rows_at = (b * H + h) * lines + t
    BY_ROW: tl.constexpr = q0_at is not None or k0_at is not None
    HOW: tl.constexpr = Relations(DISTANCE, GLOBALS, SEGMENT, OF_GLOBALS, ALIGNED and not BY_ROW)
    relations = 0
    if DISTANCE > 0:
        relations = load_relations(related, rows_at, inside, RELATIONS, DISTANCE, False)
    if DISTANCE < 0:
        relations = distance_rows(t, b, h, q0, T, slab, columns, HOW.aligned)
    added = Added(h, scale, slopes, table, origin, gaps, related)
    rows = (i, query, (inside, relations), added)
    if before is None:
        top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_E], tl.float32)
    else:
        top = tl.load(lse + rows_at, mask=inside, other=float("-inf"))
        total = tl.where(top == float("-inf"), 0.0, 1.0)
        acc = load_rows(before + b * o_b + h * o_h + at0 * o_t, o_t * FOLD, inside, ROWS, E, BLOCK_E, True)

    carry = (acc, total, top)
    carry = over_keys(
        *(carry, rows, (b, h, H, T, S, row0, ends, s0, k0, first, end)),
        *(i, b * T + t, inside, since, until, Bounds(low_add, low_plus, high_add, high_plus)),
        *((k, k_b, k_h, k_t), (v, v_b, v_h, v_t), (far_k, fk_b, fk_h, fk_t), (far_v, fv_b, fv_h, fv_t)),
        *((far_count, far_stride, far_add, far_plus, stride_at, end_at), lists, HOW),
        *(Size(KEYS, D, BLOCK_D, E, BLOCK_E, FOLD), Size(FAR_KEYS, D, BLOCK_D, E, BLOCK_E, 1)),
        FarKeys(FAR, FAR_EVERY, FAR_TIMES, FAR_START, FAR_INNER, FAR_CLIP, FAR_SPAN, FAR_APART),
        Rounding(LOW_EVERY, LOW_TIMES, HIGH_EVERY, HIGH_TIMES),
        *(Walk(HOLE, MASKED, SPLITS, BLOCK, LISTED, False), RATIO, _absorb),
    )
    acc, total, top = carry

    some = total > 0.0
    split = own_split(FLAT)
    sums = tl.where(some, total, 1.0)
    lse_at = lse + split * (tl.num_programs(0) // (tiles * FOLD)) * T + rows_at
    tl.store(lse_at, tl.where(some, top + tl.log2(sums), float("-inf")), mask=inside)
    column = tl.arange(0, BLOCK_E)[None, :]
    to = o + split * o_split + b * o_b + h * o_h + at0 * o_t + tl.arange(0, ROWS)[:, None] * (o_t * FOLD) + column
    tl.store(to, (acc * (1.0 / sums)[:, None]).to(o.dtype.element_ty), mask=inside[:, None] & (column < E))


@jit
def _absorb(
    carry, rows, key, value, at, j, shift, visible, HOW, KEYS: tl.constexpr, FAR: tl.constexpr,
    SHIFTED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys joins the running output, sum and maximum."""
    acc, total, top = carry
    i, query, row, added = rows
    if SHIFTED:
        i -= shift
    logits = logits_of(query, key, i[:, None], j[None, :], row, added, HOW, FAR, 1)
    if HOW.distance < 0:
        logits += load_distances(added.related, row, at, shift, HOW, KEYS, SHIFTED, MASKED)
    scale = scale_left(added)
    if MASKED:
        logits = tl.where(visible, logits, float("-inf"))
    # scaled after the maximum: the scale of each logit joins the subtraction
    new = tl.maximum(top, tl.max(logits, 1) * scale)
    base = new
    if MASKED:
        # a row that has seen nothing yet
        base = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(logits * scale - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    return acc, total, new


@jit(do_not_specialize=["H", "T", "splits", "lines"])
def merge_kernel(
    parts, parts_lse, o, lse, H, T, splits, p_b, p_h, p_t, p_split, o_b, o_h, o_t, lines,
    E: tl.constexpr, BLOCK_E: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One row of outputs, from those of some shares of the keys and their logsumexps."""
    row = tl.program_id(0)
    b, h, t = (row // T // H).to(tl.int64), (row // T % H).to(tl.int64), (row % T).to(tl.int64)
    column = tl.arange(0, BLOCK_E)
    top, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_E], tl.float32)
    for n in range((splits + AT_ONCE - 1) // AT_ONCE):
        split = n * AT_ONCE + tl.arange(0, AT_ONCE).to(tl.int64)
        logs = tl.load(parts_lse + split * tl.num_programs(0) + row, mask=split < splits, other=float("-inf"))
        new = tl.maximum(top, tl.max(logs, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        fade, weights = tl.exp2(top - base), tl.exp2(logs - base)
        at = parts + b * p_b + h * p_h + t * p_t + split[:, None] * p_split + column[None, :]
        value = tl.load(at, mask=(split < splits)[:, None] & (column < E)[None, :], other=0.0)
        acc = acc * fade + tl.sum(weights[:, None] * value, 0)
        total, top = total * fade + tl.sum(weights, 0), new
    sums = tl.where(total > 0.0, total, 1.0)
    tl.store(lse + (b * H + h) * lines + t + tl.arange(0, 1), tl.where(total > 0.0, top + tl.log2(sums), float("-inf")))
    tl.store(o + b * o_b + h * o_h + t * o_t + column, (acc / sums).to(o.dtype.element_ty), mask=column < E)
