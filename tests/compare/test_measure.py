"""Measuring a real layer, in this process and in one of its own."""

import math

import pytest
import torch

import regard
from regard.compare import measure
from regard.compare.count import count_parameters, count_training, state_bytes
from regard.compare.measure import CannotMeasure, MeasuredLayer, Process, Setting, extrapolate
from regard.compare.plan import CostPlan

SIZES = {"width": 16, "heads": 2, "threads": 1}


def test_counts_are_those_of_the_layer():
    whole = MeasuredLayer(Setting("softmax", "causal", 32, **SIZES)).prepare()
    assert whole["backend"]
    assert "backward" not in whole["backend"]
    found = whole["counted"]
    # four projections of 16 x 16 and two products with all pairs, forward; 2 and 2.5 times that backward
    projections, products = 4 * 2 * 32 * 16 * 16, 2 * 2 * 32 * 32 * 16
    assert found["flops_forward"] == projections + products
    assert found["flops"] == 3 * projections + products + 5 * products // 2
    assert found["parameters"] == 4 * 16 * 16
    # keys and values of 32 tokens in float32, and the number of tokens that were read
    assert found["state_bytes"] == 2 * 32 * 16 * 4 + 8


@pytest.mark.parametrize(
    ("spec", "role", "sees"),
    [
        ("local(window=4)", "causal", 5),
        ("linear", "causal", 32),
        ("strided(stride=8)", "causal", 4),
        ("fnet", "self", 32),
    ],
)
def test_what_a_token_sees(spec, role, sees):
    assert MeasuredLayer(Setting(spec, role, 32, **SIZES)).prepare()["counted"]["sees"] == sees


@pytest.mark.parametrize("heads", [[0, 1], [1, 0]])
def test_a_token_is_seen_where_any_head_sees_it(heads):
    """Of attention alone, whose heads see different tokens: one its own, the other all before it."""
    values = torch.randn(1, 2, 4, 1, requires_grad=True)  # [B, H, T, D]

    def forward() -> tuple[torch.Tensor, None]:
        seen = [values[:, heads[0]], values[:, heads[1]].cumsum(1)]
        return torch.stack(seen, 2), None  # [B, T, H, D]

    assert count_training(forward, values, at=2)["sees"] == 3


@pytest.mark.parametrize("part", ["layer", "mixing"])
@pytest.mark.parametrize(("spec", "role"), [("softmax", "cross"), ("rfa", "causal"), ("linformer(longest=32)", "self")])
def test_turns(spec, role, part):
    subject = MeasuredLayer(Setting(spec, role, 32, part=part, **SIZES))
    found = subject.prepare()
    taken = subject.turn()
    assert found["peak"] >= 0
    assert taken["forward"] > 0
    assert taken["train"] > 0
    assert math.isnan(taken["step"]) == (role == "self" or part == "mixing")


def test_a_mechanism_that_is_no_function_of_projections_says_so():
    with pytest.raises(CannotMeasure, match="no function of projected inputs") as refused:
        MeasuredLayer(Setting("fnet", "self", 32, part="mixing", **SIZES)).prepare()
    assert refused.value.status == "refused"


def test_limits():
    with pytest.raises(CannotMeasure, match="per training step; its share of the time allows") as refused:
        MeasuredLayer(Setting("softmax", "causal", 4096, seconds=1e-9, **SIZES)).prepare()
    assert refused.value.status == "slow"
    with pytest.raises(CannotMeasure, match="needs about") as refused:
        MeasuredLayer(Setting("softmax", "causal", 4096, room=1.0, **SIZES)).prepare()
    assert refused.value.status == "memory"
    # not by trying, which takes a while
    with pytest.raises(CannotMeasure, match="for its tokens alone"):
        MeasuredLayer(Setting("softmax", "causal", 10**14, room=1e9, **SIZES)).estimate()
    assert extrapolate([1.0], [10], 40, 2) == 16
    # growth as measured where it is steeper than declared, but not without end
    assert extrapolate([1.0, 4.0], [10, 20], 40, 1) == 16
    assert extrapolate([1.0, 100.0], [10, 20], 40, 1) == 800


class Window(MeasuredLayer):
    """A layer whose clock and memory are planted, by length: a window of 256 sees nearly all of 256 tokens, and tables
    have gradients of one size."""

    TIMES = {256: 0.001, 1024: 0.016, 2048: 0.036}
    length, tables = 0, 0

    def _training(self, length):
        self.length = length
        return lambda: None

    def cost_of(self, call):
        return self.TIMES.get(self.length, 0.0), self.tables + 1000 * self.length

    def _timed(self, call):
        return self.TIMES.get(self.length, 0.0)


def test_a_window_is_not_hopeless_because_its_first_tokens_are_cheap():
    subject = Window(Setting("local(window=256)", "causal", 8192, seconds=0.3, room=1e9, **SIZES))
    # as measured from 256 to 1,024 it would grow with the square
    assert subject.estimate() == {"seconds": pytest.approx(0.016 * 8), "length": 1024.0}
    # from 1,024 to 2,048 it grows by 2.25, so that the whole takes 0.182; from 256 on it would be 0.34
    subject._check_limits()


class Disturbed(MeasuredLayer):
    """A layer of which one call in four is not disturbed."""

    calls = 0

    def _timed(self, call):
        call()
        self.calls += 1
        return 0.001 if self.calls % 4 == 0 else 0.02


