"""Random draws that are made anew while a model trains: when, from what, and what a checkpoint makes of them."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from training_runs import assert_same, config, dying, finish, in_child

import regard
from regard.core.draws import RedrawnLayers, list_redrawn
from regard.tasks.train import resume
from regard.training import checkpoint, loop
from regard.training.display import Display
from regard.training.run import Run

BUFFERS = {
    "performer(features=6)": "draws",
    "rfa(features=4)": "draws",
    "reformer(chunk=4, buckets=4)": "directions",
    "clustered(clusters=3, topk=2)": "planes",
}


def two_layers(spec: str) -> nn.ModuleList:
    return nn.ModuleList(regard.attention(spec, width=16, heads=2) for _ in range(2))


@pytest.mark.parametrize("spec", BUFFERS)
def test_every_step_draws_by_default_and_depends_on_seed_step_and_place_alone(spec):
    layers, other = two_layers(spec), two_layers(spec)
    assert list_redrawn(layers) == [f"{place}.{BUFFERS[spec]}" for place in range(2)]

    def draws(layers, seed, step):
        regard.redraw(layers, seed=seed, step=step)
        return [getattr(layer, BUFFERS[spec]).clone() for layer in layers]

    first = draws(layers, 1, 5)
    torch.manual_seed(9)
    draws(other, 1, 4)
    assert_close(draws(other, 1, 5), first, rtol=0, atol=0)
    different = [first[1], draws(layers, 1, 6)[0], draws(layers, 2, 5)[0]]
    assert all((first[0] - draw).abs().max() > 0.1 for draw in different)


def test_draws_do_not_depend_on_the_number_of_threads():
    layer, before, draws = regard.attention("performer", width=64, heads=1), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            regard.redraw(layer, seed=0, step=1)
            draws.append(layer.draws.clone())
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert_close(*draws, rtol=0, atol=0)


@pytest.mark.parametrize("spec", BUFFERS)
def test_an_interval_and_never(spec):
    for every, redrawn in ((3, {0, 3, 6}), (0, set())):
        layers = two_layers(spec.replace(")", f", redraw={every})"))
        for step in range(8):
            before = copy.deepcopy(layers.state_dict())
            regard.redraw(layers, seed=0, step=step)
            name = f"1.{BUFFERS[spec]}"
            assert (not torch.equal(before[name], layers.state_dict()[name])) == (step in redrawn)
    with pytest.raises(ValueError, match="redraw"):
        regard.attention(spec.replace(")", ", redraw=-1)"), width=16, heads=2)


def with_rfa(folder, name, **training):
    settings = config(folder, name, **training)
    return dataclasses.replace(settings, model=dataclasses.replace(settings.model, attention="rfa(features=4)"))


def test_a_killed_run_draws_what_it_would_have_drawn(tmp_path):
    whole, killed = with_rfa(tmp_path, "whole"), with_rfa(tmp_path, "killed")
    finish(whole)

    def die():
        dying(loop.Loop, "_next_batch", 8)
        finish(killed)

    assert in_child(die) == -9
    resume(killed.out, Display(quiet=True))
    assert_same(whole.out, killed.out)


def test_draws_ahead_of_their_step_change_no_checkpoint(tmp_path, monkeypatch):
    plain, ahead = (with_rfa(tmp_path, name, keep=10) for name in ("plain", "ahead"))
    finish(plain)
    calls, redraw, seed_draws = [], RedrawnLayers.redraw, loop.Loop._seed_draws

    def counted_redraw(self, *, seed, step):
        calls.append(step)
        redraw(self, seed=seed, step=step)

    def counted_seed_draws(self):
        calls.append("begins")
        seed_draws(self)

    monkeypatch.setattr(loop, "AHEAD", ("cpu",))
    monkeypatch.setattr(RedrawnLayers, "redraw", counted_redraw)
    monkeypatch.setattr(loop.Loop, "_seed_draws", counted_seed_draws)
    finish(ahead)
    assert_same(plain.out, ahead.out)
    # drawn when a step has begun: its own where a checkpoint is before it (3, 5, 6), and that of the next
    assert calls[:12] == ["begins", 0, 1, "begins", 2, "begins", "begins", 3, 4, "begins", "begins", 5]
    runs = [Run.open(settings.out).checkpoints for settings in (plain, ahead)]
    for name in checkpoint.names(runs[0]):
        one, other = (checkpoint.read(run / name).tensors for run in runs)
        assert_close(other, one, rtol=0, atol=0)


def test_the_average_takes_the_last_draw(tmp_path):
    settings = with_rfa(tmp_path, "run", average=3)
    finish(settings)
    run = Run.open(settings.out)
    last, mean = (checkpoint.read(run.checkpoints / name).tensors["model"] for name in ("step-00000012", "average"))
    earlier = checkpoint.read(run.checkpoints / checkpoint.names(run.checkpoints)[0]).tensors["model"]
    names = [name for name in last if name.endswith(".draws")]
    assert names
    for name in names:
        assert_close(mean[name], last[name], rtol=0, atol=0)
        assert (earlier[name] - last[name]).abs().max() > 0.1
        sigma = name.replace("draws", "sigma")
        assert not torch.equal(mean[sigma], last[sigma])
