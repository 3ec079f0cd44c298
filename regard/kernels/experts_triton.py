"""The functions of moves.py and router.py in Triton: one pass over memory each, on a GPU.

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
TILE = 128  # rows of a router's product, and columns of its gradient, that a program works on
MOST = TILE * 65535  # rows that a grid has room for


def taken(x: Tensor, places: tuple, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    row, used = places.row, places.used
    factor = factor if factor is None or used is None else torch.where(used, factor, 0)
    x, y = x.contiguous(), x.new_empty(len(row), x.shape[1], dtype=dtype)
    if y.numel():
        flags = (used is not None, factor is not None)
        with torch.cuda.device_of(x):
            _taken[(len(row),)](x, row, _bytes(used), _dense(factor), y, x.shape[1], _block(x), *flags)
    return y


def added(y: Tensor, places: tuple, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    _, _, at, kept, starts = places
    copies, rows = (0, len(starts) - 1) if at.dim() == 1 else at.shape
    y, out = y.contiguous(), y.new_empty(rows, y.shape[1], dtype=dtype)
    if out.numel():
        flags = (kept is not None, factor is not None)
        with torch.cuda.device_of(y):
            _added[(rows,)](
                y, _dense(at), _bytes(kept), starts, _dense(factor), out, rows, y.shape[1], _block(y), copies, *flags
            )
    return out


def products(y: Tensor, places: tuple, x: Tensor, dtype: torch.dtype) -> Tensor:
    row, used = places.row, places.used
    x, out = x.contiguous(), x.new_empty(len(row), dtype=dtype)
    if out.numel():
        with torch.cuda.device_of(x):
            _products[(len(row),)](y.contiguous(), row, _bytes(used), x, out, x.shape[1], _block(x), used is not None)
    return out


def clear_empty(weights: Tensor, ends: Tensor) -> None:
    """Zeros, in place, in those of weights [G, I, O] whose group has no rows; the others are not touched."""
    size, block = weights[0].numel(), 1024
    parts = min(64, triton.cdiv(size, block))
    with torch.cuda.device_of(weights):
        _clear_empty[(len(ends), parts)](weights, ends, size, block, parts)


def copied(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In another dtype."""
    x, y, block = x.contiguous(), torch.empty(x.shape, dtype=dtype, device=x.device), 4096
    if x.numel():
        with torch.cuda.device_of(x):
            _copied[(triton.cdiv(x.numel(), block),)](x, y, x.numel(), block)
    return y


