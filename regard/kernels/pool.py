"""Slots around every x-th token: averages of the kernel of tokens that has it in its middle (Poolingformer).

Weights are equal, or, by a `weight` [n, D], a softmax over the places of the kernel of what the token in the middle
says of them. As a sum over windows PyTorch's operators write each token several times to memory. O(T D n / x).

Letters: B batch, G heads, T tokens, D head width, n tokens of a kernel, x from one slot to the next.
"""

from typing import Any

import torch
from torch import Tensor

from regard.kernels.autograd import Function, refuse_second_derivative
from regard.kernels.choose import use_triton

WIDEST = 256
LONGEST = 16  # kernels for which a loop is laid out


def takes(x: Tensor, weight: Tensor | None, kernel: int) -> bool:
    """Whether `pool` runs on these: Triton alone has it."""
    refusal = None
    if x.shape[-1] > WIDEST:
        refusal = f"heads are wider than {WIDEST}"
    elif kernel > LONGEST:
        refusal = f"it pools more than {LONGEST} tokens"
    heads = x.shape[0] * x.shape[1]
    return not torch.compiler.is_compiling() and use_triton("pool", x, weight, refusal=refusal, second_axis=heads)


def pool(x: Tensor, weight: Tensor | None, *, kernel: int, stride: int, end: Tensor | None = None) -> Tensor:
    """[B, G, T, D] -> [B, G, ceil(T / stride), D]; tokens from `end` [B] on do not exist, and a slot without any gives
    zeros. A kernel begins kernel // 2 tokens before its middle."""
    slots = -(-x.shape[2] // stride)
    return _Pool.apply(x if x.stride(-1) == 1 else x.contiguous(), weight, end, kernel, stride, slots)


class _Pool(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, end: Tensor | None, kernel: int, stride: int, slots: int
    ) -> Tensor:
        from regard.kernels import pool_triton

        weight = None if weight is None else weight.contiguous()
        y, lse = pool_triton.forward(x, weight, end, kernel, stride, slots)
        ctx.sizes = kernel, stride
        ctx.save_for_backward(x, weight, end, y, lse)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from regard.kernels import pool_triton

        refuse_second_derivative()
        of_x, of_weight = pool_triton.backward(grad, *ctx.saved_tensors, *ctx.sizes)
        return of_x, of_weight, None, None, None, None
