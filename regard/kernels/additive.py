"""Additive attention, softmax_j(w . tanh(q_i + k_j + b)) v_j, without logits or the D numbers of a pair in memory.

Letters: B batch, H heads, T queries, S keys, D head width. O(T S D) time, memory linear in the inputs; Triton alone has
it.
"""

from typing import Any

import torch
from torch import Tensor

from regard.kernels.autograd import Function, refuse_second_derivative
from regard.kernels.choose import use_triton
from regard.kernels.visible import Visible

WIDEST = 128


def takes(q: Tensor, k: Tensor, v: Tensor, refusal: str | None = None) -> bool:
    """Whether `attend` runs on these; `refusal` is the caller's own reason not to."""
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        refusal = f"heads are wider than {WIDEST}"
    elif torch.compiler.is_compiling():
        refusal = "torch.compile records no kernel of ours here"
    return use_triton("additive", q, k, v, refusal=refusal, second_axis=q.shape[0] * q.shape[1])


def attend(q: Tensor, k: Tensor, v: Tensor, w: Tensor, offset: Tensor, visible: Visible) -> Tensor:
    """q [B, H, T, D], k [B, H, S, D], v [B, H, S, E], w and the offset b [H, D] -> [B, H, T, E] in the dtype of v;
    queries without keys give 0."""
    if not q.numel() or not k.numel():
        return v.new_zeros(*q.shape[:3], v.shape[3])
    return _Attend.apply(q, k, v, w, offset, visible.first, visible.limit, visible.causal)


class _Attend(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor,
        offset: Tensor,
        first: Tensor,
        limit: Tensor,
        causal: bool,
    ) -> Tensor:
        from regard.kernels import additive_triton

        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        w, offset, first, limit = (x.contiguous() for x in (w, offset, first, limit))
        o, lse = additive_triton.forward(q, k, v, w, offset, first, limit, causal)
        ctx.save_for_backward(q, k, v, w, offset, first, limit, o, lse)
        ctx.causal = causal
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from regard.kernels import additive_triton

        refuse_second_derivative()
        grad = grad if grad.stride(3) == 1 else grad.contiguous()
        return *additive_triton.backward(grad, *ctx.saved_tensors, causal=ctx.causal), None, None, None
