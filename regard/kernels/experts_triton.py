"""The functions of moves.py and router.py in Triton: one pass over memory each, on a GPU.

What PyTorch does in three to six passes (a gather, a mask, a cast, a product with gates, a sum) is bound by memory, and
a layer of experts is little else beside its products. Sums are made in float32.
"""

from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from regard.kernels.experts_triton_kernels import (
    add_kernel,
    clear_empty_kernel,
    copy_kernel,
    logits_kernel,
    noisy_top_kernel,
    of_noisy_logits_kernel,
    of_tokens_kernel,
    products_kernel,
    take_kernel,
)

if TYPE_CHECKING:
    from regard.kernels.moves import Places

LARGEST = 2048  # columns of a row that a program holds at once
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = 128  # rows of a router's product, and columns of its gradient, that a program works on
MOST = TILE * 65535  # rows that a grid has room for


def taken(x: Tensor, places: "Places", factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    row, used = places.row, places.used
    factor = factor if factor is None or used is None else torch.where(used, factor, 0)
    x, y = x.contiguous(), x.new_empty(len(row), x.shape[1], dtype=dtype)
    if y.numel():
        flags = (used is not None, factor is not None)
        with torch.cuda.device_of(x):
            take_kernel[(len(row),)](x, row, _bytes(used), _dense(factor), y, x.shape[1], _block(x), *flags)
    return y


def added(y: Tensor, places: "Places", factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    _, _, at, kept, starts = places
    copies, rows = at.shape if starts is None else (0, len(starts) - 1)
    y, out = y.contiguous(), y.new_empty(rows, y.shape[1], dtype=dtype)
    if out.numel():
        flags = (kept is not None, factor is not None)
        with torch.cuda.device_of(y):
            add_kernel[(rows,)](
                y, _dense(at), _bytes(kept), starts, _dense(factor), out, rows, y.shape[1], _block(y), copies, *flags
            )
    return out


def products(y: Tensor, places: "Places", x: Tensor, dtype: torch.dtype) -> Tensor:
    row, used = places.row, places.used
    x, out = x.contiguous(), x.new_empty(len(row), dtype=dtype)
    if out.numel():
        with torch.cuda.device_of(x):
            products_kernel[(len(row),)](
                y.contiguous(), row, _bytes(used), x, out, x.shape[1], _block(x), used is not None
            )
    return out


def clear_empty(weights: Tensor, ends: Tensor) -> None:
    """Zeros, in place, in those of weights [G, I, O] whose group has no rows; the others are not touched."""
    size, block = weights[0].numel(), 1024
    parts = min(64, triton.cdiv(size, block))
    with torch.cuda.device_of(weights):
        clear_empty_kernel[(len(ends), parts)](weights, ends, size, block, parts)


def copied(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In another dtype."""
    x, y, block = x.contiguous(), torch.empty(x.shape, dtype=dtype, device=x.device), 4096
    if x.numel():
        with torch.cuda.device_of(x):
            copy_kernel[(triton.cdiv(x.numel(), block),)](x, y, x.numel(), block)
    return y


def logits(x: Tensor, weight: Tensor, jitter: float, seed: Tensor | None, narrow: torch.dtype) -> tuple[Tensor, Tensor]:
    """noise * x [N, E] times weight [M, E] transposed, in float32, and noise * x in a narrower dtype."""
    (rows, width), outputs = x.shape, len(weight)
    out, copy = x.new_empty(rows, outputs, dtype=torch.float32), x.new_empty(x.shape, dtype=narrow)
    if out.numel():
        columns = min(TILE, max(16, triton.next_power_of_2(outputs)))
        with torch.cuda.device_of(x):
            logits_kernel[(triton.cdiv(rows, TILE), triton.cdiv(outputs, columns))](
                x,
                weight,
                seed,
                out,
                copy,
                rows,
                jitter,
                width,
                outputs,
                TILE,
                columns,
                32,
                seed is not None,
                num_warps=8,
            )
    return out, copy


def of_tokens(grad: Tensor, weight: Tensor, base: Tensor, jitter: float, seed: Tensor | None) -> Tensor:
    """base [N, E] + noise * (grad [N, M] times weight [M, E]): the gradient of the tokens behind a router."""
    (rows, outputs), width, weight = grad.shape, weight.shape[1], weight.T.contiguous()
    out = torch.empty_like(base)
    if out.numel():
        deep = min(64, max(16, triton.next_power_of_2(outputs)))
        with torch.cuda.device_of(base):
            of_tokens_kernel[(triton.cdiv(width, TILE), triton.cdiv(rows, TILE))](
                grad,
                weight,
                base,
                seed,
                out,
                rows,
                jitter,
                width,
                outputs,
                TILE,
                TILE,
                deep,
                seed is not None,
                num_warps=8,
            )
    return out


def noisy_top(
    logits: Tensor, noise: Tensor, real: Tensor | None, k: int, floor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See regard/layers/feedforward/moe.py."""
    (rows, experts), sizes = noise.shape, _noisy_sizes(noise)
    top, expert = noise.new_empty(rows, k), noise.new_empty(rows, k, dtype=torch.long)
    parts = noise.new_zeros(max(1, triton.cdiv(rows, sizes[1])), experts)
    if rows:
        with torch.cuda.device_of(noise):
            noisy_top_kernel[(len(parts),)](
                logits, noise, _bytes(real), top, expert, parts, rows, floor, experts, *sizes, k, real is not None
            )
    return top, expert, parts.sum(0)


def of_noisy_logits(
    logits: Tensor,
    noise: Tensor,
    real: Tensor | None,
    top: Tensor,
    expert: Tensor,
    of_top: Tensor,
    of_chosen: Tensor,
    floor: float,
) -> Tensor:
    """The gradient of the logits behind `noisy_top`."""
    (rows, experts), sizes = noise.shape, _noisy_sizes(noise)
    out, given = torch.empty_like(logits), (top, expert, of_top.contiguous(), of_chosen.contiguous())
    if rows:
        with torch.cuda.device_of(noise):
            of_noisy_logits_kernel[(triton.cdiv(rows, sizes[1]),)](
                logits, noise, _bytes(real), *given, out, rows, floor, experts, *sizes, top.shape[1], real is not None
            )
    return out


def _noisy_sizes(noise: Tensor) -> tuple[int, int]:
    """Experts, as a power of two, and rows that a program works on."""
    block = triton.next_power_of_2(noise.shape[1])
    return block, max(1, 4096 // block)


def _bytes(flags: Tensor | None) -> Tensor | None:
    return None if flags is None else flags.contiguous().view(torch.uint8)


def _dense(numbers: Tensor | None) -> Tensor | None:
    """Kernels step over them one by one."""
    return None if numbers is None else numbers.contiguous()


def _block(x: Tensor) -> int:
    return min(LARGEST, triton.next_power_of_2(x.shape[1]))
