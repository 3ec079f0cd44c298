"""Mechanisms that turn all keys and values into something of fixed size, which queries then read."""

from abc import abstractmethod
from typing import final

import torch
from torch import Tensor

from regard.layers.attention.projected import CrossState, Projected


class Digested(Projected):
    """A mechanism that turns all keys and values into tensors of fixed size and reads its queries against those."""

    @abstractmethod
    def digest(self, real: Tensor | None, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """The fixed tensors; `real` [B, S] or None where all are; the other arguments are the sources by name."""
        raise NotImplementedError

    @abstractmethod
    def consult(self, digest: tuple[Tensor, ...], q: Tensor) -> Tensor:
        """[B, H, T, D]; a digest of no real token gives zeros."""
        raise NotImplementedError

    def attend_self(self, rows, query, source, state):
        return self.consult(self.digest(rows.real(), **self.repeated(source)), **query), None

    @final
    def project_memory(self, source, memory):
        B, S = memory.x.shape[:2]
        count = torch.full((B,), S, device=memory.x.device) if memory.count is None else memory.count
        real = None if memory.count is None else torch.arange(S, device=count.device) < count[:, None]
        return CrossState(self.digest(real, **self.repeated(source)), count, memory.count is None, S)

    @final
    def attend_memory(self, query, state):
        return self.consult(state.parts, **query)
