"""A running batch on a GPU: buffers of fixed size, and a step that is captured once as a CUDA graph and replayed.

Launching the kernels of a step takes the host longer than the GPU takes to run them. Here rows join and leave by being
written into places of the same buffers, so that one graph serves any batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.core.state import Progress, take_rows
from regard.decoding.captured import WARM, Capture, CudaGraph, pairs, put, sizes_changed, unshared
from regard.serve.requests import Row

SOME = 32  # rows that join at a time


class FixedBatch:
    """As `RunningBatch`, with `places` for rows of at most `capacity` tokens. A place without a row reads a token too,
    always as its first. `capture` turns a step into a function that repeats it; None: a CUDA graph."""

    def __init__(self, model: Any, device: torch.device, places: int, capacity: int, capture: Capture | None = None):
        self.model, self.device, self.capacity = model, device, capacity
        self.rows: list[Row | None] = [None] * places
        self.state: Any = None
        # of each place, the token that it reads, and whether it has a row: one tensor, which is copied at once
        self.inputs = torch.zeros(2, places, dtype=torch.long, device=device)
        self.tokens, self.is_real = self.inputs[0, :, None], self.inputs[1]
        self.logits: Tensor | None = None
        self.capture = capture or CudaGraph(device)
        self.steps, self.repeat = 0, self._advance

    @property
    def active(self) -> list[Row]:
        return [row for row in self.rows if row is not None]

    def join(self, rows: Sequence[Row], state: Any) -> None:
        """Adds rows with their state, one row each."""
        free = self._tensor([place for place, row in enumerate(self.rows) if row is None][: len(rows)])
        # some at a time: each takes the memory of a whole context for a moment
        for some, places in zip(torch.arange(len(rows), device=self.device).split(SOME), free.split(SOME), strict=True):
            part = state if len(some) == len(rows) else take_rows(state, some)
            part = self.model.fixed_state(part, self.capacity)
            if self.state is None:
                # what is in it is overwritten, row by row
                self.state = unshared(take_rows(part, torch.zeros_like(self.is_real)), set())
            _overwrite(self.state, part, places)
        for place, row in zip(free.tolist(), rows, strict=True):
            self.rows[place] = row

    def leave(self, gone: Sequence[Row]) -> None:
        self.rows = [None if row in gone else row for row in self.rows]

    def step(self) -> tuple[list[Row], Tensor]:
        """Every row reads its last token. Returns the rows and the logits [rows, V] of what follows."""
        tokens = [0 if row is None else row.token for row in self.rows]
        self.inputs.copy_(torch.tensor([tokens, [int(row is not None) for row in self.rows]]))
        if self.steps == WARM:
            self.repeat = self.capture(self._advance)
        self.repeat()
        self.steps += 1
        assert self.logits is not None, "a step writes them"
        places = [place for place, row in enumerate(self.rows) if row is not None]
        return self.active, self.logits if len(places) == len(self.rows) else self.logits[self._tensor(places)]

    def _advance(self) -> None:
        logits, after = self.model.extend(self.tokens, self.state)
        if self.logits is None:
            self.logits = torch.empty_like(logits[:, -1])
        self.logits.copy_(logits[:, -1])
        put(self.state, after)
        for length in _lengths(self.state):
            length.mul_(self.is_real)

    def _tensor(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(list(values), device=self.device)


@torch.inference_mode()
def refusal(model: Any, capacity: int, token: int, device: torch.device) -> str | None:
    """Why the states of a model have no fixed size, tried with texts of two lengths."""
    if not hasattr(model, "fixed_state"):
        return f"{type(model).__name__} has no state of fixed size"
    if capacity < 4:
        return f"a context of {capacity} tokens is too short"
    states = []
    for length in (1, 3):
        ids = torch.full((1, length), token, device=device)
        states.append(model.fixed_state(model.extend(ids, model.start(1, capacity=length))[1], capacity))
    after = model.extend(torch.full((1, 1), token, device=device), states[0])[1]
    return sizes_changed(states[0], states[1]) or sizes_changed(states[0], after)


def _overwrite(state: Any, other: Any, rows: Tensor) -> None:
    """Writes the rows of one state into these of another of the same sizes."""
    for old, new in pairs(state, other):
        # a state may keep several entries per row, side by side
        each = len(new) // len(rows)
        at = rows if each == 1 else (rows[:, None] * each + torch.arange(each, device=rows.device)).flatten()
        old.index_copy_(0, at, new)


def _lengths(state: Any) -> list[Tensor]:
    if isinstance(state, Progress):
        return [state.length]
    return [length for part in state for length in _lengths(part)] if isinstance(state, tuple) else []
