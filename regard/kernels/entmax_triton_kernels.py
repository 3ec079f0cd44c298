"""The kernels of entmax_triton.py."""

# Triton's compiler reads these bodies, in which types are not those of Python.
# pyright: reportArgumentType=false, reportOperatorIssue=false

import triton.language as tl

from regard.kernels.jit_triton import jit
from regard.kernels.rows_triton import load_rows, store_rows

ARRIVED = tl.constexpr(1.000004)  # a sum of weights from which one more step of Newton's is the last
NEAR = tl.constexpr(0.25)  # where a series is more exact than a difference


@jit
def _seen(i, j, first, count, CAUSAL: tl.constexpr):
    visible = (j < count)[None, :] & (i >= 0)[:, None]
    if CAUSAL:
        visible = visible & (j[None, :] <= first + i[:, None])
    return visible


@jit
def _logs(z, t, beta, visible):
    """log(1 + beta (z - t)), exact near 0, and where it is a weight's."""
    x = beta * (z - t[:, None])
    u = 1.0 + x
    inside = visible & (u > 0.0)
    u = tl.where(inside, u, 1.0)
    rest = u - 1.0
    whole = rest == 0.0
    # what rounding took from u is the factor x / (u - 1)
    logs = tl.where(whole, x, tl.log(u) * (x / tl.where(whole, 1.0, rest)))
    return tl.where(inside, logs, 0.0), u, inside


