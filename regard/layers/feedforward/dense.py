"""The feed-forward layer whose tokens use all parameters."""

from typing import Annotated

import torch
from torch import Tensor, nn

from regard.core.rows import Rows
from regard.core.shape import Order
from regard.core.state import Out
from regard.layers.feedforward.base import (
    Activation,
    FeedForward,
    FeedForwardFacts,
    Sizes,
    activate,
    plain_activation,
    plain_linear,
)


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
        activation: Annotated[Activation, "activation between the two products"] = "relu",
        gated: Annotated[
            bool, "the activation of one product gates another: GEGLU with gelu, SwiGLU with silu"
        ] = False,
        bias: Annotated[bool, "biases of the products"] = True,
    ):
        super().__init__(sizes)
        self.activation: Activation = activation
        self.inner = nn.Linear(sizes.width, sizes.inner, bias=bias)
        self.gate = nn.Linear(sizes.width, sizes.inner, bias=bias) if gated else None
        self.outer = nn.Linear(sizes.inner, sizes.width, bias=bias)
        for linear in filter(None, (self.inner, self.gate, self.outer)):
            nn.init.xavier_uniform_(linear.weight)
            if bias:
                nn.init.zeros_(linear.bias)

    def forward_packed(self, x: Tensor, rows: Rows) -> Out:
        h = self.inner(x)
        h = activate(self.activation, h) if self.gate is None else activate(self.activation, self.gate(x)) * h
        return Out(self.outer(h))

    def reference(self, x: Tensor) -> Out:
        return Out(torch.stack([self._plain(token) for token in x]))

    def _plain(self, x: Tensor) -> Tensor:
        def linear(layer: nn.Linear, x: Tensor) -> Tensor:
            y = plain_linear(layer.weight, x)
            return y if layer.bias is None else y + layer.bias

        h = linear(self.inner, x)
        if self.gate is None:
            return linear(self.outer, plain_activation(self.activation, h))
        return linear(self.outer, plain_activation(self.activation, linear(self.gate, x)) * h)
