"""Queries sorted into tiles of one group each, so that a tile can read what belongs to its group in one product."""

import torch
from torch import Tensor

from regard.kernels.compiling import as_symbol, count_blocks


def tiles(group: Tensor, groups: int, size: int) -> tuple[Tensor, Tensor]:
    """For the group of each query [B, H, T]: its slot among tiles of `size` slots, [B, H, T], and the group of each
    tile, [B, H, n], of which the last ones may be empty."""
    B, H, T = group.shape
    count = group.new_zeros(B, H, groups).scatter_add(2, group, torch.ones_like(group))
    used = -(-count // size)
    before, last = count.cumsum(2) - count, used.cumsum(2)
    steps = torch.arange(T, device=group.device).expand_as(group)
    place = torch.empty_like(group).scatter_(2, group.argsort(dim=2, stable=True), steps)
    slot = (size * (last - used) - before).gather(2, group) + place
    n = torch.arange(as_symbol(count_blocks(T, size) + groups), device=group.device).expand(B, H, -1)
    return slot, torch.searchsorted(last, n.contiguous(), right=True).clamp(max=groups - 1)
