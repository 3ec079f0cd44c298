"""Attention of short rows by random features in Triton: one kernel forward, one backward, all pairs in registers.

    o_i = sum_j a_ij v_j / sum_j a_ij    a_ij = phi(q_i) . phi(k_j)    phi(x)_r = exp(w_r . x' - |x'|^2 / 2)

with x' = scale x. What sums of features are to long rows, the products of all pairs are to short ones: the same
function in one tile, with neither features nor sums in memory. Features are relative to the largest of their row, so
that none overflows; the maxima cancel and are constants in the gradient. Letters and precision are those of
random_features_triton.py.
"""

# Triton's compiler reads the kernels' bodies, in which types are not those of Python.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from regard.kernels.autograd import Function, refuse_second_derivative
from regard.kernels.jit_triton import jit
from regard.kernels.random_features_triton_kernels import load_directions, products
from regard.kernels.rows_triton import load_rows, store_rows
from regard.kernels.scan_triton_cut import empty, power_of_two, rows, strides
from regard.kernels.scan_triton_tiles import exp


def attend(q: Tensor, k: Tensor, v: Tensor, W: Tensor, scale: float, real: Tensor | None, causal: bool) -> Tensor:
    """q [B, H, T, D], k [B, H, S, D], v [B, H, S, E], W [R, D] -> [B, H, T, E] in the dtype of v. Keys are left out
    where `real` [B, S] is False; queries without keys give 0."""
    return _Attend.apply(q, k, v, W, scale, real, causal)


class _Attend(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, W: Tensor, scale: float, real: Tensor | None, causal: bool
    ) -> Tensor:
        q, k, v, W = rows(q), rows(k), rows(v), W.contiguous()
        real = None if real is None else real.contiguous()
        (B, H, T, _), S = q.shape, k.shape[2]
        o = empty(q, (B, T, H, v.shape[3]), v.dtype).transpose(1, 2)
        tops = empty(q, (B, H, T)), empty(q, (B, H, S)), empty(q, (B, H, T))
        options = _options(q, k, v, W, real, causal)
        with torch.cuda.device_of(q):
            forward_kernel[(B * H,)](
                q, k, v, W, real, o, *tops, *(n for x in (q, k, v, o) for n in strides(x)), T, S, scale, **options
            )
        ctx.save_for_backward(q, k, v, W, real, *tops)
        ctx.scale, ctx.options = scale, options
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        q, k, v, W, real, *tops = ctx.saved_tensors
        grad = rows(grad)
        dq, dk, dv = (
            empty(x, (len(x), x.shape[2], x.shape[1], x.shape[3]), x.dtype).transpose(1, 2) for x in (q, k, v)
        )
        with torch.cuda.device_of(q):
            backward_kernel[(q.shape[0] * q.shape[1],)](
                q, k, v, W, real, *tops, grad, dq, dk, dv,
                *(n for x in (q, k, v, grad, dq, dk, dv) for n in strides(x)),
                q.shape[2], k.shape[2], ctx.scale, **ctx.options,
            )  # fmt: skip
        return dq, dk, dv, None, None, None, None


def _options(q: Tensor, k: Tensor, v: Tensor, W: Tensor, real: Tensor | None, causal: bool) -> dict[str, Any]:
    narrow = q.dtype == torch.bfloat16
    D, E, R = q.shape[3], v.shape[3], len(W)
    sizes = {"H": q.shape[1], "D": D, "BD": power_of_two(D), "E": E, "BE": power_of_two(E), "R": R}
    # of twice as many features at a time the backward pass does not fit in registers
    tiles = {"BT": power_of_two(q.shape[2]), "BS": power_of_two(k.shape[2]), "BR": 32 if narrow else 16}
    kinds = {"CAUSAL": causal, "RAGGED": real is not None, "NARROW": narrow, "SPLIT": W.dtype != torch.bfloat16}
    return sizes | tiles | kinds | {"num_warps": 4 if narrow else 8, "num_stages": 1}


