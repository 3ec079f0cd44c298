"""The kernels of scan_triton.py without an order: dk and dv of sums over all keys, and the reading of such sums."""

# Triton's compiler reads these bodies, in which types are not those of Python.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton.language as tl

from regard.kernels.jit_triton import jit
from regard.kernels.scan_triton_tiles import add_product, factor, inverse_of, load_tile, mapped, sloped


@jit(do_not_specialize=["T"])
def absorb_keys(
    k, v, lengths, dS, dz, dk, dv, k_b, k_h, k_t, v_b, v_h, v_t, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    MAP: tl.constexpr, RAGGED: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of sums over all keys."""
    h, b, i, columns = tl.program_id(0) % H, tl.program_id(1).to(tl.int64), tl.arange(0, C), tl.arange(0, BK)
    start, head = (tl.program_id(0) // H) * C, b * H + h
    at, live, there = start.to(tl.int64), start + i < T, start + i < T
    if RAGGED:
        live = start + i < tl.load(lengths + b).to(tl.int32)
    is_k, of_k = live[:, None] & (columns < K)[None, :], columns[None, :] < K
    ks = mapped(load_tile(k + b * k_b + h * k_h + at * k_t, i, k_t, columns, is_k, False), is_k, MAP, False, False)
    grad = tl.zeros([C, BK], tl.float32) + tl.load(dz + head * K + columns, mask=columns < K, other=0.0)[None, :]
    for part in tl.static_range((V + BV - 1) // BV):
        values = part * BV + tl.arange(0, BV)
        of_v = values[None, :] < V
        vs = factor(
            load_tile(v + b * v_b + h * v_h + at * v_t, i, v_t, values, live[:, None] & of_v, False), NARROW, PRECISION
        )
        S = tl.load(
            dS + head * (K * V) + columns[:, None] * V + values[None, :], mask=(columns < K)[:, None] & of_v, other=0.0
        )
        grad = add_product(vs, tl.trans(S), grad, True, NARROW, PRECISION)
        out = add_product(factor(ks, NARROW, PRECISION), S, tl.zeros([C, BV], tl.float32), True, NARROW, PRECISION).to(
            dv.dtype.element_ty
        )
        tl.store(
            dv + ((b * T + at) * H + h) * V + i[:, None] * (H * V) + values[None, :], out, mask=there[:, None] & of_v
        )
    grad = sloped(tl.where(live[:, None], grad, 0.0), ks, MAP).to(dk.dtype.element_ty)
    tl.store(
        dk + ((b * T + at) * H + h) * K + i[:, None] * (H * K) + columns[None, :], grad, mask=there[:, None] & of_k
    )


@jit(do_not_specialize=["T", "floor"])
def read_rows(
    q, S, z, o, den, q_b, q_h, q_t, T, floor,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, NORM: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    h, b, i, columns = tl.program_id(0) % H, tl.program_id(1).to(tl.int64), tl.arange(0, C), tl.arange(0, BK)
    start, head = (tl.program_id(0) // H) * C, b * (H // GROUP) + h // GROUP
    at, there = start.to(tl.int64), start + i < T
    inside = there[:, None] & (columns < K)[None, :]
    qs = mapped(load_tile(q + b * q_b + h * q_h + at * q_t, i, q_t, columns, inside, False), inside, MAP, False, False)
    row = tl.sum(qs * tl.load(z + head * K + columns, mask=columns < K, other=0.0)[None, :], 1)
    tl.store(den + (b * H + h) * T + start + i, row, mask=there)
    for part in tl.static_range((V + BV - 1) // BV):
        values = part * BV + tl.arange(0, BV)
        state = tl.load(
            S + head * (K * V) + columns[:, None] * V + values[None, :],
            mask=(columns < K)[:, None] & (values < V)[None, :],
            other=0.0,
        )
        num = add_product(factor(qs, NARROW, PRECISION), state, tl.zeros([C, BV], tl.float32), True, NARROW, PRECISION)
        num = (num * inverse_of(row, floor, NORM)[:, None]).to(o.dtype.element_ty)
        tl.store(
            o + ((b * T + at) * H + h) * V + i[:, None] * (H * V) + values[None, :],
            num,
            mask=there[:, None] & (values < V)[None, :],
        )


@jit(do_not_specialize=["T", "floor"])
def read_queries(
    q, S, z, den, g, e, dq, q_b, q_h, q_t, g_b, g_h, g_t, T, floor,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, NORM: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of a reading, and e: u . o is q . (S u) / den."""
    h, b, i, columns = tl.program_id(0) % H, tl.program_id(1).to(tl.int64), tl.arange(0, C), tl.arange(0, BK)
    start, head = (tl.program_id(0) // H) * C, b * (H // GROUP) + h // GROUP
    at, there = start.to(tl.int64), start + i < T
    inside = there[:, None] & (columns < K)[None, :]
    qs = mapped(load_tile(q + b * q_b + h * q_h + at * q_t, i, q_t, columns, inside, False), inside, MAP, False, False)
    sums = tl.load(z + head * K + columns, mask=columns < K, other=0.0)
    rows = (b * H + h) * T + start + i
    row = tl.load(den + rows, mask=there, other=1.0)
    inverse = inverse_of(row, floor, NORM)
    grad = tl.zeros([C, BK], tl.float32)
    for part in tl.static_range((V + BV - 1) // BV):
        values = part * BV + tl.arange(0, BV)
        state = tl.load(
            S + head * (K * V) + columns[:, None] * V + values[None, :],
            mask=(columns < K)[:, None] & (values < V)[None, :],
            other=0.0,
        )
        gs = load_tile(g + b * g_b + h * g_h + at * g_t, i, g_t, values, there[:, None] & (values < V)[None, :], False)
        grad = add_product(factor(gs, NARROW, PRECISION), tl.trans(state), grad, True, NARROW, PRECISION)
    if NORM == 0:
        es = tl.load(e + rows, mask=there, other=0.0)
    else:
        es = -tl.sum(qs * grad, 1) * inverse
        if NORM == 2:
            es = tl.where(row >= floor, es, 0.0)
        tl.store(e + rows, es, mask=there)
    grad = sloped((grad + es[:, None] * sums[None, :]) * inverse[:, None], qs, MAP).to(dq.dtype.element_ty)
    tl.store(dq + ((b * T + at) * H + h) * K + i[:, None] * (H * K) + columns[None, :], grad, mask=inside)


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
