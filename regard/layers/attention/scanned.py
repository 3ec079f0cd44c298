"""Mechanisms whose digest grows token by token: running sums are all that decoding keeps."""

from abc import abstractmethod
from typing import NamedTuple, final

import torch
from torch import Tensor

from regard.core.state import Progress
from regard.layers.attention.digested import Digested


class ScanState(NamedTuple):
    """Running sums."""

    sums: tuple[Tensor, ...]
    progress: Progress


class Scanned(Digested):
    """A digest that grows token by token: causal attention is a scan, decoding keeps the sums."""

    @abstractmethod
    def zero(self, batch: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """The sums before the first token, batch first."""
        raise NotImplementedError

    @abstractmethod
    def scan(
        self, real: Tensor | None, sums: tuple[Tensor, ...] | None, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """[B, H, T, D] and the sums after the last real token; padded tokens leave the sums alone. Without sums a
        sequence begins here, and nobody asks for those at its end."""
        raise NotImplementedError

    def digest(self, real: Tensor | None, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Roles "self" and "cross", as in `Digested`. Default: the mechanism takes neither."""
        raise NotImplementedError(f"{self.facts.name!r} takes role {self.shape.role!r} and writes no digest")

    def consult(self, digest: tuple[Tensor, ...], q: Tensor) -> Tensor:
        """Roles "self" and "cross", as in `Digested`. Default: the mechanism takes neither."""
        raise NotImplementedError(f"{self.facts.name!r} takes role {self.shape.role!r} and writes no consult")

    @final
    def attend_self(self, rows, query, source, state):
        if self.shape.role == "self":
            return super().attend_self(rows, query, source, state)
        sums = None if state is None else state.sums
        o, sums = self.scan(rows.real(), sums, **query, **self.repeated(source))
        if state is None:
            return o, None
        return o, ScanState(sums, state.progress.advance(rows))

    @final
    def empty_state(self, batch, capacity, dtype, device):
        return ScanState(self.zero(batch, dtype, device), Progress.initial(batch, device, self.facts.name))
