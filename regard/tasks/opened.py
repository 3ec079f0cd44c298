"""What the page shows of a run, whatever its task."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn


@dataclass
class Opened:
    """A model, how a text becomes its tokens, and where it attends. `encode` gives ids, `names` a printable token for
    each; `places` are some of encoder, decoder, cross and aligner."""

    task: str
    model: nn.Module
    encode: Callable[[str], list[int]]
    names: Callable[[list[int]], list[str]]
    places: tuple[str, ...]
    trained_for: int  # tokens that it was trained to read at a time
    limit: int | None = None  # tokens that it can read; None: no end
    examples: tuple[str, ...] = ()  # texts to begin with
    begins: tuple[int, ...] = ()  # special tokens before a text, and after it
    ends: tuple[int, ...] = ()
    translator: Any = None
    classifier: Any = None
    labelled: tuple[tuple[str, str], ...] = ()  # texts to validate on and their labels


def of_text(task: str, thing: Any, place: str, trained_for: int, limit: int | None) -> Opened:
    """A run that reads one text, `thing` being a model with its tokenizer."""
    tokenizer = thing.tokenizer
    return Opened(task, thing.model, tokenizer.encode, tokenizer.tokens, (place,), trained_for, limit)


def beginnings(read: Callable[[str | Path], list[str]], folder: str | Path) -> tuple[str, ...]:
    """The beginnings of some texts that a run validates on."""
    try:
        texts = read(folder)[:4]
    except ValueError:
        return ()
    return tuple(" ".join(text[:400].split())[:160] for text in texts if text.strip())
