"""The exit status of the processes of a run, for the launcher that started them.

torchrun's agent starts all processes again when one of them fails. That helps when one was killed. A wrong flag, or a
loss that is not finite, would only fail again: such a process leaves its exit status in a file, and ends with 0.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = "REGARD_STATUS_FOLDER"  # the environment variable by which our launcher names the folder of these files
LOST = 75  # another process was lost, and starting again helps (EX_TEMPFAIL of sysexits.h)


@contextmanager
def report_status() -> Iterator[None]:
    """Tells our launcher, if it started this process, the status that the block exits with."""
    try:
        yield
    except SystemExit as end:
        folder, rank = os.environ.get(FOLDER), os.environ.get("RANK")
        if folder is None or rank is None or end.code == LOST or not isinstance(end.code, int):
            raise
        Path(folder, rank).write_text(str(end.code))
        raise SystemExit(0) from None


def read_status(folder: str) -> int:
    """The first status, by rank, that is not 0."""
    left = {int(path.name): int(path.read_text()) for path in Path(folder).iterdir()}
    return next((left[rank] for rank in sorted(left) if left[rank]), 0)
