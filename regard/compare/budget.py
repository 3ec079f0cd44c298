"""Equal budgets: the feed-forward width that makes parameters equal within 1 %, and the updates that a budget buys."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regard import models
from regard.layers.position.base import Position

TOLERANCE = 0.01  # share of the baseline's parameters by which a row may differ
WIDTH_STEP = 8  # the feed-forward width is a multiple of it where that is fine enough
AXES = {
    "tokens": "tokens read in training",
    "updates": "updates of the weights",
    "flops": "counted operations, forward and backward",
    "minutes": "minutes on this device",
    "epochs": "passes over the data of a task of regard train",
}
UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


@dataclass(frozen=True)
class Budget:
    """What every row may spend on its training: an amount on one axis."""

    axis: str = "updates"
    amount: float = 600.0

    def __post_init__(self) -> None:
        if self.axis not in AXES:
            raise ValueError(f"no budget of {self.axis!r}; known: {', '.join(AXES)}")
        if self.amount <= 0:
            raise ValueError(f"the budget of {self.axis} must be above 0, got {self.amount:g}")

    def updates(self, *, tokens: int, flops: float = 0.0, seconds: float = 0.0) -> int:
        """The number of updates it buys, where one reads `tokens`, counts `flops` or takes `seconds`."""
        each = {"tokens": tokens, "updates": 1, "flops": flops, "minutes": seconds / 60}.get(self.axis, 0.0)
        if each <= 0:
            raise ValueError(f"what an update costs in {self.axis} is not known")
        return max(1, int(self.amount / each))

    def __str__(self) -> str:
        return f"{self.amount:,.6g} {self.axis}"


def budget_from(text: str) -> Budget:
    """A budget as it is written on a command line: tokens=2M, updates=600, minutes=10."""
    axis, equals, amount = text.partition("=")
    number, unit = (amount[:-1], UNITS[amount[-1]]) if amount[-1:] in UNITS else (amount, 1.0)
    try:
        return Budget(axis.strip(), float(number) * unit)
    except ValueError as error:
        if equals and axis.strip() in AXES and "above 0" in str(error):
            raise
        known = "tokens=2M, updates=600, epochs=5, flops=1P or minutes=10"
        raise ValueError(f"a budget is written {known}, got {text!r}") from None


class OverBudget(ValueError):
    """A row whose parameters no feed-forward width makes equal."""


@dataclass(frozen=True)
class SizedConfig:
    """A config whose parameters were made equal to those of the baseline, as far as possible."""

    config: Any
    parameters: int  # without embeddings, head and position tables
    embedding: int
    over: str = ""  # why it is not within 1 %

    @property
    def inner(self) -> int | None:
        """The feed-forward width that was chosen."""
        return getattr(self.config, "inner", None)


def count(config: Any) -> tuple[int, int]:
    """The parameters of a model between its embedding and its head, and those of embeddings, head and positions."""
    with torch.device("meta"):
        model = models.kinds()[config.kind][1](config)
    outside: set[int] = set()
    for name, module in model.named_modules():
        is_outside = isinstance(module, nn.Embedding | Position) or (name == "output" and isinstance(module, nn.Linear))
        outside |= {id(part) for part in module.parameters()} if is_outside else set()
    every = {id(part): part.numel() for part in model.parameters()}
    embedding = sum(size for key, size in every.items() if key in outside)
    return sum(every.values()) - embedding, embedding


def equalize_parameters(config: Any, target: int) -> SizedConfig:
    """The config whose feed-forward width brings its parameters nearest to the target."""
    parameters, embedding = count(config)
    if abs(parameters - target) <= TOLERANCE * target or not hasattr(config, "inner"):
        return _sized_config(config, parameters, embedding, target)
    # parameters are linear in the width: two counts give the slope
    wider, _ = count(dataclasses.replace(config, inner=config.inner + WIDTH_STEP))
    slope = (wider - parameters) / WIDTH_STEP
    if slope <= 0:
        return _sized_config(config, parameters, embedding, target)
    ideal = config.inner + (target - parameters) / slope
    # a small model has more than 1 % in one step
    each = WIDTH_STEP if WIDTH_STEP * slope <= TOLERANCE * target else 1
    candidates = [max(each, each * (int(ideal // each) + step)) for step in (0, 1)]
    sized = [(inner, count(dataclasses.replace(config, inner=inner))[0]) for inner in dict.fromkeys(candidates)]
    inner, parameters = min(sized, key=lambda pair: abs(pair[1] - target))
    return _sized_config(dataclasses.replace(config, inner=inner), parameters, embedding, target)


def _sized_config(config: Any, parameters: int, embedding: int, target: int) -> SizedConfig:
    off = abs(parameters - target) > TOLERANCE * target
    over = f"{_figure(parameters)}, not within 1 % of {_figure(target)}" if off else ""
    return SizedConfig(config, parameters, embedding, over)


def _figure(parameters: int) -> str:
    return f"{parameters / 1e6:.3g}M" if parameters >= 1e6 else f"{parameters:,}"
