"""Random features in Triton, without logits or angles in memory, in the dtype of the rows.

x [B, H, T, D] are rows. `exp_features` is exp(w_r . x' - |x'|^2 / 2 - top) with x' = scale x and W [R, D]; `top`
[B, H, T] keeps exp from overflowing and is a constant in the gradient: the largest logit of the row itself, or what the
caller has made of `row_maxima`. `trigonometric_features` is R^(-1/2) [sin(w_r . x / |x|), cos(w_r . x / |x|)] with W
[H, R, D], which has a gradient. Logits and angles are float32: bfloat16 rows meet W as it is where it is bfloat16 too,
and otherwise as two bfloat16 parts; other dtypes meet it in float32.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from regard.kernels import random_features_triton_kernels as kernels
from regard.kernels.autograd import Function, refuse_second_derivative
from regard.kernels.scan_triton_cut import blocks_each, empty, power_of_two, rows, strides


def row_maxima(x: Tensor, W: Tensor, scale: float) -> Tensor:
    """The largest logit of each row, [B, H, T]."""
    B, H, T, _ = x.shape
    x, top = rows(x.detach()), empty(x, (B, H, T))
    _exp_launch(x, W.contiguous(), scale, top, None, own=True)
    return top


def exp_features(x: Tensor, W: Tensor, scale: float, top: Tensor | None = None) -> Tensor:
    """[B, H, T, R] in the dtype of x; without `top` relative to the largest of each row."""
    return _ExpFeatures.apply(x, W, scale, top)


def trigonometric_features(x: Tensor, W: Tensor, gate: Tensor | None = None) -> Tensor:
    """[B, H, T, 2 R] in the dtype of x, times sigmoid(-gate) where there is a gate [B, H, T]."""
    return _TrigonometricFeatures.apply(x, W, gate)


class _ExpFeatures(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, scale: float, top: Tensor | None) -> Tensor:
        x, W = rows(x), W.contiguous()
        B, H, T, _ = x.shape
        out = empty(x, (B, T, H, len(W)), x.dtype).transpose(1, 2)
        _exp_launch(x, W, scale, empty(x, (B, H, T)) if top is None else top.contiguous(), out, own=top is None)
        ctx.save_for_backward(x, W, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_derivative()
        x, W, out = ctx.saved_tensors
        (B, H, T, D), R, grad = x.shape, len(W), rows(grad)
        dx = empty(x, (B, T, H, D), x.dtype).transpose(1, 2)
        launch = _launch(x, warps=4, stages=1)
        with torch.cuda.device_of(x):
            kernels.exp_gradient[_grid(x, launch)](
                x, W, out, grad, dx, *strides(x), *strides(grad), T, ctx.scale,
                **_sizes(x, R), BR=min(128, power_of_two(R)), NARROW=x.dtype == torch.bfloat16, **launch,
            )  # fmt: skip
        return dx, None, None, None


class _TrigonometricFeatures(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, gate: Tensor | None) -> Tensor:
        x, W = rows(x), W.contiguous()
        (B, H, T, _), R = x.shape, W.shape[1]
        out, launch = empty(x, (B, T, H, 2 * R), x.dtype).transpose(1, 2), _launch(x, warps=4, stages=2, most=2)
        with torch.cuda.device_of(x):
            kernels.trigonometric_features[_grid(x, launch)](
                x, W, gate, out, *strides(x), *strides(gate), T, R**-0.5,
                **_sizes(x, R), BR=power_of_two(R), **_parts(x, W), **launch,
            )  # fmt: skip
        ctx.save_for_backward(x, W, gate, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        refuse_second_derivative()
        x, W, gate, out = ctx.saved_tensors
        (B, H, T, D), R, grad = x.shape, W.shape[1], rows(grad)
        launch = _launch(x, warps=4, stages=2)
        dx = empty(x, (B, T, H, D), x.dtype).transpose(1, 2)
        dW = empty(x, (triton.cdiv(T, launch["C"] * launch["BLOCKS"]) * B, H, R, D))
        d_gate = None if gate is None else empty(x, (B, H, T))
        with torch.cuda.device_of(x):
            kernels.trigonometric_gradient[_grid(x, launch)](
                x, W, gate, out, grad, dx, dW, d_gate,
                *strides(x), *strides(gate), *strides(grad), T, B,
                **_sizes(x, R), BR=power_of_two(R), NARROW=x.dtype == torch.bfloat16, **launch,
            )  # fmt: skip
        return dx, dW.sum(0).to(W.dtype), None if gate is None or d_gate is None else d_gate.to(gate.dtype)


def _exp_launch(x: Tensor, W: Tensor, scale: float, top: Tensor, out: Tensor | None, *, own: bool) -> None:
    R = len(W)
    launch = _launch(x, warps=4, stages=2) if out is None else _launch(x, warps=8 if R > 128 else 4, stages=3)
    with torch.cuda.device_of(x):
        kernels.exp_features[_grid(x, launch)](
            x, W, top, out, *strides(x), x.shape[2], scale,
            **_sizes(x, R), BR=power_of_two(R), OWN=own, **_parts(x, W), **launch,
        )  # fmt: skip


def _launch(x: Tensor, *, warps: int, stages: int, most: int = 8) -> dict[str, int]:
    """How many rows a program takes, and how wide it is: measured for bfloat16; products of float32 hold more
    registers."""
    if x.dtype != torch.bfloat16:
        return {"C": 16, "BLOCKS": blocks_each(x, 16, most), "num_warps": 8, "num_stages": 1}
    return {"C": 64, "BLOCKS": blocks_each(x, 64, most), "num_warps": warps, "num_stages": stages}


def _grid(x: Tensor, launch: dict[str, int]) -> tuple[int, int]:
    B, H, T, _ = x.shape
    return H * triton.cdiv(T, launch["C"] * launch["BLOCKS"]), B


def _sizes(x: Tensor, R: int) -> dict[str, int]:
    return {"H": x.shape[1], "D": x.shape[3], "BD": power_of_two(x.shape[3]), "R": R}


def _parts(x: Tensor, W: Tensor) -> dict[str, bool]:
    return {"NARROW": x.dtype == torch.bfloat16, "SPLIT": W.dtype != torch.bfloat16}
