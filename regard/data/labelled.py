"""Texts and their labels: CSV, TSV and JSON lines by the name of the file, or two files with a line for a line.

Each may be compressed (.gz, .xz). Faults are those of data/text.py, reported with file and line, or skipped and
counted. A text may hold line breaks where its format can write them: in quotes in CSV, as \\n in JSON.
"""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from regard.data.text import (
    CONTROL,
    LONGEST,
    BadText,
    Line,
    Skipped,
    checked,
    checked_lines,
    leave_out,
    line_pairs,
    opened,
    raw_lines,
    shown,
)

PACKED = (".gz", ".xz")
FORMATS = {".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
MOST_LABELS = 1000  # more are no labels, but texts of a column that was mistaken for one

Column = str | int
Example = tuple[str, str]


class Labelled(NamedTuple):
    """Texts, the label of each, the lines that were skipped: reason -> `Skipped`, and the line where each begins,
    counted from 1."""

    texts: list[str]
    labels: list[str]
    skipped: dict[str, Skipped]
    lines: list[int]


def read_labelled(
    texts: str | Path,
    labels: str | Path | None = None,
    *,
    columns: tuple[Column, Column] = ("text", "label"),
    skip_bad: bool = False,
    longest: int = LONGEST,
) -> Labelled:
    """Texts and labels from one .csv, .tsv or .jsonl file, whose `columns` are names (of the first line, or of the JSON
    objects) or, where there is no line of names, numbers counted from 0; or from two files, line by line.

    The first bad line is an error; with `skip_bad`, it is skipped and counted.
    """
    found = Labelled([], [], {}, [])
    with ExitStack() as stack:

        def lines(path: str | Path) -> Iterator[Line | BadText]:
            return checked_lines(stack.enter_context(opened(path)), shown(path), longest)

        if labels is not None:
            if shown(texts) == shown(labels) == "standard input":
                raise ValueError("texts and labels cannot both be standard input: give a file for one of them")
            pairs = enumerate(line_pairs(lines(texts), lines(labels), shown(texts), shown(labels)), 1)
        else:
            how, name = file_format(texts), shown(texts)
            if how == "csv":
                raw = raw_lines(stack.enter_context(opened(texts)), name, longest)
                rows = csv_rows(raw, name, columns, longest)
            else:
                rows = {"jsonl": json_rows, "tsv": tsv_rows}[how](lines(texts), name, columns)
            pairs = ((0, row) if isinstance(row, BadText) else (row[0], checked_example(*row, name)) for row in rows)
        for number, pair in pairs:
            if isinstance(pair, BadText):
                leave_out(pair, found.skipped, skip_bad)
                continue
            found.texts.append(pair[0])
            found.labels.append(pair[1].strip())
            found.lines.append(number)
    if not found.texts:
        summary = "; ".join(f"{reason}: {skipped.count}" for reason, skipped in found.skipped.items())
        raise BadText(shown(texts), None, "no example left", f" after skipping bad lines ({summary})" * bool(summary))
    return found


def file_format(path: str | Path, what: str = "its labels") -> str:
    """By the end of the name, under .gz or .xz. `what` an error says that the file does not tell."""
    path = Path(path)
    suffixes = [suffix for suffix in path.suffixes if suffix.lower() not in PACKED]
    known = FORMATS.get(suffixes[-1].lower()) if suffixes else None
    if known is None:
        if shown(path) != "standard input":
            with opened(path) as stream:
                if next(raw_lines(stream, shown(path), 1), None) is None:
                    raise BadText(shown(path), 1, "the file is empty")
        raise ValueError(
            f"{shown(path)}: does not say where {what} are: name a file that ends in {', '.join(FORMATS)} "
            "(packed as .gz or .xz, if you like)"
            + (", or give a second file of labels, line by line" * (what == "its labels"))
        )
    return known


def class_names(labels: Iterable[str], name: str) -> list[str]:
    """The labels that occur, sorted: as numbers where all are whole numbers, else as text."""
    found = set(labels)
    if len(found) < 2:
        raise ValueError(f"{name}: a classifier needs at least two labels, got only {', '.join(map(repr, found))}")
    if len(found) > MOST_LABELS:
        raise ValueError(
            f"{name}: {len(found)} different labels, expected at most {MOST_LABELS}: is that the column of the labels?"
        )
    numbers = all(label.lstrip("-").isdecimal() for label in found)
    return sorted(found, key=lambda label: (int(label), label) if numbers else label)


def class_numbers(labels: Sequence[str], names: Sequence[str], name: str) -> list[int]:
    """The number of each label; one that the classes do not have is an error."""
    numbers = {label: number for number, label in enumerate(names)}
    for index, label in enumerate(labels, 1):
        if label not in numbers:
            shown_names = ", ".join(names[:20]) + (" ..." if len(names) > 20 else "")
            raise ValueError(f"{name}: example {index} has the label {label!r}, the classes are {shown_names}")
    return [numbers[label] for label in labels]


Row = tuple[int, str, str]  # line, text, label
HALF = re.compile("[\ud800-\udfff]")  # of a pair of code units, which stands for no character


def checked_example(number: int, text: str, label: str, name: str) -> Example | BadText:
    """Not blank, and such that it can be written and encoded."""
    for what, value in (("text", text), ("label", label)):
        if not value.strip():
            return BadText(name, number, f"empty {what}")
        if HALF.search(value) is not None:
            return BadText(name, number, "not UTF-8", f": half of a character in the {what}")
        bad = CONTROL.search(value.replace("\r\n", "\n").replace("\n", " ") if what == "text" else value)
        if bad is not None:
            reason = "NUL character" if bad[0] == "\0" else "control character"
            return BadText(name, number, reason, f" U+{ord(bad[0]):04X} in the {what}")
    return text.replace("\r\n", "\n"), label


def json_rows(lines: Iterator[Line | BadText], name: str, columns: tuple[Column, Column]) -> Iterator[Row | BadText]:
    if not all(isinstance(column, str) for column in columns):
        raise ValueError(f"columns of JSON lines are names, such as text and label, got {list(columns)}")
    for line in lines:
        yield line if isinstance(line, BadText) else json_row(line, name, columns)


def json_row(line: Line, name: str, columns: tuple[Column, Column]) -> Row | BadText:
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
    text, label = (values[column] for column in columns)
    if not isinstance(text, str):
        return BadText(name, line.number, "the text is not a string", f": {text!r:.40}")
    if not isinstance(label, str | int):
        return BadText(name, line.number, "the label is neither a string nor a whole number", f": {label!r:.40}")
    return line.number, text, json.dumps(label) if isinstance(label, bool) else str(label)


def tsv_rows(lines: Iterator[Line | BadText], name: str, columns: tuple[Column, Column]) -> Iterator[Row | BadText]:
    """Without quoting: a tab always separates."""
    cells = (line if isinstance(line, BadText) else (line.number, line.text.split("\t")) for line in lines)
    return table_rows(cells, name, columns)


def csv_rows(
    lines: Iterator[tuple[bytes, bool]], name: str, columns: tuple[Column, Column], longest: int
) -> Iterator[Row | BadText]:
    """Quotes as in RFC 4180: a field in quotes may hold commas, line breaks and doubled quotes."""
    return table_rows(csv_cells(lines, name, longest), name, columns)


def csv_cells(
    lines: Iterator[tuple[bytes, bool]], name: str, longest: int
) -> Iterator[tuple[int, list[str]] | BadText]:
    """The fields of each record, with the line it begins in. A bad line makes bad the record that it is part of."""
    bad: list[BadText] = []

    def feed() -> Iterator[str]:
        for number, (data, is_whole) in enumerate(lines, 1):
            line = checked(data, is_whole, name, number, longest)
            if isinstance(line, BadText):
                bad.append(line)
            # a bad line is parsed all the same: its quotes say where its record ends
            yield data.decode(errors="replace") + "\n"

    csv.field_size_limit(LONGEST)
    reader = csv.reader(feed(), strict=True)
    while True:
        first = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            bad.append(BadText(name, first, "not CSV", f": {error}"))
            cells = []
        yield bad[0] if bad else (first, cells)
        bad.clear()
    if reader.line_num == 0:
        raise BadText(name, 1, "the file is empty")


def table_rows(
    records: Iterable[tuple[int, list[str]] | BadText], name: str, columns: tuple[Column, Column]
) -> Iterator[Row | BadText]:
    for row in table_cells(records, name, columns):
        yield row if isinstance(row, BadText) else (row[0], row[1][0], row[1][1])


def table_cells(
    records: Iterable[tuple[int, list[str]] | BadText], name: str, columns: Sequence[Column]
) -> Iterator[tuple[int, list[str]] | BadText]:
    """The line and the cells of some columns of each record: names, of the first line, or numbers counted from 0."""
    names = [column for column in columns if isinstance(column, str)]
    places = [column for column in columns if not isinstance(column, str)]
    if names and places:
        raise ValueError(f"columns are all names or all numbers, got {list(columns)}")
    if places and min(places) < 0:
        raise ValueError(f"columns are counted from 0, got {list(columns)}")
    for record in records:
        if isinstance(record, BadText):
            if not places:
                # without the names of the columns nothing can be read
                raise record
            yield record
            continue
        number, cells = record
        if not places:
            places = [_place(cells, column, name, number) for column in names]
        elif len(cells) <= max(places):
            yield BadText(name, number, "too few columns", f": {len(cells)}, expected at least {max(places) + 1}")
        else:
            yield number, [cells[place] for place in places]


def _place(cells: list[str], column: str, name: str, number: int) -> int:
    """Where a column stands in the line of names."""
    header = [cell.strip() for cell in cells]
    if column not in header:
        raise BadText(
            name,
            number,
            f"no column {column!r}",
            f": the first line has {', '.join(header)[:200]}; columns says which to read, by name, or by "
            "number from 0 where there is no line of names",
        )
    return header.index(column)
