"""Synthesizer against the formulas of the paper written another way: no public implementation is right."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import regard

WIDTH, HEADS, D, LONGEST, TOKENS = 32, 4, 8, 20, 11
KEEP = torch.tensor([[1] * 11, [0, 0, 0, *[1] * 8], [1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0]]).bool()
KINDS = ["dense", "random", "factorised-dense", "factorised-random", "dot"]


def build(*kinds: str, role: str = "self", options: str = "") -> regard.Attention:
    torch.manual_seed(0)
    spec = f"synthesizer(kinds={kinds!r}, longest={LONGEST}{options})"
    layer = regard.attention(spec, width=WIDTH, heads=HEADS, role=role).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name in ("hidden_offset", "dense_offset", "mixing"):
                parameter.normal_()
    return layer


def weight(layer: regard.Attention, name: str) -> Tensor:
    """[H, D, E]"""
    return layer.project[name].weight.view(HEADS, D, WIDTH)


def table(layer: regard.Attention, kind: str, x: Tensor) -> Tensor:
    """The whole table of logits, of all positions there is room for where the kind has one: [B, H, T, n]."""
    if kind == "dense":
        hidden = F.relu(torch.einsum("bte,hde->bhtd", x, weight(layer, "h")) + layer.hidden_offset[:, None])
        return torch.einsum("bhtd,hnd->bhtn", hidden, layer.dense) + layer.dense_offset[:, None]
    if kind == "random":
        return layer.random[:, : x.shape[1]].expand(len(x), -1, -1, -1)
    if kind == "factorised-random":
        return torch.einsum("htk,hnk->htn", layer.left, layer.right)[:, : x.shape[1]].expand(len(x), -1, -1, -1)
    if kind == "factorised-dense":
        # each F one linear map of the tokens, its vector tiled: each number b times, the whole vector a times
        a, b = layer.coarse.shape[1], layer.fine.shape[1]
        F_a, F_b = (part @ weight(layer, "f") for part in (layer.coarse, layer.fine))
        A, B = torch.einsum("bte,hae->bhta", x, F_a), torch.einsum("bte,hce->bhtc", x, F_b)
        return A.repeat_interleave(b, -1) * B.repeat(1, 1, 1, a)
    q, k = (torch.einsum("bte,hde->bhtd", x, weight(layer, name)) for name in "qk")
    return q @ k.mT / D**0.5


@pytest.mark.parametrize(
    "kinds", [*[(kind,) for kind in KINDS], ("random", "dot"), ("dense", "dot"), ("random", "dense"), tuple(KINDS)]
)
@pytest.mark.parametrize("role", ["self", "causal"])
def test_formula(role, kinds):
    layer = build(*kinds, role=role, options=", rank=3")
    x = torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    alphas = torch.softmax(layer.mixing, 0) if len(kinds) > 1 else torch.ones(1)
    logits = sum(a * table(layer, kind, x)[..., :TOKENS] for a, kind in zip(alphas, kinds, strict=True))
    v = torch.einsum("bte,hde->bhtd", x, weight(layer, "v"))
    future = torch.ones(TOKENS, TOKENS).triu(1).bool() if role == "causal" else torch.zeros(TOKENS, TOKENS).bool()
    # a torch kernel with the logits as its bias and nothing else
    blank = torch.zeros_like(v)
    o = F.scaled_dot_product_attention(blank, blank, v, attn_mask=logits.masked_fill(future, -torch.inf))
    assert_close(layer(x), o.transpose(1, 2).flatten(2) @ layer.output.weight.T)
    assert_close(layer.weights(x), torch.softmax(logits.masked_fill(future, -torch.inf), -1))


@pytest.mark.parametrize("longest", [1, 2, 7, 20, 64, 1000])
def test_factors_reach_every_position(longest):
    layer = regard.attention(f"synthesizer(kinds=('factorised-dense',), longest={longest})", width=WIDTH, heads=HEADS)
    a, b = layer.coarse.shape[1], layer.fine.shape[1]
    assert longest <= a * b <= longest + a
    assert layer(torch.randn(1, longest, WIDTH)).isfinite().all()


def test_padding_moves_no_row_of_the_table():
    """Positions count real tokens: the random row of a token is that of its place among them."""
    layer = build("random")
    x = torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    y = layer(x, keep=KEEP)
    for row in range(3):
        assert_close(y[row, KEEP[row]], layer(x[row : row + 1, KEEP[row]])[0])


def test_random_tables_that_stay():
    layer = build("random", "factorised-random", "dense", options=", trained=False")
    assert {"random", "left", "right"} == {name for name, _ in layer.named_buffers()}
    trained = build("random", "factorised-random", "dense")
    assert {"random", "left", "right"} <= {name for name, _ in trained.named_parameters()}
    trained.load_state_dict(layer.state_dict())
    x = torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    assert_close(layer(x), trained(x))


@pytest.mark.parametrize("kinds", [("random",), ("dense",), ("random", "factorised-dense")])
def test_decoding_keeps_the_values_alone(kinds):
    layer = build(*kinds, role="causal")
    x = torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        _, state = layer.extend(x, layer.start(3))
        assert len(state.parts) == 1
        room = LONGEST - TOKENS
        layer.extend(torch.randn(3, room, WIDTH, dtype=torch.float64), regard.select(state, torch.arange(3)))
        with pytest.raises(
            ValueError, match=r"got 21 tokens to attend to .* at most longest=20: build it with longest=21"
        ):
            layer.extend(torch.randn(3, room + 1, WIDTH, dtype=torch.float64), state)


def test_refusals():
    with pytest.raises(ValueError, match="'synthesizer' cannot take role 'cross': a random table has a row for each"):
        build("dense", "random", role="cross")
    assert build("dense", "factorised-dense", "dot", role="cross").shape.role == "cross"
    with pytest.raises(ValueError, match="'kinds' of 'synthesizer' must name each kind once"):
        build("dense", "dense")
    with pytest.raises(ValueError, match="'kinds' of 'synthesizer' must be a list of values, each 'dense' or 'random'"):
        build("sparse")


@pytest.mark.parametrize("longest", [1, 2, 3, 11, 19])
def test_factors_reach_the_longest_row(longest):
    torch.manual_seed(0)
    spec = f"synthesizer(kinds=('factorised-dense',), longest={longest})"
    layer = regard.attention(spec, width=8, heads=2).double().eval()
    x = torch.randn(1, longest, 8, dtype=torch.float64)
    assert_close(layer(x)[0], layer.reference(x[0]))
