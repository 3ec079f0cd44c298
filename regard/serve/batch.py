"""A running batch: rows join it and leave it while it decodes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.core.state import merge, take_rows, trim, with_capacity
from regard.serve.requests import Row

IDLE = 4  # rows are copied together when one in this number is idle


class RunningBatch:
    """Rows with one state, which is that of any mechanism: `merge` adds rows to it and `take_rows` takes some out.

    A row that has left stays idle (it reads padding, which changes nothing) until another takes its place, so that
    replacing one costs a copy of that row alone."""

    def __init__(self, model: Any, device: torch.device):
        self.model, self.device = model, device
        self.rows: list[Row | None] = []
        self.lengths: list[int] = []  # tokens that each row has read, idle ones too, when it joined or left
        self.state: Any = None
        self.capacity = 0  # tokens per row that caches have room for

    @property
    def active(self) -> list[Row]:
        return [row for row in self.rows if row is not None]

    def join(self, rows: Sequence[Row], state: Any) -> None:
        """Adds rows with their state, one row each: in the places of idle ones, then behind the others."""
        if self.state is None:
            self.rows, self.lengths, self.state = list(rows), [row.read for row in rows], state
            self.capacity = max(row.generation.longest for row in rows)
            return
        idle = [place for place, row in enumerate(self.rows) if row is None][: len(rows)]
        for place, row in zip(idle, rows, strict=False):
            self.rows[place], self.lengths[place] = row, row.read
        for part, at in ((slice(len(idle)), idle), (slice(len(idle), len(rows)), None)):
            if chosen := range(len(rows))[part]:
                some = state if len(chosen) == len(rows) else take_rows(state, self._tensor(chosen))
                self.state = merge(self.state, some, None if at is None else self._tensor(at))
        self.rows += rows[len(idle) :]
        self.lengths += [row.read for row in rows[len(idle) :]]
        self.capacity = max(self.capacity, *(row.generation.longest for row in rows))
        self.state = trim(self.state, self._longest())

    def leave(self, gone: Sequence[Row]) -> None:
        """Makes rows idle; where many are, the others are copied together."""
        if not gone:
            return
        self.lengths = [
            length if row is None else row.read for row, length in zip(self.rows, self.lengths, strict=True)
        ]
        self.rows = [None if row in gone else row for row in self.rows]
        active = [place for place, row in enumerate(self.rows) if row is not None]
        if not active:
            self.rows, self.lengths, self.state, self.capacity = [], [], None, 0
            return
        if IDLE * (len(self.rows) - len(active)) < len(self.rows):
            return
        self.state = take_rows(self.state, self._tensor(active))
        self.rows, self.lengths = [self.rows[i] for i in active], [self.lengths[i] for i in active]
        self.state = trim(self.state, self._longest())
        needed = max(row.generation.longest for row in self.active)
        if 2 * needed <= self.capacity:
            self.state, self.capacity = with_capacity(self.state, needed), needed

    def step(self) -> tuple[list[Row], Tensor]:
        """Every row reads its last token. Returns the rows and the logits [rows, V] of what follows."""
        tokens = self._tensor([0 if row is None else row.token for row in self.rows])[:, None]
        keep, places = None, [place for place, row in enumerate(self.rows) if row is not None]
        if len(places) < len(self.rows):
            keep = self._tensor([row is not None for row in self.rows])[:, None]
        logits, self.state = self.model.extend(tokens, self.state, keep=keep)
        logits = logits[:, -1]
        return self.active, logits if keep is None else logits[self._tensor(places)]

    def _longest(self) -> int:
        """The bound that the state needs: also what an idle row reads stands behind what it has read."""
        pairs = zip(self.rows, self.lengths, strict=True)
        return max(length if row is None else row.read for row, length in pairs)

    def _tensor(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(list(values), device=self.device)
