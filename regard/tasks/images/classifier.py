"""A classifier of images: loaded from a run, it gives labels and their probabilities."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.core.model import Model
from regard.data.images.augment import normalise
from regard.data.images.decode import BadImage, decode_file, from_image, resize_pixels
from regard.tasks.classify.classifier import Answer
from regard.tasks.load import load

AT_ONCE = {"cpu": 256, "cuda": 2048}  # images in a batch that is classified
UNSURE = 0.5  # an answer of a smaller probability is called unsure


class ImageClassifier:
    """A model with its labels, and the mean and deviation of the pixels that it was trained on.

    >>> classifier = ImageClassifier.load("runs/images")
    >>> classifier("red.png").label
    'red'
    """

    def __init__(self, model: Model, labels: Sequence[str], mean: Sequence[float], deviation: Sequence[float]):
        self.model, self.labels = model, list(labels)
        self.mean = torch.tensor(mean, dtype=torch.float32, device=self.device)
        self.deviation = torch.tensor(deviation, dtype=torch.float32, device=self.device)

    @classmethod
    def load(cls, folder: str | Path, *, which: str | int | None = None, device: str = "auto") -> "ImageClassifier":
        """Loads a run folder. `which` is a checkpoint: best, last, average or a step; None: the average if there is
        one, else the best."""
        model, parts, run = load(folder, "images", which=which, device=device)
        labels, count = parts.facts.get("labels"), parts.config.classes
        if count is None:
            raise ValueError(f"{run.folder} has no classes: begin with it, regard train images --init {run.folder}")
        if not isinstance(labels, list) or len(labels) != count:
            raise ValueError(f"{run.folder}/run.json is damaged: it must have the {count} labels of the model")
        return cls(model, labels, *read_statistics(parts.facts, parts.config.channels, f"{run.folder}/run.json"))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def size(self) -> tuple[int, int]:
        """Height and width that the model takes."""
        return tuple(self.model.config.image)

    @property
    def channels(self) -> int:
        return self.model.config.channels

    def __call__(self, image: Any) -> Answer:
        """The answer for a file, a PIL image, or uint8 [h, w] or [h, w, C]."""
        pixels = torch.from_numpy(self.read(image))
        return self.answer(self.probabilities(pixels[None])[0])

    def read(self, image: Any) -> np.ndarray:
        """A file, a PIL image, or uint8 [h, w] or [h, w, C], as the uint8 [C, h, w] that the model takes."""
        if isinstance(image, str | Path):
            return decode_file(image, self.size, self.channels)
        if isinstance(image, np.ndarray):
            if (
                image.dtype != np.uint8
                or image.ndim not in (2, 3)
                or (image.ndim == 3 and image.shape[2] not in (1, 3))
            ):
                raise ValueError(
                    f"an image must be uint8 [h, w], [h, w, 1] or [h, w, 3], got {image.dtype} {list(image.shape)}"
                )
            planes = image[None] if image.ndim == 2 else np.ascontiguousarray(image.transpose(2, 0, 1))
            return resize_pixels(planes, self.size, self.channels)
        return from_image(image, self.size, self.channels)

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 [B, C, h, w] as the model takes them."""
        return normalise(pixels.to(self.device), self.mean, self.deviation)

    def probabilities(self, pixels: Tensor, *, check: Callable[[], None] = lambda: None) -> np.ndarray:
        """uint8 [N, C, h, w] -> [N, classes]. `check` is called between batches and may raise."""
        found = []
        for part in pixels.split(AT_ONCE.get(self.device.type, 256)):
            check()
            with torch.inference_mode():
                found.append(self.model(self.normalise(part)).logits.double().softmax(1).cpu().numpy())
        return np.concatenate(found)

    def answer(self, probabilities: np.ndarray) -> Answer:
        best = int(probabilities.argmax())
        every = dict(zip(self.labels, map(float, probabilities), strict=True))
        return Answer(self.labels[best], float(probabilities[best]), every)

    def classify(self, files: Iterable[str | Path]) -> Iterator[Answer | BadImage]:
        """The answer for each file, in order; for a broken one what is wrong with it."""
        for file in files:
            try:
                yield self(file)
            except BadImage as bad:
                yield bad


def is_unsure(answer: Answer) -> bool:
    """Whether the answer is more likely wrong than right, as far as the model knows."""
    return answer.probability < UNSURE


def describe(answer: Answer) -> str:
    """The two most probable labels."""
    best = sorted(answer.probabilities.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{label} {probability:.2f}" for label, probability in best)


def read_statistics(facts: dict[str, Any], channels: int, name: str) -> tuple[list[float], list[float]]:
    """Mean and deviation of the pixels of a run, as its run.json has them."""
    found = []
    for key in ("mean", "deviation"):
        values = facts.get(key)
        numbers = values if isinstance(values, list) and len(values) == channels else [None]
        if not all(isinstance(value, float) and abs(value) <= 1 for value in numbers):
            raise ValueError(f"{name} is damaged: {key} must be {channels} numbers up to 1, got {values!r:.100}")
        found.append(numbers)
    if min(found[1]) <= 0:
        raise ValueError(f"{name} is damaged: deviation must be above 0, got {found[1]}")
    return found[0], found[1]
