"""Values from outside against the part of JSON Schema that our servers use."""

from typing import Any

from regard.http.refused import Refused

KINDS: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


def check(value: Any, schema: dict[str, Any], name: str = "the request") -> None:
    """Refuses a value that does not match a schema."""
    choices = schema.get("anyOf", [schema])
    alike = [choice for choice in choices if _is(value, choice["type"])]
    if not alike:
        raise Refused(400, f"{name} must be of type {' or '.join(choice['type'] for choice in choices)}", param=name)
    for number, choice in enumerate(alike, 1):
        try:
            _check_kind(value, choice, name)
            return
        except Refused:
            if number == len(alike):
                raise


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, KINDS[kind]) and isinstance(value, bool) == (kind == "boolean")


def _check_kind(value: Any, schema: dict[str, Any], name: str) -> None:
    if isinstance(value, str):
        _check_text(value, schema, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        # NaN is not between any two numbers
        if not schema["minimum"] <= value <= schema["maximum"]:
            raise Refused(400, f"{name} must be from {schema['minimum']} to {schema['maximum']}", param=name)
    elif isinstance(value, list):
        least, most = schema.get("minItems", 0), schema["maxItems"]
        if not least <= len(value) <= most:
            need = f"at most {most}" if not least else f"{least} to {most}"
            raise Refused(400, f"{name} must have {need} items, got {len(value)}", param=name)
        for number, item in enumerate(value):
            check(item, schema["items"], f"{name}[{number}]")
    elif isinstance(value, dict) and "properties" in schema:
        _check_fields(value, schema, name)
    if "enum" in schema and value not in schema["enum"]:
        raise Refused(400, f"{name} must be one of {', '.join(map(str, schema['enum']))}", param=name)


def _check_text(value: str, schema: dict[str, Any], name: str) -> None:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if len(value) < least or (most is not None and len(value) > most):
        raise Refused(400, f"{name} must have {least} to {most:,} characters, got {len(value):,}", param=name)
    if not _is_whole(value):
        raise Refused(400, f"{name} holds half of a character (a lone surrogate)", param=name)


def _is_whole(text: str) -> bool:
    """Whether a text has no half of a character, which cannot be written."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_fields(value: dict[str, Any], schema: dict[str, Any], name: str) -> None:
    missing = [field for field in schema.get("required", ()) if field not in value]
    if missing:
        raise Refused(400, f"{name} needs {missing[0]!r}", param=missing[0])
    for field, part in value.items():
        if field not in schema["properties"]:
            known = ", ".join(schema["properties"])
            param = field[:40] if _is_whole(field) else None
            raise Refused(400, f"{name} has no field {field[:40]!r}; it takes {known}", param=param)
        check(part, schema["properties"][field], field)
