"""What the suite does not ask of Cluster-Former: its memory bank and k-means."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import regard

WIDTH, HEADS = 16, 4


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def layer_of(options: str, **sizes):
    return regard.attention(f"clusterformer({options})", width=WIDTH, heads=HEADS, **sizes).double()


def test_one_chunk_is_softmax():
    layer, softmax = layer_of("clusters=5, chunk=40"), regard.attention("softmax", width=WIDTH, heads=HEADS).double()
    softmax.load_state_dict(layer.inner.state_dict())
    x, keep = torch.randn(3, 33, WIDTH, dtype=torch.float64), torch.rand(3, 33) < 0.7
    assert_close(layer(x, keep=keep), softmax(x, keep=keep))


def test_a_chunk_for_each_cluster_is_softmax_among_its_tokens():
    layer = layer_of("clusters=3, chunk=4")
    x = torch.randn(2, 12, WIDTH, dtype=torch.float64)
    cluster = torch.randperm(12) % 3
    x = x + 50 * layer.centroids[cluster]
    together = cluster[:, None] == cluster
    q, k, v = (layer.inner.project_heads(name, x) for name in "qkv")
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=together)
    assert_close(layer(x), layer.inner.output(o.transpose(1, 2).flatten(2)))
    assert torch.equal(layer.weights(x)[0].amax(0) > 0, together)


def test_the_bank_keeps_the_last_real_tokens_of_training():
    layer = layer_of("clusters=2, chunk=4, bank=10")
    x, keep, seen = torch.randn(5, 2, 4, WIDTH, dtype=torch.float64), torch.rand(5, 2, 4) < 0.6, []
    layer.eval()(x[0])
    assert layer.kept == 0
    assert not layer.bank.any()
    layer.train()
    for batch, real in zip(x, keep, strict=True):
        layer(batch, keep=real)
        seen += [token for row, kept in zip(batch, real, strict=True) for token in row[kept]]
    assert layer.kept == len(seen) > 10
    bank = {tuple(token.tolist()) for token in layer.bank[:10]}
    assert bank == {tuple(token.tolist()) for token in seen[-10:]}


def test_more_tokens_than_the_bank_has_room_for():
    layer = layer_of("clusters=2, chunk=4, bank=5").train()
    x = torch.randn(1, 23, WIDTH, dtype=torch.float64)
    layer(x)
    assert {tuple(token.tolist()) for token in layer.bank[:5]} == {tuple(token.tolist()) for token in x[0, -5:]}


def test_k_means_finds_directions_and_settles():
    layer = layer_of("clusters=4, chunk=8, bank=256, every=3").train()
    directions = F.normalize(torch.randn(4, WIDTH, dtype=torch.float64), dim=-1)
    before = layer.centroids.clone()
    for step in range(3):
        assert torch.equal(layer.centroids, before)
        # k-means begins with every 48th token
        group = (64 * step + torch.arange(64).view(2, 32)) // 48
        layer(3 * directions[group] + 0.02 * torch.randn(2, 32, WIDTH, dtype=torch.float64))
    assert ((directions @ layer.centroids.T).amax(1) > 0.99).all()
    # a fixed point: each centroid points as the sum of the tokens nearest to it
    points = F.normalize(layer.bank[:192], dim=-1)
    nearest = (points @ layer.centroids.T).argmax(1)
    for k, centroid in enumerate(layer.centroids):
        assert_close(centroid, F.normalize(points[nearest == k].sum(0), dim=-1), rtol=1e-5, atol=1e-5)


def test_a_centroid_that_is_nearest_to_none_stays():
    layer = layer_of("clusters=3, chunk=4, bank=8, every=1").train()
    token = torch.randn(WIDTH, dtype=torch.float64)
    layer(token.expand(1, 8, -1))
    assert_close(layer.centroids, F.normalize(token, dim=0).expand(3, -1), rtol=1e-5, atol=1e-5)


def test_too_few_tokens_leave_the_centroids_as_they_are():
    layer = layer_of("clusters=8, chunk=4, every=1").train()
    before = layer.centroids.clone()
    layer(torch.randn(1, 7, WIDTH, dtype=torch.float64))
    assert torch.equal(layer.centroids, before)
    layer(torch.randn(1, 7, WIDTH, dtype=torch.float64))
    assert not torch.equal(layer.centroids, before)


def test_what_it_refuses():
    for options, words in (("chunk=0", "'chunk' of 'clusterformer'"), ("bank=8", "must be at least clusters=64")):
        with pytest.raises(ValueError, match=words):
            layer_of(options)
    with pytest.raises(ValueError, match="'clusterformer' cannot take position 'rotary'"):
        layer_of("chunk=4", position="rotary")
    with pytest.raises(ValueError, match="cannot take role 'causal'"):
        layer_of("chunk=4", role="causal")
