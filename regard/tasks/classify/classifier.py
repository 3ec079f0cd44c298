"""A classifier of texts: loaded from a run, it gives labels and their probabilities."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from regard.core.model import Model
from regard.data.batches import padded, similar
from regard.data.labelled import Example, class_numbers
from regard.data.tokenizer import Tokenizer
from regard.metrics.classification import Choice, choose
from regard.tasks.load import load

TOKENS_AT_ONCE = {"cpu": 8192, "cuda": 65536}  # padded, in a batch that is classified
HEAD = 0.25  # share of the beginning in a text whose middle is cut


class Answer(NamedTuple):
    """The most probable label of a text, and the probability of each."""

    label: str
    probability: float
    probabilities: dict[str, float]

    def __str__(self) -> str:
        return f"{self.label} ({self.probability:.3f})"


class Threshold(NamedTuple):
    """The least probability at which a text gets the label; below, it gets the most probable other one."""

    label: str
    value: float


class Classifier:
    """A model with its tokenizer and its labels.

    >>> classifier = Classifier.load("runs/reviews")
    >>> classifier("A fine film.").label
    'positive'
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, labels: Sequence[str], longest: int, *, cut: str = "end"):
        self.model, self.tokenizer, self.labels = model, tokenizer, list(labels)
        self.longest = longest  # tokens of a text
        self.cut = cut  # where longer texts are cut: at the end, or in the middle

    @classmethod
    def load(cls, folder: str | Path, *, which: str | int | None = None, device: str = "auto") -> "Classifier":
        """Loads a run folder. `which` is a checkpoint: best, last, average or a step; None: the average if there is
        one, else the best."""
        model, parts, run = load(folder, "classify", which=which, device=device)
        labels, longest, cut = (parts.facts.get(name) for name in ("labels", "longest", "cut"))
        count = parts.config.classes
        if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels) or len(labels) != count:
            raise ValueError(f"{run.folder}/run.json is damaged: it must have the {count} labels of the model")
        if not isinstance(longest, int):
            raise ValueError(f"{run.folder}/run.json is damaged: it must have the longest text in tokens")
        (tokenizer,) = parts.tokenizers.values()
        return cls(model, tokenizer, labels, longest, cut=cut or "end")

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def __call__(self, text: str) -> Answer:
        return self.answer(self.probabilities([text])[0])

    def encode(
        self,
        texts: Sequence[str],
        *,
        numbers: Iterable[int] | None = None,
        warn: Callable[[str], None] = lambda message: None,
    ) -> list[list[int]]:
        """bos, the ids of each text (cut if it is too long), eos. `numbers` are those of the texts in warnings."""
        rows = self.tokenizer.encode_batch(texts)
        for number, row in zip(numbers or count(1), rows, strict=False):
            if len(row) > self.longest:
                head = self._head()
                which = f"the first {head}" + (f" and the last {self.longest - head}" if self.cut == "middle" else "")
                warn(f"text {number}: {len(row)} tokens, only {which} are read")
        return [self.tokenizer.framed(self._shortened(row)) for row in rows]

    def _head(self) -> int:
        """Tokens of its beginning that are kept of a text that is too long."""
        return self.longest if self.cut == "end" else int(HEAD * self.longest)

    def _shortened(self, row: list[int]) -> list[int]:
        if len(row) <= self.longest:
            return row
        head = self._head()
        return row[:head] + row[len(row) - (self.longest - head) :]

    def probabilities(
        self,
        texts: Sequence[str],
        *,
        numbers: Iterable[int] | None = None,
        warn: Callable[[str], None] = lambda message: None,
        check: Callable[[], None] = lambda: None,
    ) -> np.ndarray:
        """[N, classes]. `check` is called between batches and may raise."""
        rows = self.encode(texts, numbers=numbers, warn=warn)
        found = np.zeros((len(rows), len(self.labels)))
        for group in similar(list(map(len, rows)), TOKENS_AT_ONCE.get(self.device.type, 8192)):
            check()
            tokens, keep = padded([rows[number] for number in group], self.device)
            with torch.inference_mode():
                logits = self.model(tokens, keep=keep).logits
            found[group] = logits.double().softmax(1).cpu().numpy()
        return found

    def answer(self, probabilities: np.ndarray, threshold: Threshold | None = None) -> Answer:
        best = int(probabilities.argmax())
        if threshold is not None:
            index = self.labels.index(threshold.label)
            others = np.where(np.arange(len(self.labels)) == index, -1.0, probabilities)
            best = index if probabilities[index] >= threshold.value else int(others.argmax())
        every = dict(zip(self.labels, map(float, probabilities), strict=True))
        return Answer(self.labels[best], float(probabilities[best]), every)

    def answers(
        self,
        examples: Sequence[Example],
        *,
        name: str = "the data",
        warn: Callable[[str], None] = lambda message: None,
        check: Callable[[], None] = lambda: None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The indices of the true classes [N], and the probabilities of all classes [N, classes]."""
        truth = class_numbers([label for _, label in examples], self.labels, name)
        return np.array(truth), self.probabilities([text for text, _ in examples], warn=warn, check=check)

    def classify(
        self,
        lines: Iterable[str],
        *,
        threshold: Threshold | None = None,
        at_once: int = 1024,
        first: int = 1,
        warn: Callable[[str], None] = lambda message: None,
    ) -> Iterator[Answer | None]:
        """The answer for each line, in order; None for a blank one. `first` is the number of the first in warnings."""
        lines = iter(lines)
        while some := list(islice(lines, at_once)):
            real = [number for number, line in enumerate(some) if line.strip()]
            numbers = [first + number for number in real]
            found = self.probabilities([some[number] for number in real], numbers=numbers, warn=warn)
            answers = dict(zip(real, found, strict=True))
            for number in range(len(some)):
                yield self.answer(answers[number], threshold) if number in answers else None
            first += len(some)

    def choose(
        self,
        examples: Sequence[Example],
        *,
        label: str | None = None,
        recall: float | None = None,
        precision: float | None = None,
    ) -> tuple[Threshold, Choice]:
        """The threshold of a label (by default the second of two) that reaches a recall or a precision on some
        examples, and what it achieves on them."""
        label = self.positive(label)
        truth, probabilities = self.answers(examples)
        index = self.labels.index(label)
        try:
            found = choose(truth == index, probabilities[:, index], recall=recall, precision=precision)
        except ValueError as error:
            raise ValueError(f"label {label!r}: {error}") from error
        return Threshold(label, found.threshold), found

    def positive(self, label: str | None) -> str:
        """The label of a threshold."""
        if label is None and len(self.labels) == 2:
            return self.labels[1]
        if label not in self.labels:
            problem = "give --positive" if label is None else f"--positive {label!r} is not a label"
            raise ValueError(f"a threshold needs one label: {problem}; known: {', '.join(self.labels)}")
        return label


def mean_loss(truth: np.ndarray, probabilities: np.ndarray) -> float:
    """Mean of -log p(true class)."""
    right = probabilities[np.arange(len(truth)), truth]
    return float(-np.log(np.maximum(right, np.finfo(np.float64).tiny)).mean())
