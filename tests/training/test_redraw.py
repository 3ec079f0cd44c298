"""Random draws that are made anew while a model trains: when, from what, and what a checkpoint makes of them."""

import copy
import dataclasses
import os
import signal
import threading
from concurrent.futures import wait
from contextlib import closing

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
from regard.training.signals import Stopped

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


def buffers(layers) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in layers.buffers()]


def drawing_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ahead")]


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("spec", BUFFERS)
def test_a_thread_draws_the_bits_of_the_step(spec, every, ahead):
    """Also where steps are skipped, after a resume, and if a step comes again. Buffers change when they are asked to,
    not when the thread has drawn."""
    spec = spec.replace(")", f", redraw={every})")
    plain, early = two_layers(spec), two_layers(spec)
    early.load_state_dict(plain.state_dict())
    for steps in ((0, 1, 2, 3, 7, 8, 9, 10), (5, 6, 7, 6)):
        with closing(RedrawnLayers(early, seed=4, ahead=ahead)) as redrawn:
            for step in steps:
                regard.redraw(plain, seed=4, step=step)
                redrawn.redraw(step, 11)
                upcoming = dict(redrawn.draws.made)
                assert every > 1 or set(upcoming) == set(range(step + 1, min(step + 1 + ahead, 11)))
                wait(upcoming.values())
                assert_close(buffers(early), buffers(plain), rtol=0, atol=0)
            assert len(drawing_threads()) == 1
        assert not drawing_threads()


def test_no_thread_for_layers_that_never_draw():
    redrawn = RedrawnLayers(two_layers("performer(features=6, redraw=0)"), seed=4, ahead=1)
    redrawn.redraw(0)
    assert not drawing_threads()


def test_a_thread_draws_on_one_core_and_leaves_other_threads_theirs():
    """Of its own decompositions too: the number of threads is never set while another thread may compute."""
    before, seen = torch.get_num_threads(), []
    layers = two_layers("performer(features=70)")

    def draw_values(draw):
        seen.append(torch.get_num_threads())
        return type(layers[0]).draw_values(layers[0], draw)

    def count_threads():
        new = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        new.start()
        new.join()
        return seen.pop(), torch.get_num_threads()

    layers[0].draw_values = draw_values
    try:
        torch.set_num_threads(2)
        with closing(RedrawnLayers(layers, seed=4, ahead=1)) as redrawn:
            redrawn.redraw(0, 3)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "set_num_threads", None)
                redrawn.redraw(1, 3)
                redrawn.redraw(2, 3)
            assert seen == [1, 1, 1]
            assert count_threads() == (2, 2)
    finally:
        torch.set_num_threads(before)


def test_an_error_of_the_thread_is_one_of_the_step():
    layers = two_layers("rfa(features=4)")

    def fail(draw):
        raise ArithmeticError("no draw")

    layers[1].draw_values = fail
    with closing(RedrawnLayers(layers, seed=4, ahead=1)) as redrawn, pytest.raises(ArithmeticError, match="no draw"):
        redrawn.redraw(0)
    assert not drawing_threads()


def with_attention(folder, name, spec="rfa(features=4)", **training):
    settings = config(folder, name, **training)
    return dataclasses.replace(settings, model=dataclasses.replace(settings.model, attention=spec))


@pytest.mark.parametrize("spec", ["rfa(features=4)", "performer(features=6)"])
@pytest.mark.parametrize("ahead", [(), ("cpu",)])
def test_a_killed_run_draws_what_it_would_have_drawn(tmp_path, monkeypatch, spec, ahead):
    whole, killed = with_attention(tmp_path, "whole", spec), with_attention(tmp_path, "killed", spec)
    finish(whole)
    monkeypatch.setattr(loop, "AHEAD", ahead)

    def die():
        dying(loop.Loop, "_next_batch", 8)
        finish(killed)

    assert in_child(die) == -9
    resume(killed.out, Display(quiet=True))
    assert_same(whole.out, killed.out)


@pytest.mark.parametrize("spec", ["rfa(features=4)", "performer(features=6)"])
def test_draws_ahead_of_their_step_change_no_checkpoint(tmp_path, monkeypatch, spec):
    plain, ahead = (with_attention(tmp_path, name, spec, keep=10) for name in ("plain", "ahead"))
    finish(plain)
    calls, redraw, seed_draws = [], RedrawnLayers.redraw, loop.Loop._seed_draws

    def counted_redraw(self, step, steps):
        calls.append(step)
        redraw(self, step, steps)

    def counted_seed_draws(self):
        calls.append("begins")
        threads.append(len(drawing_threads()))
        seed_draws(self)

    threads = []
    monkeypatch.setattr(loop, "AHEAD", ("cpu",))
    monkeypatch.setattr(RedrawnLayers, "redraw", counted_redraw)
    monkeypatch.setattr(loop.Loop, "_seed_draws", counted_seed_draws)
    finish(ahead)
    assert_same(plain.out, ahead.out)
    assert threads == [0, *[1] * (len(threads) - 1)]
    assert not drawing_threads()
    # written when a step has begun: its own where a checkpoint is before it (3, 5, 6), and that of the next
    assert calls[:12] == ["begins", 0, 1, "begins", 2, "begins", "begins", 3, 4, "begins", "begins", 5]
    runs = [Run.open(settings.out).checkpoints for settings in (plain, ahead)]
    for name in checkpoint.names(runs[0]):
        one, other = (checkpoint.read(run / name).tensors for run in runs)
        assert_close(other, one, rtol=0, atol=0)


@pytest.mark.parametrize("how", ["error", "signal"])
def test_a_run_that_ends_early_leaves_no_thread(tmp_path, monkeypatch, how):
    seen, next_batch = [], loop.Loop._next_batch

    def fail(self):
        if self.state.step == 4:
            seen.extend(drawing_threads())
            if how == "error":
                raise ArithmeticError("no batch")
            os.kill(os.getpid(), signal.SIGTERM)
        return next_batch(self)

    monkeypatch.setattr(loop, "AHEAD", ("cpu",))
    monkeypatch.setattr(loop.Loop, "_next_batch", fail)
    with pytest.raises(ArithmeticError if how == "error" else Stopped):
        finish(with_attention(tmp_path, "run"))
    assert len(seen) == 1
    assert not drawing_threads()


def test_the_average_takes_the_last_draw(tmp_path):
    settings = with_attention(tmp_path, "run", average=3)
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
