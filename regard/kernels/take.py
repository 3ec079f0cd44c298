"""Vectors of a head taken by index, and added up by index: each is the other's gradient.

PyTorch's kernels give each vector, 128 bytes of a head, a block of threads, and add in the dtype of the vectors.
Those in Triton move many at a time, read heads where they lie, and add in float32. Their sums have no fixed order:
PyTorch's run where deterministic algorithms are asked for.
"""

from typing import Any

import torch
from torch import Tensor

from regard.kernels.autograd import Function, refuse_second_derivative
from regard.kernels.choose import DTYPES, use_triton

WIDEST = 512


def take_per_head(x: Tensor, at: Tensor) -> Tensor:
    """x [B, H, N, D] at the tokens [B, H, ...]: [B, H, ..., D]"""
    if _in_triton(x):
        return _Take.apply(x, at.flatten(2)).view(*at.shape, x.shape[3])
    return x.reshape(-1, x.shape[3]).index_select(0, _flat(at, x.shape[2])).view(*at.shape, x.shape[3])


def add_per_head(y: Tensor, at: Tensor, N: int) -> Tensor:
    """The sum of y [B, H, n, D] over the vectors with one index of at [B, H, n]: [B, H, N, D]"""
    if _in_triton(y):
        return _Add.apply(y, at, N)
    B, H, _, D = y.shape
    return y.new_zeros(B * H * N, D).index_add(0, _flat(at, N), y.reshape(-1, D)).view(B, H, N, D)


def _flat(at: Tensor, N: int) -> Tensor:
    B, H = at.shape[:2]
    return (at + N * torch.arange(B * H, device=at.device).view(B, H, *[1] * (at.dim() - 2))).flatten()


def _in_triton(x: Tensor) -> bool:
    refusal = None
    if x.dtype not in DTYPES:
        refusal = f"vectors are {x.dtype}"
    elif x.shape[-1] > WIDEST:
        refusal = f"vectors are wider than {WIDEST}"
    elif torch.compiler.is_compiling():
        refusal = "torch.compile makes kernels of its own in its place"
    elif torch.are_deterministic_algorithms_enabled():
        refusal = "its sums have no fixed order, and deterministic algorithms are asked for"
    if refusal is not None and x.dtype not in DTYPES:
        # indices are taken too, and float64 in references: nothing that anyone would choose a kernel for
        return False
    return use_triton("take", x, refusal=refusal, second_axis=x.shape[0] * x.shape[1])


class _Take(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Tensor) -> Tensor:
        from regard.kernels import picks_triton

        ctx.save_for_backward(at)
        ctx.N = x.shape[2]
        return picks_triton.take(x, at)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from regard.kernels import picks_triton

        refuse_second_derivative()
        (at,) = ctx.saved_tensors
        return picks_triton.add(grad, at, ctx.N), None


class _Add(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, at: Tensor, N: int) -> Tensor:
        from regard.kernels import picks_triton

        ctx.save_for_backward(at)
        return picks_triton.add(y, at, N)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from regard.kernels import picks_triton

        refuse_second_derivative()
        return picks_triton.take(grad, *ctx.saved_tensors), None, None
