"""Additive attention: a small network scores each pair of query and key."""

from typing import Annotated

import torch
from torch import Tensor, nn

from regard.core.reference import Row, blend
from regard.core.rows import Mask
from regard.core.shape import Order, Shape
from regard.kernels import additive
from regard.layers.attention.base import Facts
from regard.layers.attention.cached import Scored


class Additive(Scored):
    """Bahdanau et al. 2014: e_ij = v_a^T tanh(W_a s_i + U_a h_j), here w^T tanh(q + k + b) with w and b of each head.
    The projections of the layer are W_a and U_a, so q = W_a s, the cache holds k = U_a h, and the hidden width is the
    head width. Luong's "concat", v^T tanh(W [s; h]), is the same with W = [W_a U_a]. normed=True is the score of GNMT
    (Wu et al. 2016), g w / |w| in the place of w with a learned g that starts at 1 / sqrt(D). Time N^2 (D of tanh for
    each pair), memory N: a few queries at a time, computed again in the backward pass, or on
    a GPU in kernels."""

    facts = Facts(
        name="additive",
        paper="Bahdanau et al. 2014, Neural Machine Translation by Jointly Learning to Align and Translate",
        link="arXiv 1409.0473",
        family="scores",
        pairs=True,
        formula="o_i = sum_j softmax_j(w^T tanh(q_i + k_j + b)) v_j",
        time=Order("N^2", 2),
        memory=Order("N", 1),
        state=Order("N", 1),
        positions=("bias",),
    )
    examples = ("additive", "additive(normed=True)")
    # a piece holds [8, S, D] of each head: larger ones are slower, for they no longer fit the cache
    piece = 8

    def __init__(self, shape: Shape, *, normed: Annotated[bool, "w is normalized, times a learned gain"] = False):
        super().__init__(shape)
        self.reading = nn.Parameter(torch.empty(shape.heads, shape.head_width))
        self.offset = nn.Parameter(torch.zeros(shape.heads, shape.head_width))
        nn.init.normal_(self.reading, std=shape.head_width**-0.5)
        self.gain = nn.Parameter(torch.full((shape.heads,), shape.head_width**-0.5)) if normed else None

    def attend_fused(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        if mask.T == 1 or not additive.takes(q, k, v, self.unfused(mask)):
            return None
        return additive.attend(q, k, v, self._reading(), self.offset, mask.visible())

    def score(self, mask: Mask, q: Tensor, k: Tensor) -> Tensor:
        q = q + self.offset[:, None]
        hidden = (q[:, :, :, None] + k[:, :, None]).tanh_()  # [B, H, T, S, D]
        # a product and a sum, not a matrix product: faster at one column, and compilers fuse it with the tanh
        wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
        return (hidden * self._reading()[:, None, None]).sum(-1, dtype=wide)

    def _reading(self) -> Tensor:
        """w, [H, D]"""
        if self.gain is None:
            return self.reading
        return self.gain[:, None] * self.reading / self.reading.norm(dim=1, keepdim=True)

    def plain(self, row: Row) -> Tensor:
        v, b, outs = self.reading[row.head], self.offset[row.head], []
        if self.gain is not None:
            v = self.gain[row.head] * v / torch.sqrt((v * v).sum())
        for i in range(row.T):
            logits = [v @ torch.tanh(row.q[i] + row.k[j] + b) + row.bias(i, j) for j in row.past(i)]
            outs.append(blend(torch.stack(logits), [row.v[j] for j in row.past(i)]))
        return torch.stack(outs)
