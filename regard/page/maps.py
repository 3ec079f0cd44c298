"""Any part of the map of any attention layer, also at 4,096 tokens, without ever holding a map of N x N numbers.

`record_calls` lets a model read a text and keeps the inputs of each attention layer. From these, rows and columns of
its map are computed when somebody looks at them. The output of a layer, o = map values (`Attention.apply_map`), is
linear in the values:

- columns of the map are the outputs of unit vectors;
- rows are their transpose, D per pass: the gradient of sum_d o[i_d, d] by the values holds row i_d in channel d;
- mechanisms whose queries are independent read only the queries in question, and those that write their logits, such
  as softmax, have their rows computed by the formula itself.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.numeric import masked_softmax
from regard.core.rows import Mask, Memory, Rows
from regard.layers.attention.attending import Attending
from regard.layers.attention.base import Attention
from regard.layers.attention.cached import Scored
from regard.layers.attention.heads import MixedHeads
from regard.layers.attention.projected import Projected
from regard.layers.attention.softmax import Softmax
from regard.models.aligner import Aligner

NARROWEST, NARROW, WIDE = 16, 64, 512  # cells of a tile; narrow along the axis that a layer computes one by one
LEVELS = 5  # zoom levels: from a cell per pair to a cell per 16 x 16 pairs, which shows 8,192 tokens at once
HELD = 1024  # rows or columns that are held at a time, counted over all heads
STRIP_BYTES = 8 << 20  # of finished tiles, kept with each call

Value = TypeVar("Value")


class Cache(Generic[Value]):
    """The latest results, up to a number of bytes."""

    def __init__(self, most: int):
        self.most, self.size = most, 0
        self.kept: OrderedDict[Any, tuple[Value, int]] = OrderedDict()

    def get(self, key: Any, make: Callable[[], Value], size: Callable[[Value], int]) -> Value:
        if key in self.kept:
            self.kept.move_to_end(key)
            return self.kept[key][0]
        value = make()
        bytes = size(value)
        self.kept[key] = value, bytes
        self.size += bytes
        # the newest stays, however large it is
        while self.size > self.most and len(self.kept) > 1:
            self.size -= self.kept.popitem(last=False)[1][1]
        return value


class Tile(NamedTuple):
    """A piece of the map at a zoom level. A cell covers 2^level x 2^level pairs and holds the largest and the mean
    weight. A weight w is stored in 8 bits as sign(w) sqrt(|w| / scale), which keeps small weights apart."""

    largest: np.ndarray  # int8 or uint8 [H, rows, columns]
    mean: np.ndarray
    scale: float
    signed: bool


@dataclass(frozen=True, kw_only=True)
class Call(ABC):
    """One call of a layer that has a map: its inputs when a model read one text, without padding."""

    x: Tensor  # [1, T, E]
    rows: Rows
    strips: Cache[Tile] = field(default_factory=lambda: Cache(STRIP_BYTES), compare=False)

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the mechanism."""

    @property
    @abstractmethod
    def heads(self) -> int:
        """The number of maps, one for each head."""

    @property
    def T(self) -> int:
        return self.x.shape[1]

    @property
    @abstractmethod
    def S(self) -> int:
        """The tokens that are attended to."""

    @property
    @abstractmethod
    def columns(self) -> int:
        """The columns of the map: tokens, or slots of the mechanism."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """All inputs."""


@dataclass(frozen=True, kw_only=True)
class LayerCall(Call):
    """A call of an attention layer."""

    layer: Attention
    memory: Memory | None = None
    stream: Tensor | None = None

    @cached_property
    def projected(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The projected queries and sources, by name."""
        if not isinstance(self.layer, Projected):
            raise ValueError(f"attention {self.name!r} has no projections: only its whole map can be shown")
        with torch.no_grad():
            return self.layer.project_inputs(self.x, self.rows, self.memory)

    @property
    def name(self) -> str:
        return self.layer.facts.name

    @property
    def heads(self) -> int:
        return self.layer.shape.heads

    @property
    def S(self) -> int:
        return self.x.shape[1] if self.memory is None else self.memory.x.shape[1]

    @property
    def columns(self) -> int:
        return self._columns

    @cached_property
    def _columns(self) -> int:
        return count_columns(self.layer, self.T, self.S)

    def tensors(self) -> list[Tensor]:
        return [self.x] + ([] if self.memory is None else [self.memory.x])


