"""The page of the command line: the help of every verb, as the program prints it."""

import contextlib
import io
import os
import re

from regard import tasks
from regard.cli import main


def help_text(*words: str) -> str:
    """What `regard WORDS --help` prints, at the width of a page."""
    printed, width = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*words, "--help"])
    finally:
        os.environ.pop("COLUMNS") if width is None else os.environ.update(COLUMNS=width)
    return printed.getvalue().rstrip()


def verbs() -> list[str]:
    return re.findall(r"^ {4}([a-z]\S*)", help_text().split("verbs:")[1], re.MULTILINE)


def command_page() -> dict[str, str]:
    lines = ["# The command line", "", "What `--help` prints.", "", f"```text\n{help_text()}\n```", ""]
    for verb in verbs():
        lines += [f"## regard {verb}", "", f"```text\n{help_text(verb)}\n```", ""]
        if verb == "train":
            for task in tasks.TASKS:
                lines += [f"### regard train {task}", "", f"```text\n{help_text('train', task)}\n```", ""]
    return {"reference/command-line.md": "\n".join(lines)}
