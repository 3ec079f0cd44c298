"""Bilinear attention: query and key meet in a space of chosen rank."""

from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn

from regard.core.reference import Row
from regard.core.rows import Mask
from regard.core.shape import Order, Shape
from regard.layers.attention.base import Facts
from regard.layers.attention.cached import Cached


class Bilinear(Cached):
    """The dot product after two learned maps: s = (A q) . (B k) / sqrt(R), A and B [R, D] of each head. It is Luong's
    q^T W k with W = A^T B of rank R. Since (A q) . (B k) = (B^T A q) . k, both maps turn the queries alone: the cache
    keeps k as it is and the kernel of softmax attention does the rest. A position scheme that reads the query reads
    B^T A q. Time N^2, memory N."""

    facts = Facts(
        name="bilinear",
        paper="Luong et al. 2015, Effective Approaches to Attention-based Neural Machine Translation (W_a of rank R)",
        link="arXiv 1508.04025",
        family="scores",
        pairs=True,
        formula="o_i = sum_j softmax_j((A q_i) . (B k_j) / sqrt(R)) v_j",
        time=Order("N^2", 2),
        memory=Order("N", 1),
        state=Order("N", 1),
        positions=("bias", "content"),
    )
    examples = ("bilinear", "bilinear(rank=2)", "bilinear(rank=7, scaled=False)")
    grouped = True
    independent_queries = True

    def __init__(
        self,
        shape: Shape,
        *,
        rank: Annotated[int | None, "width R of the space where query and key meet; None: the head width"] = None,
        scaled: Annotated[bool, "divide the logits by sqrt(R)"] = True,
    ):
        super().__init__(shape)
        if rank is not None and rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}: leave it out for the head width")
        R = rank or shape.head_width
        self.factor = R**-0.5 if scaled else 1.0
        self.left = nn.Parameter(torch.empty(shape.heads, R, shape.head_width))
        self.right = nn.Parameter(torch.empty(shape.heads, R, shape.head_width))
        for side in (self.left, self.right):
            # the logits of unit queries and keys start with variance 1
            nn.init.normal_(side, std=(shape.head_width * self.factor * R**0.5) ** -0.5)

    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.product(mask, q @ self.left.mT @ self.right, k, v, self.factor)

    def plain(self, row: Row) -> Tensor:
        A, B = self.left[row.head], self.right[row.head]
        turned = replace(row, values=row.values | {"q": torch.stack([B.T @ (A @ q) for q in row.q])})
        return torch.stack([turned.attend(i, row.past(i), self.factor) for i in range(row.T)])
