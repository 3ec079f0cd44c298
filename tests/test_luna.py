"""What the suite does not ask of Luna: the packed sequence that goes from layer to layer."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import regard
from regard.attention.base import Attention, Memory, Rows
from regard.models.transformer import ModelConfig, Transformer

WIDTH, HEADS = 16, 4


def layer_of(role: str, spec: str = "luna(length=3)") -> Attention:
    return regard.attention(spec, width=WIDTH, heads=HEADS, role=role, bias=True).double().eval()


def draw(*size: int) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def by_hand(layer, P: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """Y_P [l, E] of one row: what P [l, E] packs of the context [S, E]."""
    q, c = (layer.linears[name](part) for name, part in (("packed_q", P), ("packed_k", context)))
    outs = []
    for head in range(HEADS):
        own = slice(head * 4, head * 4 + 4)
        outs.append(torch.softmax(q[:, own] @ c[:, own].T / 2, -1) @ c[:, own])
    return torch.cat(outs, -1)


@pytest.mark.parametrize("role", ["self", "cross"])
def test_the_packed_sequence_goes_on(role):
    first, second = layer_of(role), layer_of(role)
    first.settle(None, False, True)
    second.settle(first, True, False)
    first.double()
    torch.nn.init.normal_(first.packed_norm.weight)
    assert second.packed is first.packed
    assert second.packed_norm is None
    x, memory, count = draw(2, 7, WIDTH), draw(2, 9, WIDTH), torch.tensor([7, 5])
    rows = Rows(torch.zeros(2, dtype=torch.long), count, 7, None)
    given = {"memory": Memory(memory, count)} if role == "cross" else {}
    out = first.run(x, rows, **given)
    for row in range(2):
        context = (memory if role == "cross" else x)[row, : count[row]]
        packed = first.packed + by_hand(first, first.packed, context)
        assert_close(out.stream[row], F.layer_norm(packed, (WIDTH,), first.packed_norm.weight))
    # a layer that is given a stream reads it in the place of its own P
    y = second.run(x, rows, stream=out.stream, **given)
    assert y.stream is None
    for row in range(2):
        alone = layer_of(role)
        alone.load_state_dict(second.state_dict())
        with torch.no_grad():
            alone.packed.copy_(out.stream[row])
        own = x[row : row + 1, : count[row]] if role == "self" else x[row : row + 1]
        expected = alone(own, memory=memory[row : row + 1, : count[row]]) if role == "cross" else alone(own)
        assert_close(y.y[row, : own.shape[1]], expected[0])
    if role == "cross":
        begun = first.begin(2, memory=given["memory"], dtype=x.dtype, device=x.device)
        assert_close(begun.stream, out.stream)
        begun = second.begin(2, memory=given["memory"], stream=begun.stream, dtype=x.dtype, device=x.device)
        assert_close(second.run(x, state=begun.state).y, y.y)


def test_causal_layers_read_a_stream_and_hand_it_on():
    layer, x, stream = layer_of("causal"), draw(2, 9, WIDTH), draw(2, 3, WIDTH)
    whole = layer.run(x, stream=stream)
    assert whole.stream is stream
    assert (whole.y - layer(x)).abs().max() > 1e-3
    begun = layer.begin(2, stream=stream, dtype=x.dtype, device=x.device)
    assert begun.stream is stream
    steps, state = [], begun.state
    for t in range(9):
        y, state = layer.extend(x[:, t : t + 1], state)
        steps.append(y)
    assert_close(torch.cat(steps, 1), whole.y)


def test_a_cut_state_still_trains_the_packed_sequence():
    layer, x = layer_of("causal"), draw(2, 6, WIDTH)
    _, state = layer.extend(x[:, :3], layer.start(2))
    y, _ = layer.extend(x[:, 3:], regard.detach(state))
    y.square().sum().backward()
    assert layer.packed.grad.any()


def test_the_layers_of_an_encoder_share_one_stream():
    sizes = {"vocabulary": 20, "width": WIDTH, "heads": HEADS, "inner": 8, "layers": 3, "dropout": 0.0}
    model = Transformer(ModelConfig(kind="encoder", attention="luna(length=3)", **sizes))
    layers = [block.attention for block in model.encoder.blocks]
    assert [layer.packed_norm is not None for layer in layers] == [True, True, False]
    assert len({id(layer.packed) for layer in layers}) == 1
    model(torch.randint(20, (2, 5))).logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(ValueError, match="hand on one packed sequence"):
        Transformer(ModelConfig(kind="encoder", attention=["luna(length=3)", "luna(length=4)"], **sizes))
