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
        # 64 numbers a thread: more would spill, and with fewer the sums over all threads take the time
        warps = min(32, max(1, block // 2048))
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
    inside = at < S
    # two bits at a time: the three counts share one sum
    least = tl.where(tl.sum((key >= 0).to(tl.int32)) >= n, 0, -2147483648)
    if tl.sum((inside & (key >= least + (1 << 30))).to(tl.int32)) >= n:
        least += 1 << 30
    for step in range(15):
        unit = 1 << (28 - 2 * step)
        first = (inside & (key >= least + unit)).to(tl.int64)
        second = (inside & (key >= least + 2 * unit)).to(tl.int64)
        third = (inside & (key >= least + 3 * unit)).to(tl.int64)
        counts3 = tl.sum(first + (second << 20) + (third << 40))
        passed = (
            ((counts3 & 0xFFFFF) >= n).to(tl.int32)
            + (((counts3 >> 20) & 0xFFFFF) >= n).to(tl.int32)
            + ((counts3 >> 40) >= n).to(tl.int32)
        )
        least += passed * unit
    above = (key > least) & (at < S)
    equal = (key == least) & (at < S)
    room = n - tl.sum(above.to(tl.int32))
    picked = above | (equal & (tl.cumsum(equal.to(tl.int32)) <= room))
    place = tl.cumsum(picked.to(tl.int32)) - 1
    tl.store(out + row * count + place, at.to(tl.int64), mask=picked)
    behind = tl.arange(0, COUNT)
    tl.store(out + row * count + behind, tl.zeros([COUNT], tl.int64) + S, mask=(behind >= n) & (behind < count))
