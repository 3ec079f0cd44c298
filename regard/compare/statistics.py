"""What can be said of repeated measurements: medians, intervals, and which rows differ."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

DRAWS = 2000  # of a bootstrap
LEVEL = 0.95
NARROW = 0.05  # width of an interval, as a share of its median, at which no more rounds are needed
DRIFT = 0.05  # change of the baseline between the first and the last third of the rounds that is called drift


class Interval(NamedTuple):
    """A middle value, and the bounds that repetitions put around it."""

    middle: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """The width as a share of the middle."""
        return (self.high - self.low) / self.middle if self.middle else math.inf

    def overlaps(self, other: "Interval") -> bool:
        """Whether some value lies in both."""
        return self.low <= other.high and other.low <= self.high


def bootstrap(values: Sequence[float], seed: int = 0) -> Interval:
    """The median with its percentile bootstrap interval; the draws are seeded, so equal values have equal intervals."""
    data = np.asarray(values, dtype=float)
    if len(data) < 2:
        only = float(data[0])
        return Interval(only, only, only)
    picks = np.random.default_rng(seed).integers(len(data), size=(DRAWS, len(data)))
    medians = np.median(data[picks], axis=1)
    low, high = np.quantile(medians, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(np.median(data)), float(low), float(high))


def ratios(rounds: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Each round as a multiple of the baseline's turn in the same round."""
    return [one / base for one, base in zip(rounds, baseline, strict=True)]


def quartiles(values: Sequence[float]) -> Interval:
    """The median and the quartiles around it."""
    low, middle, high = np.quantile(np.asarray(values, dtype=float), [0.25, 0.5, 0.75])
    return Interval(float(middle), float(low), float(high))


def drifts(baseline: Sequence[float]) -> bool:
    """Whether the medians of the first and the last third of the rounds differ by more than DRIFT."""
    third = len(baseline) // 3
    if not third:
        return False
    first, last = (float(np.median(part)) for part in (baseline[:third], baseline[-third:]))
    return abs(last - first) > DRIFT * min(first, last)


def wilson(right: int, asked: int, z: float = 1.96) -> Interval:
    """A share of right answers, with the interval of Wilson (1927) for the sampling of the questions."""
    if not asked:
        return Interval(math.nan, 0.0, 1.0)
    share, base = right / asked, 1 + z * z / asked
    centre = (share + z * z / (2 * asked)) / base
    half = z * math.sqrt(share * (1 - share) / asked + z * z / (4 * asked * asked)) / base
    return Interval(share, centre - half, centre + half)


def paired(one: Sequence[float], other: Sequence[float], seed: int = 0) -> Interval:
    """The mean difference over the same test items, with its bootstrap interval."""
    data = np.asarray(one, dtype=float) - np.asarray(other, dtype=float)
    picks = np.random.default_rng(seed).integers(len(data), size=(DRAWS, len(data)))
    low, high = np.quantile(data[picks].mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(data.mean()), float(low), float(high))


def letters(intervals: Sequence[Interval], higher_is_better: bool) -> list[str]:
    """Rank letters of rows that differ where their intervals do not overlap."""
    order = sorted(range(len(intervals)), key=lambda at: intervals[at].middle, reverse=higher_is_better)
    return group_letters(order, lambda one, other: intervals[one].overlaps(intervals[other]))


def group_letters(order: Sequence[int], is_same: Callable[[int, int], bool]) -> list[str]:
    """Rank letters of rows in their order, the best first: rows that share a letter are not told apart. a is the best
    group; a row can be in several."""
    groups: list[set[int]] = []
    for place, first in enumerate(order):
        # from this row on: those before it have groups of their own
        group = {at for at in order[place:] if at == first or is_same(at, first)}
        if not any(group <= known for known in groups):
            groups.append(group)
    found = {at: "".join(_letter(number) for number, group in enumerate(groups) if at in group) for at in order}
    return [found[at] for at in sorted(order)]


def _letter(number: int) -> str:
    return chr(ord("a") + number) if number < 26 else f"[{number}]"
