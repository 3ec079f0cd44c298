"""Routing attention against the k-means attention of the package `routing-transformer`, and how centroids learn."""

import copy
import importlib
import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import regard
from regard.core.rows import pack
from regard.layers.attention.base import Attention

WIDTH, HEADS, D, CLUSTERS, WINDOW, N = 24, 3, 8, 4, 5, 18


def build(role: str, *, shared: bool = True, spec: str = "") -> Attention:
    torch.manual_seed(0)
    spec = f"routing(clusters={CLUSTERS}, window={WINDOW}, shared={shared}{spec})"
    return regard.attention(spec, width=WIDTH, heads=HEADS, role=role).double()


@pytest.mark.parametrize(("role", "shared"), [("self", True), ("causal", True), ("self", False)])
def test_same_centroids(role, shared):
    peer = importlib.import_module("routing_transformer.routing_transformer")
    ours = build(role, shared=shared).eval()
    theirs = peer.KmeansAttention(CLUSTERS, WINDOW, HEADS, D, causal=role == "causal", shared_qk=True).double().eval()
    # so told, theirs takes queries and keys as they come, and lets tokens see themselves
    theirs.shared_qk = False
    theirs.kmeans.initted.fill_(True)
    theirs.kmeans.means.copy_(ours.centroids)
    x = torch.randn(2, N, WIDTH, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    k, v = (ours.project_heads(name, other) for name in "kv")
    q = k if shared else ours.project_heads("q", other)
    z = theirs(F.layer_norm(q, (D,), eps=1e-6), F.layer_norm(k, (D,), eps=1e-6), v)[0]
    z = ours.output(z.transpose(1, 2).flatten(2))
    y = ours(mine)
    # theirs adds 1e-5 to the number of times a token was picked
    assert_close(y, z, rtol=1e-4, atol=1e-5)
    toward = torch.randn_like(y)
    (y * toward).sum().backward()
    (z * toward).sum().backward()
    assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("role", ["self", "causal"])
def test_full(role):
    """One centroid that picks all tokens: softmax attention of normalised queries and keys."""
    torch.manual_seed(0)
    layer = regard.attention("routing(clusters=1)", width=WIDTH, heads=HEADS, role=role).double().eval()
    x = torch.randn(2, N, WIDTH, dtype=torch.float64)
    k, v = F.layer_norm(layer.project_heads("k", x), (D,), eps=1e-6), layer.project_heads("v", x)
    expected = F.scaled_dot_product_attention(k, k, v, is_causal=role == "causal")
    assert_close(layer(x), layer.output(expected.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("shared", [True, False])
def test_centroids_follow_the_tokens(shared):
    """A step by hand, over the real tokens only; none without training."""
    layer = build("self", shared=shared, spec=", decay=0.9, commitment=0.5")
    x = torch.randn(2, N, WIDTH, dtype=torch.float64)
    keep = torch.arange(N) < torch.tensor([[N], [7]])
    # the mean of the others is never the nearest: it stays
    layer.sums[:, 1] = layer.sums[:, [0, 2, 3]].mean(1)
    sums, counts, means = layer.sums.clone(), layer.counts.clone(), layer.centroids
    layer.eval()
    layer(x, keep=keep)
    assert_close(layer.sums, sums, rtol=0, atol=0)
    layer.train()
    packed, rows = pack(x, keep)
    loss = layer.forward_packed(packed, rows).auxiliary_loss
    squares = []
    for h in range(HEADS):
        tokens = [
            F.layer_norm(layer.project_heads(name, x)[b, h, i], (D,), eps=1e-6)
            for name in (("k",) if shared else ("q", "k"))
            for b, i in keep.nonzero().tolist()
        ]
        groups = [[] for _ in range(CLUSTERS)]
        for token in tokens:
            nearest = int((means[h] @ token).argmax())
            groups[nearest].append(token)
            squares.append((token - means[h, nearest]).square().mean())
        for c, group in enumerate(groups):
            if group:
                sums[h, c] = 0.9 * sums[h, c] + 0.1 * sum(group)
                counts[h, c] = 0.9 * counts[h, c] + 0.1 * len(group)
    assert_close(layer.sums, sums.detach())
    assert_close(layer.counts, counts)
    assert_close(loss, 0.5 * torch.stack(squares).mean())
    loss.backward()
    assert layer.project["k"].weight.grad.abs().max() > 0
    assert layer.project["v"].weight.grad is None


def test_the_second_loss_weighs_little():
    """As theirs does: a weight of 1 draws all tokens into one point."""
    peer = importlib.import_module("routing_transformer.routing_transformer")
    layer = regard.attention("routing", width=WIDTH, heads=HEADS)
    assert layer.commitment == inspect.signature(peer.Kmeans).parameters["commitment"].default


def test_across():
    """Role "cross": centroids pick from the memory, a query reads what the nearest one picked, whole and in steps."""
    torch.manual_seed(0)
    layer = regard.attention("routing(clusters=4, window=5)", width=WIDTH, heads=HEADS, role="cross").double().eval()
    x, memory = torch.randn(2, N, WIDTH, dtype=torch.float64), torch.randn(2, 30, WIDTH, dtype=torch.float64)
    q, k = (F.layer_norm(layer.project_heads(name, y), (D,), eps=1e-6) for name, y in (("q", x), ("k", memory)))
    near = torch.einsum("hcd,bhsd->bhcs", layer.centroids, k)
    own = torch.einsum("bhtd,hcd->bhtc", q, layer.centroids).argmax(-1)
    seen = torch.zeros_like(near, dtype=torch.bool).scatter(3, near.topk(5, 3).indices, True)
    seen = seen.gather(2, own[..., None].expand(-1, -1, -1, 30))
    expected = F.scaled_dot_product_attention(q, k, layer.project_heads("v", memory), attn_mask=seen)
    expected = layer.output(expected.transpose(1, 2).flatten(2))
    assert_close(layer(x, memory=memory), expected)
    state = layer.start(2, memory=memory)
    assert_close(torch.cat([layer.extend(x[:, t : t + 1], state)[0] for t in range(N)], 1), expected)


def test_centroids_learn_across_from_real_tokens_only():
    """Padding of queries and of the memory reaches neither the centroids nor their counts."""
    torch.manual_seed(0)
    layer = regard.attention("routing(clusters=3, decay=0.5)", width=WIDTH, heads=HEADS, role="cross").train()
    other = copy.deepcopy(layer)
    x, memory = torch.randn(1, N, WIDTH), torch.randn(1, 9, WIDTH)
    layer(x[:, 4:], memory=memory[:, :6])
    keep, memory_keep = torch.arange(N)[None] >= 4, torch.arange(9)[None] < 6
    before = other.sums.clone()
    other(x, keep=keep, memory=memory, memory_keep=memory_keep)
    assert (other.sums - before).abs().max() > 1e-3
    assert_close(other.sums, layer.sums)
    assert_close(other.counts, layer.counts)


@pytest.mark.parametrize("role", ["self", "causal"])
def test_strided(role):
    """Of all tokens from near to far every s-th: with w = 5 of 18, those at ranks 0, 3, 6, 9 and 12."""
    layer = build(role, spec=", strided=True").eval()
    x = torch.randn(2, N, WIDTH, dtype=torch.float64)
    k, v = F.layer_norm(layer.project_heads("k", x), (D,), eps=1e-6), layer.project_heads("v", x)
    ranked = torch.einsum("hcd,bhsd->bhcs", layer.centroids, k).argsort(-1, descending=True)
    total, times = torch.zeros_like(v), torch.zeros_like(v[..., :1])
    for b, h, c in itertools.product(range(2), range(HEADS), range(CLUSTERS)):
        picked = sorted(ranked[b, h, c, [0, 3, 6, 9, 12]].tolist())
        part = [y[b, h, picked][None, None] for y in (k, k, v)]
        total[b, h, picked] += F.scaled_dot_product_attention(*part, is_causal=role == "causal")[0, 0]
        times[b, h, picked] += 1
    expected = total / times.clamp(min=1)
    assert_close(layer(x), layer.output(expected.transpose(1, 2).flatten(2)))
