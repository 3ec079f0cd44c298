"""The patterns of runs.py in PyTorch's own operators, for a length that is not known yet: what `torch.export` records.

An exported program has one graph for all lengths, so it can neither hold a list of parts that depends on the length nor
call kernels of ours, which whoever loads it may not have. Here a pattern is a few groups of keys, one after the other:

- a near run whose two bounds rise alike (a window, blocks) is cut into tiles of b queries. All tiles see equally many
  keys, gathered by their positions: O(T (b + window) D) time and memory;
- any other near run takes all keys of a residue class: O(T S / fold D);
- far keys are few: O(T F D).

One softmax goes over the groups side by side, with masks made by comparing positions; logits are kept in memory.

Letters: B batch, T queries, S keys, H heads, G key/value heads, D head width, E value width, F far keys, C columns.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.compiling import count_blocks, surely_at_most
from regard.kernels.runs import Bias, Bound, Far, Lists, Pass, Where

TILE = 64  # queries of a tile, about


class Group(NamedTuple):
    """Keys that queries see: logits [B, H, T, C], -inf where hidden, and what weights [B, H, T, C] read of them."""

    logits: Tensor
    read: Callable[[Tensor], Tensor]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    passes: Sequence[Pass],
    *,
    scale: float,
    where: Where,
    bias: Bias,
    far_k: Tensor | None = None,
    far_v: Tensor | None = None,
    head: Tensor | None = None,
    lists: Lists | None = None,
) -> Tensor:
    """`runs.attend` without relations; any dtype and size of blocks, and a bias may be learned."""
    k, v = (_for_heads(x, q) for x in (k, v))
    far_k, far_v = (None if x is None else _for_heads(x, q) for x in (far_k, far_v))
    q = q * scale
    groups: list[Group] = []
    for part in passes:
        groups.append(_near(q, k, v, part, where, bias))
        if part.far is not None:
            groups.append(_far(q, k, v, part.far, where, bias, far_k, far_v))
        if part.listed and lists is not None:
            groups.append(_listed(q, k, v, part.block, lists.keys))
    logits = torch.cat([group.logits for group in groups], -1)
    seen = logits > -torch.inf
    # a query that sees nothing gives 0, and a finite gradient
    weights = torch.softmax(torch.where(seen, logits, torch.finfo(logits.dtype).min), -1)
    weights = torch.where(seen, weights, 0).to(v.dtype)
    shares = weights.split([group.logits.shape[-1] for group in groups], -1)
    o = reduce(torch.add, (group.read(share) for group, share in zip(groups, shares, strict=True)))
    return o if head is None else torch.cat([head, o[:, :, head.shape[2] :]], 2)


def _for_heads(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values [B, G, S, D] repeated for each head that shares them."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _near(q: Tensor, k: Tensor, v: Tensor, part: Pass, where: Where, bias: Bias) -> Group:
    """The near run of a pass: the queries arranged as [B, H, fold, tiles, b, D], each tile with a run of keys."""
    T, S, device = q.shape[2], k.shape[2], q.device
    aligned = isinstance(where.q0, int) and isinstance(where.k0, int) and where.q0 == where.k0 == 0
    fold = part.fold if aligned else 1
    tile = _tile(part.low, part.high) if aligned else None
    if tile is not None and not surely_at_most(S, tile[3]):
        b, step, start, width = tile
        n = count_blocks(T, b * fold)
    else:
        n, b, step, start, width = 1, count_blocks(T, fold), 0, 0, count_blocks(S, fold)

    def lay(x: Tensor) -> Tensor:
        """[B, H, T, C] -> [B, H, fold, n, b, C]"""
        x = F.pad(x, (0, 0, 0, n * b * fold - T))
        return x.unflatten(2, (n, b, fold)).permute(0, 1, 4, 2, 3, 5)

    def back(x: Tensor) -> Tensor:
        return x.permute(0, 1, 3, 4, 2, 5).flatten(2, 4)[:, :, :T]

    tiles = torch.arange(n, device=device)[:, None]
    residues = torch.arange(fold, device=device)[:, None, None]
    rows = residues + fold * (tiles * b + torch.arange(b, device=device))  # [fold, n, b]
    slots = residues + fold * (tiles * step + start + torch.arange(width, device=device))  # [fold, n, width]
    at = slots.clamp(0, S - 1)
    keys, values = (x[:, :, at] for x in (k, v))  # [B, H, fold, n, width, D]
    i, j = _shifted(where.q0, rows)[..., None], _shifted(where.k0, slots)[..., None, :]
    inside = ((slots >= 0) & (slots < S))[..., None, :]
    logits = _biased(lay(q) @ keys.mT, bias, i, j)
    logits = torch.where(inside & _sees(part, where, i, j), logits, -torch.inf)
    return Group(back(logits), lambda weights: back(lay(weights) @ values))


def _sees(part: Pass, where: Where, i: Tensor, j: Tensor) -> Tensor:
    """Which keys at positions j the queries at positions i see in the near run of a pass."""
    i_member, j_member = i // part.fold, j // part.fold
    seen = (j_member >= _bound(part.low, i_member)) & (j_member < _bound(part.high, i_member))
    seen = seen & (j >= max(where.first, 0))
    for end in (where.end, where.last):
        if end is not None:
            seen = seen & (j < _of_rows(end, j.dim()))
    if part.fold > 1:
        seen = seen & ((i - j) % part.fold == 0)
    return seen & (i != j) if part.hole else seen


def _far(
    q: Tensor, k: Tensor, v: Tensor, far: Far, where: Where, bias: Bias, far_k: Tensor | None, far_v: Tensor | None
) -> Group:
    S, device = k.shape[2], q.device
    index = torch.arange(far.length, device=device)
    slots = index[None] + far.start  # [1 or B, F]
    if far.inner:
        stride = far.stride if where.far_stride is None else where.far_stride[:, None].clamp(min=1)
        slots = index[None] // far.inner * stride + index % far.inner + far.start
    i = _shifted(where.q0, torch.arange(q.shape[2], device=device))[..., None]  # [.., T, 1]
    high = _bound(far.high, i)
    seen = index < high
    if far.span:
        seen = seen & (index >= high - far.span)
    if far_k is None or far_v is None:
        exist = slots < S if where.end is None else (slots < S) & (slots < where.end[:, None])
        seen = seen & exist[:, None, None]
        at = slots.clamp(max=S - 1)[:, None, :, None]
        k, v = (x.gather(2, at.expand(*x.shape[:2], -1, x.shape[3])) for x in (k, v))
    else:
        k, v = far_k, far_v
    j = index + _bound(far.high._replace(times=far.apart, plus=0), i) if far.apart else index
    logits = torch.where(seen, _biased(q @ k.mT, bias, i, j), -torch.inf)
    return Group(logits, lambda weights: weights @ v)


def _listed(q: Tensor, k: Tensor, v: Tensor, b: int, blocks: Tensor) -> Group:
    """Blocks of b queries over the blocks of keys [B, H, n, m] of their lists, -1 for none; aligned rows, no bias."""
    T, S, n, m = q.shape[2], k.shape[2], count_blocks(q.shape[2], b), blocks.shape[3]
    slots = blocks[..., None] * b + torch.arange(b, device=q.device)  # [B, H, n, m, b]
    seen = ((slots >= 0) & (slots < S)).flatten(3)[..., None, :]
    at = slots.clamp(0, S - 1).flatten(2)[..., None]
    keys, values = (x.gather(2, at.expand(-1, -1, -1, x.shape[3])).unflatten(2, (n, m * b)) for x in (k, v))

    def lay(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, n * b - T)).unflatten(2, (n, b))

    logits = torch.where(seen, _biased(lay(q) @ keys.mT, Bias(), slots, slots), -torch.inf)
    return Group(logits.flatten(2, 3)[:, :, :T], lambda weights: (lay(weights) @ values).flatten(2, 3)[:, :, :T])


def _tile(low: Bound, high: Bound) -> tuple[int, int, int, int] | None:
    """Queries of a tile, keys from one tile to the next, the first key of the first tile, keys of a tile; None where
    the bounds do not rise alike."""
    if not low.times or low.times * high.every != high.times * low.every:
        return None
    every = math.lcm(low.every, high.every)
    span = _bound(high, 0) - _bound(low, 0)
    # half a window: fewer queries copy keys more often, more of them make logits that are hidden
    b = every * max(1, max(TILE, span * low.every // low.times // 2) // every)
    start = _bound(low, 0)
    return b, b // low.every * low.times, start, max(_bound(high, b - 1) - start, 1)


@overload
def _bound(bound: Bound, i: int) -> int: ...


@overload
def _bound(bound: Bound, i: Tensor) -> Tensor | int: ...


def _bound(bound: Bound, i: Tensor | int) -> Tensor | int:
    return bound.plus if not bound.times else (i + bound.add) // bound.every * bound.times + bound.plus


def _shifted(first: int | Tensor, steps: Tensor) -> Tensor:
    """Positions of steps [...] from `first` on: [1 or B, 1, ...]"""
    return steps[None, None] + (_of_rows(first, steps.dim() + 2) if isinstance(first, Tensor) else first)


def _of_rows(x: Tensor, dims: int) -> Tensor:
    return x.view(-1, *[1] * (dims - 1))


def _biased(logits: Tensor, bias: Bias, i: Tensor, j: Tensor) -> Tensor:
    """Logits in float32 or better, with a bias of positions."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if bias.slopes is not None:
        slopes = bias.slopes.view(-1, *[1] * (logits.dim() - 2))
        logits = logits - slopes * (j - i).abs()
    if bias.table is not None:
        gap = (j - i + bias.origin).clamp(0, bias.table.shape[1] - 1)
        logits = logits + bias.table[:, gap[:, 0]].transpose(0, 1)  # [1 or B, H, ...]
    return logits