@dataclass(frozen=True, kw_only=True)
class AlignerCall(Call):
    """A call of the aligner of a translator. It has one map, over no more than the translator reads, so that map is
    always computed whole."""

    aligner: Aligner
    memory: Memory
    others: tuple[Tensor, ...]  # ids of source and target, embedding and output weights of the translator

    @property
    def name(self) -> str:
        return "aligner"

    @property
    def heads(self) -> int:
        return 1

    @property
    def S(self) -> int:
        return self.memory.x.shape[1]

    @property
    def columns(self) -> int:
        return self.S

    def tensors(self) -> list[Tensor]:
        return [self.x, self.memory.x]


class LastLayer(Exception):
    """Ends a pass when the layers in question have been called."""


class CallRecorder:
    """A recorder of models: keeps the inputs of each layer instead of its map. Ends the pass after `most` layers."""

    def __init__(self, most: int | None = None):
        self.most = most
        self.calls: list[Call] = []

    def __call__(self, layer: nn.Module, *arguments: Any, **options: Any) -> None:
        if isinstance(layer, Aligner):
            x, rows, memory, *others = arguments
            self.calls.append(AlignerCall(x=x, rows=rows, aligner=layer, memory=memory, others=tuple(others)))
        elif isinstance(layer, Attention):
            x, rows, *_ = (*arguments, None)
            rows = Rows.full(x) if rows is None else rows
            memory, stream = options.get("memory"), options.get("stream")
            self.calls.append(LayerCall(x=x, rows=rows, layer=layer, memory=memory, stream=stream))
        else:
            raise TypeError(f"expected an attention layer or an aligner, got {type(layer).__name__}")
        if len(self.calls) == self.most:
            raise LastLayer


def record_calls(read: Callable[[CallRecorder], Any], most: int | None = None) -> list[Call]:
    """The calls of the first `most` layers, or of all, while `read(recorder)` lets a model read. Layers after them are
    not computed."""
    recorder = CallRecorder(most)
    with suppress(LastLayer):
        read(recorder)
    return recorder.calls


def parts_of(layer: Attention) -> list[Attention]:
    """The layers that heads(...) consists of; any other layer is its only part."""
    # a ModuleList does not say what it holds
    return cast(list[Attention], list(layer.parts)) if isinstance(layer, MixedHeads) else [layer]


def zeros_are_hidden(layer: Attention) -> bool:
    """Whether a weight of exactly zero means that the query cannot see the key; in some mechanisms visible keys may
    have it too."""
    return not any(part.facts.signed or part.facts.name == "entmax" for part in parts_of(layer))


def whole_map(call: Call) -> Tensor:
    """The map as the library gives it, [H, T, S]."""
    with torch.no_grad():
        if isinstance(call, AlignerCall):
            return call.aligner.map(call.x, call.rows, call.memory, *call.others)[0]
        call = expect_layer(call)
        return call.layer.map(call.x, call.rows, memory=call.memory, stream=call.stream)[0]


def expect_layer(call: Call) -> LayerCall:
    """The call of an attention layer; refuses one of an aligner, whose weights are not those of a mechanism."""
    if not isinstance(call, LayerCall):
        raise ValueError(f"the {call.name} is no attention layer: see its map under Heads")
    return call


def rows(call: Call, queries: Sequence[int]) -> Tensor:
    """Rows of the map, [H, n, S]."""
    if isinstance(call, AlignerCall):
        return whole_map(call)[:, list(queries)]
    call = expect_layer(call)
    if isinstance(call.layer, MixedHeads):
        return torch.cat([rows(replace(call, layer=part), queries) for part in parts_of(call.layer)])
    layer = call.layer
    if not by_rows(call) or not isinstance(layer, Attending):
        return _rows_by_gradient(call, queries, lambda values: _output_of(call, values))
    has_formula = isinstance(layer, Softmax | Scored)
    most = layer.piece if has_formula else layer.shape.head_width
    compute = _rows_by_formula if has_formula else _rows_of_queries
    return torch.cat([compute(call, layer, *run) for run in _unbroken_runs(queries, most)], 1)


