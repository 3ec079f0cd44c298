"""What the page can ask: one function a question, numbers in reply. No HTTP here.

The annotations of a question are its schema (questions.py): the server checks requests by them before they come here.
"""

import dataclasses
import inspect
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any, get_type_hints

import numpy as np
import torch
from torch import Tensor

from regard import __version__
from regard.core.rows import Rows
from regard.layers.attention.heads import MixedHeads
from regard.layers.attention.projected import Projected
from regard.layers.attention.softmax import Softmax
from regard.page import maps, pictures
from regard.page.beams import Beam, watch
from regard.page.maps import Cache, Given
from regard.page.questions import Index, Name, Place, Role, SpecText, Text, whole
from regard.page.subjects import LONGEST, Reading, Subject, Tokens
from regard.page.wanted import while_wanted
from regard.page.wire import Reply
from regard.spec import ATTENTION, POSITIONS, describe, parse
from regard.tasks.classify.page import EXAMINED

SMALL = 1_000_000  # weights of all layers and heads together that are sent at once
LINKED = 48  # target tokens whose source is told while they come
MOST = 512  # of an option of a mechanism, unless its default or an example is larger
STEP_KEYS = 64  # in the view of the six steps: of a longer text, those with most weight
MOVED_TOKENS = 256  # of a sentence whose word is followed
# a word with another meaning in each of two sentences, each with the word that tells which
PAIRS = (
    ("can", ("I can swim.", "swim"), ("He opened a can of beer.", "beer")),
    ("like", ("I like music.", "music"), ("You look like your father.", "look")),
    ("left", ("She left the house.", "house"), ("Turn left at the station.", "turn")),
    ("bank", ("We sat on the bank of the river.", "river"), ("He works in a bank in Berlin.", "works")),
)
REPLIES, TOKENS, TEXTS = 64 << 20, 8 << 20, 256 << 20  # bytes kept of replies, of tokens, of what layers were given

Token = Annotated[int, whole(0, LONGEST)]  # the number of a token, or of a tile


