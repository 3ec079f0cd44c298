"""The feed-forward layer that all parameters take part in."""

import math
from typing import Annotated

import torch
from torch import Tensor, nn

from regard.attention.base import Order, Out, Rows
from regard.feedforward.base import Activation, FeedForward, FeedForwardFacts, Sizes, activate


class Dense(FeedForward):
    """Vaswani et al. 2017: W2 a(W1 x + b1) + b2 with a = ReLU, or GELU. Gated, W2 (a(Wg x + bg) * (W1 x + b1)) + b2, it
    is GEGLU (a = GELU) or SwiGLU (a = SiLU) of Shazeer 2020 (arXiv 2002.05202). Time N E F, memory N F."""

    facts = FeedForwardFacts(
        name="dense",
        paper="Vaswani et al. 2017, Attention Is All You Need",
        link="arXiv 1706.03762",
        family="dense",
        formula="y = W2 a(W1 x + b1) + b2",
        time=Order("N", 1),
        memory=Order("N", 1),
    )
    examples = ("dense", "dense(activation='gelu')", "dense(activation='silu', gated=True, bias=False)")

    def __init__(
        self,
        sizes: Sizes,
        *,
        activation: Annotated[Activation, "between the two products"] = "relu",
        gated: Annotated[
            bool, "the activation of one product gates another: GEGLU with gelu, SwiGLU with silu"
        ] = False,
        bias: Annotated[bool, "of the products"] = True,
    ):
        super().__init__(sizes)
        self.activation = activation
        self.inner = nn.Linear(sizes.width, sizes.inner, bias=bias)
        self.gate = nn.Linear(sizes.width, sizes.inner, bias=bias) if gated else None
        self.outer = nn.Linear(sizes.inner, sizes.width, bias=bias)
        for linear in filter(None, (self.inner, self.gate, self.outer)):
            nn.init.xavier_uniform_(linear.weight)
            if bias:
                nn.init.zeros_(linear.bias)

    def run(self, x: Tensor, rows: Rows) -> Out:
        h = self.inner(x)
        h = activate(self.activation, h) if self.gate is None else activate(self.activation, self.gate(x)) * h
        return Out(self.outer(h))

    def reference(self, x: Tensor) -> Tensor:
        return torch.stack([self._plain(token) for token in x])

    def _plain(self, x: Tensor) -> Tensor:
        def linear(layer: nn.Linear, x: Tensor) -> list[Tensor]:
            bias = layer.bias if layer.bias is not None else [0.0] * len(layer.weight)
            return [
                sum(w * u for w, u in zip(row, x, strict=True)) + b for row, b in zip(layer.weight, bias, strict=True)
            ]

        def active(u: Tensor) -> Tensor:
            if self.activation == "relu":
                return u.clamp(min=0)
            if self.activation == "silu":
                return u / (1 + torch.exp(-u))
            if self.activation == "gelu":
                return u * (1 + torch.erf(u / math.sqrt(2))) / 2
            return u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))) / 2

        h = linear(self.inner, x)
        if self.gate is None:
            h = [active(u) for u in h]
        else:
            h = [active(g) * u for g, u in zip(linear(self.gate, x), h, strict=True)]
        return torch.stack(linear(self.outer, torch.stack(h)))
