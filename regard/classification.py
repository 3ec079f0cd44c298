"""Classifiers of texts: trained from labelled text, alone or over the layers of a trained model, asked and measured."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from regard import baseline, classifier_plan, models, task
from regard.config import ClassifyConfig, LabelledData
from regard.core.files import parse_rows
from regard.data.batches import Examples, LabelledBatches, padded, similar
from regard.data.labelled import Example, Labelled, class_names, class_numbers, read_labelled
from regard.data.text import hold_out, shown
from regard.data.tokenizer import Tokenizer
from regard.metrics.classification import Choice, Report, choose, decide, report
from regard.training.graphs import few_lengths
from regard.training.loss import Loss, smoothed
from regard.training.run import Run

FILE = "tokenizer.json"
TOKENS_AT_ONCE = {"cpu": 8192, "cuda": 65536}  # padded, in a batch that is classified
SAMPLES = 3  # shown at each evaluation
INITS = ("masked", "language")  # tasks whose runs a classifier can begin with
SHIPPED = Path(__file__).parent / "bundled" / "english"  # the encoder that classifiers of English begin with
MAXIMUM_LENGTH, VOCABULARY = 512, 8000  # where a config says nothing
HEAD = 0.25  # share of the beginning in a text that lost its middle


class Corpus(NamedTuple):
    """Texts with labels to train on and to validate on, the classes, what was done to get them, and the line of each of
    the first."""

    train: list[Example]
    valid: list[Example]
    labels: list[str]
    facts: dict[str, Any]
    lines: list[int]


def read_corpus(config: LabelledData, seed: int) -> Corpus:
    """The texts a config names. Without a validation file, some are held out."""
    if config.text is None:
        raise ValueError("training data: give data.text, a .csv, .tsv or .jsonl file, or texts beside data.labels")

    def read(text: str, labels: str | None) -> Labelled:
        return read_labelled(text, labels, columns=config.columns, skip_bad=config.skip_bad)

    found = read(config.text, config.labels)
    names = class_names(found.labels, shown(config.labels or config.text))
    train = list(zip(found.texts, found.labels, found.lines, strict=True))
    facts = {"skipped": {reason: part._asdict() for reason, part in found.skipped.items()}}
    if config.valid_text is not None:
        found = read(config.valid_text, config.valid_labels)
        class_numbers(found.labels, names, shown(config.valid_labels or config.valid_text))
        valid = list(zip(found.texts, found.labels, strict=True))
        facts["skipped_valid"] = {reason: part._asdict() for reason, part in found.skipped.items()}
    else:
        train, held = hold_out(train, min(config.held_out, len(train) // 10), seed)
        valid = [example[:2] for example in held]
    train, lines = [example[:2] for example in train], [line for *_, line in train]
    digest = hashlib.sha256(json.dumps([train, valid, names]).encode()).hexdigest()
    return Corpus(train, valid, names, facts | {"texts": len(train), "valid": len(valid), "sha256": digest}, lines)


class Task(task.Task):
    """Texts in, labels out."""

    name = "classify"
    about = "A classifier from texts and labels, from scratch or over a trained run of masked or language."
    examples = (
        "regard train classify --data.text reviews.csv --out runs/reviews",
        "regard train classify --data.text train.tsv --data.columns '[sentence, label]' --data.valid_text dev.tsv",
        "regard train classify --data.text texts.txt --data.labels labels.txt --model.attention performer",
        "regard train classify --data.text reviews.jsonl.xz --init runs/masked --out runs/tuned",
        "regard train classify --data.text reviews.csv --data.tokenizer bytes --model.preset perceiver",
    )
    use = "classify with: regard classify {run} < texts.txt"
    config = ClassifyConfig
    metrics = ("accuracy", "f1", "average_precision", "loss")

    @classmethod
    def read(cls, config: ClassifyConfig) -> Corpus:
        return read_corpus(config.data, config.training.seed)

    @classmethod
    def plan(cls, config: ClassifyConfig, data: Corpus) -> tuple[ClassifyConfig, list[str]]:
        trained = None if config.init in (None, classifier_plan.NONE) else _trained(config.init)
        bundled = _trained(classifier_plan.ENGLISH) if config.init is None and SHIPPED.is_dir() else None
        texts = [text for text, _ in data.train]
        return classifier_plan.plan(config, texts, len(data.valid), trained=trained, bundled=bundled)

    @classmethod
    def learn(cls, data: Corpus, config: ClassifyConfig) -> dict[str, Tokenizer]:
        if config.init is not None:
            return {FILE: _trained(config.init).tokenizer}
        lines = [text for text, _ in data.train]
        return {FILE: Tokenizer.train(lines, config.data.vocabulary or VOCABULARY, config.data.tokenizer or "bpe")}

    @classmethod
    def size(cls, config: ClassifyConfig, tokenizers: dict[str, Tokenizer], data: Corpus) -> Any:
        body = None if config.init is None else _trained(config.init).size
        tokenizer = tokenizers[FILE]
        return config.model.resolve(tokenizer.size, len(data.labels), body, stems=task.stems(tokenizer))

    @classmethod
    def build(cls, config: ClassifyConfig, size: Any) -> nn.Module:
        model = models.build(size)
        if config.init is not None:
            trained = models.build(size.body)
            task.load_weights(trained, Run.open(init_folder(config.init)))
            model.stack.load_state_dict((trained.encoder or trained.decoder).state_dict())
        return model

    def __init__(self, config: ClassifyConfig, data: Corpus, tokenizers: dict[str, Tokenizer], model: nn.Module):
        self.model, self.valid = model, data.valid
        self.origin, self.lines = config.data.text, data.lines
        task.give_stems(model, tokenizers[FILE])
        training = config.training
        # few shapes, so that the steps can be recorded
        records = training.graphs and next(model.parameters()).is_cuda
        most = config.data.maximum_length or MAXIMUM_LENGTH
        multiple = few_lengths(most) if records else 1
        longest = min(most, training.tokens // multiple * multiple - 2)
        limit = models.positions(model)
        longest = longest if limit is None else min(longest, limit - 2)
        if longest < 1:
            raise ValueError(f"training.tokens must leave room for a text, got {training.tokens}")
        self.classifier = Classifier(model, tokenizers[FILE], data.labels, longest, cut=config.data.cut or "end")
        cut: list[str] = []
        ids = self.classifier.encode([text for text, _ in data.train], warn=cut.append)
        self.cut = len(cut)
        self.batches = LabelledBatches(
            ids,
            class_numbers([label for _, label in data.train], data.labels, "the training data"),
            tokens=training.tokens,
            seed=training.seed,
            multiple=multiple,
            blanked=config.data.blanked or 0.0,
            unknown=tokenizers[FILE].unk,
        )

    def loss(self, batch: Examples, smoothing: float) -> Loss:
        logits, second, statistics = self.model(batch.tokens, keep=batch.keep)
        total, plain = smoothed(logits, batch.labels, smoothing)
        return Loss(total, plain, torch.full((), len(batch.labels), device=logits.device), second, statistics)

    def tokens(self, batch: Examples) -> int:
        return len(batch.labels)

    def tokens_read(self, batch: Examples) -> int:
        return batch.tokens.numel() if batch.keep is None else int(batch.keep.sum())

    def named(self, rows: list[int]) -> tuple[str, list[int]]:
        return f"lines of {self.origin}", [self.lines[row] for row in rows]

    def evaluate(self, check: Callable[[], None]) -> tuple[dict[str, float], list[dict[str, str]]]:
        texts = [text for text, _ in self.valid]
        truth, probabilities = self.classifier.answers(self.valid, check=check)
        found = report(truth, probabilities, self.classifier.labels)
        metrics = {
            "loss": mean_loss(truth, probabilities),
            "accuracy": 100 * found.accuracy,
            "f1": 100 * found.macro.f1,
            "average_precision": 100 * (found.average_precision or 0.0),
        }
        samples = [
            {"text": texts[index][:100], "label": self.valid[index][1], "answer": str(answer)}
            for index, answer in enumerate(map(self.classifier.answer, probabilities[:SAMPLES]))
        ]
        return metrics, samples

    def facts(self) -> dict[str, Any]:
        return {"labels": self.classifier.labels, "longest": self.classifier.longest, "cut": self.classifier.cut}

    def files(self) -> dict[str, str]:
        lines = (json.dumps({"text": text, "label": label}, ensure_ascii=False) for text, label in self.valid)
        return {"valid.jsonl": "".join(line + "\n" for line in lines)}

    def notes(self) -> list[str]:
        longest, classifier = self.classifier.longest, self.classifier
        lost = "are cut there" if classifier.cut == "end" else "lose their middle"
        cut = [f"{self.cut:,} texts of more than {longest} tokens {lost}"] if self.cut else []
        return [
            *cut,
            f"{len(self.batches):,} texts, {len(self.valid):,} to validate on; {len(classifier.labels)} classes; "
            f"vocabulary {classifier.tokenizer.size:,}",
        ]


def init_folder(init: str) -> str:
    """The run folder that --init names."""
    return str(SHIPPED) if init == classifier_plan.ENGLISH else init


def _trained(init: str) -> classifier_plan.Trained:
    """What a classifier takes of a run."""
    run = Run.open(init_folder(init))
    parts = task.read_parts(run)
    if parts.facts.get("task") not in INITS:
        raise ValueError(f"--init {init} is a run of {parts.facts.get('task')!r}, expected {' or '.join(INITS)}")
    (tokenizer,) = parts.tokenizers.values()
    return classifier_plan.Trained(tokenizer, parts.size, parts.facts.get("length"))


class Answer(NamedTuple):
    """The most probable label of a text, and the probability of each."""

    label: str
    probability: float
    probabilities: dict[str, float]

    def __str__(self) -> str:
        return f"{self.label} ({self.probability:.3f})"


class Threshold(NamedTuple):
    """From which probability on a text is given the label; below, it gets the most probable other one."""

    label: str
    value: float


class Classifier:
    """A model with its tokenizer and its labels.

    >>> classifier = Classifier.load("runs/reviews")
    >>> classifier("A fine film.").label
    'positive'
    """

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, labels: Sequence[str], longest: int, *, cut: str = "end"
    ):
        self.model, self.tokenizer, self.labels = model, tokenizer, list(labels)
        self.longest = longest  # tokens of a text; more are cut off
        self.cut = cut  # where: at the end, or in the middle

    @classmethod
    def load(cls, folder: str | Path, *, which: str | int | None = None, device: str = "auto") -> "Classifier":
        """From a run folder. `which` is a checkpoint: best, last, average or a step; None: the average where there is
        one, else the best."""
        model, parts, run = task.load(folder, "classify", which=which, device=device)
        labels, longest, cut = (parts.facts.get(name) for name in ("labels", "longest", "cut"))
        named = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
        if not named or len(labels) != parts.size.classes or not isinstance(longest, int):
            raise ValueError(f"{run.folder}/run.json is damaged: it does not say the {parts.size.classes} labels")
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
        """bos, the ids of each text (cut where it is too long), eos. `numbers` are those of the texts in warnings."""
        rows = self.tokenizer.encode_batch(texts)
        for number, row in zip(numbers or count(1), rows, strict=False):
            if len(row) > self.longest:
                head = self._head()
                which = f"the first {head}" + (f" and the last {self.longest - head}" if self.cut == "middle" else "")
                warn(f"text {number}: {len(row)} tokens, only {which} are read")
        return [self.tokenizer.framed(self._shortened(row)) for row in rows]

    def _head(self) -> int:
        """Tokens of the beginning that are read of a text that is too long."""
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
        """The numbers of the right classes [N], and the probabilities of all [N, classes]."""
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
        """The answer to each line, in order; None to a blank one. `first` is the number of the first in warnings."""
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
        """The threshold of a label (of two, the second unless said otherwise) that reaches a recall or a precision on
        some examples, and what it does to them."""
        label = self.positive(label)
        truth, probabilities = self.answers(examples)
        index = self.labels.index(label)
        try:
            found = choose(truth == index, probabilities[:, index], recall=recall, precision=precision)
        except ValueError as error:
            raise ValueError(f"label {label!r}: {error}") from error
        return Threshold(label, found.threshold), found

    def positive(self, label: str | None) -> str:
        """The label that a threshold is of."""
        if label is None and len(self.labels) == 2:
            return self.labels[1]
        if label not in self.labels:
            said = "say which label it is of" if label is None else f"no label is called {label!r}"
            raise ValueError(f"a threshold is of one label: {said} (--positive); known: {', '.join(self.labels)}")
        return label


def mean_loss(truth: np.ndarray, probabilities: np.ndarray) -> float:
    """Mean of -log p(right class)."""
    right = probabilities[np.arange(len(truth)), truth]
    return float(-np.log(np.maximum(right, np.finfo(np.float64).tiny)).mean())


def read_valid(folder: str | Path) -> list[Example]:
    """The texts a run validates on."""
    run = Run.open(folder)
    if not run.has("valid.jsonl"):
        raise ValueError(f"{folder} keeps no validation texts: give --data, and --threshold instead of a wish")
    return parse_rows(run.read_text("valid.jsonl"), run.folder / "valid.jsonl", ("text", "label"))


class Evaluation(NamedTuple):
    """What `regard evaluate` says of a classifier."""

    loss: float
    report: Report
    threshold: Threshold | None
    chosen: Choice | None  # on the validation texts of the run, where the threshold was chosen
    reached: Choice | None  # on these texts
    baseline: "Compared | None" = None

    def to_json(self) -> dict[str, Any]:
        values = {"loss": self.loss} | self.report.to_json()
        if self.threshold is not None:
            values["threshold"] = self.threshold._asdict() | {
                "validation": None if self.chosen is None else self.chosen._asdict(),
                "here": self.reached._asdict(),
            }
        if self.baseline is not None:
            values["baseline"] = self.baseline.to_json()
        return values

    def lines(self) -> list[str]:
        """For people."""
        found, score = self.report, "{:<{wide}}  {:>9} {:>9} {:>9} {:>9} {:>9}"
        wide = max(len("micro"), *(len(label) for label in found.labels))
        lines = [
            f"accuracy = {100 * found.accuracy:.2f} %, loss = {self.loss:.4f}, "
            f"average precision = {_share(found.average_precision)}",
            "",
            score.format("", "precision", "recall", "F1", "AP", "examples", wide=wide),
        ]
        for part in found.classes:
            shares = map(_share, (*part.shares, part.average_precision))
            lines.append(score.format(part.label, *shares, part.count, wide=wide))
        for name, shares in (("macro", found.macro), ("micro", found.micro)):
            lines.append(score.format(name, *map(_share, shares), "", found.count, wide=wide))
        cell = max(6, len(f"{found.confusion.max():,}"), *(min(12, len(label)) for label in found.labels))
        lines += [
            "",
            "truth \\ answer".ljust(max(wide, 14)) + "".join(f"  {name[:12]:>{cell}}" for name in found.labels),
        ]
        for label, row in zip(found.labels, found.confusion, strict=True):
            lines.append(label.ljust(max(wide, 14)) + "".join(f"  {count:>{cell},}" for count in row))
        if self.threshold is not None:
            lines += ["", f"{self.threshold.label!r} from probability {self.threshold.value:.6g} on:"]
            for where, part in (("validation", self.chosen), ("here", self.reached)):
                if part is not None:
                    lines.append(
                        f"  {where:<10}  recall {part.recall:.4f} ({part.right:,} of {part.positives:,} found), "
                        f"precision {part.precision:.4f} ({part.taken - part.right:,} of {part.taken:,} taken wrongly)"
                    )
        return lines + self._baseline_lines()

    def _baseline_lines(self) -> list[str]:
        """The run beside the baseline."""
        if self.baseline is None:
            return []
        rows = (("this run", self.report), ("baseline", self.baseline.report))
        gap = 100 * (self.report.accuracy - self.baseline.report.accuracy)
        return [
            "",
            f"{'':<9} {'accuracy':>9} {'macro F1':>9} {'AP':>9}",
            *(
                f"{name:<9} {100 * part.accuracy:>7.2f} % {_share(part.macro.f1):>9} "
                f"{_share(part.average_precision):>9}"
                for name, part in rows
            ),
            f"this run is {abs(gap):.2f} points {'above' if gap >= 0 else 'below'} the baseline: TF-IDF of 1- and "
            f"2-grams with logistic regression, C = {self.baseline.strength:g} chosen on the validation texts",
        ]


class Compared(NamedTuple):
    """The baseline, trained on the texts of a run, on the same examples as the run."""

    strength: float  # C of the logistic regression, chosen on the validation texts
    validation: float  # its accuracy there
    report: Report

    def to_json(self) -> dict[str, Any]:
        return {"C": self.strength, "validation_accuracy": self.validation} | self.report.to_json()


def measure_baseline(folder: str | Path, examples: Sequence[Example], name: str = "the data") -> Compared:
    """TF-IDF with logistic regression, trained on the training texts of a run, asked some examples."""
    run = Run.open(folder)
    data = Task.read(task.read_config(run))
    if data.facts["sha256"] != task.read_parts(run).facts.get("data", {}).get("sha256"):
        raise ValueError(
            f"the training data of {folder} has changed since: the baseline would not be of the same texts"
        )
    found = baseline.fit(data.train, data.valid, data.labels)
    return Compared(found.strength, found.validation, found.report(examples, name))


def evaluate(
    classifier: Classifier,
    examples: Sequence[Example],
    *,
    name: str = "the data",
    threshold: Threshold | None = None,
    chosen: Choice | None = None,
    warn: Callable[[str], None] = lambda message: None,
) -> Evaluation:
    """Everything about the answers to some examples."""
    truth, probabilities = classifier.answers(examples, name=name, warn=warn)
    reached = None
    if threshold is not None:
        index = classifier.labels.index(threshold.label)
        reached = decide(truth == index, probabilities[:, index], threshold.value)
    found = report(truth, probabilities, classifier.labels)
    return Evaluation(mean_loss(truth, probabilities), found, threshold, chosen, reached)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
