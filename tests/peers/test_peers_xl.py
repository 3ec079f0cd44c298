"""Segment recurrence against the relative attention of XLNet, which is Transformer-XL's, given the memory by hand."""

import pytest
import torch
from torch.testing import assert_close
from transformers import XLNetConfig
from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

import regard
from regard.testing.cases import Case
from regard.testing.counting import cost

B, H, D = 2, 4, 8
E = H * D
SEGMENT, MEMORY, T = 5, 7, 19


def pair(clamp: int | None) -> tuple:
    """Our layer and theirs with the same weights, float64."""
    torch.manual_seed(0)
    config = XLNetConfig(d_model=E, n_head=H, d_inner=E, n_layer=1, vocab_size=8, dropout=0.0)
    theirs = XLNetRelativeAttention(config).double().eval()
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    spec = f"xl(segment={SEGMENT}, memory={MEMORY}, clamp={clamp})"
    ours = regard.attention(spec, width=E, heads=H, role="causal").double()
    with torch.no_grad():
        for name in "qkv":
            ours.project[name].weight.copy_(getattr(theirs, name).flatten(1).T)
        ours.output.weight.copy_(theirs.o.flatten(1))
        ours.position.project.weight.copy_(theirs.r.flatten(1).T)
        ours.position.u.copy_(theirs.r_w_bias)
        ours.position.v.copy_(theirs.r_r_bias)
    return ours, theirs


def segments(theirs: XLNetRelativeAttention, x: torch.Tensor, clamp: int | None, stops: bool) -> torch.Tensor:
    """Their attention a segment at a time; `stops`: no gradient goes into the memory."""
    outs, mems = [], x[:, :0]
    for h in x.split(SEGMENT, 1):
        joined = torch.cat([mems.detach() if stops else mems, h], 1).transpose(0, 1)
        n, S = h.shape[1], joined.shape[0]
        distance = torch.arange(S, -n, -1).double()
        distance = distance if clamp is None else distance.clamp(-clamp, clamp)
        frequency = 10000 ** (-torch.arange(0, E, 2).double() / E)
        r = torch.einsum("ibh,hnd->ibnd", XLNetModel.positional_embedding(distance, frequency, B), theirs.r)
        q = torch.einsum("ibh,hnd->ibnd", h.transpose(0, 1), theirs.q)
        k, v = (torch.einsum("ibh,hnd->ibnd", joined, weight) for weight in (theirs.k, theirs.v))
        hidden = torch.ones(n, S, dtype=torch.float64).triu(S - n + 1)[..., None, None]
        core = theirs.rel_attn_core(q, k, v, r, attn_mask=hidden)
        outs.append(torch.einsum("ibnd,hnd->bih", core, theirs.o))
        mems = joined.transpose(0, 1)[:, -MEMORY:]
    return torch.cat(outs, 1)


@pytest.mark.parametrize("clamp", [None, 6])
def test_whole(clamp):
    ours, theirs = pair(clamp)
    x = torch.randn(B, T, E, dtype=torch.float64)
    assert_close(ours(x), segments(theirs, x, clamp, stops=False))


def test_training_by_segments():
    """`detach` between segments is the paper's stop: nothing goes back into the inputs of the memory, but its keys and
    values still train their projections."""
    ours, theirs = pair(None)
    x = torch.randn(B, T, E, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    state, outs = ours.start(B), []
    for h in mine.split(SEGMENT, 1):
        y, state = ours.extend(h, regard.detach(state))
        outs.append(y)
    y, z = torch.cat(outs, 1), segments(theirs, other, None, stops=True)
    assert_close(y, z)
    toward = torch.randn_like(y)
    (y * toward).sum().backward()
    (z * toward).sum().backward()
    assert_close(mine.grad, other.grad)
    for name in "qkv":
        assert_close(ours.project[name].weight.grad, getattr(theirs, name).grad.flatten(1).T)
    assert_close(ours.position.project.weight.grad, theirs.r.grad.flatten(1).T)


def test_a_state_made_without_gradients_goes_on_with_them():
    ours, _ = pair(None)
    x = torch.randn(B, T, E, dtype=torch.float64)
    with torch.no_grad():
        first, state = ours.extend(x[:, :8], ours.start(B))
    late, _ = ours.extend(x[:, 8:], state)
    assert_close(torch.cat([first, late], 1), ours(x))


@pytest.mark.parametrize(("name", "rest"), [("xl", ""), ("compressive", ", compressed=512, rate=4")])
def test_a_short_row_costs_no_more_than_it_has(name, rest):
    """Whatever the size of segment and memory: most texts are shorter than the default."""
    long, fitting = (
        cost(Case(f"{name}(segment={n}, memory={M}{rest})", "causal"), 32) for n, M in ((512, 512), (32, 32))
    )
    assert long["flops"] == fitting["flops"]
    assert long["saved"] < 2 * fitting["saved"]


@pytest.mark.parametrize("spec", ["xl(segment=3, memory=5)", "compressive(segment=4, memory=4, compressed=3, rate=2)"])
def test_rows_of_any_length(spec):
    """Shorter than a segment, than the memory, and just beyond both: each as the beginning of a longer one."""
    torch.manual_seed(0)
    layer = regard.attention(spec, width=E, heads=H, role="causal").double().eval()
    x = torch.randn(B, 18, E, dtype=torch.float64)
    whole = layer(x)
    for length in range(1, 18):
        assert_close(layer(x[:, :length]), whole[:, :length])
        y, _ = layer.extend(x[:, :length], layer.start(B))
        assert_close(y, whole[:, :length])
