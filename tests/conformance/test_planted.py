"""The suite itself on trial: for each property, a mechanism with one planted bug that the check must catch."""

from dataclasses import replace

import pytest
import torch

from regard.core.rows import Mask, Rows, pack
from regard.core.shape import Order, Shape
from regard.core.state import take_rows
from regard.layers.attention.base import Attention, Facts
from regard.layers.attention.cached import CacheState
from regard.layers.attention.compressed import Compressed
from regard.layers.attention.heads import MixedHeads
from regard.layers.attention.softmax import Softmax
from regard.spec import parse
from regard.testing.cases import Case
from regard.testing.suite import CHECKS

PLANTED: dict[str, list[tuple[str, type[Softmax]]]] = {name: [] for name in CHECKS}


def caught_by(check: str, *roles: str):
    """Registers a broken class: `check` must fail on it in these roles."""

    def register(cls: type) -> type:
        PLANTED[check] += [(role, cls) for role in roles]
        return cls

    return register


def dense(layer: Attention, mask: Mask, q, k, v, visible=None, scale=None):
    """Plain attention, to plant bugs in."""
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    visible = mask.dense() if visible is None else visible
    logits = (scale or layer.scale) * q @ k.mT
    logits = logits if visible is None else logits.masked_fill(~visible, -torch.inf)
    return torch.softmax(logits, -1).nan_to_num() @ v


@caught_by("reference", "self", "causal", "cross")
class ScaledByModelWidth(Softmax):
    def attend(self, mask, q, k, v):
        return self.product(mask, q, k, v, self.shape.width**-0.5)


@caught_by("grouped", "self", "causal", "cross")
class HeadsTakeTheWrongGroup(Softmax):
    def attend(self, mask, q, k, v):
        times = q.shape[1] // k.shape[1]
        return self.product(mask, q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1), self.scale)


class Averaged(MixedHeads):
    """Parts averaged instead of summed."""

    def __init__(self, shape: Shape):
        super().__init__(shape, parse("heads(softmax, softmax)").parts)

    def forward_packed(self, x, rows=None, *, state=None, memory=None, stream=None):
        out = super().forward_packed(x, rows, state=state, memory=memory)
        return out._replace(y=out.y / 2)


@caught_by("twice", "self", "causal", "cross")
class KnowsHowManyHeadsThereAre(Softmax):
    scale = property(lambda self: self.shape.heads**-0.5)


@caught_by("roles", "causal")
class SaysYesToEverything(Softmax):
    facts = Facts(
        "softmax", "", "", "", "", Order("N^2", 2), Order("N", 1), state=Order("N", 1), roles=("self", "causal")
    )

    def __init__(self, shape: Shape):
        declared, type(self).facts = self.facts, Softmax.facts
        super().__init__(shape)
        self.facts = type(self).facts = declared


@caught_by("causality", "causal")
class SeesTheNextToken(Softmax):
    def attend(self, mask, q, k, v):
        return dense(self, mask, q, k, v, mask.gap() <= 1)


@caught_by("causality", "causal")
class MultipliesByTheMask(Softmax):
    """0 times a large number is no harm until the number is infinite, and the sum is rounded otherwise."""

    def attend(self, mask, q, k, v):
        powers = torch.exp(self.scale * q @ k.mT - (self.scale * q @ k.mT).amax(-1, keepdim=True))
        powers = powers * (mask.gap() <= 0)
        return powers @ v / powers.sum(-1, keepdim=True)


@caught_by("prefix", "causal")
class KnowsTheLength(Softmax):
    def attend(self, mask, q, k, v):
        return self.product(mask, q, k, v, self.scale * mask.S**0.1)


@caught_by("padding", "self", "cross")
class SeesPadding(Softmax):
    def attend(self, mask, q, k, v):
        return self.product(mask._replace(full=True), q, k, v, self.scale)


@caught_by("padding", "self", "causal")
class LeavesRowsWhereTheyAre(Softmax):
    """Padding hidden but not moved: positions, and with them causality, count padded tokens; NaN gets through."""

    def forward(self, x, *, keep=None, memory=None, memory_keep=None):
        if keep is None:
            return self.forward_packed(x).y
        query, source = self.project_inputs(x, Rows.full(x), None)
        visible = keep[:, None, None] & (torch.ones(x.shape[1], x.shape[1]).tril().bool() | (self.shape.role == "self"))
        o = dense(self, None, **query, **source, visible=visible)
        return self.output(o.transpose(1, 2).flatten(2)) * keep[..., None]


@caught_by("split", "causal")
class AlignsNewQueriesWithTheOldestKeys(Softmax):
    def attend(self, mask, q, k, v):
        visible = torch.ones(mask.T, mask.S).tril().bool() if mask.causal else None
        return dense(self, mask, q, k, v, visible)


