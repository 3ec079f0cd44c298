"""What the layers share that send a token to two experts, as GShard does."""

from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor

from regard.core.reference import add_up
from regard.layers.feedforward.base import Activation, Sizes, plain_linear
from regard.layers.feedforward.experts import Route, Routed, balance, best, mean, plain_balance, plain_softmax

Threshold = Annotated[float, "gate from which on the second expert is always used in training; 0: always"]


class Pairs(Routed):
    """y = g_1 FFN_1(x) + g_2 FFN_2(x) for the two largest shares of p = softmax(W x), divided by their sum.

    While training, the second expert is kept with probability min(1, g_2 / threshold), and second choices queue behind
    the first choices of all tokens: later tokens can take an earlier one its second expert."""

    def __init__(
        self,
        sizes: Sizes,
        *,
        experts: int,
        inner: int | None,
        capacity: float | None,
        balance: float,
        threshold: float,
        z: float = 0.0,
        activation: Activation = "relu",
        gated: bool = False,
        scaled: bool = False,
        group: int | None = None,
    ):
        super().__init__(
            sizes,
            experts=experts,
            inner=inner,
            choices=2,
            capacity=capacity,
            activation=activation,
            gated=gated,
            scaled=scaled,
            group=group,
        )
        self.balance, self.threshold, self.z = balance, threshold, z
        training = "token" if capacity is None else "batch"
        self.facts = replace(self.facts, training=training, random=threshold > 0, auxiliary_loss=balance > 0 or z > 0)

    def route(self, logits: Tensor, real: Tensor | None) -> Route:
        shares = torch.softmax(logits, 1)
        gate, expert = best(shares, 2)
        gate = gate / gate.sum(1, keepdim=True)
        if not self.training:
            return Route(expert, gate)
        sent = None
        if self.threshold:
            kept = torch.rand_like(gate[:, 1]) * self.threshold < gate[:, 1]
            sent = torch.stack([torch.ones_like(kept), kept], 1)
        losses = []
        if self.balance:
            losses.append(("balance", self.balance, balance(shares, expert[:, 0], real, self.group)))
        if self.z:
            losses.append(("z", self.z, mean(torch.logsumexp(logits, 1).square(), real)))
        return Route(expert, gate, sent, tuple(losses))

    def plain_route(self, x: Tensor) -> tuple[list[list[tuple[int, Tensor]]], Tensor]:
        logits = [plain_linear(self.router, token) for token in x]
        shares = [plain_softmax(row) for row in logits]
        choices = []
        for share in shares:
            first, second = sorted(range(self.experts), key=lambda expert, share=share: -share[expert].item())[:2]
            both = share[first] + share[second]
            choices.append([(first, share[first] / both), (second, share[second] / both)])
        loss = self.balance * plain_balance(shares, [named[0][0] for named in choices], self.group)
        sizes = [torch.log(add_up(torch.exp(logit) for logit in row)) ** 2 for row in logits]
        return choices, loss + self.z * add_up(sizes) / len(sizes)
