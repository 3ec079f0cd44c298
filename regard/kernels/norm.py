"""Vectors brought to mean 0 and variance 1: a layer norm without parameters, for vectors as short as a head is wide.

PyTorch's kernel gives each vector a block of threads, which short ones leave idle. O(D) for each vector.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.autograd import Function, refuse_second_derivative
from regard.kernels.choose import use_triton

WIDEST = 256


def norm(x: Tensor, epsilon: float) -> Tensor:
    """[B, H, T, D] -> [B, H, T, D], over the last axis."""
    refusal = f"vectors are wider than {WIDEST}" if x.shape[-1] > WIDEST else None
    takes = not torch.compiler.is_compiling() and x.dim() == 4
    if takes and use_triton("norm", x, refusal=refusal, second_axis=x.shape[0] * x.shape[1]):
        return _Norm.apply(x, epsilon)
    return F.layer_norm(x, x.shape[-1:], eps=epsilon)


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: float) -> Tensor:
        from regard.kernels import norm_triton

        y, scale = norm_triton.forward(x, epsilon)
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        from regard.kernels import norm_triton

        refuse_second_derivative()
        return norm_triton.backward(grad, *ctx.saved_tensors), None