def logits(x: Tensor, weight: Tensor, jitter: float, seed: Tensor | None, narrow: torch.dtype) -> tuple[Tensor, Tensor]:
    """noise * x [N, E] times weight [M, E] transposed, in float32, and noise * x in a narrower dtype."""
    (rows, width), outputs = x.shape, len(weight)
    out, copy = x.new_empty(rows, outputs, dtype=torch.float32), x.new_empty(x.shape, dtype=narrow)
    if out.numel():
        columns = min(TILE, max(16, triton.next_power_of_2(outputs)))
        with torch.cuda.device_of(x):
            _logits[(triton.cdiv(rows, TILE), triton.cdiv(outputs, columns))](
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
            _of_tokens[(triton.cdiv(width, TILE), triton.cdiv(rows, TILE))](
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
            _noisy_top[(len(parts),)](
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
            _of_noisy_logits[(triton.cdiv(rows, sizes[1]),)](
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
    starts,
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
        if COPIES == 0:
            for place in range(tl.load(starts + row), tl.load(starts + row + 1)):
                slot = tl.load(at + place).to(tl.int64)
                value = tl.load(y + slot * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
                if WEIGHTED:
                    value *= tl.load(factor + slot).to(tl.float32)
                total += value
        for copy in tl.static_range(COPIES):
            pair = copy * rows + row
            end = WIDTH
            if MASKED:
                end = WIDTH * tl.load(kept + pair).to(tl.int32)
            slot = tl.load(at + pair).to(tl.int64)
            value = tl.load(y + slot * WIDTH + column, mask=column < end, other=0.0).to(tl.float32)
            if WEIGHTED:
                value *= tl.load(factor + slot, mask=end > 0, other=0.0).to(tl.float32)
            total += value
        tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _products(y, at, used, x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    source = tl.load(at + slot).to(tl.int64)
    end = WIDTH
    if MASKED:
        end = WIDTH * tl.load(used + slot).to(tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        a = tl.load(y + slot * WIDTH + column, mask=column < end, other=0.0).to(tl.float32)
        b = tl.load(x + source * WIDTH + column, mask=column < end, other=0.0).to(tl.float32)
        total += a * b
    tl.store(out + slot, tl.sum(total).to(out.dtype.element_ty))


@triton.jit
def _clear_empty(weights, ends, SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = SIZE * (start == tl.load(ends + group)).to(tl.int32)
    for first in range(0, SIZE, BLOCK * PARTS):
        at = first + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        zeros = tl.zeros([BLOCK], weights.dtype.element_ty)
        tl.store(weights + group * SIZE + at, zeros, mask=at < end)


@triton.jit
def _copied(x, y, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < size).to(y.dtype.element_ty), mask=at < size)


@triton.jit
def _noise(seed, index, jitter):
    """1 - jitter to 1 + jitter: a hash of seed and index, the same forward and backward."""
    mixed = (index.to(tl.uint32) + 0x9E3779B9) ^ tl.load(seed).to(tl.uint32)
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    mixed = mixed ^ (mixed >> 16)
    return 1.0 + jitter * ((mixed >> 8).to(tl.float32) * (2.0 / (1 << 24)) - 1.0)


@triton.jit(do_not_specialize=["rows", "jitter"])
def _logits(
    x,
    weight,
    seed,
    out,
    copy,
    rows,
    jitter,
    WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEEP: tl.constexpr,
    NOISY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    output = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, WIDTH, DEEP):
        column = first + tl.arange(0, DEEP)
        at, inside = row * WIDTH + column[None, :], (row < rows) & (column[None, :] < WIDTH)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if NOISY:
            value *= _noise(seed, at, jitter)
        if tl.program_id(1) == 0:
            tl.store(copy + at, value.to(copy.dtype.element_ty), mask=inside)
        inside = (output < OUTPUTS) & (column[:, None] < WIDTH)
        parts = tl.load(weight + output * WIDTH + column[:, None], mask=inside, other=0.0).to(tl.float32)
        # three products of tensor cores are as exact as one in float32
        total = tl.dot(value, parts, total, input_precision="tf32x3")
    tl.store(out + row * OUTPUTS + output, total, mask=(row < rows) & (output < OUTPUTS))


@triton.jit(do_not_specialize=["rows", "jitter"])
def _of_tokens(
    grad,
    weight,
    base,
    seed,
    out,
    rows,
    jitter,
    WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEEP: tl.constexpr,
    NOISY: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, OUTPUTS, DEEP):
        output = first + tl.arange(0, DEEP)
        inside = (row < rows) & (output[None, :] < OUTPUTS)
        of_logits = tl.load(grad + row * OUTPUTS + output[None, :], mask=inside, other=0.0).to(tl.float32)
        inside = (output[:, None] < OUTPUTS) & (column < WIDTH)
        parts = tl.load(weight + column * OUTPUTS + output[:, None], mask=inside, other=0.0).to(tl.float32)
        total = tl.dot(of_logits, parts, total, input_precision="tf32")
    at, inside = row * WIDTH + column, (row < rows) & (column < WIDTH)
    if NOISY:
        total *= _noise(seed, at, jitter)
    total += tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _noisy_parts(logits, noise, row, rows, floor, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Of each row and expert: whether there is such a one, its clean logit, what the width of the noise is made from,
    that width, the noise and the noisy logit."""
    expert = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (expert < EXPERTS)
    at = row * (2 * EXPERTS) + expert
    clean = tl.load(logits + at, mask=inside, other=0.0)
    spread = tl.load(logits + at + EXPERTS, mask=inside, other=0.0)
    drawn = tl.load(noise + row * EXPERTS + expert, mask=inside, other=0.0)
    width = tl.maximum(spread, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(spread))) + floor
    return inside, clean, spread, width, drawn, tl.where(expert < EXPERTS, clean + drawn * width, float("-inf"))


@triton.jit(do_not_specialize=["rows", "floor"])
def _noisy_top(
    logits,
    noise,
    real,
    top,
    expert,
    parts,
    rows,
    floor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    MASKED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    one = tl.arange(0, BLOCK)[None, :]
    inside, clean, _, width, _, noisy = _noisy_parts(logits, noise, row, rows, floor, EXPERTS, BLOCK)
    left, last, bar = noisy, tl.zeros([ROWS, 1], tl.float32), tl.zeros([ROWS, 1], tl.float32)
    for turn in tl.static_range(K):
        last, bar = bar, tl.max(left, 1)[:, None]
        # not beyond the last one, even where all are nan
        found = tl.minimum(tl.argmax(left, 1), EXPERTS - 1)[:, None]
        tl.store(top + row * K + turn, bar, mask=row < rows)
        tl.store(expert + row * K + turn, found.to(tl.int64), mask=row < rows)
        left = tl.where(one == found, float("-inf"), left)
    chance = 0.5 + 0.5 * tl.erf((clean - tl.where(noisy > bar, bar, last)) / width * 0.7071067811865476)
    if MASKED:
        inside = inside & (tl.load(real + row, mask=row < rows, other=0) > 0)
    column = tl.arange(0, BLOCK)
    sums = tl.sum(tl.where(inside, chance, 0.0), 0)
    tl.store(parts + tl.program_id(0).to(tl.int64) * EXPERTS + column, sums, mask=column < EXPERTS)


@triton.jit(do_not_specialize=["rows", "floor"])
def _of_noisy_logits(
    logits,
    noise,
    real,
    top,
    expert,
    of_top,
    of_chosen,
    out,
    rows,
    floor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    MASKED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    one = tl.arange(0, BLOCK)[None, :]
    inside, clean, spread, width, drawn, noisy = _noisy_parts(logits, noise, row, rows, floor, EXPERTS, BLOCK)
    last = tl.load(top + row * K + K - 2, mask=row < rows, other=0.0)
    bar = tl.load(top + row * K + K - 1, mask=row < rows, other=0.0)
    z = (clean - tl.where(noisy > bar, bar, last)) / width
    counts = inside
    if MASKED:
        counts = inside & (tl.load(real + row, mask=row < rows, other=0) > 0)
    slope = tl.load(of_chosen + one, mask=one < EXPERTS, other=0.0) * 0.3989422804014327 * tl.exp(-0.5 * z * z) / width
    slope = tl.where(counts, slope, 0.0)
    of_noisy = tl.zeros([ROWS, BLOCK], tl.float32)
    for turn in tl.static_range(K):
        grad = tl.load(of_top + row * K + turn, mask=row < rows, other=0.0)
        # the bars of an expert are those of others: the k-th of them, or the next
        if turn == K - 2:
            grad -= tl.sum(tl.where(noisy > bar, 0.0, slope), 1)[:, None]
        if turn == K - 1:
            grad -= tl.sum(tl.where(noisy > bar, slope, 0.0), 1)[:, None]
        of_noisy += tl.where(one == tl.load(expert + row * K + turn, mask=row < rows, other=-1), grad, 0.0)
    of_width = of_noisy * drawn - slope * z
    at = row * (2 * EXPERTS) + one
    tl.store(out + at, slope + of_noisy, mask=inside)
    tl.store(out + at + EXPERTS, of_width / (1.0 + tl.exp(-spread)), mask=inside)
