"""Statistics of repeated measurements, by hand and by loops."""

import math
import random

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU

from regard.compare.statistics import (
    DRAWS,
    Interval,
    bootstrap,
    corpus_bleu,
    draws_differ,
    drifts,
    means_differ,
    quartiles,
    rank_letters,
    ratios,
    resample_bleu,
    resample_mean,
    wilson,
)
from regard.metrics.translation import bleu, bleu_counts


def test_bootstrap_holds_the_median_about_as_often_as_it_says():
    held = 0
    for seed in range(200):
        draw = random.Random(seed)
        low, high = bootstrap([draw.gauss(1.0, 0.1) for _ in range(15)])[1:]
        held += low <= 1.0 <= high
    assert 0.88 < held / 200 < 0.99


def test_the_interval_has_its_confidence():
    """Of 17 different values the median of a draw is at most the 5th in 3.6 % of all draws, at most the 4th in 0.8 %:
    P(Binomial(17, k / 17) >= 9). So a 95 % interval begins at the 5th; one of 90 % would begin at the 6th."""
    assert bootstrap(range(17)) == Interval(8.0, 4.0, 12.0)


def test_bootstrap_is_seeded_and_of_equal_values_a_point():
    values = [3.0, 1.0, 2.0, 5.0]
    assert bootstrap(values) == bootstrap(values)
    assert bootstrap([2.0] * 9) == bootstrap([2.0]) == Interval(2.0, 2.0, 2.0)
    assert bootstrap(values).estimate == 2.5


def test_ratios_are_within_a_round():
    # a machine that becomes ten times slower changes no ratio
    assert ratios([1.0, 10.0], [2.0, 20.0]) == [0.5, 0.5]


def test_quartiles_and_drift():
    assert quartiles([1, 2, 3, 4, 5]) == Interval(3, 2, 4)
    assert not drifts([1.0, 1.04] * 6)
    assert drifts([1.0] * 4 + [1.03] * 4 + [1.06] * 4)
    assert drifts([1.06] * 4 + [1.03] * 4 + [1.0] * 4)
    assert not drifts([1.0, 2.0])


@pytest.mark.parametrize(("right", "asked", "low", "high"), [(9, 10, 0.596, 0.982), (0, 20, 0.0, 0.161)])
def test_wilson(right, asked, low, high):
    found = wilson(right, asked)
    assert found.low == pytest.approx(low, abs=1e-3)
    assert found.high == pytest.approx(high, abs=1e-3)
    assert math.isnan(wilson(0, 0).estimate)


def test_paired_items_tell_what_two_shares_do_not():
    """Each share has a wide interval; their difference on the same items has none."""
    one = [1.0, 0.0] * 50
    other = [max(0.0, value - 0.1) for value in one]
    draws = resample_mean(one)
    assert draws.shape == (DRAWS,)
    assert draws.mean() == pytest.approx(0.5, abs=0.01)
    assert draws.std() == pytest.approx(0.05, rel=0.1)
    assert draws_differ(draws, resample_mean(other))
    assert not draws_differ(draws, draws)
    # the same values at other items are no equal answers
    assert not draws_differ(draws, resample_mean(one[::-1]))
    assert (draws != resample_mean(one[::-1])).any()


def sentences(share: float, seed: int, count: int = 200) -> tuple[list[str], list[str]]:
    """Translations of which about this share of the words is right, and their references."""
    draw = random.Random(seed)
    words = random.Random(count)
    references = [[f"w{words.randrange(40)}" for _ in range(words.randrange(1, 16))] for _ in range(count)]
    ours = [[word if draw.random() < share else "x" for word in line[draw.randrange(2) :]] for line in references]
    return [" ".join(line) for line in ours], [" ".join(line) for line in references]


