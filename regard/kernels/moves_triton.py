"""The functions of moves.py in Triton: one pass over memory each, on a GPU.

What PyTorch does in three to six passes (a gather, a mask, a cast, a product with gates, a sum) is bound by memory, and
a layer of experts is little else beside its products. Sums are made in float32. In the kernels a row that is masked
ends at column 0, so that a mask is one comparison.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 2048  # columns of a row that a program holds at once
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def taken(x: Tensor, at: Tensor, used: Tensor | None, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    x, y = x.contiguous(), x.new_empty(len(at), x.shape[1], dtype=dtype)
    if y.numel():
        with torch.cuda.device_of(x):
            _taken[(len(at),)](
                x, at, _bytes(used), _dense(factor), y, x.shape[1], _block(x), used is not None, factor is not None
            )
    return y


def added(y: Tensor, at: Tensor, kept: Tensor | None, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    k, rows = at.shape
    y, out = y.contiguous(), y.new_empty(rows, y.shape[1], dtype=dtype)
    if out.numel():
        flags = (kept is not None, factor is not None)
        with torch.cuda.device_of(y):
            _added[(rows,)](y, _dense(at), _bytes(kept), _dense(factor), out, rows, y.shape[1], _block(y), k, *flags)
    return out


def products(y: Tensor, at: Tensor, kept: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor:
    x, out = x.contiguous(), x.new_empty(at.shape, dtype=dtype)
    if at.numel():
        with torch.cuda.device_of(x):
            _products[(at.numel(),)](
                y.contiguous(), _dense(at), _bytes(kept), x, out, len(x), x.shape[1], _block(x), kept is not None
            )
    return out


def clear_empty(weights: Tensor, ends: Tensor) -> None:
    """Zeros, in place, in those of weights [G, I, O] whose group has no rows; the others are not touched."""
    size, block = weights[0].numel(), 1024
    parts = min(64, triton.cdiv(size, block))
    with torch.cuda.device_of(weights):
        _clear_empty[(len(ends), parts)](weights, ends, size, block, parts)


def _bytes(flags: Tensor | None) -> Tensor | None:
    return None if flags is None else flags.contiguous().view(torch.uint8)


def _dense(numbers: Tensor | None) -> Tensor | None:
    """Kernels step over them one by one."""
    return None if numbers is None else numbers.contiguous()


def _block(x: Tensor) -> int:
    return min(LARGEST, triton.next_power_of_2(x.shape[1]))


@triton.jit
def _taken(
    x, at, used, factor, y, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, WEIGHTED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(at + row).to(tl.int64)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        end = WIDTH
        if MASKED:
            end = WIDTH * tl.load(used + row).to(tl.int32)
        value = tl.load(x + source * WIDTH + column, mask=column < end, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(factor + row).to(tl.float32)
        tl.store(y + row * WIDTH + column, value.to(y.dtype.element_ty), mask=column < WIDTH)


@triton.jit(do_not_specialize=["rows"])
def _added(
    y,
    at,
    kept,
    factor,
    out,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    COPIES: tl.constexpr,
    MASKED: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for copy in tl.static_range(COPIES):
            pair = copy * rows + row
            end = WIDTH
            if MASKED:
                end = WIDTH * tl.load(kept + pair).to(tl.int32)
            source = tl.load(at + pair).to(tl.int64)
            value = tl.load(y + source * WIDTH + column, mask=column < end, other=0.0).to(tl.float32)
            if WEIGHTED:
                value *= tl.load(factor + pair).to(tl.float32)
            total += value
        tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=column < WIDTH)


@triton.jit(do_not_specialize=["rows"])
def _products(y, at, kept, x, out, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    source = tl.load(at + pair).to(tl.int64)
    end = WIDTH
    if MASKED:
        end = WIDTH * tl.load(kept + pair).to(tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        a = tl.load(y + source * WIDTH + column, mask=column < end, other=0.0).to(tl.float32)
        b = tl.load(x + (pair % rows) * WIDTH + column, mask=column < end, other=0.0).to(tl.float32)
        total += a * b
    tl.store(out + pair, tl.sum(total).to(out.dtype.element_ty))


@triton.jit
def _clear_empty(weights, ends, SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = SIZE * (start == tl.load(ends + group)).to(tl.int32)
    for first in range(0, SIZE, BLOCK * PARTS):
        at = first + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        zeros = tl.zeros([BLOCK], weights.dtype.element_ty)
        tl.store(weights + group * SIZE + at, zeros, mask=at < end)
