"""additive.py in Triton: all D numbers of a few pairs at a time, in registers."""

# Triton's compiler reads the kernels' bodies, in which types are not those of Python.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.jit_triton import jit
from regard.kernels.rows_triton import load_rows, store_rows
from regard.kernels.runs import empty_like_heads


def forward(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, first: Tensor, limit: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """o [B, H, T, E] and the logsumexp [B, H, T] of the logits."""
    (B, H, T, _), sizes = q.shape, _sizes(q, v, causal)
    o, lse = empty_like_heads(q, v.shape[3], v.dtype), torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        forward_kernel[(triton.cdiv(T, sizes["ROWS"]), B * H)](
            q, k, v, w, first, limit, o, lse, *_strides(q, k, v, o), H, T, k.shape[2], **sizes
        )
    return o, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    first: Tensor,
    limit: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and w."""
    (B, H, T, D), S, sizes = q.shape, k.shape[2], _sizes(q, v, causal)
    dq, dk, dv = (empty_like_heads(x, x.shape[3]) for x in (q, k, v))
    tiles, delta = triton.cdiv(T, sizes["ROWS"]), torch.empty_like(lse)
    dw = torch.empty(B, H, tiles, D, dtype=torch.float32, device=q.device)
    given = (q, k, v, w, first, limit, grad)
    with torch.cuda.device_of(q):
        queries_kernel[(tiles, B * H)](*given, o, lse, delta, dq, dw, *_strides(q, k, v, grad, o, dq), H, T, S, **sizes)
        keys_kernel[(triton.cdiv(S, sizes["KEYS"]), B * H)](
            *given, lse, delta, dk, dv, *_strides(q, k, v, grad, dk, dv), H, T, S, **sizes
        )
    return dq, dk, dv, dw.sum((0, 2)).to(w.dtype)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _sizes(q: Tensor, v: Tensor, causal: bool) -> dict[str, int]:
    D, E = q.shape[3], v.shape[3]
    block_d, block_e = (max(16, triton.next_power_of_2(size)) for size in (D, E))
    # 8,192 numbers of pairs at a time, 64 to a thread
    keys = max(2, 512 // max(block_d, block_e))
    return {"D": D, "BLOCK_D": block_d, "E": E, "BLOCK_E": block_e, "CAUSAL": causal, "ROWS": 16, "KEYS": keys}


@jit
def _logits(query, key, weight, i, j, first, limit, T, CAUSAL: tl.constexpr):
    """tanh(q + k) of each pair [rows, keys, D], its product with w, and which pairs there are."""
    hidden = 1.0 - 2.0 / (tl.exp(2.0 * (query[:, None, :] + key[None, :, :])) + 1.0)
    visible = (i < T)[:, None] & (j < limit)[None, :]
    if CAUSAL:
        visible = visible & (j[None, :] <= first + i[:, None])
    return hidden, tl.sum(hidden * weight[None, None, :], 2), visible


@jit
def forward_kernel(
    q, k, v, w, firsts, limits, o, lse,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, H, T, S,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # the later tiles of causal queries are longer: they begin first
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    one = tl.program_id(1).to(tl.int64)
    b, h = one // H, one % H
    first, limit = tl.load(firsts + b).to(tl.int32), tl.minimum(tl.load(limits + b).to(tl.int32), S)
    i, d = row0 + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    weight = tl.load(w + h * D + d, mask=d < D, other=0.0).to(tl.float32)
    query = load_rows(q + b * q_b + h * q_h, i, T, q_t, D, BLOCK_D).to(tl.float32)
    end = limit
    if CAUSAL:
        end = tl.minimum(limit, first + row0 + ROWS)
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_E], tl.float32)
    for j0 in range(0, end, KEYS):
        j = j0 + tl.arange(0, KEYS)
        key = load_rows(k + b * k_b + h * k_h, j, S, k_t, D, BLOCK_D).to(tl.float32)
        _, logits, visible = _logits(query, key, weight, i, j, first, limit, T, CAUSAL)
        logits = tl.where(visible, logits, float("-inf"))
        new = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        weights, fade = tl.exp(logits - base[:, None]), tl.exp(top - base)
        value = load_rows(v + b * v_b + h * v_h, j, S, v_t, E, BLOCK_E).to(tl.float32)
        total = total * fade + tl.sum(weights, 1)
        # in this order: Triton's compiler turns a sum over x[:, :, None] * y[None, :, :] into a product of matrices in
        # TF32, which is less exact, and wrong for fewer than 8 keys
        acc = acc * fade[:, None] + tl.sum(value[None, :, :] * weights[:, :, None], 1)
        top = new
    some = total > 0.0
    total = tl.where(some, total, 1.0)
    tl.store(lse + one * T + i, tl.where(some, top + tl.log(total), 0.0), mask=i < T)
    store_rows(o + b * o_b + h * o_h, i, T, o_t, acc / total[:, None], E, BLOCK_E)


@jit
def queries_kernel(
    q, k, v, w, firsts, limits, grad, o, lse, deltas, dq, dw,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, o_b, o_h, o_t, d_b, d_h, d_t, H, T, S,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dq, the rows' o . do, and what w gets of a tile of queries."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row0 = tile * ROWS
    one = tl.program_id(1).to(tl.int64)
    b, h = one // H, one % H
    first, limit = tl.load(firsts + b).to(tl.int32), tl.minimum(tl.load(limits + b).to(tl.int32), S)
    i, d = row0 + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    weight = tl.load(w + h * D + d, mask=d < D, other=0.0).to(tl.float32)
    query = load_rows(q + b * q_b + h * q_h, i, T, q_t, D, BLOCK_D).to(tl.float32)
    out = load_rows(grad + b * g_b + h * g_h, i, T, g_t, E, BLOCK_E).to(tl.float32)
    delta = tl.sum(out * load_rows(o + b * o_b + h * o_h, i, T, o_t, E, BLOCK_E).to(tl.float32), 1)
    tl.store(deltas + one * T + i, delta, mask=i < T)
    base = tl.load(lse + one * T + i, mask=i < T, other=0.0)
    end = limit
    if CAUSAL:
        end = tl.minimum(limit, first + row0 + ROWS)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    of_w = tl.zeros([BLOCK_D], tl.float32)
    for j0 in range(0, end, KEYS):
        j = j0 + tl.arange(0, KEYS)
        key = load_rows(k + b * k_b + h * k_h, j, S, k_t, D, BLOCK_D).to(tl.float32)
        value = load_rows(v + b * v_b + h * v_h, j, S, v_t, E, BLOCK_E).to(tl.float32)
        hidden, logits, visible = _logits(query, key, weight, i, j, first, limit, T, CAUSAL)
        weights = tl.where(visible, tl.exp(logits - base[:, None]), 0.0)
        slope = weights * (tl.sum(out[:, None, :] * value[None, :, :], 2) - delta[:, None])
        acc += tl.sum(slope[:, :, None] * (1.0 - hidden * hidden), 1)
        of_w += tl.sum(tl.sum(slope[:, :, None] * hidden, 1), 0)
    store_rows(dq + b * d_b + h * d_h, i, T, d_t, acc * weight[None, :], D, BLOCK_D)
    tl.store(dw + (one * tl.num_programs(0) + tile) * D + d, of_w, mask=d < D)


@jit
def keys_kernel(
    q, k, v, w, firsts, limits, grad, lse, deltas, dk, dv,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, H, T, S,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    key0 = tl.program_id(0) * KEYS
    one = tl.program_id(1).to(tl.int64)
    b, h = one // H, one % H
    first, limit = tl.load(firsts + b).to(tl.int32), tl.minimum(tl.load(limits + b).to(tl.int32), S)
    j, d = key0 + tl.arange(0, KEYS), tl.arange(0, BLOCK_D)
    weight = tl.load(w + h * D + d, mask=d < D, other=0.0).to(tl.float32)
    key = load_rows(k + b * k_b + h * k_h, j, S, k_t, D, BLOCK_D).to(tl.float32)
    value = load_rows(v + b * v_b + h * v_h, j, S, v_t, E, BLOCK_E).to(tl.float32)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(key0 - first, 0) // ROWS * ROWS
    # keys that are padding are seen by none
    end = tl.where(key0 < limit, T, 0)
    acc_k = tl.zeros([KEYS, BLOCK_D], tl.float32)
    acc_v = tl.zeros([KEYS, BLOCK_E], tl.float32)
    for i0 in range(begin, end, ROWS):
        i = i0 + tl.arange(0, ROWS)
        query = load_rows(q + b * q_b + h * q_h, i, T, q_t, D, BLOCK_D).to(tl.float32)
        out = load_rows(grad + b * g_b + h * g_h, i, T, g_t, E, BLOCK_E).to(tl.float32)
        base = tl.load(lse + one * T + i, mask=i < T, other=0.0)
        delta = tl.load(deltas + one * T + i, mask=i < T, other=0.0)
        hidden, logits, visible = _logits(query, key, weight, i, j, first, limit, T, CAUSAL)
        weights = tl.where(visible, tl.exp(logits - base[:, None]), 0.0)
        slope = weights * (tl.sum(out[:, None, :] * value[None, :, :], 2) - delta[:, None])
        acc_k += tl.sum(slope[:, :, None] * (1.0 - hidden * hidden), 0)
        acc_v += tl.sum(weights[:, :, None] * out[:, None, :], 0)
    store_rows(dk + b * dk_b + h * dk_h, j, S, dk_t, acc_k * weight[None, :], D, BLOCK_D)
    store_rows(dv + b * dv_b + h * dv_h, j, S, dv_t, acc_v, E, BLOCK_E)
