"""Learned vectors for distances that meet the query, in memory of the length."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.rows import Mask
from regard.core.shape import Shape
from regard.layers.position.base import Position, PositionFacts, lookup


class Music(Position):
    """Huang et al. 2018: (Q K^T + Skew(Q E_r^T)) / sqrt(D), E_r with a row for each distance i - j < L (L: `longest`),
    role "self" also for each j - i < L. Farther keys get no term, as if the table went on with zeros (Tensor2Tensor's
    rule). Time N^2 D, and beside the logits memory N D where Shaw et al. had N^2 D."""

    facts = PositionFacts(
        name="music",
        paper="Huang et al. 2018, Music Transformer",
        link="arXiv 1809.04281",
        kind="content",
        formula="(q_i . k_j + q_i . e_(j-i)) / sqrt(D), e = 0 from distance L on",
    )
    examples = ("music(longest=8)", "music(longest=3, shared=True)")

    def __init__(
        self,
        shape: Shape,
        *,
        longest: Annotated[int, "number of distances in the table, 0 included (L in the paper)"] = 1024,
        shared: Annotated[bool, "one table for all heads"] = False,
    ):
        super().__init__(shape)
        if longest < 1:
            raise ValueError(f"option 'longest' of 'music' must be at least 1, got {longest}")
        self.longest = longest
        count = longest if shape.role == "causal" else 2 * longest - 1
        size = (1 if shared else shape.heads, count, shape.head_width)
        self.table = nn.Parameter(torch.empty(size).normal_(std=shape.head_width**-0.5))

    def scores(self, q: Tensor, k: Tensor, mask: Mask, scale: float) -> Tensor:
        q = q * scale
        table = F.pad(self.table, (0, 0, 1, 0))  # row 0: zeros
        index = self.span(mask) + self.longest
        rows = lookup(table, torch.where((index > 0) & (index < table.shape[1]), index, 0))
        return q @ k.mT + self.to_keys(q @ rows.mT, mask)

    def plain_score(self, head: int, q: Tensor, k: Tensor, i: int, j: int) -> Tensor | float:
        return q @ self.table[head % len(self.table)][j - i + self.longest - 1] if abs(i - j) < self.longest else 0.0
