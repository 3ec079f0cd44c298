"""Sliding-window attention, exact, in time and memory linear in the length.

    o_t = sum_s softmax_s(scale q_t . k_s + bias_{s - t}) v_s    over    -before <= s - t <= after

The queries are cut into tiles of b. A tile sees one run of b + before + after keys, so all tiles inside the sequence
share one mask and are a single part with overlapping runs of keys; the few tiles at the ends see a piece of that run,
through the same piece of the mask. Cost O(N (b + before + after) D) for b of the order of the square root of the
window: a larger tile wastes logits outside of the band, a smaller one adds up more copies of a key's gradient.
"""

import math

import torch
from torch import Tensor

from regard.kernels.parts import Part, Runs


def band_parts(
    T: int,
    *,
    before: int,
    after: int,
    shift: int = 0,
    front: int = 0,
    bias: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> list[Part]:
    """The parts of a band for `union`, where query t < T stands at key t + shift of S = T + shift. Before these keys
    stand `front` others, which no part reads."""
    S = T + shift
    before, left = min(before, S - 1), before
    after = min(after, T - 1)
    if bias is not None:
        bias = bias[:, left - before : left + after + 1]
    if bias is None and after == T - 1 and before == S - 1:
        return [Part(Runs(0, T), Runs(front, S))]
    if bias is None and after == 0 and before == S - 1 and shift == 0:
        return [Part(Runs(0, T), Runs(front, S), causal=True)]

    b = T if T <= 64 else min(T, _tile(before + after))
    mask = _tile_mask(b, before, after, bias, device)
    # Tiles first, ..., last - 1 have all their keys inside the sequence.
    first = -((shift - before) // b) if before > shift else 0
    last = max(first, (T - after) // b)
    parts = []
    for i in (*range(min(first, -(-T // b))), *range(last, -(-T // b))):
        t, stop = i * b, min(i * b + b, T)
        low, high = max(0, t + shift - before), min(S, stop + shift + after)
        skip = low - (t + shift - before)
        piece = mask[..., : stop - t, skip : skip + high - low]
        parts.append(Part(Runs(t, stop - t), Runs(front + low, high - low), mask=piece))
    if first < last:
        rows = Runs(first * b, b, last - first, b)
        cols = Runs(front + first * b + shift - before, b + before + after, last - first, b)
        parts.append(Part(rows, cols, mask=mask))
    return parts


def _tile(window: int) -> int:
    """Queries in a tile: near the fastest measured for windows of 4 to 2048. The kernel takes 32 queries at a time."""
    return 32 * max(1, round(math.sqrt(window) / 8))


def _tile_mask(b: int, before: int, after: int, bias: Tensor | None, device: torch.device | str) -> Tensor:
    """[b, b + before + after], bool or (from a bias) float [H, ...]: key c of a tile is c - before - r from query r."""
    away = torch.arange(b + before + after, device=device) - torch.arange(b, device=device)[:, None]
    inside = (away >= 0) & (away <= before + after)
    if bias is None:
        return inside
    return bias[:, away.clamp(0, before + after)].masked_fill(~inside, -torch.inf)
