"""Sliding-window attention, exact, in time and memory linear in the length.

    o_t = sum_s softmax_s(scale q_t . k_s + bias_{s - t}) v_s    over    -before <= s - t <= after

The queries are cut into tiles of b. A tile sees one run of b + before + after keys, so all tiles inside the sequence
share one mask and are a single part with overlapping runs of keys; the few tiles at the ends see a piece of that run,
through the same piece of the mask. Cost O(N (b + before + after) D) for b of the order of the square root of the
window: a larger tile wastes logits outside of the band, a smaller one adds up more copies of a key's gradient.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.parts import Part, Runs, union


def band(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    before: int,
    after: int,
    count: Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    dilation: int = 1,
) -> Tensor:
    """q [B, H, N, D] over k, v [B, G, N, D] -> [B, H, N, D]: query t sees key s if -before <= s - t <= after.

    `count` [B]: real tokens, at the left of a row; what stands after them gets no weight (with after = 0 no real query
    sees it in the first place). `bias` [H, before + after + 1]: added to the logits at distance s - t = -before, ...,
    after. `dilation`: only the distances it divides.
    """
    N = q.shape[2]
    if dilation > 1:
        return _dilated(q, k, v, before, after, count, scale, bias, dilation)
    real = None if count is None or after == 0 else torch.arange(N, device=q.device) < count[:, None]
    parts = band_parts(N, before=before, after=after, bias=bias, device=q.device)
    return union(q, k, v, parts, scale=scale, real=real)


def band_tail(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    before: int,
    real: Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The causal window for T new queries over the `before` keys of the past and their own: S = before + T.

    `real` [B, S] bool: the slots that hold a key. `bias` [H, before + 1], as in `band`. O(T before D); T = 1 is one
    dense attention over the window.
    """
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    if T == 1:  # the heads that share their keys are queries of one head
        mask = None if bias is None else bias.unflatten(0, (G, H // G))
        part = Part(Runs(0, H // G), Runs(0, S), mask=mask)
        return union(q.reshape(B, G, H // G, D), k, v, [part], scale=scale, real=real).reshape(B, H, 1, -1)
    parts = band_parts(T, before=before, after=0, shift=before, bias=bias, device=q.device)
    return union(q, k, v, parts, scale=scale, real=real)


def band_parts(
    T: int,
    *,
    before: int,
    after: int,
    shift: int = 0,
    bias: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> list[Part]:
    """The parts of a band for `union`, where query t < T stands at key t + shift of S = T + shift."""
    S = T + shift
    before, left = min(before, S - 1), before
    after = min(after, T - 1)
    if bias is not None:
        bias = bias[:, left - before : left + after + 1]
    if bias is None and after == T - 1 and before == S - 1:
        return [Part(Runs(0, T), Runs(0, S))]
    if bias is None and after == 0 and before == S - 1 and shift == 0:
        return [Part(Runs(0, T), Runs(0, S), causal=True)]

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
        parts.append(Part(Runs(t, stop - t), Runs(low, high - low), mask=piece))
    if first < last:
        rows = Runs(first * b, b, last - first, b)
        cols = Runs(first * b + shift - before, b + before + after, last - first, b)
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


def _dilated(q, k, v, before, after, count, scale, bias, dilation) -> Tensor:
    """The tokens of one residue class modulo the dilation see each other only: fold the classes into the batch."""
    B, _, N, _ = q.shape
    pad = -N % dilation
    if count is None and pad:
        count = torch.full((B,), N, device=q.device)

    def fold(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, dilation)).movedim(3, 1).flatten(0, 1)

    if count is not None:
        count = ((count[:, None] - torch.arange(dilation, device=q.device) + dilation - 1) // dilation).flatten()
    if bias is not None:
        bias = bias[:, before % dilation :: dilation]
    o = band(
        fold(q),
        fold(k),
        fold(v),
        before=before // dilation,
        after=after // dilation,
        count=count,
        scale=scale,
        bias=bias,
    )
    return o.unflatten(0, (B, dilation)).movedim(1, 3).flatten(2, 3)[:, :, :N]
