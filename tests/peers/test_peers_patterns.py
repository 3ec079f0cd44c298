"""The patterns of keys (local, strided, globals, sparse) against public implementations and against dense attention
under a mask written out from the sets of the papers."""

import pytest
import torch
import torch.nn.functional as F
from local_attention import LocalAttention
from torch import Tensor
from torch.testing import assert_close
from transformers import GPTNeoConfig
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

import regard
from regard.core.tally import Tally
from regard.testing.cases import Case, inputs
from regard.testing.suite import CHECKS

# what query i sees of key j, before causality
SEES = {
    "local(window=1)": lambda i, j: abs(i - j) <= 1,
    "local(window=16)": lambda i, j: abs(i - j) <= 16,
    "local(window=70)": lambda i, j: abs(i - j) <= 70,
    "strided(stride=7)": lambda i, j: (i - j) % 7 == 0,
    "strided(stride=60)": lambda i, j: (i - j) % 60 == 0,
    "strided(stride=500)": lambda i, j: i == j,
    "globals(tokens=1)": lambda i, j: i == 0 or j == 0 or i == j,
    "globals(tokens=20)": lambda i, j: i < 20 or j < 20 or i == j,
    "globals(tokens=100)": lambda i, j: i < 100 or j < 100 or i == j,
    "sparse(stride=7)": lambda i, j: abs(i - j) <= 7 or (i - j) % 7 == 0,
    "sparse(stride=32)": lambda i, j: abs(i - j) <= 32 or (i - j) % 32 == 0,
    "sparse(stride=99)": lambda i, j: abs(i - j) <= 99 or (i - j) % 99 == 0,
    # l is the root of the length, rounded
    "sparse(longest=301)": lambda i, j: abs(i - j) <= 17 or (i - j) % 17 == 0,
    "sparse(pattern='fixed', longest=110)": lambda i, j: i // 10 == j // 10 or j % 10 >= 2,
    "sparse(pattern='fixed', stride=7, summary=1)": lambda i, j: i // 7 == j // 7 or j % 7 >= 6,
    "sparse(pattern='fixed', stride=7, summary=7)": lambda i, j: True,
    "sparse(pattern='fixed', stride=16, summary=3)": lambda i, j: i // 16 == j // 16 or j % 16 >= 13,
    "sparse(pattern='fixed', stride=60, summary=8)": lambda i, j: i // 60 == j // 60 or j % 60 >= 52,
    "sparse(pattern='fixed', stride=100, summary=8)": lambda i, j: i // 100 == j // 100 or j % 100 >= 92,
}


def heads(T: int, *, B: int = 2, H: int = 3, D: int = 8, dtype=torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, T, D, generator=draw, dtype=dtype).requires_grad_() for _ in range(3)]


def compare(ours: Tensor, theirs: Tensor, leaves: list[Tensor]) -> None:
    """Outputs and gradients."""
    assert_close(ours, theirs)
    toward = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=ours.dtype)
    mine = torch.autograd.grad((ours * toward).sum(), leaves)
    for got, expected in zip(mine, torch.autograd.grad((theirs * toward).sum(), leaves), strict=True):
        assert_close(got, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T", [1, 8, 100, 301])
@pytest.mark.parametrize("spec", SEES)
def test_sets(spec, T, causal):
    visible = torch.tensor([[SEES[spec](i, j) and (j <= i or not causal) for j in range(T)] for i in range(T)])
    q, k, v = heads(T)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    compare(regard.attend(spec, q, k, v, causal=causal), theirs, [q, k, v])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 4, 32, 128])
def test_local_attention(window, causal):
    theirs = LocalAttention(window, causal=causal, exact_windowsize=True, autopad=True, use_rotary_pos_emb=False)
    q, k, v = heads(100)
    # without a mask their bidirectional window sees the zeros it pads with
    keep = torch.ones(2, 100, dtype=torch.bool)
    ours = regard.attend(f"local(window={window})", q, k, v, causal=causal)
    compare(ours, theirs(q, k, v, mask=keep), [q, k, v])


