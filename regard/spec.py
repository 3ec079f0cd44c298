"""Spec strings and the closed registries they name.

`"longformer(window=256, globals=16)"` is a name with options; `"heads(local(window=64), strided(stride=8))"` nests.
Values follow the rules of `ast.literal_eval`; names are looked up among the classes found in one package of Regard and
those that installed packages name as entry points (see plugins.py), and nowhere else. So a spec string can never choose
what is imported or called.
"""

import ast
import importlib
import inspect
import math
import pkgutil
import types
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from regard.aliases import ALIASES, OLD_VALUES, SETTINGS
from regard.keywords import did_you_mean
from regard.plugins import Plugins

Kind = Literal["attention", "feedforward", "position"]

LONGEST = 10_000  # characters of a spec
LARGEST = 2**31 - 1  # of whole numbers in options


@dataclass(frozen=True)
class Spec:
    """A parsed spec string: a name, nested specs, options."""

    name: str
    parts: tuple["Spec", ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def heads(self) -> int:
        """The smallest number of heads that divides among the nested specs."""
        return len(self.parts) * math.lcm(*(part.heads for part in self.parts)) if self.parts else 1

    def __str__(self) -> str:
        inside = [str(part) for part in self.parts] + [f"{key}={value!r}" for key, value in self.options]
        return f"{self.name}({', '.join(inside)})" if inside else self.name


@dataclass(frozen=True)
class Option:
    """One option of a registered class: what `regard explain` prints of it."""

    name: str
    type: Any
    default: Any
    meaning: str

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty


def parse(text: "str | Spec") -> Spec:
    """The spec a string stands for; a ValueError says where the string goes wrong."""
    if isinstance(text, Spec):
        return text
    if not isinstance(text, str):
        raise ValueError(f"a spec is a string such as 'local(window=64)', got {type(text).__name__}: {text!r}")
    text = _bounded(text)
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"cannot read the spec {_short(text)}: expected a form such as 'local(window=64)'") from None
    return _read(tree, text)


def _bounded(text: str) -> str:
    """Without white space around it; what is far too long for a spec is refused before a parser reads it."""
    if len(text) > LONGEST:
        raise ValueError(f"a spec has at most {LONGEST:,} characters, got {len(text):,}: {_short(text)}")
    return text.strip()


def _short(text: str) -> str:
    """A spec as it is shown in errors."""
    return repr(text if len(text) <= 200 else f"{text[:120]} ... {text[-40:]}")


def over_layers(specs: "str | Spec | Sequence[str | Spec]", layers: int) -> list[Spec]:
    """One spec a layer: a list (also written `"[local(window=64), softmax]"`) is repeated until the layers run out."""
    listed = spec_list(specs)
    if len(listed) > layers:
        raise ValueError(f"{len(listed)} specs for {layers} layers: give at most one spec a layer")
    return [listed[layer % len(listed)] for layer in range(layers)]


def spec_list(specs: "str | Spec | Sequence[str | Spec]") -> list[Spec]:
    """One spec or several, as a list."""
    if isinstance(specs, Spec) or (isinstance(specs, str) and not specs.strip().startswith("[")):
        return [parse(specs)]
    if not specs:
        raise ValueError("the list of specs is empty; name at least one mechanism")
    # a list is read as it would be written: YAML, which knows no parentheses, may have cut a spec at its commas
    text = _bounded(specs if isinstance(specs, str) else f"[{', '.join(map(str, specs))}]")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if not isinstance(tree, ast.List):
        raise ValueError(f"cannot read the list of specs {_short(text)}: expected '[local(window=64), softmax]'")
    if not tree.elts:
        raise ValueError("the list of specs is empty; name at least one mechanism")
    return [_read(item, text) for item in tree.elts]


