"""What proves a feed-forward layer: one function a property, over every example of the registry. No skip list: where a
layer is exempt it has declared so, and then the opposite is checked. `PLANTED` shows the checks fail."""

import copy
import io
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from suite import Tally, holes, same
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard.core.rows import Rows, pack
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
from regard.spec import FEEDFORWARD

WIDTH, INNER = 8, 16


@dataclass(frozen=True)
class Case:
    spec: str
    role: str
    make: Callable[[Sizes], FeedForward] | None = None  # a broken one, in the tests of the checks themselves

    def build(self, *, seed: int = 0, dtype: torch.dtype = torch.float64, width: int = WIDTH) -> FeedForward:
        torch.manual_seed(seed)
        sizes = Sizes(width, 2 * width, self.role)
        layer = FEEDFORWARD.build(self.spec, sizes) if self.make is None else self.make(sizes)
        with torch.no_grad():
            for parameter in layer.parameters():
                # none may be zero or one, and routers must have opinions
                parameter.add_(0.5 * torch.randn_like(parameter))
            for buffer in layer.buffers():
                buffer.add_(torch.rand_like(buffer))
        return layer.to(dtype).eval()

    def __str__(self) -> str:
        return f"{self.spec}-{self.role}"


def cases() -> list[Case]:
    found = []
    for name in FEEDFORWARD.names():
        for spec in FEEDFORWARD.find(name).examples:
            # the role decides what can be built (check_role), never what is computed
            found.append(Case(spec, regard.facts(spec, "feedforward").roles[-1]))
    return found


def tokens(B: int = 3, T: int = 7, *, seed: int = 1, width: int = WIDTH) -> Tensor:
    return torch.randn(B, T, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def told(layer: FeedForward, x: Tensor, keep: Tensor | None = None, seed: int = 5) -> tuple[Tensor, Out]:
    """The real tokens' answers one after the other, and all that `forward_packed` gives; the same draws every time."""
    torch.manual_seed(seed)
    if keep is None:
        out = layer.forward_packed(x, Rows.full(x))
        return out.y.flatten(0, 1), out
    packed, rows = pack(x, keep)
    out = layer.forward_packed(packed, rows)
    return out.y[rows.real()], out


def reference(layer: FeedForward, x: Tensor, keep: Tensor | None = None) -> Out:
    """All real tokens compete, or those of a row do."""
    rows = [row if keep is None else row[keep[index]] for index, row in enumerate(x)]
    rows = [row for row in rows if len(row)]
    if layer.facts.evaluation == "row":
        return Out(torch.cat([layer.reference(row).y for row in rows]))
    return layer.reference(torch.cat(rows))


def check_reference(case: Case) -> None:
    layer = case.build()
    for training in (False, True):
        layer.train(training)
        if training and layer.facts.random:
            continue
        for B, T in ((1, 1), (1, 2), (2, 7), (1, 17)):
            x = tokens(B, T)
            y, out = told(copy.deepcopy(layer), x)
            expected = reference(layer, x)
            assert_close(y, expected.y)
            if training and layer.facts.auxiliary_loss:
                assert_close(out.auxiliary_loss, expected.auxiliary_loss)
        keep = holes(9)
        y, out = told(copy.deepcopy(layer), tokens(6, 9), keep)
        expected = reference(layer, tokens(6, 9), keep)
        assert_close(y, expected.y)
        if training and layer.facts.auxiliary_loss:
            assert_close(out.auxiliary_loss, expected.auxiliary_loss)


def check_gradient(case: Case) -> None:
    """Of the answers and the loss, for the tokens and every parameter, the router's too."""
    layer = case.build()
    for training in (False, True):
        layer.train(training)
        if training and layer.facts.random:
            continue
        results = []
        for slow in (False, True):
            x = tokens(1, 9).requires_grad_()
            leaves = [x, *layer.parameters()]
            y, out = (lambda out: (out.y, out))(layer.reference(x[0])) if slow else told(copy.copy(layer), x)
            toward = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=y.dtype)
            goal = (y * toward).sum() + (0 if out.auxiliary_loss is None else 3 * out.auxiliary_loss)
            results.append(torch.autograd.grad(goal, leaves, materialize_grads=True))
        names = ["x", *(name for name, _ in layer.named_parameters())]
        for name, fast, slow in zip(names, *results, strict=True):
            assert_close(fast, slow, msg=lambda text, name=name: f"{name}: {text}")


def check_learns(case: Case) -> None:
    """In training, with whatever is drawn, a gradient reaches every parameter."""
    layer = case.build().train()
    y, out = told(layer, tokens(4, 30))
    (y.square().sum() + (0 if out.auxiliary_loss is None else out.auxiliary_loss)).backward()
    lost = [name for name, part in layer.named_parameters() if part.grad is None or not part.grad.any()]
    assert not lost, f"no gradient reaches {lost}"


