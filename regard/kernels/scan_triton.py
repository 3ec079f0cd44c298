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
gradient of S and z. That of A_t is q_t . dq_t - k_t . dk_t. States too wide for the registers are cut along V.

Products take bfloat16 as it is and round other factors to it; float16 as tf32, which has its digits and the range of
float32; and float32 as float32. A state that is asked for is summed from two bfloat16 parts of each feature.
"""

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from regard.kernels.parts import once

MAPS = {"none": 0, "elu": 1, "relu": 2, "exp": 3}
HELD = 16384  # numbers of a state that a program holds; half of it where factors are float32
ENOUGH = 1.5  # programs for each multiprocessor with which a sequence is one segment
WANTED = 2  # programs for each multiprocessor where it is cut
PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None)
POISON = False  # tests fill what is about to be written with NaN
SEGMENTS: int | None = None  # tests and tuning fix their number


class Tuning(NamedTuple):
    chunk: int  # tokens
    warps: int
    stages: int
    registers: int | None = None  # at most, of a thread

    def launch(self) -> dict[str, int | None]:
        return {"C": self.chunk, "num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


# for bfloat16 and states of 64 x 64, measured on an H200
TUNED = {
    "forward": Tuning(64, 4, 3),
    "queries": Tuning(64, 4, 3),
    "keys": Tuning(32, 4, 3),
    "sums": Tuning(64, 4, 3),
    "read": Tuning(64, 4, 1),
}
# for wider states
WIDE = {
    "forward": Tuning(32, 8, 2),
    "queries": Tuning(32, 8, 3),
    "keys": Tuning(32, 8, 3),
    "sums": Tuning(64, 8, 2),
    "read": Tuning(64, 8, 1),
}


class Cut(NamedTuple):
    """How a call is cut into programs."""

    block_k: int  # K as a power of two
    block_v: int  # columns of V of a program
    parts: int  # programs along V
    segments: int
    span: int  # tokens of a segment


def tuned(kernel: str, K: int, V: int, dtype: torch.dtype, vector: bool = False) -> Tuning:
    block_k, block_v = _blocks(K, V, dtype)
    wide = block_k * block_v > 4096
    if vector:
        return Tuning(16, 8 if block_k > 64 else 4, 1)
    if dtype != torch.bfloat16:
        return Tuning(16 if wide else 32, 8 if wide else 4, 1)
    chunk, *rest = (WIDE if wide else TUNED)[kernel]
    # tiles of 64 x 256 do not stay in registers
    return Tuning(min(chunk, 32) if block_k > 128 else chunk, *rest)


def cut(x: Tensor, V: int, dtype: torch.dtype, vector: bool = False) -> Cut:
    B, H, T, K = x.shape
    block_k, block_v = _blocks(K, V, dtype)
    parts = triton.cdiv(V, block_v)
    programs, cores = B * H * parts, _multiprocessors(x)
    segments = SEGMENTS or (1 if programs >= ENOUGH * cores else triton.cdiv(WANTED * cores, programs))
    step = max(tuned(kernel, K, V, dtype, vector).chunk for kernel in TUNED)
    # a segment of few chunks is not worth its first state
    span = triton.cdiv(triton.cdiv(T, segments), step) * step
    span = span if SEGMENTS else max(span, 4 * step)
    return Cut(block_k, block_v, parts, triton.cdiv(T, span), span)


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
    o, den, S, z = _Scan.apply(q, k, v, decay, S, z, first, lengths, MAPS[map], norm, floor, final)
    return o, den, (S, z)


class _Scan(Function):
    # A compiler sees both directions as one operator each.

    @staticmethod
    def forward(ctx, q, k, v, decay, S, z, first, lengths, map, norm, floor, final):
        q, k, v, decay = (_rows(x) for x in (q, k, v, decay))
        S, z, first, lengths = (_dense(x) for x in (S, z, first, lengths))
        run = _forward_operator if torch.compiler.is_compiling() else _forward
        # the gradient of a decay reads the last state
        ends = final or ctx.needs_input_grad[3]
        o, den, S_end, z_end, *starts = run(q, k, v, decay, S, z, first, lengths, map, norm, floor, ends)
        ctx.save_for_backward(q, k, v, decay, S, z, first, lengths, o, den, *starts, S_end, z_end)
        ctx.options = map, norm, floor, final
        if norm:
            ctx.mark_non_differentiable(den)
        return o, den, S_end, z_end

    @staticmethod
    def backward(ctx, g, g_den, dS, dz):
        once()
        map, norm, floor, final = ctx.options
        *given, S_end, z_end = ctx.saved_tensors
        _, _, _, decay, _, _, first, lengths, *_ = given
        dS, dz = (dS.contiguous(), dz.contiguous()) if final else (None, None)
        g_den = None if norm else g_den.contiguous()
        run = _backward_operator if torch.compiler.is_compiling() else _backward
        learns, onward = ctx.needs_input_grad[3], ctx.needs_input_grad[4]
        *grads, of_q, of_k, dS_start, dz_start = run(*given, _rows(g), g_den, dS, dz, map, norm, floor, learns, onward)
        d_decay = None
        if learns:
            end = (S_end * dS).sum(-1) + z_end * dz if final else None  # [B, H, K]
            d_decay = _decay_gradient(of_q - of_k, end, decay, first, lengths)
        starts = (dS_start, dz_start) if onward else (None, None)
        return *grads, d_decay, *starts, None, None, None, None, None, None


def _decay_gradient(
    of_sums: Tensor, end: Tensor | None, decay: Tensor, first: Tensor | None, lengths: Tensor | None
) -> Tensor:
    """Sums over the tokens from t on of the gradient of A, and what leaves with the last state; none at padding and
    where a document begins."""
    # in double: many tokens, and large parts cancel
    total = of_sums.double().flip(2).cumsum(2).flip(2)
    if end is not None:
        total = total + (end if _vector(decay) else end.sum(-1)).unsqueeze(2)
    at = torch.arange(decay.shape[2], device=decay.device)[None]
    live = torch.ones_like(at, dtype=torch.bool)
    live = live if lengths is None else live & (at < lengths[:, None])
    live = live if first is None else live & (first != at)
    live = live[:, None, :, None] if _vector(decay) else live[:, None]
    return torch.where(live, total, 0).to(decay.dtype)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    S: Tensor | None,
    z: Tensor | None,
    first: Tensor | None,
    lengths: Tensor | None,
    map: int,
    norm: int,
    floor: float,
    ends: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, den, the state at the end, the states before each segment, and what a segment leaves of the one before."""
    p = _cut(q, v, decay)
    o, den, S_end, z_end, *starts = _forward_results(q, k, v, decay, norm, ends)
    before, options = (S, z), _options(q, k, v, decay, first, lengths, p, map, norm)
    if p.segments > 1:
        before = starts[:2]
        _segment_sums(k, v, None, None, decay, first, lengths, floor, starts, p, options, v.dtype, ends, reverse=False)
        _link(p, starts, (S, z), (S_end, z_end) if ends else (None, None), reverse=False)
    ends = ends and p.segments == 1
    tuning = tuned("forward", *_widths(q, v), v.dtype, _vector(decay))
    with torch.cuda.device_of(q):
        _scan_forward[(q.shape[1] * p.segments, len(q), p.parts)](
            q, k, v, decay, first, lengths, *before, o, den, *((S_end, z_end) if ends else (None, None)),
            *_strides(q), *_strides(k), *_strides(v), *_strides(decay), q.shape[2], p.segments, p.span, floor,
            **options, STATE=before[0] is not None, FINAL=ends,
            **tuning.launch(), EVEN=_even(q, v, lengths, p, tuning),
        )  # fmt: skip
    return o, den, S_end, z_end, *starts


