"""A model that names hidden tokens from both sides: loaded from a run, measured, and asked to fill gaps."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard import models
from regard.data.documents import Blocks, stream
from regard.data.masking import Hidden, MaskedBatches, Masking, Texts
from regard.data.text import BREAKS
from regard.data.tokenizer import LONG, Tokenizer
from regard.tasks.load import load
from regard.tasks.text import FILE, TOKENS_AT_ONCE
from regard.training.loss import IGNORED

MARK = "[mask]"  # where a token is hidden, in a text that is to be filled
SAMPLES = 2  # shown at each evaluation


class Measures(NamedTuple):
    """How well hidden tokens were named."""

    loss: float  # nats a hidden token
    perplexity: float
    accuracy: float  # how many of 100 were the most probable
    tokens: int  # hidden ones


class Candidate(NamedTuple):
    """A token that may stand in a gap. `text` may begin with a space, or be part of a word."""

    text: str
    probability: float
    id: int


class Filled(NamedTuple):
    """A text whose gaps are filled. The candidates of each gap are named while all gaps are open; in `text` they are
    filled one after the other, the surest first, each in sight of those before."""

    text: str
    gaps: list[list[Candidate]]


class MaskedModel:
    """A model with its tokenizer.

    >>> masked = MaskedModel.load("runs/masked")
    >>> masked.fill("I took my [mask] for a walk.").text
    'I took my dog for a walk.'
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, length: int, apart: bool):
        self.model, self.tokenizer = model, tokenizer
        self.length = length  # tokens it was trained to read at a time
        self.apart = apart  # whether it was trained on one document at a time
        self.limit = models.positions(model)

    @classmethod
    def load(cls, folder: str | Path, *, which: str | int | None = None, device: str = "auto") -> "MaskedModel":
        """From a run folder; see `regard.tasks.load.load`."""
        model, parts, run = load(folder, "masked", which=which, device=device)
        length, apart = parts.facts.get("length", models.positions(model)), parts.facts.get("apart", True)
        if not isinstance(length, int) or not isinstance(apart, bool) or FILE not in parts.tokenizers:
            raise ValueError(f"{run.folder}/run.json is damaged: it does not say how long a text may be")
        return cls(model, parts.tokenizers[FILE], length, apart)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def rows(
        self, documents: Sequence[str], *, tokens: int, seed: int = 0, shuffle: bool = True, multiple: int = 1
    ) -> Blocks | Texts:
        """Batches of text as the model reads it."""
        sizes = {"length": self.length, "tokens": tokens, "seed": seed, "shuffle": shuffle}
        if not self.apart:
            return Blocks(stream(documents, self.tokenizer), **sizes)
        return Texts(self.frames(documents), multiple=multiple, **sizes)

    def frames(self, documents: Sequence[str]) -> list[list[int]]:
        """Documents that stand alone: between bos and eos, without the end of their last line."""
        texts = [text.removesuffix("\n") for text in documents]
        if max(map(len, texts), default=0) > LONG:
            return [self.tokenizer.framed(self.tokenizer.encode_text(text).tolist()) for text in texts]
        # all at once, by as many threads as there are cores
        return [self.tokenizer.framed(ids) for ids in self.tokenizer.encode_batch(texts)]

    def measure(
        self, documents: Sequence[str], masking: Masking, *, check: Callable[[], None] = lambda: None
    ) -> Measures:
        """How well it names tokens of documents that are hidden as in training, the same each time."""
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
                asked = target != IGNORED
                sums[0] -= torch.where(asked, missed, 0).double().sum()
                sums[1] += (asked & (logits.argmax(-1) == target)).sum()
                check()
        if tokens == 0:
            raise ValueError("the text is too short: none of its tokens was drawn to be hidden")
        loss, right = (sums / tokens).tolist()
        return Measures(loss, math.exp(min(loss, 50.0)), 100 * right, tokens)

    def _checks(self, documents: Sequence[str], masking: Masking) -> MaskedBatches:
        rows = self.rows(documents, tokens=max(TOKENS_AT_ONCE, self.length), shuffle=False)
        return MaskedBatches(rows, masking, anew=False)

    def _logits(self, batch: Hidden) -> Tensor:
        """[B, P, V] at the places."""
        x = self.model.hidden(batch.tokens, keep=batch.keep).x
        x = x.gather(1, batch.places[..., None].expand(-1, -1, x.shape[2]))
        return self.model.output(x).float()

    def samples(self, documents: Sequence[str], masking: Masking) -> list[dict[str, str]]:
        """Some rows with hidden tokens, and what the model makes of them."""
        batches = self._checks(documents, masking)
        # where rows go from short to long, those in the middle are neither
        batch = batches.get(0, batches.count(0) // 2)
        some = (batch.targets != IGNORED).any(1).nonzero()[:SAMPLES, 0]
        batch = Hidden(*(None if part is None else part[some].to(self.device) for part in batch))
        with torch.inference_mode():
            best = self._logits(batch).argmax(-1)
        found = []
        for row in range(len(batch.tokens)):
            ids = batch.tokens[row] if batch.keep is None else batch.tokens[row, batch.keep[row]]
            filled, asked = ids.clone(), batch.targets[row] != IGNORED
            filled[batch.places[row, asked]] = best[row, asked]
            marked = self.tokenizer.tokens(ids.tolist()[:40])
            marked = [MARK if id == self.tokenizer.mask else name for id, name in zip(ids, marked, strict=False)]
            shown = " ".join(marked) if self.tokenizer.kind in ("words", "stems", "units") else "".join(marked)
            found.append({"hidden": shown, "named": BREAKS.sub(" ", self._text(filled.tolist()[:40]))})
        return found

    def fill(self, text: str, *, top: int = 5, mark: str = MARK) -> Filled:
        """Names the token in each gap of a text, with the `top` most probable ones."""
        if self.model.output is None:
            raise ValueError("this encoder gives vectors and names no tokens: use regard embed")
        if not mark:
            raise ValueError("the mark of a gap must not be empty")
        if top < 1:
            raise ValueError(f"top must be at least 1, got {top}")
        parts = text.split(mark)
        if self.tokenizer.mask is None:
            raise ValueError("the tokenizer of this run has no mask, so the model was not trained to fill gaps")
        if len(parts) == 1:
            raise ValueError(f"there is no {mark} in the text: put it where a word is to be filled in")
        ids = self.tokenizer.encode_around(parts)
        # as it stands in training: a text alone, or what begins behind the end of another
        ids = self.tokenizer.framed(ids) if self.apart else [self.tokenizer.eos, *ids]
        if len(ids) > self.length:
            raise ValueError(f"the text has {len(ids)} tokens, the model learned to read {self.length}: shorten it")
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
        """The probabilities of all tokens at some places of a row, [P, V]; special ones have none."""
        with torch.inference_mode():
            x = self.model.hidden(row[None]).x[0, places]
            logits = self.model.output(x).float()
            logits[:, self.tokenizer.special] = -math.inf
            return logits.softmax(1)

    def _piece(self, id: int) -> str:
        """A token as it is to be read; "▁" is a space."""
        return self.tokenizer.tokens([id])[0]

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)
