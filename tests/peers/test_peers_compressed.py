"""Memory-compressed attention against the package `memory-compressed-attention`, and against a convolution of torch."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import regard

WIDTH, HEADS, D = 32, 4, 8


def build(spec: str, role: str, **sizes) -> regard.Attention:
    torch.manual_seed(0)
    layer = regard.attention(spec, **({"width": WIDTH, "heads": HEADS, "role": role} | sizes)).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith(("conv", "offset", "first")):
                parameter.normal_(std=0.5)
    return layer


@pytest.mark.parametrize("role", ["self", "causal"])
@pytest.mark.parametrize(("factor", "tokens"), [(3, 24), (4, 12), (1, 7)])
def test_memory_compressed_attention(factor, tokens, role):
    """Lengths that the factor divides: others theirs pads at the left, so that what a block is depends on the length.
    One of its convolutions serves keys and values, and it divides by the root of the whole width."""
    peer = importlib.import_module("memory_compressed_attention")
    torch.manual_seed(0)
    causal = role == "causal"
    theirs = peer.MemoryCompressedAttention(WIDTH, HEADS, causal=causal, compression_factor=factor).double()
    ours = build(f"compressed(factor={factor}, first='learned')", role, bias=True)
    conv = theirs.compress_fn.conv
    with torch.no_grad():
        theirs.null_k.normal_()
        theirs.null_v.normal_()
        for name, weight in zip("qkv", theirs.to_qkv.weight.chunk(3), strict=True):
            ours.project[name].weight.copy_(weight * (HEADS**-0.5 if name == "q" else 1))
            ours.project[name].bias.zero_()
        ours.output.load_state_dict(theirs.to_out.state_dict())
        for name, null in (("k", theirs.null_k), ("v", theirs.null_v)):
            getattr(ours, f"conv_{name}").copy_(conv.weight.view(HEADS, D, D, factor).permute(0, 3, 2, 1))
            getattr(ours, f"offset_{name}").copy_(conv.bias.view(HEADS, D))
            getattr(ours, f"first_{name}").copy_(null.view(HEADS, D))
    x = torch.randn(2, tokens, WIDTH, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = ours(mine), theirs(other)
    assert_close(y, z)
    toward = torch.randn_like(y)
    (y * toward).sum().backward()
    (z * toward).sum().backward()
    assert_close(mine.grad, other.grad)
    both = (ours.conv_k.grad + ours.conv_v.grad).permute(0, 3, 2, 1).reshape_as(conv.weight)
    assert_close(both, conv.weight.grad)
    assert_close(ours.first_v.grad.flatten(), theirs.null_v.grad.flatten())
    assert_close(ours.project["k"].weight.grad, theirs.to_qkv.weight.grad.chunk(3)[1])


def by_torch(layer: regard.Attention, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and weights of unpadded rows: a grouped Conv1d of torch, a dense mask, one softmax."""
    f, kv_heads = layer.factor, layer.shape.kv_heads
    q = F.linear(x, layer.project["q"].weight).view(len(x), -1, HEADS, D).transpose(1, 2)
    slots = []
    for name in "kv":
        raw = F.linear(source, layer.project[name].weight).transpose(1, 2)  # [B, G D, S]
        weight = getattr(layer, f"conv_{name}").permute(0, 3, 2, 1).reshape(kv_heads * D, D, f)
        blocks = F.conv1d(F.pad(raw, (0, -raw.shape[2] % f)), weight, stride=f, groups=kv_heads)
        if layer.first == "token":
            blocks = torch.cat([raw[..., :1], blocks], -1)
        elif layer.first == "learned":
            first = getattr(layer, f"first_{name}").flatten()[None, :, None]
            blocks = torch.cat([first.expand(len(x), -1, -1), blocks], -1)
        slots.append(blocks.unflatten(1, (kv_heads, D)).mT.repeat_interleave(HEADS // kv_heads, 1))
    k, v = slots
    logits = q @ k.mT / D**0.5
    if layer.shape.role == "causal":
        ends = torch.arange(1, k.shape[2] - layer.lead + 1) * f - 1
        ends = torch.cat([torch.full((layer.lead,), -1), ends])
        logits = logits.masked_fill(torch.arange(x.shape[1])[:, None] < ends, -torch.inf)
    weights = torch.softmax(logits, -1).nan_to_num(0)
    return (weights @ v).transpose(1, 2).flatten(2) @ layer.output.weight.T, weights


@pytest.mark.parametrize("role", ["self", "causal", "cross"])
@pytest.mark.parametrize("first", ["token", "learned", "none"])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize(("factor", "tokens"), [(3, 1), (3, 2), (3, 3), (3, 11), (5, 20), (2, 9)])
def test_convolution(factor, tokens, kv_heads, first, role):
    layer = build(f"compressed(factor={factor}, first={first!r})", role, kv_heads=kv_heads)
    x = torch.randn(2, tokens, WIDTH, dtype=torch.float64)
    memory = torch.randn(2, tokens + 4, WIDTH, dtype=torch.float64) if role == "cross" else None
    y, weights = by_torch(layer, x, x if memory is None else memory)
    assert_close(layer(x, memory=memory), y)
    assert_close(layer.weights(x, memory=memory), weights)


@pytest.mark.parametrize("first", ["token", "learned", "none"])
@pytest.mark.parametrize("factor", [1, 2, 3, 7])
@pytest.mark.parametrize("grad", [False, True])
def test_steps(grad, factor, first):
    """Cuts that end inside blocks, at their ends and beyond, with rows of different length."""
    layer = build(f"compressed(factor={factor}, first={first!r})", "causal")
    x = torch.randn(3, 40, WIDTH, dtype=torch.float64)
    keep = torch.rand(3, 40, generator=torch.Generator().manual_seed(1)) < 0.7
    keep[1, :9] = False
    whole = layer(x, keep=keep)
    with torch.set_grad_enabled(grad):
        state, at = layer.start(3), 0
        for n in (2, 7, 1, 1, 1, 13, 4, 1, 10):
            maps = layer.weights(x[:, at : at + n], keep=keep[:, at : at + n], state=state)
            y, state = layer.extend(x[:, at : at + n], state, keep=keep[:, at : at + n])
            assert_close(y, whole[:, at : at + n])
            assert maps.shape[:3] == (3, HEADS, n)
            at += n
        assert (state.progress.length == keep.sum(1)).all()


def test_what_a_state_holds():
    """A slot for each block and the tokens of the one that is not finished."""
    layer = build("compressed(factor=4)", "causal")
    with torch.no_grad():
        _, state = layer.extend(torch.randn(2, 103, WIDTH, dtype=torch.float64), layer.start(2))
    assert state.slots[0].shape == (2, HEADS, 1 + 26, D)
    assert state.tail[0].shape == (2, HEADS, 3, D)


def test_starts_as_the_mean():
    layer = regard.attention("compressed(factor=2, first='none')", width=WIDTH, heads=HEADS).double()
    plain = regard.attention("softmax", width=WIDTH, heads=HEADS, role="cross").double()
    plain.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(2, 12, WIDTH, dtype=torch.float64)
    assert_close(layer(x), plain(x, memory=x.unflatten(1, (6, 2)).mean(2)))


def test_refusals():
    with pytest.raises(ValueError, match="'factor' of 'compressed' must be at least 1, got 0"):
        regard.attention("compressed(factor=0)", width=WIDTH, heads=HEADS)
