"""Decoding past the last position of a model."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class SlidingState(NamedTuple):
    """The model's state, and the tokens to read again when it starts anew."""

    inner: Any
    ids: Tensor  # [B, <= longest]

    def select(self, rows: Tensor) -> "SlidingState":
        return SlidingState(self.inner.select(rows), self.ids[rows])

    def reorder(self, rows: Tensor) -> "SlidingState":
        return SlidingState(self.inner.reorder(rows), self.ids[rows])


class Sliding:
    """A decoder whose positions end at `longest`, extended beyond them: when the next tokens do not fit, it starts
    again from the last half of its context, at the first positions. Rows have no padding."""

    def __init__(self, model: Any, longest: int):
        self.model, self.longest, self.training = model, longest, model.training

    def start(self, batch: int, *, capacity: int | None = None) -> SlidingState:
        room = None if capacity is None else min(capacity, self.longest)
        inner = self.model.start(batch, capacity=room)
        return SlidingState(inner, torch.zeros((batch, 0), dtype=torch.long, device=inner.progress.length.device))

    def extend(self, tokens: Tensor, state: SlidingState, *, keep: Tensor | None = None) -> tuple[Tensor, SlidingState]:
        """Logits of the tokens that were read, at least of the last one."""
        if keep is not None:
            raise ValueError("a sliding context takes rows of equal length, without padding")
        ids = torch.cat([state.ids, tokens], 1)[:, -self.longest :]
        inner = state.inner
        if inner.progress.longest + tokens.shape[1] > self.longest:
            tokens = ids[:, -max(1, self.longest // 2) :]
            inner = self.model.start(len(ids), capacity=self.longest)
        logits, inner = self.model.extend(tokens, inner)
        return logits, SlidingState(inner, ids)
