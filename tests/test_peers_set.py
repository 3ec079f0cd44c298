"""Induced attention against PyTorch Geometric's ISAB (the paper's form) and `isab-pytorch` (attention alone)."""

import pytest
import torch
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


def copy_attention(ours, theirs: torch.nn.MultiheadAttention) -> None:
    parts = zip("qkv", theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True)
    for name, weight, bias in parts:
        ours.project[name].weight.copy_(weight)
        ours.project[name].bias.copy_(bias)
    ours.output.load_state_dict(theirs.out_proj.state_dict())


@pytest.mark.parametrize("padded", [False, True])
def test_inside_a_layer_it_is_the_isab_of_pytorch_geometric(padded):
    peers = pytest.importorskip("torch_geometric.nn.aggr.utils")
    theirs = shaken(peers.InducedSetAttentionBlock(WIDTH, POINTS, HEADS))
    ours = regard.attention(f"set(points={POINTS})", width=WIDTH, heads=HEADS, bias=True).double()
    inner, outer = theirs.mab1, theirs.mab2
    with torch.no_grad():
        ours.points.copy_(theirs.ind[0])
        copy_attention(ours.gather, inner.attn)
        copy_attention(ours.spread, outer.attn)
        ours.feed.load_state_dict(inner.lin.state_dict())
        for norm, other in zip(ours.norms, (inner.layer_norm1, inner.layer_norm2), strict=True):
            norm.load_state_dict(other.state_dict())
    x = torch.randn(3, 11, WIDTH, dtype=torch.float64)
    keep = torch.arange(11) < torch.tensor([11, 4, 7])[:, None] if padded else torch.ones(3, 11, dtype=torch.bool)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    # what a post-norm layer puts around an attention
    y = outer.layer_norm1(mine + ours(mine, keep=keep if padded else None))
    y = outer.layer_norm2(y + outer.lin(y).relu())
    z = theirs(other, keep if padded else None)
    assert_close(y[keep], z[keep])
    toward = torch.randn_like(y)
    (y * toward)[keep].sum().backward()
    (z * toward)[keep].sum().backward()
    assert_close(mine.grad, other.grad)
    assert_close(ours.points.grad, theirs.ind.grad[0])
    assert_close(ours.feed.weight.grad, inner.lin.weight.grad)


@pytest.mark.parametrize("padded", [False, True])
def test_attention_alone_is_isab_pytorchs(padded):
    peers = pytest.importorskip("isab_pytorch")
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