@jit
def _product(x, y, NARROW: tl.constexpr):
    """x y in float32, of factors rounded to bfloat16 where rows are."""
    if NARROW:
        product = tl.dot(x.to(tl.bfloat16), y.to(tl.bfloat16))
    else:
        product = tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="ieee")
    return product


@jit
def _half(row, scale):
    """|x'|^2 / 2 of each row."""
    row = row.to(tl.float32) * scale
    return tl.sum(row * row, 1) * 0.5


@jit
def _logits(row, half, weight, rest, r, scale, R: tl.constexpr, NARROW: tl.constexpr, SPLIT: tl.constexpr):
    logits = products(row, weight, rest, NARROW, SPLIT) * scale - half[:, None]
    return tl.where((r < R)[None, :], logits, float("-inf"))


@jit
def _pairs(
    query, key, half_q, half_k, top_q, top_k, W, d, scale, D: tl.constexpr, R: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr, NARROW: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """a_ij [BT, BS] of all pairs, relative to the largest features of their rows."""
    pairs = tl.zeros([BT, BS], tl.float32)
    for begin in range(0, R, BR):
        r = begin + tl.arange(0, BR)
        weight, rest = load_directions(W, d, r, D, R, NARROW, SPLIT)
        of_q = exp(_logits(query, half_q, weight, rest, r, scale, R, NARROW, SPLIT) - top_q[:, None])
        of_k = exp(_logits(key, half_k, weight, rest, r, scale, R, NARROW, SPLIT) - top_k[:, None])
        pairs += _product(of_q, tl.trans(of_k), NARROW)
    return pairs


@jit
def _seen(real, b, T, S, BT: tl.constexpr, BS: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr):
    """Which pairs [BT, BS] there are."""
    i, j = tl.arange(0, BT), tl.arange(0, BS)
    here = j < S
    if RAGGED:
        here = here & (tl.load(real + b * S + j, mask=here, other=0) != 0)
    seen = (i < T)[:, None] & here[None, :]
    if CAUSAL:
        seen = seen & (j[None, :] <= i[:, None])
    return seen


@jit
def forward_kernel(
    q, k, v, W, real, o, tops_q, tops_k, norms,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, T, S, scale,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, R: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, NARROW: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """o, the largest logits of queries and of keys, and the logarithms of the denominators."""
    one = tl.program_id(0).to(tl.int64)
    b, h, i, j, d = one // H, one % H, tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, BD)
    query = load_rows(q + b * q_b + h * q_h, i, T, q_t, D, BD)
    key = load_rows(k + b * k_b + h * k_h, j, S, k_t, D, BD)
    half_q, half_k = _half(query, scale), _half(key, scale)
    top_q, top_k = tl.full([BT], float("-inf"), tl.float32), tl.full([BS], float("-inf"), tl.float32)
    for begin in range(0, R, BR):
        r = begin + tl.arange(0, BR)
        weight, rest = load_directions(W, d, r, D, R, NARROW, SPLIT)
        top_q = tl.maximum(top_q, tl.max(_logits(query, half_q, weight, rest, r, scale, R, NARROW, SPLIT), 1))
        top_k = tl.maximum(top_k, tl.max(_logits(key, half_k, weight, rest, r, scale, R, NARROW, SPLIT), 1))
    pairs = _pairs(query, key, half_q, half_k, top_q, top_k, W, d, scale, D, R, BT, BS, BR, NARROW, SPLIT)
    seen = _seen(real, b, T, S, BT, BS, CAUSAL, RAGGED)
    base = tl.max(tl.where(seen, top_k[None, :], float("-inf")), 1)
    base = tl.where(base == float("-inf"), 0.0, base)
    pairs = tl.where(seen, pairs * exp(tl.minimum(top_k[None, :] - base[:, None], 0.0)), 0.0)
    total = tl.sum(pairs, 1)
    some = total > 1e-30
    total = tl.where(some, total, 1.0)
    value = load_rows(v + b * v_b + h * v_h, j, S, v_t, E, BE)
    out = _product(tl.where(some[:, None], pairs / total[:, None], 0.0), value, NARROW)
    store_rows(o + b * o_b + h * o_h, i, T, o_t, out, E, BE)
    tl.store(tops_q + one * T + i, top_q, mask=i < T)
    tl.store(tops_k + one * S + j, top_k, mask=j < S)
    tl.store(norms + one * T + i, tl.where(some, base + tl.log(total), float("inf")), mask=i < T)


@jit
def backward_kernel(
    q, k, v, W, real, tops_q, tops_k, norms, grad, dq, dk, dv,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
    dq_b, dq_h, dq_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, T, S, scale,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, R: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, NARROW: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """With G the gradient of the pairs a_ij, the logits of a query have phi(q) (G phi(k)), those of a key
    phi(k) (G^T phi(q)); dx = scale (s W - scale x sum_r s_r) for the gradients s of the logits of a row."""
    one = tl.program_id(0).to(tl.int64)
    b, h, i, j, d = one // H, one % H, tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, BD)
    query = load_rows(q + b * q_b + h * q_h, i, T, q_t, D, BD)
    key = load_rows(k + b * k_b + h * k_h, j, S, k_t, D, BD)
    half_q, half_k = _half(query, scale), _half(key, scale)
    top_q = tl.load(tops_q + one * T + i, mask=i < T, other=0.0)
    top_k = tl.load(tops_k + one * S + j, mask=j < S, other=0.0)
    pairs = _pairs(query, key, half_q, half_k, top_q, top_k, W, d, scale, D, R, BT, BS, BR, NARROW, SPLIT)
    norm = tl.load(norms + one * T + i, mask=i < T, other=float("inf"))
    seen = _seen(real, b, T, S, BT, BS, CAUSAL, RAGGED)
    share = exp(tl.where(seen, top_k[None, :] - norm[:, None], float("-inf")))
    pairs = pairs * share
    out = load_rows(grad + b * g_b + h * g_h, i, T, g_t, E, BE)
    value = load_rows(v + b * v_b + h * v_h, j, S, v_t, E, BE)
    store_rows(dv + b * dv_b + h * dv_h, j, S, dv_t, _product(tl.trans(pairs), out, NARROW), E, BE)
    slope = _product(out, tl.trans(value), NARROW)
    slope = share * (slope - tl.sum(pairs * slope, 1)[:, None])
    acc_q, acc_k = tl.zeros([BT, BD], tl.float32), tl.zeros([BS, BD], tl.float32)
    total_q, total_k = tl.zeros([BT], tl.float32), tl.zeros([BS], tl.float32)
    for begin in range(0, R, BR):
        r = begin + tl.arange(0, BR)
        weight, rest = load_directions(W, d, r, D, R, NARROW, SPLIT)
        of_q = exp(_logits(query, half_q, weight, rest, r, scale, R, NARROW, SPLIT) - top_q[:, None])
        of_k = exp(_logits(key, half_k, weight, rest, r, scale, R, NARROW, SPLIT) - top_k[:, None])
        slope_q = of_q * _product(slope, of_k, NARROW)
        slope_k = of_k * _product(tl.trans(slope), of_q, NARROW)
        total_q += tl.sum(slope_q, 1)
        total_k += tl.sum(slope_k, 1)
        acc_q += _product(slope_q, tl.trans(weight), NARROW)
        acc_k += _product(slope_k, tl.trans(weight), NARROW)
    acc_q = (acc_q - query.to(tl.float32) * (total_q * scale)[:, None]) * scale
    acc_k = (acc_k - key.to(tl.float32) * (total_k * scale)[:, None]) * scale
    store_rows(dq + b * dq_b + h * dq_h, i, T, dq_t, acc_q, D, BD)
    store_rows(dk + b * dk_b + h * dk_h, j, S, dk_t, acc_k, D, BD)
