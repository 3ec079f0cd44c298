"""Translators: trained from text, loaded from a run, asked for translations, scores and alignments."""

import dataclasses
import hashlib
import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from regard import task
from regard.config import DataConfig, TranslateConfig
from regard.core.allocator import hand_back_memory
from regard.core.files import parse_rows
from regard.data import placeholders
from regard.data.batches import Batch, Batches, keep_short, padded, similar
from regard.data.entities import Entity, Style, find
from regard.data.placeholders import Marked
from regard.data.sentences import Span, clauses, sentences
from regard.data.text import BREAKS, hold_out, read_pairs
from regard.data.tokenizer import Tokenizer, visible
from regard.decoding import DecodingConfig, Hypothesis, decode
from regard.decoding.copying import Copying
from regard.metrics.translation import Score, bleu, chrf, exact_match
from regard.training.loss import Loss, loss
from regard.training.run import Run

FILES = ("source.json", "target.json")  # of the tokenizers; the second where the target has its own
SHIPPED = Path(__file__).parent / "bundled" / "english-german"
TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 16384}  # of the source, in a batch that is translated
SAMPLES = 2  # shown at each evaluation
# Shares of the training sentences that are at most as long as `usual_length` and `trained_length` say. Of longer ones
# a model knows too little: the bundled one translates news of 33 to 44 tokens to chrF 25.6 whole, to 30.9 in clauses.
USUAL, TRAINED = 0.99, 0.999
ITEM = re.compile(r"\s*(?:\(?\d{1,3}[.)]|[-*–—]|[a-z]\))\s+(?=\S)")  # what begins the line of a list
TAG = re.compile(r"</?(?!br\b|hr\b|img\b)(\w+)[^<>]*(?<!/)>")  # one that needs another

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
        "regard train translate --data.generated 20000 --training.minutes 3",
        "regard train translate --data.source a.en --data.target a.de --out runs/a --model.attention performer",
        "regard train translate --data.source pairs.tsv --model.attention '[\"local(window=16)\", softmax]'",
        "regard train translate --config runs/a/config.yaml --out runs/b --training.seed 2",
        "regard train translate --model.preset lstm --model.attention additive --data.generated 20000",
    )
    use = "translate with: regard translate {run}"
    config = TranslateConfig
    metrics = ("bleu", "chrf", "exact", "loss")
    cpu_tokens = 1024
    epochs = 30

    @classmethod
    def read(cls, config: TranslateConfig) -> Corpus:
        return read_corpus(config.data, config.training.seed)

    @classmethod
    def plan(cls, config: TranslateConfig, data: Corpus) -> tuple[TranslateConfig, list[str]]:
        """Vocabulary by the number of pairs, sizes by the machine, and a learning rate that such a model bears."""
        data_options, model, training = config.data, config.model, config.training
        on_cpu, chosen = task.pick_device(training.device, training.precision).type == "cpu", []
        if data_options.vocabulary is None:
            units = data_options.tokenizer == "units"
            data_options = dataclasses.replace(data_options, vocabulary=8000 if units else vocabulary(len(data.train)))
            chosen.append(f"data.vocabulary {data_options.vocabulary:,}")
        if model.preset is None:
            norm = model.norm or "pre"
            model = dataclasses.replace(model, preset="mini" if on_cpu else "tiny", norm=norm)
            chosen.append(f"model.preset {model.preset}, model.norm {norm}")
        if training.learning_rate is None and training.schedule != "paper":
            size = model.resolve(data_options.vocabulary, None)
            high = getattr(size, "norm", None) == "pre" and size.width <= 256
            training = dataclasses.replace(training, learning_rate=0.003 if high else 0.001)
            chosen.append(f"training.learning_rate {training.learning_rate}")
        note = f"chosen for {len(data.train):,} pairs on a {'CPU' if on_cpu else 'GPU'}: {', '.join(chosen)}"
        config = dataclasses.replace(config, data=data_options, model=model, training=training)
        return config, [note] if chosen else []

    @classmethod
    def learn(cls, data: Corpus, config: TranslateConfig) -> dict[str, Tokenizer]:
        """One for both sides where they share it."""
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
    def size(cls, config: TranslateConfig, tokenizers: dict[str, Tokenizer], data: Corpus) -> Any:
        source, target = tokenizers["source.json"], tokenizers.get("target.json")
        return config.model.resolve(source.size, None if target is None else target.size)

    def __init__(self, config: TranslateConfig, data: Corpus, tokenizers: dict[str, Tokenizer], model: nn.Module):
        source, target = (tokenizers.get(name, tokenizers["source.json"]) for name in FILES)
        self.model, self.valid, self.beam = model, data.valid, config.training.beam
        training = config.training
        pairs, lines = marked_pairs(source, target, data.train, training.seed)
        sides = [
            placeholders.encode(tokenizer, [pair[side] for pair in pairs])
            for side, tokenizer in enumerate((source, target))
        ]
        style = Style.learn(
            entities for pair in pairs[: len(data.train)] for entities in by_marks(source, target, pair)
        )
        self.translator = translator = Translator(
            model, source, target, config.data.maximum_length, style=style, **lengths_of(sides[0], config.data)
        )
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
        self.lines = [data.lines[lines[index]] for index in short.index]
        self.copied = sum(index >= len(data.train) for index in short.index)
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
        translator = self.translator
        lengths = {"usual_length": translator.usual_length, "trained_length": translator.trained_length}
        return {"longest": translator.longest, **lengths, "numbers": translator.style._asdict()}

    def files(self) -> dict[str, str]:
        lines = (json.dumps({"source": one, "target": other}, ensure_ascii=False) for one, other in self.valid)
        return {"valid.jsonl": "".join(line + "\n" for line in lines)}

    def notes(self) -> list[str]:
        source, target = self.translator.source, self.translator.target
        left_out = [f"left out {self.dropped} pairs of more than {self.most} tokens"] if self.dropped else []
        sizes = f"{source.size:,}" + (f" and {target.size:,}" if target is not source else "")
        copied = f" ({self.copied:,} of them made to teach copying)" if self.copied else ""
        return [
            *left_out,
            f"{len(self.batches):,} pairs{copied}, {len(self.valid):,} to validate on; vocabulary {sizes}",
        ]


