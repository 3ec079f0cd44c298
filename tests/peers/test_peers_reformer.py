"""The Reformer against Hugging Face's LSH attention with the same hashes, and against full attention."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from transformers import ReformerConfig
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

import regard

WIDTH, HEADS, D, SEED = 24, 3, 8, 5


def pair(chunk: int, buckets: int | list[int], rounds: int, role: str) -> tuple:
    """Our layer and theirs with the same weights and hashes, float64."""
    torch.manual_seed(0)
    config = ReformerConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        attention_head_size=D,
        lsh_attn_chunk_length=chunk,
        num_buckets=buckets,
        num_hashes=rounds,
        lsh_attention_probs_dropout_prob=0.0,
        is_decoder=role == "causal",
        hash_seed=SEED,
    )
    theirs = LSHSelfAttention(config, layer_idx=0).double()
    spec = f"reformer(chunk={chunk}, buckets={buckets}, rounds={rounds})"
    ours = regard.attention(spec, width=WIDTH, heads=HEADS, role=role).double()
    with torch.no_grad():
        ours.project["k"].weight.copy_(theirs.query_key.weight)
        ours.project["v"].weight.copy_(theirs.value.weight)
        ours.output.weight.copy_(torch.eye(WIDTH))
        # theirs draws anew at each call, from this seed
        torch.manual_seed(SEED)
        drawn = torch.randn(HEADS, D, rounds, ours.directions.shape[3], dtype=torch.float64)
        ours.directions.copy_(drawn.transpose(1, 2))
    return ours, theirs


@pytest.mark.parametrize("role", ["self", "causal"])
@pytest.mark.parametrize("pad", [0, 3, 13])
@pytest.mark.parametrize(("chunk", "buckets", "rounds"), [(4, 4, 1), (8, 6, 2), (5, [2, 4], 3), (40, 2, 2)])
def test_same_hashes(chunk, buckets, rounds, pad, role):
    ours, theirs = pair(chunk, buckets, rounds, role)
    x = torch.randn(2, 40, WIDTH, dtype=torch.float64)
    # theirs takes the last chunk of a row with its padding: so no chunk is padding alone
    if pad // chunk:
        x = x[:, : 40 - pad // chunk * chunk]
    keep = (torch.arange(x.shape[1]) < 40 - pad).expand(2, -1)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = ours(mine, keep=keep)
    z = theirs(other, attention_mask=keep).hidden_states
    assert_close(y[keep], z[keep])
    toward = torch.randn_like(y[keep])
    (y[keep] * toward).sum().backward()
    (z[keep] * toward).sum().backward()
    assert_close(mine.grad, other.grad)
    for name, linear in (("k", theirs.query_key), ("v", theirs.value)):
        assert_close(ours.project[name].weight.grad, linear.weight.grad)


@pytest.mark.parametrize("role", ["self", "causal"])
@pytest.mark.parametrize(
    "spec", ["reformer(chunk=21)", "reformer(chunk=11, rounds=1)", "reformer(chunk=21, once=True)"]
)
def test_full(spec, role):
    """Two chunks that see each other: softmax attention of shared queries and keys, of unit length, without itself."""
    torch.manual_seed(0)
    layer = regard.attention(spec, width=WIDTH, heads=HEADS, role=role).double()
    x = torch.randn(2, 21, WIDTH, dtype=torch.float64)
    k, v = layer.project_heads("k", x), layer.project_heads("v", x)
    others = ~torch.eye(21, dtype=torch.bool)
    others = others.tril() if role == "causal" else others
    # the first token has none to look back at
    others[0, 0] = role == "causal"
    expected = F.scaled_dot_product_attention(k, F.normalize(k, dim=-1), v, attn_mask=others, scale=1.0)
    # 1e-6 stands beside the squares of the keys
    assert_close(layer(x), layer.output(expected.transpose(1, 2).flatten(2)), rtol=1e-5, atol=1e-5)


def test_redraw():
    torch.manual_seed(0)
    layer = regard.attention("reformer(chunk=4)", width=WIDTH, heads=HEADS)
    x = torch.randn(1, 60, WIDTH)
    y = layer(x)
    assert_close(layer(x), y, rtol=0, atol=0)
    layer.redraw()
    assert (layer(x) - y).abs().max() > 1e-3
