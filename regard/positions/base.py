"""The contract of a position scheme.

A scheme acts at one of four places, its `kind`; a mechanism says in its facts which kinds it can take:

- "input":    added to the token vectors before anything else (sinusoidal, learned): every mechanism takes it;
- "rotation": turns queries and keys so that their product depends on the distance (rotary);
- "bias":     a number for each head and distance, added to the scaled logit (ALiBi, T5 buckets);
- "content":  a term of the logit that reads the query or key (Shaw, Music Transformer, Transformer-XL), and perhaps of
              the value; added before scaling.

Positions count the real tokens of a row from 0. `gap` is the position of the key minus the position of the query.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

if TYPE_CHECKING:
    from regard.attention.base import Shape


@dataclass(frozen=True)
class PositionFacts:
    name: str
    paper: str
    link: str
    kind: Literal["input", "rotation", "bias", "content"]
    formula: str
    family: str = "position"
    roles: tuple[str, ...] = ("self", "causal")
    refusals: tuple[tuple[str, str], ...] = ()


class Position(nn.Module):
    """A scheme writes the methods of its kind and their `plain_` twins, which the references read."""

    facts: PositionFacts
    examples: tuple[str, ...]

    def __init__(self, shape: "Shape"):
        super().__init__()
        self.shape = shape
        if shape.role not in self.facts.roles:
            why = dict(self.facts.refusals).get(
                shape.role, "queries and memory are two sequences and have no common positions; place them at the input"
            )
            raise ValueError(f"position {self.facts.name!r} cannot be used with role {shape.role!r}: {why}")

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        """Kind "input": x [B, T, E] with its positions [1 or B, T] put in."""
        raise NotImplementedError

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Kind "rotation": x [B, H, T, D] turned by its positions [1 or B, T]."""
        raise NotImplementedError

    def bias(self, gap: Tensor) -> Tensor:
        """Kind "bias": gap [T, S] -> [H, T, S], gap [B, T, S] -> [B, H, T, S]."""
        raise NotImplementedError

    def scores(self, q: Tensor, k: Tensor, gap: Tensor) -> Tensor:
        """Kind "content": what joins q.k before scaling, [B, H, T, S]; q, k [B, H, T or S, D]; gap as for `bias`."""
        raise NotImplementedError

    def values(self, weights: Tensor, gap: Tensor) -> Tensor | None:
        """Kind "content": what joins weights @ v, [B, H, T, D], or None where the scheme leaves values alone."""
        return None

    def plain_add(self, x: Tensor) -> Tensor:
        """Twin of `add` for one sequence [T, E] from position 0."""
        return x

    def plain_rotate(self, vector: Tensor, position: int) -> Tensor:
        """Twin of `rotate` for one vector [D]."""
        return vector

    def plain_bias(self, head: int, i: int, j: int) -> Tensor | float:
        """Twin of `bias` for query i and key j."""
        return 0.0

    def plain_score(self, head: int, q: Tensor, k: Tensor, i: int, j: int) -> Tensor | float:
        """Twin of `scores` for one query [D] and one key [D]."""
        return 0.0

    def plain_value(self, head: int, i: int, j: int) -> Tensor | float:
        """Twin of `values`: what is added to v_j when query i reads it, [D]."""
        return 0.0
