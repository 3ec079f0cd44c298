"""The sorting of Sinkhorn attention: against the package `sinkhorn-transformer`, whose attention itself is another one,
and what a soft permutation must be."""

import importlib

import torch
import torch.nn.functional as F
from torch.testing import assert_close

import regard
from regard.core.rows import Mask, Rows
from regard.layers.attention.base import Attention

WIDTH, HEADS, D, BLOCK, N = 24, 3, 8, 4, 28


def build(role: str = "self", **options) -> Attention:
    torch.manual_seed(0)
    options = ", ".join(f"{key}={value}" for key, value in options.items())
    spec = f"sinkhorn(block={BLOCK}, longest={N}, {options})"
    return regard.attention(spec, width=WIDTH, heads=HEADS, role=role).double().eval()


def sort(layer: Attention, x: torch.Tensor) -> torch.Tensor:
    """S [B, H, U, U] of a layer."""
    mask: Mask = layer.whole_mask(Rows.full(x))
    return layer._sort(mask, layer.project_heads("s", x).unflatten(2, (-1, BLOCK)))


def test_same_order():
    peer = importlib.import_module("sinkhorn_transformer.sinkhorn_transformer")
    layer = build(iterations=5, temperature=0.6)
    x = torch.randn(2, N, WIDTH, dtype=torch.float64)
    hidden = torch.relu(layer.project_heads("s", x.unflatten(1, (-1, BLOCK)).sum(2)) + layer.offset[:, None])
    logits = torch.einsum("bhud,hwd->bhuw", hidden, layer.place) / 0.6
    expected = peer.sinkhorn_sorting_operator(logits.flatten(0, 1), 5)
    assert_close(sort(layer, x).flatten(0, 1), expected)


def test_rows_and_columns():
    order = sort(build(iterations=400), torch.randn(2, N, WIDTH, dtype=torch.float64))
    ones = torch.ones(2, HEADS, N // BLOCK, dtype=torch.float64)
    assert_close(order.sum(2), ones)
    assert_close(order.sum(3), ones, rtol=1e-3, atol=1e-3)


def test_causal():
    """Blocks mix earlier ones only, in shares that sum to one; balanced columns leave each the one just before."""
    x = torch.randn(2, N, WIDTH, dtype=torch.float64)
    order, balanced = sort(build("causal"), x), sort(build("causal", iterations=1000), x)
    for found in (order, balanced):
        assert not found.triu().any()
        assert_close(found.sum(3)[:, :, 1:], torch.ones(2, HEADS, N // BLOCK - 1, dtype=torch.float64))
    assert order.diagonal(-1, 2, 3)[..., 1:].min() < 0.2
    assert balanced.diagonal(-1, 2, 3).min() > 0.99


def test_hard_permutation():
    """Logits that name one block for each place: a query reads its block and the named one."""
    layer = build(temperature=0.01)
    with torch.no_grad():
        layer.offset.zero_()
        layer.place.zero_()
        # block u is told by the u-th number of its tokens, and its place reads the next block
        layer.project["s"].weight.zero_()
        for u in range(N // BLOCK):
            layer.project["s"].weight[u::D, u] = 1
            layer.place[:, (u + 1) % (N // BLOCK), u] = 1
    x = torch.randn(1, N, WIDTH, dtype=torch.float64)
    x[..., : N // BLOCK] = F.one_hot(torch.arange(N) // BLOCK, N // BLOCK).double()
    block = torch.arange(N) // BLOCK
    gap = (block - block[:, None]) % (N // BLOCK)
    q, k, v = (layer.project_heads(name, x) for name in "qkv")
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=gap <= 1)
    assert_close(layer(x), layer.output(expected.transpose(1, 2).flatten(2)))


def test_noise_in_training_only():
    layer = build()
    x = torch.randn(1, N, WIDTH, dtype=torch.float64)
    assert_close(layer(x), layer(x), rtol=0, atol=0)
    layer.train()
    assert (layer(x) - layer(x)).abs().max() > 1e-3


def test_noise_draws_blocks_by_their_weights():
    """Gumbel noise: nearly hard, a block is read as often as softmax of the logits says."""
    x = torch.randn(1, N, WIDTH, dtype=torch.float64)
    hard = build("causal", temperature=0.01).train()
    drawn = sort(hard, x.expand(3000, -1, -1)).mean(0)
    assert_close(drawn, sort(build("causal", temperature=1.0), x)[0], rtol=0, atol=0.05)
