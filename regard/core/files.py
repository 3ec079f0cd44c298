"""Small files of settings, read within bounds: reading ends soon, in little memory, or with an error in words.

A pipe could block forever, a device never end; a few lines of YAML can stand for gigabytes (aliases of aliases) or nest
so deep that a parser overflows its stack.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

LARGEST = 64 * 2**20  # bytes of a file of settings
DEEPEST = 64  # lists and objects within each other
MOST = 1_000_000  # values in a file, each alias counted as what it stands for


def check_regular(path: str | Path, what: str = "a file") -> None:
    """Refuses folders, pipes and devices in words; a file that is not there is an OSError."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise ValueError(f"{path} is a folder, expected {what}")
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is a pipe or a device, expected {what}")


def check_inside(path: str | Path, folder: str | Path) -> None:
    """Refuses a path that leads out of its folder, by a symbolic link or by its name."""
    if not Path(path).resolve().is_relative_to(Path(folder).resolve()):
        raise ValueError(f"{path} leads out of {folder}, to {Path(path).resolve()}: it is not followed")


def read_bytes(path: str | Path, limit: int = LARGEST) -> bytes:
    """All of a regular file of at most `limit` bytes."""
    check_regular(path)
    with open(path, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} has more than {limit:,} bytes: it is no file of settings")
    return data


def decode_text(data: bytes, name: str | Path) -> str:
    """UTF-8 text; for other bytes the error names the encoding that they look like."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{name}:{line}: not UTF-8{describe_bad_byte(data, error.start)}") from error


def describe_bad_byte(data: bytes, at: int) -> str:
    """The byte that is not UTF-8 and what to do about it, as the end of a sentence."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return ": the file begins like UTF-16; convert it: iconv -f UTF-16 -t UTF-8"
    place = f": byte 0x{data[at]:02x} at byte {at + 1}"
    try:
        character = data[at : at + 1].decode("cp1252")
    except UnicodeDecodeError:
        return place
    return f"{place}, which is {character!r} in Windows-1252 (cp1252); convert the file: iconv -f CP1252 -t UTF-8"


def parse_json(text: str | bytes, name: str | Path) -> Any:
    """What JSON stands for; `name` is said in errors."""
    try:
        return json.loads(text if isinstance(text, str) else decode_text(text, name))
    except RecursionError as error:
        raise ValueError(f"{name} is not readable JSON: it nests too deep") from error
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        raise ValueError(f"{name} is not readable JSON: {error}") from error


def parse_rows(text: str, name: str | Path, fields: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The texts of these fields, from one JSON object per line."""
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line:
            values = parse_json(line, f"{name}:{number}")
            row = tuple(values.get(field) if isinstance(values, dict) else None for field in fields)
            if not all(isinstance(text, str) for text in row):
                raise ValueError(f"{name}:{number} must be a JSON object with texts as {' and '.join(fields)}")
            rows.append(row)
    return rows


def parse_yaml(text: str, name: str | Path) -> Any:
    """What YAML stands for; `name` is said in errors."""
    import yaml

    try:
        check_yaml(text)
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # a ValueError: a date with a 13th month, a number of 5,000 digits
        raise ValueError(f"{name} is not readable YAML: {' '.join(str(error).split())}") from error


class _Keys:
    """The keys of a map of YAML, whose nodes are key, value, key, value ..."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.is_key = True

    def add(self, scalar: str | None) -> None:
        import yaml

        if self.is_key and scalar is not None:
            if scalar in self.seen:
                raise yaml.YAMLError(f"it has the key {scalar!r} twice: keep one")
            self.seen.add(scalar)
        self.is_key = not self.is_key


def check_yaml(text: str) -> None:
    """Raises yaml.YAMLError for what nests deeper than DEEPEST, stands for more than MOST values, or says a key twice:
    YAML forbids it, but its parser takes the last one in silence."""
    import yaml

    sizes: dict[str, int] = {}  # of each anchor: the values it stands for
    open_nodes: list[tuple[str | None, int]] = []  # anchor, and the values before it
    keys: list[_Keys | None] = [None]  # of each open node that is a map
    count = 0
    # a token at a time, without recursion
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.NodeEvent) and keys[-1] is not None:
            keys[-1].add(event.value if isinstance(event, yaml.ScalarEvent) else None)
        if isinstance(event, yaml.CollectionStartEvent):
            keys.append(_Keys() if isinstance(event, yaml.MappingStartEvent) else None)
        elif isinstance(event, yaml.CollectionEndEvent):
            keys.pop()
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, count))
            if len(open_nodes) > DEEPEST:
                raise yaml.YAMLError(f"it nests more than {DEEPEST} lists and maps into each other")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor is not None:
                sizes[anchor] = count - before
        elif isinstance(event, yaml.AliasEvent):
            count += sizes.get(event.anchor, 0)
        elif isinstance(event, yaml.ScalarEvent) and event.anchor is not None:
            sizes[event.anchor] = 1
        count += 1
        if count > MOST:
            raise yaml.YAMLError(f"it stands for more than {MOST:,} values, aliases included")
