"""Linear attention in Triton without an order: sums over all keys, and their reading by queries."""

from typing import Any

import torch
import triton
from torch import Tensor

from regard.kernels import scan_triton_cut as cuts
from regard.kernels.autograd import Function, refuse_second_derivative
from regard.kernels.scan_triton import MAPS, options_of, segment_sums
from regard.kernels.scan_triton_cut import Tuning, blocks_each, dense, empty, precision, rows, strides
from regard.kernels.scan_triton_sums import absorb_keys, read_queries, read_rows

NO_DECAY = (None, None, None)


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
    def forward(ctx: Any, k: Tensor, v: Tensor, lengths: Tensor | None, map: int) -> tuple[Tensor, Tensor]:
        k, v, lengths = rows(k), rows(v), dense(lengths)
        ctx.save_for_backward(k, v, lengths)
        ctx.map = map
        return (_absorb_operator if torch.compiler.is_compiling() else _absorb)(k, v, lengths, map)

    @staticmethod
    def backward(ctx: Any, dS: Tensor, dz: Tensor) -> tuple[Tensor, Tensor, None, None]:
        refuse_second_derivative()
        run = _absorb_backward_operator if torch.compiler.is_compiling() else _absorb_backward
        k, v, lengths = ctx.saved_tensors
        dk, dv = run(k, v, lengths, dS.contiguous(), dz.contiguous(), ctx.map)
        return dk, dv, None, None


