"""Multiplicative attention: a learned matrix between query and key."""

from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn

from regard.core.reference import Row
from regard.core.rows import Mask
from regard.core.shape import Order, Shape
from regard.layers.attention.base import Facts
from regard.layers.attention.cached import Cached


class Multiplicative(Cached):
    """Luong et al. 2015, "general": score(h_t, h_s) = h_t^T W_a h_s, here q^T W k / sqrt(D) with W of each head. The
    paper does not divide; but then W starts so small that a step of Adam can be larger than W. Since q^T W k =
    (W^T q) . k, the matrix turns the queries alone: the cache keeps k as it is and the kernel of softmax attention does
    the rest. A position scheme that reads the query reads W^T q. Time N^2, memory N."""

    facts = Facts(
        name="multiplicative",
        paper="Luong et al. 2015, Effective Approaches to Attention-based Neural Machine Translation",
        link="arXiv 1508.04025",
        family="scores",
        pairs=True,
        formula="o_i = sum_j softmax_j(q_i^T W k_j / sqrt(D)) v_j",
        time=Order("N^2", 2),
        memory=Order("N", 1),
        state=Order("N", 1),
        positions=("bias", "content"),
    )
    examples = ("multiplicative", "multiplicative(scaled=False)")
    grouped = True
    independent_queries = True

    def __init__(
        self,
        shape: Shape,
        *,
        scaled: Annotated[bool, "divide the logits by the root of the head width"] = True,
    ):
        super().__init__(shape)
        self.factor = shape.head_width**-0.5 if scaled else 1.0
        self.between = nn.Parameter(torch.empty(shape.heads, shape.head_width, shape.head_width))
        # the logits of unit queries and keys start with variance 1
        nn.init.normal_(self.between, std=1 / (shape.head_width * self.factor))

    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.product(mask, q @ self.between, k, v, self.factor)

    def plain(self, row: Row) -> Tensor:
        turned = replace(row, values=row.values | {"q": torch.stack([self.between[row.head].T @ q for q in row.q])})
        return torch.stack([turned.attend(i, row.past(i), self.factor) for i in range(row.T)])
