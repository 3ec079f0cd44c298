"""Feed-forward layers: the checks of `regard.testing.feedforward` on trial (`PLANTED` shows them fail), and what they
do not ask."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard.core.rows import Rows
from regard.core.state import Out
from regard.kernels.router import wide_linear
from regard.layers.feedforward.base import FeedForward, Sizes, active_parameters
from regard.layers.feedforward.choice import Choice
from regard.layers.feedforward.dense import Dense
from regard.layers.feedforward.gshard import GShard
from regard.layers.feedforward.moe import MoE
from regard.layers.feedforward.productkey import Normed, ProductKey
from regard.layers.feedforward.scaling import Scaling
from regard.layers.feedforward.stmoe import STMoE
from regard.layers.feedforward.switch import Switch
from regard.testing.cases import same
from regard.testing.feedforward import CHECKS, INNER, WIDTH, Case, cost, tokens


@pytest.mark.parametrize("shape", [(7, 24), (2, 5, 24)])
def test_a_router_is_wide_and_its_gradients_are_as_autocast_says(shape):
    draw = torch.Generator().manual_seed(5)
    x, weight, grad = (torch.randn(*s, generator=draw) for s in (shape, (6, 24), (*shape[:-1], 6)))
    found = []
    for low in (False, True):
        given = [part.clone().requires_grad_() for part in (x, weight)]
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            logits = wide_linear(*given)
        found.append((logits.detach(), *torch.autograd.grad(logits, given, grad)))
    (exact, *wide), (logits, *narrow) = found
    assert_close(logits, exact, rtol=0, atol=0)
    for rounded, full in zip(narrow, wide, strict=True):
        assert rounded.dtype == torch.float32
        assert 1e-4 < (rounded - full).norm() / full.norm() < 0.01


# the checks on trial


class NoGate(Switch):
    def route(self, logits, real):
        route = super().route(logits, real)
        return route._replace(gate=torch.ones_like(route.gate))


class StoppedGate(Switch):
    def route(self, logits, real):
        route = super().route(logits, real)
        return route._replace(gate=route.gate.detach())


class PaddingTakesRoom(Switch):
    def _limits(self, tokens, real):
        return super()._limits(tokens, None)


class PaddingIsSent(Switch):
    def forward_packed(self, x, rows):
        return super().forward_packed(x, Rows.full(x))


class PaddingCountsForBalance(Switch):
    def route(self, logits, real):
        return super().route(logits, None)


class DroppedInEvaluation(Switch):
    def _limits(self, tokens, real):
        training, self.training = self.training, True
        limits = super()._limits(tokens, real)
        self.training = training
        return limits


class LastServedFirst(Switch):
    def forward_packed(self, x, rows):
        out = super().forward_packed(x.flip(1), rows)
        return out._replace(y=out.y.flip(1))


class SecondDrawnInEvaluation(GShard):
    def route(self, logits, real):
        training, self.training = self.training, True
        route = super().route(logits, real)
        self.training = training
        return route._replace(losses=route.losses if training else ())


class RenormalisedOverAll(GShard):
    def route(self, logits, real):
        route = super().route(logits, real)
        return route._replace(gate=route.gate * 0.9)


class UnweightedLoss(GShard):
    def route(self, logits, real):
        route = super().route(logits, real)
        return route._replace(losses=tuple((name, 1.0, value) for name, _, value in route.losses))


class ZOfTheShares(STMoE):
    def route(self, logits, real):
        route = super().route(logits, real)
        return route._replace(losses=tuple((name, weight, value**0.5) for name, weight, value in route.losses))


class RoundedRouter(Switch):
    def logits(self, x):
        if x.dtype == torch.float32:
            return super().logits(x.bfloat16().float())
        return (x @ self.router.T).float(), x


class SameNoise(MoE):
    def route(self, logits, real):
        self.eval()
        route = super().route(logits[:, : self.experts], real)
        self.train()
        return route


class AllRowsCompete(Choice):
    def forward_packed(self, x, rows):
        if rows.uniform_start is None:
            return super().forward_packed(x, rows)
        whole = x.flatten(0, 1)[None]
        out = super().forward_packed(whole, Rows.full(whole))
        return out._replace(y=out.y.view(x.shape))


class PaddingInTheMean(ProductKey):
    def find(self, x, real):
        return super().find(x, None)


class NormOfTheBatchAlways(ProductKey):
    def find(self, x, real):
        training, self.norm.training = self.norm.training, True
        found = super().find(x, real)
        self.norm.training = training
        return found


class HalvesSwapped(ProductKey):
    def find(self, x, real):
        index, weight = super().find(x, real)
        return index % self.keys * self.keys + index // self.keys, weight


class AllUnits(Scaling):
    def _mask(self, logits):
        return torch.ones_like(logits)


class OneDraw(Scaling):
    def _mask(self, logits):
        torch.manual_seed(0)
        return super()._mask(logits)


class EveryExpert(Switch):
    """One-hot dispatch: every expert works on every token."""

    def active(self):
        return sum(part.numel() for part in self.networks.parameters())


class NonlinearCost(Dense):
    def forward_packed(self, x, rows):
        mixed = torch.softmax(x @ x.mT, -1) @ x
        return Out(super().forward_packed(x, rows).y + 0 * mixed)


def bound(cls: type, **options) -> Callable[[Sizes], FeedForward]:
    return lambda sizes: cls(sizes, **options)


EVEN = {"experts": 4, "capacity": 1.0, "jitter": 0.0}
BOTH = {"experts": 4, "capacity": 1.0, "threshold": 0.0}
PLANTED = [
    ("reference", bound(NoGate, **EVEN)),
    ("gradient", bound(StoppedGate, **EVEN)),
    ("reference", bound(PaddingTakesRoom, **EVEN)),
    ("padding", bound(PaddingTakesRoom, **EVEN)),
    ("padding", bound(PaddingIsSent, **EVEN)),
    ("padding", bound(PaddingCountsForBalance, **EVEN)),
    ("company", bound(DroppedInEvaluation, **EVEN)),
    ("coupling", bound(LastServedFirst, **EVEN)),
    ("reference", bound(LastServedFirst, **EVEN)),
    ("random", bound(SecondDrawnInEvaluation, experts=4)),
    ("reference", bound(RenormalisedOverAll, **BOTH)),
    ("reference", bound(UnweightedLoss, **BOTH)),
    ("reference", bound(ZOfTheShares, **BOTH)),
    ("low_precision", bound(RoundedRouter, experts=16, capacity=None)),
    ("random", bound(SameNoise, experts=4, choices=2)),
    ("learns", bound(SameNoise, experts=4, choices=2)),
    ("company", bound(AllRowsCompete, experts=4, capacity=1.0)),
    ("padding", bound(PaddingInTheMean, keys=5, heads=2, choices=3, key_width=6)),
    ("company", bound(NormOfTheBatchAlways, keys=5, heads=2, choices=3, key_width=6)),
    ("reference", bound(HalvesSwapped, keys=5, heads=2, choices=3, key_width=6)),
    ("reference", bound(AllUnits, block=4, rank=3)),
    ("random", bound(OneDraw, block=4, rank=3)),
    ("active", bound(EveryExpert)),
    ("cost", bound(NonlinearCost)),
]


@pytest.mark.parametrize(("check", "make"), PLANTED, ids=lambda value: value if isinstance(value, str) else "")
def test_planted_bugs_are_caught(check, make):
    with pytest.raises((AssertionError, NotImplementedError)):
        CHECKS[check](Case("switch", "self", make))


# one by one


def test_one_expert_is_a_dense_layer():
    switch = regard.feedforward("switch(experts=1)", width=WIDTH, inner=INNER).eval()
    dense = regard.feedforward("dense(bias=False)", width=WIDTH, inner=INNER)
    with torch.no_grad():
        dense.inner.weight.copy_(switch.networks.inner[0].T)
        dense.outer.weight.copy_(switch.networks.outer[0].T)
    x = tokens().float()
    assert_close(switch(x), dense(x))


def test_the_cost_does_not_grow_with_the_experts():
    """The same active parameters: the work of a step is that of the tokens, and the router's."""
    for name, k in (("switch(capacity=None, ", 1), ("gshard(capacity=None, threshold=0.0, ", 2)):
        work = {}
        for experts in (8, 64):
            layer = regard.feedforward(f"{name}experts={experts})", width=64, inner=128).train()
            counted = cost(layer, 2048)["flops"]
            work[experts] = counted - 3 * 2 * 2048 * 64 * experts
        dense = cost(regard.feedforward("dense(bias=False)", width=64, inner=128), 2048)["flops"]
        assert work[64] == work[8] == k * dense


