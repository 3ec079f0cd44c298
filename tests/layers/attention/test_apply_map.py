"""Maps of mechanisms that are made of others, or of no attention at all, against what their formulas say."""

import math

import pytest
import torch
from torch.testing import assert_close

import regard
from regard.core.rows import Rows

WIDTH, HEADS, T, S = 12, 3, 23, 17


def built(spec, role="self"):
    torch.manual_seed(0)
    layer = regard.attention(spec, width=WIDTH, heads=HEADS, role=role).double().eval()
    x = torch.randn(2, T, WIDTH, dtype=torch.float64)
    return layer, x, torch.randn(2, S, WIDTH, dtype=torch.float64) if role == "cross" else None


def test_clusterformer_mixes_the_values_of_its_attention():
    layer, x, _ = built("clusterformer(clusters=4, chunk=5)")
    v = layer.inner.project_heads("v", x)
    assert_close(layer.inner.output((layer.weights(x) @ v).transpose(1, 2).flatten(2)), layer(x))


@pytest.mark.parametrize("role", ["self", "causal"])
def test_scaling_mixes_the_values_of_its_convolutions(role):
    layer, x, _ = built("scaling", role)
    made = layer._made(x, Rows.full(x), None)[0]
    v = made[..., -WIDTH:].unflatten(2, (HEADS, -1)).transpose(1, 2)
    assert_close(layer.inner.output((layer.weights(x) @ v).transpose(1, 2).flatten(2)), layer(x))


@pytest.mark.parametrize("role", ["self", "cross"])
def test_set_is_the_product_of_two_maps(role):
    layer, x, memory = built("set(points=5)", role)
    source = x if memory is None else memory
    points = layer.points.expand(2, -1, -1)
    read = layer.norms[0](points + layer.gather(points, memory=source))
    read = layer.norms[1](read + torch.relu(layer.feed(read)))
    wanted = layer.spread.weights(x, memory=read) @ layer.gather.weights(points, memory=source)
    assert_close(layer.weights(x, memory=memory), wanted)


@pytest.mark.parametrize("role", ["self", "cross"])
def test_luna_is_the_product_of_two_maps(role):
    layer, x, memory = built("luna(length=5, tied=False)", role)
    for row in range(2):
        source = (x if memory is None else memory)[row]
        names = "packed_q", "packed_k", "packed_v"
        packed = torch.cat([layer._plain_attention(h, layer.packed, source, *names) for h in range(HEADS)], -1)
        for h in range(HEADS):
            reading = (layer._plain("packed_q", h, layer.packed) @ layer._plain("packed_k", h, source).T) * layer.scale
            looking = (layer._plain("q", h, x[row]) @ layer._plain("k", h, packed).T) * layer.scale
            assert_close(layer.weights(x, memory=memory)[row, h], looking.softmax(-1) @ reading.softmax(-1))


def test_luna_of_the_past():
    layer, x, _ = built("luna(length=5, tied=False)", "causal")
    for h in range(HEADS):
        q, k, near = (layer._plain(name, h, x[0]) for name in ("q", "k", "packed_k"))
        scores = near @ layer._plain("packed_q", h, layer.packed).T * layer.scale
        pack = torch.log2(1 + 2**scores)  # w [T, l]
        for t in range(T):
            read = ((q[t] * layer.scale) @ (k[: t + 1].T @ pack[: t + 1]) / (t + 1)).softmax(-1)
            row = torch.zeros(T, dtype=x.dtype)
            row[: t + 1] = pack[: t + 1] @ read / (t + 1)
            assert_close(layer.weights(x)[0, h, t], row)


def test_fnet_is_cosines():
    layer, x, _ = built("fnet")
    steps = torch.arange(T, dtype=x.dtype)
    assert_close(layer.weights(x)[1, 2], torch.cos(2 * math.pi * steps[:, None] * steps / T))
    keep = torch.arange(T)[None] < torch.tensor([[T], [9]])
    wanted = torch.zeros(T, T, dtype=x.dtype)
    wanted[:9, :9] = torch.cos(2 * math.pi * steps[:9, None] * steps[:9] / 9)
    assert_close(layer.weights(x, keep=keep)[1, 0], wanted)


