"""What steps need, made by a thread while the steps before run."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

Made = TypeVar("Made")


class Ahead(Generic[Made]):
    """`make(step, steps)` for one step after another, of `steps` in all. The next `ahead` of them are made early, by a
    thread; 0: each when it is asked for. What is made must depend on the step alone: then it is the same either way.
    With `one_core` the operations of the thread are not split among further threads."""

    def __init__(self, make: Callable[[int, int], Made], ahead: int, *, one_core: bool = False):
        self.make, self.ahead, self.one_core = make, ahead, one_core
        self.thread: ThreadPoolExecutor | None = None  # from the first step to `close`
        self.made: dict[int, Future[Made]] = {}

    def get(self, step: int, steps: int) -> Made:
        """What a step needs; nothing is made for steps that do not come."""
        if not self.ahead:
            return self.make(step, steps)
        if self.thread is None:
            self.thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
            if self.one_core:
                _keep_to_one_core(self.thread)
        for at in [at for at in self.made if not step <= at <= step + self.ahead]:
            self.made.pop(at).cancel()  # of steps that were skipped
        self.begin(range(step, max(step + 1, min(step + 1 + self.ahead, steps))), steps)
        return self.made.pop(step).result()

    def begin(self, upcoming: range, steps: int) -> None:
        """Lets the thread make what these steps need, if there is one."""
        for at in upcoming:
            if self.thread is not None and at not in self.made:
                self.made[at] = self.thread.submit(self.make, at, steps)

    def close(self) -> None:
        """Ends the thread; what it has not begun is dropped. A later step would begin another."""
        if self.thread is not None:
            self.thread.shutdown(cancel_futures=True)
            self.thread = None
        self.made.clear()


def _keep_to_one_core(thread: ThreadPoolExecutor) -> None:
    """`set_num_threads` holds for the thread that calls it, and for all that begin later. The latter is undone, and the
    calling thread waits meanwhile: its own number never changes."""
    threads = torch.get_num_threads()
    try:
        thread.submit(_use_one_core).result()
    finally:
        torch.set_num_threads(threads)


def _use_one_core() -> None:
    torch.get_num_threads()  # the first call in a thread sets the number of new threads: a later one would undo this
    torch.set_num_threads(1)
