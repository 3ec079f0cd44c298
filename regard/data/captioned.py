"""Pictures and their captions: CSV, TSV and JSON lines by the name of the file, with one or more captions per picture.
Pictures are files of a folder, or in one array of an .npz file.

The first column names a picture, each other one has a caption; a picture may also be named in several rows. In JSON
lines a caption may be a list of them. Faults are those of data/text.py.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from regard.data.images.decode import BadImage
from regard.data.images.formats import read_npz_pixels
from regard.data.images.read import decode_all, resize_all
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


class Captioned(NamedTuple):
    """Pictures of one size with one or more captions each, what each picture is called, and what was skipped."""

    pixels: np.ndarray  # uint8 [N, C, h, w]
    captions: list[list[str]]
    names: list[str]
    skipped: dict[str, Skipped]

    @property
    def size(self) -> tuple[int, int]:
        return self.pixels.shape[2], self.pixels.shape[3]

    @property
    def channels(self) -> int:
        return self.pixels.shape[1]

    def take(self, places: np.ndarray) -> "Captioned":
        """Some of the pictures."""
        captions, names = [self.captions[place] for place in places], [self.names[place] for place in places]
        return Captioned(self.pixels[places], captions, names, self.skipped)


def read_captioned(
    captions: str | Path,
    images: str | Path | None = None,
    *,
    columns: Sequence[Column] = COLUMNS,
    size: tuple[int, int] | None = None,
    channels: int | None = None,
    skip_bad: bool | None = None,
) -> Captioned:
    """Captions of a file and their pictures, which are in the folder `images` (None: in that of the file), or in the
    array `images` of an .npz file, where captions name them by their numbers from 0. `size` None: that of the pictures,
    if all have the same and it is small, else 64 x 64; `channels` None: 1 if all are grey, else 3.

    The first bad line or broken picture is an error, and the message about a picture offers data.skip_bad where
    `skip_bad` is False; with `skip_bad`, they are skipped and counted.
    """
    found = read_captions(captions, columns=columns, skip_bad=bool(skip_bad))
    if images is not None and str(images).lower().endswith(".npz"):
        pixels = read_npz_pixels(Path(images))
        numbers = [_number(name, len(pixels), shown(captions), str(images)) for name in found.pictures]
        return Captioned(resize_all(pixels[numbers], size, channels), found.captions, found.pictures, found.skipped)
    folder = Path(captions).parent if images is None else Path(images)
    if not folder.is_dir():
        raise BadImage(
            str(folder), "is no folder of pictures, and no .npz file" if folder.exists() else "no such folder"
        )
    files = [folder / name for name in found.pictures]
    if images is None and not any(file.exists() for file in files):
        detail = f", among them {found.pictures[0]!r}: give the folder that holds its pictures, or an .npz file"
        raise BadImage(str(captions), "names no picture of its own folder", detail)
    decoded = decode_all(files, str(folder), size, channels, skip_bad)
    kept = [found.captions[place] for place in decoded.kept]
    names = [str(files[place]) for place in decoded.kept]
    return Captioned(decoded.pixels, kept, names, found.skipped | decoded.skipped)


def _number(name: str, count: int, file: str, array: str) -> int:
    """The number of a picture in an array."""
    if not name.isdecimal() or int(name) >= count:
        detail = f": captions of {array} name its pictures by their numbers, 0 to {count - 1}"
        raise BadText(file, None, f"no picture is called {name[:60]!r}", detail)
    return int(name)


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
