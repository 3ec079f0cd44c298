"""Which world a process trains in."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

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
    # a process alone may shard, too: then it needs no other to meet
    store = None if is_launched() else dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] # documented there
    alone: dict[str, Any] = {} if store is None else {"store": store, "rank": 0, "world_size": 1}
    with connecting(config.timeout):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if uses_gpu else "gloo", timeout=timedelta(seconds=config.timeout), **alone
        )
    if config.sharded:
        from regard.training.distributed.sharding import Sharded

        world = Sharded(config)
    else:
        world = Processes(config)
    try:
        with world.in_words():
            yield world
    except (LostProcess, EndedElsewhere, Stopped):
        raise
    except BaseException as error:
        if world.tell_end():
            raise
        raise EndedElsewhere(f"process {world.rank} of {world.size}: another one reports the error") from error
    finally:
        # what communicates must be gone before the group: otherwise its threads are waited for while they wait for us
        world.leave()
        gc.collect()
        dist.destroy_process_group()


@contextmanager
def connecting(timeout: float) -> Iterator[None]:
    """Inside the block, in which the processes find each other, a failure is a `LostProcess`: one was killed before the
    others reached it."""
    try:
        yield
    except RuntimeError as error:
        why = " ".join(str(error).split())[:200]
        raise LostProcess(
            f"the processes of the run did not reach each other within {timeout:g} seconds (training.timeout): {why}"
        ) from error