def test_counts_of_a_sentence():
    # pairs ab, bc, de; the triple abc
    found = bleu_counts(["a b c x d e", "a b c d", ""], ["a b c d e", "a b c d", "a"], tokenize="none")
    assert found == [[5, 3, 1, 0, 6, 5], [4, 3, 2, 1, 4, 4], [0, 0, 0, 0, 0, 1]]


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 0.9, 1.0])
def test_counts_of_sentences_have_the_bleu_of_the_corpus(share):
    """Few matches need the smoothing, short sentences the penalty."""
    for count in (1, 3, 200):
        ours, references = sentences(share, 0, count)
        counts = np.array(bleu_counts(ours, references, tokenize="none"))
        totals = np.maximum(counts[:, 4:5] - np.arange(4), 0)
        found = corpus_bleu(np.concatenate([counts, totals], 1).sum(0))
        assert found == pytest.approx(bleu(ours, references, tokenize="none").value, abs=1e-9)


def test_bleu_of_a_drawn_test_set():
    """The spread over draws is that which sacreBLEU itself finds by scoring drawn sentences."""
    ours, references = sentences(0.7, 1, count=80)
    draw = random.Random(0)
    scores = []
    for _ in range(200):
        picks = [draw.randrange(len(ours)) for _ in ours]
        drawn = [[lines[at] for at in picks] for lines in (ours, references)]
        scores.append(BLEU(tokenize="none", force=True).corpus_score(drawn[0], [drawn[1]]).score)
    found = resample_bleu(bleu_counts(ours, references, tokenize="none"))
    assert found.mean() == pytest.approx(np.mean(scores), abs=0.5)
    assert found.std() == pytest.approx(np.std(scores), rel=0.2)


def test_translators_are_told_apart_sentence_by_sentence():
    draws = {
        name: resample_bleu(bleu_counts(*sentences(share, seed), tokenize="none"))
        for name, share, seed in (("good", 0.8, 1), ("same", 0.8, 2), ("bad", 0.6, 3))
    }
    assert draws_differ(draws["good"], draws["bad"])
    assert draws_differ(draws["bad"], draws["good"])
    assert not draws_differ(draws["good"], draws["same"])


def test_means_of_seeds():
    assert means_differ([30.0, 31.0, 32.0], [20.0, 21.0, 22.0])
    # not overlapping, but the second is all over the place: error 3.2, difference 6
    assert not means_differ([30.0, 30.1, 30.2], [19.0, 24.0, 29.9])
    # two seeds say too little of their spread
    assert not means_differ([30.0, 30.1], [10.0, 10.1])
    assert not means_differ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])


def letters(intervals: list[Interval], higher_is_better: bool) -> list[str]:
    """Rank letters of rows that differ where their intervals do not overlap."""
    order = sorted(range(len(intervals)), key=lambda at: intervals[at].estimate, reverse=higher_is_better)
    return rank_letters(order, lambda one, other: intervals[one].overlaps(intervals[other]))


def test_letters():
    clear = [Interval(1, 0.9, 1.1), Interval(2, 1.9, 2.1), Interval(3, 2.9, 3.1)]
    assert letters(clear, higher_is_better=False) == ["a", "b", "c"]
    assert letters(clear, higher_is_better=True) == ["c", "b", "a"]
    # the second differs from neither of the others, which differ from each other
    chain = [Interval(1, 0.8, 1.2), Interval(1.3, 1.1, 1.5), Interval(1.6, 1.4, 1.8)]
    assert letters(chain, higher_is_better=False) == ["a", "ab", "b"]
    assert letters([Interval(1, 0, 2)] * 3, higher_is_better=True) == ["a"] * 3
    # the first differs from none, the others from each other: no letter says that they are equal
    wide = [Interval(3, 0, 4), Interval(2.5, 2.4, 2.6), Interval(1.5, 1.4, 1.6), Interval(0.5, 0.4, 0.6)]
    assert letters(wide, higher_is_better=True) == ["abc", "a", "b", "c"]


def test_rows_share_a_letter_if_and_only_if_they_are_the_same():
    for seed in range(20):
        draw = random.Random(seed)
        same = {(one, other): draw.random() < 0.6 for other in range(8) for one in range(other)}
        order = draw.sample(range(8), 8)
        found = rank_letters(order, lambda one, other, same=same: same[min(one, other), max(one, other)])
        for (one, other), are in same.items():
            assert bool(set(found[one]) & set(found[other])) == are
        assert found[order[0]].startswith("a")
