"""What can be shown: a model with its tokenizer, under a name."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard import tasks
from regard.core.rows import Rows
from regard.models.feedback import Feedback
from regard.models.recording import Recording
from regard.page.maps import Given, LayerInputs, record
from regard.tasks.opened import Opened
from regard.training.run import Run

LONGEST = 4096  # tokens shown of a text
SHOWN = {"maps", "stack"}  # what a model has one of, if its layers can be asked what they attend to


class Tokens(NamedTuple):
    """A text as a model reads it at one place: ids, and the names of what attends and of what is attended to."""

    ids: list[int]
    target_ids: list[int] | None  # where the place is in a decoder that reads a source
    queries: list[str]
    keys: list[str]
    predicted: list[str] | None  # what each query is asked for, where the model predicts tokens
    target: str | None
    cut: bool  # the text was longer


class Reading(NamedTuple):
    """Tokens, and what each layer was given."""

    tokens: Tokens
    layers: list[Given]

    @property
    def queries(self) -> list[str]:
        return self.tokens.queries

    @property
    def keys(self) -> list[str]:
        return self.tokens.keys


@dataclass
class Subject:
    """`encode` gives ids, `names` a printable token for each; places are where the model attends."""

    name: str
    title: str
    task: str
    model: nn.Module
    encode: Callable[[str], list[int]]
    names: Callable[[list[int]], list[str]]
    places: tuple[str, ...]
    translator: Any = None
    classifier: Any = None
    labelled: tuple[tuple[str, str], ...] = ()  # texts to validate on and their labels
    examples: tuple[str, ...] = ()
    begins: tuple[int, ...] = ()  # special tokens before a text, and after it
    ends: tuple[int, ...] = ()
    longest: int = LONGEST
    facts: dict[str, Any] = field(default_factory=dict)
    _layers: dict[str, list[Given]] = field(default_factory=dict, repr=False)

    def tokenize(self, place: str, text: str, target: str | None) -> Tokens:
        """A text as the model reads it at a place; without a target, a translator gives its own."""
        if place not in self.places:
            raise ValueError(f"{self.name} attends in {', '.join(self.places)}; got {place!r}")
        # a translator is asked about what it would read, its encoder alone about as much as can be shown
        special = len(self.begins) + len(self.ends)
        alone = self.translator is None or place == "encoder"
        ids, cut = _cut(self.encode(text), self.longest - special if alone else self.translator.longest)
        ids = [*self.begins, *ids, *self.ends]
        if not ids:
            raise ValueError("the text is empty: type some words")
        names = self.names(ids) if self.translator is None else self.translator.source_names(ids, text)
        names = regrouped(names)
        if alone:
            predicted = [*names[1:], "?"] if place == "decoder" else None
            return Tokens(ids, None, names, names, predicted, None, cut)
        target = target or self.translator(text)
        out, more = _cut(self.translator.encode_target(target, text), self.longest - 1)
        bos, eos = self.translator.target.bos, self.translator.target.eos
        named = regrouped(self.translator.target_names([bos, *out, eos], text))
        queries, predicted = named[:-1], named[1:]
        keys = queries if place == "decoder" else names
        return Tokens(ids, [bos, *out], queries, keys, predicted, target, cut or more)

    @torch.no_grad()
    def read(self, place: str, tokens: Tokens, most: int | None = None) -> Reading:
        """What each layer at a place is given, up to layer `most`, in one pass."""
        device = next(self.model.parameters()).device
        ids = [torch.tensor([part], device=device) for part in (tokens.ids, tokens.target_ids) if part is not None]
        places = {"place": place} if len(self.places) > 1 else {}

        def maps(recorder: LayerInputs) -> None:
            if isinstance(self.model, Feedback):
                raise ValueError("a feedback model mixes its layers over time: the page shows models layer by layer")
            if hasattr(self.model, "maps"):
                self.model.maps(*ids, **places, recorder=recorder)
            else:
                self.model.stack(ids[0], Rows.full(ids[0]), maps=Recording("own", recorder))

        layers = record(maps, most)
        _check_finite(layers)
        return Reading(tokens, layers)

    def layers(self, place: str) -> list[Given]:
        """The layers at a place, each with what it is given of one word: how many there are, and of what kind."""
        if place not in self._layers:
            self._layers[place] = self.read(place, self.tokenize(place, "a", "a")).layers
        return self._layers[place]


def of_translator(name: str, title: str, translator: Any, examples: tuple[str, ...] = ()) -> Subject:
    from regard.tasks.translate.page import opened

    return of_opened(name, title, opened(translator, examples))


def of_opened(name: str, title: str, opened: Opened) -> Subject:
    """What a task opens, under a name."""
    model = opened.model
    if not SHOWN & set(dir(model)) or isinstance(model, Feedback):
        raise ValueError(
            f"{name} is a model of kind {model.config.kind!r}, whose attention is not between the tokens of a text "
            "layer by layer: the page cannot show it"
        )
    return Subject(
        name=name,
        title=title,
        task=opened.task,
        model=model,
        encode=opened.encode,
        names=opened.names,
        places=opened.places,
        translator=opened.translator,
        classifier=opened.classifier,
        labelled=opened.labelled,
        examples=opened.examples,
        begins=opened.begins,
        ends=opened.ends,
        longest=min(LONGEST, opened.limit or LONGEST),
        facts=describe(model, opened.trained_for),
    )


def of_model(name: str, model: nn.Module, tokenizer: Any) -> Subject:
    """A model of kind encoder or decoder with whatever encodes text and names tokens."""
    kind = getattr(getattr(model, "config", None), "kind", None)
    if not hasattr(model, "maps"):
        raise ValueError(f"{type(model).__name__} gives no maps of its attention: show a model that has maps()")
    if kind == "encoder-decoder" or kind == "recurrent":
        raise ValueError("a model that translates is shown with its tokenizers: give a Translator or its run folder")
    names = getattr(tokenizer, "tokens", None) or getattr(tokenizer, "convert_ids_to_tokens", None)
    if not hasattr(tokenizer, "encode") or not callable(names):
        raise ValueError(
            "give tokenizer=, with encode(text) -> ids and tokens(ids) -> names: regard.data.tokenizer.Tokenizer is one"
        )
    place = "encoder" if kind == "encoder" else "decoder"
    model.eval()
    return Subject(name, name, "read", model, tokenizer.encode, names, (place,), facts=describe(model, None))


def open_run(folder: str | Path | None, name: str, device: str = "cpu") -> Subject:
    """The subject in a run folder; None: the translator bundled with Regard."""
    if folder is None:
        from regard.tasks.translate import Translator

        return of_translator(name, "English to German, bundled with Regard", Translator.load(device=device), EXAMPLES)
    return of_opened(name, name, tasks.of(Run.open(folder)).open(folder, device))


EXAMPLES = (
    "Where is the station?",
    "My brother lives in Berlin and works as a teacher.",
    "The animal didn't cross the street because it was too tired.",
    "What would you do if you were in my place?",
)


def describe(model: nn.Module, longest: int | None) -> dict[str, Any]:
    """Sizes to show beside the name."""
    config = model.config
    shown = ("kind", "width", "heads", "layers", "decoder_layers", "position")
    shown += ("attention", "decoder_attention", "cross_attention")
    facts = {name: getattr(config, name) for name in shown if getattr(config, name, None) is not None}
    facts = {
        name: value if isinstance(value, str | int) else ", ".join(map(str, value)) for name, value in facts.items()
    }
    return facts | {
        "parameters": sum(part.numel() for part in model.parameters()),
        "trained_for": longest,
    }


BYTES = re.compile(r"(?:\\x[0-9a-f]{2})+")


def regrouped(names: Sequence[str]) -> list[str]:
    """Names of tokens in which letters that were cut into bytes are written again: a token that holds a part of one is
    called by the letter and which part of it, such as "語 2/3". What is no part of a letter stays as it is."""
    found, at = list(names), 0
    while at < len(names):
        text, parts = names[at], 1
        if BYTES.search(text):
            tries = ((_text("".join(names[at : at + n])), n) for n in range(1, 5))
            text, parts = next((made for made in tries if made[0] is not None), (text, 1))
        if parts > 1:
            letters = text.removeprefix("▁")
            called = [f"{text if n == 0 else letters} {n + 1}/{parts}" for n in range(parts)]
        else:
            called = [text]
        found[at : at + parts] = called
        at += parts
    return found


def _text(name: str) -> str | None:
    """The text of a name in which bytes are escaped; None where they are no text."""
    try:
        return BYTES.sub(lambda match: bytes.fromhex(match[0].replace("\\x", "")).decode(), name)
    except UnicodeDecodeError:
        return None


def _cut(ids: list[int], most: int) -> tuple[list[int], bool]:
    return ids[:most], len(ids) > most


def _check_finite(layers: list[Given]) -> None:
    for given in layers:
        parts: list[Tensor] = [given.x] + ([] if given.memory is None else [given.memory.x])
        if not all(bool(part.isfinite().all()) for part in parts):
            raise ValueError("the model's numbers are not finite: its weights are broken")
