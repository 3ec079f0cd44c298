"""CUDA graphs for small models.

A small model leaves a GPU idle: launching its hundreds of kernels takes the host far longer than running them takes the
GPU. Here the forward and backward pass of each batch shape is captured once as a CUDA graph, and then replayed in one
call. The kernels, and so the numbers, are the same; dropout follows the seed of the step as it does without graphs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.core.capture import without_collection

MOST = 128  # shapes that are captured; others run without a graph


def few_lengths(longest: int) -> int:
    """The multiple to round lengths of rows up to, so that there are at most 64 different ones."""
    return max(8, 8 * -(-longest // 512))


class Captured(NamedTuple):
    """A graph, and the tensors that it reads and writes, which keep their addresses."""

    graph: torch.cuda.CUDAGraph
    batch: Any
    weights: Tensor
    results: dict[str, Tensor]


class CudaGraphs:
    """Calls `work(batch, weights) -> named tensors` by replay. `work` adds to the gradients of parameters, which must
    exist.

    A shape runs without a graph the first time, and is captured the second time; other threads may use the GPU
    meanwhile. If `work` cannot be captured, because it waits for the GPU, it runs without graphs from then on, and
    `notify` gets the reason once. All code that touches the gradients must run on `stream`.
    """

    def __init__(
        self, work: Callable[[Any, Tensor], dict[str, Tensor]], device: torch.device, notify: Callable[[str], None]
    ):
        self.work, self.device, self.notify = work, device, notify
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[tuple, Captured] = {}
        self.seen: set[tuple] = set()
        self.works = True

    def __call__(self, batch: Any, weights: Sequence[float]) -> dict[str, Tensor]:
        """`batch` is on the host, a NamedTuple of tensors or None."""
        shape = tuple(None if part is None else tuple(part.shape) for part in batch)
        values = torch.tensor(weights)
        captured = self.graphs.get(shape)
        if captured is None:
            batch, values = batch.to(self.device), values.to(self.device)
            if not self.works or shape not in self.seen or len(self.graphs) == MOST:
                self.seen.add(shape)
                return self.work(batch, values)
            captured = self._capture(batch, values)
            if captured is None:
                return self.work(batch, values)
            self.graphs[shape] = captured
        else:
            for kept, part in zip(captured.batch, batch, strict=True):
                if part is not None:
                    kept.copy_(part, non_blocking=True)
            captured.weights.copy_(values, non_blocking=True)
        captured.graph.replay()
        return {name: part.clone() for name, part in captured.results.items()}

    def _capture(self, batch: Any, values: Tensor) -> Captured | None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        drawn = torch.cuda.get_rng_state(self.device)
        try:
            with (
                without_collection(),
                torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
            ):
                results = self.work(batch, values)
        except RuntimeError as error:
            self.works = False
            self.notify(f"training without CUDA graphs: {_first_reason(error)}")
            self.graphs.clear()
            torch.cuda.synchronize(self.device)
            _renew_generator(self.device, drawn)
            return None
        return Captured(graph, batch, values, results)


def _renew_generator(device: torch.device, state: Tensor) -> None:
    """Puts a fresh generator in the place of the GPU's: a capture that failed leaves it counting for its graph."""
    fresh = torch.Generator(device)
    fresh.set_state(state)
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.default_generators[index].graphsafe_set_state(fresh)


def _first_reason(error: BaseException) -> str:
    """The end of a capture that failed raises too, and only says that something was wrong before."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).splitlines()[0] if str(error) else type(error).__name__
