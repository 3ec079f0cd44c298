"""Exact softmax attention as a union of parts.

A pattern of attention is written as a list of parts: small dense attentions between some of the queries and some of
the keys. For the keys of part p let o_p be the part's output and l_p the logsumexp of its logits. Over all parts

    l = logsumexp_p l_p,    o = sum_p exp(l_p - l) o_p,

which is the softmax over the union of the parts' keys, as long as no query meets a key twice. The gradient needs no
merging at all: with the final o and l in place of o_p and l_p, the usual backward of a part gives its share.

Cost: the logits of the parts and nothing else, O(sum_p T_p S_p D) time, and memory linear in the inputs; parts are
taken a few blocks at a time, so that what is temporary stays small. On CPU the parts run through torch's flash kernel.

Letters: B batch, T queries, S keys, H heads, G key/value heads (H is a multiple of G), D head width, N runs of a part.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.kernels.autograd import Function, refuse_second_derivative
from regard.kernels.compiling import exporting, is_dynamic, is_one

# Numbers in a temporary, except where one run alone is longer. They should stay in the cache, and well below 32 MiB:
# larger ones malloc hands back to the system each time, and page faults then cost as much as the arithmetic.
CHUNK = 1 << 21
# Elsewhere a temporary is cheap and the start of a kernel is not.
DEVICE_CHUNK = 1 << 26

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Runs(NamedTuple):
    """Positions start + stride * n + step * i of an axis, for run n < runs and i < length.

    A slice has runs 1; blocks have stride = length; windows that overlap have stride < length; the residue classes
    modulo c have runs = step = c and stride 1; stride 0 gives every run the same positions.
    """

    start: int
    length: int
    runs: int = 1
    stride: int = 0
    step: int = 1


class Blocks(NamedTuple):
    """For run n the blocks indices[n] (an integer tensor [N, M]) of an axis cut into blocks of `size` positions."""

    indices: Tensor
    size: int = 1


class Part(NamedTuple):
    """Run n of `rows` attends run n of `cols`.

    causal: the i-th query of a run sees its first i + 1 keys. mask: broadcastable to [B, N, H, T, S], bool (True is
    visible) or float (added to the logits; -inf hides; it may require a gradient).
    """

    rows: Runs
    cols: Runs | Blocks
    causal: bool = False
    mask: Tensor | None = None


def default_scale(q: Tensor) -> float:
    """One over the square root of the head width."""
    return q.shape[-1] ** -0.5


def partial(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """One softmax attention q [B, H, T, D], k [B, H, S, D], v [B, H, S, E] -> o [B, H, T, E], lse [B, H, T].

    Forward only. `mask` is that of a Part, here broadcastable to [B, H, T, S]. lse is float32 (float64 for float64). A
    query that sees no key has o = 0 and lse = -inf. O(T S D).
    """
    scale = default_scale(q) if scale is None else scale
    mask = _additive(mask, _accumulator(q))
    if _flash(q, v):
        o, lse = _FLASH(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        # The kernel says lse = 0 where nothing is visible.
        return o, lse if mask is None else lse.masked_fill(mask.amax(-1) == -torch.inf, -torch.inf)
    logits = _logits(q, k, causal, mask, scale)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
    return (weights @ v.to(weights.dtype)).to(v.dtype), lse


def union(
    q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Part], *, scale: float | None = None, real: Tensor | None = None
) -> Tensor:
    """Softmax over the union of the parts' keys: q [B, H, T, D], k [B, G, S, D], v [B, G, S, E] -> [B, H, T, E].

    `real` [B, S] bool: keys that exist; the others get exactly no weight. Queries that see no key give 0. The caller
    promises that no query meets a key in two parts, and that the rows of a part are distinct.
    """
    scale = default_scale(q) if scale is None else scale
    parts = [part for part in parts if not _empty_part(part)] if q.numel() else []
    plan = [number for part in parts for number in _numbers(part)]
    masks = [part.mask for part in parts]
    indices = [part.cols.indices if isinstance(part.cols, Blocks) else None for part in parts]
    if exporting():
        return _forward(q, k, v, scale, plan, [real, *masks, *indices])[0]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return _Union.apply(q, k, v, scale, plan, real, *masks, *indices)


class _Union(Function):
    # A compiler sees both directions as one operator each: the loops over chunks depend on the length, and their writes
    # in place would be rewritten as copies of whole tensors.

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, plan: list[int], *tensors: Tensor | None
    ) -> Tensor:
        # `tensors` are odd in number: dynamo omits ctx if forward has as many parameters as there are arguments.
        run = _forward_operator if torch.compiler.is_compiling() else _forward
        o, lse = run(q, k, v, scale, plan, tensors)
        ctx.scale, ctx.plan = scale, plan
        ctx.save_for_backward(q, k, v, o, lse, *tensors)
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        q, k, v, o, lse, *tensors = ctx.saved_tensors
        run = _backward_operator if torch.compiler.is_compiling() else _backward
        learned = [bool(need) for need in ctx.needs_input_grad[5:]]
        gq, gk, gv, gmasks = run(grad, q, k, v, o, lse, ctx.scale, ctx.plan, tensors, learned)
        return gq, gk, gv, None, None, *(g if need else None for g, need in zip(gmasks, learned, strict=True))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, plan: Sequence[int], tensors: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """o [B, H, T, E] and lse [B, H, T, 1]."""
    real, parts = _parts(plan, tensors)
    single = len(parts) == 1 and not is_dynamic(q.shape[2]) and parts[0].rows == Runs(0, q.shape[2])
    if single and q.shape[1] == k.shape[1] and _flash(q, v):
        # Nothing to merge, as in a step of decoding.
        (_, cols, causal, mask), at = parts[0], (slice(0, q.shape[0]), slice(0, 1), slice(0, q.shape[1]))
        seen = _mask(mask, real, cols, at)
        o, lse = partial(q, _take(k, cols, at), _take(v, cols, at), causal=causal, mask=seen, scale=scale)
        # in the layout that the fake operator promises to compilers
        return _empty(q, o.shape[3], o.dtype).copy_(o), _empty(q, 1, lse.dtype).copy_(lse.unsqueeze(-1))
    dtype = _accumulator(q)
    o = _empty(q, v.shape[3], dtype).zero_()
    lse = _empty(q, 1, dtype).fill_(-torch.inf)
    for rows, cols, causal, mask in parts:
        for at in _chunks(q, k, rows, cols):
            q_at, k_at, v_at = _take(q, rows, at), _take(k, cols, at[:2]), _take(v, cols, at[:2])
            seen = _mask(mask, real, cols, at)
            new, l_new = partial(q_at, k_at, v_at, causal=causal, mask=seen, scale=scale)
            o_at, l_at = _view(o, rows)[at], _view(lse, rows)[at]
            new, l_new = new.unflatten(0, o_at.shape[:2]), l_new.unsqueeze(-1).unflatten(0, o_at.shape[:2])
            total = torch.logaddexp(l_at, l_new)
            o_at.lerp_(new.to(dtype), (l_new - total).exp().nan_to_num(0.0))
            l_at.copy_(total)
    return o.to(q.dtype), lse


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    plan: Sequence[int],
    tensors: Sequence[Tensor | None],
    learned: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The gradients of q, k, v and of those tensors that are learned masks; the others get an empty one."""
    dtype = lse.dtype
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # a query without keys: all its weights are exp(-inf)
    gq, gk, gv = (_empty(x, x.shape[3], dtype).zero_() for x in (q, k, v))
    gtensors = _gradients_of_masks(q, tensors, learned)
    real, parts = _parts(plan, tensors)
    for (rows, cols, causal, mask), need, gmask in zip(parts, learned[1:], gtensors[1:], strict=False):
        for at in _chunks(q, k, rows, cols):
            g_at, q_at, o_at, l_at = (_take(x, rows, at) for x in (grad, q, o, lse))
            k_at, v_at, seen = _take(k, cols, at[:2]), _take(v, cols, at[:2]), _mask(mask, real, cols, at)
            new_q, new_k, new_v, new_mask = _partial_backward(
                g_at, q_at, k_at, v_at, o_at, l_at.squeeze(-1), causal, seen, scale, need
            )
            gq_at = _view(gq, rows)[at]
            gq_at.add_(new_q.unflatten(0, gq_at.shape[:2]))
            _add(gk, cols, at, new_k)
            _add(gv, cols, at, new_v)
            if need and new_mask is not None:
                gmask_at = _select(gmask, at)
                gmask_at.add_(new_mask.unflatten(0, gq_at.shape[:2]).sum_to_size(gmask_at.shape))
    return gq.to(q.dtype), gk.to(k.dtype), gv.to(v.dtype), gtensors


