"""The moving average of the weights: its formula, what is averaged, and that it is what others take."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from training_runs import assert_same, config, dying, finish, in_child

import regard
from regard.tasks.train import resume
from regard.tasks.translate import Task
from regard.training import checkpoint, loop
from regard.training.checkpoint import CheckpointError
from regard.training.display import Display
from regard.training.ema import Ema, decay_at
from regard.training.run import Run


class Small(nn.Module):
    """Tied weights, running statistics, a counter, and a buffer of another kind."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.second(self.first(x)))


def test_the_average_is_that_of_the_formula():
    torch.manual_seed(0)
    model = Small()
    ema, expected = Ema(model, 0.7), {name: part.double() for name, part in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(1, 21):
        model(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(step)
        decay = min(0.7, (1 + step) / (10 + step))
        for name, part in model.state_dict().items():
            expected[name] = decay * expected[name] + (1 - decay) * part.double()
    found = ema.state_dict()
    assert found.keys() == {name for name, part in model.state_dict().items() if part.is_floating_point()}
    assert "norm.running_mean" in found
    assert found["second.weight"] is found["first.weight"]
    for name, part in found.items():
        assert_close(part.double(), expected[name], rtol=1e-5, atol=1e-6)
    assert decay_at(0.7, 1) == pytest.approx(2 / 11)
    assert decay_at(0.7, 1000) == 0.7


def test_the_model_has_the_average_for_a_while():
    model = Small()
    ema = Ema(model, 0.5)
    before = model.first.weight.detach().clone()
    with torch.no_grad():
        model.first.weight.add_(1)
    address = model.first.weight.data_ptr()
    with ema.applied():
        assert_close(model.first.weight.detach(), before, rtol=0, atol=0)
        assert model.first.weight.data_ptr() == address
    assert_close(model.first.weight.detach(), before + 1, rtol=0, atol=0)


def test_random_draws_are_not_averaged():
    layer = regard.attention("performer(redraw=1)", width=8, heads=2, role="self")
    drawn = {name for name, _ in layer.named_buffers()}
    assert drawn
    assert not drawn & Ema(layer, 0.9).state_dict().keys()


def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    whole = config(tmp_path, "whole", ema=0.8)
    finish(whole)
    killed = config(tmp_path, "killed", ema=0.8)

    def work():
        dying(loop.Loop, "_update", 9)
        finish(killed)

    assert in_child(work) < 0
    resume(killed.out, Display(quiet=True))
    assert_same(whole.out, killed.out)


def test_others_take_the_average(tmp_path, monkeypatch):
    """The checkpoint holds what was evaluated, and the weights that training resumes from beside it."""
    seen = {}
    evaluate = Task.evaluate

    def remember(self, check):
        seen["weight"] = self.model.state_dict()["decoder.blocks.0.feedforward.inner.weight"].clone()
        return evaluate(self, check)

    monkeypatch.setattr(Task, "evaluate", remember)
    settings = config(tmp_path, ema=0.8, steps=5)
    finish(settings)
    last = checkpoint.newest(Run.open(settings.out).checkpoints).checkpoint
    name = "decoder.blocks.0.feedforward.inner.weight"
    assert_close(last.tensors["model"][name], seen["weight"], rtol=0, atol=0)
    assert (last.tensors["weights"][name] != seen["weight"]).any()
    plain = config(tmp_path, "plain", steps=5)
    finish(plain)
    # the average changes nothing of the training itself
    other = checkpoint.newest(Run.open(plain.out).checkpoints).checkpoint
    assert "weights" not in other.tensors
    assert_close(last.tensors["weights"][name], other.tensors["model"][name], rtol=0, atol=0)


def test_a_checkpoint_without_the_weights_cannot_be_resumed(tmp_path):
    settings = config(tmp_path, ema=0.8, steps=3, evaluate_every=3)
    finish(settings)
    run = Run.open(settings.out)
    last = checkpoint.newest(run.checkpoints).checkpoint
    checkpoint.write(run.checkpoints, last.path.name, {**last.tensors, "weights": {}}, last.state)
    with pytest.raises(CheckpointError, match=r"weights\.safetensors does not have the weights of a run with training"):
        resume(settings.out, Display(quiet=True), steps=4)
