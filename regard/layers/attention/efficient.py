"""Efficient attention: queries normalised over features, keys over positions."""

import torch
from torch import Tensor

from regard.core.numeric import to_wide, wide_dtype
from regard.core.reference import Row, add_up
from regard.core.shape import Order
from regard.kernels.scan import FeatureState, absorb, attend_sums, feature_scan
from regard.layers.attention.base import Facts
from regard.layers.attention.scanned import Scanned


class Efficient(Scanned):
    """Shen et al. 2018: rho_q(Q) (rho_k(K)^T V), rho_q a softmax over the features of each query, rho_k over the
    positions of each feature of the keys, without 1 / sqrt(D). The weights of a query sum to one by construction.
    Causal is the exact restriction to the past: the softmax of each feature runs over the positions up to the query.
    Time N D^2 per head, memory N, state D^2."""

    facts = Facts(
        name="efficient",
        paper="Shen et al. 2018, Efficient Attention: Attention with Linear Complexities",
        link="arXiv 1812.01243",
        family="kernels",
        formula="o_i = sum_c softmax_c(q_i)_c sum_j softmax_j(k_jc) v_j",
        time=Order("N", 1),
        memory=Order("N", 1),
        state=Order("1", 0),
    )
    examples = ("efficient",)

    def digest(self, real: Tensor | None, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        k = to_wide(k)
        seen = k if real is None else torch.where(real[:, None, :, None], k, -torch.inf)
        top = seen.detach().amax(2, keepdim=True).clamp(min=torch.finfo(k.dtype).min)
        # padded keys may lie above the largest real one, and are left out
        S, z = absorb((k - top).clamp(max=0), v, map="exp", real=real)
        return (S / z.masked_fill(z == 0, 1)[..., None],)  # [B, H, D, D]

    def consult(self, digest: tuple[Tensor, ...], q: Tensor) -> Tensor:
        shifted = to_wide(q) - to_wide(q).detach().amax(-1, keepdim=True)
        # the sum of the exponentials of a query is its denominator
        return attend_sums(shifted, digest[0], torch.ones_like(digest[0][..., 0]), dtype=q.dtype, map="exp")

    def zero(self, batch: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        size, wide = (batch, self.shape.heads, self.shape.head_width), wide_dtype(dtype)
        sums = torch.zeros((*size, size[2]), dtype=wide, device=device)
        return sums, sums[..., 0], torch.full(size, -torch.inf, dtype=wide, device=device)

    def scan(
        self, real: Tensor | None, sums: FeatureState | None, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, FeatureState | None]:
        weights = torch.softmax(q, -1, dtype=wide_dtype(q.dtype))
        o, sums = feature_scan(weights, k, v, state=sums, real=real)
        return o.to(v.dtype), sums

    def plain(self, row: Row) -> Tensor:
        outs = []
        for i in range(row.T):
            powers = torch.exp(row.q[i] - row.q[i].max())
            seen = [row.k[j] for j in row.past(i)]
            columns = torch.exp(torch.stack(seen) - torch.stack(seen).max(0).values)  # [seen, D]
            weights = (columns / columns.sum(0)) @ (powers / powers.sum())
            outs.append(add_up(w * row.v[j] for w, j in zip(weights, row.past(i), strict=True)))
        return torch.stack(outs)
