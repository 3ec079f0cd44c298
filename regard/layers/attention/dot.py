"""Dot-product attention without the scale."""

import torch
from torch import Tensor

from regard.core.reference import Row
from regard.core.rows import Mask
from regard.core.shape import Order
from regard.layers.attention.base import Facts
from regard.layers.attention.cached import Cached


class Dot(Cached):
    """Luong et al. 2015, "dot": score(h_t, h_s) = h_t . h_s, here q . k of each head. Time N^2, memory N."""

    facts = Facts(
        name="dot",
        paper="Luong et al. 2015, Effective Approaches to Attention-based Neural Machine Translation",
        link="arXiv 1508.04025",
        family="scores",
        pairs=True,
        formula="o_i = sum_j softmax_j(q_i . k_j) v_j",
        time=Order("N^2", 2),
        memory=Order("N", 1),
        state=Order("N", 1),
        positions=("rotation", "bias", "content"),
    )
    examples = ("dot",)
    grouped = True
    independent_queries = True

    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.product(mask, q, k, v, 1.0)

    def plain(self, row: Row) -> Tensor:
        return torch.stack([row.attend(i, row.past(i), 1.0) for i in range(row.T)])
