"""Marks for PyTorch's compiler, set without importing it: that takes longer than all of Regard, and most never compile.

`torch.compiler.disable` and `torch.compiler.assume_constant_result` import it where a function is defined.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

F = TypeVar("F", bound=Callable)


def run_eagerly(function: F) -> F:
    """As `torch.compiler.disable`: compiled code calls the function as it is written."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def constant_when_compiled(function: F) -> F:
    """As `torch.compiler.assume_constant_result`: called once while code is compiled, and its answer is kept."""
    function._dynamo_marked_constant = True
    return function
