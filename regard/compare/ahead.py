"""What steps need, made by a thread while the steps before run."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Ahead(Generic[Made]):
    """`make(step, steps)` for one step after another, of `steps` in all. The next `ahead` of them are made early, by a
    thread; 0: each when it is asked for. What is made must depend on the step alone: then it is the same either way."""

    def __init__(self, make: Callable[[int, int], Made], ahead: int):
        self.make, self.ahead = make, ahead
        self.thread = ThreadPoolExecutor(1) if ahead else None
        self.made: dict[int, Future[Made]] = {}

    def get(self, step: int, steps: int) -> Made:
        """What a step needs; none is made that does not come."""
        if self.thread is None:
            return self.make(step, steps)
        for at in range(step, min(step + 1 + self.ahead, steps)):
            if at not in self.made:
                self.made[at] = self.thread.submit(self.make, at, steps)
        return self.made.pop(step).result()

    def close(self) -> None:
        """Ends the thread; what it has not begun is dropped."""
        if self.thread is not None:
            self.thread.shutdown(cancel_futures=True)
