"""Nyström attention against transformers and, where it is installed, the package `nystrom-attention`."""

import importlib

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import NystromformerConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

import regard

WIDTH, HEADS, TOKENS = 32, 4, 24


def compare(ours: regard.Attention, theirs: nn.Module, pairs: dict[str, tuple[nn.Parameter, nn.Parameter]], x) -> None:
    """Outputs, and the gradients of the input and of the parameters in pairs (ours, theirs), which are made equal."""
    with torch.no_grad():
        for own, other in pairs.values():
            own.copy_(other.view_as(own))
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = ours(mine), theirs(other)
    z = z[0] if isinstance(z, tuple) else z
    assert_close(y, z)
    toward = torch.randn_like(y)
    (y * toward).sum().backward()
    (z * toward).sum().backward()
    assert_close(mine.grad, other.grad)
    for name, (own, other) in pairs.items():
        assert_close(own.grad, other.grad.view_as(own), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kernel", [0, 5, 33])
@pytest.mark.parametrize("landmarks", [2, 6, 12, TOKENS])
@pytest.mark.parametrize("batch", [1, 3])
def test_transformers(batch, landmarks, kernel):
    torch.manual_seed(0)
    config = NystromformerConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_landmarks=landmarks,
        segment_means_seq_len=TOKENS,
        conv_kernel_size=kernel or 1,
    )
    theirs = NystromformerSelfAttention(config).double().eval()
    # the norm of each matrix; by default theirs is the largest of the batch and all heads
    theirs.init_option = "exact"
    theirs.conv_kernel_size = kernel or None
    ours = regard.attention(f"nystrom(landmarks={landmarks}, kernel={kernel})", width=WIDTH, heads=HEADS, bias=True)
    ours = ours.double()
    with torch.no_grad():
        # theirs ends before the output projection
        ours.output.weight.copy_(torch.eye(WIDTH))
        for linear in (theirs.query, theirs.key, theirs.value):
            linear.bias.normal_()
    pairs = {}
    for name, linear in (("q", theirs.query), ("k", theirs.key), ("v", theirs.value)):
        pairs |= {
            name: (ours.project[name].weight, linear.weight),
            f"{name} bias": (ours.project[name].bias, linear.bias),
        }
    if kernel:
        pairs["filter"] = (ours.filter, theirs.conv.weight)
    compare(ours, theirs, pairs, torch.randn(batch, TOKENS, WIDTH, dtype=torch.float64))


@pytest.mark.parametrize("iterations", [1, 6, 9])
@pytest.mark.parametrize("kernel", [0, 5])
def test_nystrom_attention(kernel, iterations):
    """One row of one head, for their norm is the largest of all."""
    peer = importlib.import_module("nystrom_attention")
    torch.manual_seed(0)
    theirs = peer.NystromAttention(
        WIDTH,
        dim_head=8,
        heads=1,
        num_landmarks=6,
        pinv_iterations=iterations,
        residual=kernel > 0,
        residual_conv_kernel=kernel,
    ).double()
    spec = f"nystrom(landmarks=6, kernel={kernel}, iterations={iterations})"
    ours = regard.attention(spec, width=WIDTH, heads=1, head_width=8, bias=True).double()
    with torch.no_grad():
        for name, weight in zip("qkv", theirs.to_qkv.weight.chunk(3), strict=True):
            ours.project[name].weight.copy_(weight)
            # their output alone has a bias, ours has biases everywhere or nowhere
            ours.project[name].bias.zero_()
    pairs = {
        "output": (ours.output.weight, theirs.to_out[0].weight),
        "output bias": (ours.output.bias, theirs.to_out[0].bias),
    }
    if kernel:
        pairs["filter"] = (ours.filter, theirs.res_conv.weight)
    compare(ours, theirs, pairs, torch.randn(1, TOKENS, WIDTH, dtype=torch.float64))


@pytest.mark.parametrize("tokens", [13, 24, 31])
def test_many_steps_are_the_inverse(tokens):
    """The same with torch's pseudo-inverse, for lengths that the landmarks divide and others."""
    torch.manual_seed(0)
    layer = regard.attention("nystrom(landmarks=4, kernel=0, iterations=20)", width=WIDTH, heads=HEADS).double()
    x = torch.randn(2, tokens, WIDTH, dtype=torch.float64)
    q, k, v = (layer.project_heads(name, x) for name in "qkv")
    segments = torch.arange(tokens) * 4 // tokens
    assert segments.bincount().max() - segments.bincount().min() <= 1
    q_mean, k_mean = (torch.stack([part[:, :, segments == s].mean(2) for s in range(4)], 2) for part in (q, k))

    def softmax(a, b):
        return torch.softmax(a @ b.mT / (WIDTH // HEADS) ** 0.5, -1)

    maps = softmax(q, k_mean) @ torch.linalg.pinv(softmax(q_mean, k_mean)) @ softmax(q_mean, k)
    assert_close(layer.weights(x), maps)
    assert_close(layer(x), (maps @ v).transpose(1, 2).flatten(2) @ layer.output.weight.T)


def test_short_rows_beside_long_ones():
    """At most as many tokens as landmarks: softmax attention, also where other rows of the batch are longer."""
    torch.manual_seed(0)
    layer = regard.attention("nystrom(landmarks=6, kernel=0)", width=WIDTH, heads=HEADS).double()
    plain = regard.attention("softmax", width=WIDTH, heads=HEADS).double()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(4, TOKENS, WIDTH, dtype=torch.float64)
    keep = torch.arange(TOKENS) < torch.tensor([TOKENS, 6, 1, 7])[:, None]
    assert_close(layer(x, keep=keep)[1:3], plain(x, keep=keep)[1:3])
    assert not torch.allclose(layer(x, keep=keep)[3], plain(x, keep=keep)[3])


def test_refusals():
    with pytest.raises(ValueError, match="'nystrom' cannot take role 'causal': the landmarks are means over all"):
        regard.attention("nystrom", width=WIDTH, heads=HEADS, role="causal")
    with pytest.raises(ValueError, match="'nystrom' cannot take role 'cross': the landmarks of the queries"):
        regard.attention("nystrom", width=WIDTH, heads=HEADS, role="cross")
    with pytest.raises(ValueError, match=r"'kernel' of 'nystrom' must be odd.*got 4: give 5"):
        regard.attention("nystrom(kernel=4)", width=WIDTH, heads=HEADS)
    with pytest.raises(ValueError, match="'landmarks' of 'nystrom' must be at least 1, got 0"):
        regard.attention("nystrom(landmarks=0)", width=WIDTH, heads=HEADS)
