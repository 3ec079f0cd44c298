"""Performer: random features whose products are, on average, the softmax kernel."""

from dataclasses import replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from regard.core.numeric import to_wide, wide_dtype
from regard.core.reference import Row, add_up
from regard.core.shape import Order, Shape
from regard.kernels.random_features import (
    attend_pairs,
    attends_pairs,
    exp_features,
    exp_features_of_all,
    exp_logits,
    stabilised_features,
)
from regard.kernels.scan import State, absorb, attend_past, attend_sums
from regard.layers.attention.base import Facts
from regard.layers.attention.draws import RandomBuffer, check_redraw, normal_rows
from regard.layers.attention.scanned import Scanned

RELU_FLOOR = 1e-3  # added to each ReLU feature, as in the authors' code

Sums = tuple[Tensor, Tensor, Tensor]  # of phi(k) v^T [B, H, R, D], of phi(k) [B, H, R], and the running maximum [B, H]


class Performer(RandomBuffer, Scanned):
    """Choromanski et al. 2020 (FAVOR+): phi(x)_r = exp(w_r . x' - |x'|^2 / 2) with x' = x / D^(1/4) and w_r normal, so
    that E[phi(q) . phi(k)] = exp(q . k / sqrt(D)) with no feature below zero; the rows of W are orthogonal in blocks of
    D, each with the length of a normal vector. Kernel "relu" is their generalised attention, phi(x) =
    relu(W x / sqrt(R)) + 1e-3 with x as it is; without a projection, relu(x) + 1e-3. That is their TensorFlow code;
    the JAX code has no 1 / sqrt(R), and no projection unless asked for.

    The features are divided by exp of a maximum, which cancels: of all keys of the row, or, causal, a running maximum
    of the past, so that later tokens do not reach back (their code takes the maximum of all and lets the future leak
    through epsilon). W is one draw per layer, kept in a buffer; training draws it anew every `redraw` steps, and what
    was drawn last is evaluated (their code draws at every call). Time N R D per head, memory N R, state R D."""

    random_buffer = "draws"
    facts = Facts(
        name="performer",
        paper="Choromanski et al. 2020, Rethinking Attention with Performers",
        link="arXiv 2009.14794",
        family="kernels",
        formula="o_i = phi(q_i)^T sum_j phi(k_j) v_j^T / (phi(q_i) . sum_j phi(k_j)), "
        "phi(x)_r = exp(w_r . x / D^(1/4) - |x|^2 / (2 sqrt(D)))",
        time=Order("N features", 1),
        memory=Order("N features", 1),
        state=Order("features", 0),
        positions=("rotation",),
        exact=False,
    )
    examples = (
        "performer(features=8)",
        "performer(features=6, kernel='relu')",
        "performer(kernel='relu', projection=False)",
        "performer(features=7, orthogonal=False)",
        "performer(features=6, epsilon=0.01)",
    )
    draws: Tensor  # W [R, D]

    def __init__(
        self,
        shape: Shape,
        *,
        features: Annotated[int, "number of random features (R): more are closer to softmax"] = 256,
        kernel: Annotated[
            Literal["softmax", "relu"], "kernel: 'softmax', by positive features of exp(q . k), or 'relu'"
        ] = "softmax",
        orthogonal: Annotated[bool, "orthogonal random features, which lowers the variance"] = True,
        epsilon: Annotated[float, "constant added to each softmax feature (authors: 1e-6); not causal"] = 0.0,
        projection: Annotated[bool, "random projection; False: kernel 'relu' of the vectors themselves, R = D"] = True,
        redraw: Annotated[int, "training steps between draws of W; 0: drawn once"] = 1,
    ):
        if epsilon:
            leak = "relative to the largest of all keys, epsilon would let the future change the past; leave it out"
            self.facts = replace(self.facts, roles=("self", "cross"), state=None, refusals=(("causal", leak),))
        super().__init__(shape)
        if features < 1:
            raise ValueError(f"option 'features' of 'performer' must be at least 1, got {features}")
        if epsilon < 0:
            raise ValueError(f"option 'epsilon' of 'performer' must not be negative, got {epsilon}")
        if epsilon and kernel == "relu":
            raise ValueError(f"option 'epsilon' of 'performer' is for kernel 'softmax', got {epsilon}: leave it out")
        if not projection and kernel != "relu":
            raise ValueError(f"option 'projection' of 'performer' is for kernel 'relu', got kernel={kernel!r}")
        self.kernel, self.orthogonal, self.epsilon, self.is_projected = kernel, orthogonal, epsilon, projection
        self.features = features if projection else shape.head_width
        self.redraw_every = check_redraw("performer", redraw) if projection else 0
        if projection:
            self.register_buffer("draws", torch.empty(features, shape.head_width))
            self.redraw()

    def draw_values(self, draw: torch.Generator | None = None) -> Tensor:
        """Random directions."""
        return normal_rows(*self.draws.shape, draw=draw, orthogonal=self.orthogonal)

    def digest(self, real: Tensor | None, k: Tensor, v: Tensor) -> State:
        if self.kernel == "relu":
            return absorb(self._relu(k), v, real=real)
        if self.epsilon:
            return absorb(self._softmax(k, (2, 3), real), v, real=real)
        return absorb(exp_features_of_all(k, self.draws, scale=self._scale, real=real), v, real=real)

    def consult(self, digest: State, q: Tensor) -> Tensor:
        return attend_sums(self._query(q), *digest, dtype=q.dtype)

    def attend_fused(self, real: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        if self.kernel == "relu" or self.epsilon or not attends_pairs(q, k, v):
            return None
        causal = self.shape.role == "causal"
        return attend_pairs(q, k, v, self.draws, scale=self._scale, real=real, causal=causal)

    def zero(self, batch: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        size, wide = (batch, self.shape.heads, self.features), wide_dtype(dtype)
        sums = torch.zeros((*size, self.shape.head_width), dtype=wide, device=device)
        return sums, sums[..., 0], torch.full(size[:2], -torch.inf, dtype=wide, device=device)

    def scan(
        self, real: Tensor | None, sums: Sums | None, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Sums | None]:
        o = self.attend_fused(real, q, k, v) if sums is None else None
        if o is not None:
            return o, None
        before, top = (None, None) if sums is None else ((sums[0], sums[1]), sums[2])
        if self.kernel == "relu":
            k, decay = self._relu(k), None
        else:
            k, decay, top = stabilised_features(k, self.draws, scale=self._scale, top=top, real=real)
        o, after = attend_past(self._query(q), k, v, state=before, decay=decay, real=real, final=sums is not None)
        return o, None if after is None or top is None else (*after, top)

    def _query(self, q: Tensor) -> Tensor:
        if self.kernel == "relu":
            return self._relu(q)
        if self.epsilon:
            return self._softmax(q, (3,), None)
        return exp_features(q, self.draws, scale=self._scale)

    def _softmax(self, x: Tensor, over: tuple[int, ...], real: Tensor | None) -> Tensor:
        """Softmax features [B, H, n, R] with epsilon, relative to exp of the largest product w . x over some axes, as
        the authors have it."""
        logits = exp_logits(x, self.draws, scale=self._scale)
        largest = logits + self._scaled(x).square().sum(-1, keepdim=True) / 2
        if real is not None:
            largest = torch.where(real[:, None, :, None], largest, -torch.inf)
        top = largest.detach().amax(over, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)
        # padded keys may lie above the largest real one, and are left out of the sums
        return (logits - top).clamp(max=0).exp() + self.epsilon

    @property
    def _scale(self) -> float:
        return self.shape.head_width**-0.25

    def _relu(self, x: Tensor) -> Tensor:
        x = to_wide(x)
        if self.is_projected:
            x = x @ (self.draws.to(x.dtype) * self.features**-0.5).T
        return torch.relu(x) + RELU_FLOOR

    def _scaled(self, x: Tensor) -> Tensor:
        return to_wide(x) * self._scale

    def plain(self, row: Row) -> Tensor:
        W, D = self.draws.to(row.q.dtype) if self.is_projected else None, self.shape.head_width

        def rectified(x: Tensor) -> Tensor:
            turned = x if W is None else torch.stack([w @ x for w in W]) / len(W) ** 0.5
            return turned.clamp(min=0) + 1e-3

        def products(x: Tensor) -> Tensor:
            assert W is not None, "the softmax kernel has a projection"
            return torch.stack([w @ x / D**0.25 for w in W])

        def logs(x: Tensor) -> Tensor:
            return products(x) - x @ x / (2 * D**0.5)

        if self.kernel == "relu":
            queries, keys = ([rectified(x) for x in xs] for xs in (row.q, row.k))
        elif self.epsilon:
            queries = [torch.exp(logs(x) - products(x).max().detach()) + self.epsilon for x in row.q]
            top = torch.stack([products(x) for x in row.k]).max().detach()
            keys = [torch.exp(logs(x) - top) + self.epsilon for x in row.k]
        else:
            queries, keys = ([torch.exp(logs(x)) for x in xs] for xs in (row.q, row.k))
        outs = []
        for i in range(row.T):
            weights = torch.stack([queries[i] @ keys[j] for j in row.past(i)])
            outs.append(add_up(w * row.v[j] for w, j in zip(weights / weights.sum(), row.past(i), strict=True)))
        return torch.stack(outs)
