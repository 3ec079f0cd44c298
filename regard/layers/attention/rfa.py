"""Random feature attention, with and without a gate."""

from dataclasses import replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.numeric import to_wide, wide_dtype
from regard.core.reference import Row, add_up
from regard.core.shape import Order, Shape
from regard.kernels.random_features import trigonometric_features
from regard.kernels.scan import State, absorb, attend_past, attend_sums
from regard.layers.attention.base import Facts
from regard.layers.attention.draws import RandomBuffer, check_redraw, normal_rows
from regard.layers.attention.scanned import Scanned


class RandomFeatures(RandomBuffer, Scanned):
    """Peng et al. 2021: phi(x) = R^(-1/2) [sin(w_r . x'), cos(w_r . x')] with x' = x / |x| and w_r = sigma * w~_r,
    w~_r normal, so that phi(q) . phi(k) is on average the Gaussian kernel exp(-|q' - k'|^2 / 2) at sigma = 1, which is
    exp(q' . k') times a constant. sigma [H, D] is learned and starts at 1 / temperature; w~ lives in a buffer and is
    drawn anew at every training step (`redraw`); what was drawn last is evaluated. With a gate
    g_t = sigmoid(w_g . x_t + b), S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t^T, and z likewise.

    Features have signs, so a denominator may come out near zero or below: it is raised to `floor`. (The authors' code
    has no gate, a fixed scale in place of R^(-1/2), and a floor larger than the sum of the first tokens; it draws from
    a pool of 500 matrices, whose first H it evaluates with; and its orthogonal features have orthogonal columns [R, D]
    where R is not D.) Time N R D per head, memory N R, state R D."""

    random_buffer = "draws"
    facts = Facts(
        name="rfa",
        paper="Peng et al. 2021, Random Feature Attention",
        link="arXiv 2103.02143",
        family="kernels",
        formula="o_i = phi(q_i)^T S_i / max(phi(q_i) . z_i, floor), S_i = sum_j phi(k_j) v_j^T, z_i = sum_j phi(k_j)",
        time=Order("N features", 1),
        memory=Order("N features", 1),
        state=Order("features", 0),
        positions=("rotation",),
        exact=False,
        signed=True,
    )
    examples = (
        "rfa(features=3)",
        "rfa(features=5, gate=True)",
        "rfa(features=5, orthogonal=True, temperature=2.0, floor=0.5)",
    )
    draws: Tensor  # w~ [H, R, D]

    def __init__(
        self,
        shape: Shape,
        *,
        features: Annotated[int, "number of random directions (R); each gives a sine and a cosine"] = 64,
        gate: Annotated[bool, "learned forget gate; causal only"] = False,
        temperature: Annotated[
            float, "temperature: sigma starts at 1 / temperature, higher spreads the attention"
        ] = 1.0,
        floor: Annotated[float, "smallest denominator"] = 0.01,
        orthogonal: Annotated[bool, "orthogonal random directions, which lowers the variance"] = False,
        redraw: Annotated[int, "training steps between draws of w~; 0: drawn once"] = 1,
    ):
        if gate:
            self.inputs = {**self.inputs, "gate": "gate"}
            refused = "a gate forgets the past, and a sequence seen at once has none; leave gate out"
            self.facts = replace(self.facts, roles=("causal",), refusals=(("self", refused), ("cross", refused)))
        super().__init__(shape)
        for name, value in (("features", features), ("temperature", temperature), ("floor", floor)):
            if not 0 < value < float("inf"):
                raise ValueError(f"option {name!r} of 'rfa' must be above 0 and finite, got {value}")
        self.floor, self.orthogonal, self.redraw_every = floor, orthogonal, check_redraw("rfa", redraw)
        self.sigma = nn.Parameter(torch.full((shape.heads, shape.head_width), 1 / temperature))
        self.register_buffer("draws", torch.empty(shape.heads, features, shape.head_width))
        self.redraw()

    def draw_values(self, draw: torch.Generator | None = None) -> Tensor:
        """Random directions."""
        return normal_rows(*self.draws.shape, draw=draw, orthogonal=self.orthogonal)

    def digest(self, real: Tensor | None, k: Tensor, v: Tensor) -> State:
        return absorb(self._features(k), v, real=real)

    def consult(self, digest: State, q: Tensor) -> Tensor:
        return attend_sums(self._features(q), *digest, dtype=q.dtype, floor=self.floor)

    def zero(self, batch: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        size = (batch, self.shape.heads, 2 * self.draws.shape[1], self.shape.head_width)
        sums = torch.zeros(size, dtype=wide_dtype(dtype), device=device)
        return sums, sums[..., 0]

    def scan(
        self,
        real: Tensor | None,
        sums: State | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor | None = None,
    ) -> tuple[Tensor, State | None]:
        decay = None if gate is None else F.logsigmoid(to_wide(gate))
        q, k, final = self._features(q), self._features(k, gate), sums is not None
        return attend_past(q, k, v, state=sums, decay=decay, real=real, floor=self.floor, final=final)

    def _features(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """[B, H, n, 2 R]; with a gate times what it leaves to new tokens."""
        return trigonometric_features(x, self.draws * self.sigma[:, None], gate=gate)

    def plain(self, row: Row) -> Tensor:
        W, R = self.draws[row.head] * self.sigma[row.head], self.draws.shape[1]

        def phi(x: Tensor) -> Tensor:
            angles = torch.stack([w @ x for w in W]) / (x @ x).sqrt()
            return torch.stack([angles.sin(), angles.cos()])

        queries, keys = ([phi(x) for x in xs] for xs in (row.q, row.k))
        gates = 1 / (1 + torch.exp(-row.values["gate"])) if "gate" in row.values else None
        outs = []
        for i in range(row.T):
            weights = []
            for j in row.past(i):
                held = 1 if gates is None else (1 - gates[j]) * torch.prod(gates[j + 1 : i + 1])
                weights.append(held * (queries[i] * keys[j]).sum() / R)
            mixed = add_up(w * row.v[j] for w, j in zip(weights, row.past(i), strict=True))
            outs.append(mixed / add_up(weights).clamp(min=self.floor))
        return torch.stack(outs)
