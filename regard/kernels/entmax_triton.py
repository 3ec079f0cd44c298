"""entmax.py in Triton."""

import torch
import triton
from torch import Tensor

from regard.kernels.entmax_triton_kernels import forward_kernel, keys_kernel, queries_kernel
from regard.kernels.runs import empty_like_heads

STEPS = 24  # of Newton's at most: about log2(keys) for alpha near 2, fewer below


def forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, first: Tensor, count: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, H, T, E], and of each query the threshold t and the sum of the weights, which is one but for rounding."""
    (B, H, T, _), E = q.shape, v.shape[3]
    o = empty_like_heads(q, E)
    t, total = (torch.empty(B, H, T, dtype=torch.float32, device=q.device) for _ in range(2))
    sizes = _sizes(q, v, causal)
    with torch.cuda.device_of(q):
        forward_kernel[(triton.cdiv(T, sizes["ROWS"]), B * H)](
            q, k, v, beta, first, count, o, t, total,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3],
            H, T, k.shape[2], scale, **sizes, STEPS=STEPS,
        )  # fmt: skip
    return o, t, total


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    first: Tensor,
    count: Tensor,
    t: Tensor,
    total: Tensor,
    causal: bool,
    scale: float,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and, where it learns, of beta."""
    (B, H, T, _), S, sizes = q.shape, k.shape[2], _sizes(q, v, causal)
    dq, dk, dv = (empty_like_heads(x, x.shape[3]) for x in (q, k, v))
    tiles, means = triton.cdiv(T, sizes["ROWS"]), torch.empty_like(t)
    of_beta = torch.empty(B, H, tiles, dtype=torch.float32, device=q.device)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad.stride()[:3])
    with torch.cuda.device_of(q):
        queries_kernel[(tiles, B * H)](
            q, k, v, grad, beta, first, count, t, total, means, dq, of_beta if learns else None,
            *strides, *dq.stride()[:3], H, T, S, scale, **sizes,
        )  # fmt: skip
        # fewer keys than in the other kernels: two sums of them take registers
        sizes |= {"KEYS": 32}
        keys_kernel[(triton.cdiv(S, 32), B * H)](
            q, k, v, grad, beta, first, count, t, total, means, dk, dv,
            *strides, *dk.stride()[:3], *dv.stride()[:3], H, T, S, scale, **sizes,
        )  # fmt: skip
    return dq, dk, dv, of_beta.sum((0, 2))


def _sizes(q: Tensor, v: Tensor, causal: bool) -> dict[str, int]:
    D, E = q.shape[3], v.shape[3]
    wide = q.dtype == torch.float32
    return {
        "D": D,
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
        "E": E,
        "BLOCK_E": max(16, triton.next_power_of_2(E)),
        "CAUSAL": causal,
        "ROWS": 32 if wide else 64,
        "KEYS": 32 if wide or max(D, E) > 64 else 64,
    }
