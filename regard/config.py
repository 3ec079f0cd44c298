"""Dataclasses as config files and as flags of the command line.

`parse` reads a command line: a YAML file first (`--config`), then dotted flags over it. An unknown key is an
error. `from_json` reads back what a run keeps of its config.

A field that was renamed says its old name in its metadata, `renamed("old name", default)`. Files and flags with the old
name are read as before; what is written has the new one.
"""

import argparse
import dataclasses
import difflib
import functools
import json
import os
import re
import reprlib
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, TypeGuard

from regard.core.files import check_yaml, decode_text, parse_yaml, read_bytes
from regard.core.options import options
from regard.spec import describe

LONGEST_MESSAGE = 1000  # characters that are shown of what a parser says


def renamed(before: str, default: Any) -> Any:
    """A field of a dataclass that had another name before."""
    return dataclasses.field(default=default, metadata={"before": before})


def is_section(hint: Any) -> TypeGuard[type]:
    """Whether the type of a field is a dataclass of settings of its own."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def parse(cls: type, argv: list[str], program: str, description: str) -> Any:
    """A config from a command line. --help and --print_config print and exit; bad input raises ValueError."""
    from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter

    class Formatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
        def _expand_help(self, action: argparse.Action) -> str:
            return _without_null(super()._expand_help(action))

    argv = _with_new_names(cls, argv)
    _bound_yaml()
    parser = ArgumentParser(prog=program, description=description, exit_on_error=False, formatter_class=Formatter)
    parser.add_argument(
        "--config", action="config", help="recipe, or YAML file with any of the keys below; flags override it"
    )
    parser.add_class_arguments(for_flags(cls), as_group=False)
    try:
        values = parser.parse_args(argv).as_dict()
    except RecursionError as error:
        raise ValueError(f"a value nests too deep; see {program} --help") from error
    except ArgumentError as error:
        message = " ".join(str(error).split())
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[: LONGEST_MESSAGE // 2]} ... {message[-LONGEST_MESSAGE // 2 :]}"
        if message.startswith("Unexpected config"):
            raise ValueError(f"the config is not a YAML file of keys and values; see {program} --help") from error
        wrong = re.search(r'Parser key "([\w.]+)": .*(?:Given|Got) value: (.*)$', message)
        if wrong and wrong[1] in names(cls):
            expected = _described(cls, wrong[1])
            raise ValueError(f"{wrong[1]} must be {expected}, got {wrong[2]!r}; see {program} --help") from error
        unknown = re.search(r"(?:unrecognized arguments: |Key )'?(?:--)?([\w.]+)", message)
        hint = near(unknown[1], names(cls)) if unknown else ""
        raise ValueError(f"{message}{hint}; see {program} --help") from error
    values.pop("config", None)
    return from_json(cls, values)


def _without_null(text: str) -> str:
    """The help of a flag whose default is null, without it: the text says what is done then."""
    found = re.search(r" \(type: (.*), default: null\)$", text)
    if found is None:
        return text
    kind = re.sub(r"^Optional\[(.*)\]$", r"\1", found[1]).replace(" | null", "").replace(", null]", "]")
    return f"{text[: found.start()]} (type: {kind})"


@functools.cache
def for_flags(cls: type) -> type:
    """A dataclass of the same options with plain types, and their help in a docstring, where the parser looks."""
    title = " ".join((cls.__doc__ or "").split()).split(". ")[0].removesuffix(".")
    fields, lines = [], [f"{title}.\n\nArgs:"]
    for option in options(cls).values():
        kind, default = option.type, option.default
        if is_section(kind):
            kind = for_flags(kind)
            values = {field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
            fields.append((option.name, kind, dataclasses.field(default_factory=functools.partial(kind, **values))))
            continue
        fields.append((option.name, kind, dataclasses.field(default=default)))
        lines.append(f"    {option.name}: {option.help}")
    made = dataclasses.make_dataclass(cls.__name__, fields, frozen=True)
    made.__doc__ = "\n".join(lines)
    return made


def _with_new_names(cls: type, argv: list[str]) -> list[str]:
    """A command line without the old names of fields. Config files that would not end, or are no text, are refused."""
    sections = [name for name, hint in typing.get_type_hints(cls).items() if is_section(hint)]
    before, argv = old_names(cls), list(argv)
    for index, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--")
        if flag.startswith("--") and name in before:
            argv[index] = f"--{before[name]}{equals}{value}"
        elif flag.startswith("--") and name in ("config", *sections):
            path = value or "".join(argv[index + 1 : index + 2])
            made = _renamed_file(cls if name == "config" else typing.get_type_hints(cls)[name], path, flag)
            if made is not None and equals:
                argv[index] = f"{flag}={made}"
            elif made is not None:
                argv[index + 1] = made
    return argv


def _renamed_file(cls: type, path: str, flag: str) -> str | None:
    """A config file as YAML with the names that fields have now; None where it has no old one, or is no file."""
    # what is no file is YAML itself, or said to be missing
    if len(path) >= 4096 or not os.path.exists(path):
        return None
    values = parse_yaml(decode_text(read_bytes(path), f"{flag} {path}"), f"{flag} {path}")
    made = new_names(cls, values)
    return None if made == values else json.dumps(made, default=str)


def old_names(cls: type, section: str = "") -> dict[str, str]:
    """The dotted names that fields had before, each with the name that it has now."""
    renames, hints = {}, typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        if is_section(hints[item.name]):
            renames |= old_names(hints[item.name], f"{section}{item.name}.")
        elif "before" in item.metadata:
            renames[section + item.metadata["before"]] = section + item.name
    return renames


def new_names(cls: type, values: Any) -> Any:
    """Values of a config, or of a section of it, with fields that were renamed under the names they have now."""
    if not isinstance(values, dict):
        return values
    before, hints = old_names(cls), typing.get_type_hints(cls)
    made = {}
    for name, value in values.items():
        if before.get(name) in values:
            raise ValueError(f"{name} is the old name of {before[name]}: give one of them")
        made[before.get(name, name)] = new_names(hints[name], value) if is_section(hints.get(name)) else value
    return made


@functools.cache
def _bound_yaml() -> None:
    """Has jsonargparse refuse YAML without bounds, in files and in flags."""
    import yaml
    from jsonargparse import get_loader, set_loader

    plain = get_loader("yaml")

    def load(text: str) -> Any:
        check_yaml(text)
        return plain(text)

    set_loader("yaml", load, exceptions=(yaml.YAMLError, ValueError))


def names(cls: type, before: str = "") -> list[str]:
    """The dotted names of all fields."""
    dotted = []
    for name, hint in typing.get_type_hints(cls).items():
        dotted += names(hint, f"{before}{name}.") if is_section(hint) else [before + name]
    return dotted


def _described(cls: type, name: str) -> str:
    """In words, what the field of a dotted name takes."""
    hint: Any = cls
    for part in name.split("."):
        hint = typing.get_type_hints(hint)[part]
    return describe(hint).replace("True or False", "true or false").replace("None", "null")


def near(name: str, known: list[str]) -> str:
    """The end of an error about an unknown name, where a known one is like it."""
    close = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def from_json(cls: type, values: dict[str, Any]) -> Any:
    """A config from plain values, field by field: an unknown name, or a value of the wrong type, is an error."""
    fields = {item.name: item for item in dataclasses.fields(cls)}
    if not isinstance(values, dict):
        raise ValueError(f"expected the fields of {cls.__name__}: {', '.join(fields)}; got {reprlib.repr(values)}")
    values = new_names(cls, values)
    unknown = set(values) - set(fields)
    if unknown:
        raise ValueError(f"{cls.__name__} has no {', '.join(sorted(unknown))}; it has {', '.join(fields)}")
    hints = typing.get_type_hints(cls)
    return cls(**{name: fit(hints[name], value, name) for name, value in values.items()})


def change(config: Any, name: str, value: Any) -> Any:
    """A config with another value of a dotted name."""
    section, _, rest = name.partition(".")
    hints = typing.get_type_hints(type(config))
    if section not in hints:
        raise ValueError(f"{type(config).__name__} has no {name}")
    if rest:
        return dataclasses.replace(config, **{section: change(getattr(config, section), rest, value)})
    return dataclasses.replace(config, **{section: fit(hints[section], value, section)})


def fit(hint: Any, value: Any, name: str) -> Any:
    """The value as the type says: JSON has lists for tuples and whole numbers for fractions."""
    if is_section(hint):
        return from_json(hint, value)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for part in arguments:
            try:
                return fit(part, value, name)
            except ValueError:
                continue
    elif origin is Literal:
        if value in arguments:
            return value
    elif origin is tuple and isinstance(value, (list, tuple)):
        parts = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(parts) == len(value):
            return tuple(fit(part, item, name) for part, item in zip(parts, value, strict=True))
    elif origin is dict and isinstance(value, dict):
        return value
    elif origin in (list, Sequence) and isinstance(value, list | tuple):
        return [fit(arguments[0], item, name) for item in value]
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ValueError(f"{name} must be {describe(hint)}, got {reprlib.repr(value)}")
