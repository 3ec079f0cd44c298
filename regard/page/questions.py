"""The values of a question, as annotations of the method that answers it. The server checks requests by them and
publishes them as OpenAPI."""

import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

TYPES = {str: "string", int: "integer", list: "array", dict: "object"}


class Bounds:
    """Keywords of JSON Schema that an annotation adds to its type."""

    def __init__(self, **keywords: Any):
        self.keywords = keywords


def chars(least: int, most: int) -> Bounds:
    """Bounds of the number of characters in a text."""
    return Bounds(minLength=least, maxLength=most)


def whole(least: int, most: int) -> Bounds:
    """Bounds of an integer."""
    return Bounds(minimum=least, maximum=most)


Name = Annotated[str, chars(1, 200)]
Text = Annotated[str, chars(0, 60_000)]
SpecText = Annotated[str, chars(1, 300)]
Place = Literal["encoder", "decoder", "cross", "aligner"]
Index = Annotated[int, whole(0, 999)]  # the number of a layer or a head


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a function's arguments that a request holds: all but callables."""
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = [part for part in inspect.signature(function).parameters.values() if part.name in hints]
    properties = {part.name: _schema(hints[part.name]) for part in parameters}
    properties = {name: schema for name, schema in properties.items() if schema is not None}
    required = [part.name for part in parameters if part.default is part.empty and part.name in properties]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _schema(hint: Any) -> dict[str, Any] | None:
    """The schema of a type; None if no request can hold it."""
    if typing.get_origin(hint) is Annotated:
        plain, *bounds = typing.get_args(hint)
        return (_schema(plain) or {}) | {name: value for bound in bounds for name, value in bound.keywords.items()}
    if typing.get_origin(hint) is Literal:
        return {"type": "string", "enum": list(typing.get_args(hint))}
    options = [part for part in typing.get_args(hint) if part is not type(None)]
    if type(None) in typing.get_args(hint) and len(options) == 1:
        return _schema(options[0])
    kind = TYPES.get(typing.get_origin(hint) or hint)
    return None if kind is None else {"type": kind}
