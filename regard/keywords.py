"""Unknown and missing keywords, refused in words. It imports nothing of ours."""

import difflib
import functools
import inspect
import math
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def did_you_mean(name: str, known: list[str]) -> str:
    """The end of an error about an unknown name, where a known one is like it or has its letters as initials."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    near = near or [word for word in known if len(name) > 1 and name == "".join(part[:1] for part in word.split("_"))]
    return f" (did you mean {near[0]!r}?)" if near else ""


def check_keywords(**meant: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function, or the `__init__` of a class, so that unknown and missing keywords are refused with the
    known ones. `meant` is what to give instead of some that are like none of them."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__qualname__.removesuffix(".__init__").rpartition("<locals>.")[2]
        parameters = inspect.signature(function).parameters
        known = [word for word in parameters if word != "self"]
        takes = f"it takes {', '.join(known)}"
        needed = {
            word: math.inf if parameter.kind is parameter.KEYWORD_ONLY else place
            for place, (word, parameter) in enumerate(parameters.items())
            if parameter.default is parameter.empty
        }

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for word in kwargs:
                if word not in parameters:
                    near = f": give {meant[word]}" if word in meant else did_you_mean(word, known)
                    raise TypeError(f"{name} has no argument {word!r}{near}; {takes}")
            missing = [word for word, place in needed.items() if place >= len(args) and word not in kwargs]
            if missing:
                raise TypeError(f"{name} needs {' and '.join(missing)}; {takes}")
            return function(*args, **kwargs)

        return checked

    return decorate
