"""Residual layers that are undone in the backward pass, so that no activation of theirs is kept."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regard.core.rerun import Rerun
from regard.core.state import Out
from regard.kernels.autograd import Function

Sublayer = Callable[[Tensor, Tensor | None], Out]
Sublayers = list[list[Sublayer]]


class Coupled(Function):
    """Gomez et al. 2017, The Reversible Residual Network (arXiv 1707.04585), as in the Reformer: of two equal streams
    of residuals one reads the other in turn,

        (a, b) <- (b, a + f(b)),    undone by    (a, b) <- (b - f(a), a),

    so that two sublayers are y1 = x1 + attention(x2), y2 = x2 + feedforward(y1). The backward pass starts from the last
    a and b, runs each f again, the same to the random number, and keeps nothing else of the size of the input. What
    goes from layer to layer beside x (a stream) is kept; it does not grow with the length.

    `sublayers(memory)` gives those of each layer, for the memory that they read; `collect` is called with a and b
    behind each layer, without gradients, and with what its last sublayer gave.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layers: Sequence[nn.Module],
        sublayers: Callable[[Tensor | None], Sublayers],
        collect: Callable[[Tensor, Tensor, Out], None],
        x: Tensor,
        stream: Tensor | None,
        memory: Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        a = b = x
        streams: list[Tensor | None] = []
        losses: list[Tensor] = []
        ctx.reruns = []
        for layer, parts in zip(layers, sublayers(memory), strict=True):
            outs = []
            for part in parts:
                rerun = Rerun(layer, x.device)
                streams.append(stream)
                with rerun.first():
                    out = part(b, stream)
                ctx.reruns.append(rerun)
                a, b, stream = b, a + out.y, out.stream
                losses += [] if out.auxiliary_loss is None else [out.auxiliary_loss]
                outs.append(out._replace(y=x.new_empty(0)))
            collect(a, b, outs[-1])
        ctx.layers, ctx.sublayers, ctx.parameters = layers, sublayers, parameters
        ctx.autocast = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
        ctx.save_for_backward(a, b, memory, *streams)
        return a, b, stream, reduce(torch.add, losses) if losses else None

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_a: Tensor, grad_b: Tensor, grad_stream: Tensor | None, grad_loss: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        a, b, memory, *streams = ctx.saved_tensors
        memory, grad_memory = _leaf(memory), None
        place = {id(parameter): index for index, parameter in enumerate(ctx.parameters)}
        grads: list[Tensor | None] = [None] * len(place)
        enabled, dtype = ctx.autocast
        for layer, parts in reversed(list(zip(ctx.layers, ctx.sublayers(memory), strict=True))):
            learned = [parameter for parameter in layer.parameters() if parameter.requires_grad]
            for part in reversed(parts):
                read, stream = a.detach().requires_grad_(), _leaf(streams.pop())
                with ctx.reruns.pop().again():
                    with torch.enable_grad(), torch.autocast(a.device.type, dtype, enabled):
                        out = part(read, stream)
                    pairs = [(out.y, grad_b), (out.stream, grad_stream), (out.auxiliary_loss, grad_loss)]
                    made = [(x, grad) for x, grad in pairs if x is not None and x.requires_grad]
                    leaves = [leaf for leaf in (stream, memory) if leaf is not None]
                    found = torch.autograd.grad(
                        [x for x, _ in made],
                        [read, *leaves, *learned],
                        [grad for _, grad in made],
                        allow_unused=True,
                    )
                a, b = b - out.y.detach(), a
                grad_a, grad_b = grad_b, grad_a if found[0] is None else grad_a + found[0]
                beside = iter(found[1 : 1 + len(leaves)])
                grad_stream = None if stream is None else next(beside)
                grad_memory = grad_memory if memory is None else _sum(grad_memory, next(beside))
                for parameter, grad in zip(learned, found[1 + len(leaves) :], strict=True):
                    index = place[id(parameter)]
                    grads[index] = _sum(grads[index], grad)
        return None, None, None, grad_a + grad_b, grad_stream, grad_memory, *grads


def _leaf(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().requires_grad_()


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
