"""The learning rate as a function of the update, counted from 1."""

import math

from regard.training.config import TrainingConfig

FIRST_WARMUP = 500  # updates to the peak, where it is not known yet how many there will be; of the paper's 4000


def learning_rate(config: TrainingConfig, step: int, width: int, measured: int | None = 0) -> float:
    """paper: Vaswani et al. 2017, 5.3; the others rise linearly to their peak during the warm-up.

    `measured` are the updates before the plan was made, None while it is not: they rise by a slope of their own, which
    the rest of the warm-up leads to the peak.
    """
    if measured is None or step <= measured:
        return _first_learning_rate(config, step, width)
    if step < config.warmup and measured:
        first, peak = (
            _first_learning_rate(config, measured, width),
            _planned_learning_rate(config, config.warmup, width),
        )
        return first + (peak - first) * (step - measured) / (config.warmup - measured)
    return _planned_learning_rate(config, step, width)


def _first_learning_rate(config: TrainingConfig, step: int, width: int) -> float:
    if config.schedule == "paper":
        return (config.learning_rate or 1.0) * width**-0.5 * min(step**-0.5, step * 4000**-1.5)
    return (config.learning_rate or 1e-3) * min(1.0, step / FIRST_WARMUP)


def _planned_learning_rate(config: TrainingConfig, step: int, width: int) -> float:
    warmup = max(1, config.warmup)
    if config.schedule == "paper":
        return (config.learning_rate or 1.0) * width**-0.5 * min(step**-0.5, step * warmup**-1.5)
    peak = config.learning_rate or 1e-3
    if step < warmup:
        return peak * step / warmup
    if config.schedule == "inverse_root":
        return peak * math.sqrt(warmup / step)
    if config.schedule == "cosine":
        done = (step - warmup) / max(1, config.steps - warmup)
        return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return peak
