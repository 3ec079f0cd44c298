"""How good the answers of a classifier are: counted by scikit-learn, gathered here.

Truth and answers are numbers of classes, 0 to C - 1; probabilities are [N, C]. A share of nothing (the precision of a
class that nobody answers) is 0, as scikit-learn counts it; the average precision of a class that nothing belongs to is
None.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Shares(NamedTuple):
    """precision: how many of those taken are right; recall: how many of those that are right were taken; F1 is their
    harmonic mean."""

    precision: float
    recall: float
    f1: float


class ClassScore(NamedTuple):
    """One class against all others."""

    label: str
    shares: Shares
    average_precision: float | None  # the area under its precision-recall curve, summed in steps
    examples: int  # that belong to it


class Curve(NamedTuple):
    """Precision and recall of a class when it is answered from a threshold of its probability upwards, lowest first."""

    thresholds: np.ndarray
    precision: np.ndarray
    recall: np.ndarray


class Report(NamedTuple):
    """Every measure of a set of answers."""

    labels: list[str]
    examples: int
    accuracy: float
    confusion: np.ndarray  # [truth, answer]
    classes: list[ClassScore]
    macro: Shares  # the mean over the classes
    micro: Shares  # of all decisions together; each example having one class, all three are the accuracy
    average_precision: float | None  # the mean over the classes that something belongs to
    curves: list[Curve | None]  # of each class

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the curves."""
        return {
            "examples": self.examples,
            "accuracy": self.accuracy,
            "macro": self.macro._asdict(),
            "micro": self.micro._asdict(),
            "average_precision": self.average_precision,
            "labels": self.labels,
            "confusion": self.confusion.tolist(),
            "classes": {
                score.label: score.shares._asdict()
                | {"average_precision": score.average_precision, "examples": score.examples}
                for score in self.classes
            },
        }


class Choice(NamedTuple):
    """A threshold and what it does to the examples it was tried on."""

    threshold: float
    precision: float
    recall: float
    taken: int
    right: int
    positives: int


def report(truth: Sequence[int], probabilities: np.ndarray, labels: Sequence[str]) -> Report:
    """Every measure of the most probable answers, and the curves behind them."""
    from sklearn.metrics import accuracy_score, confusion_matrix, precision_recall_fscore_support

    right, probabilities = _checked(truth, probabilities, len(labels))
    answers, every = probabilities.argmax(1), range(len(labels))
    # scikit-learn names only the string that zero_division may be, and takes numbers too
    options: dict[str, Any] = {"labels": list(every), "zero_division": 0}
    each: Any = precision_recall_fscore_support(right, answers, **options)
    whole = {}
    for how in ("macro", "micro"):
        precision, recall, f1, _ = precision_recall_fscore_support(right, answers, average=how, **options)
        whole[how] = Shares(float(precision), float(recall), float(f1))
    curves = [curve(np.equal(right, index), probabilities[:, index]) for index in every]
    areas = [average_precision(np.equal(right, index), probabilities[:, index]) for index in every]
    known = [area for area in areas if area is not None]
    return Report(
        labels=list(labels),
        examples=len(right),
        accuracy=float(accuracy_score(right, answers)),
        confusion=confusion_matrix(right, answers, labels=list(every)),
        classes=[
            ClassScore(
                labels[index], Shares(*(float(part[index]) for part in each[:3])), areas[index], int(each[3][index])
            )
            for index in every
        ],
        macro=whole["macro"],
        micro=whole["micro"],
        average_precision=sum(known) / len(known) if known else None,
        curves=curves,
    )


def top_accuracy(truth: Sequence[int] | np.ndarray, probabilities: np.ndarray, count: int) -> float:
    """The share of examples whose true class is among the `count` most probable ones."""
    right, probabilities = _checked(truth, probabilities, np.shape(probabilities)[1])
    own = probabilities[np.arange(len(right)), right][:, None]
    # of equally probable classes the first is answered, as argmax does
    earlier = np.arange(probabilities.shape[1]) < right[:, None]
    before = (probabilities > own) | ((probabilities == own) & earlier)
    return float((before.sum(1) < count).mean())


def macro_f1(truth: Sequence[int] | np.ndarray, probabilities: np.ndarray) -> float:
    """The mean over the classes of F1, as `report` has it."""
    from sklearn.metrics import f1_score

    right, probabilities = _checked(truth, probabilities, np.shape(probabilities)[1])
    every = list(range(probabilities.shape[1]))
    options: dict[str, Any] = {"labels": every, "average": "macro", "zero_division": 0}
    return float(f1_score(right, probabilities.argmax(1), **options))


def curve(positive: np.ndarray, scores: np.ndarray) -> Curve | None:
    """One point for each score that occurs: what scores at least that much is taken. None where nothing is positive."""
    from sklearn.metrics import precision_recall_curve

    if not positive.any():
        return None
    precision, recall, thresholds = precision_recall_curve(positive, scores)
    # the last point, which takes nothing, has no threshold
    return Curve(thresholds, precision[:-1], recall[:-1])


def average_precision(positive: np.ndarray, scores: np.ndarray) -> float | None:
    from sklearn.metrics import average_precision_score

    return float(average_precision_score(positive, scores)) if positive.any() else None


def choose(
    positive: np.ndarray, scores: np.ndarray, *, recall: float | None = None, precision: float | None = None
) -> Choice:
    """The threshold with the best precision among those that reach the recall, or the best recall among those that
    reach the precision. One that nothing reaches is an error that says how far one can get."""
    if (recall is None) == (precision is None):
        raise ValueError("a threshold is chosen for a recall or for a precision: give one of them")
    name, least = ("recall", recall) if precision is None else ("precision", precision)
    if least is None or not 0 < least <= 1:
        raise ValueError(f"the {name} to reach must be above 0 and at most 1, got {least:g}")
    found = curve(np.asarray(positive, bool), np.asarray(scores, np.float64))
    if found is None:
        raise ValueError("no example belongs to the class, so no threshold can be chosen for it")
    reached, better = (found.recall, found.precision) if precision is None else (found.precision, found.recall)
    fits = np.flatnonzero(reached >= least)
    if not len(fits):
        raise ValueError(f"no threshold reaches {name} {least:g}: the most is {reached.max():.4f}")
    # of equally good ones, the one that is also further above what it has to reach
    best = max(fits, key=lambda index: (better[index], reached[index]))
    return decide(positive, scores, float(found.thresholds[best]))


def decide(positive: np.ndarray, scores: np.ndarray, threshold: float) -> Choice:
    """What a threshold does: the examples that score at least that much are taken."""
    positive, taken = np.asarray(positive, bool), np.asarray(scores) >= threshold
    right, count, positives = int((positive & taken).sum()), int(taken.sum()), int(positive.sum())
    return Choice(threshold, right / max(1, count), right / max(1, positives), count, right, positives)


def _checked(
    truth: Sequence[int] | np.ndarray, probabilities: np.ndarray, classes: int
) -> tuple[np.ndarray, np.ndarray]:
    right, probabilities = np.asarray(truth, np.int64), np.asarray(probabilities, np.float64)
    if not len(right) or probabilities.shape != (len(right), classes):
        raise ValueError(
            f"a report needs one probability of each of {classes} classes for each of at least one example, "
            f"got {list(probabilities.shape)} for {len(right)}"
        )
    if right.min() < 0 or right.max() >= classes:
        raise ValueError(f"classes are 0 to {classes - 1}, got {right.min()} to {right.max()}")
    if not np.isfinite(probabilities).all():
        raise ValueError("some probabilities are not finite: the model is broken")
    return right, probabilities
