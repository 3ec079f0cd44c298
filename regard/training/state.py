"""The progress of a run, as `state.json` of a checkpoint has it."""

import dataclasses
import math
import reprlib
from dataclasses import dataclass, field
from typing import Any

import torch

from regard.config import from_json
from regard.training import checkpoint
from regard.training.loss_scale import LossScale


@dataclass
class State:
    """All that a checkpoint has besides tensors."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # the index of the next one in the epoch
    evaluated: int = 0  # the step of the latest evaluation
    best: float | None = None  # value of the metric
    best_step: int | None = None
    since_best: int = 0  # evaluations since then
    loss_scale: LossScale = field(default_factory=LossScale)
    loss_sum: float = 0.0  # since the latest line of the log
    loss_tokens: int = 0
    statistics: dict[str, Any] = field(default_factory=dict)  # of the layers, summed since the same line
    batches: int = 0  # the number that the statistics are sums over
    seconds: float = 0.0  # of training so far
    threads: int | None = None  # of the CPU: another number changes the last bits
    processes: int = 1  # likewise
    logged: int = 0  # the step of the latest line of the log


def read_state(found: checkpoint.Checkpoint, optimizer: torch.optim.Optimizer) -> tuple[State, dict[str, Any]]:
    """The progress of a run and the facts of its optimizer. Refuses a state that training cannot resume from."""
    try:
        state = from_json(State, _modern(found.state))
        if found.path.name.lstrip(".") != checkpoint.step_name(state.step):
            raise ValueError(f"it is of step {state.step}, and the checkpoint is {found.path.name}")
        _check_numbers(state)
        facts = _checked_facts(found.state.get("optimizer"), optimizer)
    except (ValueError, TypeError, OverflowError) as error:
        raise checkpoint.CheckpointError(f"{found.path}/state.json is damaged: {error}") from error
    return state, facts


def _modern(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a State. Older runs have the two numbers of the loss scale among the other fields."""
    values = {name: value for name, value in values.items() if name not in ("optimizer", "drawn", "aliases")}
    if "scale" in values and "loss_scale" not in values:
        values["loss_scale"] = {"value": values.pop("scale"), "steps_since_rescale": values.pop("steady", 0)}
    return values


def _check_numbers(state: State) -> None:
    for section in (state, state.loss_scale):
        for item in dataclasses.fields(section):
            value = getattr(section, item.name)
            if isinstance(value, int | float) and not 0 <= value < math.inf and item.name != "best":
                raise ValueError(f"{item.name} must be a finite number of at least 0, got {value}")
    for name, value in state.statistics.items():
        numbers = value if isinstance(value, list) else [value]
        if "." not in name or not all(isinstance(number, int | float) for number in numbers):
            raise ValueError(f"statistics must be numbers by LAYER.NAME, got {name!r}: {reprlib.repr(value)}")


def _checked_facts(facts: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    groups = facts.get("groups") if isinstance(facts, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise ValueError("it does not list the parameter groups of the optimizer")
    for name, value in (option for group in groups for option in dict(group.get("options", {})).items()):
        if not _is_like(value, optimizer.param_groups[0].get(name)):
            raise ValueError(f"{name} of the optimizer cannot be {reprlib.repr(value)}")
    return facts


def _is_like(value: Any, own: Any) -> bool:
    """Whether the value of an optimizer's option in a file has the same type as the one it would replace."""
    if isinstance(own, tuple | list):
        return isinstance(value, list) and len(value) == len(own) and all(map(_is_like, value, own))
    if isinstance(own, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(own, bool)
    return not isinstance(own, int | float) or (isinstance(value, int | float) and math.isfinite(value))
