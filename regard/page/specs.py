"""Mechanisms and position schemes by name: what the page shows of them, and specs of a size it can draw."""

import dataclasses
import inspect
from typing import Any

from regard.spec import ATTENTION, POSITIONS, Registry, Spec, describe, parse

MOST = 512  # the largest number that an option may have, unless its default or an example is larger


def registry_entry(registry: Registry, name: str) -> dict[str, Any]:
    """The facts, options and examples of a name."""
    cls: Any = registry.find(name)
    facts = {key: value for key, value in dataclasses.asdict(cls.facts).items() if key != "refusals"}
    for cost in ("time", "memory", "state"):
        if facts.get(cost) is not None:
            text, exponent = facts[cost]
            facts[cost] = {"text": text, "exponent": exponent}
    options = [
        {
            "name": option.name,
            "type": describe(option.type),
            "default": None if option.required else option.default,
            "meaning": option.meaning,
        }
        for option in registry.options(name)
    ]
    about = inspect.getdoc(cls) or ""
    facts |= {"options": options, "examples": cls.examples, "about": about, "package": registry.source(name)}
    return facts | {"nests": getattr(cls, "nests", False)}


def check_sizes(spec: str, kind: str = "attention") -> str:
    """A spec whose numbers are small enough to be drawn; refuses others."""
    registry = {"attention": ATTENTION, "position": POSITIONS}[kind]
    parsed = parse(spec)
    _check(registry, parsed, 0)
    return str(parsed)


def _check(registry: Registry, spec: Spec, depth: int) -> None:
    if depth > 3 or len(spec.parts) > 8:
        raise ValueError("the spec is nested too deeply or too widely to be shown: use fewer parts")
    cls: Any = registry.find(spec.name)
    usual = [(option.name, option.default) for option in registry.options(spec.name)]
    usual += [option for example in cls.examples for option in parse(example).options]
    for name, value in spec.options:
        most = max([MOST, *(number for key, number in usual if key == name and isinstance(number, int))])
        for number in value if isinstance(value, tuple | list) else [value]:
            if isinstance(number, int | float) and not abs(number) <= most:
                raise ValueError(f"option {name!r} of {spec.name!r} is shown up to {most}, got {number}")
    for part in spec.parts:
        _check(registry, part, depth + 1)
