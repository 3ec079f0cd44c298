"""How a quality cell is trained: examples that are drawn early, updates that are replayed, and what an update takes."""

import threading

import pytest
import torch

from regard.compare import learn as learning
from regard.compare.ahead import Ahead
from regard.compare.budget import Budget
from regard.compare.learn import Broke, Lesson, learn
from regard.compare.quality import QualityPlan
from regard.models import build

SIZES = {"width": 16, "heads": 2, "inner": 32, "layers": 1}


class Replayed:
    """Stands in for CUDA graphs: calls the same work with examples from the host and a learning rate in a tensor."""

    def __init__(self, work):
        self.work = work

    def __call__(self, found, weights):
        return self.work(found, torch.tensor(weights))


def trainer(spec: str = "softmax", task: str = "listops", device: str = "cpu", **more) -> learning._Trainer:
    lesson = Lesson(spec, task, {}, 24, 4, device=device, **(SIZES | more))
    found = lesson.find_task()
    torch.manual_seed(0)
    return learning._Trainer(lesson, found, 24, build(lesson.config(spec, found)).to(device))


def weights(found: learning._Trainer) -> list[torch.Tensor]:
    return [part.detach().clone() for part in found.model.parameters()]


def test_what_is_made_early_is_the_same():
    """In order, by another thread, no more than asked for, and nothing beyond the last step."""
    made = []

    def make(step: int, steps: int) -> tuple[int, str]:
        made.append(step)
        return step * steps, threading.current_thread().name

    early = Ahead(make, 2)
    assert early.get(3, 7)[0] == 21
    assert early.get(4, 7)[0] == 28
    early.get(5, 7)
    assert made[:3] == [3, 4, 5]
    value, thread = early.get(6, 7)
    assert (value, made) == (42, [3, 4, 5, 6])
    assert not early.made
    early.close()
    assert thread != threading.current_thread().name
    made.clear()
    assert Ahead(make, 0).get(3, 7) == (21, threading.current_thread().name)
    assert made == [3]


def test_an_error_in_the_thread_is_that_of_the_step():
    def fail(step: int, steps: int) -> int:
        raise ValueError(f"step {step}")

    early = Ahead(fail, 2)
    with pytest.raises(ValueError, match="step 4"):
        early.get(4, 9)
    early.close()


@pytest.mark.parametrize("pretrain", ["none", "self"])
def test_examples_that_are_drawn_early_are_those_of_the_step(pretrain):
    """The same bits, whoever draws them, also those of self-pretraining."""
    plain = trainer(pretrain=pretrain)
    early = Ahead(plain.draw_step, 3)
    for step in range(6):
        for one, other in zip(plain.draw_step(step, 6), early.get(step, 6), strict=True):
            assert one is other is None or torch.equal(one, other)
    early.close()


def test_updates_that_are_replayed_are_those_of_a_loop():
    """With the work of a graph, and with examples that a thread draws, a cell has the same weights."""
    plain, replayed = trainer("performer(features=8)"), trainer("performer(features=8)")
    replayed.examples = Ahead(replayed.draw_step, 2)
    replayed.graphs = Replayed(replayed.learn_from)
    for step in range(5):
        plain.update(step, 5)
        replayed.update(step, 5)
    assert len(replayed.unchecked) == 5
    assert not plain.unchecked
    torch.testing.assert_close(weights(replayed), weights(plain), rtol=1e-6, atol=1e-7)
    replayed.check_finite()
    assert not replayed.unchecked
    replayed.examples.close()


@pytest.mark.parametrize("look", ["score", "save", "count"])
def test_the_first_update_that_is_not_finite_is_named_later(look, monkeypatch, tmp_path):
    """A GPU is not asked after every update; before a score, a checkpoint, and every so many updates it is."""
    found = trainer(rate=1e30)
    with pytest.raises(Broke) as early:
        found.train(learning.Progress(20), lambda: 0.0, 0.0)
    found = trainer(rate=1e30, saved=str(tmp_path / "cell.pt"))
    found.graphs = Replayed(found.learn_from)
    monkeypatch.setattr(learning, "CHECKED_EVERY", 12)
    for step in range(11):
        found.update(step, 20)
    looks = {
        "score": lambda: found.score("valid"),
        "save": lambda: found.save(learning.Progress(20)),
        "count": lambda: found.update(11, 20),
    }
    with pytest.raises(Broke) as late:
        looks[look]()
    assert str(late.value) == str(early.value)
    assert not (tmp_path / "cell.pt").exists()


def test_minutes_pay_for_whole_updates(monkeypatch):
    """Drawing, both passes and the optimizer are timed, the first updates are not, and the weights stay."""
    now, taken = [0.0], {"draw": 0.25, "loss": 0.5, "step": 1.25}
    draw, loss, step = learning._Trainer.draw, learning._Trainer.loss, torch.optim.AdamW.step

    def timed(name, function):
        def call(*inputs):
            # the first updates compile
            now[0] += taken[name] * (100 if now[0] < 100 else 1)
            return function(*inputs)

        return call

    for owner, name, function in (
        (learning._Trainer, "draw", draw),
        (learning._Trainer, "loss", loss),
        (torch.optim.AdamW, "step", step),
    ):
        monkeypatch.setattr(owner, name, timed(name, function))
    found = trainer()
    before = weights(found)
    assert found.time_update(lambda: now[0]) == 2.0
    assert all(torch.equal(one, other) for one, other in zip(weights(found), before, strict=True))
    assert not found.optimizer.state
    answer, _ = learn(Lesson("softmax", "recall", {}, 24, 4, budget=Budget("minutes", 0.1), **SIZES), lambda: now[0])
    assert answer["updates"] == 3


def test_the_precision_is_part_of_the_question():
    plain, half = (QualityPlan("recall", ("linear",), dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert plain.question("linear", 0.001, 1) != half.question("linear", 0.001, 1)
    assert half.lesson("linear", 0.001, 1).dtype == "bfloat16"
    context = trainer(dtype="bfloat16").precision()
    assert isinstance(context, torch.autocast)
    assert context.fast_dtype == torch.bfloat16
    with trainer().precision():
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "spec", ["softmax", "linear", "local(window=8)", "performer(features=16)", "recurrent(cell='gru')"]
)
def test_cuda_graphs_train_as_a_loop_does(spec, capsys):
    plain, replayed = (trainer(spec, "recall", "cuda", width=64) for _ in range(2))
    plain.graphs = None
    for found in (plain, replayed):
        with found:
            for step in range(8):
                found.update(step, 8)
            found.check_finite()
    assert replayed.graphs.graphs, capsys.readouterr().err
    torch.testing.assert_close(weights(replayed), weights(plain), rtol=1e-3, atol=1e-4)