def check_padding(case: Case) -> None:
    x, keep = tokens(6, 9), holes(9)
    layer = case.build()
    y = layer(x, keep=keep)
    assert not y[~keep].any()
    for row in range(6):
        if keep[row].any():
            assert_close(y[row : row + 1, keep[row]], layer(x[row : row + 1, keep[row]]))
    if not layer.facts.random and layer.facts.training != "row":
        # padded tokens take no capacity and count for no loss: as if there were none
        layer.train()
        padded, whole = copy.deepcopy(layer), copy.deepcopy(layer)
        y, out = told(padded, x, keep)
        alone, plain = told(whole, x[keep][None])
        assert_close(y, alone)
        assert (out.auxiliary_loss is None) == (plain.auxiliary_loss is None)
        assert out.auxiliary_loss is None or assert_close(out.auxiliary_loss, plain.auxiliary_loss) is None
        for name, value in (out.statistics or {}).items():
            assert_close(value, plain.statistics[name])
        assert_close(list(padded.buffers()), list(whole.buffers()))
    # what stands in the padding reaches nothing, to the last bit
    for training in (False, True):
        results = []
        for fill in (0.0, 7.0, 1e30, math.inf, math.nan):
            layer = case.build(dtype=torch.float32).train(training)
            filled = torch.where(keep[..., None], x, fill).float().requires_grad_()
            torch.manual_seed(5)
            packed, rows = pack(filled, keep)
            out = layer.forward_packed(packed, rows)
            (out.y[rows.real()].square().sum() + (0 if out.auxiliary_loss is None else out.auxiliary_loss)).backward()
            grads = [torch.zeros(()) if part.grad is None else part.grad for part in layer.parameters()]
            found = [out.y[rows.real()].detach(), filled.grad, *grads, *layer.buffers()]
            results.append(found + list((out.statistics or {}).values()))
        for result in results:
            for got, expected in zip(result, results[0], strict=True):
                assert got.isfinite().all()
                same(got, expected)


def check_company(case: Case) -> None:
    """Outside training: a row is the same in any company, and a token too unless the layer says that rows compete."""
    layer = case.build()
    moved = 0.0
    for seed in range(3):
        x = tokens(3, 12, seed=seed)
        y = layer(x)
        for row in range(3):
            assert_close(layer(x[row : row + 1]), y[row : row + 1])
        moved = max(moved, *((layer(x[:, t : t + 1]) - y[:, t : t + 1]).abs().max().item() for t in range(12)))
    if layer.facts.evaluation == "token":
        assert moved < 1e-9, f"declared as a matter of the token alone, but it moves by {moved}"
    else:
        assert moved > 1e-9, "declared as a matter of the row, but each token goes its own way"


def check_coupling(case: Case) -> None:
    """In training: which tokens can change the answer of another, exactly those that are declared."""
    layer = case.build().train()
    at, others = (1, 9), {"earlier": False, "later": False, "rows": False}
    for seed in range(40):
        x = tokens(3, 12, seed=seed)
        base, _ = told(copy.deepcopy(layer), x)
        base = base.view(3, 12, -1)[at]
        for kind, other in (
            ("earlier", (slice(1, 2), slice(0, 9))),
            ("later", (slice(1, 2), slice(10, None))),
            ("later", (slice(2, 3), slice(None))),
            ("rows", (slice(0, 1), slice(None))),
            ("rows", (slice(2, 3), slice(None))),
        ):
            changed = x.clone()
            changed[other] = tokens(3, 12, seed=100 + seed)[other]
            # a row behind is later, unless rows keep to themselves
            y, _ = told(copy.deepcopy(layer), changed)
            others[kind] |= bool((y.view(3, 12, -1)[at] - base).abs().max() > 1e-9)
    expected = {
        "token": {"earlier": False, "later": False, "rows": False},
        "row": {"earlier": True, "later": True, "rows": False},
        "earlier": {"earlier": True, "later": False, "rows": True},
        "batch": {"earlier": True, "later": True, "rows": True},
    }
    assert others == expected[layer.facts.training], f"{layer.facts.training!r} is declared, found {others}"


def check_random(case: Case) -> None:
    layer, x = case.build(), tokens(4, 30)
    same(told(layer, x, seed=1)[0], told(layer, x, seed=2)[0])
    layer.train()
    moved = [not torch.equal(told(layer, x, seed=1)[0], told(layer, x, seed=seed)[0]) for seed in range(2, 12)]
    assert any(moved) == layer.facts.random
    same(told(layer, x, seed=1)[0], told(layer, x, seed=1)[0])


def check_loss(case: Case) -> None:
    layer, x = case.build(), tokens(4, 30)
    assert told(layer, x)[1].auxiliary_loss is None
    loss, found = told(layer.train(), x)[1][3:5]
    assert (loss is not None) == layer.facts.auxiliary_loss
    if loss is not None:
        assert loss.dim() == 0
        assert loss.isfinite()
        assert any(part.requires_grad for part in [loss])
    for value in (found or {}).values():
        assert value.isfinite().all()
        assert not value.requires_grad
    if "load" in (found or {}):
        assert_close(found["load"].sum(), torch.ones(()))
        assert 0 <= found["dropped"] < 1


