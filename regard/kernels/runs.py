"""Exact softmax attention over runs of keys, said by positions: the patterns that Triton kernels take.

The query at position i sees the keys at positions low(i) <= j < high(i), where both bounds are a `Bound`,

    bound(i) = (i + add) // every * times + plus:

a window has times 1, blocks of l have every = times = l, "all" has times 0. Beside this near run a query may see a far
one: few keys that all later queries share (global tokens, summaries). A `fold` of s cuts positions into the s residue
classes modulo s that never see each other; bounds then count the members of a class. A pattern is a list of such
passes, each over what the passes before it left open; no query may meet a key twice.

`attend` needs Triton (regard/kernels/parts_triton.py), except in a program that `torch.export` records (portable.py);
what stands in parts.py does the same for any device and for any mask. O(T (keys seen) D) time, memory linear in the
inputs, forward and backward.

Letters: B batch, T queries, S keys, H heads, G key/value heads (H is a multiple of G), D head width, E value width.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.autograd import Function, refuse_second_derivative
from regard.kernels.choose import portable_only, use_triton
from regard.kernels.parts import default_scale

LOG2E = math.log2(math.e)
WIDEST = 256  # head width that a program has room for


class Bound(NamedTuple):
    """(i + add) // every * times + plus, rounded down."""

    add: int = 0
    every: int = 1
    times: int = 1
    plus: int = 0


ALL = Bound(times=0, plus=2**30)  # above every position
NONE = Bound(times=0, plus=-(2**30))  # below every position


class Far(NamedTuple):
    """Keys j < length that a query sees where j < high(i), and j >= high(i) - span if `span` is not 0.

    They are k and v (or far_k and far_v) at slot start + j // inner * stride + j % inner; inner = 0: at start + j.
    To positions, far key j is for query i a token at j + (i + add) // every * apart, `add` and `every` those of high.
    """

    length: int
    high: Bound = ALL
    start: int = 0
    inner: int = 0
    stride: int = 0
    span: int = 0
    apart: int = 0


class Pass(NamedTuple):
    """The near run of keys, and perhaps a far one. hole: a query does not see the key at its own position. block: the
    tokens of a block of queries that also sees the `listed` blocks of keys in `Lists`; a power of two, at least 16."""

    low: Bound = NONE
    high: Bound = ALL
    far: Far | None = None
    fold: int = 1
    hole: bool = False
    block: int = 0
    listed: int = 0


