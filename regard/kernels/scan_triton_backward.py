"""The backward kernels of scan_triton.py: one scan forward for dq, one in reverse for dk and dv."""

# Triton's compiler reads these bodies, in which types are not those of Python.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false

import triton.language as tl

from regard.kernels.jit_triton import jit
from regard.kernels.scan_triton_tiles import (
    add_product,
    documents,
    exp,
    factor,
    faded,
    inverse_of,
    is_left_to_other,
    load_keys,
    load_state,
    load_tile,
    mapped,
    pair_weights,
    place,
    program,
    real_length,
    sloped,
    split_row,
    store_state,
    store_tile,
    sums_seen,
)


@jit(do_not_specialize=["T", "batch", "segments", "span", "last", "floor"])
def scan_queries(
    q, k, v, g, den, e, decay, tops, safe, first, lengths, S_before, z_before, dq, of_q,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, d_b, d_h, d_t, T, batch, segments, span, last, floor,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MAP: tl.constexpr, NORM: tl.constexpr, DECAY: tl.constexpr, RESET: tl.constexpr, RAGGED: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr, LEARNS: tl.constexpr, GIVEN: tl.constexpr, STATE: tl.constexpr,
    EVEN: tl.constexpr, C: tl.constexpr, BY_IDENTITY: tl.constexpr,
):  # fmt: skip
    """dq, and e where it is not given. BY_IDENTITY: queries are multiplied by the identity matrix, which is exact."""
    h, segment, b, head, group = program(H, GROUP)
    if DECAY > 2:
        if is_left_to_other(safe, head, DECAY):
            return
        tops += head * K * (last + 1)
    if DECAY == 1 or DECAY == 2:
        decay += b * d_b + h * d_h
    _, part_v, columns, values = place(BK, BV, V)
    q, k, v = q + b * q_b + h * q_h, k + b * k_b + group * k_h, v + b * v_b + group * v_h
    g, dq = g + b * g_b + h * g_h, dq + ((part_v * batch + b) * T * H + h) * K
    den, e = den + head * T, e + head * T * (K if NORM == 3 else 1)
    of_q += (part_v * batch * H + head) * T * K if DECAY == 2 else (tl.program_id(2) * batch * H + head) * T
    length = real_length(lengths, b, T, RAGGED)
    number = head * segments + segment
    S, z = load_state(S_before, z_before, number, part_v, columns, values, K, V, BK, BV, STATE, False)
    i, r = tl.arange(0, C), tl.arange(0, 16)
    causal = i[:, None] >= i[None, :]
    line = factor(tl.where((r == 0)[:, None] & (i >= 0)[None, :], 1.0, 0.0), NARROW, "ieee")
    ones = factor(tl.where((r >= 0)[None, :] & (i >= 0)[:, None], 1.0, 0.0), NARROW, "ieee")
    for n in range(0, tl.cdiv(tl.minimum(span, T - segment * span), C)):
        start = segment * span + n * C
        at, live, there = start.to(tl.int64), start + i < length, start + i < T
        is_k, is_v = live[:, None] & (columns < K)[None, :], live[:, None] & (values < V)[None, :]
        ks, A, total = load_keys(
            k, k_t, decay, d_t, tops, last, start, i, columns, live, is_k, K, MAP, DECAY, EVEN, True, C
        )
        vs = factor(load_tile(v + at * v_t, i, v_t, values, is_v, EVEN), NARROW, PRECISION)
        gs = factor(load_tile(g + at * g_t, i, g_t, values, is_v, EVEN), NARROW, PRECISION)
        visible, before, leaving = causal, live, ks
        if DECAY == 4:
            S, z = S * total[None, :], z * total[None, :]
        if RESET:
            visible, before, after, through = documents(first + b * T, start, i, live, causal)
        # g is as narrow as it came: g / den would be rounded once more
        seen = sums_seen(z, A, ks, visible, before, ones, DECAY, RESET, NARROW, PRECISION)
        grad = _read_back(gs, vs, S, A, ks, visible, before, DECAY, RESET, NARROW, PRECISION)
        qs = load_tile(q + at * q_t, i, q_t, columns, is_k, EVEN)
        if BY_IDENTITY:
            # a product has the layout of the gradient: the compiler need not compute features in two layouts
            identity = factor(tl.where(columns[:, None] == columns[None, :], 1.0, 0.0), NARROW, "ieee")
            qs = tl.dot(factor(qs, NARROW, PRECISION), identity, input_precision=PRECISION)
        qs = mapped(qs, is_k, MAP, EVEN, False)
        inside = there[:, None] & (columns < K)[None, :]
        if NORM == 3:
            inverse = inverse_of(seen, floor, 1)
            grad = grad * inverse
            if not GIVEN:
                store_tile(e + at * K, i, K, columns, -qs * inverse * grad, inside, False)
        else:
            grad = _over_denominators(
                grad, seen, qs, den + start + i, e + start + i, part_v, live, there, floor, NORM, GIVEN
            )
        if LEARNS:
            if DECAY == 2:
                # with a denominator of each feature, what A does to both cancels at the query
                store_tile(of_q + at * K, i, K, columns, qs * grad * (0.0 if NORM == 3 else 1.0), inside, False)
            else:
                tl.store(of_q + start + i, tl.sum(qs * grad, 1), mask=there)
        store_tile(dq + at * (H * K), i, H * K, columns, sloped(grad, qs, MAP), inside, EVEN)
        if DECAY > 0 and DECAY < 4:
            S, z, leaving = faded(S, z, ks, A, total, DECAY)
        if RESET:
            S, z, leaving = _reset(S, z, leaving, after, through)
        S = add_product(tl.trans(vs), leaving, S, False, NARROW, PRECISION)
        z = add_product(line, leaving, z, False, NARROW, PRECISION)


