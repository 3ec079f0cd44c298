"""The task of classification: texts in, labels out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard import models
from regard.core.model import Model
from regard.data.batches import Examples, LabelledBatches
from regard.data.labelled import class_numbers
from regard.data.tokenizer import Tokenizer
from regard.metrics.classification import report
from regard.tasks import base
from regard.tasks.base import batch_tokens
from regard.tasks.classify import page
from regard.tasks.classify import plan as plans
from regard.tasks.classify.classifier import Classifier, mean_loss
from regard.tasks.classify.config import ClassifyConfig
from regard.tasks.classify.corpus import Corpus, read_corpus
from regard.tasks.classify.verbs import ABOUT, EXAMPLES
from regard.tasks.load import BUNDLED, count_stems, load_weights, read_parts, set_stems
from regard.tasks.opened import Opened
from regard.training.graphs import few_lengths
from regard.training.loss import Loss, smoothed_cross_entropy
from regard.training.run import Run

FILE = "tokenizer.json"
SAMPLES = 3  # shown at each evaluation
INITS = ("masked", "language")  # tasks whose runs can be the init of a classifier
ENGLISH = BUNDLED / "english"  # the encoder that classifiers of English texts begin with
MAXIMUM_LENGTH, VOCABULARY = 512, 8000  # defaults


class Task(base.Task):
    """Texts in, labels out."""

    name = "classify"
    about, examples = ABOUT, EXAMPLES
    use = "classify with: regard classify {run} < texts.txt"
    config = ClassifyConfig
    predicts = "class"
    metrics = ("accuracy", "f1", "average_precision", "loss")
    trains_on = ("text",)
    data_files, test_files = ("text", "labels", "valid_text", "valid_labels"), ("data", "labels")

    @classmethod
    def read_data(cls, config: ClassifyConfig) -> Corpus:
        return read_corpus(config.data, config.training.seed)

    @classmethod
    def complete_config(cls, config: ClassifyConfig, data: Corpus) -> tuple[ClassifyConfig, list[str]]:
        trained = None if config.init in (None, plans.NONE) else _trained(config.init)
        bundled = _trained(plans.ENGLISH) if config.init is None and ENGLISH.is_dir() else None
        texts = [text for text, _ in data.train]
        return plans.plan(config, texts, len(data.valid), trained=trained, bundled=bundled)

    @classmethod
    def train_tokenizers(cls, data: Corpus, config: ClassifyConfig) -> dict[str, Tokenizer]:
        if config.init is not None:
            return {FILE: _trained(config.init).tokenizer}
        lines = [text for text, _ in data.train]
        return {FILE: Tokenizer.train(lines, config.data.vocabulary or VOCABULARY, config.data.tokenizer or "bpe")}

    @classmethod
    def model_config(cls, config: ClassifyConfig, tokenizers: dict[str, Tokenizer], data: Corpus) -> Any:
        body = None if config.init is None else _trained(config.init).config
        tokenizer = tokenizers[FILE]
        return config.model.resolve(
            body=body, vocabulary=tokenizer.size, classes=len(data.labels), stems=count_stems(tokenizer)
        )

    @classmethod
    def build_model(cls, config: ClassifyConfig, model_config: Any) -> Model:
        model = models.build(model_config)
        if config.init is not None:
            pretrained = models.build(model_config.body)
            load_weights(pretrained, Run.open(init_folder(config.init)))
            _stack_of(model).load_state_dict(_stack_of(pretrained).state_dict())
        return model

    @classmethod
    def init_folder(cls, config: ClassifyConfig) -> str | None:
        return None if config.init is None else init_folder(config.init)

    def __init__(self, config: ClassifyConfig, data: Corpus, tokenizers: dict[str, Tokenizer], model: Model):
        self.model, self.valid = model, data.valid
        self.origin, self.lines = config.data.text, data.lines
        set_stems(model, tokenizers[FILE])
        training, tokens = config.training, batch_tokens(config.training)
        # few shapes, so that few CUDA graphs are captured
        uses_cuda_graphs = training.graphs and next(model.parameters()).is_cuda
        most = config.data.maximum_length or MAXIMUM_LENGTH
        multiple = few_lengths(most) if uses_cuda_graphs else 1
        longest = min(most, tokens // multiple * multiple - 2)
        limit = models.max_positions(model)
        longest = longest if limit is None else min(longest, limit - 2)
        if longest < 1:
            raise ValueError(f"training.tokens must leave room for a text, got {tokens}")
        self.classifier = Classifier(model, tokenizers[FILE], data.labels, longest, cut=config.data.cut or "end")
        cut: list[str] = []
        ids = self.classifier.encode([text for text, _ in data.train], warn=cut.append)
        self.cut = len(cut)
        self.batches = LabelledBatches(
            ids,
            class_numbers([label for _, label in data.train], data.labels, "the training data"),
            tokens=tokens,
            seed=training.seed,
            multiple=multiple,
            blanked=config.data.blanked or 0.0,
            unknown=tokenizers[FILE].unk,
        )

    def loss(self, batch: Examples, label_smoothing: float) -> Loss:
        logits, auxiliary_loss, statistics = self.model(batch.tokens, keep=batch.keep)
        total, plain = smoothed_cross_entropy(logits, batch.labels, label_smoothing)
        count = torch.full((), len(batch.labels), device=logits.device)
        return Loss(total, plain, count, auxiliary_loss, statistics)

    def count_tokens(self, batch: Examples) -> int:
        return len(batch.labels)

    def count_tokens_read(self, batch: Examples) -> int:
        return batch.tokens.numel() if batch.keep is None else int(batch.keep.sum())

    def describe_rows(self, rows: list[int]) -> tuple[str, list[int]]:
        return f"lines of {self.origin}", [self.lines[row] for row in rows]

    def evaluate(self, check: Callable[[], None]) -> tuple[dict[str, float], list[dict[str, str]]]:
        texts = [text for text, _ in self.valid]
        truth, probabilities = self.classifier.answers(self.valid, check=check)
        found = report(truth.tolist(), probabilities, self.classifier.labels)
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
    def open_for_page(cls, folder: str | Path, device: str) -> Opened:
        return page.open_run(folder, device)

    def facts(self) -> dict[str, Any]:
        return {"labels": self.classifier.labels, "longest": self.classifier.longest, "cut": self.classifier.cut}

    def files(self) -> dict[str, str]:
        lines = (json.dumps({"text": text, "label": label}, ensure_ascii=False) for text, label in self.valid)
        return {"valid.jsonl": "".join(line + "\n" for line in lines)}

    def notes(self) -> list[str]:
        longest, classifier = self.classifier.longest, self.classifier
        lost = "are cut at their end" if classifier.cut == "end" else "are cut in their middle"
        cut = [f"{self.cut:,} texts of more than {longest} tokens {lost}"] if self.cut else []
        return [
            *cut,
            f"{len(self.batches):,} texts, {len(self.valid):,} to validate on; {len(classifier.labels)} classes; "
            f"vocabulary {classifier.tokenizer.size:,}",
        ]


def init_folder(init: str) -> str:
    """The run folder that --init names."""
    return str(ENGLISH) if init == plans.ENGLISH else init


def _stack_of(model: Model) -> nn.Module:
    """The layers of a classifier over a pretrained body, or of that body, which is an encoder or a decoder."""
    stack = getattr(model, "stack", None) or getattr(model, "encoder", None) or getattr(model, "decoder", None)
    if not isinstance(stack, nn.Module):
        raise ValueError(f"a model of kind {model.config.kind!r} has no stack of layers that --init could begin with")
    return stack


def _trained(init: str) -> plans.Pretrained:
    """Reads the tokenizer and the model config of a run."""
    run = Run.open(init_folder(init))
    parts = read_parts(run)
    if parts.facts.get("task") not in INITS:
        raise ValueError(f"--init {init} is a run of {parts.facts.get('task')!r}, expected {' or '.join(INITS)}")
    (tokenizer,) = parts.tokenizers.values()
    return plans.Pretrained(tokenizer, parts.config, parts.facts.get("length"))
