"""The learning rate as a function of the update, counted from 1."""

import math

from regard.training.config import TrainingConfig

FIRST_WARMUP = 500  # updates to the peak while the number of updates is not known yet
PAPER_WARMUP = 4000  # the same for schedule paper


def learning_rate(config: TrainingConfig, step: int, width: int, measured: int | None = 0) -> float:
    """The learning rate of an update. Schedule paper is that of Vaswani et al. 2017, section 5.3; the others rise
    linearly to their peak during the warm-up.

    `measured` is the number of updates that were timed before the plan was made; None: it is not made yet. These
    updates have a warm-up of their own, and the rest of the warm-up rises from where they end to the peak.
    """
    if measured is None or step <= measured:
        return _first_learning_rate(config, step, width)
    warmup = _planned(config.warmup, "warmup")
    if step < warmup and measured:
        first = _first_learning_rate(config, measured, width)
        peak = _planned_learning_rate(config, warmup, width)
        return first + (peak - first) * (step - measured) / (warmup - measured)
    return _planned_learning_rate(config, step, width)


def _first_learning_rate(config: TrainingConfig, step: int, width: int) -> float:
    if config.schedule == "paper":
        return _paper_learning_rate(config, step, width, PAPER_WARMUP)
    return (config.learning_rate or 1e-3) * min(1.0, step / FIRST_WARMUP)


def _planned_learning_rate(config: TrainingConfig, step: int, width: int) -> float:
    warmup = max(1, _planned(config.warmup, "warmup"))
    if config.schedule == "paper":
        return _paper_learning_rate(config, step, width, warmup)
    peak = config.learning_rate or 1e-3
    if step < warmup:
        return peak * step / warmup
    if config.schedule == "inverse_root":
        return peak * math.sqrt(warmup / step)
    if config.schedule == "cosine":
        done = (step - warmup) / max(1, _planned(config.steps, "steps") - warmup)
        return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return peak


def _paper_learning_rate(config: TrainingConfig, step: int, width: int, warmup: int) -> float:
    return (config.learning_rate or 1.0) * width**-0.5 * min(step**-0.5, step * warmup**-1.5)


def _planned(value: int | None, name: str) -> int:
    """A setting that a plan decides, see `Plan.apply`."""
    if value is None:
        raise ValueError(f"training.{name} is not planned yet: give it, or apply a plan to the config")
    return value