class Lists(NamedTuple):
    """The blocks of keys that each of n blocks of queries sees, and, for gradients, the other way round."""

    keys: Tensor  # [B, H, n, listed], -1 for none
    starts: Tensor | None = None  # [B, H, n + 1] where the queries of a block of keys begin in
    queries: Tensor | None = None  # [B, H, n * listed]

    @classmethod
    def of(cls, keys: Tensor, inverse: bool) -> "Lists":
        B, H, n, listed = keys.shape
        if not inverse or not listed:
            return cls(keys.contiguous())
        by_key, order = torch.where(keys < 0, n, keys).flatten(2).sort(dim=2, stable=True)
        blocks = torch.arange(n + 1, device=keys.device).expand(B, H, -1).contiguous()
        return cls(keys.contiguous(), torch.searchsorted(by_key, blocks), order // listed)


class Where(NamedTuple):
    """Where queries and keys stand: query t at q0 + t, key slot s at k0 + s.

    q0 and k0 are numbers, or tensors [B] where rows differ. Keys at position < end [B] exist, and near ones are those
    from `first` to before last [B]. `since` and `until` [B, T] are bounds of single queries, as those of packed
    documents. far_stride [B] is that of the far keys, where rows differ.
    """

    q0: int | Tensor = 0
    k0: int | Tensor = 0
    end: Tensor | None = None
    first: int = 0
    since: Tensor | None = None
    until: Tensor | None = None
    last: Tensor | None = None
    far_stride: Tensor | None = None


class Bias(NamedTuple):
    """What is added to the scaled logits: -slopes[h] |j - i|, or table[h, j - i + origin]."""

    slopes: Tensor | None = None  # [H]
    table: Tensor | None = None  # [H, gaps]
    origin: int = 0


class Common(NamedTuple):
    """The numbers that all passes of a call share, of `Where`, `Bias` and `Relations`."""

    q0: int = 0  # 0 as well where rows differ
    k0: int = 0
    first: int = 0
    skip: int = 0  # queries that are computed elsewhere, or see all keys
    origin: int = 0
    distance: int = 0  # 0: no relations, -1: a table of all distances
    globals: int = 0
    segment: int = 0
    of_globals: int = 0
    unbounded: int = 0  # whether the skipped queries see all keys


class Relations(NamedTuple):
    """A logit for each relation p of a query to a key: table[b, h, t, p] joins the scaled logits (ETC).

    Positions below `globals` are one sequence, the others another one. Within a sequence p is the distance, clipped at
    m = `distance`: 0 the token itself, 1 ... m to the right, m + 1 ... 2 m to the left. Between the two p is 2 m + 1,
    or 2 m + 2 for a token and the global one of its segment (`segment` tokens each; 0: there are no segments).
    """

    table: Tensor  # [B, H, T, 2 m + 3]
    distance: int
    globals: int
    segment: int = 0
    of_globals: bool = False  # whether the queries are the global tokens; their far keys are none


class Distances(NamedTuple):
    """A logit for each query and distance d = i - j, which joins the scaled logits (Transformer-XL).

    The kernels read the logits of neighbouring keys, which are neighbours in the table, 8 at a time. So the table says
    where a key stands beside the first of the 8 queries that its query is one of: with C the width less 8, the logit of
    query t at distance d is table[h, t % 8, b, t // 8, C + t % 8 - d]. No query sees a key C or more before it, or
    after it.
    """

    table: Tensor  # [H, 8, B, (T + 7) // 8, C + 8], C a multiple of 8

    @classmethod
    def of(cls, q: Tensor, keys: Tensor) -> "Distances":
        """The products of queries [B, H, T, D] and a key for each distance from 0 on, [H, C, D]."""
        (_, _, T, _), C = q.shape, keys.shape[1]
        wide = C + -C % 8
        q = F.pad(q, (0, 0, 0, -T % 8)).unflatten(2, (-1, 8)).permute(1, 3, 0, 2, 4)  # [H, 8, B, T / 8, D]
        # falling distances from wide + 7 to -7, of which residue r takes those from wide + r on
        falling = F.pad(keys.flip(1), (0, 0, wide + 8 - C, 7))
        shifted = torch.stack([falling[:, 7 - r : 15 - r + wide] for r in range(8)], 1)
        table = q.flatten(2, 3).flatten(0, 1) @ shifted.flatten(0, 1).mT
        return cls(table.unflatten(1, q.shape[2:4]).unflatten(0, q.shape[:2]))


def takes(q: Tensor, k: Tensor, v: Tensor, bias: Bias | None = None, refusal: str | None = None) -> bool:
    """Whether `attend` runs on these, by the choice of kernels; `refusal` is the caller's own reason not to. While a
    program is exported it does, but for relations, for which a caller gives a refusal."""
    if portable_only():
        return refusal is None
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        refusal = f"heads are wider than {WIDEST}"
    elif bias is not None and any(x is not None and x.requires_grad for x in bias[:2]) and torch.is_grad_enabled():
        refusal = "the bias of positions is learned, and it gives a bias no gradient"
    return use_triton("parts", q, k, v, refusal=refusal)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    passes: Sequence[Pass],
    *,
    scale: float | None = None,
    where: Where | None = None,
    bias: Bias | None = None,
    far_k: Tensor | None = None,
    far_v: Tensor | None = None,
    head: Tensor | None = None,
    unbounded: int = 0,
    lists: Lists | None = None,
    relations: Relations | Distances | None = None,
) -> Tensor:
    """q [B, H, T, D], k [B, G, S, D], v [B, G, S, E] -> [B, H, T, E]; queries that see no key give 0.

    far_k [B, G, F, D] and far_v [B, G, F, E] are the far keys and values, where these are no keys of k. `head`
    [B, H, n, E] is the output of the first n queries, which are computed elsewhere and skipped here. The first
    `unbounded` queries see all keys of k, and the passes are of the others.
    """
    where, bias = where or Where(), bias or Bias()
    scale = default_scale(q) if scale is None else scale
    if unbounded and (head is not None or relations is not None or where.since is not None or where.until is not None):
        raise ValueError("unbounded queries take no head, no relations and no bounds of single queries")
    if unbounded and any(part.fold > 1 for part in passes):
        raise ValueError("unbounded queries see the keys of all classes: give no fold")
    if portable_only():
        if relations is not None or where.since is not None or where.until is not None:
            raise NotImplementedError(
                "a pattern with relations, or with bounds of single queries such as those of packed documents, cannot "
                "be exported: export the model without them, or set REGARD_KERNELS=triton to keep Regard's own kernels"
            )
        from regard.kernels import portable

        if unbounded:
            all_keys = where._replace(first=0)
            head = portable.attend(q[:, :, :unbounded], k, v, [Pass()], scale=scale, where=all_keys, bias=bias)
        return portable.attend(
            q, k, v, passes, scale=scale, where=where, bias=bias, far_k=far_k, far_v=far_v, head=head, lists=lists
        )
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(dtype) for x in (q, k, v))
        far_k, far_v, head = (None if x is None else x.to(dtype) for x in (far_k, far_v, head))
    q, k, v = (_with_dense_rows(x) for x in (q, k, v))
    far_k, far_v = (None if x is None else _with_dense_rows(x) for x in (far_k, far_v))
    if not q.numel() or not k.numel():
        return torch.zeros((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    skip = min(unbounded, q.shape[2]) if head is None else head.shape[2]
    numbers, tensors = flatten(passes, where, bias, skip, lists, relations, unbounded > 0)
    related = None if relations is None else relations.table.contiguous()
    return _Attend.apply(q, k, v, far_k, far_v, head, related, scale, numbers, *tensors)


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class _Attend(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        far_k: Tensor | None,
        far_v: Tensor | None,
        head: Tensor | None,
        related: Tensor | None,
        scale: float,
        numbers: list[int],
        *tensors: Tensor | None,
    ) -> Tensor:
        # `tensors` are odd in number: dynamo omits ctx if forward has as many parameters as there are arguments.
        run = _forward_operator if torch.compiler.is_compiling() else _forward
        o, lse = run(q, k, v, far_k, far_v, head, related, scale, numbers, tensors)
        ctx.scale, ctx.numbers, ctx.head = scale, numbers, 0 if head is None else head.shape[2]
        ctx.save_for_backward(q, k, v, far_k, far_v, related, o, lse, *tensors)
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        q, k, v, far_k, far_v, related, o, lse, *tensors = ctx.saved_tensors
        run = _backward_operator if torch.compiler.is_compiling() else _backward
        grads = run(grad, q, k, v, far_k, far_v, related, o, lse, ctx.scale, ctx.numbers, tensors)
        far = grads[3:5] if far_k is not None else (None, None)
        of_related = None if related is None else grads[5]
        head = grad[:, :, : ctx.head] if ctx.head else None
        return *grads[:3], *far, head, of_related, None, None, *[None] * len(tensors)


def flatten(
    passes: Sequence[Pass],
    where: Where,
    bias: Bias,
    skip: int,
    lists: Lists | None = None,
    relations: Relations | Distances | None = None,
    unbounded: bool = False,
) -> tuple[list[int], list[Tensor | None]]:
    """As numbers and tensors, since operators take no tuples; a bias in units of the kernels' base 2."""
    q0, k0 = (0 if isinstance(x, Tensor) else x for x in where[:2])
    common = Common(q0, k0, where.first, skip, bias.origin, unbounded=int(unbounded))
    if isinstance(relations, Distances):
        common = common._replace(distance=-1)
    elif relations is not None:
        _, distance, globals, segment, of_globals = relations
        common = common._replace(distance=distance, globals=globals, segment=segment, of_globals=int(of_globals))
    numbers = list(common)
    for low, high, far, *others in passes:
        count, bound, *rest = far or Far(0)
        numbers += [*low, *high, count, *bound, *rest, *map(int, others)]
    slopes, table = (x if x is None else (x.detach().float() * LOG2E).contiguous() for x in bias[:2])
    starts = [x if isinstance(x, Tensor) else None for x in where[:2]]
    places = (where.end, where.since, where.until, where.last, where.far_stride)
    return numbers, [*starts, *places, slopes, table, *(lists or (None, None, None))]


def unflatten(numbers: Sequence[int]) -> tuple[Common, list[Pass]]:
    """What `flatten` made numbers of."""
    count, passes = len(Common._fields), []
    for at in range(count, len(numbers), 22):
        n = numbers[at : at + 22]
        far = Far(n[8], Bound(*n[9:13]), *n[13:18]) if n[8] else None
        passes.append(Pass(Bound(*n[:4]), Bound(*n[4:8]), far, n[18], bool(n[19]), *n[20:]))
    return Common._make(numbers[:count]), passes


def _forward(
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
    """o [B, H, T, E] and the base-2 logsumexp [B, H, T] of the logits."""
    from regard.kernels import parts_triton

    return parts_triton.forward(q, k, v, far_k, far_v, head, related, scale, numbers, tensors)


def _backward(
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
    """The gradients of q, k, v, far_k, far_v and `related`; the last three are empty where there are none."""
    from regard.kernels import parts_triton

    return parts_triton.backward(grad, q, k, v, far_k, far_v, related, o, lse, scale, numbers, tensors)


_forward_operator = torch.library.custom_op("regard::runs", _forward, mutates_args=())
_backward_operator = torch.library.custom_op("regard::runs_backward", _backward, mutates_args=())


@_forward_operator.register_fake
def _(q, k, v, far_k, far_v, head, related, scale, numbers, tensors):
    return empty_like_heads(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@_backward_operator.register_fake
def _(grad, q, k, v, far_k, far_v, related, o, lse, scale, numbers, tensors):
    far = (q.new_empty(0) if x is None else empty_like_heads(x, x.shape[3]) for x in (far_k, far_v))
    of_related = q.new_empty(0) if related is None else torch.empty_like(related)
    return *(empty_like_heads(x, x.shape[3]) for x in (q, k, v)), *far, of_related


def empty_like_heads(x: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """[B, H, T, width] for x [B, H, T, D], in memory order [B, T, H, width], where heads merge."""
    B, H, T, _ = x.shape
    return x.new_empty(B, T, H, width, dtype=dtype or x.dtype).transpose(1, 2)
