"""Triton's interpreter, in less than half the time: most of what the tests of kernels wait for."""

import os
from dataclasses import replace
from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> None:
    """Without two things that the interpreter does again and again. It looks for the functions of the language whenever
    a kernel or a function of one is called; and it checks every sum and product of integers for overflow, which numbers
    as small as those of tests never reach."""
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    builder, patch = interpreter.interpreter_builder, interpreter._patch_lang
    builder.options = replace(builder.options, sanitize_overflow=False)
    patched = {}

    def patch_once(function):
        language = interpreter.tl
        seen = function.__globals__.values()
        modules = tuple(any(value is module for value in seen) for module in (language, language.core))
        if modules not in patched:
            patched[modules] = patch(function)
        # what undoes the patches of this call: there are none
        return type(patched[modules])()

    interpreter._patch_lang = patch_once


@pytest.fixture(autouse=True)
def interpreter_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies the bits of bfloat16 as whole numbers, and cuts off digits where a GPU rounds. What a
    GPU splits into two bfloat16 parts it would multiply in float32."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    dot, cast = interpreter.InterpreterBuilder.create_dot, interpreter.InterpreterBuilder.cast_impl

    def wide(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(self, x, dtype):
        if x.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
            bits = torch.from_numpy(np.ascontiguousarray(x.data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
            return interpreter.TensorHandle(bits, tl.bfloat16)
        return cast(self, x, dtype)

    def split(x):
        data = torch.from_numpy(np.ascontiguousarray(x.data))
        high = data.bfloat16().float()
        low = (data - high).bfloat16().float()
        return [interpreter.TensorHandle(part.numpy(), tl.float32) for part in (high, low)]

    def product(self, a, b, total, precision, *rest):
        a, b = wide(a), wide(b)
        if "TF32x3" not in str(precision):
            return dot(self, a, b, total, precision, *rest)
        (high, low), (other_high, other_low) = split(a), split(b)
        for x, y in ((low, other_high), (high, other_low), (high, other_high)):
            total = dot(self, x, y, total, precision, *rest)
        return total

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", product)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounded)