def test_short_steps_are_tried_until_one_is_not_disturbed():
    subject = Disturbed(Setting("linear", "causal", 2048, seconds=1e9, **SIZES))
    assert subject.estimate() == {"seconds": pytest.approx(0.008), "length": 256.0}


def test_a_table_is_no_memory_that_grows():
    subject = Window(Setting("gmlp(longest=1024)", "causal", 8192, seconds=1e9, room=1e8, **SIZES))
    subject.tables = 3 * 4 * count_parameters(subject.layer)
    tried = list(subject._shorter_lengths((32, 8)))[-1]
    # memory grows with the square at most, as declared
    assert subject._estimate_memory(tried[:1]) == pytest.approx(subject.tables + 256_000 * 32**2, rel=1e-6)
    assert subject._estimate_memory(tried) < subject.tables + 1_024_000 * 8**2
    # the first call took what was free
    assert subject._estimate_memory([tried[0]._replace(rise=0), tried[1]]) > subject.tables + 1_024_000 * 8**2
    with pytest.raises(CannotMeasure, match="needs about"):
        Window(Setting("gmlp(longest=1024)", "causal", 8192, seconds=1e9, room=1e6, **SIZES)).estimate()


@pytest.mark.parametrize("name", [name for name in regard.names() if name != "heads"])
def test_every_turn_decodes_behind_the_same_length(name):
    """However many rounds there are, no table is too short, and no state grows."""
    plan = CostPlan(specs=(name,), lengths=(64,), width=16, heads=2)
    for row in plan.rows():
        if not row.decodes or row.spec == "softmax" != name:
            continue
        subject = MeasuredLayer(Setting(row.spec, "causal", 64, **SIZES))
        subject.prepare()
        before = state_bytes(subject.state)
        for _ in range(3):
            assert subject.step() > 0
        assert state_bytes(subject.state) == before


class Compiling(MeasuredLayer):
    """A layer whose clock is planted: the first step of a length compiles for half a minute."""

    is_new = False

    def _training(self, length):
        self.is_new = True
        return super()._training(length)

    def _timed(self, call):
        call()
        is_new, self.is_new = self.is_new, False
        return 30.0 if is_new else 0.001


def test_what_is_compiled_once_is_not_part_of_an_estimate():
    setting = Setting("softmax", "causal", 1024, seconds=1.0, **SIZES)
    assert Compiling(setting).estimate() == {"seconds": pytest.approx(0.064), "length": 128.0}
    assert Compiling(setting).prepare()["seconds"] == 0.001


class Overhead(MeasuredLayer):
    """A layer whose calls take 10 ms whatever their length."""

    def _timed(self, call):
        call()
        return 0.01


def test_what_a_call_costs_at_any_length_does_not_make_a_row_hopeless():
    # by 64 tokens alone it would take 32 times 10 ms, which is more than six times what it may take
    setting = Setting("linear", "causal", 2048, seconds=0.05, **SIZES)
    assert Overhead(setting).estimate() == {"seconds": pytest.approx(0.08), "length": 256.0}
    # what is slower by far is not tried further
    setting = Setting("linear", "causal", 2048, seconds=0.01, **SIZES)
    assert Overhead(setting).estimate() == {"seconds": pytest.approx(0.32), "length": 64.0}


def test_what_empties_the_cache_of_a_gpu_is_not_part_of_the_peak(monkeypatch):
    done = []
    subject = MeasuredLayer(Setting("softmax", "causal", 32, **SIZES))
    monkeypatch.setattr(subject, "_flush", lambda: done.append("flushed"))
    monkeypatch.setattr(measure, "reset_peak", lambda device: done.append("reset") or 3)
    monkeypatch.setattr(measure, "peak", lambda device: 10)
    assert subject.cost_of(lambda: done.append("called"))[1] == 7
    assert done == ["flushed", "reset", "called"]


def test_a_process_of_its_own():
    contestant = Process(Setting("linear", "causal", 32, **SIZES))
    try:
        found = contestant.prepare()
        assert found["counted"]["sees"] == 32
        assert contestant.turn()["train"] > 0
    finally:
        contestant.close()
    assert not contestant.process.is_alive()
    refused = Process(Setting("linformer", "causal", 32, **SIZES))
    try:
        with pytest.raises(CannotMeasure, match="every slot mixes all positions"):
            refused.prepare()
    finally:
        refused.close()


def test_an_auxiliary_loss_is_part_of_a_step():
    subject = MeasuredLayer(Setting("compressive(segment=8, memory=8, compressed=4)", "causal", 32, **SIZES))
    subject.prepare()
    assert subject.train() > 0
    # a text of one segment compresses nothing, so its loss has no gradient
    whole = MeasuredLayer(Setting("compressive(segment=64, memory=64, compressed=8)", "causal", 32, **SIZES))
    whole.prepare()
    assert whole.train() > 0


def test_shared_tensors_of_a_state_count_once():
    x = torch.zeros(4, 4)
    assert state_bytes((x, (x, None), 3)) == 64
    layer = regard.attention("linear", width=16, heads=2, role="causal")
    tokens = torch.randn(1, 8, 16, requires_grad=True)
    assert count_training(lambda: (layer(tokens), None), tokens, 3)["sees"] == 4
