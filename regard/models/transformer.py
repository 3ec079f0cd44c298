"""The Transformer: encoder, decoder, or both, around any attention of the registry.

Padding is met once, on token ids: the real tokens of each row are moved to the left before they are embedded, so that
the layers only ever see rows that are real from the left, and what is padded costs no copy of vectors.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.model import Hidden, Model, Prediction
from regard.core.rows import Memory, Rows, pack, unpack
from regard.core.shape import Shape
from regard.core.state import Out, Progress, check_rows, take_rows
from regard.kernels.compiling import run_eagerly
from regard.kernels.dropout import Dropout
from regard.layers.attention.base import Attention
from regard.layers.attention.checks import check_form
from regard.layers.feedforward.base import Sizes
from regard.models.aligner import Aligner
from regard.models.config import ModelConfig, Specs
from regard.models.recording import Recorder, Recording, take_map
from regard.models.reversible import Coupled, Sublayer
from regard.spec import ATTENTION, FEEDFORWARD, POSITIONS, Spec, over_layers, parse, spec_list


def normalization(config: ModelConfig) -> nn.Module:
    """A norm of vectors, of the kind that the config names."""
    kinds = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
    return kinds[config.norm_kind](config.width, eps=config.norm_epsilon)


class BlockState(NamedTuple):
    """What one layer of a decoder keeps: of its own tokens, and of the memory."""

    own: Any
    cross: Any


class ModelState(NamedTuple):
    """What a decoder keeps. `select` copies rows of it all; `reorder` only those of the tokens, for beams over one
    memory."""

    blocks: tuple[BlockState, ...]
    progress: Progress

    def select(self, rows: Tensor) -> "ModelState":
        check_rows(rows, self)
        blocks = tuple(BlockState(take_rows(own, rows), take_rows(cross, rows)) for own, cross in self.blocks)
        return ModelState(blocks, take_rows(self.progress, rows))

    def reorder(self, rows: Tensor) -> "ModelState":
        check_rows(rows, self)
        blocks = tuple(BlockState(take_rows(own, rows), cross) for own, cross in self.blocks)
        return ModelState(blocks, take_rows(self.progress, rows))


class Block(nn.Module):
    """Attention, cross-attention where there is a memory, feed-forward: each around a residual. Without a spec of its
    own attention, it only reads a memory, of any length and width: what changes the length is made of it."""

    def __init__(
        self,
        config: ModelConfig,
        spec: Spec | str | None,
        cross: Spec | str | None,
        role: Literal["self", "causal"] = "self",
        memory_width: int | None = None,
        feedforward: Spec | str | None = None,
        pace: int | None = None,
    ):
        """`feedforward` None: the first that the config names. `pace`: of the memory, so many tokens are as far apart
        as two of the queries, and positions inside attention count both on one line; None: they have no common
        places."""
        super().__init__()
        sizes = {name: getattr(config, name) for name in ("width", "heads", "kv_heads", "head_width", "bias")}
        inside = POSITIONS.find(parse(config.position).name).facts.kind != "input"
        position = config.position if inside else None
        own = Shape.of(role=role, position=position, **sizes)
        placed = {} if pace is None else {"position": position, "pace": pace}
        look = Shape.of(role="cross", memory_width=memory_width, **placed, **sizes)
        self.attention = None if spec is None else ATTENTION.build(spec, own)
        self.cross = None if cross is None else ATTENTION.build(cross, look)
        feedforward = spec_list(config.feedforward)[0] if feedforward is None else feedforward
        self.feedforward = FEEDFORWARD.build(feedforward, Sizes(config.width, config.inner, role))
        sublayers = 1 + (spec is not None) + (cross is not None)
        self.norms = nn.ModuleList(normalization(config) for _ in range(sublayers))
        self.dropout = Dropout(config.dropout)
        self.pre = config.norm == "pre"

    def forward(
        self,
        x: Tensor,
        rows: Rows,
        *,
        state: BlockState | None = None,
        memory: Memory | None = None,
        stream: Tensor | None = None,
        maps: Recording | None = None,
    ) -> Out:
        """`maps` collects [B, H, T, S] of the place it names, "own" or "cross"."""
        outs = []
        for add, norm in zip(self.sublayers(rows, state=state, memory=memory, maps=maps), self.norms, strict=True):
            outs.append(add(x, stream))
            x = x + outs[-1].y if self.pre else norm(x + outs[-1].y)
            stream = outs[-1].stream
        return gathered(x, stream, outs, state)

    def sublayers(
        self,
        rows: Rows,
        *,
        state: BlockState | None = None,
        memory: Memory | None = None,
        maps: Recording | None = None,
    ) -> list[Sublayer]:
        """In order, functions of x and the stream that give what is added to x, and the stream behind it."""
        own, cross = (None, None) if state is None else state

        def attend(x: Tensor, stream: Tensor | None) -> Out:
            if maps is not None:
                maps.add("own", self.attention, x, rows, state=own, stream=stream)
            return self.attention.forward_packed(x, rows, state=own, stream=stream)

        def look(x: Tensor, stream: Tensor | None) -> Out:
            if maps is not None:
                maps.add("cross", self.cross, x, rows, memory=memory, stream=stream)
            if cross is None:
                return self.cross.forward_packed(x, rows, memory=memory, stream=stream)._replace(state=None)
            # beams of one sentence fold into the queries of its memory
            folded = x.reshape(len(cross.count), -1, x.shape[2])
            return Out(self.cross.forward_packed(folded, Rows.full(folded), state=cross).y.reshape(x.shape))

        def feed(x: Tensor, stream: Tensor | None) -> Out:
            return self.feedforward.forward_packed(x, rows)

        def adding(sublayer: Sublayer, norm: nn.Module) -> Sublayer:
            def add(x: Tensor, stream: Tensor | None) -> Out:
                out = sublayer(norm(x) if self.pre else x, stream)
                # a layer without a stream of its own lets it pass
                return out._replace(y=self.dropout(out.y), stream=stream if out.stream is None else out.stream)

            return add

        found = [attend] if self.attention is not None else []
        found += [feed] if self.cross is None else [look, feed]
        return [adding(*pair) for pair in zip(found, self.norms, strict=True)]


def gathered(x: Tensor, stream: Tensor | None, outs: list[Out], state: BlockState | None) -> Out:
    """What a layer gives, of what its sublayers gave."""
    losses = [out.auxiliary_loss for out in outs if out.auxiliary_loss is not None]
    own = state and state._replace(own=outs[0].state)
    return Out(x, own, stream, sum(losses) if losses else None, outs[-1].statistics)


class Stack(nn.Module):
    """The layers of an encoder or a decoder, with the embedding and the positions before them."""

    def __init__(
        self,
        config: ModelConfig,
        vocabulary: int,
        layers: int,
        specs: Specs,
        cross: Specs | None,
        feedforward: Specs | None = None,
    ):
        """`feedforward` None: as the config says."""
        super().__init__()
        role = "self" if cross is None and config.kind != "decoder" else "causal"
        self.embedding = nn.Embedding(vocabulary, config.width)
        nn.init.normal_(self.embedding.weight, std=config.width**-0.5)
        kind = POSITIONS.find(parse(config.position).name).facts.kind
        shape = Shape.of(width=config.width, heads=config.heads, role=role)
        self.position = POSITIONS.build(config.position, shape) if kind == "input" else None
        own = over_layers(specs, layers)
        crosses = [None] * layers if cross is None else over_layers(cross, layers)
        feeds = over_layers(config.feedforward if feedforward is None else feedforward, layers)
        self.blocks = nn.ModuleList(
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
        # of each id those of its stems, 0 where there is none; whoever has the tokenizer fills it in
        stems = torch.zeros(vocabulary, config.stems, dtype=torch.long) if config.stems else None
        self.register_buffer("stems", stems)
        self.dropout = Dropout(config.dropout)
        self.reversible = config.reversible
        link_layers(self.blocks)

    def embed(self, ids: Tensor, rows: Rows, segments: Tensor | None = None) -> Tensor:
        """[B, T] -> [B, T, E]; without `segments` all tokens are of the first."""
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
        go = through_pair if self.reversible else through
        out = go(self.blocks, x, rows, states=states, memory=memory, maps=maps, outputs=outputs)
        return out._replace(y=self.norm(out.y), stream=None if out.stream is None else self.stream_norm(out.stream))

    def give_stream_norm(self, reader: "Stack") -> None:
        """Norms the stream behind the last layer, as `norm` does the tokens, where it is made here and read there."""
        made, read = (any(layer.facts.stream for layer in stack.attentions()) for stack in (self, reader))
        if made and read and not isinstance(self.norm, nn.Identity):
            self.stream_norm = nn.LayerNorm(self.embedding.embedding_dim)

    def attentions(self) -> list[Attention]:
        return [layer for block in self.blocks for layer in (block.attention, block.cross) if layer is not None]


def link_layers(*stacks: Sequence[Block]) -> None:
    """Tells each layer which it may share with, the first of its kind in its place, and whether a stream comes and is
    read. A stream runs through all layers in the order in which they work, from stack to stack; what carries one has a
    single first of its kind. Of what is said twice, the last counts."""
    places = [
        (index, name, getattr(block, name))
        for index, blocks in enumerate(stacks)
        for block in blocks
        for name in ("attention", "cross")
        if getattr(block, name) is not None
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


def through(
    blocks: Sequence[Block],
    x: Tensor,
    rows: Rows,
    *,
    states: Sequence[BlockState] | None = None,
    memory: Memory | None = None,
    maps: Recording | None = None,
    outputs: list[Tensor] | None = None,
) -> Out:
    """One block after the other, with the auxiliary losses added up."""
    outs, stream = [], memory and memory.stream
    for block, state in zip(blocks, states or [None] * len(blocks), strict=True):
        out = block(x, rows, state=state, memory=memory, stream=stream, maps=maps)
        x, stream = out.y, out.stream
        if outputs is not None:
            outputs.append(x)
        outs.append(out)
    loss, statistics = gather_auxiliary({str(index): out for index, out in enumerate(outs)})
    return Out(x, tuple(out.state for out in outs), stream, loss, statistics)


def gather_auxiliary(parts: dict[str, Out]) -> tuple[Tensor | None, dict[str, Tensor] | None]:
    """The auxiliary losses of the parts added up, and their statistics as PART.NAME."""
    losses = [part.auxiliary_loss for part in parts.values() if part.auxiliary_loss is not None]
    found = {f"{part}.{name}": value for part, out in parts.items() for name, value in (out.statistics or {}).items()}
    return sum(losses) if losses else None, found or None


# What a compiler makes of the first run of a layer it does not make of the second, and the two must be the same.
@run_eagerly
def through_pair(
    blocks: Sequence[Block],
    x: Tensor,
    rows: Rows,
    *,
    states: Sequence[BlockState] | None = None,
    memory: Memory | None = None,
    maps: Recording | None = None,
    outputs: list[Tensor] | None = None,
) -> Out:
    """`through` with two streams of residuals that read each other in turn, and their mean behind the last layer. In
    training each sublayer is undone and run again on the way back: see `Coupled`."""
    stream, outs = memory and memory.stream, []

    def sublayers(x: Tensor | None) -> list[list[Sublayer]]:
        read = memory and memory._replace(x=x)
        given = zip(blocks, states or [None] * len(blocks), strict=True)
        return [block.sublayers(rows, state=state, memory=read, maps=maps) for block, state in given]

    def passed(a: Tensor, b: Tensor, out: Out) -> None:
        if outputs is not None:
            outputs.append((a + b) / 2)
        # without what is as large as the input
        outs.append(out._replace(y=None))

    if torch.is_grad_enabled() and states is None and maps is None:
        # one that several layers share is given once
        parameters = dict.fromkeys(p for block in blocks for p in block.parameters() if p.requires_grad)
        given = blocks, sublayers, passed, x, stream, memory and memory.x
        a, b, stream, loss = Coupled.apply(*given, *parameters)
        # what the layers made in there has no gradients, and what they counted needs none
        statistics = gather_auxiliary({str(index): out for index, out in enumerate(outs)})[1]
        return Out((a + b) / 2, (None,) * len(blocks), stream, loss, statistics)
    a = b = x
    for parts, state in zip(sublayers(memory and memory.x), states or [None] * len(blocks), strict=True):
        made = []
        for part in parts:
            made.append(part(b, stream))
            a, b, stream = b, a + made[-1].y, made[-1].stream
        passed(a, b, gathered(None, stream, made, state))
    loss, statistics = gather_auxiliary({str(index): out for index, out in enumerate(outs)})
    return Out((a + b) / 2, tuple(out.state for out in outs), stream, loss, statistics)


class Transform(nn.Module):
    """norm(GELU(W x + b)) before the output layer: the head of BERT (Devlin et al. 2019, arXiv 1810.04805)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)
        self.norm = normalization(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.gelu(self.dense(x)))


