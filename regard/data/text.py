"""Text files, read so that nothing goes wrong silently.

A line ends at "\\n" and nowhere else: U+2028, form feeds and the like never cut one. One "\\r" before the end of a line
and a byte order mark at the start of a file are dropped. What is then left is UTF-8 text without control characters
(tabs are fine); anything else is `BadText`, which says file and line. U+2028, U+2029 and the marks of writing
direction are kept: they belong to the text of many languages and disturb nothing here.
"""

import gzip
import io
import lzma
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from regard.core.files import describe_bad_byte

Some = TypeVar("Some", bound=tuple[Any, ...])

LONGEST = 1_000_000  # characters in a line
STANDARD_INPUT = "-"

CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f]")
BREAKS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # what would end a line or a column of output
MARK = b"\xef\xbb\xbf"
PACKED = {".gz": gzip.open, ".xz": lzma.open}
# a compressed file may unpack to this many bytes, or to this multiple of its own size, whichever is more
UNPACKED, RATIO = 16 * 2**20, 50
SKIPPED_AT_ONCE = 1 << 16  # bytes, of a line that is too long to be kept
WARNINGS = 10  # lines that are warned of one by one


class BadText(ValueError):
    """What is wrong with a text, and where. `reason` is short and the same for all lines with the same fault."""

    def __init__(self, file: str, line: int | None, reason: str, detail: str = "") -> None:
        self.file, self.line, self.reason = file, line, reason
        place = file if line is None else f"{file}:{line}"
        super().__init__(f"{place}: {reason}{detail}")


class Skipped(NamedTuple):
    """How many lines were skipped for one reason, and the first of them as file:line."""

    count: int  # pyright: ignore[reportIncompatibleMethodOverride] - saved runs have this name
    first: str


def leave_out(bad: BadText, skipped: dict[str, Skipped], skip_bad: bool) -> None:
    """Counts a bad line by its reason; without `skip_bad` it is an error."""
    if not skip_bad:
        raise bad
    before = skipped.get(bad.reason, Skipped(0, f"{bad.file}:{bad.line}"))
    skipped[bad.reason] = before._replace(count=before.count + 1)


class Pairs(NamedTuple):
    """Sentences and their translations, the lines that were skipped: reason -> `Skipped`, and the line of each pair,
    counted from 1."""

    source: list[str]
    target: list[str]
    skipped: dict[str, Skipped]
    lines: list[int]


def open_lines(path: str | Path, *, needs_text: bool = False, longest: int = LONGEST) -> Iterator[str]:
    """Every line of a file: plain, .gz, .xz, or "-" for standard input. The first bad line ends it with `BadText`;
    a blank one is bad only where the caller needs text."""
    with opened(path) as stream:
        for line in checked_lines(stream, shown(path), longest):
            if isinstance(line, BadText):
                raise line
            if needs_text and not line.text.strip():
                raise BadText(shown(path), line.number, "empty line", ", where text is needed")
            yield line.text


