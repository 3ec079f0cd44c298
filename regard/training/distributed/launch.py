"""Starts the processes of a run on this machine, and starts them again when one of them dies.

The work is that of torchrun's agent. What differs is where it listens: torchrun's store listens on every interface of
the machine, and this one, like all connections between the processes, on the loopback interface alone.
"""

import logging
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from regard.training.distributed.status import FOLDER, read_status

LOOPBACK = "127.0.0.1"
BACKEND = "regard-loopback"


def launch(processes: int, arguments: Sequence[str], *, restarts: int) -> int:
    """Runs `regard ARGUMENTS` in as many processes, and returns their exit status. If one is killed, all are started
    again, up to `restarts` times."""
    rendezvous_handler_registry.register(BACKEND, _Loopback)
    # what torchelastic has to say is for those who run clusters; the processes speak for themselves
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # each module of it has a level of its own
    with tempfile.TemporaryDirectory(prefix="regard-") as folder:
        own = {
            FOLDER: folder,
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", _loopback_interface()),
            # what a checkpoint may take after SIGTERM; PyTorch 2.11 has no such setting, and kills after 30 seconds
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600"),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes))),
        }
        os.environ.update({name: value for name, value in own.items() if value})
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            rdzv_backend=BACKEND,
            rdzv_endpoint=LOOPBACK,
            local_addr=LOOPBACK,
            run_id="regard",
            max_restarts=restarts,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "regard", *arguments)
        except SignalException as stopped:
            return read_status(folder) or 128 + stopped.sigval
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            how = failure.signal_name() if failure.exitcode < 0 else f"status {failure.exitcode}"
            died = f"process {rank} ended with {how}"
            again = f" after {restarts} restarts" if restarts else ""
            print(f"regard: {died}{again}: the run stands at its last checkpoint", file=sys.stderr)
            return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        return read_status(folder)


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "")


class _Loopback(RendezvousHandler):
    """One machine, whose store listens on the loopback interface."""

    def __init__(self, parameters: RendezvousParameters):
        self.parameters = parameters
        listener = socket.create_server((LOOPBACK, 0))
        self.port = listener.getsockname()[1]
        self.store = torch.distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage] # documented there
            LOOPBACK,
            self.port,
            None,
            True,
            timedelta(seconds=600),
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """One store for all starts: the processes count them there, and take another part of it each time."""
        store = PrefixStore(self.parameters.run_id, self.store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.parameters.run_id

    def shutdown(self) -> bool:
        return True
