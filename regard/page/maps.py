"""Any part of the map of any attention, at 4,096 tokens too, without a map of N x N numbers ever being held.

`record` has a model read and keeps what each attention layer was given. From that, rows and columns of its map are
computed when somebody looks at them. What a layer carries of values, o = map values (`Attention.apply_map`), is linear
in them:

- columns are what it carries of unit vectors;
- rows are the transpose of that, D a pass: the gradient of sum_d o[i_d, d] by the values holds row i_d in channel d;
- of mechanisms whose queries read alone, only the queries that are asked about are read for it, and of those that
  write their logits, such as softmax, the rows are the formula itself.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.numeric import masked_softmax
from regard.core.rows import Mask, Memory, Rows
from regard.layers.attention.base import Attention
from regard.layers.attention.cached import Scored
from regard.layers.attention.heads import MixedHeads
from regard.layers.attention.softmax import Softmax
from regard.models.aligner import Aligner

NARROWEST, NARROW, WIDE = 16, 64, 512  # cells of a tile, narrow across what a layer computes one by one
LEVELS = 5  # of zoom: from a cell a pair to a cell 16 x 16, by which all of 8,192 tokens are seen
HELD = 1024  # rows or columns of the map of one head that are held at a time, or as many of several together
STRIPS = 8 << 20  # bytes of pictures kept beside what a layer was given


@dataclass(frozen=True)
class Given:
    """An attention layer and what it was given: one text, no padding."""

    layer: Attention
    x: Tensor  # [1, T, E]
    rows: Rows
    memory: Memory | None
    stream: Tensor | None
    strips: "Cache" = field(default_factory=lambda: Cache(STRIPS), compare=False)

    @cached_property
    def read(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The projected queries and sources, by name."""
        with torch.no_grad():
            return self.layer.project_inputs(self.x, self.rows, self.memory)

    @property
    def name(self) -> str:
        return self.layer.facts.name

    @property
    def heads(self) -> int:
        return self.layer.shape.heads

    @property
    def T(self) -> int:
        return self.x.shape[1]

    @property
    def S(self) -> int:
        return self.x.shape[1] if self.memory is None else self.memory.x.shape[1]

    @cached_property
    def slots(self) -> int:
        """The columns of the map."""
        return slots(self.layer, self.T, self.S)


@dataclass(frozen=True)
class Linked(Given):
    """The aligner of a translator and what it was given. It has one map, over no more than the translator reads, so
    that is taken whole."""

    layer: Aligner
    others: tuple[Tensor, ...] = ()  # ids of source and target, embedding and output of the translator

    name, heads = "aligner", 1

    @property
    def slots(self) -> int:
        return self.S


class Enough(Exception):
    """Ends a pass when the layers asked for have been reached."""


class LayerInputs:
    """A recorder of models: keeps what each layer is given in place of its map, and ends the pass at layer `most`."""

    def __init__(self, most: int | None = None):
        self.most = most
        self.layers: list[Given] = []

    def __call__(
        self,
        layer: Attention | Aligner,
        x: Tensor,
        rows: Rows | None = None,
        *others: Any,
        state: Any = None,
        memory: Memory | None = None,
        stream: Tensor | None = None,
    ) -> None:
        if isinstance(layer, Aligner):
            memory, *others = others
            given: Given = Linked(layer, x, rows, memory, None, others=tuple(others))
        else:
            given = Given(layer, x, rows or Rows.full(x), memory, stream)
        self.layers.append(given)
        if len(self.layers) == self.most:
            raise Enough


def record(read: Callable[[LayerInputs], Any], most: int | None = None) -> list[Given]:
    """What each layer is given while `read(recorder)` has a model read, up to layer `most`: what comes behind it is
    not computed."""
    recorder = LayerInputs(most)
    with suppress(Enough):
        read(recorder)
    return recorder.layers


def whole(given: Given) -> Tensor:
    """The map as the library gives it, [H, T, S]."""
    with torch.no_grad():
        if isinstance(given, Linked):
            return given.layer.map(given.x, given.rows, given.memory, *given.others)[0]
        return given.layer.map(given.x, given.rows, memory=given.memory, stream=given.stream)[0]


def rows(given: Given, queries: Sequence[int]) -> Tensor:
    """Rows of the map, [H, n, S]."""
    if isinstance(given, Linked):
        return whole(given)[:, list(queries)]
    if isinstance(given.layer, MixedHeads):
        return torch.cat([rows(replace(given, layer=part), queries) for part in given.layer.parts])
    if not by_rows(given):
        return _transposed(given, queries, lambda values: _carried(given, values))
    quick = isinstance(given.layer, Softmax | Scored)
    most = given.layer.piece if quick else given.layer.shape.head_width
    some = [_formula(given, *run) if quick else _transposed_alone(given, *run) for run in _runs(queries, most)]
    return torch.cat(some, 1)


