"""Attention along the rows and the columns of a grid."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.numeric import take_tokens
from regard.core.rows import Mask, Rows
from regard.core.shape import Order, Shape
from regard.core.state import Initial, Out, Progress, check_rows, take_rows
from regard.kernels.compiling import count_blocks, is_dynamic
from regard.layers.attention.base import Attention, Facts
from regard.layers.attention.cached import Cached, write_slots
from regard.layers.attention.checks import input_position
from regard.spec import ATTENTION


class AxialState(NamedTuple):
    """The row of the grid that each sequence is in, slot = column, and the columns of those above it."""

    x: Tensor  # [B, w, E] what was read of the row
    above: Tensor  # [B, w, E] u of the row
    inner: tuple[Tensor, Tensor]  # [B, w, G, D] its keys and values
    columns: tuple[Tensor, Tensor]  # [B w, G, C, D] keys and values of every column, slot = row
    progress: Progress

    def select(self, rows: Tensor) -> "AxialState":
        check_rows(rows, self)
        w = self.x.shape[1]
        folded = (rows[:, None] * w + torch.arange(w, device=rows.device)).flatten()
        return self._replace(
            x=self.x[rows],
            above=self.above[rows],
            inner=tuple(part[rows] for part in self.inner),
            columns=tuple(part[folded] for part in self.columns),
            progress=take_rows(self.progress, rows),
        )


class Axial(Attention):
    """Ho et al. 2019: tokens are the cells of a grid, row by row, w of them in a row, for any number of rows. A whole
    softmax attention with projections of its own goes along the rows, and another along the columns:

        self:    y = Column(Row(x))
        causal:  u = ShiftDown(MaskedColumn(Row(x))),    y = MaskedRow(x + u)

    The causal form is an outer and an inner layer of their decoder, without what a Transformer layer puts around them:
    Row sees whole rows, so what it tells of a row is read from the next row on; u holds all rows above a token, and the
    inner layer adds the tokens before it in its own row. Their shift to the right is not made here: token i reads
    itself, as everywhere in Regard. A grid of more axes is left to them. Decoding keeps the columns of all rows above.

    The map is the product of those of its attentions, head by head: C R, or M (1 + ShiftDown(C R)) with M that of the
    inner layer, which counts x and u. Time N (w + N / w), which is N^1.5 for w = sqrt(N); memory N. For a w that stays
    the exponent rises with the length towards 2: for w = 6 and width 16 (the rest of the work is linear) it is 1.72 to
    1.80 from 1,024 to 2,048 tokens, where it is counted and declared, and 1.91 from 4,096 to 8,192.
    """

    facts = Facts(
        name="axial",
        paper="Ho et al. 2019, Axial Attention in Multidimensional Transformers",
        link="arXiv 1912.12180",
        family="patterns",
        formula="y = Column(Row(x)); causal: y = MaskedRow(x + ShiftDown(MaskedColumn(Row(x))))",
        time=Order("N (w + N / w)", 1.75),
        memory=Order("N", 1),
        state=Order("N", 1),
        roles=("self", "causal"),
        refusals=(("cross", "queries and keys are cells of one grid, and a memory is another sequence"),),
        exact=False,
        independent_heads=False,
    )
    examples = ("axial(width=6)",)

    def __init__(self, shape: Shape, *, width: Annotated[int, "width of the grid: tokens per row (w)"] = 32):
        super().__init__(shape)
        if width < 1:
            raise ValueError(f"option 'width' of 'axial' must be at least 1, got {width}")
        self.position = input_position("axial", shape, "a query meets most keys through another row or column")
        self.width, causal = width, shape.role == "causal"
        plain = replace(shape, position=None)
        hidden = replace(plain, out_width=shape.width)
        self.rows: Cached = ATTENTION.build("softmax", replace(hidden, role="self"))
        self.columns: Cached = ATTENTION.build("softmax", hidden if causal else plain)
        self.inner: Cached | None = ATTENTION.build("softmax", plain) if causal else None
        if causal:
            self.facts = replace(self.facts, signed=True)

    @classmethod
    def grid_option(cls, options: Mapping[str, Any]) -> str | None:
        return "width"

    def forward_packed(self, x, rows=None, *, state=None, memory=None, stream=None) -> Out:
        rows = rows or Rows.full(x)
        x = x if self.position is None else self.position.add(x, rows)
        if state is not None:
            return self._later(x, rows, state)
        grid, counts = self._grid(x, rows)
        y = self._columns(self._rows(grid, counts[0]), counts[1])
        if self.inner is not None:
            y = self._rows(grid + _down(y), None, self.inner)
        return Out(y.flatten(1, 2)[:, : rows.T])

    def initial_state(self, batch, *, memory=None, stream=None, capacity=None, dtype, device) -> Initial:
        w, G, D = self.width, self.shape.kv_heads, self.shape.head_width

        def zeros(*size: int) -> Tensor:
            return torch.zeros(batch, w, *size, dtype=dtype, device=device)

        size = (batch * w, G, -(-(capacity or 0) // w), D)
        keys, values = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
        x, above, inner = zeros(self.shape.width), zeros(self.shape.width), (zeros(G, D), zeros(G, D))
        return Initial(AxialState(x, above, inner, (keys, values), Progress.initial(batch, device)))

    def apply_map(self, values, x, rows=None, *, memory=None, stream=None) -> Tensor:
        rows = rows or Rows.full(x)
        x = x if self.position is None else self.position.add(x, rows)
        grid, counts = self._grid(x, rows)
        m, w = grid.shape[1:3]

        def along_rows(layer: Attention, grid: Tensor, count: Tensor | None, values: Tensor) -> Tensor:
            folded = grid.flatten(0, 1)
            return layer.map(folded, _rows(folded, count)).unflatten(0, (-1, m)).transpose(1, 2) @ values

        values = F.pad(values, (0, 0, 0, m * w - rows.T)).unflatten(2, (m, w))
        first = self._rows(grid, counts[0])
        folded = first.transpose(1, 2).flatten(0, 1)
        maps = self.columns.map(folded, _rows(folded, counts[1])).unflatten(0, (-1, w)).transpose(1, 2)
        o = (maps @ along_rows(self.rows, grid, counts[0], values).transpose(2, 3)).transpose(2, 3)  # [B, H, m, w, n]
        if self.inner is not None:
            above = F.pad(o[:, :, :-1], (0, 0, 0, 0, 1, 0))
            o = along_rows(self.inner, grid + _down(self._columns(first, counts[1])), None, values + above)
        return o.flatten(2, 3)[:, :, : rows.T]

    def _grid(self, x: Tensor, rows: Rows) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
        """[B, T, E] -> [B, m, w, E], and the cells that are real in each row [B m] and column [B w] of it; None: all,
        or all that matter."""
        w = self.width
        m = count_blocks(rows.T, w)
        grid = F.pad(x, (0, 0, 0, m * w - rows.T)).unflatten(1, (m, w))
        # a causal token reads rows above its own, and those are complete
        whole = rows.uniform_start is not None and not is_dynamic(rows.T) and m * w == rows.T
        if self.inner is not None or whole:
            return grid, (None, None)
        lines, columns = (torch.arange(n, device=x.device) for n in (m, w))
        return grid, (
            (rows.count[:, None] - lines * w).clamp(0, w).flatten(),
            ((rows.count[:, None] - columns + w - 1) // w).clamp(min=0).flatten(),
        )

    def _rows(self, grid: Tensor, count: Tensor | None, layer: Attention | None = None) -> Tensor:
        folded = grid.flatten(0, 1)
        return (layer or self.rows).forward_packed(folded, _rows(folded, count)).y.unflatten(0, grid.shape[:2])

    def _columns(self, grid: Tensor, count: Tensor | None) -> Tensor:
        folded = grid.transpose(1, 2).flatten(0, 1)
        return (
            self.columns.forward_packed(folded, _rows(folded, count)).y.unflatten(0, (-1, self.width)).transpose(1, 2)
        )

    def _later(self, x: Tensor, rows: Rows, state: AxialState) -> Out:
        """New tokens, on a grid from the beginning of the row that the first one is in."""
        assert self.inner is not None, "only role 'causal' has a state"
        B, T, w = x.shape[0], rows.T, self.width
        # before the first token every sequence is at the beginning of a row
        m = -(-(T if state.progress.longest == 0 else w - 1 + T) // w)
        inside = rows.start % w
        after = inside + rows.count
        cell = torch.arange(m * w, device=x.device)
        # of a row's cells, and of the new tokens behind them
        at = torch.where(cell < inside[:, None], cell, (w + cell - inside[:, None]).clamp(max=w + T - 1))

        def lay(old: Tensor, new: Tensor) -> Tensor:
            return take_tokens(torch.cat([old, new], 1), at)  # [B, m w, ...]

        def last(grid: Tensor) -> Tensor:
            """The row that the next token is in; where nothing of it is known yet, any number."""
            return take_tokens(grid, ((after // w * w)[:, None] + cell[:w]).clamp(max=m * w - 1))

        grid = lay(state.x, x)
        above, columns = state.above[:, None], state.columns
        # the host may know that no row becomes complete
        if torch.compiler.is_compiling() or rows.uniform_start is None or rows.uniform_start % w + T >= w:
            first = self._rows(grid.unflatten(1, (m, w)), None).transpose(1, 2).flatten(0, 1)  # [B w, m, E]
            out, columns = self._extended(
                first, (rows.start // w).repeat_interleave(w), columns, state.progress.longest // w
            )
            above = torch.cat([above, out.unflatten(0, (B, w)).transpose(1, 2)], 1)  # [B, m + 1, w, E]
        cells = inside[:, None] + torch.arange(T, device=x.device)  # of the new tokens
        h = x + take_tokens(above.flatten(1, 2), cells.clamp(max=above.shape[1] * w - 1))
        query, source = self.inner.project_inputs(h, rows, None)
        q = take_tokens(query["q"].transpose(1, 2), (cell - inside[:, None]).clamp(0, T - 1))
        k, v = (lay(old, new.transpose(1, 2)) for old, new in zip(state.inner, source.values(), strict=True))
        q, k, v = (part.unflatten(1, (m, w)).flatten(0, 1).transpose(1, 2) for part in (q, k, v))
        o = self.inner.attend_projected(Rows.full(q[:, 0]), {"q": q}, {"k": k, "v": v})[0].transpose(
            1, 2
        )  # [B m, w, H, D]
        y = self.inner.output(take_tokens(o.unflatten(0, (B, m)).flatten(1, 2), cells).flatten(2))
        k, v = (last(part.transpose(1, 2).unflatten(0, (B, m)).flatten(1, 2)) for part in (k, v))
        above = take_tokens(above, (after // w)[:, None].clamp(max=above.shape[1] - 1))[:, 0]
        return Out(y, AxialState(last(grid), above, (k, v), columns, state.progress.advance(rows)))

    def _extended(
        self, x: Tensor, start: Tensor, old: tuple[Tensor, Tensor], top: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Columns with m more rows from row `start` on; those that are not complete yet are written again later."""
        m = x.shape[1]
        query, source = self.columns.project_inputs(x, Rows.full(x), None)
        at, need = start[:, None] + torch.arange(m, device=x.device), top + m
        k, v = (write_slots(part, new, at, need) for part, new in zip(old, source.values(), strict=True))
        mask = Mask(start, torch.zeros_like(start), start + m, m, need, causal=True, full=False, shift=None)
        o = self.columns.attend(mask, q=query["q"], k=k[:, :, :need], v=v[:, :, :need])
        return self.columns.output(o.transpose(1, 2).flatten(2)), (k, v)

    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x, w, T = x if self.position is None else self.position.plain_add(x), self.width, len(x)
        lines = [list(range(first, min(first + w, T))) for first in range(0, T, w)]
        columns = [list(range(first, T, w)) for first in range(min(w, T))]

        def along(layer: Attention, x: Tensor, sets: list[list[int]]) -> list[Tensor]:
            by_cell: dict[int, Tensor] = {}
            for cells in sets:
                by_cell |= dict(zip(cells, layer.reference(x[cells]), strict=True))
            return [by_cell[i] for i in range(T)]

        y = along(self.columns, torch.stack(along(self.rows, x, lines)), columns)
        if self.inner is None:
            return torch.stack(y)
        return torch.stack(
            along(self.inner, torch.stack([x[i] if i < w else x[i] + y[i - w] for i in range(T)]), lines)
        )


def _rows(x: Tensor, count: Tensor | None) -> Rows:
    return Rows.full(x) if count is None else Rows(torch.zeros_like(count), count, x.shape[1], None)


def _down(grid: Tensor) -> Tensor:
    """[B, m, w, E] moved down by a row, zeros in the first."""
    return F.pad(grid[:, :-1], (0, 0, 0, 0, 1, 0))