def read_pairs(
    source: str | Path,
    target: str | Path | None = None,
    *,
    columns: tuple[int, int] = (0, 1),
    skip_bad: bool = False,
    limit: int | None = None,
    longest: int = LONGEST,
) -> Pairs:
    """Sentence pairs from two files with a line for a line, or from one TSV file (`target` None) whose `columns` hold
    source and target, counted from 0, without quoting.

    The first bad line is an error; with `skip_bad`, pairs with a bad line are skipped and counted. Files that end
    early or do not have equally many lines are an error in any case, for then no pair is sure. `limit` is the number of
    pairs after which reading stops.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 pair, got {limit}")
    if target is None and (len(columns) != 2 or min(columns) < 0):
        raise ValueError(f"columns must be two column numbers counted from 0, got {columns}")
    if target is not None and shown(source) == shown(target) == "standard input":
        raise ValueError("source and target cannot both be standard input: give a file for one of them, or one TSV")

    found = Pairs([], [], {}, [])
    with ExitStack() as stack:
        if target is None:
            stream = stack.enter_context(opened(source))
            pairs = column_pairs(checked_lines(stream, shown(source), longest), shown(source), columns)
        else:
            paths = (source, target)
            lines = [checked_lines(stack.enter_context(opened(path)), shown(path), longest) for path in paths]
            pairs = line_pairs(lines[0], lines[1], shown(source), shown(target))
        for number, pair in enumerate(pairs, 1):
            if isinstance(pair, BadText):
                leave_out(pair, found.skipped, skip_bad)
                continue
            found.source.append(pair[0])
            found.target.append(pair[1])
            found.lines.append(number)
            if len(found.source) == limit:
                break
    if not found.source:
        summary = "; ".join(f"{reason}: {skipped.count}" for reason, skipped in found.skipped.items())
        raise BadText(shown(source), None, "no pair left", f" after skipping bad lines ({summary})")
    return found


def read_sentences(
    stream: BinaryIO,
    *,
    name: str = "standard input",
    longest: int = LONGEST,
    warn: Callable[[str], None] | None = None,
) -> Iterator[str]:
    """Every line of a stream of bytes, none dropped, so that as many lines can go out as came in. Blank lines stay.

    What cannot be text is made so, with a warning (on standard error, unless `warn` takes it): bytes that are not
    UTF-8 become U+FFFD, control characters become spaces, and a line is cut after `longest` characters. The first
    bytes that are not UTF-8 are named, with how to convert the file. After the first few lines with a fault the others
    are only counted.
    """
    say = warn or (lambda message: print(message, file=sys.stderr, flush=True))
    faulty, advised = 0, False
    for number, (data, is_whole) in enumerate(raw_lines(stream, name, longest), 1):
        faults = []
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            text = data.decode(errors="replace")
            advice = describe_bad_byte(data, error.start) if is_whole and not advised else ""
            faults.append(f"bytes that are not UTF-8, replaced by U+FFFD{advice}")
            advised = advised or bool(advice)
        if CONTROL.search(text):
            text = CONTROL.sub(" ", text)
            faults.append("control characters, replaced by spaces")
        if not is_whole or len(text) > longest:
            text = text[:longest]
            faults.append(f"longer than {longest} characters, cut there")
        if faults:
            faulty += 1
            if faulty <= WARNINGS:
                say(f"{name}:{number}: {'; '.join(faults)}")
        yield text
    if faulty > WARNINGS:
        say(f"{name}: {faulty - WARNINGS} more lines with such faults")


class Line(NamedTuple):
    number: int  # counted from 1
    text: str


def shown(path: str | Path) -> str:
    """The name of a file in messages."""
    return "standard input" if str(path) == STANDARD_INPUT else str(path)


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked. Only regular files and standard input: a pipe could block forever, and a device
    could never end."""
    if str(path) == STANDARD_INPUT:
        if sys.stdin is None:
            raise BadText(shown(path), None, "standard input is closed")
        yield sys.stdin.buffer
        return
    path = Path(path)
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise BadText(str(path), None, "is a folder, expected a text file")
        if not stat.S_ISREG(mode):
            raise BadText(str(path), None, "is a pipe or a device, expected a file", "; give '-' for standard input")
        stream = PACKED.get(path.suffix, open)(path, "rb")
    except OSError as error:
        raise BadText(str(path), None, (error.strerror or str(error)).lower()) from error
    with stream:
        yield io.BufferedReader(_Unpacked(stream, path), 1 << 18) if path.suffix in PACKED else stream


