"""Attention to every s-th token."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.reference import Row
from regard.core.rows import Mask
from regard.core.shape import Order, Shape
from regard.kernels import runs
from regard.kernels.runs import ALL, Bound, Pass
from regard.layers.attention.base import Facts
from regard.layers.attention.cached import Cached


class Strided(Cached):
    """Child et al. 2019, the second step of the strided pattern on its own: query i sees the keys j with (i - j)
    divisible by s, of the past only where it is causal. Their l is our stride s.

    The tokens fall into s classes that never see each other: s softmax attentions over N / s tokens. Time N^2 / s,
    memory N. `heads(local(window=...), strided(stride=...))` is their attention with a pattern for each head.
    """

    facts = Facts(
        name="strided",
        paper="Child et al. 2019, Generating Long Sequences with Sparse Transformers (section 4.2)",
        link="arXiv 1904.10509",
        family="patterns",
        formula="o_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j over (i - j) mod stride = 0",
        time=Order("N^2 / stride", 2),
        memory=Order("N", 1),
        state=Order("N", 1),
        roles=("self", "causal"),
        refusals=(("cross", "a stride of positions has no meaning between two sequences"),),
        positions=("rotation",),
    )
    examples = ("strided(stride=3)", "strided(stride=2)")
    reduces_to = (("strided(stride=1)", "softmax"),)
    grouped = True
    piece = 1024  # queries at a time in decoding: the mask of a piece stays linear in the length

    def __init__(self, shape: Shape, *, stride: Annotated[int, "distance between the tokens that a query sees"] = 128):
        super().__init__(shape)
        if stride < 1:
            raise ValueError(f"option 'stride' of 'strided' must be at least 1, got {stride}")
        self.stride = stride

    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if mask.T > 1 and runs.takes(q, k, v):
            classes = Pass(high=Bound(plus=1) if mask.causal else ALL, fold=self.stride)
            return runs.attend(q, k, v, [classes], scale=self.scale, where=mask.where())
        # slot = position, so as many queries as keys are a whole sequence
        if mask.T == mask.S:
            return self._whole(mask, q, k, v)
        return torch.cat([self._late(part, q[:, :, at], k, v) for at, part in mask.pieces(self.piece)], 2)

    def _whole(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        stride, B = min(self.stride, mask.T), len(q)
        q, k, v = (_fold(x, stride) for x in (q, k, v))  # [B * stride, H or G, L, D]
        visible, L = None, q.shape[2]
        if not mask.causal and (not mask.full or mask.T % stride):
            at = torch.arange(L * stride, device=q.device).view(L, stride).T
            visible = (at < mask.end[:, None, None]).flatten(0, 1)[:, None, None]  # [B * stride, 1, 1, L]
        return _unfold(self._softmax(q, k, v, visible, mask.causal), B, mask.T)

    def _late(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries that follow a past: fold them as far as they go round, and gather each fold's class of keys."""
        stride, device, B = self.stride, q.device, q.shape[0]
        folds = min(stride, mask.T)
        q = _fold(q, folds)  # [B * folds, H, L, D]
        first = mask.q0[:, None, None] + torch.arange(folds, device=device)[:, None]  # [B, folds, 1]
        # as many keys as a class may have, and never a single one, for which a compiler would make a graph of its own
        keys = first % stride + stride * torch.arange(mask.S // stride + 2, device=device)  # [B, folds, S / stride]
        visible = keys[:, :, None] <= (first + folds * torch.arange(q.shape[2], device=device))[..., None]
        batch = torch.arange(B, device=device)[:, None, None]
        k, v = (
            x.transpose(1, 2)[batch, keys.clamp(max=mask.S - 1)].transpose(2, 3).flatten(0, 1) for x in (k, v)
        )  # [B * folds, G, S / stride, D]
        return _unfold(self._softmax(q, k, v, visible.flatten(0, 1)[:, None], False), B, mask.T)

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=causal, scale=self.scale, enable_gqa=grouped
        )

    def plain(self, row: Row) -> Tensor:
        seen = ([j for j in row.past(i) if (i - j) % self.stride == 0] for i in range(row.T))
        return torch.stack([row.attend(i, keys, self.scale) for i, keys in enumerate(seen)])


def _fold(x: Tensor, folds: int) -> Tensor:
    """[B, H, T, D] -> [B * folds, H, T / folds, D], token t in fold t mod folds; zeros behind the last token."""
    pad = -x.shape[2] % folds
    x = F.pad(x, (0, 0, 0, pad)) if pad else x
    return x.unflatten(2, (-1, folds)).movedim(3, 1).flatten(0, 1)


def _unfold(x: Tensor, B: int, T: int) -> Tensor:
    """The inverse of `_fold`."""
    return x.unflatten(0, (B, -1)).movedim(1, 3).flatten(2, 3)[:, :, :T]
