"""What can be said of repeated measurements: medians, intervals, and which rows differ."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

DRAWS = 2000  # of a bootstrap
CONFIDENCE = 0.95
NARROW_WIDTH = 0.05  # width of an interval, as a share of its median, at which no more rounds are needed
DRIFT_SHARE = 0.05  # change of the baseline between the first and the last third of the rounds that is called drift


class Interval(NamedTuple):
    """An estimate with its lower and upper bound."""

    estimate: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """The width as a share of the estimate."""
        return (self.high - self.low) / self.estimate if self.estimate else math.inf

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
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(np.median(data)), float(low), float(high))


def ratios(rounds: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Each round as a multiple of the baseline's turn in the same round."""
    return [one / base for one, base in zip(rounds, baseline, strict=True)]


def quartiles(values: Sequence[float]) -> Interval:
    """The median and the quartiles around it."""
    low, middle, high = np.quantile(np.asarray(values, dtype=float), [0.25, 0.5, 0.75])
    return Interval(float(middle), float(low), float(high))


def drifts(baseline: Sequence[float]) -> bool:
    """Whether the medians of the first and the last third of the rounds differ by more than DRIFT_SHARE."""
    third = len(baseline) // 3
    if not third:
        return False
    first, last = (float(np.median(part)) for part in (baseline[:third], baseline[-third:]))
    return abs(last - first) > DRIFT_SHARE * min(first, last)


def wilson(right: int, asked: int, z: float = 1.96) -> Interval:
    """A share of right answers, with the interval of Wilson (1927) for the sampling of the questions."""
    if not asked:
        return Interval(math.nan, 0.0, 1.0)
    share, base = right / asked, 1 + z * z / asked
    centre = (share + z * z / (2 * asked)) / base
    half = z * math.sqrt(share * (1 - share) / asked + z * z / (4 * asked * asked)) / base
    return Interval(share, centre - half, centre + half)


def resample(items: np.ndarray, seed: int = 0) -> np.ndarray:
    """Sums over DRAWS test sets that are drawn from the items of one, [N, ...] -> [DRAWS, ...]. The draws depend on the
    number of items alone: those of two rows of a table are paired, item by item."""
    count = len(items)
    times = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=DRAWS)
    return times @ items


def resample_mean(items: Sequence[float]) -> np.ndarray:
    """The mean score of each of the drawn test sets, [DRAWS]."""
    return resample(np.asarray(items, dtype=float)) / len(items)


def resample_bleu(counts: Sequence[Sequence[int]]) -> np.ndarray:
    """BLEU of each of the drawn test sets (Koehn 2004), [DRAWS], from what each sentence adds to it, [N, 6]: matches of
    1 to 4 tokens, its length, and that of its reference."""
    data = np.asarray(counts, dtype=float)
    # a sentence of n tokens has n - 1 pairs, n - 2 triples, and so on
    totals = np.maximum(data[:, 4:5] - np.arange(4), 0)
    return corpus_bleu(resample(np.concatenate([data, totals], 1)))


def corpus_bleu(sums: np.ndarray) -> np.ndarray:
    """BLEU of sums over sentences, [..., 10]: matches of 1 to 4 tokens, lengths of hypotheses and references, and how
    many of 1 to 4 tokens the hypotheses have. Smoothed as sacreBLEU does by default: the first missing match of an
    order counts as 1/2, the next one as 1/4."""
    matches, length, reference, totals = sums[..., :4], sums[..., 4], sums[..., 5], sums[..., 6:]
    smoothed = np.where(matches > 0, matches, 0.5 ** np.cumsum(matches == 0, -1))
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.exp(np.log(smoothed / totals).mean(-1))
        penalty = np.exp(np.minimum(0.0, 1 - reference / length))
        score = 100 * penalty * precision
    return np.where((matches.sum(-1) > 0) & (totals[..., -1] > 0), score, 0.0)


def draws_differ(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether the 95 % interval of the difference between two rows, over paired bootstrap samples, excludes zero."""
    low, high = np.quantile(one - other, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return not low <= 0 <= high


def means_differ(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the means of two rows of seeds, three each at least, differ by more than twice the standard error of
    their difference."""
    if min(len(one), len(other)) < 3:
        return False
    error = math.sqrt(sum(np.var(scores, ddof=1) / len(scores) for scores in (one, other)))
    return abs(float(np.mean(one) - np.mean(other))) > 2 * error


def rank_letters(order: Sequence[int], is_same: Callable[[int, int], bool]) -> list[str]:
    """Rank letters (a compact letter display) of rows in their order, the best first: two rows share a letter if and
    only if `is_same` holds for them. The best group is a; a row can be in several."""
    # one group of all, which each pair that differs divides (insert and absorb, Piepho 2004)
    groups = [frozenset(range(len(order)))]
    for one, other in itertools.combinations(range(len(order)), 2):
        if not is_same(order[one], order[other]):
            parts = {part for group in groups for part in _divided(group, one, other)}
            groups = [group for group in parts if not any(group < larger for larger in parts)]
    named = [{order[place] for place in group} for group in sorted(groups, key=sorted)]
    found = {at: "".join(_letter(number) for number, group in enumerate(named) if at in group) for at in order}
    return [found[at] for at in sorted(order)]


def _divided(group: frozenset[int], one: int, other: int) -> tuple[frozenset[int], ...]:
    """A group without each of two rows in turn, if it has both."""
    return (group - {one}, group - {other}) if {one, other} <= group else (group,)


def _letter(number: int) -> str:
    return chr(ord("a") + number) if number < 26 else f"[{number}]"