class _Unpacked(io.RawIOBase):
    """What a packed file holds, up to a size that no text needs: a small file can be made to unpack to any size."""

    def __init__(self, stream: BinaryIO, path: Path):
        self.stream, self.path, self.size, self.count = stream, path, os.stat(path).st_size, 0
        self.most = max(UNPACKED, RATIO * self.size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = self.stream.read(len(buffer))
        self.count += len(data)
        if self.count > self.most:
            detail = f": more than {self.most:,} bytes come out of {self.size:,}; unpack it first if it is meant so"
            raise BadText(str(self.path), None, "unpacks to far more than text does", detail)
        buffer[: len(data)] = data
        return len(data)


def raw_lines(stream: BinaryIO, name: str, longest: int) -> Iterator[tuple[bytes, bool]]:
    """Lines as bytes, without their end and the mark at the start of the file; and whether the line is whole. Of a
    line that cannot have at most `longest` characters only the front is kept, so memory stays bounded."""
    most = 4 * longest + len(MARK + b"\r\n")
    number = 0
    try:
        while data := stream.readline(most):
            number += 1
            is_whole = data.endswith(b"\n") or len(data) < most
            rest = b"" if is_whole else stream.readline(SKIPPED_AT_ONCE)
            while rest and not rest.endswith(b"\n"):
                rest = stream.readline(SKIPPED_AT_ONCE)
            if number == 1:
                data = data.removeprefix(MARK)
            yield data.removesuffix(b"\n").removesuffix(b"\r"), is_whole
    except EOFError as error:
        raise BadText(name, number + 1, "the compressed file ends too early", ": it was cut off") from error
    except (OSError, zlib.error, lzma.LZMAError) as error:
        raise BadText(name, number + 1, "cannot be read", f": {error}") from error


def checked_lines(stream: BinaryIO, name: str, longest: int) -> Iterator[Line | BadText]:
    """Each line, or what is wrong with it. A file without any line is an error at once."""
    number = 0
    for number, (data, is_whole) in enumerate(raw_lines(stream, name, longest), 1):
        yield checked(data, is_whole, name, number, longest)
    if number == 0:
        raise BadText(name, 1, "the file is empty")


def checked(data: bytes, is_whole: bool, name: str, number: int, longest: int) -> Line | BadText:
    if not is_whole:
        return BadText(name, number, f"line longer than {longest} characters")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return BadText(name, number, "not UTF-8", describe_bad_byte(data, error.start))
    if len(text) > longest:
        return BadText(name, number, f"line longer than {longest} characters", f": it has {len(text)}")
    if control := CONTROL.search(text):
        reason = "NUL character" if control[0] == "\0" else "control character"
        return BadText(name, number, reason, f" U+{ord(control[0]):04X} at character {control.start() + 1}")
    return Line(number, text)


def line_pairs(
    sources: Iterator[Line | BadText], targets: Iterator[Line | BadText], source: str, target: str
) -> Iterator[tuple[str, str] | BadText]:
    """A line of each file. When one ends first, the other is read on to its end, to say how many lines it has."""
    count = 0
    while True:
        first, second = next(sources, None), next(targets, None)
        if first is None and second is None:
            return
        if first is None or second is None:
            others = count + 1 + sum(1 for _ in (targets if first is None else sources))
            short, long = (source, target) if first is None else (target, source)
            detail = f": {short} has {count}, {long} has {others}"
            raise BadText(short, count + 1, "the files do not have equally many lines", detail)
        count += 1
        yield paired(first, second, source, target)


def paired(first: Line | BadText, second: Line | BadText, source: str, target: str) -> tuple[str, str] | BadText:
    texts = []
    for line, name in ((first, source), (second, target)):
        if isinstance(line, BadText):
            return line
        if not line.text.strip():
            return BadText(name, line.number, "empty line", ", where text is needed")
        texts.append(line.text)
    return texts[0], texts[1]


def column_pairs(
    lines: Iterator[Line | BadText], name: str, columns: tuple[int, int]
) -> Iterator[tuple[str, str] | BadText]:
    for line in lines:
        if isinstance(line, BadText):
            yield line
            continue
        cells = line.text.split("\t")
        if len(cells) <= max(columns):
            reason, detail = (
                "too few columns",
                f": {len(cells)}, expected at least {max(columns) + 1}, separated by tabs",
            )
            if len(cells) == 1 and line.number == 1:
                reason = "a sentence without its translation"
                detail = ": give the file of translations (--data.target; of other verbs --target), or pairs with a tab"
            yield BadText(name, line.number, reason, detail)
            continue
        first, second = (cells[column] for column in columns)
        if first.strip() and second.strip():
            yield first, second
        else:
            empty = columns[0] if not first.strip() else columns[1]
            yield BadText(name, line.number, "empty column", f" {empty + 1}, where text is needed")


def hold_out(pairs: Sequence[Some], count: int, seed: int) -> tuple[list[Some], list[Some]]:
    """(rest, held out): a draw of `count` pairs with different sources; no source of theirs is left in the rest. What a
    pair has beside source and target stays with it."""
    if count < 1:
        raise ValueError(f"too few to hold any out: got {len(pairs)}, give at least 10, or a validation file")
    order = np.argsort(np.random.Generator(np.random.PCG64(seed)).random(len(pairs)), kind="stable")
    held: dict[str, int] = {}
    for index in map(int, order):
        held.setdefault(pairs[index][0], index)
        if len(held) == count:
            break
    rest = [pair for pair in pairs if pair[0] not in held]
    if not rest:
        raise ValueError("all pairs have the same few sources: give a validation file")
    return rest, [pairs[index] for index in held.values()]
