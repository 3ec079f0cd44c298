"""Verbs of the command line, as tests call them."""

import io
import sys

import pytest

from regard import cli


def told(monkeypatch, capsys, *words: str, stdin: bytes | None = None) -> tuple[str, str]:
    """What a verb that ends well prints: (standard output, standard error)."""
    if stdin is not None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    assert cli.main(list(words)) == 0
    said = capsys.readouterr()
    return said.out, said.err


def refused(capsys, *words: str) -> str:
    """The one line of a verb that refuses, with status 2 and nothing on standard output."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1), said
    assert said.err.startswith("regard")
    return said.err
