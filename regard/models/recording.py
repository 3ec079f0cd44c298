"""What is taken of the attention layers of a model while it reads: their maps, or whatever a recorder keeps instead."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from regard.core.rows import unpack
from regard.core.shape import Order, Shape
from regard.core.state import Out
from regard.layers.attention.base import Attention, Facts

Place = Literal["self", "cross", "none"]


class Recorder(Protocol):
    """Called in place of `layer.map`, with what the layer is given; what it returns is collected. It may raise to end
    the pass."""

    def __call__(self, layer: nn.Module, *arguments: Any, **options: Any) -> Any: ...


def take_map(layer: Any, *arguments: Any, **options: Any) -> Any:
    """The map of a layer: of attention, or of an aligner."""
    return layer.map(*arguments, **options)


class KnownMap(Attention):
    """A map that a model has computed already, in the place of the layer that others have: the tokens [B, T, S] are its
    rows. It computes nothing."""

    def __init__(self, name: str):
        cost = Order("N^2", 2)
        self.facts = Facts(name, "", "", "", "", cost, cost, roles=("cross",), linear=False)
        super().__init__(Shape.of(width=1, heads=1, role="cross"))

    def map(self, x, rows=None, *, state=None, memory=None, stream=None) -> Tensor:
        return x[:, None]

    def apply_map(self, values, x, rows=None, *, memory=None, stream=None) -> Tensor:
        return x[:, None] @ values

    def forward_packed(self, x, rows=None, *, state=None, memory=None, stream=None) -> Out:
        self.not_written("forward_packed")

    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        self.not_written("reference")


def place_map(found: Tensor, columns: str, keep: Tensor | None, target_keep: Tensor | None) -> Tensor:
    """A map [B, H, T, S] of packed tokens, or whatever a recorder kept of it, as one of the tokens that were given;
    `columns` are those of its layer: only tokens are moved."""
    found = found if target_keep is None else unpack(found, target_keep[:, None], dim=2)
    return unpack(found, keep[:, None, None], dim=3) if keep is not None and columns == "tokens" else found


def last_weights(calls: Sequence[tuple[Attention, Tensor]], *states: Any) -> Tensor:
    """What the last of the queries [B, n, E] of each layer reads of the tokens of its memory, the mean over layers and
    heads: [B, S]. Beams of one sentence fold into the queries of its memory; one state may serve all layers."""
    maps = []
    for (layer, queries), cross in zip(calls, states * len(calls) if len(states) == 1 else states, strict=True):
        if layer.facts.columns != "tokens":
            raise ValueError(
                f"the cross-attention {layer.facts.name!r} attends to slots, not to source tokens: what was covered "
                "cannot be told"
            )
        last = queries[:, -1:].reshape(len(cross.count), -1, queries.shape[2])
        maps.append(layer.map(last, state=cross).mean(1).flatten(0, 1))
    return torch.stack(maps).mean(0)


@dataclass
class Recording:
    """What a pass collects, layer by layer: of self-attention, or of the attention to the memory; of no layer, for
    what stands behind them all."""

    place: Place
    recorder: Recorder = take_map
    results: list[Any] = field(default_factory=list)

    def add(self, place: Place, layer: nn.Module, *arguments: Any, **options: Any) -> None:
        if place == self.place:
            self.results.append(self.recorder(layer, *arguments, **options))
