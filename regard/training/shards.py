"""Tensors in shards, as torch.distributed.checkpoint writes them into safetensors files: one file for each process.

A tensor is called STEM/NAME, and the header of each file says where its part of a tensor begins. Whoever reads them
needs no processes, and no PyTorch but for the tensors.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read or used; the message names the file and what is wrong."""


def read_shards(
    files: Iterable[Path], aliases: Any, device: torch.device | str, only: Collection[str] | None
) -> dict[str, dict[str, Tensor]]:
    """The whole tensors by stem and name. `aliases` names those that are the same tensor as another."""
    parts: dict[str, list[tuple[list[int], Tensor]]] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                places = json.loads((file.metadata() or {})["DCP_SHARDING_INFO"])
                for name in file.keys():  # noqa: SIM118
                    if only is None or name.partition("/")[0] in only:
                        part = file.get_tensor(name)
                        parts.setdefault(name, []).append((_checked(places[name]["saved_offsets"], part), part))
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path}: is not a readable file of shards: {error}") from error
    whole = {name: _joined(name, shards).to(device) for name, shards in parts.items()}
    if not isinstance(aliases, Mapping):
        raise CheckpointError(f"aliases of shards must be a JSON object, got {type(aliases).__name__}")
    for alias, name in aliases.items():
        if name in whole:
            whole[alias] = whole[name]
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in whole.items():
        stem, _, rest = name.partition("/")
        tensors.setdefault(stem, {})[rest] = tensor
    return tensors


def _checked(offsets: Any, part: Tensor) -> list[int]:
    right = isinstance(offsets, list) and all(type(offset) is int and offset >= 0 for offset in offsets)
    if not right or len(offsets) != part.dim():
        raise ValueError(f"a shard of {list(part.shape)} cannot begin at {offsets}")
    return offsets


def _joined(name: str, shards: list[tuple[list[int], Tensor]]) -> Tensor:
    dimensions = range(shards[0][1].dim())
    if any(part.dim() != len(dimensions) or part.dtype != shards[0][1].dtype for _, part in shards):
        raise CheckpointError(f"shards of {name!r} do not fit together")
    size = [max(offsets[d] + part.shape[d] for offsets, part in shards) for d in dimensions]
    if sum(part.numel() for _, part in shards) != torch.Size(size).numel():
        raise CheckpointError(f"shards of {name!r} are missing, or there are too many of them")
    whole = torch.empty(size, dtype=shards[0][1].dtype)
    for offsets, part in shards:
        whole[tuple(slice(offset, offset + n) for offset, n in zip(offsets, part.shape, strict=True))] = part
    return whole
