"""Recorded steps for small models on a GPU.

A small model keeps a GPU waiting: launching its hundreds of kernels takes the host far longer than running them. Here
the forward and backward pass of each shape of batch is recorded once as a CUDA graph and from then on replayed in one
call. The numbers are those of the same kernels; dropout follows the seed of the step as it does without recording.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOST = 128  # shapes that are recorded; others run as usual


def few_lengths(longest: int) -> int:
    """What the lengths of rows are rounded up to a multiple of, so that there are few: at most 64."""
    return max(8, 8 * -(-longest // 512))


class Recorded:
    """Calls `work(batch, weights) -> named tensors`, which adds gradients to parameters that all have one, by replay.

    A shape is run as usual when it is first seen, recorded when it is seen again. What cannot be recorded (work that
    waits for the GPU) is run as usual for good, and `said` gets the reason once. Everything that touches the gradients
    must run on `stream`.
    """

    def __init__(
        self, work: Callable[[Any, Tensor], dict[str, Tensor]], device: torch.device, said: Callable[[str], None]
    ):
        self.work, self.device, self.said = work, device, said
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, Any, Tensor, dict[str, Tensor]]] = {}
        self.seen: set[tuple] = set()
        self.works = True

    def __call__(self, batch: Any, weights: list[float]) -> dict[str, Tensor]:
        """`batch` is on the host, a NamedTuple of tensors or None."""
        shape = tuple(None if part is None else tuple(part.shape) for part in batch)
        values = torch.tensor(weights)
        known = self.graphs.get(shape)
        if known is None:
            batch, values = batch.to(self.device), values.to(self.device)
            if not self.works or shape not in self.seen or len(self.graphs) == MOST:
                self.seen.add(shape)
                return self.work(batch, values)
            known = self._record(batch, values)
            if known is None:
                return self.work(batch, values)
            self.graphs[shape] = known
        else:
            for kept, part in zip(known[1], batch, strict=True):
                if part is not None:
                    kept.copy_(part, non_blocking=True)
            known[2].copy_(values, non_blocking=True)
        known[0].replay()
        return {name: part.clone() for name, part in known[3].items()}

    def _record(self, batch: Any, values: Tensor) -> tuple | None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                result = self.work(batch, values)
        except RuntimeError as error:
            self.works = False
            torch.cuda.synchronize(self.device)
            self.said(f"steps are not recorded: {str(error).splitlines()[0]}")
            return None
        return graph, batch, values, result
