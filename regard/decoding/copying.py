"""Placeholders in a search: each is written at most as often as it was read."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class CopyingState(NamedTuple):
    """The state of the model, and which placeholders each row may still write."""

    inner: Any
    left: Tensor  # [rows, placeholders]

    def reorder(self, rows: Tensor) -> "CopyingState":
        return CopyingState(self.inner.reorder(rows), self.left[rows])

    def select(self, rows: Tensor) -> "CopyingState":
        return CopyingState(self.inner.select(rows), self.left[rows])


class Copying:
    """Wraps a model in a search. `first` is the id of the first placeholder, of which there are as many as
    `left` [B, placeholders] has columns: True for those in the source of each row. `pad` is an id that the search is
    forbidden to take."""

    training = False

    def __init__(self, model: Any, first: int, left: Tensor, pad: int) -> None:
        self.model, self.first, self.left, self.pad = model, first, left, pad
        self.end = first + left.shape[1]
        self.encode = model.encode

    def start(self, batch: int, *, memory: Any = None, capacity: int | None = None) -> CopyingState:
        return CopyingState(self.model.start(batch, memory=memory, capacity=capacity), self.left)

    def extend(self, tokens: Tensor, state: CopyingState) -> tuple[Tensor, CopyingState]:
        logits, inner = self.model.extend(tokens, state.inner)
        return self._restrict(tokens, logits, inner, state.left)

    def extend_with_attention(self, tokens: Tensor, state: CopyingState) -> tuple[Tensor, CopyingState, Tensor]:
        logits, inner, weights = self.model.extend_with_attention(tokens, state.inner)
        return *self._restrict(tokens, logits, inner, state.left), weights

    def _restrict(self, tokens: Tensor, logits: Tensor, inner: Any, left: Tensor) -> tuple[Tensor, CopyingState]:
        """Logits without the placeholders that a row has written already."""
        ids = torch.arange(self.first, self.end, device=tokens.device)
        left = left & (tokens[:, -1:] != ids)
        placeholders, may = logits[..., self.first : self.end], left[:, None]
        # their probability goes to the padding, so that those of all other tokens stay what the model says
        blocked = placeholders.masked_fill(may, -torch.inf).logsumexp(-1)
        # in place: nobody else has the logits, and they are large
        logits[..., self.pad] = logits[..., self.pad].logaddexp(blocked)
        placeholders.masked_fill_(~may, -torch.inf)
        return logits, CopyingState(inner, left)