@jit
def _reset(S, z, leaving, after, through):
    """The state behind a chunk in which documents begin, and the keys that reach it."""
    return tl.where(through, S, 0.0), tl.where(through, z, 0.0), tl.where(after[:, None], leaving, 0.0)


@jit
def _read_back(
    gs, vs, S, A, ks, visible, before, DECAY: tl.constexpr, RESET: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S g at each query of a chunk, [C, BK]: the gradient of its features, but for denominators."""
    of_score = tl.dot(gs, tl.trans(vs), input_precision=PRECISION)
    grad = tl.dot(gs, factor(S, NARROW, PRECISION), input_precision=PRECISION)
    if DECAY > 0 and DECAY < 4:
        grad = grad * exp(A)
    if RESET:
        grad = tl.where(before[:, None], grad, 0.0)
    if DECAY == 2 or DECAY == 3:
        grad = grad + tl.sum(of_score[:, :, None] * pair_weights(A, ks, visible), 1)
    else:
        if DECAY == 1:
            of_score = of_score * exp(tl.where(visible, A - tl.trans(A), 0.0))
        of_score = factor(tl.where(visible, of_score, 0.0), NARROW, PRECISION)
        grad = tl.dot(of_score, factor(ks, NARROW, PRECISION), grad, input_precision=PRECISION)
    return grad


@jit
def _over_denominators(grad, seen, qs, den, e, part_v, live, there, floor, NORM: tl.constexpr, GIVEN: tl.constexpr):
    """The gradient of features whose sum is divided by denominators; e is written where it is not given."""
    row = tl.load(den, mask=live, other=1.0)
    if GIVEN:
        es = tl.where(part_v == 0, tl.load(e, mask=live, other=0.0), 0.0)
    else:
        # g . o = q . (S g) / (q . z): o has been rounded, and so have the parts of den, which here must cancel
        es = -tl.sum(qs * grad, 1) * inverse_of(tl.sum(qs * seen, 1), floor, 1)
        if NORM == 2:
            es = tl.where(row >= floor, es, 0.0)
        tl.store(e, es, mask=there)
    return (grad + es[:, None] * seen) * inverse_of(row, floor, NORM)[:, None]


@jit(do_not_specialize=["T", "batch", "segments", "span", "last", "floor"])
def scan_keys(
    q, k, v, g, den, e, decay, tops, safe, first, lengths, S_after, z_after, dk, dv, of_k, S_start, z_start,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, d_b, d_h, d_t, T, batch, segments, span, last, floor,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MAP: tl.constexpr, NORM: tl.constexpr, DECAY: tl.constexpr, RESET: tl.constexpr, RAGGED: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr, LEARNS: tl.constexpr, STATE: tl.constexpr, FINAL: tl.constexpr,
    EVEN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dk and dv, from the last chunk to the first; S and z are the gradients of the state here. Scores are [j, t]."""
    h, segment, b, head, group = program(H, GROUP)
    if DECAY > 2:
        if is_left_to_other(safe, head, DECAY):
            return
        tops += head * K * (last + 1)
    if DECAY == 1 or DECAY == 2:
        decay += b * d_b + h * d_h
    part_k, part_v, columns, values = place(BK, BV, V)
    q, k, v = q + b * q_b + h * q_h, k + b * k_b + group * k_h, v + b * v_b + group * v_h
    g, dv, rows = g + b * g_b + h * g_h, dv + ((part_k * batch + b) * T * H + h) * V, head * T
    dk += ((part_v * batch + b) * T * H + h) * K
    of_k += (part_v * batch * H + head) * T * K if DECAY == 2 else (tl.program_id(2) * batch * H + head) * T
    length = real_length(lengths, b, T, RAGGED)
    number, i, r = head * segments + segment, tl.arange(0, C), tl.arange(0, 16)
    S, z = load_state(S_after, z_after, number, part_v, columns, values, K, V, BK, BV, STATE, True)
    causal = i[:, None] <= i[None, :]
    ones = factor(tl.where((r >= 0)[None, :] & (i >= 0)[:, None], 1.0, 0.0), NARROW, "ieee")
    count = tl.cdiv(tl.minimum(span, T - segment * span), C)
    for n in range(0, count):
        start = segment * span + (count - 1 - n) * C
        at, live, there = start.to(tl.int64), start + i < length, start + i < T
        is_k, is_v = live[:, None] & (columns < K)[None, :], live[:, None] & (values < V)[None, :]
        # queries over their denominators, and e with them: as if there were none
        inverse, es = _load_inverses(den, e, rows, start, i, columns, part_v, live, is_k, floor, K, NORM)
        qs = mapped(load_tile(q + at * q_t, i, q_t, columns, is_k, EVEN), is_k, MAP, EVEN, True) * inverse
        ks, A, total = load_keys(
            k, k_t, decay, d_t, tops, last, start, i, columns, live, is_k, K, MAP, DECAY, EVEN, C < 64, C
        )
        vs = factor(load_tile(v + at * v_t, i, v_t, values, is_v, EVEN), NARROW, PRECISION)
        gs = factor(load_tile(g + at * g_t, i, g_t, values, is_v, EVEN), NARROW, PRECISION)
        visible, before, after, through = causal, live, live, True
        if RESET:
            visible, before, after, through = documents(first + b * T, start, i, live, tl.trans(causal))
            visible = tl.trans(visible)
        # what is read of a key behind its chunk
        of_state = add_product(ones, z, tl.zeros([C, BK], tl.float32), False, NARROW, PRECISION)
        of_state = tl.dot(vs, factor(S, NARROW, PRECISION), of_state, input_precision=PRECISION)
        arriving, leaving = qs, ks
        if DECAY > 0 and DECAY < 4:
            arriving, leaving, of_state = qs * exp(A), ks * exp(total[None, :] - A), of_state * exp(total[None, :] - A)
        if RESET:
            arriving, leaving = tl.where(before[:, None], arriving, 0.0), tl.where(after[:, None], leaving, 0.0)
            of_state = tl.where(after[:, None], of_state, 0.0)
        score, grad = _of_chunk(qs, ks, vs, gs, es, A, visible, of_state, NORM, DECAY, NARROW, PRECISION)
        of_v = tl.dot(
            factor(leaving, NARROW, PRECISION), tl.trans(factor(S, NARROW, PRECISION)), input_precision=PRECISION
        )
        of_v = tl.dot(factor(score, NARROW, PRECISION), gs, of_v, input_precision=PRECISION)
        if not EVEN:
            # padding may lie in the same chunk as a token that is read
            of_v, grad = tl.where(live[:, None], of_v, 0.0), tl.where(live[:, None], grad, 0.0)
        inside = there[:, None] & (columns < K)[None, :]
        store_tile(dv + at * (H * V), i, H * V, values, of_v, there[:, None] & (values < V)[None, :], EVEN)
        if LEARNS:
            if DECAY == 2:
                store_tile(of_k + at * K, i, K, columns, ks * grad, inside, False)
            else:
                tl.store(of_k + start + i, tl.sum(ks * grad, 1), mask=there)
        store_tile(dk + at * (H * K), i, H * K, columns, sloped(grad, ks, 3 if DECAY > 2 else MAP), inside, EVEN)
        S, z = _behind(S, z, gs, es, arriving, A, total, before, through, NORM, DECAY, RESET, FINAL, NARROW, PRECISION)
    if FINAL:
        store_state(S_start, z_start, head, part_v, S, z, columns, values, K, V)


@jit
def _load_inverses(den, e, rows, start, i, columns, part_v, live, is_k, floor, K: tl.constexpr, NORM: tl.constexpr):
    """One over the denominators, [C, 1] or of each feature, and e."""
    if NORM == 3:
        at = (rows + start).to(tl.int64) * K
        inverse = inverse_of(load_tile(den + at, i, K, columns, is_k, False), floor, 1)
        es = tl.where(part_v == 0, load_tile(e + at, i, K, columns, is_k, False), 0.0)
    else:
        inverse = inverse_of(tl.load(den + rows + start + i, mask=live, other=1.0), floor, NORM)[:, None]
        es = tl.where(part_v == 0, tl.load(e + rows + start + i, mask=live, other=0.0), 0.0)
    return inverse, es


@jit
def _of_chunk(
    qs, ks, vs, gs, es, A, visible, grad,
    NORM: tl.constexpr, DECAY: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The scores of a chunk [j, t], and the gradient of its keys with what its own queries add."""
    of_score = tl.dot(vs, tl.trans(gs), input_precision=PRECISION)
    if NORM < 3:
        of_score = of_score + es[None, :]
    if DECAY == 2 or DECAY == 3:
        weight = exp(tl.where(visible[:, :, None], A[None, :, :] - A[:, None, :], float("-inf")))
        score = tl.sum(ks[:, None, :] * qs[None, :, :] * weight, 2)
        back = of_score[:, :, None] * qs[None, :, :]
        if NORM == 3:
            back = back + es[None, :, :]
        grad = grad + tl.sum(back * weight, 1)
    else:
        qs, ks = factor(qs, NARROW, PRECISION), factor(ks, NARROW, PRECISION)
        score = tl.dot(ks, tl.trans(qs), input_precision=PRECISION)
        if DECAY == 1:
            weight = exp(tl.where(visible, tl.trans(A) - A, 0.0))
            score, of_score = score * weight, of_score * weight
        score = tl.where(visible, score, 0.0)
        of_score = factor(tl.where(visible, of_score, 0.0), NARROW, PRECISION)
        grad = tl.dot(of_score, qs, grad, input_precision=PRECISION)
        if NORM == 3:
            later = factor(tl.where(visible, 1.0, 0.0), NARROW, PRECISION)
            grad = add_product(later, es, grad, True, NARROW, PRECISION)
    return score, grad


@jit
def _behind(
    S, z, gs, es, arriving, A, total, before, through, NORM: tl.constexpr, DECAY: tl.constexpr, RESET: tl.constexpr,
    FINAL: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of the state in front of a chunk, from those behind it."""
    r = tl.arange(0, 16)[:, None]
    if DECAY > 0 and DECAY < 4:
        S, z = S * exp(total)[None, :], z * exp(total)[None, :]
    if RESET:
        S, z = tl.where(through, S, 0.0), tl.where(through, z, 0.0)
    S = add_product(tl.trans(gs), arriving, S, FINAL, NARROW, PRECISION)
    if NORM == 3:
        if DECAY < 4:
            es = es * exp(A)
        if RESET:
            es = tl.where(before[:, None], es, 0.0)
        z = z + tl.where(r == 0, tl.sum(es, 0)[None, :], 0.0)
    else:
        z = add_product(split_row(es, r, NARROW, PRECISION), arriving, z, FINAL, NARROW, PRECISION)
    if DECAY == 4:
        S, z = S * total[None, :], z * total[None, :]
    return S, z