def test_local_attention_padding():
    theirs = LocalAttention(4, causal=False, exact_windowsize=True, autopad=True, use_rotary_pos_emb=False)
    q, k, v = heads(30)
    keep = torch.arange(30) < torch.tensor([30, 17])[:, None]
    shown = keep[:, None, :, None]
    ours = torch.where(shown, regard.attend("local(window=4)", q, k, v, keep=keep), 0)
    compare(ours, torch.where(shown, theirs(q, k, v, mask=keep), 0), [q, k, v])


def test_gpt_neo():
    """Their window of w tokens counts the query itself, and their products are not scaled."""
    torch.manual_seed(0)
    config = GPTNeoConfig(
        hidden_size=32, num_heads=4, num_layers=1, attention_types=[[["local"], 1]], window_size=9,
        max_position_embeddings=64, attention_dropout=0.0, resid_dropout=0.0,
    )  # fmt: skip
    theirs = GPTNeoSelfAttention(config, "local", 0)
    ours = regard.attention("local(window=8)", width=32, heads=4, role="causal", bias=True)
    with torch.no_grad():
        ours.project["q"].weight.copy_(theirs.q_proj.weight * 8**0.5)
        ours.project["k"].weight.copy_(theirs.k_proj.weight)
        ours.project["v"].weight.copy_(theirs.v_proj.weight)
        for linear in ours.project.values():
            # their output alone has a bias
            linear.bias.zero_()
        ours.output.load_state_dict(theirs.out_proj.state_dict())
    x = torch.randn(2, 50, 32, requires_grad=True)
    compare(ours(x), theirs(x)[0], [x])


# the suite on strides whose linear part is too large for counting exponents

MORE = ("sparse(stride=9)", "sparse(pattern='fixed', stride=9, summary=2)", "strided(stride=9)")


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in ("compile", "export") else [])
        for name in CHECKS
        if name != "cost"
    ],
)
@pytest.mark.parametrize("role", ["self", "causal"])
@pytest.mark.parametrize("spec", MORE)
def test_more(spec, role, check):
    CHECKS[check](Case(spec, role))


@pytest.mark.parametrize(
    "spec",
    ["local(window=9)", "strided(stride=4)", "globals(tokens=9)", "sparse(stride=9)", "sparse(pattern='fixed')"],
)
def test_long_prefill(spec):
    """Many tokens at once behind a state: as a whole sequence, and without a tensor of N x N."""
    T = 2100
    case = Case(spec, "causal")
    layer, x = case.build(heads=1, dtype=torch.float32), inputs(case, T, B=2, dtype=torch.float32)["x"]
    keep = torch.ones(2, 20, dtype=torch.bool)
    keep[1, 12:] = False
    with torch.no_grad():
        for ragged in (None, keep):
            first, state = layer.extend(x[:, :20], layer.start(2), keep=ragged)
            with Tally() as tally:
                rest = layer.extend(x[:, 20:], state)[0]
            assert tally.largest < 4 * T * T
            joined = torch.cat([first, rest], 1)
            assert_close(joined[0], layer(x[:1])[0])
            own = torch.cat([x[1, :20][keep[1]] if ragged is not None else x[1, :20], x[1, 20:]])
            assert_close(rest[1], layer(own[None])[0, len(own) - len(rest[1]) :])


@pytest.mark.parametrize(
    ("spec", "option"),
    [
        ("local(window=0)", "window"),
        ("strided(stride=0)", "stride"),
        ("globals(tokens=0)", "tokens"),
        ("sparse(stride=0)", "stride"),
        ("sparse(pattern='fixed', stride=4)", "summary"),
        ("sparse(pattern='fixed', stride=4, summary=0)", "summary"),
        ("sparse(pattern='random')", "pattern"),
    ],
)
def test_options(spec, option):
    with pytest.raises(ValueError, match=f"option '{option}'"):
        regard.attention(spec, width=16, heads=4)
