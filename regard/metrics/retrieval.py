"""Retrieval: how high the right picture stands for a caption, and the first right caption for a picture.

Where similarities are equal, every order of the equals is as likely as any other, and the measures are those over all
these orders. So a model that finds all alike is measured as chance is.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

AT = (1, 5, 10)


class Recall(NamedTuple):
    """One direction: the share of queries with a right answer among the first 1, 5 and 10, and the median of the rank
    of the first right one, counted from 1."""

    at: dict[int, float]
    median_rank: float

    def __str__(self) -> str:
        shares = ", ".join(f"recall@{k} = {100 * share:.2f} %" for k, share in self.at.items())
        return f"{shares}, median rank = {self.median_rank:g}"

    def to_json(self) -> dict[str, Any]:
        return {f"recall@{k}": share for k, share in self.at.items()} | {"median_rank": self.median_rank}


class Retrieval(NamedTuple):
    """Both directions."""

    pictures: Recall  # a caption finds its picture
    captions: Recall  # a picture finds one of its captions


def retrieval(similarity: np.ndarray, owners: np.ndarray) -> Retrieval:
    """Similarities [pictures, captions], higher is nearer, and the number of the picture that each caption belongs
    to."""
    similarity, owners = np.asarray(similarity), np.asarray(owners)
    if similarity.ndim != 2 or not similarity.size or owners.shape != similarity.shape[1:]:
        raise ValueError(
            "expected similarities [pictures, captions] and one owner per caption, got "
            f"{list(similarity.shape)} and {list(owners.shape)}"
        )
    if not np.isfinite(similarity).all():
        raise ValueError("similarities must be finite numbers, got NaN or infinite ones")
    right = owners == np.arange(len(similarity))[:, None]  # [pictures, captions]
    if not right.any(0).all() or not right.any(1).all():
        raise ValueError("every caption must belong to a picture, and every picture must have a caption")
    return Retrieval(_recall(similarity.T, right.T), _recall(similarity, right))


def chance(pictures: int, owners: np.ndarray) -> Retrieval:
    """The same of a random order."""
    return retrieval(np.zeros((pictures, len(owners))), owners)


def _recall(similarity: np.ndarray, right: np.ndarray) -> Recall:
    """Queries by candidates: of each query, the candidates above the best right one come first, those equal to it in
    any order."""
    best = np.where(right, similarity, -np.inf).max(1, keepdims=True)
    above = (similarity > best).sum(1)
    equal = similarity == best
    ours, others = (equal & right).sum(1), (equal & ~right).sum(1)
    # many queries are alike where many candidates are equal
    alike = Counter(zip(above.tolist(), ours.tolist(), others.tolist(), strict=True))

    def found_within(k: int) -> float:
        return sum(count * _within(k - a, o, w) for (a, o, w), count in alike.items()) / len(similarity)

    return Recall({k: found_within(k) for k in AT}, _median_rank(found_within, similarity.shape[1]))


def _median_rank(found_within: Callable[[int], float], most: int) -> float:
    """The median of a rank from 1 to `most`, given the share of the ranks that are at most k: midway between the rank
    at which it reaches a half and the one at which it passes it."""
    ranks = range(most + 1)
    return (bisect_left(ranks, 0.5, key=found_within) + bisect_right(ranks, 0.5, key=found_within)) / 2


def _within(places: int, right: int, wrong: int) -> float:
    """The probability that one of the right is among the first places of a random order of right and wrong."""
    if places <= 0:
        return 0.0
    places = min(int(places), int(right + wrong))
    return 1.0 - math.comb(int(wrong), places) / math.comb(int(right + wrong), places)