_forward_operator = torch.library.custom_op("regard::union", _forward, mutates_args=())
_backward_operator = torch.library.custom_op("regard::union_backward", _backward, mutates_args=())


@_forward_operator.register_fake
def _(q, k, v, scale, plan, tensors):
    return _empty(q, v.shape[3], q.dtype), _empty(q, 1, _accumulator(q))


@_backward_operator.register_fake
def _(grad, q, k, v, o, lse, scale, plan, tensors, learned):
    gtensors = _gradients_of_masks(q, tensors, learned)
    return *(_empty(x, x.shape[3], x.dtype) for x in (q, k, v)), gtensors


def _gradients_of_masks(q: Tensor, tensors: Sequence[Tensor | None], learned: Sequence[bool]) -> list[Tensor]:
    """Zeros for each mask that is learned, and empty tensors for the others."""
    pairs = zip(tensors, learned, strict=True)
    return [torch.zeros_like(x) if need and x is not None else q.new_empty(0) for x, need in pairs]


def _length(cols: Runs | Blocks) -> int:
    return cols.indices.shape[1] * cols.size if isinstance(cols, Blocks) else cols.length


def _empty_part(part: Part) -> bool:
    # a dynamic length is not 0
    return any(isinstance(size, int) and size == 0 for size in (part.rows.length, part.rows.runs, _length(part.cols)))


