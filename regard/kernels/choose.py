"""Which implementation of a kernel runs: PyTorch's operators ("torch") or ours in Triton ("triton").

"auto", the default, takes Triton on a CUDA device where it runs and PyTorch elsewhere; it alone falls back, and takes
no kernel whose tests have not passed on a GPU yet. An explicit "triton" that cannot run is an error that says why. The
environment variable REGARD_KERNELS sets the choice of a process, `use` that of a block of code. On a CPU Triton runs
interpreted only, with TRITON_INTERPRET=1: for tests.

A program that `torch.export` records holds no kernels of ours unless "triton" is chosen, so that it can be loaded
without Regard: see `portable_only`.

A kernel asks `use_triton(name, *tensors)`; tests read what was answered inside `with record() as answers`.
"""

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from regard.kernels.compiling import constant_when_compiled, exporting

Choice = Literal["auto", "torch", "triton"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNPROVEN: tuple[str, ...] = ()  # kernels whose tests have not passed on a GPU yet
GRID = 65535  # programs along the second or third axis of a grid, at most

_choice: str = os.environ.get("REGARD_KERNELS", "auto")  # checked where it is used
_answers: list[tuple[str, str]] | None = None
_problems: dict[str, str | None] = {}  # why Triton does not run on a kind of device, found out once


@contextmanager
def use(choice: Choice) -> Iterator[None]:
    """Sets the choice for a block of code, in all threads of the process."""
    global _choice
    before, _choice = _choice, _checked(choice)
    try:
        yield
    finally:
        _choice = before


@contextmanager
def record() -> Iterator[list[tuple[str, str]]]:
    """Collects (kernel, "torch" or "triton") for each call in a block of code; calls that are compiled leave none."""
    global _answers
    before, _answers = _answers, []
    try:
        yield _answers
    finally:
        _answers = before


def use_triton(kernel: str, *tensors: Tensor | None, refusal: str | None = None, second_axis: int = 1) -> bool:
    """Whether the kernel of that name runs in Triton on these tensors; `refusal` is the kernel's own reason not to, and
    `second_axis` how many programs its grid has along that axis."""
    choice = _checked(_choice)
    if choice != "torch" and refusal is None and not exporting() and second_axis > GRID:
        refusal = f"batch rows times heads are {second_axis:,}, and a grid has room for {GRID:,}"
    if choice == "auto" and kernel in UNPROVEN:
        refusal = "its tests have not passed on a GPU yet"
    reason = None if choice == "torch" else refusal or _reason(choice, [x for x in tensors if x is not None])
    if choice == "triton" and reason:
        raise ValueError(
            f"kernel {kernel!r} cannot run in Triton: {reason}; REGARD_KERNELS=auto or torch runs it with PyTorch"
        )
    answer = choice != "torch" and reason is None
    if _answers is not None and not torch.compiler.is_compiling():
        _answers.append((kernel, "triton" if answer else "torch"))
    return answer


def portable_only() -> bool:
    """Whether only PyTorch's own operators may be used, and no length looked at: `torch.export` records the program."""
    return exporting() and _checked(_choice) != "triton"


def _checked(choice: str) -> Choice:
    if choice in ("auto", "torch", "triton"):
        return choice
    raise ValueError(f"the choice of kernels must be 'auto', 'torch' or 'triton', got {choice!r} (REGARD_KERNELS)")


def _reason(choice: Choice, tensors: list[Tensor]) -> str | None:
    device = tensors[0].device.type
    if choice == "auto" and exporting():
        return "a program that is exported holds PyTorch's operators only"
    if choice == "auto" and device != "cuda":
        return "'auto' takes Triton on CUDA devices only"
    for x in tensors:
        if x.device.type != device:
            return f"its tensors lie on {device} and {x.device.type}"
        if x.dtype not in DTYPES:
            return f"it takes float32, bfloat16 and float16, got {str(x.dtype).removeprefix('torch.')}"
    return _problem(device)


@constant_when_compiled
def _problem(device: str) -> str | None:
    """Why Triton does not run on such a device; for a GPU a first kernel is compiled and run, once in a process."""
    if device not in _problems:
        # in a thread of its own: a compiler that is at work in this one would trace the kernel instead of running it
        with ThreadPoolExecutor(1) as thread:
            _problems[device] = thread.submit(_tried, device).result()
        if device == "cuda" and _problems[device]:
            warnings.warn(
                f"Triton does not run here, and attention is slower without it: {_problems[device]} "
                "(REGARD_KERNELS=torch ends this warning)",
                stacklevel=2,
            )
    return _problems[device]


def _tried(device: str) -> str | None:
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the tensors lie on the CPU, where it runs interpreted only (TRITON_INTERPRET=1)"
    if device not in ("cpu", "cuda"):
        return f"its tensors lie on {device}: it takes CUDA"
    try:
        from regard.kernels import experts_triton

        # it needs a C compiler, for one
        experts_triton.copied(torch.zeros(1, device=device), torch.bfloat16)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
