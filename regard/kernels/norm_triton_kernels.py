"""The kernels of norm_triton.py."""

import triton.language as tl

from regard.kernels.jit_triton import jit


@jit
def forward_kernel(x, y, scale, x_b, x_h, x_t, H, T, epsilon, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
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


@jit
def backward_kernel(
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
