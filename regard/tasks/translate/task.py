"""The task of translation."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regard.core.model import Model
from regard.data import placeholders
from regard.data.batches import Batch, Batches, keep_short
from regard.data.entities import Entity, Style
from regard.data.placeholders import Marked
from regard.data.tokenizer import Tokenizer
from regard.decoding import DecodingConfig
from regard.tasks import base
from regard.tasks.load import pick_device
from regard.tasks.opened import Opened
from regard.tasks.translate import page
from regard.tasks.translate.config import DataConfig, TranslateConfig
from regard.tasks.translate.corpus import Corpus, Pair, read_corpus
from regard.tasks.translate.translator import FILES, Translator
from regard.tasks.translate.verbs import ABOUT, EXAMPLES
from regard.training.loss import Loss, translation_loss

SAMPLES = 2  # shown at each evaluation
# Shares of the training sentences that are at most as long as `usual_length` and `trained_length`. A model translates
# longer ones badly: the bundled one reaches chrF 25.6 on whole news sentences of 33 to 44 tokens, 30.9 in clauses.
USUAL, TRAINED = 0.99, 0.999


class Task(base.Task):
    """Translates sentences."""

    name = "translate"
    about, examples = ABOUT, EXAMPLES
    use = "translate with: regard translate {run}"
    config = TranslateConfig
    predicts = "translation"
    metrics = ("bleu", "chrf", "exact", "loss")
    cpu_tokens = 1024
    trains_on = ("source", "generated")
    data_files, test_files = ("source", "target", "valid_source", "valid_target"), ("source", "target")
    epochs = 30

    @classmethod
    def read_data(cls, config: TranslateConfig) -> Corpus:
        return read_corpus(config.data, config.training.seed)

    @classmethod
    def complete_config(cls, config: TranslateConfig, data: Corpus) -> tuple[TranslateConfig, list[str]]:
        """Vocabulary by the number of pairs, preset by the machine, and learning rate by the model."""
        data_options, model, training = config.data, config.model, config.training
        on_cpu, chosen = pick_device(training.device, training.precision).type == "cpu", []
        if data_options.vocabulary is None:
            units = data_options.tokenizer == "units"
            data_options = dataclasses.replace(data_options, vocabulary=8000 if units else vocabulary(len(data.train)))
            chosen.append(f"data.vocabulary {data_options.vocabulary:,}")
        if model.preset is None:
            norm = model.norm or "pre"
            model = dataclasses.replace(model, preset="mini" if on_cpu else "tiny", norm=norm)
            chosen.append(f"model.preset {model.preset}, model.norm {norm}")
        if training.learning_rate is None and training.schedule != "paper":
            model_config = model.resolve(vocabulary=data_options.vocabulary)
            high = getattr(model_config, "norm", None) == "pre" and model_config.width <= 256
            training = dataclasses.replace(training, learning_rate=0.003 if high else 0.001)
            chosen.append(f"training.learning_rate {training.learning_rate}")
        note = f"chosen for {len(data.train):,} pairs on a {'CPU' if on_cpu else 'GPU'}: {', '.join(chosen)}"
        config = dataclasses.replace(config, data=data_options, model=model, training=training)
        return config, [note] if chosen else []

    @classmethod
    def train_tokenizers(cls, data: Corpus, config: TranslateConfig) -> dict[str, Tokenizer]:
        """One for both sides if they share it."""
        sides = [[pair[side] for pair in data.train] for side in (0, 1)]
        texts = {"source.json": sides[0] + sides[1]} if config.data.shared else dict(zip(FILES, sides, strict=True))
        size, kind = config.data.vocabulary or vocabulary(len(data.train)), config.data.tokenizer
        protects = config.data.generated is None if config.data.protect is None else config.data.protect
        protects = protects and kind == "bpe"
        return {
            name: Tokenizer.train(lines, size, kind, reserved=placeholders.reserve(lines) if protects else None)
            for name, lines in texts.items()
        }

    @classmethod
    def model_config(cls, config: TranslateConfig, tokenizers: dict[str, Tokenizer], data: Corpus) -> Any:
        source, target = tokenizers["source.json"], tokenizers.get("target.json")
        return config.model.resolve(vocabulary=source.size, target_vocabulary=None if target is None else target.size)

    def __init__(self, config: TranslateConfig, data: Corpus, tokenizers: dict[str, Tokenizer], model: Model):
        source, target = (tokenizers.get(name, tokenizers["source.json"]) for name in FILES)
        self.model, self.valid, self.beam = model, data.valid, config.training.beam
        training, tokens = config.training, base.batch_tokens(config.training)
        pairs, lines = marked_pairs(source, target, data.train, training.seed)
        source_ids = placeholders.encode(source, [pair[0] for pair in pairs])
        target_ids = placeholders.encode(target, [pair[1] for pair in pairs])
        style = Style.learn(
            entities for pair in pairs[: len(data.train)] for entities in by_marks(source, target, pair)
        )
        self.translator = translator = Translator(
            model, source, target, config.data.maximum_length, style=style, **lengths_of(source_ids, config.data)
        )
        # few shapes, so that few CUDA graphs are captured
        multiple = 8 if training.graphs and translator.device.type == "cuda" else 1
        # a row of a batch is its tokens and one special one, padded to a multiple
        self.most = min(config.data.maximum_length, tokens // multiple * multiple - 1)
        short = keep_short(source_ids, target_ids, self.most)
        if not short.source:
            name = "data.maximum_length" if self.most == config.data.maximum_length else "training.tokens"
            raise ValueError(f"no pair has at most {self.most} tokens on both sides: raise {name}")
        self.dropped = short.dropped
        self.origin = config.data.source or "the generated pairs"
        self.lines = [data.lines[lines[index]] for index in short.indices]
        self.copied = sum(index >= len(data.train) for index in short.indices)
        self.batches = Batches(
            short.source,
            short.target,
            tokens=tokens,
            seed=training.seed,
            multiple=multiple,
            special=translator.special,
        )
        self.checks = translator.batches(data.valid, tokens)

    def loss(self, batch: Batch, label_smoothing: float) -> Loss:
        return translation_loss(self.model, batch, label_smoothing)

    def count_tokens(self, batch: Batch) -> int:
        return batch.target_out.numel() if batch.target_keep is None else int(batch.target_keep.sum())

    def describe_rows(self, rows: list[int]) -> tuple[str, list[int]]:
        return f"lines of {self.origin}", [self.lines[row] for row in rows]

    def evaluate(self, check: Callable[[], None]) -> tuple[dict[str, float], list[dict[str, str]]]:
        plain = self.translator.loss(self.checks, check)
        sources = (source for source, _ in self.valid)
        best = self.translator.translate(sources, DecodingConfig(beam=self.beam), check=check)
        hypotheses = [translations[0].text for translations in best]
        scores = self.translator.scores(hypotheses, [target for _, target in self.valid])
        samples = [
            {"source": source, "reference": target, "translation": ours}
            for (source, target), ours in zip(self.valid[:SAMPLES], hypotheses, strict=False)
        ]
        metrics = {name: score.value for name, score in scores.items()}
        return {"loss": plain, "perplexity": math.exp(min(plain, 50.0)), **metrics}, samples

    @classmethod
    def open_for_page(cls, folder: str | Path, device: str) -> Opened:
        return page.open_run(folder, device)

    def facts(self) -> dict[str, Any]:
        translator = self.translator
        lengths = {"usual_length": translator.usual_length, "trained_length": translator.trained_length}
        return {"longest": translator.longest, **lengths, "numbers": translator.style._asdict()}

    def files(self) -> dict[str, str]:
        lines = (json.dumps({"source": one, "target": other}, ensure_ascii=False) for one, other in self.valid)
        return {"valid.jsonl": "".join(line + "\n" for line in lines)}

    def notes(self) -> list[str]:
        source, target = self.translator.source, self.translator.target
        omitted = [f"omitted {self.dropped} pairs of more than {self.most} tokens"] if self.dropped else []
        sizes = f"{source.size:,}" + (f" and {target.size:,}" if target is not source else "")
        copied = f" ({self.copied:,} of them made up to teach copying)" if self.copied else ""
        return [
            *omitted,
            f"{len(self.batches):,} pairs{copied}, {len(self.valid):,} to validate on; vocabulary {sizes}",
        ]


def marked_pairs(
    source: Tokenizer, target: Tokenizer, pairs: Sequence[Pair], seed: int
) -> tuple[list[tuple[Marked, Marked]], list[int]]:
    """Pairs to train on, with placeholders if the tokenizers have them, then made-up ones that teach copying; and the
    index of the original pair of each."""
    count = 1 if source.reserved is None else source.reserved.count
    marked = [
        placeholders.mark_pair(source, target, pair, shift=(seed + index) % count) for index, pair in enumerate(pairs)
    ]
    more = placeholders.copies(source, target, pairs, seed)
    return marked + more.pairs, [*range(len(pairs)), *more.indices]


def by_marks(source: Tokenizer, target: Tokenizer, pair: tuple[Marked, Marked]) -> Iterator[tuple[Entity, Entity]]:
    """The entities of a pair that have the same placeholder."""
    offset = target.placeholders.start - source.placeholders.start
    theirs = dict(zip(pair[1].marks, pair[1].entities, strict=True))
    for mark, entity in zip(pair[0].marks, pair[0].entities, strict=True):
        yield entity, theirs[mark + offset]


def lengths_of(sources: Sequence[Sequence[int]], config: DataConfig) -> dict[str, int]:
    """The usual and the longest length of training sentences, in tokens."""
    lengths = [len(ids) for ids in sources if len(ids) <= config.maximum_length] or [config.maximum_length]
    usual, trained = (int(np.quantile(lengths, share, method="higher")) for share in (USUAL, TRAINED))
    return {"usual_length": max(usual, 2), "trained_length": max(trained, 2)}


def vocabulary(pairs: int) -> int:
    """The vocabulary size for a number of pairs, 4,000 for 30,000: few pairs would show each token too seldom."""
    return min(8000, max(1000, 500 * round(8 * (pairs / 30_000) ** 0.5)))
