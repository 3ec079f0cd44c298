"""A captioner: loaded from a run, it writes captions of pictures, and compares pictures with texts."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.core.model import Model
from regard.data.batches import padded, similar
from regard.data.images.augment import normalise
from regard.data.images.decode import BadImage, decode_files
from regard.data.text import BREAKS
from regard.data.tokenizer import Tokenizer
from regard.decoding import DecodingConfig, Hypothesis, caption
from regard.tasks.images.classifier import read_statistics
from regard.tasks.load import load
from regard.training.loss import IGNORED, smoothed_cross_entropy

FILE = "tokenizer.json"
PICTURES_AT_ONCE = {"cpu": 32, "cuda": 256}
SCORED_AT_ONCE = {"cpu": 8, "cuda": 64}  # each with all its captions, whose logits are held
TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 32768}  # of texts, padded


class Caption(NamedTuple):
    """One caption of a picture: its text, its score and the hypothesis of the search."""

    text: str
    score: float
    hypothesis: Hypothesis


class Match(NamedTuple):
    """The number of a candidate, and its similarity to the query: the cosine of their vectors."""

    number: int
    similarity: float


class Captioner:
    """A model with its tokenizer, and how it sees pixels.

    >>> captioner = Captioner.load("runs/captions")
    >>> captioner("dog.jpg")
    'A dog runs through the grass .'
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer, longest: int, mean: Sequence[float], deviation: Sequence[float]
    ):
        """`longest` is the number of tokens of a caption; `mean` and `deviation` are those of each channel of the
        training pictures, as fractions of 255."""
        self.model, self.tokenizer, self.longest = model, tokenizer, longest
        device = next(model.parameters()).device
        self.mean, self.deviation = (torch.tensor(values, device=device) for values in (mean, deviation))

    @classmethod
    def load(cls, folder: str | Path, *, which: str | int | None = None, device: str = "auto") -> "Captioner":
        """Loads a run folder. `which` is a checkpoint: best, last, average or a step; None: the average if there is
        one, else the best."""
        model, parts, run = load(folder, "captions", which=which, device=device)
        longest = parts.facts.get("longest")
        if not isinstance(longest, int):
            raise ValueError(f"{run.folder}/run.json is damaged: it must have the longest caption in tokens")
        statistics = read_statistics(parts.facts, parts.config.channels, f"{run.folder}/run.json")
        return cls(model, parts.tokenizers[FILE], longest, *statistics)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the pictures that the model sees."""
        return self.model.config.image

    def __call__(self, path: str | Path) -> str:
        return self.caption(self.read_pictures([path]))[0][0].text

    # what goes into the model

    def read_pictures(self, paths: Sequence[str | Path]) -> np.ndarray:
        """Picture files as uint8 [N, C, h, w], in the size that the model sees. A broken one is raised."""
        return self.read_readable(paths)[1]

    def read_readable(
        self, paths: Sequence[str | Path], refuse: Callable[[BadImage], None] | None = None
    ) -> tuple[list[int], np.ndarray]:
        """The numbers of the picture files that can be read, and these as `read_pictures` gives them. A broken one is
        given to `refuse`."""
        found = list(decode_files(paths, self.size, self.model.config.channels, refuse))
        pixels = [one for one in found if one is not None]
        kept = [number for number, one in enumerate(found) if one is not None]
        return kept, np.array(pixels, np.uint8)

    def images(self, pixels: np.ndarray | Tensor) -> Tensor:
        """uint8 [N, C, h, w] as the model takes them, on its device."""
        return normalise(torch.as_tensor(pixels).to(self.device), self.mean, self.deviation)

    def encode(self, texts: Sequence[str], warn: Callable[[str], None] = lambda message: None) -> list[list[int]]:
        """bos and the ids of each text, cut if it is too long."""
        rows = self.tokenizer.encode_batch(texts)
        for text, row in zip(texts, rows, strict=True):
            if len(row) > self.longest:
                warn(f"{text[:60]!r}: {len(row)} tokens, only the first {self.longest} are read")
        return [[self.tokenizer.bos, *row[: self.longest]] for row in rows]

    def _chunks(
        self, pixels: np.ndarray | Tensor, check: Callable[[], None], at_once: dict[str, int] = PICTURES_AT_ONCE
    ) -> Iterator[tuple[int, Tensor]]:
        """The pictures as the model takes them, some at a time, and the number of the first of them."""
        size = at_once.get(self.device.type, at_once["cpu"])
        for start in range(0, len(pixels), size):
            check()
            yield start, self.images(pixels[start : start + size])

    # captions

    def caption(
        self,
        pixels: np.ndarray | Tensor,
        decoding: DecodingConfig | None = None,
        *,
        check: Callable[[], None] = lambda: None,
    ) -> list[list[Caption]]:
        """The n best captions of each picture, best first. `check` is called between batches and may raise."""
        decoding, tokenizer = decoding or DecodingConfig(), self.tokenizer
        if decoding.maximum is None:
            decoding = dataclasses.replace(decoding, maximum=max(self.longest, decoding.minimum))
        special: dict[str, Any] = {"bos": tokenizer.bos, "eos": tokenizer.eos}
        special["forbidden"] = (tokenizer.pad, tokenizer.bos)
        found = []
        for _, images in self._chunks(pixels, check):
            for hypotheses in caption(self.model, images, decoding, **special):
                found.append([Caption(self.text(part.ids), part.score, part) for part in hypotheses])
        return found

    def text(self, ids: Sequence[int]) -> str:
        """The text of a caption, on one line."""
        return BREAKS.sub(" ", self.tokenizer.decode(ids)).strip()

    def loss(
        self,
        pixels: np.ndarray | Tensor,
        captions: Sequence[Sequence[str]],
        check: Callable[[], None] = lambda: None,
    ) -> float:
        """Mean of -log p(token) over all captions of all pictures."""
        model: Any = self.model
        total, tokens, eos = torch.zeros((), dtype=torch.float64, device=self.device), 0, self.tokenizer.eos
        with torch.inference_mode():
            for start, images in self._chunks(pixels, check, SCORED_AT_ONCE):
                some = captions[start : start + len(images)]
                most = max(map(len, some))
                # a picture is read once: its captions are the beams of its memory
                rows = [row for texts in some for row in self._frame(texts, most)]
                ids, keep = padded(rows, self.device)
                keep = torch.ones_like(ids, dtype=torch.bool) if keep is None else keep
                target = torch.where(keep, ids.roll(-1, 1), IGNORED)
                ends = keep.sum(1) - 1
                target[torch.arange(len(ids), device=ids.device), ends] = eos
                is_caption = torch.tensor([place < len(texts) for texts in some for place in range(most)])
                target[~is_caption.to(target.device)] = IGNORED
                logits, _ = model.extend(ids, model.start(len(ids), memory=model.encode(images)), keep=keep)
                total += smoothed_cross_entropy(logits.flatten(0, 1), target.flatten())[1].double()
                tokens += int((target != IGNORED).sum())
        return float(total) / tokens

    def _frame(self, texts: Sequence[str], count: int) -> list[list[int]]:
        """The captions of a picture as rows, and empty ones up to a number."""
        return [*self.encode(texts), *[[self.tokenizer.bos]] * (count - len(texts))]

    # comparison

    def picture_vectors(self, pixels: np.ndarray | Tensor, *, check: Callable[[], None] = lambda: None) -> np.ndarray:
        """[N, E], each of length 1."""
        model: Any = self.model
        with torch.inference_mode():
            parts = [model.picture_vectors(images).float().cpu() for _, images in self._chunks(pixels, check)]
        return torch.cat(parts).numpy()

    def caption_vectors(
        self,
        texts: Sequence[str],
        *,
        warn: Callable[[str], None] = lambda message: None,
        check: Callable[[], None] = lambda: None,
    ) -> np.ndarray:
        """[N, E], each of length 1."""
        model: Any = self.model
        rows = self.encode(texts, warn)
        found = np.zeros((len(rows), self.model.config.width), np.float32)
        for group in similar(list(map(len, rows)), TOKENS_AT_ONCE.get(self.device.type, 4096)):
            check()
            ids, keep = padded([rows[number] for number in group], self.device)
            with torch.inference_mode():
                found[group] = model.caption_vectors(ids, keep=keep).float().cpu().numpy()
        return found

    def probabilities(self, pixels: np.ndarray | Tensor, labels: Sequence[str]) -> np.ndarray:
        """[N, labels]: zero-shot classification by the text of each label, such as "a photo of a dog", under the
        softmax that the model was trained with."""
        model: Any = self.model
        scale = float(model.scale())
        scores = scale * self.picture_vectors(pixels).astype(np.float64) @ self.caption_vectors(labels).T
        scores = np.exp(scores - scores.max(1, keepdims=True))
        return scores / scores.sum(1, keepdims=True)


def nearest(queries: np.ndarray, candidates: np.ndarray, count: int) -> list[list[Match]]:
    """The nearest candidates of each query, best first; of equals the first."""
    similarity = queries.astype(np.float64) @ candidates.T
    order = np.argsort(-similarity, axis=1, kind="stable")[:, :count]
    return [
        [Match(int(place), float(row[place])) for place in best] for row, best in zip(similarity, order, strict=True)
    ]
