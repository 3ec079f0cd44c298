"""One expert for each token."""

from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor

from regard.core.shape import Order
from regard.layers.feedforward.base import FeedForwardFacts, Sizes
from regard.layers.feedforward.experts import (
    Balance,
    Capacity,
    ExpertActivation,
    Experts,
    Gated,
    Group,
    Inner,
    Route,
    Routed,
    balance,
    plain_balance,
    plain_linear,
    plain_softmax,
)


class Switch(Routed):
    """Fedus et al. 2022: y = p_e FFN_e(x) for the expert e that has the largest share p = softmax(W x) of a token.

    The gate is the share itself, so that the router learns. While training, its input is multiplied by noise from
    1 - jitter to 1 + jitter, an expert takes ceil(capacity N / experts) tokens, and experts are kept alike by
    balance * experts * sum_e f_e P_e. A token that is turned away came later than those that were not: no token learns
    from later ones. In the paper every other layer is of this kind: ["dense", "switch"]. The authors' code keeps to a
    capacity outside training too, and rounds it down. Time N E F, memory N F."""

    facts = FeedForwardFacts(
        name="switch",
        paper="Fedus et al. 2022, Switch Transformers",
        link="arXiv 2101.03961",
        family="experts",
        formula="y = p_e FFN_e(x),  e = argmax p,  p = softmax(W x)",
        time=Order("N", 1),
        memory=Order("N", 1),
        training="earlier",
        random=True,
        auxiliary_loss=True,
    )
    examples = (
        "switch(experts=4, capacity=1.0, jitter=0.0)",
        "switch(experts=3, inner=12, capacity=None)",
        "switch(experts=5, capacity=0.8, jitter=0.0, activation='gelu', gated=True)",
        "switch(experts=3, capacity=1.0, jitter=0.0, group=25)",
    )
    reduces_to = (("switch(experts=1)", "dense(bias=False)"),)

    def __init__(
        self,
        sizes: Sizes,
        *,
        experts: Experts = 8,
        inner: Inner = None,
        capacity: Capacity = 1.25,
        balance: Balance = 0.01,
        jitter: Annotated[float, "noise on what the router reads, in training"] = 0.01,
        activation: ExpertActivation = "relu",
        gated: Gated = False,
        group: Group = None,
    ):
        super().__init__(
            sizes,
            experts=experts,
            inner=inner,
            choices=1,
            capacity=capacity,
            activation=activation,
            gated=gated,
            group=group,
        )
        if not 0 <= jitter < 1:
            raise ValueError(f"jitter of {self.facts.name!r} must be at least 0 and below 1, got {jitter}")
        self.balance, self.jitter = balance, jitter
        training = "token" if capacity is None else "earlier"
        self.facts = replace(self.facts, training=training, random=jitter > 0, auxiliary_loss=balance > 0)

    def route(self, logits: Tensor, real: Tensor | None) -> Route:
        shares = torch.softmax(logits, 1)
        gate, expert = shares.max(1, keepdim=True)
        losses = ()
        if self.training and self.balance:
            losses = (("balance", self.balance, balance(shares, expert[:, 0], real, self.group)),)
        return Route(expert, gate, losses=losses)

    def plain_route(self, x: Tensor) -> tuple[list[list[tuple[int, Tensor]]], Tensor]:
        shares = [plain_softmax(plain_linear(self.router, token)) for token in x]
        firsts = [int(share.argmax()) for share in shares]
        choices = [[(first, share[first])] for first, share in zip(firsts, shares, strict=True)]
        return choices, self.balance * plain_balance(shares, firsts, self.group)
