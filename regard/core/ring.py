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

from regard.core.sequence import Split, exchange


def takes(q: Tensor) -> bool:
    """Whether there is a kernel for a block: the one of PyTorch for CPUs."""
    return q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64)


def attend_ring(split: Split, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal: q, k and v [B, H, T, D] are those of the tokens of this process."""
    return _Ring.apply(split, q.contiguous(), k.contiguous(), v.contiguous(), scale)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: Split, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        o, total = torch.zeros_like(q), q.new_full(q.shape[:3], -math.inf)
        passing = [k, v]
        for step in range(split.size):
            owner = split.rank - step
            if owner >= 0:
                part, logsumexp = _block(q, passing[0], passing[1], owner == split.rank, scale)
                both = torch.logaddexp(total, logsumexp)
                o = o * (total - both).exp()[..., None] + part * (logsumexp - both).exp()[..., None]
                total = both
            if step + 1 < split.size:
                passing = _rotate(split, passing)
        ctx.split, ctx.scale = split, scale
        ctx.save_for_backward(q, k, v, o, total)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] # PyTorch's decorator types it otherwise
        q, k, v, o, total = ctx.saved_tensors
        split, of_q = ctx.split, torch.zeros_like(q)
        passing = [k, v, torch.zeros_like(k), torch.zeros_like(v)]
        for step in range(split.size):
            owner = split.rank - step
            if owner >= 0:
                k, v, of_k, of_v = passing
                added = _block_backward(grad.contiguous(), q, k, v, o, total, owner == split.rank, ctx.scale)
                of_q = of_q + added[0]
                passing = [k, v, of_k + added[1], of_v + added[2]]
            # once more than forward: then the gradients are back where their keys are
            passing = _rotate(split, passing)
        return None, of_q, passing[2], passing[3], None


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


def _block(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The answer of a block of keys alone and its logsumexp."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, total: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The share of a block in the gradients, from the answer and the logsumexp of all blocks."""
    work = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return work(grad, q, k, v, o, total, 0.0, causal, scale=scale)
