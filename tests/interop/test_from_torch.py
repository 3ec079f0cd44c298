"""torch.nn.MultiheadAttention in and out: the same outputs, and words for what cannot be taken over."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import regard
from regard.kernels.packed import pack_linears


def peer(**options) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, dtype=torch.float64, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)  # biases start at zero
    return module.eval()


def draw(*size: int) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float64)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("role", ["self", "causal", "cross"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_both_ways_with_padding(bias, role, batch_first):
    module = peer(bias=bias, batch_first=batch_first)
    layer = regard.from_torch(module, role=role)
    x, memory = draw(2, 7, 16), draw(2, 9, 16)
    context = memory if role == "cross" else x
    keep = torch.arange(context.shape[1]) < torch.tensor([context.shape[1], 4])[:, None]
    masks = {"key_padding_mask": ~keep}
    if role == "causal":
        masks |= {"attn_mask": torch.ones(7, 7, dtype=torch.bool).triu(1)}

    def asked(module, batch_first):
        sides = (x, context, context) if batch_first else (part.transpose(0, 1) for part in (x, context, context))
        y = module(*sides, need_weights=False, **masks)[0]
        return y if batch_first else y.transpose(0, 1)

    expected = asked(module, batch_first)
    got = layer(x, memory=memory, memory_keep=keep) if role == "cross" else layer(x, keep=keep)
    real = slice(None) if role == "cross" else keep
    assert_close(got[real], expected[real], rtol=0, atol=1e-12)
    back = regard.to_torch(layer, batch_first=not batch_first)
    assert_close(asked(back, not batch_first)[real], expected[real], rtol=0, atol=1e-12)


def test_a_memory_of_another_width():
    module = peer(kdim=10, vdim=10, batch_first=True)
    layer, x, memory = regard.from_torch(module), draw(2, 5, 16), draw(2, 6, 10)
    expected = module(x, memory, memory)[0]
    assert_close(layer(x, memory=memory), expected, rtol=0, atol=1e-12)
    assert_close(regard.to_torch(layer)(x, memory, memory)[0], expected, rtol=0, atol=1e-12)


def test_a_layer_that_is_packed_for_inference():
    torch.manual_seed(0)
    layer, x = regard.attention("softmax", width=16, heads=4, bias=True).eval(), torch.randn(1, 9, 16)
    expected = layer(x).detach()
    module = regard.to_torch(pack_linears(layer))
    assert_close(module(x, x, x)[0], expected)


def test_weights_go_into_another_mechanism():
    module, x = peer(batch_first=True), draw(1, 9, 16)
    layer = regard.from_torch(module, attention="local(window=2)", role="causal")
    near = torch.ones(9, 9, dtype=torch.bool).tril().triu(-2)
    assert_close(layer(x), module(x, x, x, attn_mask=~near)[0], rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="'softmax', the only one"):
        regard.to_torch(layer)


def test_the_layer_stands_alone_and_keeps_dtype_and_mode():
    module = nn.MultiheadAttention(16, 4).half().train()
    layer = regard.from_torch(module)
    assert layer.output.weight.dtype == torch.float16
    assert layer.training
    with torch.no_grad():
        module.in_proj_weight.zero_()
    assert layer.project["q"].weight.any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"add_bias_kv": True}, "add_bias_kv"),
        ({"add_zero_attn": True}, "add_zero_attn"),
        ({"kdim": 8, "vdim": 12}, "kdim 8 and vdim 12"),
    ],
)
def test_what_cannot_be_taken_over(options, words):
    with pytest.raises(ValueError, match=words):
        regard.from_torch(peer(**options))


def test_wrong_arguments():
    with pytest.raises(ValueError, match="MultiheadAttention, got Linear"):
        regard.from_torch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="for role 'cross', got 'self'"):
        regard.from_torch(peer(kdim=8, vdim=8), role="self")
    with pytest.raises(ValueError, match="other projections"):
        regard.from_torch(peer(), attention="fnet")
    for options, name in (
        ({"kv_heads": 2}, "kv_heads"),
        ({"head_width": 8}, "head_width"),
        ({"out_width": 8}, "out_width"),
        ({"position": "rotary"}, "position"),
        ({"bias": "inputs"}, "bias='inputs'"),
    ):
        with pytest.raises(ValueError, match=f"has no {name}"):
            regard.to_torch(regard.attention("softmax", width=16, heads=4, **options))
