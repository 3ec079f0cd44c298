"""How many processes serve."""

import socket
from collections.abc import Sequence
from pathlib import Path

import torch

from regard.tasks.load import pick_device
from regard.training.run import Run

# parameters of a model of which each process may have one: the translator, of 6 million, answers 1.1 to 1.2 times as
# many requests per second from two processes as from one of two threads
SMALL = 10_000_000
MOST = 4  # processes, unless more are asked for


def suitable_processes(folders: Sequence[str | Path], device: str) -> int:
    """As many as there are cores, if all models are small: they spend much of their time in Python, where threads of
    one process wait for each other."""
    if pick_device(device).type != "cpu" or not hasattr(socket, "send_fds"):
        return 1
    sizes = [Run.open(folder).read_json("run.json").get("parameters") for folder in folders]
    if all(isinstance(size, int) and size < SMALL for size in sizes):
        return max(1, min(torch.get_num_threads(), MOST))
    return 1
