"""Fourier mixing against Hugging Face's FNet: the transform alone, a whole layer, and rows of different length."""

import pytest
import torch
from torch.testing import assert_close
from transformers import FNetConfig
from transformers.models.fnet.modeling_fnet import FNetBasicFourierTransform, FNetLayer

import regard
from regard.core.rows import Rows, pack, unpack
from regard.models.block import Block
from regard.models.config import ModelConfig
from regard.spec import parse

WIDTH, INNER = 12, 20
CONFIG = FNetConfig(
    hidden_size=WIDTH,
    intermediate_size=INNER,
    hidden_act="gelu",
    hidden_dropout_prob=0.0,
    layer_norm_eps=1e-5,
    use_tpu_fourier_optimizations=False,
)
KEEP = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0, 1], [1] * 9, [1, 0, 0, 0, 0, 1, 0, 0, 0]]).bool()


@pytest.mark.parametrize("tokens", [1, 2, 9, 16, 37])
def test_transform(tokens):
    torch.manual_seed(0)
    x = torch.randn(3, tokens, WIDTH, dtype=torch.float64)
    layer = regard.attention("fnet", width=WIDTH, heads=4)
    assert_close(layer(x), FNetBasicFourierTransform(CONFIG)(x)[0])


def test_rows_of_different_length_are_each_their_own_transform():
    """Theirs knows no padding: each row is given to it alone."""
    torch.manual_seed(0)
    x = torch.randn(3, 9, WIDTH, dtype=torch.float64)
    y = regard.attention("fnet", width=WIDTH, heads=4)(x, keep=KEEP)
    for row in range(3):
        alone = FNetBasicFourierTransform(CONFIG)(x[row : row + 1, KEEP[row]])[0]
        assert_close(y[row : row + 1, KEEP[row]], alone)
    assert not y[~KEEP].any()


@pytest.mark.parametrize("padded", [False, True])
def test_layer(padded):
    """A post-norm block of our Transformer is a layer of theirs."""
    torch.manual_seed(0)
    theirs = FNetLayer(CONFIG).double()
    options = {"width": WIDTH, "heads": 4, "inner": INNER, "dropout": 0.0, "feedforward": "dense(activation='gelu')"}
    ours = Block(ModelConfig(kind="encoder", **options), parse("fnet"), None, "self").double()
    pairs = {"norms.0": theirs.fourier.output.LayerNorm, "norms.1": theirs.output.LayerNorm}
    pairs |= {"feedforward.inner": theirs.intermediate.dense, "feedforward.outer": theirs.output.dense}
    for name, module in pairs.items():
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        ours.get_submodule(name).load_state_dict(module.state_dict())
    x = torch.randn(3, 9, WIDTH, dtype=torch.float64)
    if not padded:
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, z = ours(mine, Rows.full(mine)).y, theirs(other)[0]
        assert_close(y, z)
        (y * x).sum().backward()
        (z * x).sum().backward()
        assert_close(mine.grad, other.grad)
        return
    packed, rows = pack(x, KEEP)
    # a model embeds padded ids too: what stands there must not matter
    packed = torch.where(rows.real()[..., None], packed, 7.0)
    y = unpack(ours(packed, rows).y, KEEP)
    for row in range(3):
        assert_close(y[row, KEEP[row]], theirs(x[row : row + 1, KEEP[row]])[0][0])


def test_long_rows_keep_their_angles():
    """Float32 at rows of ten thousand tokens, padded, against float64."""
    torch.manual_seed(0)
    layer, x = regard.attention("fnet", width=4, heads=1), torch.randn(2, 10_007, 4)
    keep = torch.arange(10_007) < torch.tensor([10_007, 9_973])[:, None]
    y, exact = layer(x, keep=keep), layer(x.double(), keep=keep)
    assert_close(y.double(), exact, rtol=0, atol=2e-6 * exact.abs().max().item())
