"""Clustered attention against dense attention with the groups of a layer. (The authors' package compiles operators that
do not build for today's PyTorch, and draws other planes at each call.)"""

import pytest
import torch
from torch.testing import assert_close

import regard

WIDTH, HEADS, N = 24, 3, 90


def build(options: str, seed: int = 0):
    torch.manual_seed(seed)
    return regard.attention(f"clustered({options})", width=WIDTH, heads=HEADS).double()


def dense(layer, x: torch.Tensor) -> torch.Tensor:
    """Every weight of every query, [B, H, T, S]."""
    q, k = layer.project_heads("q", x), layer.project_heads("k", x)
    group = layer.group(q, None)
    together = (group[..., None] == group[..., None, :]).double()
    means = together @ q / together.sum(-1, keepdim=True)
    weights = torch.softmax(means @ k.mT * layer.scale, -1)
    if not layer.topk:
        return weights
    least = weights.topk(layer.topk, -1).values[..., -1:]
    own = torch.softmax((q @ k.mT * layer.scale).masked_fill(weights < least, -torch.inf), -1)
    mass = torch.where(weights >= least, weights, 0).sum(-1, keepdim=True)
    return torch.where(weights >= least, mass * own, weights)


# two clusters of about 45 queries take several tiles each
@pytest.mark.parametrize(
    "options", ["clusters=7, topk=0", "clusters=7, topk=9", "clusters=1, topk=2", "clusters=2, topk=9", "clusters=40"]
)
def test_dense(options):
    layer = build(options)
    x = torch.randn(2, N, WIDTH, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = layer(mine)
    z = layer.output((dense(layer, other) @ layer.project_heads("v", other)).transpose(1, 2).flatten(2))
    assert_close(y, z)
    toward = torch.randn_like(y)
    (y * toward).sum().backward()
    (z * toward).sum().backward()
    assert_close(mine.grad, other.grad)


def test_nearer_to_softmax():
    """More clusters are nearer to full attention than fewer, and improved ones nearer than plain ones (their Lemma)."""
    torch.manual_seed(1)
    x = torch.randn(4, N, WIDTH, dtype=torch.float64)
    softmax = regard.attention("softmax", width=WIDTH, heads=HEADS).double()

    def away(options: str) -> float:
        layer = build(options)
        layer.load_state_dict(softmax.state_dict(), strict=False)
        return (layer.weights(x) - softmax.weights(x)).abs().sum(-1).mean().item()

    few, more, improved = away("clusters=4, topk=0"), away("clusters=30, topk=0"), away("clusters=30, topk=30")
    assert improved < more < few


def test_groups():
    """Queries that lie together are answered together."""
    torch.manual_seed(0)
    layer = build("clusters=4, bits=64")
    centres = 10 * torch.randn(1, HEADS, 4, 8, dtype=torch.float64)
    # the first centroids are the first queries
    which = torch.cat([torch.arange(4), torch.randint(4, (N - 4,))])
    group = layer.group(centres[:, :, which] + 0.1 * torch.randn(1, HEADS, N, 8, dtype=torch.float64), None)
    assert_close(group, which.expand_as(group))


def test_redraw():
    layer = build("clusters=4, topk=3")
    x = torch.randn(1, N, WIDTH, dtype=torch.float64)
    y = layer(x)
    assert_close(layer(x), y, rtol=0, atol=0)
    layer.redraw()
    assert (layer(x) - y).abs().max() > 1e-3
