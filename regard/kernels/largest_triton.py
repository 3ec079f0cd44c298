"""Where the largest numbers of a row stand, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def largest(x: Tensor, count: int, each: Tensor | None) -> Tensor:
    """As `largest.largest`; of equal numbers the first."""
    x = x.contiguous()
    B, _, _, S = x.shape
    out = torch.empty(*x.shape[:3], count, dtype=torch.long, device=x.device)
    rows = out[..., 0].numel()
    if rows and count:
        block = triton.next_power_of_2(S)
        counts = out if each is None else each
        # 32 numbers a thread: more would spill, and fewer leave each thread with little but sums over all of them
        warps = min(32, max(1, block // 1024))
        _largest[(rows,)](
            x, out, counts, S, count, rows // B, each is not None, block, triton.next_power_of_2(count), num_warps=warps
        )
    return out


@triton.jit
def _largest(
    x,
    out,
    counts,
    S,
    count,
    rows,
    ragged: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    number = tl.load(x + row * S + at, mask=at < S, other=-float("inf"))
    n = count
    if ragged:
        n = tl.minimum(tl.load(counts + row // rows).to(tl.int32), count)
    # zero and minus zero are the same; as whole numbers, negative ones are in reverse
    bits = (number + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    least = tl.where(tl.sum((key >= 0).to(tl.int32)) >= n, 0, -2147483648)
    for step in range(31):
        more = least + (1 << (30 - step))
        least = tl.where(tl.sum(((key >= more) & (at < S)).to(tl.int32)) >= n, more, least)
    above = (key > least) & (at < S)
    equal = (key == least) & (at < S)
    room = n - tl.sum(above.to(tl.int32))
    picked = above | (equal & (tl.cumsum(equal.to(tl.int32)) <= room))
    place = tl.cumsum(picked.to(tl.int32)) - 1
    tl.store(out + row * count + place, at.to(tl.int64), mask=picked)
    behind = tl.arange(0, COUNT)
    tl.store(out + row * count + behind, tl.zeros([COUNT], tl.int64) + S, mask=(behind >= n) & (behind < count))