def _numbers(part: Part) -> list[int]:
    """A part as numbers, since operators take no tuples; of Blocks the size, in the place of a length."""
    cols = Runs(0, part.cols.size) if isinstance(part.cols, Blocks) else part.cols
    return [*part.rows, *cols, int(part.causal)]


def _parts(plan: Sequence[int], tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, list[Part]]:
    """`real` and the parts, from their numbers and from [real, a mask for each part, an index for each part]."""
    count = len(plan) // 11
    parts = []
    for i in range(count):
        numbers, mask, index = plan[11 * i : 11 * i + 11], tensors[1 + i], tensors[1 + count + i]
        cols = Runs(*numbers[5:10]) if index is None else Blocks(index, numbers[6])
        parts.append(Part(Runs(*numbers[:5]), cols, bool(numbers[10]), mask))
    return tensors[0], parts


def _chunks(q: Tensor, k: Tensor, rows: Runs, cols: Runs | Blocks) -> Iterator[tuple[slice, slice, slice]]:
    """Cuts the axes [B, N, H] of a part: B or N, as to fold both would copy (on a GPU it may), and H into as many heads
    as keys have."""
    (B, H, _, D), G, N = q.shape, k.shape[1], rows.runs
    if exporting():
        for h in range(H // G):
            yield slice(0, B), slice(0, N), slice(h, H, H // G)
        return
    one = G * max(rows.length, _length(cols)) * D
    if _on_cpu(q):
        size = max(1, CHUNK // one)
        b, n = (1, size) if B * -(-N // size) <= N * -(-B // size) else (size, 1)
    else:
        b, n = B, max(1, DEVICE_CHUNK // (B * one))
    for i in range(0, B, b):
        for j in range(0, N, n):
            for h in range(H // G):
                yield slice(i, min(i + b, B)), slice(j, min(j + n, N)), slice(h, H, H // G)


def _view(x: Tensor, at: Runs | Blocks) -> Tensor:
    """[B, H, S, D] -> [B, N, H, length, D]: a view, except for Blocks."""
    if isinstance(at, Blocks):
        return x.unflatten(2, (-1, at.size))[:, :, at.indices].flatten(3, 4).transpose(1, 2)
    start, length, count, stride, step = at
    span = (length - 1) * step + 1
    if stride == 0 or is_one(count):
        y = x[:, :, start : start + span : step].unsqueeze(2)
        # a program that is exported forgets what is written through an expanded view
        y = y if is_one(count) else y.expand(-1, -1, count, -1, -1)
    elif step == 1 and stride == length:
        y = x.narrow(2, start, count * length).unflatten(2, (count, length))
    elif stride == 1 and step == count:
        y = x.narrow(2, start, count * length).unflatten(2, (length, count)).transpose(2, 3)
    else:
        y = x.narrow(2, start, (count - 1) * stride + span).unfold(2, span, stride)[..., ::step].transpose(-1, -2)
    return y.transpose(1, 2)


def _take(x: Tensor, axis: Runs | Blocks, at: tuple[slice, ...]) -> Tensor:
    """A chunk [b, n, h, length, D] of a view as the [b * n, h, length, D] of a kernel."""
    if isinstance(axis, Blocks):
        x, axis, at = x[at[0]], Blocks(axis.indices[at[1]], axis.size), ()
    return _view(x, axis)[at].flatten(0, 1)


def _add(x: Tensor, cols: Runs | Blocks, at: tuple[slice, ...], new: Tensor) -> None:
    """The adjoint of _take(x, cols, at): adds new [b * n, G, length, D] to x [B, G, S, D] in place."""
    x, new = x[at[0]], new.unflatten(0, (_size(at[0]), _size(at[1])))
    if isinstance(cols, Blocks):
        new = new.transpose(1, 2).unflatten(3, (-1, cols.size)).flatten(2, 3)
        x.unflatten(2, (-1, cols.size)).index_add_(2, cols.indices[at[1]].flatten(), new.to(x.dtype))
        return
    (start, length, count, stride, step), runs = cols, new.shape[1]
    start += at[1].start * stride
    if runs == 1 or stride == 0:
        _view(x, Runs(start, length, step=step)).add_(new.sum(1, keepdim=True) if runs > 1 else new)
    elif (step == 1 and stride == length) or (stride == 1 and step == count):
        _view(x, cols)[:, at[1]].add_(new)
    else:
        # Runs overlap, but equal stretches of `stride` positions do not: one addition for each stretch. In a short last
        # stretch the last run stands alone, since `stride` positions of it may reach past the end of the axis.
        new = new.transpose(1, 2)
        for i in range(0, length, stride):
            first, wide = start + i, min(stride, length - i)
            whole = runs - (wide < stride)
            y = x.narrow(2, first, whole * stride).unflatten(2, (whole, stride))
            y[:, :, :, :wide].add_(new[:, :, :whole, i : i + wide])
            if whole < runs:
                x.narrow(2, first + whole * stride, wide).add_(new[:, :, whole, i : i + wide])


def _mask(mask: Tensor | None, real: Tensor | None, cols: Runs | Blocks, at: tuple[slice, ...]) -> Tensor | None:
    """The mask of a chunk, [b * n or 1, h or 1, T or 1, S]."""
    if mask is not None:
        mask = _select(mask, at)
    if real is not None:
        seen = _take(real[:, None, :, None], cols, at[:2]).transpose(-1, -2)
        seen = seen.unflatten(0, (_size(at[0]), _size(at[1])))
        if mask is None or mask.dtype == torch.bool:
            mask = seen if mask is None else mask & seen
        else:
            mask = mask.masked_fill(~seen, -torch.inf)
    if mask is None or all(is_one(size) for size in mask.shape[:2]):
        return None if mask is None else mask[0]
    return mask.expand(_size(at[0]), _size(at[1]), -1, -1, -1).flatten(0, 1)


def _select(mask: Tensor, at: tuple[slice, ...]) -> Tensor:
    mask = mask[(None,) * (5 - mask.dim())]
    return mask[tuple(slice(None) if is_one(size) else a for a, size in zip(at, mask.shape[:3], strict=True))]


def _size(at: slice) -> int:
    return at.stop - at.start


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)
    mask = mask.to(dtype)
    return mask if mask.stride(-1) <= 1 else mask.contiguous()  # the kernel takes the last stride to be 0 or 1


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _empty(x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """[B, H, T, width] for x [B, H, T, D], in memory order [B, T, H, width]: that of the kernel, where heads merge."""
    B, H, T, _ = x.shape
    return x.new_empty(B, T, H, width, dtype=dtype).transpose(1, 2)


def _on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _flash(q: Tensor, v: Tensor) -> bool:
    return _on_cpu(q) and q.shape[-1] == v.shape[-1] and not exporting()


def _logits(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, scale: float) -> Tensor:
    dtype = _accumulator(q)
    logits = (q.to(dtype) * scale) @ k.to(dtype).transpose(-1, -2)
    if mask is not None:
        logits = logits + mask
    if causal:
        ahead = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(ahead, -torch.inf)
    return logits


def _partial_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float,
    learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of one part, given the o and lse of the union; `learned`: also that of the mask, [B, H, T, S]."""
    mask = _additive(mask, lse.dtype)
    if _flash(q, v) and not learned:
        return *_FLASH_BACKWARD(grad, q, k, v, o, lse, 0.0, causal, attn_mask=mask, scale=scale), None
    grad, o, wide_q, wide_k, wide_v = (x.to(lse.dtype) for x in (grad, o, q, k, v))
    weights = (_logits(q, k, causal, mask, scale) - lse.unsqueeze(-1)).exp()
    glogits = weights * (grad @ wide_v.transpose(-1, -2) - (grad * o).sum(-1, keepdim=True))
    gq, gk = glogits @ wide_k * scale, glogits.transpose(-1, -2) @ wide_q * scale
    return gq, gk, weights.transpose(-1, -2) @ grad, glogits
