"""The kernels of experts_triton.py. A row that is masked ends at column 0, so that a mask is one comparison."""

# Triton's compiler reads these bodies, in which types are not those of Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import triton.language as tl

from regard.kernels.jit_triton import jit


@jit
def take_kernel(
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


@jit(do_not_specialize=["rows"])
def add_kernel(
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


@jit
def products_kernel(y, at, used, x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
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


@jit
def clear_empty_kernel(weights, ends, SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = SIZE * (start == tl.load(ends + group)).to(tl.int32)
    for first in range(0, SIZE, BLOCK * PARTS):
        at = first + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        zeros = tl.zeros([BLOCK], weights.dtype.element_ty)
        tl.store(weights + group * SIZE + at, zeros, mask=at < end)


@jit
def copy_kernel(x, y, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < size).to(y.dtype.element_ty), mask=at < size)


@jit
def _noise(seed, index, jitter):
    """1 - jitter to 1 + jitter: a hash of seed and index, the same forward and backward."""
    mixed = (index.to(tl.uint32) + 0x9E3779B9) ^ tl.load(seed).to(tl.uint32)
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    mixed = mixed ^ (mixed >> 16)
    return 1.0 + jitter * ((mixed >> 8).to(tl.float32) * (2.0 / (1 << 24)) - 1.0)


@jit(do_not_specialize=["rows", "jitter"])
def logits_kernel(
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


@jit(do_not_specialize=["rows", "jitter"])
def of_tokens_kernel(
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


@jit
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


@jit(do_not_specialize=["rows", "floor"])
def noisy_top_kernel(
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


@jit(do_not_specialize=["rows", "floor"])
def of_noisy_logits_kernel(
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
