"""The contract of a position scheme.

A scheme acts at one of four places, its `kind`; a mechanism says in its facts which kinds it can take:

- "input":    added to the token vectors before anything else (sinusoidal, learned, fourier): every mechanism takes it;
- "rotation": turns queries and keys so that their product depends on the distance (rotary);
- "bias":     a number for each head and distance, added to the scaled logit (ALiBi, T5 buckets);
- "content":  a term of the logit that reads the query or key (Shaw, Music Transformer, Transformer-XL), and perhaps of
              the value; added before scaling.

Positions count the real tokens of a row from 0. `gap` is the position of the key minus the position of the query. The
queries and keys of one call stand in unbroken runs, so all their gaps are one run as well, `span`: what depends on the
gap alone is computed once for each gap, and `skew` brings it to the keys.

A model that pools tokens says where its vectors stand: `step` places apart, its queries `pace` keys apart, and the
first of them, where it is `apart`, at no place. A model whose attention reads tokens in another order than they stand
in says which token each slot holds: `slots`.

Sinusoids, Fourier features and rotations also count the cells of a grid, such as the patches of an image: row by row,
`columns` in each.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, NoReturn, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.numeric import wide_dtype
from regard.core.rows import Mask, Rows
from regard.core.shape import Shape, check_role
from regard.kernels.runs import Bias


@dataclass(frozen=True)
class PositionFacts:
    """What a scheme declares of itself."""

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
    step = 1  # places between neighbouring tokens
    apart = False  # the first token has no place: what depends on distances leaves its logits alone
    slots: Tensor | None  # [T] the place that each slot holds, where tokens are read in another order

    def __init__(self, shape: Shape):
        super().__init__()
        if shape.role == "cross" and shape.pace is not None:
            # queries and memory stand on one line
            shape = replace(shape, role="self")
        self.shape, self.pace = shape, shape.pace or 1
        self.register_buffer("slots", None, persistent=False)
        why = (
            "queries and memory are two sequences without common positions; add positions to each before the layer "
            "and give this one position='none'"
        )
        check_role("position", self.facts, shape.role, why)

    def add(self, x: Tensor, rows: Rows) -> Tensor:
        """Kind "input": x [B, T, E] with the positions of its rows added."""
        self._not_written("add")

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Kind "rotation": x [B, H, T, D] turned by its positions [1 or B, T]."""
        self._not_written("rotate")

    def bias(self, gap: Tensor) -> Tensor:
        """Kind "bias": gap [T, S] -> [H, T, S], gap [B, T, S] -> [B, H, T, S]."""
        self._not_written("bias")

    def scores(self, q: Tensor, k: Tensor, mask: Mask, scale: float) -> Tensor:
        """Kind "content": scale times (q.k and what the scheme puts beside it), [B, H, T, S]; q, k [B, H, T or S, D].
        Scale queries before any product, so that half precision does not overflow."""
        self._not_written("scores")

    @property
    def has_distances(self) -> bool:
        """Kind "content": whether it writes `by_distance`."""
        return False

    def by_distance(self, q: Tensor, count: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Kind "content", causal: the queries whose product with the keys is meant, [B, H, T, D]; and those whose
        products with [H, count, D] join the scaled logits, for the distances 0 ... count - 1 of a key before its
        query."""
        self._not_written("by_distance")

    def values(self, weights: Tensor, mask: Mask) -> Tensor | None:
        """Kind "content": what joins weights @ v, [B, H, T, D], or None where the scheme leaves values alone."""
        return None

    @final
    def biases(self, mask: Mask) -> Tensor:
        """`bias` for the queries and keys of a mask, [H, T, S] or [B, H, T, S]. Final."""
        numbers = self.bias(self.span(mask).unsqueeze(-2))  # [H, 1, C] or [B, H, 1, C]
        return self.to_keys(numbers.expand(*numbers.shape[:-2], mask.T, -1), mask)

    # where tokens stand: final

    @final
    def places(self, slots: Tensor, pace: int = 1) -> Tensor:
        """The places of tokens `pace` keys apart, by their numbers: a pooled token stands where the first of its window
        does, one that is pooled with no other a window before."""
        return self.step * (pace * slots - (pace - 1) * self.apart)

    @final
    def cells(self, positions: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """The row and the column of each position of a grid, which begins behind a first token that is `apart`; that
        one stands at 0, 0."""
        cell = (positions - int(self.apart)).clamp(min=0)
        return cell // columns, cell % columns

    @final
    def span(self, mask: Mask) -> Tensor:
        """The gaps that occur under a mask, in places."""
        return self.step * span(mask, self.pace, self.apart)

    @final
    def gap(self, mask: Mask) -> Tensor:
        """The gap of each query and key, in places: [T, S], or [B, T, S] where rows differ."""
        if self.pace == 1:
            return self.step * mask.gap()
        queries, keys = (torch.arange(n, device=mask.k0.device) for n in (mask.T, mask.S))
        return self.places(keys) - self.places(queries + mask.known_shift, self.pace)[:, None]

    @final
    def to_keys(self, x: Tensor, mask: Mask) -> Tensor:
        """From a column for each gap to one for each key."""
        return self.without_first(skew(x, mask.S, self.pace), mask)

    @final
    def without_first(self, x: Tensor, mask: Mask) -> Tensor:
        """[..., T, S] with zeros for the first query and the first key, where these have no place."""
        if not self.apart:
            return x
        queries, keys = (torch.arange(n, device=x.device) for n in (mask.T, mask.S))
        return torch.where((queries + mask.known_shift > 0)[:, None] & (keys > 0), x, 0)

    def slopes(self) -> Tensor | None:
        """Kind "bias": [H] where the bias is -slope |gap|; None where it is another function of the gap."""
        return None

    @final
    def run_bias(self, before: int, after: int) -> Bias | None:
        """`bias` for kernels that make it from the gaps -before to after; None for other kinds. Final."""
        if self.facts.kind != "bias":
            return None
        slopes = self.slopes()
        if slopes is not None:
            return Bias(slopes=self.step * slopes)
        device = next((x.device for x in (*self.parameters(), *self.buffers())), None)
        gaps = torch.arange(-before, after + 1, device=device)[None]
        return Bias(table=self.bias(self.places(gaps))[:, 0], origin=before)

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
        """Twin of `scores` for one query [D] and one key [D]: what joins q.k before scaling."""
        return 0.0

    def plain_value(self, head: int, i: int, j: int) -> Tensor | float:
        """Twin of `values`: what is added to v_j when query i reads it, [D]."""
        return 0.0

    @final
    def _not_written(self, method: str) -> NoReturn:
        """For the methods of other kinds, and those that a scheme forgot."""
        raise NotImplementedError(f"position {self.facts.name!r} of kind {self.facts.kind!r} does not write {method!r}")


def span(mask: Mask, pace: int = 1, apart: bool = False) -> Tensor:
    """The gaps that occur under a mask, rising by one: [C], or [B, C] where rows differ. Query t and key s meet at
    column s + pace (T - 1 - t). Where a causal mask hides the future and the host knows where that begins, most of it
    is left out; the few gaps too many are for `skew` and for matrix products of round sizes."""
    device = mask.k0.device
    if pace > 1:
        first = (pace - 1) * apart - pace * (mask.T - 1 + mask.known_shift)
        return torch.arange(first, first + mask.S + pace * mask.T, device=device)
    if mask.shift is None:
        return (mask.k0 - mask.q0)[:, None] + torch.arange(1 - mask.T, mask.S + 1, device=device)
    end = mask.S + 1 - mask.shift
    return torch.arange(1 - mask.T - mask.shift, min(end, 9) if mask.causal else end, device=device)


def skew(x: Tensor, S: int, pace: int = 1) -> Tensor:
    """From a column for each gap of the span, [..., T, C], to one for each key, [..., T, S]: out[t, s] is
    x[t, s + pace (T - 1 - t)], and of no meaning where there is no such column. Read as one long row, each query begins
    C - pace numbers after the one before it, so that a view of more than S columns is enough."""
    T = x.shape[-2]
    x = F.pad(x, (0, max(0, S + pace - x.shape[-1])))
    C = x.shape[-1] - pace
    return x.flatten(-2).narrow(-1, pace * (T - 1), T * C).unflatten(-1, (T, C))[..., :S]


def lookup(table: Tensor, index: Tensor) -> Tensor:
    """Rows of a table [H or 1, R, D]: index [C] -> [H or 1, C, D], index [B, C] -> [B, H or 1, C, D]."""
    rows = table[:, index]
    return rows if index.dim() == 1 else rows.transpose(0, 1)


def check_columns(name: str, columns: int | None, apart: bool) -> None:
    """Refuses a grid without columns, and a first token apart from no grid."""
    if columns is not None and columns < 1:
        raise ValueError(f"option 'columns' of {name!r} must be at least 1, or None for a line, got {columns}")
    if apart and columns is None:
        raise ValueError(f"option 'apart' of {name!r} is for a grid: give columns, or leave apart out")


def check_end(name: str, x: Tensor, rows: Rows, longest: int) -> None:
    """Refuses a token behind the last position of a scheme that has an end."""
    end = rows.T + (rows.uniform_start or 0)
    if rows.uniform_start is None and x.device.type == "cpu" and not torch.compiler.is_compiling():
        # On other devices looking would stop the host at every step: a table fails at the lookup there.
        end = max(end, int((rows.start + rows.count).max()))
    if end > longest:
        raise ValueError(
            f"position {name!r} has longest={longest} positions and got a token at position {end - 1}: "
            f"build it with {name}(longest={end}) or more, shorten the input, or use a scheme without an end"
        )


def rates(width: int, base: float) -> Tensor:
    """How far each of the ceil(width / 2) sinusoids of a width turns in a step, base^(-2i / width) radians, `exact`."""
    return exact([base ** (-2 * i / width) for i in range((width + 1) // 2)])


def exact(radians: list[float]) -> Tensor:
    """What turns in a step, as whole numbers of 2^-48 turns. Angles counted so are exact at any position (float32 is
    off by 0.05 at position 1,000,000), and a module that is moved to half precision keeps them."""
    return torch.tensor([round(rate / math.tau * 2**48) for rate in radians])


def angles(positions: Tensor, rates: Tensor, dtype: torch.dtype) -> Tensor:
    """[...] -> [..., n]: the angle of each sinusoid, between -pi and pi, in float32 or better."""
    half = 2**47
    turned = (positions[..., None] * rates + half) % (2 * half) - half
    return turned.to(wide_dtype(dtype)) * (math.pi / half)
