"""Work that ends when nobody waits for it any more."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import TorchDispatchMode


class Unwanted(Exception):
    """Whoever asked has gone."""


class While(TorchDispatchMode):
    """Asks between two operators, whatever is computed, whether it is still wanted."""

    def __init__(self, wanted: Callable[[], bool]):
        super().__init__()
        self.wanted = wanted

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        if not self.wanted():
            raise Unwanted
        return function(*args, **(kwargs or {}))


@contextmanager
def while_wanted(wanted: Callable[[], bool] | None) -> Iterator[None]:
    """Inside, work ends with Unwanted as soon as it is not wanted; None: it always is."""
    if wanted is None:
        yield
        return
    if not wanted():
        raise Unwanted
    with While(wanted):
        yield
