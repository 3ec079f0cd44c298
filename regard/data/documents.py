"""Running text for language models: files and folders become documents, documents become rows of tokens.

A text ends its lines in "\\n", the last one too. What one document is, the caller says: a file, a line, or what blank
lines separate.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.data.batches import Planned, to_device
from regard.data.text import STANDARD_INPUT, BadText, Skipped, checked_lines, leave_out, opened, shown
from regard.data.tokenizer import PAD, Tokenizer

Unit = Literal["file", "line", "blank"]
IGNORED = -100  # a target that the loss ignores, as in regard.training.loss
LONGEST = 1 << 31  # characters of a line: all of a text is kept, so there is no reason to cut it


class Documents(NamedTuple):
    """Texts to train on and to validate on, and what was done to get them."""

    train: list[str]
    valid: list[str]
    facts: dict[str, Any]


def files_under(paths: Sequence[str]) -> list[str]:
    """Files as they are, folders as all the files in them, by name, without hidden ones."""
    found: list[str] = []
    for path in paths:
        if path == STANDARD_INPUT or not os.path.isdir(path):
            found.append(path)
            continue
        inside = [
            str(part)
            for part in sorted(Path(path).rglob("*"))
            if not part.is_dir() and not any(name.startswith(".") for name in part.relative_to(path).parts)
        ]
        if not inside:
            raise BadText(path, None, "is a folder without any file")
        found += inside
    return found


def read_documents(paths: Sequence[str], unit: Unit, skip_bad: bool = False) -> tuple[list[str], dict[str, Skipped]]:
    """The documents of files and folders (.gz, .xz and "-" too), and the bad lines skipped: reason -> `Skipped`.
    Without `skip_bad` the first bad line is an error. A document of white space alone does not count."""
    documents: list[str] = []
    skipped: dict[str, Skipped] = {}
    for path in files_under(paths):
        parts: list[list[str]] = [[]]
        with opened(path) as stream:
            for line in checked_lines(stream, shown(path), LONGEST):
                if isinstance(line, BadText):
                    leave_out(line, skipped, skip_bad)
                    continue
                if unit == "line" or (unit == "blank" and not line.text.strip()):
                    parts.append([])
                parts[-1].append(line.text + "\n")
        documents += [text for part in parts if (text := "".join(part)).strip()]
    if not documents:
        raise BadText(", ".join(map(shown, paths)), None, "no text in it")
    return documents, skipped


def hold_out(documents: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """(first, rest): the rest holds the last `share` of all characters; the document at the border is cut in two."""
    left = int(sum(map(len, documents)) * (1 - share))
    first: list[str] = []
    rest: list[str] = []
    for text in documents:
        cut = max(0, min(left, len(text)))
        first += [text[:cut]] if cut else []
        rest += [text[cut:]] if cut < len(text) else []
        left -= len(text)
    if not first or not rest:
        raise ValueError("the text is too short to hold some of it out for validation: give more, or a validation file")
    return first, rest


def digest(*parts: Sequence[str]) -> str:
    """One number for all texts."""
    found = hashlib.sha256()
    for texts in parts:
        found.update(f"{len(texts)} ".encode())
        for text in texts:
            data = text.encode()
            found.update(f"{len(data)} ".encode())
            found.update(data)
    return found.hexdigest()


class Text(NamedTuple):
    """Rows of running text: what is read and what comes next, padded on the right."""

    tokens: Tensor  # [B, T]
    target: Tensor  # [B, T]
    keep: Tensor | None  # None: nothing is padded
    indices: Tensor  # [B], which rows

    def to(self, device: torch.device | str) -> "Text":
        return to_device(self, device)


def stream(documents: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    """All documents one after the other, with the end token before, between and behind them."""
    end = np.array([tokenizer.eos], dtype=np.int32)
    return np.concatenate([end, *(part for text in documents for part in (tokenizer.encode_text(text), end))])


class Blocks:
    """A stream of tokens in blocks of `length`, `tokens // length` of them per batch. Each epoch cuts the stream at
    other places and shuffles the blocks, so that a token is trained on once per epoch (but for fewer than two blocks at
    the ends), each time behind another context. Without `shuffle`, blocks come in order and the last may be shorter;
    with a `stride` they overlap, and the targets are only what no earlier block predicted."""

    def __init__(
        self,
        ids: np.ndarray,
        *,
        length: int,
        tokens: int,
        seed: int = 0,
        shuffle: bool = True,
        stride: int | None = None,
    ) -> None:
        self.ids, self.length, self.rows, self.seed, self.shuffle = ids, length, tokens // length, seed, shuffle
        self.stride = length if stride is None else stride
        self.planned: tuple[int, np.ndarray] | None = None
        if length > tokens:
            raise ValueError(f"a block of {length} tokens does not fit into a batch of {tokens}: raise training.tokens")
        if not 1 <= self.stride <= length:
            raise ValueError(f"the stride must be from 1 to the length of a block, {length}, got {stride}")
        if len(ids) < (2 * length + 1 if shuffle else 2):
            raise ValueError(f"the text has {len(ids)} tokens, too few for blocks of {length}: lower data.length")

    def __len__(self) -> int:
        """How many blocks there are."""
        return (len(self.ids) - 1) // self.length

    def starts(self, epoch: int) -> np.ndarray:
        """Where the blocks of an epoch begin, in the order of training."""
        if self.planned is None or self.planned[0] != epoch:
            # drawn and sorted as in batches.py, for the same reason
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
            if self.shuffle:
                starts = np.arange(int(generator.random() * self.length), len(self.ids) - self.length, self.length)
                starts = starts[np.argsort(generator.random(len(starts)), kind="stable")]
            else:
                last = max(1, len(self.ids) - 1 - (self.length - self.stride))
                starts = np.arange(0, last, self.stride)
            self.planned = (epoch, starts)
        return self.planned[1]

    def count(self, epoch: int) -> int:
        return -(-len(self.starts(epoch)) // self.rows)

    def get(self, epoch: int, i: int) -> Text:
        starts = self.starts(epoch)[i * self.rows : (i + 1) * self.rows]
        window = starts[:, None] + np.arange(self.length + 1)
        keep = window[:, 1:] < len(self.ids)
        ids = np.where(window < len(self.ids), self.ids[np.minimum(window, len(self.ids) - 1)], PAD).astype(np.int64)
        tokens, target = ids[:, :-1], ids[:, 1:].copy()
        known = np.arange(self.length) < self.length - self.stride
        target[(starts[:, None] > 0) & known] = IGNORED
        kept = None if keep.all() else torch.from_numpy(keep)
        return Text(torch.from_numpy(tokens), torch.from_numpy(target), kept, torch.from_numpy(starts))


class Pieces(Planned):
    """Rows of one document each, so that no token sees another document, whatever the attention. A text longer than
    `length` is cut into several rows. Rows of similar length share a batch."""

    def __init__(
        self,
        documents: Sequence[np.ndarray],
        end: int,
        *,
        length: int,
        tokens: int,
        seed: int = 0,
        shuffle: bool = True,
        multiple: int = 1,
    ) -> None:
        mark = np.array([end], dtype=np.int32)
        texts = [np.concatenate([mark, ids, mark]) for ids in documents]
        self.rows_of = [text[at : at + length + 1] for text in texts for at in range(0, len(text) - 1, length)]
        lengths = np.array([len(row) - 1 for row in self.rows_of])
        self.multiple = multiple
        lengths = -(-lengths // multiple) * multiple
        if lengths.max() > tokens:
            raise ValueError(
                f"a row of {lengths.max()} tokens does not fit into a batch of {tokens}: raise training.tokens"
            )
        super().__init__(lengths, tokens=tokens, seed=seed, shuffle=shuffle)

    def get(self, epoch: int, i: int) -> Text:
        index = self.rows(epoch, i)
        width = int(self.lengths[index].max())
        tokens, target = (torch.full((len(index), width), PAD) for _ in range(2))
        keep = torch.zeros(len(index), width, dtype=torch.bool)
        for place, row in enumerate(index):
            ids = torch.from_numpy(self.rows_of[row].astype(np.int64))
            tokens[place, : len(ids) - 1], target[place, : len(ids) - 1] = ids[:-1], ids[1:]
            keep[place, : len(ids) - 1] = True
        return Text(tokens, target, None if keep.all() else keep, torch.from_numpy(index))
