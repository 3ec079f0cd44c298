"""Marks for PyTorch's compiler, set without importing it: that takes longer than all of Regard, and most never compile.

`torch.compiler.disable` and `torch.compiler.assume_constant_result` import it where a function is defined.

What `torch.export` records may have dynamic lengths: numbers that are not known yet. Then no loop and no list may
depend on them, and no question that the range of lengths does not answer. The helpers below are what a mechanism asks
instead.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

F = TypeVar("F", bound=Callable)
P = ParamSpec("P")
R = TypeVar("R")


def run_eagerly(function: Callable[P, R]) -> Callable[P, R]:
    """As `torch.compiler.disable`: compiled code calls the function as it is written."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            eager: Any = torch.compiler.disable(function)
            return eager(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def constant_when_compiled(function: F) -> F:
    """As `torch.compiler.assume_constant_result`: called once while code is compiled, and its answer is kept."""
    # the mark that dynamo looks for
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


@constant_when_compiled
def exporting() -> bool:
    """Whether `torch.export` records what is computed: one graph for all lengths, of PyTorch's own operators."""
    # asked for real: to code that it traces, the compiler of PyTorch 2.11 always answers that it is exported
    return torch.compiler.is_exporting()


def is_dynamic(size: int) -> bool:
    """Whether a size is left open by a program that is exported."""
    return exporting() and not isinstance(size, int)


def is_one(size: int) -> bool:
    """Whether a size is 1; a dynamic one counts as more."""
    return not is_dynamic(size) and size == 1


def as_symbol(size: int) -> int:
    """A size made of dynamic ones, such as (T + 63) // 64, as a number of its own. With the formula the compiler asks
    at each reshape whether one such size divides another, finds no proof, and refuses the program."""
    if not is_dynamic(size):
        return size
    # an int, or what stands for one while a program is recorded
    symbol: Any = torch.scalar_tensor(size, dtype=torch.long).item()
    torch._check(symbol >= 1)
    return symbol


def count_blocks(length: int, size: int, least: int = 1) -> int:
    """The number of blocks of `size` that hold `length` tokens, and at least `least`."""
    count = (length + size - 1) // size
    if not is_dynamic(length):
        return max(count, least)
    larger: Any = torch.sym_max(count, least) if least > 1 else count
    count = as_symbol(larger)
    torch._check(count * size >= length)
    return count


def at_most(size: int, length: int) -> int:
    """The smaller of the two, where only room is saved; of a dynamic length, `size`."""
    return size if is_dynamic(length) else min(size, length)


def surely_at_most(first: int, second: int) -> bool:
    """Whether the first is at most the second; where one is dynamic, whether it is so for all lengths."""
    if not is_dynamic(first) and not is_dynamic(second):
        return first <= second
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(first <= second)
