"""SIGTERM and SIGINT while a run trains."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(Exception):
    """The training was stopped by a signal, after the run was saved."""

    def __init__(self, number: int, step: int):
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}; saved")
        self.code = 128 + number


class Signals:
    """Remembers the first signal, which the loop checks between batches; the second ends the program at once."""

    received: int | None = None

    def remember_signal(self, number: int, _: FrameType | None = None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = number

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Inside the block signals are remembered; after it the former handlers are back."""
        before = {number: signal.signal(number, self.remember_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
