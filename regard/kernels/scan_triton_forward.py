"""The forward kernels of scan_triton.py: a scan, the sums of segments before it, and what links them."""

# Triton's compiler reads these bodies, in which types are not those of Python.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false

from typing import Any, NamedTuple

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
    split_row,
    store_state,
    store_tile,
    sums_seen,
)


@jit(do_not_specialize=["T", "batch", "segments", "span", "last", "floor"])
def scan_forward(
    q, k, v, decay, tops, safe, first, lengths, S_before, z_before, o, den, S_after, z_after,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, d_b, d_h, d_t, T, batch, segments, span, last, floor,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MAP: tl.constexpr, NORM: tl.constexpr, DECAY: tl.constexpr, RESET: tl.constexpr, RAGGED: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr, STATE: tl.constexpr, FINAL: tl.constexpr, EVEN: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """o, or its numerators of each part of K, and the denominators."""
    h, segment, b, head, group = program(H, GROUP)
    if DECAY > 2:
        if is_left_to_other(safe, head, DECAY):
            return
        tops += head * K * (last + 1)
    part_k, part_v, columns, values = place(BK, BV, V)
    i = tl.arange(0, C)
    q, k, v = q + b * q_b + h * q_h, k + b * k_b + group * k_h, v + b * v_b + group * v_h
    o += ((part_k * batch + b) * T * H + h) * V
    den += head * T * K if NORM == 3 else (part_k * batch * H + head) * T
    length = real_length(lengths, b, T, RAGGED)
    if DECAY == 1 or DECAY == 2:
        decay += b * d_b + h * d_h
    S, z = load_state(
        S_before, z_before, head * segments + segment, part_v, columns, values, K, V, BK, BV, STATE, False
    )
    causal, r = i[:, None] >= i[None, :], tl.arange(0, 16)
    # a column of ones adds up rows, a row of ones columns, as products do it
    column = factor(tl.where((r == 0)[None, :] & (i >= 0)[:, None], 1.0, 0.0), NARROW, "ieee")
    line = tl.trans(column)
    for n in range(0, tl.cdiv(tl.minimum(span, T - segment * span), C)):
        start = segment * span + n * C
        at, live, there = start.to(tl.int64), start + i < length, start + i < T
        is_k, is_v = live[:, None] & (columns < K)[None, :], live[:, None] & (values < V)[None, :]
        qs = mapped(load_tile(q + at * q_t, i, q_t, columns, is_k, EVEN), is_k, MAP, EVEN, True)
        ks, A, total = load_keys(
            k, k_t, decay, d_t, tops, last, start, i, columns, live, is_k, K, MAP, DECAY, EVEN, True, C
        )
        vs = factor(load_tile(v + at * v_t, i, v_t, values, is_v, EVEN), NARROW, PRECISION)
        visible, before, leaving = causal, live, ks
        if DECAY == 4:
            S, z = S * total[None, :], z * total[None, :]
        if RESET:
            visible, before, after, through = documents(first + b * T, start, i, live, causal)
        if NORM == 3:
            ones = factor(tl.where((r >= 0)[None, :] & (i >= 0)[:, None], 1.0, 0.0), NARROW, "ieee")
            seen = sums_seen(z, A, ks, visible, before, ones, DECAY, RESET, NARROW, PRECISION)
            qs = qs * inverse_of(seen, floor, 1)
            if part_v == 0:
                store_tile(den + at * K, i, K, columns, seen, there[:, None] & (columns < K)[None, :], False)
        arriving = qs * exp(A) if DECAY > 0 and DECAY < 4 else qs
        if RESET:
            arriving = tl.where(before[:, None], arriving, 0.0)
        score = _scores(qs, ks, A, visible, DECAY, NARROW, PRECISION)
        score, arriving = factor(score, NARROW, PRECISION), factor(arriving, NARROW, PRECISION)
        num = tl.dot(arriving, tl.trans(factor(S, NARROW, PRECISION)), input_precision=PRECISION)
        num = tl.dot(score, vs, num, input_precision=PRECISION)
        if NORM < 3:
            row = add_product(arriving, tl.trans(z), tl.zeros([C, 16], tl.float32), True, NARROW, PRECISION)
            row = tl.sum(tl.dot(score, column, row, input_precision=PRECISION), 1)
            num = num * inverse_of(row, floor, NORM)[:, None]
            if part_v == 0:
                tl.store(den + start + i, row, mask=there)
        store_tile(o + at * (H * V), i, H * V, values, num, there[:, None] & (values < V)[None, :], EVEN)
        if DECAY > 0 and DECAY < 4:
            S, z, leaving = faded(S, z, ks, A, total, DECAY)
        if RESET:
            S, z = tl.where(through, S, 0.0), tl.where(through, z, 0.0)
            leaving = tl.where(after[:, None], leaving, 0.0)
        S = add_product(tl.trans(vs), leaving, S, FINAL, NARROW, PRECISION)
        z = add_product(line, leaving, z, FINAL, NARROW, PRECISION)
    if FINAL:
        store_state(S_after, z_after, head, part_v, S, z, columns, values, K, V)


@jit
def _scores(qs, ks, A, visible, DECAY: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    """The products of the queries and keys of a chunk, [C, C]."""
    if DECAY == 2 or DECAY == 3:
        score = tl.sum(qs[:, None, :] * pair_weights(A, ks, visible), 2)
    else:
        qs, ks = factor(qs, NARROW, PRECISION), factor(ks, NARROW, PRECISION)
        score = tl.dot(qs, tl.trans(ks), input_precision=PRECISION)
        if DECAY == 1:
            score = score * exp(tl.where(visible, A - tl.trans(A), 0.0))
        score = tl.where(visible, score, 0.0)
    return score


@jit(do_not_specialize=["T", "segments", "span", "last", "floor"])
def scan_sums(
    x, y, den, e, logits, decay, tops, safe, first, lengths, S, z, shrink,
    x_b, x_h, x_t, y_b, y_h, y_t, k_b, k_h, k_t, d_b, d_h, d_t, T, segments, span, last, floor,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MAP: tl.constexpr, NORM: tl.constexpr, DECAY: tl.constexpr, RESET: tl.constexpr, RAGGED: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr, REVERSE: tl.constexpr, ENDS: tl.constexpr, LINKED: tl.constexpr,
    EVEN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """x, y are keys and values, in reverse queries over denominators and the gradient of what they read; all of a
    segment."""
    h, segment, b, head, group = program(H, GROUP)
    if DECAY > 2:
        if is_left_to_other(safe, head, DECAY):
            return
        tops += head * K * (last + 1)
    if DECAY == 1 or DECAY == 2:
        decay += b * d_b + h * d_h
    _, part_v, columns, values = place(BK, BV, V)
    i, r, rows = tl.arange(0, C), tl.arange(0, 16)[:, None], head * T
    x, y = x + b * x_b + group * x_h, y + b * y_b + group * y_h
    keys, key_t = (logits + b * k_b + h * k_h, k_t) if DECAY == 3 and REVERSE else (x, x_t)
    length = real_length(lengths, b, T, RAGGED)
    state, sums = tl.zeros([BV, BK], tl.float32), tl.zeros([16, BK], tl.float32)
    left = tl.zeros([BK if DECAY >= 2 else 1], tl.float32) + 1.0
    causal, line = i[:, None] >= i[None, :], factor(tl.where((r == 0) & (i >= 0)[None, :], 1.0, 0.0), NARROW, "ieee")
    count = tl.cdiv(tl.minimum(span, T - segment * span), C)
    if not ENDS:
        # nobody asks for what comes behind the last segment, or before the first one in reverse
        count = tl.where(segment == (0 if REVERSE else segments - 1), 0, count)
    for n in range(0, count):
        start = segment * span + n * C
        at, live = start.to(tl.int64), start + i < length
        is_k, is_v = live[:, None] & (columns < K)[None, :], live[:, None] & (values < V)[None, :]
        ys = factor(load_tile(y + at * y_t, i, y_t, values, is_v, EVEN), NARROW, PRECISION)
        xs, A, total = load_keys(
            keys, key_t, decay, d_t, tops, last, start, i, columns, live, is_k, K, MAP, DECAY, EVEN, True, C
        )
        if RESET:
            _pairs, before, after, through = documents(first + b * T, start, i, live, causal)
        if REVERSE:
            if DECAY > 2:
                xs = load_tile(x + at * x_t, i, x_t, columns, is_k, False).to(tl.float32)
            share = tl.zeros([C, BK if DECAY >= 2 else 1], tl.float32) + left[None, :]
            if DECAY == 4:
                share = share * total[None, :]
            elif DECAY > 0:
                share = share * exp(A)
            if RESET:
                share = tl.where(before[:, None], share, 0.0)
            if NORM == 3:
                each = load_tile(e + (rows + at) * K, i, K, columns, is_k, False) * share
                sums += tl.where(r == 0, tl.sum(each, 0)[None, :], 0.0)
                xs = xs * inverse_of(load_tile(den + (rows + at) * K, i, K, columns, is_k, False), floor, 1)
            else:
                xs = xs * inverse_of(tl.load(den + rows + start + i, mask=live, other=1.0), floor, NORM)[:, None]
                line = split_row(tl.load(e + rows + start + i, mask=live, other=0.0), r, NARROW, PRECISION)
            if DECAY > 0 or RESET:
                xs = xs * share
        else:
            state, sums, xs = faded(state, sums, xs, A, total, DECAY)
            if RESET:
                state, sums = tl.where(through, state, 0.0), tl.where(through, sums, 0.0)
                xs = tl.where(after[:, None], xs, 0.0)
        state = add_product(tl.trans(ys), xs, state, ENDS, NARROW, PRECISION)
        if not (REVERSE and NORM == 3):
            sums = add_product(line, xs, sums, ENDS, NARROW, PRECISION)
        if DECAY > 0:
            left = left * (total if DECAY == 4 else exp(total))
        if RESET:
            left = tl.where(through, left, 0.0)
    number = head * segments + segment
    store_state(S, z, number, part_v, state, sums, columns, values, K, V)
    # the compiler knows the first, and drops what depends on it
    if LINKED and not REVERSE:  # noqa: SIM102
        if part_v == 0:
            _store_shrink(shrink, number, left, columns, K, DECAY)


@jit
def _store_shrink(shrink, number, left, columns, K: tl.constexpr, DECAY: tl.constexpr):
    if DECAY >= 2:
        tl.store(shrink + number * K + columns, left, mask=columns < K)
    else:
        tl.store(shrink + number + tl.arange(0, 1), left)


class Link(NamedTuple):
    """How states of segments are linked, known when a kernel is compiled."""

    inner: Any  # numbers of a state for each feature
    wide: Any  # how many decays a segment has: one, or one of each feature
    reverse: Any


@jit
def _load_sums(part, shrink, head, n, segments, at, SIZE: tl.constexpr, LINK):
    """What segment n, counted from where the state comes from, adds to the state and leaves of it; where that lies."""
    number = head * segments + (segments - 1 - n if LINK.reverse else n)
    there = (at < SIZE) & (at * 0 + n < segments)
    added = tl.load(part + number * SIZE + at, mask=there, other=0.0)
    feature = at // LINK.inner if LINK.wide > 1 else at * 0
    left = tl.load(shrink + number * LINK.wide + feature, mask=there, other=0.0)
    return added, left, part + number * SIZE + at, there


@jit
def _link(
    part, shrink, begin, end, head, at, segments, SIZE: tl.constexpr, LINK, STATE: tl.constexpr, FINAL: tl.constexpr
):  # fmt: skip
    """Four segments at a time: all of their loads are in flight before the first store, behind which a compiler would
    leave those that it cannot tell from it."""
    state = tl.zeros(at.shape, tl.float32)
    if STATE:
        state = tl.load(begin + head * SIZE + at, mask=at < SIZE, other=0.0)
    for n in range(0, segments, 4):
        added0, left0, to0, there0 = _load_sums(part, shrink, head, n, segments, at, SIZE, LINK)
        added1, left1, to1, there1 = _load_sums(part, shrink, head, n + 1, segments, at, SIZE, LINK)
        added2, left2, to2, there2 = _load_sums(part, shrink, head, n + 2, segments, at, SIZE, LINK)
        added3, left3, to3, there3 = _load_sums(part, shrink, head, n + 3, segments, at, SIZE, LINK)
        tl.store(to0, state, mask=there0)
        state = state * left0 + added0
        tl.store(to1, state, mask=there1)
        state = tl.where(there1, state * left1 + added1, state)
        tl.store(to2, state, mask=there2)
        state = tl.where(there2, state * left2 + added2, state)
        tl.store(to3, state, mask=there3)
        state = tl.where(there3, state * left3 + added3, state)
    if FINAL:
        tl.store(end + head * SIZE + at, state, mask=at < SIZE)


@jit(do_not_specialize=["segments"])
def link_segments(
    S, z, shrink, S_begin, z_begin, S_end, z_end, segments,
    K: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
    STATE: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """What each segment adds -> the state before it, in place (after it, in reverse), and the one at the end. The last
    blocks of a head are those of z."""
    head, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    OF_S: tl.constexpr = Link(V, WIDE, REVERSE)
    OF_Z: tl.constexpr = Link(1, WIDE, REVERSE)
    if tl.program_id(1) * BLOCK < K * V:
        _link(S, shrink, S_begin, S_end, head, at, segments, K * V, OF_S, STATE, FINAL)
    else:
        at -= (K * V + BLOCK - 1) // BLOCK * BLOCK
        _link(z, shrink, z_begin, z_end, head, at, segments, K, OF_Z, STATE, FINAL)
