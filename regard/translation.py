"""Translators: trained from text, loaded from a run, asked for translations, scores and alignments."""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml

from regard import __version__, models
from regard.config import DataConfig, TranslateConfig, from_json
from regard.data.batches import Batch, Batches, keep_short, padded, similar
from regard.data.text import read_pairs
from regard.data.tokenizer import EOS, Tokenizer
from regard.decoding import DecodingConfig, Hypothesis, decode
from regard.feedforward.base import active_parameters
from regard.kernels.packed import pack_linears
from regard.metrics.translation import Score, bleu, chrf, exact_match
from regard.training import checkpoint
from regard.training.compact import compact, expand
from regard.training.display import Display
from regard.training.loop import State, train
from regard.training.loss import Loss, loss
from regard.training.run import Run

SHIPPED = Path(__file__).parent / "shipped" / "english-german"
TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 16384}  # of the source, in a batch that is translated
SAMPLES = 2  # shown at each evaluation
BREAKS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # what would end a line or a column of output

Pair = tuple[str, str]


class Corpus(NamedTuple):
    """Pairs to train on and to validate on, and what was done to get them."""

    train: list[Pair]
    valid: list[Pair]
    facts: dict[str, Any]


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

        train = pairs(config.generated, seed)
    else:
        found = read_pairs(config.source, config.target, columns=config.columns, skip_bad=config.skip_bad)
        train = list(zip(found.source, found.target, strict=True))
        facts["skipped"] = {reason: part._asdict() for reason, part in found.skipped.items()}
    if config.valid_source is not None:
        found = read_pairs(config.valid_source, config.valid_target, columns=config.columns, skip_bad=config.skip_bad)
        valid = list(zip(found.source, found.target, strict=True))
        facts["skipped_valid"] = {reason: part._asdict() for reason, part in found.skipped.items()}
    else:
        train, valid = hold_out(train, min(config.held_out, len(train) // 10), seed)
    digest = hashlib.sha256(json.dumps([train, valid]).encode()).hexdigest()
    return Corpus(train, valid, facts | {"pairs": len(train), "valid": len(valid), "sha256": digest})


def hold_out(pairs: Sequence[Pair], count: int, seed: int) -> tuple[list[Pair], list[Pair]]:
    """(rest, held out): a draw of `count` pairs with different sources; no source of theirs is left in the rest."""
    if count < 1:
        raise ValueError(f"{len(pairs)} pairs are too few to hold any out: give at least 10, or a validation file")
    order = np.argsort(np.random.Generator(np.random.PCG64(seed)).random(len(pairs)), kind="stable")
    held: dict[str, int] = {}
    for index in order:
        held.setdefault(pairs[index][0], int(index))
        if len(held) == count:
            break
    rest = [pair for pair in pairs if pair[0] not in held]
    if not rest:
        raise ValueError("all pairs have the same few sources: give a validation file")
    return rest, [pairs[index] for index in held.values()]


class TranslationTask:
    """What the training loop asks of a translator."""

    def __init__(self, translator: "Translator", corpus: Corpus, config: TranslateConfig):
        self.translator, self.model, self.valid = translator, translator.model, corpus.valid
        data, training = config.data, config.training
        sides = [
            tokenizer.encode_batch([pair[side] for pair in corpus.train])
            for side, tokenizer in enumerate((translator.source, translator.target))
        ]
        # few shapes, so that the steps can be recorded
        multiple = 8 if training.graphs and translator.device.type == "cuda" else 1
        # a row of a batch is its tokens and one special one, padded to a multiple
        self.most = min(data.maximum_length, training.tokens // multiple * multiple - 1)
        short = keep_short(*sides, self.most)
        if not short.source:
            name = "data.maximum_length" if self.most == data.maximum_length else "training.tokens"
            raise ValueError(f"no pair has at most {self.most} tokens: raise {name}")
        self.dropped = short.dropped
        self.batches = Batches(
            short.source, short.target, tokens=training.tokens, seed=training.seed, multiple=multiple
        )
        self.checks = translator.batches(corpus.valid, training.tokens)

    def loss(self, batch: Batch, smoothing: float) -> Loss:
        return loss(self.model, batch, smoothing)

    def tokens(self, batch: Batch) -> int:
        return batch.target_out.numel() if batch.target_keep is None else int(batch.target_keep.sum())

    def evaluate(self, beam: int, check: Callable[[], None]) -> tuple[dict[str, float], list[dict[str, str]]]:
        plain = self.translator.loss(self.checks, check)
        sources = (source for source, _ in self.valid)
        best = self.translator.translate(sources, DecodingConfig(beam=beam), check=check)
        hypotheses = [translations[0].text for translations in best]
        scores = self.translator.scores(hypotheses, [target for _, target in self.valid])
        samples = [
            {"source": source, "reference": target, "translation": ours}
            for (source, target), ours in zip(self.valid[:SAMPLES], hypotheses, strict=False)
        ]
        metrics = {name: score.value for name, score in scores.items()}
        return {"loss": plain, "perplexity": math.exp(min(plain, 50.0)), **metrics}, samples


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

    def __init__(self, model: torch.nn.Module, source: Tokenizer, target: Tokenizer, longest: int):
        self.model, self.source, self.target = model, source, target
        self.longest = longest  # tokens of a sentence; more are cut off

    @classmethod
    def load(
        cls, folder: str | Path | None = None, *, which: str | int | None = None, device: str = "auto"
    ) -> "Translator":
        """From a run folder; None: the translator that comes with Regard. `which` is a checkpoint: best, last, average
        or a step; None: the average where there is one, else the best. It translates; it is not for training on."""
        run = Run.open(SHIPPED if folder is None else folder)
        parts = read_parts(run)
        model = models.build(parts.config)
        try:
            model.load_state_dict(expand(run.find(which).tensors["model"]))
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"the checkpoint does not fit the sizes in {run.folder}/run.json: {reason}") from error
        model = model.to(pick_device(device)).eval()
        if next(model.parameters()).device.type == "cpu":
            pack_linears(model)
        return cls(model, parts.source, parts.target, parts.longest)

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
        found: dict[int, list[Translation]] = {}
        real = [number for number, row in enumerate(ids) if row]
        for places in similar([len(ids[number]) + 1 for number in real], TOKENS_AT_ONCE.get(self.device.type, 4096)):
            check()
            group = [real[place] for place in places]
            source, keep = padded([[*ids[number], EOS] for number in group], self.device)
            with torch.inference_mode():
                best = decode(self.model, source, keep, decoding)
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
        return Batches(source, target, tokens=tokens, shuffle=False)

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


class Parts(NamedTuple):
    """What a run folder says of its model."""

    config: Any
    source: Tokenizer
    target: Tokenizer
    longest: int


def read_parts(run: Run) -> Parts:
    """Sizes and tokenizers of a run; what does not belong together is an error in words."""
    facts = run.read_json("run.json")
    if facts.get("task") != "translate":
        raise ValueError(f"{run.folder} is a run of {facts.get('task')!r}, not of 'translate'")
    values, longest = facts.get("model"), facts.get("longest")
    if not isinstance(values, dict) or not isinstance(longest, int):
        raise ValueError(f"{run.folder}/run.json is damaged: it does not say the sizes of the model")
    config = from_json(models.config_class(values), values)
    own = "target.json" if (run.folder / "target.json").exists() else "source.json"
    sizes = {"source.json": config.vocabulary, own: config.target_vocabulary or config.vocabulary}
    found = {name: Tokenizer.load(run.folder / name) for name in sizes}
    for name, size in sizes.items():
        digest = facts.get("tokenizers", {}).get(name)
        if found[name].size != size or (digest and digest != checkpoint.digest(run.folder / name)):
            raise ValueError(
                f"{run.folder}/{name} is not the tokenizer of this run: "
                f"it has {found[name].size} tokens, the model {size}"
            )
    return Parts(config, found["source.json"], found[own], longest)


def read_config(run: Run) -> TranslateConfig:
    """What a run was begun with."""
    path = run.folder / "config.yaml"
    if not path.exists():
        raise ValueError(f"{run.folder} has no config.yaml: a compact run translates, and cannot go on")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not readable YAML: {' '.join(str(error).split())}") from error
    return from_json(TranslateConfig, values)


def train_translator(config: TranslateConfig, display: Display) -> State:
    """`regard train translate`: a new run. Nothing is written before all is known to fit."""
    Run.vacant(config.out)
    torch.manual_seed(config.training.seed)
    corpus = read_corpus(config.data, config.training.seed)
    source, target = learn_tokenizers(corpus.train, config.data)
    model_config = config.model.resolve(source.size, None if target is source else target.size)
    device = pick_device(config.training.device, config.training.precision)
    model = models.build(model_config)
    translator = Translator(model.to(device), source, target, config.data.maximum_length)
    task = TranslationTask(translator, corpus, config)
    run = Run.create(config.out)
    source.save(run.folder / "source.json")
    if target is not source:
        target.save(run.folder / "target.json")
    names = [name for name in ("source.json", "target.json") if (run.folder / name).exists()]
    lines = (json.dumps({"source": one, "target": other}, ensure_ascii=False) for one, other in corpus.valid)
    run.write_text("valid.jsonl", "".join(line + "\n" for line in lines))
    run.write_text("config.yaml", yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False))
    facts = {
        "task": "translate",
        "regard": __version__,
        "model": dataclasses.asdict(model_config),
        "longest": config.data.maximum_length,
        "parameters": sum(part.numel() for part in model.parameters()),
        "active": active_parameters(model),
        "tokenizers": {name: checkpoint.digest(run.folder / name) for name in names},
        "data": corpus.facts,
    }
    run.write_json("run.json", facts)
    return _train(task, corpus, config, run, display)


def resume_translator(folder: str | Path, display: Display, steps: int | None = None) -> State:
    """`regard resume`: goes on with a run, or makes a finished one longer."""
    run = Run.open(folder)
    config = read_config(run)
    if steps is not None:
        config = dataclasses.replace(config, training=dataclasses.replace(config.training, steps=steps))
    parts = read_parts(run)
    corpus = read_corpus(config.data, config.training.seed)
    if corpus.facts["sha256"] != run.read_json("run.json").get("data", {}).get("sha256"):
        raise ValueError(f"the training data of {run.folder} has changed since the run began: it cannot go on exactly")
    device = pick_device(config.training.device, config.training.precision)
    torch.manual_seed(config.training.seed)
    model = models.build(parts.config).to(device)
    if steps is not None:
        run.write_text("config.yaml", yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False))
    translator = Translator(model, parts.source, parts.target, parts.longest)
    return _train(TranslationTask(translator, corpus, config), corpus, config, run, display)


