"""What mixers without attention have in common."""

from torch import Tensor

from regard.core.rows import Rows
from regard.core.shape import Shape
from regard.layers.attention.base import Attention
from regard.layers.attention.checks import input_position


class Mixing(Attention):
    """A mixer in the place of an attention: no queries, no keys, no heads. Inside heads(...), where it has some of the
    heads, it has as large a share of the channels."""

    def __init__(self, shape: Shape):
        super().__init__(shape)
        self.position = input_position(self.facts.name, shape, "it has no queries and keys to put it between")

    def share(self, size: int) -> slice:
        """The part of `size` channels that goes with these heads among all."""
        first, last = self.shape.first_head, self.shape.first_head + self.shape.heads
        return slice(size * first // self.shape.all_heads, size * last // self.shape.all_heads)

    def channels(self) -> slice:
        """The channels of a mixer that has no projection and so gives back those it reads."""
        if self.shape.out_width != self.shape.width:
            raise ValueError(
                f"attention {self.facts.name!r} has no projection: out_width must be the width {self.shape.width}, "
                f"got {self.shape.out_width}"
            )
        return self.share(self.shape.width)

    def placed(self, x: Tensor, rows: Rows) -> Tensor:
        """The tokens with their positions added."""
        return x if self.position is None else self.position.add(x, rows)

    def check_length(self, S: int, longest: int) -> None:
        """Refuses more tokens than the mixer has weights for."""
        if longest < S:
            raise ValueError(
                f"{self.facts.name!r} got {S} tokens (padding included), expected at most longest={longest}: "
                f"build it with longest={S} or more, or shorten the input"
            )
