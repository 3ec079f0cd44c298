"""The logits of expert routers: x W^T in float32 (or better), also under autocast, for routing is sensitive to
rounding. Gradients are not, and have autocast's dtype: on a GPU products in float32 cost ten times as much.
"""

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.kernels import moves
from regard.kernels.autograd import Function


def product_dtype(x: Tensor) -> torch.dtype:
    """What matrix products of x are made in: autocast's choice for float32, where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x.dtype


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T."""
    wide, narrow = torch.promote_types(x.dtype, torch.float32), product_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        if _narrows(narrow):
            return _WideLinear.apply(x, weight, narrow)
        return F.linear(x.to(wide), weight.to(wide))


def logits(x: Tensor, weight: Tensor, jitter: float = 0.0) -> tuple[Tensor, Tensor]:
    """(x * noise) W^T of tokens x [N, E], with noise from 1 - jitter to 1 + jitter; and x, for all who read it behind
    the router: their gradient comes by here, and is added to the router's in one pass over memory where that can be."""
    narrow = product_dtype(x)
    if _narrows(narrow) and (kernel := moves.kernels(x, weight)) and len(x) <= kernel.MOST:
        seed = torch.randint(2**31, (1,), device=x.device) if jitter else None
        with torch.autocast(x.device.type, enabled=False):
            return _Router.apply(x, weight, kernel, jitter, seed, narrow)
    if not jitter:
        return wide_linear(x, weight), x
    noise = torch.empty_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    return wide_linear(x * noise.uniform_(1 - jitter, 1 + jitter), weight), x


def _narrows(dtype: torch.dtype) -> bool:
    return torch.finfo(dtype).bits < 32 and not torch.compiler.is_compiling()


class _WideLinear(Function):
    """x W^T in float32, gradients in `narrow`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, narrow: torch.dtype) -> Tensor:
        ctx.save_for_backward(x.to(narrow), weight.to(narrow))
        ctx.dtypes = x.dtype, weight.dtype
        return F.linear(x.float(), weight.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype)
        of_x, of_weight = grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)
        return of_x.to(ctx.dtypes[0]), of_weight.to(ctx.dtypes[1]), None


class _Router(Function):
    """The same with noise, in Triton; x is handed on."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        kernel: ModuleType,
        jitter: float,
        seed: Tensor | None,
        narrow: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        ctx.kernel = kernel
        found, copy = kernel.logits(x.contiguous(), weight.contiguous(), jitter, seed, narrow)
        ctx.save_for_backward(copy, weight.to(narrow), seed)
        ctx.jitter, ctx.dtype = jitter, weight.dtype
        return found, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, of_x: Tensor) -> tuple[Tensor | None, ...]:
        copy, weight, seed = ctx.saved_tensors
        grad, of_x = grad.to(copy.dtype).contiguous(), of_x.contiguous()
        of_weight = (grad.T @ copy).to(ctx.dtype)
        return ctx.kernel.of_tokens(grad, weight, of_x, ctx.jitter, seed), of_weight, None, None, None, None
