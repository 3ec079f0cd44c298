"""Experts spread over processes: each has some of them, and tokens travel to their experts and back (all-to-all).

A layer deals its own tokens out as ever. What lies in the slots of an expert is then sent to the process that has it,
computed there together with what came from the others, and sent back. Gradients travel the same way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from regard.kernels.grouped import Deal, deal
from regard.training.distributed.tensors import full


def check_experts(model: nn.Module, processes: int) -> None:
    """Refuses numbers of experts that cannot be spread evenly."""
    counts = {len(weight) for part in _list_experts(model) for weight in part.parameters(recurse=False)}
    for count in sorted(counts):
        if count % processes:
            raise ValueError(
                f"{count} experts cannot be spread evenly over {processes} processes: choose a number of experts that "
                "is a multiple of it, or leave training.spread_experts out"
            )


def _list_experts(model: nn.Module) -> list[Any]:
    """The modules that hold experts."""
    return [part for part in model.modules() if hasattr(part, "exchange")]


def spread_experts(model: nn.Module, mesh: DeviceMesh) -> list[Any]:
    """Leaves each process its share of the experts of a model. Returns the modules that hold them."""
    found = _list_experts(model)
    for part in found:
        for name, weight in list(part.named_parameters(recurse=False)):
            shard = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
            part.register_parameter(name, nn.Parameter(shard))
        part.exchange = partial(exchanged, mesh.get_group())
    return found


@contextmanager
def whole_experts(modules: list[Any]) -> Iterator[None]:
    """Inside the block, every process has all experts."""
    before = [(part, dict(part._parameters), part.exchange) for part in modules]
    for part, parameters, _ in before:
        for name, weight in parameters.items():
            if weight is not None:
                part._parameters[name] = nn.Parameter(full(weight.detach()), requires_grad=False)
        part.exchange = None
    try:
        yield
    finally:
        for part, parameters, exchange in before:
            part._parameters.update(parameters)
            part.exchange = exchange


def exchanged(group: Any, networks: Any, x: Tensor, dealt: Deal) -> Tensor:
    """What the experts make of the slots, wherever they are: [S, I] or padded [G, room, I] in, the same out."""
    size = dist.get_world_size(group)
    weights = {name: _share(weight, size) for name, weight in networks.named_parameters()}
    flat, used, counts = _filled(x, dealt)
    # what each process sends for each of the experts of each other one, and what it gets
    sent = counts.view(size, -1)  # [processes, own experts]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent.contiguous(), group=group)
    sizes = [list(map(int, part.sum(1))) for part in (sent, received)]
    rows = _Exchange.apply(flat, *sizes, group)
    # they come by sender, and are dealt to the experts of this process
    own = sent.shape[1]
    expert = torch.arange(own, device=x.device).repeat(size).repeat_interleave(received.flatten())
    widths = (networks.inner.shape[1], networks.inner.shape[2])
    here = deal(expert[None], own, rows.dtype, widths, None, None)
    y = networks.compute(here.spread(rows, rows.dtype), here, weights)
    gate = torch.ones(len(here.pair), dtype=y.dtype, device=y.device)
    y = _Exchange.apply(here.collect(y, gate), *reversed(sizes), group)
    if used is not None:
        y = y.new_zeros(len(used), y.shape[1]).index_copy(0, used.nonzero()[:, 0], y)
    return y if dealt.room is None else y.view(*x.shape[:2], -1)


def _share(weight: Any, size: int) -> Tensor:
    """The experts of this process. Their gradient is a sum over the tokens of all processes, and that of all other
    weights a mean over processes of losses that are weighted for it: so this one is divided, too."""
    own = weight.to_local()
    return _Divided.apply(own, size)


def _filled(x: Tensor, dealt: Deal) -> tuple[Tensor, Tensor | None, Tensor]:
    """The filled slots one behind the other, by expert; which slots they are (None: all); and how many each expert
    has."""
    used, flat = dealt.places.used, x.reshape(-1, x.shape[-1])
    if dealt.ends is not None:
        counts = torch.diff(dealt.ends, prepend=dealt.ends.new_zeros(1)).long()
    else:
        counts = torch.full((len(x),), x.shape[1], device=x.device) if used is None else used.view(len(x), -1).sum(1)
    return (flat if used is None else flat[used]), used, counts


class _Exchange(torch.autograd.Function):
    """Rows to other processes and from them; the counts say how many go to each and come from each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        y = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(y, x.contiguous(), received, sent, group=group)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] # PyTorch's decorator types it otherwise
        sent, received = ctx.sizes
        back = grad.new_empty(sum(sent), *grad.shape[1:])
        dist.all_to_all_single(back, grad.contiguous(), sent, received, group=ctx.group)
        return back, None, None, None


class _Divided(torch.autograd.Function):
    """The same tensor, whose gradient is divided."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: int) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride] # PyTorch's decorator types it otherwise
        return grad / ctx.by, None