def test_decoding_is_never_bound_by_capacity():
    """All tokens want one expert: in training most are dropped, otherwise none."""
    layer = regard.feedforward("switch(experts=8, capacity=1.0, jitter=0.0)", width=WIDTH, inner=INNER)
    with torch.no_grad():
        layer.router.zero_()
        layer.router[3] = 1.0
    x = torch.rand(2, 16, WIDTH)
    answered = layer.train().forward_packed(x, Rows.full(x))
    assert (answered.y.abs().sum(-1) > 0).sum() == 4
    assert_close(answered.statistics["dropped"], torch.tensor(28 / 32))
    assert (layer.eval()(x).abs().sum(-1) > 0).all()


def test_second_choices_queue_behind_first_ones():
    """Four tokens, two experts of room two: who is dropped is who comes last in that order."""
    layer = regard.feedforward("gshard(experts=3, capacity=1.5, threshold=0.0)", width=3, inner=4).train()
    with torch.no_grad():
        layer.router.copy_(torch.eye(3))
    # first and second choices: (0, 1), (0, 1), (1, 0), (1, 0): all room of 0 and 1 goes to first choices
    x = torch.tensor([[[3.0, 2, 0], [3, 2, 0], [2, 3, 0], [2, 3, 0]]])
    out = layer.forward_packed(x, Rows.full(x))
    share = torch.softmax(torch.tensor([3.0, 2.0]), 0)[0]
    for t, expert in enumerate((0, 0, 1, 1)):
        assert_close(out.y[0, t], share * layer.networks.plain(expert, x[0, t]))
    assert_close(out.statistics["dropped"], torch.tensor(0.5))


