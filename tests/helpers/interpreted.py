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
