"""The kernels of picks_triton.py."""

# Triton's compiler reads these bodies, in which types are not those of Python.
# pyright: reportArgumentType=false, reportOperatorIssue=false

import triton.language as tl

from regard.kernels.jit_triton import jit


@jit
def largest_kernel(x, out, counts, S, count, rows, RAGGED: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    number = tl.load(x + row * S + at, mask=at < S, other=0.0)
    n = count
    if RAGGED:
        n = tl.minimum(tl.load(counts + row // rows).to(tl.int32), count)
    # zero and minus zero are the same; as whole numbers, negative ones are in reverse
    bits = (number + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(at < S, key, -2147483648)
    # the least that is picked, one bit after another
    least = tl.where(tl.sum((key >= 0).to(tl.int32)) >= n, 0, -2147483648)
    for step in range(31):
        more = least + (1 << (30 - step))
        least = tl.where(tl.sum((key >= more).to(tl.int32)) >= n, more, least)
    above = (key > least) & (at < S)
    equal = (key == least) & (at < S)
    room = n - tl.sum(above.to(tl.int32))
    picked = above | (equal & (tl.cumsum(equal.to(tl.int32)) <= room))
    place = tl.cumsum(picked.to(tl.int32)) - 1
    tl.store(out + row * count + place, at.to(tl.int64), mask=picked)
    behind = tl.arange(0, COUNT)
    tl.store(out + row * count + behind, tl.zeros([COUNT], tl.int64) + S, mask=(behind >= n) & (behind < count))


@jit
def assign_kernel(
    codes,
    centroids,
    lengths,
    group,
    votes,
    members,
    H,
    T,
    C,
    bits,
    RAGGED: tl.constexpr,
    LAST: tl.constexpr,
    PRECISION: tl.constexpr,
    CLUSTERS: tl.constexpr,
    BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    cluster, bit = tl.arange(0, CLUSTERS), tl.arange(0, BITS)
    inside = (cluster < C)[:, None] & (bit < bits)[None, :]
    place = cluster[:, None] * bits + bit[None, :]
    means = tl.load(centroids + head * C * bits + place, mask=inside, other=0.0)
    n = T
    used = cluster < C
    if RAGGED:
        n = tl.load(lengths + head // H).to(tl.int32)
        used = used & (cluster < n)
    total = tl.zeros([CLUSTERS, BITS], tl.float32)
    count = tl.zeros([CLUSTERS], tl.float32)
    for step in range(ROUNDS):
        at = (tl.program_id(0) * ROUNDS + step) * TOKENS + tl.arange(0, TOKENS)
        real = (at < T)[:, None] & (bit < bits)[None, :]
        code = tl.load(codes + (head * T + at[:, None]) * bits + bit[None, :], mask=real, other=0.0)
        near = tl.dot(code, tl.trans(means), input_precision=PRECISION)
        # whole numbers, so that one with its cluster behind it is a whole number too: of several nearest, the first
        both = near.to(tl.int32) * CLUSTERS + (CLUSTERS - 1 - cluster)[None, :]
        both = tl.max(tl.where(used[None, :], both, -2147483648), 1)
        # a row without tokens has no cluster
        own = tl.where(both == -2147483648, 0, CLUSTERS - 1 - (both & (CLUSTERS - 1)))
        tl.store(group + head * T + at, own.to(tl.int64), mask=at < T)
        if not LAST:
            hot = (cluster[:, None] == own[None, :]) & (at < n)[None, :]
            total += tl.dot(hot.to(code.dtype), code, input_precision=PRECISION)
            count += tl.sum(hot.to(tl.float32), 1)
    if not LAST:
        tl.atomic_add(votes + head * C * bits + place, total, mask=inside)
        tl.atomic_add(members + head * C + cluster, count, mask=cluster < C)


@jit
def take_kernel(x, at, y, H, n, D, x_b, x_h, x_n, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (row < n)[:, None] & (column < D)[None, :]
    token = tl.load(at + head * n + row, mask=row < n, other=0)
    first = x + (head // H) * x_b + (head % H) * x_h
    part = tl.load(first + token[:, None] * x_n + column[None, :], mask=inside, other=0.0)
    tl.store(y + (head * n + row)[:, None] * D + column[None, :], part, mask=inside)


@jit
def add_kernel(y, at, total, H, N, n, D, y_b, y_h, y_n, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (row < n)[:, None] & (column < D)[None, :]
    token = tl.load(at + head * n + row, mask=row < n, other=0)
    first = y + (head // H) * y_b + (head % H) * y_h
    part = tl.load(first + row[:, None] * y_n + column[None, :], mask=inside, other=0.0)
    place = total + (head * N + token)[:, None] * D + column[None, :]
    tl.atomic_add(place, part.to(tl.float32), mask=inside, sem="relaxed")
