"""How a process joins the others of its run."""

import gc
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from regard.training.config import TrainingConfig
from regard.training.distributed.world import Alone, EndedElsewhere, LostProcess, Processes, is_launched
from regard.training.signals import Stopped


@contextmanager
def joined(config: TrainingConfig) -> Iterator[Alone | Processes]:
    """The world of this process, while the block runs."""
    if not is_launched() and not config.sharded:
        yield Alone()
        return
    uses_gpu = config.device != "cpu" and torch.cuda.is_available()
    timeout = timedelta(seconds=config.timeout)
    with connecting(config.timeout):
        kept, start, rank, size = _find_others(timeout)
        store = PrefixStore(f"regard/start/{start}", kept)
        backend = "cpu:gloo,cuda:nccl" if uses_gpu else "gloo"
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
        if config.sharded:
            from regard.training.distributed.sharding import Sharded

            world = Sharded(config, kept)
        else:
            world = Processes(config, kept)
    try:
        with world.in_words():
            yield world
    except BaseException as error:
        _clear_frames(error)
        if isinstance(error, LostProcess | EndedElsewhere | Stopped) or world.announce_error():
            raise
        raise EndedElsewhere(f"process {world.rank} of {world.size}: another one reports the error") from error
    finally:
        # what communicates must be gone before the group: if it is the last to let go of it, it joins the threads of
        # the group while it holds Python's lock, which they may wait for
        world.release()
        gc.collect()
        dist.destroy_process_group()


def _clear_frames(error: BaseException | None) -> None:
    """Forgets the local variables of the functions that an error has ended: among them is what communicates."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _find_others(timeout: timedelta) -> tuple[Store, int, int, int]:
    """A store that may be kept from start to start, the number of this start, the rank of this process, and how many
    processes there are."""
    if not is_launched():
        # a process alone may shard, too: then it needs no other to meet
        return dist.HashStore(), 1, 0, 1  # pyright: ignore[reportPrivateImportUsage] # documented there
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    return store, count_starts(store, rank, size, timeout), rank, size


def count_starts(store: Store, rank: int, size: int, timeout: timedelta) -> int:
    """The number of this start, from 1: the same in every process.

    torchrun keeps its store when it starts processes again, with all that those of earlier starts have left there, and
    TORCHELASTIC_RESTART_COUNT differs from machine to machine: it counts the failures on each. So the main process
    counts, and tells the others, each of which asks by a name that was never used before."""
    if rank:
        name = uuid.uuid4().hex
        store.set(f"regard/asks/{rank}", name)
        store.wait([f"regard/answers/{name}"], timeout)
        start = int(store.get(f"regard/answers/{name}"))
        store.add(f"regard/here/{start}", 1)
        return start
    start, ends = store.add("regard/starts", 1), time.monotonic() + timeout.total_seconds()
    asks = [f"regard/asks/{other}" for other in range(1, size)]
    # processes of an earlier start may have asked, too: nobody reads their answers
    while store.add(f"regard/here/{start}", 0) < len(asks):
        for name in (store.get(ask).decode() for ask in asks if store.check([ask])):
            store.set(f"regard/answers/{name}", str(start))
        if time.monotonic() > ends:
            raise dist.DistStoreError("not all of them have started")
        time.sleep(0.02)
    return start


@contextmanager
def connecting(timeout: float) -> Iterator[None]:
    """Inside the block, in which the processes find each other, a failure is a `LostProcess`: one was killed before the
    others reached it."""
    try:
        yield
    except RuntimeError as error:
        why = " ".join(str(error).split())[:200]
        raise LostProcess(
            f"the processes of the run could not connect to each other (training.timeout: {timeout:g} seconds): {why}"
        ) from error