def _read(tree: ast.expr, text: str) -> Spec:
    if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        return parse(tree.value)
    if isinstance(tree, ast.Name):
        return Spec(tree.id)
    if not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)):
        raise ValueError(f"cannot read the spec {_short(text)}: expected a name, or a name with options in parentheses")
    options = []
    for keyword in tree.keywords:
        if keyword.arg is None:
            raise ValueError(f"cannot read the spec {_short(text)}: '**' is not allowed, write option=value")
        try:
            value = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            if isinstance(keyword.value, ast.Name):
                _check_word(tree.func.id, keyword.arg, keyword.value.id)
            raise ValueError(
                f"option {keyword.arg!r} in {_short(text)} must be a plain value (number, string, True, None, list or "
                f"tuple), got {_short(ast.get_source_segment(text, keyword.value) or '')}"
            ) from None
        options.append((keyword.arg, value))
    repeated = {key for key, _ in options if [k for k, _ in options].count(key) > 1}
    if repeated:
        raise ValueError(f"option {sorted(repeated)[0]!r} is given twice in {_short(text)}")
    return Spec(tree.func.id, tuple(_read(part, text) for part in tree.args), tuple(options))


def _check_word(name: str, option: str, word: str) -> None:
    """Refuses a word as the value of a known option, by what that option takes."""
    for registry in REGISTRIES.values():
        meant = registry.canonical(Spec(name)).name
        known = {one.name: one for one in registry.options(meant)} if meant in registry else {}
        if option in known:
            kind, default = known[option].type, known[option].default
            advice = "" if known[option].required or default is None else f", such as {name}({option}={default!r})"
            if fits(word, kind):
                advice = f": write it in quotes, {name}({option}={word!r})"
            raise ValueError(
                f"option {option!r} of {name!r} must be {describe(kind)}, got {_short(word)[1:-1]}{advice}"
            )


