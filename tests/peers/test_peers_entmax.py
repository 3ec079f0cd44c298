"""Entmax against the authors' package `entmax`: weights, outputs, and the gradients of logits and of alpha."""

import entmax as peer
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import regard
from regard.layers.attention.entmax import entmax

WIDTH, HEADS = 32, 4
KEEP = torch.tensor([[1] * 11, [0, 0, 0, *[1] * 8], [1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0]]).bool()


def theirs(alpha: float | Tensor, z: Tensor) -> Tensor:
    if isinstance(alpha, float) and alpha in (1.5, 2.0):
        return (peer.entmax15 if alpha == 1.5 else peer.sparsemax)(z, dim=-1)
    return peer.entmax_bisect(z, alpha, dim=-1, n_iter=100)


@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.5, 1.9, 2.0])
def test_weights_and_gradients(alpha, size):
    torch.manual_seed(0)
    z = (size * torch.randn(5, 300, dtype=torch.float64)).requires_grad_()
    ours, other = entmax(z, alpha - 1), theirs(alpha, z)
    # at 1.05 weights of 1e-300 are on either side of zero
    assert_close(ours, other)
    toward = torch.randn_like(z)
    mine, expected = (torch.autograd.grad((p * toward).sum(), z)[0] for p in (ours, other))
    assert_close(mine, expected, rtol=1e-5, atol=1e-8)
    if alpha >= 1.5:
        assert torch.equal(ours > 0, other > 0)


def test_learned_alpha():
    torch.manual_seed(0)
    z = torch.randn(2, HEADS, 7, 40, dtype=torch.float64).requires_grad_()
    alpha = torch.tensor([1.05, 1.3, 1.6, 1.95], dtype=torch.float64).view(1, HEADS, 1, 1).requires_grad_()
    ours, other = entmax(z, alpha - 1), theirs(alpha, z)
    assert_close(ours, other)
    toward = torch.randn_like(z)
    mine, expected = (torch.autograd.grad((p * toward).sum(), (z, alpha)) for p in (ours, other))
    assert_close(mine, expected)


@pytest.mark.parametrize("beta", [0.05, 0.5, 0.8, 1.0])
def test_gradients_are_finite_differences(beta):
    torch.manual_seed(0)
    z = torch.randn(3, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: entmax(z, beta), z)
    if beta < 1:
        betas = torch.full((3, 1), beta, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(entmax, (z, betas))


def test_one_step_from_softmax():
    torch.manual_seed(0)
    z = torch.randn(3, 50)
    assert_close(entmax(z, torch.tensor(1e-4)), torch.softmax(z, -1), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("keys", [1, 2, 1000, 20000])
@pytest.mark.parametrize("beta", [0.5, 0.9, 1.0])
def test_newton_arrives(beta, keys):
    """Rows that take it long: a ramp, a narrow bell, equal logits, a geometric fall, one far ahead."""
    ramp = torch.arange(keys, dtype=torch.float64)
    rows = [ramp / keys, 0.1 * torch.randn(keys, dtype=torch.float64), 0 * ramp, 0.5**ramp, -1e4 * ramp]
    z = torch.stack(rows)
    assert_close(entmax(z, beta), theirs(1 + beta, z))


@pytest.mark.parametrize("spec", ["entmax(alpha=1.5)", "entmax(alpha=2)", "entmax(alpha=1.3)", "entmax"])
@pytest.mark.parametrize("role", ["self", "causal", "cross"])
def test_layer(role, spec):
    torch.manual_seed(0)
    layer = regard.attention(spec, width=WIDTH, heads=HEADS, role=role).double()
    x, memory = torch.randn(3, 11, WIDTH).double(), torch.randn(3, 11, WIDTH).double()
    source = memory if role == "cross" else x
    q, k, v = (layer.project_heads(name, x if name == "q" else source) for name in "qkv")
    logits = q @ k.mT / (WIDTH // HEADS) ** 0.5
    hidden = ~KEEP[:, None, None] | (torch.ones(11, 11).triu(1).bool() if role == "causal" else False)
    # theirs stop with an error at a query that sees nothing, which only padding does
    logits = logits.masked_fill(hidden & ~hidden.all(-1, keepdim=True), -torch.inf)
    alpha = layer.alphas().view(1, HEADS, 1, 1) if layer.alpha == "learned" else float(layer.alpha)
    expected = (theirs(alpha, logits) @ v).transpose(1, 2).flatten(2) @ layer.output.weight.T
    given = {"memory": memory, "memory_keep": KEEP} if role == "cross" else {"keep": KEEP}
    rows = KEEP if role != "cross" else torch.ones_like(KEEP)
    assert_close(layer(x, **given)[rows], expected[rows])
    maps = layer.weights(x, **given).transpose(1, 2)[rows]
    if spec != "entmax(alpha=1.3)":
        assert (maps == 0).sum() > hidden.expand(3, HEADS, 11, 11).transpose(1, 2)[rows].sum(), "no weight is zero"


def test_alphas_are_told():
    layer = regard.attention("entmax", width=WIDTH, heads=HEADS)
    assert_close(layer.alphas(), 1 + torch.sigmoid(layer.a))
    assert_close(regard.attention("entmax(alpha=1.5)", width=WIDTH, heads=2).alphas(), torch.tensor([1.5, 1.5]))


@pytest.mark.parametrize("alpha", [0.5, 2.5])
def test_alpha_out_of_range(alpha):
    with pytest.raises(ValueError, match=r"from 1 \(softmax\) to 2 \(sparsemax\), or 'learned', got"):
        regard.attention(f"entmax(alpha={alpha})", width=WIDTH, heads=HEADS)


def test_gradients_reach_alpha_in_half_precision():
    """Where the authors' bisection gives NaN."""
    torch.manual_seed(0)
    layer = regard.attention("entmax", width=WIDTH, heads=HEADS, role="causal").bfloat16()
    layer(30 * torch.randn(2, 20, WIDTH).bfloat16()).float().square().sum().backward()
    assert layer.a.grad.isfinite().all()
    assert layer.a.grad.any()
