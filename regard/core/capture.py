"""What must not happen while a CUDA graph is captured."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_captures = 0  # in progress, in all threads
_was_enabled = False  # Python's garbage collector, before the first of them


@contextmanager
def without_collection() -> Iterator[None]:
    """Turns Python's garbage collector off. It may free another CUDA graph and its memory, by calls that are forbidden
    during a capture: the capture then fails, and no error names the reason."""
    global _captures, _was_enabled
    with _lock:
        if _captures == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _captures += 1
    try:
        yield
    finally:
        with _lock:
            _captures -= 1
            if _captures == 0 and _was_enabled:
                gc.enable()