@caught_by("ragged_decode", "causal")
class WritesBehindTheLongestRow(Softmax):
    """Every row's new token goes to the same slot."""

    def attend_self(self, rows, query, source, state):
        if state is None:
            return super().attend_self(rows, query, source, state)
        filled, after = state.progress.longest, state.progress.advance(rows)
        pairs = zip(state.parts, source.values(), strict=True)
        parts = tuple(torch.cat([old[:, :, :filled], new], 2) for old, new in pairs)
        end = after.length
        mask = Mask(rows.start, torch.zeros_like(end), end, rows.T, after.longest, True, False, None)
        return self.attend(mask, *query.values(), *parts), CacheState(parts, after)


@caught_by("ragged_decode", "causal")
class CountsPaddedTokensAsSeen(Softmax):
    def attend_self(self, rows, query, source, state):
        o, after = super().attend_self(rows, query, source, state)
        if after is None:
            return o, None
        length, longest = after.progress[:2]
        return o, after._replace(progress=after.progress._replace(length=torch.full_like(length, longest)))


class Unbranched(CacheState):
    """Hands out the old buffers where a copy is due."""

    def copy_rows(self, rows):
        whole = torch.equal(rows, torch.arange(len(self.progress.length)))
        parts = self.parts if whole else take_rows(self.parts, rows)
        return self._replace(parts=parts, progress=take_rows(self.progress, rows))


@caught_by("select", "causal")
class BranchesShareOneBuffer(Softmax):
    def attend_self(self, rows, query, source, state):
        o, after = super().attend_self(rows, query, source, state)
        return o, after and Unbranched(*after)

    def empty_state(self, batch, capacity, dtype, device):
        return Unbranched(*super().empty_state(batch, capacity, dtype, device))


class Stuck(CacheState):
    def copy_rows(self, rows):
        return self._replace(parts=take_rows(self.parts, rows * 0), progress=take_rows(self.progress, rows))


@caught_by("select", "causal")
class BranchesKeepTheFirstRow(Softmax):
    def attend_self(self, rows, query, source, state):
        o, after = super().attend_self(rows, query, source, state)
        return o, after and Stuck(*after)

    def empty_state(self, batch, capacity, dtype, device):
        return Stuck(*super().empty_state(batch, capacity, dtype, device))


@caught_by("select", "causal")
class DeclaresAFixedState(Softmax):
    facts = Facts("softmax", "", "", "", "", Order("N^2", 2), Order("N", 1), state=Order("1", 0))


@caught_by("batch", "self", "causal", "cross")
class ScalesByTheLargestOfTheBatch(Softmax):
    def attend(self, mask, q, k, v):
        return self.product(mask, q / q.abs().amax(), k, v, self.scale)


@caught_by("gradient", "self", "causal", "cross")
class CutsTheGradientOfKeys(Softmax):
    def attend(self, mask, q, k, v):
        return self.product(mask, q, k.detach(), v, self.scale)


class Learning(Softmax):
    """Trains an auxiliary loss, rightly: the mean square of its values."""

    facts = replace(Softmax.facts, auxiliary_loss=True)

    def learn(self, rows, query, source, memory, state):
        real = rows.real()
        v = source["v"] if real is None else torch.where(real[:, None, :, None], source["v"], 0)
        return v.square().sum() / (rows.count.sum() * v[0, :, 0].numel()).clamp(min=1)

    def reference_loss(self, x, memory=None):
        values = [self.plain_row(head, x).v for head in range(self.shape.heads)]
        return sum((row**2).mean() for v in values for row in v) / (len(values) * len(x))


@caught_by("gradient", "self", "causal")
class LosesTheGradientOfItsLoss(Learning):
    def learn(self, rows, query, source, memory, state):
        return super().learn(rows, query, source, memory, state).detach()


@caught_by("loss", "self", "causal")
class LosesPaddingToo(Learning):
    def learn(self, rows, query, source, memory, state):
        return source["v"].square().mean()


@caught_by("weights", "self", "causal", "cross")
class WeightsDoNotSumToOne(Softmax):
    def attend(self, mask, q, k, v):
        return 1.01 * self.product(mask, q, k, v, self.scale)


@caught_by("weights", "self", "causal", "cross")
class MapOfAnotherMechanism(Softmax):
    def map(self, x, rows=None, *, state=None, memory=None, stream=None):
        maps = super().map(x, rows, state=state, memory=memory)
        return (maps > 0).to(maps) / (maps > 0).sum(-1, keepdim=True).clamp(min=1)


@caught_by("cost", "self", "causal", "cross")
class KeepsTheWholeMatrix(Softmax):
    def attend(self, mask, q, k, v):
        return dense(self, mask, q, k, v)


@caught_by("cost", "self", "causal")
class DeclaresLinearTime(Softmax):
    facts = Facts("softmax", "", "", "", "", Order("N", 1), Order("N", 1), state=Order("N", 1))


@caught_by("low_precision", "self", "cross")
class ScalesAfterTheProduct(Softmax):
    def attend(self, mask, q, k, v):
        logits = (q @ k.mT) * self.scale
        visible = mask.dense()
        return torch.softmax(logits if visible is None else logits.masked_fill(~visible, -1e4), -1) @ v


