"""Attention in chunks of a sorted row, with several sorts merged, over tokens that stay where they are (the Reformer).

A round sorts the N tokens of a row in some order and cuts it into chunks of m. A token attends to its chunk and the one
before; that of the first chunk is the last one of the round before (of the last round, for the first). Queries are k
itself and keys k / |k|; no token reads itself or, where causal, what comes after it, and one that meets no other gives
its own value. All rounds share one softmax, in which a key counts as often as it is met.

`attend` needs Triton (chunks_triton.py). O(R N m D) time, memory linear in the inputs.

Letters: B batch, H heads, R rounds, N tokens of the sorted rows, S tokens (N is S rounded up to chunks), D head width.
"""

from typing import Any

import torch
from torch import Tensor

from regard.kernels.autograd import Function, refuse_second_derivative
from regard.kernels.choose import use_triton

WIDEST = 128


def takes(k: Tensor, v: Tensor, chunk: int, rounds: int, refusal: str | None = None) -> bool:
    """Whether `attend` and `buckets` run on these, by the choice of kernels; `refusal` is the caller's own reason not
    to."""
    if max(k.shape[-1], v.shape[-1]) > WIDEST:
        refusal = f"heads are wider than {WIDEST}"
    elif chunk > WIDEST:
        refusal = f"chunks have more than {WIDEST} tokens"
    elif torch.compiler.is_compiling():
        refusal = "it is no operator that a compiler knows"
    return use_triton("chunks", k, v, refusal=refusal, second_axis=k.shape[0] * k.shape[1] * rounds)


def attend(k: Tensor, v: Tensor, order: Tensor, chunk: int, *, causal: bool, end: Tensor | None = None) -> Tensor:
    """k, v [B, H, S, D], order [B, H, R, N] of the tokens -> [B, H, S, D]. Of each row the tokens before end [B] are
    real, and stand before the others in every round."""
    if torch.is_autocast_enabled(k.device.type):
        dtype = torch.get_autocast_dtype(k.device.type)
        k, v = k.to(dtype), v.to(dtype)
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    return _Attend.apply(k, v, order.int().contiguous(), end, chunk, causal)


def buckets(k: Tensor, directions: Tensor) -> Tensor:
    """argmax([k R; -k R]) for k [B, H, S, D] and directions [H, rounds, D, n]: [B, H, rounds, S], int32."""
    from regard.kernels import chunks_triton

    return chunks_triton.buckets(k if k.stride(-1) == 1 else k.contiguous(), directions)


class _Attend(Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, order: Tensor, end: Tensor | None, chunk: int, causal: bool) -> Tensor:
        from regard.kernels import chunks_triton

        o, lse = chunks_triton.forward(k, v, order, end, chunk, causal)
        ctx.chunk, ctx.causal = chunk, causal
        ctx.save_for_backward(k, v, order, end, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from regard.kernels import chunks_triton

        refuse_second_derivative()
        k, v, order, end, o, lse = ctx.saved_tensors
        dk, dv = chunks_triton.backward(grad, k, v, order, end, o, lse, ctx.chunk, ctx.causal)
        return dk, dv, None, None, None, None
