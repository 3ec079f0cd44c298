"""Tensors of which each process has a shard (PyTorch's DTensor), beside those that are whole.

PyTorch imports a lot with DTensor: here it is known by what it has, and imported only where one is made.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def full(x: Tensor) -> Tensor:
    """The whole of a tensor; all processes must ask for it."""
    shards: Any = x
    return shards.full_tensor() if is_shard(x) else x


def is_shard(x: Tensor) -> bool:
    """Whether other processes have more of a tensor."""
    return hasattr(x, "full_tensor")


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this process has of each tensor, in the same memory."""
    every: Any = tensors
    return [x._local_tensor if is_shard(x) else x for x in every]


def placed_like(x: Tensor, own: Tensor) -> Tensor:
    """A whole tensor where another one is: on its device, and in shards if that one is."""
    x = x.to(own.device)
    if not is_shard(own):
        return x
    from torch.distributed.tensor import distribute_tensor

    shards: Any = own
    return distribute_tensor(x, shards.device_mesh, shards.placements, src_data_rank=None)


def is_finite(x: Tensor) -> bool:
    """Whether every number of a tensor is finite; all processes must ask."""
    return not x.is_floating_point() or bool(full(torch.isfinite(x).all()))