def marked_pairs(
    source: Tokenizer, target: Tokenizer, pairs: Sequence[Pair], seed: int
) -> tuple[list[tuple[Marked, Marked]], list[int]]:
    """Pairs to train on, with placeholders where the tokenizers have them, and made-up ones behind; and which of the
    given pairs each is."""
    count = 1 if source.reserved is None else source.reserved.count
    marked = [
        placeholders.mark_pair(source, target, pair, shift=(seed + index) % count) for index, pair in enumerate(pairs)
    ]
    more = placeholders.copies(source, target, pairs, seed)
    return marked + more.pairs, [*range(len(pairs)), *more.index]


def by_marks(source: Tokenizer, target: Tokenizer, pair: tuple[Marked, Marked]) -> Iterator[tuple[Entity, Entity]]:
    """The entities of a pair that have the same placeholder."""
    offset = target.placeholders.start - source.placeholders.start
    theirs = dict(zip(pair[1].marks, pair[1].entities, strict=True))
    for mark, entity in zip(pair[0].marks, pair[0].entities, strict=True):
        yield entity, theirs[mark + offset]


def lengths_of(sources: Sequence[Sequence[int]], config: DataConfig) -> dict[str, int]:
    """How long the sentences are that a run is trained on."""
    lengths = [len(ids) for ids in sources if len(ids) <= config.maximum_length] or [config.maximum_length]
    usual, trained = (int(np.quantile(lengths, share, method="higher")) for share in (USUAL, TRAINED))
    return {"usual_length": max(usual, 2), "trained_length": max(trained, 2)}


