"""What is to be checked, by the names that a user gives."""

import importlib
from types import ModuleType
from typing import Any, NamedTuple

from regard.spec import REGISTRIES, Kind, Registry, classes_of


class Target(NamedTuple):
    """A registered name."""

    kind: Kind
    name: str


def find(text: str) -> list[Target]:
    """What a name stands for: a word of `regard list`, a class as `module:Class`, or all that a module defines. A class
    that is not registered is registered in this process. A ValueError says what is wrong."""
    module, colon, attribute = text.partition(":")
    if text.isidentifier():
        words = [(registry, registry.canonical(text).name) for registry in REGISTRIES.values()]
        known = [(registry, word) for registry, word in words if word in registry]
        for registry, word in known:
            registry.find(word)  # a broken one says why
        if known:
            return [Target(registry.kind, word) for registry, word in known]
    loaded = _import(module, text)
    if colon:
        if not hasattr(loaded, attribute):
            raise ValueError(f"{text!r}: the module {module} has no {attribute!r}")
        return [_register(getattr(loaded, attribute), text)]
    found = classes_of(loaded)
    if not found:
        raise ValueError(f"{text!r}: the module defines no class with facts; name a class as {text}:Class")
    return [_register(cls, text) for cls in found]


def _import(module: str, text: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"nothing is called {text!r}: give a word of 'regard list', or what can be imported here as module:Class"
        ) from error


def _register(cls: Any, text: str) -> Target:
    for registry in REGISTRIES.values():
        if isinstance(cls, type) and issubclass(cls, registry.base):
            return Target(registry.kind, _add(registry, cls, text))
    bases = ", ".join(registry.base.__name__ for registry in REGISTRIES.values())
    raise ValueError(f"{text!r} is {cls!r}: expected a class that is built on one of {bases}")


def _add(registry: Registry, cls: Any, text: str) -> str:
    """The name of a class, which is registered unless it is already."""
    name = getattr(getattr(cls, "facts", None), "name", "")
    try:
        if name not in registry or registry.find(name) is not cls:
            registry.add(cls)
    except ValueError as error:
        raise ValueError(f"{text!r} cannot be checked: {error}") from error
    return cls.facts.name
