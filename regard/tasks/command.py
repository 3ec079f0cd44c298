"""What the verbs of tasks share: flags, warnings, input and output. PyTorch is not imported here."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

AddVerb = Callable[[str, Callable[[argparse.Namespace], Any], str, list[str]], argparse.ArgumentParser]


class EvaluationFlags:
    """The flags of `regard evaluate` for runs of one task. Tasks may share a flag; the help is that of the first."""

    def __init__(self, parser: argparse.ArgumentParser, task: str, about: str, known: dict[str, argparse.Action]):
        self.group, self.known = parser.add_argument_group(task, about), known
        self.actions: list[argparse.Action] = []

    def add_argument(self, name: str, **options: Any) -> None:
        if name not in self.known:
            self.known[name] = self.group.add_argument(name, **options)
        self.actions.append(self.known[name])

    def add_columns(self) -> None:
        """The flag for the columns of a table."""
        about = (
            "columns of --source or --data, by name or by number from 0 (default: text,label; of pairs 0,1; of images "
            "path,label; of captions image,caption)"
        )
        self.add_argument("--columns", help=about)

    def add_text(self) -> None:
        """The flag for the text to evaluate on."""
        about = "files or folders of text, - for standard input (default: the run's validation text)"
        self.add_argument("--text", nargs="+", metavar="FILE", help=about)


def add_model(added: argparse.ArgumentParser) -> None:
    """The flags for the checkpoint and the device."""
    add_checkpoint(added)
    added.add_argument("--device", default="auto", help="device: cpu, cuda ... (default: a GPU if there is one)")


def add_checkpoint(added: argparse.ArgumentParser) -> None:
    """The flag for the checkpoint."""
    about = "checkpoint to use: best, last, average or a step (default: the average if there is one, else the best)"
    added.add_argument("--checkpoint", help=about)


def add_run(added: argparse.ArgumentParser) -> None:
    """The argument for the run folder."""
    added.add_argument("run", metavar="RUN", help="run folder")


def read_evaluation(verbs: Any, task: str, words: Sequence[str]) -> argparse.Namespace:
    """The arguments of `regard evaluate` for a run of one task, whose verbs these are."""
    parser = argparse.ArgumentParser("regard evaluate")
    add_run(parser)
    parser.add_argument("--json", action="store_true")
    add_model(parser)
    verbs.add_evaluation(EvaluationFlags(parser, task, verbs.EVALUATION, {}))
    return parser.parse_args(words)


def read_columns(text: str) -> tuple[str | int, str | int]:
    """The value of --columns."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(parts):
        raise ValueError(f"--columns must be two columns, such as text,label or 0,1, got {text!r}")
    first, second = (int(part) for part in parts) if all(part.isdecimal() for part in parts) else parts
    return first, second


def check_writable(path: str) -> None:
    """Fails before the work if a file cannot be written; creates none."""
    is_new = not Path(path).exists()
    with Path(path).open("a"):
        pass
    if is_new:
        Path(path).unlink()


def check_picture(path: str) -> None:
    """Fails before the work if a picture cannot be drawn into a file of this name."""
    from regard import draw

    draw.check(path)


def counted(items: Sequence[Any], noun: str) -> str:
    """The number of items with their noun: "1 text", "2 texts"."""
    return f"{len(items):,} {noun}" + ("" if len(items) == 1 else "s")


@contextmanager
def few_warnings() -> Iterator[Callable[[str], None]]:
    """For warnings that any line may cause: prints the first few, and the number of the others."""
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
    """Prints a line to standard error."""
    print(f"regard: {message}", file=sys.stderr, flush=True)


def notice_empty(path: str, number: int) -> None:
    """Says on standard error if no line came from a file: a wrong name would go unnoticed."""
    from regard.data.text import shown

    if number == 0:
        notice(f"{shown(path)} is empty")


def write_out(text: str) -> None:
    """Writes text to standard output, without buffering."""
    sys.stdout.write(text)
    sys.stdout.flush()


def evaluated_documents(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """A name for the documents to evaluate on, and the documents: those of --text, split as for training, or those that
    the run validates on."""
    from regard.data.documents import read_documents
    from regard.tasks.text import read_valid
    from regard.training.run import Run

    if arguments.text is None:
        return "the run's validation", read_valid(arguments.run)
    unit = Run.open(arguments.run).read_json("run.json").get("documents", "file")
    return ", ".join(arguments.text), read_documents(arguments.text, unit)[0]