class Transformer(Model):
    """Vaswani et al. 2017, with any attention: token ids in, logits out.

    >>> model = Transformer(ModelConfig(vocabulary=8000, attention="local(window=64)"))
    >>> logits = model(source, target, keep=source_keep, target_keep=target_keep).logits
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config: ModelConfig = config
        decoder_layers = config.layers if config.decoder_layers is None else config.decoder_layers
        self.encoder = self.decoder = None
        if config.kind != "decoder":
            self.encoder = Stack(config, config.vocabulary, config.layers, config.attention, None)
        if config.kind != "encoder":
            specs = config.attention if config.decoder_attention is None else config.decoder_attention
            cross = config.cross_attention if config.kind == "encoder-decoder" else None
            vocabulary = config.target_vocabulary or config.vocabulary
            self.decoder = Stack(config, vocabulary, decoder_layers, specs, cross, config.decoder_feedforward)
            if self.encoder is not None and config.target_vocabulary is None:
                self.decoder.embedding = self.encoder.embedding
            if self.encoder is not None:
                link_layers(self.encoder.blocks, self.decoder.blocks)
                self.encoder.give_stream_norm(self.decoder)
        embedding = (self.decoder or self.encoder).embedding
        self.transform = Transform(config) if config.head == "transform" else nn.Identity()
        self.output = None
        if config.head != "none":
            self.output = nn.Linear(config.width, embedding.num_embeddings, bias=config.head_bias)
            if config.tied:
                self.output.weight = embedding.weight
            if config.head_bias:
                nn.init.zeros_(self.output.bias)
        self.pooler = nn.Linear(config.width, config.width) if config.pooler else None
        self.aligner = Aligner(config.width, embedding.num_embeddings) if config.aligner else None

    def forward(
        self,
        tokens: Tensor,
        target: Tensor | None = None,
        *,
        keep: Tensor | None = None,
        target_keep: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Prediction:
        """ids [B, S] (and [B, T]) -> logits at each position of the last of them."""
        if self.output is None:
            raise ValueError("this model has head 'none' and gives no logits: use encode (or pooled) for its vectors")
        x, loss, statistics = self.hidden(tokens, target, keep=keep, target_keep=target_keep, segments=segments)
        logits, keep = self.output(x), keep if target is None else target_keep
        return Prediction(logits if keep is None else unpack(logits, keep), loss, statistics)

    def hidden(
        self,
        tokens: Tensor,
        target: Tensor | None = None,
        *,
        keep: Tensor | None = None,
        target_keep: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Hidden:
        """`forward` before the output layer, which a loss puts on the real tokens only."""
        if (target is None) == (self.config.kind == "encoder-decoder"):
            wants = "needs source and target ids" if target is None else "takes one sequence of ids"
            raise ValueError(f"a model of kind {self.config.kind!r} {wants}")
        outs, memory = {}, None
        check_rows_match(tokens, target)
        if target is not None:
            outs["encoder"], memory = self._encode(tokens, keep)
            source, tokens, keep = (tokens, keep), target, target_keep
        packed, rows = pack_ids(tokens, keep)
        learns = self.aligner is not None and self.training
        outputs = [] if learns else None
        last = "encoder" if self.decoder is None else "decoder"
        stack, parts = self.decoder or self.encoder, self._segments(segments, tokens, keep)
        outs[last] = out = stack(packed, rows, segments=parts, memory=memory, outputs=outputs)
        if learns:
            outs["aligner"] = Out(
                None, auxiliary_loss=self.aligner(*self._aligned(outputs, rows, memory, source, packed))
            )
        return Hidden(self.transform(out.y), *gather_auxiliary(outs))

    def maps(
        self,
        tokens: Tensor,
        target: Tensor | None = None,
        *,
        keep: Tensor | None = None,
        target_keep: Tensor | None = None,
        segments: Tensor | None = None,
        place: Literal["encoder", "decoder", "cross", "aligner"] | None = None,
        recorder: Recorder = take_map,
    ) -> list[Tensor]:
        """What attends to what, [B, H, T, S] a layer: in the encoder, the decoder, or from target to source.

        Without a place it is the attention that reads the source, or the only one there is. A `recorder` is called in
        place of each layer's map, and what it keeps is given back; it is for rows without padding.
        """
        both = ("cross", "encoder", "decoder", *(() if self.aligner is None else ("aligner",)))
        places = {"encoder-decoder": both}.get(self.config.kind, (self.config.kind,))
        place = place or places[0]
        if place not in places:
            raise ValueError(f"a model of kind {self.config.kind!r} has maps of {', '.join(places)}; got {place!r}")
        if place != "encoder" and (target is None) == (self.config.kind == "encoder-decoder"):
            wants = "source and target ids" if target is None else "one sequence of ids"
            raise ValueError(f"maps of the {place!r} attention of kind {self.config.kind!r} need {wants}")
        check_rows_match(tokens, target)
        found = Recording({"cross": "cross", "aligner": "none"}.get(place, "own"), recorder)
        if place == "encoder" or target is None:
            stack, queries, keys = self.encoder or self.decoder, keep, keep
            stack(*pack_ids(tokens, keep), segments=self._segments(segments, tokens, keep), maps=found)
        else:
            memory = self.encode(tokens, keep=keep)
            packed, rows = pack_ids(target, target_keep)
            outputs = []
            self.decoder(packed, rows, memory=memory, maps=found, outputs=outputs)
            stack, queries, keys = self.decoder, target_keep, target_keep if place == "decoder" else keep
            if place == "aligner":
                found.add("none", self.aligner, *self._aligned(outputs, rows, memory, (tokens, keep), packed))
        layers = [block.cross if place == "cross" else block.attention for block in stack.blocks]
        columns = ["tokens"] if place == "aligner" else [layer.facts.columns for layer in layers]
        maps = []
        for names, part in zip(columns, found.results, strict=True):
            part = part if queries is None else unpack(part, queries[:, None], dim=2)
            padded = keys is not None and names == "tokens"
            maps.append(unpack(part, keys[:, None, None], dim=3) if padded else part)
        return maps

    def _aligned(
        self, outputs: list[Tensor], rows: Rows, memory: Memory, source: tuple[Tensor, Tensor | None], target: Tensor
    ) -> tuple[Tensor, Rows, Memory, Tensor, Tensor, Tensor, Tensor]:
        """What the aligner reads. The last layer but one of a decoder knows best where the translation goes on."""
        x, ids = outputs[max(len(outputs) - 2, 0)], pack_ids(*source)[0]
        return x, rows, memory, ids, target, self.encoder.embedding.weight, self.output.weight

    def encode(self, tokens: Tensor, *, keep: Tensor | None = None, segments: Tensor | None = None) -> Memory:
        """The encoder's last layer, with the real tokens of each row on the left."""
        if self.encoder is None:
            raise ValueError("a model of kind 'decoder' has no encoder: call it on the tokens, or use start and extend")
        return self._encode(tokens, keep, segments)[1]

    def pooled(self, tokens: Tensor, *, keep: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """One vector a row, [B, E]: tanh(W x + b) of the first real token x."""
        if self.pooler is None:
            raise ValueError("this model has no pooler: build it with pooler=True, or pool what encode returns")
        return torch.tanh(self.pooler(self.encode(tokens, keep=keep, segments=segments).x[:, 0]))

    def _encode(self, tokens: Tensor, keep: Tensor | None, segments: Tensor | None = None) -> tuple[Out, Memory]:
        packed, rows = pack_ids(tokens, keep)
        out = self.encoder(packed, rows, segments=self._segments(segments, tokens, keep))
        return out, Memory(out.y, None if keep is None else rows.count, out.stream)

    def _segments(self, segments: Tensor | None, tokens: Tensor, keep: Tensor | None) -> Tensor | None:
        """The segment of each token, moved with it."""
        if segments is None:
            return None
        if not self.config.segments:
            raise ValueError("this model knows no segments: leave them out, or build it with segments=2")
        if segments.shape != tokens.shape:
            raise ValueError(f"segments must be {list(tokens.shape)}, one a token, got {list(segments.shape)}")
        return pack_ids(segments, keep)[0]

    def start(self, batch: int, *, memory: Memory | None = None, capacity: int | None = None) -> ModelState:
        """The decoder's state before the first token. A memory of B rows also serves k * B rows: beams."""
        if self.decoder is None:
            raise ValueError("a model of kind 'encoder' does not decode: build kind 'decoder' or 'encoder-decoder'")
        if (memory is None) != (self.encoder is None):
            needs = "needs memory=model.encode(source)" if memory is None else "has no memory to read"
            raise ValueError(f"a model of kind {self.config.kind!r} {needs}")
        if memory is not None and batch % len(memory.x):
            raise ValueError(f"a memory of {len(memory.x)} rows serves a multiple of them, not a batch of {batch}")
        weight = self.decoder.embedding.weight
        options = {"dtype": weight.dtype, "device": weight.device}
        blocks, stream = [], memory and memory.stream
        for block in self.decoder.blocks:
            own = None if stream is None else stream.repeat_interleave(batch // len(stream), 0)
            own, cross = block.attention.initial_state(batch, stream=own, capacity=capacity, **options), None
            if block.cross is not None:
                out = block.cross.initial_state(len(memory.x), memory=memory, stream=stream, **options)
                # only the memory refines a stream: it is the same for all tokens
                cross, stream = out.state, stream if out.stream is None else out.stream
            blocks.append(BlockState(own.state, cross))
        return ModelState(tuple(blocks), Progress.initial(batch, weight.device))

    def extend(self, tokens: Tensor, state: ModelState, *, keep: Tensor | None = None) -> tuple[Tensor, ModelState]:
        """New ids [B, n] -> logits [B, n, V] and the next state; the old one is used up."""
        packed, rows = pack_ids(tokens, keep)
        self._check_state(state, len(tokens))
        rows = state.progress.place(rows)
        out = self.decoder(packed, rows, states=state.blocks)
        logits = self.output(self.transform(out.y))
        after = ModelState(out.state, state.progress.advance(rows))
        return logits if keep is None else unpack(logits, keep), after

    def fixed_state(self, state: ModelState, capacity: int) -> ModelState:
        """A state that keeps the sizes of its tensors while single tokens are added, up to `capacity` in all: for steps
        that are captured as a CUDA graph. The tensors of what `extend` returns are to be written into those of it."""
        pairs = zip(self.decoder.blocks, state.blocks, strict=True)
        blocks = (kept._replace(own=block.attention.fixed_state(kept.own, capacity)) for block, kept in pairs)
        return ModelState(tuple(blocks), state.progress.bounded(capacity))

    def _check_state(self, state: Any, batch: int) -> None:
        """Refuses what is no state of this model, or of other rows than the tokens."""
        if not isinstance(state, ModelState) or self.decoder is None or len(state.blocks) != len(self.decoder.blocks):
            raise ValueError(f"expected the state of this model, from start() or extend(), got {type(state).__name__}")
        rows = len(state.progress.length)
        if rows != batch:
            raise ValueError(f"tokens have {batch} rows and the state {rows}: select rows to match")
        for block, kept in zip(self.decoder.blocks, state.blocks, strict=True):
            check_form(block.attention, kept.own)


def look_up(table: nn.Embedding, ids: Tensor) -> Tensor:
    """The vectors of token ids. On a CPU an id that the table does not have is refused in words, at no cost; elsewhere
    looking for one would take a synchronisation."""
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


def check_rows_match(source: Tensor, target: Tensor | None) -> None:
    """Refuses a source and a target of different numbers of rows, which would broadcast."""
    known = all(isinstance(ids, Tensor) and ids.dim() == 2 for ids in (source, target))
    if known and len(source) != len(target):
        raise ValueError(f"target has {len(target)} rows and source {len(source)}: give one target a source")


def pack_ids(ids: Tensor, keep: Tensor | None) -> tuple[Tensor, Rows]:
    """Ids [B, T] with the real ones of each row moved to the left and zeros behind."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.long, torch.int):
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"token ids must be whole numbers [batch, tokens], int64 or int32, got {got}")
    if keep is None:
        return ids, Rows.full(ids)
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool or keep.shape != ids.shape:
        got = f"{keep.dtype} {list(keep.shape)}" if isinstance(keep, Tensor) else type(keep).__name__
        raise ValueError(f"keep must be boolean {list(ids.shape)}, True = real token, got {got}")
    packed, rows = pack(ids[..., None], keep)
    return packed[..., 0], rows
