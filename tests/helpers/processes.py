"""Work in several processes, as torchrun starts them; forked, so that none has to import anything."""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

from torch.distributed import TCPStore
from training_runs import begin_child, exit_status

from regard.training.distributed.world import BEGUN


def in_processes(size: int, work: Callable[[int], None], again: bool = False, kills: bool = True) -> list[int]:
    """Calls work(rank) in as many processes of one group: their exit statuses, or minus the signals that ended them. If
    one fails, the others are killed, unless they have to notice it by themselves. `again`: they were started before
    and began the run."""
    # what DistributedDataParallel and FSDP2 import, which takes seconds, is imported once and not in each process
    import torch._dynamo  # noqa: F401

    import regard.training.distributed.sharding  # noqa: F401

    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), multi_tenant=True)
    if again:
        store.add("regard/starts", 1)
        store.set(BEGUN, "")
    shared = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }

    def one(rank: int) -> None:
        signal.alarm(500)  # a process that waits for good fails; on a busy machine 50 updates have taken 2 minutes
        with mock.patch.dict(os.environ, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}):
            work(rank)

    children = [begin_child(lambda rank=rank: one(rank)) for rank in range(size)]
    statuses: dict[int, int] = {}
    while len(statuses) < size:
        # not any child: other tests may have left some
        for child in [child for child in children if child not in statuses]:
            ended, found = os.waitpid(child, os.WNOHANG)
            if ended:
                statuses[child] = exit_status(found)
        if kills and any(statuses.values()):
            for other in set(children) - statuses.keys():
                os.kill(other, signal.SIGKILL)
        time.sleep(0.01)
    return [statuses[child] for child in children]
