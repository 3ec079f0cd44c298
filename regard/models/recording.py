"""What is taken of the attention layers of a model while it reads: their maps, or whatever a recorder keeps instead."""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import nn

Place = Literal["self", "cross", "none"]


class Recorder(Protocol):
    """Called in place of `layer.map`, with what the layer is given; what it returns is collected. It may raise to end
    the pass."""

    def __call__(self, layer: nn.Module, *arguments: Any, **options: Any) -> Any: ...


def take_map(layer: Any, *arguments: Any, **options: Any) -> Any:
    """The map of a layer: of attention, or of an aligner."""
    return layer.map(*arguments, **options)


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