def vocabulary(pairs: int) -> int:
    """Tokens to learn from so many pairs: fewer pairs show each of them too seldom. 4,000 for 30,000."""
    return min(8000, max(1000, 500 * round(8 * (pairs / 30_000) ** 0.5)))


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

    def __init__(
        self,
        model: nn.Module,
        source: Tokenizer,
        target: Tokenizer,
        longest: int,
        *,
        usual_length: int | None = None,
        trained_length: int | None = None,
        style: Style | None = None,
    ):
        """Lengths are in tokens: a sentence has at most `longest`; a line of more than `usual_length` is split into
        sentences, and a sentence of more than `trained_length` into clauses (None: as `longest`)."""
        self.model, self.source, self.target, self.longest = model, source, target, longest
        self.usual_length = min(usual_length or longest, longest)
        self.trained_length = min(trained_length or longest, longest)
        self.style = style or Style()

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
        numbers = parts.facts.get("numbers") or {}
        try:
            style = Style(**numbers)
            lengths = {name: parts.facts.get(name) for name in ("usual_length", "trained_length")}
            if any(value is not None and (not isinstance(value, int) or value < 1) for value in lengths.values()):
                raise TypeError(lengths)
        except TypeError as error:
            raise ValueError(f"{run.folder}/run.json is damaged: numbers or lengths cannot be read") from error
        return cls(model, source, target, longest, style=style, **lengths)

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
        plans = [self._plan(line, done + number + 1, warn) for number, line in enumerate(lines)]
        found = self._search([part for plan in plans for part in plan if isinstance(part, Marked)], decoding, check)
        missed = self._piecewise(plans, found, decoding, done, warn, check)
        for line, plan in zip(lines, plans, strict=True):
            parts = [part if isinstance(part, str) else missed.get(part, found[part]) for part in plan]
            yield joined(parts, decoding) if line.strip() else [NOTHING]

    # from lines to what is searched for, and back

    @property
    def protects(self) -> bool:
        """Whether the model has learned to copy placeholders."""
        return self.source.reserved is not None and self.target.reserved is not None

    def entities(self, text: str) -> list[Entity]:
        """What is not language in a text; nothing where the text is no plain text."""
        if self.protects:
            return placeholders.entities(self.source, text)
        return find(text) if self.source.kind != "units" else []

    def mark(self, text: str) -> Marked:
        """A source with placeholders, where the model knows them."""
        return placeholders.mark(self.source, text) if self.protects else Marked(text)

    def encode(self, text: str) -> list[int]:
        """The ids of a source, without the one that ends it."""
        return placeholders.encode(self.source, [self.mark(text)])[0]

    def encode_target(self, text: str, source: str) -> list[int]:
        """The ids of a translation of a source."""
        marked = placeholders.mark_target(self.mark(source), (self.source, self.target), text)
        return placeholders.encode(self.target, [marked])[0]

    def text(self, ids: Sequence[int], marked: Marked) -> str:
        """What the model writes, on one line and in one column, with the entities of its source in their places."""
        surfaces = self._surfaces(marked)
        return BREAKS.sub(" ", self.target.decode_between(ids, surfaces) if surfaces else self.target.decode(ids))

    def _surfaces(self, marked: Marked) -> dict[int, str]:
        """What each placeholder of the target stands for."""
        offset = self.target.placeholders.start - self.source.placeholders.start
        return {mark + offset: surface for mark, surface in marked.surfaces(self.style).items()}

    def source_names(self, ids: Sequence[int], text: str) -> list[str]:
        """Tokens of a source to print: a placeholder as what it stands for."""
        surfaces = self.mark(text).surfaces()
        return [
            visible(surfaces[id]) if id in surfaces else name
            for id, name in zip(ids, self.source.tokens(ids), strict=True)
        ]

    def target_names(self, ids: Sequence[int], source: str) -> list[str]:
        """Tokens of a translation of a source to print."""
        surfaces = self._surfaces(self.mark(source))
        return [
            visible(surfaces[id]) if id in surfaces else name
            for id, name in zip(ids, self.target.tokens(ids), strict=True)
        ]

    def _plan(self, line: str, number: int, warn: Callable[[str], None]) -> list[str | Marked]:
        """A line as text to be copied and sentences to be translated, in order."""
        found = self.entities(line)
        kept = [(entity.start, entity.end) for entity in found]
        core = line.strip()
        whole = Span(line.index(core), line.index(core) + len(core)) if core else Span(0, 0)
        spans = [whole] if core else []
        if core and not self._fits(core, self.usual_length):
            spans = sentences(line, kept) if self.source.kind != "units" else spans
        plan, end = [], 0
        for span in spans:
            fits = partial(self._fits, most=self.trained_length)
            pieces = list(clauses(line, span, fits, kept)) if self._has_words(line[span.start : span.end]) else [span]
            if len(pieces) > 1:
                tokens = len(self.encode(line[span.start : span.end]))
                why = f"nearly all that the run was trained on have at most {self.trained_length}"
                if tokens <= self.trained_length:
                    why = (
                        f"it has more numbers or names than there are placeholders, {self.source.reserved.count} a kind"
                    )
                warn(f"line {number}: a sentence of {tokens} tokens is translated in {len(pieces)} parts: {why}")
            for piece in pieces:
                plan += [line[end : piece.start], *self._protected(line[piece.start : piece.end])]
                end = piece.end
        return [BREAKS.sub(" ", part) if isinstance(part, str) else part for part in (*plan, line[end:]) if part]

    def _fits(self, text: str, most: int) -> bool:
        found = self.entities(text) if self.protects else []
        marked = placeholders.mark(self.source, text, found) if self.protects else Marked(text)
        if len(marked.entities) < len(found):
            return False
        return len(placeholders.encode(self.source, [marked])[0]) <= most

    def _has_words(self, text: str) -> bool:
        """Whether there is a letter outside of the entities."""
        if self.source.kind == "units":
            return True
        return any(letter.isalpha() for part in Marked(text, tuple(self.entities(text))).parts for letter in part)

    def _protected(self, text: str) -> list[str | Marked]:
        """A sentence without what can be copied as it is: signs at its ends, the mark of a list, or all of it where
        there is no word. Without placeholders things at its ends too, since the model would not keep them."""
        if self.source.kind == "units":
            return [self.mark(text)]
        item = ITEM.match(text)
        start, end = self._without_ends(text, item.end() if item else 0)
        core = text[start:end]
        if not self._has_words(core):
            return [text[:start], *self._written(core), text[end:]]
        stripped = core.strip()
        start += core.index(stripped)
        return [text[:start], self.mark(stripped), text[start + len(stripped) :]]

    def _without_ends(self, text: str, start: int) -> tuple[int, int]:
        """Where a sentence begins and ends without what is copied at its ends. A tag goes only with the one that closes
        it, since what they enclose may move."""
        free = ("sign",) if self.protects else ("sign", "thing")
        found, end = deque(entity for entity in self.entities(text) if entity.start >= start), len(text)
        while found:
            first, last = found[0], found[-1]
            begins = first.kind in free and not text[start : first.start].strip()
            ends = last.kind in free and not text[last.end : end].strip()
            if begins and ends and last.text == closing(first.text):
                start, end = found.popleft().end, found.pop().start
            elif begins and not (self.protects and TAG.match(first.text)):
                start = found.popleft().end
            elif ends and not (self.protects and TAG.match(last.text)):
                end = found.pop().start
            else:
                break
        return start, end

    def _written(self, text: str) -> list[str]:
        """A text without words, its numbers as the target language writes them."""
        found = self.entities(text)
        parts = Marked(text, tuple(found)).parts
        written = [self.style.write(entity, text) for entity in found]
        return [part for both in zip(parts, [*written, ""], strict=True) for part in both]

    def _search(
        self, pieces: Sequence[Marked], decoding: DecodingConfig, check: Callable[[], None]
    ) -> dict[Marked, list[Translation]]:
        """The n best of each piece; equal pieces are translated once. Of those with placeholders, what has all of them
        comes first."""
        found: dict[Marked, list[Translation]] = {}
        for has_marks in (False, True):
            some = list(dict.fromkeys(piece for piece in pieces if bool(piece.marks) == has_marks))
            ids = placeholders.encode(self.source, some)
            for places in similar([len(row) + 1 for row in ids], TOKENS_AT_ONCE.get(self.device.type, 4096)):
                check()
                group, rows = [some[place] for place in places], [ids[place] for place in places]
                for piece, hypotheses in zip(group, self._decode(rows, decoding, has_marks), strict=True):
                    best = [Translation(self.text(part.ids, piece), part.score, part) for part in hypotheses]
                    found[piece] = sorted(best, key=lambda one: len(self._lost(piece, one)))[: decoding.nbest]
        return found

    def _decode(self, rows: list[list[int]], decoding: DecodingConfig, has_marks: bool) -> list[list[Hypothesis]]:
        special = {"bos": self.target.bos, "eos": self.target.eos, "forbidden": (self.target.pad, self.target.bos)}
        source, keep = padded([[*row, self.source.eos] for row in rows], self.device)
        if has_marks and not decoding.sample:
            # to choose among all that the beam finds
            decoding = dataclasses.replace(decoding, nbest=decoding.beam)
        with torch.inference_mode():
            return decode(self.copying(source), source, keep, decoding, **special)

    def copying(self, source: torch.Tensor) -> Any:
        """The model, which can write the placeholders of each source [B, S] and no others."""
        if not self.protects:
            return self.model
        places = torch.tensor(list(self.source.placeholders), device=source.device)
        left = (source[:, :, None] == places).any(1)
        return Copying(self.model, self.target.placeholders.start, left, self.target.pad)

    def _lost(self, piece: Marked, found: Translation) -> list[Entity]:
        """The entities of a piece that a translation does not have."""
        if self.protects:
            offset = self.target.placeholders.start - self.source.placeholders.start
            pairs = zip(piece.marks, piece.entities, strict=True)
            return [entity for mark, entity in pairs if mark + offset not in found.hypothesis.ids]
        copied = [entity for entity in self.entities(piece.text) if entity.kind in ("thing", "sign")]
        return [entity for entity in copied if entity.text not in found.text]

    def _piecewise(
        self,
        plans: Sequence[list[str | Marked]],
        found: dict[Marked, list[Translation]],
        decoding: DecodingConfig,
        done: int,
        warn: Callable[[str], None],
        check: Callable[[], None],
    ) -> dict[Marked, list[Translation]]:
        """Pieces whose best translation lost an entity, anew: what stands before and behind it is translated alone, and
        the entity keeps its place between them."""
        again: dict[Marked, list[str | Marked]] = {}
        for number, plan in enumerate(plans, done + 1):
            for piece in plan:
                if isinstance(piece, Marked) and (lost := self._lost(piece, found[piece][0])):
                    again[piece] = self._around(piece.text, lost)
                    shown = ", ".join(entity.text[:60] for entity in lost)
                    warn(f"line {number}: translated in parts around {shown}, which the model would have lost")
        if not again:
            return {}
        parts = self._search(
            [part for plan in again.values() for part in plan if isinstance(part, Marked)], decoding, check
        )
        deeper = self._piecewise(list(again.values()), parts, decoding, done, lambda message: None, check)
        parts |= deeper
        return {
            piece: joined([part if isinstance(part, str) else parts[part] for part in plan], decoding)
            for piece, plan in again.items()
        }

    def _around(self, text: str, lost: Sequence[Entity]) -> list[str | Marked]:
        plan, end = [], 0
        for entity in (*lost, None):
            part = text[end : len(text) if entity is None else entity.start]
            core = part.strip()
            before, after = (part[: part.index(core)], part[part.index(core) + len(core) :]) if core else (part, "")
            plan += [before, *(self._protected(core) if core else ()), after]
            if entity is not None:
                plan.append(self.style.write(entity, text))
                end = entity.end
        return [part for part in plan if part]

    def batches(
        self, pairs: Sequence[Pair], tokens: int, warn: Callable[[str], None] = lambda message: None
    ) -> Batches:
        """Pairs as batches for the loss, from short to long, cut where they are too long."""
        most = min(self.longest, tokens - 1)
        marked = [placeholders.mark_pair(self.source, self.target, pair) for pair in pairs]
        source, target = (
            [row[:most] for row in placeholders.encode(tokenizer, [pair[side] for pair in marked])]
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


def closing(tag: str) -> str | None:
    """The tag that closes this one."""
    found = TAG.fullmatch(tag)
    return f"</{found[1]}>" if found and not tag.startswith("</") else None


NOTHING = Translation("", 0.0, Hypothesis([], 0.0, 0.0, True))


def joined(parts: Sequence[str | Sequence[Translation]], decoding: DecodingConfig) -> list[Translation]:
    """The n best of a line, out of the n best of its parts, with copied text between them."""
    if sum(not isinstance(part, str) for part in parts) == 1:
        # as the search scored it
        before, best, after = [], [], []
        for part in parts:
            if isinstance(part, str):
                (after if best else before).append(part)
            else:
                best = part
        return [one._replace(text="".join((*before, one.text, *after))) for one in best]
    lines = [NOTHING]
    for part in parts:
        if isinstance(part, str):
            lines = [one._replace(text=one.text + part) for one in lines]
        else:
            both = (join(one, other, decoding) for one in lines for other in part)
            lines = sorted(both, key=lambda one: -one.score)[: decoding.nbest]
    return lines


def join(one: Translation, other: Translation, decoding: DecodingConfig) -> Translation:
    ours, theirs = one.hypothesis, other.hypothesis
    ids, logprob = ours.ids + theirs.ids, ours.logprob + theirs.logprob
    score = logprob / decoding.scale(len(ids) + 1)
    whole = Hypothesis(ids, score, logprob, ours.finished and theirs.finished)
    return Translation(one.text + other.text, score, whole)


def read_valid(folder: str | Path) -> list[Pair]:
    """The pairs a run validates on."""
    run = Run.open(folder)
    if not run.has("valid.jsonl"):
        raise ValueError(f"{folder} keeps no validation pairs: give --source and --target")
    return parse_rows(run.read_text("valid.jsonl"), run.folder / "valid.jsonl", ("source", "target"))
