"""The learning rate as a function of the update, counted from 1."""

import math

from regard.config import TrainingConfig


def rate(config: TrainingConfig, step: int, width: int) -> float:
    """paper: Vaswani et al. 2017, 5.3; the others rise linearly to their peak during the warm-up."""
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
