"""largest.py, votes.py and take.py in Triton: what centroids pick, who belongs to them, and vectors taken by index."""

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from regard.kernels.picks_triton_kernels import add_kernel, assign_kernel, largest_kernel, take_kernel

NUMBERS = 4096  # that a program moves
LONG, MEMBERS = 8192, 16  # from which length on a row is cut into groups, and how many numbers these have
ROUNDS = 16  # blocks of tokens that a program assigns before it adds their votes to those of others


def largest(x: Tensor, count: int, each: Tensor | None) -> Tensor:
    """As `largest.largest`; of equal numbers the first, in rows of less than LONG.

    Of a long row few numbers are looked at. The `count` largest are among the members of the `count` groups with the
    largest maxima: whoever is larger than the least that is picked is in a group with such a maximum, and there are
    fewer of these groups than numbers to pick."""
    S, groups = x.shape[-1], triton.cdiv(x.shape[-1], MEMBERS)
    if S < LONG or 4 * count > groups:
        return _largest(x, count, each)
    x = F.pad(x, (0, MEMBERS * groups - S), value=-torch.inf) if S % MEMBERS else x
    # a group is far apart, so that neighbours of a row are read together, and members that are taken stay in order
    members = x.unflatten(-1, (MEMBERS, groups))
    picked = _largest(members.amax(-2), count, None)
    taken = members.gather(-1, picked[..., None, :].expand(*members.shape[:-1], count)).flatten(-2)
    at = _largest(taken, count, each)
    # what stands for none is behind all members
    return (at // count * groups + picked.gather(-1, at % count)).clamp(max=S)


def _largest(x: Tensor, count: int, each: Tensor | None) -> Tensor:
    x = x.contiguous()
    B, _, _, S = x.shape
    out = torch.empty(*x.shape[:3], count, dtype=torch.long, device=x.device)
    rows = out[..., 0].numel()
    if rows and count:
        sizes = {"RAGGED": each is not None, "BLOCK": triton.next_power_of_2(S), "COUNT": triton.next_power_of_2(count)}
        # 64 numbers a thread: more would spill, and with fewer the sums over all threads take the time
        warps = min(32, max(1, sizes["BLOCK"] // 2048))
        with torch.cuda.device_of(x):
            largest_kernel[(rows,)](
                x, out, out if each is None else each, S, count, rows // B, **sizes, num_warps=warps
            )
    return out


def assign(codes: Tensor, centroids: Tensor, lengths: Tensor | None, last: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The cluster of each code [B, H, T], what the members of each cluster vote for [B, H, C, bits] and how many there
    are [B, H, C]; no votes in the `last` pass."""
    codes, centroids = codes.contiguous(), centroids.contiguous()
    (B, H, T, bits), C = codes.shape, centroids.shape[2]
    group = torch.empty(B, H, T, dtype=torch.long, device=codes.device)
    votes = torch.zeros(B, H, C, bits, device=codes.device)
    members = torch.zeros(B, H, C, device=codes.device)
    # as many tokens at a time as leave room on the chip for their distances to all clusters
    tokens = 128 if C <= 128 and codes.dtype != torch.float32 else 32
    rounds = min(ROUNDS, triton.cdiv(T, tokens))
    with torch.cuda.device_of(codes):
        assign_kernel[(triton.cdiv(T, tokens * rounds), B * H)](
            codes,
            centroids,
            group if lengths is None else lengths,
            group,
            votes,
            members,
            H,
            T,
            C,
            bits,
            RAGGED=lengths is not None,
            LAST=last,
            PRECISION="ieee" if codes.dtype == torch.float32 else "tf32",
            CLUSTERS=max(16, triton.next_power_of_2(C)),
            BITS=max(16, triton.next_power_of_2(bits)),
            TOKENS=tokens,
            ROUNDS=rounds,
        )
    return group, votes, members


def take(x: Tensor, at: Tensor) -> Tensor:
    """x [B, H, N, D] at [B, H, n]: [B, H, n, D]"""
    (B, H, _, D), n = x.shape, at.shape[2]
    x = x if x.stride(3) == 1 else x.contiguous()
    y = torch.empty(B, H, n, D, dtype=x.dtype, device=x.device)
    if y.numel():
        width, rows = _tile(D)
        grid = (triton.cdiv(n, rows), B * H)
        with torch.cuda.device_of(x):
            take_kernel[grid](x, at.contiguous(), y, H, n, D, *x.stride()[:3], WIDTH=width, ROWS=rows)
    return y


def add(y: Tensor, at: Tensor, N: int) -> Tensor:
    """The sums of y [B, H, n, D] by at [B, H, n]: [B, H, N, D]"""
    B, H, n, D = y.shape
    y = y if y.stride(3) == 1 else y.contiguous()
    total = torch.zeros(B, H, N, D, device=y.device)
    if y.numel():
        width, rows = _tile(D)
        grid = (triton.cdiv(n, rows), B * H)
        with torch.cuda.device_of(y):
            add_kernel[grid](y, at.contiguous(), total, H, N, n, D, *y.stride()[:3], WIDTH=width, ROWS=rows)
    return total.to(y.dtype)


def _tile(D: int) -> tuple[int, int]:
    width = triton.next_power_of_2(D)
    return width, max(1, NUMBERS // width)
