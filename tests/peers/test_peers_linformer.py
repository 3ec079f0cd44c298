"""Linformer against the public implementation of the package `linformer`, which is headwise sharing."""

import pytest
import torch
from linformer import LinformerSelfAttention
from torch.testing import assert_close

import regard

WIDTH, HEADS, RANK, LONGEST = 32, 4, 6, 24


def pair(role: str = "self", *, head_width: int = 8, kv_heads: int = HEADS) -> tuple:
    """Our layer and theirs with the same weights, float64."""
    torch.manual_seed(0)
    one = kv_heads == 1
    theirs = LinformerSelfAttention(WIDTH, LONGEST, k=RANK, heads=HEADS, dim_head=head_width, one_kv_head=one).double()
    spec = f"linformer(rank={RANK}, longest={LONGEST})"
    sizes = {"width": WIDTH, "heads": HEADS, "kv_heads": kv_heads, "head_width": head_width}
    ours = regard.attention(spec, role=role, bias=True, **sizes).double()
    with torch.no_grad():
        for name, linear in (("q", theirs.to_q), ("k", theirs.to_k), ("v", theirs.to_v)):
            ours.project[name].weight.copy_(linear.weight)
            # their output alone has a bias; ours has biases everywhere or nowhere
            ours.project[name].bias.zero_()
        ours.output.load_state_dict(theirs.to_out.state_dict())
        ours.mix_k.copy_(theirs.proj_k.T)
        ours.mix_v.copy_(theirs.proj_v.T)
    return ours, theirs


def compare(ours, theirs, given: dict[str, torch.Tensor]) -> None:
    """Outputs and the gradients of inputs and parameters."""
    mine = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    other = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    y = ours(**mine)
    z = theirs(other["x"], context=other.get("memory"))
    assert_close(y, z)
    toward = torch.randn_like(y)
    (y * toward).sum().backward()
    (z * toward).sum().backward()
    for name in given:
        assert_close(mine[name].grad, other[name].grad)
    assert_close(ours.mix_k.grad, theirs.proj_k.grad.T)
    assert_close(ours.mix_v.grad, theirs.proj_v.grad.T)
    for own, linear in (*((ours.project[n], getattr(theirs, f"to_{n}")) for n in "qkv"), (ours.output, theirs.to_out)):
        assert_close(own.weight.grad, linear.weight.grad)
    assert_close(ours.output.bias.grad, theirs.to_out.bias.grad)


@pytest.mark.parametrize("tokens", [1, 5, LONGEST])
def test_self(tokens):
    compare(*pair(), {"x": torch.randn(3, tokens, WIDTH, dtype=torch.float64)})


def test_head_width():
    compare(*pair(head_width=5), {"x": torch.randn(3, 11, WIDTH, dtype=torch.float64)})


def test_one_key_value_head():
    compare(*pair(kv_heads=1), {"x": torch.randn(3, 11, WIDTH, dtype=torch.float64)})


@pytest.mark.parametrize("tokens", [5, LONGEST])
def test_cross(tokens):
    x = torch.randn(3, 30, WIDTH, dtype=torch.float64)
    compare(*pair("cross"), {"x": x, "memory": torch.randn(3, tokens, WIDTH, dtype=torch.float64)})