def columns(given: Given, first: int, last: int) -> Tensor:
    """Columns first to last - 1 of the map, [H, T, last - first]."""
    with torch.no_grad():
        unit = given.x.new_zeros(1, 1, given.slots, last - first)
        unit[0, 0, first:last].fill_diagonal_(1)
        return _carried(given, unit)


def _carried(given: Given, values: Tensor) -> Tensor:
    """[1, 1 or H, S, n] -> [H, T, n]"""
    return given.layer.apply_map(values, given.x, given.rows, memory=given.memory, stream=given.stream)[0]


def _some(given: Given, first: int, last: int) -> tuple[Mask, dict[str, Tensor], dict[str, Tensor]]:
    """What queries first to last - 1 read: the mask, the queries and the sources by name."""
    role, zero = given.layer.shape.role, given.rows.start
    queries, source = given.read
    at = 0 if role == "cross" else first
    mask = Mask(zero + at, zero, zero + given.S, last - first, given.S, role == "causal", full=True, shift=at)
    return mask, {name: part[:, :, first:last] for name, part in queries.items()}, source


@torch.no_grad()
def _formula(given: Given, first: int, last: int) -> Tensor:
    """Softmax of the logits, with the position scheme put in."""
    layer, (mask, query, source) = given.layer, _some(given, first, last)
    times = layer.shape.heads // layer.shape.kv_heads
    keys = {name: source[name].repeat_interleave(times, 1) for name in layer.kinds("key")}
    keys |= {name: source[name] for name in layer.kinds("gate")}
    kind = None if layer.position is None else layer.position.facts.kind
    if isinstance(layer, Scored):
        logits = layer.score(mask, **query, **keys)
    elif kind == "content":
        logits = layer.position.scores(query["q"], keys["k"], mask, layer.scale)
    else:
        logits = (query["q"] * layer.scale) @ keys["k"].mT
    if kind == "bias":
        logits = logits + layer.position.biases(mask)
    return masked_softmax(logits, mask.dense())[0]


def _transposed_alone(given: Given, first: int, last: int) -> Tensor:
    layer, (mask, query, source) = given.layer, _some(given, first, last)
    names = layer.kinds("value")

    def attended(v: Tensor) -> Tensor:
        return layer.attend(mask, **query, **layer.repeated(source | dict.fromkeys(names, v)))

    return _transposed(given, range(last - first), lambda values: layer.in_widths(values, attended)[0])


