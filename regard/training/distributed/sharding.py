"""Weights, gradients and optimizer state in shards, one shard per process: PyTorch's FSDP2.

The layers of a Transformer are gathered one after the other when they are needed; what belongs to no layer, or to
several, is gathered for the whole step. Evaluations gather everything, so that they wait for no other process.

Checkpoints are written by torch.distributed.checkpoint: each process writes its shards as one safetensors file.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import Store
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from regard.training import checkpoint
from regard.training.config import TrainingConfig
from regard.training.distributed.batchnorm import synchronise_batch_norms
from regard.training.distributed.experts import check_experts, spread_experts, whole_experts
from regard.training.distributed.tensors import local
from regard.training.distributed.world import Compute, Computed, Processes
from regard.training.run import Run
from regard.training.task import TrainingTask


class Sharded(Processes):
    """Processes that each keep a shard of everything that is trained."""

    def __init__(self, config: TrainingConfig, kept: Store):
        super().__init__(config, kept)
        self.precision, self.spreads_experts = config.precision, config.spread_experts
        self.experts: list[Any] = []
        self.root: FSDPModule | None = None

    def check(self, task: TrainingTask) -> None:
        super().check(task)
        if self.spreads_experts:
            check_experts(task.model, self.size)

    def wrap(self, model: nn.Module, compute: Compute) -> Compute:
        synchronise_batch_norms(model)
        device = next(model.parameters()).device
        options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (self.size,))}
        if self.precision != "float32":
            # weights travel in half precision, gradients are added up in float32; autocast does the rest
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=getattr(torch, self.precision), reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        if self.spreads_experts:
            self.experts = spread_experts(model, options["mesh"])
            options["ignored_params"] = {weight for part in self.experts for weight in part.parameters()}
        computed = Computed(model, compute)
        for layer in _layers(model):
            fully_shard(layer, **options)
        self.root = fully_shard(computed, **options)
        return computed

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        # gradients are scattered after every batch: kept whole until the last, they would need what sharding saves
        return nullcontext()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        assert isinstance(self.root, nn.Module), "wrapped before the first evaluation"
        parts = [part for part in self.root.modules() if isinstance(part, FSDPModule)]
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            with whole_experts(self.experts):
                yield
        finally:
            for part in parts:
                part.reshard()
                part.set_reshard_after_forward(part is not self.root, recurse=False)

    def save(self, run: Run, name: str, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        every = {f"{stem}/{key}": part.detach() for stem, named in tensors.items() for key, part in named.items()}
        # the main process has the first rows of every tensor: others may have none to tell tied ones by
        aliases = self.broadcast(checkpoint.find_ties(dict(zip(every, local(every.values()), strict=True))))
        flat = {key: part for key, part in every.items() if key not in aliases}
        needed = sum(part.numel() * part.element_size() for part in flat.values())

        def save_shards(folder: Path) -> None:
            self.barrier()
            try:
                save(flat, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
            except CheckpointException as error:
                why = " ".join(str(error).split())[:300]
                raise checkpoint.CheckpointError(f"{folder}: shards could not be written: {why}") from error
            self.barrier()

        given = dict(state) | {"aliases": aliases}
        checkpoint.write_shards(run.checkpoints, name, save_shards, given, needed, self.is_main)
        self.barrier()

    def release(self) -> None:
        self.root = None

    def finish(self, run: Run) -> None:
        """Converts the checkpoints of a finished run to one file each, as one process writes them."""
        if self.is_main:
            for name in checkpoint.names(run.checkpoints):
                if checkpoint.is_sharded(run.checkpoints / name):
                    found = checkpoint.read(run.checkpoints / name)
                    checkpoint.write(run.checkpoints, name, found.tensors, found.state)
        self.barrier()


def _layers(model: nn.Module) -> list[nn.Module]:
    """The layers that can be gathered by themselves: those that are called as modules and share no weights."""
    if getattr(model.config, "reversible", False):
        # the backward pass calls their parts
        return []
    layers = [part for part in model.modules() if getattr(part, "compiles_alone", False)]
    uses = Counter(parameter for layer in layers for parameter in layer.parameters())
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for part in model.modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(part)

    def is_apart(layer: nn.Module) -> bool:
        inside = set(layer.modules())
        return all(uses[parameter] == 1 and owners[parameter] <= inside for parameter in layer.parameters())

    return [layer for layer in layers if is_apart(layer)]
