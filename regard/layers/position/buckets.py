"""A learned number for each head and bucket of distances."""

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.shape import Shape
from regard.layers.position.base import Position, PositionFacts


class Buckets(Position):
    """Raffel et al. 2020 (T5): the logit of head h gains b_h[bucket(i - j)]. Of n buckets the first n/2 hold the
    distances 0 .. n/2 - 1, the others grow by a constant factor up to `distance`, and the last takes all beyond. Role
    "self" gives half of all buckets to keys behind the query and half to those ahead. T5 does not scale q.k; here the
    mechanism does as ever, so T5's weights need W_Q sqrt(D). Cost N^2 H."""

    facts = PositionFacts(
        name="buckets",
        paper="Raffel et al. 2020, Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
        link="arXiv 1910.10683",
        kind="bias",
        formula="q_i . k_j / sqrt(D) + b_h[bucket(i - j)]",
    )
    examples = ("buckets(buckets=8, distance=12)",)
    starts: Tensor  # the first distance of each bucket but the first

    def __init__(
        self,
        shape: Shape,
        *,
        buckets: Annotated[int, "number of buckets in all"] = 32,
        distance: Annotated[int, "distance from which on all keys share the last bucket"] = 128,
    ):
        super().__init__(shape)
        # of one direction
        self.count = buckets if shape.role == "causal" else buckets // 2
        exact = self.count // 2
        if exact < 1 or (shape.role != "causal" and buckets % 2):
            least = "at least 2" if shape.role == "causal" else "an even number of at least 4"
            raise ValueError(f"option 'buckets' of 'buckets' must be {least} for role {shape.role!r}, got {buckets}")
        if distance <= exact:
            raise ValueError(
                f"option 'distance' of 'buckets' must be more than {exact}, the distances that have a bucket of their "
                f"own, got {distance}"
            )
        self.buckets, self.distance = buckets, distance
        # bucket b begins at the first n with log(n / exact) / log(distance / exact) >= (b - exact) / wide; in whole
        # numbers, since logarithms round to either side just where a bucket begins
        wide = self.count - exact
        starts, n = list(range(1, exact + 1)), exact
        for step in range(1, wide):
            while n**wide * exact**step < distance**step * exact**wide:
                n += 1
            starts.append(n)
        self.register_buffer("starts", torch.tensor(starts), persistent=False)
        self.table = nn.Parameter(torch.empty(buckets, shape.heads).normal_(std=shape.width**-0.5))

    def bucket(self, gap: Tensor) -> Tensor:
        """The bucket of each gap."""
        if self.shape.role == "causal":
            return torch.bucketize(-gap, self.starts, right=True)
        return torch.bucketize(gap.abs(), self.starts, right=True) + self.count * (gap > 0)

    def bias(self, gap: Tensor) -> Tensor:
        return F.embedding(self.bucket(gap), self.table).movedim(-1, -3)

    def plain_bias(self, head: int, i: int, j: int) -> Tensor:
        exact, n = self.count // 2, abs(i - j)
        if n >= exact:
            share = math.log(n / exact) / math.log(self.distance / exact)
            n = min(self.count - 1, exact + int(round(share * (self.count - exact), 9)))
        return self.table[n + (self.count if j > i else 0), head]
