"""A penalty that grows with the distance."""

import torch
from torch import Tensor

from regard.core.numeric import wide_dtype
from regard.core.shape import Shape
from regard.layers.position.base import Position, PositionFacts


class Alibi(Position):
    """Press et al. 2022: softmax(q_i K^T / sqrt(D) - m_h |i - j|). Of n = 2^p heads, head h = 1 .. n has the slope
    m_h = 2^(-8h/n); other head counts take the slopes of the next smaller power n and then every second slope of 2n
    heads, as published. The paper is causal; for role "self" both sides are penalised alike. Cost N^2 H."""

    facts = PositionFacts(
        name="alibi",
        paper="Press et al. 2022, Train Short, Test Long: Attention with Linear Biases",
        link="arXiv 2108.12409",
        kind="bias",
        formula="q_i . k_j / sqrt(D) - m_h |i - j|, m_h = 2^(-8h/H)",
    )
    examples = ("alibi",)
    powers: Tensor  # [H]

    def __init__(self, shape: Shape):
        super().__init__(shape)
        n = 2 ** (shape.all_heads.bit_length() - 1)
        heads = range(shape.first_head, shape.first_head + shape.heads)
        # -log2 of the slopes: eighths, sixteenths ..., which half precision holds exactly
        powers = [8 * (h + 1) / n if h < n else 4 * (2 * (h - n) + 1) / n for h in heads]
        self.register_buffer("powers", torch.tensor(powers), persistent=False)

    def bias(self, gap: Tensor) -> Tensor:
        return -self.slopes()[:, None, None] * gap.abs().unsqueeze(-3)

    def slopes(self) -> Tensor:
        return torch.exp2(-self.powers.to(wide_dtype(self.powers.dtype)))

    def plain_bias(self, head: int, i: int, j: int) -> float:
        heads, h = self.shape.all_heads, self.shape.first_head + head
        n = 1
        while 2 * n <= heads:
            n *= 2
        slope = (2 ** (-8 / n)) ** (h + 1) if h < n else (2 ** (-4 / n)) ** (2 * (h - n) + 1)
        return -slope * abs(i - j)
