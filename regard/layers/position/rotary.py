"""Queries and keys turned by angles that grow with the position."""

import math
from typing import Annotated, Literal

import torch
from torch import Tensor

from regard.core.numeric import wide_dtype
from regard.core.shape import Shape
from regard.layers.position.base import Position, PositionFacts, angles, check_columns, exact


class Rotary(Position):
    """Su et al. 2021: channel pair i of q_t and k_t is turned by t base^(-2i/D), so that q_t . k_s depends on t - s
    alone. Pairs are (i, i + D/2) in "halves", as in GPT-NeoX and Llama, and (2i, 2i + 1) in "interleaved", as in the
    paper and GPT-J. With `fraction` the first round-down-to-even(fraction D) channels take the place of D and the rest
    stay as they are.

    `stretch` = (f, a, b, L) is how Llama 3.1 (Dubey et al. 2024, arXiv 2407.21783) reads texts longer than the L tokens
    it was trained on at first: a pair that turns fewer than a times in L tokens turns f times as slowly, one that turns
    more than b times as before, and between them the speeds are mixed.

    With `columns` the tokens are the cells of a grid, row by row: of the D / 2 pairs the first half turns by the row
    and the other by the column, pair i of either by base^(-4i/D) a cell, so that q . k depends on the two distances
    alone; where D is no multiple of 4, the last two channels stay as they are. A first token that is `apart`, such as
    a class token, is not turned. Cost N E."""

    facts = PositionFacts(
        name="rotary",
        paper="Su et al. 2021, RoFormer: Enhanced Transformer with Rotary Position Embedding",
        link="arXiv 2104.09864",
        kind="rotation",
        formula="(R_t q_t) . (R_s k_s) = q_t . R_(s-t) k_s, R_t turns channel pair i by t base^(-2i/D)",
    )
    examples = (
        "rotary",
        "rotary(base=100.0, fraction=0.5, layout='interleaved')",
        "rotary(base=500.0, stretch=(8.0, 1.0, 4.0, 12.0))",
        "rotary(base=10.0, columns=5)",
        "rotary(base=10.0, columns=4, apart=True, layout='interleaved')",
    )
    rates: Tensor  # [turned / 2]; on a grid half as many, for rows and columns alike

    def __init__(
        self,
        shape: Shape,
        *,
        base: Annotated[float, "base of the angles: the slowest pair turns once in about 2 pi base tokens"] = 10000.0,
        fraction: Annotated[float, "share of the channels of a head that turn"] = 1.0,
        layout: Annotated[Literal["halves", "interleaved"], "which channels form a pair"] = "halves",
        stretch: Annotated[
            tuple[float, ...] | None,
            "slower turns, as in Llama 3.1: factor, fewest and most turns in the first length, that length",
        ] = None,
        columns: Annotated[int | None, "tokens in a row of the grid that they are cells of; None: a line"] = None,
        apart: Annotated[bool, "the first token, such as a class token, is no cell of the grid"] = False,
    ):
        super().__init__(shape)
        check_columns("rotary", columns, apart)
        if columns is not None and stretch is not None:
            raise ValueError("option 'stretch' of 'rotary' is for a line of tokens: leave out stretch, or columns")
        if base <= 1:
            raise ValueError(f"option 'base' of 'rotary' must be more than 1, got {base}")
        if stretch is not None and (len(stretch) != 4 or min(stretch) <= 0 or stretch[1] >= stretch[2]):
            raise ValueError(
                "option 'stretch' of 'rotary' must be four numbers above 0: factor, fewest turns, more turns, length; "
                f"got {stretch!r}"
            )
        self.base, self.layout, self.stretch = base, layout, stretch
        self.columns, self.apart = columns, apart
        least = 2 if columns is None else 4
        self.turned = int(shape.head_width * fraction) // least * least
        if not 0 < fraction <= 1 or not self.turned:
            raise ValueError(
                f"option 'fraction' of 'rotary' must be at most 1 and leave at least {least} of the "
                f"{shape.head_width} channels of a head to turn, got {fraction}"
            )
        if fraction == 1 and shape.head_width % 2:
            raise ValueError(
                f"position 'rotary' turns pairs of channels and needs an even head width, got {shape.head_width}: "
                f"choose other heads or head_width, or a fraction below 1"
            )
        speeds = [self.speed(i) for i in range(self.turned // least)]
        self.register_buffer("rates", exact(speeds), persistent=False)

    def speed(self, i: int) -> float:
        """Radians a token of pair i; on a grid a row, and a column, of pair i of their own."""
        speed = self.base ** (-2 * i / (self.turned if self.columns is None else self.turned // 2))
        if self.stretch is None:
            return speed
        factor, few, many, length = self.stretch
        turns = length * speed / math.tau
        share = min(max((turns - few) / (many - few), 0.0), 1.0)
        return speed * (share + (1 - share) / factor)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.slots is not None:
            positions = self.slots[positions]
        places = (positions,) if self.columns is None else self.cells(positions, self.columns)
        turns = [angles(place, self.rates, x.dtype) for place in places]
        angle = torch.cat(turns, -1)[:, None]  # [1 or B, 1, T, turned / 2]
        cos, sin = angle.cos(), angle.sin()
        axis, pairs = (-1, (-1, 2)) if self.layout == "interleaved" else (-2, (2, -1))
        turned, rest = x[..., : self.turned].to(wide_dtype(x.dtype)), x[..., self.turned :]
        first, second = turned.unflatten(-1, pairs).unbind(axis)
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], axis).flatten(-2)
        return torch.cat([turned.to(x.dtype), rest], -1)

    def plain_rotate(self, vector: Tensor, position: int) -> Tensor:
        out, half = list(vector), self.turned // 2
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if self.layout == "interleaved" else (i, i + half)
            angle = position / self.base ** (2 * i / self.turned)
            if self.columns is not None:
                row, column = divmod(max(position - self.apart, 0), self.columns)
                own = i if i < half // 2 else i - half // 2
                angle = (row if i < half // 2 else column) / self.base ** (2 * own / half)
            if self.stretch is not None:
                factor, few, many, length = self.stretch
                wave = 2 * math.pi * self.base ** (2 * i / self.turned)
                if wave > length / few:
                    angle = angle / factor
                elif wave >= length / many:
                    smooth = (length / wave - few) / (many - few)
                    angle = (1 - smooth) * angle / factor + smooth * angle
            out[a] = vector[a] * math.cos(angle) - vector[b] * math.sin(angle)
            out[b] = vector[a] * math.sin(angle) + vector[b] * math.cos(angle)
        return torch.stack(out)