class Registry:
    """The classes of one package by the name in their `facts`, found by looking at its files: a new file suffices.
    Those of other people's packages are found by their entry points, and loaded when they are named or listed."""

    def __init__(self, kind: Kind, package: str, base: str):
        self.kind: Kind = kind
        self.package = package
        self.plugins = Plugins(kind, f"regard.{kind}", self._taken, self._check)
        self._base = base  # in `base.py` of the package
        self._own: dict[str, type] | None = None
        self._added: dict[str, type] = {}

    @property
    def base(self) -> type:
        """The class that all of them are built on."""
        return getattr(importlib.import_module(f"{self.package}.base"), self._base)

    @property
    def own(self) -> dict[str, type]:
        """Those of Regard itself."""
        if self._own is None:
            classes: dict[str, type] = {}
            path = importlib.import_module(self.package).__path__
            for module_name in sorted(module.name for module in pkgutil.iter_modules(path)):
                module = importlib.import_module(f"{self.package}.{module_name}")
                classes |= {cls.facts.name: cls for cls in classes_of(module)}
            self._own = classes
        return self._own

    @property
    def classes(self) -> dict[str, type]:
        """All, those of other packages behind ours."""
        return self.own | self.plugins.load_all() | self._added

    def __contains__(self, name: str) -> bool:
        """Whether a name is known; it need not be loaded for that."""
        return name in self.own or name in self._added or name in self.plugins.points()

    def add(self, cls: type) -> None:
        """Registers a class of one's own in this process: to try a mechanism that no package brings yet."""
        name = getattr(getattr(cls, "facts", None), "name", cls.__name__)
        self._check(name, cls)
        if self._added.get(name, cls) is not cls or name in self._taken():
            raise ValueError(f"{self.kind} {name!r} exists already: give the facts of {cls.__name__} another name")
        self._added[name] = cls

    def source(self, name: str) -> str | None:
        """The package that a name comes from, with its version; None: Regard itself."""
        if name in self.own:
            return None
        return self._added[name].__module__ if name in self._added else self.plugins.package(name)

    def _taken(self) -> set[str]:
        return {*self.own, *ALIASES[self.kind], *SETTINGS}

    def _check(self, name: str, value: Any) -> type:
        """The class that an entry point names, or the only one of a module."""
        found = classes_of(value) if isinstance(value, ModuleType) else [value]
        base = self.base
        if len(found) != 1 or not (isinstance(found[0], type) and issubclass(found[0], base)):
            got = (
                f"{len(found)} classes with facts in {value.__name__}" if isinstance(value, ModuleType) else repr(value)
            )
            raise ValueError(f"expected a class that is built on {base.__module__}.{base.__name__}, got {got}")
        cls = found[0]
        for attribute, meaning in (("facts", "what it declares of itself"), ("examples", "small specs for the suite")):
            if not getattr(cls, attribute, None):
                raise ValueError(f"{cls.__name__} has no {attribute}: {meaning}; write {attribute} = ... in the class")
        if cls.facts.name != name:
            raise ValueError(f"the facts of {cls.__name__} name it {cls.facts.name!r}, not {name!r}: both must agree")
        strangers = [text for text in cls.examples if parse(text).name != name]
        if strangers:
            raise ValueError(f"an example of {cls.__name__} names another: {strangers[0]!r}")
        missing = sorted(getattr(cls, "__abstractmethods__", ()))
        if missing:
            raise ValueError(f"{cls.__name__} does not write {', '.join(missing)}")
        return cls

    def names(self) -> list[str]:
        return sorted(self.classes)

    def aliases(self, name: str) -> list[str]:
        """What else a name may be called."""
        return [alias for alias, spec in ALIASES[self.kind].items() if parse(spec).name == name]

    def canonical(self, spec: "str | Spec") -> Spec:
        """The spec in our names and values: an alias becomes what it stands for, the options of the spec override its
        options, and the old spelling of a value becomes that of today."""
        spec = parse(spec)
        parts = tuple(self.canonical(part) for part in spec.parts)
        meant = parse(ALIASES[self.kind].get(spec.name.lower(), spec.name))
        name = meant.name if meant.name in self else meant.name.lower()
        options = dict(meant.options) | dict(spec.options)
        for option, values in OLD_VALUES.get(self.kind, {}).get(name, {}).items():
            if isinstance(options.get(option), str):
                options[option] = values.get(options[option], options[option])
        return Spec(name if name in self else spec.name, parts, tuple(options.items()))

    def find(self, name: str) -> type:
        name = self.canonical(Spec(name)).name
        if name in self.own or name in self._added:
            return self.own.get(name) or self._added[name]
        if name in self.plugins.points():
            return self.plugins.load(name)
        if name.lower() in SETTINGS:
            raise ValueError(f"unknown {self.kind} {name!r}: {SETTINGS[name.lower()]}")
        near = did_you_mean(name, [*self.names(), *ALIASES[self.kind]])
        raise ValueError(f"unknown {self.kind} {name!r}{near}; known: {', '.join(self.names())}")

    def options(self, name: str) -> list[Option]:
        """The options of a name, read from the keyword-only arguments of its class."""
        init = self.find(name).__init__
        parameters = [
            p for p in inspect.signature(init).parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY
        ]
        # a class without options may inherit a signature that only type checkers can resolve
        hints = get_type_hints(init, include_extras=True) if parameters else {}
        options = []
        for parameter in parameters:
            hint = hints[parameter.name]
            meaning = hint.__metadata__[0] if get_origin(hint) is Annotated else ""
            kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
            options.append(Option(parameter.name, kind, parameter.default, meaning))
        return options

    def build(self, spec: "str | Spec", shape: Any) -> Any:
        """What a spec names: `Class(shape, **options)`, or `Class(shape, parts, **options)` where it nests specs."""
        spec = self.canonical(spec)
        cls = self.find(spec.name)
        known = {option.name: option for option in self.options(spec.name)}
        for key, value in spec.options:
            if key not in known:
                listed = f"it takes {', '.join(known)}" if known else "it takes none"
                raise ValueError(
                    f"{self.kind} {spec.name!r} has no option {key!r}{did_you_mean(key, list(known))}; {listed}"
                )
            if not fits(value, known[key].type):
                expected = describe(known[key].type)
                raise ValueError(f"option {key!r} of {spec.name!r} must be {expected}, got {value!r}")
            for number in value if isinstance(value, tuple | list) else (value,):
                _check_number(number, f"option {key!r} of {spec.name!r}")
        missing = [name for name, option in known.items() if option.required and name not in dict(spec.options)]
        if missing:
            raise ValueError(f"{self.kind} {spec.name!r} needs the option {missing[0]!r}: {known[missing[0]].meaning}")
        if getattr(cls, "nests", False):
            return cls(shape, spec.parts, **dict(spec.options))
        if spec.parts:
            raise ValueError(f"{self.kind} {spec.name!r} takes options by name only, got {str(spec.parts[0])!r}")
        return cls(shape, **dict(spec.options))


