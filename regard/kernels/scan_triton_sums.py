"""The kernels of scan_triton.py without an order: dk and dv of sums over all keys, and the reading of such sums."""

# Triton's compiler reads these bodies, in which types are not those of Python.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton.language as tl

from regard.kernels.jit_triton import jit
from regard.kernels.scan_triton_tiles import factor, inverse_of, load_tile, mapped, sloped, store_tile


@jit
def _load_sums(
    S, columns, part, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """S [K, V] or its gradient as a factor [BK, BV], and what rounding leaves of it."""
    values = part * BV + tl.arange(0, BV)
    inside = (columns < K)[:, None] & (values < V)[None, :]
    state = tl.load(S + columns[:, None] * V + values[None, :], mask=inside, other=0.0)
    high = factor(state, NARROW, PRECISION)
    return high, factor(state - high.to(tl.float32), NARROW, PRECISION)


@jit
def _add_product(x, high, low, total, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    total = tl.dot(x, high, total, input_precision=PRECISION)
    if NARROW or PRECISION == "tf32":
        total = tl.dot(x, low, total, input_precision=PRECISION)
    return total


@jit(do_not_specialize=["T"])
def absorb_keys(
    k, v, lengths, dS, dz, dk, dv, k_b, k_h, k_t, v_b, v_h, v_t, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    BLOCKS: tl.constexpr, MAP: tl.constexpr, RAGGED: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of sums over all keys; dS, of one part of V, is loaded once for all blocks of rows of a program."""
    h, b, i, columns = tl.program_id(0) % H, tl.program_id(1).to(tl.int64), tl.arange(0, C), tl.arange(0, BK)
    begin, head = (tl.program_id(0) // H) * (C * BLOCKS), b * H + h
    parts: tl.constexpr = (V + BV - 1) // BV
    k, v, dS = k + b * k_b + h * k_h, v + b * v_b + h * v_h, dS + head * (K * V)
    length = T
    if RAGGED:
        length = tl.load(lengths + b).to(tl.int32)
    of_sums = tl.load(dz + head * K + columns, mask=columns < K, other=0.0)
    high, low = _load_sums(dS, columns, 0, K, V, BV, NARROW, PRECISION)
    for n in range(0, tl.minimum(BLOCKS, tl.cdiv(T - begin, C))):
        start = begin + n * C
        at, live, there = start.to(tl.int64), start + i < length, start + i < T
        is_k = live[:, None] & (columns < K)[None, :]
        ks = mapped(load_tile(k + at * k_t, i, k_t, columns, is_k, False), is_k, MAP, False, False)
        grad = tl.zeros([C, BK], tl.float32) + of_sums[None, :]
        for part in tl.static_range(parts):
            values = part * BV + tl.arange(0, BV)
            of_v = values[None, :] < V
            if parts > 1:
                high, low = _load_sums(dS, columns, part, K, V, BV, NARROW, PRECISION)
            out = tl.zeros([C, BV], tl.float32)
            out = _add_product(factor(ks, NARROW, PRECISION), high, low, out, NARROW, PRECISION)
            store_tile(dv + ((b * T + at) * H + h) * V, i, H * V, values, out, there[:, None] & of_v, False)
            vs = factor(load_tile(v + at * v_t, i, v_t, values, live[:, None] & of_v, False), NARROW, PRECISION)
            grad = _add_product(vs, tl.trans(high), tl.trans(low), grad, NARROW, PRECISION)
        grad = sloped(tl.where(live[:, None], grad, 0.0), ks, MAP)
        inside = there[:, None] & (columns < K)[None, :]
        store_tile(dk + ((b * T + at) * H + h) * K, i, H * K, columns, grad, inside, False)


@jit(do_not_specialize=["T", "floor"])
def read_rows(
    q, S, z, o, den, q_b, q_h, q_t, T, floor,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, BLOCKS: tl.constexpr, MAP: tl.constexpr, NORM: tl.constexpr, NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    h, b, i, columns = tl.program_id(0) % H, tl.program_id(1).to(tl.int64), tl.arange(0, C), tl.arange(0, BK)
    begin, head = (tl.program_id(0) // H) * (C * BLOCKS), b * (H // GROUP) + h // GROUP
    q, S = q + b * q_b + h * q_h, S + head * (K * V)
    parts: tl.constexpr = (V + BV - 1) // BV
    sums = tl.load(z + head * K + columns, mask=columns < K, other=0.0)
    high, low = _load_sums(S, columns, 0, K, V, BV, NARROW, PRECISION)
    for n in range(0, tl.minimum(BLOCKS, tl.cdiv(T - begin, C))):
        start = begin + n * C
        at, there = start.to(tl.int64), start + i < T
        inside = there[:, None] & (columns < K)[None, :]
        qs = mapped(load_tile(q + at * q_t, i, q_t, columns, inside, False), inside, MAP, False, False)
        row = tl.sum(qs * sums[None, :], 1)
        tl.store(den + (b * H + h) * T + start + i, row, mask=there)
        for part in tl.static_range(parts):
            values = part * BV + tl.arange(0, BV)
            if parts > 1:
                high, low = _load_sums(S, columns, part, K, V, BV, NARROW, PRECISION)
            num = tl.zeros([C, BV], tl.float32)
            num = _add_product(factor(qs, NARROW, PRECISION), high, low, num, NARROW, PRECISION)
            num = num * inverse_of(row, floor, NORM)[:, None]
            of_v = there[:, None] & (values < V)[None, :]
            store_tile(o + ((b * T + at) * H + h) * V, i, H * V, values, num, of_v, False)


@jit(do_not_specialize=["T", "floor"])
def read_queries(
    q, S, z, den, g, e, dq, q_b, q_h, q_t, g_b, g_h, g_t, T, floor,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, BLOCKS: tl.constexpr, MAP: tl.constexpr, NORM: tl.constexpr, NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of a reading, and e: u . o is q . (S u) / den."""
    h, b, i, columns = tl.program_id(0) % H, tl.program_id(1).to(tl.int64), tl.arange(0, C), tl.arange(0, BK)
    begin, head = (tl.program_id(0) // H) * (C * BLOCKS), b * (H // GROUP) + h // GROUP
    q, g, S = q + b * q_b + h * q_h, g + b * g_b + h * g_h, S + head * (K * V)
    parts: tl.constexpr = (V + BV - 1) // BV
    sums = tl.load(z + head * K + columns, mask=columns < K, other=0.0)
    high, low = _load_sums(S, columns, 0, K, V, BV, NARROW, PRECISION)
    for n in range(0, tl.minimum(BLOCKS, tl.cdiv(T - begin, C))):
        start = begin + n * C
        at, there = start.to(tl.int64), start + i < T
        inside, rows = there[:, None] & (columns < K)[None, :], (b * H + h) * T + start + i
        row = tl.load(den + rows, mask=there, other=1.0)
        inverse = inverse_of(row, floor, NORM)
        grad = tl.zeros([C, BK], tl.float32)
        for part in tl.static_range(parts):
            values = part * BV + tl.arange(0, BV)
            if parts > 1:
                high, low = _load_sums(S, columns, part, K, V, BV, NARROW, PRECISION)
            gs = load_tile(g + at * g_t, i, g_t, values, there[:, None] & (values < V)[None, :], False)
            gs = factor(gs, NARROW, PRECISION)
            grad = _add_product(gs, tl.trans(high), tl.trans(low), grad, NARROW, PRECISION)
        qs = mapped(load_tile(q + at * q_t, i, q_t, columns, inside, False), inside, MAP, False, False)
        if NORM == 0:
            es = tl.load(e + rows, mask=there, other=0.0)
        else:
            es = -tl.sum(qs * grad, 1) * inverse
            if NORM == 2:
                es = tl.where(row >= floor, es, 0.0)
            tl.store(e + rows, es, mask=there)
        grad = sloped((grad + es[:, None] * sums[None, :]) * inverse[:, None], qs, MAP)
        store_tile(dq + ((b * T + at) * H + h) * K, i, H * K, columns, grad, inside, False)


@jit(do_not_specialize=["count", "T", "floor"])
def add_parts(
    parts, parts_den, o, rest, den, count, T, floor,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What the parts of K add up to: numerators [B, T, H, V] and denominators [B, H, T], count of them; divided, and
    what rounding leaves of them."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b, t, h = row // (T * H), row // H % T, row % H
    column, inside = tl.arange(0, BV)[None, :], row < count
    at, to = (b * H + h) * T + t, row[:, None] * V + column
    mask = inside[:, None] & (column < V)
    num, sums = tl.zeros([ROWS, BV], tl.float32), tl.zeros([ROWS], tl.float32)
    for part in tl.static_range(PARTS):
        num += tl.load(parts + part * count * V + to, mask=mask, other=0.0)
        if NORM < 3:
            sums += tl.load(parts_den + part * count + at, mask=inside, other=0.0)
    if NORM < 3:
        tl.store(den + at, sums, mask=inside)
        num = num * inverse_of(sums, floor, NORM)[:, None]
    rounded = num.to(o.dtype.element_ty)
    tl.store(o + to, rounded, mask=mask)
    if rest is not None:
        tl.store(rest + to, (num - rounded.to(tl.float32)).to(rest.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["count", "T", "floor"])
def row_gradients(
    g, o, rest, den, e, g_b, g_h, g_t, count, T, floor,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """e = -(g . o) [B, H, T], zero where no gradient comes through a denominator; o [B, T, H, V] and what rounding left
    of it."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b, t, h = row // (T * H), row // H % T, row % H
    column, inside = tl.arange(0, BV)[None, :], row < count
    mask, at = inside[:, None] & (column < V), row[:, None] * V + column
    gs = tl.load(g + (b * g_b + h * g_h + t * g_t)[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    os = tl.load(o + at, mask=mask, other=0.0).to(tl.float32)
    if rest is not None:
        os += tl.load(rest + at, mask=mask, other=0.0).to(tl.float32)
    row_den = tl.load(den + (b * H + h) * T + t, mask=inside, other=0.0)
    some = row_den >= floor if NORM == 2 else tl.abs(row_den) > 1e-30
    tl.store(e + (b * H + h) * T + t, tl.where(some, -tl.sum(gs * os, 1), 0.0), mask=inside)
