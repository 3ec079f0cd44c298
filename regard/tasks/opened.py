"""What the page shows of a run, whatever its task."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from regard.core.model import Model
from regard.data.tokenizer import Tokenizer


@dataclass
class Opened:
    """A model, how a text becomes its tokens, and where it attends. `encode` gives ids, `names` a printable token for
    each; `places` are some of encoder, decoder, cross and aligner."""

    task: str
    model: Model
    encode: Callable[[str], list[int]]
    names: Callable[[list[int]], list[str]]
    places: tuple[str, ...]
    trained_for: int  # the longest text that it was trained on, in tokens
    limit: int | None = None  # the longest text that it can read, in tokens; None: any length
    examples: tuple[str, ...] = ()  # texts to begin with
    begins: tuple[int, ...] = ()  # special tokens before a text
    ends: tuple[int, ...] = ()  # and after it
    translator: Any = None
    classifier: Any = None
    labelled: tuple[tuple[str, str], ...] = ()  # texts to validate on and their labels


class Reader(Protocol):
    """A model with its tokenizer."""

    model: Model
    tokenizer: Tokenizer


def of_reader(task: str, reader: Reader, place: str, trained_for: int, limit: int | None) -> Opened:
    """A run whose model reads one text."""
    tokenizer = reader.tokenizer
    return Opened(task, reader.model, tokenizer.encode, tokenizer.tokens, (place,), trained_for, limit)


def beginnings(read: Callable[[str | Path], list[str]], folder: str | Path) -> tuple[str, ...]:
    """The beginnings of the first texts that a run validates on."""
    try:
        texts = read(folder)[:4]
    except ValueError:
        return ()
    return tuple(" ".join(text[:400].split())[:160] for text in texts if text.strip())
