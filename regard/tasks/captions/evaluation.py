"""How good a captioner is: its captions against the references, and whether pictures and captions find each other."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from regard.decoding import DecodingConfig
from regard.metrics.captions import bleu, chrf, cider
from regard.metrics.retrieval import Retrieval, chance, retrieval
from regard.metrics.translation import Score
from regard.tasks.captions.captioner import Captioner


class Evaluation(NamedTuple):
    """What `regard evaluate` prints of a captioner."""

    loss: float  # per token of all captions
    scores: dict[str, Score]
    retrieval: Retrieval
    chance: Retrieval  # what a random order would reach
    hypotheses: list[str]

    def to_json(self) -> dict[str, Any]:
        scores = {name: {"value": score.value, "signature": score.signature} for name, score in self.scores.items()}
        parts = (("retrieval", self.retrieval), ("chance", self.chance))
        found = {
            name: {"pictures": part.pictures.to_json(), "captions": part.captions.to_json()} for name, part in parts
        }
        return {"loss": self.loss, "perplexity": math.exp(min(self.loss, 50.0)), **scores, **found}

    def lines(self) -> list[str]:
        """For people."""
        return [
            *(score.text for score in self.scores.values()),
            f"loss = {self.loss:.4f} per token, perplexity = {math.exp(min(self.loss, 50.0)):.2f}",
            f"captions find pictures: {self.retrieval.pictures}",
            f"              chance: {self.chance.pictures}",
            f"pictures find captions: {self.retrieval.captions}",
            f"              chance: {self.chance.captions}",
        ]


def evaluate(
    captioner: Captioner,
    pixels: np.ndarray,
    captions: Sequence[Sequence[str]],
    decoding: DecodingConfig | None = None,
    *,
    check: Callable[[], None] = lambda: None,
) -> Evaluation:
    """All measures on some pictures [N, C, h, w] and the captions of each. `check` is called between batches and may
    raise."""
    loss = captioner.loss(pixels, captions, check)
    hypotheses = [best[0].text for best in captioner.caption(pixels, decoding, check=check)]
    scores = {
        "bleu": bleu(hypotheses, captions),
        "chrf": chrf(hypotheses, captions),
        "cider": cider(hypotheses, captions),
    }
    owners = np.array([number for number, texts in enumerate(captions) for _ in texts])
    vectors = captioner.caption_vectors([text for texts in captions for text in texts], check=check)
    similarity = captioner.picture_vectors(pixels, check=check).astype(np.float64) @ vectors.T
    found = retrieval(similarity, owners)
    return Evaluation(loss, scores, found, chance(len(pixels), owners), hypotheses)
