"""Translators: trained from text, loaded from a run, asked for translations, scores and alignments."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from regard import task
from regard.config import DataConfig, TranslateConfig
from regard.data.batches import Batch, Batches, keep_short, padded, similar
from regard.data.text import BREAKS, hold_out, read_pairs
from regard.data.tokenizer import Tokenizer
from regard.decoding import DecodingConfig, Hypothesis, decode
from regard.memory import hand_back_memory
from regard.metrics.translation import Score, bleu, chrf, exact_match
from regard.training.loss import Loss, loss
from regard.training.run import Run

FILES = ("source.json", "target.json")  # of the tokenizers; the second where the target has its own
SHIPPED = Path(__file__).parent / "shipped" / "english-german"
TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 16384}  # of the source, in a batch that is translated
SAMPLES = 2  # shown at each evaluation

Pair = tuple[str, str]


class Corpus(NamedTuple):
    """Pairs to train on and to validate on, what was done to get them, and which line or number each of the first has
    where it came from."""

    train: list[Pair]
    valid: list[Pair]
    facts: dict[str, Any]
    lines: list[int]


def read_corpus(config: DataConfig, seed: int) -> Corpus:
    """The pairs a config names. Without a validation file, some pairs are held out."""
    if (config.source is None) == (config.generated is None):
        raise ValueError(
            "training data: give data.source and data.target (two files of equally many lines), data.source alone "
            "(a TSV file), or data.generated (how many pairs to make up)"
        )
    facts: dict[str, Any] = {}
    if config.generated is not None:
        from regard.data.generated import pairs

        train = [(*pair, number) for number, pair in enumerate(pairs(config.generated, seed), 1)]
    else:
        found = read_pairs(config.source, config.target, columns=config.columns, skip_bad=config.skip_bad)
        train = list(zip(found.source, found.target, found.lines, strict=True))
        facts["skipped"] = {reason: part._asdict() for reason, part in found.skipped.items()}
    if config.valid_source is not None:
        found = read_pairs(config.valid_source, config.valid_target, columns=config.columns, skip_bad=config.skip_bad)
        valid = list(zip(found.source, found.target, strict=True))
        facts["skipped_valid"] = {reason: part._asdict() for reason, part in found.skipped.items()}
    else:
        train, held = hold_out(train, min(config.held_out, len(train) // 10), seed)
        valid = [pair[:2] for pair in held]
    train, lines = [pair[:2] for pair in train], [line for *_, line in train]
    digest = hashlib.sha256(json.dumps([train, valid]).encode()).hexdigest()
    return Corpus(train, valid, facts | {"pairs": len(train), "valid": len(valid), "sha256": digest}, lines)


class Task(task.Task):
    """Pairs in, translations out."""

    name = "translate"
    about = "A translator from pairs of sentences: Transformer or recurrent, with any attention."
    examples = (
        "regard train translate --data.generated 20000 --model.preset tiny --training.steps 2000",
        "regard train translate --data.source a.en --data.target a.de --out runs/a --model.attention performer",
        "regard train translate --data.source pairs.tsv --model.attention '[\"local(window=16)\", softmax]'",
        "regard train translate --config runs/a/config.yaml --out runs/b --training.seed 2",
        "regard train translate --model.preset lstm --model.attention additive --data.generated 20000",
    )
    use = "translate with: regard translate {run}"
    config = TranslateConfig
    metrics = ("bleu", "chrf", "exact", "loss")

    @classmethod
    def read(cls, config: TranslateConfig) -> Corpus:
        return read_corpus(config.data, config.training.seed)

    @classmethod
    def learn(cls, data: Corpus, config: TranslateConfig) -> dict[str, Tokenizer]:
        """One for both sides where they share it."""
        sides = [[pair[side] for pair in data.train] for side in (0, 1)]
        texts = {"source.json": sides[0] + sides[1]} if config.data.shared else dict(zip(FILES, sides, strict=True))
        size, kind = config.data.vocabulary, config.data.tokenizer
        return {name: Tokenizer.train(lines, size, kind) for name, lines in texts.items()}

    @classmethod
    def size(cls, config: TranslateConfig, tokenizers: dict[str, Tokenizer], data: Corpus) -> Any:
        source, target = tokenizers["source.json"], tokenizers.get("target.json")
        return config.model.resolve(source.size, None if target is None else target.size)

    def __init__(self, config: TranslateConfig, data: Corpus, tokenizers: dict[str, Tokenizer], model: nn.Module):
        source, target = (tokenizers.get(name, tokenizers["source.json"]) for name in FILES)
        self.translator = translator = Translator(model, source, target, config.data.maximum_length)
        self.model, self.valid, self.beam = model, data.valid, config.training.beam
        training = config.training
        sides = [
            tokenizer.encode_batch([pair[side] for pair in data.train])
            for side, tokenizer in enumerate((source, target))
        ]
        # few shapes, so that the steps can be recorded
        multiple = 8 if training.graphs and translator.device.type == "cuda" else 1
        # a row of a batch is its tokens and one special one, padded to a multiple
        self.most = min(config.data.maximum_length, training.tokens // multiple * multiple - 1)
        short = keep_short(*sides, self.most)
        if not short.source:
            name = "data.maximum_length" if self.most == config.data.maximum_length else "training.tokens"
            raise ValueError(f"no pair has at most {self.most} tokens: raise {name}")
        self.dropped = short.dropped
        self.origin = config.data.source or "what was generated"
        self.lines = [data.lines[index] for index in short.index]
        self.batches = Batches(
            short.source,
            short.target,
            tokens=training.tokens,
            seed=training.seed,
            multiple=multiple,
            special=translator.special,
        )
        self.checks = translator.batches(data.valid, training.tokens)

    def loss(self, batch: Batch, smoothing: float) -> Loss:
        return loss(self.model, batch, smoothing)

    def tokens(self, batch: Batch) -> int:
        return batch.target_out.numel() if batch.target_keep is None else int(batch.target_keep.sum())

    def named(self, rows: list[int]) -> tuple[str, list[int]]:
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

    def facts(self) -> dict[str, Any]:
        return {"longest": self.translator.longest}

    def files(self) -> dict[str, str]:
        lines = (json.dumps({"source": one, "target": other}, ensure_ascii=False) for one, other in self.valid)
        return {"valid.jsonl": "".join(line + "\n" for line in lines)}

    def notes(self) -> list[str]:
        source, target = self.translator.source, self.translator.target
        left_out = [f"left out {self.dropped} pairs of more than {self.most} tokens"] if self.dropped else []
        sizes = f"{source.size:,}" + (f" and {target.size:,}" if target is not source else "")
        return [*left_out, f"{len(self.batches):,} pairs, {len(self.valid):,} to validate on; vocabulary {sizes}"]


class Translation(NamedTuple):
    """One translation of a sentence: its text, its score and what the search found."""

    text: str
    score: float
    hypothesis: Hypothesis


class Translator:
    """A model with its tokenizers.

    >>> translator = Translator.load()  # the one that comes with Regard; or Translator.load("runs/my-model")
    >>> translator("Where is the station?")
    'Wo ist der Bahnhof?'
    """

    def __init__(self, model: nn.Module, source: Tokenizer, target: Tokenizer, longest: int):
        self.model, self.source, self.target = model, source, target
        self.longest = longest  # tokens of a sentence; more are cut off

    @classmethod
    def load(
        cls, folder: str | Path | None = None, *, which: str | int | None = None, device: str = "auto"
    ) -> "Translator":
        """From a run folder; None: the translator that comes with Regard. `which` is a checkpoint: best, last, average
        or a step; None: the average where there is one, else the best. It translates; it is not for training on."""
        model, parts, run = task.load(SHIPPED if folder is None else folder, "translate", which=which, device=device)
        longest = parts.facts.get("longest")
        if not isinstance(longest, int):
            raise ValueError(f"{run.folder}/run.json is damaged: it does not say how long a sentence may be")
        source, target = (parts.tokenizers.get(name, parts.tokenizers["source.json"]) for name in FILES)
        return cls(model, source, target, longest)

    @property
    def special(self) -> tuple[int, int, int]:
        """The ids that end a source, begin a target and end it."""
        return self.source.eos, self.target.bos, self.target.eos

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def __call__(self, text: str) -> str:
        return next(self.translate([text]))[0].text

    def translate(
        self,
        lines: Iterable[str],
        decoding: DecodingConfig | None = None,
        *,
        at_once: int = 1024,
        first: int = 1,
        warn: Callable[[str], None] = lambda message: None,
        check: Callable[[], None] = lambda: None,
    ) -> Iterator[list[Translation]]:
        """The n best of each line, in order; an empty line stays empty. `at_once` lines are sorted by length and
        translated together; what comes out does not depend on it. `first` is the number of the first line in warnings;
        `check` is called between batches and may raise."""
        decoding = decoding or DecodingConfig()
        chunk: list[str] = []
        done = first - 1
        for line in lines:
            chunk.append(line)
            if len(chunk) == at_once:
                yield from self._translate(chunk, decoding, done, warn, check)
                done, chunk = done + len(chunk), []
                hand_back_memory()
        if chunk:
            yield from self._translate(chunk, decoding, done, warn, check)

    def _translate(
        self,
        lines: list[str],
        decoding: DecodingConfig,
        done: int,
        warn: Callable[[str], None],
        check: Callable[[], None],
    ) -> Iterator[list[Translation]]:
        ids = self.source.encode_batch(lines)
        for number, row in enumerate(ids):
            if len(row) > self.longest:
                warn(f"line {done + number + 1}: {len(row)} tokens, only the first {self.longest} are translated")
                del row[self.longest :]
        special = {"bos": self.target.bos, "eos": self.target.eos, "forbidden": (self.target.pad, self.target.bos)}
        found: dict[int, list[Translation]] = {}
        real = [number for number, row in enumerate(ids) if row]
        for places in similar([len(ids[number]) + 1 for number in real], TOKENS_AT_ONCE.get(self.device.type, 4096)):
            check()
            group = [real[place] for place in places]
            source, keep = padded([[*ids[number], self.source.eos] for number in group], self.device)
            with torch.inference_mode():
                best = decode(self.model, source, keep, decoding, **special)
            for number, hypotheses in zip(group, best, strict=True):
                found[number] = [Translation(self._text(part.ids), part.score, part) for part in hypotheses]
        for number, line in enumerate(lines):
            nothing = Translation("", 0.0, Hypothesis([], 0.0, 0.0, True))
            yield found[number] if line.strip() else [nothing]

    def _text(self, ids: list[int]) -> str:
        """On one line and in one column, whatever the model writes."""
        return BREAKS.sub(" ", self.target.decode(ids))

    def batches(
        self, pairs: Sequence[Pair], tokens: int, warn: Callable[[str], None] = lambda message: None
    ) -> Batches:
        """Pairs as batches for the loss, from short to long, cut where they are too long."""
        most = min(self.longest, tokens - 1)
        source, target = (
            [row[:most] for row in tokenizer.encode_batch([pair[side] for pair in pairs])]
            for side, tokenizer in enumerate((self.source, self.target))
        )
        cut = sum(most in (len(one), len(other)) for one, other in zip(source, target, strict=True))
        if cut:
            warn(f"the loss is of the first {most} tokens of {cut} pairs that are as long or longer")
        return Batches(source, target, tokens=tokens, shuffle=False, special=self.special)

    def loss(self, batches: Batches, check: Callable[[], None] = lambda: None) -> float:
        """Mean over target tokens of -log p(token), without smoothing."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        tokens = 0
        with torch.inference_mode():
            for index in range(batches.count(0)):
                part = loss(self.model, batches.get(0, index).to(self.device), 0.0)
                total += part.plain.double()
                tokens += part.tokens
                check()
        return float(total) / int(tokens)

    def scores(self, hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Score]:
        """BLEU, chrF and exact match. Text that came as units is scored on its tokens as they are."""
        units = self.target.kind == "units"
        if units:
            references = [" ".join(self.target.split_words(line)) for line in references]
        return {
            "bleu": bleu(hypotheses, references, tokenize="none" if units else "13a"),
            "chrf": chrf(hypotheses, references),
            "exact": exact_match(hypotheses, references),
        }


def read_valid(folder: str | Path) -> list[Pair]:
    """The pairs a run validates on."""
    run = Run.open(folder)
    if not run.has("valid.jsonl"):
        raise ValueError(f"{folder} keeps no validation pairs: give --source and --target")
    records = [json.loads(line) for line in run.read_text("valid.jsonl").split("\n") if line]
    return [(record["source"], record["target"]) for record in records]
