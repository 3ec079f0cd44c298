"""Linear attention: the feature map elu(x) + 1 in place of the exponential."""

import torch
from torch import Tensor

from regard.core.numeric import wide_dtype
from regard.core.reference import Row, add_up
from regard.core.shape import Order
from regard.kernels.scan import State, absorb, attend_past, attend_sums
from regard.layers.attention.base import Facts
from regard.layers.attention.scanned import Scanned


class Linear(Scanned):
    """Katharopoulos et al. 2020: o_i = phi(q_i)^T S / (phi(q_i) . z), S = sum_j phi(k_j) v_j^T, z = sum_j phi(k_j),
    with phi(x) = elu(x) + 1 and no factor 1 / sqrt(D). The authors' code adds 1e-6 to the denominator; here one of zero
    gives zeros, and the weights of a query sum to one. Time N D^2 per head, memory N, state D^2."""

    facts = Facts(
        name="linear",
        paper="Katharopoulos et al. 2020, Transformers are RNNs",
        link="arXiv 2006.16236",
        family="kernels",
        formula="o_i = phi(q_i)^T sum_j phi(k_j) v_j^T / (phi(q_i) . sum_j phi(k_j)), phi(x) = elu(x) + 1",
        time=Order("N", 1),
        memory=Order("N", 1),
        state=Order("1", 0),
    )
    examples = ("linear",)

    def digest(self, real: Tensor | None, k: Tensor, v: Tensor) -> State:
        return absorb(k, v, map="elu", real=real)

    def consult(self, digest: State, q: Tensor) -> Tensor:
        return attend_sums(q, *digest, dtype=q.dtype, map="elu")

    def zero(self, batch: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        H, D = self.shape.heads, self.shape.head_width
        wide = wide_dtype(dtype)
        return tuple(torch.zeros(size, dtype=wide, device=device) for size in ((batch, H, D, D), (batch, H, D)))

    def scan(
        self, real: Tensor | None, sums: State | None, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, State | None]:
        return attend_past(q, k, v, map="elu", state=sums, real=real, final=sums is not None)

    def plain(self, row: Row) -> Tensor:
        def phi(x: Tensor) -> Tensor:
            return torch.where(x > 0, x + 1, torch.exp(x))

        outs = []
        for i in range(row.T):
            weights = [phi(row.q[i]) @ phi(row.k[j]) for j in row.past(i)]
            outs.append(add_up(w * row.v[j] for w, j in zip(weights, row.past(i), strict=True)) / add_up(weights))
        return torch.stack(outs)
