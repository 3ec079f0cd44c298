"""What the verbs of tasks share: flags, warnings, what is read and written. PyTorch is not imported here."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

AddVerb = Callable[[str, Callable[[argparse.Namespace], Any], str, list[str]], argparse.ArgumentParser]


class EvaluationFlags:
    """The flags of `regard evaluate` for runs of one task. Tasks may share a flag, which the first one describes."""

    def __init__(self, parser: argparse.ArgumentParser, task: str, about: str, known: dict[str, argparse.Action]):
        self.group, self.known = parser.add_argument_group(task, about), known
        self.actions: list[argparse.Action] = []

    def add_argument(self, name: str, **options: Any) -> None:
        if name not in self.known:
            self.known[name] = self.group.add_argument(name, **options)
        self.actions.append(self.known[name])

    def add_columns(self) -> None:
        """Which columns of a table are read."""
        names = "of --source or --data, two names (text,label) or numbers from 0 (default: text,label; of pairs 0,1)"
        self.add_argument("--columns", help=f"columns {names}")

    def add_text(self) -> None:
        """What running text is read."""
        about = "files, folders, - (default: the run's validation text)"
        self.add_argument("--text", nargs="+", metavar="FILE", help=about)


def add_model(added: argparse.ArgumentParser) -> None:
    """Which weights a verb uses, and where."""
    added.add_argument("--checkpoint", help="best, last, average or a step (default: the average, or else the best)")
    added.add_argument("--device", default="auto", help="cpu, cuda ... (default: a GPU where there is one)")


def read_columns(text: str) -> tuple[str | int, str | int]:
    """The value of --columns."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(parts):
        raise ValueError(f"--columns are two, such as text,label or 0,1, got {text!r}")
    first, second = (int(part) for part in parts) if all(part.isdecimal() for part in parts) else parts
    return first, second


def check_writable(path: str) -> None:
    """Ends in words before the work, not after it; leaves no file."""
    is_new = not Path(path).exists()
    with Path(path).open("a"):
        pass
    if is_new:
        Path(path).unlink()


def counted(things: Sequence[Any], noun: str) -> str:
    """Their number with a noun behind it."""
    return f"{len(things):,} {noun}" + ("" if len(things) == 1 else "s")


@contextmanager
def few_warnings() -> Iterator[Callable[[str], None]]:
    """For warnings that any line may bring: the first few are said, and how many more there were."""
    from regard.data.text import WARNINGS

    count = 0

    def warn(message: str) -> None:
        nonlocal count
        count += 1
        if count <= WARNINGS:
            notice(message)

    yield warn
    if count > WARNINGS:
        notice(f"{count - WARNINGS} more such warnings")


def notice(message: str) -> None:
    """A line on standard error."""
    print(f"regard: {message}", file=sys.stderr, flush=True)


def write_out(text: str) -> None:
    """Text on standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def evaluated_documents(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """Those of --text, cut as the run was trained on, or what the run validates on; and their name."""
    from regard.data.documents import read_documents
    from regard.tasks.text import read_valid
    from regard.training.run import Run

    if arguments.text is None:
        return "the run's validation", read_valid(arguments.run)
    unit = Run.open(arguments.run).read_json("run.json").get("documents", "file")
    return ", ".join(arguments.text), read_documents(arguments.text, unit)[0]
