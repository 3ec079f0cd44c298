"""Any part of the map of any attention, at 4,096 tokens too, without a map of N x N numbers ever being held.

`record` runs a model and keeps what each attention layer was given. From that, rows and columns of its map are computed
when somebody looks at them:

- rows of softmax and of mechanisms that write their logits: the formula itself, for those queries only;
- columns of everything else that is linear in its values: attend with unit vectors as values, D columns a pass;
- rows of the same: the transpose of that, D rows a pass. The output is linear in the values, so the gradient of
  sum_d o[i_d, d] by the values holds row i_d of the map in channel d;
- what mixes its own map (`facts.linear` is False, or no heads): the whole map, and only of short texts.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.base import Attention, Heads, Mask, Memory, Rows, Scored, masked_softmax
from regard.attention.heads import MixedHeads
from regard.attention.softmax import Softmax

WHOLE = 1024  # tokens up to which a map may be taken whole
TILE_ROWS, TILE_COLUMNS = 64, 512  # cells of a tile


@dataclass(frozen=True)
class Given:
    """An attention layer and what it was given: one text, no padding."""

    layer: Attention
    x: Tensor  # [1, T, E]
    rows: Rows
    memory: Memory | None
    stream: Tensor | None
    strips: dict[tuple[int, int], "Tile"] = field(default_factory=dict, compare=False)  # the last one taken

    @cached_property
    def read(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The projected queries and sources, by name."""
        with torch.no_grad():
            return self.layer.read(self.x, self.rows, self.memory)

    @property
    def heads(self) -> int:
        return self.layer.shape.heads

    @property
    def T(self) -> int:
        return self.x.shape[1]

    @property
    def S(self) -> int:
        return self.x.shape[1] if self.memory is None else self.memory.x.shape[1]


class Enough(Exception):
    """Ends a model's run when the layers wanted have been reached."""


@contextmanager
def record(model: nn.Module, most: int | None = None) -> Iterator[list[Given]]:
    """Inside, each map that the model takes of a layer is not computed: what the layer was given is kept instead. The
    run ends at layer `most`: what comes behind it is not computed."""
    found: list[Given] = []
    layers = [part for part in model.modules() if isinstance(part, Attention)]

    def keep(layer: Attention) -> Callable[..., Tensor]:
        def map(x, rows=None, *, state=None, memory=None, stream=None) -> Tensor:
            found.append(Given(layer, x, rows or Rows.full(x), memory, stream))
            if len(found) == most:
                raise Enough
            return x.new_zeros(1, 1, 1, 1)

        return map

    for layer in layers:
        layer.map = keep(layer)
    try:
        yield found
    except Enough:
        pass
    finally:
        for layer in layers:
            del layer.map


def whole(given: Given) -> Tensor:
    """The map as the library gives it, [H, T, S]."""
    with torch.no_grad():
        maps = given.layer.map(given.x, given.rows, memory=given.memory, stream=given.stream)
    return maps[0]


def rows(given: Given, queries: Sequence[int]) -> Tensor:
    """Rows of the map, [H, n, S]."""
    layer = given.layer
    if isinstance(layer, MixedHeads):
        return torch.cat([rows(replace(given, layer=part), queries) for part in layer.parts])
    if _direct(layer):
        return _direct_rows(given, queries)
    if not _probed(layer):
        _check_whole(given)
        return whole(given)[:, list(queries)]
    return _transposed_rows(given, list(queries))


def columns(given: Given, first: int, last: int) -> Tensor:
    """Columns first to last - 1 of the map, [H, T, last - first]."""
    layer = given.layer
    if isinstance(layer, MixedHeads):
        return torch.cat([columns(replace(given, layer=part), first, last) for part in layer.parts])
    if _direct(layer):
        return _direct_rows(given, range(given.T))[..., first:last]
    if not _probed(layer):
        _check_whole(given)
        return whole(given)[..., first:last]
    with torch.no_grad():
        query, source = given.read
        at = torch.arange(given.S, device=given.x.device)[None]
        values = layer.kinds("value")
        # a position scheme may add to the values
        silent = source | {name: torch.zeros_like(source[name]) for name in values}
        nothing = layer.mix(given.rows, query, silent, None, given.memory)[0]
        parts = []
        for start in range(first, last, layer.shape.head_width):
            probe = source | {name: layer.unit(at, start, 1) for name in values}
            part = layer.mix(given.rows, query, probe, None, given.memory)[0] - nothing
            parts.append(part[0, ..., : last - start])
    return torch.cat(parts, -1)


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
    return all(map(_direct, parts))


def slots(given: Given) -> int:
    """The columns of the map; where they are no tokens, only the map itself knows how many."""
    return given.S if given.layer.facts.columns == "tokens" else whole(given).shape[2]


def limit(layers: Sequence[Attention]) -> int | None:
    """The most tokens that can be shown of these layers, None where only patience ends it."""
    leaves = [leaf for layer in layers for leaf in (layer.parts if isinstance(layer, MixedHeads) else [layer])]
    quick = all(_direct(leaf) or (_probed(leaf) and leaf.facts.time.exponent < 2) for leaf in leaves)
    return None if quick else WHOLE


