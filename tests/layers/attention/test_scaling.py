"""The sparse layers of Scaling Transformers that the suite's examples do not all have: what stands behind attention."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import regard
from regard.core.rows import Rows

OUTPUTS = ["none", "mult", "conv", "multconv"]


def build(spec: str, **options):
    torch.manual_seed(0)
    layer = regard.attention(spec, width=12, heads=3, **({"role": "causal"} | options)).double().eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("share_qk", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"kv_heads": 1, "role": "self"}, {"bias": True}], ids=str)
def test_reference(output, share_qk, sizes):
    layer = build(f"scaling(output={output!r}, share_qk={share_qk})", **sizes)
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    for row, y in zip(x, layer(x), strict=True):
        assert_close(y, layer.reference(row))


@pytest.mark.parametrize("output", OUTPUTS)
def test_decoding(output):
    """In any pieces, of rows that are not equally long."""
    layer = build(f"scaling(output={output!r})")
    x, keep = torch.randn(2, 7, 12, dtype=torch.float64), torch.tensor([[1, 1, 0, 1, 1, 0, 1], [1] * 7]).bool()
    whole = layer(x, keep=keep)
    for cuts in ([1] * 7, [3, 1, 3]):
        state, pieces = layer.start(2), []
        for part, flags in zip(x.split(cuts, 1), keep.split(cuts, 1), strict=True):
            y, state = layer.extend(part, state, keep=flags)
            pieces.append(y)
        assert_close(torch.cat(pieces, 1), whole)


def test_the_sparse_layers_are_pytorchs():
    """A product with a weight that gates and a shared matrix make, and a convolution over tokens and modules with zeros
    before the first token and beside the outer modules, as `nn.Conv2d` does it."""
    layer = build("scaling(output='multconv')", bias=True)
    o = torch.randn(1, 5, 12, dtype=torch.float64)
    weight = torch.einsum("si,im->smi", layer.out_gates, layer.out_shared).flatten(0, 1)
    z = (o @ weight.T + layer.out_bias).unflatten(2, (3, 4)).permute(0, 3, 1, 2)  # [B, M, T, S]
    kernel = layer.out_convolve.weight.unflatten(1, (3, 3, 4)).permute(0, 3, 2, 1)  # [M, M, tokens, modules]
    padded = nn.functional.pad(z, (1, 1, 2, 0))
    y = nn.functional.conv2d(padded, kernel, layer.out_convolve.bias).permute(0, 2, 3, 1).flatten(2)
    assert_close(layer._written(o, Rows.full(o), None)[0], y)


def test_fewer_weights():
    dense, sparse = (build(f"scaling(output={output!r})") for output in ("dense", "mult"))
    count = [sum(part.numel() for part in layer.parameters()) for layer in (dense, sparse)]
    assert count[0] - count[1] == 12 * 12 - (3 * 12 + 12 * 4)
    assert "k" not in build("scaling(share_qk=True)").convolve


def test_refusals():
    with pytest.raises(ValueError, match=r"output='none' gives the heads side by side, 3 of 5: it needs that width"):
        build("scaling(output='none')", head_width=5)
    with pytest.raises(ValueError, match="heads must divide the width, got 12 and 5"):
        regard.attention("scaling(output='mult')", width=12, heads=5, head_width=4)
    with pytest.raises(ValueError, match="option 'output' of 'scaling' must be 'dense' or 'none'"):
        build("scaling(output='lowrank')")
