"""What the server takes on: bounds on every input, on what waits and on memory."""

import math
from dataclasses import fields, replace

from regard.core.options import config_dataclass

MOST_PROCESSES = 256


@config_dataclass
class Limits:
    """Flags of `regard serve`, and the bounds on fields of requests."""

    rows: int = 16  # decoded at a time, in each process
    queue: int = 64  # requests that wait for each model, in each process
    memory: int = 1 << 30  # bytes of decoding states of each model
    prefix_memory: int = 256 << 20  # bytes of kept states of prompts of each model
    threads: int = 0  # of PyTorch for each model in each process; 0: as many as the process has
    processes: int = 0  # that serve; 0: as many as suit the models
    context: int = 2048  # tokens of prompt and answer, where the model has positions for more
    deadline: float = 120.0  # seconds for a request
    drain: float = 30.0  # seconds for what was accepted, after SIGTERM
    body: int = 1 << 20  # bytes of a request
    prompts: int = 32  # of a request
    samples: int = 16  # n
    texts: int = 64  # of a request, to translate, classify, fill or embed
    characters: int = 20_000  # of such a text
    connections: int = 1024  # of each process

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            most = MOST_PROCESSES if field.name == "processes" else math.inf
            least = 0 if field.name in ("prefix_memory", "drain", "threads", "processes") else 1
            # NaN is not between any two numbers
            if not least <= value < math.inf:
                raise ValueError(f"--{field.name.replace('_', '-')} must be a number of at least {least}, got {value}")
            if value > most:
                raise ValueError(f"--{field.name} must be at most {most}, got {value}")

    def shared_by(self, processes: int) -> "Limits":
        """The limits of one of several processes. They share the memory; all else stays, so that a request may have as
        many prompts and samples as with one process."""
        memory, prefix_memory = max(1, self.memory // processes), self.prefix_memory // processes
        return replace(self, processes=processes, memory=memory, prefix_memory=prefix_memory)


UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def read_bytes(text: str) -> int:
    """The bytes of 2GiB, 500 MB or 1000000."""
    number = text.strip().rstrip("BKMGIbkmgi ").strip()
    unit = text.strip()[len(number) :].strip().upper()
    try:
        return round(float(number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"expected an amount of memory such as 2GiB or 500MB, got {text!r}") from None