def _direct(layer: Attention) -> bool:
    return isinstance(layer, Softmax | Scored)


def _probed(layer: Attention) -> bool:
    # some mechanisms with heads take their map their own way, and that is the one to show
    return isinstance(layer, Heads) and type(layer).map is Heads.map and layer.facts.columns == "tokens"


def _check_whole(given: Given) -> None:
    if max(given.T, given.S) > WHOLE:
        raise ValueError(
            f"the map of attention {given.layer.facts.name!r} can only be taken whole: "
            f"give it at most {WHOLE:,} tokens, not {max(given.T, given.S):,}"
        )


def _direct_rows(given: Given, queries: Sequence[int]) -> Tensor:
    layer = given.layer
    with torch.no_grad():
        query, source = given.read
        source = {name: source[name] for name in layer.kinds("key", "gate")}
        times = layer.shape.heads // layer.shape.kv_heads
        source = {n: p.repeat_interleave(times, 1) if p.dim() == 4 and times > 1 else p for n, p in source.items()}
        zero, parts = given.rows.start, []
        for first, last in _runs(queries):
            T, S = last - first, given.S
            causal = layer.shape.role == "causal"
            end = torch.full_like(zero, S)
            mask = Mask(zero + first, zero, end, T, S, causal, True, None if layer.shape.role == "cross" else first)
            q = {name: part[:, :, first:last] for name, part in query.items()}
            kind = None if layer.position is None else layer.position.facts.kind
            if isinstance(layer, Scored):
                logits = layer.score(mask, **q, **source)
            elif kind == "content":
                logits = layer.position.scores(q["q"], source["k"], mask, layer.scale)
            else:
                logits = (q["q"] * layer.scale) @ source["k"].mT
            if kind == "bias":
                logits = logits + layer.position.biases(mask)
            parts.append(masked_softmax(logits, mask.dense())[0])
    return torch.cat(parts, 1)


def _runs(queries: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, last) of each unbroken run of rising numbers."""
    first = last = queries[0]
    for query in queries[1:]:
        if query != last + 1:
            yield first, last + 1
            first = query
        last = query
    yield first, last + 1


def _transposed_rows(given: Given, queries: list[int]) -> Tensor:
    layer, D = given.layer, given.layer.shape.head_width
    times = layer.shape.heads // layer.shape.kv_heads
    query, source = given.read
    names = layer.kinds("value")
    values = [source[name].detach().requires_grad_() for name in names]
    with torch.enable_grad():
        o = layer.mix(given.rows, query, source | dict(zip(names, values, strict=True)), None, given.memory)[0][0]
    found = given.x.new_zeros(layer.shape.heads, len(queries), given.S)
    for start in range(0, len(queries), D):
        some = torch.tensor(queries[start : start + D])
        channels = torch.arange(len(some))
        # heads that share values are told apart by asking one of each group at a time
        for member in range(times):
            asked = o[member::times, some, channels].sum()
            grads = torch.autograd.grad(asked, values, retain_graph=True, allow_unused=True)
            total = sum(grad[0] for grad in grads if grad is not None)  # [G, S, D]
            found[member::times, start : start + len(some)] = total[..., : len(some)].transpose(1, 2)
    return found


# tiles


class Tile(NamedTuple):
    """A piece of the map at a zoom level: a cell is 2^level x 2^level pairs, of which it holds the largest and the mean
    weight. Numbers are coded as sign(w) sqrt(|w| / scale) in 8 bits, which keeps small weights apart."""

    largest: np.ndarray  # int8 or uint8 [H, rows, columns]
    mean: np.ndarray
    scale: float
    signed: bool


def tile(given: Given, level: int, row: int, column: int, head: int | None = None) -> Tile:
    """Tile (row, column) of a level, of one head or of all."""
    span = 1 << level
    first, last = row * TILE_ROWS * span, min((row + 1) * TILE_ROWS * span, given.T)
    left, right = column * TILE_COLUMNS * span, min((column + 1) * TILE_COLUMNS * span, given.S)
    if first >= last or left >= right:
        raise ValueError(f"there is no tile {row}, {column} at level {level} of a map of {given.T} x {given.S}")
    some = slice(None) if head is None else slice(head, head + 1)
    # a few rows or columns at a time: what is held of the map is this many
    size, pools = max(span, 256), []
    if not by_rows(given):
        # columns come with all their rows: the other tiles below and above are made with this one
        if (level, column) not in given.strips:
            for start in range(left, right, size):
                pools.append(_pooled(columns(given, start, min(start + size, right)), span))
            given.strips.clear()
            given.strips[level, column] = _coded(*(torch.cat(parts, 2) for parts in zip(*pools, strict=True)))
        strip = given.strips[level, column]
        part = slice(row * TILE_ROWS, (row + 1) * TILE_ROWS)
        return strip._replace(largest=strip.largest[some, part], mean=strip.mean[some, part])
    for start in range(first, last, size):
        part = rows(given, range(start, min(start + size, last)))[some, :, left:right]
        pools.append(_pooled(part, span))
    return _coded(*(torch.cat(parts, 1) for parts in zip(*pools, strict=True)))


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
