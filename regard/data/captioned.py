"""Captions of pictures: CSV, TSV and JSON lines by the name of the file, with one or more captions per picture.

The first column names a picture, each other one has a caption; a picture may also be named in several rows. In JSON
lines a caption may be a list of them. Faults are those of data/text.py.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from regard.data.labelled import Column, csv_cells, file_format, table_cells
from regard.data.text import (
    CONTROL,
    LONGEST,
    BadText,
    Line,
    Skipped,
    checked_lines,
    leave_out,
    opened,
    raw_lines,
    shown,
)

COLUMNS = ("image", "caption")


class Captions(NamedTuple):
    """Pictures as the file names them, in the order in which it first does, the captions of each, and the lines that
    were skipped: reason -> `Skipped`."""

    pictures: list[str]
    captions: list[list[str]]
    skipped: dict[str, Skipped]


def read_captions(
    path: str | Path, *, columns: Sequence[Column] = COLUMNS, skip_bad: bool = False, longest: int = LONGEST
) -> Captions:
    """Captions from a .csv, .tsv or .jsonl file, plain, .gz or .xz. `columns` are those of the picture and of one or
    more captions: names, or, where there is no line of names, numbers counted from 0. Of several captions in a row some
    may be blank.

    The first bad line is an error; with `skip_bad`, it is skipped and counted.
    """
    if len(columns) < 2:
        raise ValueError(f"columns must be that of the picture and one or more of captions, got {list(columns)}")
    name, how = shown(path), file_format(path, "its captions")
    found: dict[str, list[str]] = {}
    skipped: dict[str, Skipped] = {}
    with ExitStack() as stack:
        stream = stack.enter_context(opened(path))
        if how == "csv":
            rows = table_cells(csv_cells(raw_lines(stream, name, longest), name, longest), name, columns)
        elif how == "tsv":
            lines = checked_lines(stream, name, longest)
            cells = (line if isinstance(line, BadText) else (line.number, line.text.split("\t")) for line in lines)
            rows = table_cells(cells, name, columns)
        else:
            rows = _json_rows(checked_lines(stream, name, longest), name, columns)
        for row in rows:
            row = row if isinstance(row, BadText) else _checked(*row, name)
            if isinstance(row, BadText):
                leave_out(row, skipped, skip_bad)
            else:
                picture, *captions = row
                found.setdefault(picture, []).extend(captions)
    if not found:
        summary = "; ".join(f"{reason}: {part.count}" for reason, part in skipped.items())
        raise BadText(name, None, "no caption left", f" after skipping bad lines ({summary})" * bool(summary))
    return Captions(list(found), list(found.values()), skipped)


def _checked(number: int, cells: list[str], name: str) -> list[str] | BadText:
    """The picture and its captions, each such that it can be encoded, on one line and without blanks around it."""
    picture, *captions = (cell.strip() for cell in cells)
    captions = [" ".join(caption.split()) for caption in captions if caption]
    if not picture:
        return BadText(name, number, "empty picture")
    if not captions:
        return BadText(name, number, "empty caption")
    for value in (picture, *captions):
        if any("\ud800" <= character <= "\udfff" for character in value):
            return BadText(name, number, "not UTF-8", ": half of a character")
        if bad := CONTROL.search(value):
            reason = "NUL character" if bad[0] == "\0" else "control character"
            return BadText(name, number, reason, f" U+{ord(bad[0]):04X}")
    return [picture, *captions]


def _json_rows(
    lines: Iterator[Line | BadText], name: str, columns: Sequence[Column]
) -> Iterator[tuple[int, list[str]] | BadText]:
    if not all(isinstance(column, str) for column in columns):
        raise ValueError(f"columns of JSON lines are names, such as image and caption, got {list(columns)}")
    for line in lines:
        yield line if isinstance(line, BadText) else _json_row(line, name, columns)


def _json_row(line: Line, name: str, columns: Sequence[Column]) -> tuple[int, list[str]] | BadText:
    try:
        values = json.loads(line.text)
    except (ValueError, RecursionError) as error:
        return BadText(name, line.number, "not JSON", f": {error}")
    if not isinstance(values, dict):
        return BadText(name, line.number, "not a JSON object", f": {line.text[:40]!r}")
    for column in columns:
        if column not in values:
            known = ", ".join(list(values)[:10])
            return BadText(name, line.number, f"no field {column!r}", f": it has {known}; columns says which to read")
    picture, *others = (values[column] for column in columns)
    captions = [text for other in others for text in (other if isinstance(other, list) else [other])]
    # the pictures of an array have numbers
    if not isinstance(picture, str | int) or isinstance(picture, bool):
        return BadText(name, line.number, "the picture is neither a name nor a number", f": {picture!r:.40}")
    if not all(isinstance(text, str) for text in captions):
        return BadText(name, line.number, "a caption is not a string", f": {captions!r:.40}")
    return line.number, [str(picture), *captions]
