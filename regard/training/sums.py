"""The sums of a line of the log, over the updates since the line before."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class LogSums:
    """Tensors stay on the device, so that the host waits for them only when a line is written."""

    loss: Tensor  # float64, without label smoothing
    since: float  # a reading of the clock, moved forward by the time of evaluations and checkpoints
    tokens: int = 0  # the number that the loss is a sum over
    tokens_read: int = 0
    gradient_norm: float = 0.0  # of the latest update
    statistics: dict[str, Tensor] = field(default_factory=dict)  # by LAYER.NAME, float64
    batches: int = 0  # the number that the statistics are sums over

    @classmethod
    def zero(cls, device: torch.device, now: float) -> "LogSums":
        return cls(torch.zeros((), dtype=torch.float64, device=device), now)

    def accumulate_loss(self, loss: Tensor, tokens: int, tokens_read: int) -> None:
        self.loss += loss.double()
        self.tokens += tokens
        self.tokens_read += tokens_read

    def accumulate_statistics(self, batches: list[dict[str, Tensor]]) -> None:
        """Adds the statistics of the layers, batch by batch."""
        for statistics in batches:
            for name, value in statistics.items():
                self.statistics[name] = self.statistics.get(name, 0) + value.double()
        self.batches += len(batches)

    def means_by_layer(self) -> dict[str, dict[str, Any]]:
        """Mean statistics, {layer: {name: a number or a list of them}}."""
        layers: dict[str, dict[str, Any]] = {}
        for path, value in self.statistics.items():
            layer, name = path.rsplit(".", 1)
            layers.setdefault(layer, {})[name] = (value / self.batches).round(decimals=4).tolist()
        return layers
