"""Attention to the neighbours only."""

from typing import Annotated

import torch
from torch import Tensor

from regard.core.reference import Row
from regard.core.rows import Mask
from regard.core.shape import Order, Shape
from regard.kernels import runs
from regard.kernels.band import band_parts
from regard.kernels.compiling import at_most
from regard.kernels.parts import union
from regard.kernels.runs import Bound, Pass
from regard.layers.attention.base import Facts
from regard.layers.attention.tailed import Tailed


class Local(Tailed):
    """Luong et al. 2015 (local-m) with the softmax of Vaswani et al. 2017, section 4 (restricted self-attention): query
    i sees the keys j with |i - j| <= w, of the past only where it is causal. Their D (Luong) or r is our window w.

    A token sees itself and w neighbours on a side: w + 1 keys (causal) or 2 w + 1. Time N w, memory N, state w.
    """

    facts = Facts(
        name="local",
        paper="Luong et al. 2015, Effective Approaches to Attention-based Neural Machine Translation (section 3.2)",
        link="arXiv 1508.04025",
        family="patterns",
        formula="o_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j over |i - j| <= window (causal: 0 <= i - j <= window)",
        time=Order("N window", 1),
        memory=Order("N", 1),
        state=Order("window", 0),
        roles=("self", "causal"),
        refusals=(("cross", "a window of positions has no meaning between two sequences"),),
        positions=("rotation", "bias"),
    )
    examples = ("local(window=3)", "local(window=8)")
    reduces_to = (("local(window=64)", "softmax"),)
    grouped = True
    rings = True

    def __init__(
        self,
        shape: Shape,
        *,
        window: Annotated[int, "window size: tokens seen on each side, besides the query's own"] = 256,
    ):
        super().__init__(shape)
        if window < 1:
            raise ValueError(f"option 'window' of 'local' must be at least 1, got {window}")
        self.window = self.reach = window

    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if mask.T == 1:
            # the tail of one query is its window
            return self.product(mask, q, k, v, self.scale)
        before = at_most(self.window, mask.S)
        after = 0 if mask.causal else before
        run_bias = None if self.position is None else self.position.run_bias(before, after)
        if runs.takes(q, k, v, run_bias):
            near = Pass(Bound(plus=-before), Bound(plus=after + 1))
            return runs.attend(q, k, v, [near], scale=self.scale, where=mask.where(), bias=run_bias)
        bias, scheme = None, self.scheme("bias")
        if scheme is not None:
            gaps = torch.arange(-before, after + 1, device=q.device)[None]
            bias = scheme.bias(scheme.places(gaps))[:, 0]  # [H, before + 1 + after]
        parts = band_parts(mask.T, before=before, after=after, shift=mask.known_shift, bias=bias, device=q.device)
        # no causal query of a whole sequence sees what stands behind it
        real = None if mask.full or (mask.causal and mask.aligned) else mask.real()
        return union(q, k, v, parts, scale=self.scale, real=real)

    def plain(self, row: Row) -> Tensor:
        seen = ([j for j in row.past(i) if abs(i - j) <= self.window] for i in range(row.T))
        return torch.stack([row.attend(i, keys, self.scale) for i, keys in enumerate(seen)])
