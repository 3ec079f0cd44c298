"""Induced attention against the paper's block on PyTorch's attention, and `isab-pytorch` (attention alone)."""

import importlib

import pytest
import torch
from sets import ISAB, copy_attention
from torch.testing import assert_close

import regard

WIDTH, HEADS, POINTS = 32, 4, 6


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def shaken(module: torch.nn.Module) -> torch.nn.Module:
    """Norms and biases that start at one and zero would hide what they do."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module.double().eval()


@pytest.mark.parametrize("padded", [False, True])
def test_inside_a_layer_it_is_the_isab_of_the_paper(padded):
    theirs = shaken(ISAB(WIDTH, HEADS, POINTS))
    ours = regard.attention(f"set(points={POINTS})", width=WIDTH, heads=HEADS, bias=True).double()
    inner, outer = theirs.gather, theirs.spread
    with torch.no_grad():
        ours.points.copy_(theirs.points)
        copy_attention(ours.gather, inner.attention)
        copy_attention(ours.spread, outer.attention)
        ours.feed.load_state_dict(inner.feed.state_dict())
        for norm, other in zip(ours.norms, inner.norms, strict=True):
            norm.load_state_dict(other.state_dict())
    x = torch.randn(3, 11, WIDTH, dtype=torch.float64)
    keep = torch.arange(11) < torch.tensor([11, 4, 7])[:, None] if padded else torch.ones(3, 11, dtype=torch.bool)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    # what a post-norm layer puts around an attention
    y = outer.norms[0](mine + ours(mine, keep=keep if padded else None))
    y = outer.norms[1](y + outer.feed(y).relu())
    z = theirs(other, keep if padded else None)
    assert_close(y[keep], z[keep])
    toward = torch.randn_like(y)
    (y * toward)[keep].sum().backward()
    (z * toward)[keep].sum().backward()
    assert_close(mine.grad, other.grad)
    assert_close(ours.points.grad, theirs.points.grad)
    assert_close(ours.feed.weight.grad, inner.feed.weight.grad)


@pytest.mark.parametrize("padded", [False, True])
def test_attention_alone_is_isab_pytorchs(padded):
    peers = importlib.import_module("isab_pytorch")
    theirs = peers.ISAB(dim=WIDTH, heads=HEADS, num_latents=POINTS).double()
    ours = regard.attention(f"set(points={POINTS}, block=False)", width=WIDTH, heads=HEADS, head_width=64).double()
    with torch.no_grad():
        ours.points.copy_(theirs.latents)
        for layer, other in ((ours.gather, theirs.attn1), (ours.spread, theirs.attn2)):
            weights = (other.to_q.weight, *other.to_kv.weight.chunk(2))
            for name, weight in zip("qkv", weights, strict=True):
                layer.project[name].weight.copy_(weight)
            layer.output.weight.copy_(other.to_out.weight)
    x = torch.randn(3, 11, WIDTH, dtype=torch.float64)
    keep = torch.arange(11) < torch.tensor([11, 4, 7])[:, None] if padded else None
    real = torch.ones(3, 11, dtype=torch.bool) if keep is None else keep
    assert_close(ours(x, keep=keep)[real], theirs(x, mask=keep)[0][real])
