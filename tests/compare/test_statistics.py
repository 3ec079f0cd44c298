"""Statistics of repeated measurements, by hand and by loops."""

import math
import random

import pytest

from regard.compare.statistics import Interval, bootstrap, drifts, letters, paired, quartiles, ratios, wilson


def test_bootstrap_holds_the_median_about_as_often_as_it_says():
    held = 0
    for seed in range(200):
        draw = random.Random(seed)
        low, high = bootstrap([draw.gauss(1.0, 0.1) for _ in range(15)])[1:]
        held += low <= 1.0 <= high
    assert 0.88 < held / 200 < 0.99


def test_bootstrap_is_seeded_and_of_equal_values_a_point():
    values = [3.0, 1.0, 2.0, 5.0]
    assert bootstrap(values) == bootstrap(values)
    assert bootstrap([2.0] * 9) == bootstrap([2.0]) == Interval(2.0, 2.0, 2.0)
    assert bootstrap(values).middle == 2.5


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
    assert math.isnan(wilson(0, 0).middle)


def test_paired_items_tell_what_two_shares_do_not():
    """Each share has a wide interval; their difference on the same items has none."""
    one = [1.0, 0.0] * 50
    other = [max(0.0, value - 0.1) for value in one]
    assert paired(one, other).low > 0
    assert paired(one, one).low == paired(one, one).high == 0
    # the same values at other items are no equal answers
    assert paired(one, one[::-1]).low < 0 < paired(one, one[::-1]).high


def test_letters():
    clear = [Interval(1, 0.9, 1.1), Interval(2, 1.9, 2.1), Interval(3, 2.9, 3.1)]
    assert letters(clear, higher_is_better=False) == ["a", "b", "c"]
    assert letters(clear, higher_is_better=True) == ["c", "b", "a"]
    # b is in the group of both, which are told apart from each other
    chain = [Interval(1, 0.8, 1.2), Interval(1.3, 1.1, 1.5), Interval(1.6, 1.4, 1.8)]
    assert letters(chain, higher_is_better=False) == ["a", "ab", "b"]
    assert letters([Interval(1, 0, 2)] * 3, higher_is_better=True) == ["a"] * 3
