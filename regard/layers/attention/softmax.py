"""Scaled dot-product attention."""

import torch
from torch import Tensor

from regard.core.reference import Row
from regard.core.rows import Mask
from regard.core.shape import Order
from regard.layers.attention.base import Facts
from regard.layers.attention.cached import Cached


class Softmax(Cached):
    """Vaswani et al. 2017: softmax(q K^T / sqrt(D)) V. Time N^2, memory N (the kernel never stores the weights)."""

    facts = Facts(
        name="softmax",
        paper="Vaswani et al. 2017, Attention Is All You Need",
        link="arXiv 1706.03762",
        family="scores",
        pairs=True,
        formula="o_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j",
        time=Order("N^2", 2),
        memory=Order("N", 1),
        state=Order("N", 1),
        positions=("rotation", "bias", "content"),
    )
    examples = ("softmax",)
    grouped = True
    independent_queries = True
    rings = True

    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.product(mask, q, k, v, self.scale)

    def plain(self, row: Row) -> Tensor:
        return torch.stack([row.attend(i, row.past(i), self.scale) for i in range(row.T)])
