"""Batches of pairs of similar length, in an order that depends on nothing but the seed and the epoch.

To resume in the middle of an epoch takes two numbers, the epoch and the index of the batch: there is no other state.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.data.tokenizer import BOS, EOS, PAD, SPECIAL, UNK

NOISE = 1.0  # tokens: how far lengths are moved before sorting, so that pairs meet others in each epoch


class Batch(NamedTuple):
    """Pairs as a model takes them, padded on the right. A `keep` is None where nothing is padded."""

    source: Tensor  # [B, S], ends in eos
    source_keep: Tensor | None
    target_in: Tensor  # [B, T], starts with bos
    target_out: Tensor  # [B, T], ends in eos
    target_keep: Tensor | None
    index: Tensor  # [B], which pairs

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(*(None if part is None else part.to(device, non_blocking=True) for part in self))


class Short(NamedTuple):
    """The pairs that are not too long: their ids, their index among all, and how many were dropped."""

    source: list[Sequence[int]]
    target: list[Sequence[int]]
    index: list[int]
    dropped: int


def keep_short(source_ids: Sequence[Sequence[int]], target_ids: Sequence[Sequence[int]], maximum: int) -> Short:
    """Leave out the pairs with more than `maximum` tokens, special ones not counted, on either side."""
    pairs = zip(source_ids, target_ids, strict=True)
    index = [n for n, (source, target) in enumerate(pairs) if max(len(source), len(target)) <= maximum]
    source, target = [source_ids[n] for n in index], [target_ids[n] for n in index]
    return Short(source, target, index, len(source_ids) - len(index))


class Plan:
    """Which rows are in which batch: every row once an epoch, in batches of at most `tokens` padded tokens, rows times
    the longest of them. `lengths` are what the rows take in a batch.

    With `shuffle`, rows of about equal length are put together anew in each epoch and the batches are shuffled;
    without, they come from short to long. Among equal lengths, a smaller `finer`, from 0 to below 1, comes first.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        tokens: int,
        seed: int = 0,
        shuffle: bool = True,
        finer: np.ndarray | None = None,
        name: str = "text",
    ) -> None:
        if len(lengths) == 0:
            raise ValueError(f"there is no {name} to make batches of")
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        if (worst := lengths.max()) > tokens:
            row = int(lengths.argmax())
            raise ValueError(
                f"{name} {row + 1} is too long: it takes {worst} tokens and a batch has at most {tokens}. "
                f"Allow more tokens in a batch or leave out long {name}s"
            )
        self.lengths, self.tokens, self.seed, self.shuffle, self.finer = lengths, tokens, seed, shuffle, finer
        self.planned: tuple[int, list[np.ndarray]] | None = None

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self.lengths)

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """Which rows each batch of an epoch has."""
        if epoch < 0:
            raise ValueError(f"epochs are counted from 0, got {epoch}")
        if not self.shuffle:
            epoch = 0
        if self.planned is None or self.planned[0] != epoch:
            self.planned = (epoch, self.draw(epoch))
        return self.planned[1]

    def rows(self, epoch: int, i: int) -> np.ndarray:
        """Those of batch `i` of an epoch."""
        parts = self.epoch(epoch)
        if not 0 <= i < len(parts):
            raise IndexError(f"epoch {epoch} has {len(parts)} batches, counted from 0, got {i}")
        return parts[i]

    def draw(self, epoch: int) -> list[np.ndarray]:
        # Only `random` is drawn and only stable sorts are used: numpy may change how it shuffles from one version to
        # the next.
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
        key = self.lengths if self.finer is None else self.lengths + self.finer
        if self.shuffle:
            key = key + NOISE * generator.random(len(self))
        order = np.argsort(key, kind="stable")
        cuts = self.cuts(self.lengths[order])
        parts = np.split(order, cuts)
        if self.shuffle:
            parts = [parts[n] for n in np.argsort(generator.random(len(parts)), kind="stable")]
        return parts

    def cuts(self, lengths: np.ndarray) -> list[int]:
        """Where each batch but the first begins, when each takes as many rows as it can."""
        cuts, start = [], 0
        while True:
            window = lengths[start : start + self.tokens // lengths[start]]
            padded = np.maximum.accumulate(window) * np.arange(1, len(window) + 1)
            start += int(np.searchsorted(padded, self.tokens, side="right"))
            if start == len(lengths):
                return cuts
            cuts.append(start)


def rounded(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """Up to a multiple."""
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1, got {multiple}")
    return -(-lengths // multiple) * multiple


class Batches:
    """Batches of pairs by a `Plan`. A pair takes the longer of its source (with eos) and its target (with bos or eos),
    rounded up to a `multiple`, to which both sides are padded."""

    def __init__(
        self,
        source_ids: Sequence[Sequence[int]],
        target_ids: Sequence[Sequence[int]],
        *,
        tokens: int,
        seed: int = 0,
        shuffle: bool = True,
        multiple: int = 1,
    ) -> None:
        if len(source_ids) != len(target_ids):
            raise ValueError(f"expected as many targets as sources, got {len(source_ids)} and {len(target_ids)}")
        self.sources, self.targets, self.multiple = Ragged(source_ids), Ragged(target_ids), multiple
        # a pair takes its tokens and one special one
        longest = rounded(np.maximum(self.sources.lengths, self.targets.lengths) + 1, multiple)
        # source lengths too, so that the shorter side is padded little
        finer = self.sources.lengths / (self.sources.lengths.max(initial=0) + 1)
        self.plan = Plan(longest, tokens=tokens, seed=seed, shuffle=shuffle, finer=finer, name="pair")

    def __len__(self) -> int:
        """How many pairs there are."""
        return len(self.plan)

    def count(self, epoch: int) -> int:
        """How many batches an epoch has; it differs a little from epoch to epoch."""
        return len(self.plan.epoch(epoch))

    def get(self, epoch: int, i: int) -> Batch:
        """Batch `i` of an epoch."""
        index = self.plan.rows(epoch, i)
        source, source_keep = self.sources.padded(index, last=EOS, multiple=self.multiple)
        target_out, target_keep = self.targets.padded(index, last=EOS, multiple=self.multiple)
        target_in, _ = self.targets.padded(index, first=BOS, multiple=self.multiple)
        return Batch(source, source_keep, target_in, target_out, target_keep, torch.from_numpy(index))


class Examples(NamedTuple):
    """Texts with their classes as a model takes them, padded on the right; `keep` is None where nothing is."""

    tokens: Tensor  # [B, T]
    keep: Tensor | None
    labels: Tensor  # [B], numbers of classes
    index: Tensor  # [B], which texts

    def to(self, device: torch.device | str) -> "Examples":
        return Examples(*(None if part is None else part.to(device, non_blocking=True) for part in self))


class LabelledBatches:
    """Batches of texts with their classes, by a `Plan`. A share of `blanked` of the
    tokens, special ones left alone, is replaced by the unknown one: a draw of seed, epoch and batch alone."""

    def __init__(
        self,
        ids: Sequence[Sequence[int]],
        labels: Sequence[int],
        *,
        tokens: int,
        seed: int = 0,
        shuffle: bool = True,
        multiple: int = 1,
        blanked: float = 0.0,
    ) -> None:
        if len(ids) != len(labels):
            raise ValueError(f"expected as many labels as texts, got {len(labels)} and {len(ids)}")
        self.texts, self.labels = Ragged(ids), torch.tensor(labels)
        self.multiple, self.blanked = multiple, blanked
        self.plan = Plan(rounded(self.texts.lengths, multiple), tokens=tokens, seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        return len(self.plan)

    def count(self, epoch: int) -> int:
        return len(self.plan.epoch(epoch))

    def get(self, epoch: int, i: int) -> Examples:
        index = self.plan.rows(epoch, i)
        tokens, keep = self.texts.padded(index, multiple=self.multiple)
        if self.blanked:
            drawn = torch.from_numpy(drawing(self.plan.seed, epoch, i).random(tokens.shape)) < self.blanked
            tokens = torch.where(drawn & (tokens >= len(SPECIAL)), UNK, tokens)
        return Examples(tokens, keep, self.labels[index], torch.from_numpy(index))


def drawing(seed: int, epoch: int, i: int) -> np.random.Generator:
    """What is drawn for one batch. The plan of the epoch draws from [seed, epoch]."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch, i, 1])))


def similar(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Places of similar length, longest first, as many as fit into the padded tokens, one at least."""
    group: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if group and (len(group) + 1) * lengths[group[0]] > tokens:
            yield group
            group = []
        group.append(place)
    if group:
        yield group


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Ids [B, T] with padding on the right, and which are real (None: all)."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])
    keep = torch.arange(longest) < torch.tensor([len(row) for row in rows])[:, None]
    return ids.to(device), None if keep.all() else keep.to(device)


class Ragged:
    """Rows of different length in one flat array."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.flat = np.fromiter(chain.from_iterable(rows), np.int32, int(self.lengths.sum()))

    def padded(
        self, index: np.ndarray, *, first: int | None = None, last: int | None = None, multiple: int = 1
    ) -> tuple[Tensor, Tensor | None]:
        """Some rows, perhaps with a token put before or after each, [B, T], and which tokens are real."""
        lengths, starts = self.lengths[index], self.starts[index]
        special = first is not None or last is not None
        width = int(rounded(lengths.max() + special, multiple))
        places = np.arange(width)
        shift = first is not None
        own = (places >= shift) & (places < lengths[:, None] + shift)
        table = np.full((len(index), width), PAD, dtype=np.int64)
        table[own] = self.flat[(starts[:, None] + places - shift)[own]]
        if first is not None:
            table[:, 0] = first
        if last is not None:
            table[np.arange(len(index)), lengths] = last
        keep = places < lengths[:, None] + special
        return torch.from_numpy(table), None if keep.all() else torch.from_numpy(keep)
