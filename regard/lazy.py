"""Public names of a package that are imported when they are first used: `regard --help` need not wait for PyTorch."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package, for names by the modules of it that define them.

    >>> __getattr__, __dir__ = lazy_names(__name__, {"Classifier": "classifier"})
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return get, lambda: sorted(modules)
