"""Sinusoids of the position, added to the token vectors."""

import math
from typing import Annotated, Literal

import torch
from torch import Tensor

from regard.core.rows import Rows
from regard.core.shape import Shape
from regard.layers.position.base import Position, PositionFacts, angles, check_columns, rates


class Sinusoidal(Position):
    """Vaswani et al. 2017: PE(t, 2i) = sin(t / 10000^(2i/E)), PE(t, 2i+1) = cos(t / 10000^(2i/E)), for any t and any
    width (an odd one ends with a sine). "halves" holds the same numbers as [sines | cosines].

    With `columns` the tokens are the cells of a grid, row by row: the first half of the channels (rounded up) is the PE
    of the row, the other that of the column, each of its own width. A first token that is `apart`, such as a class
    token, gets nothing added and the grid begins behind it. Cost N E."""

    facts = PositionFacts(
        name="sinusoidal",
        paper="Vaswani et al. 2017, Attention Is All You Need (section 3.5)",
        link="arXiv 1706.03762",
        kind="input",
        formula="x_t + PE_t, PE_t = (sin t w_i, cos t w_i)_i, w_i = base^(-2i/E)",
    )
    examples = (
        "sinusoidal",
        "sinusoidal(layout='halves', base=50.0)",
        "sinusoidal(columns=5, base=20.0)",
        "sinusoidal(columns=4, apart=True, layout='halves', base=20.0)",
    )
    rates: Tensor  # [E / 2]; on a grid of the row
    column_rates: Tensor | None  # on a grid

    def __init__(
        self,
        shape: Shape,
        *,
        layout: Annotated[
            Literal["interleaved", "halves"], "sine and cosine in turn, or all sines before all cosines"
        ] = "interleaved",
        base: Annotated[
            float, "base of the angles: the slowest sinusoid turns once in about 2 pi base tokens"
        ] = 10000.0,
        columns: Annotated[int | None, "tokens in a row of the grid that they are cells of; None: a line"] = None,
        apart: Annotated[bool, "the first token, such as a class token, is no cell of the grid"] = False,
    ):
        super().__init__(shape)
        check_columns("sinusoidal", columns, apart)
        if base <= 1:
            raise ValueError(f"option 'base' of 'sinusoidal' must be more than 1, got {base}")
        self.layout, self.base, self.columns, self.apart = layout, base, columns, apart
        self.first_half = shape.width if columns is None else -(-shape.width // 2)  # channels of the line, or the row
        self.register_buffer("rates", rates(self.first_half, base), persistent=False)
        column_rates = None if columns is None else rates(shape.width // 2, base)
        self.register_buffer("column_rates", column_rates, persistent=False)

    def add(self, x: Tensor, rows: Rows) -> Tensor:
        positions = rows.positions()
        if self.columns is None or self.column_rates is None:
            return x + self._waves(positions, self.rates, self.first_half, x.dtype)
        row, column = self.cells(positions, self.columns)
        across = self._waves(column, self.column_rates, self.shape.width - self.first_half, x.dtype)
        placed = torch.cat([self._waves(row, self.rates, self.first_half, x.dtype), across], -1)
        return x + (torch.where((positions > 0)[..., None], placed, 0) if self.apart else placed)

    def _waves(self, places: Tensor, rates: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """[1 or B, T] -> [1 or B, T, width]"""
        angle = angles(places, rates, dtype)
        waves = (angle.sin(), angle.cos())
        placed = torch.stack(waves, -1).flatten(-2) if self.layout == "interleaved" else torch.cat(waves, -1)
        return placed[..., :width].to(dtype)

    def plain_add(self, x: Tensor) -> Tensor:
        T, E = x.shape
        placed = torch.zeros(T, E, dtype=torch.float64)
        for t in range(T):
            if self.columns is None:
                self._plain_waves(placed[t], t)
            elif t >= self.apart:
                row, column = divmod(t - self.apart, self.columns)
                self._plain_waves(placed[t, : math.ceil(E / 2)], row)
                self._plain_waves(placed[t, math.ceil(E / 2) :], column)
        return x + placed.to(x)

    def _plain_waves(self, placed: Tensor, t: int) -> None:
        """Writes the PE of one place."""
        E = len(placed)
        for c in range(E):
            i, cosine = (c // 2, c % 2 == 1)
            if self.layout == "halves":
                sines = math.ceil(E / 2)
                i, cosine = (c, False) if c < sines else (c - sines, True)
            angle = t / self.base ** (2 * i / E)
            placed[c] = math.cos(angle) if cosine else math.sin(angle)
