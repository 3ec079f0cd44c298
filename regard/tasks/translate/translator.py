"""A translator: loaded from a run, it translates, and computes losses and scores."""

import dataclasses
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.core.allocator import hand_back_memory
from regard.core.model import Model
from regard.data import placeholders
from regard.data.batches import Batches, padded, similar
from regard.data.entities import Entity, Style, find
from regard.data.placeholders import Marked
from regard.data.sentences import Span, clauses, sentences
from regard.data.text import BREAKS
from regard.data.tokenizer import Tokenizer, visible
from regard.decoding import DecodingConfig, Ensemble, Hypothesis, decode
from regard.decoding.copying import Copying
from regard.decoding.ensemble import Mean
from regard.metrics.translation import Score, Tokenization, bleu, bleu_counts, chrf, exact_match
from regard.tasks.load import BUNDLED, load
from regard.tasks.translate.alignment import attended_words
from regard.tasks.translate.corpus import Pair
from regard.training.loss import translation_loss

FILES = ("source.json", "target.json")  # of the tokenizers; the second where the target has its own
ENGLISH_GERMAN = BUNDLED / "english-german"
TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 16384}  # of the source, in a batch that is translated
ITEM = re.compile(r"\s*(?:\(?\d{1,3}[.)]|[-*–—]|[a-z]\))\s+(?=\S)")  # the bullet or number of a list item
TAG = re.compile(r"</?(?!br\b|hr\b|img\b)(\w+)[^<>]*(?<!/)>")  # one that opens or closes


class Translation(NamedTuple):
    """One translation of a sentence: its text, its score and the hypothesis of the search."""

    text: str
    score: float
    hypothesis: Hypothesis


