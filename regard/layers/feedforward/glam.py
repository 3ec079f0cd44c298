"""Two gated experts for each token."""

from regard.core.shape import Order
from regard.layers.feedforward.base import FeedForwardFacts, Sizes
from regard.layers.feedforward.experts import Balance, Capacity, Experts, Group, Inner
from regard.layers.feedforward.pairs import Pairs, Threshold


class GLaM(Pairs):
    """Du et al. 2022: the routing of GShard over gated experts W2 (GELU(Wg x) * W1 x) without biases.

    The paper alternates it with dense layers of the same form in a decoder with relative positions,
    model.feedforward ["dense(activation='gelu', gated=True, bias=False)", "glam"]. Capacity, second choices and the
    balance loss are as in gshard. Time 2 N E F (three products), memory 2 N F."""

    facts = FeedForwardFacts(
        name="glam",
        paper="Du et al. 2022, GLaM",
        link="arXiv 2112.06905",
        family="experts",
        formula="y = g_1 FFN_1(x) + g_2 FFN_2(x),  FFN(x) = W2 (GELU(Wg x) * W1 x)",
        time=Order("N", 1),
        memory=Order("N", 1),
        training="batch",
        random=True,
        auxiliary_loss=True,
    )
    examples = ("glam(experts=4, capacity=1.0, threshold=0.0)", "glam(experts=4)")

    def __init__(
        self,
        sizes: Sizes,
        *,
        experts: Experts = 64,
        inner: Inner = None,
        capacity: Capacity = 2.0,
        balance: Balance = 0.01,
        threshold: Threshold = 0.5,
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
            activation="gelu",
            gated=True,
        )
