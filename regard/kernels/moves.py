"""Rows of matrices taken, weighted and added up by index, forward and backward.

Rows x [N, I] go to slots y [S, I]: slot s has row at[s]. Back, row n adds up k slots, those of at[:, n], [k, N], each
times a factor. Both are each other's gradient, so that nothing is scattered and sums have one order, that of k. Where a
mask is False a slot is empty, or a row has no slot: what lies in memory there is not read. With Triton, on a GPU, each
of the three functions is one pass over memory (moves_triton.py).
"""

import os
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

try:
    from regard.kernels import moves_triton
except ImportError:  # no Triton: there is none for a CPU alone
    moves_triton = None
# On request, for they have been interpreted and compiled, but neither run nor timed on a GPU.
TRITON = os.environ.get("REGARD_TRITON") == "1"


def kernels(*tensors: Tensor) -> ModuleType | None:
    """Those in Triton, where they take these; compilers make their own."""
    if not TRITON or moves_triton is None or torch.compiler.is_compiling():
        return None
    return moves_triton if all(x.is_cuda and x.dtype in moves_triton.DTYPES for x in tensors) else None


class Spread(Function):
    """y[s] = x[at[s]] in another dtype, zeros where not `used`; x[n] has gone to back[:, n], where `kept`."""

    @staticmethod
    def forward(ctx, x: Tensor, dtype: torch.dtype, at: Tensor, used: Tensor | None, back: Tensor, kept: Tensor | None):
        ctx.save_for_backward(back, kept)
        ctx.dtype = x.dtype
        return taken(x, at, used, None, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        back, kept = ctx.saved_tensors
        return added(grad, back, kept, None, ctx.dtype), None, None, None, None, None


class Collect(Function):
    """out[n] = sum_c gate[c, n] y[at[c, n]], where `kept`; slot s of y is of pair[s], c N + n, if `used`."""

    @staticmethod
    def forward(ctx, y: Tensor, gate: Tensor, at: Tensor, kept: Tensor | None, pair: Tensor, used: Tensor | None):
        ctx.save_for_backward(y, gate, at, kept, pair, used)
        return added(y, at, kept, gate, y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        y, gate, at, kept, pair, used = ctx.saved_tensors
        of_y = taken(grad, pair % len(grad), used, gate.flatten().index_select(0, pair), y.dtype)
        return of_y, products(y, at, kept, grad, gate.dtype), None, None, None, None


def taken(x: Tensor, at: Tensor, used: Tensor | None, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """factor[s] x[at[s]], [S, I]; zeros where not `used`."""
    if kernel := kernels(x):
        return kernel.taken(x, at, used, factor, dtype)
    if len(x) == 0:
        return x.new_zeros(len(at), x.shape[1], dtype=dtype)
    y = x.to(dtype).index_select(0, at)
    y = y if factor is None else y.mul_(factor[:, None])
    return y if used is None else y.masked_fill_(~used[:, None], 0)


def added(y: Tensor, at: Tensor, kept: Tensor | None, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """sum_c factor[c, n] y[at[c, n]], where `kept`: [N, I]"""
    if kernel := kernels(y):
        return kernel.added(y, at, kept, factor, dtype)
    out = None
    for c in range(len(at)):
        part = _read(y, at[c], None if kept is None else kept[c])
        part = part if factor is None else part.mul_(factor[c, :, None])
        out = part if out is None else out.add_(part)
    return out.to(dtype)


def products(y: Tensor, at: Tensor, kept: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor:
    """y[at[c, n]] . x[n], [k, N]; zeros where not `kept`."""
    if kernel := kernels(y, x):
        return kernel.products(y, at, kept, x, dtype)
    parts = (_read(y, at[c], None if kept is None else kept[c]).mul_(x).sum(1) for c in range(len(at)))
    return torch.stack(list(parts)).to(dtype)


def _read(y: Tensor, at: Tensor, kept: Tensor | None) -> Tensor:
    """y[at], zeros where not `kept`, in float32 or better; the caller's own."""
    if len(y) == 0:
        return y.new_zeros(len(at), y.shape[1], dtype=torch.promote_types(y.dtype, torch.float32))
    part = y.index_select(0, at).to(torch.promote_types(y.dtype, torch.float32))
    return part if kept is None else part.masked_fill_(~kept[:, None], 0)
