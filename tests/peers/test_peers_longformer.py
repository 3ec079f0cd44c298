"""Longformer against Hugging Face's layer; ETC, which has no public PyTorch layer, against dense attention over both
sequences with the score of every pair written out."""

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from torch.testing import assert_close
from transformers import LongformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

import regard
from regard.layers.attention import etc

WIDTH, HEADS = 24, 3


def longformers(window: int, globals: int) -> tuple:
    """Our layer and theirs with the same weights; theirs counts the window on both sides and has no output layer."""
    torch.manual_seed(0)
    config = LongformerConfig(hidden_size=WIDTH, num_attention_heads=HEADS, attention_window=[2 * window])
    theirs = LongformerSelfAttention(config, layer_id=0).eval()
    spec = f"longformer(window={window}, globals={globals})"
    ours = regard.attention(spec, width=WIDTH, heads=HEADS, bias=True)
    with torch.no_grad():
        for name, word in (("q", "query"), ("k", "key"), ("v", "value")):
            ours.project[name].load_state_dict(getattr(theirs, word).state_dict())
            if globals:
                ours.project[f"global_{name}"].load_state_dict(getattr(theirs, f"{word}_global").state_dict())
        ours.output.weight.copy_(torch.eye(WIDTH))
        ours.output.bias.zero_()
    return ours, theirs


@pytest.mark.parametrize(("window", "globals"), [(4, 1), (4, 7), (16, 3), (8, 0)])
def test_longformer(window, globals):
    ours, theirs = longformers(window, globals)
    # theirs takes whole windows only
    x = torch.randn(3, 96, WIDTH)
    count = torch.tensor([96, 61, 33])[:, None]
    at = torch.arange(96)
    kind = torch.where(at < count, 0.0, -10000.0) + torch.where(at < globals, 10000.0, 0.0)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    keep = at < count
    y = ours(mine, keep=keep)
    z = theirs(other, kind, is_index_masked=kind < 0, is_index_global_attn=kind > 0, is_global_attn=globals > 0)[0]
    assert_close(y[keep], z[keep])
    toward = torch.randn(y[keep].shape)
    (y[keep] * toward).sum().backward()
    (z[keep] * toward).sum().backward()
    assert_close(mine.grad, other.grad)
    for name, word in (("q", "query"), ("k", "key"), ("v", "value")):
        assert_close(ours.project[name].weight.grad, getattr(theirs, word).weight.grad)
        if globals:
            got = ours.project[f"global_{name}"].weight.grad
            assert_close(got, getattr(theirs, f"{word}_global").weight.grad)


def test_longformer_starts_with_equal_projections():
    layer = regard.attention("longformer(window=4, globals=2)", width=WIDTH, heads=HEADS)
    for name in ("q", "k", "v"):
        assert_close(layer.project[f"global_{name}"].weight, layer.project[name].weight, rtol=0, atol=0)
    assert set(regard.attention("longformer(globals=0)", width=WIDTH, heads=HEADS).project) == {"q", "k", "v"}


def test_longformer_dilation():
    """Without global tokens, a dilated window is a window in each residue class."""
    sizes = {"width": WIDTH, "heads": HEADS}
    torch.manual_seed(0)
    wide, near = (regard.attention(f"longformer(window=5, globals=0, dilation={d})", **sizes) for d in (3, 1))
    near.load_state_dict(wide.state_dict())
    x = torch.randn(2, 50, WIDTH)
    y = wide(x)
    for first in range(3):
        assert_close(y[:, first::3], near(x[:, first::3]))


