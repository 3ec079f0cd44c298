"""Word alignments from a translator's attention.

The model reads a pair of sentences (forced decoding), and the attention from target to source is merged to words: the
sum over the tokens of a source word, the mean over those of a target word. Each target word is linked to the source
word with the largest weight. The weight on the end of the source sentence belongs to no word. It is dropped without
normalizing the others, so that a token that mostly attends to the end counts less among the tokens of its word.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, cast, get_args

import numpy as np
import torch
from torch import Tensor

from regard.core.model import Model
from regard.data import placeholders
from regard.data.batches import padded, similar
from regard.data.placeholders import Marked
from regard.data.tokenizer import Tokenizer
from regard.layers.attention.base import Attention
from regard.metrics.alignment import Links, Method, flip, format_links, symmetrise

Read = Literal["consume", "predict"]
AGREED = 0.25  # least product of the probabilities that two models give to a link


class Alignment(NamedTuple):
    """Links (source word, target word) of a pair, and the attention they were read from."""

    links: Links
    matrix: np.ndarray  # [target words, source words]
    source: list[str]
    target: list[str]

    def __str__(self) -> str:
        return format_links(self.links)


class WordMaps(NamedTuple):
    """The attention between the words of a pair in several layers."""

    maps: np.ndarray  # [layers, target words, source words]
    source: list[str]
    target: list[str]


class Agreement(NamedTuple):
    """The layer of each direction where the two agree best, and how much every pair of layers disagrees."""

    forward: int
    backward: int
    rates: np.ndarray  # [layers, layers]: error rate of one direction with the other as gold


def align(
    model: Model,
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    *,
    layer: int | Literal["average", "aligner"] | None = None,
    head: int | Literal["average"] = "average",
    read: Read = "predict",
    tokens: int = 4096,
) -> list[Alignment]:
    """Links of each pair of sentences, one per target word (none for a word that attends to no source word at all).

    layer counts from 0, or back from -1; None is the model's aligner if it has one, else the last but one. Which layer
    aligns best differs a lot between models: with a second model of the opposite direction, `choose_layers` finds it
    without gold links.

    read="predict", the default, takes the attention of the decoder step that predicts a target token, "consume" that of
    the step after it, which has the token as input and so can attend to its source (Chen et al. 2020, Accurate Word
    Alignment Induction from Neural Machine Translation). Which is better depends on the model: the decoders of three or
    four layers that were measured here attend to a word when they predict it, the deep ones of that paper at "consume".
    An aligner uses both: the state of the step that predicts, and the token that was predicted.

    tokens bounds the padded tokens of a batch.
    """
    if layer == "all":
        raise ValueError("links come from one layer or the average: give layer a number or 'average', or use read_maps")
    found = read_maps(
        model, source_tokenizer, target_tokenizer, pairs, layer=layer, head=head, read=read, tokens=tokens
    )
    return [Alignment(strongest(maps[0]), maps[0], source, target) for maps, source, target in found]


def align_both(
    forward: Sequence[WordMaps],
    backward: Sequence[WordMaps],
    *,
    layers: tuple[int, int] | None = None,
    method: Method | Literal["agreement"] = "grow-diagonal",
) -> list[Alignment]:
    """Combines the links of two models. The second translates in the opposite direction: its maps are of the flipped
    pairs. Without layers, those that agree best are used. The matrix is the mean of the two directions.

    "agreement" links two words if the geometric mean of their two weights is above one half, so a word can have several
    links (Liang, Taskar & Klein 2006, Alignment by Agreement); it is for aligners, whose maps are probabilities. The
    other methods combine two sets of links: see `symmetrise`.

    >>> forward = read_maps(english_german, english, german, pairs)
    >>> backward = read_maps(german_english, german, english, [(b, a) for a, b in pairs])
    >>> links = [alignment.links for alignment in align_both(forward, backward)]
    """
    _check_pairs(forward, backward)
    if not forward:
        return []
    one, two = choose_layers(forward, backward)[:2] if layers is None else layers
    _index("layer", one, len(forward[0].maps))
    _index("layer", two, len(backward[0].maps))
    found = []
    for ours, theirs in zip(forward, backward, strict=True):
        there, back = ours.maps[one], theirs.maps[two]
        if method == "agreement":
            links = frozenset((int(s), int(t)) for t, s in np.argwhere(there * back.T > AGREED))
        else:
            links = symmetrise(strongest(there), flip(strongest(back)), method)
        found.append(Alignment(links, (there + back.T) / 2, ours.source, ours.target))
    return found


def choose_layers(forward: Sequence[WordMaps], backward: Sequence[WordMaps]) -> Agreement:
    """The layers whose links agree best between a model and one of the opposite direction, which needs no gold links
    (Chen et al. 2020): rate = 1 - 2 |A∩B| / (|A| + |B|), the alignment error rate with B as gold. The lower of two
    rates also tells which way to `read`, or which head, suits the models."""
    _check_pairs(forward, backward)
    if not forward:
        raise ValueError("choosing layers needs pairs of sentences, got none")
    ours = [[strongest(pair.maps[layer]) for pair in forward] for layer in range(len(forward[0].maps))]
    theirs = [[flip(strongest(pair.maps[layer])) for pair in backward] for layer in range(len(backward[0].maps))]
    rates = np.array([[_disagreement(one, two) for two in theirs] for one in ours])
    one, two = np.unravel_index(rates.argmin(), rates.shape)
    return Agreement(int(one), int(two), rates)


def strongest(matrix: np.ndarray) -> Links:
    """Links each target word to the source word with the largest weight, the first of equals."""
    if matrix.size == 0:
        return frozenset()
    best = matrix.argmax(1)
    return frozenset((int(source), target) for target, source in enumerate(best) if matrix[target, source] > 0)


def read_maps(
    model: Model,
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    *,
    layer: int | Literal["average", "all", "aligner"] | None = "all",
    head: int | Literal["average"] = "average",
    read: Read = "predict",
    tokens: int = 4096,
) -> list[WordMaps]:
    """The attention between the words of each pair, of every layer or of one; arguments as in `align`."""
    _check_model(model)
    if read not in get_args(Read):
        raise ValueError(f"read must be one of {', '.join(get_args(Read))}, got {read!r}")
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    both = source_tokenizer, target_tokenizer
    sides = [
        (_Side.of(source_tokenizer, source), _Side.of(target_tokenizer, target))
        for source, target in (placeholders.mark_pair(*both, pair) for pair in pairs)
    ]
    found: dict[int, WordMaps] = {}
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for group in similar([max(map(len, (one.ids, two.ids))) + 1 for one, two in sides], tokens):
                sources, targets = zip(*(sides[index] for index in group), strict=True)
                maps = _word_maps(model, sources, targets, layer, head, read)
                for index, one, two, part in zip(group, sources, targets, maps, strict=True):
                    # a copy, since a view would keep the padded batch in memory
                    words = part[:, : len(two.words), : len(one.words)].copy()
                    if not np.isfinite(words).all():
                        raise ValueError(f"the attention of pair {index + 1} is not finite: are the weights damaged?")
                    found[index] = WordMaps(words, one.words, two.words)
    finally:
        model.train(training)
    return [found[index] for index in range(len(sides))]


def attended_words(
    model: Model,
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    pieces: Sequence[Marked],
    outputs: Sequence[Sequence[int]],
) -> list[list[str]]:
    """The source word that each token of an output attends to most, when it is predicted; "" where there is none."""
    _check_model(model)
    found: list[list[str]] = [[] for _ in outputs]
    sources = [_Side.of(source_tokenizer, piece) for piece in pieces]
    targets = [
        _Side(list(ids), list(range(len(ids))), [""] * len(ids), target_tokenizer.bos, target_tokenizer.eos)
        for ids in outputs
    ]
    with torch.inference_mode():
        sizes = [max(len(one.ids), len(two.ids)) + 1 for one, two in zip(sources, targets, strict=True)]
        for group in similar(sizes, 4096):
            sides = [sources[index] for index in group], [targets[index] for index in group]
            maps = _word_maps(model, *sides, None, "average", "predict")
            for index, part in zip(group, maps, strict=True):
                words = sources[index].words
                links = strongest(part[0, : len(outputs[index]), : len(words)])
                by_token = {token: words[word] for word, token in links}
                found[index] = [by_token.get(token, "") for token in range(len(outputs[index]))]
    return found


def has_aligner(model: Model) -> bool:
    """Whether the model has an aligner, trained beside the translation."""
    return getattr(model, "aligner", None) is not None


class _Attending(Protocol):
    """A translator that can give its attention."""

    maps: Callable[..., list[Tensor]]  # (source, target, place=, keep=, target_keep=)


class _Side(NamedTuple):
    """One sentence of a pair."""

    ids: list[int]
    owners: list[int]  # the word of each id
    words: list[str]
    bos: int
    eos: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, marked: Marked) -> "_Side":
        ids, owners = placeholders.words(tokenizer, marked)
        return cls(ids, owners, tokenizer.split_words(marked.text), tokenizer.bos, tokenizer.eos)


def _word_maps(
    model: Model,
    sources: Sequence[_Side],
    targets: Sequence[_Side],
    layer: int | Literal["average", "all", "aligner"] | None,
    head: int | Literal["average"],
    read: Read,
) -> np.ndarray:
    """[B, layers, target words, source words], padded with zeros."""
    device = next(model.parameters()).device
    source, source_keep = padded([[*side.ids, side.eos] for side in sources], device)
    target, target_keep = padded([[side.bos, *side.ids] for side in targets], device)
    keeps = {"keep": source_keep, "target_keep": target_keep}
    attending = cast(_Attending, model)  # which _check_model has made sure of
    # an aligner has one head: another head is that of a layer of the decoder
    if layer == "aligner" or (layer is None and head == "average" and has_aligner(model)):
        if not has_aligner(model):
            raise ValueError("the model has no aligner: train one with --model.aligner true, or give another layer")
        if read == "consume":
            raise ValueError("the aligner reads the step that predicts: read='consume' is for other layers")
        layers = [_head(part, head) for part in attending.maps(source, target, place="aligner", **keeps)]
    else:
        _check_columns(model)
        layers = _pick([_head(part, head) for part in attending.maps(source, target, **keeps)], layer)
    maps = torch.stack(layers, 1).float()  # [B, layers, T, S]
    # bos is the input of row 0, so that row t predicts token t and row t + 1 consumes it
    rows = _members(targets, target.shape[1], int(read == "consume")).to(device)
    columns = _members(sources, source.shape[1], 0).to(device)
    rows = rows / rows.sum(2, keepdim=True).clamp(min=1)
    return (rows[:, None] @ maps @ columns[:, None].mT).cpu().numpy()


def _members(sides: Sequence[_Side], length: int, shift: int) -> Tensor:
    """[B, words, length]: 1 if the token, moved right by `shift`, belongs to the word."""
    members = torch.zeros(len(sides), max(len(side.words) for side in sides), length)
    for row, side in zip(members, sides, strict=True):
        row[side.owners, torch.arange(len(side.ids)) + shift] = 1
    return members


def _head(maps: Tensor, head: int | Literal["average"]) -> Tensor:
    """[B, H, T, S] -> [B, T, S]"""
    return maps.mean(1) if head == "average" else maps[:, _index("head", head, maps.shape[1])]


def _pick(layers: list[Tensor], layer: int | Literal["average", "all"] | None) -> list[Tensor]:
    if layer == "all":
        return layers
    if layer == "average":
        return [torch.stack(layers).mean(0)]
    return [layers[max(len(layers) - 2, 0) if layer is None else _index("layer", layer, len(layers))]]


def _index(name: str, value: int | str, count: int) -> int:
    if not isinstance(value, int) or not -count <= value < count:
        raise ValueError(f"{name} must be a number from 0 to {count - 1} (or back from -1), got {value!r}")
    return value


def _check_model(model: Model) -> None:
    kind = model.config.kind
    if kind in ("encoder", "decoder") or not hasattr(model, "maps"):
        raise ValueError(f"word alignment needs a translator with attention, got a model of kind {kind!r}")


def _check_columns(model: Model) -> None:
    for part in model.modules():
        if isinstance(part, Attention) and part.shape.role == "cross" and part.facts.columns != "tokens":
            raise ValueError(
                f"the cross-attention {part.facts.name!r} attends to slots, not to source words: word alignment needs "
                "another one"
            )


def _check_pairs(forward: Sequence[WordMaps], backward: Sequence[WordMaps]) -> None:
    if len(forward) != len(backward):
        raise ValueError(f"both directions need the same pairs: got {len(forward)} and {len(backward)}")
    for number, (ours, theirs) in enumerate(zip(forward, backward, strict=True), 1):
        there, back = ours.maps.shape[1:], theirs.maps.shape[:0:-1]
        if there != back:
            raise ValueError(
                f"pair {number} has {there[0]} target and {there[1]} source words in one direction, {back[0]} and "
                f"{back[1]} in the other: flip the pairs for the second model"
            )


def _disagreement(ours: Sequence[Links], theirs: Sequence[Links]) -> float:
    total = sum(map(len, ours)) + sum(map(len, theirs))
    both = sum(len(one & two) for one, two in zip(ours, theirs, strict=True))
    return 1 - 2 * both / max(total, 1)
