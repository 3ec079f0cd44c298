"""What the references of the mechanisms read: one head of one unpadded sequence, nothing batched, nothing masked.

A reference is the formula of the paper written as loops over queries and keys, in float64, and shares no code with the
path that users run. The conformance suite compares the two.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


class PlainPosition(Protocol):
    """What a reference asks of a position scheme: its terms for one head, one query i and one key j."""

    def plain_score(self, head: int, q: Tensor, k: Tensor, i: int, j: int) -> Tensor | float: ...

    def plain_bias(self, head: int, i: int, j: int) -> Tensor | float: ...

    def plain_value(self, head: int, i: int, j: int) -> Tensor | float: ...


@dataclass
class Row:
    """Head `head` of one sequence. `values[name]` holds each projected input, [T, D] (queries) or [S, D] (sources)."""

    head: int
    causal: bool
    T: int
    S: int
    values: dict[str, Tensor]
    position: PlainPosition | None = None

    @property
    def q(self) -> Tensor:
        return self.values["q"]

    @property
    def k(self) -> Tensor:
        return self.values["k"]

    @property
    def v(self) -> Tensor:
        return self.values["v"]

    def past(self, i: int) -> range:
        """The keys query i may see by its role alone."""
        return range(i + 1) if self.causal else range(self.S)

    def product(self, i: int, j: int) -> Tensor:
        """q_i . k_j with what a position scheme adds to it before scaling."""
        product = self.q[i] @ self.k[j]
        if self.position is not None:
            product = product + self.position.plain_score(self.head, self.q[i], self.k[j], i, j)
        return product

    def bias(self, i: int, j: int) -> Tensor | float:
        """What a position scheme adds to the logit after scaling."""
        return 0.0 if self.position is None else self.position.plain_bias(self.head, i, j)

    def value(self, i: int, j: int) -> Tensor:
        """v_j as query i reads it."""
        return self.v[j] if self.position is None else self.v[j] + self.position.plain_value(self.head, i, j)

    def attend(self, i: int, seen: Iterable[int], scale: float) -> Tensor:
        """Softmax attention of query i over the keys `seen`: zeros if there are none."""
        seen = list(seen)
        if not seen:
            return torch.zeros_like(self.v[0])
        logits = torch.stack([scale * self.product(i, j) + self.bias(i, j) for j in seen])
        return blend(logits, [self.value(i, j) for j in seen])


def blend(logits: Tensor, values: list[Tensor]) -> Tensor:
    """sum_j softmax(logits)_j values_j, written out."""
    powers = torch.exp(logits - logits.max())
    shares = powers / powers.sum()
    return add_up(share * value for share, value in zip(shares, values, strict=True))


def plain_layer_norm(vector: Tensor, norm: nn.LayerNorm) -> Tensor:
    """A layer norm of one vector, written out."""
    away = vector - vector.sum() / len(vector)
    return away / torch.sqrt((away * away).sum() / len(vector) + norm.eps) * norm.weight + norm.bias


def add_up(terms: Iterable[Tensor]) -> Tensor:
    """The sum of one tensor or more: `sum` begins with the number 0, which is no tensor."""
    return functools.reduce(torch.add, terms)