def _train(task: TranslationTask, corpus: Corpus, config: TranslateConfig, run: Run, display: Display) -> State:
    translator = task.translator
    if config.training.threads is not None:
        torch.set_num_threads(config.training.threads)
    for name, part in corpus.facts.items():
        if name.startswith("skipped"):
            for reason, skipped in part.items():
                display.note(f"left out {skipped['count']} lines: {reason}, first at {skipped['first']}")
    if task.dropped:
        display.note(f"left out {task.dropped} pairs of more than {task.most} tokens")
    count = sum(part.numel() for part in translator.model.parameters())
    active = active_parameters(translator.model)
    of_them = "" if active == count else f", {active:,} of them active"
    display.note(
        f"{len(task.batches):,} pairs, {len(corpus.valid):,} to validate on; vocabulary {translator.source.size:,}"
        + (f" and {translator.target.size:,}" if translator.target is not translator.source else "")
        + f"; {count:,} parameters{of_them} on {translator.device}; {run.folder}"
    )
    return train(task, config.training, run, display)


def learn_tokenizers(pairs: Sequence[Pair], config: DataConfig) -> tuple[Tokenizer, Tokenizer]:
    """Of source and target; the same one twice where they share it."""
    sides = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if config.shared:
        both = Tokenizer.train([*sides[0], *sides[1]], config.vocabulary, config.tokenizer)
        return both, both
    source, target = (Tokenizer.train(side, config.vocabulary, config.tokenizer) for side in sides)
    return source, target


