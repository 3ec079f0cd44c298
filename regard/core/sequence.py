"""Rows whose tokens are spread over several processes, as a layer of attention sees them.

Every process has as many tokens of each row, the first process the first ones. What a causal mechanism reads of the
tokens before its own is what decoding would keep of them: keys and values, the last of them, or running sums. The
functions here fetch it. Each is differentiable: its backward pass sends the gradients back the same way. All processes
must call them in the same order.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from regard.core.rows import Rows


class Split(NamedTuple):
    """The processes that share the tokens of every row."""

    group: Any  # of torch.distributed, used for nothing else: layers wait for each other inside a step
    rank: int
    size: int

    def peer(self, rank: int) -> int:
        """The rank among all processes of one of the group."""
        return dist.get_global_rank(self.group, rank)


_split: Split | None = None


@contextmanager
def split_rows(split: Split | None) -> Iterator[None]:
    """Inside the block, layers know that they see a part of each row; None: they see whole rows."""
    global _split
    before, _split = _split, split
    try:
        yield
    finally:
        _split = before


def current_split() -> Split | None:
    """The processes that share the tokens of every row; None: rows are whole."""
    return _split


def placed(rows: Rows) -> Rows:
    """Rows without padding where they stand: behind the tokens of earlier processes."""
    if _split is None:
        return rows
    first = _split.rank * rows.T
    return rows._replace(start=rows.start + first, uniform_start=first)


def tokens_before(split: Split, x: Tensor) -> Tensor:
    """Of [B, H, T, ...], that of the tokens of all earlier processes, [B, H, rank T, ...]."""
    return _Before.apply(x, split)


def last_tokens_before(split: Split, x: Tensor, count: int) -> Tensor:
    """Of [B, H, T, ...], that of the last `count` tokens before those of this process, or of all if there are fewer. A
    halo that the process before has is all that travels."""
    if count > x.shape[2]:
        before = tokens_before(split, x)
        return before[:, :, max(0, before.shape[2] - count) :]
    halo = _Halo.apply(x[:, :, x.shape[2] - count :], split)
    return halo if split.rank else halo[:, :, :0]


def receive_sums(split: Split, sums: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The sums behind the last token of the process before; the first one gets those it gives."""
    return _Received.apply(split, *(part.requires_grad_(torch.is_grad_enabled()) for part in sums))


def send_sums(split: Split, y: Tensor, sums: Sequence[Tensor]) -> Tensor:
    """Sends the sums behind the last token of this process to the next one. Returns y, which the gradient of the sums
    then comes with."""
    return _Sent.apply(split, y, *sums)


def tied(y: Tensor, *fetched: Tensor) -> Tensor:
    """y, whose backward pass reaches all that was fetched, also what this process did not read: others wait for its
    gradient."""
    return _Tied.apply(y, *fetched)


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, *fetched: Tensor) -> Tensor:
        ctx.save_for_backward(*fetched)
        return y.view_as(y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] # PyTorch's decorator types it otherwise
        return grad, *map(torch.zeros_like, ctx.saved_tensors)


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split) -> Tensor:
        ctx.split, ctx.tokens = split, x.shape[2]
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(split.size)]
        dist.all_gather(parts, x.contiguous(), group=split.group)
        return torch.cat(parts[: split.rank], 2) if split.rank else x.new_empty(*x.shape[:2], 0, *x.shape[3:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride] # PyTorch's decorator types it otherwise
        split, T = ctx.split, ctx.tokens
        # of all tokens but those that nobody reads, then summed over the processes that read them
        behind = split.size * T - grad.shape[2]
        whole = F.pad(grad, (0, 0) * (grad.dim() - 3) + (0, behind)).contiguous()
        dist.all_reduce(whole, group=split.group)
        return whole.narrow(2, split.rank * T, T), None


class _Halo(torch.autograd.Function):
    """From the process before; of the first, from nobody."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split) -> Tensor:
        ctx.split = split
        return _shifted(split, [x], 1)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride] # PyTorch's decorator types it otherwise
        return _shifted(ctx.split, [grad], -1)[0], None


def _shifted(split: Split, tensors: list[Tensor], by: int) -> list[Tensor]:
    """What the process that is `by` before this one has; zeros where there is none."""
    found = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in tensors]
    work = []
    for x, room in zip(tensors, found, strict=True):
        if 0 <= split.rank + by < split.size:
            work.append(dist.P2POp(dist.isend, x.contiguous(), split.peer(split.rank + by), split.group))
        if 0 <= split.rank - by < split.size:
            work.append(dist.P2POp(dist.irecv, room, split.peer(split.rank - by), split.group))
    exchange(work)
    return found


def exchange(work: list[dist.P2POp]) -> None:
    """Sends and receives, in any order, and waits until all is there."""
    for one in dist.batch_isend_irecv(work):
        one.wait()


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: Split, *sums: Tensor) -> tuple[Tensor, ...]:
        ctx.split = split
        if not split.rank:
            return tuple(part.clone() for part in sums)
        found = tuple(torch.empty_like(part, memory_format=torch.contiguous_format) for part in sums)
        for part in found:
            dist.recv(part, split.peer(split.rank - 1), group=split.group)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] # PyTorch's decorator types it otherwise
        if ctx.split.rank:
            for grad in grads:
                dist.send(grad.contiguous(), ctx.split.peer(ctx.split.rank - 1), group=ctx.split.group)
        return None, *(None for _ in grads)


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: Split, y: Tensor, *sums: Tensor) -> Tensor:
        ctx.split, ctx.likes = split, [(part.shape, part.dtype) for part in sums]
        if split.rank + 1 < split.size:
            for part in sums:
                dist.send(part.contiguous(), split.peer(split.rank + 1), group=split.group)
        return y.view_as(y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] # PyTorch's decorator types it otherwise
        split = ctx.split
        found = [torch.zeros(shape, dtype=dtype, device=grad.device) for shape, dtype in ctx.likes]
        if split.rank + 1 < split.size:
            for part in found:
                dist.recv(part, split.peer(split.rank + 1), group=split.group)
        return None, grad, *found
