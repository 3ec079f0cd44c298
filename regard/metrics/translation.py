"""Translations against references: BLEU and chrF by sacreBLEU, with the signature that makes a score comparable."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

# those of sacreBLEU that need no further package and download nothing
Tokenization = Literal["13a", "none", "intl", "char", "zh"]


class Score(NamedTuple):
    value: float  # 0 to 100
    text: str  # one line to print
    signature: str  # how it was computed


def bleu(hypotheses: Sequence[str], references: Sequence[str], *, tokenize: Tokenization = "13a") -> Score:
    """BLEU of the whole corpus (Papineni et al. 2002; Post 2018). tokenize="none" is for text that already is split
    into tokens on both sides; such scores compare only with those on the same tokens."""
    if tokenize not in get_args(Tokenization):
        raise ValueError(f"tokenize must be one of {', '.join(get_args(Tokenization))}, got {tokenize!r}")
    # forced: tokens are expected where nothing is to be split, so no warning about them
    return _score(BLEU(tokenize=tokenize, force=tokenize == "none"), hypotheses, references)


def bleu_counts(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: Tokenization = "13a"
) -> list[list[int]]:
    """What each sentence adds to the BLEU of a corpus, [sentences, 6]: matches of 1 to 4 tokens, the length of the
    hypothesis, and that of the reference. Sums over any choice of sentences have its BLEU: what a bootstrap needs."""
    _check(hypotheses, references)
    metric = BLEU(tokenize=tokenize, force=tokenize == "none")
    found = [metric.corpus_score([ours], [[theirs]]) for ours, theirs in zip(hypotheses, references, strict=True)]
    return [[*score.counts, score.sys_len, score.ref_len] for score in found]


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """chrF2 of the whole corpus: F-score of character n-grams, recall weighted twice (Popović 2015)."""
    return _score(CHRF(), hypotheses, references)


def exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """The share of hypotheses equal to their reference, in percent; spaces around a sentence do not count."""
    _check(hypotheses, references)
    hits = sum(ours.strip() == theirs.strip() for ours, theirs in zip(hypotheses, references, strict=True))
    value = 100 * hits / len(hypotheses)
    return Score(value, f"exact match = {value:.2f} ({hits} of {len(hypotheses)})", "exact|strip:yes")


def _score(metric: BLEU | CHRF, hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    _check(hypotheses, references)
    return score_corpus(metric, hypotheses, [references])


def score_corpus(metric: BLEU | CHRF, hypotheses: Sequence[str], references: Sequence[Sequence[str | None]]) -> Score:
    """The score of checked sentences. `references` are lists, each with one reference, or None, per hypothesis."""
    # sacreBLEU takes None for a missing reference, its types say strings
    result = metric.corpus_score(hypotheses, cast(Any, references))
    signature = str(metric.get_signature())
    return Score(result.score, result.format(width=2, signature=signature), signature)


def _check(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    for name, lines in (("hypotheses", hypotheses), ("references", references)):
        if isinstance(lines, str) or not all(isinstance(line, str) for line in lines):
            raise ValueError(f"{name} must be a list of sentences, one string each, got {type(lines).__name__}")
    if len(hypotheses) != len(references):
        raise ValueError(
            f"each hypothesis needs its reference: got {len(hypotheses)} hypotheses and {len(references)} references"
        )
    if not hypotheses:
        raise ValueError("there is nothing to score: got no hypotheses and no references")
