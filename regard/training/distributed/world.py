"""The processes that train one model together, as the training loop sees them.

The loop is written for one process. What other processes change is asked of a `World`: which rows of a batch are ours,
what the main process decided, whether another process received a signal. `Alone` is the world of one process, in which
all of it is trivial. `Processes` are those of torch.distributed, which torchrun or `--training.processes` starts.

Every process makes every batch and takes its share of the rows. The gradient is the mean over the processes; a loss is
weighted so that this mean is the gradient of one process with the whole batch. Decisions that depend on a clock, on a
signal or on rounding are taken by the main process, or by all of them together.
"""

import inspect
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store

from regard.core.parallel import Spread, spread_batch
from regard.core.sequence import Split, split_rows
from regard.training.config import TrainingConfig
from regard.training.distributed.batchnorm import synchronise_batch_norms
from regard.training.distributed.tokens import check_splits, split_tokens
from regard.training.run import Run
from regard.training.task import TrainingTask

T = TypeVar("T")
Rows = tuple[Tensor | None, ...]  # a batch: each tensor has its rows first
Compute = Callable[..., Any]
PREPARING = timedelta(days=7)  # the longest time that the main process may read data, train tokenizers or save alone
LOST = re.compile(
    r"gloo|nccl|timed out|timeout|connection (was )?(closed|reset|refused)|broken pipe|\bstore\b",
    re.IGNORECASE,
)
ENDED = "regard/ended"  # in the store: the process that ended with an error
BEGUN = "regard/begun"  # in the store of all starts: that one of them began the run


class LostProcess(RuntimeError):
    """Another process of the run is stuck or was killed."""


class EndedElsewhere(RuntimeError):
    """Another process of the run ended with an error, which it reports itself."""


class Share(NamedTuple):
    """The rows of a batch that this process computes."""

    batch: Any
    weight: float  # of their loss: the gradient is a mean over processes, and the loss a sum over all rows


