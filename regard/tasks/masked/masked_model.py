"""A masked language model: loaded from a run, it is evaluated on text and fills gaps."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard import models
from regard.core.model import LinearHead, Model
from regard.data.documents import Blocks, stream
from regard.data.masking import Hidden, MaskedBatches, Masking, Texts
from regard.data.text import BREAKS
from regard.data.tokenizer import LONG, Tokenizer
from regard.tasks.load import load
from regard.tasks.text import FILE, TOKENS_AT_ONCE
from regard.training.loss import IGNORED

MARK = "[mask]"  # marks a gap in a text
SAMPLES = 2  # shown at each evaluation


class Measures(NamedTuple):
    """How well masked tokens were predicted."""

    loss: float  # nats per masked token
    perplexity: float
    accuracy: float  # per cent
    tokens: int  # masked ones


class Candidate(NamedTuple):
    """A token that may fill a gap. `text` may begin with a space, or be a part of a word."""

    text: str
    probability: float
    id: int


class Filled(NamedTuple):
    """A text whose gaps are filled. The candidates of each gap are predicted while all gaps are open; in `text` the
    gaps are filled one after the other, the most probable first, each in the context of those before."""

    text: str
    gaps: list[list[Candidate]]


class MaskedModel:
    """A model with its tokenizer.

    >>> masked = MaskedModel.load("runs/masked")
    >>> masked.fill("I took my [mask] for a walk.").text
    'I took my dog for a walk.'
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, length: int, apart: bool):
        self.model, self.tokenizer = model, tokenizer
        self.length = length  # tokens per row that it was trained with
        self.apart = apart  # whether every row was from one document
        self.limit = models.max_positions(model)  # the number of positions; None: any

    @classmethod
    def load(cls, folder: str | Path, *, which: str | int | None = None, device: str = "auto") -> "MaskedModel":
        """Loads a run folder; see `regard.tasks.load.load`."""
        model, parts, run = load(folder, "masked", which=which, device=device)
        length, apart = parts.facts.get("length", models.max_positions(model)), parts.facts.get("apart", True)
        if not isinstance(length, int) or not isinstance(apart, bool) or FILE not in parts.tokenizers:
            raise ValueError(f"{run.folder}/run.json is damaged: it must have length, apart and {FILE}")
        return cls(model, parts.tokenizers[FILE], length, apart)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def fills(self) -> bool:
        """Whether it predicts tokens for gaps."""
        return self._head.output is not None and self.tokenizer.mask is not None

    def rows(
        self, documents: Sequence[str], *, tokens: int, seed: int = 0, shuffle: bool = True, multiple: int = 1
    ) -> Blocks | Texts:
        """Batches of text, in rows as the model was trained with."""
        sizes: dict[str, Any] = {"length": self.length, "tokens": tokens, "seed": seed, "shuffle": shuffle}
        if not self.apart:
            return Blocks(stream(documents, self.tokenizer), **sizes)
        return Texts(self.frames(documents), multiple=multiple, **sizes)

    def frames(self, documents: Sequence[str]) -> list[list[int]]:
        """Documents between bos and eos, without the end of their last line."""
        texts = [text.removesuffix("\n") for text in documents]
        if max(map(len, texts), default=0) > LONG:
            return [self.tokenizer.framed(self.tokenizer.encode_text(text).tolist()) for text in texts]
        # in one call, which uses all cores
        return [self.tokenizer.framed(ids) for ids in self.tokenizer.encode_batch(texts)]

    def measure(
        self, documents: Sequence[str], masking: Masking, *, check: Callable[[], None] = lambda: None
    ) -> Measures:
        """How well it predicts masked tokens of documents, chosen as in training, and the same in every call."""
        batches = self._checks(documents, masking)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        tokens = 0
        with torch.inference_mode():
            for index in range(batches.count(0)):
                batch = batches.get(0, index)
                tokens += int((batch.targets != IGNORED).sum())
                batch = batch.to(self.device)
                target, logits = batch.targets, self._logits(batch)
                missed = logits.log_softmax(-1).gather(2, target.clamp(min=0)[..., None])[..., 0]
                counted = target != IGNORED
                sums[0] -= torch.where(counted, missed, 0).double().sum()
                sums[1] += (counted & (logits.argmax(-1) == target)).sum()
                check()
        if tokens == 0:
            raise ValueError("the text is too short: none of its tokens was chosen to be masked; give more text")
        loss, right = (sums / tokens).tolist()
        return Measures(loss, math.exp(min(loss, 50.0)), 100 * right, tokens)

    def _checks(self, documents: Sequence[str], masking: Masking) -> MaskedBatches:
        rows = self.rows(documents, tokens=max(TOKENS_AT_ONCE, self.length), shuffle=False)
        return MaskedBatches(rows, masking, anew=False)

    def _logits(self, batch: Hidden) -> Tensor:
        """[B, P, V] at the places."""
        x = self._head.hidden(batch.tokens, keep=batch.keep).x
        x = x.gather(1, batch.places[..., None].expand(-1, -1, x.shape[2]))
        return self._head.output(x).float()

    @property
    def _head(self) -> LinearHead:
        """The model: every one that predicts masked tokens has a linear head."""
        return cast(LinearHead, self.model)

    def samples(self, documents: Sequence[str], masking: Masking) -> list[dict[str, str]]:
        """Some rows with masked tokens, and the model's predictions."""
        batches = self._checks(documents, masking)
        # rows are sorted by length: those in the middle are typical
        batch = batches.get(0, batches.count(0) // 2)
        some = (batch.targets != IGNORED).any(1).nonzero()[:SAMPLES, 0]
        batch = Hidden(
            tokens=batch.tokens[some],
            keep=None if batch.keep is None else batch.keep[some],
            places=batch.places[some],
            targets=batch.targets[some],
            indices=batch.indices[some],
        ).to(self.device)
        with torch.inference_mode():
            best = self._logits(batch).argmax(-1)
        found = []
        for row in range(len(batch.tokens)):
            ids = batch.tokens[row] if batch.keep is None else batch.tokens[row, batch.keep[row]]
            filled, counted = ids.clone(), batch.targets[row] != IGNORED
            filled[batch.places[row, counted]] = best[row, counted]
            marked = self.tokenizer.tokens(ids.tolist()[:40])
            marked = [MARK if id == self.tokenizer.mask else name for id, name in zip(ids, marked, strict=False)]
            shown = " ".join(marked) if self.tokenizer.kind in ("words", "stems", "units") else "".join(marked)
            found.append({"hidden": shown, "named": BREAKS.sub(" ", self._text(filled.tolist()[:40]))})
        return found

    def fill(self, text: str, *, top: int = 5, mark: str = MARK) -> Filled:
        """Fills each gap of a text, and gives the `top` most probable tokens for it."""
        if self._head.output is None:
            raise ValueError("this encoder gives vectors and predicts no tokens: use regard embed")
        if not mark:
            raise ValueError("the mark of a gap must not be empty")
        if top < 1:
            raise ValueError(f"top must be at least 1, got {top}")
        parts = text.split(mark)
        if self.tokenizer.mask is None:
            raise ValueError("the tokenizer of this run has no mask token, so the model cannot fill gaps")
        if len(parts) == 1:
            raise ValueError(f"there is no {mark} in the text: put it where the gap is")
        ids = self.tokenizer.encode_around(parts)
        # as in training: between bos and eos, or after the end of another text
        ids = self.tokenizer.framed(ids) if self.apart else [self.tokenizer.eos, *ids]
        if len(ids) > self.length:
            raise ValueError(
                f"the text has {len(ids)} tokens, the model was trained on rows of {self.length}: shorten it"
            )
        row = torch.tensor(ids, device=self.device)
        open_gaps = [place for place, id in enumerate(ids) if id == self.tokenizer.mask]
        chances = self._chances(row, open_gaps)
        best = chances.topk(min(top, self.tokenizer.size - len(self.tokenizer.special)))
        gaps = [
            [Candidate(self._piece(id), chance, id) for chance, id in zip(*found, strict=True)]
            for found in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
        while open_gaps:
            sure = chances.max(1)
            first = int(sure.values.argmax())
            row[open_gaps.pop(first)] = sure.indices[first]
            chances = self._chances(row, open_gaps) if open_gaps else chances
        return Filled(self._text(row.tolist()), gaps)

    def _chances(self, row: Tensor, places: list[int]) -> Tensor:
        """The probabilities of all tokens at some places of a row, [P, V]; those of special tokens are 0."""
        with torch.inference_mode():
            x = self._head.hidden(row[None]).x[0, places]
            logits = self._head.output(x).float()
            logits[:, self.tokenizer.special] = -math.inf
            return logits.softmax(1)

    def _piece(self, id: int) -> str:
        """The printable form of a token; "▁" is a space."""
        return self.tokenizer.tokens([id])[0]

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)
