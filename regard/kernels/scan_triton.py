"""Linear attention in Triton: a chunked scan where order counts, a sum and a reading where it does not.

    S_t = a_t S_{t-1} + k_t v_t^T    z_t = a_t z_{t-1} + k_t    o_t = q_t S_t / (q_t . z_t), or without the denominator

q = phi(query) [B, H, T, K] and k = phi(key) [B, G, T, K] with a feature map inside the kernels, v [B, G, T, V], H a
multiple of G. a_t = exp(decay_t) <= 1 is one number of a head [B, H, T], or one of each feature [B, H, T, K]. `first`
[B, T] is the last position at or before t at which a packed document begins, -1 where none does: there the state is
forgotten. Tokens at or behind `lengths` [B] are padding: they leave the state alone, read zeros and have no gradient.

A program walks over the chunks of a segment with the state in registers, in float32. Where batch and heads are too few
for the GPU, a sequence has several segments, whose first states come from a pass over keys and values before. Inside a
chunk scores are a small matrix; with a decay they are weighted by exp(A_t - A_j) for j <= t, A the sum of the decays,
of which no part can overflow. A decay of each feature weights every product by itself, so its chunks are short.

With u = g / den and e = -(u . o), g the gradient of o, the backward pass is that of the sums over the values (v, 1)
with (u, e) in the place of g: one scan forward for dq, one in reverse for dk and dv with a state of its own, the
gradient of S and z. That of A_t is q_t . dq_t - k_t . dk_t. States too wide for the registers are cut along V, and
along K: numerators and denominators of parts of K are added up and divided after the scan.

Products take bfloat16 as it is and round other factors to it; float16 as tf32, which has its digits and the range of
float32; and float32 as float32. A state that is asked for is summed from two bfloat16 parts of each feature.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from regard.kernels import scan_triton_cut as cuts
from regard.kernels.autograd import Function, refuse_second_derivative
from regard.kernels.scan_triton_backward import scan_keys, scan_queries
from regard.kernels.scan_triton_cut import Cut, dense, empty, even, precision, rows, strides
from regard.kernels.scan_triton_decay import decay_gradient, state_products
from regard.kernels.scan_triton_forward import link_segments, scan_forward, scan_sums
from regard.kernels.scan_triton_sums import add_parts, row_gradients
from regard.kernels.scan_triton_tiles import FLOOR, LIFT, LOG2E, TOKENS, group_maxima

MAPS = {"none": 0, "elu": 1, "relu": 2, "exp": 3}
GROWTH = 2 * LIFT.value  # powers of two by which a maximum may grow inside a chunk that keeps one unit


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: tuple[Tensor, Tensor] | None = None,
    decay: Tensor | None = None,
    first: Tensor | None = None,
    lengths: Tensor | None = None,
    map: str = "none",
    normalise: bool = True,
    floor: float = 0.0,
    each: bool = False,
    final: bool = True,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """o [B, H, T, V], the denominators [B, H, T] in float32 and the state after the last token, if `final`.

    normalise: o is divided by the denominators, which are raised to `floor` where it is above zero; with no floor o is
    zero where the denominator is. Then no gradient comes through the denominators. Otherwise o is float32.
    each: with a decay of each feature and no map, every feature c has its own denominator: sum_c q_tc S_tc / z_tc.
    """
    if each and (map != "none" or not _vector(decay)):
        raise ValueError(f"each feature has its denominator with a decay of each and map 'none' only, got map {map!r}")
    S, z = (None, None) if state is None else state
    norm = 3 if each else 0 if not normalise else 2 if floor > 0 else 1
    o, den, S, z = _Scan.apply(q, k, v, decay, None, None, S, z, first, lengths, MAPS[map], norm, floor, final)
    return o, den, (S, z)


def softmax_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: tuple[Tensor, Tensor, Tensor] | None = None,
    lengths: Tensor | None = None,
    final: bool = True,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """`scan` with a denominator of each feature and keys exp(k): o_t = sum_c q_tc S_tc / z_tc, and S, z [B, H, K, .] in
    units of exp of `top` [B, H, K], the running maximum, which is a constant in the gradient."""
    S, z, top = (None, None, None) if state is None else state
    k = rows(k)
    tops, safe = _maxima(k, top, dense(lengths))
    # a sum in units of exp(top) -> in those of the kernels, a power of two where a head keeps one for a chunk
    units = [
        torch.where(safe[..., None] != 0, _unit(x) - x * LOG2E.value, 0.0).exp2() for x in (tops[..., 0], tops[..., -1])
    ]
    if S is not None and z is not None:
        S, z = S / units[0][..., None], z / units[0]
    o, _, S, z = _Scan.apply(q, k, v, None, tops, safe, S, z, None, lengths, 0, 3, 0.0, final)
    return o, (S * units[1][..., None], z * units[1], tops[..., -1].clone()) if final else None


def _unit(top: Tensor) -> Tensor:
    return (top * LOG2E.value).floor() - LIFT.value


@torch.no_grad()
def _maxima(k: Tensor, top: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """The running maximum before and behind groups of tokens, [B, H, K, groups + 1], and which heads [B, H] have none
    that grows too much for one unit of a chunk."""
    B, H, T, K = k.shape
    count, chunk = triton.cdiv(T, TOKENS.value), cuts.tuned("forward", K, K, k.dtype, 4).chunk
    tops, groups = empty(k, (B, H, K, count + 1)), 8
    with torch.cuda.device_of(k):
        group_maxima[(H * triton.cdiv(count, groups), B)](
            k, lengths, tops, *strides(k), T, count,
            H=H, K=K, BK=cuts.power_of_two(K), RAGGED=lengths is not None, GROUPS=groups,
        )  # fmt: skip
    tops[..., 0] = FLOOR.value if top is None else top.clamp(min=FLOOR.value)
    tops = tops.cummax(-1).values
    step = chunk // TOKENS.value
    begin = torch.arange(0, count, step, device=k.device)
    first = k[:, :, ::chunk].float().clamp(FLOOR.value, -FLOOR.value)
    if lengths is not None:
        first = torch.where((begin * TOKENS.value < lengths[:, None])[:, None, :, None], first, FLOOR.value)
    low, high = torch.maximum(tops[..., begin], first.mT), tops[..., (begin + step).clamp(max=count)]
    return tops, ((high - low) * LOG2E.value <= GROWTH - 2).all(-1).all(-1).to(torch.int32)


class _Saved(NamedTuple):
    """What the forward pass leaves for `_backward`, in the order of its arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    tops: Tensor | None
    safe: Tensor | None
    S: Tensor | None
    z: Tensor | None
    first: Tensor | None
    lengths: Tensor | None
    o: Tensor
    rest: Tensor
    den: Tensor
    S_starts: Tensor
    z_starts: Tensor
    shrink: Tensor
    S_end: Tensor
    z_end: Tensor