def _transposed(given: Given, queries: Sequence[int], apply: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows [H, n, S] of a map, of which `apply_map` is the product with values."""
    D, found = given.layer.shape.head_width, []
    with torch.enable_grad():
        values = given.x.new_zeros(1, given.heads, given.slots, min(D, len(queries)), requires_grad=True)
        o = apply(values)
        for start in range(0, len(queries), D):
            some = torch.tensor(queries[start : start + D], device=o.device)
            asked = o[:, some, torch.arange(len(some), device=o.device)].sum()
            (gradient,) = torch.autograd.grad(asked, values, retain_graph=start + D < len(queries))
            found.append(gradient[0, ..., : len(some)].mT)
    return torch.cat(found, 1)


def _runs(queries: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """(first, last) of each unbroken run of rising numbers, at most so long."""
    first = last = queries[0]
    for query in queries[1:]:
        if query != last + 1 or query - first == most:
            yield first, last + 1
            first = query
        last = query
    yield first, last + 1


def part(given: Given, head: int) -> tuple[Given, int]:
    """The layer that a head belongs to, and its number there: of heads(...), one of the parts."""
    for layer in given.layer.parts if isinstance(given.layer, MixedHeads) else ():
        if head < layer.shape.heads:
            return part(replace(given, layer=layer), head)
        head -= layer.shape.heads
    return given, head


def by_rows(given: Given) -> bool:
    """Whether a part of the map is cheaper by its rows than by its columns."""
    parts = given.layer.parts if isinstance(given.layer, MixedHeads) else [given.layer]
    return isinstance(given, Linked) or all(getattr(part, "independent_queries", False) for part in parts)


def slots(layer: Attention, T: int, S: int) -> int:
    """The columns of a map of T queries over S tokens."""
    if layer.facts.columns == "tokens":
        return S
    weight = next(layer.parameters())
    x = weight.new_zeros(1, T, layer.shape.width)
    memory = Memory(weight.new_zeros(1, S, layer.shape.memory_width), None) if layer.shape.role == "cross" else None
    with torch.no_grad():
        return layer.slots(x, Rows.full(x), memory=memory).shape[2]


# tiles


class Tile(NamedTuple):
    """A piece of the map at a zoom level: a cell is 2^level x 2^level pairs, of which it holds the largest and the mean
    weight. Numbers are coded as sign(w) sqrt(|w| / scale) in 8 bits, which keeps small weights apart."""

    largest: np.ndarray  # int8 or uint8 [H, rows, columns]
    mean: np.ndarray
    scale: float
    signed: bool


def farthest(T: int, S: int) -> int:
    """The level from which all of a map is seen."""
    return max(0, (max(T, S) - 1).bit_length() - (WIDE - 1).bit_length())


def tile_shape(given: Given, level: int) -> tuple[int, int]:
    """The rows and columns of cells of a tile: few of those that a layer computes one by one, and from afar, where a
    cell is many of them, fewer."""
    if by_rows(given):
        return NARROW, WIDE
    return WIDE, max(NARROW >> level, NARROWEST)


def tile(given: Given, level: int, row: int, column: int, head: int | None = None) -> Tile:
    """Tile (row, column) of a level, of one head or of all."""
    if level > farthest(given.T, given.slots):
        raise ValueError(f"there is no level {level} of a map of {given.T} x {given.slots}: all is seen before")
    span = 1 << level
    down, across = tile_shape(given, level)
    first, last = row * down * span, min((row + 1) * down * span, given.T)
    left, right = column * across * span, min((column + 1) * across * span, given.slots)
    if first >= last or left >= right:
        raise ValueError(f"there is no tile {row}, {column} at level {level} of a map of {given.T} x {given.slots}")
    some = slice(None) if head is None else slice(head, head + 1)
    # a power of two, so that it holds whole cells
    size = max(span, 1 << (HELD // given.heads).bit_length() - 1)
    if by_rows(given):

        def pooled(start: int) -> tuple[Tensor, Tensor]:
            return _pooled(rows(given, range(start, min(start + size, last)))[some, :, left:right], span)

        return _coded(*_joined([pooled(start) for start in range(first, last, size)], 1))

    def strip() -> Tile:
        pools = [_pooled(columns(given, at, min(at + size, right)), span) for at in range(left, right, size)]
        return _coded(*_joined(pools, 2))

    # columns come with all their rows: the tiles below and above are made with this one
    made = given.strips.get((level, column), strip, lambda made: made.largest.nbytes + made.mean.nbytes)
    part = slice(row * down, (row + 1) * down)
    return made._replace(largest=made.largest[some, part], mean=made.mean[some, part])


def _joined(pools: list[tuple[Tensor, Tensor]], dim: int) -> list[Tensor]:
    return [torch.cat(parts, dim) for parts in zip(*pools, strict=True)]


def _pooled(part: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """[H, t, s] -> the number of largest size and the mean of each span x span, the last ones of what there is."""
    if span == 1:
        return part, part
    high, low = F.max_pool2d(part, span, ceil_mode=True), -F.max_pool2d(-part, span, ceil_mode=True)
    return torch.where(-low > high, low, high), F.avg_pool2d(part, span, ceil_mode=True)


def _coded(largest: Tensor, mean: Tensor) -> Tile:
    scale = float(largest.abs().max()) or 1.0
    signed = bool((largest < 0).any() or (mean < 0).any())
    top = 127 if signed else 255

    def codes(part: Tensor) -> np.ndarray:
        numbers = part.sign() * (part.abs() / scale).sqrt() * top
        return numbers.round().to(torch.int8 if signed else torch.uint8).cpu().numpy()

    return Tile(codes(largest), codes(mean), scale, signed)


class Cache:
    """The latest results, up to a number of bytes."""

    def __init__(self, most: int):
        self.most, self.size = most, 0
        self.kept: OrderedDict[Any, tuple[Any, int]] = OrderedDict()

    def get(self, key: Any, make: Callable[[], Any], size: Callable[[Any], int]) -> Any:
        if key in self.kept:
            self.kept.move_to_end(key)
            return self.kept[key][0]
        made = make()
        bytes = size(made)
        self.kept[key] = made, bytes
        self.size += bytes
        # the newest stays, however large it is
        while self.size > self.most and len(self.kept) > 1:
            self.size -= self.kept.popitem(last=False)[1][1]
        return made
