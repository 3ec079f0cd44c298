"""Calls in a thread that ends with them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_brief_thread(function: Callable[[], T]) -> T:
    """The result of a function, which is called in a thread of its own. Two things end with that thread:

    The modes of PyTorch that the caller is in, such as a transform of torch.func or torch.export, do not hold in it.

    A thread that has computed keeps OpenMP's threads for it as long as it lives. Where these are more than cores, one
    that waits for others sleeps at once: a program that loaded GPT-2 small in one thread and computed in another, on
    two cores, took 61 instead of 44 ms for a step."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()
