"""Attention inside windows of a grid, which may be shifted."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.reference import Row, blend
from regard.core.rows import Mask, Rows
from regard.core.shape import Order, Shape
from regard.kernels.compiling import count_blocks, is_dynamic
from regard.layers.attention.attending import Attending
from regard.layers.attention.base import Facts


class Windows(NamedTuple):
    """How the cells of a grid go into n windows of L slots, and back."""

    token: Tensor  # [n L] the token in each slot; any where there is none
    there: Tensor  # [n L] whether there is one
    same: Tensor  # [n, L, L] whether two slots belong to the same window of the plane
    slot: Tensor  # [T] the slot of each token


class Swin(Attending):
    """Liu et al. 2021: tokens are the cells of a grid, row by row, `width` of them in a row, for any number of rows.
    Cells a and b see each other where they lie in the same window of h x w cells, of a plane cut into windows from
    (s_h, s_w) on, `shift`,

        floor((row_a - s_h) / h) = floor((row_b - s_h) / h),  and the same for the columns,

    so that windows at the border are cut, and never wrapped: the authors get the same from a rolled map and a mask that
    adds -100. In its window a query reads by softmax(q k^T / sqrt(D) + B) v, with B a learned number for each head and
    distance in rows and columns, table[(row_a - row_b + h - 1)(2 w - 1) + column_a - column_b + w - 1]. Layers with
    shift 0 and half a window in turn connect the windows.

    Where windows do not divide the map, the authors pad it with zeros that are read as keys; here nothing is read that
    is not there. Time N window^2, memory N.
    """

    facts = Facts(
        name="swin",
        paper="Liu et al. 2021, Swin Transformer: Hierarchical Vision Transformer using Shifted Windows",
        link="arXiv 2103.14030",
        family="patterns",
        formula="o_i = sum_j softmax_j(q_i . k_j / sqrt(D) + B[row_i - row_j, column_i - column_j]) v_j in a window",
        time=Order("N window^2", 1),
        memory=Order("N", 1),
        roles=("self",),
        refusals=(
            ("causal", "a window reaches to the cells behind a query, and its first query would see nothing"),
            ("cross", "queries and keys are cells of one grid, and a memory is another sequence"),
        ),
        positions=("rotation",),
    )
    examples = (
        "swin(window=3, width=6)",
        "swin(window=4, shift=2, width=8)",
        "swin(window=[2, 4], shift=[1, 3], width=7, relative=False)",
    )
    reduces_to = (
        ("swin(window=33, width=6, relative=False)", "softmax"),
        ("swin(window=[1, 6], width=6, relative=False)", "image(block=6, memory=0)"),
        ("swin(window=[2, 3], width=3, relative=False)", "image(block=6, memory=0)"),
    )

    def __init__(
        self,
        shape: Shape,
        *,
        window: Annotated[int | tuple[int, ...], "side of a window in cells (M), or [rows, columns]"] = 7,
        shift: Annotated[int | tuple[int, ...], "where the windows begin (s), or [rows, columns]"] = 0,
        width: Annotated[int, "width of the grid: tokens per row"] = 32,
        relative: Annotated[bool, "a learned bias for each head and distance in rows and columns"] = True,
    ):
        super().__init__(shape)
        self.window, self.shift = _pair("window", window), _pair("shift", shift)
        if min(self.window) < 1 or any(s >= m for s, m in zip(self.shift, self.window, strict=True)):
            raise ValueError(
                f"a window of 'swin' has at least 1 cell and is shifted by less than its side, got window={window}, "
                f"shift={shift}"
            )
        if width < 1:
            raise ValueError(f"option 'width' of 'swin' must be at least 1, got {width}")
        self.width = width
        self.table: nn.Parameter | None = None
        if relative:
            h, w = self.window
            self.table = nn.Parameter(
                nn.init.trunc_normal_(torch.empty((2 * h - 1) * (2 * w - 1), shape.heads), std=0.02)
            )

    @classmethod
    def grid_option(cls, options: Mapping[str, Any]) -> str | None:
        return "width"

    def attend_self(
        self, rows: Rows, query: dict[str, Tensor], source: dict[str, Tensor], state: None
    ) -> tuple[Tensor, None]:
        return self.attend(self.whole_mask(rows), **query, **self.repeat_heads(source)), None

    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (h, w), W, T = self.window, self.width, mask.T
        high, wide = count_blocks(count_blocks(T, W), h), -(-W // w)
        whole = not is_dynamic(T) and high * h * wide * w == T
        if whole and mask.full and self.shift == (0, 0):
            # windows are blocks of the grid: no cell is looked up, and none is hidden
            blocks = (high, h, wide, w)
            q, k, v = (x.unflatten(2, blocks).transpose(3, 4).flatten(4, 5).flatten(2, 3) for x in (q, k, v))
            o = self._in_windows(q, k, v, None)
            return o.unflatten(3, (h, w)).unflatten(2, (high, wide)).transpose(3, 4).flatten(2, 5)
        windows = self._windows(T, high, wide, q.device)
        visible, there = windows.same, windows.there
        if not mask.full:
            there = mask.real()[:, windows.token] & there  # [B, n L]
        if not (whole and mask.full):
            there = there.unflatten(-1, visible.shape[:2])
            # what is not there sees all, lest its row divide by zero: nobody reads it
            visible = (visible & there[..., None, :]) | ~there[..., :, None]
        q, k, v = (x.index_select(2, windows.token).unflatten(2, windows.same.shape[:2]) for x in (q, k, v))
        return self._in_windows(q, k, v, visible).flatten(2, 3).index_select(2, windows.slot)

    def _in_windows(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        """[B, H, n, L, D] of each, and what is visible [n, L, L] or [B, n, L, L] -> [B, H, n, L, D]"""
        logits = visible
        if self.table is not None:
            logits = self.table[self._distances(q.device)].movedim(-1, 0).to(q.dtype)[:, None]  # [H, 1, L, L]
            if visible is not None:
                logits = torch.where(visible.unsqueeze(-4), logits, -torch.inf)
        elif visible is not None:
            logits = visible.unsqueeze(-4)
        if logits is not None:
            logits = logits.expand(*logits.shape[:-4], *q.shape[1:3], -1, -1).flatten(-4, -3)
            logits = logits if logits.dim() == 4 else logits[None]
        # windows take the place of heads: so one table serves all rows of the batch
        o = F.scaled_dot_product_attention(
            q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2), attn_mask=logits, scale=self.scale
        )
        return o.unflatten(1, q.shape[1:3])

    def _distances(self, device: torch.device) -> Tensor:
        """[L, L] the row of the table for each query and key of a window."""
        h, w = self.window
        slot = torch.arange(h * w, device=device)
        row, column = slot // w, slot % w
        down, right = row[:, None] - row + h - 1, column[:, None] - column + w - 1
        return down * (2 * w - 1) + right

    def _windows(self, T: int, high: int, wide: int, device: torch.device) -> Windows:
        """The windows of a grid of T cells, high x wide of them. The plane is moved by the shift as on a ring, so that
        the pieces of windows at opposite borders share one, in which they do not see each other."""
        (h, w), (s, t), W = self.window, self.shift, self.width
        # made on the device, not copied to it: a CUDA graph may not copy from the host
        slot = torch.arange(high * wide * h * w, device=device).view(high, wide, h * w)
        at, inside = slot // (h * w), slot % (h * w)
        row = (at // wide * h + inside // w + s) % (high * h)
        column = (at % wide * w + inside % w + t) % (wide * w)
        token = row * W + column
        there = (column < W) & (token < T)
        # those that came around the ring stand before the first window
        part = 2 * (row < s) + (column < t)
        same = (part[..., :, None] == part[..., None, :]).flatten(0, 1)
        tokens = torch.arange(T, device=device)
        row, column = (tokens // W - s) % (high * h), (tokens % W - t) % (wide * w)
        back = (row // h * wide + column // w) * (h * w) + row % h * w + column % w
        return Windows(torch.where(there, token, 0).flatten(), there.flatten(), same, back)

    def plain(self, row: Row) -> Tensor:
        (h, w), (s, t) = self.window, self.shift
        cells = [divmod(i, self.width) for i in range(row.T)]
        outs = []
        for i, (r, c) in enumerate(cells):
            seen = [j for j, (y, x) in enumerate(cells) if ((y - s) // h, (x - t) // w) == ((r - s) // h, (c - t) // w)]
            logits = []
            for j in seen:
                logit = self.scale * row.product(i, j)
                if self.table is not None:
                    down, right = r - cells[j][0], c - cells[j][1]
                    logit = logit + self.table[(down + h - 1) * (2 * w - 1) + right + w - 1, row.head]
                logits.append(logit)
            outs.append(blend(torch.stack(logits), [row.v[j] for j in seen]))
        return torch.stack(outs)


def _pair(name: str, value: int | tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns."""
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2:
        raise ValueError(f"option {name!r} of 'swin' must be a number or [rows, columns], got {value}")
    return pair[0], pair[1]