def compact_run(folder: str | Path, out: str | Path, which: str | int | None = None) -> Path:
    """A run folder with one checkpoint in 8 bits and nothing of its training: to be passed on."""
    run, small = Run.open(folder), Run.create(out)
    for name in ("source.json", "target.json"):
        if (run.folder / name).exists():
            small.write_text(name, (run.folder / name).read_text(encoding="utf-8"))
    found = run.find(which)
    state = {"step": found.state["step"], "compact": True}
    path = checkpoint.write(small.checkpoints, "average", {"model": compact(found.tensors["model"])}, state)
    small.write_json("run.json", run.read_json("run.json"))
    return path


def read_valid(folder: str | Path) -> list[Pair]:
    """The pairs a run validates on."""
    path = Run.open(folder).folder / "valid.jsonl"
    if not path.exists():
        raise ValueError(f"{folder} keeps no validation pairs: give --source and --target")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return [(record["source"], record["target"]) for record in records]


def pick_device(name: str, precision: str = "float32") -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"no device is called {name!r}: use auto, cpu, cuda or cuda:1") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r}: Regard runs on cpu and cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: PyTorch sees no GPU here; use cpu")
    if device.type == "cpu" and precision != "float32":
        raise ValueError(f"precision {precision!r} is for a GPU; on the CPU it is float32")
    return device


def _plain(values: Any) -> Any:
    """Tuples as lists, for YAML."""
    if isinstance(values, dict):
        return {name: _plain(value) for name, value in values.items()}
    return [_plain(value) for value in values] if isinstance(values, tuple | list) else values
