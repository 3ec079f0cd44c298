"""What the page shows of a run, whatever its task."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

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


class Sample(NamedTuple):
    """An image to begin with: uint8 [C, h, w], and its label if it has one."""

    pixels: np.ndarray
    label: str | None = None


class CaptionedImage(NamedTuple):
    """A caption of an image, token by token, and where a model looks when it writes each of them."""

    text: str
    tokens: list[str]  # as printed, the end among them
    weights: list[Tensor]  # [H, tokens, patches] of each layer


@dataclass
class OpenedImages:
    """A model that reads images, how pixels become its input, and what it answers. The model has `maps(images,
    recorder=...)` over its patches and `grids()`, which say where the tokens of each layer stand; words of a caption
    look at the patches of the last of them."""

    task: str
    model: Model
    size: tuple[int, int]  # height and width that it reads
    channels: int
    normalise: Callable[[Tensor], Tensor]  # uint8 [B, C, h, w] -> what the model reads
    predict: Callable[[Tensor], Tensor] | None = None  # uint8 [B, C, h, w] -> probabilities [B, classes]
    labels: tuple[str, ...] = ()
    unsure_below: float = 0.5  # an answer of a smaller probability is called unsure
    samples: tuple[Sample, ...] = ()
    # uint8 [1, C, h, w] and a caption to read -> how it is written; an empty one: the model's own
    caption: Callable[[Tensor, str], CaptionedImage] | None = None


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
