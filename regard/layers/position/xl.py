"""Sinusoids of the distance, projected for each head, with a bias for content and one for position."""

import math
from typing import Annotated

import torch
from torch import Tensor, nn

from regard.core.rows import Mask
from regard.core.shape import Shape
from regard.layers.position.base import Position, PositionFacts, angles, rates


class TransformerXL(Position):
    """Dai et al. 2019: A_ij = ((q_i + u) . k_j + (q_i + v) . W_R R_(i-j)) / sqrt(D), R = [sines | cosines] of the
    distance, W_R: E -> H D without bias, u and v of each head. Distances may be negative (role "self"), as in XLNet;
    `clamp` reads larger ones as that one, on both sides. Time N^2 D + N E H D."""

    facts = PositionFacts(
        name="xl",
        paper="Dai et al. 2019, Transformer-XL: Attentive Language Models beyond a Fixed-Length Context",
        link="arXiv 1901.02860",
        kind="content",
        formula="((q_i + u) . k_j + (q_i + v) . W_R R_(i-j)) / sqrt(D)",
    )
    examples = ("xl", "xl(clamp=5)")
    rates: Tensor  # [E / 2]

    def __init__(
        self,
        shape: Shape,
        *,
        clamp: Annotated[int | None, "largest relative distance, to which others are clamped; None: no limit"] = None,
    ):
        super().__init__(shape)
        if clamp is not None and clamp < 1:
            raise ValueError(f"option 'clamp' of 'xl' must be at least 1 or None, got {clamp}")
        self.clamp = clamp
        self.project = nn.Linear(shape.width, shape.heads * shape.head_width, bias=False)
        nn.init.xavier_uniform_(self.project.weight)
        self.u = nn.Parameter(torch.empty(shape.heads, shape.head_width).normal_(std=0.02))
        self.v = nn.Parameter(torch.empty(shape.heads, shape.head_width).normal_(std=0.02))
        self.register_buffer("rates", rates(shape.width, 10000.0), persistent=False)

    def scores(self, q: Tensor, k: Tensor, mask: Mask, scale: float) -> Tensor:
        distance = -self.span(mask)
        if self.clamp is not None:
            distance = distance.clamp(-self.clamp, self.clamp)
        R = self._sinusoids(distance, q.dtype)  # [C, E] or [B, C, E]
        content, place = (q + self.u[:, None]) * scale, (q + self.v[:, None]) * scale
        heads = _, D = self.shape.heads, self.shape.head_width
        if mask.T < D:
            # a few queries, as in decoding, are carried to the sinusoids more cheaply than every distance to the heads
            place = place @ self.project.weight.unflatten(0, heads) @ R.unsqueeze(-3).mT
        else:
            place = place @ self.project(R).unflatten(-1, heads).movedim(-3, -1)
        return content @ k.mT + self.to_keys(place, mask)

    @property
    def has_distances(self) -> bool:
        return self.step == self.pace == 1 and not self.apart

    def by_distance(self, q, count, scale):
        distance = torch.arange(count, device=q.device)
        R = self._sinusoids(distance if self.clamp is None else distance.clamp(max=self.clamp), q.dtype)
        heads = self.shape.heads, self.shape.head_width
        keys = (self.project(R) * scale).to(q.dtype).unflatten(-1, heads).transpose(0, 1)
        return q + self.u[:, None].to(q.dtype), q + self.v[:, None].to(q.dtype), keys

    def _sinusoids(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        angle = angles(distance, self.rates, dtype)
        return torch.cat([angle.sin(), angle.cos()], -1)[..., : self.shape.width].to(dtype)

    def plain_score(self, head: int, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
        E, D = self.shape.width, self.shape.head_width
        distance = i - j if self.clamp is None else max(-self.clamp, min(self.clamp, i - j))
        angle = [distance / 10000 ** (2 * n / E) for n in range(math.ceil(E / 2))]
        R = [math.sin(a) for a in angle] + [math.cos(a) for a in angle]
        row = self.project.weight[head * D : head * D + D] @ torch.tensor(R[:E], dtype=q.dtype)
        return self.u[head] @ k + (q + self.v[head]) @ row
