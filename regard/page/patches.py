"""Maps over the patches of an image: rollout over the layers, attention distance, windows.

A layer is given by what it takes rows of its map with and by its grid, so that no map of N x N numbers is ever held.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

HELD = 1024  # rows of a map that are held at a time, counted over all heads

TakeRows = Callable[[Sequence[int]], Tensor]  # numbers of queries -> their rows of the map, [H, n, S]


class Grid(NamedTuple):
    """The tokens of a layer: `leading` ones, such as a class token, and then patches, row by row."""

    rows: int
    columns: int
    leading: int = 0

    @property
    def patches(self) -> int:
        return self.rows * self.columns

    @property
    def tokens(self) -> int:
        return self.leading + self.patches


class Layer(NamedTuple):
    """A layer of self-attention over patches."""

    take: TakeRows
    heads: int
    grid: Grid


class Window(NamedTuple):
    """The patches of rows top to bottom - 1 and columns left to right - 1."""

    top: int
    left: int
    bottom: int
    right: int


def of_map(weights: Tensor, grid: Grid) -> Layer:
    """A layer whose map [H, T, T] is there."""
    if weights.shape[1:] != (grid.tokens, grid.tokens):
        raise ValueError(f"a map of {grid} has {grid.tokens} rows and columns, got {list(weights.shape[1:])}")
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
    if coarse == fine:
        return flow
    if coarse.leading != fine.leading or coarse.rows > fine.rows or coarse.columns > fine.columns:
        raise ValueError(f"patches of {fine} cannot be merged into {coarse}")
    down, across = (torch.arange(many) // -(-many // few) for many, few in zip(fine[:2], coarse[:2], strict=True))
    place = (down[:, None] * coarse.columns + across).flatten().to(flow.device)  # [fine patches]
    shares = flow[:, coarse.leading :] / torch.bincount(place, minlength=coarse.patches)
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
    for queries in _strips(grid.patches, layer.heads):
        weights = layer.take([grid.leading + query for query in queries])[..., grid.leading :].float().cpu()
        far = torch.cdist(places[queries[0] : queries[-1] + 1], places)  # [n, patches]
        # a patch that sees no other bridges no distance
        sums = weights.sum(2).clamp(min=torch.finfo(weights.dtype).tiny)
        total += ((weights * far).sum(2) / sums).sum(1)
    return total / grid.patches


def find_windows(layer: Layer) -> list[Window]:
    """The rectangles of patches that only see themselves, if the layer cuts its grid into some; none if a patch sees
    all, or if what patches see is anything else. Measured on the map: a pair is visible if a head gives it weight."""
    grid = layer.grid
    free = torch.ones(grid.rows, grid.columns, dtype=torch.bool)
    windows: list[Window] = []
    while free.any():
        top, left = (int(part) for part in free.nonzero()[0])
        seen = _seen(layer, top, left)
        if not seen[top, left]:
            return []
        bottom, right = (int(part) + 1 for part in seen.nonzero().max(0).values)
        window = Window(top, left, bottom, right)
        inside = torch.zeros_like(free)
        inside[top:bottom, left:right] = True
        # a rectangle, of patches that no other window has, seen alike from its far corner
        if not torch.equal(seen, inside) or not bool((free | ~inside).all()) or inside.all():
            return []
        if not torch.equal(_seen(layer, bottom - 1, right - 1), inside):
            return []
        free &= ~inside
        windows.append(window)
    return windows


def _seen(layer: Layer, row: int, column: int) -> Tensor:
    """The patches [rows, columns] that a patch sees."""
    grid = layer.grid
    weights = layer.take([grid.leading + row * grid.columns + column])[:, 0, grid.leading :]
    return (weights != 0).any(0).view(grid.rows, grid.columns).cpu()


def _strips(tokens: int, heads: int) -> list[range]:
    size = max(1, HELD // heads)
    return [range(first, min(first + size, tokens)) for first in range(0, tokens, size)]
