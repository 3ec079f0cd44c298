"""Attention by alpha-entmax over whole sequences, in Triton: weights [1 + beta (z - t)]_+^(1 / beta), with one t for
each query such that they sum to one (regard/layers/attention/entmax.py has the formulas).

Logits are never in memory. A tile of queries goes over its keys once for their maximum, once for each step of Newton's
until all its queries have arrived, and once for the output; the backward pass goes over them three times. A query that
has arrived waits for the others of its tile without changing, so no result depends on its neighbours.
O(T S D) for each step, memory linear in the inputs.

Not chosen by "auto" yet (choose.py): REGARD_KERNELS=triton takes it.
"""

from typing import Any

import torch
from torch import Tensor

from regard.kernels.autograd import Function, refuse_second_derivative
from regard.kernels.choose import use_triton
from regard.kernels.visible import Visible

WIDEST = 128  # head width that a program has room for


def takes(q: Tensor, k: Tensor, v: Tensor, refusal: str | None = None) -> bool:
    """Whether `attend` runs on these, by the choice of kernels; `refusal` is the caller's own reason not to."""
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        refusal = f"heads are wider than {WIDEST}"
    elif torch.compiler.is_compiling():
        refusal = "torch.compile records no kernel of ours here"
    return use_triton("entmax", q, k, v, refusal=refusal, second_axis=q.shape[0] * q.shape[1])


def attend(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, visible: Visible, scale: float) -> Tensor:
    """q [B, H, T, D], k [B, H, S, D], v [B, H, S, E] and beta = alpha - 1 of each head [H], above 0 and at most 1:
    [B, H, T, E]; queries that see no key give 0."""
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(dtype) for x in (q, k, v))
    if not q.numel() or not k.numel():
        return q.new_zeros(*q.shape[:3], v.shape[3])
    return _Attend.apply(q, k, v, beta.float(), visible.first, visible.limit, visible.causal, scale)


class _Attend(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        first: Tensor,
        count: Tensor,
        causal: bool,
        scale: float,
    ) -> Tensor:
        from regard.kernels import entmax_triton

        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        first, count, beta = (x.contiguous() for x in (first.int(), count.int(), beta))
        o, t, total = entmax_triton.forward(q, k, v, beta, first, count, causal, scale)
        ctx.save_for_backward(q, k, v, beta, first, count, t, total)
        ctx.options = causal, scale
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from regard.kernels import entmax_triton

        refuse_second_derivative()
        learns = ctx.needs_input_grad[3]
        grad = grad if grad.stride(3) == 1 else grad.contiguous()
        causal, scale = ctx.options
        dq, dk, dv, of_beta = entmax_triton.backward(
            grad, *ctx.saved_tensors, causal=causal, scale=scale, learns=learns
        )
        return dq, dk, dv, of_beta if learns else None, None, None, None, None
