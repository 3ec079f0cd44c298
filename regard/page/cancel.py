"""Work that stops when nobody waits for its result any more."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import TorchDispatchMode

IsCancelled = Callable[[], bool]


class Cancelled(Exception):
    """Nobody waits for the result any more."""


class CancelMode(TorchDispatchMode):
    """Checks before every operator whether the work is cancelled, whatever is computed."""

    def __init__(self, is_cancelled: IsCancelled):
        super().__init__()
        self.is_cancelled = is_cancelled

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.is_cancelled():
            raise Cancelled
        return func(*args, **(kwargs or {}))


@contextmanager
def cancellable(is_cancelled: IsCancelled | None) -> Iterator[None]:
    """Inside, work ends with Cancelled as soon as `is_cancelled()` is true; None: it never is."""
    if is_cancelled is None:
        yield
        return
    if is_cancelled():
        raise Cancelled
    with CancelMode(is_cancelled):
        yield
