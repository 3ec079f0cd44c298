"""pool.py in Triton: tokens are read where they lie, and no window of them is written to memory."""

import torch
import triton
from torch import Tensor

from regard.kernels.pool_triton_kernels import forward_kernel, slots_kernel, tokens_kernel
from regard.kernels.runs import empty_like_heads

ROWS = 32  # slots or tokens at a time


def forward(
    x: Tensor, weight: Tensor | None, end: Tensor | None, kernel: int, stride: int, slots: int
) -> tuple[Tensor, Tensor]:
    """The slots [B, G, slots, D] and the logsumexp of their logits, float32."""
    B, G, T, D = x.shape
    y = x.new_empty(B, slots, G, D).transpose(1, 2)
    lse = x.new_empty(B, G, slots, dtype=torch.float32)
    with torch.cuda.device_of(x):
        forward_kernel[(triton.cdiv(slots, ROWS), B * G)](
            *(x, weight, end, y, lse, *x.stride()[:3], *y.stride()[:3], G, T, slots),
            **_sizes(kernel, stride, D),
        )
    return y, lse


def backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, end: Tensor | None, y: Tensor, lse: Tensor, kernel: int, stride: int
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x and of the weight."""
    (B, G, T, D), slots = x.shape, y.shape[2]
    grad = grad if grad.stride(-1) == 1 or D == 1 else grad.contiguous()
    tiles = triton.cdiv(slots, ROWS)
    shares = lse.new_empty(B, G, slots, kernel)
    of_middle = None if weight is None else lse.new_empty(B, G, slots, D)
    of_weight = None if weight is None else lse.new_empty(B * G * tiles, kernel, D)
    out = empty_like_heads(x, D)
    with torch.cuda.device_of(x):
        slots_kernel[(tiles, B * G)](
            *(x, weight, end, y, lse, grad, shares, of_middle, of_weight),
            *(*x.stride()[:3], *y.stride()[:3], *grad.stride()[:3], G, T, slots),
            **_sizes(kernel, stride, D),
        )
        tokens_kernel[(triton.cdiv(T, ROWS), B * G)](
            *(grad, shares, of_middle, out, *grad.stride()[:3], *out.stride()[:3], G, T, slots),
            **_sizes(kernel, stride, D),
        )
    return out, None if weight is None or of_weight is None else of_weight.sum(0).to(weight.dtype)


def _sizes(kernel: int, stride: int, D: int) -> dict[str, int]:
    block = max(16, triton.next_power_of_2(D))
    return {"KERNEL": kernel, "STRIDE": stride, "LEFT": kernel // 2, "D": D, "BLOCK": block, "ROWS": ROWS}
