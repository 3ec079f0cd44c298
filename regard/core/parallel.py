"""A batch that is spread over several processes, as a layer sees it.

A process has some rows of every batch. Most layers treat each row alone and need not know. A layer whose answer, loss
or statistics depend on the whole batch (batch norm, competition for experts, contrast) sums over the batch with the
functions here. In one process they return what they are given.

The loss that training minimises is the mean over the processes of what each of them computes. Every function here is
differentiable in that sense: its backward pass is the transpose of the same communication. All processes must call
them in the same order, with tensors of the same shape.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Spread(NamedTuple):
    """The processes that share a batch."""

    group: Any  # of torch.distributed; None: all processes
    rank: int
    size: int
    has_rows: bool = True  # False: the batch has fewer rows than there are processes, and this one's rows do not count


_spread: Spread | None = None


@contextmanager
def spread_batch(spread: Spread | None) -> Iterator[None]:
    """Inside the block, layers know that the batch is spread; None: it is not."""
    global _spread
    before, _spread = _spread, spread
    try:
        yield
    finally:
        _spread = before


def is_spread() -> bool:
    """Whether other processes have rows of the batch, too."""
    return _spread is not None


def batch_sum(x: Tensor) -> Tensor:
    """The sum over the processes of a tensor that each of them computed from its rows."""
    if _spread is None:
        return x
    return _Sum.apply(x if _spread.has_rows else x * 0, _spread.group)


def batch_rows(x: Tensor) -> Tensor:
    """The rows [n, ...] of all processes one after the other, [N, ...]; a process may have any number of them."""
    if _spread is None:
        return x
    x = x if _spread.has_rows else x[:0]
    before, total = batch_offset(torch.tensor(len(x), device=x.device))
    first = int(before)
    room = x.new_zeros(int(total), *x.shape[1:])
    places = torch.arange(first, first + len(x), device=x.device)
    if x.dtype == torch.bool:
        return _Sum.apply(room.long().index_copy(0, places, x.long()), _spread.group).bool()
    return _Sum.apply(room.index_copy(0, places, x), _spread.group)


def batch_offset(count: Tensor) -> tuple[Tensor, Tensor]:
    """Of whole numbers that each process counted in its rows: their sums over the processes before this one, whose rows
    come first in the batch, and over all."""
    if _spread is None:
        return torch.zeros_like(count), count
    own = count if _spread.has_rows else torch.zeros_like(count)
    counts = [torch.empty_like(own) for _ in range(_spread.size)]
    dist.all_gather(counts, own.contiguous(), group=_spread.group)
    stacked = torch.stack(counts)
    return stacked[: _spread.rank].sum(0), stacked.sum(0)


class _Sum(torch.autograd.Function):
    """The sum over processes, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride] # PyTorch's decorator types it otherwise
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