def _forward_results(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, norm: int, ends: bool) -> list[Tensor]:
    (B, H, T, K), V, p = q.shape, v.shape[-1], _cut(q, v, decay)
    o = _empty(q, (B, T, H, V), v.dtype if norm else torch.float32).transpose(1, 2)
    rows = (B, H, T, K) if norm == 3 else (B, H, T)
    sizes = [rows, (B, H, K, V) if ends else (0,), (B, H, K) if ends else (0,)]
    cuts = (B, H, p.segments)
    sizes += [(*cuts, K, V), (*cuts, K), (*cuts, K if _vector(decay) else 1)] if p.segments > 1 else [(0,)] * 3
    return [o, *(_empty(q, size) for size in sizes)]


def _options(q, k, v, decay, first, lengths, p: Cut, map: int, norm: int) -> dict[str, int | bool | str]:
    """What all kernels of a scan are told when they are compiled."""
    H, K = q.shape[1::2]
    sizes = {"H": H, "GROUP": H // k.shape[1], "K": K, "V": v.shape[3], "BK": p.block_k, "BV": p.block_v}
    sizes |= {"MAP": map, "NORM": norm, "DECAY": 0 if decay is None else decay.dim() - 2}
    return sizes | {"RESET": first is not None, "RAGGED": lengths is not None, **_precision(v.dtype)}


def _segment_sums(x, y, den, e, decay, first, lengths, floor, sums, p, options, dtype, ends, reverse):
    """The sum of x_t y_t^T over each segment, as the state after it has it; in reverse, as the gradient before it."""
    tuning = tuned("sums", *_widths(x, y), dtype, _vector(decay))
    with torch.cuda.device_of(x):
        _scan_sums[(options["H"] * p.segments, len(x), p.parts)](
            x, y, den, e, decay, first, lengths, *sums, *_strides(x), *_strides(y), *_strides(decay),
            x.shape[2], p.segments, p.span, floor,
            **options | {"GROUP": options["H"] // x.shape[1]}, REVERSE=reverse, ENDS=ends, LINKED=sums[2] is not None,
            **tuning.launch(), EVEN=_even(x, y, lengths, p, tuning),
        )  # fmt: skip


def _link(p: Cut, sums, begin, end, reverse: bool) -> None:
    """What each segment adds -> the state before it, in place (after it, in reverse), and the one at the end."""
    part_S, part_z, shrink = sums
    (B, H, _, K, V), block = part_S.shape, 1024
    with torch.cuda.device_of(part_S):
        for part, state, out, size, inner in ((part_S, begin[0], end[0], K * V, V), (part_z, begin[1], end[1], K, 1)):
            _link_segments[(B * H, triton.cdiv(size, block))](
                part, shrink, state, out, p.segments,
                SIZE=size, INNER=inner, WIDE=shrink.shape[3], BLOCK=block, REVERSE=reverse,
                STATE=state is not None, FINAL=out is not None,
            )  # fmt: skip


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    S: Tensor | None,
    z: Tensor | None,
    first: Tensor | None,
    lengths: Tensor | None,
    o: Tensor,
    den: Tensor,
    S_starts: Tensor,
    z_starts: Tensor,
    shrink: Tensor,
    g: Tensor,
    g_den: Tensor | None,
    dS: Tensor | None,
    dz: Tensor | None,
    map: int,
    norm: int,
    floor: float,
    learns: bool,
    onward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, q . dq and k . dk where a decay learns, and the gradient of the first state."""
    p = _cut(q, v, decay)
    # q . dq - k . dk cancels: narrow factors would leave a decay few digits
    exact = learns and v.dtype != torch.float32
    dtype = torch.float16 if exact else v.dtype
    dq, dk, dv, of_q, of_k, dS_start, dz_start = _backward_results(q, k, v, decay, learns, onward)
    e = _row_gradients(g, g_den, o, den, norm, floor, p)
    options = _options(q, k, v, decay, first, lengths, p, map, norm)
    options |= {"NARROW": False, "PRECISION": "tf32x3"} if exact else {}
    sizes = (q.shape[2], len(q), p.segments, p.span)
    grid = (q.shape[1] * p.segments, len(q), p.parts)
    strides = (*_strides(q), *_strides(k), *_strides(v), *_strides(g), *_strides(decay))
    before, after = (S, z), (dS, dz)
    if p.segments > 1:
        before, after = (S_starts, z_starts), (torch.empty_like(S_starts), torch.empty_like(z_starts))
    tuning = tuned("queries", *_widths(q, v), dtype, _vector(decay))
    with torch.cuda.device_of(q):
        _scan_queries[grid](
            q, k, v, g, den, e, decay, first, lengths, *before, dq, of_q, *strides, *sizes, floor,
            **options, LEARNS=learns, GIVEN=p.parts > 1 or norm == 0, STATE=before[0] is not None,
            **tuning.launch(), EVEN=_even(q, v, lengths, p, tuning),
        )  # fmt: skip
    if norm == 3 and p.parts > 1:
        e = dq.sum(0).float() * q / -torch.where(den.abs() > 1e-30, den, torch.inf)
    starts = (dS_start, dz_start) if onward else (None, None)
    if p.segments > 1:
        sums = (*after, shrink)
        _segment_sums(q, g, den, e, decay, first, lengths, floor, sums, p, options, dtype, onward, reverse=True)
        _link(p, sums, (dS, dz), starts, reverse=True)
        starts = (None, None)
    tuning = tuned("keys", *_widths(q, v), dtype, _vector(decay))
    with torch.cuda.device_of(q):
        _scan_keys[grid](
            q, k, v, g, den, e, decay, first, lengths, *after, dk, dv, of_k, *starts, *strides, *sizes, floor,
            **options, LEARNS=learns, STATE=after[0] is not None, FINAL=starts[0] is not None,
            **tuning.launch(), EVEN=_even(q, v, lengths, p, tuning),
        )  # fmt: skip
    return *_added(q, k, v, dq, dk, dv, of_q, of_k, learns, p), dS_start, dz_start


def _backward_results(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, learns: bool, onward: bool):
    """Of each head, and of each part of V where a state is cut: `_added` makes the gradients of them."""
    (B, H, T, K), V, p = q.shape, v.shape[-1], _cut(q, v, decay)
    dq, dk = (
        _empty(q, (p.parts, B, T, H, K), x.dtype if p.parts == 1 else torch.float32).transpose(2, 3) for x in (q, k)
    )
    dv = _empty(q, (B, T, H, V), v.dtype).transpose(1, 2)
    size = (p.parts, B, H, T, *((K,) if _vector(decay) else ())) if learns else (0,)
    starts = [(B, H, K, V), (B, H, K)] if onward else [(0,), (0,)]
    return dq, dk, dv, _empty(q, size), _empty(q, size), *(_empty(q, size) for size in starts)


def _added(q, k, v, dq, dk, dv, of_q, of_k, learns: bool, p: Cut):
    """The gradients of parts of V and of heads with the same key and value, added up."""
    dq, dk = (x[0] if p.parts == 1 else x.sum(0).to(y.dtype) for x, y in ((dq, q), (dk, k)))
    if k.shape[1] < q.shape[1]:
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2, dtype=torch.float32).to(x.dtype) for x in (dk, dv))
    of_q, of_k = (x.sum(0) if learns else x for x in (of_q, of_k))
    return dq, dk, dv, of_q, of_k


def _row_gradients(g, g_den, o, den, norm: int, floor: float, p: Cut) -> Tensor:
    """e [B, H, T], the gradient of the logarithms of the denominators; the kernel for dq writes it where it sees all
    of V."""
    if norm == 0:
        return g_den
    if p.parts == 1 or norm == 3:
        return _empty(g, den.shape)
    some = den >= floor if norm == 2 else den.abs() > 1e-30
    return torch.where(some, -(g.float() * o).sum(-1), 0)


_forward_operator = torch.library.custom_op("regard::linear_scan", _forward, mutates_args=())
_backward_operator = torch.library.custom_op("regard::linear_scan_backward", _backward, mutates_args=())


@_forward_operator.register_fake
def _(q, k, v, decay, S, z, first, lengths, map, norm, floor, ends):
    return tuple(_forward_results(q, k, v, decay, norm, ends))


@_backward_operator.register_fake
def _(q, k, v, decay, *rest):
    learns, onward = rest[-2:]
    *grads, dS_start, dz_start = _backward_results(q, k, v, decay, learns, onward)
    return *_added(q, k, v, *grads, learns, _cut(q, v, decay)), dS_start, dz_start


def absorb(k: Tensor, v: Tensor, *, lengths: Tensor | None = None, map: str = "none") -> tuple[Tensor, Tensor]:
    """S = sum_j k_j v_j^T [B, G, K, V] and z = sum_j k_j [B, G, K] over the keys, in float32."""
    return _Absorb.apply(k, v, lengths, MAPS[map])


def read(
    q: Tensor,
    S: Tensor,
    z: Tensor,
    *,
    dtype: torch.dtype,
    map: str = "none",
    normalise: bool = True,
    floor: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """o = q S / (q . z) [B, H, T, V] in `dtype` and the denominators [B, H, T], as `scan` has them. S and z may have
    fewer heads than q."""
    norm = 0 if not normalise else 2 if floor > 0 else 1
    return _Read.apply(q, S, z, dtype, MAPS[map], norm, floor)


class _Absorb(Function):
    @staticmethod
    def forward(ctx, k, v, lengths, map):
        k, v, lengths = _rows(k), _rows(v), _dense(lengths)
        ctx.save_for_backward(k, v, lengths)
        ctx.map = map
        return (_absorb_operator if torch.compiler.is_compiling() else _absorb)(k, v, lengths, map)

    @staticmethod
    def backward(ctx, dS, dz):
        once()
        run = _absorb_backward_operator if torch.compiler.is_compiling() else _absorb_backward
        return *run(*ctx.saved_tensors, dS.contiguous(), dz.contiguous(), ctx.map), None, None


class _Read(Function):
    @staticmethod
    def forward(ctx, q, S, z, dtype, map, norm, floor):
        q, S, z = _rows(q), _dense(S), _dense(z)
        run = _read_operator if torch.compiler.is_compiling() else _read
        o, den = run(q, S, z, dtype, map, norm, floor)
        ctx.save_for_backward(q, S, z, den)
        ctx.options = dtype, map, norm, floor
        if norm:
            ctx.mark_non_differentiable(den)
        return o, den

    @staticmethod
    def backward(ctx, g, g_den):
        once()
        dtype, map, norm, floor = ctx.options
        run = _read_backward_operator if torch.compiler.is_compiling() else _read_backward
        g_den = None if norm else g_den.contiguous()
        return *run(*ctx.saved_tensors, _rows(g), g_den, dtype, map, norm, floor), None, None, None, None


def _absorb(k: Tensor, v: Tensor, lengths: Tensor | None, map: int) -> tuple[Tensor, Tensor]:
    p = _cut(k, v, None)
    (B, G, _, K), V = k.shape, v.shape[3]
    sums = _empty(k, (B, G, p.segments, K, V)), _empty(k, (B, G, p.segments, K)), None
    options = _options(k, k, v, None, None, lengths, p, map, 0)
    _segment_sums(k, v, None, None, None, None, lengths, 0.0, sums, p, options, v.dtype, True, reverse=False)
    return sums[0].sum(2), sums[1].sum(2)


def _absorb_backward(
    k: Tensor, v: Tensor, lengths: Tensor | None, dS: Tensor, dz: Tensor, map: int
) -> tuple[Tensor, Tensor]:
    (B, G, T, K), V = k.shape, v.shape[3]
    (block_k, block_v), tuning = _blocks(K, V, v.dtype), tuned("read", K, V, v.dtype)
    dk, dv = (_empty(k, (B, T, G, x.shape[3]), x.dtype).transpose(1, 2) for x in (k, v))
    with torch.cuda.device_of(k):
        _absorb_keys[(G * triton.cdiv(T, tuning.chunk), B)](
            k, v, lengths, dS, dz, dk, dv, *_strides(k), *_strides(v), T,
            H=G, K=K, V=V, BK=block_k, BV=block_v, MAP=map, RAGGED=lengths is not None,
            **_precision(v.dtype), **tuning.launch(),
        )  # fmt: skip
    return dk, dv


def _read(
    q: Tensor, S: Tensor, z: Tensor, dtype: torch.dtype, map: int, norm: int, floor: float
) -> tuple[Tensor, Tensor]:
    (B, H, T, K), (G, _, V) = q.shape, S.shape[1:]
    (block_k, block_v), tuning = _blocks(K, V, dtype), tuned("read", K, V, dtype)
    o, den = _read_results(q, S, dtype, norm)
    with torch.cuda.device_of(q):
        _read_rows[(H * triton.cdiv(T, tuning.chunk), B)](
            q, S, z, o, den, *_strides(q), T, floor,
            H=H, GROUP=H // G, K=K, V=V, BK=block_k, BV=block_v, MAP=map, NORM=norm,
            **_precision(dtype), **tuning.launch(),
        )  # fmt: skip
    return o, den


def _read_results(q: Tensor, S: Tensor, dtype: torch.dtype, norm: int) -> tuple[Tensor, Tensor]:
    B, H, T, _ = q.shape
    o = _empty(q, (B, T, H, S.shape[3]), dtype).transpose(1, 2)
    return o, _empty(q, (B, H, T))


def _read_backward(
    q: Tensor,
    S: Tensor,
    z: Tensor,
    den: Tensor,
    g: Tensor,
    g_den: Tensor | None,
    dtype: torch.dtype,
    map: int,
    norm: int,
    floor: float,
) -> tuple[Tensor, Tensor, Tensor]:
    (B, H, T, K), (G, _, V) = q.shape, S.shape[1:]
    (block_k, block_v), tuning = _blocks(K, V, dtype), tuned("read", K, V, dtype)
    dq, e = _empty(q, (B, T, H, K), q.dtype).transpose(1, 2), _empty(q, (B, H, T)) if norm else g_den
    with torch.cuda.device_of(q):
        _read_queries[(H * triton.cdiv(T, tuning.chunk), B)](
            q, S, z, den, g, e, dq, *_strides(q), *_strides(g), T, floor,
            H=H, GROUP=H // G, K=K, V=V, BK=block_k, BV=block_v, MAP=map, NORM=norm,
            **_precision(dtype), **tuning.launch(),
        )  # fmt: skip
    p = cut(q, V, dtype)
    sums = _empty(q, (B, H, p.segments, K, V)), _empty(q, (B, H, p.segments, K)), None
    options = _options(q, q, g, None, None, None, p, map, norm) | _precision(dtype)
    _segment_sums(q, g, den, e, None, None, None, floor, sums, p, options, dtype, True, reverse=True)
    return dq, *(x.sum(2).unflatten(1, (G, -1)).sum(2) for x in sums[:2])


_absorb_operator = torch.library.custom_op("regard::linear_absorb", _absorb, mutates_args=())
_absorb_backward_operator = torch.library.custom_op("regard::linear_absorb_backward", _absorb_backward, mutates_args=())
_read_operator = torch.library.custom_op("regard::linear_read", _read, mutates_args=())
_read_backward_operator = torch.library.custom_op("regard::linear_read_backward", _read_backward, mutates_args=())


@_absorb_operator.register_fake
def _(k, v, lengths, map):
    B, G, _, K = k.shape
    return _empty(k, (B, G, K, v.shape[3])), _empty(k, (B, G, K))


@_absorb_backward_operator.register_fake
def _(k, v, lengths, dS, dz, map):
    B, G, T, _ = k.shape
    return tuple(_empty(k, (B, T, G, x.shape[3]), x.dtype).transpose(1, 2) for x in (k, v))


@_read_operator.register_fake
def _(q, S, z, dtype, map, norm, floor):
    return _read_results(q, S, dtype, norm)


@_read_backward_operator.register_fake
def _(q, S, z, den, g, g_den, dtype, map, norm, floor):
    B, H, T, K = q.shape
    return _empty(q, (B, T, H, K), q.dtype).transpose(1, 2), torch.empty_like(S), torch.empty_like(z)


def _vector(decay: Tensor | None) -> bool:
    return decay is not None and decay.dim() == 4


def _block(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _blocks(K: int, V: int, dtype: torch.dtype) -> tuple[int, int]:
    held = HELD if dtype == torch.bfloat16 else HELD // 2
    return _block(K), min(_block(V), held // _block(K))


def _widths(q: Tensor, v: Tensor) -> tuple[int, int]:
    return q.shape[3], v.shape[3]


def _cut(q: Tensor, v: Tensor, decay: Tensor | None) -> Cut:
    return cut(q, v.shape[3], v.dtype, _vector(decay))


def _even(x: Tensor, y: Tensor, lengths: Tensor | None, p: Cut, tuning: Tuning) -> bool:
    """Whether every tile is full, so that nothing is masked."""
    T, K = x.shape[2:]
    return lengths is None and T % tuning.chunk == 0 and p.block_k == K and y.shape[3] % p.block_v == 0


def _multiprocessors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1


def _precision(dtype: torch.dtype) -> dict[str, bool | str]:
    return {"NARROW": dtype == torch.bfloat16, "PRECISION": "ieee" if dtype == torch.float32 else "tf32"}


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def _rows(x: Tensor | None) -> Tensor | None:
    """Kernels step over heads and tokens as they lie, and over the numbers of one from each to the next."""
    return x if x is None or x.dim() == 3 or x.stride(3) == 1 else x.contiguous()


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _empty(x: Tensor, size, dtype: torch.dtype = torch.float32) -> Tensor:
    y = x.new_empty(size, dtype=dtype)
    return y.fill_(torch.nan) if POISON else y


@triton.jit
def _exp(x):
    # one instruction where tl.exp is five: that one takes care of numbers below the smallest
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _exp_once(x):
    """For tiles that several products take: the compiler would compute `_exp` anew for each, and this it cannot."""
    if PTX:
        x = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=False, pack=1
        )
    else:
        x = _exp(x)
    return x


@triton.jit
def _mapped(x, inside, MAP: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr):
    """Features in float32, zeros where there is no token or no feature."""
    x = x.to(tl.float32)
    if MAP == 1:
        low = tl.minimum(x, 0.0)
        x = tl.maximum(x, 0.0) + (_exp_once(low) if ONCE else _exp(low))
    elif MAP == 2:
        x = tl.maximum(x, 0.0)
    elif MAP == 3:
        x = _exp_once(x) if ONCE else _exp(x)
    if (MAP == 1 or MAP == 3) and not EVEN:
        x = tl.where(inside, x, 0.0)
    return x


@triton.jit
def _sloped(grad, feature, MAP: tl.constexpr):
    """The gradient of what a feature was made of."""
    if MAP == 1:
        grad = grad * tl.minimum(feature, 1.0)
    elif MAP == 2:
        grad = tl.where(feature > 0, grad, 0.0)
    elif MAP == 3:
        grad = grad * feature
    return grad


@triton.jit
def _factor(x, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    """As a factor of a product: bfloat16, or float32 rounded to tf32, whose last digits a GPU would cut off."""
    if NARROW:
        x = x.to(tl.bfloat16)
    else:
        x = x.to(tl.float32)
        if PRECISION == "tf32":
            bits = x.to(tl.uint32, bitcast=True)
            x = ((bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _inverse(den, floor, NORM: tl.constexpr):
    if NORM == 1:
        some = tl.abs(den) > 1e-30
        den = tl.where(some, 1.0 / tl.where(some, den, 1.0), 0.0)
    elif NORM == 2:
        den = 1.0 / tl.maximum(den, floor)
    else:
        den = tl.full(den.shape, 1.0, tl.float32)
    return den


@triton.jit
def _tile(x, i, stride, columns, inside, EVEN: tl.constexpr):
    at = x + i[:, None] * stride + columns[None, :]
    return tl.load(at) if EVEN else tl.load(at, mask=inside, other=0.0)


@triton.jit
def _put(x, i, stride, columns, value, inside, EVEN: tl.constexpr):
    at = x + i[:, None] * stride + columns[None, :]
    if EVEN:
        tl.store(at, value.to(x.dtype.element_ty))
    else:
        tl.store(at, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _decays(decay, i, stride, live, columns, K: tl.constexpr, DECAY: tl.constexpr):
    """A, the sum of the decays of a chunk up to each token, [C, 1] or [C, BK], and of all of them, [1] or [BK]."""
    if DECAY == 2:
        each = _tile(decay, i, stride, columns, live[:, None] & (columns < K)[None, :], False).to(tl.float32)
        A = tl.cumsum(each, 0)
    else:
        each = tl.load(decay + i * stride, mask=live, other=0.0).to(tl.float64)
        A = tl.cumsum(each, 0).to(tl.float32)[:, None]
    # the last of the sums: a sum in another order would differ from it
    return A, tl.min(A, 0)


@triton.jit
def _documents(first, start, i, live, causal):
    """Which pairs of a chunk are of one document, which queries of the one before the chunk, which keys of the one
    after it, and whether that is the same one."""
    begun = tl.load(first + start + i, mask=live, other=-1)
    last = tl.max(begun, 0)
    return causal & ((start + i)[None, :] >= begun[:, None]), begun < start, start + i >= last, last < start


@triton.jit
def _add_product(x, y, total, TWICE: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    """total + x y for a factor x; twice: with what rounding leaves of y."""
    rounded = _factor(y, NARROW, PRECISION)
    total = tl.dot(x, rounded, total, input_precision=PRECISION)
    if TWICE and (NARROW or PRECISION == "tf32"):
        rest = _factor(y - rounded.to(tl.float32), NARROW, PRECISION)
        total = tl.dot(x, rest, total, input_precision=PRECISION)
    return total


@triton.jit
def _load_state(
    S, z, number, columns, values,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STATE: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """S transposed [BV, BK], and z as 16 rows that add up to it [16, BK], of a segment; or zeros. Once: only the first
    part of V has z."""
    if STATE:
        inside = (columns < K)[None, :] & (values < V)[:, None]
        state = tl.load(S + number * (K * V) + columns[None, :] * V + values[:, None], mask=inside, other=0.0)
        row = tl.load(z + number * K + columns, mask=columns < K, other=0.0)
        sums = tl.where(tl.arange(0, 16)[:, None] == (tl.program_id(2) * 16 if ONCE else 0), row[None, :], 0.0)
    else:
        state, sums = tl.zeros([BV, BK], tl.float32), tl.zeros([16, BK], tl.float32)
    return state, sums


@triton.jit
def _store_state(S, z, number, state, sums, columns, values, K: tl.constexpr, V: tl.constexpr):
    inside = (columns < K)[None, :] & (values < V)[:, None]
    tl.store(S + number * (K * V) + columns[None, :] * V + values[:, None], state, mask=inside)
    # the first part of V is enough for z
    if tl.program_id(2) == 0:
        tl.store(z + number * K + columns, tl.sum(sums, 0), mask=columns < K)


@triton.jit
def _split_row(e, r, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    """e [C] as the first two of 16 rows: rounded, and what is left."""
    rounded = _factor(e, NARROW, PRECISION).to(tl.float32)
    rest = tl.where(r == 1, (e - rounded)[None, :], 0.0)
    return _factor(tl.where(r == 0, rounded[None, :], rest), NARROW, PRECISION)


@triton.jit(do_not_specialize=["T", "segments", "span", "floor"])
def _scan_forward(
    q, k, v, decay, first, lengths, S_before, z_before, o, den, S_after, z_after,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, d_b, d_h, d_t, T, segments, span, floor,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MAP: tl.constexpr, NORM: tl.constexpr, DECAY: tl.constexpr, RESET: tl.constexpr, RAGGED: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr, STATE: tl.constexpr, FINAL: tl.constexpr, EVEN: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    h, segment, b = tl.program_id(0) % H, tl.program_id(0) // H, tl.program_id(1).to(tl.int64)
    head, group = b * H + h, h // GROUP
    i, columns, values = tl.arange(0, C), tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    q, k, v = q + b * q_b + h * q_h, k + b * k_b + group * k_h, v + b * v_b + group * v_h
    o, den = o + (b * T * H + h) * V, den + head * T * (K if NORM == 3 else 1)
    length = T
    if RAGGED:
        length = tl.load(lengths + b).to(tl.int32)
    S, z = _load_state(S_before, z_before, head * segments + segment, columns, values, K, V, BK, BV, STATE, False)
    causal = i[:, None] >= i[None, :]
    # a column of ones adds up rows, a row of ones columns, as products do it
    column = _factor(tl.where((tl.arange(0, 16) == 0)[None, :] & (i >= 0)[:, None], 1.0, 0.0), NARROW, "ieee")
    line = tl.trans(column)
    for n in range(0, tl.cdiv(tl.minimum(span, T - segment * span), C)):
        start = segment * span + n * C
        at, live, there = start.to(tl.int64), start + i < length, start + i < T
        is_k, is_v = live[:, None] & (columns < K)[None, :], live[:, None] & (values < V)[None, :]
        qs = _mapped(_tile(q + at * q_t, i, q_t, columns, is_k, EVEN), is_k, MAP, EVEN, True)
        ks = _mapped(_tile(k + at * k_t, i, k_t, columns, is_k, EVEN), is_k, MAP, EVEN, True)
        vs = _factor(_tile(v + at * v_t, i, v_t, values, is_v, EVEN), NARROW, PRECISION)
        visible, leaving = causal, ks
        if DECAY > 0:
            A, total = _decays(decay + b * d_b + h * d_h + at * d_t, i, d_t, live, columns, K, DECAY)
            leaving = ks * _exp(total[None, :] - A)
        if RESET:
            visible, before, after, through = _documents(first + b * T, start, i, live, causal)
            leaving = tl.where(after[:, None], leaving, 0.0)
        if DECAY == 2:
            weight = _exp(tl.where(visible[:, :, None], A[:, None, :] - A[None, :, :], float("-inf"))) * ks[None, :, :]
            if NORM == 3:
                seen = tl.sum(z, 0)[None, :] * _exp(A)
                if RESET:
                    seen = tl.where(before[:, None], seen, 0.0)
                seen = seen + tl.sum(weight, 1)
                qs = qs * _inverse(seen, floor, 1)
                if tl.program_id(2) == 0:
                    _put(den + at * K, i, K, columns, seen, there[:, None] & (columns < K)[None, :], False)
            score = tl.sum(qs[:, None, :] * weight, 2)
        else:
            narrow_q, narrow_k = _factor(qs, NARROW, PRECISION), _factor(ks, NARROW, PRECISION)
            score = tl.dot(narrow_q, tl.trans(narrow_k), input_precision=PRECISION)
            if DECAY == 1:
                score = score * _exp(tl.where(visible, A - tl.trans(A), 0.0))
            score = tl.where(visible, score, 0.0)
        arriving = qs * _exp(A) if DECAY > 0 else qs
        if RESET:
            arriving = tl.where(before[:, None], arriving, 0.0)
        score, arriving = _factor(score, NARROW, PRECISION), _factor(arriving, NARROW, PRECISION)
        num = tl.dot(arriving, tl.trans(_factor(S, NARROW, PRECISION)), input_precision=PRECISION)
        num = tl.dot(score, vs, num, input_precision=PRECISION)
        if NORM < 3:
            row = _add_product(arriving, tl.trans(z), tl.zeros([C, 16], tl.float32), True, NARROW, PRECISION)
            row = tl.sum(tl.dot(score, column, row, input_precision=PRECISION), 1)
            num = num * _inverse(row, floor, NORM)[:, None]
            if tl.program_id(2) == 0:
                tl.store(den + start + i, row, mask=there)
        _put(o + at * (H * V), i, H * V, values, num, there[:, None] & (values < V)[None, :], EVEN)
        if DECAY > 0:
            S, z = S * _exp(total)[None, :], z * _exp(total)[None, :]
        if RESET:
            S, z = tl.where(through, S, 0.0), tl.where(through, z, 0.0)
        S = _add_product(tl.trans(vs), leaving, S, FINAL, NARROW, PRECISION)
        z = _add_product(line, leaving, z, FINAL, NARROW, PRECISION)
    if FINAL:
        _store_state(S_after, z_after, head, S, z, columns, values, K, V)


@triton.jit(do_not_specialize=["T", "segments", "span", "floor"])
def _scan_sums(
    x, y, den, e, decay, first, lengths, S, z, shrink,
    x_b, x_h, x_t, y_b, y_h, y_t, d_b, d_h, d_t, T, segments, span, floor,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MAP: tl.constexpr, NORM: tl.constexpr, DECAY: tl.constexpr, RESET: tl.constexpr, RAGGED: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr, REVERSE: tl.constexpr, ENDS: tl.constexpr, LINKED: tl.constexpr,
    EVEN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """x, y are keys and values, in reverse queries over denominators and the gradient of what they read; all of a
    segment."""
    h, segment, b = tl.program_id(0) % H, tl.program_id(0) // H, tl.program_id(1).to(tl.int64)
    head, group = b * H + h, h // GROUP
    i, columns, values = tl.arange(0, C), tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    x, y, rows = x + b * x_b + group * x_h, y + b * y_b + group * y_h, head * T
    length = T
    if RAGGED:
        length = tl.load(lengths + b).to(tl.int32)
    state, sums = tl.zeros([BV, BK], tl.float32), tl.zeros([16, BK], tl.float32)
    left = tl.zeros([BK if DECAY == 2 else 1], tl.float32) + 1.0
    causal, r = i[:, None] >= i[None, :], tl.arange(0, 16)[:, None]
    line = _factor(tl.where((r == 0) & (i >= 0)[None, :], 1.0, 0.0), NARROW, "ieee")
    count = tl.cdiv(tl.minimum(span, T - segment * span), C)
    if not ENDS:
        # nobody asks for what comes behind the last segment, or before the first one in reverse
        count = tl.where(segment == (0 if REVERSE else segments - 1), 0, count)
    for n in range(0, count):
        start = segment * span + n * C
        at, live = start.to(tl.int64), start + i < length
        is_k, is_v = live[:, None] & (columns < K)[None, :], live[:, None] & (values < V)[None, :]
        xs = _mapped(_tile(x + at * x_t, i, x_t, columns, is_k, EVEN), is_k, MAP, EVEN, True)
        ys = _factor(_tile(y + at * y_t, i, y_t, values, is_v, EVEN), NARROW, PRECISION)
        if DECAY > 0:
            A, total = _decays(decay + b * d_b + h * d_h + at * d_t, i, d_t, live, columns, K, DECAY)
            xs = xs * _exp(A if REVERSE else total[None, :] - A)
        if RESET:
            _, before, after, through = _documents(first + b * T, start, i, live, causal)
            xs = tl.where((before if REVERSE else after)[:, None], xs, 0.0)
        if REVERSE:
            if DECAY > 0 or RESET:
                xs = xs * left[None, :]
            if NORM == 3:
                each = _tile(e + (rows + at) * K, i, K, columns, is_k, False) * _exp(A) * left[None, :]
                if RESET:
                    each = tl.where(before[:, None], each, 0.0)
                sums += tl.where(r == 0, tl.sum(each, 0)[None, :], 0.0)
                xs = xs * _inverse(_tile(den + (rows + at) * K, i, K, columns, is_k, False), floor, 1)
            else:
                xs = xs * _inverse(tl.load(den + rows + start + i, mask=live, other=1.0), floor, NORM)[:, None]
                line = _split_row(tl.load(e + rows + start + i, mask=live, other=0.0), r, NARROW, PRECISION)
        else:
            if DECAY > 0:
                state, sums = state * _exp(total)[None, :], sums * _exp(total)[None, :]
            if RESET:
                state, sums = tl.where(through, state, 0.0), tl.where(through, sums, 0.0)
        state = _add_product(tl.trans(ys), xs, state, ENDS, NARROW, PRECISION)
        if not (REVERSE and NORM == 3):
            sums = _add_product(line, xs, sums, ENDS, NARROW, PRECISION)
        if DECAY > 0:
            left = left * _exp(total)
        if RESET:
            left = tl.where(through, left, 0.0)
    number = head * segments + segment
    _store_state(S, z, number, state, sums, columns, values, K, V)
    # the compiler knows the first, and drops what depends on it
    if LINKED and not REVERSE:  # noqa: SIM102
        if tl.program_id(2) == 0:
            if DECAY == 2:
                tl.store(shrink + number * K + columns, left, mask=columns < K)
            else:
                tl.store(shrink + number + tl.arange(0, 1), left)


@triton.jit(do_not_specialize=["segments"])
def _link_segments(
    part, shrink, begin, end, segments,
    SIZE: tl.constexpr, INNER: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
    STATE: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    head, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state = tl.zeros([BLOCK], tl.float32)
    if STATE:
        state = tl.load(begin + head * SIZE + at, mask=at < SIZE, other=0.0)
    for n in range(0, segments):
        number = head * segments + (segments - 1 - n if REVERSE else n)
        added = tl.load(part + number * SIZE + at, mask=at < SIZE, other=0.0)
        tl.store(part + number * SIZE + at, state, mask=at < SIZE)
        left = tl.load(shrink + number * WIDE + (at // INNER if WIDE > 1 else at * 0), mask=at < SIZE, other=0.0)
        state = state * left + added
    if FINAL:
        tl.store(end + head * SIZE + at, state, mask=at < SIZE)


@triton.jit(do_not_specialize=["T", "batch", "segments", "span", "floor"])
def _scan_queries(
    q, k, v, g, den, e, decay, first, lengths, S_before, z_before, dq, of_q,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, d_b, d_h, d_t, T, batch, segments, span, floor,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MAP: tl.constexpr, NORM: tl.constexpr, DECAY: tl.constexpr, RESET: tl.constexpr, RAGGED: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr, LEARNS: tl.constexpr, GIVEN: tl.constexpr, STATE: tl.constexpr,
    EVEN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dq, and e where it is not given."""
    h, segment, b = tl.program_id(0) % H, tl.program_id(0) // H, tl.program_id(1).to(tl.int64)
    head, group, part = b * H + h, h // GROUP, tl.program_id(2)
    i, columns, values = tl.arange(0, C), tl.arange(0, BK), part * BV + tl.arange(0, BV)
    q, k, v = q + b * q_b + h * q_h, k + b * k_b + group * k_h, v + b * v_b + group * v_h
    g, dq = g + b * g_b + h * g_h, dq + ((part * batch + b) * T * H + h) * K
    den, e = den + head * T, e + head * T * (K if NORM == 3 else 1)
    of_q = of_q + (part * batch * H + head) * T * (K if DECAY == 2 else 1)
    length = T
    if RAGGED:
        length = tl.load(lengths + b).to(tl.int32)
    S, z = _load_state(S_before, z_before, head * segments + segment, columns, values, K, V, BK, BV, STATE, False)
    causal, r = i[:, None] >= i[None, :], tl.arange(0, 16)
    line = _factor(tl.where((r == 0)[:, None] & (i >= 0)[None, :], 1.0, 0.0), NARROW, "ieee")
    ones = _factor(tl.where((r >= 0)[None, :] & (i >= 0)[:, None], 1.0, 0.0), NARROW, "ieee")
    for n in range(0, tl.cdiv(tl.minimum(span, T - segment * span), C)):
        start = segment * span + n * C
        at, live, there = start.to(tl.int64), start + i < length, start + i < T
        is_k, is_v = live[:, None] & (columns < K)[None, :], live[:, None] & (values < V)[None, :]
        ks = _mapped(_tile(k + at * k_t, i, k_t, columns, is_k, EVEN), is_k, MAP, EVEN, True)
        vs = _factor(_tile(v + at * v_t, i, v_t, values, is_v, EVEN), NARROW, PRECISION)
        gs = _factor(_tile(g + at * g_t, i, g_t, values, is_v, EVEN), NARROW, PRECISION)
        visible, leaving = causal, ks
        if DECAY > 0:
            A, total = _decays(decay + b * d_b + h * d_h + at * d_t, i, d_t, live, columns, K, DECAY)
            leaving = ks * _exp(total[None, :] - A)
        if RESET:
            visible, before, after, through = _documents(first + b * T, start, i, live, causal)
            leaving = tl.where(after[:, None], leaving, 0.0)
        # g is as narrow as it came: g / den would be rounded once more
        of_score = tl.dot(gs, tl.trans(vs), input_precision=PRECISION)
        grad = tl.dot(gs, _factor(S, NARROW, PRECISION), input_precision=PRECISION)
        # z at each query
        seen = _add_product(ones, z, tl.zeros([C, BK], tl.float32), True, NARROW, PRECISION)
        if DECAY > 0:
            grad, seen = grad * _exp(A), seen * _exp(A)
        if RESET:
            grad, seen = tl.where(before[:, None], grad, 0.0), tl.where(before[:, None], seen, 0.0)
        if DECAY == 2:
            weight = _exp(tl.where(visible[:, :, None], A[:, None, :] - A[None, :, :], float("-inf"))) * ks[None, :, :]
            grad, seen = grad + tl.sum(of_score[:, :, None] * weight, 1), seen + tl.sum(weight, 1)
        else:
            weight, narrow_k = tl.where(visible, 1.0, 0.0), _factor(ks, NARROW, PRECISION)
            if DECAY == 1:
                weight = weight * _exp(tl.where(visible, A - tl.trans(A), 0.0))
                of_score = of_score * weight
            of_score = _factor(tl.where(visible, of_score, 0.0), NARROW, PRECISION)
            grad = tl.dot(of_score, narrow_k, grad, input_precision=PRECISION)
            seen = tl.dot(_factor(weight, NARROW, PRECISION), narrow_k, seen, input_precision=PRECISION)
        qs = _mapped(_tile(q + at * q_t, i, q_t, columns, is_k, EVEN), is_k, MAP, EVEN, False)
        inside = there[:, None] & (columns < K)[None, :]
        if NORM == 3:
            inverse = _inverse(seen, floor, 1)
            grad = grad * inverse
            if not GIVEN:
                _put(e + at * K, i, K, columns, -qs * inverse * grad, inside, False)
        else:
            row = tl.load(den + start + i, mask=live, other=1.0)
            inverse = _inverse(row, floor, NORM)
            if GIVEN:
                es = tl.where(part == 0, tl.load(e + start + i, mask=live, other=0.0), 0.0)
            else:
                # g . o = q . (S g) / (q . z): o has been rounded, and so have the parts of den, which here must cancel
                es = -tl.sum(qs * grad, 1) * _inverse(tl.sum(qs * seen, 1), floor, 1)
                if NORM == 2:
                    es = tl.where(row >= floor, es, 0.0)
                tl.store(e + start + i, es, mask=there)
            grad = (grad + es[:, None] * seen) * inverse[:, None]
        if LEARNS:
            if DECAY == 2:
                # with a denominator of each feature, what A does to both cancels at the query
                _put(of_q + at * K, i, K, columns, qs * grad * (0.0 if NORM == 3 else 1.0), inside, False)
            else:
                tl.store(of_q + start + i, tl.sum(qs * grad, 1), mask=there)
        _put(dq + at * (H * K), i, H * K, columns, _sloped(grad, qs, MAP), inside, EVEN)
        if DECAY > 0:
            S, z = S * _exp(total)[None, :], z * _exp(total)[None, :]
        if RESET:
            S, z = tl.where(through, S, 0.0), tl.where(through, z, 0.0)
        S = _add_product(tl.trans(vs), leaving, S, False, NARROW, PRECISION)
        z = _add_product(line, leaving, z, False, NARROW, PRECISION)


@triton.jit(do_not_specialize=["T", "batch", "segments", "span", "floor"])
def _scan_keys(
    q, k, v, g, den, e, decay, first, lengths, S_after, z_after, dk, dv, of_k, S_start, z_start,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, d_b, d_h, d_t, T, batch, segments, span, floor,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MAP: tl.constexpr, NORM: tl.constexpr, DECAY: tl.constexpr, RESET: tl.constexpr, RAGGED: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr, LEARNS: tl.constexpr, STATE: tl.constexpr, FINAL: tl.constexpr,
    EVEN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dk and dv, from the last chunk to the first; S and z are the gradients of the state here. Scores are [j, t]."""
    h, segment, b = tl.program_id(0) % H, tl.program_id(0) // H, tl.program_id(1).to(tl.int64)
    head, group, part = b * H + h, h // GROUP, tl.program_id(2)
    i, columns, values = tl.arange(0, C), tl.arange(0, BK), part * BV + tl.arange(0, BV)
    q, k, v = q + b * q_b + h * q_h, k + b * k_b + group * k_h, v + b * v_b + group * v_h
    g, dv, rows = g + b * g_b + h * g_h, dv + (b * T * H + h) * V, head * T * (K if NORM == 3 else 1)
    den, e = den + rows, e + rows
    dk, of_k = (
        dk + ((part * batch + b) * T * H + h) * K,
        of_k + (part * batch * H + head) * T * (K if DECAY == 2 else 1),
    )
    length = T
    if RAGGED:
        length = tl.load(lengths + b).to(tl.int32)
    S, z = _load_state(S_after, z_after, head * segments + segment, columns, values, K, V, BK, BV, STATE, True)
    causal, r = i[:, None] <= i[None, :], tl.arange(0, 16)
    ones = _factor(tl.where((r >= 0)[None, :] & (i >= 0)[:, None], 1.0, 0.0), NARROW, "ieee")
    count = tl.cdiv(tl.minimum(span, T - segment * span), C)
    for n in range(0, count):
        start = segment * span + (count - 1 - n) * C
        at, live, there = start.to(tl.int64), start + i < length, start + i < T
        is_k, is_v = live[:, None] & (columns < K)[None, :], live[:, None] & (values < V)[None, :]
        # queries over their denominators, and e with them: as if there were none
        if NORM == 3:
            inverse = _inverse(_tile(den + at * K, i, K, columns, is_k, False), floor, 1)
            each = tl.where(part == 0, _tile(e + at * K, i, K, columns, is_k, False), 0.0)
        else:
            inverse = _inverse(tl.load(den + start + i, mask=live, other=1.0), floor, NORM)[:, None]
            es = tl.where(part == 0, tl.load(e + start + i, mask=live, other=0.0), 0.0)
        qs = _mapped(_tile(q + at * q_t, i, q_t, columns, is_k, EVEN), is_k, MAP, EVEN, True) * inverse
        ks = _mapped(_tile(k + at * k_t, i, k_t, columns, is_k, EVEN), is_k, MAP, EVEN, C < 64)
        vs = _factor(_tile(v + at * v_t, i, v_t, values, is_v, EVEN), NARROW, PRECISION)
        gs = _factor(_tile(g + at * g_t, i, g_t, values, is_v, EVEN), NARROW, PRECISION)
        visible, arriving, leaving = causal, qs, ks
        if DECAY > 0:
            A, total = _decays(decay + b * d_b + h * d_h + at * d_t, i, d_t, live, columns, K, DECAY)
            arriving, leaving = qs * _exp(A), ks * _exp(total[None, :] - A)
        if RESET:
            visible, before, after, through = _documents(first + b * T, start, i, live, tl.trans(causal))
            visible = tl.trans(visible)
            arriving, leaving = tl.where(before[:, None], arriving, 0.0), tl.where(after[:, None], leaving, 0.0)
        narrow_S = _factor(S, NARROW, PRECISION)
        of_score = tl.dot(vs, tl.trans(gs), input_precision=PRECISION)
        if NORM < 3:
            of_score = of_score + es[None, :]
        of_state = _add_product(ones, z, tl.zeros([C, BK], tl.float32), False, NARROW, PRECISION)
        of_state = tl.dot(vs, narrow_S, of_state, input_precision=PRECISION)
        if DECAY > 0:
            of_state = of_state * _exp(total[None, :] - A)
        if RESET:
            of_state = tl.where(after[:, None], of_state, 0.0)
        if DECAY == 2:
            weight = _exp(tl.where(visible[:, :, None], A[None, :, :] - A[:, None, :], float("-inf")))
            score = tl.sum(ks[:, None, :] * qs[None, :, :] * weight, 2)
            back = of_score[:, :, None] * qs[None, :, :]
            if NORM == 3:
                back = back + each[None, :, :]
            grad = of_state + tl.sum(back * weight, 1)
        else:
            narrow_q = _factor(qs, NARROW, PRECISION)
            score = tl.dot(_factor(ks, NARROW, PRECISION), tl.trans(narrow_q), input_precision=PRECISION)
            if DECAY == 1:
                weight = _exp(tl.where(visible, tl.trans(A) - A, 0.0))
                score, of_score = score * weight, of_score * weight
            score = tl.where(visible, score, 0.0)
            of_score = _factor(tl.where(visible, of_score, 0.0), NARROW, PRECISION)
            grad = tl.dot(of_score, narrow_q, of_state, input_precision=PRECISION)
        of_v = tl.dot(_factor(leaving, NARROW, PRECISION), tl.trans(narrow_S), input_precision=PRECISION)
        of_v = tl.dot(_factor(score, NARROW, PRECISION), gs, of_v, input_precision=PRECISION)
        if not EVEN:
            # padding may lie in the same chunk as a token that is read
            of_v, grad = tl.where(live[:, None], of_v, 0.0), tl.where(live[:, None], grad, 0.0)
        inside = there[:, None] & (columns < K)[None, :]
        _put(dv + at * (H * V), i, H * V, values, of_v, there[:, None] & (values < V)[None, :], EVEN)
        if LEARNS:
            if DECAY == 2:
                _put(of_k + at * K, i, K, columns, ks * grad, inside, False)
            else:
                tl.store(of_k + start + i, tl.sum(ks * grad, 1), mask=there)
        _put(dk + at * (H * K), i, H * K, columns, _sloped(grad, ks, MAP), inside, EVEN)
        if DECAY > 0:
            S, z = S * _exp(total)[None, :], z * _exp(total)[None, :]
        if RESET:
            S, z = tl.where(through, S, 0.0), tl.where(through, z, 0.0)
        S = _add_product(tl.trans(gs), arriving, S, FINAL, NARROW, PRECISION)
        if NORM == 3:
            each = each * _exp(A)
            if RESET:
                each = tl.where(before[:, None], each, 0.0)
            z = z + tl.where((r == 0)[:, None], tl.sum(each, 0)[None, :], 0.0)
        else:
            z = _add_product(_split_row(es, r[:, None], NARROW, PRECISION), arriving, z, FINAL, NARROW, PRECISION)
    if FINAL:
        _store_state(S_start, z_start, head, S, z, columns, values, K, V)


@triton.jit(do_not_specialize=["T"])
def _absorb_keys(
    k, v, lengths, dS, dz, dk, dv, k_b, k_h, k_t, v_b, v_h, v_t, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    MAP: tl.constexpr, RAGGED: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of sums over all keys."""
    h, b, i, columns = tl.program_id(0) % H, tl.program_id(1).to(tl.int64), tl.arange(0, C), tl.arange(0, BK)
    start, head = (tl.program_id(0) // H) * C, b * H + h
    at, live, there = start.to(tl.int64), start + i < T, start + i < T
    if RAGGED:
        live = start + i < tl.load(lengths + b).to(tl.int32)
    is_k, of_k = live[:, None] & (columns < K)[None, :], columns[None, :] < K
    ks = _mapped(_tile(k + b * k_b + h * k_h + at * k_t, i, k_t, columns, is_k, False), is_k, MAP, False, False)
    grad = tl.zeros([C, BK], tl.float32) + tl.load(dz + head * K + columns, mask=columns < K, other=0.0)[None, :]
    for part in tl.static_range((V + BV - 1) // BV):
        values = part * BV + tl.arange(0, BV)
        of_v = values[None, :] < V
        vs = _factor(
            _tile(v + b * v_b + h * v_h + at * v_t, i, v_t, values, live[:, None] & of_v, False), NARROW, PRECISION
        )
        S = tl.load(
            dS + head * (K * V) + columns[:, None] * V + values[None, :], mask=(columns < K)[:, None] & of_v, other=0.0
        )
        grad = _add_product(vs, tl.trans(S), grad, True, NARROW, PRECISION)
        out = _add_product(
            _factor(ks, NARROW, PRECISION), S, tl.zeros([C, BV], tl.float32), True, NARROW, PRECISION
        ).to(dv.dtype.element_ty)
        tl.store(
            dv + ((b * T + at) * H + h) * V + i[:, None] * (H * V) + values[None, :], out, mask=there[:, None] & of_v
        )
    grad = _sloped(tl.where(live[:, None], grad, 0.0), ks, MAP).to(dk.dtype.element_ty)
    tl.store(
        dk + ((b * T + at) * H + h) * K + i[:, None] * (H * K) + columns[None, :], grad, mask=there[:, None] & of_k
    )


@triton.jit(do_not_specialize=["T", "floor"])
def _read_rows(
    q, S, z, o, den, q_b, q_h, q_t, T, floor,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, NORM: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    h, b, i, columns = tl.program_id(0) % H, tl.program_id(1).to(tl.int64), tl.arange(0, C), tl.arange(0, BK)
    start, head = (tl.program_id(0) // H) * C, b * (H // GROUP) + h // GROUP
    at, there = start.to(tl.int64), start + i < T
    inside = there[:, None] & (columns < K)[None, :]
    qs = _mapped(_tile(q + b * q_b + h * q_h + at * q_t, i, q_t, columns, inside, False), inside, MAP, False, False)
    row = tl.sum(qs * tl.load(z + head * K + columns, mask=columns < K, other=0.0)[None, :], 1)
    tl.store(den + (b * H + h) * T + start + i, row, mask=there)
    for part in tl.static_range((V + BV - 1) // BV):
        values = part * BV + tl.arange(0, BV)
        state = tl.load(
            S + head * (K * V) + columns[:, None] * V + values[None, :],
            mask=(columns < K)[:, None] & (values < V)[None, :],
            other=0.0,
        )
        num = _add_product(
            _factor(qs, NARROW, PRECISION), state, tl.zeros([C, BV], tl.float32), True, NARROW, PRECISION
        )
        num = (num * _inverse(row, floor, NORM)[:, None]).to(o.dtype.element_ty)
        tl.store(
            o + ((b * T + at) * H + h) * V + i[:, None] * (H * V) + values[None, :],
            num,
            mask=there[:, None] & (values < V)[None, :],
        )


@triton.jit(do_not_specialize=["T", "floor"])
def _read_queries(
    q, S, z, den, g, e, dq, q_b, q_h, q_t, g_b, g_h, g_t, T, floor,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, NORM: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of a reading, and e: u . o is q . (S u) / den."""
    h, b, i, columns = tl.program_id(0) % H, tl.program_id(1).to(tl.int64), tl.arange(0, C), tl.arange(0, BK)
    start, head = (tl.program_id(0) // H) * C, b * (H // GROUP) + h // GROUP
    at, there = start.to(tl.int64), start + i < T
    inside = there[:, None] & (columns < K)[None, :]
    qs = _mapped(_tile(q + b * q_b + h * q_h + at * q_t, i, q_t, columns, inside, False), inside, MAP, False, False)
    sums = tl.load(z + head * K + columns, mask=columns < K, other=0.0)
    rows = (b * H + h) * T + start + i
    row = tl.load(den + rows, mask=there, other=1.0)
    inverse = _inverse(row, floor, NORM)
    grad = tl.zeros([C, BK], tl.float32)
    for part in tl.static_range((V + BV - 1) // BV):
        values = part * BV + tl.arange(0, BV)
        state = tl.load(
            S + head * (K * V) + columns[:, None] * V + values[None, :],
            mask=(columns < K)[:, None] & (values < V)[None, :],
            other=0.0,
        )
        gs = _tile(g + b * g_b + h * g_h + at * g_t, i, g_t, values, there[:, None] & (values < V)[None, :], False)
        grad = _add_product(_factor(gs, NARROW, PRECISION), tl.trans(state), grad, True, NARROW, PRECISION)
    if NORM == 0:
        es = tl.load(e + rows, mask=there, other=0.0)
    else:
        es = -tl.sum(qs * grad, 1) * inverse
        if NORM == 2:
            es = tl.where(row >= floor, es, 0.0)
        tl.store(e + rows, es, mask=there)
    grad = _sloped((grad + es[:, None] * sums[None, :]) * inverse[:, None], qs, MAP).to(dq.dtype.element_ty)
    tl.store(dq + ((b * T + at) * H + h) * K + i[:, None] * (H * K) + columns[None, :], grad, mask=inside)
