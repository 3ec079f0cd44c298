"""What a model is to those who train, decode or draw it: its config, and what it gives back."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn


class Hidden(NamedTuple):
    """What the output layer reads, [B, T, E] with the real tokens of each row on the left, and the auxiliary losses."""

    x: Tensor
    auxiliary_loss: Tensor | None
    statistics: dict[str, Tensor] | None = None  # of the layers, by name


class Prediction(NamedTuple):
    """Logits [B, T, V] at the real positions (zeros elsewhere), or [B, K] of classes; and the auxiliary losses of the
    layers, added up."""

    logits: Tensor
    auxiliary_loss: Tensor | None
    statistics: dict[str, Tensor] | None = None  # of the layers, by name


class Model(nn.Module):
    """A module that keeps the config it was built from. A call of it gives a `Prediction`."""

    config: Any  # a dataclass; `kind` and `width` are among its fields, of models of texts `vocabulary` too


class LinearHead(Protocol):
    """A model whose logits are `output(hidden(...).x)`: a loss need not compute those of padding."""

    hidden: Callable[..., Hidden]
    output: nn.Linear
