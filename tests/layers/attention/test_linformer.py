"""What the conformance suite cannot see of Linformer: how layers share E, and its limits in words."""

import copy

import pytest
import torch
from torch.testing import assert_close

import regard

WIDTH, HEADS, LONGEST = 16, 4, 20
PARAMETERS = {"none": 2 * HEADS, "headwise": 2, "key-value": 1, "layerwise": 1}  # matrices [R, n] a layer


def build(sharing: str, role: str = "self", rank: int = 3, longest: int = LONGEST, **sizes) -> regard.Attention:
    spec = f"linformer(rank={rank}, longest={longest}, sharing={sharing!r})"
    return regard.attention(spec, width=WIDTH, heads=HEADS, role=role, **sizes).double()


def stack(sharing: str, role: str = "self") -> torch.nn.ModuleList:
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(build(sharing, role) for _ in range(2))
    for layer in layers:
        layer.link_layers(layers[0], False, False)
    return layers


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("sharing", "matrices"), PARAMETERS.items())
def test_parameters(sharing, matrices):
    plain = count(regard.attention("softmax", width=WIDTH, heads=HEADS))
    assert count(build(sharing)) == plain + matrices * 3 * LONGEST
    both = 1 if sharing == "layerwise" else 2
    assert count(stack(sharing)) == 2 * plain + both * matrices * 3 * LONGEST


def test_none_has_a_matrix_for_each_key_value_head():
    assert build("none", kv_heads=2).mix_k.shape == (2, 3, LONGEST)


def test_layerwise_gradient_sums():
    layers = stack("layerwise")
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    # the same two layers with an E of their own each
    apart = copy.deepcopy(layers)
    apart[1].mix_k = torch.nn.Parameter(apart[0].mix_k.detach().clone())
    for model in (layers, apart):
        model[1](model[0](x)).square().sum().backward()
    assert apart[0].mix_k.grad.abs().max() > 0
    assert apart[1].mix_k.grad.abs().max() > 0
    assert_close(layers[0].mix_k.grad, apart[0].mix_k.grad + apart[1].mix_k.grad)


def test_layerwise_stays_shared():
    layers = stack("layerwise")
    for model in (copy.deepcopy(layers), copy.deepcopy(layers).float(), copy.deepcopy(layers).to(torch.bfloat16)):
        assert model[0].mix_k is model[1].mix_k
    other = stack("layerwise")
    with torch.no_grad():
        other[0].mix_k.zero_()
    other.load_state_dict(layers.state_dict())
    assert other[0].mix_k is other[1].mix_k
    assert_close(other[1].mix_k, layers[0].mix_k)


def test_settle_leaves_others_alone():
    for sharing in ("none", "headwise", "key-value"):
        layers = stack(sharing)
        assert layers[0].mix_k is not layers[1].mix_k
    layer = build("layerwise")
    own = layer.mix_k
    softmax = regard.attention("softmax", width=WIDTH, heads=HEADS)
    for first in (None, layer, softmax, build("key-value")):
        layer.link_layers(first, False, False)
        assert layer.mix_k is own


def test_settle_refuses_other_sizes():
    for first in (build("layerwise", rank=2), build("layerwise", longest=21)):
        with pytest.raises(ValueError, match="give them the same"):
            build("layerwise").link_layers(first, False, False)


def test_too_long():
    x = torch.randn(1, LONGEST + 1, WIDTH, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"got 21 tokens .* longest=20: build it with longest=21"):
        build("headwise")(x)
    cross = build("headwise", "cross")
    assert cross(x, memory=x[:, :LONGEST]).shape == x.shape
    for call in (lambda: cross(x, memory=x), lambda: cross.start(1, memory=x), lambda: cross.weights(x, memory=x)):
        with pytest.raises(ValueError, match="longest=20"):
            call()


def test_causal_is_refused_in_words():
    with pytest.raises(ValueError, match="every slot mixes all positions"):
        build("headwise", "causal")


@pytest.mark.parametrize("option", ["rank", "longest"])
def test_sizes(option):
    with pytest.raises(ValueError, match=f"'{option}' of 'linformer' must be at least 1, got 0"):
        build("headwise", **{option: 0})


def test_unit_slots_are_softmax():
    """E = F = the unit matrix: nothing is mixed, and attention is the usual one."""
    torch.manual_seed(0)
    layer = build("key-value", rank=9, longest=9)
    softmax = regard.attention("softmax", width=WIDTH, heads=HEADS).double()
    softmax.load_state_dict({name: tensor for name, tensor in layer.state_dict().items() if name != "mix_k"})
    with torch.no_grad():
        layer.mix_k.copy_(torch.eye(9))
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    assert_close(layer(x), softmax(x))
    assert_close(layer.weights(x), softmax.weights(x))


@pytest.mark.parametrize("sharing", PARAMETERS)
def test_biases_of_padded_tokens_stay_out(sharing):
    layer = build(sharing, bias=True)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    x = torch.randn(2, 12, WIDTH, dtype=torch.float64)
    keep = torch.rand(2, 12, generator=torch.Generator().manual_seed(0)) < 0.6
    x[~keep] = torch.nan
    y = layer(x, keep=keep)
    for row in range(2):
        assert_close(y[row, keep[row]], layer(x[row : row + 1, keep[row]])[0])


def test_memory_without_a_real_token():
    layer = build("headwise", "cross", bias=True)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    x, memory = torch.randn(2, 2, 7, WIDTH, dtype=torch.float64)
    keep = torch.tensor([[False] * 7, [True] * 7])
    y = layer(x, memory=memory, memory_keep=keep)
    assert_close(y[0], torch.zeros_like(y[0]), rtol=0, atol=0)
    assert_close(y[1:], layer(x[1:], memory=memory[1:]))
