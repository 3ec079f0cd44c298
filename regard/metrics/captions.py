"""Captions of pictures against several references each: CIDEr-D of our own, BLEU and chrF by sacreBLEU."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from regard.metrics.translation import Score, score_corpus

LONGEST = 4  # words of an n-gram
SIGMA = 6.0  # of the penalty on lengths that differ, in words
WORD = re.compile(r"\w+(?:['’]\w+)*")

References = Sequence[Sequence[str]]  # one or more captions per picture
Ngram = tuple[str, ...]


def bleu(hypotheses: Sequence[str], references: References) -> Score:
    """BLEU-4 of the whole corpus in small letters; an n-gram counts if any reference of its picture has it."""
    # captions are often spaced before full stops as it is, which is no sign of a mistake
    return score_corpus(BLEU(lowercase=True, force=True), list(hypotheses), _streams(hypotheses, references))


def chrf(hypotheses: Sequence[str], references: References) -> Score:
    """chrF2 of the whole corpus in small letters, each hypothesis against the reference it is nearest to."""
    return score_corpus(CHRF(lowercase=True), list(hypotheses), _streams(hypotheses, references))


def cider(hypotheses: Sequence[str], references: References) -> Score:
    """CIDEr-D of Vedantam et al. 2015 (arXiv 1411.5726): how much of what is rare in other pictures' captions a
    hypothesis c shares with the captions s_1 .. s_m of its own picture,

        CIDEr-D(c) = mean over n = 1 .. 4 and over j of
                     10 exp(-(|c| - |s_j|)^2 / (2 * 6^2)) min(g_n(c), g_n(s_j)) . g_n(s_j) / (|g_n(c)| |g_n(s_j)|),

    where g_n counts each n-gram times log(pictures / pictures with the n-gram in a reference). The score is the mean
    over the pictures, 0 to 10; tables often print 100 times it. As in the authors' code, counts are not divided by the
    length. Words are lower-cased and stand without punctuation; the authors split text by the tokenizer of the Penn
    Treebank instead. An n-gram that every picture has tells nothing, so a single picture scores 0.
    """
    _check(hypotheses, references)
    counted = [[_count(words(text)) for text in texts] for texts in references]
    pictures: Counter[Ngram] = Counter()
    for texts in counted:
        pictures.update({ngram for text in texts for ngram in text.counts})
    vectors = _Vectors(pictures, len(references))
    scores = []
    for hypothesis, texts in zip(hypotheses, counted, strict=True):
        ours = vectors.of(_count(words(hypothesis)))
        scores.append(sum(_similarity(ours, vectors.of(text)) for text in texts) / len(texts))
    value = 10 * sum(scores) / len(scores)
    signature = f"pictures:{len(references)}|case:lc|words:no punctuation|sigma:{SIGMA:g}"
    return Score(value, f"CIDEr-D|{signature} = {value:.4f}", signature)


def words(text: str) -> list[str]:
    """What CIDEr-D compares: lower-cased words, without punctuation."""
    return WORD.findall(text.lower())


class _Counted(NamedTuple):
    """A caption: how often each n-gram is in it, and its length in words."""

    counts: Counter[Ngram]
    length: int


def _count(caption: Sequence[str]) -> _Counted:
    counts: Counter[Ngram] = Counter()
    for n in range(1, LONGEST + 1):
        counts.update(tuple(caption[start : start + n]) for start in range(len(caption) - n + 1))
    return _Counted(counts, len(caption))


class _Vector(NamedTuple):
    """A caption as CIDEr-D sees it: g_n and its norm for each n, and the length."""

    weights: list[dict[Ngram, float]]
    norms: list[float]
    length: int


class _Vectors:
    """Makes vectors of captions; `pictures` has the number of pictures that each n-gram occurs with."""

    def __init__(self, pictures: Counter[Ngram], total: int):
        self.pictures, self.total = pictures, total

    def of(self, caption: _Counted) -> _Vector:
        weights: list[dict[Ngram, float]] = [{} for _ in range(LONGEST)]
        for ngram, count in caption.counts.items():
            # one that no reference has is as rare as one that a single picture has
            weights[len(ngram) - 1][ngram] = count * math.log(self.total / max(1, self.pictures[ngram]))
        norms = [math.sqrt(sum(weight**2 for weight in part.values())) for part in weights]
        return _Vector(weights, norms, caption.length)


def _similarity(ours: _Vector, theirs: _Vector) -> float:
    """The mean over n of a hypothesis and one reference, 0 to 1."""
    total = 0.0
    for mine, other, *norms in zip(ours.weights, theirs.weights, ours.norms, theirs.norms, strict=True):
        if all(norms):
            shared = sum(min(weight, other[ngram]) * other[ngram] for ngram, weight in mine.items() if ngram in other)
            total += shared / (norms[0] * norms[1])
    return total / LONGEST * math.exp(-((ours.length - theirs.length) ** 2) / (2 * SIGMA**2))


def _streams(hypotheses: Sequence[str], references: References) -> list[list[str | None]]:
    """The first references of all pictures, the second, and so on; None where a picture has fewer."""
    _check(hypotheses, references)
    most = max(map(len, references))
    return [[texts[place] if place < len(texts) else None for texts in references] for place in range(most)]


def _check(hypotheses: Sequence[str], references: References) -> None:
    if isinstance(hypotheses, str) or not all(isinstance(text, str) for text in hypotheses):
        raise ValueError(f"hypotheses must be a list of captions, one string each, got {type(hypotheses).__name__}")
    for texts in references:
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"references must be one or more captions per picture, got {texts!r}")
    if len(hypotheses) != len(references):
        raise ValueError(
            f"each hypothesis needs its references: got {len(hypotheses)} hypotheses and references of "
            f"{len(references)} pictures"
        )
    if not hypotheses:
        raise ValueError("there is nothing to score: got no hypotheses and no references")
