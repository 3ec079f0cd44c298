"""The layers of an encoder or a decoder, one after the other, with the embedding before them."""

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from regard.core.rows import Memory, Rows
from regard.core.shape import Shape
from regard.core.state import Out
from regard.kernels.compiling import run_eagerly
from regard.kernels.dropout import Dropout
from regard.layers.attention.base import Attention
from regard.layers.position.base import Position
from regard.models.block import Block, BlockState, combine_outputs, gather_auxiliary, normalization
from regard.models.config import ModelConfig, Specs
from regard.models.modules import ModuleListOf
from regard.models.recording import Recording
from regard.models.reversible import Coupled, Sublayer
from regard.spec import POSITIONS, Spec, over_layers, parse

Blocks: TypeAlias = "Sequence[Block] | ModuleListOf[Block]"


class Stack(nn.Module):
    """The layers of an encoder or a decoder, with the embedding and the positions before them."""

    def __init__(
        self,
        config: ModelConfig,
        vocabulary: int,
        layers: int,
        specs: Specs | Sequence[Spec],
        cross: Specs | None,
        feedforward: Specs | Sequence[Spec] | None = None,
    ):
        """`feedforward`: None is what the config names."""
        super().__init__()
        role = "self" if cross is None and config.kind != "decoder" else "causal"
        self.embedding = nn.Embedding(vocabulary, config.width)
        nn.init.normal_(self.embedding.weight, std=config.width**-0.5)
        kind = POSITIONS.find(parse(config.position).name).facts.kind
        shape = Shape.of(width=config.width, heads=config.heads, role=role)
        self.position: Position | None = POSITIONS.build(config.position, shape) if kind == "input" else None
        own = over_layers(specs, layers)
        crosses = [None] * layers if cross is None else over_layers(cross, layers)
        feeds = over_layers(config.feedforward if feedforward is None else feedforward, layers)
        self.blocks: ModuleListOf[Block] = ModuleListOf(
            Block(config, spec, cross, role, feedforward=feed)
            for spec, cross, feed in zip(own, crosses, feeds, strict=True)
        )
        final = config.norm == "pre" if config.final_norm is None else config.final_norm
        self.norm = normalization(config) if final else nn.Identity()
        self.stream_norm = nn.Identity()
        self.embedding_norm = normalization(config) if config.normed_embedding else nn.Identity()
        self.scale = math.sqrt(config.width) if config.scaled_embedding else 1.0
        self.segments = nn.Embedding(config.segments, config.width) if config.segments else None
        if self.segments is not None:
            nn.init.normal_(self.segments.weight, std=0.02)
        # the ids of the stems of each id, 0 where there is none; whoever has the tokenizer fills it in
        self.stems: Tensor | None
        stems = torch.zeros(vocabulary, config.stems, dtype=torch.long) if config.stems else None
        self.register_buffer("stems", stems)
        self.dropout = Dropout(config.dropout)
        self.reversible = config.reversible
        link_layers(self.blocks)

    def embed(self, ids: Tensor, rows: Rows, segments: Tensor | None = None) -> Tensor:
        """[B, T] -> [B, T, E]; without `segments` all tokens belong to the first."""
        x = look_up(self.embedding, ids)
        if self.stems is not None:
            stems = self.stems[ids]
            x = x + (self.embedding(stems) * (stems > 0)[..., None]).sum(2)
        x = x * self.scale
        if self.segments is not None:
            x = x + (self.segments.weight[0] if segments is None else self.segments(segments))
        x = x if self.position is None else self.position.add(x, rows)
        return self.dropout(self.embedding_norm(x))

    def forward(
        self,
        ids: Tensor,
        rows: Rows,
        *,
        segments: Tensor | None = None,
        states: Sequence[BlockState] | None = None,
        memory: Memory | None = None,
        maps: Recording | None = None,
        outputs: list[Tensor] | None = None,
    ) -> Out:
        """`maps` and `outputs` collect those of each layer."""
        x = self.embed(ids, rows, segments)
        forward = forward_reversible if self.reversible else forward_blocks
        out = forward(self.blocks, x, rows, states=states, memory=memory, maps=maps, outputs=outputs)
        return out._replace(y=self.norm(out.y), stream=None if out.stream is None else self.stream_norm(out.stream))

    def give_stream_norm(self, reader: "Stack") -> None:
        """Adds a norm of the stream after the last layer, as `norm` is for the tokens, where `reader` reads it."""
        made, read = (any(layer.facts.stream for layer in stack.attentions()) for stack in (self, reader))
        if made and read and not isinstance(self.norm, nn.Identity):
            self.stream_norm = nn.LayerNorm(self.embedding.embedding_dim)

    def self_attentions(self) -> list[Attention]:
        """The self-attention of each layer."""
        return [block.attention for block in self.blocks if block.attention is not None]

    def attentions(self) -> list[Attention]:
        """All attention layers, in the order in which they work."""
        return [layer for block in self.blocks for layer in (block.attention, block.cross) if layer is not None]


