"""Batches of pairs of similar length, in an order that depends on nothing but the seed and the epoch.

To resume in the middle of an epoch takes two numbers, the epoch and the index of the batch: there is no other state.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from regard.data.tokenizer import BOS, EOS, PAD

# tokens by which lengths are shifted at random before sorting, so that each epoch batches other pairs together
NOISE = 1.0


Tensors = TypeVar("Tensors", bound=tuple[Tensor | None, ...])


def to_device(batch: Tensors, device: torch.device | str) -> Tensors:
    """A named tuple of tensors, some of which may be missing, on a device."""
    # a named tuple takes its fields one by one, other than tuple itself
    make: Any = type(batch)
    return make(*(None if x is None else x.to(device, non_blocking=True) for x in batch))


class Batch(NamedTuple):
    """Pairs as a model takes them, padded on the right. A `keep` is None where nothing is padded."""

    source: Tensor  # [B, S], ends in eos
    source_keep: Tensor | None
    target_in: Tensor  # [B, T], starts with bos
    target_out: Tensor  # [B, T], ends in eos
    target_keep: Tensor | None
    indices: Tensor  # [B], which pairs

    def to(self, device: torch.device | str) -> "Batch":
        return to_device(self, device)


class Short(NamedTuple):
    """The pairs that are not too long: their ids, their index among all, and how many were dropped."""

    source: list[Sequence[int]]
    target: list[Sequence[int]]
    indices: list[int]
    dropped: int


def keep_short(source_ids: Sequence[Sequence[int]], target_ids: Sequence[Sequence[int]], maximum: int) -> Short:
    """Drop the pairs with more than `maximum` tokens, special ones not counted, on either side."""
    pairs = zip(source_ids, target_ids, strict=True)
    index = [n for n, (source, target) in enumerate(pairs) if max(len(source), len(target)) <= maximum]
    source, target = [source_ids[n] for n in index], [target_ids[n] for n in index]
    return Short(source, target, index, len(source_ids) - len(index))


class Planned:
    """Every row once per epoch, in batches of at most `tokens` padded tokens: rows times the longest of `lengths`.

    With `shuffle`, each epoch groups rows of about equal length anew and shuffles the batches; without, batches come
    from short to long. `key`, below 1, orders rows of equal length.
    """

    def __init__(
        self, lengths: np.ndarray, *, tokens: int, seed: int, shuffle: bool, key: np.ndarray | float = 0.0
    ) -> None:
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        self.lengths, self.key, self.tokens, self.seed, self.shuffle = lengths, key, tokens, seed, shuffle
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
            self.planned = (epoch, self.plan(epoch))
        return self.planned[1]

    def count(self, epoch: int) -> int:
        """How many batches an epoch has; it differs a little from epoch to epoch."""
        return len(self.epoch(epoch))

    def rows(self, epoch: int, i: int) -> np.ndarray:
        """Which rows batch `i` of an epoch has."""
        if not 0 <= i < self.count(epoch):
            raise IndexError(f"epoch {epoch} has {self.count(epoch)} batches, counted from 0, got {i}")
        return self.epoch(epoch)[i]

    def plan(self, epoch: int) -> list[np.ndarray]:
        # Only `random` is drawn and only stable sorts are used: numpy may change how it shuffles from one version to
        # the next.
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
        key = self.lengths + self.key
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


class Batches(Planned):
    """Every pair once per epoch. A pair is as long as its source (with eos) or target (with bos or eos), the longer of
    the two, rounded up to a `multiple`, to which both sides are padded."""

    def __init__(
        self,
        source_ids: Sequence[Sequence[int]],
        target_ids: Sequence[Sequence[int]],
        *,
        tokens: int,
        seed: int = 0,
        shuffle: bool = True,
        multiple: int = 1,
        special: tuple[int, int, int] = (EOS, BOS, EOS),
    ) -> None:
        """`special`: the ids that end a source, begin a target and end a target."""
        if len(source_ids) != len(target_ids):
            raise ValueError(f"expected as many targets as sources, got {len(source_ids)} and {len(target_ids)}")
        if len(source_ids) == 0:
            raise ValueError("there is no pair to make batches of")
        if multiple < 1:
            raise ValueError(f"multiple must be at least 1, got {multiple}")
        self.multiple, self.special = multiple, special
        self.sources, self.targets = Ragged(source_ids), Ragged(target_ids)
        # A row takes its tokens and one special one.
        longest = np.maximum(self.sources.lengths, self.targets.lengths) + 1
        lengths = -(-longest // multiple) * multiple
        if (worst := lengths.max()) > tokens:
            raise ValueError(
                f"pair {int(lengths.argmax()) + 1} is too long: it takes {worst} tokens and a batch has at most "
                f"{tokens}. Raise the tokens of a batch, or drop long pairs"
            )
        # Source lengths too, so that the shorter side is padded little.
        key = self.sources.lengths / (self.sources.lengths.max() + 1)
        super().__init__(lengths, tokens=tokens, seed=seed, shuffle=shuffle, key=key)

    def get(self, epoch: int, i: int) -> Batch:
        """Batch `i` of an epoch."""
        index = self.rows(epoch, i)
        close, begin, end = self.special
        source, source_keep = self.sources.padded(index, last=close, multiple=self.multiple)
        target_out, target_keep = self.targets.padded(index, last=end, multiple=self.multiple)
        target_in, _ = self.targets.padded(index, first=begin, multiple=self.multiple)
        return Batch(source, source_keep, target_in, target_out, target_keep, torch.from_numpy(index))


class Examples(NamedTuple):
    """Texts with their classes as a model takes them, padded on the right; `keep` is None where nothing is."""

    tokens: Tensor  # [B, T]
    keep: Tensor | None
    labels: Tensor  # [B], numbers of classes
    indices: Tensor  # [B], which texts

    def to(self, device: torch.device | str) -> "Examples":
        return to_device(self, device)


class LabelledBatches(Planned):
    """Every text once per epoch, with its class. A share `blanked` of the tokens, but not the first and the last, is
    replaced by the unknown token; which ones depends on seed, epoch and batch alone."""

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
        unknown: int | None = None,
    ) -> None:
        if blanked and unknown is None:
            raise ValueError("data.blanked needs a tokenizer with an unknown token; this one has none")
        if len(ids) != len(labels):
            raise ValueError(f"expected as many labels as texts, got {len(labels)} and {len(ids)}")
        if not len(ids):
            raise ValueError("there is no text to make batches of")
        self.texts, self.labels = Ragged(ids), torch.tensor(labels)
        self.multiple, self.blanked, self.unknown = multiple, blanked, unknown
        lengths = -(-self.texts.lengths // multiple) * multiple
        if (worst := lengths.max()) > tokens:
            raise ValueError(f"a text of {worst} tokens does not fit into a batch of {tokens}: raise training.tokens")
        super().__init__(lengths, tokens=tokens, seed=seed, shuffle=shuffle)

    def get(self, epoch: int, i: int) -> Examples:
        index = self.rows(epoch, i)
        tokens, keep = self.texts.padded(index, multiple=self.multiple)
        if self.blanked and self.unknown is not None:
            drawn = drawing(self.seed, epoch, i).random(tokens.shape) < self.blanked
            places = np.arange(tokens.shape[1])
            inner = (places > 0) & (places < self.texts.lengths[index][:, None] - 1)
            tokens = torch.where(torch.from_numpy(drawn & inner), self.unknown, tokens)
        return Examples(tokens, keep, self.labels[index], torch.from_numpy(index))


def drawing(seed: int, epoch: int, i: int, purpose: int = 1) -> np.random.Generator:
    """The random numbers of one batch, others for each purpose. The plan of the epoch draws from [seed, epoch]."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch, i, purpose])))


def similar(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Indices in groups of similar length, longest first: as many as fit into `tokens` padded tokens, at least one."""
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
        width = -(-(int(lengths.max()) + special) // multiple) * multiple
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
