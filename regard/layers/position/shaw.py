"""Learned vectors for clipped distances, joined to keys and values."""

from typing import Annotated

import torch
from torch import Tensor, nn

from regard.core.rows import Mask
from regard.core.shape import Shape
from regard.layers.position.base import Position, PositionFacts


class Shaw(Position):
    """Shaw et al. 2018: e_ij = q_i . (k_j + a^K_ij) / sqrt(D), z_i = sum_j alpha_ij (v_j + a^V_ij), where a_ij is the
    row clip(j - i, -k, k) of a table of 2k + 1 (k: `distance`). No N x N x D tensor is built: q meets the table,
    from which the logits are picked, and the weights are added up by row before they meet it. Time N^2 D, as q.k."""

    facts = PositionFacts(
        name="shaw",
        paper="Shaw et al. 2018, Self-Attention with Relative Position Representations",
        link="arXiv 1803.02155",
        kind="content",
        formula="q_i . (k_j + a^K_clip(j-i)) / sqrt(D), values v_j + a^V_clip(j-i)",
    )
    examples = ("shaw(distance=3, values=False)", "shaw(distance=2, shared=False)")

    def __init__(
        self,
        shape: Shape,
        *,
        distance: Annotated[int, "largest relative distance, to which others are clamped (k in the paper)"] = 16,
        values: Annotated[bool, "a table for the values too"] = True,
        shared: Annotated[bool, "one table for all heads; the paper's base model has one each"] = True,
    ):
        super().__init__(shape)
        if distance < 1:
            raise ValueError(f"option 'distance' of 'shaw' must be at least 1, got {distance}")
        self.distance = distance
        size = (1 if shared else shape.heads, 2 * distance + 1, shape.head_width)
        deviation = shape.head_width**-0.5
        self.key_table = nn.Parameter(torch.empty(size).normal_(std=deviation))
        self.value_table = nn.Parameter(torch.empty(size).normal_(std=deviation)) if values else None

    def scores(self, q: Tensor, k: Tensor, mask: Mask, scale: float) -> Tensor:
        q = q * scale
        place = (q @ self.key_table.mT).gather(-1, self._rows(mask).expand(*q.shape[:3], mask.S))
        return q @ k.mT + self.without_first(place, mask)

    def values(self, weights: Tensor, mask: Mask) -> Tensor | None:
        if self.value_table is None:
            return None
        empty = weights.new_zeros(*weights.shape[:3], self.value_table.shape[1])
        weights = self.without_first(weights, mask)
        bins = empty.scatter_add(-1, self._rows(mask).expand_as(weights), weights)  # [B, H, T, 2k + 1]
        return bins @ self.value_table.to(bins.dtype)

    def _rows(self, mask: Mask) -> Tensor:
        """The row of the tables for each query and key, [T, S] or [B, 1, T, S]."""
        rows = self.gap(mask).clamp(-self.distance, self.distance) + self.distance
        return rows if rows.dim() == 2 else rows[:, None]

    def plain_score(self, head: int, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
        return q @ self._plain_row(self.key_table, head, i, j)

    def plain_value(self, head: int, i: int, j: int) -> Tensor | float:
        return 0.0 if self.value_table is None else self._plain_row(self.value_table, head, i, j)

    def _plain_row(self, table: Tensor, head: int, i: int, j: int) -> Tensor:
        return table[head % len(table)][max(-self.distance, min(self.distance, j - i)) + self.distance]
