"""What the host does at each step besides launching the model: the less, the less a GPU waits for it."""

import traceback

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from training_runs import config, finish

from regard.core.draws import seed_generators
from regard.training import loop
from regard.training.adamw import AdamW
from regard.training.groups import parameter_groups
from regard.training.optimizer_state import pack_optimizer, unpack_optimizer


def build(kind, **options):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 11))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    groups = parameter_groups(model, weight_decay=0.1)
    return model, kind(groups, lr=0.0, betas=(0.9, 0.98), eps=1e-9, **options)


def step(model, optimizer, numbers):
    for number in numbers:
        draw = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            parameter.grad.copy_(torch.randn(parameter.shape, generator=draw))
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + number)
        optimizer.step()


def assert_equal(one, other):
    assert_close(one[0].state_dict(), other[0].state_dict(), rtol=0, atol=0)
    found, expected = (pack_optimizer(optimizer, model) for model, optimizer in (one, other))
    assert_close(found[0], expected[0], rtol=0, atol=0)
    assert found[1] == expected[1]


def test_adamw_lists_its_tensors_once_and_computes_what_pytorch_does(monkeypatch):
    ours, theirs = build(AdamW), build(torch.optim.AdamW, fused=True)
    step(*theirs, range(6))
    step(*ours, range(2))
    # from here on no step is PyTorch's
    monkeypatch.setattr(torch.optim.AdamW, "_init_group", None)
    step(*ours, range(2, 6))
    assert_equal(ours, theirs)


def test_adamw_lists_its_tensors_anew_when_states_are_loaded_or_gradients_are_others():
    ours, theirs, resumed = build(AdamW), build(torch.optim.AdamW, fused=True), build(AdamW)
    step(*theirs, range(3))
    step(*ours, range(3))
    step(*resumed, range(10, 12))  # its lists are of states that are gone
    resumed[0].load_state_dict(ours[0].state_dict())
    unpack_optimizer(resumed[1], resumed[0], *pack_optimizer(ours[1], ours[0]))
    for parameter in ours[0].parameters():
        parameter.grad = torch.zeros_like(parameter)
    for pair in (theirs, ours, resumed):
        step(*pair, range(3, 6))
    assert_equal(ours, theirs)
    assert_equal(resumed, theirs)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_generators_draw_what_they_draw_after_manual_seed(device):
    torch.manual_seed(2**64 - 5)
    expected = torch.randn(3)
    seed_generators(2**64 - 5, torch.device(device))
    assert_close(torch.randn(3), expected, rtol=0, atol=0)


@pytest.mark.parametrize("ahead", [(), ("cpu",)])
def test_a_step_visits_no_modules_and_keeps_no_stacks(tmp_path, monkeypatch, ahead):
    """Only the model itself, by being called, goes from module to module."""
    visits, is_counting = [], False

    def counting(during, method):
        """`method`, whose visits count or do not."""

        def counted(self, *given):
            nonlocal is_counting
            before, is_counting = is_counting, during
            try:
                return method(self, *given)
            finally:
                is_counting = before

        return counted

    def counted(owner, name):
        function = getattr(owner, name)

        def visit(*given, **options):
            if is_counting:
                visits.append(name)
            return function(*given, **options)

        monkeypatch.setattr(owner, name, visit)

    monkeypatch.setattr(loop, "AHEAD", ahead)
    monkeypatch.setattr(loop.Loop, "_update", counting(True, loop.Loop._update))
    monkeypatch.setattr(loop.Loop, "_backward", counting(False, loop.Loop._backward))
    counted(nn.Module, "named_modules")
    counted(nn.Module, "train")
    counted(traceback, "format_stack")
    finish(config(tmp_path))
    assert not visits
