"""timm, a library of vision models to compare ours with. It asks for torchvision at import, of which no build for the
CPU is published.

No model needs torchvision to run: its pictures and data sets are for timm.data alone. Where it is missing, modules of
its name stand for it while timm is imported, and are gone afterwards, so nobody else mistakes them for torchvision.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

NAMES = ("", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".datasets")


class _Placeholder(type):
    """The class of a class with every attribute, each another such class: enough to be named or inherited from."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder(name, (), {})


class _Module(ModuleType):
    __path__ = ()  # so it counts as a package, with submodules

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder(name, (), {})


@contextmanager
def _torchvision() -> Iterator[None]:
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    modules = {f"torchvision{name}": _Module(f"torchvision{name}") for name in NAMES}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


with _torchvision():
    import timm  # noqa: F401  (what tests import from here)
