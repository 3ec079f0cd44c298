"""The command line. A verb is a function in a module of this package or of a task; nothing imports this package.

A verb imports the heavy libraries it needs when it is called.
"""

import argparse
import io
import os
import platform
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from regard import __version__
from regard.cli import compare, demo, mechanisms, runs, serve, show
from regard.core.allocator import LARGEST, SERVER_IDLE, keep_memory
from regard.plugins import PluginWarning

SHOW_WARNING = warnings.showwarning
HOME = Path(__file__).resolve().parents[1]
MEMORY, SOFTWARE = 1, 70  # exit statuses: too little memory; a bug of Regard, as in sysexits.h


def main(argv: list[str] | None = None) -> int:
    """Runs one verb. Bad input ends the program with status 2 and one line on stderr, an unexpected error with status
    70. --debug, anywhere, adds the traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without é gets ? and no traceback
    given = sys.argv[1:] if argv is None else argv
    words = [word for word in given if word != "--debug"]
    if argv is None and words[:1] != ["show"]:
        # the process is our own; a server lives long, and returns most of what it does not need
        keep_memory(SERVER_IDLE if words[:1] == ["serve"] else LARGEST)
    if argv is None:
        warnings.showwarning = _show_warning
    parser = _parser()
    try:
        parser, work = _choose(parser, words)
        code = work()
        sys.stdout.flush()
        return code or 0
    except BrokenPipeError:
        # the reader (head, less) has closed the pipe; the rest of the buffer is discarded
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        if len(words) < len(given):
            traceback.print_exc()
        if isinstance(error, ValueError | OSError):
            end(parser, _in_words(error, words))
        return _last_resort(parser, error, words)


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """A warning about an installed package in one line; the others as Python shows them."""
    if issubclass(category, PluginWarning):
        print(f"regard: {message}", file=sys.stderr)
    else:
        SHOW_WARNING(message, category, *where, **more)


def _choose(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.ArgumentParser, Callable[[], Any]]:
    """The parser of the verb, for its help in errors, and the call of the verb."""
    if argv[:1] == ["train"]:
        # its flags are generated from the config of the task
        parser.prog = "regard train"
        return parser, lambda: runs.train(argv[1:])
    argv, rest = compare.split_flags(argv) if argv[:1] == ["compare"] else (argv, [])
    arguments, unknown = parser.parse_known_args(argv)
    arguments.rest, arguments.argv = rest, argv
    if unknown:
        getattr(arguments, "parser", parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.verb is None:
        return parser, parser.print_help
    return arguments.parser, lambda: arguments.verb(arguments)


def _in_words(error: Exception, argv: list[str]) -> str:
    """The message for bad input; that of a bad file begins with the flag that named it."""
    if isinstance(error, UnicodeEncodeError):
        for index, word in enumerate(argv):
            if any("\ud800" <= letter <= "\udfff" for letter in word):
                raw = os.fsencode(word)
                flag = argv[index - 1] if index and argv[index - 1].startswith("--") else f"argument {index + 1}"
                return f"{flag} is not UTF-8: {raw!r}; is it Windows-1252 (cp1252) or Latin-1? Give it as UTF-8"
    file = str(getattr(error, "file", ""))
    for flag, word in pairwise([part for given in argv for part in given.split("=", 1)]):
        if file and flag.startswith("--") and (file == word or file.startswith(f"{word}{os.sep}")):
            return f"{flag} {error}"
    return str(error)


def _last_resort(parser: argparse.ArgumentParser, error: BaseException, argv: list[str]) -> int:
    """Reports an unexpected error: what happened, with which files, and how to report it."""
    what = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    if isinstance(error, MemoryError) or re.search(r"out of memory|can't allocate memory|not enough memory", what):
        print(f"{parser.prog}: there is not enough memory: {what}", file=sys.stderr)
        print("Use less at a time: fewer tokens or texts, a smaller beam, length or model.", file=sys.stderr)
        return MEMORY
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(HOME)]
    place = f" at regard/{Path(frames[-1].filename).relative_to(HOME)}:{frames[-1].lineno}" if frames else ""
    files = [part for word in argv for part in word.split("=", 1) if os.path.exists(part)]
    lines = [
        f"{parser.prog}: an unexpected error in Regard{place}: {what}",
        *([f"The files it was given: {', '.join(dict.fromkeys(files))}"] if files else []),
        f"Please report it to whoever gave you Regard, with the output of the same command and --debug; this is Regard "
        f"{__version__}, Python {platform.python_version()}, {platform.system()}.",
    ]
    print("\n".join(lines), file=sys.stderr)
    return SOFTWARE


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, without the usage that argparse would print."""

    def error(self, message: str) -> NoReturn:
        end(self, f"{message}; see {self.prog} --help")


class _Verb(_Parser):
    """Flags may be between the positional arguments: `translate RUN --beam 5 in.txt`. Plain argparse ends the list FILE
    before the first flag, and does not accept in.txt."""

    _intermixed = False

    # one signature for what the stubs declare as overloads
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._intermixed:
            return super().parse_known_args(args, namespace)
        self._intermixed = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._intermixed = False


def end(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    parser.exit(2, f"{parser.prog}: {' '.join(message.split())}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="regard",
        description="Every attention, one Transformer: train it, run it, see it, compare it.",
        epilog="Try it: regard demo. Help for one verb: regard VERB --help.",
    )
    parser.set_defaults(verb=None)
    parser.add_argument("--version", action="version", version=f"regard {__version__}")
    parser.add_argument("--debug", action="store_true", help="with any verb: show the traceback of an error")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", parser_class=_Verb)

    def verb(name: str, function: Any, about: str, examples: list[str]) -> argparse.ArgumentParser:
        added = verbs.add_parser(
            name,
            help=about,
            description=about[0].upper() + about[1:] + ".",
            epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(verb=function, parser=added)
        return added

    for module in (mechanisms, demo, show, serve, compare, runs):
        module.add_verbs(verb)
    return parser
