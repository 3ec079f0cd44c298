"""Attention dropout: in training alone, unbiased, the same on the way back, refused where no weights are single."""

import pytest
import torch
from torch.testing import assert_close

import regard
from regard.core.rows import Memory, Rows
from regard.kernels.dropout import dropped
from regard.spec import ATTENTION

PAIRS = [name for name in ATTENTION.names() if regard.facts(ATTENTION.find(name).examples[0]).pairs]
CASES = [(name, role) for name in PAIRS for role in regard.facts(ATTENTION.find(name).examples[0]).roles]


def build(name: str, role: str, dropout: float = 0.4, **options):
    torch.manual_seed(0)
    spec = ATTENTION.find(name).examples[0]
    layer = regard.attention(spec, width=16, heads=4, role=role, dropout=dropout, **options).double()
    memory = {"memory": torch.randn(1, 7, 16, dtype=torch.float64)} if role == "cross" else {}
    return layer, torch.randn(1, 9, 16, dtype=torch.float64), memory


@pytest.mark.parametrize(("name", "role"), CASES)
def test_only_in_training_and_the_same_on_average(name, role):
    layer, x, memory = build(name, role)
    plain, _, _ = build(name, role, dropout=0.0)
    layer.eval()
    exact = layer(x, **memory)
    assert_close(exact, plain.eval()(x, **memory))
    layer.train()
    many = {part: value.expand(2000, -1, -1) for part, value in memory.items()}
    torch.manual_seed(1)
    with torch.no_grad():
        drawn = layer(x.expand(2000, -1, -1), **many)
    assert drawn.std(0).max() > 1e-2
    # the mean of 2,000 draws, within six of its standard errors
    error = (drawn.mean(0) - exact[0]).abs()
    assert (error <= 6 * drawn.std(0) / 2000**0.5 + 1e-12).all()
    torch.manual_seed(1)
    with torch.no_grad():
        assert_close(layer(x.expand(2000, -1, -1), **many), drawn, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in PAIRS),
        *(
            (name, {"position": position})
            for name in ("softmax", "entmax")
            for position in ("alibi", "shaw(distance=3)")
        ),
        ("softmax", {"kv_heads": 2}),
    ],
)
def test_the_backward_pass_drops_the_same_weights(name, options):
    """For the weights that were drawn the output is affine in the values: sum(dv * v) = sum(g * (o(v) - o(0)))."""
    role = regard.facts(ATTENTION.find(name).examples[0]).roles[-1]
    layer, x, memory = build(name, "causal" if "position" in options else role, **options)
    layer.train()
    rows, memory = Rows.full(x), Memory(memory["memory"], None) if memory and "position" not in options else None
    query, source = layer.project_inputs(x, rows, memory)
    source["v"] = source["v"].detach().requires_grad_()

    def read(v: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return layer.attend_projected(rows, query, source | {"v": v}, None, memory)[0]

    o = read(source["v"])
    g = torch.randn_like(o)
    (dv,) = torch.autograd.grad((o * g).sum(), source["v"])
    assert_close((dv * source["v"]).sum(), (g * (o - read(torch.zeros_like(source["v"])))).sum())
    assert (o - layer.eval().attend_projected(rows, query, source, None, memory)[0]).abs().max() > 1e-3


def test_a_step_of_decoding_and_a_memory():
    layer, x, _ = build("softmax", "cross")
    y = layer.train().forward_packed(x, memory=Memory(torch.randn(1, 7, 16, dtype=torch.float64), None)).y
    assert y.isfinite().all()
    layer, x, _ = build("softmax", "causal")
    y, _ = layer.eval().extend(x, layer.start(1))
    assert_close(y, layer(x))


def test_share():
    torch.manual_seed(0)
    x = torch.ones(100_000)
    for p in (0.1, 0.5):
        y = dropped(x, p)
        assert abs((y == 0).double().mean().item() - p) < 0.01
        assert_close(y[y > 0], torch.full_like(y[y > 0], 1 / (1 - p)), rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", [name for name in ATTENTION.names() if name not in PAIRS])
def test_the_others_refuse(name):
    spec = ATTENTION.find(name).examples[0]
    with pytest.raises(ValueError, match="no attention dropout"):
        regard.attention(spec, width=16, heads=4, role=regard.facts(spec).roles[0], dropout=0.1)


def test_sizes_and_conversion():
    for wrong in (-0.1, 1.0, "much"):
        with pytest.raises(ValueError, match="dropout must be"):
            regard.attention("softmax", width=16, heads=4, dropout=wrong)
    module = torch.nn.MultiheadAttention(16, 4, dropout=0.3)
    assert regard.from_torch(module).shape.dropout == 0.3
    assert regard.to_torch(regard.from_torch(module)).dropout == 0.3
    assert regard.from_torch(module, attention="local(window=2)").shape.dropout == 0
