"""Routing attention over a memory: queries of one centroid read its keys in tiles."""

import torch
from torch.testing import assert_close

import regard


def test_larger_tiles_of_many_queries():
    """Queries are read independently of each other: many at once, in larger tiles, give what few at a time do, and the
    gradients of both are equal."""
    torch.manual_seed(0)
    layer = regard.attention("routing(clusters=2, window=5)", width=8, heads=2, role="cross").double().eval()
    assert [layer._tile(T) for T in (100, 255, 256, 600, 100_000)] == [16, 16, 32, 64, 128]
    x = torch.randn(2, 600, 8, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(2, 40, 8, dtype=torch.float64, requires_grad=True)
    whole = layer(x, memory=memory)
    pieces = torch.cat([layer(part, memory=memory) for part in x.split(100, 1)], 1)
    assert_close(whole, pieces)
    leaves = [x, memory, *layer.parameters()]
    grad = torch.randn_like(whole)
    assert_close(*(torch.autograd.grad(y, leaves, grad, allow_unused=True) for y in (whole, pieces)))
