"""The contract of a feed-forward layer: what every token goes through on its own, between two attentions.

Letters as in attention: B batch, T tokens, E model width; F is the width inside, N all real tokens of a call. A layer
sees rows that are real from the left, `forward_packed(x, rows)`; what it answers at padding is never read.

Most layers work on each token alone. Some let tokens compete: for a place at an expert while they train ("earlier": a
token may be turned away because of tokens before it in its row and of the rows before; "batch": because of any token,
also of later ones, which a decoder then learns from), or always ("row": because of any token of its row). A layer
declares which in its facts. No layer lets tokens of different rows compete outside training, so that a translation does
not depend on what else is translated, and decoding never turns a token away.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.rows import Rows, pack, unpack
from regard.core.shape import Order, check_role
from regard.core.state import Out

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]


@dataclass(frozen=True)
class FeedForwardFacts:
    """What a layer declares of itself. Each line is tested, also where it says no."""

    name: str
    paper: str
    link: str
    family: str
    formula: str
    time: Order
    memory: Order
    roles: tuple[Literal["self", "causal"], ...] = ("self", "causal")
    refusals: tuple[tuple[str, str], ...] = ()  # (role, why not)
    training: Literal["token", "row", "earlier", "batch"] = "token"  # what an answer depends on while training
    evaluation: Literal["token", "row"] = "token"  # and otherwise, in decoding too
    random: bool = False  # draws numbers while training
    auxiliary_loss: bool = False  # returns one in training, to be added to the loss of the model


@dataclass(frozen=True)
class Sizes:
    """What every layer is built with; "causal": the tokens behind a token must not change its answer."""

    width: int
    inner: int
    role: Literal["self", "causal"] = "self"

    def __post_init__(self) -> None:
        for name in ("width", "inner"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}")
        if self.role not in ("self", "causal"):
            raise ValueError(f"role must be 'self' or 'causal', got {self.role!r}")


class FeedForward(nn.Module, ABC):
    """The contract. `facts` and `examples` (small specs the suite builds) belong to each layer."""

    facts: FeedForwardFacts
    examples: tuple[str, ...]
    reduces_to: tuple[tuple[str, str], ...] = ()
    choosing: tuple[str, ...] = ("router",)  # parameters and modules that say which others a token meets

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes = sizes
        check_role("feedforward", self.facts, sizes.role, "the layer is not defined for it")

    @final
    def forward(self, x: Tensor, *, keep: Tensor | None = None) -> Tensor:
        """[B, T, E] -> [B, T, E]; padded positions give zeros."""
        if x.dim() != 3 or x.shape[2] != self.sizes.width or not x.is_floating_point():
            raise ValueError(f"x must be [batch, tokens, {self.sizes.width}], got {x.dtype} {list(x.shape)}")
        if keep is None:
            return self.forward_packed(x, Rows.full(x)).y
        if keep.dtype != torch.bool or keep.shape != x.shape[:2]:
            got = f"{keep.dtype} {list(keep.shape)}"
            raise ValueError(f"keep must be boolean {list(x.shape[:2])}, True = real token, got {got}")
        packed, rows = pack(x, keep)
        return unpack(self.forward_packed(packed, rows).y, keep)

    @abstractmethod
    def forward_packed(self, x: Tensor, rows: Rows) -> Out:
        """[B, T, E] -> Out(y, auxiliary_loss=..., statistics=...): what a model calls. The loss is already weighted."""

    def link_layers(self, first: "FeedForward | None") -> None:
        """A model calls it once for each layer: `first` is the first layer of this kind, None for that layer itself.
        What layers share is taken from it."""

    @abstractmethod
    def reference(self, x: Tensor) -> Out:
        """The real tokens of one row [N, E] -> y [N, E] and the loss: the formula in loops. It draws no random numbers:
        the suite compares layers that draw none."""

    def active(self) -> int:
        """The number of parameters that one token uses."""
        return sum(parameter.numel() for parameter in self.parameters())


def active_parameters(model: nn.Module) -> int:
    """The number of parameters of a model that one token uses; each layer of experts says how many of its own."""
    idle, counted = 0, set()
    for layer in model.modules():
        if isinstance(layer, FeedForward):
            # what layers share is there once, and each of them uses its own part of it
            idle += sum(parameter.numel() for parameter in layer.parameters() if parameter not in counted)
            idle -= layer.active()
            counted |= set(layer.parameters())
    return sum(parameter.numel() for parameter in model.parameters()) - idle


def activate(name: Activation, x: Tensor) -> Tensor:
    if name == "relu":
        return torch.relu(x)
    if name == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def plain_linear(weight: Tensor, x: Tensor) -> Tensor:
    """weight [O, I] times x [I], as sums."""
    return torch.stack([(row * x).sum() for row in weight])


def plain_activation(name: Activation, x: Tensor) -> Tensor:
    """The formula of each."""
    if name == "relu":
        return x.clamp(min=0)
    if name == "silu":
        return x / (1 + torch.exp(-x))
    if name == "gelu":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