class _Scan(Function):
    # A compiler sees both directions as one operator each.

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        tops: Tensor | None,
        safe: Tensor | None,
        S: Tensor | None,
        z: Tensor | None,
        first: Tensor | None,
        lengths: Tensor | None,
        map: int,
        norm: int,
        floor: float,
        final: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, decay = rows(q), rows(k), rows(v), rows(decay)
        S, z, first, lengths = (dense(x) for x in (S, z, first, lengths))
        run = _forward_operator if torch.compiler.is_compiling() else _forward
        # the gradient of a decay reads the last state
        ends = final or ctx.needs_input_grad[3]
        o, rest, den, S_end, z_end, *starts = run(
            q, k, v, decay, tops, safe, S, z, first, lengths, map, norm, floor, ends
        )
        ctx.save_for_backward(q, k, v, decay, tops, safe, S, z, first, lengths, o, rest, den, *starts, S_end, z_end)
        ctx.options = map, norm, floor, final
        if norm:
            ctx.mark_non_differentiable(den)
        return o, den, S_end, z_end

    @staticmethod
    def backward(ctx: Any, g: Tensor, g_den: Tensor, dS: Tensor, dz: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        map, norm, floor, final = ctx.options
        of_end = (dS.contiguous(), dz.contiguous()) if final else (None, None)
        of_den = None if norm else g_den.contiguous()
        run = _backward_operator if torch.compiler.is_compiling() else _backward
        learns, onward = ctx.needs_input_grad[3], ctx.needs_input_grad[6]
        dq, dk, dv, d_decay, dS_start, dz_start = run(
            *_Saved(*ctx.saved_tensors), g, of_den, *of_end, map, norm, floor, learns, onward
        )
        starts = (dS_start, dz_start) if onward else (None, None)
        return dq, dk, dv, d_decay if learns else None, None, None, *starts, None, None, None, None, None, None


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    tops: Tensor | None,
    safe: Tensor | None,
    S: Tensor | None,
    z: Tensor | None,
    first: Tensor | None,
    lengths: Tensor | None,
    map: int,
    norm: int,
    floor: float,
    ends: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, what rounding left of it where K is cut, den, the state at the end, the states before each segment, and what a
    segment leaves of the one before."""
    ways = _ways(decay, tops)
    p = cuts.cut(q, v.shape[3], v.dtype, ways[0])
    o, rest, den, S_end, z_end, S_starts, z_starts, shrink = _forward_results(q, k, v, decay, tops, norm, ends)
    before, options, extra = (S, z), options_of(q, k, v, first, lengths, p, map, norm), (decay, tops, safe)
    if p.segments > 1:
        before, starts = (S_starts, z_starts), (S_starts, z_starts, shrink)
        for way in ways:
            segment_sums(k, v, None, None, k, extra, first, lengths, floor, starts, p, options, way, v.dtype, ends)
        _link(p, starts, (S, z), (S_end, z_end) if ends else (None, None), reverse=False)
    ends = ends and p.segments == 1
    out, out_den = o, den
    if p.parts_k > 1:
        options["NORM"] = 3 if norm == 3 else 0
        B, H, T, V = o.shape
        out = empty(q, (p.parts_k, B, T, H, V))
        out_den = den if norm == 3 else empty(q, (p.parts_k, B, H, T))
    for way in ways:
        tuning = cuts.tuned("forward", *_widths(q, v), v.dtype, way)
        with torch.cuda.device_of(q):
            scan_forward[(q.shape[1] * p.segments, len(q), p.parts)](
                q, k, v, *extra, first, lengths, *before, out, out_den, *((S_end, z_end) if ends else (None, None)),
                *strides(q), *strides(k), *strides(v), *strides(decay),
                q.shape[2], len(q), p.segments, p.span, _last(tops), floor,
                **options, DECAY=way, STATE=before[0] is not None, FINAL=ends,
                **tuning.launch(), EVEN=even(q, v, lengths, p, tuning),
            )  # fmt: skip
    if p.parts_k > 1:
        _add_parts(out, out_den, o, rest if rest.numel() else None, den, norm, floor, p.parts_k)
    return o, rest, den, S_end, z_end, S_starts, z_starts, shrink


def _add_parts(
    parts: Tensor,
    parts_den: Tensor | None,
    o: Tensor,
    rest: Tensor | None,
    den: Tensor | None,
    norm: int,
    floor: float,
    count: int,
) -> None:
    B, H, T, V = o.shape
    with torch.cuda.device_of(o):
        add_parts[(triton.cdiv(B * H * T, 32),)](
            parts, parts_den, o, rest, den, B * H * T, T, floor,
            H=H, V=V, BV=cuts.power_of_two(V), NORM=norm, PARTS=count, ROWS=32,
        )  # fmt: skip


def _forward_results(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, tops: Tensor | None, norm: int, ends: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Room for what `_forward` returns."""
    (B, H, T, K), V, way = q.shape, v.shape[-1], _ways(decay, tops)[0]
    p = cuts.cut(q, V, v.dtype, way)
    o = empty(q, (B, T, H, V), v.dtype if norm else torch.float32).transpose(1, 2)
    den = empty(q, (B, H, T, K) if norm == 3 else (B, H, T))
    S_end, z_end = (empty(q, size if ends else (0,)) for size in ((B, H, K, V), (B, H, K)))
    each = (B, H, p.segments)
    sizes = (*each, K, V), (*each, K), (*each, K if way > 1 else 1)
    S_starts, z_starts, shrink = (empty(q, size if p.segments > 1 else (0,)) for size in sizes)
    # with it the gradient of the denominators is that of what was not rounded
    cancels = p.parts_k > 1 and norm in (1, 2) and o.dtype != torch.float32
    rest = empty(q, (B, T, H, V), o.dtype).transpose(1, 2) if cancels else empty(q, (0,), o.dtype)
    return o, rest, den, S_end, z_end, S_starts, z_starts, shrink


def options_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor | None,
    lengths: Tensor | None,
    p: Cut,
    map: int,
    norm: int,
) -> dict[str, Any]:
    """The constants that all kernels of a scan are compiled with."""
    H, K = q.shape[1::2]
    sizes = {"H": H, "GROUP": H // k.shape[1], "K": K, "V": v.shape[3], "BK": p.block_k, "BV": p.block_v}
    return sizes | {
        "MAP": map,
        "NORM": norm,
        "RESET": first is not None,
        "RAGGED": lengths is not None,
        **precision(v.dtype),
    }


def segment_sums(
    x: Tensor,
    y: Tensor,
    den: Tensor | None,
    e: Tensor | None,
    k: Tensor | None,
    extra: tuple[Tensor | None, Tensor | None, Tensor | None],
    first: Tensor | None,
    lengths: Tensor | None,
    floor: float,
    sums: tuple[Tensor, Tensor, Tensor | None],
    p: Cut,
    options: dict[str, Any],
    way: int,
    dtype: torch.dtype,
    ends: bool,
    reverse: bool = False,
) -> None:
    """The sum of x_t y_t^T over each segment, as the state after it has it; in reverse, as the gradient before it."""
    tuning, (decay, tops, _) = cuts.tuned("sums", *_widths(x, y), dtype, way), extra
    with torch.cuda.device_of(x):
        scan_sums[(options["H"] * p.segments, len(x), p.parts)](
            x, y, den, e, k, *extra, first, lengths, *sums,
            *strides(x), *strides(y), *strides(k), *strides(decay),
            x.shape[2], p.segments, p.span, _last(tops), floor,
            **options | {"GROUP": options["H"] // x.shape[1]},
            DECAY=way, REVERSE=reverse, ENDS=ends, LINKED=sums[2] is not None,
            **tuning.launch(), EVEN=even(x, y, lengths, p, tuning),
        )  # fmt: skip


def _link(
    p: Cut,
    sums: tuple[Tensor, Tensor, Tensor],
    begin: tuple[Tensor | None, Tensor | None],
    end: tuple[Tensor | None, Tensor | None],
    reverse: bool,
) -> None:
    """What each segment adds -> the state before it, in place (after it, in reverse), and the one at the end."""
    part_S, part_z, shrink = sums
    (B, H, _, K, V), block = part_S.shape, 256
    with torch.cuda.device_of(part_S):
        link_segments[(B * H, triton.cdiv(K * V, block) + triton.cdiv(K, block))](
            part_S, part_z, shrink, *begin, *end, p.segments,
            K=K, V=V, WIDE=shrink.shape[3], BLOCK=block, REVERSE=reverse,
            STATE=begin[0] is not None, FINAL=end[0] is not None, num_warps=2,
        )  # fmt: skip


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    tops: Tensor | None,
    safe: Tensor | None,
    S: Tensor | None,
    z: Tensor | None,
    first: Tensor | None,
    lengths: Tensor | None,
    o: Tensor,
    rest: Tensor,
    den: Tensor,
    S_starts: Tensor,
    z_starts: Tensor,
    shrink: Tensor,
    S_end: Tensor,
    z_end: Tensor,
    g: Tensor,
    g_den: Tensor | None,
    dS: Tensor | None,
    dz: Tensor | None,
    map: int,
    norm: int,
    floor: float,
    learns: bool,
    onward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, of the decay where it learns, and of the first state."""
    # here, where no compiler looks: it makes a gradient contiguous whose strides are asked for
    ways, g = _ways(decay, tops), rows(g)
    p = cuts.cut(q, v.shape[3], v.dtype, ways[0])
    # q . dq - k . dk cancels: narrow factors would leave a decay few digits
    exact = learns and v.dtype != torch.float32
    dtype = torch.float16 if exact else v.dtype
    dq, dk, dv, of_q, of_k, dS_start, dz_start = _backward_results(q, k, v, decay, tops, learns, onward)
    e = _row_gradients(g, g_den, o, rest, den, norm, floor, p)
    options = options_of(q, k, v, first, lengths, p, map, norm)
    options |= {"NARROW": False, "PRECISION": cuts.EXACT} if exact else {}
    sizes = (q.shape[2], len(q), p.segments, p.span, _last(tops), floor)
    grid, extra = (q.shape[1] * p.segments, len(q), p.parts), (decay, tops, safe)
    steps = (*strides(q), *strides(k), *strides(v), *strides(g), *strides(decay))
    before, after = (S, z), (dS, dz)
    sums = (torch.empty_like(S_starts), torch.empty_like(z_starts), shrink)
    if p.segments > 1:
        before, after = (S_starts, z_starts), sums[:2]
    given = p.parts_v > 1 or norm == 0 or (p.parts_k > 1 and norm < 3)
    for way in ways:
        tuning = cuts.tuned("queries", *_widths(q, v), dtype, way)
        # faster on an H200 for these; others were not measured
        by_identity = way == 0 and dtype == torch.bfloat16 and not cuts.is_wide(*_widths(q, v), dtype)
        with torch.cuda.device_of(q):
            scan_queries[grid](
                q, k, v, g, den, e, *extra, first, lengths, *before, dq, of_q, *steps, *sizes,
                **options, DECAY=way, LEARNS=learns, GIVEN=given, STATE=before[0] is not None,
                **tuning.launch(), EVEN=even(q, v, lengths, p, tuning), BY_IDENTITY=by_identity,
            )  # fmt: skip
    if norm == 3 and p.parts_v > 1:
        e = dq.sum(0).float() * q / -torch.where(den.abs() > 1e-30, den, torch.inf)
    starts = (dS_start, dz_start) if onward else (None, None)
    if p.segments > 1:
        for way in ways:
            segment_sums(q, g, den, e, k, extra, first, lengths, floor, sums, p, options, way, dtype, onward, True)
        _link(p, sums, (dS, dz), starts, reverse=True)
        starts = (None, None)
    for way in ways:
        tuning = cuts.tuned("keys", *_widths(q, v), dtype, way)
        with torch.cuda.device_of(q):
            scan_keys[grid](
                q, k, v, g, den, e, *extra, first, lengths, *after, dk, dv, of_k, *starts, *steps, *sizes,
                **options, DECAY=way, LEARNS=learns, STATE=after[0] is not None, FINAL=starts[0] is not None,
                **tuning.launch(), EVEN=even(q, v, lengths, p, tuning),
            )  # fmt: skip
    d_decay = of_q
    if learns and decay is not None:
        of_end = None if dS is None or dz is None else (dS, dz)
        products = state_products((S_starts, z_starts), sums[:2], (S_end, z_end), of_end, segments=p.segments)
        d_decay = decay_gradient(of_q.sum(0) - of_k.sum(0), products, p.span, decay, first, lengths)
    dq, dk, dv = (_summed(parts, x.dtype) for parts, x in ((dq, q), (dk, k), (dv, v)))
    return dq, *_grouped(k, dk, dv), d_decay, dS_start, dz_start


def _backward_results(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, tops: Tensor | None, learns: bool, onward: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of each head, and of each part of K or V where a state is cut: `_added` makes the gradients of them."""
    (B, H, T, K), V = q.shape, v.shape[-1]
    p = cuts.cut(q, V, v.dtype, _ways(decay, tops)[0])

    def parts(count: int, x: Tensor) -> Tensor:
        dtype = x.dtype if count == 1 else torch.float32
        return empty(q, (count, B, T, H, x.shape[3]), dtype).transpose(2, 3)

    size = ((p.parts_v, B, H, T, K) if _vector(decay) else (p.parts, B, H, T)) if learns else (0,)
    dq, dk, dv = parts(p.parts_v, q), parts(p.parts_v, k), parts(p.parts_k, v)
    of_q, of_k = empty(q, size), empty(q, size)
    dS_start, dz_start = (empty(q, start if onward else (0,)) for start in ((B, H, K, V), (B, H, K)))
    return dq, dk, dv, of_q, of_k, dS_start, dz_start


def _summed(parts: Tensor, dtype: torch.dtype, *, run: bool = True) -> Tensor:
    """What gradients of parts [parts, B, H, T, .] add up to."""
    count, B, H, T, width = parts.shape
    if count == 1:
        return parts[0]
    out = empty(parts, (B, T, H, width), dtype).transpose(1, 2)
    if run:
        _add_parts(parts, None, out, None, None, 3, 0.0, count)
    return out


def _grouped(k: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of heads with the same key and value, added up."""
    if k.shape[1] < dk.shape[1]:
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2, dtype=torch.float32).to(x.dtype) for x in (dk, dv))
    return dk, dv


def _row_gradients(
    g: Tensor, g_den: Tensor | None, o: Tensor, rest: Tensor, den: Tensor, norm: int, floor: float, p: Cut
) -> Tensor:
    """e [B, H, T], the gradient of the logarithms of the denominators; the kernel for dq writes it where it sees all
    of V."""
    if norm == 0 and g_den is not None:
        return g_den
    if p.parts == 1 or norm == 3:
        return empty(g, den.shape)
    e, (B, H, T, V) = empty(g, den.shape), o.shape
    with torch.cuda.device_of(g):
        row_gradients[(triton.cdiv(B * H * T, 32),)](
            g, o, rest if rest.numel() else None, den, e, *strides(g), B * H * T, T, floor,
            H=H, V=V, BV=cuts.power_of_two(V), NORM=norm, ROWS=32,
        )  # fmt: skip
    return e


_forward_operator = torch.library.custom_op("regard::linear_scan", _forward, mutates_args=())
_backward_operator = torch.library.custom_op("regard::linear_scan_backward", _backward, mutates_args=())


@_forward_operator.register_fake
def _(q, k, v, decay, tops, safe, S, z, first, lengths, map, norm, floor, ends):
    return _forward_results(q, k, v, decay, tops, norm, ends)


@_backward_operator.register_fake
def _(q, k, v, decay, tops, *rest):
    learns, onward = rest[-2:]
    dq, dk, dv, of_q, _, dS_start, dz_start = _backward_results(q, k, v, decay, tops, learns, onward)
    dq, dk, dv = (_summed(parts, x.dtype, run=False) for parts, x in ((dq, q), (dk, k), (dv, v)))
    return dq, *_grouped(k, dk, dv), torch.empty_like(decay) if learns else of_q, dS_start, dz_start


def _ways(decay: Tensor | None, tops: Tensor | None) -> tuple[int, ...]:
    """DECAY of the kernels that run; with running maxima both that know them, each on the heads that are its own."""
    if tops is not None:
        return 4, 3
    return (0 if decay is None else decay.dim() - 2,)


def _last(tops: Tensor | None) -> int:
    return 0 if tops is None else tops.shape[3] - 1


def _vector(decay: Tensor | None) -> bool:
    return decay is not None and decay.dim() == 4


def _widths(q: Tensor, v: Tensor) -> tuple[int, int]:
    return q.shape[3], v.shape[3]
