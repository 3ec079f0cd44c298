"""Maps over the patches of an image: rollout over the layers, attention distance, windows.

A layer is given by what it takes rows of its map with and by its grid, so that no map of N x N numbers is ever held.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.models.vision.grid import Grid

HELD = 1024  # rows of a map that are held at a time, counted over all heads

TakeRows = Callable[[Sequence[int]], Tensor]  # numbers of queries -> their rows of the map, [H, n, S]


class Layer(NamedTuple):
    """A layer of self-attention over patches, with its tokens in the order of reading."""

    take: TakeRows
    heads: int
    grid: Grid

    @property
    def patches(self) -> int:
        return self.grid.rows * self.grid.columns


class Window(NamedTuple):
    """The patches of rows top to bottom - 1 and columns left to right - 1."""

    top: int
    left: int
    bottom: int
    right: int


def of_map(weights: Tensor, grid: Grid) -> Layer:
    """A layer whose map [H, T, T] is there."""
    if weights.shape[1:] != (grid.tokens, grid.tokens):
        raise ValueError(
            f"a map over {grid.rows} x {grid.columns} patches and {grid.leading} other tokens has {grid.tokens} rows "
            f"and columns, got {list(weights.shape[1:])}"
        )
    return Layer(lambda queries: weights[:, list(queries)], len(weights), grid)


def rollout(layers: Sequence[Layer], start: Tensor) -> Tensor:
    """Attention rollout of Abnar and Zuidema 2020 (arXiv 2005.00928): rows of R = Ā_L ... Ā_1, combined by `start`,
    [k, T of the last layer] -> [k, T of the first].

    Ā_l is the mean A_l of the maps of all heads with the residual connection: (A_l + I) / 2, each row divided by its
    sum. Unit vectors in `start` give rows of R. Where a layer has fewer patches than the one before, a new patch is the
    mean of those that were merged into it. Rows of R sum to one. The maps must not be signed.
    """
    flow = start
    for number in reversed(range(len(layers))):
        flow = _through(layers[number], flow)
        if number:
            flow = _unmerge(flow, layers[number].grid, layers[number - 1].grid)
    return flow


def _through(layer: Layer, flow: Tensor) -> Tensor:
    """[k, T] -> [k, T]: times Ā, some rows at a time."""
    out = torch.zeros_like(flow)
    for queries in _strips(layer.grid.tokens, layer.heads):
        mean = layer.take(queries).mean(0).to(flow)  # [n, T]
        at = torch.arange(len(queries), device=flow.device)
        mean[at, at + queries[0]] += 1
        out += flow[:, queries[0] : queries[-1] + 1] @ (mean / mean.sum(1, keepdim=True))
    return out


def _unmerge(flow: Tensor, coarse: Grid, fine: Grid) -> Tensor:
    """[k, tokens of the coarse grid] -> [k, tokens of the fine grid]: each patch in equal shares to those it is the
    mean of. At an odd border a patch has fewer of them."""
    if coarse[:3] == fine[:3]:
        return flow
    if coarse.leading != fine.leading or coarse.rows > fine.rows or coarse.columns > fine.columns:
        raise ValueError(
            f"{fine.rows} x {fine.columns} patches cannot be merged into {coarse.rows} x {coarse.columns}: they must "
            "become fewer, behind as many other tokens"
        )
    down, across = (torch.arange(many) // -(-many // few) for many, few in zip(fine[:2], coarse[:2], strict=True))
    place = (down[:, None] * coarse.columns + across).flatten().to(flow.device)  # [fine patches]
    shares = flow[:, coarse.leading :] / torch.bincount(place)
    return torch.cat([flow[:, : coarse.leading], shares[:, place]], 1)


def attention_distance(layer: Layer, patch: tuple[float, float]) -> Tensor:
    """The mean distance that attention bridges, in pixels, of each head [H]: the mean over patches i of
    sum_j a_ij |x_i - x_j|, with centres x and weights a that are divided by their sum over patches, so that leading
    tokens, which are nowhere, do not count (Dosovitskiy et al. 2020, Figure 7). `patch` is its height and width in
    pixels."""
    grid = layer.grid
    down, across = torch.meshgrid(torch.arange(grid.rows), torch.arange(grid.columns), indexing="ij")
    places = torch.stack([down.flatten() * patch[0], across.flatten() * patch[1]], 1).float()  # [patches, 2]
    total = torch.zeros(layer.heads)
    for queries in _strips(layer.patches, layer.heads):
        weights = layer.take([grid.leading + query for query in queries])[..., grid.leading :].float().cpu()
        far = torch.cdist(places[queries[0] : queries[-1] + 1], places)  # [n, patches]
        # a patch that sees no other bridges no distance
        sums = weights.sum(2).clamp(min=torch.finfo(weights.dtype).tiny)
        total += ((weights * far).sum(2) / sums).sum(1)
    return total / layer.patches


def find_windows(layer: Layer) -> list[Window]:
    """The rectangles of patches that only see themselves, if the layer cuts its grid into some; none if a patch sees
    all, or if what patches see is anything else. Measured on the map: a pair is visible if a head gives it weight."""
    grid = layer.grid
    # rows and columns are cut each by itself: where, the patches at the edges tell
    left_edge, top_edge = [row * grid.columns for row in range(grid.rows)], list(range(grid.columns))
    down = _cuts(_seen(layer, left_edge).any(2))
    across = _cuts(_seen(layer, top_edge).any(1))
    windows = [Window(top, left, bottom, right) for top, bottom in down for left, right in across]
    if len(windows) < 2:
        return []
    corners = [(at.top, at.left) for at in windows] + [(at.bottom - 1, at.right - 1) for at in windows]
    seen = _seen(layer, [row * grid.columns + column for row, column in corners])
    for (top, left, bottom, right), one in zip(windows * 2, seen, strict=True):
        inside = torch.zeros_like(one)
        inside[top:bottom, left:right] = True
        if not torch.equal(one, inside):
            return []
    return windows


def _cuts(seen: Tensor) -> list[tuple[int, int]]:
    """The runs that a line of n places is cut into, given what each place sees of it, [n, n]: its beginning and end,
    from one run to the next. None if the first of a run does not see it whole."""
    cuts, first = list[tuple[int, int]](), 0
    while first < len(seen):
        reached = seen[first].nonzero().flatten().tolist()
        if not reached or reached != list(range(first, reached[-1] + 1)):
            return []
        cuts.append((first, reached[-1] + 1))
        first = reached[-1] + 1
    return cuts


def _seen(layer: Layer, patches: Sequence[int]) -> Tensor:
    """What patches see, [n, rows, columns]."""
    grid = layer.grid
    weights = layer.take([grid.leading + patch for patch in patches])[..., grid.leading :]
    return (weights != 0).any(0).unflatten(1, (grid.rows, grid.columns)).cpu()


def _strips(tokens: int, heads: int) -> list[range]:
    size = max(1, HELD // heads)
    return [range(first, min(first + size, tokens)) for first in range(0, tokens, size)]