@jit
def forward_kernel(
    q, k, v, betas, firsts, counts, o, ts, totals,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, H, T, S, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    # the later tiles of causal queries are longer: they begin first
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    beta, first = tl.load(betas + h), tl.load(firsts + b)
    count = tl.minimum(tl.load(counts + b), S)
    i = row0 + tl.arange(0, ROWS)
    end = count
    if CAUSAL:
        end = tl.minimum(count, first + row0 + ROWS)
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    query = load_rows(q + b * q_b + h * q_h, i, T, q_t, D, BLOCK_D)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    for j0 in range(0, end, KEYS):
        j = j0 + tl.arange(0, KEYS)
        z = tl.dot(query, tl.trans(load_rows(k, j, S, k_t, D, BLOCK_D)), input_precision="ieee") * scale
        top = tl.maximum(top, tl.max(tl.where(_seen(i, j, first, count, CAUSAL), z, float("-inf")), 1))
    some = top > float("-inf")
    t = tl.where(some, top, 0.0)
    going = some & (i < T)
    left = tl.max(going.to(tl.int32), 0)
    step = 0
    while (left > 0) & (step < STEPS):
        mass = tl.zeros([ROWS], tl.float32)
        slope = tl.zeros([ROWS], tl.float32)
        for j0 in range(0, end, KEYS):
            j = j0 + tl.arange(0, KEYS)
            z = tl.dot(query, tl.trans(load_rows(k, j, S, k_t, D, BLOCK_D)), input_precision="ieee") * scale
            logs, u, inside = _logs(z, t, beta, _seen(i, j, first, count, CAUSAL))
            p = tl.where(inside, tl.exp(logs / beta), 0.0)
            mass += tl.sum(p, 1)
            slope += tl.sum(p / u, 1)
        # P (1 - P^-beta) / beta over the slope; y = log P^beta is small in the end
        y = beta * tl.log(tl.where(mass > 0.0, mass, 1.0))
        series = y * (1.0 - y * (0.5 - y * (1.0 / 6 - y * (1.0 / 24 - y * (1.0 / 120)))))
        move = mass * tl.where(y < NEAR, series, 1.0 - tl.exp(-y)) / (beta * tl.where(slope > 0.0, slope, 1.0))
        t = tl.where(going, t + move, t)
        going = going & (mass > ARRIVED)
        left = tl.max(going.to(tl.int32), 0)
        step += 1

    acc = tl.zeros([ROWS, BLOCK_E], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for j0 in range(0, end, KEYS):
        j = j0 + tl.arange(0, KEYS)
        z = tl.dot(query, tl.trans(load_rows(k, j, S, k_t, D, BLOCK_D)), input_precision="ieee") * scale
        logs, _, inside = _logs(z, t, beta, _seen(i, j, first, count, CAUSAL))
        p = tl.where(inside, tl.exp(logs / beta), 0.0)
        total += tl.sum(p, 1)
        value = load_rows(v, j, S, v_t, E, BLOCK_E)
        acc = tl.dot(p.to(value.dtype), value, acc, input_precision="ieee")
    total = tl.where(total > 0.0, total, 1.0)
    at = (b * H + h) * T + i
    tl.store(ts + at, t, mask=i < T)
    tl.store(totals + at, total, mask=i < T)
    store_rows(o + b * o_b + h * o_h, i, T, o_t, acc / total[:, None], E, BLOCK_E)


@jit
def queries_kernel(
    q, k, v, grad, betas, firsts, counts, ts, totals, means, dq, of_beta,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, dq_b, dq_h, dq_t, H, T, S, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dq, the mean m = (s . g) / sum s of each query, s = p^(1 - beta) and g = do . v, and what beta gets of a tile."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row0 = tile * ROWS
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    beta, first = tl.load(betas + h), tl.load(firsts + b)
    count = tl.minimum(tl.load(counts + b), S)
    i = row0 + tl.arange(0, ROWS)
    end = count
    if CAUSAL:
        end = tl.minimum(count, first + row0 + ROWS)
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    query = load_rows(q + b * q_b + h * q_h, i, T, q_t, D, BLOCK_D)
    out = load_rows(grad + b * g_b + h * g_h, i, T, g_t, E, BLOCK_E)
    at = (b * H + h) * T + i
    t = tl.load(ts + at, mask=i < T, other=0.0)
    total = tl.load(totals + at, mask=i < T, other=1.0)

    slopes = tl.zeros([ROWS], tl.float32)
    along = tl.zeros([ROWS], tl.float32)
    for j0 in range(0, end, KEYS):
        j = j0 + tl.arange(0, KEYS)
        z = tl.dot(query, tl.trans(load_rows(k, j, S, k_t, D, BLOCK_D)), input_precision="ieee") * scale
        g = tl.dot(out, tl.trans(load_rows(v, j, S, v_t, E, BLOCK_E)), input_precision="ieee")
        logs, u, inside = _logs(z, t, beta, _seen(i, j, first, count, CAUSAL))
        s = tl.where(inside, tl.exp(logs / beta) / u, 0.0)
        slopes += tl.sum(s, 1)
        along += tl.sum(s * g, 1)
    mean = along / tl.where(slopes > 0.0, slopes, 1.0)
    tl.store(means + at, mean, mask=i < T)

    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    moved = tl.zeros([ROWS], tl.float32)
    for j0 in range(0, end, KEYS):
        j = j0 + tl.arange(0, KEYS)
        key = load_rows(k, j, S, k_t, D, BLOCK_D)
        z = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        g = tl.dot(out, tl.trans(load_rows(v, j, S, v_t, E, BLOCK_E)), input_precision="ieee")
        logs, u, inside = _logs(z, t, beta, _seen(i, j, first, count, CAUSAL))
        p = tl.where(inside, tl.exp(logs / beta), 0.0)
        centred = g - mean[:, None]
        acc = tl.dot((p / u * centred).to(key.dtype), key, acc, input_precision="ieee")
        if of_beta is not None:
            # 1 - 1 / u - log u, which is -l^2 / 2 + l^3 / 6 - ... near l = log u = 0
            series = -0.5 + logs * (1.0 / 6 + logs * (-1.0 / 24 + logs * (1.0 / 120 - logs * (1.0 / 720))))
            bend = tl.where(tl.abs(logs) < NEAR, logs * logs * series, 1.0 - 1.0 / u - logs)
            moved += tl.sum(p * bend * centred, 1)
    store_rows(dq + b * dq_b + h * dq_h, i, T, dq_t, acc * scale, D, BLOCK_D)
    if of_beta is not None:
        whole = tl.sum(tl.where(i < T, moved / total, 0.0), 0) / (beta * beta)
        tl.store(of_beta + (b * H + h) * tl.num_programs(0) + tile, whole)


@jit
def keys_kernel(
    q, k, v, grad, betas, firsts, counts, ts, totals, means, dk, dv,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, H, T, S, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    key0 = tl.program_id(0) * KEYS
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    beta, first = tl.load(betas + h), tl.load(firsts + b)
    count = tl.minimum(tl.load(counts + b), S)
    j = key0 + tl.arange(0, KEYS)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(key0 - first, 0) // ROWS * ROWS
    # keys that are padding are seen by none
    end = tl.where(key0 < count, T, 0)
    q += b * q_b + h * q_h
    grad += b * g_b + h * g_h
    key = load_rows(k + b * k_b + h * k_h, j, S, k_t, D, BLOCK_D)
    value = load_rows(v + b * v_b + h * v_h, j, S, v_t, E, BLOCK_E)
    acc_k = tl.zeros([KEYS, BLOCK_D], tl.float32)
    acc_v = tl.zeros([KEYS, BLOCK_E], tl.float32)
    for i0 in range(begin, end, ROWS):
        i = i0 + tl.arange(0, ROWS)
        query = load_rows(q, i, T, q_t, D, BLOCK_D)
        out = load_rows(grad, i, T, g_t, E, BLOCK_E)
        at = (b * H + h) * T + i
        t = tl.load(ts + at, mask=i < T, other=0.0)
        total = tl.load(totals + at, mask=i < T, other=1.0)
        mean = tl.load(means + at, mask=i < T, other=0.0)
        z = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        g = tl.dot(out, tl.trans(value), input_precision="ieee")
        visible = _seen(i, j, first, count, CAUSAL) & (i < T)[:, None]
        logs, u, inside = _logs(z, t, beta, visible)
        p = tl.where(inside, tl.exp(logs / beta), 0.0)
        acc_v = tl.dot(tl.trans(p / total[:, None]).to(out.dtype), out, acc_v, input_precision="ieee")
        dz = p / u * (g - mean[:, None])
        acc_k = tl.dot(tl.trans(dz).to(query.dtype), query, acc_k, input_precision="ieee")
    store_rows(dk + b * dk_b + h * dk_h, j, S, dk_t, acc_k * scale, D, BLOCK_D)
    store_rows(dv + b * dv_b + h * dv_h, j, S, dv_t, acc_v, E, BLOCK_E)
