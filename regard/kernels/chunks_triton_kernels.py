"""The kernels of chunks_triton.py."""

# Triton's compiler reads these bodies, in which types are not those of Python.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton.language as tl

from regard.kernels.jit_triton import jit


@jit
def _program(ends, H, S, R: tl.constexpr):
    """The chunk and the row of `order` that a program has, its head among all and its round, batch row and head, and
    how many tokens of that row are real."""
    c, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head, r = row // R, row % R
    b, h = head // H, head % H
    end = S
    if ends is not None:
        end = tl.load(ends + b).to(tl.int32)
    return c, row, head, r, b, h, end


@jit
def _rows(x, tokens, stride, S, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The vectors of tokens, zeros for those behind the last."""
    d = tl.arange(0, BLOCK_D)
    return tl.load(x + tokens[:, None] * stride + d[None, :], mask=(tokens < S)[:, None] & (d < D)[None, :], other=0.0)


@jit
def _unit(k, D: tl.constexpr):
    """k / |k|, with the small term of the authors' code for keys near zero."""
    wide = k.to(tl.float32)
    return (wide * (1.0 / tl.sqrt(tl.sum(wide * wide, 1) + 1e-6 * D))[:, None]).to(k.dtype)


@jit
def _tokens(order, base, c, S, M: tl.constexpr, BLOCK_M: tl.constexpr):
    """The tokens of a chunk; S stands for none."""
    rows = tl.arange(0, BLOCK_M)
    return tl.load(order + base + c * M + rows, mask=rows < M, other=S)


@jit
def _visible(i, j, end, CAUSAL: tl.constexpr):
    """Which of the keys j the queries i see."""
    i, j = i[:, None], j[None, :]
    if CAUSAL:
        return (j < i) & (i < end)
    else:
        return (j != i) & (j < end) & (i < end)


@jit
def forward_kernel(
    k, v, order, ends, each, lse, k_b, k_h, k_s, v_b, v_h, v_s, H, S, N, log2e, R: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    c, row, head, r, b, h, end = _program(ends, H, S, R)
    if c * M < end:
        k += b * k_b + h * k_h
        v += b * v_b + h * v_h
        i = _tokens(order, row * N, c, S, M, BLOCK_M)
        before, last = row * N, c - 1
        if c == 0:
            before, last = (head * R + (r + R - 1) % R) * N, (end - 1) // M
        j = _tokens(order, before, last, S, M, BLOCK_M)
        q = _rows(k, i, k_s, S, D, BLOCK_D)
        near = tl.dot(q, tl.trans(_unit(q, D)), input_precision="ieee") * log2e
        far = tl.dot(q, tl.trans(_unit(_rows(k, j, k_s, S, D, BLOCK_D), D)), input_precision="ieee") * log2e
        near = tl.where(_visible(i, i, end, CAUSAL), near, -float("inf"))
        far = tl.where(_visible(i, j, end, CAUSAL), far, -float("inf"))
        top = tl.maximum(tl.max(near, 1), tl.max(far, 1))
        safe = tl.where(top == -float("inf"), 0.0, top)
        near, far = tl.exp2(near - safe[:, None]), tl.exp2(far - safe[:, None])
        total = tl.sum(near, 1) + tl.sum(far, 1)
        values = _rows(v, i, v_s, S, D, BLOCK_D)
        out = tl.dot(near.to(values.dtype), values, input_precision="ieee")
        values = _rows(v, j, v_s, S, D, BLOCK_D)
        out += tl.dot(far.to(values.dtype), values, input_precision="ieee")
        out = out / tl.where(total > 0, total, 1.0)[:, None]
        d = tl.arange(0, BLOCK_D)
        each += row * S * D
        lse += row * S
        real = i < end
        tl.store(
            each + i[:, None] * D + d[None, :], out.to(each.dtype.element_ty), mask=real[:, None] & (d < D)[None, :]
        )
        filled = tl.where(total > 0, total, 1.0)
        tl.store(lse + i, tl.where(total > 0, safe + tl.log2(filled), -float("inf")), mask=real)


@jit
def merge_kernel(
    each, lse, v, o, total, v_b, v_h, v_s, o_b, o_h, o_s, H, S, R: tl.constexpr, TOKENS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    b, h = head // H, head % H
    t, d = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, BLOCK_D)
    real = t < S
    inside = real[:, None] & (d < D)[None, :]
    top = tl.full([TOKENS], -float("inf"), tl.float32)
    for r in tl.static_range(R):
        top = tl.maximum(top, tl.load(lse + (head * R + r) * S + t, mask=real, other=-float("inf")))
    met = top > -float("inf")
    safe = tl.where(met, top, 0.0)
    sums, out = tl.zeros([TOKENS], tl.float32), tl.zeros([TOKENS, BLOCK_D], tl.float32)
    for r in tl.static_range(R):
        at = (head * R + r) * S + t
        one = tl.load(lse + at, mask=real, other=-float("inf"))
        weight = tl.exp2(one - safe)
        # what no round has written is read by none
        part = tl.load(each + at[:, None] * D + d[None, :], mask=inside & (one > -float("inf"))[:, None], other=0.0)
        sums += weight
        out += weight[:, None] * part.to(tl.float32)
    own = tl.load(v + b * v_b + h * v_h + t[:, None] * v_s + d[None, :], mask=inside & (met == 0)[:, None], other=0.0)
    out = tl.where(met[:, None], out / tl.where(met, sums, 1.0)[:, None], own.to(tl.float32))
    tl.store(o + b * o_b + h * o_h + t[:, None] * o_s + d[None, :], out.to(o.dtype.element_ty), mask=inside)
    tl.store(total + head * S + t, tl.where(met, safe + tl.log2(tl.where(met, sums, 1.0)), float("inf")), mask=real)


@jit
def delta_kernel(
    o, grad, delta, o_b, o_h, o_s, g_b, g_h, g_s, H, S, TOKENS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    b, h = head // H, head % H
    t, d = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, BLOCK_D)
    inside = (t < S)[:, None] & (d < D)[None, :]
    left = tl.load(o + b * o_b + h * o_h + t[:, None] * o_s + d[None, :], mask=inside, other=0.0)
    right = tl.load(grad + b * g_b + h * g_h + t[:, None] * g_s + d[None, :], mask=inside, other=0.0)
    tl.store(delta + head * S + t, tl.sum(left.to(tl.float32) * right.to(tl.float32), 1), mask=t < S)


@jit
def _slopes(q, keys, values, grad, lse, delta, seen, log2e):
    """The weights of some queries for some keys, and the gradients of their logits."""
    logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * log2e
    weight = tl.where(seen, tl.exp2(logits - lse[:, None]), 0.0)
    slope = weight * (tl.dot(grad, tl.trans(values), input_precision="ieee") - delta[:, None])
    return weight.to(q.dtype), slope.to(q.dtype)


@jit
def backward_kernel(
    k, v, grad, order, ends, lse, delta, dk, dv, k_b, k_h, k_s, v_b, v_h, v_s, g_b, g_h, g_s, d_r, d_b, d_h, d_s, H,
    S, N, log2e, R: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    c, row, head, r, b, h, end = _program(ends, H, S, R)
    last = tl.maximum(end - 1, 0) // M
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    grad += b * g_b + h * g_h
    lse += head * S
    delta += head * S
    i = _tokens(order, row * N, c, S, M, BLOCK_M)
    raw = _rows(k, i, k_s, S, D, BLOCK_D)
    unit = _unit(raw, D)
    values = _rows(v, i, v_s, S, D, BLOCK_D)
    g = _rows(grad, i, g_s, S, D, BLOCK_D)
    own_lse = tl.load(lse + i, mask=i < S, other=float("inf"))
    own_delta = tl.load(delta + i, mask=i < S, other=0.0)

    # its queries and its keys
    seen = _visible(i, i, end, CAUSAL)
    weight, slope = _slopes(raw, unit, values, g, own_lse, own_delta, seen, log2e)
    of_query = tl.dot(slope, unit, input_precision="ieee")
    of_key = tl.dot(tl.trans(slope), raw, input_precision="ieee")
    of_value = tl.dot(tl.trans(weight), g, input_precision="ieee")

    # its queries and the keys of the chunk before
    base, other = row * N, c - 1
    if c == 0:
        base, other = (head * R + (r + R - 1) % R) * N, last
    j = _tokens(order, base, other, S, M, BLOCK_M)
    keys = _unit(_rows(k, j, k_s, S, D, BLOCK_D), D)
    far = _rows(v, j, v_s, S, D, BLOCK_D)
    seen = _visible(i, j, end, CAUSAL)
    weight, slope = _slopes(raw, keys, far, g, own_lse, own_delta, seen, log2e)
    of_query += tl.dot(slope, keys, input_precision="ieee")

    # the queries of the chunk behind and its keys
    base, other = row * N, tl.minimum(c + 1, N // M - 1)
    if c == last:
        base, other = (head * R + (r + 1) % R) * N, 0
    j = _tokens(order, base, other, S, M, BLOCK_M)
    queries = _rows(k, j, k_s, S, D, BLOCK_D)
    of_far = _rows(grad, j, g_s, S, D, BLOCK_D)
    far_lse = tl.load(lse + j, mask=j < S, other=float("inf"))
    far_delta = tl.load(delta + j, mask=j < S, other=0.0)
    # chunks of padding are behind the last: the one that stands in for the next is their own
    seen = _visible(j, i, end, CAUSAL) & (c <= last)
    weight, slope = _slopes(queries, unit, values, of_far, far_lse, far_delta, seen, log2e)
    of_key += tl.dot(tl.trans(slope), queries, input_precision="ieee")
    of_value += tl.dot(tl.trans(weight), of_far, input_precision="ieee")

    # through k / |k|
    wide = raw.to(tl.float32)
    square = tl.sum(wide * wide, 1) + 1e-6 * D
    along = tl.sum(of_key * wide, 1) / square
    of_query += (of_key - wide * along[:, None]) * (1.0 / tl.sqrt(square))[:, None]
    # what meets no other reads its own value, once for all rounds
    alone = (own_lse == float("inf")) & (r == 0)
    of_value += tl.where(alone[:, None], g.to(tl.float32), 0.0)
    d = tl.arange(0, BLOCK_D)
    base = r * d_r + b * d_b + h * d_h
    place = i[:, None] * d_s + d[None, :]
    inside = (i < S)[:, None] & (d < D)[None, :]
    tl.store(dk + base + place, of_query.to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + base + place, of_value.to(dv.dtype.element_ty), mask=inside)


@jit
def buckets_kernel(
    k, high, low, out, k_b, k_h, k_s, H, S, n, R: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    head, r = row // R, row % R
    b, h = head // H, head % H
    t, d = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, BLOCK_D)
    columns = tl.arange(0, COLUMNS)
    x = _rows(k + b * k_b + h * k_h, t, k_s, S, D, BLOCK_D)
    at = (h * R + r) * D * n + d[:, None] * n + columns[None, :]
    inside = (d < D)[:, None] & (columns < n)[None, :]
    side = tl.dot(x, tl.load(high + at, mask=inside, other=0.0), input_precision="ieee")
    if low is not None:
        side += tl.dot(x, tl.load(low + at, mask=inside, other=0.0), input_precision="ieee")
    most, most_at = tl.max(tl.where((columns < n)[None, :], side, -float("inf")), 1, return_indices=True)
    least, least_at = tl.min(tl.where((columns < n)[None, :], side, float("inf")), 1, return_indices=True)
    tl.store(out + row * S + t, tl.where(most >= -least, most_at, n + least_at), mask=t < S)
