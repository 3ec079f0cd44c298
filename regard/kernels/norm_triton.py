"""norm.py in Triton: many vectors to a program, read and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # vectors at a time


def forward(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The normed vectors, contiguous, and what each was multiplied by, [B, H, T] in float32."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    B, H, T, D = x.shape
    y = torch.empty((B, H, T, D), dtype=x.dtype, device=x.device)
    scale = torch.empty((B, H, T), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _forward[(triton.cdiv(T, ROWS), B * H)](
            x, y, scale, *x.stride()[:3], H, T, epsilon, D=D, BLOCK=triton.next_power_of_2(D), ROWS=ROWS
        )
    return y, scale


def backward(grad: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    B, H, T, D = y.shape
    # in memory order [B, T, H, D], as heads are split from a projection
    out = torch.empty((B, T, H, D), dtype=y.dtype, device=y.device).transpose(1, 2)
    with torch.cuda.device_of(y):
        _backward[(triton.cdiv(T, ROWS), B * H)](
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


@triton.jit
def _forward(x, y, scale, x_b, x_h, x_t, H, T, epsilon, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    rows, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (rows < T)[:, None] & (d < D)[None, :]
    at = x + head // H * x_b + head % H * x_h + rows[:, None] * x_t + d[None, :]
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    away = tl.where((d < D)[None, :], value - (tl.sum(value, 1) / D)[:, None], 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(away * away, 1) / D + epsilon)
    place = (head * T + rows)[:, None] * D + d[None, :]
    tl.store(y + place, (away * factor[:, None]).to(y.dtype.element_ty), mask=inside)
    tl.store(scale + head * T + rows, factor, mask=rows < T)


@triton.jit
def _backward(
    grad,
    y,
    scale,
    out,
    grad_b,
    grad_h,
    grad_t,
    out_b,
    out_h,
    out_t,
    H,
    T,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    b, h = head // H, head % H
    rows, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (rows < T)[:, None] & (d < D)[None, :]
    g = tl.load(grad + b * grad_b + h * grad_h + rows[:, None] * grad_t + d[None, :], mask=inside, other=0.0)
    g = g.to(tl.float32)
    normed = tl.load(y + (head * T + rows)[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(scale + head * T + rows, mask=rows < T, other=0.0)
    mean, along = tl.sum(g, 1) / D, tl.sum(g * normed, 1) / D
    dx = (g - mean[:, None] - normed * along[:, None]) * factor[:, None]
    tl.store(out + b * out_b + h * out_h + rows[:, None] * out_t + d[None, :], dx.to(out.dtype.element_ty), mask=inside)
