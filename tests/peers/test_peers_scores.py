"""The score functions against public implementations, and against the formulas of the papers written another way."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import GPTNeoConfig
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

import regard

WIDTH, HEADS, D = 32, 4, 8
KEEP = torch.tensor([[1] * 11, [0, 0, 0, *[1] * 8], [1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0]]).bool()
MEMORY_KEEP = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1] * 7, [0, 0, 1, 0, 1, 1, 1]]).bool()


def build(spec: str, role: str = "self", **sizes) -> regard.Attention:
    torch.manual_seed(0)
    layer = regard.attention(spec, **({"width": WIDTH, "heads": HEADS, "role": role} | sizes)).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return layer


def draw(*sizes: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*sizes, dtype=dtype)


def heads_of(layer: regard.Attention, name: str, x: Tensor) -> Tensor:
    """[B, H, n, D], written out: head h reads rows h*D to h*D + D of the projection."""
    weight = layer.project[name].weight.view(-1, D, x.shape[-1])
    return torch.einsum("bne,hde->bhnd", x, weight)


def answer(layer: regard.Attention, logits: Tensor, v: Tensor) -> Tensor:
    """Softmax of the logits over v, joined and put through the output."""
    o = torch.einsum("bhts,bhsd->bthd", torch.softmax(logits, -1), v)
    return o.flatten(2) @ layer.output.weight.T


# scaled and unscaled products


@pytest.mark.parametrize(("spec", "scale"), [("softmax", D**-0.5), ("dot", 1.0)])
@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("causal", "S"), [(False, 11), (True, 11), (False, 7)])
def test_products_are_torch_sdpa(spec, scale, kv_heads, padded, causal, S):
    q, k, v = draw(3, HEADS, 11, D), draw(3, kv_heads, S, D), draw(3, kv_heads, S, D)
    keep = (KEEP if S == 11 else MEMORY_KEEP) if padded else torch.ones(3, S).bool()
    visible = keep[:, None, None]
    if causal:
        visible = visible & torch.ones(11, S).tril().bool()
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
    got = regard.attend(spec, q, k, v, keep=keep if padded else None, causal=causal)
    real = keep if S == 11 else torch.ones(3, 11).bool()
    assert_close(got.transpose(1, 2)[real], expected.transpose(1, 2)[real])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("role", ["self", "causal", "cross"])
def test_softmax_is_torch_multihead(role, padded, bias):
    memory_width = 24 if role == "cross" else None
    layer = build("softmax", role, bias=bias, memory_width=memory_width)
    peer = nn.MultiheadAttention(
        WIDTH, HEADS, bias=bias, kdim=memory_width, vdim=memory_width, batch_first=True, dtype=torch.float64
    )
    with torch.no_grad():
        projections = [layer.project[name] for name in "qkv"]
        if role == "cross":
            for name, linear in zip("qkv", projections, strict=True):
                getattr(peer, f"{name}_proj_weight").copy_(linear.weight)
        else:
            peer.in_proj_weight.copy_(torch.cat([linear.weight for linear in projections]))
        peer.out_proj.weight.copy_(layer.output.weight)
        if bias:
            peer.in_proj_bias.copy_(torch.cat([linear.bias for linear in projections]))
            peer.out_proj.bias.copy_(layer.output.bias)
    x, memory = draw(3, 11, WIDTH).requires_grad_(), draw(3, 7, 24)
    keep = KEEP.clone() if padded else torch.ones_like(KEEP)
    # their rows that see nothing are NaN, gradients too: with a causal mask, the first token must be real
    keep[:, 0] |= role == "causal"
    given = {"keep": keep}
    if role == "cross":
        given |= {"memory": memory, "memory_keep": MEMORY_KEEP if padded else None}
    source, real = (memory, MEMORY_KEEP) if role == "cross" else (x, keep)
    # their mask is True where a token is to be ignored
    ignore = ~real if padded else None
    future = torch.ones(11, 11).triu(1).bool() if role == "causal" else None
    expected, maps = peer(
        x, source, source, key_padding_mask=ignore, attn_mask=future, need_weights=True, average_attn_weights=False
    )
    got = layer(x, **given)
    assert_close(got[keep], expected[keep])
    assert_close(layer.weights(x, **given).transpose(1, 2)[keep], maps.transpose(1, 2)[keep])
    toward = torch.where(keep[..., None], draw(*got.shape), 0)
    mine, theirs = (torch.autograd.grad((y * toward).sum(), x)[0] for y in (got, expected))
    assert_close(mine, theirs)


def test_dot_is_gpt_neo():
    torch.manual_seed(0)
    config = GPTNeoConfig(hidden_size=WIDTH, num_heads=HEADS, num_layers=1, attention_types=[[["global"], 1]])
    peer = GPTNeoSelfAttention(config, "global", layer_id=0).eval()
    layer = build("dot", "causal", bias=True).float()
    with torch.no_grad():
        for name in "qkv":
            layer.project[name].weight.copy_(getattr(peer, f"{name}_proj").weight)
            layer.project[name].bias.zero_()
        layer.output.load_state_dict(peer.out_proj.state_dict())
    x = draw(3, 11, WIDTH, dtype=torch.float32)
    expected, maps = peer(x)
    assert_close(layer(x), expected)
    assert_close(layer.weights(x), maps)
    with torch.no_grad():
        _, state = layer.extend(x[:, :5], layer.start(3))
        assert_close(layer.extend(x[:, 5:], state)[0], expected[:, 5:])


# learned scores


@pytest.mark.parametrize(("spec", "scale"), [("multiplicative", D**-0.5), ("multiplicative(scaled=False)", 1.0)])
@pytest.mark.parametrize("role", ["self", "cross"])
def test_multiplicative_is_luong_general(role, spec, scale):
    layer = build(spec, role)
    x = draw(2, 11, WIDTH)
    memory = draw(2, 7, WIDTH) if role == "cross" else None
    source = x if memory is None else memory
    q, k, v = heads_of(layer, "q", x), heads_of(layer, "k", source), heads_of(layer, "v", source)
    logits = scale * torch.einsum("bhta,hac,bhsc->bhts", q, layer.between, k)
    assert_close(layer(x, memory=memory), answer(layer, logits, v))
    assert_close(layer.weights(x, memory=memory), torch.softmax(logits, -1))


@pytest.mark.parametrize("role", ["self", "causal", "cross"])
def test_multiplicative_by_the_unit_matrix_is_dot(role):
    layer, dot = build("multiplicative(scaled=False)", role, kv_heads=2), build("dot", role, kv_heads=2)
    dot.load_state_dict(layer.state_dict(), strict=False)
    with torch.no_grad():
        layer.between.copy_(torch.eye(D).expand(HEADS, D, D))
    x, memory = draw(2, 11, WIDTH), draw(2, 7, WIDTH) if role == "cross" else None
    assert_close(layer(x, memory=memory), dot(x, memory=memory))


@pytest.mark.parametrize("spec", ["bilinear", "bilinear(rank=3)", "bilinear(rank=13, scaled=False)"])
@pytest.mark.parametrize("role", ["self", "causal", "cross"])
def test_bilinear_is_two_maps_and_a_product(spec, role):
    layer, general = build(spec, role), build("multiplicative(scaled=False)", role)
    x = draw(2, 11, WIDTH)
    memory = draw(2, 7, WIDTH) if role == "cross" else None
    source = x if memory is None else memory
    q, k, v = heads_of(layer, "q", x), heads_of(layer, "k", source), heads_of(layer, "v", source)
    R = layer.left.shape[1]
    scale = 1.0 if "scaled=False" in spec else R**-0.5
    left, right = torch.einsum("bhtd,hrd->bhtr", q, layer.left), torch.einsum("bhsd,hrd->bhsr", k, layer.right)
    o = F.scaled_dot_product_attention(left, right, v, is_causal=role == "causal", scale=scale)
    assert_close(layer(x, memory=memory), o.transpose(1, 2).flatten(2) @ layer.output.weight.T)
    # a factorisation of Luong's matrix
    general.load_state_dict(layer.state_dict(), strict=False)
    with torch.no_grad():
        general.between.copy_(scale * torch.einsum("hra,hrc->hac", layer.left, layer.right))
    assert_close(general(x, memory=memory), layer(x, memory=memory))


@pytest.mark.parametrize("spec", ["multiplicative", "bilinear"])
def test_learned_scores_start_as_wide_as_softmax(spec):
    """Logits of unit queries and keys with variance 1, from matrices no smaller than those of the projections: what
    one step of Adam changes is then a small part of them."""
    torch.manual_seed(0)
    layer = regard.attention(spec, width=128, heads=1, role="cross")
    own = [part for name, part in layer.named_parameters() if "." not in name]
    with torch.no_grad():
        q, k = torch.randn(2, 1, 1, 300, 128)
        turned = q @ layer.between if spec == "multiplicative" else q @ layer.left.mT @ layer.right
        logits = turned @ k.mT * layer.factor
    assert_close(logits.std(), torch.tensor(1.0), rtol=0.1, atol=0.0)
    assert all(part.std() > 0.9 * 128**-0.5 for part in own)


@pytest.mark.parametrize("role", ["self", "causal", "cross"])
def test_additive_is_luong_concat(role):
    """v^T tanh(W [h_t; h_s]) with one matrix on the two vectors of the layer's input joined end to end."""
    layer = build("additive", role, bias=True)
    x = draw(2, 19, WIDTH)
    memory = draw(2, 23, WIDTH) if role == "cross" else None
    source = x if memory is None else memory
    fused = torch.cat([layer.project["q"].weight, layer.project["k"].weight], 1).view(HEADS, D, 2 * WIDTH)
    shift = (layer.project["q"].bias + layer.project["k"].bias).view(HEADS, D) + layer.offset
    T, S = x.shape[1], source.shape[1]
    pairs = torch.cat([x[:, :, None].expand(-1, -1, S, -1), source[:, None].expand(-1, T, -1, -1)], -1)
    hidden = torch.tanh(torch.einsum("htx,bijx->bhijt", fused, pairs) + shift[:, None, None])
    logits = torch.einsum("ht,bhijt->bhij", layer.reading, hidden)
    if role == "causal":
        logits = logits.masked_fill(torch.ones(T, S).triu(1).bool(), -torch.inf)
    v = heads_of(layer, "v", source) + layer.project["v"].bias.view(HEADS, 1, D)
    expected = answer(layer, logits, v) + layer.output.bias
    assert_close(layer(x, memory=memory), expected)


