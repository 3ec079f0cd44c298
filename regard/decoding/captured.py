"""Greedy decoding and sampling on a GPU, without synchronising host and GPU at each token.

Launching the hundreds of small kernels of a step takes the host longer than the GPU takes to run them, and a look at
whether all sentences are done makes it wait. Here a step (the model on one token per row, and the choice of the next)
is captured once as a CUDA graph over buffers of fixed size and replayed for each token; the host looks after every 16.
The first steps run as they are, so that short outputs need no graph. Tokens are those of greedy.py.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from regard.core.capture import without_collection
from regard.decoding.base import DecodingConfig, Pool, refuse
from regard.decoding.greedy import Watch, Written, ask_watch, ranked

EVERY = 16  # steps between two looks
WARM = 2  # steps before one is captured: what is compiled or set up at first use must be there
NOT_CAPTURED = "steps of decoding are not captured as a CUDA graph: {reason}"

Capture = Callable[[Callable[[], None]], Callable[[], None]]


def refusal(model: Any, logits: Tensor) -> str | None:
    """Why steps of this model are not captured, as far as that is known before it is tried."""
    if logits.device.type != "cuda":
        return f"CUDA graphs need a CUDA device, and the model is on {logits.device.type}"
    if not hasattr(model, "fixed_state"):
        return f"{type(model).__name__} has no state of fixed size"
    return None


def search_greedily(
    model: Any,
    logits: Tensor,
    state: Any,
    limits: list[int],
    config: DecodingConfig,
    eos: int,
    forbidden: tuple[int, ...],
    draws: Tensor | None,
    used: Tensor | None = None,
    watch: Watch | None = None,
    capture: Capture | None = None,
) -> Pool:
    """As `greedy.search_greedily`. `capture` turns a step into a function that repeats it; None: a CUDA graph. With
    `watch` the host looks at each token."""
    B, L, device = len(limits), max(limits) + 1, logits.device
    K = 1 if draws is None else draws.shape[1]
    if K > 1:
        logits = logits.repeat_interleave(K, 0)
        state = state.reorder(torch.arange(B, device=device).repeat_interleave(K))
    # the last token is chosen and not read
    state = unshared(model.fixed_state(state, state.progress.longest + L - 1), set())
    blocked = torch.tensor([*forbidden, eos], device=device)
    limit, step = torch.tensor(limits, device=device), torch.zeros(1, dtype=torch.long, device=device)
    now = Written.nothing(logits, used, B, K, L, config)
    token = torch.zeros(B, K, dtype=torch.long, device=device)
    reported = torch.zeros_like(token, dtype=torch.bool)

    def choose(logits: Tensor, barred: Tensor) -> None:
        after, chosen, taken = now.advance(logits, step, limit, barred, eos, draws, config)
        put((now, token, reported), (after, chosen, taken & (chosen != eos)))
        step.add_(1)

    def advance(barred: Tensor) -> None:
        nonlocal state, fixed
        logits, after = model.extend(token.view(-1, 1), state)
        if fixed and sizes_changed(state, after):
            fixed = False
            warnings.warn(NOT_CAPTURED.format(reason=sizes_changed(state, after)), stacklevel=2)
        if fixed:
            put(state, after)
        else:
            state = after
        choose(logits[:, -1], barred)

    every, fixed = EVERY if watch is None else 1, True
    repeats: dict[int, Callable[[], None]] = {}
    with on_a_stream(device):
        graph = capture or CudaGraph(device)
        choose(logits, _barred(blocked, 0, config))
        for t in range(1, L + 1):
            if watch is not None:
                put(now, now.stopped(ask_watch(watch, reported, token, torch.arange(B))))
            if t % every == 0 or t == L:
                still, bad = torch.stack([now.going.any(1).sum(), now.bad]).tolist()
                refuse(bad, t - 1)
                if not still:
                    break
            if t == L:
                break
            barred = _barred(blocked, t, config)
            if t <= WARM or not fixed:
                advance(barred)
                continue
            if len(barred) not in repeats:
                repeats[len(barred)] = graph(lambda barred=barred: advance(barred))
            repeats[len(barred)]()
    return ranked(now.pool, config)


class CudaGraph:
    """Captures work as a CUDA graph, and returns the function that replays it. Work that cannot be captured is returned
    as it is, and a warning says why."""

    def __init__(self, device: torch.device):
        self.device, self.works = device, True

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        if not self.works:
            return work
        graph = torch.cuda.CUDAGraph()
        try:
            # not `torch.cuda.graph`, which empties caches; other threads may use the GPU meanwhile
            with without_collection():
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self.works = False
            torch.cuda.synchronize(self.device)
            warnings.warn(NOT_CAPTURED.format(reason=str(error).splitlines()[0]), stacklevel=2)
            return work
        return graph.replay


def put(buffers: Any, new: Any) -> None:
    """Writes the tensors of a nested tuple into those of another of the same form and sizes."""
    changed = [pair for pair in pairs(buffers, new) if pair[0] is not pair[1] and not _same_memory(*pair)]
    # what is a view of a buffer would be overwritten while it is read
    ready = [(old, made.clone() if _same_storage(old, made) else made) for old, made in changed]
    for dtype in {old.dtype for old, _ in ready}:
        alike = [pair for pair in ready if pair[0].dtype == dtype]
        # one launch for all of them, for which there is no public function
        copy_all = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
        copy_all([old for old, _ in alike], [made for _, made in alike])


def sizes_changed(before: Any, after: Any) -> str | None:
    """What a step did to the sizes of a state, in words, if it did."""
    for old, made in pairs(before, after):
        if old.shape != made.shape:
            return f"a step changed the size of a state from {list(old.shape)} to {list(made.shape)}"
    return None


def unshared(state: Any, taken: set[int]) -> Any:
    """The same state with no two tensors in the same memory; `taken` are the addresses in use."""
    if isinstance(state, Tensor):
        memory = state.untyped_storage().data_ptr()
        state = state.clone(memory_format=torch.contiguous_format) if memory in taken else state
        taken.add(state.untyped_storage().data_ptr())
    elif isinstance(state, tuple):
        parts = [unshared(part, taken) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    return state


@contextmanager
def on_a_stream(device: torch.device) -> Iterator[None]:
    """A stream of its own, on which work can be captured; none without CUDA."""
    if device.type != "cuda":
        yield
        return
    stream, before = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)


def pairs(old: Any, new: Any) -> list[tuple[Tensor, Tensor]]:
    """The tensors of two nested tuples of the same form, side by side."""
    if isinstance(old, Tensor):
        return [(old, new)]
    if not isinstance(old, tuple):
        return []
    return [pair for parts in zip(old, new, strict=True) for pair in pairs(*parts)]


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _barred(blocked: Tensor, step: int, config: DecodingConfig) -> Tensor:
    """The last one blocked is eos."""
    return blocked if step < config.minimum else blocked[:-1]
