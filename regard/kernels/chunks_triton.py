"""chunks.py in Triton: a program for each chunk of each round, which gathers its tokens from where they are.

Forward: partial results of each round, merged by their logsumexp. Backward: a program has the queries and the keys of
its chunk; the chunk before gives keys, the one behind queries. Each token is in one chunk of a round, so that every
program writes rows of its own: no atomics, and the rounds are added up.
"""

import torch
import triton
from torch import Tensor

from regard.kernels.chunks_triton_kernels import (
    backward_kernel,
    buckets_kernel,
    delta_kernel,
    forward_kernel,
    merge_kernel,
)
from regard.kernels.runs import LOG2E, empty_like_heads

TOKENS = 64  # of the kernels that go over tokens


def forward(k: Tensor, v: Tensor, order: Tensor, end: Tensor | None, chunk: int, causal: bool) -> tuple[Tensor, Tensor]:
    """o [B, H, S, D] and the base-2 logsumexp [B, H, S] of all logits; of tokens that meet no other it is inf."""
    (B, H, S, D), R, N = k.shape, order.shape[2], order.shape[3]
    each = k.new_empty(B, H, R, S, D)
    lse = torch.full((B, H, R, S), -torch.inf, dtype=torch.float32, device=k.device)
    o, total = empty_like_heads(k, D), lse.new_empty(B, H, S)
    sizes = _sizes(D)
    with torch.cuda.device_of(k):
        forward_kernel[(N // chunk, B * H * R)](
            k,
            v,
            order,
            end,
            each,
            lse,
            *k.stride()[:3],
            *v.stride()[:3],
            H,
            S,
            N,
            LOG2E,
            R=R,
            CAUSAL=causal,
            **sizes,
            **_chunk(chunk),
            num_warps=8,
            num_stages=1,
        )
        merge_kernel[(triton.cdiv(S, TOKENS), B * H)](
            each, lse, v, o, total, *v.stride()[:3], *o.stride()[:3], H, S, R=R, TOKENS=TOKENS, **sizes
        )
    return o, total


def backward(
    grad: Tensor,
    k: Tensor,
    v: Tensor,
    order: Tensor,
    end: Tensor | None,
    o: Tensor,
    lse: Tensor,
    chunk: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    (B, H, S, D), R, N = k.shape, order.shape[2], order.shape[3]
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    delta, sizes = torch.empty_like(lse), _sizes(D)
    dk, dv = (k.new_empty(R, B, S, H, D).transpose(2, 3) for _ in range(2))
    with torch.cuda.device_of(k):
        delta_kernel[(triton.cdiv(S, TOKENS), B * H)](
            o, grad, delta, *o.stride()[:3], *grad.stride()[:3], H, S, TOKENS=TOKENS, **sizes
        )
        backward_kernel[(N // chunk, B * H * R)](
            k,
            v,
            grad,
            order,
            end,
            lse,
            delta,
            dk,
            dv,
            *k.stride()[:3],
            *v.stride()[:3],
            *grad.stride()[:3],
            *dk.stride()[:4],
            H,
            S,
            N,
            LOG2E,
            R=R,
            CAUSAL=causal,
            **sizes,
            **_chunk(chunk),
            num_warps=8,
            num_stages=1,
        )
    return (dk[0], dv[0]) if R == 1 else (_added(dk), _added(dv))


def _added(parts: Tensor) -> Tensor:
    """The sum over rounds [R, B, H, S, D], in the memory order of heads that were split from a projection."""
    return parts.transpose(2, 3).sum(0).transpose(1, 2)


def buckets(k: Tensor, directions: Tensor) -> Tensor:
    (B, H, S, D), (R, n) = k.shape, directions.shape[1::2]
    out = torch.empty((B, H, R, S), dtype=torch.int32, device=k.device)
    high = directions.to(k.dtype).contiguous()
    # what rounding to half precision leaves of the directions: two products have them nearly exact
    low = None if k.dtype == torch.float32 else (directions - high.to(directions.dtype)).to(k.dtype).contiguous()
    with torch.cuda.device_of(k):
        buckets_kernel[(triton.cdiv(S, TOKENS), B * H * R)](
            k,
            high,
            low,
            out,
            *k.stride()[:3],
            H,
            S,
            n,
            R=R,
            TOKENS=TOKENS,
            COLUMNS=max(16, triton.next_power_of_2(n)),
            **_sizes(D),
        )
    return out


def _sizes(width: int) -> dict[str, int]:
    return {"D": width, "BLOCK_D": max(16, triton.next_power_of_2(width))}


def _chunk(size: int) -> dict[str, int]:
    return {"M": size, "BLOCK_M": max(16, triton.next_power_of_2(size))}