class WithoutDenominator(Softmax):
    """sum_j (q . k_j)^2 v_j, in float32 up to the end."""

    def attend(self, mask, q, k, v):
        wide = torch.promote_types(q.dtype, torch.float32)
        weights = (self.scale * q.to(wide) @ k.to(wide).mT).square()
        visible = mask.dense()
        weights = weights if visible is None else torch.where(visible, weights, 0)
        return (weights @ v.to(wide)).to(v.dtype)


@caught_by("low_precision", "self")
class OverflowsInSilence(WithoutDenominator):
    pass


@caught_by("low_precision", "self", "causal", "cross")
class SaysThatItOverflows(Softmax):
    facts = replace(Softmax.facts, overflows=True)


def test_what_has_no_denominator_may_overflow_if_it_says_so():
    class Declared(WithoutDenominator):
        facts = replace(Softmax.facts, overflows=True)

    CHECKS["low_precision"](Case("softmax", "self", make=lambda **sizes: Declared(Shape.of(**sizes))))


@caught_by("compile", "self", "causal", "cross")
class AsksTheHost(Softmax):
    def attend(self, mask, q, k, v):
        return self.product(mask, q, k, v, self.scale if q.abs().max().item() < 1e30 else 1.0)


@caught_by("compile", "causal")
class ANewGraphEveryStep(Softmax):
    def attend(self, mask, q, k, v):
        return sum((self.product(mask, q, k, v, self.scale) for _ in range(mask.S)), 0) / mask.S


@caught_by("export", "self")
class ExportsAnotherFormula(Softmax):
    def attend(self, mask, q, k, v):
        return self.product(mask, q, k, v, 1.0 if torch.compiler.is_exporting() else self.scale)


@caught_by("export", "self")
class SaysThatTheLengthIsFixed(Softmax):
    facts = replace(Softmax.facts, dynamic_length=False)


@caught_by("autocast", "causal")
class StateIsAlwaysFloat32(Softmax):
    def empty_state(self, batch, capacity, dtype, device):
        return super().empty_state(batch, capacity, torch.float32, device)


@caught_by("round_trip", "self", "causal", "cross")
class DrawsOutsideBuffers(Softmax):
    def __init__(self, shape: Shape):
        super().__init__(shape)
        self.noise = torch.rand(())

    def attend(self, mask, q, k, v):
        return self.product(mask, q, k, v, self.scale * self.noise.item())


PLANTED["limit"] = [(role, Averaged) for role in ("self", "causal", "cross")]
TRIALS = [(check, role, cls) for check, planted in PLANTED.items() for role, cls in planted]


@pytest.mark.parametrize(("check", "role", "cls"), TRIALS, ids=[f"{c}-{r}-{k.__name__}" for c, r, k in TRIALS])
def test_planted_bug_is_caught(check, role, cls):
    spec = "heads(softmax, softmax)" if issubclass(cls, MixedHeads) else "softmax"
    case = Case(spec, role, make=lambda **sizes: cls(Shape.of(**sizes)))
    with pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)):
        CHECKS[check](case)


def test_every_check_has_its_bug():
    assert not [check for check, planted in PLANTED.items() if not planted]


@pytest.mark.parametrize("role", ["self", "causal"])
def test_the_suite_passes_a_second_loss_that_is_right(role):
    for check in ("gradient", "loss"):
        CHECKS[check](Case("softmax", role, make=lambda **sizes: Learning(Shape.of(**sizes))))


class SlotsOfPadding(Compressed):
    def _filled(self, count, k):
        return torch.ones_like(super()._filled(count, k))


class SlotsOfTheFuture(Compressed):
    def map(self, x, rows=None, *, state=None, memory=None, stream=None):
        maps = super().map(x, rows, state=state, memory=memory)
        return maps.roll(1, -1)


class SlotsOfOtherValues(Compressed):
    def slots(self, x, rows=None, *, memory=None):
        return super().slots(x, rows, memory=memory).roll(1, 2)


@pytest.mark.parametrize(
    ("check", "role", "cls"),
    [
        ("weights", "self", SlotsOfPadding),
        ("weights", "cross", SlotsOfPadding),
        ("weights", "causal", SlotsOfTheFuture),
        ("weights", "self", SlotsOfOtherValues),
    ],
)
def test_maps_over_slots_are_on_trial_too(check, role, cls):
    with pytest.raises(AssertionError):
        CHECKS[check](Case("compressed", role, make=lambda **sizes: cls(Shape.of(**sizes), factor=3)))


def test_the_suite_passes_what_is_right():
    """The same way of building, without a bug: so a failure above is the bug's doing."""
    for check in CHECKS:
        for role in ("self", "causal", "cross"):
            CHECKS[check](Case("softmax", role, make=lambda **sizes: Softmax(Shape.of(**sizes))))


def test_packing_is_what_keeps_nan_out():
    x = torch.full((1, 3, 2), torch.nan)
    x[0, 1] = 1.0
    packed, rows = pack(x, torch.tensor([[False, True, False]]))
    assert packed.isfinite().all()
    assert rows.count.tolist() == [1]
