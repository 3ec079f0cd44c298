"""norm.py in Triton: many vectors to a program, read and written once."""

import torch
import triton
from torch import Tensor

from regard.kernels.norm_triton_kernels import backward_kernel, forward_kernel

ROWS = 64  # vectors at a time


def forward(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The normed vectors, contiguous, and what each was multiplied by, [B, H, T] in float32."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    B, H, T, D = x.shape
    y = torch.empty((B, H, T, D), dtype=x.dtype, device=x.device)
    scale = torch.empty((B, H, T), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        forward_kernel[(triton.cdiv(T, ROWS), B * H)](
            x, y, scale, *x.stride()[:3], H, T, epsilon, D=D, BLOCK=triton.next_power_of_2(D), ROWS=ROWS
        )
    return y, scale


def backward(grad: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    B, H, T, D = y.shape
    # in memory order [B, T, H, D], as heads are split from a projection
    out = torch.empty((B, T, H, D), dtype=y.dtype, device=y.device).transpose(1, 2)
    with torch.cuda.device_of(y):
        backward_kernel[(triton.cdiv(T, ROWS), B * H)](
            grad,
            y,
            scale,
            out,
            *grad.stride()[:3],
            *out.stride()[:3],
            H,
            T,
            D=D,
            BLOCK=triton.next_power_of_2(D),
            ROWS=ROWS,
        )
    return out
