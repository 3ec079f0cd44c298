"""Attention to the neighbours only."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.reference import Row
from regard.core.rows import Mask
from regard.core.shape import Order, Shape
from regard.kernels import runs
from regard.kernels.band import band_parts
from regard.kernels.compiling import at_most, count_blocks
from regard.kernels.parts import Part, Runs, union
from regard.kernels.runs import Bound, Pass
from regard.layers.attention.base import Facts
from regard.layers.attention.tailed import Tailed


class Local(Tailed):
    """Luong et al. 2015 (local-m) with the softmax of Vaswani et al. 2017, section 4 (restricted self-attention): query
    i sees the keys j with |i - j| <= w, of the past only where it is causal. Their D (Luong) or r is our window w.

    A token sees itself and w neighbours on a side: w + 1 keys (causal) or 2 w + 1. Time N w, memory N, state w.

    2-D: with window=[r, c] the tokens are the cells of a grid, row by row, `width` of them in a row, for any number of
    rows: a query sees the cells within r rows and c columns of its own, of the past only where it is causal. All cells
    of the 2 r + 1 rows are compared and those of other columns left out: time and memory N r width. On a small grid all
    cells are compared.
    """

    facts = Facts(
        name="local",
        paper="Luong et al. 2015, Effective Approaches to Attention-based Neural Machine Translation (section 3.2)",
        link="arXiv 1508.04025",
        family="patterns",
        formula="o_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j over |i - j| <= window (causal: 0 <= i - j <= window)",
        time=Order("N window", 1),
        memory=Order("N", 1),
        state=Order("window", 0),
        roles=("self", "causal"),
        refusals=(("cross", "a window of positions has no meaning between two sequences"),),
        positions=("rotation", "bias"),
    )
    examples = (
        "local(window=3)",
        "local(window=8)",
        "local(window=[1, 2], width=6)",
        "local(window=[1, 0], width=4)",
    )
    reduces_to = (
        ("local(window=64)", "softmax"),
        ("local(window=[64, 64], width=6)", "softmax"),
        ("local(window=[1, 5], width=64)", "local(window=5)"),
        ("local(window=[3, 64], width=1)", "local(window=3)"),
    )
    grouped = True
    rings = True

    def __init__(
        self,
        shape: Shape,
        *,
        window: Annotated[
            int | tuple[int, ...],
            "window size: tokens seen on each side, besides the query's own; or [rows, columns] of a grid",
        ] = 256,
        width: Annotated[int | None, "width of the grid, for a window of rows and columns"] = None,
    ):
        self.grid: tuple[int, int, int] | None = None  # rows and columns on each side, and columns of the grid
        if isinstance(window, int) and width is None:
            if window < 1:
                raise ValueError(f"option 'window' of 'local' must be at least 1, got {window}")
            self.window = self.reach = window
        elif isinstance(window, int) or width is None or len(window) != 2 or width < 1:
            raise ValueError(
                f"'local' takes window=w, or window=[rows, columns] and width=W of the grid, got window={window}, "
                f"width={width}"
            )
        else:
            rows, columns = window[0], min(window[1], width - 1)
            self.grid, self.window = (rows, columns, width), columns
            self.reach = max(rows * width + columns, 1)
            self.rings = False
            costs = {"time": Order("N rows width", 1), "state": Order("rows width", 0)}
            self.facts = replace(self.facts, **costs, positions=("rotation",))
        super().__init__(shape)

    @classmethod
    def grid_option(cls, options: Mapping[str, Any]) -> str | None:
        return "width" if isinstance(options.get("window"), tuple | list) else None

    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.grid is not None:
            return self._attend_grid(mask, q, k, v, *self.grid)
        if mask.T == 1:
            # the tail of one query is its window
            return self.product(mask, q, k, v, self.scale)
        before = at_most(self.window, mask.S)
        after = 0 if mask.causal else before
        run_bias = None if self.position is None else self.position.run_bias(before, after)
        if runs.takes(q, k, v, run_bias):
            near = Pass(Bound(plus=-before), Bound(plus=after + 1))
            return runs.attend(q, k, v, [near], scale=self.scale, where=mask.where(), bias=run_bias)
        bias, scheme = None, self.scheme("bias")
        if scheme is not None:
            gaps = torch.arange(-before, after + 1, device=q.device)[None]
            bias = scheme.bias(scheme.places(gaps))[:, 0]  # [H, before + 1 + after]
        parts = band_parts(mask.T, before=before, after=after, shift=mask.known_shift, bias=bias, device=q.device)
        # no causal query of a whole sequence sees what stands behind it
        real = None if mask.full or (mask.causal and mask.aligned) else mask.real()
        return union(q, k, v, parts, scale=self.scale, real=real)

    def _attend_grid(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, r: int, c: int, W: int) -> Tensor:
        """The queries of a row of the grid see the rows around it, but for the columns that are too far."""

        def sees(i: Tensor, j: Tensor) -> Tensor:
            return ((i // W - j // W).abs() <= r) & ((i % W - j % W).abs() <= c)

        if not mask.aligned:
            return self.attend_past(mask, q, k, v, sees)
        if self.takes_whole(mask, (r + 1 if mask.causal else 2 * r + 1) * W):
            return self.attend_whole(mask, q, k, v, sees)
        T, lines = mask.T, count_blocks(mask.T, W)
        above = at_most(r, lines)
        below = 0 if mask.causal else above
        q = F.pad(q, (0, 0, 0, lines * W - T))
        k, v = (F.pad(part, (0, 0, above * W, (lines + below) * W - T)) for part in (k, v))
        slots, columns = torch.arange((above + 1 + below) * W, device=q.device), torch.arange(W, device=q.device)
        visible = (slots % W - columns[:, None]).abs() <= c  # [W, keys]
        if mask.causal:
            visible = visible & (slots <= (above * W + columns)[:, None])
        at = torch.arange((above + lines + below) * W, device=q.device) - above * W
        real = (at >= 0) & (at < mask.end[:, None])
        part = Part(Runs(0, W, lines, W), Runs(0, (above + 1 + below) * W, lines, W), mask=visible)
        return union(q, k, v, [part], scale=self.scale, real=real)[:, :, :T]

    def plain(self, row: Row) -> Tensor:
        if self.grid is not None:
            r, c, W = self.grid
            near = [[abs(i // W - j // W) <= r and abs(i % W - j % W) <= c for j in range(row.S)] for i in range(row.T)]
            seen = ([j for j in row.past(i) if near[i][j]] for i in range(row.T))
            return torch.stack([row.attend(i, keys, self.scale) for i, keys in enumerate(seen)])
        seen = ([j for j in row.past(i) if abs(i - j) <= self.window] for i in range(row.T))
        return torch.stack([row.attend(i, keys, self.scale) for i, keys in enumerate(seen)])
