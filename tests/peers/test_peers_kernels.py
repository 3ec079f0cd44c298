"""Performer, linear and efficient attention against performer-pytorch; what random features converge to."""

import pytest
import torch
import torch.nn.functional as F
from performer_pytorch import FastAttention
from performer_pytorch.performer_pytorch import generalized_kernel, linear_attention, softmax_kernel
from torch.testing import assert_close

import regard
from regard.core.rows import Rows
from regard.layers.attention.draws import normal_rows


def heads(B=2, H=4, T=11, D=8, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return [torch.randn(B, H, T, D, dtype=dtype) for _ in range(3)]


def ours(spec, q, k, v, role="self", **buffers):
    H, D = q.shape[1], q.shape[3]
    layer = regard.attention(spec, width=H * D, heads=H, role=role).to(q.dtype)
    for name, value in buffers.items():
        getattr(layer, name).copy_(value)
    rows = Rows.full(q.transpose(1, 2))
    return layer.attend_projected(rows, {"q": q}, {"k": k, "v": v})[0]


def test_performer_equals_its_peer():
    q, k, v = heads()
    peer = FastAttention(8, nb_features=24).double()
    epsilon = 1e-4  # what the peer adds to each feature
    o = ours(f"performer(features=24, epsilon={epsilon})", q, k, v, draws=peer.projection_matrix)
    assert_close(o, peer(q, k, v))


def test_causal_performer_equals_its_peer_without_the_leak():
    """The peer's causal path in its own functions, with nothing added to the features."""
    q, k, v = heads()
    W = torch.randn(24, 8, dtype=torch.float64)
    features = {
        "q": softmax_kernel(q, projection_matrix=W, is_query=True, eps=0.0),
        "k": softmax_kernel(k, projection_matrix=W, is_query=False, eps=0.0),
    }
    o = ours("performer(features=24)", q, k, v, role="causal", draws=W)
    for t in range(1, 12):
        expected = linear_attention(features["q"][:, :, t - 1 : t], features["k"][:, :, :t], v[:, :, :t])
        assert_close(o[:, :, t - 1 : t], expected)


def prefixes(features: list, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """The peer's attention of features, over what each token may see."""
    q, k = features
    if not causal:
        return linear_attention(q, k, v)
    rows = [linear_attention(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1]) for t in range(q.shape[2])]
    return torch.cat(rows, 2)


def compare(mine: torch.Tensor, other: torch.Tensor, leaves: list) -> None:
    """Outputs and gradients."""
    assert_close(mine, other)
    toward = torch.randn_like(mine)
    assert_close(
        torch.autograd.grad((mine * toward).sum(), leaves), torch.autograd.grad((other * toward).sum(), leaves)
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("projection", [False, True])
def test_relu_features_equal_the_peers(projection, causal):
    """relu(W x / sqrt(R)) + 1e-3 of the vectors as they come, as in the authors' code; without W, of x itself."""
    q, k, v = leaves = [part.requires_grad_() for part in heads()]
    W = 3 * torch.randn(24, 8, dtype=torch.float64)
    options = {"kernel_fn": torch.nn.ReLU(), "kernel_epsilon": 1e-3, "normalize_data": False}
    options["projection_matrix"] = W / 24**0.5 if projection else None
    features = [generalized_kernel(part, **options) for part in (q, k)]
    spec = "performer(features=24, kernel='relu')" if projection else "performer(kernel='relu', projection=False)"
    role = "causal" if causal else "self"
    mine = ours(spec, q, k, v, role, **({"draws": W} if projection else {}))
    compare(mine, prefixes(features, v, causal), leaves)


@pytest.mark.parametrize("causal", [False, True])
def test_orthogonal_random_features_by_hand(causal):
    """Every product of features as the cosine of a difference of angles; the floor binds for some queries."""
    q, k, v = heads()
    role = "causal" if causal else "self"
    torch.manual_seed(3)
    spec = "rfa(features=12, orthogonal=True, temperature=0.5, floor=0.3)"
    layer = regard.attention(spec, width=32, heads=4, role=role).double()
    for block in (layer.draws[:, :8], layer.draws[:, 8:]):
        products = block @ block.mT
        assert_close(products, torch.diag_embed(products.diagonal(dim1=1, dim2=2)), rtol=0, atol=1e-5)
    with torch.no_grad():
        layer.sigma.mul_(1 + 0.3 * torch.randn_like(layer.sigma))
    leaves = [*(part.requires_grad_() for part in (q, k, v)), layer.sigma]
    angles = [
        torch.einsum("bhtd,hrd,hd->bhtr", part / part.norm(dim=-1, keepdim=True), layer.draws, layer.sigma)
        for part in (q, k)
    ]
    weights = torch.cos(angles[0][:, :, :, None] - angles[1][:, :, None]).mean(-1)
    weights = weights.tril() if causal else weights
    total = weights.sum(-1, keepdim=True)
    other = weights @ v / total.clamp(min=0.3)
    assert (total < 0.3).any()
    assert (total > 0.3).any()
    mine = layer.attend_projected(Rows.full(q.transpose(1, 2)), {"q": q}, {"k": k, "v": v})[0]
    compare(mine, other, leaves)


def test_linear_equals_its_peer():
    """The peer's linear attention on the features of Katharopoulos et al."""
    q, k, v = heads()
    phi = [F.elu(x) + 1 for x in (q, k)]
    assert_close(ours("linear", q, k, v), linear_attention(*phi, v))
    causal = ours("linear", q, k, v, role="causal")
    for t in range(1, 12):
        expected = linear_attention(phi[0][:, :, t - 1 : t], phi[1][:, :, :t], v[:, :, :t])
        assert_close(causal[:, :, t - 1 : t], expected)


def test_efficient_equals_its_peer():
    q, k, v = heads()
    # the peer divides queries and keys by nothing else than the two softmaxes
    assert_close(ours("efficient", q, k, v), FastAttention(8, no_projection=True)(q, k, v))


@pytest.mark.parametrize("causal", [False, True])
def test_performer_approaches_softmax(causal):
    q, k, v = (0.5 * x for x in heads(T=20, D=16))
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    errors = []
    for features in (16, 256, 4096):
        torch.manual_seed(1)
        role = "causal" if causal else "self"
        errors.append((ours(f"performer(features={features})", q, k, v, role) - exact).square().mean().sqrt().item())
    assert errors[2] < errors[1] < errors[0]
    assert errors[2] < 0.25 * errors[0]
    assert errors[2] < 0.02


def test_orthogonal_features_are_orthogonal():
    layer = regard.attention("performer(features=20)", width=32, heads=4)
    block = layer.draws[:8]
    products = block @ block.T
    assert_close(products, torch.diag(products.diagonal()), rtol=0, atol=1e-4)
    assert layer.draws.norm(dim=1).std() > 0.1, "lengths are those of normal vectors"


def test_orthogonal_directions_favour_none():
    """Each number of an isotropic draw has mean 0 and variance 1."""
    drawn = normal_rows(4000, 8, 8, draw=torch.Generator().manual_seed(0), orthogonal=True)
    assert_close(drawn.mean(0), torch.zeros(8, 8), rtol=0, atol=5 / 4000**0.5)
    assert_close(drawn.var(0), torch.ones(8, 8), rtol=0, atol=0.12)


def test_redraw_is_on_request_and_stays_in_the_state():
    torch.manual_seed(0)
    for spec in ("performer(features=8)", "rfa(features=8)"):
        layer = regard.attention(spec, width=16, heads=2).eval()
        x = torch.randn(1, 5, 16)
        before = layer(x)
        assert_close(layer(x), before, rtol=0, atol=0)
        layer.redraw()
        after = layer(x)
        assert (after - before).abs().max() > 1e-4
        copy = regard.attention(spec, width=16, heads=2)
        copy.load_state_dict(layer.state_dict())
        assert_close(copy(x), after, rtol=0, atol=0)


def test_rfa_approaches_its_kernel():
    q, k, v = heads(T=12, D=8)
    units = [F.normalize(x, dim=-1) for x in (q, k)]
    expected = torch.softmax(units[0] @ units[1].mT, -1) @ v
    errors = []
    for features in (16, 4096):
        torch.manual_seed(2)
        errors.append((ours(f"rfa(features={features})", q, k, v) - expected).abs().max().item())
    assert errors[1] < 0.3 * errors[0]
    assert errors[1] < 0.1


def test_rfa_gate_forgets():
    """A gate at 1 keeps only what was, a gate at 0 only the last token."""
    layer = regard.attention("rfa(features=64, gate=True)", width=16, heads=2, role="causal")
    x = torch.randn(1, 6, 16)
    with torch.no_grad():
        layer.project["gate"].weight.zero_()
        layer.project["gate"].bias.fill_(-30.0)
        weights = layer.weights(x)
    assert_close(weights, torch.eye(6).expand(1, 2, 6, 6), rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="gate"):
        regard.attention("rfa(gate=True)", width=16, heads=2, role="self")


def test_epsilon_is_refused_where_it_leaks():
    with pytest.raises(ValueError, match="let the future change the past"):
        regard.attention("performer(epsilon=1e-4)", width=16, heads=2, role="causal")
