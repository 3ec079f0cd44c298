"""summaries.py in Triton."""

# Triton's compiler reads the kernels' bodies, in which types are not those of Python.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.jit_triton import jit
from regard.kernels.runs import empty_like_heads


def forward(k: Tensor, v: Tensor, p: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    (B, H, T, D), r = k.shape, p.shape[3]
    n = T // chunk
    made = [k.new_empty(B, n * r, H, D).transpose(1, 2) for _ in range(2)]
    with torch.cuda.device_of(k):
        forward_kernel[(n, B * H)](
            k, v, p, *made, *k.stride()[:3], *v.stride()[:3], *p.stride()[:3], *made[0].stride()[:3],
            H, **_sizes(D, r, chunk),
        )  # fmt: skip
    return made[0], made[1]


def backward(of_k: Tensor, of_v: Tensor, k: Tensor, v: Tensor, p: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    (B, H, T, D), r = k.shape, p.shape[3]
    n = T // chunk
    dk, dv, dp = (empty_like_heads(x, x.shape[3]) for x in (k, v, p))
    for x in (dk, dv, dp):
        # tokens behind the last whole chunk are in no sum
        x[:, :, n * chunk :] = 0
    with torch.cuda.device_of(k):
        backward_kernel[(n, B * H)](
            k, v, p, of_k, of_v, dk, dv, dp, *k.stride()[:3], *v.stride()[:3], *p.stride()[:3],
            *of_k.stride()[:3], *of_v.stride()[:3], *dk.stride()[:3], *dp.stride()[:3], H, **_sizes(D, r, chunk),
        )  # fmt: skip
    return dk, dv, dp


def _sizes(D: int, r: int, chunk: int) -> dict[str, int]:
    sizes = {"D": D, "R": r, "C": chunk}
    return sizes | {f"BLOCK_{name}": max(16, triton.next_power_of_2(size)) for name, size in sizes.items()}


@jit
def _shares(p, rows, stride, R: tl.constexpr, C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """The softmax over the places of a chunk, [C, R], zeros beyond."""
    at, column = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    inside = (at < C)[:, None] & (column < R)[None, :]
    logits = tl.load(p + rows[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    logits = tl.where((at < C)[:, None], logits, float("-inf"))
    weights = tl.exp(logits - tl.max(logits, 0)[None, :])
    return tl.where(inside, weights / tl.sum(weights, 0)[None, :], 0.0), inside


@jit
def forward_kernel(
    k, v, p, sums_k, sums_v, k_b, k_h, k_t, v_b, v_h, v_t, p_b, p_h, p_t, s_b, s_h, s_t, H,
    D: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    at, d, r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    rows = chunk * C + at
    shares, _ = _shares(p + b * p_b + h * p_h, rows, p_t, R, C, BLOCK_R, BLOCK_C)
    inside = (at < C)[:, None] & (d < D)[None, :]
    to = b * s_b + h * s_h + (chunk * R + r)[:, None] * s_t + d[None, :]
    fits = (r < R)[:, None] & (d < D)[None, :]
    key = tl.load(k + b * k_b + h * k_h + rows[:, None] * k_t + d[None, :], mask=inside, other=0.0)
    weights = tl.trans(shares).to(key.dtype)
    tl.store(sums_k + to, tl.dot(weights, key, input_precision="ieee").to(key.dtype), mask=fits)
    value = tl.load(v + b * v_b + h * v_h + rows[:, None] * v_t + d[None, :], mask=inside, other=0.0)
    tl.store(sums_v + to, tl.dot(weights, value, input_precision="ieee").to(key.dtype), mask=fits)


@jit
def backward_kernel(
    k, v, p, of_k, of_v, dk, dv, dp, k_b, k_h, k_t, v_b, v_h, v_t, p_b, p_h, p_t, gk_b, gk_h, gk_t, gv_b, gv_h, gv_t,
    d_b, d_h, d_t, dp_b, dp_h, dp_t, H,
    D: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    at, d, r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    rows, slots = chunk * C + at, chunk * R + r
    shares, inside_p = _shares(p + b * p_b + h * p_h, rows, p_t, R, C, BLOCK_R, BLOCK_C)
    inside = (at < C)[:, None] & (d < D)[None, :]
    fits = (r < R)[:, None] & (d < D)[None, :]
    key = tl.load(k + b * k_b + h * k_h + rows[:, None] * k_t + d[None, :], mask=inside, other=0.0)
    grad = tl.load(of_k + b * gk_b + h * gk_h + slots[:, None] * gk_t + d[None, :], mask=fits, other=0.0)
    grad = grad.to(key.dtype)
    to = b * d_b + h * d_h + rows[:, None] * d_t + d[None, :]
    weights = shares.to(key.dtype)
    tl.store(dk + to, tl.dot(weights, grad, input_precision="ieee").to(key.dtype), mask=inside)
    along = tl.dot(key, tl.trans(grad), input_precision="ieee")
    value = tl.load(v + b * v_b + h * v_h + rows[:, None] * v_t + d[None, :], mask=inside, other=0.0)
    grad = tl.load(of_v + b * gv_b + h * gv_h + slots[:, None] * gv_t + d[None, :], mask=fits, other=0.0)
    grad = grad.to(key.dtype)
    tl.store(dv + to, tl.dot(weights, grad, input_precision="ieee").to(key.dtype), mask=inside)
    along += tl.dot(value, tl.trans(grad), input_precision="ieee")
    slope = shares * (along - tl.sum(shares * along, 0)[None, :])
    to = dp + b * dp_b + h * dp_h + rows[:, None] * dp_t + r[None, :]
    tl.store(to, slope.to(dp.dtype.element_ty), mask=inside_p)
