"""The patterns of runs.py in Triton: softmax over runs of keys, without logits in memory.

Forward: a program takes a tile of queries and goes over the tiles of keys that one of them sees, with a running maximum
and sum (in base 2, the scale joined to the logits); masks are made only for tiles that some query does not see whole.
Backward: one kernel over tiles of queries (dq, and the rows' o . do), one over tiles of keys (dk, dv), which finds its
queries by the inverse of the bounds. There are no atomics, so results are the same from run to run.

Few queries over many keys, and few far keys under many queries, are split over the grid: partial results in float32,
merged by their logsumexp or added up. Later passes of a pattern read what earlier ones left, in float32.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.runs import LOG2E, Pass, empty_like_heads, unflatten

PROGRAMS = 2112  # that a grid should have: a few for each multiprocessor
MANY = 512  # far keys from which on they are most of the work


class Tile(NamedTuple):
    """Queries and keys of a tile, warps, pipeline stages; the most registers of a thread (None: as many as it takes),
    for more programs at a time; whether all tiles of keys are masked, in one loop instead of two."""

    rows: int
    keys: int
    warps: int = 4
    stages: int = 2
    registers: int | None = None
    masked: bool = False


def tile(kind: str, width: int, dtype: torch.dtype, far: int = 0, plain: bool = True) -> Tile:
    """The tile of a kernel ("forward", "queries", "keys" or, of far keys, "far") for a head width. `far` is how many
    far keys there are; `plain`: no list of blocks and no table of relations takes registers as well."""
    if dtype == torch.float32:
        return Tile(32, 32, 4, 1) if width <= 128 else Tile(16, 16, 4, 1)
    if width > 128:
        return {"forward": Tile(64, 32, 8)}.get(kind, Tile(32, 32, 8, 1))
    # Measured on an H200, with a window of 256 and heads of 64: larger tiles are slower, as a window is few of them;
    # fewer registers make room for one program more on each multiprocessor.
    if far > MANY:
        many = {"forward": Tile(128, 64, 4, 3), "queries": Tile(64, 64), "far": Tile(32, 128, 4, 3)}
        return many.get(kind, Tile(32, 64))
    if width > 64 or not plain or (far and kind == "keys"):
        return {"forward": Tile(64, 64, 4, 3), "queries": Tile(64, 64)}.get(kind, Tile(32, 64))
    return {"forward": Tile(64, 64, 4, 2, 128), "queries": Tile(64, 32, 4, 3, 96)}.get(kind, Tile(32, 64, 4, 1, 128))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    far_k: Tensor | None,
    far_v: Tensor | None,
    head: Tensor | None,
    related: Tensor | None,
    scale: float,
    numbers: Sequence[int],
    tensors: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor]:
    common, passes = unflatten(numbers)
    (B, H, T, _), E = q.shape, v.shape[3]
    o, lse = empty_like_heads(q, E), q.new_empty(B, H, T, dtype=torch.float32)
    inner = empty_like_heads(q, E, torch.float32) if len(passes) > 1 else None
    for n, part in enumerate(passes):
        sizes = _tile_of("forward", q, v, part, related is None)
        programs = triton.cdiv(triton.cdiv(T, part.fold), sizes.rows) * B * H * part.fold
        splits = _splits(programs, part, triton.cdiv(k.shape[2], sizes.keys)) if len(passes) == 1 else 1
        out, out_lse = (o if n == len(passes) - 1 else inner), lse
        if splits > 1:
            out = q.new_empty(splits, B, T, H, E, dtype=torch.float32).transpose(2, 3)
            out_lse = lse.new_empty(splits, B, H, T)
        near, far = _arguments(q, k, v, far_k, far_v, related, part, common, tensors)
        with torch.cuda.device_of(q):
            _forward[(programs, splits)](
                *near,
                *far,
                out,
                out_lse,
                inner if n else None,
                *out.stride()[-4:-1],
                out.stride(0),
                scale * LOG2E,
                **_constants(q, k, v, far_k, part, sizes, common),
                SPLITS=splits,
                **_launch(sizes),
            )
        if splits > 1:
            _merge(out, out_lse, o, lse)
    if head is not None:
        o[:, :, : head.shape[2]] = head
    return o, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    far_k: Tensor | None,
    far_v: Tensor | None,
    related: Tensor | None,
    o: Tensor,
    lse: Tensor,
    scale: float,
    numbers: Sequence[int],
    tensors: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    common, passes = unflatten(numbers)
    grad = grad if grad.stride(-1) == 1 or grad.shape[-1] == 1 else grad.contiguous()
    delta = torch.empty_like(lse)
    rows = (q, k, v, far_k, far_v, related, scale, common, tensors)
    # not every distance has a key
    of_related = q.new_empty(0) if related is None else torch.zeros_like(related)
    gq, gk, gv = (empty_like_heads(x, x.shape[3]) for x in (q, k, v))
    wide = [empty_like_heads(x, x.shape[3], torch.float32) if len(passes) > 1 else None for x in (q, k, v)]
    gfar = (q.new_empty(0), q.new_empty(0))
    for n, part in enumerate(passes):
        last, before = n == len(passes) - 1, wide if n else (None, None, None)
        outs = (gq, gk, gv) if last else wide
        _of_queries(part, rows, grad, o, lse, delta, outs[0], before[0], n == 0, of_related)
        sums = _of_far(part, rows, grad, lse, delta)
        _of_keys(part, rows, grad, lse, delta, outs[1:], before[1:], None if far_k is not None else sums)
        if far_k is not None:
            gfar = tuple(x.to(k.dtype) for x in sums)
    return gq, gk, gv, *gfar, of_related


def _of_queries(part: Pass, rows: tuple, grad, o, lse, delta, gq, before, first: bool, of_related) -> None:
    """dq, delta by the first pass, and the gradient of what relations add."""
    q, k, v, far_k, far_v, related, scale, common, tensors = rows
    (B, H, T, D), sizes = q.shape, _tile_of("queries", q, v, part, related is None)
    programs = triton.cdiv(triton.cdiv(T, part.fold), sizes.rows) * B * H * part.fold
    alone = before is None and gq.dtype == q.dtype
    splits = _splits(programs, part, triton.cdiv(k.shape[2], sizes.keys)) if alone else 1
    out = gq
    if splits > 1:
        out = q.new_empty(splits, B, T, H, D, dtype=torch.float32).transpose(2, 3)
    out_related = of_related
    if splits > 1 and related is not None:
        out_related = related.new_empty(splits, *related.shape, dtype=torch.float32)
    near, far = _arguments(q, k, v, far_k, far_v, related, part, common, tensors)
    with torch.cuda.device_of(q):
        _queries[(programs, splits)](
            *near,
            *far,
            o,
            grad,
            lse,
            delta,
            out,
            before,
            None if related is None else out_related,
            *o.stride()[:3],
            *grad.stride()[:3],
            *out.stride()[-4:-1],
            out.stride(0),
            scale * LOG2E,
            scale,
            **_constants(q, k, v, far_k, part, sizes, common),
            SPLITS=splits,
            FIRST=first,
            **_launch(sizes),
        )
    if splits > 1:
        gq.copy_(out.sum(0))
        if related is not None:
            of_related.copy_(out_related.sum(0))


def _of_far(part: Pass, rows: tuple, grad, lse, delta) -> tuple[Tensor, Tensor] | None:
    """dk and dv of the far keys, float32 [B, G, F, D or E]."""
    if part.far is None:
        return None
    q, k, v, far_k, far_v, related, scale, common, tensors = rows
    (B, _, T, _), G, sizes = q.shape, k.shape[1], _tile_of("far", q, v, part, related is None)
    # classes do not matter to far keys, which see the queries of all of them
    part, count = part._replace(fold=1, hole=False), part.far.count
    keys = min(sizes.keys, max(16, triton.next_power_of_2(count)))
    sizes = sizes._replace(keys=keys)
    programs = triton.cdiv(count, keys) * B * G
    splits = max(1, min(PROGRAMS // programs, triton.cdiv(T, sizes.rows) // 4))
    sums = [q.new_empty(splits, B, G, count, x.shape[3], dtype=torch.float32) for x in (q, v)]
    near, far = _arguments(q, k, v, far_k, far_v, related, part, common, tensors)
    with torch.cuda.device_of(q):
        _keys[(programs, splits)](
            *near,
            *far,
            grad,
            lse,
            delta,
            *sums,
            None,
            None,
            None,
            None,
            *grad.stride()[:3],
            *sums[0].stride()[1:4],
            *sums[1].stride()[1:4],
            sums[0].stride(0),
            sums[1].stride(0),
            scale * LOG2E,
            scale,
            **_constants(q, k, v, far_k, part, sizes, common),
            SPLITS=splits,
            OF_FAR=True,
            **_launch(sizes),
        )
    return tuple(x.sum(0) if splits > 1 else x[0] for x in sums)


def _of_keys(part: Pass, rows: tuple, grad, lse, delta, outs, before, sums) -> None:
    """dk and dv of the near keys, and what far ones of the same tensors have had."""
    q, k, v, far_k, far_v, related, scale, common, tensors = rows
    (B, G, S, _), sizes = k.shape, _tile_of("keys", q, v, part, related is None)
    programs = triton.cdiv(triton.cdiv(S, part.fold), sizes.keys) * B * G * part.fold
    near, far = _arguments(q, k, v, far_k, far_v, related, part, common, tensors)
    with torch.cuda.device_of(q):
        _keys[(programs, 1)](
            *near,
            *far,
            grad,
            lse,
            delta,
            *outs,
            *before,
            *(sums or (None, None)),
            *grad.stride()[:3],
            *outs[0].stride()[:3],
            *outs[1].stride()[:3],
            0,
            0,
            scale * LOG2E,
            scale,
            **_constants(q, k, v, far_k, part, sizes, common),
            SPLITS=1,
            OF_FAR=False,
            **_launch(sizes),
        )


def _merge(out: Tensor, out_lse: Tensor, o: Tensor, lse: Tensor) -> None:
    """Partial results [splits, ...] into o and lse."""
    natural = out_lse / LOG2E
    weights = torch.softmax(natural, 0).nan_to_num(0.0)[..., None]
    torch.logsumexp(natural, 0, out=lse)
    lse.mul_(LOG2E)
    o.copy_((out * weights).sum(0))


def _splits(programs: int, part: Pass, blocks: int) -> int:
    """Into how many shares the keys are cut, where all queries see all and the grid would be small."""
    if part.low.times or part.high.times or part.fold > 1 or part.far is not None:
        return 1
    return max(1, min(PROGRAMS // programs, blocks // 4))


def _tile_of(kind: str, q: Tensor, v: Tensor, part: Pass, plain: bool) -> Tile:
    far = 0 if part.far is None else part.far.count
    sizes = tile(kind, triton.next_power_of_2(max(q.shape[3], v.shape[3])), q.dtype, far, plain and not part.listed)
    if part.block:
        sizes = sizes._replace(rows=min(sizes.rows, part.block), keys=min(sizes.keys, part.block))
    # few queries fill no large tile
    return sizes._replace(rows=min(sizes.rows, max(16, triton.next_power_of_2(q.shape[2]))))


def _launch(sizes: Tile) -> dict[str, int]:
    options = {"num_warps": sizes.warps, "num_stages": sizes.stages}
    return options if sizes.registers is None else options | {"maxnreg": sizes.registers}


def _arguments(q, k, v, far_k, far_v, related, part: Pass, common, tensors) -> tuple[tuple, tuple]:
    """What all kernels take first: inputs, strides, sizes and places; of far keys those of the near, where there are
    no others."""
    far_k, far_v = (k, v) if far_k is None else (far_k, far_v)
    q0_at, k0_at, end, since, until, last, far_stride, slopes, table, *lists = tensors
    q0, k0, first, skip, origin = common[:5]
    low, high, far = part.low, part.high, part.far
    near = (
        *(q, k, v, far_k, far_v, q0_at, k0_at, end, since, until, last, far_stride, slopes, table, *lists, related),
        *(stride for x in (q, k, v, far_k, far_v) for stride in x.stride()[:3]),
    )
    counts = (
        *(q.shape[1], q.shape[2], k.shape[2], q0, k0, first, skip, origin, 0 if table is None else table.shape[1]),
        0 if related is None else related.shape[3],
        *(low.add, low.plus, high.add, high.plus),
        *((0, 0, 0, 1) if far is None else (far.count, far.high.add, far.high.plus, max(1, far.stride))),
    )
    return near, counts


def _constants(
    q: Tensor, k: Tensor, v: Tensor, far_k: Tensor | None, part: Pass, sizes: Tile, common: Sequence[int]
) -> dict[str, int | bool]:
    far = part.far
    D, E = q.shape[3], v.shape[3]
    far_keys = 16 if far is None else min(sizes.keys, max(16, triton.next_power_of_2(far.count)))
    return {
        "RATIO": q.shape[1] // k.shape[1],
        "D": D,
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
        "E": E,
        "BLOCK_E": max(16, triton.next_power_of_2(E)),
        "ROWS": sizes.rows,
        "KEYS": sizes.keys,
        "FAR_KEYS": far_keys,
        "LOW_EVERY": part.low.every,
        "LOW_TIMES": part.low.times,
        "HIGH_EVERY": part.high.every,
        "HIGH_TIMES": part.high.times,
        "FAR": far is not None,
        "FAR_EVERY": 1 if far is None else far.high.every,
        "FAR_TIMES": 0 if far is None else far.high.times,
        "FAR_START": 0 if far is None else far.start,
        "FAR_INNER": 0 if far is None else far.inner,
        "FAR_CLIP": far is not None and far_k is None,
        "FOLD": part.fold,
        "HOLE": part.hole,
        "MASKED": part.hole or sizes.masked,
        "BLOCK": part.block,
        "LISTED": part.listed,
        "DISTANCE": common[5],
        "GLOBALS": common[6],
        "SEGMENT": common[7],
        "OF_GLOBALS": bool(common[8]),
        "RELATIONS": triton.next_power_of_2(2 * common[5] + 3) if common[5] > 0 else 1,
    }


@triton.jit
def _floor(x, EVERY: tl.constexpr):
    """x // EVERY rounded down, where Triton rounds towards zero."""
    if EVERY == 1:
        return x
    else:
        return tl.where(x >= 0, x // EVERY, -((EVERY - 1 - x) // EVERY))


@triton.jit
def _bound(i, add, plus, EVERY: tl.constexpr, TIMES: tl.constexpr):
    if TIMES == 0:
        return i * 0 + plus
    else:
        return _floor(i + add, EVERY) * TIMES + plus


@triton.jit
def _beyond(n, add, plus, EVERY: tl.constexpr, TIMES: tl.constexpr):
    """The first i with bound(i) > n."""
    if TIMES == 0:
        return tl.where(plus > n, -(1 << 30), 1 << 30)
    else:
        return (_floor(n - plus, TIMES) + 1) * EVERY - add


@triton.jit
def _places(b, one, q0, k0, q0_at, k0_at, end_at, last_at, first, T, S, FOLD: tl.constexpr, BY_KEY: tl.constexpr):
    """Class `one` of a row: its first query and slot; how many of both; their positions; the keys that exist."""
    if q0_at is not None:
        q0 += tl.load(q0_at + b).to(tl.int32)
    if k0_at is not None:
        k0 += tl.load(k0_at + b).to(tl.int32)
    end = k0 + S
    if end_at is not None:
        end = tl.minimum(end, tl.load(end_at + b).to(tl.int32))
    if last_at is not None:
        end = tl.minimum(end, tl.load(last_at + b).to(tl.int32))
    first = tl.maximum(tl.maximum(first, k0), 0)
    if FOLD == 1:
        return one * 0, one * 0, T, S, q0, k0, first, end
    else:
        if BY_KEY:
            slot = one
            rest = ((k0 + slot) % FOLD + FOLD) % FOLD
            query = ((rest - q0) % FOLD + FOLD) % FOLD
        else:
            query = one
            rest = (q0 + query) % FOLD
            slot = ((rest - k0) % FOLD + FOLD) % FOLD
        up = FOLD - 1
        queries, slots = (T - query + up) // FOLD, (S - slot + up) // FOLD
        first, end = (first - rest + up) // FOLD, (end - rest + up) // FOLD
        return query, slot, queries, slots, (q0 + query) // FOLD, (k0 + slot - rest) // FOLD, first, end


@triton.jit
def _far_end(b, count, end_at, S, START: tl.constexpr, INNER: tl.constexpr, stride, CLIP: tl.constexpr):
    """How many far keys exist, where they are keys of the row."""
    if CLIP:
        end = S
        if end_at is not None:
            end = tl.minimum(end, tl.load(end_at + b).to(tl.int32))
        end = tl.maximum(end - START, 0)
        if INNER > 0:
            end = end // stride * INNER + tl.minimum(end % stride, INNER)
        count = tl.minimum(count, end)
    return count


@triton.jit
def _blocks(low_min, low_max, high_min, high_max, SIZE: tl.constexpr):
    """Blocks from low_min on: how many there are, and from which to which they lie in low_max ... high_min."""
    count = tl.maximum(high_max - low_min + SIZE - 1, 0) // SIZE
    whole = tl.minimum(count, tl.maximum(low_max - low_min + SIZE - 1, 0) // SIZE)
    stop = tl.maximum(whole, tl.minimum(count, tl.maximum(high_min - low_min, 0) // SIZE))
    return count, whole, stop


@triton.jit
def _share(low, high, low_max, high_min, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    """The part of a range that this program takes."""
    if SPLITS > 1:
        size = (tl.maximum(high - low + SIZE - 1, 0) // SIZE + SPLITS - 1) // SPLITS * SIZE
        low = low + tl.program_id(1) * size
        high = tl.minimum(high, low + size)
        low_max, high_min = tl.maximum(low, low_max), tl.minimum(high, high_min)
    return low, high, low_max, high_min


@triton.jit
def _load(base, stride, inside, COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr):
    """COUNT rows from base on, [COUNT, BLOCK]; zeros where a row is not `inside`."""
    column = tl.arange(0, BLOCK)[None, :]
    at = base + tl.arange(0, COUNT)[:, None] * stride + column
    if CHECKED:
        if WIDTH == BLOCK:
            return tl.load(at, mask=inside[:, None], other=0.0)
        else:
            return tl.load(at, mask=inside[:, None] & (column < WIDTH), other=0.0)
    else:
        if WIDTH == BLOCK:
            return tl.load(at)
        else:
            return tl.load(at, mask=column < WIDTH, other=0.0)


@triton.jit
def _far_slot(j, stride, START: tl.constexpr, INNER: tl.constexpr):
    if INNER == 0:
        return j + START
    else:
        return j // INNER * stride + j % INNER + START


@triton.jit
def _load_far(
    base,
    stride,
    j,
    count,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    START: tl.constexpr,
    INNER: tl.constexpr,
    far_stride,
):
    column = tl.arange(0, BLOCK)[None, :]
    at = base + _far_slot(j, far_stride, START, INNER).to(tl.int64)[:, None] * stride + column
    return tl.load(at, mask=(j < count)[:, None] & (column < WIDTH), other=0.0)


@triton.jit
def _logits(a, b, i, j, h, scale, slopes, table, origin, gaps):
    """a b^T; where there is a bias of positions also scaled, and with that of head h. i and j have its shape."""
    logits = tl.dot(a, tl.trans(b), input_precision="ieee")
    if slopes is not None or table is not None:
        logits *= scale
    if slopes is not None:
        logits -= tl.load(slopes + h) * tl.abs(j - i).to(tl.float32)
    if table is not None:
        at = j - i + origin
        logits += tl.load(table + h * gaps + at, mask=(at >= 0) & (at < gaps), other=0.0)
    return logits


@triton.jit
def _by_distance(logits, scale, related, rows_at, away, columns, inside):
    """Scaled logits, and the entry of their distance in the rows of a table."""
    seen = inside & (away >= 0) & (away < columns)
    added = tl.load(related + rows_at * columns + away, mask=seen, other=0.0).to(tl.float32)
    return logits * scale + added * 1.4426950408889634


@triton.jit
def _load_relations(related, rows_at, inside, RELATIONS: tl.constexpr, DISTANCE: tl.constexpr, BY_ROW: tl.constexpr):
    """The table of some queries, [ROWS, RELATIONS], or the other way round."""
    p = tl.arange(0, RELATIONS)
    if BY_ROW:
        at, mask = rows_at[None, :] * (2 * DISTANCE + 3) + p[:, None], inside[None, :] & (p < 2 * DISTANCE + 3)[:, None]
    else:
        at, mask = rows_at[:, None] * (2 * DISTANCE + 3) + p[None, :], inside[:, None] & (p < 2 * DISTANCE + 3)[None, :]
    return tl.load(related + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _linked(i, j, GLOBALS: tl.constexpr, SEGMENT: tl.constexpr):
    """Whether one is the global token of the other's segment."""
    return tl.maximum(tl.maximum(i, j) - GLOBALS, 0) // SEGMENT == tl.minimum(i, j)


@triton.jit
def _related(
    logits,
    scale,
    tile,
    i,
    j,
    DISTANCE: tl.constexpr,
    GLOBALS: tl.constexpr,
    SEGMENT: tl.constexpr,
    FAR: tl.constexpr,
    OF_GLOBALS: tl.constexpr,
    AXIS: tl.constexpr,
):
    """Scaled logits, and the entry of their relation in `tile`, which has the relations on an axis."""
    if FAR or OF_GLOBALS:
        across = i * 0 + j * 0 + (2 * DISTANCE + 1)
        if SEGMENT > 0:
            across += _linked(i, j, GLOBALS, SEGMENT).to(tl.int32)
    if FAR:
        index = across
    else:
        gap = j - i
        index = tl.minimum(tl.abs(gap), DISTANCE) + tl.where(gap < 0, DISTANCE, 0)
        if OF_GLOBALS:
            index = tl.where(j + gap * 0 < GLOBALS, index, across)
    return logits * scale + tl.gather(tile, index, AXIS) * 1.4426950408889634


@triton.jit
def _of_relations(
    acc,
    slope,
    i,
    at,
    DISTANCE: tl.constexpr,
    GLOBALS: tl.constexpr,
    SEGMENT: tl.constexpr,
    FAR: tl.constexpr,
    OF_GLOBALS: tl.constexpr,
    KEYS: tl.constexpr,
    RELATIONS: tl.constexpr,
):
    """What a tile of gradients of logits [ROWS, KEYS], of the keys from `at` on, adds to those of relations."""
    p = tl.arange(0, RELATIONS)[None, :]
    i, j = i[:, None], (at + tl.arange(0, KEYS))[None, :]
    if not FAR:
        # below the largest distance a relation is that of one key
        gap = tl.where(p > DISTANCE, DISTANCE - p, p)
        key = i + gap
        inner = (p < 2 * DISTANCE) & (p != DISTANCE) & (key >= at) & (key < at + KEYS)
        right, left = j - i >= DISTANCE, i - j >= DISTANCE
        if OF_GLOBALS:
            inner, right = inner & (key < GLOBALS), right & (j < GLOBALS)
        acc += tl.where(inner, tl.gather(slope, tl.minimum(tl.maximum(key - at, 0), KEYS - 1), 1), 0.0)
        acc += tl.where(p == DISTANCE, tl.sum(tl.where(right, slope, 0.0), 1)[:, None], 0.0)
        acc += tl.where(p == 2 * DISTANCE, tl.sum(tl.where(left, slope, 0.0), 1)[:, None], 0.0)
    if FAR or OF_GLOBALS:
        if OF_GLOBALS:
            slope = tl.where(j >= GLOBALS, slope, 0.0)
        if SEGMENT > 0:
            linked = _linked(i, j, GLOBALS, SEGMENT)
            acc += tl.where(p == 2 * DISTANCE + 2, tl.sum(tl.where(linked, slope, 0.0), 1)[:, None], 0.0)
            slope = tl.where(linked, 0.0, slope)
        acc += tl.where(p == 2 * DISTANCE + 1, tl.sum(slope, 1)[:, None], 0.0)
    return acc


@triton.jit
def _absorb(acc, total, top, logits, scale, value, visible, MASKED: tl.constexpr):
    """One tile of keys joins the running output, sum and maximum."""
    if MASKED:
        logits = tl.where(visible, logits, float("-inf"))
    # scaled after the maximum: the scale of each logit joins the subtraction
    new = tl.maximum(top, tl.max(logits, 1) * scale)
    base = new
    if MASKED:
        # a row that has seen nothing yet
        base = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(logits * scale - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    return acc, total, new


@triton.jit(
    do_not_specialize=[
        *(
            "T",
            "S",
            "q0",
            "k0",
            "first",
            "skip",
            "origin",
            "gaps",
            "columns",
            "low_add",
            "low_plus",
            "high_add",
            "high_plus",
        ),
        *("far_count", "far_add", "far_plus", "far_stride"),
    ]
)
def _forward(
    q,
    k,
    v,
    far_k,
    far_v,
    q0_at,
    k0_at,
    end_at,
    since,
    until,
    last_at,
    stride_at,
    slopes,
    table,
    lists,
    list_starts,
    list_rows,
    related,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    fk_b,
    fk_h,
    fk_t,
    fv_b,
    fv_h,
    fv_t,
    H,
    T,
    S,
    q0,
    k0,
    first,
    skip,
    origin,
    gaps,
    columns,
    low_add,
    low_plus,
    high_add,
    high_plus,
    far_count,
    far_add,
    far_plus,
    far_stride,
    o,
    lse,
    before,
    o_b,
    o_h,
    o_t,
    o_split,
    scale,
    RATIO: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    FAR_KEYS: tl.constexpr,
    LOW_EVERY: tl.constexpr,
    LOW_TIMES: tl.constexpr,
    HIGH_EVERY: tl.constexpr,
    HIGH_TIMES: tl.constexpr,
    FAR: tl.constexpr,
    FAR_EVERY: tl.constexpr,
    FAR_TIMES: tl.constexpr,
    FAR_START: tl.constexpr,
    FAR_INNER: tl.constexpr,
    FAR_CLIP: tl.constexpr,
    FOLD: tl.constexpr,
    HOLE: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
    DISTANCE: tl.constexpr,
    GLOBALS: tl.constexpr,
    SEGMENT: tl.constexpr,
    OF_GLOBALS: tl.constexpr,
    RELATIONS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    # of causal patterns the later tiles are longer: they begin first
    tiles = ((T + FOLD - 1) // FOLD + ROWS - 1) // ROWS
    row0 = (tiles - 1 - tl.program_id(0) % tiles) * ROWS
    one = tl.program_id(0) // tiles
    b, h = (one // (H * FOLD)).to(tl.int64), (one // FOLD % H).to(tl.int64)
    t0, s0, queries, _, q0, k0, first, end = _places(
        b, one % FOLD, q0, k0, q0_at, k0_at, end_at, last_at, first, T, S, FOLD, False
    )
    row = row0 + tl.arange(0, ROWS)
    t = t0 + row * FOLD
    inside = (row < queries) & (t >= skip)
    i = row + q0
    q_at = q + b * q_b + h * q_h + (t0 + row0.to(tl.int64) * FOLD) * q_t
    query = _load(q_at, q_t * FOLD, inside, ROWS, D, BLOCK_D, True)
    rows_at = (b * H + h) * T + t
    factor = scale if slopes is None and table is None and related is None else 1.0
    if DISTANCE > 0:
        tile = _load_relations(related, rows_at, inside, RELATIONS, DISTANCE, False)
    if before is None:
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_E], tl.float32)
    else:
        top = tl.load(lse + rows_at, mask=inside, other=float("-inf"))
        total = tl.where(top == float("-inf"), 0.0, 1.0)
        before_at = before + b * o_b + h * o_h + (t0 + row0.to(tl.int64) * FOLD) * o_t
        acc = _load(before_at, o_t * FOLD, inside, ROWS, E, BLOCK_E, True)

    if FAR:
        fk_at, fv_at = far_k + b * fk_b + h // RATIO * fk_h, far_v + b * fv_b + h // RATIO * fv_h
        if stride_at is not None:
            far_stride = tl.load(stride_at + b).to(tl.int32)
        far_count = _far_end(b, far_count, end_at, S, FAR_START, FAR_INNER, far_stride, FAR_CLIP)
        high = tl.minimum(_bound(i, far_add, far_plus, FAR_EVERY, FAR_TIMES), far_count)
        last = tl.minimum(row0 + ROWS, queries) - 1 + q0
        high_min = tl.minimum(_bound(row0 + q0, far_add, far_plus, FAR_EVERY, FAR_TIMES), far_count)
        high_max = tl.minimum(_bound(last, far_add, far_plus, FAR_EVERY, FAR_TIMES), far_count)
        count, whole, stop = _blocks(0, 0, high_min, high_max, FAR_KEYS)
        for n in range(whole, stop):
            j = n * FAR_KEYS + tl.arange(0, FAR_KEYS)
            key = _load_far(fk_at, fk_t, j, far_count, D, BLOCK_D, FAR_START, FAR_INNER, far_stride)
            value = _load_far(fv_at, fv_t, j, far_count, E, BLOCK_E, FAR_START, FAR_INNER, far_stride)
            logits = _logits(query, key, i[:, None], j[None, :], h, scale, slopes, table, origin, gaps)
            if DISTANCE < 0:
                logits = _by_distance(
                    logits, scale, related, rows_at[:, None], i[:, None] - j[None, :], columns, inside[:, None]
                )
            if DISTANCE > 0:
                logits = _related(
                    *(logits, scale, tile, i[:, None], j[None, :], DISTANCE, GLOBALS, SEGMENT, True, OF_GLOBALS, 1)
                )
            acc, total, top = _absorb(acc, total, top, logits, factor, value, None, False)
        for n in range(stop, count):
            j = n * FAR_KEYS + tl.arange(0, FAR_KEYS)
            key = _load_far(fk_at, fk_t, j, far_count, D, BLOCK_D, FAR_START, FAR_INNER, far_stride)
            value = _load_far(fv_at, fv_t, j, far_count, E, BLOCK_E, FAR_START, FAR_INNER, far_stride)
            logits = _logits(query, key, i[:, None], j[None, :], h, scale, slopes, table, origin, gaps)
            if DISTANCE < 0:
                logits = _by_distance(
                    logits, scale, related, rows_at[:, None], i[:, None] - j[None, :], columns, inside[:, None]
                )
            if DISTANCE > 0:
                logits = _related(
                    *(logits, scale, tile, i[:, None], j[None, :], DISTANCE, GLOBALS, SEGMENT, True, OF_GLOBALS, 1)
                )
            acc, total, top = _absorb(acc, total, top, logits, factor, value, j[None, :] < high[:, None], True)

    low, high, low_min, low_max, high_min, high_max = _rows_see(
        *(i, row0 + q0, tl.minimum(row0 + ROWS, queries) - 1 + q0, b * T + t, inside, since, until, first, end),
        *(low_add, low_plus, high_add, high_plus, LOW_EVERY, LOW_TIMES, HIGH_EVERY, HIGH_TIMES, MASKED),
    )
    low_min, high_max, low_max, high_min = _share(low_min, high_max, low_max, high_min, SPLITS, KEYS)
    count, whole, stop = _blocks(low_min, low_max, high_min, high_max, KEYS)
    k_at = k + b * k_b + h // RATIO * k_h + (s0 - k0.to(tl.int64) * FOLD) * k_t
    v_at = v + b * v_b + h // RATIO * v_h + (s0 - k0.to(tl.int64) * FOLD) * v_t
    for n in range(count - (stop - whole)):
        at = low_min + tl.where(n < whole, n, n + stop - whole) * KEYS
        j = at + tl.arange(0, KEYS)
        real = (j >= first) & (j < end)
        key = _load(k_at + at.to(tl.int64) * FOLD * k_t, k_t * FOLD, real, KEYS, D, BLOCK_D, True)
        value = _load(v_at + at.to(tl.int64) * FOLD * v_t, v_t * FOLD, real, KEYS, E, BLOCK_E, True)
        logits = _logits(query, key, i[:, None], j[None, :], h, scale, slopes, table, origin, gaps)
        if DISTANCE < 0:
            logits = _by_distance(
                logits, scale, related, rows_at[:, None], i[:, None] - j[None, :], columns, inside[:, None]
            )
        if DISTANCE > 0:
            logits = _related(
                *(logits, scale, tile, i[:, None], j[None, :], DISTANCE, GLOBALS, SEGMENT, False, OF_GLOBALS, 1)
            )
        visible = (j[None, :] >= low[:, None]) & (j[None, :] < high[:, None])
        if HOLE:
            visible &= j[None, :] != i[:, None]
        acc, total, top = _absorb(acc, total, top, logits, factor, value, visible, True)
    if not MASKED:
        for n in range(whole, stop):
            at = low_min + n * KEYS
            j = at + tl.arange(0, KEYS)
            key = _load(k_at + at.to(tl.int64) * FOLD * k_t, k_t * FOLD, None, KEYS, D, BLOCK_D, False)
            value = _load(v_at + at.to(tl.int64) * FOLD * v_t, v_t * FOLD, None, KEYS, E, BLOCK_E, False)
            logits = _logits(query, key, i[:, None], j[None, :], h, scale, slopes, table, origin, gaps)
            if DISTANCE < 0:
                logits = _by_distance(
                    logits, scale, related, rows_at[:, None], i[:, None] - j[None, :], columns, inside[:, None]
                )
            if DISTANCE > 0:
                logits = _related(
                    *(logits, scale, tile, i[:, None], j[None, :], DISTANCE, GLOBALS, SEGMENT, False, OF_GLOBALS, 1)
                )
            acc, total, top = _absorb(acc, total, top, logits, factor, value, None, False)

    if LISTED > 0:
        listed = lists + ((b * H + h) * ((T + BLOCK - 1) // BLOCK) + row0 // BLOCK) * LISTED
        for n in range(LISTED * (BLOCK // KEYS)):
            block = tl.load(listed + n // (BLOCK // KEYS)).to(tl.int32)
            at = block * BLOCK + n % (BLOCK // KEYS) * KEYS
            j = at + tl.arange(0, KEYS)
            real = (j >= 0) & (j < S)
            key = _load(k_at + at.to(tl.int64) * k_t, k_t, real, KEYS, D, BLOCK_D, True)
            value = _load(v_at + at.to(tl.int64) * v_t, v_t, real, KEYS, E, BLOCK_E, True)
            logits = _logits(query, key, i[:, None], j[None, :], h, scale, slopes, table, origin, gaps)
            if DISTANCE < 0:
                logits = _by_distance(
                    logits, scale, related, rows_at[:, None], i[:, None] - j[None, :], columns, inside[:, None]
                )
            if DISTANCE > 0:
                logits = _related(
                    *(logits, scale, tile, i[:, None], j[None, :], DISTANCE, GLOBALS, SEGMENT, False, OF_GLOBALS, 1)
                )
            acc, total, top = _absorb(acc, total, top, logits, factor, value, real[None, :], True)

    some = total > 0.0
    split = tl.program_id(1).to(tl.int64)
    sums = tl.where(some, total, 1.0)
    tl.store(
        lse + split * (tl.num_programs(0) // (tiles * FOLD)) * T + rows_at,
        tl.where(some, top + tl.log2(sums), float("-inf")),
        mask=inside,
    )
    o_at = o + split * o_split + b * o_b + h * o_h + (t0 + row0.to(tl.int64) * FOLD) * o_t
    column = tl.arange(0, BLOCK_E)[None, :]
    out = (acc / sums[:, None]).to(o.dtype.element_ty)
    tl.store(o_at + tl.arange(0, ROWS)[:, None] * (o_t * FOLD) + column, out, mask=inside[:, None] & (column < E))


@triton.jit
def _rows_see(
    i,
    i_first,
    i_last,
    rows_at,
    inside,
    since,
    until,
    first,
    end,
    low_add,
    low_plus,
    high_add,
    high_plus,
    LOW_EVERY: tl.constexpr,
    LOW_TIMES: tl.constexpr,
    HIGH_EVERY: tl.constexpr,
    HIGH_TIMES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The bounds of each row, and the least and the largest of either."""
    low = tl.maximum(_bound(i, low_add, low_plus, LOW_EVERY, LOW_TIMES), first)
    high = tl.minimum(_bound(i, high_add, high_plus, HIGH_EVERY, HIGH_TIMES), end)
    if since is not None:
        low = tl.maximum(low, tl.load(since + rows_at, mask=inside, other=0).to(tl.int32))
        low_min = tl.min(tl.where(inside, low, 1 << 30), 0)
        low_max = tl.max(tl.where(inside, low, -(1 << 30)), 0)
    else:
        low_min = tl.maximum(_bound(i_first, low_add, low_plus, LOW_EVERY, LOW_TIMES), first)
        low_max = tl.maximum(_bound(i_last, low_add, low_plus, LOW_EVERY, LOW_TIMES), first)
    if until is not None:
        high = tl.minimum(high, tl.load(until + rows_at, mask=inside, other=0).to(tl.int32))
        high_min = tl.min(tl.where(inside, high, 1 << 30), 0)
        high_max = tl.max(tl.where(inside, high, -(1 << 30)), 0)
    else:
        high_min = tl.minimum(_bound(i_first, high_add, high_plus, HIGH_EVERY, HIGH_TIMES), end)
        high_max = tl.minimum(_bound(i_last, high_add, high_plus, HIGH_EVERY, HIGH_TIMES), end)
    if MASKED:
        # no tile counts as seen whole
        low_max = high_max
    return low, high, low_min, low_max, high_min, high_max


@triton.jit
def _slopes_of_row(value, grad, top, delta, logits, scale, visible, MASKED: tl.constexpr):
    """The gradients of the logits of a tile."""
    weights = tl.exp2(logits * scale - top[:, None])
    if MASKED:
        weights = tl.where(visible, weights, 0.0)
    return weights * (tl.dot(grad, tl.trans(value), input_precision="ieee") - delta[:, None])


@triton.jit(
    do_not_specialize=[
        *(
            "T",
            "S",
            "q0",
            "k0",
            "first",
            "skip",
            "origin",
            "gaps",
            "columns",
            "low_add",
            "low_plus",
            "high_add",
            "high_plus",
        ),
        *("far_count", "far_add", "far_plus", "far_stride"),
    ]
)
def _queries(
    q,
    k,
    v,
    far_k,
    far_v,
    q0_at,
    k0_at,
    end_at,
    since,
    until,
    last_at,
    stride_at,
    slopes,
    table,
    lists,
    list_starts,
    list_rows,
    related,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    fk_b,
    fk_h,
    fk_t,
    fv_b,
    fv_h,
    fv_t,
    H,
    T,
    S,
    q0,
    k0,
    first,
    skip,
    origin,
    gaps,
    columns,
    low_add,
    low_plus,
    high_add,
    high_plus,
    far_count,
    far_add,
    far_plus,
    far_stride,
    o,
    grad_o,
    lse,
    deltas,
    out,
    before,
    out_related,
    o_b,
    o_h,
    o_t,
    g_b,
    g_h,
    g_t,
    out_b,
    out_h,
    out_t,
    out_split,
    scale,
    natural,
    RATIO: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    FAR_KEYS: tl.constexpr,
    LOW_EVERY: tl.constexpr,
    LOW_TIMES: tl.constexpr,
    HIGH_EVERY: tl.constexpr,
    HIGH_TIMES: tl.constexpr,
    FAR: tl.constexpr,
    FAR_EVERY: tl.constexpr,
    FAR_TIMES: tl.constexpr,
    FAR_START: tl.constexpr,
    FAR_INNER: tl.constexpr,
    FAR_CLIP: tl.constexpr,
    FOLD: tl.constexpr,
    HOLE: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
    DISTANCE: tl.constexpr,
    GLOBALS: tl.constexpr,
    SEGMENT: tl.constexpr,
    OF_GLOBALS: tl.constexpr,
    RELATIONS: tl.constexpr,
    SPLITS: tl.constexpr,
    FIRST: tl.constexpr,
):
    tiles = ((T + FOLD - 1) // FOLD + ROWS - 1) // ROWS
    row0 = (tiles - 1 - tl.program_id(0) % tiles) * ROWS
    one = tl.program_id(0) // tiles
    b, h = (one // (H * FOLD)).to(tl.int64), (one // FOLD % H).to(tl.int64)
    t0, s0, queries, _, q0, k0, first, end = _places(
        b, one % FOLD, q0, k0, q0_at, k0_at, end_at, last_at, first, T, S, FOLD, False
    )
    row = row0 + tl.arange(0, ROWS)
    t = t0 + row * FOLD
    inside = (row < queries) & (t >= skip)
    i = row + q0
    at0 = t0 + row0.to(tl.int64) * FOLD
    query = _load(q + b * q_b + h * q_h + at0 * q_t, q_t * FOLD, inside, ROWS, D, BLOCK_D, True)
    grad = _load(grad_o + b * g_b + h * g_h + at0 * g_t, g_t * FOLD, inside, ROWS, E, BLOCK_E, True)
    rows_at = (b * H + h) * T + t
    top = tl.load(lse + rows_at, mask=inside, other=float("inf"))
    factor = scale if slopes is None and table is None and related is None else 1.0
    if DISTANCE > 0:
        tile = _load_relations(related, rows_at, inside, RELATIONS, DISTANCE, False)
    of_tile = tl.zeros([ROWS, RELATIONS], tl.float32)
    if FIRST:
        seen = _load(o + b * o_b + h * o_h + at0 * o_t, o_t * FOLD, inside, ROWS, E, BLOCK_E, True)
        delta = tl.sum(seen.to(tl.float32) * grad.to(tl.float32), 1)
        tl.store(deltas + rows_at, delta, mask=inside)
    else:
        delta = tl.load(deltas + rows_at, mask=inside, other=0.0)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)

    if FAR:
        fk_at, fv_at = far_k + b * fk_b + h // RATIO * fk_h, far_v + b * fv_b + h // RATIO * fv_h
        if stride_at is not None:
            far_stride = tl.load(stride_at + b).to(tl.int32)
        far_count = _far_end(b, far_count, end_at, S, FAR_START, FAR_INNER, far_stride, FAR_CLIP)
        high = tl.minimum(_bound(i, far_add, far_plus, FAR_EVERY, FAR_TIMES), far_count)
        last = tl.minimum(row0 + ROWS, queries) - 1 + q0
        high_min = tl.minimum(_bound(row0 + q0, far_add, far_plus, FAR_EVERY, FAR_TIMES), far_count)
        high_max = tl.minimum(_bound(last, far_add, far_plus, FAR_EVERY, FAR_TIMES), far_count)
        count, whole, stop = _blocks(0, 0, high_min, high_max, FAR_KEYS)
        for n in range(whole, stop):
            j = n * FAR_KEYS + tl.arange(0, FAR_KEYS)
            key = _load_far(fk_at, fk_t, j, far_count, D, BLOCK_D, FAR_START, FAR_INNER, far_stride)
            value = _load_far(fv_at, fv_t, j, far_count, E, BLOCK_E, FAR_START, FAR_INNER, far_stride)
            logits = _logits(query, key, i[:, None], j[None, :], h, scale, slopes, table, origin, gaps)
            if DISTANCE < 0:
                logits = _by_distance(
                    logits, scale, related, rows_at[:, None], i[:, None] - j[None, :], columns, inside[:, None]
                )
            if DISTANCE > 0:
                logits = _related(
                    *(logits, scale, tile, i[:, None], j[None, :], DISTANCE, GLOBALS, SEGMENT, True, OF_GLOBALS, 1)
                )
            slope = _slopes_of_row(value, grad, top, delta, logits, factor, None, False)
            acc = tl.dot(slope.to(key.dtype), key, acc, input_precision="ieee")
            if DISTANCE < 0:
                away = i[:, None] - j[None, :]
                tl.store(
                    out_related + rows_at[:, None] * columns + away,
                    slope.to(out_related.dtype.element_ty),
                    mask=inside[:, None] & (away >= 0) & (away < columns),
                )
            if DISTANCE > 0:
                of_tile = _of_relations(
                    *(
                        of_tile,
                        slope,
                        i,
                        n * FAR_KEYS,
                        DISTANCE,
                        GLOBALS,
                        SEGMENT,
                        True,
                        OF_GLOBALS,
                        FAR_KEYS,
                        RELATIONS,
                    )
                )
        for n in range(stop, count):
            j = n * FAR_KEYS + tl.arange(0, FAR_KEYS)
            key = _load_far(fk_at, fk_t, j, far_count, D, BLOCK_D, FAR_START, FAR_INNER, far_stride)
            value = _load_far(fv_at, fv_t, j, far_count, E, BLOCK_E, FAR_START, FAR_INNER, far_stride)
            logits = _logits(query, key, i[:, None], j[None, :], h, scale, slopes, table, origin, gaps)
            if DISTANCE < 0:
                logits = _by_distance(
                    logits, scale, related, rows_at[:, None], i[:, None] - j[None, :], columns, inside[:, None]
                )
            if DISTANCE > 0:
                logits = _related(
                    *(logits, scale, tile, i[:, None], j[None, :], DISTANCE, GLOBALS, SEGMENT, True, OF_GLOBALS, 1)
                )
            slope = _slopes_of_row(value, grad, top, delta, logits, factor, j[None, :] < high[:, None], True)
            acc = tl.dot(slope.to(key.dtype), key, acc, input_precision="ieee")
            if DISTANCE < 0:
                away = i[:, None] - j[None, :]
                tl.store(
                    out_related + rows_at[:, None] * columns + away,
                    slope.to(out_related.dtype.element_ty),
                    mask=inside[:, None] & (away >= 0) & (away < columns),
                )
            if DISTANCE > 0:
                of_tile = _of_relations(
                    *(
                        of_tile,
                        slope,
                        i,
                        n * FAR_KEYS,
                        DISTANCE,
                        GLOBALS,
                        SEGMENT,
                        True,
                        OF_GLOBALS,
                        FAR_KEYS,
                        RELATIONS,
                    )
                )

    low, high, low_min, low_max, high_min, high_max = _rows_see(
        *(i, row0 + q0, tl.minimum(row0 + ROWS, queries) - 1 + q0, b * T + t, inside, since, until, first, end),
        *(low_add, low_plus, high_add, high_plus, LOW_EVERY, LOW_TIMES, HIGH_EVERY, HIGH_TIMES, MASKED),
    )
    low_min, high_max, low_max, high_min = _share(low_min, high_max, low_max, high_min, SPLITS, KEYS)
    count, whole, stop = _blocks(low_min, low_max, high_min, high_max, KEYS)
    k_at = k + b * k_b + h // RATIO * k_h + (s0 - k0.to(tl.int64) * FOLD) * k_t
    v_at = v + b * v_b + h // RATIO * v_h + (s0 - k0.to(tl.int64) * FOLD) * v_t
    for n in range(count - (stop - whole)):
        at = low_min + tl.where(n < whole, n, n + stop - whole) * KEYS
        j = at + tl.arange(0, KEYS)
        real = (j >= first) & (j < end)
        key = _load(k_at + at.to(tl.int64) * FOLD * k_t, k_t * FOLD, real, KEYS, D, BLOCK_D, True)
        value = _load(v_at + at.to(tl.int64) * FOLD * v_t, v_t * FOLD, real, KEYS, E, BLOCK_E, True)
        logits = _logits(query, key, i[:, None], j[None, :], h, scale, slopes, table, origin, gaps)
        if DISTANCE < 0:
            logits = _by_distance(
                logits, scale, related, rows_at[:, None], i[:, None] - j[None, :], columns, inside[:, None]
            )
        if DISTANCE > 0:
            logits = _related(
                *(logits, scale, tile, i[:, None], j[None, :], DISTANCE, GLOBALS, SEGMENT, False, OF_GLOBALS, 1)
            )
        visible = (j[None, :] >= low[:, None]) & (j[None, :] < high[:, None])
        if HOLE:
            visible &= j[None, :] != i[:, None]
        slope = _slopes_of_row(value, grad, top, delta, logits, factor, visible, True)
        acc = tl.dot(slope.to(key.dtype), key, acc, input_precision="ieee")
        if DISTANCE < 0:
            away = i[:, None] - j[None, :]
            tl.store(
                out_related + rows_at[:, None] * columns + away,
                slope.to(out_related.dtype.element_ty),
                mask=inside[:, None] & (away >= 0) & (away < columns),
            )
        if DISTANCE > 0:
            of_tile = _of_relations(
                *(of_tile, slope, i, at, DISTANCE, GLOBALS, SEGMENT, False, OF_GLOBALS, KEYS, RELATIONS)
            )
    if not MASKED:
        for n in range(whole, stop):
            at = low_min + n * KEYS
            j = at + tl.arange(0, KEYS)
            key = _load(k_at + at.to(tl.int64) * FOLD * k_t, k_t * FOLD, None, KEYS, D, BLOCK_D, False)
            value = _load(v_at + at.to(tl.int64) * FOLD * v_t, v_t * FOLD, None, KEYS, E, BLOCK_E, False)
            logits = _logits(query, key, i[:, None], j[None, :], h, scale, slopes, table, origin, gaps)
            if DISTANCE < 0:
                logits = _by_distance(
                    logits, scale, related, rows_at[:, None], i[:, None] - j[None, :], columns, inside[:, None]
                )
            if DISTANCE > 0:
                logits = _related(
                    *(logits, scale, tile, i[:, None], j[None, :], DISTANCE, GLOBALS, SEGMENT, False, OF_GLOBALS, 1)
                )
            slope = _slopes_of_row(value, grad, top, delta, logits, factor, None, False)
            acc = tl.dot(slope.to(key.dtype), key, acc, input_precision="ieee")
            if DISTANCE < 0:
                away = i[:, None] - j[None, :]
                tl.store(
                    out_related + rows_at[:, None] * columns + away,
                    slope.to(out_related.dtype.element_ty),
                    mask=inside[:, None] & (away >= 0) & (away < columns),
                )
            if DISTANCE > 0:
                of_tile = _of_relations(
                    *(of_tile, slope, i, at, DISTANCE, GLOBALS, SEGMENT, False, OF_GLOBALS, KEYS, RELATIONS)
                )

    if LISTED > 0:
        listed = lists + ((b * H + h) * ((T + BLOCK - 1) // BLOCK) + row0 // BLOCK) * LISTED
        for n in range(LISTED * (BLOCK // KEYS)):
            block = tl.load(listed + n // (BLOCK // KEYS)).to(tl.int32)
            at = block * BLOCK + n % (BLOCK // KEYS) * KEYS
            j = at + tl.arange(0, KEYS)
            real = (j >= 0) & (j < S)
            key = _load(k_at + at.to(tl.int64) * k_t, k_t, real, KEYS, D, BLOCK_D, True)
            value = _load(v_at + at.to(tl.int64) * v_t, v_t, real, KEYS, E, BLOCK_E, True)
            logits = _logits(query, key, i[:, None], j[None, :], h, scale, slopes, table, origin, gaps)
            if DISTANCE < 0:
                logits = _by_distance(
                    logits, scale, related, rows_at[:, None], i[:, None] - j[None, :], columns, inside[:, None]
                )
            if DISTANCE > 0:
                logits = _related(
                    *(logits, scale, tile, i[:, None], j[None, :], DISTANCE, GLOBALS, SEGMENT, False, OF_GLOBALS, 1)
                )
            slope = _slopes_of_row(value, grad, top, delta, logits, factor, real[None, :], True)
            acc = tl.dot(slope.to(key.dtype), key, acc, input_precision="ieee")
            if DISTANCE < 0:
                away = i[:, None] - j[None, :]
                tl.store(
                    out_related + rows_at[:, None] * columns + away,
                    slope.to(out_related.dtype.element_ty),
                    mask=inside[:, None] & (away >= 0) & (away < columns),
                )
            if DISTANCE > 0:
                of_tile = _of_relations(
                    *(of_tile, slope, i, at, DISTANCE, GLOBALS, SEGMENT, False, OF_GLOBALS, KEYS, RELATIONS)
                )

    if DISTANCE > 0:
        p = tl.arange(0, RELATIONS)[None, :]
        tl.store(
            out_related
            + tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // tiles) * T * (2 * DISTANCE + 3)
            + rows_at[:, None] * (2 * DISTANCE + 3)
            + p,
            of_tile.to(out_related.dtype.element_ty),
            mask=(row < queries)[:, None] & (p < 2 * DISTANCE + 3),
        )
    acc *= natural
    out_at = b * out_b + h * out_h + at0 * out_t
    if before is not None:
        acc += _load(before + out_at, out_t * FOLD, inside, ROWS, D, BLOCK_D, True)
    column = tl.arange(0, BLOCK_D)[None, :]
    # rows that were skipped get zeros
    tl.store(
        out
        + tl.program_id(1).to(tl.int64) * out_split
        + out_at
        + tl.arange(0, ROWS)[:, None] * (out_t * FOLD)
        + column,
        acc.to(out.dtype.element_ty),
        mask=(row < queries)[:, None] & (column < D),
    )


@triton.jit(
    do_not_specialize=[
        *(
            "T",
            "S",
            "q0",
            "k0",
            "first",
            "skip",
            "origin",
            "gaps",
            "columns",
            "low_add",
            "low_plus",
            "high_add",
            "high_plus",
        ),
        *("far_count", "far_add", "far_plus", "far_stride"),
    ]
)
def _keys(
    q,
    k,
    v,
    far_k,
    far_v,
    q0_at,
    k0_at,
    end_at,
    since,
    until,
    last_at,
    stride_at,
    slopes,
    table,
    lists,
    list_starts,
    list_rows,
    related,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    fk_b,
    fk_h,
    fk_t,
    fv_b,
    fv_h,
    fv_t,
    H,
    T,
    S,
    q0,
    k0,
    first,
    skip,
    origin,
    gaps,
    columns,
    low_add,
    low_plus,
    high_add,
    high_plus,
    far_count,
    far_add,
    far_plus,
    far_stride,
    grad_o,
    lse,
    deltas,
    out_k,
    out_v,
    before_k,
    before_v,
    sums_k,
    sums_v,
    g_b,
    g_h,
    g_t,
    ok_b,
    ok_h,
    ok_t,
    ov_b,
    ov_h,
    ov_t,
    ok_split,
    ov_split,
    scale,
    natural,
    RATIO: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    FAR_KEYS: tl.constexpr,
    LOW_EVERY: tl.constexpr,
    LOW_TIMES: tl.constexpr,
    HIGH_EVERY: tl.constexpr,
    HIGH_TIMES: tl.constexpr,
    FAR: tl.constexpr,
    FAR_EVERY: tl.constexpr,
    FAR_TIMES: tl.constexpr,
    FAR_START: tl.constexpr,
    FAR_INNER: tl.constexpr,
    FAR_CLIP: tl.constexpr,
    FOLD: tl.constexpr,
    HOLE: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
    DISTANCE: tl.constexpr,
    GLOBALS: tl.constexpr,
    SEGMENT: tl.constexpr,
    OF_GLOBALS: tl.constexpr,
    RELATIONS: tl.constexpr,
    SPLITS: tl.constexpr,
    OF_FAR: tl.constexpr,
):
    tiles = ((far_count if OF_FAR else (S + FOLD - 1) // FOLD) + KEYS - 1) // KEYS
    slot0 = tl.program_id(0) % tiles * KEYS
    one = tl.program_id(0) // tiles
    G = H // RATIO
    b, g = (one // (G * FOLD)).to(tl.int64), (one // FOLD % G).to(tl.int64)
    t0, s0, queries, slots, q0, k0, first, end = _places(
        b, one % FOLD, q0, k0, q0_at, k0_at, end_at, last_at, first, T, S, FOLD, True
    )
    slot = slot0 + tl.arange(0, KEYS)
    if stride_at is not None:
        far_stride = tl.load(stride_at + b).to(tl.int32)
    if OF_FAR:
        slots = far_count
        far_count = _far_end(b, far_count, end_at, S, FAR_START, FAR_INNER, far_stride, FAR_CLIP)
        j, j_low, j_high, real = slot, slot0, tl.minimum(slot0 + KEYS, far_count), slot < far_count
        key = _load_far(far_k + b * fk_b + g * fk_h, fk_t, j, far_count, D, BLOCK_D, FAR_START, FAR_INNER, far_stride)
        value = _load_far(far_v + b * fv_b + g * fv_h, fv_t, j, far_count, E, BLOCK_E, FAR_START, FAR_INNER, far_stride)
        begin = _beyond(j_low, far_add, far_plus, FAR_EVERY, FAR_TIMES)
        whole_begin = _beyond(j_high - 1, far_add, far_plus, FAR_EVERY, FAR_TIMES)
        stop, whole_stop = begin * 0 + (1 << 30), begin * 0 + (1 << 30)
    else:
        j = slot + k0
        real = (j >= first) & (j < end)
        j_low, j_high = tl.maximum(slot0 + k0, first), tl.minimum(slot0 + KEYS + k0, end)
        at0 = s0 + slot0.to(tl.int64) * FOLD
        key = _load(k + b * k_b + g * k_h + at0 * k_t, k_t * FOLD, real, KEYS, D, BLOCK_D, True)
        value = _load(v + b * v_b + g * v_h + at0 * v_t, v_t * FOLD, real, KEYS, E, BLOCK_E, True)
        begin = _beyond(j_low, high_add, high_plus, HIGH_EVERY, HIGH_TIMES)
        whole_begin = _beyond(j_high - 1, high_add, high_plus, HIGH_EVERY, HIGH_TIMES)
        stop = _beyond(j_high - 1, low_add, low_plus, LOW_EVERY, LOW_TIMES)
        whole_stop = _beyond(j_low, low_add, low_plus, LOW_EVERY, LOW_TIMES)
    # rows of queries, of which the skipped and those of other documents do not count as seeing a tile whole
    begin = tl.maximum(begin - q0, skip // FOLD)
    stop = tl.where(j_low < j_high, tl.minimum(stop - q0, queries), begin)
    whole_begin, whole_stop = tl.maximum(whole_begin - q0, (skip + FOLD - 1) // FOLD), tl.minimum(whole_stop - q0, stop)
    if MASKED or since is not None or until is not None:
        whole_begin = stop
    begin, stop, whole_begin, whole_stop = _share(begin, stop, whole_begin, whole_stop, SPLITS, ROWS)
    count, first_whole, last_whole = _blocks(begin, whole_begin, whole_stop, stop, ROWS)

    factor = scale if slopes is None and table is None and related is None else 1.0
    acc_k = tl.zeros([KEYS, BLOCK_D], tl.float32)
    acc_v = tl.zeros([KEYS, BLOCK_E], tl.float32)
    for member in range(RATIO):
        h = g * RATIO + member
        q_at, g_at = q + b * q_b + h * q_h + t0 * q_t, grad_o + b * g_b + h * g_h + t0 * g_t
        rows_at = (b * H + h) * T
        for n in range(count - (last_whole - first_whole)):
            row0 = begin + tl.where(n < first_whole, n, n + last_whole - first_whole) * ROWS
            row = row0 + tl.arange(0, ROWS)
            t = t0 + row * FOLD
            inside = (row < queries) & (t >= skip)
            i = row + q0
            query = _load(q_at + row0.to(tl.int64) * FOLD * q_t, q_t * FOLD, inside, ROWS, D, BLOCK_D, True)
            grad = _load(g_at + row0.to(tl.int64) * FOLD * g_t, g_t * FOLD, inside, ROWS, E, BLOCK_E, True)
            top = tl.load(lse + rows_at + t, mask=inside, other=float("inf"))
            delta = tl.load(deltas + rows_at + t, mask=inside, other=0.0)
            logits = _logits(key, query, i[None, :], j[:, None], h, scale, slopes, table, origin, gaps)
            if DISTANCE < 0:
                logits = _by_distance(
                    logits, scale, related, (rows_at + t)[None, :], i[None, :] - j[:, None], columns, (t < T)[None, :]
                )
            if DISTANCE > 0:
                tile = _load_relations(related, rows_at + t, t < T, RELATIONS, DISTANCE, True)
                logits = _related(
                    *(logits, scale, tile, i[None, :], j[:, None], DISTANCE, GLOBALS, SEGMENT, OF_FAR, OF_GLOBALS, 0)
                )
            if OF_FAR:
                high = _bound(i, far_add, far_plus, FAR_EVERY, FAR_TIMES)
                visible = (j[:, None] < high[None, :]) & real[:, None]
            else:
                low = tl.maximum(_bound(i, low_add, low_plus, LOW_EVERY, LOW_TIMES), first)
                high = tl.minimum(_bound(i, high_add, high_plus, HIGH_EVERY, HIGH_TIMES), end)
                if since is not None:
                    low = tl.maximum(low, tl.load(since + b * T + t, mask=inside, other=0).to(tl.int32))
                if until is not None:
                    high = tl.minimum(high, tl.load(until + b * T + t, mask=inside, other=0).to(tl.int32))
                visible = (j[:, None] >= low[None, :]) & (j[:, None] < high[None, :])
                if HOLE:
                    visible &= j[:, None] != i[None, :]
            acc_k, acc_v = _of_column(acc_k, acc_v, query, value, grad, top, delta, logits, factor, visible, True)
        if not MASKED:
            for n in range(first_whole, last_whole):
                row0 = begin + n * ROWS
                t = t0 + (row0 + tl.arange(0, ROWS)) * FOLD
                i = row0 + tl.arange(0, ROWS) + q0
                query = _load(q_at + row0.to(tl.int64) * FOLD * q_t, q_t * FOLD, None, ROWS, D, BLOCK_D, False)
                grad = _load(g_at + row0.to(tl.int64) * FOLD * g_t, g_t * FOLD, None, ROWS, E, BLOCK_E, False)
                top, delta = tl.load(lse + rows_at + t), tl.load(deltas + rows_at + t)
                logits = _logits(key, query, i[None, :], j[:, None], h, scale, slopes, table, origin, gaps)
                if DISTANCE < 0:
                    logits = _by_distance(
                        logits,
                        scale,
                        related,
                        (rows_at + t)[None, :],
                        i[None, :] - j[:, None],
                        columns,
                        (t < T)[None, :],
                    )
                if DISTANCE > 0:
                    tile = _load_relations(related, rows_at + t, t < T, RELATIONS, DISTANCE, True)
                    logits = _related(
                        *(
                            logits,
                            scale,
                            tile,
                            i[None, :],
                            j[:, None],
                            DISTANCE,
                            GLOBALS,
                            SEGMENT,
                            OF_FAR,
                            OF_GLOBALS,
                            0,
                        )
                    )
                acc_k, acc_v = _of_column(acc_k, acc_v, query, value, grad, top, delta, logits, factor, None, False)
        if LISTED > 0 and not OF_FAR:
            blocks = (T + BLOCK - 1) // BLOCK
            start_at = list_starts + (b * H + h) * (blocks + 1) + slot0 // BLOCK
            start, end_of_list = tl.load(start_at).to(tl.int32), tl.load(start_at + 1).to(tl.int32)
            for n in range((end_of_list - start) * (BLOCK // ROWS)):
                block = tl.load(list_rows + (b * H + h) * blocks * LISTED + start + n // (BLOCK // ROWS)).to(tl.int32)
                row0 = block * BLOCK + n % (BLOCK // ROWS) * ROWS
                t = row0 + tl.arange(0, ROWS)
                inside = (t < T) & (t >= skip)
                query = _load(q_at + row0.to(tl.int64) * q_t, q_t, inside, ROWS, D, BLOCK_D, True)
                grad = _load(g_at + row0.to(tl.int64) * g_t, g_t, inside, ROWS, E, BLOCK_E, True)
                top = tl.load(lse + rows_at + t, mask=inside, other=float("inf"))
                delta = tl.load(deltas + rows_at + t, mask=inside, other=0.0)
                logits = _logits(key, query, (t + q0)[None, :], j[:, None], h, scale, slopes, table, origin, gaps)
                acc_k, acc_v = _of_column(acc_k, acc_v, query, value, grad, top, delta, logits, factor, None, False)

    # beside the keys that exist a tile that all see whole has any numbers
    acc_k = tl.where(real[:, None], acc_k * natural, 0.0)
    acc_v = tl.where(real[:, None], acc_v, 0.0)
    columns_k, columns_v = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_E)[None, :]
    at = slot0.to(tl.int64) * FOLD
    if not OF_FAR:
        at += s0
    k_to = b * ok_b + g * ok_h + at * ok_t + tl.arange(0, KEYS)[:, None] * (ok_t * FOLD) + columns_k
    v_to = b * ov_b + g * ov_h + at * ov_t + tl.arange(0, KEYS)[:, None] * (ov_t * FOLD) + columns_v
    mask_k = (slot < slots)[:, None] & (columns_k < D)
    mask_v = (slot < slots)[:, None] & (columns_v < E)
    if before_k is not None:
        acc_k += tl.load(before_k + k_to, mask=mask_k, other=0.0)
        acc_v += tl.load(before_v + v_to, mask=mask_v, other=0.0)
    if sums_k is not None:
        token = s0 + slot * FOLD - FAR_START
        if FAR_INNER == 0:
            number, is_far = token, (token >= 0) & (token < far_count)
        else:
            number = token // far_stride * FAR_INNER + token % far_stride
            is_far = (token >= 0) & (token % far_stride < FAR_INNER) & (number < far_count)
        from_k = ((b * G + g) * far_count + number)[:, None]
        acc_k += tl.load(sums_k + from_k * D + columns_k, mask=mask_k & is_far[:, None], other=0.0)
        acc_v += tl.load(sums_v + from_k * E + columns_v, mask=mask_v & is_far[:, None], other=0.0)
    split = tl.program_id(1).to(tl.int64)
    tl.store(out_k + split * ok_split + k_to, acc_k.to(out_k.dtype.element_ty), mask=mask_k)
    tl.store(out_v + split * ov_split + v_to, acc_v.to(out_v.dtype.element_ty), mask=mask_v)


@triton.jit
def _of_column(acc_k, acc_v, query, value, grad, top, delta, logits, scale, visible, MASKED: tl.constexpr):
    """What a tile of queries adds to dk and dv; logits and `visible` are [KEYS, ROWS]."""
    weights = tl.exp2(logits * scale - top[None, :])
    if MASKED:
        weights = tl.where(visible, weights, 0.0)
    acc_v = tl.dot(weights.to(grad.dtype), grad, acc_v, input_precision="ieee")
    slope = weights * (tl.dot(value, tl.trans(grad), input_precision="ieee") - delta[None, :])
    acc_k = tl.dot(slope.to(query.dtype), query, acc_k, input_precision="ieee")
    return acc_k, acc_v