class Engine:
    """The subjects by name, opened when they are first looked at, and what was computed last."""

    def __init__(self, subjects: dict[str, Callable[[], Subject]]):
        self._open, self._opened = subjects, dict[str, Subject]()
        self._replies, self._tokens, self._texts = Cache(REPLIES), Cache(TOKENS), Cache(TEXTS)
        # one computation at a time: torch uses all cores for it
        self.lock = threading.Lock()

    def subject(self, run: str) -> Subject:
        if run not in self._open:
            raise ValueError(f"there is no such run; there are {', '.join(self._open)}")
        if run not in self._opened:
            self._opened[run] = self._open[run]()
        return self._opened[run]

    @classmethod
    def questions(cls) -> dict[str, Callable[..., Reply]]:
        """The functions that answer, by name: those that return a Reply, but `answer` itself."""
        public = [part for name, part in vars(cls).items() if inspect.isfunction(part) and name[0] != "_"]
        replies = [part for part in public if get_type_hints(part).get("return") is Reply]
        return {part.__name__: part for part in replies if part is not cls.answer}

    def answer(self, name: str, values: dict[str, Any], wanted: Callable[[], bool] | None = None) -> Reply:
        """The reply to a question by name, as long as it is wanted. Equal questions are answered once."""
        key = name, repr(sorted(values.items()))
        with self.lock, while_wanted(wanted):
            return self._replies.get(key, lambda: getattr(self, name)(**values), lambda reply: reply.size)

    # texts

    def about(self) -> Reply:
        """Runs, mechanisms, position schemes."""
        runs = []
        for name in self._open:
            subject = self.subject(name)
            fields = ("name", "title", "task", "places", "examples", "longest", "facts")
            about = {field: getattr(subject, field) for field in fields}
            runs.append(
                about | {"labelled": len(subject.labelled), "pieces": _pieces(subject), "pairs": _pairs(subject)}
            )
        mechanisms = [_facts(ATTENTION, name) for name in ATTENTION.names()]
        positions = [_facts(POSITIONS, name) for name in POSITIONS.names()]
        return Reply({"version": __version__, "runs": runs, "mechanisms": mechanisms, "positions": positions})

    def reading(self, run: str, place: str, text: str, target: str, layers: int | None = None) -> Reading:
        """What the first layers were given, or all of them."""

        def size(reading: Reading) -> int:
            # what was given, and the projections and pictures that will be kept of it
            return sum(
                4 * given.x.nbytes + min(maps.STRIPS, 2 * given.heads * given.T * given.S) for given in reading.layers
            )

        key = run, place, text, target
        for kept in self._texts.kept:
            # one that went as deep or deeper will do
            if kept[:4] == key and (kept[4] is None or (layers is not None and kept[4] >= layers)):
                layers = kept[4]
                break
        tokens = self._tokenize(*key)
        return self._texts.get((*key, layers), lambda: self.subject(run).read(place, tokens, layers), size)

    def _tokenize(self, run: str, place: str, text: str, target: str) -> Tokens:
        """A text in tokens, which is also its translation where no target is given."""

        def size(tokens: Tokens) -> int:
            return 100 * (len(tokens.queries) + len(tokens.keys))

        return self._tokens.get(
            (run, place, text, target), lambda: self.subject(run).tokenize(place, text, target), size
        )

    def read(self, run: Name, place: Place, text: Text, target: Text = "") -> Reply:
        """Tokens and layers; of short texts all weights too."""
        tokens, known = self._tokenize(run, place, text, target), self.subject(run).layers(place)
        T, S = len(tokens.queries), len(tokens.keys)
        small = sum(given.heads * T * S for given in known) <= SMALL
        # of a long text only the first layer is looked at yet
        found = self.reading(run, place, text, target, layers=None if small else 1)
        arrays = {f"layer{i}": _numbers(maps.whole(given)) for i, given in enumerate(found.layers)} if small else {}
        meta = {
            "queries": tokens.queries,
            "keys": tokens.keys,
            "predicted": tokens.predicted,
            "target": tokens.target,
            "layers": [_layer_facts(given, T, S) for given in known],
            "small": small,
            "cut": tokens.cut,
            "longest": S,
        }
        return Reply(meta, arrays)

    def tile(
        self,
        run: Name,
        place: Place,
        text: Text,
        layer: Index,
        level: Annotated[int, whole(0, maps.LEVELS - 1)],
        row: Token,
        column: Token,
        target: Text = "",
        head: Index | None = None,
    ) -> Reply:
        """A piece of the map at a zoom level, of one head or of all."""
        given = self._layer(self.reading(run, place, text, target, layer + 1), layer, head)
        made = maps.tile(given, level, row, column, head)
        arrays = {"largest": made.largest} | ({} if level == 0 else {"mean": made.mean})
        return Reply({"scale": made.scale, "signed": made.signed}, arrays)

    def rows(
        self,
        run: Name,
        place: Place,
        text: Text,
        layer: Index,
        first: Token,
        count: Annotated[int, whole(1, 64)] = 1,
        target: Text = "",
    ) -> Reply:
        """Exact rows of the map, of all heads."""
        given = self._layer(self.reading(run, place, text, target, layer + 1), layer)
        last = min(first + count, given.T)
        if first >= last:
            raise ValueError(f"there is no token {first}: the text has {given.T}, counted from 0")
        if (last - first) * given.slots * given.heads > 4 * SMALL:
            raise ValueError(
                f"{last - first} rows of {given.slots} weights and {given.heads} heads are too many at once"
            )
        return Reply({"first": first}, {"weights": _numbers(maps.rows(given, range(first, last)))})

    def top(
        self,
        run: Name,
        place: Place,
        text: Text,
        layer: Index,
        first: Token,
        count: Annotated[int, whole(1, 128)],
        most: Annotated[int, whole(1, 16)] = 6,
        target: Text = "",
    ) -> Reply:
        """The keys that get most of each query, of all heads."""
        given = self._layer(self.reading(run, place, text, target, layer + 1), layer)
        last = min(first + count, given.T)
        if first >= last:
            raise ValueError(f"there is no token {first}: the text has {given.T}, counted from 0")
        best = maps.rows(given, range(first, last)).topk(min(most, given.slots))
        keys = best.indices.to(torch.int32).cpu().numpy()
        return Reply({"first": first}, {"keys": keys, "weights": _numbers(best.values)})

    def _layer(self, found: Reading, layer: int, head: int | None = None) -> Given:
        if layer >= len(found.layers):
            raise ValueError(f"there is no layer {layer}: there are {len(found.layers)}, counted from 0")
        if head is not None and head >= found.layers[layer].heads:
            raise ValueError(f"there is no head {head}: there are {found.layers[layer].heads}, counted from 0")
        return found.layers[layer]

    # translation

    def translate(
        self,
        run: Name,
        text: Text,
        beam: Annotated[int, whole(1, 12)],
        emit: Callable[[dict[str, Any]], None],
        wanted: Callable[[], bool] | None = None,
    ) -> dict[str, Any]:
        """Tells each step of the search to `emit`, as long as it is wanted; returns what was found."""
        with self.lock, while_wanted(wanted):
            subject = self.subject(run)
            if subject.task != "translate":
                raise ValueError(f"{run} does not translate; choose another run")
            translator = subject.translator
            ids = translator.encode(text)
            if not ids or not text.strip():
                raise ValueError("there is nothing to translate yet: type a sentence")
            cut, ids = len(ids) > translator.longest, ids[: translator.longest]
            source = [*ids, translator.source.eos]
            emit({"source": translator.source_names(source, text), "cut": cut, "longest": translator.longest})
            places: dict[tuple[int, ...], list[int]] = {}
            steps = 0

            def seen(beams: list[Beam]) -> None:
                nonlocal steps
                names = translator.target_names([beam.token for beam in beams], text)
                best = max(range(len(beams)), key=lambda i: beams[i].logprob)
                # each link reads the whole path again: only while that is quick
                near = len(beams[best].path) <= LINKED
                link, weight = self._link(subject, source, beams[best].path) if near else (None, None)
                listed = [
                    {"parent": beam.parent, "token": name, "logprob": beam.logprob}
                    for beam, name in zip(beams, names, strict=True)
                ]
                emit({"step": steps, "beams": listed, "link": link, "weight": weight})
                places.update({beam.path: [steps, i] for i, beam in enumerate(beams)})
                steps += 1

            found = watch(translator, ids, beam, seen)
            return {
                "found": [
                    {
                        "text": translator.text(part.ids, translator.mark(text)),
                        "score": part.score,
                        "logprob": part.logprob,
                        "finished": part.finished,
                        "place": places.get(tuple(part.ids)),
                    }
                    for part in found
                ]
            }

    @staticmethod
    @torch.no_grad()
    def _link(subject: Subject, source: list[int], path: tuple[int, ...]) -> tuple[int, float]:
        """Which source token the newest target token came from: as the aligner says where there is one, otherwise the
        attention that predicted it."""
        device = subject.translator.device
        ids, target = torch.tensor([source], device=device), [subject.translator.target.bos, *path]
        if "aligner" in subject.places:
            (found,) = subject.model.maps(ids, torch.tensor([target], device=device), place="aligner")
            layer = found[0, 0, -2]  # the row of the token before it
        else:
            found = subject.model.maps(ids, torch.tensor([target[:-1]], device=device))
            layer = found[max(len(found) - 2, 0)][0, :, -1].mean(0)[: len(source)]
        return int(layer.argmax()), float(layer.max())

    # classification

    def results(
        self,
        run: Name,
        first: Annotated[int, whole(0, EXAMINED)] = 0,
        count: Annotated[int, whole(1, EXAMINED)] = EXAMINED,
    ) -> Reply:
        """What a classifier answers to some of the texts it validates on."""
        subject = self.subject(run)
        if subject.classifier is None:
            raise ValueError(f"{run} does not classify; choose another run")
        if not subject.labelled:
            raise ValueError(f"{run} keeps no texts to validate on: nothing is known of its answers")
        some = subject.labelled[first : first + count]
        if not some:
            raise ValueError(f"there is no text {first}: there are {len(subject.labelled)}, counted from 0")
        truth, probabilities = subject.classifier.answers(some)
        meta = {
            "labels": subject.classifier.labels,
            "total": len(subject.labelled),
            "texts": [text[:300] for text, _ in some],
        }
        arrays = {"truth": truth.astype(np.int32), "probabilities": probabilities.astype(np.float32)}
        return Reply(meta, arrays)

    # six steps

    def steps(
        self, run: Name, place: Place, text: Text, layer: Index, head: Index, query: Token, target: Text = ""
    ) -> Reply:
        """One token through one head, with the numbers of the keys it sees; of many, those with most weight."""
        found = self.reading(run, place, text, target)
        given = self._layer(found, layer, head)
        if query >= given.T:
            raise ValueError(f"there is no token {query}: the text has {given.T}, counted from 0")
        given, head = maps.part(given, head)
        attention = given.layer
        slots = attention.facts.columns == "slots"
        if slots or not isinstance(attention, Projected) or set(attention.inputs) != {"q", "k", "v"}:
            raise ValueError(f"attention {given.name!r} has no single query, key and value: see its map under Heads")
        queries, sources = given.read
        times = attention.shape.heads // attention.shape.kv_heads
        q, k, v = queries["q"][0, head, query], sources["k"][0, head // times], sources["v"][0, head // times]
        weights = maps.rows(given, [query])[head, 0]
        seen = _visible(given, query, weights)
        # in the order of the text
        best = seen[weights[seen].abs().topk(min(STEP_KEYS, len(seen))).indices].sort().values
        meta = {
            "queries": found.queries,
            "keys": [found.keys[key] for key in best.tolist()],
            "places": best.tolist(),
            "query": query,
            "visible": len(seen),
            "hidden": given.slots - len(seen),
            "plain": isinstance(attention, Softmax),
            "formula": attention.facts.formula,
            "causal": attention.shape.role == "causal",
            "scale": attention.scale,
        }
        return Reply(
            meta, _six(q, k[best], v[best], attention.scale, weights[best], weights[seen] @ v[seen].to(weights))
        )

    def example(self) -> Reply:
        """The worked example: scores of 112 and 96 over width 64."""
        words, D = ["▁Thinking", "▁Machines"], 64
        generator = torch.Generator().manual_seed(1)
        q = torch.randn(D, generator=generator, dtype=torch.float64)
        # any two keys with these products will do: random ones, moved along q until the score is right
        k = torch.randn(2, D, generator=generator, dtype=torch.float64)
        k = k + ((torch.tensor([112.0, 96.0], dtype=torch.float64) - k @ q) / (q @ q))[:, None] * q
        v = torch.randn(2, D, generator=generator, dtype=torch.float64)
        weights = (k @ q / math.sqrt(D)).softmax(0)
        meta = {"queries": words, "keys": words, "places": [0, 1], "query": 0, "visible": 2, "hidden": 0}
        meta |= {"plain": True, "formula": Softmax.facts.formula, "causal": False, "scale": D**-0.5}
        return Reply(meta, _six(q, k, v, D**-0.5, weights, weights @ v))

    def moves(self, run: Name, text: Text, other: Text, word: Name, layer: Index) -> Reply:
        """How far attention moves a word's vector in two sentences, and which words it owes the way to."""
        subject = self.subject(run)
        if "encoder" not in subject.places:
            raise ValueError(f"{run} has no encoder whose vectors could be compared")
        sides, vectors, arrays = [], [], {}
        for number, sentence in enumerate((text, other)):
            found = self.reading(run, "encoder", sentence, "")
            given = self._layer(found, layer)
            if given.T > MOVED_TOKENS:
                raise ValueError(f"give sentences of at most {MOVED_TOKENS} tokens, not {given.T:,}")
            at = _place(found.queries, word)
            shares, moved = _contributions(given, at)
            before, after = self._states(subject, sentence, layer, at)
            vectors.append((before, after))
            sides.append({"tokens": found.queries, "at": at, "moved": moved, "start": float(before.norm())})
            arrays[f"shares{number}"] = _numbers(shares)
        cosines = [float(torch.cosine_similarity(one, two, dim=0)) for one, two in zip(*vectors, strict=True)]
        return Reply({"word": word, "sides": sides, "before": cosines[0], "after": cosines[1]}, arrays)

    @staticmethod
    @torch.no_grad()
    def _states(subject: Subject, text: str, layer: int, at: int) -> tuple[Tensor, Tensor]:
        """The vector of a token as it comes in, and after a layer."""
        stack = subject.model.encoder
        device = next(stack.parameters()).device
        ids = torch.tensor([[*subject.begins, *subject.encode(text), *subject.ends]], device=device)
        outputs: list[Tensor] = []
        rows = Rows.full(ids)
        stack(ids, rows, outputs=outputs)
        return stack.embed(ids, rows)[0, at], outputs[layer][0, at]

    # mechanisms and positions

    def pattern(
        self,
        spec: SpecText,
        role: Role,
        length: Annotated[int, whole(2, 128)],
        heads: Annotated[int, whole(1, 16)],
        seed: Annotated[int, whole(0, 9999)] = 0,
    ) -> Reply:
        """Which pairs are visible and why, from the layer that runs."""
        with pictures.Deadline():
            return pictures.pattern(_bounded(spec), role, length, heads, seed)

    def cost(self, spec: SpecText, role: Role) -> Reply:
        """Counted work over lengths, beside softmax's."""
        with pictures.Deadline():
            return pictures.cost(_bounded(spec), role)

    def compare(self, spec: SpecText, run: Name, text: Text, layer: Index) -> Reply:
        """Effective weights of a mechanism on a text, with the projections that a run has learned."""
        place = "encoder" if "encoder" in self.subject(run).places else self.subject(run).places[0]
        found = self.reading(run, place, text, "")
        with pictures.Deadline():
            return pictures.compare(_bounded(spec), self._layer(found, layer), found.queries)

    def position(
        self,
        spec: SpecText,
        role: Role,
        length: Annotated[int, whole(2, 256)],
        width: Annotated[int, whole(2, 512)],
        heads: Annotated[int, whole(1, 16)],
        run: Name | None = None,
    ) -> Reply:
        """Tables and distances of a position scheme, as a run has learned it where it has one like it."""
        trained = None if run is None else pictures.trained_position(self.subject(run).model, spec, role)
        with pictures.Deadline():
            return pictures.position(_bounded(spec, "position"), role, length, width, heads, trained)


def _layer_facts(given: Given, T: int, S: int) -> dict[str, Any]:
    """What the page must know of a layer to draw its map of T x S tokens."""
    plain = isinstance(given, maps.Linked)
    return {
        "spec": given.name,
        "heads": given.heads,
        "signed": not plain and given.layer.facts.signed,
        "slots": not plain and given.layer.facts.columns == "slots",
        "causal": not plain and given.layer.shape.role == "causal",
        "zeros_are_hidden": not plain and _zeros_are_hidden(given.layer),
        "columns": S if plain else maps.slots(given.layer, T, S),
        "tiles": [[*maps.tile_shape(given, level)] for level in range(maps.LEVELS)],
    }


def _zeros_are_hidden(layer: Any) -> bool:
    """Whether a weight of exactly zero says that the query cannot see the key: not where visible keys may have it."""
    parts = layer.parts if isinstance(layer, MixedHeads) else [layer]
    return not any(part.facts.signed or part.facts.name == "entmax" for part in parts)


def _visible(given: Given, query: int, weights: Tensor) -> Tensor:
    """The keys that a query can see, by number."""
    seen = weights != 0 if _zeros_are_hidden(given.layer) else torch.ones_like(weights, dtype=torch.bool)
    if given.layer.shape.role == "causal" and given.layer.facts.columns == "tokens":
        seen[query + 1 :] = False
    return seen.nonzero()[:, 0]


def _six(q: Tensor, k: Tensor, v: Tensor, scale: float, weights: Tensor, sum: Tensor) -> dict[str, np.ndarray]:
    """Query, keys and values; scores; scaled; weights; weighted values; the sum of those of all keys."""
    scores = k @ q
    weighted = weights[:, None].to(v) * v
    parts = {"q": q, "k": k, "v": v, "scores": scores, "scaled": scores * scale, "weights": weights}
    parts |= {"weighted": weighted, "sum": sum}
    return {name: _numbers(part) for name, part in parts.items()}


def _contributions(given: Given, at: int) -> tuple[Tensor, float]:
    """Each token's share [S] of the step that attention makes one token take, and how long that step is.

    The step is a sum over tokens, d = sum_j c_j with c_j = sum_h a_hj v_hj W_h; the share of j is c_j . d / |d|^2.
    """
    layer = given.layer
    if not isinstance(layer, Projected) or not layer.facts.linear or len(layer.kinds("value")) != 1:
        raise ValueError(f"attention {layer.facts.name!r} gives no sum over words; choose another run")
    weights = maps.rows(given, [at])[:, 0]  # [H, S]
    values = given.read[1][layer.kinds("value")[0]][0]
    values = values.repeat_interleave(layer.shape.heads // layer.shape.kv_heads, 0)  # [H, S, D]
    out = layer.output.weight.detach().unflatten(1, (layer.shape.heads, -1))  # [E, H, D]
    parts = torch.einsum("hs,hsd,ehd->se", weights, values, out)
    step = parts.sum(0)
    return parts @ step / (step @ step), float(step.norm())


def _pieces(subject: Subject) -> bool:
    """Whether tokens are pieces of words that say where a word begins, and not words or characters."""
    names = subject.names(subject.encode("the cat and the dog in the house"))
    return any(len(name) > 1 and name[0] in "▁Ġ" for name in names)


def _pairs(subject: Subject) -> list[dict[str, Any]]:
    """The pairs of sentences whose words are one token each, where the model has an encoder to follow them through."""
    if "encoder" not in subject.places or getattr(subject.model, "encoder", None) is None:
        return []
    found = []
    for word, *sides in PAIRS:
        with suppress(ValueError):
            for sentence, clue in sides:
                tokens = subject.names([*subject.begins, *subject.encode(sentence), *subject.ends])
                _place(tokens, word), _place(tokens, clue)
            (text, first), (other, second) = sides
            found.append({"word": word, "text": text, "other": other, "clues": [first, second]})
    return found


def _place(tokens: Sequence[str], word: str) -> int:
    plain = [token.replace("▁", "").lower() for token in tokens]
    if word.lower() not in plain:
        raise ValueError(f"{word!r} is not one token of {' '.join(plain)!r}: choose one of its tokens")
    return plain.index(word.lower())


def _bounded(spec: str, kind: str = "attention") -> str:
    """A spec whose numbers are of a size to be shown."""
    registry = {"attention": ATTENTION, "position": POSITIONS}[kind]
    parsed = parse(spec)

    def check(part: Any, depth: int) -> None:
        if depth > 3 or len(part.parts) > 8:
            raise ValueError("the spec is nested too deeply or too widely to be shown")
        usual = [(option.name, option.default) for option in registry.options(part.name)]
        usual += [option for example in registry.find(part.name).examples for option in parse(example).options]
        for name, value in part.options:
            most = max([MOST, *(number for key, number in usual if key == name and isinstance(number, int))])
            for number in value if isinstance(value, tuple | list) else [value]:
                if isinstance(number, int | float) and not abs(number) <= most:
                    raise ValueError(f"option {name!r} of {part.name!r} is shown up to {most}, got {number}")
        for inner in part.parts:
            check(inner, depth + 1)

    check(parsed, 0)
    return str(parsed)


def _facts(registry: Any, name: str) -> dict[str, Any]:
    """What the registry knows of a name."""
    cls = registry.find(name)
    facts = {key: value for key, value in dataclasses.asdict(cls.facts).items() if key != "refusals"}
    for cost in ("time", "memory", "state"):
        if facts.get(cost) is not None:
            text, exponent = facts[cost]
            facts[cost] = {"text": text, "exponent": exponent}
    options = [
        {
            "name": option.name,
            "type": describe(option.type),
            "default": None if option.required else option.default,
            "meaning": option.meaning,
        }
        for option in registry.options(name)
    ]
    about = inspect.getdoc(cls) or ""
    return facts | {"options": options, "examples": cls.examples, "about": about, "nests": getattr(cls, "nests", False)}


def _numbers(part: Tensor) -> np.ndarray:
    return part.detach().to(torch.float32).cpu().numpy()