class _Read(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, S: Tensor, z: Tensor, dtype: torch.dtype, map: int, norm: int, floor: float
    ) -> tuple[Tensor, Tensor]:
        q, S, z = rows(q), dense(S), dense(z)
        run = _read_operator if torch.compiler.is_compiling() else _read
        o, den = run(q, S, z, dtype, map, norm, floor)
        ctx.save_for_backward(q, S, z, den)
        ctx.options = dtype, map, norm, floor
        if norm:
            ctx.mark_non_differentiable(den)
        return o, den

    @staticmethod
    def backward(ctx: Any, g: Tensor, g_den: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        dtype, map, norm, floor = ctx.options
        run = _read_backward_operator if torch.compiler.is_compiling() else _read_backward
        q, S, z, den = ctx.saved_tensors
        of_den = None if norm else g_den.contiguous()
        return *run(q, S, z, den, rows(g), of_den, dtype, map, norm, floor), None, None, None, None


def _absorb(k: Tensor, v: Tensor, lengths: Tensor | None, map: int) -> tuple[Tensor, Tensor]:
    p = cuts.cut(k, v.shape[3], v.dtype)
    (B, G, _, K), V = k.shape, v.shape[3]
    sums = empty(k, (B, G, p.segments, K, V)), empty(k, (B, G, p.segments, K)), None
    options = options_of(k, k, v, None, lengths, p, map, 0)
    segment_sums(k, v, None, None, None, NO_DECAY, None, lengths, 0.0, sums, p, options, 0, v.dtype, True)
    return _joined(sums[0], G), _joined(sums[1], G)


def _absorb_backward(
    k: Tensor, v: Tensor, lengths: Tensor | None, dS: Tensor, dz: Tensor, map: int
) -> tuple[Tensor, Tensor]:
    (B, G, T, K), V = k.shape, v.shape[3]
    # tiles of 64 x 256 of keys and of their gradients do not stay in registers
    block_k, block_v, tuning = _tiles(K, V, v.dtype, 32 if K > 128 else 64)
    dk, dv = (empty(k, (B, T, G, x.shape[3]), x.dtype).transpose(1, 2) for x in (k, v))
    blocks = blocks_each(k, tuning.chunk)
    with torch.cuda.device_of(k):
        absorb_keys[(G * triton.cdiv(T, tuning.chunk * blocks), B)](
            k, v, lengths, dS, dz, dk, dv, *strides(k), *strides(v), T,
            H=G, K=K, V=V, BK=block_k, BV=block_v, BLOCKS=blocks, MAP=map, RAGGED=lengths is not None,
            **precision(v.dtype), **tuning.launch(),
        )  # fmt: skip
    return dk, dv


def _read(
    q: Tensor, S: Tensor, z: Tensor, dtype: torch.dtype, map: int, norm: int, floor: float
) -> tuple[Tensor, Tensor]:
    (B, H, T, K), (G, _, V) = q.shape, S.shape[1:]
    block_k, block_v, tuning = _tiles(K, V, dtype)
    o, den = _read_results(q, S, dtype, norm)
    blocks = blocks_each(q, tuning.chunk)
    with torch.cuda.device_of(q):
        read_rows[(H * triton.cdiv(T, tuning.chunk * blocks), B)](
            q, S, z, o, den, *strides(q), T, floor,
            H=H, GROUP=H // G, K=K, V=V, BK=block_k, BV=block_v, BLOCKS=blocks, MAP=map, NORM=norm,
            **precision(dtype), **tuning.launch(),
        )  # fmt: skip
    return o, den


def _read_results(q: Tensor, S: Tensor, dtype: torch.dtype, norm: int) -> tuple[Tensor, Tensor]:
    B, H, T, _ = q.shape
    o = empty(q, (B, T, H, S.shape[3]), dtype).transpose(1, 2)
    return o, empty(q, (B, H, T))


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
    block_k, block_v, tuning = _tiles(K, V, dtype)
    dq, e = empty(q, (B, T, H, K), q.dtype).transpose(1, 2), empty(q, (B, H, T)) if norm else g_den
    blocks = blocks_each(q, tuning.chunk)
    with torch.cuda.device_of(q):
        read_queries[(H * triton.cdiv(T, tuning.chunk * blocks), B)](
            q, S, z, den, g, e, dq, *strides(q), *strides(g), T, floor,
            H=H, GROUP=H // G, K=K, V=V, BK=block_k, BV=block_v, BLOCKS=blocks, MAP=map, NORM=norm,
            **precision(dtype), **tuning.launch(),
        )  # fmt: skip
    p = cuts.cut(q, V, dtype)
    sums = empty(q, (B, H, p.segments, K, V)), empty(q, (B, H, p.segments, K)), None
    options = options_of(q, q, g, None, None, p, map, norm) | precision(dtype)
    segment_sums(q, g, den, e, None, NO_DECAY, None, None, floor, sums, p, options, 0, dtype, True, True)
    return dq, _joined(sums[0], G), _joined(sums[1], G)


def _joined(sums: Tensor, G: int) -> Tensor:
    """The sums of segments and of heads of a group [B, H, segments, ...] added up to [B, G, ...]; where there is one of
    each, as they lie."""
    B, H, segments, *rest = sums.shape
    if H == G and segments == 1:
        return sums.view(B, G, *rest)
    return sums.view(B, G, H // G * segments, *rest).sum(2)


_absorb_operator = torch.library.custom_op("regard::linear_absorb", _absorb, mutates_args=())
_absorb_backward_operator = torch.library.custom_op("regard::linear_absorb_backward", _absorb_backward, mutates_args=())
_read_operator = torch.library.custom_op("regard::linear_read", _read, mutates_args=())
_read_backward_operator = torch.library.custom_op("regard::linear_read_backward", _read_backward, mutates_args=())


@_absorb_operator.register_fake
def _(k, v, lengths, map):
    B, G, _, K = k.shape
    return empty(k, (B, G, K, v.shape[3])), empty(k, (B, G, K))


@_absorb_backward_operator.register_fake
def _(k, v, lengths, dS, dz, map):
    B, G, T, _ = k.shape
    return tuple(empty(k, (B, T, G, x.shape[3]), x.dtype).transpose(1, 2) for x in (k, v))


@_read_operator.register_fake
def _(q, S, z, dtype, map, norm, floor):
    return _read_results(q, S, dtype, norm)


@_read_backward_operator.register_fake
def _(q, S, z, den, g, g_den, dtype, map, norm, floor):
    B, H, T, K = q.shape
    return empty(q, (B, T, H, K), q.dtype).transpose(1, 2), torch.empty_like(S), torch.empty_like(z)


def _tiles(K: int, V: int, dtype: torch.dtype, rows: int = 64) -> tuple[int, int, Tuning]:
    """Features and values of a tile, and how a kernel of rows is launched; it has all features of a row."""
    narrow, block_k = dtype == torch.bfloat16, cuts.power_of_two(K)
    block_v = min(cuts.power_of_two(V), (cuts.HELD if narrow else cuts.HELD // 2) // block_k)
    wide = block_k * block_v > 4096
    if narrow:
        return block_k, block_v, Tuning(rows, 8 if wide else 4, 1)
    return block_k, block_v, Tuning(16 if wide else 32, 8 if wide else 4, 1)
