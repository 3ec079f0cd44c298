"""A learned vector for each position, added to the token vectors."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.rows import Rows
from regard.core.shape import Shape
from regard.layers.position.base import Position, PositionFacts, check_end


class Learned(Position):
    """Gehring et al. 2017: x_t + p_t with a table p of `longest` rows, started at N(0, 0.02^2) as in BERT. Cost N E."""

    facts = PositionFacts(
        name="learned",
        paper="Gehring et al. 2017, Convolutional Sequence to Sequence Learning (section 3.1)",
        link="arXiv 1705.03122",
        kind="input",
        formula="x_t + p_t, p learned",
    )
    examples = ("learned(longest=256)",)

    def __init__(self, shape: Shape, *, longest: Annotated[int, "maximum number of positions"] = 1024):
        super().__init__(shape)
        if longest < 1:
            raise ValueError(f"option 'longest' of 'learned' must be at least 1, got {longest}")
        self.longest = longest
        self.table = nn.Parameter(torch.empty(longest, shape.width).normal_(std=0.02))

    def add(self, x: Tensor, rows: Rows) -> Tensor:
        check_end("learned", x, rows, self.longest)
        at, real = rows.positions(), rows.real()
        # what is padding may stand behind the end of the table
        return x + F.embedding(at if real is None else torch.where(real, at, 0), self.table)

    def plain_add(self, x: Tensor) -> Tensor:
        return torch.stack([vector + self.table[t] for t, vector in enumerate(x)])