def columns(call: LayerCall, first: int, last: int) -> Tensor:
    """Columns first to last - 1 of the map, [H, T, last - first]."""
    with torch.no_grad():
        unit = call.x.new_zeros(1, 1, call.columns, last - first)
        unit[0, 0, first:last].fill_diagonal_(1)
        return _output_of(call, unit)


def _output_of(call: LayerCall, values: Tensor) -> Tensor:
    """The map times values: [1, 1 or H, S, n] -> [H, T, n]"""
    return call.layer.apply_map(values, call.x, call.rows, memory=call.memory, stream=call.stream)[0]


def _inputs_of(call: LayerCall, first: int, last: int) -> tuple[Mask, dict[str, Tensor], dict[str, Tensor]]:
    """What queries first to last - 1 read: the mask, the queries and the sources by name."""
    role, zero = call.layer.shape.role, call.rows.start
    queries, source = call.projected
    shift = 0 if role == "cross" else first
    mask = Mask(zero + shift, zero, zero + call.S, last - first, call.S, role == "causal", full=True, shift=shift)
    return mask, {name: part[:, :, first:last] for name, part in queries.items()}, source


@torch.no_grad()
def _rows_by_formula(call: LayerCall, layer: Attending, first: int, last: int) -> Tensor:
    """Softmax of the logits, with the position scheme applied."""
    mask, query, source = _inputs_of(call, first, last)
    times = layer.shape.heads // layer.shape.kv_heads
    keys = {name: source[name].repeat_interleave(times, 1) for name in layer.input_names("key")}
    keys |= {name: source[name] for name in layer.input_names("gate")}
    position = layer.position
    if isinstance(layer, Scored):
        logits = layer.score(mask, **query, **keys)
    elif position is not None and position.facts.kind == "content":
        logits = position.scores(query["q"], keys["k"], mask, layer.scale)
    else:
        logits = (query["q"] * layer.scale) @ keys["k"].mT
    if position is not None and position.facts.kind == "bias":
        logits = logits + position.biases(mask)
    return masked_softmax(logits, mask.dense())[0]


def _rows_of_queries(call: LayerCall, layer: Attending, first: int, last: int) -> Tensor:
    """Rows of a mechanism whose queries are independent: only those in question are computed."""
    mask, query, source = _inputs_of(call, first, last)
    names = layer.input_names("value")

    def attended(v: Tensor) -> Tensor:
        return layer.attend(mask, **query, **layer.repeat_heads(source | dict.fromkeys(names, v)))

    return _rows_by_gradient(call, range(last - first), lambda values: layer.in_widths(values, attended)[0])