def dense_etc(layer, x: Tensor) -> Tensor:
    """One unpadded sequence [T, E]: all pairs at once, relations looked up, what is out of reach masked."""
    g, m, H, T = layer.globals, layer.distance, HEADS, len(x)
    at = torch.arange(T)
    i, j = at[:, None], at[None]
    away = (j - i).clamp(-m, m)
    relation = torch.where(away >= 0, away, m - away)
    across = (i < g) != (j < g)
    linked = torch.zeros(T, T, dtype=torch.bool)
    if isinstance(layer.segment, tuple):
        owner = torch.arange(len(layer.segment)).repeat_interleave(torch.tensor(layer.segment))[: max(T - g, 0)]
        for place, token in enumerate(owner.tolist(), g):
            linked[token, place] = linked[place, token] = True
    elif layer.segment is not None:
        linked = (torch.maximum(i, j) - g) // layer.segment == torch.minimum(i, j)
    relation = torch.where(across, 2 * m + 1 + linked.long(), relation)
    seen = (i < g) | (j < g) | ((j - i).abs() <= layer.radius)

    def projected(linear: Module, x: Tensor) -> Tensor:
        """Tokens by the projection of their sequence, where there are two."""
        both = (linear.first, linear.others) if hasattr(linear, "first") else (linear, linear)
        return torch.cat([side(part) for side, part in zip(both, (x[:g], x[g:]), strict=True)])

    def heads(name: str) -> Tensor:
        return projected(layer.project[name], x).view(T, H, -1).transpose(0, 1)

    q, k, v = (heads(name) for name in ("q", "k", "v"))
    # what the global queries read, which may be projected for them
    wide_k, wide_v = (
        heads(f"wide_{name}") if "wide_k" in layer.project else part for name, part in (("k", k), ("v", v))
    )
    query = (i < g).long().expand(T, T)
    e = torch.stack([layer.long_e, layer.global_e])[query, relation]  # [T, T, H, D]
    b = torch.stack([layer.long_b, layer.global_b])[query, relation]  # [T, T, H]
    products = torch.where(i < g, q @ wide_k.mT, q @ k.mT)
    scores = products + torch.einsum("hid,ijhd->hij", q, e) + b.permute(2, 0, 1)
    weights = (scores / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    o = torch.where(i < g, weights @ wide_v, weights @ v)
    return projected(layer.output, o.transpose(0, 1).flatten(1))


@pytest.mark.parametrize("chunk", [1, etc.CHUNK])
@pytest.mark.parametrize(
    "options",
    [
        "globals=5, radius=3, distance=2",
        "globals=9, radius=20, distance=12, segment=11",
        "globals=1, radius=2, distance=30, segment=3",
        "globals=70, radius=7, distance=4",
        "globals=4, radius=90, distance=8, segment=40",
        "globals=5, radius=3, distance=4, segment=(7, 1, 30), projections='query'",
        "globals=5, radius=6, distance=9, segment=(7, 1, 30), projections='pair', output='separate'",
        "globals=3, radius=2, distance=2, projections='pair'",
    ],
)
def test_etc(options, chunk, monkeypatch):
    monkeypatch.setattr(etc, "CHUNK", chunk)
    torch.manual_seed(0)
    layer = regard.attention(f"etc({options})", width=WIDTH, heads=HEADS, bias=True).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(3, 101, WIDTH, dtype=torch.float64)
    count = [101, 64, 3]
    keep = torch.arange(101) < torch.tensor(count)[:, None]
    toward = torch.randn_like(x)
    results = []
    for dense in (False, True):
        layer.zero_grad()
        given = x.clone().requires_grad_()
        if dense:
            y = torch.cat([dense_etc(layer, row[:n]) for row, n in zip(given, count, strict=True)])
        else:
            y = layer(given, keep=keep)[keep]
        (y * toward[keep]).sum().backward()
        results.append({"y": y.detach(), "x": given.grad, **{n: p.grad for n, p in layer.named_parameters()}})
    for name, expected in results[1].items():
        assert_close(results[0][name], expected, msg=lambda text, name=name: f"{name}: {text}")


def test_etc_has_an_output_projection_for_each_sequence():
    layer = regard.attention("etc(globals=3, radius=2, distance=2, output='separate')", width=WIDTH, heads=HEADS)
    x = torch.randn(2, 9, WIDTH)
    before = layer(x)
    torch.nn.init.zeros_(layer.output.first.weight)
    after = layer(x)
    assert not after[:, :3].any()
    assert_close(after[:, 3:], before[:, 3:])
    assert before[:, :3].abs().min() > 0


def test_etc_refuses_more_segments_than_global_tokens():
    with pytest.raises(ValueError, match="gives 3 segments, and there are 2 global tokens"):
        regard.attention("etc(globals=2, segment=(3, 4, 5))", width=WIDTH, heads=HEADS)
