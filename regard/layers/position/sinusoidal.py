"""Sinusoids of the position, added to the token vectors."""

import math
from typing import Annotated, Literal

import torch
from torch import Tensor

from regard.core.rows import Rows
from regard.core.shape import Shape
from regard.layers.position.base import Position, PositionFacts, angles, rates


class Sinusoidal(Position):
    """Vaswani et al. 2017: PE(t, 2i) = sin(t / 10000^(2i/E)), PE(t, 2i+1) = cos(t / 10000^(2i/E)), for any t and any
    width (an odd one ends with a sine). "halves" holds the same numbers as [sines | cosines]. Cost N E."""

    facts = PositionFacts(
        name="sinusoidal",
        paper="Vaswani et al. 2017, Attention Is All You Need (section 3.5)",
        link="arXiv 1706.03762",
        kind="input",
        formula="x_t + PE_t, PE_t = (sin t w_i, cos t w_i)_i, w_i = base^(-2i/E)",
    )
    examples = ("sinusoidal", "sinusoidal(layout='halves', base=50.0)")
    rates: Tensor  # [E / 2]

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
    ):
        super().__init__(shape)
        if base <= 1:
            raise ValueError(f"option 'base' of 'sinusoidal' must be more than 1, got {base}")
        self.layout, self.base = layout, base
        self.register_buffer("rates", rates(shape.width, base), persistent=False)

    def add(self, x: Tensor, rows: Rows) -> Tensor:
        angle = angles(rows.positions(), self.rates, x.dtype)  # [1 or B, T, E / 2]
        waves = (angle.sin(), angle.cos())
        placed = torch.stack(waves, -1).flatten(-2) if self.layout == "interleaved" else torch.cat(waves, -1)
        return x + placed[..., : self.shape.width].to(x.dtype)

    def plain_add(self, x: Tensor) -> Tensor:
        T, E = x.shape
        placed = torch.zeros(T, E, dtype=torch.float64)
        for t in range(T):
            for c in range(E):
                i, cosine = (c // 2, c % 2 == 1)
                if self.layout == "halves":
                    sines = math.ceil(E / 2)
                    i, cosine = (c, False) if c < sines else (c - sines, True)
                angle = t / self.base ** (2 * i / E)
                placed[t, c] = math.cos(angle) if cosine else math.sin(angle)
        return x + placed.to(x)
