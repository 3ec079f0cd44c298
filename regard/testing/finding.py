"""What is to be checked, by the names that a user gives."""

import importlib
from types import ModuleType
from typing import Any, NamedTuple

from regard.layers.attention.projected import Projected
from regard.layers.position.base import Position
from regard.spec import REGISTRIES, Kind, Registry, classes_of

# methods of position schemes, and what the references read instead
TWINS = {"add": "plain_add", "rotate": "plain_rotate", "bias": "plain_bias", "scores": "plain_score"}


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
        if known:
            # a broken one says why
            return [Target(registry.kind, _add(registry, registry.find(word), text)) for registry, word in known]
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


def _lacks_reference(cls: type) -> str | None:
    """The method that a class would have to write for the suite to have something to compare with."""
    if issubclass(cls, Projected) and (cls.reference, cls.plain) == (Projected.reference, Projected.plain):
        return "plain(row)"
    if issubclass(cls, Position):
        for fast, slow in TWINS.items():
            if getattr(cls, fast) is not getattr(Position, fast) and getattr(cls, slow) is getattr(Position, slow):
                return slow
    return None


def _add(registry: Registry, cls: Any, text: str) -> str:
    """The name of a class, which is registered unless it is already."""
    name = getattr(getattr(cls, "facts", None), "name", "")
    try:
        if name not in registry or registry.find(name) is not cls:
            registry.add(cls)
        if missing := _lacks_reference(cls):
            raise ValueError(f"{cls.__name__} has no reference: write {missing}, the formula in loops")
    except ValueError as error:
        raise ValueError(f"{text!r} cannot be checked: {error}") from error
    return cls.facts.name
