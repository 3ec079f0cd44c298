"""Softmax attention over rows whose tokens are spread over processes, without any process holding all keys.

Keys and values travel around a ring of the processes (Liu et al. 2023, Ring Attention, arXiv 2310.01889). Each process
attends to what passes by, and merges the answers by their logsumexp. In the backward pass they travel once more, and
their gradients with them.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from regard.core.sequence import Split, exchange


def takes(q: Tensor) -> bool:
    """Whether PyTorch has a kernel of a block that also gives its logsumexp."""
    if q.device.type == "cpu":
        return q.dtype in (torch.float32, torch.float64)
    # the kernel itself does not pad heads to a multiple of 8, as PyTorch's function around it does
    return q.shape[-1] % 8 == 0 and can_use_flash_attention(SDPAParams(q, q, q, None, 0.0, True, False))


def attend_ring(split: Split, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal: q, k and v [B, H, T, D] are those of the tokens of this process."""
    return _Ring.apply(split, q.contiguous(), k.contiguous(), v.contiguous(), scale)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: Split, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        # sums over blocks are not rounded to half precision
        precise = torch.promote_types(q.dtype, torch.float32)
        o = torch.zeros_like(q, dtype=precise)
        total = torch.full_like(o[..., 0], -math.inf)
        passing, beside = [k, v], ()
        for step in range(split.size):
            owner = split.rank - step
            if owner >= 0:
                part, logsumexp, *beside = _block(q, passing[0], passing[1], owner == split.rank, scale)
                both = torch.logaddexp(total, logsumexp)
                o = o * (total - both).exp()[..., None] + part * (logsumexp - both).exp()[..., None]
                total = both
            if step + 1 < split.size:
                passing = _rotate(split, passing)
        o = o.to(q.dtype)
        ctx.split, ctx.scale, ctx.beside = split, scale, beside
        ctx.save_for_backward(q, k, v, o, total)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] # PyTorch's decorator types it otherwise
        q, k, v, o, total = ctx.saved_tensors
        split, of_q, of_k, of_v = ctx.split, *(torch.zeros_like(x, dtype=total.dtype) for x in (q, k, v))
        passing = [k, v, of_k, of_v]
        for step in range(split.size):
            owner = split.rank - step
            if owner >= 0:
                k, v, of_k, of_v = passing
                whole = (grad.contiguous(), q, k, v, o, total)
                added = _block_backward(whole, ctx.beside, owner == split.rank, ctx.scale)
                of_q = of_q + added[0]
                passing = [k, v, of_k + added[1], of_v + added[2]]
            # once more than forward: then the gradients are back where their keys are
            passing = _rotate(split, passing)
        return None, *(x.to(q.dtype) for x in (of_q, *passing[2:])), None


def _rotate(split: Split, tensors: list[Tensor]) -> list[Tensor]:
    """Hands tensors on to the next process, and takes those of the one before."""
    if split.size == 1:
        return tensors
    found = [torch.empty_like(x) for x in tensors]
    after, before = split.peer((split.rank + 1) % split.size), split.peer((split.rank - 1) % split.size)
    exchange(
        [dist.P2POp(dist.isend, x.contiguous(), after, split.group) for x in tensors]
        + [dist.P2POp(dist.irecv, x, before, split.group) for x in found]
    )
    return found


def _block(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Any, ...]:
    """The answer of a block of keys alone, its logsumexp, and what else the backward pass of the kernel asks for, which
    does not depend on the block."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:-1]


def _block_backward(
    whole: tuple[Tensor, ...], beside: list[Any], causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The share of a block in the gradients of q, k and v. `whole` are the gradient of the answer, q, k and v of the
    block, and the answer and the logsumexp of all blocks."""
    if whole[0].device.type == "cpu":
        work = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return work(*whole, 0.0, causal, scale=scale)
    lengths, random = beside[:4], beside[4:]
    work = torch.ops.aten._scaled_dot_product_flash_attention_backward
    return work(*whole, *lengths, 0.0, causal, *random, scale=scale)
