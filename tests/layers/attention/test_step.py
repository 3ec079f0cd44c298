"""Steps in few operators: the same numbers, bit for bit, as the usual way gives."""

import pytest
import torch

import regard
from regard.layers.attention.cached import Cached


def without(monkeypatch):
    """The usual way."""
    monkeypatch.setattr(Cached, "step", lambda self, x, rows, state: None)


def taken(monkeypatch):
    """Which steps were taken, as they come."""
    found, step = [], Cached.step
    monkeypatch.setattr(
        Cached, "step", lambda self, x, rows, state: (found.append(step(self, x, rows, state)), found[-1])[1]
    )
    return found


def layer(role, dtype=torch.float32, **options):
    torch.manual_seed(0)
    return regard.attention("softmax", width=24, heads=4, role=role, **options).to(dtype).eval()


@torch.no_grad()
def decoded(attention, tokens, capacity):
    state, found = attention.start(len(tokens), capacity=capacity), []
    for token in tokens.split(1, 1):
        y, state = attention.extend(token, state)
        found.append(y)
    return torch.cat(found, 1), state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("capacity", [None, 3, 12])
@pytest.mark.parametrize("bias", [False, True])
def test_tokens(monkeypatch, dtype, capacity, bias):
    attention, tokens = layer("causal", dtype, bias=bias), torch.randn(3, 9, 24, dtype=dtype)
    with monkeypatch.context() as patch:
        without(patch)
        expected, state = decoded(attention, tokens, capacity)
    steps = taken(monkeypatch)
    found, after = decoded(attention, tokens, capacity)
    assert torch.equal(found, expected)
    for part, other in zip(after.parts, state.parts, strict=True):
        assert torch.equal(part[:, :, :9], other[:, :, :9])
    assert torch.equal(after.progress.length, state.progress.length)
    assert after.progress[1:] == state.progress[1:]
    assert sum(step is not None for step in steps) >= (9 if capacity == 12 else 6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_beams_over_a_memory(monkeypatch, padded, bias):
    """Also where a row of the memory is empty."""
    attention, memory = layer("cross", bias=bias), torch.randn(3, 7, 24)
    keep = torch.arange(7) < torch.tensor([7, 0, 4])[:, None] if padded else None
    with torch.no_grad():
        state = attention.start(3, memory=memory, memory_keep=keep)
        x = torch.randn(6, 1, 24)
        with monkeypatch.context() as patch:
            without(patch)
            expected = attention.extend(x, state)[0]
        steps = taken(monkeypatch)
        assert torch.equal(attention.extend(x, state)[0], expected)
        assert [step is not None for step in steps] == [True]


def test_where_the_usual_way_is_taken(monkeypatch):
    steps = taken(monkeypatch)
    ragged, tokens = layer("causal"), torch.randn(2, 3, 24)
    keep = torch.tensor([[True, True, True], [True, False, False]])
    with torch.no_grad():
        _, state = ragged.extend(tokens, ragged.start(2, capacity=8), keep=keep)
        ragged.extend(tokens[:, :1], state)
        for other in (layer("causal", position="rotary"), layer("causal", kv_heads=2), layer("causal").train()):
            other.extend(tokens[:, :1], other.start(2, capacity=8))
        with torch.autocast("cpu", torch.bfloat16):
            mixed = layer("causal")
            mixed.extend(tokens[:, :1], mixed.start(2, capacity=8))
        long = layer("cross")
        long.extend(torch.randn(1, 9, 24), long.start(1, memory=tokens[:1]))
    grown = layer("causal")
    grown.extend(tokens[:, :1], grown.start(2, capacity=8))
    # padding, positions inside, groups of heads, training, autocast, many queries, gradients
    assert steps == [None] * 8
