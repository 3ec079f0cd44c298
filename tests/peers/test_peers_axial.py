"""Rows and columns against `axial-attention`; what the suite does not ask of the causal form."""

import importlib

import pytest
import torch
from torch.testing import assert_close

import regard

WIDTH, HEADS = 16, 4


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_a_row_and_then_a_column_as_axial_attention():
    peers = importlib.import_module("axial_attention")
    theirs = peers.AxialAttention(dim=WIDTH, num_dimensions=2, heads=HEADS, dim_index=-1, sum_axial_out=False).double()
    ours = regard.attention("axial(width=5)", width=WIDTH, heads=HEADS, bias=True).double()
    with torch.no_grad():
        for layer, other in zip((ours.rows, ours.columns), theirs.axial_attentions, strict=True):
            weights = (other.fn.to_q.weight, *other.fn.to_kv.weight.chunk(2))
            for name, weight in zip("qkv", weights, strict=True):
                layer.project[name].weight.copy_(weight)
                layer.project[name].bias.zero_()
            layer.output.load_state_dict(other.fn.to_out.state_dict())
    x = torch.randn(2, 3, 5, WIDTH, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = ours(mine.flatten(1, 2)).unflatten(1, (3, 5))
    # theirs goes along the first axis of the grid first
    z = theirs(other.transpose(1, 2)).transpose(1, 2)
    assert_close(y, z)
    toward = torch.randn_like(y)
    (y * toward).sum().backward()
    (z * toward).sum().backward()
    assert_close(mine.grad, other.grad)
    assert_close(ours.rows.output.weight.grad, theirs.axial_attentions[0].fn.to_out.weight.grad)


def test_a_single_row_is_causal_softmax():
    layer = regard.attention("axial(width=64)", width=WIDTH, heads=HEADS, role="causal").double()
    x = torch.randn(2, 33, WIDTH, dtype=torch.float64)
    softmax = regard.attention("softmax", width=WIDTH, heads=HEADS, role="causal").double()
    softmax.load_state_dict(layer.inner.state_dict())
    assert_close(layer(x), softmax(x))


@pytest.mark.parametrize("width", [1, 2, 5, 33])
def test_a_token_reads_all_tokens_up_to_itself_and_no_other(width):
    layer = regard.attention(f"axial(width={width})", width=WIDTH, heads=HEADS, role="causal").double()
    x = torch.randn(1, 23, WIDTH, dtype=torch.float64, requires_grad=True)
    maps = layer.weights(x)[0].amin(0)
    reached = torch.ones(23, 23, dtype=torch.bool).tril()
    assert torch.equal(maps > 0, reached)
    y = layer(x)
    for i in range(23):
        (grad,) = torch.autograd.grad(y[0, i].sum(), x, retain_graph=True)
        assert torch.equal(grad[0].abs().amax(-1) > 0, reached[i])


@pytest.mark.parametrize("role", ["self", "causal"])
def test_the_map_is_what_reaches_a_query(role):
    """With one head, where all layers but the first one hand on what they read, the layer is linear in its values."""
    layer = regard.attention("axial(width=4)", width=WIDTH, heads=1, role=role).double()
    inner = [layer.columns] if role == "self" else [layer.columns, layer.inner]
    for part in inner:
        torch.nn.init.eye_(part.project["v"].weight)
        torch.nn.init.eye_(part.output.weight)
    torch.nn.init.eye_(layer.rows.project["v"].weight)
    torch.nn.init.eye_(layer.rows.output.weight)
    x = torch.randn(3, 23, WIDTH, dtype=torch.float64)
    for keep in (None, torch.rand(3, 23) < 0.7):
        v = x if keep is None else torch.where(keep[..., None], x, 0)
        assert_close(layer.weights(x, keep=keep)[:, 0] @ v, layer(x, keep=keep))


def test_decoding_computes_columns_only_where_a_row_ends():
    layer = regard.attention("axial(width=4)", width=WIDTH, heads=HEADS, role="causal")
    x = torch.randn(2, 12, WIDTH)
    whole = layer(x)
    state, steps, calls = layer.start(2), [], []
    layer.columns.project["k"].register_forward_hook(lambda *_: calls.append(len(steps)))
    with torch.no_grad():
        for t in range(12):
            y, state = layer.extend(x[:, t : t + 1], state)
            steps.append(y)
    assert calls == [3, 7, 11]
    assert_close(torch.cat(steps, 1), whole)


def test_what_it_refuses():
    with pytest.raises(ValueError, match="'width' of 'axial' must be at least 1"):
        regard.attention("axial(width=0)", width=WIDTH, heads=HEADS)
    with pytest.raises(ValueError, match="'axial' cannot take position 'rotary'"):
        regard.attention("axial", width=WIDTH, heads=HEADS, position="rotary")
    layer = regard.attention("axial", width=WIDTH, heads=HEADS, role="causal")
    with pytest.raises(ValueError, match="a state has no map"):
        layer.weights(torch.randn(2, 3, WIDTH), state=layer.start(2))


def test_a_position_scheme_is_added_to_the_tokens():
    layer = regard.attention("axial(width=4)", width=WIDTH, heads=HEADS, role="causal", position="sinusoidal").double()
    x = torch.randn(1, 13, WIDTH, dtype=torch.float64)
    state, steps = layer.start(1), []
    for n in (3, 6, 1, 3):
        first = sum(y.shape[1] for y in steps)
        y, state = layer.extend(x[:, first : first + n], state)
        steps.append(y)
    assert_close(torch.cat(steps, 1), layer(x))
    assert_close(layer(x)[0], layer.reference(x[0]))
