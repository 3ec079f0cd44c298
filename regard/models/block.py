"""A layer of a Transformer: attention, cross-attention, feed-forward, each around a residual."""

from collections.abc import Iterable
from functools import reduce
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from regard.core.rows import Memory, Rows
from regard.core.shape import Shape
from regard.core.state import Out
from regard.kernels.convolution import convolve, next_tail
from regard.kernels.dropout import Dropout, DropPath
from regard.layers.attention.base import Attention
from regard.layers.feedforward.base import FeedForward, Sizes
from regard.layers.position.base import Position
from regard.models.config import ModelConfig
from regard.models.recording import Recording
from regard.models.reversible import Sublayer
from regard.spec import ATTENTION, FEEDFORWARD, POSITIONS, Spec, parse, spec_list


def normalization(config: ModelConfig) -> nn.Module:
    """A norm of vectors, of the kind that the config names."""
    kinds = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
    return kinds[config.norm_kind](config.width, eps=config.norm_epsilon)


class BlockState(NamedTuple):
    """What one layer of a decoder keeps: the states of its self-attention, of its cross-attention, and the tail of its
    short convolution."""

    attention: Any
    cross: Any
    short: Tensor | None = None


class ShortConvolution(nn.Module):
    """A depthwise convolution over a few tokens, before self-attention reads them:

        u_tc = sum_i w_ic x_{t-i, c},    i = 0 .. size - 1,

    or around each token where `centred`. Many linear attentions have one and recall with it (Fu et al. 2023, Hungry
    Hungry Hippos, arXiv 2212.14052). It starts as the identity, so that a layer starts as it would without."""

    def __init__(self, width: int, size: int, centred: bool):
        super().__init__()
        self.centred = centred
        weight = torch.zeros(width, 1, size)
        weight[:, :, (size - 1) // 2 if centred else -1] = 1
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor, rows: Rows, tail: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[B, T, E] -> [B, T, E], and the next tail where one is given."""
        real = rows.real()
        if self.centred and real is not None:
            x = torch.where(real[..., None], x, 0)
        y = convolve(x, self.weight, tail=tail, centred=self.centred, groups=len(self.weight))
        return y, None if tail is None else next_tail(tail, x, None if real is None else rows.count)

    def initial_tail(self, batch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What stands before the first token: zeros."""
        return torch.zeros(batch, self.weight.shape[2] - 1, len(self.weight), dtype=dtype, device=device)


class Block(nn.Module):
    """Attention, cross-attention where there is a memory, feed-forward: each around a residual. Without a spec of
    self-attention it only reads a memory, of any length and width: models that change the length are built on it."""

    compiles_alone = True  # training compiles each layer by itself, and equal ones once
    recomputes_alone = True  # training.recompute computes each again in the backward pass, one by one

    def __init__(
        self,
        config: ModelConfig,
        spec: Spec | str | None,
        cross: Spec | str | None,
        role: Literal["self", "causal"] = "self",
        memory_width: int | None = None,
        feedforward: Spec | str | None = None,
        pace: int | None = None,
        drop_path: float = 0.0,
    ):
        """`feedforward`: None is the first that the config names. `pace`: the number of tokens of the memory that are
        as far apart as two queries, where positions inside attention count both on one line; None: they have no common
        places. `drop_path`: the probability with which a row leaves a sublayer out, in training."""
        super().__init__()
        sizes = {name: getattr(config, name) for name in ("width", "heads", "kv_heads", "head_width", "bias")}
        inside = POSITIONS.find(parse(config.position).name).facts.kind != "input"
        position = config.position if inside else None
        shape = Shape.of(role=role, position=position, **sizes)
        placed = {} if pace is None else {"position": position, "pace": pace}
        cross_shape = Shape.of(role="cross", memory_width=memory_width, **placed, **sizes)
        self.attention: Attention | None = None if spec is None else ATTENTION.build(spec, shape)
        self.cross: Attention | None = None if cross is None else ATTENTION.build(cross, cross_shape)
        self.short: ShortConvolution | None = None
        if spec is not None and config.short_convolution:
            self.short = ShortConvolution(config.width, config.short_convolution, centred=role == "self")
        feedforward = spec_list(config.feedforward)[0] if feedforward is None else feedforward
        self.feedforward: FeedForward = FEEDFORWARD.build(feedforward, Sizes(config.width, config.inner, role))
        sublayers = 1 + (spec is not None) + (cross is not None)
        self.norms = nn.ModuleList(normalization(config) for _ in range(sublayers))
        self.dropout = Dropout(config.dropout)
        self.drop_path = DropPath(drop_path)
        self.pre = config.norm == "pre"
        # where its self-attention reads the tokens in another order than they stand in: which it reads, and back
        self.order: Tensor | None
        self.back: Tensor | None
        self.register_buffer("order", None, persistent=False)
        self.register_buffer("back", None, persistent=False)

    def read_in_order(self, order: Tensor) -> None:
        """Gives self-attention the tokens in this order; its answers come back to the places of the tokens."""
        self.order, self.back = order, order.argsort()
        for part in [] if self.attention is None else self.attention.modules():
            if isinstance(part, Position):
                part.slots = order

    def forward(
        self,
        x: Tensor,
        rows: Rows,
        *,
        state: BlockState | None = None,
        memory: Memory | None = None,
        stream: Tensor | None = None,
        maps: Recording | None = None,
    ) -> Out:
        """`maps` collects [B, H, T, S] of the place it names, "self" or "cross"."""
        outs: list[Out] = []
        for add, norm in zip(self.sublayers(rows, state=state, memory=memory, maps=maps), self.norms, strict=True):
            outs.append(add(x, stream))
            x = x + outs[-1].y if self.pre else norm(x + outs[-1].y)
            stream = outs[-1].stream
        return combine_outputs(x, stream, outs, state)

    def sublayers(
        self,
        rows: Rows,
        *,
        state: BlockState | None = None,
        memory: Memory | None = None,
        maps: Recording | None = None,
    ) -> list[Sublayer]:
        """In order, functions of x and the stream that give what is added to x, and the stream behind it."""
        attention, cross = self.attention, self.cross
        kept, kept_cross, tail = (None, None, None) if state is None else state
        found: list[Sublayer] = []

        if attention is not None:

            def attend_self(x: Tensor, stream: Tensor | None) -> Out:
                x, after = (x, None) if self.short is None else self.short(x, rows, tail)
                x = x if self.order is None else x.index_select(1, self.order)
                if maps is not None:
                    maps.add("self", attention, x, rows, state=kept, stream=stream)
                out = attention.forward_packed(x, rows, state=kept, stream=stream)
                out = out if self.back is None else out._replace(y=out.y.index_select(1, self.back))
                return out if state is None else out._replace(state=BlockState(out.state, kept_cross, after))

            found.append(attend_self)

        if cross is not None:

            def attend_memory(x: Tensor, stream: Tensor | None) -> Out:
                if kept_cross is None:
                    if maps is not None:
                        maps.add("cross", cross, x, rows, memory=memory, stream=stream)
                    return cross.forward_packed(x, rows, memory=memory, stream=stream)._replace(state=None)
                # beams of one sentence fold into the queries of its memory
                folded = x.reshape(kept_cross.count.shape[0], -1, x.shape[2])
                if maps is not None:
                    maps.add("cross", cross, folded, state=kept_cross)
                return Out(cross.forward_packed(folded, Rows.full(folded), state=kept_cross).y.reshape(x.shape))

            found.append(attend_memory)

        def feed(x: Tensor, stream: Tensor | None) -> Out:
            return self.feedforward.forward_packed(x, rows)

        def adding(sublayer: Sublayer, norm: nn.Module) -> Sublayer:
            def add(x: Tensor, stream: Tensor | None) -> Out:
                out = sublayer(norm(x) if self.pre else x, stream)
                y = self.dropout(out.y)
                y = y if state is not None else self.drop_path(y)
                # a layer without a stream of its own passes it on
                return out._replace(y=y, stream=stream if out.stream is None else out.stream)

            return add

        found.append(feed)
        return [adding(*pair) for pair in zip(found, self.norms, strict=True)]


def combine_outputs(x: Tensor, stream: Tensor | None, outs: list[Out], state: BlockState | None) -> Out:
    """The output of a layer, from those of its sublayers, of which the first knows the next state."""
    after = None if state is None else outs[0].state
    return Out(x, after, stream, sum_losses(outs), outs[-1].statistics)


def sum_losses(outs: Iterable[Out]) -> Tensor | None:
    """The auxiliary losses added up; None where there are none."""
    losses = [out.auxiliary_loss for out in outs if out.auxiliary_loss is not None]
    return reduce(torch.add, losses) if losses else None


def gather_auxiliary(parts: dict[str, Out]) -> tuple[Tensor | None, dict[str, Tensor] | None]:
    """The auxiliary losses of the parts added up, and their statistics as PART.NAME."""
    found = {f"{part}.{name}": value for part, out in parts.items() for name, value in (out.statistics or {}).items()}
    return sum_losses(parts.values()), found or None