class Translator:
    """A model with its tokenizers.

    >>> translator = Translator.load()  # the one bundled with Regard; or Translator.load("runs/my-model")
    >>> translator("Where is the station?")
    'Wo ist der Bahnhof?'
    """

    def __init__(
        self,
        model: Model,
        source: Tokenizer,
        target: Tokenizer,
        longest: int,
        *,
        usual_length: int | None = None,
        trained_length: int | None = None,
        style: Style | None = None,
    ):
        """Lengths are in tokens: a sentence has at most `longest`; a line of more than `usual_length` is split into
        sentences, and a sentence of more than `trained_length` into clauses (None: as `longest`). `dictionary` may be
        set: then an unknown word of a translation is replaced by what it has for the source word that was attended to
        most, or by that word itself."""
        self.model, self.source, self.target, self.longest = model, source, target, longest
        self.usual_length = min(usual_length or longest, longest)
        self.trained_length = min(trained_length or longest, longest)
        self.style = style or Style()
        self.dictionary: Mapping[str, str] | None = None

    @classmethod
    def load(
        cls, folder: str | Path | None = None, *, which: str | int | None = None, device: str = "auto"
    ) -> "Translator":
        """Loads a run folder; None: the translator bundled with Regard. `which` is a checkpoint: best, last, average
        or a step; None: the average if there is one, else the best. It is for inference, not for training."""
        model, parts, run = load(ENGLISH_GERMAN if folder is None else folder, "translate", which=which, device=device)
        longest = parts.facts.get("longest")
        if not isinstance(longest, int):
            raise ValueError(f"{run.folder}/run.json is damaged: it must have the longest sentence in tokens")
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

    @classmethod
    def load_ensemble(
        cls,
        folders: Sequence[str | Path],
        *,
        which: str | int | None = None,
        device: str = "auto",
        mean: Mean = "arithmetic",
    ) -> "Translator":
        """Loads several run folders as one translator, which averages their probabilities at every step. The models may
        be of any kinds, but must have one vocabulary. A sentence has at most the length that all of them can read."""
        if not folders:
            raise ValueError("an ensemble needs at least one run")
        first, *others = (cls.load(folder, which=which, device=device) for folder in folders)
        if not others:
            return first
        for folder, other in zip(folders[1:], others, strict=True):
            for side in ("source", "target"):
                ours, theirs = getattr(first, side), getattr(other, side)
                if ours.saved() != theirs.saved():
                    raise ValueError(
                        f"{folder} has another {side} vocabulary than {folders[0]} ({theirs.size:,} and {ours.size:,} "
                        "tokens): an ensemble needs runs that were trained on the same text with the same tokenizer"
                    )
        every = (first, *others)
        lengths = {name: min(getattr(one, name) for one in every) for name in ("usual_length", "trained_length")}
        model = Ensemble([one.model for one in every], mean).eval()
        return cls(model, first.source, first.target, min(one.longest for one in every), style=first.style, **lengths)

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
        ready: Callable[[int, list[Translation]], None] | None = None,
    ) -> Iterator[list[Translation]]:
        """The n best of each line, in order; an empty line stays empty. `at_once` lines are sorted by length and
        translated together, which does not change the translations. `first` is the number of the first line in
        warnings; `check` is called between batches and may raise. `ready` is called with the number of a line and its
        translations as soon as a beam is done with it, while it still searches for others; not with every line."""
        decoding = decoding or DecodingConfig()
        chunk: list[str] = []
        done = first - 1
        for line in lines:
            chunk.append(line)
            if len(chunk) == at_once:
                yield from self._translate(chunk, decoding, done, warn, check, ready)
                done, chunk = done + len(chunk), []
                hand_back_memory()
        if chunk:
            yield from self._translate(chunk, decoding, done, warn, check, ready)

    def _translate(
        self,
        lines: list[str],
        decoding: DecodingConfig,
        done: int,
        warn: Callable[[str], None],
        check: Callable[[], None],
        ready: Callable[[int, list[Translation]], None] | None,
    ) -> Iterator[list[Translation]]:
        plans = [self._plan(line, done + number + 1, warn) for number, line in enumerate(lines)]
        pieces = [[part for part in plan if isinstance(part, Marked)] for plan in plans]
        found: dict[Marked, list[Translation]] = {}

        def report(piece: Marked) -> None:
            for number, (plan, needed) in enumerate(zip(plans, pieces, strict=True), done + 1):
                # what lost an entity is translated again
                if piece in needed and all(one in found and not self._lost(one, found[one][0]) for one in needed):
                    assert ready is not None, "it reports to this"
                    ready(number, joined([part if isinstance(part, str) else found[part] for part in plan], decoding))

        self._search(
            [one for needed in pieces for one in needed], decoding, check, found, None if ready is None else report
        )
        missed = self._piecewise(plans, found, decoding, done, warn, check)
        for line, plan in zip(lines, plans, strict=True):
            parts = [part if isinstance(part, str) else missed.get(part, found[part]) for part in plan]
            yield joined(parts, decoding) if line.strip() else [NOTHING]

    # from lines to sentences with placeholders, and back

    @property
    def protects(self) -> bool:
        """Whether the model has learned to copy placeholders."""
        return self.source.reserved is not None and self.target.reserved is not None

    def entities(self, text: str) -> list[Entity]:
        """The entities (numbers, addresses, tags ...) of a text; none if it is not plain text."""
        if self.protects:
            return placeholders.entities(self.source, text)
        return find(text) if self.source.kind != "units" else []

    def mark(self, text: str) -> Marked:
        """A source with placeholders, if the model knows them."""
        return placeholders.mark(self.source, text) if self.protects else Marked(text)

    def encode(self, text: str) -> list[int]:
        """The ids of a source, without the one that ends it."""
        return placeholders.encode(self.source, [self.mark(text)])[0]

    def encode_target(self, text: str, source: str) -> list[int]:
        """The ids of a translation of a source."""
        marked = placeholders.mark_target(self.mark(source), (self.source, self.target), text)
        return placeholders.encode(self.target, [marked])[0]

    def text(self, ids: Sequence[int], marked: Marked, unknown: Sequence[str] = ()) -> str:
        """The text of a translation, without line breaks and tabs, with the entities of its source restored, and with
        these texts for its unknown words."""
        surfaces = self._surfaces(marked)
        text = self.target.decode_between(ids, surfaces) if surfaces else self.target.decode(ids, unknown)
        return BREAKS.sub(" ", text)

    def _unknown(
        self, pieces: Sequence[Marked], found: Sequence[Sequence[Hypothesis]]
    ) -> dict[tuple[int, int], list[str]]:
        """The texts for the unknown words of hypotheses, by the numbers of piece and hypothesis."""
        unk = self.target.unk
        asked = [
            (piece, number, one.ids)
            for piece, hypotheses in enumerate(found)
            for number, one in enumerate(hypotheses)
            if self.dictionary is not None and unk in one.ids
        ]
        if not asked:
            return {}
        words = attended_words(
            self.model, self.source, self.target, [pieces[piece] for piece, *_ in asked], [ids for *_, ids in asked]
        )
        known, texts, shown = self.dictionary or {}, {}, self.target.tokens([unk])[0]
        for (piece, number, ids), row in zip(asked, words, strict=True):
            sources = [word for word, id in zip(row, ids, strict=True) if id == unk]
            texts[piece, number] = [known.get(word, word) or shown for word in sources]
        return texts

    def _surfaces(self, marked: Marked) -> dict[int, str]:
        """The text that replaces each placeholder of the target."""
        offset = self.target.placeholders.start - self.source.placeholders.start
        return {mark + offset: surface for mark, surface in marked.surfaces(self.style).items()}

    def source_names(self, ids: Sequence[int], text: str) -> list[str]:
        """Printable tokens of a source: a placeholder as the text it stands for."""
        surfaces = self.mark(text).surfaces()
        return [
            visible(surfaces[id]) if id in surfaces else name
            for id, name in zip(ids, self.source.tokens(ids), strict=True)
        ]

    def target_names(self, ids: Sequence[int], source: str) -> list[str]:
        """Printable tokens of a translation of a source."""
        surfaces = self._surfaces(self.mark(source))
        return [
            visible(surfaces[id]) if id in surfaces else name
            for id, name in zip(ids, self.target.tokens(ids), strict=True)
        ]

    def _plan(self, line: str, number: int, warn: Callable[[str], None]) -> list[str | Marked]:
        """A line as text to copy and sentences to translate, in order."""
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
                why = f"nearly all sentences that the run was trained on have at most {self.trained_length}"
                if tokens <= self.trained_length and self.source.reserved is not None:
                    count = self.source.reserved.count
                    why = f"it has more numbers or names than there are placeholders, {count} of each kind"
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
        """A sentence without the parts that are copied: signs at its ends, the bullet of a list, or all of it if it has
        no word. Without placeholders also things at its ends, since the model would not keep them."""
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
        """The begin and end of a sentence without the parts copied at its ends. A tag is copied only with the one that
        closes it, since the text between them may move."""
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
        self,
        pieces: Sequence[Marked],
        decoding: DecodingConfig,
        check: Callable[[], None],
        found: dict[Marked, list[Translation]],
        report: Callable[[Marked], None] | None = None,
    ) -> None:
        """Puts the n best translations of each piece into `found`; equal pieces are translated once. Translations that
        keep all placeholders come first. `report` is called with each piece that is found before the others."""

        def keep(piece: Marked, hypotheses: Sequence[Hypothesis], unknown: Mapping[int, list[str]]) -> None:
            best = [
                Translation(self.text(part.ids, piece, unknown.get(number, ())), part.score, part)
                for number, part in enumerate(hypotheses)
            ]
            found[piece] = sorted(best, key=lambda one: len(self._lost(piece, one)))[: decoding.nbest]

        pieces = list(dict.fromkeys(pieces))
        ids = placeholders.encode(self.source, pieces)
        for places in similar([len(row) + 1 for row in ids], TOKENS_AT_ONCE.get(self.device.type, 4096)):
            check()
            group = [pieces[place] for place in places]

            def tell(place: int, hypotheses: list[Hypothesis], group: list[Marked] = group) -> None:
                assert report is not None, "it tells this"
                keep(group[place], hypotheses, {})
                report(group[place])

            # unknown words are looked up for all pieces at once
            early = None if report is None or self.dictionary is not None else tell
            outputs = self._decode([ids[place] for place in places], group, decoding, early)
            unknown = self._unknown(group, outputs)
            for index, (piece, hypotheses) in enumerate(zip(group, outputs, strict=True)):
                if piece not in found:
                    keep(piece, hypotheses, {number: texts for (at, number), texts in unknown.items() if at == index})

    def _decode(
        self,
        rows: list[list[int]],
        pieces: Sequence[Marked],
        decoding: DecodingConfig,
        report: Callable[[int, list[Hypothesis]], None] | None = None,
    ) -> list[list[Hypothesis]]:
        special = {"bos": self.target.bos, "eos": self.target.eos, "forbidden": (self.target.pad, self.target.bos)}
        source, keep = padded([[*row, self.source.eos] for row in rows], self.device)
        needed = None
        if not decoding.sample:
            # with placeholders, to choose among all hypotheses of the beam
            needed = [decoding.beam if piece.marks else decoding.nbest for piece in pieces]
            decoding = dataclasses.replace(decoding, nbest=max(needed))
        with torch.inference_mode():
            return decode(self.copying(source), source, keep, decoding, **special, needed=needed, report=report)

    def copying(self, source: torch.Tensor) -> Any:
        """The model, restricted to the placeholders that each source [B, S] has."""
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
        """Translates pieces again whose best translation lost an entity: the text before and after it is translated
        alone, and the entity stays between them."""
        again: dict[Marked, list[str | Marked]] = {}
        for number, plan in enumerate(plans, done + 1):
            for piece in plan:
                if isinstance(piece, Marked) and (lost := self._lost(piece, found[piece][0])):
                    again[piece] = self._around(piece.text, lost)
                    shown = ", ".join(entity.text[:60] for entity in lost)
                    warn(f"line {number}: translated in parts around {shown}, which the model would have dropped")
        if not again:
            return {}
        parts: dict[Marked, list[Translation]] = {}
        inner = [part for plan in again.values() for part in plan if isinstance(part, Marked)]
        self._search(inner, decoding, check, parts)
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
        """Pairs as batches for the loss, sorted by length, cut if they are too long."""
        most = min(self.longest, tokens - 1)
        marked = [placeholders.mark_pair(self.source, self.target, pair) for pair in pairs]
        source, target = (
            [row[:most] for row in placeholders.encode(tokenizer, [pair[side] for pair in marked])]
            for side, tokenizer in enumerate((self.source, self.target))
        )
        cut = sum(most in (len(one), len(other)) for one, other in zip(source, target, strict=True))
        if cut:
            warn(f"the loss covers only the first {most} tokens of {cut} pairs that are as long or longer")
        return Batches(source, target, tokens=tokens, shuffle=False, special=self.special)

    def loss(self, batches: Batches, check: Callable[[], None] = lambda: None) -> float:
        """Mean over target tokens of -log p(token), without label smoothing."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        tokens = 0
        with torch.inference_mode():
            for index in range(batches.count(0)):
                part = translation_loss(self.model, batches.get(0, index).to(self.device), 0.0)
                total += part.plain.double()
                tokens += part.tokens
                check()
        return float(total) / int(tokens)

    def scores(self, hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Score]:
        """BLEU, chrF and exact match. Text of tokenizer units is scored on its tokens as they are."""
        references, tokenize = self._as_scored(references)
        return {
            "bleu": bleu(hypotheses, references, tokenize=tokenize),
            "chrf": chrf(hypotheses, references),
            "exact": exact_match(hypotheses, references),
        }

    def bleu_counts(self, hypotheses: Sequence[str], references: Sequence[str]) -> list[list[int]]:
        """What each sentence adds to BLEU, as `regard.metrics.translation.bleu_counts` has it."""
        references, tokenize = self._as_scored(references)
        return bleu_counts(hypotheses, references, tokenize=tokenize)

    def _as_scored(self, references: Sequence[str]) -> tuple[Sequence[str], Tokenization]:
        """References in the form in which they are scored, and how they are split into tokens."""
        if self.target.kind != "units":
            return references, "13a"
        return [" ".join(self.target.split_words(line)) for line in references], "none"


def closing(tag: str) -> str | None:
    """The tag that closes this one."""
    found = TAG.fullmatch(tag)
    return f"</{found[1]}>" if found and not tag.startswith("</") else None


NOTHING = Translation("", 0.0, Hypothesis([], 0.0, 0.0, True))


def joined(parts: Sequence[str | Sequence[Translation]], decoding: DecodingConfig) -> list[Translation]:
    """The n best translations of a line, from the n best of its parts, with copied text between them."""
    if sum(not isinstance(part, str) for part in parts) == 1:
        # its score is that of the search
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
