"""Spatial gating against the package `g-mlp-pytorch`: gMLP and aMLP, both ways and causal, by steps too."""

import pytest
import torch
from g_mlp_pytorch import g_mlp_pytorch as peer
from torch.testing import assert_close

import regard
from regard.layers.attention.base import Attention

WIDTH, LONGEST, EXPANSION = 16, 24, 4


def pair(role: str, attention: int) -> tuple[Attention, torch.nn.Module]:
    """Our layer and theirs with the same weights, float64."""
    torch.manual_seed(0)
    theirs = peer.gMLPBlock(
        dim=WIDTH,
        dim_ff=EXPANSION * WIDTH,
        seq_len=LONGEST,
        attn_dim=attention or None,
        causal=role == "causal",
    ).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    spec = f"gmlp(longest={LONGEST}, expansion={EXPANSION}, attention={attention})"
    ours = regard.attention(spec, width=WIDTH, heads=4, role=role, bias=True).double()
    with torch.no_grad():
        for name in ("weight", "bias"):
            bypass, gate = getattr(theirs.proj_in[0], name).chunk(2)
            getattr(ours.bypass, name).copy_(bypass)
            getattr(ours.gate, name).copy_(gate)
        ours.output.load_state_dict(theirs.proj_out.state_dict())
        ours.norm.load_state_dict(theirs.sgu.norm.state_dict())
        ours.mix.copy_(theirs.sgu.weight[0])
        ours.offset.copy_(theirs.sgu.bias[0])
        if attention:
            for name, weight in zip("qkv", theirs.attn.to_qkv.weight.chunk(3), strict=True):
                ours.attention.project[name].weight.copy_(weight)
                # theirs has a bias at the output alone
                ours.attention.project[name].bias.zero_()
            ours.attention.output.load_state_dict(theirs.attn.to_out.state_dict())
    return ours, theirs


@pytest.mark.parametrize("attention", [0, 5])
@pytest.mark.parametrize(("role", "tokens"), [("self", LONGEST), ("causal", LONGEST), ("causal", 7)])
def test_block(role, attention, tokens):
    """Of the lengths, theirs takes shorter ones only where it is causal."""
    ours, theirs = pair(role, attention)
    x = torch.randn(3, tokens, WIDTH, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = ours(mine), theirs(other)
    assert_close(y, z)
    toward = torch.randn_like(y)
    (y * toward).sum().backward()
    (z * toward).sum().backward()
    assert_close(mine.grad, other.grad)
    assert_close(ours.mix.grad, theirs.sgu.weight.grad[0])
    assert_close(ours.offset.grad, theirs.sgu.bias.grad[0])
    assert_close(torch.cat([ours.bypass.weight.grad, ours.gate.weight.grad]), theirs.proj_in[0].weight.grad)


@pytest.mark.parametrize("attention", [0, 5])
def test_decoding(attention):
    ours, theirs = pair("causal", attention)
    x = torch.randn(2, LONGEST, WIDTH, dtype=torch.float64)
    state, steps = ours.start(2), []
    for token in x.split(1, 1):
        y, state = ours.extend(token, state)
        steps.append(y)
    assert_close(torch.cat(steps, 1), theirs(x))


def test_map_is_the_table_and_the_tiny_attention():
    ours, theirs = pair("causal", 5)
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    q, k, _ = theirs.attn.to_qkv(x).chunk(3, -1)
    logits = torch.where(torch.ones(9, 9).tril().bool(), q @ k.mT * theirs.attn.scale, -torch.inf)
    expected = torch.softmax(logits, -1) + theirs.sgu.weight[0, :9, :9].tril()
    assert_close(ours.weights(x), expected[:, None].expand(-1, 4, -1, -1))
    keep = torch.arange(6) < torch.tensor([6, 2])[:, None]
    _, state = ours.extend(x[:, :6], ours.start(2), keep=keep)
    late = ours.weights(x[:, 6:], state=state)
    assert_close(late[0], ours.weights(x[:1])[0, :, 6:])
    own = torch.cat([x[1:, :2], x[1:, 6:]], 1)
    assert_close(late[1, ..., :5], ours.weights(own)[0, :, 2:])
    assert not late[1, ..., 5:].any()


def test_a_layer_starts_as_a_feed_forward_one():
    torch.manual_seed(0)
    ours = regard.attention(f"gmlp(longest={LONGEST})", width=WIDTH, heads=4)
    x = torch.randn(2, 9, WIDTH)
    assert_close(ours(x), ours.output(torch.nn.functional.gelu(ours.bypass(x))))


def test_longer_inputs_are_refused_in_words():
    ours, _ = pair("causal", 0)
    x = torch.randn(1, LONGEST + 1, WIDTH, dtype=torch.float64)
    expected = f"'gmlp' got {LONGEST + 1} tokens .*longest={LONGEST}: build it with longest={LONGEST + 1}"
    with pytest.raises(ValueError, match=expected):
        ours(x)
    _, state = ours.extend(x[:, 1:], ours.start(1))
    with pytest.raises(ValueError, match=expected):
        ours.extend(x[:, :1], state)


@pytest.mark.parametrize("options", ["longest=0", "expansion=3", "expansion=0"])
def test_options_that_make_no_layer_are_refused(options):
    with pytest.raises(ValueError, match=f"option '{options.split('=')[0]}' of 'gmlp' must be"):
        regard.attention(f"gmlp({options})", width=WIDTH, heads=4)
