"""Weighted sums of each chunk of tokens: r of its keys and of its values, by a softmax over its places (Long-Short).

PyTorch's operators copy heads to where its small products take them, several times in the backward pass. A program in
Triton reads a chunk of a head where it lies. O(T r D) time, nothing kept but the inputs.

Letters: B batch, H heads, T tokens, D head width, c tokens of a chunk, r sums of it.
"""

from typing import Any

import torch
from torch import Tensor

from regard.kernels.autograd import Function, refuse_second_derivative
from regard.kernels.choose import use_triton

WIDEST, LONGEST, MOST = 128, 128, 64  # head width, chunk and sums that a program has room for


def takes(k: Tensor, v: Tensor, p: Tensor, chunk: int) -> bool:
    """Whether `summarise` runs on these: Triton alone has it."""
    refusal = None
    if k.shape[-1] > WIDEST or chunk > LONGEST or p.shape[-1] > MOST:
        refusal = f"heads are wider than {WIDEST}, chunks longer than {LONGEST}, or the sums are more than {MOST}"
    heads = k.shape[0] * k.shape[1]
    return not torch.compiler.is_compiling() and use_triton("summaries", k, v, p, refusal=refusal, second_axis=heads)


def summarise(k: Tensor, v: Tensor, p: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """k, v [B, H, T, D] and logits p [B, H, T, r] -> [B, H, n r, D] of keys and of values, r of each of the n = T //
    chunk whole chunks."""
    return _Summarise.apply(k, v, p, chunk)


class _Summarise(Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, p: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        from regard.kernels import summaries_triton

        k, v, p = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v, p))
        ctx.chunk = chunk
        ctx.save_for_backward(k, v, p)
        return summaries_triton.forward(k, v, p, chunk)

    @staticmethod
    def backward(ctx: Any, of_k: Tensor, of_v: Tensor) -> tuple[Tensor | None, ...]:
        from regard.kernels import summaries_triton

        refuse_second_derivative()
        of_k, of_v = (x if x.stride(3) == 1 else x.contiguous() for x in (of_k, of_v))
        return *summaries_triton.backward(of_k, of_v, *ctx.saved_tensors, chunk=ctx.chunk), None
