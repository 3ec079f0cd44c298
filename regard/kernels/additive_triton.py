"""additive.py in Triton: all D numbers of a pair in the registers of one thread.

Tiles are [D, ., .] with the queries on the last axis, or for the gradients of keys these: a thread has one of them and
adds up what its pairs give. No sum is one over the threads of a warp, but for the last.
"""

# Triton's compiler reads the kernels' bodies, in which types are not those of Python.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.jit_triton import jit
from regard.kernels.runs import empty_like_heads
from regard.kernels.scan_triton_tiles import PTX, exp

TILE = 32  # queries of a program, or keys: one for each thread of a warp


def forward(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, offset: Tensor, first: Tensor, limit: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """o [B, H, T, E] and the logsumexp [B, H, T] of the logits."""
    (B, H, T, _), sizes = q.shape, _sizes(q, v, causal, 128)
    o, lse = empty_like_heads(q, v.shape[3], v.dtype), torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        forward_kernel[(triton.cdiv(T, TILE), B * H)](
            q, k, v, w, offset, first, limit, o, lse, *_strides(q, k, v, o), H, T, k.shape[2], **sizes
        )
    return o, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    offset: Tensor,
    first: Tensor,
    limit: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, w and the offset."""
    (B, H, T, D), S, sizes = q.shape, k.shape[2], _sizes(q, v, causal, 64)
    dq, dk, dv = (empty_like_heads(x, x.shape[3]) for x in (q, k, v))
    tiles, delta = triton.cdiv(T, TILE), torch.empty_like(lse)
    parts = torch.empty(B, H, tiles, 2, D, dtype=torch.float32, device=q.device)
    given = (q, k, v, w, offset, first, limit, grad)
    with torch.cuda.device_of(q):
        queries_kernel[(tiles, B * H)](
            *given, o, lse, delta, dq, parts, *_strides(q, k, v, grad, o, dq), H, T, S, **sizes
        )
        keys_kernel[(triton.cdiv(S, TILE), B * H)](
            *given, lse, delta, dk, dv, *_strides(q, k, v, grad, dk, dv), H, T, S, **sizes
        )
    of_w, of_offset = parts.sum((0, 2)).unbind(1)
    return dq, dk, dv, of_w.to(w.dtype), of_offset.to(offset.dtype)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _sizes(q: Tensor, v: Tensor, causal: bool, held: int) -> dict[str, int]:
    """`held`: how many numbers of pairs a thread has at a time. A head wider than 32 is shared by several warps, for
    more would not fit in registers; then a step is one pair for each thread."""
    D, E = q.shape[3], v.shape[3]
    block_d, block_e = (max(16, triton.next_power_of_2(size)) for size in (D, E))
    wide = max(block_d, block_e)
    sizes = {"D": D, "BLOCK_D": block_d, "E": E, "BLOCK_E": block_e, "CAUSAL": causal, "LANES": TILE}
    return sizes | {"STEP": held // wide if wide <= 32 else 1, "num_warps": max(1, wide // 32)}


@jit
def _load(x, rows, limit, stride, D: tl.constexpr, BLOCK: tl.constexpr):
    """The rows [n] below `limit`, of width D, as columns [BLOCK, n] in float32; zeros beyond."""
    d = tl.arange(0, BLOCK)
    at = x + rows.to(tl.int64)[None, :] * stride + d[:, None]
    return tl.load(at, mask=(rows < limit)[None, :] & (d < D)[:, None], other=0.0).to(tl.float32)


@jit
def _store(x, rows, limit, stride, value, D: tl.constexpr, BLOCK: tl.constexpr):
    d = tl.arange(0, BLOCK)
    at = x + rows.to(tl.int64)[None, :] * stride + d[:, None]
    tl.store(at, value.to(x.dtype.element_ty), mask=(rows < limit)[None, :] & (d < D)[:, None])


@jit
def _inverse(x):
    """1 / x in one instruction, where a division is ten."""
    if PTX:
        x = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        x = 1.0 / x
    return x


@jit
def _hidden(outer, inner):
    """tanh of the sum of each pair of columns, [D, outer, inner]."""
    return 1.0 - 2.0 * _inverse(exp(2.0 * (outer[:, :, None] + inner[:, None, :])) + 1.0)


@jit
def _seen(i, j, first, limit, T, CAUSAL: tl.constexpr):
    """Which pairs of queries i and keys j there are; both have the shape of the pairs."""
    seen = (i < T) & (j < limit)
    if CAUSAL:
        seen = seen & (j <= first + i)
    return seen


@jit
def forward_kernel(
    q, k, v, w, offset, firsts, limits, o, lse,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, H, T, S,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, CAUSAL: tl.constexpr,
    LANES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    # the later tiles of causal queries are longer: they begin first
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * LANES
    one = tl.program_id(1).to(tl.int64)
    b, h = one // H, one % H
    first, limit = tl.load(firsts + b).to(tl.int32), tl.minimum(tl.load(limits + b).to(tl.int32), S)
    i, d = row0 + tl.arange(0, LANES), tl.arange(0, BLOCK_D)
    weight = tl.load(w + h * D + d, mask=d < D, other=0.0).to(tl.float32)
    query = _load(q + b * q_b + h * q_h, i, T, q_t, D, BLOCK_D)
    query += tl.load(offset + h * D + d, mask=d < D, other=0.0).to(tl.float32)[:, None]
    end = limit
    if CAUSAL:
        end = tl.minimum(limit, first + row0 + LANES)
    top, total = tl.full([LANES], float("-inf"), tl.float32), tl.zeros([LANES], tl.float32)
    acc = tl.zeros([BLOCK_E, LANES], tl.float32)
    for j0 in range(0, end, STEP):
        j = j0 + tl.arange(0, STEP)
        key = _load(k + b * k_b + h * k_h, j, S, k_t, D, BLOCK_D)
        value = _load(v + b * v_b + h * v_h, j, S, v_t, E, BLOCK_E)
        logits = tl.sum(_hidden(key, query) * weight[:, None, None], 0)
        logits = tl.where(_seen(i[None, :], j[:, None], first, limit, T, CAUSAL), logits, float("-inf"))
        new = tl.maximum(top, tl.max(logits, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        weights, fade = exp(logits - base[None, :]), exp(top - base)
        total = total * fade + tl.sum(weights, 0)
        # in this order: Triton's compiler turns a sum over x[:, :, None] * y[None, :, :] into a product of matrices in
        # TF32, which is less exact, and wrong for fewer than 8 keys
        acc = acc * fade[None, :] + tl.sum(weights[None, :, :] * value[:, :, None], 1)
        top = new
    some = total > 0.0
    total = tl.where(some, total, 1.0)
    tl.store(lse + one * T + i, tl.where(some, top + tl.log(total), 0.0), mask=i < T)
    _store(o + b * o_b + h * o_h, i, T, o_t, acc / total[None, :], E, BLOCK_E)


@jit
def queries_kernel(
    q, k, v, w, offset, firsts, limits, grad, o, lse, deltas, dq, parts,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, o_b, o_h, o_t, d_b, d_h, d_t, H, T, S,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, CAUSAL: tl.constexpr,
    LANES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """dq, the rows' o . do, and what w and the offset get of a tile of queries."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row0 = tile * LANES
    one = tl.program_id(1).to(tl.int64)
    b, h = one // H, one % H
    first, limit = tl.load(firsts + b).to(tl.int32), tl.minimum(tl.load(limits + b).to(tl.int32), S)
    i, d = row0 + tl.arange(0, LANES), tl.arange(0, BLOCK_D)
    weight = tl.load(w + h * D + d, mask=d < D, other=0.0).to(tl.float32)
    query = _load(q + b * q_b + h * q_h, i, T, q_t, D, BLOCK_D)
    query += tl.load(offset + h * D + d, mask=d < D, other=0.0).to(tl.float32)[:, None]
    out = _load(grad + b * g_b + h * g_h, i, T, g_t, E, BLOCK_E)
    delta = tl.sum(out * _load(o + b * o_b + h * o_h, i, T, o_t, E, BLOCK_E), 0)
    tl.store(deltas + one * T + i, delta, mask=i < T)
    base = tl.load(lse + one * T + i, mask=i < T, other=0.0)
    end = limit
    if CAUSAL:
        end = tl.minimum(limit, first + row0 + LANES)
    acc, of_w = tl.zeros([BLOCK_D, LANES], tl.float32), tl.zeros([BLOCK_D, LANES], tl.float32)
    for j0 in range(0, end, STEP):
        j = j0 + tl.arange(0, STEP)
        key = _load(k + b * k_b + h * k_h, j, S, k_t, D, BLOCK_D)
        value = _load(v + b * v_b + h * v_h, j, S, v_t, E, BLOCK_E)
        hidden = _hidden(key, query)
        logits = tl.sum(hidden * weight[:, None, None], 0)
        seen = _seen(i[None, :], j[:, None], first, limit, T, CAUSAL)
        weights = tl.where(seen, exp(logits - base[None, :]), 0.0)
        slope = weights * (tl.sum(out[:, None, :] * value[:, :, None], 0) - delta[None, :])
        acc += tl.sum(slope[None, :, :] * (1.0 - hidden * hidden), 1)
        of_w += tl.sum(slope[None, :, :] * hidden, 1)
    acc *= weight[:, None]
    _store(dq + b * d_b + h * d_h, i, T, d_t, acc, D, BLOCK_D)
    to = parts + (one * tl.num_programs(0) + tile) * 2 * D + d
    tl.store(to, tl.sum(of_w, 1), mask=d < D)
    tl.store(to + D, tl.sum(acc, 1), mask=d < D)


@jit
def keys_kernel(
    q, k, v, w, offset, firsts, limits, grad, lse, deltas, dk, dv,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, H, T, S,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, CAUSAL: tl.constexpr,
    LANES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    key0 = tl.program_id(0) * LANES
    one = tl.program_id(1).to(tl.int64)
    b, h = one // H, one % H
    first, limit = tl.load(firsts + b).to(tl.int32), tl.minimum(tl.load(limits + b).to(tl.int32), S)
    j, d = key0 + tl.arange(0, LANES), tl.arange(0, BLOCK_D)
    weight = tl.load(w + h * D + d, mask=d < D, other=0.0).to(tl.float32)
    # the offset belongs to the sum of both
    key = _load(k + b * k_b + h * k_h, j, S, k_t, D, BLOCK_D)
    key += tl.load(offset + h * D + d, mask=d < D, other=0.0).to(tl.float32)[:, None]
    value = _load(v + b * v_b + h * v_h, j, S, v_t, E, BLOCK_E)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(key0 - first, 0) // STEP * STEP
    # keys that are padding are seen by none
    end = tl.where(key0 < limit, T, 0)
    acc_k, acc_v = tl.zeros([BLOCK_D, LANES], tl.float32), tl.zeros([BLOCK_E, LANES], tl.float32)
    for i0 in range(begin, end, STEP):
        i = i0 + tl.arange(0, STEP)
        query = _load(q + b * q_b + h * q_h, i, T, q_t, D, BLOCK_D)
        out = _load(grad + b * g_b + h * g_h, i, T, g_t, E, BLOCK_E)
        base = tl.load(lse + one * T + i, mask=i < T, other=0.0)
        delta = tl.load(deltas + one * T + i, mask=i < T, other=0.0)
        hidden = _hidden(query, key)
        logits = tl.sum(hidden * weight[:, None, None], 0)
        seen = _seen(i[:, None], j[None, :], first, limit, T, CAUSAL)
        weights = tl.where(seen, exp(logits - base[:, None]), 0.0)
        slope = weights * (tl.sum(value[:, None, :] * out[:, :, None], 0) - delta[:, None])
        acc_k += tl.sum(slope[None, :, :] * (1.0 - hidden * hidden), 1)
        acc_v += tl.sum(weights[None, :, :] * out[:, :, None], 1)
    _store(dk + b * dk_b + h * dk_h, j, S, dk_t, acc_k * weight[:, None], D, BLOCK_D)
    _store(dv + b * dv_b + h * dv_h, j, S, dv_t, acc_v, E, BLOCK_E)
