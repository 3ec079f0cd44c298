"""Regard: every attention, one Transformer. Train it, run it, see it, compare it.

A public name is imported when it is first used: `regard --help` need not wait for PyTorch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.api import attend, attention, facts, feedforward, names, position
    from regard.core.draws import redraw
    from regard.core.state import detach, merge, select
    from regard.interop.torch import from_torch, to_torch
    from regard.layers.attention.base import Attention, Facts
    from regard.models.config import ModelConfig
    from regard.models.transformer import Transformer
    from regard.page.notebook import show
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
    "merge",
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
    "Attention": "regard.layers.attention.base",
    "Facts": "regard.layers.attention.base",
    "ModelConfig": "regard.models.transformer",
    "Transformer": "regard.models.transformer",
    "detach": "regard.core.state",
    "from_torch": "regard.interop.torch",
    "merge": "regard.core.state",
    "over_layers": "regard.spec",
    "redraw": "regard.core.draws",
    "select": "regard.core.state",
    "show": "regard.page.notebook",
    "to_torch": "regard.interop.torch",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES.get(name, "regard.api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
