"""The kernels of ring_triton.py: a share of the slots for each program, and the merging of shares."""

# Triton's compiler reads these bodies, in which types are not those of Python.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import triton.language as tl

from regard.kernels.jit_triton import jit


@jit
def read_kernel(
    q, k, v, keys, values, seen, o, sums,
    q_b, q_h, k_b, k_g, v_b, v_g, keys_b, keys_g, values_b, values_g, o_b, o_h, keys_s, values_s, R, sums_s, scale,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, G: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(0) // G).to(tl.int64)
    g = (tl.program_id(0) % G).to(tl.int64)
    split = tl.program_id(1)
    at = tl.load(seen + b).to(tl.int32)
    slot = at % R
    filled = tl.minimum(at, R)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    rows = tl.arange(0, ROWS)
    heads = g * GROUP + rows
    real = (rows < GROUP)[:, None] & inside[None, :]
    query = tl.load(q + b * q_b + heads[:, None] * q_h + d[None, :], mask=real, other=0.0)

    # the new token stands in for whatever its slot held, and is read by the first share
    new_k = tl.load(k + b * k_b + g * k_g + d, mask=inside, other=0.0)
    new_v = tl.load(v + b * v_b + g * v_g + d, mask=inside, other=0.0)
    keys += b * keys_b + g * keys_g
    values += b * values_b + g * values_g
    if split == 0:
        tl.store(keys + slot * keys_s + d, new_k, mask=inside)
        tl.store(values + slot * values_s + d, new_v, mask=inside)
        top = tl.sum(query.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale
        total = tl.full([ROWS], 1.0, tl.float32)
        mean = tl.broadcast_to(new_v.to(tl.float32)[None, :], [ROWS, BLOCK_D])
    else:
        top = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mean = tl.zeros([ROWS, BLOCK_D], tl.float32)

    share = tl.cdiv(tl.cdiv(filled, SPLITS), BLOCK) * BLOCK
    first = split * share
    last = tl.minimum(first + share, filled)
    state = (top, total, mean)
    if ROWS == 1:
        top, total, mean = read_slots(
            state, query, keys, values, first, last, slot, keys_s, values_s, d, inside, scale, BLOCK, BLOCK_D
        )
    else:
        top, total, mean = read_slots_of_group(
            state, query, keys, values, first, last, slot, keys_s, values_s, d, inside, scale, BLOCK
        )

    if SPLITS == 1:
        place = o + b * o_b + heads[:, None] * o_h + d[None, :]
        tl.store(place, (mean / total[:, None]).to(o.dtype.element_ty), mask=real)
    else:
        place = sums + split * sums_s + (b * H + heads) * (D + 2)
        tl.store(place[:, None] + d[None, :], mean, mask=real)
        tl.store(place + D, total, mask=rows < GROUP)
        tl.store(place + D + 1, top, mask=rows < GROUP)


@jit
def read_slots(
    state, query, keys, values, first, last, slot, keys_s, values_s, d, inside, scale,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The slots from `first` to `last` join the running maximum, sum and mean of one query."""
    top, total, mean = state
    # each place of a block has sums of its own, which are merged once: warps need not wait for each other
    tops = tl.full([BLOCK], -float("inf"), tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    means = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=3):
        k_at, v_at, old = old_block(keys, values, start, last, slot, keys_s, values_s, d, inside, BLOCK)
        logits = tl.sum(k_at.to(tl.float32) * query.to(tl.float32), 1) * scale
        logits = tl.where(old, logits, -float("inf"))
        higher = tl.maximum(tops, logits)
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        weight = tl.exp2(logits - safe)
        shrink = tl.exp2(tops - safe)
        totals = totals * shrink + weight
        means = means * shrink[:, None] + weight[:, None] * v_at.to(tl.float32)
        tops = higher
    higher = tl.maximum(top, tl.max(tops, 0))
    safe = tl.where(higher == -float("inf"), 0.0, higher)
    weight = tl.exp2(tops - tl.max(safe, 0))
    shrink = tl.exp2(top - safe)
    total = total * shrink + tl.sum(totals * weight, 0)
    mean = mean * shrink[:, None] + tl.sum(means * weight[:, None], 0)[None, :]
    top = higher
    return top, total, mean


@jit
def read_slots_of_group(
    state, query, keys, values, first, last, slot, keys_s, values_s, d, inside, scale, BLOCK: tl.constexpr
):  # fmt: skip
    """As `read_slots`, of the queries of a group that share keys and values."""
    top, total, mean = state
    for start in range(first, last, BLOCK):
        k_at, v_at, old = old_block(keys, values, start, last, slot, keys_s, values_s, d, inside, BLOCK)
        logits = tl.dot(query, tl.trans(k_at), input_precision="ieee") * scale
        logits = tl.where(old[None, :], logits, -float("inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        # a share that has met no key yet
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        weight = tl.exp2(logits - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weight, 1)
        mean = mean * shrink[:, None] + tl.dot(weight.to(v_at.dtype), v_at, input_precision="ieee")
        top = higher
    return top, total, mean


@jit
def old_block(keys, values, start, last, slot, keys_s, values_s, d, inside, BLOCK: tl.constexpr):
    """Keys and values of the slots from `start` on, and which of them are read: not the one just written."""
    slots = start + tl.arange(0, BLOCK)
    old = (slots < last) & (slots != slot)
    some = old[:, None] & inside[None, :]
    k_at = tl.load(keys + slots[:, None] * keys_s + d[None, :], mask=some, other=0.0)
    v_at = tl.load(values + slots[:, None] * values_s + d[None, :], mask=some, other=0.0)
    return k_at, v_at, old


@jit
def merge_kernel(
    sums,
    o,
    o_b,
    o_h,
    sums_s,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d, s = tl.arange(0, BLOCK_D), tl.arange(0, SPLIT_BLOCK)
    real = s < SPLITS
    place = sums + s * sums_s + row * (D + 2)
    top = tl.load(place + D + 1, mask=real, other=-float("inf"))
    total = tl.load(place + D, mask=real, other=0.0)
    mean = tl.load(place[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
    # the first share has the new token, so one of them is finite
    weight = tl.exp2(top - tl.max(top, 0))
    out = tl.sum(mean * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(o + row // H * o_b + row % H * o_h + d, out.to(o.dtype.element_ty), mask=d < D)
