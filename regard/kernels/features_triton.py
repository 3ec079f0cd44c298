"""Random features in Triton: exp(w_r . x - |x|^2 / 2 - top) of rows x, without logits in memory.

x [B, H, T, D] is multiplied by `scale` first, W [R, D]. `top` [B, H, T] keeps exp from overflowing and is a constant in
the gradient: the largest logit of the row itself, or what the caller has made of `row_maxima`. Logits are float32:
bfloat16 rows meet W as two bfloat16 parts, other dtypes float32.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from regard.kernels.autograd import Function, refuse_second_derivative
from regard.kernels.features_triton_kernels import exp_features_kernel, rows_gradient_kernel
from regard.kernels.scan_triton_cut import empty, power_of_two, rows, strides


def row_maxima(x: Tensor, W: Tensor, scale: float) -> Tensor:
    """The largest logit of each row, [B, H, T]."""
    B, H, T, _ = x.shape
    x, top = rows(x.detach()), empty(x, (B, H, T))
    _launch(x, W, scale, top, None, own=True)
    return top


def exp_features(x: Tensor, W: Tensor, scale: float, top: Tensor | None = None) -> Tensor:
    """[B, H, T, R] in the dtype of x; without `top` relative to the largest of each row."""
    return _Features.apply(x, W, scale, top)


class _Features(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, scale: float, top: Tensor | None) -> Tensor:
        x, W = rows(x), W.contiguous()
        out = _forward(x, W, scale, top)
        ctx.save_for_backward(x, W, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_derivative()
        x, W, out = ctx.saved_tensors
        return _backward(x, W, ctx.scale, out, rows(grad)), None, None, None


def _forward(x: Tensor, W: Tensor, scale: float, top: Tensor | None) -> Tensor:
    B, H, T, _ = x.shape
    out = empty(x, (B, T, H, len(W)), x.dtype).transpose(1, 2)
    _launch(x, W, scale, empty(x, (B, H, T)) if top is None else top.contiguous(), out, own=top is None)
    return out


def _launch(x: Tensor, W: Tensor, scale: float, top: Tensor, out: Tensor | None, *, own: bool) -> None:
    B, H, T, D = x.shape
    sizes = {"H": H, "D": D, "BD": power_of_two(D), "R": len(W), "BR": power_of_two(len(W))}
    with torch.cuda.device_of(x):
        exp_features_kernel[(H * triton.cdiv(T, 32), B)](
            x, W, top, out, *strides(x), T, scale,
            **sizes, OWN=own, NARROW=x.dtype == torch.bfloat16, C=32, num_warps=4, num_stages=1,
        )  # fmt: skip


def _backward(x: Tensor, W: Tensor, scale: float, out: Tensor, grad: Tensor) -> Tensor:
    B, H, T, D = x.shape
    dx = empty(x, (B, T, H, D), x.dtype).transpose(1, 2)
    sizes = {"H": H, "D": D, "BD": power_of_two(D), "R": len(W), "BR": min(64, power_of_two(len(W)))}
    with torch.cuda.device_of(x):
        rows_gradient_kernel[(H * triton.cdiv(T, 64), B)](
            x, W, out, grad, dx, *strides(x), *strides(grad), T, scale,
            **sizes, NARROW=x.dtype == torch.bfloat16, C=64, num_warps=4, num_stages=2,
        )  # fmt: skip
    return dx
