"""k-means of codes of -1 and 1, in Triton: one pass of assignments and votes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROUNDS = 16  # times that a program does so before it adds its votes to those of others


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
    grid = (triton.cdiv(T, tokens * rounds), B * H)
    _assign[grid](
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
        lengths is not None,
        last,
        "ieee" if codes.dtype == torch.float32 else "tf32",
        max(16, triton.next_power_of_2(C)),
        max(16, triton.next_power_of_2(bits)),
        tokens,
        rounds,
    )
    return group, votes, members


@triton.jit
def _assign(
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
    ragged: tl.constexpr,
    last: tl.constexpr,
    precision: tl.constexpr,
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
    if ragged:
        n = tl.load(lengths + head // H).to(tl.int32)
    used = (cluster < C) & ((cluster < n) | (not ragged))
    total = tl.zeros([CLUSTERS, BITS], tl.float32)
    count = tl.zeros([CLUSTERS], tl.float32)
    for step in range(ROUNDS):
        at = (tl.program_id(0) * ROUNDS + step) * TOKENS + tl.arange(0, TOKENS)
        code = tl.load(
            codes + (head * T + at[:, None]) * bits + bit[None, :],
            mask=(at < T)[:, None] & (bit < bits)[None, :],
            other=0.0,
        )
        near = tl.dot(code, tl.trans(means), input_precision=precision)
        # whole numbers, so that one with its cluster behind it is a whole number too: of several nearest, the first
        both = near.to(tl.int32) * CLUSTERS + (CLUSTERS - 1 - cluster)[None, :]
        both = tl.max(tl.where(used[None, :], both, -2147483648), 1)
        # minus infinity, where no cluster is used: a row without tokens
        own = tl.where(both == -2147483648, 0, CLUSTERS - 1 - (both & (CLUSTERS - 1)))
        tl.store(group + head * T + at, own.to(tl.int64), mask=at < T)
        if not last:
            hot = (cluster[:, None] == own[None, :]) & (at < n)[None, :]
            total += tl.dot(hot.to(code.dtype), code, input_precision=precision)
            count += tl.sum(hot.to(tl.float32), 1)
    if not last:
        tl.atomic_add(votes + head * C * bits + place, total, mask=inside)
        tl.atomic_add(members + head * C + cluster, count, mask=cluster < C)