def check_role(case: Case) -> None:
    facts = case.build().facts
    for role in ("self", "causal"):
        if role in facts.roles:
            assert replace(case, role=role).build().sizes.role == role
        else:
            with pytest.raises(ValueError, match=dict(facts.refusals)[role]):
                replace(case, role=role).build()


def grouped_flops(x, weight, *_, out_shape=None, **__):
    """Of the tokens that are sent, or of the weights' gradient: one product of all rows either way."""
    return 2 * x[0] * x[1] * weight[-1]


def cost(layer: FeedForward, T: int) -> dict[str, int]:
    """The counted work of a step of training."""
    x, saved = tokens(1, T, width=layer.sizes.width).float().requires_grad_(), {}

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    counted = {torch.ops.aten._grouped_mm: grouped_flops}
    with FlopCounterMode(display=False, custom_mapping=counted) as flops, Tally() as tally:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            out = layer.forward_packed(x, Rows.full(x))
        (out.y.sum() + (0 if out.auxiliary_loss is None else out.auxiliary_loss)).backward()
    weights = {part.untyped_storage().data_ptr() for part in layer.parameters()}
    kept = sum(part.untyped_storage().nbytes() for at, part in saved.items() if at not in weights)
    return {"flops": flops.get_total_flops(), "written": tally.written, "saved": kept}


def check_cost(case: Case) -> None:
    layer = case.build(dtype=torch.float32).train()
    short, long = cost(layer, 2048), cost(layer, 4096)
    grown = {name: math.log2(long[name] / short[name]) for name in short}
    assert abs(max(grown["flops"], grown["written"]) - layer.facts.time.exponent) < 0.1, grown
    assert abs(grown["saved"] - layer.facts.memory.exponent) < 0.1, grown


def check_active(case: Case) -> None:
    """No more parameters than declared have a part in the answer to a token, on average, and not far fewer."""
    layer, x = case.build(), tokens(1, 24)
    counts = []
    for t in range(24):
        layer.zero_grad()
        layer(x)[0, t].square().sum().backward()
        counts.append(sum(int((part.grad != 0).sum()) for part in layer.parameters() if part.grad is not None))
    mean = sum(counts) / len(counts)
    assert mean <= layer.active() <= sum(part.numel() for part in layer.parameters())
    # a unit that a ReLU closes is active but learns nothing, nor does what only chooses
    assert mean >= 0.1 * layer.active()


def check_low_precision(case: Case) -> None:
    """Finite, and off by no more than twice what rounding the inputs is; what chooses does so in float32."""
    x = tokens(4, 64, width=32).float()
    for dtype, size in itertools.product((torch.bfloat16, torch.float16), (1.0, 6.0)):
        low = case.build(dtype=dtype, width=32)
        layer = copy.deepcopy(low).float()
        given = (size * x).to(dtype)
        with torch.no_grad():
            got, exact = low(given), layer(given.float())
            assert got.dtype == dtype
            assert got.isfinite().all()
            moved, eps = 0.0, torch.finfo(dtype).eps
            for seed in range(4):
                # inside the layer, behind the choice, which must not move
                near = copy.deepcopy(layer)
                torch.manual_seed(seed)
                for name, part in near.named_parameters():
                    if (
                        "router" not in name
                        and "table" not in name
                        and name.split(".")[0] not in ("down", "up", "query", "hidden", "hidden_norms", "norm")
                    ):
                        part.mul_(1 + eps * (2 * torch.rand_like(part) - 1))
                moved = max(moved, (near(given.float()) - exact).abs().max().item())
            assert (got.float() - exact).abs().max() <= 4 * moved + 4 * eps * exact.abs().max()
    layer = case.build(dtype=torch.float32, width=32)
    with torch.no_grad():
        exact = copy.deepcopy(layer).double()(x.double())
        with torch.autocast("cpu", torch.bfloat16):
            got = layer(x)
        assert got.isfinite().all()
        assert_close(got.double(), exact, rtol=0.05, atol=0.05 * exact.abs().max().item())


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


def check_round_trip(case: Case) -> None:
    layer, other = case.build(seed=0), case.build(seed=1)
    stored = io.BytesIO()
    torch.save(layer.state_dict(), stored)
    stored.seek(0)
    other.load_state_dict(torch.load(stored, weights_only=True))
    x = tokens()
    same(other(x), layer(x))
    assert str(regard.spec.parse(case.spec)) == str(regard.spec.parse(str(regard.spec.parse(case.spec))))
    wrong = f"{case.spec[:-1]}, nonsense=1)" if "(" in case.spec else f"{case.spec}(nonsense=1)"
    with pytest.raises(ValueError, match="has no option 'nonsense'"):
        regard.feedforward(wrong, width=WIDTH, inner=INNER)


CHECKS = {name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_layer(case, check):
    CHECKS[check](case)


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