@pytest.mark.parametrize("name", ["switch(jitter=0.0, ", "gshard(threshold=0.0, ", "stmoe(threshold=0.0, ", "glam("])
def test_local_groups_are_calls_of_their_own(name):
    """Tokens of other groups are no competition, and the losses are the mean; the last group has what is left."""
    torch.manual_seed(0)
    options = "experts=4, capacity=0.75" + (", threshold=0.0" if name == "glam(" else "")
    layer = regard.feedforward(f"{name}{options}, group=5)", width=WIDTH, inner=INNER).double().train()
    nn.init.normal_(layer.router)
    x = tokens(1, 13)
    whole = layer.forward_packed(x, Rows.full(x))
    cuts = [layer.forward_packed(part, Rows.full(part)) for part in x.split(5, 1)]
    assert_close(whole.y, torch.cat([cut.y for cut in cuts], 1))
    assert_close(whole.auxiliary_loss, sum(n / 13 * cut.auxiliary_loss for n, cut in zip((5, 5, 3), cuts, strict=True)))
    assert 0.1 < whole.statistics["dropped"] < 0.9
    layer.group = None
    assert (layer.forward_packed(x, Rows.full(x)).y - whole.y).abs().max() > 1e-3
    # a token alone has room for itself: ceil(0.75 / 4) = 1
    layer.group = 1
    assert layer.forward_packed(x, Rows.full(x)).statistics["dropped"] == 0
    assert_close(layer.forward_packed(x, Rows.full(x)).y, layer.eval().forward_packed(x, Rows.full(x)).y)


def test_the_second_expert_is_asked_as_often_as_its_gate_says():
    layer = regard.feedforward("gshard(experts=2, capacity=None, threshold=0.5)", width=2, inner=4).train()
    with torch.no_grad():
        layer.router.copy_(torch.eye(2))
    x = torch.tensor([math.log(4.0), 0.0]).expand(40_000, 2)  # gates 0.8 and 0.2
    torch.manual_seed(0)
    assert_close(
        layer.route(layer.logits(x)[0], None).sent.float().mean(0), torch.tensor([1.0, 0.4]), rtol=0, atol=0.01
    )
    assert layer.eval().route(layer.logits(x)[0], None).sent is None


def test_noisy_top_k_load_is_the_probability_of_being_chosen():
    """The k-th of the others is what an expert must exceed; draws of the noise of one expert say how often it does."""
    torch.manual_seed(0)
    layer = MoE(Sizes(WIDTH, INNER), experts=4, choices=2, importance=0.0, load=1.0).train()
    with torch.no_grad():
        layer.router.normal_()
        layer.spread.normal_()
    x = torch.randn(1, WIDTH)
    clean = x @ layer.router.T
    width = nn.functional.softplus(x @ layer.spread.T) + 0.01
    torch.manual_seed(1)
    noisy = clean + torch.randn(1, 4) * width
    expected = []
    for expert in range(4):
        others = sorted((noisy[0, other].item() for other in range(4) if other != expert), reverse=True)
        draws = clean[0, expert] + torch.randn(200_000) * width[0, expert]
        expected.append((draws > others[1]).float().mean())
    expected = torch.stack(expected)
    torch.manual_seed(1)
    (name, weight, value) = layer.route(layer.logits(x)[0], None).losses[1]
    assert (name, weight) == ("balance", 1.0)
    assert_close(value, expected.var(correction=0) / expected.mean() ** 2, rtol=0.03, atol=0.001)


