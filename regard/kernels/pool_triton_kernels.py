"""What pool_triton.py runs on the device."""

# Triton's compiler reads these bodies, in which types are not those of Python.
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import triton.language as tl

from regard.kernels.jit_triton import jit


@jit
def _row_end(end_at, b, T):
    """How many tokens of a row exist."""
    if end_at is not None:
        T = tl.minimum(T, tl.load(end_at + b).to(tl.int32))
    return T


@jit
def _load(x, at, stride, exist, D: tl.constexpr, BLOCK: tl.constexpr):
    """Vectors `at` of x as [., BLOCK] in float32; zeros where there is none."""
    column = tl.arange(0, BLOCK)[None, :]
    to = x + at.to(tl.int64)[:, None] * stride + column
    return tl.load(to, mask=exist[:, None] & (column < D), other=0.0).to(tl.float32)


@jit
def _logits(middle, weight, j: tl.constexpr, exist, D: tl.constexpr, BLOCK: tl.constexpr):
    """What the tokens in the middle say of those at place j of their kernels."""
    logits = tl.zeros([middle.shape[0]], tl.float32)
    if weight is not None:
        column = tl.arange(0, BLOCK)
        row = tl.load(weight + j * D + column, mask=column < D, other=0.0).to(tl.float32)
        logits = tl.sum(middle * row[None, :], 1)
    return tl.where(exist, logits, float("-inf"))


@jit(do_not_specialize=["T", "slots"])
def forward_kernel(
    x, weight, end_at, y, lse, x_b, x_h, x_t, y_b, y_h, y_t, H, T, slots,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, LEFT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of slots: the average of their tokens, by a softmax over the tokens that exist."""
    row = tl.program_id(1)
    b, h = (row // H).to(tl.int64), (row % H).to(tl.int64)
    end = _row_end(end_at, b, T)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = m * STRIDE
    x += b * x_b + h * x_h
    middle = tl.zeros([ROWS, BLOCK], tl.float32)
    if weight is not None:
        middle = _load(x, first, x_t, (m < slots) & (first < end), D, BLOCK)
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for j in tl.static_range(KERNEL):
        token = first + (j - LEFT)
        exist = (m < slots) & (token >= 0) & (token < end)
        logits = _logits(middle, weight, j, exist, D, BLOCK)
        new = tl.maximum(top, logits)
        base = tl.where(new == float("-inf"), 0.0, new)
        fade, share = tl.exp(top - base), tl.exp(logits - base)
        acc = acc * fade[:, None] + share[:, None] * _load(x, token, x_t, exist, D, BLOCK)
        total, top = total * fade + share, new
    sums = tl.where(total > 0.0, total, 1.0)
    # of a slot without tokens every share is 0
    tl.store(lse + row.to(tl.int64) * slots + m, tl.where(total > 0.0, top + tl.log(sums), 0.0), mask=m < slots)
    column = tl.arange(0, BLOCK)[None, :]
    to = y + b * y_b + h * y_h + m.to(tl.int64)[:, None] * y_t + column
    tl.store(to, (acc / sums[:, None]).to(y.dtype.element_ty), mask=(m < slots)[:, None] & (column < D))


@jit(do_not_specialize=["T", "slots"])
def slots_kernel(
    x, weight, end_at, y, lse, grad, shares, of_middle, of_weight,
    x_b, x_h, x_t, y_b, y_h, y_t, g_b, g_h, g_t, H, T, slots,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, LEFT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The shares of the tokens of a tile of slots, and what goes through them to the tokens in the middle and to this
    tile's part of the gradient of the weight."""
    row = tl.program_id(1)
    b, h = (row // H).to(tl.int64), (row % H).to(tl.int64)
    end = _row_end(end_at, b, T)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first, column = m * STRIDE, tl.arange(0, BLOCK)
    x += b * x_b + h * x_h
    at = row.to(tl.int64) * slots + m
    top = tl.load(lse + at, mask=m < slots, other=0.0)
    middle, acc = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    slope, delta = middle, top
    if weight is not None:
        middle = _load(x, first, x_t, (m < slots) & (first < end), D, BLOCK)
        slope = _load(grad + b * g_b + h * g_h, m, g_t, m < slots, D, BLOCK)
        delta = tl.sum(slope * _load(y + b * y_b + h * y_h, m, y_t, m < slots, D, BLOCK), 1)
    for j in tl.static_range(KERNEL):
        token = first + (j - LEFT)
        exist = (m < slots) & (token >= 0) & (token < end)
        share = tl.exp(_logits(middle, weight, j, exist, D, BLOCK) - top)
        tl.store(shares + at * KERNEL + j, share, mask=m < slots)
        if weight is not None:
            of_logits = share * (tl.sum(slope * _load(x, token, x_t, exist, D, BLOCK), 1) - delta)
            weights = tl.load(weight + j * D + column, mask=column < D, other=0.0).to(tl.float32)
            acc += of_logits[:, None] * weights[None, :]
            part = (row.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * KERNEL + j
            tl.store(of_weight + part * D + column, tl.sum(of_logits[:, None] * middle, 0), mask=column < D)
    if weight is not None:
        acc = tl.where((first < end)[:, None], acc, 0.0)
        tl.store(of_middle + at[:, None] * D + column[None, :], acc, mask=(m < slots)[:, None] & (column < D)[None, :])


@jit(do_not_specialize=["T", "slots"])
def tokens_kernel(
    grad, shares, of_middle, out, g_b, g_h, g_t, o_b, o_h, o_t, H, T, slots,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, LEFT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """What a tile of tokens gets from the slots that read them."""
    row = tl.program_id(1)
    b, h = (row // H).to(tl.int64), (row % H).to(tl.int64)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at, column = row.to(tl.int64) * slots, tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for j in tl.static_range(KERNEL):
        place = t + (LEFT - j)
        m = place // STRIDE
        reads = (place >= 0) & (place % STRIDE == 0) & (m < slots) & (t < T)
        share = tl.load(shares + (at + m) * KERNEL + j, mask=reads, other=0.0)
        acc += share[:, None] * _load(grad + b * g_b + h * g_h, m, g_t, reads, D, BLOCK)
    if of_middle is not None:
        m = t // STRIDE
        acc += _load(of_middle + at * D, m, D, (t % STRIDE == 0) & (m < slots) & (t < T), D, BLOCK)
    to = out + b * o_b + h * o_h + t.to(tl.int64)[:, None] * o_t + column
    tl.store(to, acc.to(out.dtype.element_ty), mask=(t < T)[:, None] & (column < D))
