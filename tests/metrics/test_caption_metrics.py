"""Scores of captions and of retrieval."""

import math
import random
from itertools import permutations

import numpy as np
import pytest

from regard.metrics.captions import bleu, chrf, cider, words
from regard.metrics.retrieval import Recall, chance, retrieval

CAPTIONS = [
    ["A dog runs .", "A brown dog runs through the grass ."],
    ["Two men sit on a bench .", "A pair of men sitting ."],
    ["A girl in a red dress climbs the stairs .", "Child climbing up ."],
]


class TestCider:
    def test_by_hand(self):
        """Two pictures. Of "a dog": `a` is in both (weight 0), `dog` and `a dog` in one (weight log 2 = w).
        n = 1: ours (0, w), theirs (0, w, w) for a dog runs: w w / (w sqrt(2) w) = 1 / sqrt 2.
        n = 2: ours (w), theirs (w, w): 1 / sqrt 2. n = 3, 4: ours has none. Lengths 2 and 3: exp(-1 / 72).
        The second picture gets its own reference: n = 1, 2 are 1, it has no more words."""
        first = 10 * (2 / math.sqrt(2)) / 4 * math.exp(-1 / 72)
        second = 10 * 2 / 4
        score = cider(["a dog", "a cat"], [["a dog runs"], ["a cat"]])
        assert score.value == pytest.approx((first + second) / 2, rel=1e-12)
        assert score.text == f"CIDEr-D|{score.signature} = {score.value:.4f}"

    def test_counts_are_clipped(self):
        """dog dog dog: weight 3 w for `dog`, of which the reference has w; its norm is 3 w, and 2 w' for `dog dog`,
        which no reference has. n = 1: min(3 w, w) w / (3 w sqrt 2 w)."""
        expected = 10 * (1 / (3 * math.sqrt(2))) / 4 * math.exp(0)
        assert cider(["dog dog dog", "x"], [["a dog runs"], ["a cat"]]).value == pytest.approx(expected / 2, rel=1e-12)

    def test_words_are_rare_by_pictures_and_not_by_captions(self):
        """`dog` is in two captions of one picture of two: its weight is w = log 2, as that of all others.
        First caption: n = 1, 2 are 1. Second: n = 1 is w w / (sqrt 2 w sqrt 2 w)."""
        expected = 10 * (2 / 4 + 1 / 2 / 4) / 2
        found = cider(["dog runs", "x"], [["dog runs", "dog sits"], ["cat"]])
        assert found.value == pytest.approx(expected / 2, rel=1e-12)

    def test_a_reference_that_is_long_enough_scores_all(self):
        own = [texts[0] for texts in CAPTIONS]
        one = cider(own, [[text] for text in own])
        assert words(own[0]) == ["a", "dog", "runs"]  # too short for n = 4, so 3 / 4 of 10
        assert one.value == pytest.approx((7.5 + 10 + 10) / 3)

    def test_is_a_mean_over_references(self):
        a, b = (cider(["a dog runs", "x", "y"], [[CAPTIONS[0][j]], *CAPTIONS[1:]]) for j in (0, 1))
        both = cider(["a dog runs", "x", "y"], CAPTIONS)
        assert b.value < both.value < a.value

    def test_order_of_pictures_and_references_does_not_matter(self):
        draw = random.Random(0)
        hypotheses = ["a dog in the grass", "men on a bench", "a girl climbs up"]
        expected = cider(hypotheses, CAPTIONS).value
        for order in permutations(range(3)):
            shuffled = [draw.sample(CAPTIONS[i], 2) for i in order]
            assert cider([hypotheses[i] for i in order], shuffled).value == pytest.approx(expected)

    def test_case_and_punctuation_do_not_matter(self):
        hypotheses = ["A DOG, runs!", "", "the man's hat"]
        plain = ["a dog runs", "", "the man's hat"]
        assert cider(hypotheses, CAPTIONS).value == cider(plain, CAPTIONS).value > 0
        assert words("The man's hat.") == ["the", "man's", "hat"]

    def test_a_length_of_its_own_costs(self):
        long = "a dog runs " * 5
        assert cider([long, "x", "y"], CAPTIONS).value < 0.3 * cider(["a dog runs", "x", "y"], CAPTIONS).value

    def test_what_all_pictures_share_tells_nothing(self):
        assert cider(["a dog"], [["a dog"]]).value == 0
        assert cider(["a", "a"], [["a dog"], ["a cat"]]).value == 0


