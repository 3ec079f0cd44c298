"""No positions."""

from torch import Tensor

from regard.core.rows import Rows
from regard.layers.position.base import Position, PositionFacts


class NoPosition(Position):
    """Nothing is added: the order of the tokens counts only where the mechanism itself reads it. Costs nothing."""

    facts = PositionFacts(
        name="none",
        paper="Vaswani et al. 2017, Attention Is All You Need (section 3.5, left out)",
        link="arXiv 1706.03762",
        kind="input",
        formula="x_t = x_t",
        roles=("self", "causal", "cross"),
    )
    examples = ("none",)

    def add(self, x: Tensor, rows: Rows) -> Tensor:
        return x