def test_batch_norm_is_that_of_torch():
    ours, theirs = Normed(5).double(), nn.BatchNorm1d(5).double()
    for seed in range(3):
        x = tokens(1, 9, width=5, seed=seed)[0]
        assert_close(ours(x, None), theirs(x))
    assert_close(ours.mean, theirs.running_mean)
    assert_close(ours.variance, theirs.running_var)
    ours.eval(), theirs.eval()
    assert_close(ours(x, None), theirs(x))
    before = ours.train().mean.clone()
    ours(x, torch.zeros(9, dtype=torch.bool))
    same(ours.mean, before)


def test_layers_share_the_values_of_product_keys():
    """One table for all such layers of encoder and decoder, counted once; a token takes its part in each of them."""
    spec = "productkey(keys=8, heads=2, choices=2, key_width=8{})"
    sizes = {"vocabulary": 20, "width": 16, "heads": 2, "inner": 16, "layers": 3, "dropout": 0.0}
    feeds = ["dense", spec.format(", shared_values=True"), spec.format(", shared_values=True")]
    model = regard.Transformer(regard.ModelConfig(**sizes, feedforward=feeds))
    found = [part for part in model.modules() if isinstance(part, ProductKey)]
    assert len(found) == 4
    assert len({id(part.values) for part in found}) == 1
    assert len({id(part.query.weight) for part in found}) == 4
    idle = sum(part.numel() for part in model.parameters()) - active_parameters(model)
    assert idle == 64 * 16 - 4 * 2 * 2 * 16
    logits = model(torch.randint(20, (2, 5)), torch.randint(20, (2, 5))).logits
    logits.square().sum().backward()
    assert found[0].values.grad.any()
    own = regard.Transformer(regard.ModelConfig(**sizes, feedforward=spec.format("")))
    assert len({id(part.values) for part in own.modules() if isinstance(part, ProductKey)}) == 6
    other = "productkey(keys=4, heads=2, choices=2, key_width=8, shared_values=True)"
    mixed = regard.ModelConfig(**(sizes | {"layers": 2}), feedforward=[other, feeds[1]])
    with pytest.raises(ValueError, match=r"needs as many keys in every layer, and the same option: got 8 keys, and 4"):
        regard.Transformer(mixed)


def test_few_tokens_read_few_rows():
    """The sparse layer in decoding: the same answers, from a part of the weights."""
    layer = regard.feedforward("scaling(block=8, rank=3)", width=WIDTH, inner=64).eval()
    with torch.no_grad():
        layer.up.bias.normal_()
    x = tokens(4, 8).float()
    whole = layer(x)
    few = torch.cat([layer(x[:, t : t + 1][row : row + 1]) for row in range(4) for t in range(8)])
    assert_close(few.view(whole.shape), whole)
    with FlopCounterMode(display=False) as flops:
        layer(x[:1, :1])
    assert flops.get_total_flops() == 2 * (WIDTH * 3 + 3 * 64 + 2 * WIDTH * 8)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("switch(experts=0)", "at least as many experts"),
        ("gshard(experts=1)", "sends a token to 2 experts"),
        ("switch(capacity=0.0)", "must be above 0"),
        ("gshard(group=0)", "must be at least 1 token, or None for all; got 0"),
        ("choice(experts=2, capacity=3.0)", "at most the number of experts"),
        ("productkey(keys=4, choices=5)", "at most as many choices as keys"),
        ("productkey(key_width=7)", "two halves"),
        ("productkey(query_layers=(8, 0))", "at least 1 wide each"),
        ("scaling(block=5)", "must divide the width inside"),
        ("scaling(block=4, hard=1.5)", "hard from 0 to 1"),
        ("dense(activation='tanh')", "'relu' or 'gelu'"),
        ("swich", "did you mean 'switch'"),
    ],
)
def test_what_cannot_be_is_refused_in_words(spec, words):
    with pytest.raises(ValueError, match=words):
        regard.feedforward(spec, width=WIDTH, inner=INNER)


def test_bad_tokens_are_refused():
    layer = regard.feedforward("dense", width=WIDTH, inner=INNER)
    with pytest.raises(ValueError, match=r"x must be \[batch, tokens, 8\]"):
        layer(torch.zeros(2, 8))
    with pytest.raises(ValueError, match="keep must be boolean"):
        layer(torch.zeros(2, 3, 8), keep=torch.ones(2, 3))
    with pytest.raises(ValueError, match="inner must be a whole number"):
        regard.feedforward("dense", width=8, inner=0)