class TestSeveralReferences:
    def test_bleu_takes_ngrams_of_any(self):
        both = bleu(["the small dog runs fast"], [["the small dog runs", "dog runs fast"]])
        alone = bleu(["the small dog runs fast"], [["the small dog runs"]])
        assert both.value > alone.value
        assert "nrefs:2" in both.signature

    def test_bleu_by_hand(self):
        # each n-gram of the hypothesis is in one of the references, and one is as long
        assert bleu(["a b c d e"], [["a b c d x", "b c d e"]]).value == pytest.approx(100)

    def test_case_does_not_matter(self):
        for metric in (bleu, chrf):
            assert metric(["A Dog runs fast"], [["a dog Runs fast"]]).value == pytest.approx(100)
            assert "case:lc" in metric(["a"], [["a"]]).signature

    def test_pictures_may_have_different_numbers(self):
        hypotheses = ["a b c d", "e f g h"]
        some = bleu(hypotheses, [["x", "a b c d"], ["e f g h"]])
        assert some.value == pytest.approx(100)
        assert chrf(hypotheses, [["x", "a b c d"], ["e f g h"]]).value == pytest.approx(100)

    @pytest.mark.parametrize("metric", [bleu, chrf, cider])
    def test_refusals(self, metric):
        with pytest.raises(ValueError, match="got 2 hypotheses and references of 1 pictures"):
            metric(["a", "b"], [["a"]])
        with pytest.raises(ValueError, match="nothing to score"):
            metric([], [])
        with pytest.raises(ValueError, match="hypotheses must be a list of captions"):
            metric("a", [["a"]])
        for references in (["a"], [[]], [[1]]):
            with pytest.raises(ValueError, match="one or more captions per picture"):
                metric(["a"], references)


class TestRetrieval:
    def test_by_hand(self):
        """Three pictures with two captions each; owners 0 0 1 1 2 2."""
        similarity = np.array(
            [
                [0.9, 0.1, 0.2, 0.3, 0.0, 0.0],  # its first caption is first
                [0.8, 0.7, 0.1, 0.6, 0.0, 0.0],  # two captions of others are above the better of its own
                [0.5, 0.5, 0.5, 0.5, 0.4, 0.1],  # four are
            ]
        )
        found = retrieval(similarity, np.array([0, 0, 1, 1, 2, 2]))
        # captions find their pictures at 1, 3, 3, 1, 1, 1
        assert found.pictures == Recall({1: pytest.approx(4 / 6), 5: 1.0, 10: 1.0}, 1.0)
        assert found.captions == Recall({1: pytest.approx(1 / 3), 5: 1.0, 10: 1.0}, 3.0)
        assert str(found.captions) == "recall@1 = 33.33 %, recall@5 = 100.00 %, recall@10 = 100.00 %, median rank = 3"

    def test_equals_are_a_mean_over_all_orders(self):
        similarity, owners = np.array([[1.0, 1.0, 1.0, 0.5]] * 2), np.array([0, 1, 1, 0])
        expected = []
        for order in permutations(range(3)):
            ranks = [min(order.index(c) for c in own if c < 3) for own in ([0, 3], [1, 2])]
            expected.append([rank < 1 for rank in ranks])
        assert retrieval(similarity, owners).captions.at[1] == pytest.approx(np.mean(expected))

    def test_chance(self):
        owners = np.repeat(np.arange(100), 5)
        found = chance(100, owners)
        assert found.pictures.at == {k: pytest.approx(k / 100) for k in (1, 5, 10)}
        assert found.pictures.median_rank == pytest.approx(50.5)
        assert found.captions.at[1] == pytest.approx(0.01)
        assert found.captions.at[5] == pytest.approx(1 - math.prod((495 - i) / (500 - i) for i in range(5)))
        draws = np.random.Generator(np.random.PCG64(0))
        random_order = [retrieval(draws.random((100, 500)), owners).captions for _ in range(20)]
        assert np.mean([part.at[10] for part in random_order]) == pytest.approx(found.captions.at[10], abs=0.02)
        # half of the first right ones of five among 500 stand there or above; the mean rank is 83.5
        assert found.captions.median_rank == 65
        assert np.mean([part.median_rank for part in random_order]) == pytest.approx(65, abs=4)

    def test_a_median_rank_is_one_over_queries_and_orders(self):
        """Ranks 1 and 2 or 2 and 1 in either order of two equals, and 3: of six, the middle ones are 2 and 2."""
        similarity = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
        found = retrieval(similarity, np.array([0, 1, 2]))
        assert found.captions.median_rank == 2
        # without equals it is the usual one
        assert retrieval(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([0, 1])).captions.median_rank == 1.5

    def test_perfect(self):
        owners = np.array([1, 0, 1, 2])
        similarity = (owners == np.arange(3)[:, None]).astype(float)
        for part in retrieval(similarity, owners):
            assert part == Recall({1: 1.0, 5: 1.0, 10: 1.0}, 1.0)

    def test_refusals(self):
        with pytest.raises(ValueError, match=r"got \[2, 2\] and \[3\]"):
            retrieval(np.zeros((2, 2)), np.zeros(3))
        with pytest.raises(ValueError, match="every picture must have a caption"):
            retrieval(np.zeros((2, 2)), np.array([0, 0]))
        with pytest.raises(ValueError, match="finite"):
            retrieval(np.full((1, 1), np.nan), np.array([0]))
