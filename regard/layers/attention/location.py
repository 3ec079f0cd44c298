"""Location-based attention: where to look is read off the query alone."""

from typing import Annotated

import torch
from torch import Tensor, nn

from regard.core.reference import Row, blend
from regard.core.rows import Mask
from regard.core.shape import Order, Shape
from regard.layers.attention.base import Facts
from regard.layers.attention.cached import Cached


class Location(Cached):
    """Luong et al. 2015, "location": a_t = softmax(W_a h_t), a row of W_a for each position, here W_a [longest, D] of
    each head on q. No key is read: the rows of W_a are the keys of an ordinary attention, the same for every sequence,
    and decoding keeps the values alone. Time N^2, memory N."""

    facts = Facts(
        name="location",
        paper="Luong et al. 2015, Effective Approaches to Attention-based Neural Machine Translation",
        link="arXiv 1508.04025",
        family="scores",
        pairs=True,
        formula="o_i = sum_j softmax_j((W q_i)_j) v_j",
        time=Order("N^2", 2),
        memory=Order("N", 1),
        state=Order("N", 1),
        positions=("bias",),
    )
    examples = ("location(longest=2048)",)
    independent_queries = True
    inputs = {"q": "query", "v": "value"}

    def __init__(self, shape: Shape, *, longest: Annotated[int, "maximum number of tokens to attend to"] = 1024):
        super().__init__(shape)
        if longest < 1:
            raise ValueError(f"longest must be at least 1, got {longest}: give the greatest length to come")
        self.longest = longest
        self.table = nn.Parameter(torch.empty(shape.heads, longest, shape.head_width))
        # the logits of unit queries start with variance 1
        nn.init.normal_(self.table, std=shape.head_width**-0.5)

    def attend(self, mask: Mask, q: Tensor, v: Tensor) -> Tensor:
        if self.longest < mask.S:
            raise ValueError(
                f"attention 'location' has a table of {self.longest} positions, got {mask.S} tokens to attend to: "
                f"build it with location(longest={mask.S}) or more, or cut the sequence"
            )
        # slot = position in every row, so all rows share the first S keys; kernels want a copy per row
        k = self.table[:, : mask.S].repeat(q.shape[0], 1, 1, 1)
        return self.product(mask, q, k, v, 1.0)

    def plain(self, row: Row) -> Tensor:
        outs = []
        for i in range(row.T):
            logits = [self.table[row.head, j] @ row.q[i] + row.bias(i, j) for j in row.past(i)]
            outs.append(blend(torch.stack(logits), [row.v[j] for j in row.past(i)]))
        return torch.stack(outs)
