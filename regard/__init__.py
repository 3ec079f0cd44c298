"""Regard: every attention, one Transformer. Train it, run it, see it, compare it.

A public name is imported when it is first used: `regard --help` need not wait for PyTorch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.api import attend, attention, facts, feedforward, names, position
    from regard.attention.base import Attention, Facts, detach, redraw, select
    from regard.interop.torch import from_torch, to_torch
    from regard.models.transformer import ModelConfig, Transformer
    from regard.show.notebook import show
    from regard.spec import over_layers

__all__ = [
    "Attention",
    "Facts",
    "ModelConfig",
    "Transformer",
    "attend",
    "attention",
    "detach",
    "facts",
    "feedforward",
    "from_torch",
    "names",
    "over_layers",
    "position",
    "redraw",
    "select",
    "show",
    "to_torch",
]
__version__ = "0.1.0"

# the module of each public name; the names above that are not here are in regard.api
_MODULES = {
    "Attention": "regard.attention.base",
    "Facts": "regard.attention.base",
    "ModelConfig": "regard.models.transformer",
    "Transformer": "regard.models.transformer",
    "detach": "regard.attention.base",
    "from_torch": "regard.interop.torch",
    "over_layers": "regard.spec",
    "redraw": "regard.attention.base",
    "select": "regard.attention.base",
    "show": "regard.show.notebook",
    "to_torch": "regard.interop.torch",
}


class _Package(ModuleType):
    """`regard.attention`, `regard.feedforward` and `regard.show` are functions. The import of a package of that name
    would put the package in their place."""

    def __getattr__(self, name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'regard' has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULES.get(name, "regard.api")), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in __all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
