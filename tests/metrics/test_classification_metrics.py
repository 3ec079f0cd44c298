"""Measures of classifiers: by hand, and against their definitions in loops."""

import numpy as np
import pytest
from matplotlib.image import imread

from regard import draw
from regard.metrics.classification import choose, curve, decide, macro_f1, report, top_accuracy


def drawn(seed, count=60, classes=3):
    """Truth and probabilities of a classifier that knows something; some probabilities are equal."""
    draw = np.random.default_rng(seed)
    truth = draw.integers(0, classes, count)
    logits = draw.normal(size=(count, classes)).round(1)
    logits[np.arange(count), truth] += 0.7
    return truth, np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


def test_report_by_hand():
    # answers a a b b c c of truth a b b b c a
    answers = np.eye(3)[[0, 0, 1, 1, 2, 2]] * 0.8 + 0.1
    found = report([0, 1, 1, 1, 2, 0], answers, ["a", "b", "c"])
    assert found.accuracy == pytest.approx(4 / 6)
    assert found.confusion.tolist() == [[1, 0, 1], [1, 2, 0], [0, 0, 1]]
    assert found.classes[1].shares == pytest.approx((1, 2 / 3, 0.8))
    assert [score.examples for score in found.classes] == [2, 3, 1]
    assert found.macro == pytest.approx((2 / 3, (1 / 2 + 2 / 3 + 1) / 3, (1 / 2 + 4 / 5 + 2 / 3) / 3))
    assert found.micro == pytest.approx((4 / 6,) * 3)


def test_a_class_that_nothing_belongs_to_or_nobody_answers():
    found = report([0, 0, 1], np.array([[0.9, 0.1, 0.0]] * 3), ["a", "b", "c"])
    assert found.classes[1].shares == (0, 0, 0)
    assert (found.classes[2].average_precision, found.curves[2]) == (None, None)
    assert found.average_precision == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert found.to_json()["classes"]["c"]["average_precision"] is None


@pytest.mark.parametrize("seed", range(5))
def test_curve_and_average_precision_are_their_definitions(seed):
    truth, probabilities = drawn(seed)
    found = report(truth, probabilities, ["a", "b", "c"])
    for index in range(3):
        positive, scores = truth == index, probabilities[:, index]
        points = {}
        for threshold in sorted(set(scores), reverse=True):
            taken = [bool(one) for one, score in zip(positive, scores, strict=True) if score >= threshold]
            points[threshold] = (sum(taken) / len(taken), sum(taken) / sum(positive))
        line = found.curves[index]
        # points that only repeat a recall of 1 with less precision may be missing
        for threshold, precision, recall in zip(*line, strict=True):
            assert points[threshold] == pytest.approx((precision, recall))
        area, before = 0.0, 0.0
        for precision, recall in points.values():
            area, before = area + (recall - before) * precision, recall
        assert found.classes[index].average_precision == pytest.approx(area)


@pytest.mark.parametrize("wanted", [0.3, 0.62, 0.95, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_threshold_is_the_best_that_reaches_it(seed, wanted):
    truth, probabilities = drawn(seed, classes=2)
    positive, scores = truth == 1, probabilities[:, 1]
    every = [decide(positive, scores, threshold) for threshold in set(scores)]
    found = choose(positive, scores, recall=wanted)
    assert found.recall >= wanted
    assert found.precision == max(one.precision for one in every if one.recall >= wanted)
    reachable = [one for one in every if one.precision >= wanted]
    if reachable:
        found = choose(positive, scores, precision=wanted)
        assert found.precision >= wanted
        assert found.recall == max(one.recall for one in reachable)
    else:
        with pytest.raises(ValueError, match=f"no threshold reaches precision {wanted:g}: the most is"):
            choose(positive, scores, precision=wanted)


def test_decision_counts():
    found = decide(np.array([True, True, False, False]), np.array([0.9, 0.2, 0.5, 0.1]), 0.5)
    assert found == (0.5, 0.5, 0.5, 2, 1, 2)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({}, "give one of them"),
        ({"recall": 0.5, "precision": 0.5}, "give one of them"),
        ({"recall": 0.0}, "above 0 and at most 1, got 0"),
        ({"precision": 1.5}, "above 0 and at most 1, got 1.5"),
    ],
)
def test_a_wish_that_cannot_be(options, part):
    with pytest.raises(ValueError, match=part):
        choose(np.array([True, False]), np.array([0.5, 0.4]), **options)


def test_bad_answers_are_refused():
    assert curve(np.array([False]), np.array([0.5])) is None
    with pytest.raises(ValueError, match="no example belongs to the class"):
        choose(np.array([False]), np.array([0.5]), recall=0.5)
    with pytest.raises(ValueError, match="got \\[1, 2\\] for 2"):
        report([0, 1], np.array([[0.5, 0.5]]), ["a", "b"])
    with pytest.raises(ValueError, match="classes are 0 to 1, got 0 to 2"):
        report([0, 2], np.full((2, 2), 0.5), ["a", "b"])
    with pytest.raises(ValueError, match="not finite"):
        report([0, 1], np.full((2, 2), np.nan), ["a", "b"])


@pytest.mark.parametrize("classes", [2, 5, 30])
def test_picture(tmp_path, classes):
    truth, probabilities = drawn(0, 400, classes)
    found = report(truth, probabilities, [f"$class {index}" for index in range(classes)])
    chosen = choose(truth == 1, probabilities[:, 1], recall=0.9) if classes == 2 else None
    picture = draw.report_picture(found, "run $", "note $", only=1 if classes == 2 else None, chosen=chosen)
    matrix, line = picture.axes
    if classes <= 12:
        words = [text.get_text().split("\n")[0] for text in matrix.texts]
        assert words == [f"{count:,}" for count in found.confusion.flat]
    if chosen is not None:
        mark = line.lines[-1]
        assert (mark.get_xdata()[0], mark.get_ydata()[0]) == (chosen.recall, chosen.precision)
    image = imread(draw.save(picture, tmp_path / "report.png"))
    assert image[..., :3].std() > 0.05


def test_of_equally_good_thresholds_the_one_with_more_of_what_was_wanted():
    positive, scores = np.array([1, 1, 1, 0]), np.array([0.9, 0.8, 0.7, 0.6])
    # precision is 1 down to 0.7, recall is 1 from 0.7 down
    assert choose(positive, scores, recall=0.3).threshold == 0.7
    assert choose(positive, scores, precision=0.5).threshold == 0.7


@pytest.mark.parametrize("seed", range(3))
def test_accuracy_among_the_most_probable(seed):
    from sklearn.metrics import top_k_accuracy_score

    draw = np.random.default_rng(seed)
    truth, probabilities = draw.integers(0, 8, 60), draw.dirichlet(np.ones(8), 60)
    whole = report(truth.tolist(), probabilities, [str(label) for label in range(8)])
    assert top_accuracy(truth, probabilities, 1) == pytest.approx(whole.accuracy)
    assert macro_f1(truth, probabilities) == pytest.approx(whole.macro.f1)
    for count in (2, 5, 7):
        expected = top_k_accuracy_score(truth, probabilities, k=count, labels=range(8))
        assert top_accuracy(truth, probabilities, count) == pytest.approx(expected)
    assert top_accuracy(truth, probabilities, 8) == 1


def test_of_equally_probable_classes_the_first_is_answered():
    even = np.full((3, 3), 1 / 3)
    assert top_accuracy([0, 1, 2], even, 1) == pytest.approx(1 / 3)
    assert top_accuracy([0, 1, 2], even, 2) == pytest.approx(2 / 3)
