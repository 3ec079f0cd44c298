"""Fourier features of the position, mapped to the width and added to the token vectors."""

import math
from typing import Annotated

import torch
from torch import Tensor, nn

from regard.core.rows import Rows
from regard.core.shape import Shape
from regard.layers.position.base import Position, PositionFacts, angles, check_columns, check_end, exact


class Fourier(Position):
    """Jaegle et al. 2021: x_t + W F_t, F_t = (c, sin(pi f_k c), cos(pi f_k c)) of the coordinate c of token t, which
    runs from -1 at the first of `longest` tokens to 1 at the last. The frequencies f_k rise in `bands` even steps from
    1 to `highest`, by default half the number of tokens, the Nyquist frequency. W is learned and has no bias.

    The authors concatenate F_t with what a token is made of, u_t. Where x_t = V u_t, as for the patches of an image,
    V u_t + W F_t = [V W] [u_t; F_t]: adding is the same as concatenating before the linear map.

    With `columns` the tokens are the cells of a grid, row by row, and F_t has the features of row and column, each with
    a coordinate and frequencies of its own: [coordinates | sines | cosines]. A first token that is `apart`, such as a
    class token, gets nothing added and the grid begins behind it; `longest` counts it. Cost N bands E."""

    facts = PositionFacts(
        name="fourier",
        paper="Jaegle et al. 2021, Perceiver: General Perception with Iterative Attention (section 3.2)",
        link="arXiv 2103.03206",
        kind="input",
        formula="x_t + W (c, sin pi f_k c, cos pi f_k c)_k, c = -1 ... 1, f_k = 1 ... highest, W learned",
    )
    examples = (
        "fourier(bands=3, longest=256)",
        "fourier(bands=4, columns=5, longest=256)",
        "fourier(bands=3, highest=2.5, columns=4, apart=True, longest=257)",
    )
    rates: Tensor  # [axes, bands]

    def __init__(
        self,
        shape: Shape,
        *,
        bands: Annotated[int, "number of frequencies along each axis"] = 64,
        highest: Annotated[
            float | None, "highest frequency, in periods per axis; None: half the number of tokens along the axis"
        ] = None,
        longest: Annotated[int, "maximum number of positions, over which coordinates run from -1 to 1"] = 1024,
        columns: Annotated[int | None, "tokens in a row of the grid that they are cells of; None: a line"] = None,
        apart: Annotated[bool, "the first token, such as a class token, is no cell of the grid"] = False,
    ):
        super().__init__(shape)
        check_columns("fourier", columns, apart)
        if bands < 1:
            raise ValueError(f"option 'bands' of 'fourier' must be at least 1, got {bands}")
        if highest is not None and not 1 <= highest < math.inf:
            raise ValueError(f"option 'highest' of 'fourier' must be at least 1, the lowest frequency, got {highest}")
        if longest < 1 + apart:
            raise ValueError(f"option 'longest' of 'fourier' must be at least {1 + apart}, got {longest}")
        self.bands, self.highest, self.longest = bands, highest, longest
        self.columns, self.apart = columns, apart
        # tokens along each axis: of a grid its rows and its columns
        self.sizes = (longest,) if columns is None else (-(-(longest - apart) // columns), columns)
        turns = [math.pi * f / max(n - 1, 1) for n in self.sizes for f in self._frequencies(n)]
        self.register_buffer("rates", exact(turns).view(len(self.sizes), bands), persistent=False)
        self.project = nn.Linear(len(self.sizes) * (2 * bands + 1), shape.width, bias=False)
        nn.init.xavier_uniform_(self.project.weight)

    def _frequencies(self, n: int) -> list[float]:
        """Those of an axis with n tokens."""
        top = max(1.0, n / 2) if self.highest is None else self.highest
        return [1 + (top - 1) * k / max(self.bands - 1, 1) for k in range(self.bands)]

    def add(self, x: Tensor, rows: Rows) -> Tensor:
        check_end("fourier", x, rows, self.longest)
        positions = rows.positions()
        places = (positions,) if self.columns is None else self.cells(positions, self.columns)
        # coordinates times n - 1, which are whole numbers
        places = [2 * at - (n - 1) for at, n in zip(places, self.sizes, strict=True)]
        angle = torch.cat([angles(at, rates, x.dtype) for at, rates in zip(places, self.rates, strict=True)], -1)
        coordinates = [at.to(angle) / max(n - 1, 1) for at, n in zip(places, self.sizes, strict=True)]
        features = torch.cat([torch.stack(coordinates, -1), angle.sin(), angle.cos()], -1)  # [1 or B, T, F]
        if self.apart:
            features = torch.where((positions > 0)[..., None], features, 0)
        return x + self.project(features.to(self.project.weight.dtype))

    def plain_add(self, x: Tensor) -> Tensor:
        out = []
        for t, vector in enumerate(x):
            if self.apart and t == 0:
                out.append(vector)
                continue
            axes = [(t, self.longest)]
            if self.columns is not None:
                row, column = divmod(t - self.apart, self.columns)
                axes = [(row, math.ceil((self.longest - self.apart) / self.columns)), (column, self.columns)]
            coordinates, sines, cosines = [], [], []
            for place, n in axes:
                c = 2 * place / (n - 1) - 1 if n > 1 else 0.0
                coordinates.append(c)
                highest = self.highest or max(1.0, n / 2)
                for k in range(self.bands):
                    f = 1 + k * (highest - 1) / (self.bands - 1) if k else 1.0
                    sines.append(math.sin(math.pi * f * c))
                    cosines.append(math.cos(math.pi * f * c))
            features = torch.tensor(coordinates + sines + cosines, dtype=torch.float64)
            out.append(vector + self.project.weight @ features.to(x))
        return torch.stack(out)
