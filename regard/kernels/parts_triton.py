"""The patterns of runs.py in Triton: softmax over runs of keys, without logits in memory.

Forward: a program takes a tile of queries and goes over the tiles of keys that one of them sees, with a running maximum
and sum (in base 2, the scale joined to the logits); masks are made only for tiles that some query does not see whole.
Backward: one kernel over tiles of queries (dq, and the rows' o . do), one over tiles of keys (dk, dv), which finds its
queries by the inverse of the bounds. There are no atomics, so results are the same from run to run.

Few queries over many keys, and few far keys under many queries, are split over the grid: partial results in float32,
merged by their logsumexp or added up. Queries that are unbounded, while others are not, have launches of their own for
o and dq; for dk and dv they are one tile more. Later passes of a pattern read what earlier ones left, in float32.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from regard.kernels.parts_triton_backward import keys_kernel, queries_kernel
from regard.kernels.parts_triton_forward import forward_kernel, merge_kernel
from regard.kernels.runs import LOG2E, Common, Pass, empty_like_heads, unflatten

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


def tile(kind: str, width: int, dtype: torch.dtype, far: int = 0, plain: bool = True, distances: bool = False) -> Tile:
    """The tile of a kernel ("forward", "queries", "keys" or, of far keys, "far") for a head width. `far` is how many
    far keys there are; `plain`: no list of blocks and no table takes registers as well; `distances`: a table of
    distances does."""
    if dtype == torch.float32:
        return Tile(32, 32, 4, 1) if width <= 128 else Tile(16, 16, 4, 1)
    if width > 128:
        return {"forward": Tile(64, 32, 8)}.get(kind, Tile(32, 32, 8, 1))
    # Measured on an H200, with a window of 256 and heads of 64: larger tiles are slower, as a window is few of them;
    # fewer registers make room for one program more on each multiprocessor.
    if far > MANY and plain:
        many = {"forward": Tile(128, 64, 4, 3), "queries": Tile(64, 64), "far": Tile(32, 128, 4, 3)}
        if width <= 64:
            many |= {"forward": Tile(128, 64, 8, 3, 128), "queries": Tile(128, 64, 8, 2, 128)}
        return many.get(kind, Tile(32, 64))
    if width <= 64 and distances:
        # as many registers as make no spills, for three programs at a time
        tables = {"forward": Tile(64, 64, 4, 3, 168), "queries": Tile(64, 32, 4, 3, 168)}
        return tables.get(kind, Tile(32, 64, 4, 1, 168))
    if width > 64 or not plain or (far and kind == "keys"):
        return {"forward": Tile(64, 64, 4, 3), "queries": Tile(64, 64)}.get(kind, Tile(32, 64))
    return {"forward": Tile(64, 64, 4, 2, 128), "queries": Tile(64, 32, 4, 3, 96)}.get(kind, Tile(32, 64, 4, 2, 128))


class Inputs(NamedTuple):
    """What all kernels of a call read: tensors, and the numbers and tensors of runs.flatten."""

    q: Tensor
    k: Tensor
    v: Tensor
    far_k: Tensor | None
    far_v: Tensor | None
    related: Tensor | None
    scale: float
    common: Common
    tensors: Sequence[Tensor | None]


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
    inputs = Inputs(q, k, v, far_k, far_v, related, scale, common, tensors)
    o, lse = empty_like_heads(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
    inner = empty_like_heads(q, v.shape[3], torch.float32) if len(passes) > 1 else None
    for n, part in enumerate(passes):
        out = o if inner is None or n == len(passes) - 1 else inner
        _compute_outputs(part, inputs, out, lse, inner if n else None, len(passes) == 1)
    if head is not None:
        o[:, :, : head.shape[2]] = head
    if common.unbounded:
        few = common.skip
        _compute_outputs(Pass(), _unbounded_inputs(inputs), o[:, :, :few], lse[:, :, :few], None, True)
    return o, lse


def _unbounded_inputs(inputs: Inputs) -> Inputs:
    """Those of the first queries, which see all keys."""
    q0, k0, _, count, origin, *_ = inputs.common
    common = Common(q0, k0, origin=origin)
    return inputs._replace(q=inputs.q[:, :, :count], far_k=None, far_v=None, common=common)


def _compute_outputs(part: Pass, inputs: Inputs, o: Tensor, lse: Tensor, before: Tensor | None, alone: bool) -> None:
    """o and lse of a pass, which joins what passes before it left; `alone`: it is the only one."""
    q, k, v, far_k, _, related, scale, common, _ = inputs
    (B, H, T, _), E, sizes = q.shape, v.shape[3], _tile_of("forward", q, v, part, related)
    programs = triton.cdiv(triton.cdiv(T, part.fold), sizes.rows) * B * H * part.fold
    splits = _count_splits(programs, part, triton.cdiv(k.shape[2], sizes.keys)) if alone else 1
    out, out_lse = o, lse
    grid, flat = _grid(programs // (B * H * part.fold), H * part.fold, B, splits)
    if splits > 1:
        out = q.new_empty(splits, B, T, H, E, dtype=torch.float32).transpose(2, 3)
        out_lse = lse.new_empty(splits, B, H, T)
    with torch.cuda.device_of(q):
        forward_kernel[grid](
            *_shared_arguments(inputs, part),
            out,
            out_lse,
            before,
            *out.stride()[-4:-1],
            out.stride(0),
            out_lse.stride(-2),
            scale * LOG2E,
            **_constants(q, k, v, far_k, part, sizes, common),
            FLAT=flat,
            SPLITS=splits,
            **_launch(sizes),
        )
    if splits > 1:
        _merge_splits(out, out_lse, o, lse)


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
    inputs = Inputs(q, k, v, far_k, far_v, related, scale, common, tensors)
    # not every distance has a key
    of_related = q.new_empty(0) if related is None else torch.zeros_like(related)
    grads = _empty_gradients(q, k, v)
    wide = _empty_gradients(q, k, v, torch.float32) if len(passes) > 1 else None
    far_grads = (q.new_empty(0), q.new_empty(0))
    for n, part in enumerate(passes):
        outs = grads if wide is None or n == len(passes) - 1 else wide
        before = (None, None, None) if wide is None or n == 0 else wide
        _compute_query_gradients(part, inputs, grad, o, lse, delta, outs[0], before[0], n == 0, of_related)
        with_unbounded = bool(common.unbounded) and n == len(passes) - 1
        if with_unbounded:
            few_grad, few_o, few_lse, few_delta, few_out = (
                x[:, :, : common.skip] for x in (grad, o, lse, delta, outs[0])
            )
            few = _unbounded_inputs(inputs)
            _compute_query_gradients(Pass(), few, few_grad, few_o, few_lse, few_delta, few_out, None, True, of_related)
        far_sums = _compute_far_gradients(part, inputs, grad, lse, delta)
        if far_k is not None and far_sums is not None:
            far_grads, far_sums = (far_sums[0].to(k.dtype), far_sums[1].to(k.dtype)), None
        # far keys without tensors of their own are keys of the row
        _compute_key_gradients(part, inputs, grad, lse, delta, outs[1:], before[1:], far_sums, with_unbounded)
    return *grads, *far_grads, of_related


def _empty_gradients(
    q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    of_q, of_k, of_v = (empty_like_heads(x, x.shape[3], dtype) for x in (q, k, v))
    return of_q, of_k, of_v


def _compute_query_gradients(
    part: Pass,
    inputs: Inputs,
    grad: Tensor,
    o: Tensor,
    lse: Tensor,
    delta: Tensor,
    gq: Tensor,
    before: Tensor | None,
    first: bool,
    of_related: Tensor,
) -> None:
    """dq, delta by the first pass, and the gradient of what relations add."""
    q, k, v, far_k, _, related, scale, common, _ = inputs
    (B, H, T, D), sizes = q.shape, _tile_of("queries", q, v, part, related)
    programs = triton.cdiv(triton.cdiv(T, part.fold), sizes.rows) * B * H * part.fold
    alone = before is None and gq.dtype == q.dtype
    splits = _count_splits(programs, part, triton.cdiv(k.shape[2], sizes.keys)) if alone else 1
    out = gq
    grid, flat = _grid(programs // (B * H * part.fold), H * part.fold, B, splits)
    if splits > 1:
        out = q.new_empty(splits, B, T, H, D, dtype=torch.float32).transpose(2, 3)
    out_related = of_related
    if splits > 1 and related is not None:
        out_related = related.new_empty(splits, *related.shape, dtype=torch.float32)
    with torch.cuda.device_of(q):
        queries_kernel[grid](
            *_shared_arguments(inputs, part),
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
            lse.stride(1),
            scale * LOG2E,
            scale,
            **_constants(q, k, v, far_k, part, sizes, common),
            FLAT=flat,
            SPLITS=splits,
            FIRST=first,
            **_launch(sizes),
        )
    if splits > 1:
        gq.copy_(out.sum(0))
        if related is not None:
            of_related.copy_(out_related.sum(0))


def _compute_far_gradients(
    part: Pass, inputs: Inputs, grad: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor] | None:
    """dk and dv of the far keys, float32 [B, G, F, D or E]."""
    if part.far is None:
        return None
    q, k, v, far_k, _, related, scale, common, _ = inputs
    (B, _, T, _), G, sizes = q.shape, k.shape[1], _tile_of("far", q, v, part, related)
    # classes do not matter to far keys, which see the queries of all of them
    part, count = part._replace(fold=1, hole=False), part.far.length
    keys = min(sizes.keys, max(16, triton.next_power_of_2(count)))
    sizes = sizes._replace(keys=keys)
    programs = triton.cdiv(count, keys) * B * G
    splits = max(1, min(PROGRAMS // programs, triton.cdiv(T, sizes.rows) // 4))
    sums = [q.new_empty(splits, B, G, count, x.shape[3], dtype=torch.float32) for x in (q, v)]
    with torch.cuda.device_of(q):
        keys_kernel[(programs, splits)](
            *_shared_arguments(inputs, part),
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
            FLAT=True,
            SPLITS=splits,
            EIGHTS=_has_rows_in_eights(q, part, common),
            OF_FAR=True,
            UNBOUNDED=False,
            **_launch(sizes),
        )
    of_k, of_v = (x.sum(0) if splits > 1 else x[0] for x in sums)
    return of_k, of_v


def _compute_key_gradients(
    part: Pass,
    inputs: Inputs,
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    outs: tuple[Tensor, Tensor],
    before: tuple[Tensor | None, Tensor | None],
    sums: tuple[Tensor, Tensor] | None,
    unbounded: bool,
) -> None:
    """dk and dv of the near keys, and what far ones of the same tensors have had. `unbounded`: also from the first
    queries, which see all keys."""
    q, k, v, far_k, _, related, scale, common, _ = inputs
    (B, G, S, _), sizes = k.shape, _tile_of("keys", q, v, part, related)
    grid, flat = _grid(triton.cdiv(triton.cdiv(S, part.fold), sizes.keys), G * part.fold, B)
    with torch.cuda.device_of(q):
        keys_kernel[grid](
            *_shared_arguments(inputs, part),
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
            FLAT=flat,
            SPLITS=1,
            EIGHTS=_has_rows_in_eights(q, part, common),
            OF_FAR=False,
            UNBOUNDED=unbounded,
            **_launch(sizes),
        )


def _merge_splits(out: Tensor, out_lse: Tensor, o: Tensor, lse: Tensor) -> None:
    """Partial results [splits, ...] into o and lse."""
    (splits, B, H, T), E = out_lse.shape, o.shape[3]
    with torch.cuda.device_of(o):
        merge_kernel[(B * H * T,)](
            *(out, out_lse, o, lse, H, T, splits, *out.stride()[1:4], out.stride(0), *o.stride()[:3], lse.stride(1)),
            E=E,
            BLOCK_E=triton.next_power_of_2(E),
            AT_ONCE=16,
        )


def _count_splits(programs: int, part: Pass, blocks: int) -> int:
    """Into how many shares the keys are cut, where all queries see all and the grid would be small."""
    if part.low.times or part.high.times or part.fold > 1 or part.far is not None:
        return 1
    return max(1, min(PROGRAMS // programs, blocks // 4))


def _tile_of(kind: str, q: Tensor, v: Tensor, part: Pass, related: Tensor | None) -> Tile:
    width, far = triton.next_power_of_2(max(q.shape[3], v.shape[3])), 0 if part.far is None else part.far.length
    # of relations a table has 4 axes
    distances = related is not None and related.dim() == 5
    sizes = tile(kind, width, q.dtype, far, related is None and not part.listed, distances)
    if part.block:
        sizes = sizes._replace(rows=min(sizes.rows, part.block), keys=min(sizes.keys, part.block))
    # few queries fill no large tile
    return sizes._replace(rows=min(sizes.rows, max(16, triton.next_power_of_2(q.shape[2]))))


def _grid(tiles: int, heads: int, batch: int, splits: int = 1) -> tuple[tuple[int, ...], bool]:
    """The grid of a launch, and whether it is flat: programs then divide to find their tile, head and batch row. Only
    the first axis of a grid may be longer than 65,535."""
    if splits > 1 or max(heads, batch) >= 1 << 16:
        return (tiles * heads * batch, splits), True
    return (tiles, heads, batch), False


def _has_rows_in_eights(q: Tensor, part: Pass, common: Common) -> bool:
    """Whether a kernel of keys may begin at multiples of eight queries, so that their lse are loaded two at a time."""
    return part.fold == 1 and q.shape[2] % 8 == 0 and common.skip % 8 == 0


def _launch(sizes: Tile) -> dict[str, int]:
    options = {"num_warps": sizes.warps, "num_stages": sizes.stages}
    return options if sizes.registers is None else options | {"maxnreg": sizes.registers}


def _shared_arguments(inputs: Inputs, part: Pass) -> tuple[Tensor | int | None, ...]:
    """What all kernels take first: inputs, strides, sizes and places; of far keys those of the near, where there are
    no others."""
    q, k, v, far_k, far_v, related, _, common, tensors = inputs
    far_k, far_v = (k, v) if far_k is None or far_v is None else (far_k, far_v)
    q0_at, k0_at, end, since, until, last, far_stride, slopes, table, *lists = tensors
    q0, k0, first, skip, origin = common[:5]
    low, high, far = part.low, part.high, part.far
    return (
        *(q, k, v, far_k, far_v, q0_at, k0_at, end, since, until, last, far_stride, slopes, table, *lists, related),
        *(stride for x in (q, k, v, far_k, far_v) for stride in x.stride()[:3]),
        *(q.shape[1], q.shape[2], k.shape[2], q0, k0, first, skip, origin, 0 if table is None else table.shape[1]),
        *((0, 0) if related is None else (related.shape[-1] // 8, related.shape[-3] * related.shape[-2])),
        *(low.add, low.plus, high.add, high.plus),
        *((0, 0, 0, 1) if far is None else (far.length, far.high.add, far.high.plus, max(1, far.stride))),
    )


def _constants(
    q: Tensor, k: Tensor, v: Tensor, far_k: Tensor | None, part: Pass, sizes: Tile, common: Common
) -> dict[str, int | bool]:
    far = part.far
    D, E = q.shape[3], v.shape[3]
    far_keys = 16 if far is None else min(sizes.keys, max(16, triton.next_power_of_2(far.length)))
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
        "FAR_SPAN": 0 if far is None else far.span,
        "FAR_APART": 0 if far is None else far.apart,
        "FOLD": part.fold,
        "HOLE": part.hole,
        "MASKED": part.hole or sizes.masked,
        "BLOCK": part.block,
        "LISTED": part.listed,
        "DISTANCE": common.distance,
        "GLOBALS": common.globals,
        "SEGMENT": common.segment,
        "OF_GLOBALS": bool(common.of_globals),
        # of a table of distances, where rows do not differ
        "ALIGNED": not (common.q0 % 8 or common.k0 % 8 or (far is not None and far.apart % 8)),
        "RELATIONS": triton.next_power_of_2(2 * common.distance + 3) if common.distance > 0 else 1,
    }