def link_layers(*stacks: Blocks) -> None:
    """Tells each layer which it may share with, the first of its kind in its place, and whether a stream comes and is
    read. A stream runs through all layers in the order in which they work, from stack to stack; what carries one has a
    single first of its kind. A later call overrides what an earlier one said."""
    places = [
        (index, name, layer)
        for index, blocks in enumerate(stacks)
        for block in blocks
        for name, layer in (("attention", block.attention), ("cross", block.cross))
        if layer is not None
    ]
    pre = any(block.pre for blocks in stacks for block in blocks)
    streams, first = [layer.facts.stream for _, _, layer in places], {}
    for number, (index, name, layer) in enumerate(places):
        like = first.setdefault((type(layer), *(() if streams[number] else (index, name))), layer)
        layer.link_layers(None if like is layer else like, any(streams[:number]), any(streams[number + 1 :]), pre)
    feeds = [block.feedforward for blocks in stacks for block in blocks]
    for feed in feeds:
        like = next(other for other in feeds if type(other) is type(feed))
        feed.link_layers(None if like is feed else like)


def initial_states(
    blocks: Blocks, batch: int, weight: Tensor, *, memory: Memory | None = None, capacity: int | None = None
) -> tuple[BlockState, ...]:
    """The states of the blocks of a decoder before the first token, in the dtype and on the device of `weight`. A
    memory of B rows also serves a batch of k * B: beams."""
    options = {"dtype": weight.dtype, "device": weight.device}
    states, stream = [], None if memory is None else memory.stream
    for block in blocks:
        assert block.attention is not None, "layers of a decoder attend to themselves"
        repeated = None if stream is None else stream.repeat_interleave(batch // stream.shape[0], 0)
        kept, cross = block.attention.initial_state(batch, stream=repeated, capacity=capacity, **options), None
        if block.cross is not None and memory is not None:
            out = block.cross.initial_state(memory.x.shape[0], memory=memory, stream=stream, **options)
            # only the memory refines a stream: it is the same for all tokens
            cross, stream = out.state, stream if out.stream is None else out.stream
        short = None if block.short is None else block.short.initial_tail(batch, **options)
        states.append(BlockState(kept.state, cross, short))
    return tuple(states)


def forward_blocks(
    blocks: Blocks,
    x: Tensor,
    rows: Rows,
    *,
    states: Sequence[BlockState] | None = None,
    memory: Memory | None = None,
    maps: Recording | None = None,
    outputs: list[Tensor] | None = None,
) -> Out:
    """One block after the other, with the auxiliary losses added up."""
    outs: list[Out] = []
    stream = None if memory is None else memory.stream
    for block, state in zip(blocks, states or [None] * len(blocks), strict=True):
        out = block(x, rows, state=state, memory=memory, stream=stream, maps=maps)
        x, stream = out.y, out.stream
        if outputs is not None:
            outputs.append(x)
        outs.append(out)
    loss, statistics = gather_auxiliary({str(index): out for index, out in enumerate(outs)})
    return Out(x, tuple(out.state for out in outs), stream, loss, statistics)


# A compiler may compute a layer differently the second time, and both times must give the same numbers.
@run_eagerly
def forward_reversible(
    blocks: Blocks,
    x: Tensor,
    rows: Rows,
    *,
    states: Sequence[BlockState] | None = None,
    memory: Memory | None = None,
    maps: Recording | None = None,
    outputs: list[Tensor] | None = None,
) -> Out:
    """`forward_blocks` with two streams of residuals that read each other in turn, and their mean behind the last
    layer. In training each sublayer is undone and computed again in the backward pass: see `Coupled`."""
    outs: list[Out] = []
    stream = None if memory is None else memory.stream

    def sublayers(x: Tensor | None) -> list[list[Sublayer]]:
        leaf = None if memory is None or x is None else memory._replace(x=x)
        pairs = zip(blocks, states or [None] * len(blocks), strict=True)
        return [block.sublayers(rows, state=state, memory=leaf, maps=maps) for block, state in pairs]

    def collect(a: Tensor, b: Tensor, out: Out) -> None:
        if outputs is not None:
            outputs.append((a + b) / 2)
        # without what is as large as the input
        outs.append(out._replace(y=a.new_empty(0)))

    read = None if memory is None else memory.x
    if torch.is_grad_enabled() and states is None and maps is None:
        # a parameter that several layers share is passed once
        parameters = dict.fromkeys(p for block in blocks for p in block.parameters() if p.requires_grad)
        a, b, stream, loss = Coupled.apply(blocks, sublayers, collect, x, stream, read, *parameters)
        # outputs of the layers in there have no gradients, and statistics need none
        statistics = gather_auxiliary({str(index): out for index, out in enumerate(outs)})[1]
        return Out((a + b) / 2, (None,) * len(blocks), stream, loss, statistics)
    a = b = x
    for parts, state in zip(sublayers(read), states or [None] * len(blocks), strict=True):
        made: list[Out] = []
        for part in parts:
            made.append(part(b, stream))
            a, b, stream = b, a + made[-1].y, made[-1].stream
        collect(a, b, combine_outputs(b, stream, made, state))
    loss, statistics = gather_auxiliary({str(index): out for index, out in enumerate(outs)})
    return Out((a + b) / 2, tuple(out.state for out in outs), stream, loss, statistics)


def look_up(table: nn.Embedding, ids: Tensor) -> Tensor:
    """The vectors of token ids. On a CPU an id that the table does not have is refused in words, at no cost; elsewhere
    looking for one would synchronise with the device."""
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        return table(ids)
    try:
        return table(ids)
    except IndexError:
        wrong = ids[(ids < 0) | (ids >= table.num_embeddings)]
        raise ValueError(
            f"token id {int(wrong[0])} is not in the vocabulary, which has the ids 0 to {table.num_embeddings - 1}: "
            "was the text encoded by another tokenizer?"
        ) from None