def classes_of(module: ModuleType) -> list[Any]:
    """The classes with facts that a module defines."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and "facts" in vars(value)
    ]


def _check_number(value: Any, what: str) -> None:
    """Numbers that no layer can be built with: negative ones, infinity, whole ones that sizes never reach."""
    if isinstance(value, int | float) and not 0 <= value < math.inf:
        raise ValueError(f"{what} must not be negative, and finite, got {value}")
    if isinstance(value, int) and value > LARGEST:
        raise ValueError(f"{what} must be at most {LARGEST:,}, got {value:,}")


def fits(value: Any, kind: Any) -> bool:
    """Whether a literal has the type an option asks for."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in inside)
    if origin in (Union, types.UnionType):
        return any(fits(value, choice) for choice in inside)
    if origin is tuple:
        return isinstance(value, tuple | list) and all(fits(item, inside[0]) for item in value)
    if kind is type(None) or kind is None:
        return value is None
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def describe(kind: Any) -> str:
    """An option's type in words."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(repr(choice) for choice in inside)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(choice) for choice in inside)
    if origin is tuple:
        several = {int: "whole numbers", float: "numbers", str: "strings"}
        count = "" if inside[-1] is Ellipsis else f"{len(inside)} "
        each = several.get(inside[0]) or f"values, each {describe(inside[0])}"
        return f"a list of {count}{each}"
    if origin in (list, Sequence):
        return "a list"
    names = {int: "a whole number", float: "a number", bool: "True or False", str: "a string", type(None): "None"}
    return names.get(kind, str(kind))


ATTENTION = Registry("attention", "regard.layers.attention", "Attention")
FEEDFORWARD = Registry("feedforward", "regard.layers.feedforward", "FeedForward")
POSITIONS = Registry("position", "regard.layers.position", "Position")
REGISTRIES = {registry.kind: registry for registry in (ATTENTION, FEEDFORWARD, POSITIONS)}

# the fields of a config that hold specs
FIELDS = {
    "attention": ATTENTION,
    "decoder_attention": ATTENTION,
    "cross_attention": ATTENTION,
    "pooling_attention": ATTENTION,
    "feedforward": FEEDFORWARD,
    "decoder_feedforward": FEEDFORWARD,
    "position": POSITIONS,
    "image_position": POSITIONS,
}


def packages_of(config: Any) -> dict[str, dict[str, str]]:
    """The packages that the names in the specs of a config come from, by kind and name; those of Regard left out."""
    found: dict[str, dict[str, str]] = {}
    for field, registry in FIELDS.items():
        specs = getattr(config, field, None)
        waiting = spec_list(specs) if specs else []
        while waiting:
            spec = registry.canonical(waiting.pop())
            waiting += spec.parts
            if (package := registry.source(spec.name)) is not None:
                found.setdefault(registry.kind, {})[spec.name] = package
    return found


def use_canonical_names(config: Any) -> None:
    """Puts the names of ours into the specs of a config, where they are written with aliases."""
    for name, registry in FIELDS.items():
        specs = getattr(config, name, None)
        if not specs:
            continue
        written = spec_list(specs)
        meant = [registry.canonical(spec) for spec in written]
        if meant != written:
            many = len(meant) > 1 or not isinstance(specs, str)
            value = [str(spec) for spec in meant] if many else str(meant[0])
            # configs are frozen
            object.__setattr__(config, name, value)
