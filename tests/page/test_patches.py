"""Rollout, attention distance and windows, against loops and against what can be seen by hand."""

import math

import pytest
import torch

from regard.models.vision.grid import Grid
from regard.page import patches
from regard.page.patches import Window, attention_distance, find_windows, of_map, rollout


def draw(heads, grid, seed=0):
    torch.manual_seed(seed)
    return torch.rand(heads, grid.tokens, grid.tokens, dtype=torch.float64).softmax(2)


def by_loops(maps):
    """R = Ā_L ... Ā_1 as the paper writes it."""
    T = maps[0].shape[1]
    product = torch.eye(T, dtype=torch.float64)
    for weights in maps:
        mean = torch.zeros(T, T, dtype=torch.float64)
        for head in weights:
            mean += head / len(weights)
        mixed = (mean + torch.eye(T)) / 2
        for row in mixed:
            row /= row.sum()
        product = mixed @ product
    return product


@pytest.mark.parametrize("held", [1024, 7])
@pytest.mark.parametrize("scale", [1, 3])
def test_rollout_is_the_product(monkeypatch, held, scale):
    """However many rows are held at a time, also of weights whose rows do not sum to one."""
    monkeypatch.setattr(patches, "HELD", held)
    grid = Grid(3, 4, 1)
    maps = [scale * draw(2, grid, seed) for seed in range(3)]
    R = rollout([of_map(weights, grid) for weights in maps], torch.eye(grid.tokens, dtype=torch.float64))
    torch.testing.assert_close(R, by_loops(maps))
    torch.testing.assert_close(R.sum(1), torch.ones(grid.tokens, dtype=torch.float64))
    # some rows alone, and their mean
    some = rollout([of_map(weights, grid) for weights in maps], torch.eye(grid.tokens, dtype=torch.float64)[[0, 5]])
    torch.testing.assert_close(some, R[[0, 5]])


def test_rollout_through_merging():
    """Each new patch is the mean of its four: rows still sum to one, over the patches of the first layer."""
    fine, coarse = Grid(4, 6), Grid(2, 3)
    maps = [draw(2, fine), draw(3, coarse, 1)]
    merging = torch.zeros(coarse.tokens, fine.tokens, dtype=torch.float64)
    for row in range(4):
        for column in range(6):
            merging[row // 2 * 3 + column // 2, row * 6 + column] = 1 / 4
    layers = [of_map(maps[0], fine), of_map(maps[1], coarse)]
    R = rollout(layers, torch.eye(coarse.tokens, dtype=torch.float64))
    torch.testing.assert_close(R, by_loops(maps[1:]) @ merging @ by_loops(maps[:1]))
    torch.testing.assert_close(R.sum(1), torch.ones(coarse.tokens, dtype=torch.float64))


def test_an_odd_border_is_merged_from_fewer():
    identity = of_map(torch.eye(9)[None], Grid(3, 3))
    merged = of_map(torch.eye(4)[None], Grid(2, 2))
    R = rollout([identity, merged], torch.eye(4)).view(4, 3, 3)
    torch.testing.assert_close(R[0], torch.tensor([[1.0, 1, 0], [1, 1, 0], [0, 0, 0]]) / 4)
    torch.testing.assert_close(R[1], torch.tensor([[0.0, 0, 1], [0, 0, 1], [0, 0, 0]]) / 2)
    torch.testing.assert_close(R[3], torch.tensor([[0.0, 0, 0], [0, 0, 0], [0, 0, 1]]))


def test_grids_that_do_not_follow_are_refused():
    layers = [of_map(torch.eye(4)[None], Grid(2, 2)), of_map(torch.eye(9)[None], Grid(3, 3))]
    with pytest.raises(ValueError, match="cannot be merged"):
        rollout(layers, torch.eye(9))
    with pytest.raises(ValueError, match="has 5 rows and columns"):
        of_map(torch.eye(4)[None], Grid(2, 2, 1))


@pytest.mark.parametrize("leading", [0, 2])
def test_attention_distance_against_loops(monkeypatch, leading):
    monkeypatch.setattr(patches, "HELD", 5)
    grid, patch = Grid(3, 4, leading), (8, 6)
    weights = draw(2, grid)
    expected = []
    for head in weights[:, leading:, leading:]:
        total = 0.0
        for i in range(12):
            for j in range(12):
                far = math.hypot((i // 4 - j // 4) * patch[0], (i % 4 - j % 4) * patch[1])
                total += float(head[i, j] / head[i].sum()) * far
        expected.append(total / 12)
    torch.testing.assert_close(attention_distance(of_map(weights, grid), patch), torch.tensor(expected))


def test_attention_to_itself_bridges_nothing():
    grid = Grid(2, 2, 1)
    weights = torch.eye(5)[None].repeat(2, 1, 1)
    weights[1, 1:, 0], weights[1, 1:, 1:] = 1, 0  # a head that only sees the class token
    torch.testing.assert_close(attention_distance(of_map(weights, grid), (4, 4)), torch.zeros(2))


def window_map(grid, size, shift):
    """Two patches see each other if the plane, moved by the shift and cut into squares, has them in one."""
    place = [
        ((row - shift) // size, (column - shift) // size) for row in range(grid.rows) for column in range(grid.columns)
    ]
    seen = torch.tensor([[float(one == other) for other in place] for one in place])
    return (seen / seen.sum(1, keepdim=True))[None].repeat(2, 1, 1)


def test_windows_are_found_on_the_map():
    grid = Grid(4, 6)
    assert find_windows(of_map(window_map(grid, 2, 0), grid)) == [
        Window(row, column, row + 2, column + 2) for row in (0, 2) for column in (0, 2, 4)
    ]
    # moved by one, and cut at the border
    shifted = find_windows(of_map(window_map(grid, 2, 1), grid))
    assert shifted[:3] == [Window(0, 0, 1, 1), Window(0, 1, 1, 3), Window(0, 3, 1, 5)]
    assert len(shifted) == 3 * 4
    assert sum((bottom - top) * (right - left) for top, left, bottom, right in shifted) == grid.tokens


def test_what_is_no_window_is_not_drawn():
    grid = Grid(3, 4)
    band = torch.ones(12, 12).tril(1).triu(-1)[None]
    leaking = window_map(grid, 2, 0)
    leaking[:, 5, 11] = 0.1  # the last patch of the first window sees one of another
    for weights in (draw(2, grid).float(), band, torch.zeros(1, 12, 12), window_map(grid, 2, 0).roll(1, 2), leaking):
        assert find_windows(of_map(weights, grid)) == []
