"""The questions of the page: one method each, numbers in reply. No HTTP here.

The annotations of a question are its schema (questions.py): the server checks requests by them before they come here.
"""

import base64
import binascii
import hashlib
import inspect
import threading
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np
import torch

from regard import __version__
from regard.core.shape import Role
from regard.page import images, maps, pictures, stepping
from regard.page.beams import Beam, watch
from regard.page.cancel import IsCancelled, cancellable
from regard.page.images import ImageSubject, Sight
from regard.page.maps import Cache, Call
from regard.page.questions import Index, Name, Place, SpecText, Text, chars, whole
from regard.page.specs import check_sizes, registry_entry
from regard.page.subjects import LONGEST, HasMaps, Reading, Subject, Tokens
from regard.page.wire import Reply, to_numpy
from regard.spec import ATTENTION, POSITIONS
from regard.tasks.classify.page import EXAMINED
from regard.tasks.opened import CaptionedImage

SMALL = 1_000_000  # weights of all layers and heads together that are sent at once
LINKED = 48  # target tokens up to which a translation shows its links while it is searched for
MOVED_TOKENS = 256  # of a sentence in which a word is followed
REPLY_BYTES, TOKEN_BYTES, READING_BYTES, IMAGE_BYTES = 64 << 20, 8 << 20, 256 << 20, 64 << 20  # kept of each

