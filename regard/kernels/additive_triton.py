"""additive.py in Triton."""

# Triton's compiler reads the kernels' bodies, in which types are not those of Python.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.jit_triton import jit
from regard.kernels.runs import empty_like_heads


def forward(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    (B, H, T, D), S = q.shape, k.shape[2]
    out = torch.empty(B, H, T, S, dtype=torch.float32, device=q.device)
    sizes = _sizes(D)
    with torch.cuda.device_of(q):
        scores_kernel[(triton.cdiv(T, sizes["ROWS"]), triton.cdiv(S, sizes["KEYS"]), B * H)](
            q, k, w, out, *q.stride()[:3], *k.stride()[:3], H, T, S, **sizes
        )
    return out


def backward(grad: Tensor, q: Tensor, k: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (B, H, T, D), S, sizes = q.shape, k.shape[2], _sizes(q.shape[3])
    dq, dk = (empty_like_heads(x, D) for x in (q, k))
    tiles = triton.cdiv(T, sizes["ROWS"])
    dw = torch.empty(B, H, tiles, D, dtype=torch.float32, device=q.device)
    strides = (*q.stride()[:3], *k.stride()[:3])
    with torch.cuda.device_of(q):
        queries_kernel[(tiles, B * H)](q, k, w, grad, dq, dw, *strides, *dq.stride()[:3], H, T, S, **sizes)
        keys_kernel[(triton.cdiv(S, sizes["KEYS"]), B * H)](
            q, k, w, grad, dk, *strides, *dk.stride()[:3], H, T, S, **sizes
        )
    return dq, dk, dw.sum((0, 2)).to(w.dtype)


def _sizes(D: int) -> dict[str, int]:
    # 8,192 numbers of pairs at a time, 64 to a thread
    block = max(16, triton.next_power_of_2(D))
    return {"D": D, "BLOCK": block, "ROWS": 16, "KEYS": max(2, 512 // block)}


@jit
def _load(x, at, limit, stride, D: tl.constexpr, BLOCK: tl.constexpr):
    """Rows [n] of width D in float32, zeros beyond."""
    d = tl.arange(0, BLOCK)
    inside = (at < limit)[:, None] & (d < D)[None, :]
    return tl.load(x + at.to(tl.int64)[:, None] * stride + d[None, :], mask=inside, other=0.0).to(tl.float32)


@jit
def _hidden(query, key):
    """tanh(q + k) of each pair, [rows, keys, D]"""
    x = query[:, None, :] + key[None, :, :]
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@jit
def scores_kernel(
    q, k, w, out, q_b, q_h, q_t, k_b, k_h, k_t, H, T, S,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    one = tl.program_id(2).to(tl.int64)
    b, h = one // H, one % H
    i, j = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    d = tl.arange(0, BLOCK)
    weight = tl.load(w + h * D + d, mask=d < D, other=0.0).to(tl.float32)
    query = _load(q + b * q_b + h * q_h, i, T, q_t, D, BLOCK)
    key = _load(k + b * k_b + h * k_h, j, S, k_t, D, BLOCK)
    logits = tl.sum(_hidden(query, key) * weight[None, None, :], 2)
    to = out + (one * T + i.to(tl.int64))[:, None] * S + j[None, :]
    tl.store(to, logits, mask=(i < T)[:, None] & (j < S)[None, :])


@jit
def queries_kernel(
    q, k, w, grad, dq, dw, q_b, q_h, q_t, k_b, k_h, k_t, d_b, d_h, d_t, H, T, S,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dq, and what w gets of a tile of queries."""
    one = tl.program_id(1).to(tl.int64)
    b, h = one // H, one % H
    i, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    weight = tl.load(w + h * D + d, mask=d < D, other=0.0).to(tl.float32)
    query = _load(q + b * q_b + h * q_h, i, T, q_t, D, BLOCK)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    of_w = tl.zeros([BLOCK], tl.float32)
    for j0 in range(0, S, KEYS):
        j = j0 + tl.arange(0, KEYS)
        key = _load(k + b * k_b + h * k_h, j, S, k_t, D, BLOCK)
        at = grad + (one * T + i.to(tl.int64))[:, None] * S + j[None, :]
        g = tl.load(at, mask=(i < T)[:, None] & (j < S)[None, :], other=0.0).to(tl.float32)
        hidden = _hidden(query, key)
        acc += tl.sum(g[:, :, None] * (1.0 - hidden * hidden), 1)
        of_w += tl.sum(tl.sum(g[:, :, None] * hidden, 1), 0)
    inside = (i < T)[:, None] & (d < D)[None, :]
    to = dq + b * d_b + h * d_h + i.to(tl.int64)[:, None] * d_t + d[None, :]
    tl.store(to, (acc * weight[None, :]).to(dq.dtype.element_ty), mask=inside)
    tl.store(dw + (one * tl.num_programs(0) + tl.program_id(0)) * D + d, of_w, mask=d < D)


@jit
def keys_kernel(
    q, k, w, grad, dk, q_b, q_h, q_t, k_b, k_h, k_t, d_b, d_h, d_t, H, T, S,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    one = tl.program_id(1).to(tl.int64)
    b, h = one // H, one % H
    j, d = tl.program_id(0) * KEYS + tl.arange(0, KEYS), tl.arange(0, BLOCK)
    weight = tl.load(w + h * D + d, mask=d < D, other=0.0).to(tl.float32)
    key = _load(k + b * k_b + h * k_h, j, S, k_t, D, BLOCK)
    acc = tl.zeros([KEYS, BLOCK], tl.float32)
    for i0 in range(0, T, ROWS):
        i = i0 + tl.arange(0, ROWS)
        query = _load(q + b * q_b + h * q_h, i, T, q_t, D, BLOCK)
        at = grad + (one * T + i.to(tl.int64))[:, None] * S + j[None, :]
        g = tl.load(at, mask=(i < T)[:, None] & (j < S)[None, :], other=0.0).to(tl.float32)
        hidden = _hidden(query, key)
        acc += tl.sum(g[:, :, None] * (1.0 - hidden * hidden), 0)
    inside = (j < S)[:, None] & (d < D)[None, :]
    to = dk + b * d_b + h * d_h + j.to(tl.int64)[:, None] * d_t + d[None, :]
    tl.store(to, (acc * weight[None, :]).to(dk.dtype.element_ty), mask=inside)