def blocks(layer, x, sets):
    """The map of attention within each set of places, and elsewhere nothing: [B, H, T, T]"""
    found = torch.zeros(len(x), HEADS, T, T, dtype=x.dtype)
    for places in sets:
        found[:, :, places[:, None], places] = layer.weights(x[:, places])
    return found


def within(layer, x, sets):
    """What attention within each set of places gives."""
    y = torch.zeros_like(x)
    for places in sets:
        y[:, places] = layer(x[:, places])
    return y


@pytest.mark.parametrize("role", ["self", "causal"])
def test_axial_reads_rows_and_then_columns(role):
    layer, x, _ = built("axial(width=6)", role)
    places = torch.arange(T)
    lines, columns = [places[first : first + 6] for first in range(0, T, 6)], [places[first::6] for first in range(6)]
    if role == "causal":
        # rows that are not complete are read by none
        lines, columns = lines[:-1], [column[column < 18] for column in columns]
    first = within(layer.rows, x, lines)
    wanted = blocks(layer.columns, first, columns) @ blocks(layer.rows, x, lines)
    if role == "causal":
        above = torch.diag(torch.ones(T - 6, dtype=x.dtype), -6)
        lines = [places[first : first + 6] for first in range(0, T, 6)]
        inner = blocks(layer.inner, x + above @ within(layer.columns, first, columns), lines)
        wanted = inner @ (torch.eye(T, dtype=x.dtype) + above @ wanted)
    assert_close(layer.weights(x), wanted)


@pytest.mark.parametrize("role", ["self", "causal"])
@pytest.mark.parametrize("pooling", ["mean", "max", "ldconv"])
def test_poolingformer_reads_the_window_and_what_it_has_read(pooling, role):
    layer, x, _ = built(f"poolingformer(window=2, wide=6, kernel=3, stride=2, pooling='{pooling}')", role)
    near, read = layer.near.weights(x), layer.near(x)
    far = layer.far.apply_map(torch.eye(T, dtype=x.dtype).expand(2, 1, -1, -1), read, Rows.full(read))
    assert_close(layer.weights(x), near + far @ near)
    if pooling != "max":
        v = layer.far.project_heads("v", read)
        assert_close((far @ v).transpose(1, 2).flatten(2), layer.far(read))
        return
    # of a maximum, the mean over the features of which token each is of
    rows = Rows.full(read)
    query, source = layer.far.project_inputs(read, rows, None)

    def read_values(v):
        return layer.far.attend(layer.far.whole_mask(rows), **query, **source | {"v": v}).sum(0)

    slopes = torch.autograd.functional.jacobian(read_values, source["v"])  # [H, T, D, B, H, T, D]
    assert_close(far, torch.einsum("htdbhsd->bhts", slopes) / slopes.shape[2])


@pytest.mark.parametrize("role", ["self", "causal"])
def test_longshort_mixes_values_and_their_summaries(role):
    layer, x, _ = built("longshort(window=5, rank=3, chunk=4, norm=False)", role)
    assert_close(layer.output((layer.weights(x) @ layer.project_heads("v", x)).transpose(1, 2).flatten(2)), layer(x))


def test_compressive_mixes_values_and_their_means():
    layer, x, _ = built("compressive(segment=4, memory=4, compressed=5, rate=2, function='mean')", "causal")
    assert_close(layer.output((layer.weights(x) @ layer.project_heads("v", x)).transpose(1, 2).flatten(2)), layer(x))


def test_mixer_is_its_slope():
    """Of each head, the mean over its channels of how an output moves with an input of the same channel."""
    layer, x, _ = built("mixer(longest=64, inner=5)")
    slopes = torch.autograd.functional.jacobian(lambda x: layer(x[None])[0], x[1])  # [T, E, T, E]
    wanted = slopes.diagonal(dim1=1, dim2=3).unflatten(2, (HEADS, -1)).mean(-1).movedim(2, 0)
    assert_close(layer.weights(x)[1], wanted)
