"""Softmax attention over rows of different lengths, without a mask: the real tokens of all rows lie one behind another.

PyTorch's attention for variable lengths takes such a packing. It needs a GPU and 16-bit floats, has no dropout, and
computes nothing for padding. The number of real tokens stays on the device: padding lies behind the last row's end.
"""

from typing import Any

import torch
from torch import Tensor

from regard.kernels.autograd import Function, refuse_second_derivative
from regard.kernels.choose import portable_only

# Keys from which on the copies cost less than a mask: on an H200 rows of a quarter to all of the length train 1.2
# times as fast at 2,048 and 1.8 times at 16,384. Rows that are all but full train at 0.9 of the speed.
FEWEST = 2048


def takes(q: Tensor, k: Tensor) -> bool:
    """Whether `attend_ragged` runs on these and is the faster way."""
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and k.shape[2] >= FEWEST
        and q.shape[-1] <= 256
        and not portable_only()
    )


def attend_ragged(q: Tensor, k: Tensor, v: Tensor, count: Tensor, scale: float, *, own: bool) -> Tensor:
    """softmax(scale q K^T) V over the first count[b] keys of row b. `own`: the queries are the keys' tokens, so that
    padding gives zeros; else all T of them are real. A row without keys gives zeros."""
    from torch.nn.attention.varlen import varlen_attn

    (B, H, T, _), (G, S) = q.shape, k.shape[1:3]
    order, place, ends = packing(count, S)
    # heads that share keys are not known to every version of PyTorch
    k, v = (x if H == G else x.repeat_interleave(H // G, 1) for x in (k, v))
    keys, values = (PackRows.apply(x, order, place, count) for x in (k, v))
    if own:
        starts = ends
        queries = PackRows.apply(q, order, place, count)
    else:
        starts = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=q.device)
        queries = q.transpose(1, 2).reshape(B * T, H, -1)
    o: Any = varlen_attn(queries, keys, values, starts, ends, T, S, scale=scale)
    if own:
        return UnpackRows.apply(o, order, place, count)
    return o.view(B, T, H, -1).transpose(1, 2)


def packing(count: Tensor, S: int) -> tuple[Tensor, Tensor, Tensor]:
    """For rows of S tokens, the first count[b] of which are real: which token [B S] lies at each packed place, the
    place [B S] of each token, and where rows begin and end among the packed ones [B + 1]. Padding comes last."""
    ends = torch.nn.functional.pad(count.cumsum(0), (1, 0))
    at = torch.arange(S, device=count.device)
    first = S * torch.arange(len(count), device=count.device)
    # in front of a row lie `first - ends` padded tokens, and in the row those from `count` on
    behind = ends[-1] + (first - ends[:-1])[:, None] + at - count[:, None]
    place = torch.where(at < count[:, None], ends[:-1, None] + at, behind).flatten()
    order = torch.empty_like(place).scatter_(0, place, torch.arange(len(place), device=count.device))
    return order, place, ends.int()


class PackRows(Function):
    """[B, H, S, D] -> [B S, H, D], real tokens first. The gradient of padding is zero, whatever comes back for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(order, place, count)
        return _pack(x, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        _, place, count = ctx.saved_tensors
        return _unpack(grad, place, count), None, None, None


class UnpackRows(Function):
    """The way back; padding is zero, whatever lies behind the packed tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return _unpack(x, place, count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        (order,) = ctx.saved_tensors
        return _pack(grad, order), None, None, None


def _pack(x: Tensor, order: Tensor) -> Tensor:
    B, H, S, D = x.shape
    return x.transpose(1, 2).reshape(B * S, H * D).index_select(0, order).view(B * S, H, D)


def _unpack(x: Tensor, place: Tensor, count: Tensor) -> Tensor:
    N, H, D = x.shape
    rows = x.reshape(N, H * D).index_select(0, place).view(len(count), -1, H, D)
    real = torch.arange(rows.shape[1], device=x.device) < count[:, None]
    return rows.masked_fill_(~real[..., None, None], 0).transpose(1, 2)
