"""The task of classification: texts in, labels out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard import models
from regard.data.batches import Examples, LabelledBatches
from regard.data.labelled import class_numbers
from regard.data.tokenizer import Tokenizer
from regard.metrics.classification import report
from regard.tasks import base
from regard.tasks.classify import page
from regard.tasks.classify import plan as plans
from regard.tasks.classify.classifier import Classifier, mean_loss
from regard.tasks.classify.config import ClassifyConfig
from regard.tasks.classify.corpus import Corpus, read_corpus
from regard.tasks.classify.verbs import ABOUT, EXAMPLES
from regard.tasks.load import BUNDLED, give_stems, load_weights, read_parts, stems
from regard.tasks.opened import Opened
from regard.training.graphs import few_lengths
from regard.training.loss import Loss, smoothed
from regard.training.run import Run

FILE = "tokenizer.json"
SAMPLES = 3  # shown at each evaluation
INITS = ("masked", "language")  # tasks whose runs a classifier can begin with
ENGLISH = BUNDLED / "english"  # the encoder that classifiers of English begin with
MAXIMUM_LENGTH, VOCABULARY = 512, 8000  # where a config says nothing


class Task(base.Task):
    """Texts in, labels out."""

    name = "classify"
    about, examples = ABOUT, EXAMPLES
    use = "classify with: regard classify {run} < texts.txt"
    config = ClassifyConfig
    predicts = "class"
    metrics = ("accuracy", "f1", "average_precision", "loss")

    @classmethod
    def read(cls, config: ClassifyConfig) -> Corpus:
        return read_corpus(config.data, config.training.seed)

    @classmethod
    def plan(cls, config: ClassifyConfig, data: Corpus) -> tuple[ClassifyConfig, list[str]]:
        trained = None if config.init in (None, plans.NONE) else _trained(config.init)
        bundled = _trained(plans.ENGLISH) if config.init is None and ENGLISH.is_dir() else None
        texts = [text for text, _ in data.train]
        return plans.plan(config, texts, len(data.valid), trained=trained, bundled=bundled)

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
        return config.model.resolve(
            body=body, vocabulary=tokenizer.size, classes=len(data.labels), stems=stems(tokenizer)
        )

    @classmethod
    def build(cls, config: ClassifyConfig, size: Any) -> nn.Module:
        model = models.build(size)
        if config.init is not None:
            trained = models.build(size.body)
            load_weights(trained, Run.open(init_folder(config.init)))
            model.stack.load_state_dict((trained.encoder or trained.decoder).state_dict())
        return model

    def __init__(self, config: ClassifyConfig, data: Corpus, tokenizers: dict[str, Tokenizer], model: nn.Module):
        self.model, self.valid = model, data.valid
        self.origin, self.lines = config.data.text, data.lines
        give_stems(model, tokenizers[FILE])
        training = config.training
        # few shapes, so that few CUDA graphs are captured
        uses_cuda_graphs = training.graphs and next(model.parameters()).is_cuda
        most = config.data.maximum_length or MAXIMUM_LENGTH
        multiple = few_lengths(most) if uses_cuda_graphs else 1
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

    def loss(self, batch: Examples, label_smoothing: float) -> Loss:
        logits, second, statistics = self.model(batch.tokens, keep=batch.keep)
        total, plain = smoothed(logits, batch.labels, label_smoothing)
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

    @classmethod
    def open(cls, folder: str | Path, device: str) -> Opened:
        return page.open_run(folder, device)

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
    return str(ENGLISH) if init == plans.ENGLISH else init


def _trained(init: str) -> plans.Trained:
    """What a classifier takes of a run."""
    run = Run.open(init_folder(init))
    parts = read_parts(run)
    if parts.facts.get("task") not in INITS:
        raise ValueError(f"--init {init} is a run of {parts.facts.get('task')!r}, expected {' or '.join(INITS)}")
    (tokenizer,) = parts.tokenizers.values()
    return plans.Trained(tokenizer, parts.size, parts.facts.get("length"))