def test_additive_steps_a_recurrent_decoder():
    """One head, a query and a memory of different width, one step at a time: Bahdanau's search over the annotations."""
    layer = build("additive", "cross", width=20, heads=1, head_width=D, memory_width=WIDTH, out_width=WIDTH)
    memory, steps = draw(3, 7, WIDTH), draw(3, 5, 20)
    W_a, U_a = layer.project["q"].weight, layer.project["k"].weight
    state = layer.start(3, memory=memory, memory_keep=MEMORY_KEEP)
    for t in range(5):
        s = steps[:, t]
        energies = torch.tanh((s @ W_a.T)[:, None] + memory @ U_a.T + layer.offset[0]) @ layer.reading[0]
        shares = torch.softmax(energies.masked_fill(~MEMORY_KEEP, -torch.inf), -1)
        context = torch.einsum("bs,bse->be", shares, memory @ layer.project["v"].weight.T) @ layer.output.weight.T
        y, state = layer.extend(s[:, None], state)
        assert_close(y[:, 0], context)


# positions


def test_location_reads_no_key():
    layer = build("location(longest=16)", "causal")
    x = draw(2, 11, WIDTH)
    # all scores of the table first, cut to the length and masked before the softmax
    scores = torch.einsum("bhtd,hld->bhtl", heads_of(layer, "q", x), layer.table)[..., :11]
    scores = scores.masked_fill(torch.ones(11, 11).triu(1).bool(), -torch.inf)
    assert_close(layer(x), answer(layer, scores, heads_of(layer, "v", x)))
    assert set(layer.project) == {"q", "v"}