def _rows_by_gradient(call: LayerCall, queries: Sequence[int], apply: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows [H, n, S] of a map; `apply` multiplies it with values."""
    D, computed = call.layer.shape.head_width, []
    with torch.enable_grad():
        values = call.x.new_zeros(1, call.heads, call.columns, min(D, len(queries)), requires_grad=True)
        o = apply(values)
        for start in range(0, len(queries), D):
            some = torch.tensor(queries[start : start + D], device=o.device)
            total = o[:, some, torch.arange(len(some), device=o.device)].sum()
            (gradient,) = torch.autograd.grad(total, values, retain_graph=start + D < len(queries))
            computed.append(gradient[0, ..., : len(some)].mT)
    return torch.cat(computed, 1)


def _unbroken_runs(queries: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """(first, last) of each run of consecutive numbers, cut after `most` of them."""
    first = last = queries[0]
    for query in queries[1:]:
        if query != last + 1 or query - first == most:
            yield first, last + 1
            first = query
        last = query
    yield first, last + 1


def part_of_head(call: LayerCall, head: int) -> tuple[LayerCall, int]:
    """The layer that a head belongs to, and its number there: one of the parts of heads(...)."""
    if isinstance(call.layer, MixedHeads):
        for part in parts_of(call.layer):
            if head < part.shape.heads:
                return part_of_head(replace(call, layer=part), head)
            head -= part.shape.heads
    return call, head


def by_rows(call: Call) -> bool:
    """Whether a part of the map is cheaper to compute by rows than by columns."""
    if not isinstance(call, LayerCall):
        return True
    return all(isinstance(part, Attending) and part.independent_queries for part in parts_of(call.layer))


def count_columns(layer: Attention, T: int, S: int) -> int:
    """The columns of a map of T queries over S tokens."""
    if layer.facts.columns == "tokens":
        return S
    weight = next(layer.parameters())
    x = weight.new_zeros(1, T, layer.shape.width)
    memory = Memory(weight.new_zeros(1, S, layer.shape.memory_width), None) if layer.shape.role == "cross" else None
    with torch.no_grad():
        return layer.slots(x, Rows.full(x), memory=memory).shape[2]


# tiles


def farthest(T: int, S: int) -> int:
    """The level at which the whole map fits into one tile."""
    return max(0, (max(T, S) - 1).bit_length() - (WIDE - 1).bit_length())


def tile_shape(call: Call, level: int) -> tuple[int, int]:
    """The rows and columns of cells of a tile: narrow along the axis that a layer computes one by one, and narrower at
    levels where a cell covers many of them."""
    if by_rows(call):
        return NARROW, WIDE
    return WIDE, max(NARROW >> level, NARROWEST)


def tile(call: Call, level: int, row: int, column: int, head: int | None = None) -> Tile:
    """Tile (row, column) of a level, of one head or of all."""
    T, S = call.T, call.columns
    if level > farthest(T, S):
        raise ValueError(f"there is no level {level} of a map of {T} x {S}: level {farthest(T, S)} shows all of it")
    span = 1 << level
    down, across = tile_shape(call, level)
    top, bottom = row * down * span, min((row + 1) * down * span, T)
    left, right = column * across * span, min((column + 1) * across * span, S)
    if top >= bottom or left >= right:
        raise ValueError(f"there is no tile {row}, {column} at level {level} of a map of {T} x {S}")
    heads = slice(None) if head is None else slice(head, head + 1)
    # a power of two, so that it holds whole cells
    size = max(span, 1 << (HELD // call.heads).bit_length() - 1)
    if by_rows(call):

        def pool_rows(start: int) -> tuple[Tensor, Tensor]:
            return _pool(rows(call, range(start, min(start + size, bottom)))[heads, :, left:right], span)

        return _encode(*_join([pool_rows(start) for start in range(top, bottom, size)], 1))
    layer = expect_layer(call)

    def strip() -> Tile:
        pools = [_pool(columns(layer, at, min(at + size, right)), span) for at in range(left, right, size)]
        return _encode(*_join(pools, 2))

    # a column is computed with all its rows, so the tiles above and below come from the same strip
    made = call.strips.get((level, column), strip, lambda made: made.largest.nbytes + made.mean.nbytes)
    part = slice(row * down, (row + 1) * down)
    return made._replace(largest=made.largest[heads, part], mean=made.mean[heads, part])


def _join(pools: list[tuple[Tensor, Tensor]], dim: int) -> list[Tensor]:
    return [torch.cat(parts, dim) for parts in zip(*pools, strict=True)]


def _pool(part: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """[H, t, s] -> the weight of largest size and the mean of each span x span block; those at the edge are smaller."""
    if span == 1:
        return part, part
    high, low = F.max_pool2d(part, span, ceil_mode=True), -F.max_pool2d(-part, span, ceil_mode=True)
    return torch.where(-low > high, low, high), F.avg_pool2d(part, span, ceil_mode=True)


def _encode(largest: Tensor, mean: Tensor) -> Tile:
    scale = float(largest.abs().max()) or 1.0
    signed = bool((largest < 0).any() or (mean < 0).any())
    top = 127 if signed else 255

    def codes(part: Tensor) -> np.ndarray:
        numbers = part.sign() * (part.abs() / scale).sqrt() * top
        return numbers.round().to(torch.int8 if signed else torch.uint8).cpu().numpy()

    return Tile(codes(largest), codes(mean), scale, signed)
