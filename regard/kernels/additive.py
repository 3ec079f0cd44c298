"""Logits w . tanh(q_i + k_j) of additive attention, without the D numbers of each pair in memory.

Letters: B batch, H heads, T queries, S keys, D head width. O(T S D) time; Triton alone has it.
"""

from typing import Any

import torch
from torch import Tensor

from regard.kernels.autograd import Function, refuse_second_derivative
from regard.kernels.choose import use_triton

WIDEST = 128


def takes(q: Tensor, k: Tensor) -> bool:
    """Whether `scores` runs on these."""
    refusal = f"heads are wider than {WIDEST}" if q.shape[-1] > WIDEST else None
    if torch.compiler.is_compiling():
        # its own kernels fuse the product and the sum
        refusal = "torch.compile records no kernel of ours here"
    return use_triton("additive", q, k, refusal=refusal)


def scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """q [B, H, T, D], k [B, H, S, D], w [H, D] -> [B, H, T, S] in float32."""
    return _Scores.apply(q, k, w)


class _Scores(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        from regard.kernels import additive_triton

        q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
        ctx.save_for_backward(q, k, w)
        return additive_triton.forward(q, k, w.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        from regard.kernels import additive_triton

        refuse_second_derivative()
        q, k, w = ctx.saved_tensors
        return additive_triton.backward(grad.contiguous(), q, k, w.contiguous())
