"""Computing a part of a network a second time, in the backward pass, instead of keeping what it computed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class Rerun:
    """What a module reads beside its inputs: random numbers, and buffers it may write. Taken before the first
    computation, it makes the second see the same, and leaves both as they are then."""

    def __init__(self, layer: nn.Module, device: torch.device):
        self.devices = [device] if layer.training and device.type == "cuda" else []
        self.random = torch.get_rng_state() if layer.training else None
        self.device_random = [torch.cuda.get_rng_state(device) for device in self.devices]
        # a batch norm writes its statistics without a new version
        unseen = {id(part) for one in layer.modules() if isinstance(one, _BatchNorm) for part in one.buffers()}
        self.buffers = [
            (part, -1 if id(part) in unseen else part._version, part.clone())
            for part in (layer.buffers() if layer.training else ())
        ]

    @contextmanager
    def first(self) -> Iterator[None]:
        """The first computation, behind which only what it has written is kept."""
        yield
        self.buffers = [(part, version, old) for part, version, old in self.buffers if part._version != version]

    @contextmanager
    def again(self) -> Iterator[None]:
        """The second computation, which may be cut short by an exception."""
        with torch.random.fork_rng(self.devices, enabled=self.random is not None):
            if self.random is not None:
                torch.set_rng_state(self.random)
            for device, state in zip(self.devices, self.device_random, strict=True):
                torch.cuda.set_rng_state(state, device)
            now = [part.clone() for part, _, _ in self.buffers]
            self._write([old for _, _, old in self.buffers])
            try:
                yield
            finally:
                self._write(now)

    @torch.no_grad()
    def _write(self, values: list[torch.Tensor]) -> None:
        for (part, _, _), value in zip(self.buffers, values, strict=True):
            part.copy_(value)
