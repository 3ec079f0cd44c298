"""Texts as vectors, by an encoder; their cosine tells how similar two texts are."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
import torch.nn.functional as F

from regard.core.model import Model
from regard.data.batches import padded, similar
from regard.data.tokenizer import Tokenizer
from regard.models.transformer import Transformer
from regard.tasks.load import load

TOKENS_AT_ONCE = 16384
Pooling = Literal["mean", "first", "pooler"]


class Embedder:
    """An encoder with its tokenizer.

    >>> embedder = Embedder.load("runs/minilm")
    >>> one, other = embedder.embed(["A cat sits on the mat.", "There is a cat on a mat."])
    >>> likeness = one @ other
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, length: int):
        self.model, self.tokenizer, self.length = model, tokenizer, length

    @classmethod
    def load(cls, folder: str | Path, *, which: str | int | None = None, device: str = "auto") -> "Embedder":
        """Loads a run of the task "masked", trained with Regard or imported."""
        model, parts, run = load(folder, "masked", which=which, device=device)
        if not hasattr(model, "encode"):
            raise ValueError(
                f"{run.folder} has a model of kind {parts.config.kind!r}, which gives no vectors of tokens"
            )
        length, tokenizer = parts.facts.get("length"), parts.tokenizers.get("tokenizer.json")
        if not isinstance(length, int) or tokenizer is None:
            raise ValueError(f"{run.folder}/run.json is damaged: it must have length and tokenizer.json")
        return cls(model, tokenizer, length)

    def embed(
        self,
        texts: Sequence[str],
        *,
        pooling: Pooling = "mean",
        normalized: bool = True,
        first: int = 1,
        warn: Callable[[str], None] = lambda message: None,
    ) -> np.ndarray:
        """[texts, width] in float32: the mean over the tokens of a text, its first token, or the pooler's output for
        it. `normalized`: of length one. `first` is the number of the first text in warnings."""
        if pooling not in ("mean", "first", "pooler"):
            raise ValueError(f"pooling must be 'mean', 'first' or 'pooler', got {pooling!r}")
        encoder = cast(Transformer, self.model)  # or a model with the same `encode`, `pooler` and `pooled`
        if pooling == "pooler" and encoder.pooler is None:
            raise ValueError("this model has no pooler: use pooling 'mean' or 'first'")
        device = next(self.model.parameters()).device
        rows = []
        for number, ids in enumerate(self.tokenizer.encode_batch(list(texts)), first):
            if len(ids) > self.length - 2:
                warn(f"text {number}: {len(ids)} tokens, only the first {self.length - 2} are read")
            rows.append([self.tokenizer.bos, *ids[: self.length - 2], self.tokenizer.eos])
        found = np.zeros((len(rows), self.model.config.width), np.float32)
        for group in similar([len(row) for row in rows], TOKENS_AT_ONCE):
            tokens, keep = padded([rows[place] for place in group], device)
            with torch.inference_mode():
                if pooling == "pooler":
                    vectors = encoder.pooled(tokens, keep=keep)
                else:
                    x = encoder.encode(tokens, keep=keep).x
                    if pooling == "first":
                        vectors = x[:, 0]
                    elif keep is None:
                        vectors = x.mean(1)
                    else:
                        vectors = torch.where(keep[..., None], x, 0).sum(1) / keep.sum(1, keepdim=True)
                vectors = F.normalize(vectors, dim=1) if normalized else vectors
            found[group] = vectors.float().cpu().numpy()
        return found
