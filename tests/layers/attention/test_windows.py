"""Windows of a grid: the bias by distances, and what a shift changes."""

import pytest
import torch
from torch.testing import assert_close

import regard
from regard.layers.attention.swin import Swin


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
