"""What the suite does not ask of Poolingformer: its two levels as dense attention, with PyTorch's own pooling."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import regard

WIDTH, HEADS, LONG = 16, 4, 41


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("role", ["self", "causal"])
@pytest.mark.parametrize("pooling", ["mean", "max"])
@pytest.mark.parametrize(("kernel", "stride"), [(5, 4), (3, 5), (7, 2)])
def test_two_dense_levels(role, pooling, kernel, stride):
    spec = f"poolingformer(window=3, wide=11, kernel={kernel}, stride={stride}, pooling={pooling!r})"
    layer = regard.attention(spec, width=WIDTH, heads=HEADS, role=role, bias=True).double()
    x = torch.randn(2, LONG, WIDTH, dtype=torch.float64)
    causal, i = role == "causal", torch.arange(LONG)[:, None]

    def project(level, name, part):
        return level.project[name](part).unflatten(2, (HEADS, -1)).transpose(1, 2)

    def pool(part):
        flat = part.transpose(2, 3).flatten(0, 1)
        if pooling == "mean":
            pooled = F.avg_pool1d(flat, kernel, stride, kernel // 2, count_include_pad=False)
        else:
            pooled = F.max_pool1d(flat, kernel, stride, kernel // 2)
        return pooled.unflatten(0, (2, HEADS)).transpose(2, 3)

    q, k, v = (project(layer.near, name, x) for name in "qkv")
    away = i - torch.arange(LONG)
    seen = (away.abs() <= 3) & ((away >= 0) | (not causal))
    near = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
    q, k, v = (project(layer.far, name, near) for name in "qkv")
    middle = torch.arange(0, LONG, stride)
    seen = ((i - middle).abs() <= 11) & ((middle + kernel // 2 <= i) | (not causal))
    far = F.scaled_dot_product_attention(q, pool(k), pool(v), attn_mask=seen).transpose(1, 2).flatten(2)
    assert_close(layer(x), layer.output(near + far))


@pytest.mark.parametrize("role", ["self", "causal"])
@pytest.mark.parametrize("pooling", ["mean", "ldconv"])
def test_the_map_is_what_reaches_a_query(role, pooling):
    """With one head, and the values of the second level as the first one gives them, the layer is linear in its own."""
    spec = f"poolingformer(window=3, wide=9, kernel=4, stride=3, pooling={pooling!r})"
    layer = regard.attention(spec, width=WIDTH, heads=1, role=role).double()
    torch.nn.init.eye_(layer.far.project["v"].weight)
    x = torch.randn(3, LONG, WIDTH, dtype=torch.float64)
    for keep in (None, torch.rand(3, LONG) < 0.7):
        v = layer.near.project["v"](x)
        v = v if keep is None else torch.where(keep[..., None], v, 0)
        assert_close(layer.output(layer.weights(x, keep=keep)[:, 0] @ v), layer(x, keep=keep))


def test_what_it_refuses():
    with pytest.raises(ValueError, match="'stride' of 'poolingformer' must be at least 1"):
        regard.attention("poolingformer(stride=0)", width=WIDTH, heads=HEADS)
    with pytest.raises(ValueError, match="'poolingformer' cannot take position 'shaw'"):
        regard.attention("poolingformer", width=WIDTH, heads=HEADS, position="shaw")
    layer = regard.attention("poolingformer", width=WIDTH, heads=HEADS, role="causal")
    with pytest.raises(ValueError, match="a state has no map"):
        layer.weights(torch.randn(2, 3, WIDTH), state=layer.start(2))