def test_location_refuses_what_lies_beyond_the_table():
    layer = build("location(longest=8)", "causal")
    x = draw(2, 9, WIDTH)
    words = r"table of 8 positions, got 9 tokens.*location\(longest=9\)"
    with pytest.raises(ValueError, match=words):
        layer(x)
    _, state = layer.extend(x[:, :8], layer.start(2))
    with pytest.raises(ValueError, match=words):
        layer.extend(x[:, 8:], state)
    with pytest.raises(ValueError, match=words):
        build("location(longest=8)", "cross")(x, memory=draw(2, 9, WIDTH))


@pytest.mark.parametrize("window", [1, 3, 50])
@pytest.mark.parametrize("role", ["self", "causal", "cross"])
def test_predictive_is_luong_local_p(role, window):
    """All keys scored, the window cut out of them, the Gaussian put on top; S is the length without padding."""
    layer = build(f"predictive(window={window})", role)
    x = draw(3, 11, WIDTH)
    source, keep = (draw(3, 7, WIDTH), MEMORY_KEEP) if role == "cross" else (x, KEEP)
    s = (keep.cumsum(1) - 1)[:, None, None].double()
    q, p, k, v = (heads_of(layer, name, source if name in "kv" else x) for name in "qpkv")
    S = s.transpose(2, 3) + 1 if role == "causal" else keep.sum(1)[:, None, None, None]
    p = S * torch.sigmoid(torch.einsum("bhtd,hd->bht", torch.tanh(p), layer.reading))[..., None]
    inside = (s >= p - window) & (s <= p + window) & keep[:, None, None]
    if role == "causal":
        inside = inside & torch.ones(11, 11).tril().bool()
    scores = (torch.einsum("bhtd,bhsd->bhts", q, k) / D**0.5).masked_fill(~inside, -torch.inf)
    weights = torch.softmax(scores, -1) * torch.exp(-((s - p) ** 2) / (2 * (window / 2) ** 2))
    expected = torch.einsum("bhts,bhsd->bthd", weights, v).flatten(2) @ layer.output.weight.T
    given = {"memory": source, "memory_keep": keep} if role == "cross" else {"keep": keep}
    real = torch.ones(3, 11).bool() if role == "cross" else keep
    assert_close(layer(x, **given)[real], expected[real])
    assert_close(layer.weights(x, **given).transpose(1, 2)[real], weights.transpose(1, 2)[real])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("bilinear(rank=0)", "rank must be at least 1, got 0"),
        ("location(longest=0)", "longest must be at least 1, got 0"),
        ("predictive(window=0)", "window must be at least 1, got 0"),
    ],
)
def test_impossible_options(spec, words):
    with pytest.raises(ValueError, match=words):
        build(spec)