# the number of a sample of the run, or what `upload` called an image
Image = Annotated[str, chars(1, 40)]
Caption = Annotated[str, chars(0, 2000)]
Upload = Annotated[str, chars(4, -(-images.MOST_UPLOADED // 3) * 4)]
Token = Annotated[int, whole(0, LONGEST)]  # the number of a token, or of a tile


class Engine:
    """The subjects by name, opened when they are first looked at, and the latest results."""

    def __init__(self, subjects: dict[str, Callable[[], Subject | ImageSubject]]):
        self._open, self._opened = subjects, dict[str, Subject | ImageSubject]()
        self._replies, self._tokens = Cache[Reply](REPLY_BYTES), Cache[Tokens](TOKEN_BYTES)
        self._readings, self._sights = Cache[Reading](READING_BYTES), Cache[Sight](READING_BYTES)
        self._images, self._captions = Cache[bytes](IMAGE_BYTES), Cache[CaptionedImage](READING_BYTES)
        # one computation at a time: torch uses all cores for it
        self.lock = threading.Lock()

    def subject(self, run: str) -> Subject | ImageSubject:
        if run not in self._open:
            raise ValueError(f"there is no such run; there are {', '.join(self._open)}")
        if run not in self._opened:
            self._opened[run] = self._open[run]()
        return self._opened[run]

    def reader(self, run: str) -> Subject:
        """A run that reads texts."""
        subject = self.subject(run)
        if not isinstance(subject, Subject):
            raise ValueError(f"{run} reads images and no texts: choose another run")
        return subject

    def viewer(self, run: str) -> ImageSubject:
        """A run that reads images."""
        subject = self.subject(run)
        if not isinstance(subject, ImageSubject):
            raise ValueError(f"{run} reads texts and no images: choose another run")
        return subject

    @classmethod
    def questions(cls) -> dict[str, Callable[..., Reply]]:
        """The methods that answer a question, by name: all public ones that return a Reply, except `answer`."""
        public = [part for name, part in vars(cls).items() if inspect.isfunction(part) and name[0] != "_"]
        replies = [part for part in public if get_type_hints(part).get("return") is Reply]
        return {part.__name__: part for part in replies if part is not cls.answer}

    def answer(self, name: str, values: dict[str, Any], is_cancelled: IsCancelled | None = None) -> Reply:
        """The reply to a question by name, unless it is cancelled. Equal questions are computed once."""
        key = name, repr(sorted(values.items()))
        with self.lock, cancellable(is_cancelled):
            if name == "upload":
                # what is kept of it is the image
                return self.upload(**values)
            return self._replies.get(key, lambda: getattr(self, name)(**values), lambda reply: reply.size)

    # texts

    def about(self) -> Reply:
        """Runs, mechanisms, position schemes."""
        runs = []
        for name in self._open:
            subject = self.subject(name)
            fields = ("name", "title", "task", "places", "examples", "longest", "facts")
            about = {field: getattr(subject, field) for field in fields}
            if isinstance(subject, ImageSubject):
                about |= {"reads": "images", "labelled": 0, "pieces": False, "pairs": []}
                about["captions"] = subject.opened.caption is not None
            else:
                about |= {"reads": "texts", "labelled": len(subject.labelled), "pieces": _has_pieces(subject)}
                about["pairs"] = stepping.sentence_pairs(subject)
            runs.append(about)
        mechanisms = [registry_entry(ATTENTION, name) for name in ATTENTION.names()]
        positions = [registry_entry(POSITIONS, name) for name in POSITIONS.names()]
        return Reply({"version": __version__, "runs": runs, "mechanisms": mechanisms, "positions": positions})

    def reading(self, run: str, place: str, text: str, target: str, layers: int | None = None) -> Reading:
        """A text as the first layers read it, or all of them."""

        def size(reading: Reading) -> int:
            # the inputs, and the projections and tiles that will be kept with them
            return sum(
                4 * call.x.nbytes + min(maps.STRIP_BYTES, 2 * call.heads * call.T * call.S) for call in reading.layers
            )

        key = run, place, text, target
        for kept in self._readings.kept:
            # a reading that went as deep or deeper will do
            if kept[:4] == key and (kept[4] is None or (layers is not None and kept[4] >= layers)):
                layers = kept[4]
                break
        tokens = self._tokenize(*key)
        return self._readings.get((*key, layers), lambda: self.reader(run).read(place, tokens, layers), size)

    def _tokenize(self, run: str, place: str, text: str, target: str) -> Tokens:
        """The tokens of a text, and of its translation if the place needs one."""

        def size(tokens: Tokens) -> int:
            return 100 * (len(tokens.queries) + len(tokens.keys))

        return self._tokens.get(
            (run, place, text, target), lambda: self.reader(run).tokenize(place, text, target), size
        )

    def read(self, run: Name, place: Place, text: Text, target: Text = "") -> Reply:
        """Tokens and layers; of short texts all weights too."""
        tokens, known = self._tokenize(run, place, text, target), self.reader(run).layers(place)
        T, S = len(tokens.queries), len(tokens.keys)
        small = sum(call.heads * T * S for call in known) <= SMALL
        # of a long text the page shows the first layer first
        reading = self.reading(run, place, text, target, layers=None if small else 1)
        weights = [to_numpy(maps.whole_map(call)) for call in reading.layers] if small else []
        meta = {
            "queries": tokens.queries,
            "keys": tokens.keys,
            "predicted": tokens.predicted,
            "target": tokens.target,
            "layers": [_layer_facts(call, T, S) for call in known],
            "small": small,
            "cut": tokens.cut,
            "longest": S,
        }
        return Reply(meta, {f"layer{number}": part for number, part in enumerate(weights)})

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
        call = self._call(self.reading(run, place, text, target, layer + 1), layer, head)
        tile = maps.tile(call, level, row, column, head)
        arrays = {"largest": tile.largest} | ({} if level == 0 else {"mean": tile.mean})
        return Reply({"scale": tile.scale, "signed": tile.signed}, arrays)

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
        call = self._call(self.reading(run, place, text, target, layer + 1), layer)
        last = _check_query(call, first, count)
        if (last - first) * call.columns * call.heads > 4 * SMALL:
            raise ValueError(
                f"{last - first} rows of {call.columns} weights and {call.heads} heads are too many: ask for fewer rows"
            )
        return Reply({"first": first}, {"weights": to_numpy(maps.rows(call, range(first, last)))})

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
        """The keys with the largest weights of each query, of all heads."""
        call = self._call(self.reading(run, place, text, target, layer + 1), layer)
        last = _check_query(call, first, count)
        best = maps.rows(call, range(first, last)).topk(min(most, call.columns))
        keys = best.indices.to(torch.int32).cpu().numpy()
        return Reply({"first": first}, {"keys": keys, "weights": to_numpy(best.values)})

    def _call(self, reading: Reading, layer: int, head: int | None = None) -> Call:
        if layer >= len(reading.layers):
            raise ValueError(f"there is no layer {layer}: there are {len(reading.layers)}, counted from 0")
        if head is not None and head >= reading.layers[layer].heads:
            raise ValueError(f"there is no head {head}: there are {reading.layers[layer].heads}, counted from 0")
        return reading.layers[layer]

    # translation

    def translate(
        self,
        run: Name,
        text: Text,
        beam: Annotated[int, whole(1, 12)],
        emit: Callable[[dict[str, Any]], None],
        is_cancelled: IsCancelled | None = None,
    ) -> dict[str, Any]:
        """Tells each step of the search to `emit`, until it is cancelled. Returns the hypotheses."""
        with self.lock, cancellable(is_cancelled):
            subject = self.reader(run)
            if subject.task != "translate":
                raise ValueError(f"{run} does not translate: choose another run")
            translator = subject.translator
            ids = translator.encode(text)
            if not ids or not text.strip():
                raise ValueError("there is nothing to translate yet: type a sentence")
            cut, ids = len(ids) > translator.longest, ids[: translator.longest]
            source = [*ids, translator.source.eos]
            emit({"source": translator.source_names(source, text), "cut": cut, "longest": translator.longest})
            # where each beam stands in the tree: its step and its number there
            nodes: dict[tuple[int, ...], list[int]] = {}
            steps = 0

            def on_step(beams: list[Beam]) -> None:
                nonlocal steps
                names = translator.target_names([beam.token for beam in beams], text)
                best = max(range(len(beams)), key=lambda i: beams[i].logprob)
                # each link reads the whole path again: only while that is quick
                near = len(beams[best].path) <= LINKED
                link, weight = _link(subject, source, beams[best].path) if near else (None, None)
                listed = [
                    {"parent": beam.parent, "token": name, "logprob": beam.logprob}
                    for beam, name in zip(beams, names, strict=True)
                ]
                emit({"step": steps, "beams": listed, "link": link, "weight": weight})
                nodes.update({beam.path: [steps, i] for i, beam in enumerate(beams)})
                steps += 1

            hypotheses = watch(translator, ids, beam, on_step)
            return {
                "hypotheses": [
                    {
                        "text": translator.text(one.ids, translator.mark(text)),
                        "score": one.score,
                        "logprob": one.logprob,
                        "finished": one.finished,
                        "place": nodes.get(tuple(one.ids)),
                    }
                    for one in hypotheses
                ]
            }

    # classification

    def results(
        self,
        run: Name,
        first: Annotated[int, whole(0, EXAMINED)] = 0,
        count: Annotated[int, whole(1, EXAMINED)] = EXAMINED,
    ) -> Reply:
        """What a classifier answers to some of its validation texts."""
        subject = self.reader(run)
        if subject.classifier is None:
            raise ValueError(f"{run} does not classify: choose another run")
        if not subject.labelled:
            raise ValueError(f"{run} keeps no validation texts: there are no answers to show")
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

    # images

    def upload(self, data: Upload) -> Reply:
        """Keeps an image file, given in base64, and names it by its content; also what it looks like, small."""
        try:
            raw = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise ValueError("the image is not in base64") from None
        if len(raw) > images.MOST_UPLOADED:
            raise ValueError(f"the image has {len(raw):,} bytes, at most {images.MOST_UPLOADED:,} are taken")
        small = images.decode(raw, (images.THUMB, images.THUMB), 3)
        return Reply({"image": self.keep_image(raw)}, {"pixels": np.ascontiguousarray(small.transpose(1, 2, 0))})

    def keep_image(self, raw: bytes) -> str:
        """Keeps an image file; its name, by its content."""
        name = hashlib.sha256(raw).hexdigest()[:20]
        self._images.get(name, lambda: raw, len)
        return name

    def samples(self, run: Name) -> Reply:
        """The images that a run comes with, small, and their labels."""
        return images.thumbnails(self.viewer(run))

    def see(self, run: Name, image: Image) -> Reply:
        """An image as a model sees it, its answer and its layers."""
        return images.overview(self.viewer(run), self._sight(run, image))

    def attention(self, run: Name, image: Image, layer: Index) -> Reply:
        """All weights of a layer over patches if they are few, and the windows that it cuts the image into."""
        return images.whole_layer(self._sight(run, image), layer)

    def glance(
        self,
        run: Name,
        image: Image,
        layer: Index,
        at: Token | None = None,
        side: Literal["query", "key"] = "query",
    ) -> Reply:
        """What a patch looks at, or who looks at it, of all heads; without one, the mean over all patches."""
        return images.glance(self._sight(run, image), layer, at, side)

    def rollout(self, run: Name, image: Image, layer: Index, at: Token | None = None) -> Reply:
        """Attention rollout over the layers up to one."""
        return images.rolled(self._sight(run, image), layer, at)

    def distances(self, run: Name, image: Image) -> Reply:
        """The mean distance that the attention of each head bridges, in pixels."""
        return images.distances(self._sight(run, image))

    def caption(self, run: Name, image: Image, layer: Index, text: Caption = "") -> Reply:
        """A caption of an image token by token, and where each looks; without a text, the model's own."""

        def size(found: CaptionedImage) -> int:
            return sum(weights.nbytes for weights in found.weights)

        sight, subject = self._sight(run, image), self.viewer(run)
        found = self._captions.get((run, image, text), lambda: subject.caption(sight, text), size)
        return images.written(found, layer)

    def _sight(self, run: str, image: str) -> Sight:
        subject = self.viewer(run)

        def see() -> Sight:
            if image.isdecimal() and len(image) <= 3:
                return subject.see(subject.sample(int(image)))
            if image not in self._images.kept:
                raise ValueError("this image is not here any more: choose it again")
            return subject.see(subject.decode(self._images.kept[image][0]))

        return self._sights.get((run, image), see, lambda sight: sight.size)

    # six steps

    def steps(
        self, run: Name, place: Place, text: Text, layer: Index, head: Index, query: Token, target: Text = ""
    ) -> Reply:
        """One token through one head, with the numbers of the keys it sees; of many, those with most weight."""
        reading = self.reading(run, place, text, target)
        call = self._call(reading, layer, head)
        _check_query(call, query)
        return stepping.steps(reading, maps.expect_layer(call), head, query)

    def example(self) -> Reply:
        """The worked example: scores of 112 and 96 over width 64."""
        return stepping.worked_example()

    def moves(self, run: Name, text: Text, other: Text, word: Name, layer: Index) -> Reply:
        """How far attention moves a word's vector in two sentences, and the share of each word in that."""
        subject = self.reader(run)
        stack = stepping.encoder_of(subject)
        if stack is None:
            raise ValueError(f"{run} has no encoder whose vectors could be compared: choose another run")
        sides, vectors, arrays = [], [], {}
        for number, sentence in enumerate((text, other)):
            reading = self.reading(run, "encoder", sentence, "")
            call = maps.expect_layer(self._call(reading, layer))
            if call.T > MOVED_TOKENS:
                raise ValueError(f"give sentences of at most {MOVED_TOKENS} tokens, not {call.T:,}")
            at = stepping.find_word(reading.queries, word)
            shares, moved = stepping.contributions(call, at)
            before, after = stepping.vectors(subject, stack, sentence, layer, at)
            vectors.append((before, after))
            sides.append({"tokens": reading.queries, "at": at, "moved": moved, "start": float(before.norm())})
            arrays[f"shares{number}"] = to_numpy(shares)
        cosines = [float(torch.cosine_similarity(one, two, dim=0)) for one, two in zip(*vectors, strict=True)]
        return Reply({"word": word, "sides": sides, "before": cosines[0], "after": cosines[1]}, arrays)

    # mechanisms and positions

    def pattern(
        self,
        spec: SpecText,
        role: Role,
        length: Annotated[int, whole(2, 128)],
        heads: Annotated[int, whole(1, 16)],
        seed: Annotated[int, whole(0, 9999)] = 0,
    ) -> Reply:
        """Which pairs are visible and why, measured on the layer itself."""
        with pictures.Deadline():
            return pictures.pattern(check_sizes(spec), role, length, heads, seed)

    def cost(self, spec: SpecText, role: Role) -> Reply:
        """Operations counted at several lengths, beside those of softmax."""
        with pictures.Deadline():
            return pictures.cost(check_sizes(spec), role)

    def compare(self, spec: SpecText, run: Name, text: Text, layer: Index) -> Reply:
        """Effective weights of a mechanism on a text, with the projections that a run has learned."""
        places = self.reader(run).places
        place = "encoder" if "encoder" in places else places[0]
        reading = self.reading(run, place, text, "")
        call = maps.expect_layer(self._call(reading, layer))
        with pictures.Deadline():
            return pictures.compare(check_sizes(spec), call, reading.queries)

    def position(
        self,
        spec: SpecText,
        role: Role,
        length: Annotated[int, whole(2, 256)],
        width: Annotated[int, whole(2, 512)],
        heads: Annotated[int, whole(1, 16)],
        run: Name | None = None,
    ) -> Reply:
        """Tables and distances of a position scheme, as a run has learned them if it has that scheme."""
        trained = None if run is None else pictures.trained_position(self.subject(run).model, spec, role)
        with pictures.Deadline():
            return pictures.position(check_sizes(spec, "position"), role, length, width, heads, trained)


def _check_query(call: Call, first: int, count: int = 1) -> int:
    """The end of `count` queries from `first` on, at most that of the text."""
    if first >= call.T:
        raise ValueError(f"there is no token {first}: the text has {call.T}, counted from 0")
    return min(first + count, call.T)


@torch.no_grad()
def _link(subject: Subject, source: list[int], path: tuple[int, ...]) -> tuple[int, float]:
    """The source token that the newest target token came from, and its weight: as the aligner says if there is one,
    otherwise by the attention that predicted it."""
    if not isinstance(subject.model, HasMaps):
        raise TypeError(f"a translator needs a model with a method maps(), got {type(subject.model).__name__}")
    device = subject.translator.device
    ids, target = torch.tensor([source], device=device), [subject.translator.target.bos, *path]
    if "aligner" in subject.places:
        (weights,) = subject.model.maps(ids, torch.tensor([target], device=device), place="aligner")
        row = weights[0, 0, -2]  # of the token before it
    else:
        layers = subject.model.maps(ids, torch.tensor([target[:-1]], device=device))
        row = layers[max(len(layers) - 2, 0)][0, :, -1].mean(0)[: len(source)]
    return int(row.argmax()), float(row.max())


def _layer_facts(call: Call, T: int, S: int) -> dict[str, Any]:
    """What the page must know about a layer to draw its map of T x S tokens."""
    facts: dict[str, Any] = {
        "spec": call.name,
        "heads": call.heads,
        "tiles": [[*maps.tile_shape(call, level)] for level in range(maps.LEVELS)],
    }
    if not isinstance(call, maps.LayerCall):
        return facts | {"signed": False, "slots": False, "causal": False, "zeros_are_hidden": False, "columns": S}
    layer = call.layer
    return facts | {
        "signed": layer.facts.signed,
        "slots": layer.facts.columns == "slots",
        "causal": layer.shape.role == "causal",
        "zeros_are_hidden": maps.zeros_are_hidden(layer),
        "columns": maps.count_columns(layer, T, S),
    }


def _has_pieces(subject: Subject) -> bool:
    """Whether tokens are pieces of words that mark where a word begins, and not words or characters."""
    names = subject.names(subject.encode("the cat and the dog in the house"))
    return any(len(name) > 1 and name[0] in "▁Ġ" for name in names)
