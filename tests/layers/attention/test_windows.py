"""Windows of a grid: the bias by distances, what a shift changes, and small grids of which all pairs are compared."""

import pytest
import torch
from torch.testing import assert_close

import regard
from regard.layers.attention import tailed
from regard.layers.attention.swin import Swin
from regard.layers.attention.tailed import Tailed


def layer(spec: str) -> Swin:
    torch.manual_seed(0)
    return regard.attention(spec, width=8, heads=2).double()


def test_the_bias_depends_on_the_distance_alone_and_has_a_direction():
    """With no queries and keys, weights are the softmax of the bias."""
    made = layer("swin(window=3, width=3)")
    with torch.no_grad():
        made.table.normal_()
        made.project["q"].weight.zero_()
    weights = made.weights(torch.randn(1, 9, 8, dtype=torch.float64))[0].log()  # [H, 9, 9]
    for i, j in ((0, 4), (1, 5), (3, 7), (4, 8)):
        # relative to the query itself: one down and one to the right
        assert_close(weights[:, i, j] - weights[:, i, i], made.table[(-1 + 2) * 5 + (-1 + 2)] - made.table[12])
        assert_close(weights[:, j, i] - weights[:, j, j], made.table[(1 + 2) * 5 + (1 + 2)] - made.table[12])


@pytest.mark.parametrize("rows", [6, 7])
def test_shifted_windows_are_cut_at_the_border_and_never_wrapped(rows):
    made = layer("swin(window=3, shift=1, width=6)")
    weights = made.weights(torch.randn(1, rows * 6, 8, dtype=torch.float64))[0, 0]
    seen = [j for j in range(rows * 6) if weights[0, j] > 0]
    assert seen == [0], "the corner is a window of its own"
    last = rows * 6 - 1
    size = (rows - 1) % 3 or 3
    assert len([j for j in range(rows * 6) if weights[last, j] > 0]) == 2 * size


@pytest.mark.parametrize("spec", ["swin(window=4, width=8)", "swin(window=4, shift=2, width=8)"])
def test_a_map_of_whole_windows_and_one_that_is_padded_agree(spec):
    """Rows of one length take another way than rows of several."""
    made, x = layer(spec), torch.randn(2, 64, 8, dtype=torch.float64)
    keep = torch.ones(2, 64, dtype=torch.bool)
    assert_close(made(x, keep=keep), made(x))
    keep[1, 40:] = False
    both = made(x, keep=keep)
    assert_close(both[:1], made(x[:1]))
    assert_close(both[1:, :40], made(x[1:, :40]))


@pytest.mark.parametrize("role", ["self", "causal"])
@pytest.mark.parametrize(
    "spec",
    [
        "local(window=[1, 2], width=6)",
        "local(window=[2, 0], width=4)",
        "image(block=[2, 3], memory=[1, 2], width=6)",
        "image(block=[2, 2], memory=[3, 1], width=4)",
    ],
)
def test_a_small_grid_is_read_as_a_large_one(spec, role, monkeypatch):
    """All pairs, or the keys of each block: the same values and gradients, with padding and with shared key heads."""
    made = regard.attention(spec, width=16, heads=4, kv_heads=2, role=role).double()
    x = torch.randn(2, 33, 16, dtype=torch.float64, requires_grad=True)
    keep = torch.ones(2, 33, dtype=torch.bool)
    keep[1, 20:] = False
    taken, whole = [], Tailed.attend_whole
    monkeypatch.setattr(Tailed, "attend_whole", lambda *args: taken.append(1) or whole(*args))
    found = []
    for dense in (0, 33):
        monkeypatch.setattr(tailed, "DENSE", dense)
        outputs = (made(x), made(x, keep=keep))
        gradients = torch.autograd.grad(sum(y.square().sum() for y in outputs), (x, *made.parameters()))
        found.append((*outputs, *gradients))
        assert len(taken) == (2 if dense else 0)
    assert_close(found[0], found[1])


def test_a_map_of_8_x_8_is_small(monkeypatch):
    """Of more rows, the keys of each block are collected; so they are where all pairs were many."""
    sizes = []
    monkeypatch.setattr(Tailed, "attend_whole", lambda self, mask, q, k, v, sees: sizes.append(mask.T) or q)
    for spec in ("local(window=[2, 2], width=8)", "image(block=[2, 2], memory=[2, 2], width=8)"):
        made = regard.attention(spec, width=8, heads=2)
        for rows in (8, 16):
            made(torch.randn(1, rows * 8, 8))
    assert sizes == [64, 64]
    regard.attention("local(window=[64, 2], width=33)", width=8, heads=2)(torch.randn(1, 33 * 33, 8))
    assert sizes == [64, 64]
