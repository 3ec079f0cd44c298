"""What the page can show: a model with its tokenizer, under a name."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from regard import tasks
from regard.core.options import options
from regard.core.rows import Rows
from regard.models import registry
from regard.models.feedback import Feedback
from regard.models.pooling import Classifier
from regard.models.recording import Recorder, Recording
from regard.page.images import HasGrids, ImageSubject
from regard.page.maps import Call, CallRecorder, record_calls
from regard.tasks.opened import Opened, OpenedImages
from regard.training.run import Run

LONGEST = 4096  # tokens shown of a text


@runtime_checkable
class HasMaps(Protocol):
    """A model with a method `maps`, which calls a recorder for each attention layer."""

    def maps(self, *tokens: Tensor, recorder: Recorder = ..., **options: Any) -> list[Any]: ...


class Tokens(NamedTuple):
    """A text as a model reads it at one place: ids, and the names of the queries and the keys."""

    ids: list[int]
    target_ids: list[int] | None  # of a decoder that reads a source
    queries: list[str]
    keys: list[str]
    predicted: list[str] | None  # the token that each query predicts, if the model predicts tokens
    target: str | None
    cut: bool  # whether the text was longer


class Reading(NamedTuple):
    """Tokens, and the calls of the layers that read them."""

    tokens: Tokens
    layers: list[Call]

    @property
    def queries(self) -> list[str]:
        return self.tokens.queries

    @property
    def keys(self) -> list[str]:
        return self.tokens.keys


@dataclass
class Subject:
    """A model to show. `encode` gives ids, `names` a printable token for each; `places` are where the model attends."""

    name: str
    title: str
    task: str
    model: nn.Module
    encode: Callable[[str], list[int]]
    names: Callable[[list[int]], list[str]]
    places: tuple[str, ...]
    translator: Any = None
    classifier: Any = None
    labelled: tuple[tuple[str, str], ...] = ()  # validation texts and their labels
    examples: tuple[str, ...] = ()
    begins: tuple[int, ...] = ()  # special tokens before a text, and after it
    ends: tuple[int, ...] = ()
    longest: int = LONGEST
    facts: dict[str, Any] = field(default_factory=dict)
    _layers: dict[str, list[Call]] = field(default_factory=dict, repr=False)

    def tokenize(self, place: str, text: str, target: str | None) -> Tokens:
        """A text as the model reads it at a place. Without a target, a translator gives its own."""
        if place not in self.places:
            raise ValueError(f"{self.name} attends in {', '.join(self.places)}; got {place!r}")
        # a translator shows as many tokens as it would read, its encoder alone as many as the page can show
        translator = self.translator
        special = len(self.begins) + len(self.ends)
        most = self.longest - special if translator is None or place == "encoder" else translator.longest
        ids, cut = _cut(self.encode(text), most)
        ids = [*self.begins, *ids, *self.ends]
        if not ids:
            raise ValueError("the text is empty: type some words")
        names = regroup(self.names(ids) if translator is None else translator.source_names(ids, text))
        if translator is None or place == "encoder":
            predicted = [*names[1:], "?"] if place == "decoder" else None
            return Tokens(ids, None, names, names, predicted, None, cut)
        target = target or translator(text)
        out, target_cut = _cut(translator.encode_target(target, text), self.longest - 1)
        bos, eos = translator.target.bos, translator.target.eos
        named = regroup(translator.target_names([bos, *out, eos], text))
        queries, predicted = named[:-1], named[1:]
        keys = queries if place == "decoder" else names
        return Tokens(ids, [bos, *out], queries, keys, predicted, target, cut or target_cut)

    @torch.no_grad()
    def read(self, place: str, tokens: Tokens, most: int | None = None) -> Reading:
        """The calls of the first `most` layers at a place, or of all, in one pass."""
        device = next(self.model.parameters()).device
        ids = [torch.tensor([part], device=device) for part in (tokens.ids, tokens.target_ids) if part is not None]
        places = {"place": place} if len(self.places) > 1 else {}

        def read(recorder: CallRecorder) -> None:
            if isinstance(self.model, Feedback):
                raise ValueError("a feedback model mixes its layers over time: the page shows models layer by layer")
            if isinstance(self.model, HasMaps):
                self.model.maps(*ids, **places, recorder=recorder)
            elif isinstance(self.model, Classifier) and self.model.stack is not None:
                self.model.stack(ids[0], Rows.full(ids[0]), maps=Recording("self", recorder))

        calls = record_calls(read, most)
        _check_finite(calls)
        return Reading(tokens, calls)

    def layers(self, place: str) -> list[Call]:
        """The layers at a place, as called with a short text: their number and their kinds."""
        if place not in self._layers:
            self._layers[place] = self.read(place, self.tokenize(place, "a", "a")).layers
        return self._layers[place]


def of_translator(name: str, title: str, translator: Any, examples: tuple[str, ...] = ()) -> Subject:
    from regard.tasks.translate.page import opened

    return of_opened(name, title, opened(translator, examples))


def of_opened(name: str, title: str, opened: Opened) -> Subject:
    """A run as its task opens it, under a name."""
    model = opened.model
    if not isinstance(model, HasMaps | Classifier) or isinstance(model, Feedback):
        raise ValueError(
            f"{name} is a model of kind {_config(model).kind!r}, whose attention is not between the tokens of a text "
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


def of_images(name: str, title: str, opened: OpenedImages) -> ImageSubject:
    """A run that reads images, under a name."""
    if not isinstance(opened.model, HasGrids):
        raise ValueError(
            f"{name} is a model of kind {_config(opened.model).kind!r}, whose attention is not between patches of an "
            "image: the page cannot show it"
        )
    opened.model.eval()
    return ImageSubject(name, title, opened, describe(opened.model, None))


def of_model(name: str, model: nn.Module, tokenizer: Any) -> Subject:
    """A model of kind encoder or decoder, with any tokenizer that encodes text and names tokens."""
    kind = getattr(_config(model), "kind", None)
    if not isinstance(model, HasMaps):
        raise ValueError(f"{type(model).__name__} gives no maps of its attention: show a model with a method maps()")
    if kind in _translating():
        raise ValueError("a model that translates is shown with its tokenizers: give a Translator or its run folder")
    names: Callable[[list[int]], list[str]] | None = getattr(tokenizer, "tokens", None)
    names = names or getattr(tokenizer, "convert_ids_to_tokens", None)
    if not hasattr(tokenizer, "encode") or not callable(names):
        raise ValueError(
            "give tokenizer=, with encode(text) -> ids and tokens(ids) -> names: regard.data.tokenizer.Tokenizer is one"
        )
    place = "encoder" if kind == "encoder" else "decoder"
    model.eval()
    return Subject(name, name, "read", model, tokenizer.encode, names, (place,), facts=describe(model, None))


def open_run(folder: str | Path | None, name: str, device: str = "cpu") -> Subject | ImageSubject:
    """The subject in a run folder; None: the translator bundled with Regard."""
    if folder is None:
        from regard.tasks.translate import Translator

        return of_translator(name, "English to German, bundled with Regard", Translator.load(device=device), EXAMPLES)
    opened = tasks.of(Run.open(folder)).open_for_page(folder, device)
    return of_images(name, name, opened) if isinstance(opened, OpenedImages) else of_opened(name, name, opened)


EXAMPLES = (
    "Where is the station?",
    "My brother lives in Berlin and works as a teacher.",
    "The animal didn't cross the street because it was too tired.",
    "What would you do if you were in my place?",
)


def describe(model: nn.Module, longest: int | None) -> dict[str, Any]:
    """The sizes to show beside the name."""
    config = _config(model)
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


def _translating() -> set[str]:
    """The kinds of models that translate."""
    forms = (model.forms.get("translation") for model in registry.entries().values())
    return {form.fixed.get("kind", options(form.config)["kind"].default) for form in forms if form is not None}


def _config(model: nn.Module) -> Any:
    """The config of a model; None if it has none."""
    return getattr(model, "config", None)


BYTES = re.compile(r"(?:\\x[0-9a-f]{2})+")


def regroup(names: Sequence[str]) -> list[str]:
    """Names of tokens in which characters that were cut into bytes are readable: a token that holds a part of one gets
    the character and the number of the part, such as "語 2/3". Other tokens keep their names."""
    grouped, at = [], 0
    while at < len(names):
        text, parts = _decode_at(names, at) if BYTES.search(names[at]) else (names[at], 1)
        if parts > 1:
            bare = text.removeprefix("▁")
            grouped += [f"{text if n == 0 else bare} {n + 1}/{parts}" for n in range(parts)]
        else:
            grouped.append(text)
        at += parts
    return grouped


def _decode_at(names: Sequence[str], at: int) -> tuple[str, int]:
    """The text of the fewest names from `at` on whose bytes are UTF-8, and their number; one name as it is if no four
    of them are."""
    for parts in range(1, 5):
        text = _decode("".join(names[at : at + parts]))
        if text is not None:
            return text, parts
    return names[at], 1


def _decode(name: str) -> str | None:
    """The text of a name in which bytes are escaped; None if they are not UTF-8."""
    try:
        return BYTES.sub(lambda match: bytes.fromhex(match[0].replace("\\x", "")).decode(), name)
    except UnicodeDecodeError:
        return None


def _cut(ids: list[int], most: int) -> tuple[list[int], bool]:
    return ids[:most], len(ids) > most


def _check_finite(calls: list[Call]) -> None:
    for call in calls:
        if not all(bool(part.isfinite().all()) for part in call.tensors()):
            raise ValueError("the model's activations are not finite: its weights are damaged")
