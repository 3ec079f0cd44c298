"""Two experts for each token."""

from regard.core.shape import Order
from regard.layers.feedforward.base import FeedForwardFacts, Sizes
from regard.layers.feedforward.experts import Balance, Capacity, Experts, Group, Inner
from regard.layers.feedforward.pairs import Pairs, Threshold


class GShard(Pairs):
    """Lepikhin et al. 2021: y = g_1 FFN_1(x) + g_2 FFN_2(x) for the experts of the two largest shares p = softmax(W x),
    g_i = p_i / (p_1 + p_2).

    While training, an expert takes ceil(capacity N / experts) tokens, first choices before second ones, the second
    expert is asked with probability min(1, g_2 / threshold) only, and experts are kept alike by
    balance * experts * sum_e f_e P_e (the paper's loss times experts^2, so that 1 is even). Gates are as they were
    before anybody was dropped. When capacity binds, later tokens can take an earlier one its second expert. `group` are
    the paper's local groups: tokens compete with those of their group only, and the loss is the mean of the groups'.
    Outside training nothing is drawn and no token dropped, where the authors' code keeps to a capacity and, unless told
    otherwise, asks the second expert always; it rounds capacities down, and up to a multiple of four. Time 2 N E F,
    memory 2 N F."""

    facts = FeedForwardFacts(
        name="gshard",
        paper="Lepikhin et al. 2021, GShard",
        link="arXiv 2006.16668",
        family="experts",
        formula="y = g_1 FFN_1(x) + g_2 FFN_2(x),  g = the two largest of softmax(W x), by their sum",
        time=Order("N", 1),
        memory=Order("N", 1),
        training="batch",
        random=True,
        auxiliary_loss=True,
    )
    examples = (
        "gshard(experts=4, capacity=1.5, threshold=0.0)",
        "gshard(experts=3, capacity=None)",
        "gshard(experts=4, capacity=1.25)",
        "gshard(experts=3, capacity=1.25, threshold=0.0, group=16)",
    )

    def __init__(
        self,
        sizes: Sizes,
        *,
        experts: Experts = 8,
        inner: Inner = None,
        capacity: Capacity = 2.0,
        balance: Balance = 0.01,
        threshold: Threshold = 0.5,
        group: Group = None,
    ):
        super().__init__(
            sizes, experts=experts, inner=inner, capacity=capacity, balance=balance, threshold=threshold, group=group
        )
