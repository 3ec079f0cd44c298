"""Local attention around a predicted position."""

from typing import Annotated

import torch
from torch import Tensor, nn

from regard.core.numeric import masked_softmax
from regard.core.reference import Row, blend
from regard.core.rows import Mask
from regard.core.shape import Order, Shape
from regard.layers.attention.base import Facts
from regard.layers.attention.cached import Cached


class Predictive(Cached):
    """Luong et al. 2015, "local-p". Each query predicts where to look, p_t = S sigmoid(v_p^T tanh(W_p h_t)), reads the
    keys s of [p_t - w, p_t + w] and weighs them by softmax_s(score) exp(-(s - p_t)^2 / (2 (w/2)^2)), which is not made
    to sum to one. Here W_p is a projection of its own and the score is q . k / sqrt(D). Positions s count from 0 and S
    is how many tokens the query may see (causal: its position + 1), so 0 <= p_t <= S. The window is cut hard: p_t
    learns through the Gaussian alone. Rotary turns W_p h_t like the query. Time and memory N w: each query gathers the
    keys of its window."""

    facts = Facts(
        name="predictive",
        paper="Luong et al. 2015, Effective Approaches to Attention-based Neural Machine Translation",
        link="arXiv 1508.04025",
        family="scores",
        formula="o_i = sum_(|j - p_i| <= w) softmax_j(q_i . k_j / sqrt(D)) exp(-2 (j - p_i)^2 / w^2) v_j, "
        "p_i = S sigmoid(v^T tanh(W_p x_i))",
        time=Order("N w", 1),
        memory=Order("N w", 1),
        state=Order("N", 1),
        positions=("rotation",),
        signed=True,
    )
    examples = ("predictive(window=3)",)
    inputs = {"q": "query", "p": "query", "k": "key", "v": "value"}
    grouped = True

    def __init__(
        self, shape: Shape, *, window: Annotated[int, "window size: keys on each side of the predicted position"] = 10
    ):
        super().__init__(shape)
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}: a narrower one may hold no key")
        self.window = window
        self.reading = nn.Parameter(torch.empty(shape.heads, shape.head_width))
        nn.init.normal_(self.reading, std=shape.head_width**-0.5)

    def attend(self, mask: Mask, q: Tensor, p: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sees = mask.end - mask.k0 if not mask.causal else mask.q0 - mask.k0 + 1
        sees = sees[:, None, None] + (torch.arange(mask.T, device=q.device) if mask.causal else 0)  # [B, 1, 1 or T]
        wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
        centre = sees * torch.sigmoid((p.to(wide).tanh() * self.reading[:, None]).sum(-1))  # [B, H, T]
        lowest = (centre.detach() - self.window).ceil()
        at = lowest[..., None] + torch.arange(2 * self.window + 1, device=q.device)  # [B, H, T, 2w+1]
        off = at - centre[..., None]
        visible = (off.detach() <= self.window) & (at >= 0) & (at < sees[..., None])
        batch = torch.arange(k.shape[0], device=q.device)[:, None, None, None]
        heads = torch.arange(q.shape[1], device=q.device)[:, None, None] * k.shape[1] // q.shape[1]
        slots = at.long().clamp(0, mask.S - 1)
        near_k, near_v = k[batch, heads, slots], v[batch, heads, slots]  # [B, H, T, 2w+1, D]
        logits = (near_k @ (q * self.scale)[..., None])[..., 0]
        weights = masked_softmax(logits, visible) * torch.exp(-2 * (off / self.window) ** 2)
        return (weights.to(v.dtype)[..., None, :] @ near_v)[..., 0, :]

    def plain(self, row: Row) -> Tensor:
        outs = []
        for i in range(row.T):
            p = len(row.past(i)) * torch.sigmoid(self.reading[row.head] @ torch.tanh(row.values["p"][i]))
            seen = [j for j in row.past(i) if abs(j - p.item()) <= self.window]
            logits = torch.stack([self.scale * row.product(i, j) for j in seen])
            sigma = self.window / 2
            outs.append(blend(logits, [torch.exp(-((j - p) ** 2) / (2 * sigma**2)) * row.v[j] for j in seen]))
        return torch.stack(outs)
