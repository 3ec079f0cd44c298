"""Mechanisms whose digest grows token by token: running sums are all that decoding keeps."""

from abc import abstractmethod
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from regard.core.rows import Rows
from regard.core.sequence import Split, receive_sums, send_sums
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

    @abstractmethod
    def scan(
        self, real: Tensor | None, sums: Any, *args: Any, **inputs: Any
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """[B, H, T, D] and the sums after the last real token; padded tokens leave the sums alone. Without sums a
        sequence begins here, and the sums at its end are not used. The arguments after the sums are the mechanism's
        `inputs` by name, q, k and v by default."""

    def digest(self, real: Tensor | None, *args: Any, **sources: Any) -> tuple[Tensor, ...]:
        """Roles "self" and "cross", as in `Digested`. Default: the mechanism takes neither."""
        self.not_written("digest")

    def consult(self, digest: Any, *args: Any, **queries: Any) -> Tensor:
        """Roles "self" and "cross", as in `Digested`. Default: the mechanism takes neither."""
        self.not_written("consult")

    @final
    def attend_self(
        self, rows: Rows, query: dict[str, Tensor], source: dict[str, Tensor], state: ScanState | None
    ) -> tuple[Tensor, ScanState | None]:
        if self.shape.role == "self":
            return super().attend_self(rows, query, source, state)
        o, sums = self.scan(rows.real(), None if state is None else state.sums, **query, **self.repeat_heads(source))
        if state is None:
            return o, None
        assert sums is not None, "a scan that was given sums returns them"
        return o, ScanState(sums, state.progress.advance(rows))

    @final
    def attend_split(self, split: Split, rows: Rows, query: dict[str, Tensor], source: dict[str, Tensor]) -> Tensor:
        if self.shape.role != "causal":
            return super().attend_split(split, rows, query, source)
        first = next(iter(source.values()))
        sums = receive_sums(split, self.zero(len(first), first.dtype, first.device))
        o, sums = self.scan(rows.real(), sums, **query, **self.repeat_heads(source))
        assert sums is not None, "a scan that was given sums returns them"
        return send_sums(split, o, sums)

    @final
    def empty_state(self, batch: int, capacity: int | None, dtype: torch.dtype, device: torch.device) -> ScanState:
        return ScanState(self.zero(batch, dtype, device), Progress.initial(batch, device, self.facts.name))