class World(Protocol):
    """What the training loop asks of the processes."""

    rank: int
    size: int

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes and logs."""
        ...

    def has_begun_run(self) -> bool:
        """Whether the processes began the run before one of them died and they were started again."""
        ...

    def mark_run_begun(self) -> None:
        """Called by the main process before it writes a new run."""
        ...

    def device(self, device: torch.device) -> torch.device:
        """The device of this process, of the kind that was asked for."""
        ...

    def check(self, task: TrainingTask) -> None:
        """Refuses what the processes cannot share, before anything is written."""
        ...

    def wrap(self, model: nn.Module, compute: Compute) -> Compute:
        """`compute`, a function of a batch that calls the model, so that its gradients are averaged over processes."""
        ...

    def share(self, batch: Rows) -> Share:
        """The rows of a batch that this process computes."""
        ...

    def spread(self, share: Share) -> AbstractContextManager[None]:
        """Inside the block, layers know of the rows that other processes have."""
        ...

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Inside the block, gradients are only added up, unless the batch is the last of an update."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the processes."""
        ...

    def broadcast(self, value: T) -> T:
        """The value of the main process."""
        ...

    def first_signal(self, number: int | None) -> int | None:
        """The largest signal that any process received; None: there is none."""
        ...

    def barrier(self) -> None:
        """Waits until all processes are here."""
        ...

    def gathered(self) -> AbstractContextManager[None]:
        """Inside the block, the model is whole in every process, which may call it without the others."""
        ...

    def save(self, run: Run, name: str, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Writes a checkpoint."""
        ...

    def finish(self, run: Run) -> None:
        """Called when training is over: converts the checkpoints to one file each."""
        ...


class Alone:
    """One process."""

    rank, size, is_main = 0, 1, True

    def has_begun_run(self) -> bool:
        return False

    def mark_run_begun(self) -> None:
        pass

    def device(self, device: torch.device) -> torch.device:
        return device

    def check(self, task: TrainingTask) -> None:
        pass

    def wrap(self, model: nn.Module, compute: Compute) -> Compute:
        return compute

    def share(self, batch: Rows) -> Share:
        return Share(batch, 1.0)

    def spread(self, share: Share) -> AbstractContextManager[None]:
        return nullcontext()

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def sum(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, value: T) -> T:
        return value

    def first_signal(self, number: int | None) -> int | None:
        return number

    def barrier(self) -> None:
        pass

    def gathered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def save(self, run: Run, name: str, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        run.write_checkpoint(name, tensors, state)

    def finish(self, run: Run) -> None:
        pass


class Processes:
    """The processes of torch.distributed, of which this is one."""

    def __init__(self, config: TrainingConfig, kept: Store):
        """`kept`: the store that all starts of these processes have in common."""
        self.rank, self.size, self.kept = dist.get_rank(), dist.get_world_size(), kept
        self.timeout = config.timeout
        # a group of its own: layers that wait for each other must not wait behind the gradients of other layers
        split = dist.new_group(timeout=timedelta(seconds=config.timeout)) if config.shares == "tokens" else None
        self.split = None if split is None else Split(split, self.rank, self.size)
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.parent = os.getppid()
        self.barrier_group: Any = dist.new_group(timeout=PREPARING, backend="gloo")
        self.wrapped: nn.parallel.DistributedDataParallel | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def has_begun_run(self) -> bool:
        return self.kept.check([BEGUN])

    def mark_run_begun(self) -> None:
        self.kept.set(BEGUN, "")

    def device(self, device: torch.device) -> torch.device:
        if device.type != "cuda" or device.index is not None:
            return device
        count = torch.cuda.device_count()
        if self.local_rank >= count:
            raise ValueError(
                f"process {self.local_rank} of this machine has no GPU of its own: there are {count}; start as many "
                "processes as GPUs, or give --training.device cpu"
            )
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    def check(self, task: TrainingTask) -> None:
        if self.split is not None:
            check_splits(task.model)
            split_tokens(task.batches.get(0, 0), self.split)

    def wrap(self, model: nn.Module, compute: Compute) -> Compute:
        synchronise_batch_norms(model)
        # buffers are equal by construction: every process draws from the same seed, and statistics are summed
        kind = nn.parallel.DistributedDataParallel
        # PyTorch 2.13 renamed it
        names = ("forward_sync_buffers", "broadcast_buffers")
        name = next(name for name in names if name in inspect.signature(kind).parameters)
        options: dict[str, Any] = {name: False}
        self.wrapped = kind(Computed(model, compute), gradient_as_bucket_view=True, **options)
        return self.wrapped

    def share(self, batch: Rows) -> Share:
        if self.split is not None:
            return Share(split_tokens(batch, self.split), float(self.size))
        rows = len(next(part for part in batch if part is not None))
        first, last = (rows * rank // self.size for rank in (self.rank, self.rank + 1))
        has_rows = first < last
        # all processes must call the same collectives: one without rows computes a row that does not count
        cut = slice(first, last) if has_rows else slice(0, 1)
        make: Any = type(batch)
        parts = make(*(None if part is None else part[cut] for part in batch))
        return Share(parts, float(self.size * has_rows))

    @contextmanager
    def spread(self, share: Share) -> Iterator[None]:
        with spread_batch(Spread(None, self.rank, self.size, share.weight > 0)), split_rows(self.split):
            yield

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        assert self.wrapped is not None, "wrapped before the first update"
        return nullcontext() if is_last else self.wrapped.no_sync()

    def sum(self, x: Tensor) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total)
        return total

    def broadcast(self, value: T) -> T:
        values = [value]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def first_signal(self, number: int | None) -> int | None:
        if os.getppid() != self.parent:
            # whoever started us is gone, and nobody would end us
            number = number or signal.SIGTERM
        found = torch.tensor(number or 0)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found) or None

    def barrier(self) -> None:
        """In a group of its own: reading data, or writing a checkpoint, may take longer than any other communication.
        The death of a process closes its connections, and ends the others at once."""
        dist.barrier(self.barrier_group)

    def announce_error(self) -> bool:
        """Tells the other processes that this one ends with an error: they lose their connection to it, and ask why.
        Whether it is the first, which reports the error: often all of them have the same."""
        store = dist.distributed_c10d._get_default_store()
        try:
            return store.compare_set(ENDED, "", str(self.rank)) == str(self.rank).encode()
        except dist.DistError:
            return True

    def _check_error_elsewhere(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        if store.check([ENDED]):
            which = store.get(ENDED).decode()
            raise EndedElsewhere(f"process {self.rank} of {self.size}: process {which} ended with an error")

    def gathered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def save(self, run: Run, name: str, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        run.write_checkpoint(name, tensors, state)

    def finish(self, run: Run) -> None:
        pass

    def release(self) -> None:
        """Lets go of what communicates, before its group is destroyed."""
        self.wrapped = None

    @contextmanager
    def in_words(self) -> Iterator[None]:
        """Inside the block, the loss of another process is a `LostProcess`, and its error an `EndedElsewhere`."""
        try:
            yield
        except RuntimeError as error:
            # what PyTorch raises; our own errors are of classes of their own
            is_plain = type(error) is RuntimeError and LOST.search(str(error))
            if not is_plain and not isinstance(error, dist.DistError):
                raise
            with suppress(dist.DistError):
                self._check_error_elsewhere()
            # the first sentence, without the line of PyTorch's source
            why = re.sub(r"^\[\S+:\d+\] ", "", " ".join(str(error).split())).split(". ")[0][:200].rstrip(".")
            raise LostProcess(
                f"process {self.rank} of {self.size}: another process of the run has ended, or did not answer for "
                f"{self.timeout:g} seconds (training.timeout): {why}. The run resumes from its last checkpoint"
            ) from error


class Computed(nn.Module):
    """A function that calls a model, as a module: what is wrapped is called by its `forward`, and a loss calls other
    methods of a model, too."""

    def __init__(self, model: nn.Module, compute: Compute):
        super().__init__()
        self.model, self.compute = model, compute

    def forward(self, *inputs: Any) -> Any:
        return self.compute(*inputs)


def is_launched() -> bool:
    """Whether torchrun, or our own launcher, started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def is_main_process() -> bool:
    """Whether this is the process that speaks to the user."""
    return os.environ.get("RANK", "0") == "0" or not is_launched()
