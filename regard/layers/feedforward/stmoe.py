"""Two experts for each token, with a router whose logits stay small."""

from typing import Annotated

from regard.core.shape import Order
from regard.layers.feedforward.base import FeedForwardFacts, Sizes
from regard.layers.feedforward.experts import Balance, Capacity, Experts, Group, Inner
from regard.layers.feedforward.pairs import Pairs, Threshold


class STMoE(Pairs):
    """Zoph et al. 2022: the routing of GShard over experts W2 (GELU(Wg x) * W1 x * b), b a learned factor per unit, and
    an auxiliary loss z * mean((log sum_e exp(W x)_e)^2) that keeps the router's logits from growing.

    Capacity, second choices and the balance loss are as in gshard. In the paper every fourth layer is of this kind.
    Time 2 N E F (three products), memory 2 N F."""

    facts = FeedForwardFacts(
        name="stmoe",
        paper="Zoph et al. 2022, ST-MoE",
        link="arXiv 2202.08906",
        family="experts",
        formula="y = g_1 FFN_1(x) + g_2 FFN_2(x),  loss z mean(log^2 sum_e exp(W x)_e)",
        time=Order("N", 1),
        memory=Order("N", 1),
        training="batch",
        random=True,
        auxiliary_loss=True,
    )
    examples = ("stmoe(experts=4, capacity=1.25, threshold=0.0, z=0.1)", "stmoe(experts=4)")

    def __init__(
        self,
        sizes: Sizes,
        *,
        experts: Experts = 8,
        inner: Inner = None,
        capacity: Capacity = 1.25,
        balance: Balance = 0.01,
        z: Annotated[float, "weight of the loss that keeps the router's logits small"] = 0.001,
        threshold: Threshold = 0.2,
        group: Group = None,
    ):
        super().__init__(
            sizes,
            experts=experts,
            inner=inner,
            capacity=capacity,
            balance=balance,
            threshold=threshold,
            group=group,
            z=z,
            activation="gelu",
            gated=True,
            scaled=True,
        )
