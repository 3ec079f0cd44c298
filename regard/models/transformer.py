"""The Transformer: encoder, decoder, or both, around any attention of the registry.

Padding is met once, on token ids: the real tokens of each row are moved to the left before they are embedded, so that
the layers only ever see rows that are real from the left, and what is padded costs no copy of vectors.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.model import Hidden, Model, Prediction
from regard.core.numeric import take_tokens
from regard.core.rows import Memory, Rows, pack, unpack
from regard.core.sequence import placed
from regard.core.state import Out, Progress, check_rows, take_rows
from regard.layers.attention.checks import check_form
from regard.models.aligner import Aligner
from regard.models.block import BlockState, gather_auxiliary, normalization
from regard.models.config import ModelConfig
from regard.models.recording import Recorder, Recording, last_weights, place_map, take_map
from regard.models.stack import Stack, initial_states, link_layers

MapPlace = Literal["encoder", "decoder", "cross", "aligner"]


class ModelState(NamedTuple):
    """What a decoder keeps. `select` copies rows of it all; `reorder` only those of the tokens, for beams over one
    memory."""

    blocks: tuple[BlockState, ...]
    progress: Progress

    def select(self, rows: Tensor) -> "ModelState":
        check_rows(rows, self)
        blocks = tuple(BlockState(*(take_rows(part, rows) for part in block)) for block in self.blocks)
        return ModelState(blocks, take_rows(self.progress, rows))

    def reorder(self, rows: Tensor) -> "ModelState":
        check_rows(rows, self)
        blocks = tuple(
            BlockState(take_rows(kept, rows), cross, take_rows(short, rows)) for kept, cross, short in self.blocks
        )
        return ModelState(blocks, take_rows(self.progress, rows))


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
        self.encoder: Stack | None = None
        self.decoder: Stack | None = None
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
        embedding = self.last_stack.embedding
        self.transform = Transform(config) if config.head == "transform" else nn.Identity()
        self.output: nn.Linear | None = None
        if config.head != "none":
            self.output = nn.Linear(config.width, embedding.num_embeddings, bias=config.head_bias)
            if config.tied:
                self.output.weight = embedding.weight
            if config.head_bias:
                nn.init.zeros_(self.output.bias)
        self.pooler = nn.Linear(config.width, config.width) if config.pooler else None
        self.aligner = Aligner(config.width, embedding.num_embeddings) if config.aligner else None

    @property
    def last_stack(self) -> Stack:
        """The layers that the output layer reads: the decoder, or the encoder where there is none."""
        stack = self.encoder if self.decoder is None else self.decoder
        assert stack is not None, "a model has an encoder or a decoder"
        return stack

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
        outs: dict[str, Out] = {}
        memory, source = None, (tokens, keep)
        check_rows_match(tokens, target)
        if target is not None:
            outs["encoder"], memory = self._encode(tokens, keep)
            tokens, keep = target, target_keep
        packed, rows = pack_ids(tokens, keep)
        outputs: list[Tensor] | None = [] if self.aligner is not None and self.training else None
        last = "encoder" if self.decoder is None else "decoder"
        parts = self._segments(segments, tokens, keep)
        outs[last] = out = self.last_stack(packed, rows, segments=parts, memory=memory, outputs=outputs)
        if self.aligner is not None and outputs is not None and memory is not None:
            missed = self.aligner(*self._aligned(outputs, rows, memory, source, packed))
            outs["aligner"] = Out(out.y, auxiliary_loss=missed)
        return Hidden(self.transform(out.y), *gather_auxiliary(outs))

    def maps(
        self,
        tokens: Tensor,
        target: Tensor | None = None,
        *,
        keep: Tensor | None = None,
        target_keep: Tensor | None = None,
        segments: Tensor | None = None,
        place: MapPlace | None = None,
        recorder: Recorder = take_map,
    ) -> list[Tensor]:
        """What attends to what, [B, H, T, S] per layer: in the encoder, the decoder, or from target to source.

        `place` defaults to the attention that reads the source, or the only one there is. A `recorder` is called in
        place of each layer's map, and what it returns is collected; it is for rows without padding.
        """
        places = self._map_places()
        place = place or places[0]
        if place not in places:
            raise ValueError(f"a model of kind {self.config.kind!r} has maps of {', '.join(places)}; got {place!r}")
        if place != "encoder" and (target is None) == (self.config.kind == "encoder-decoder"):
            wants = "source and target ids" if target is None else "one sequence of ids"
            raise ValueError(f"maps of the {place!r} attention of kind {self.config.kind!r} need {wants}")
        check_rows_match(tokens, target)
        found = Recording("cross" if place == "cross" else "none" if place == "aligner" else "self", recorder)
        if place == "encoder" or target is None:
            stack, queries, keys = self.encoder or self.last_stack, keep, keep
            stack(*pack_ids(tokens, keep), segments=self._segments(segments, tokens, keep), maps=found)
        else:
            memory = self.encode(tokens, keep=keep)
            packed, rows = pack_ids(target, target_keep)
            outputs: list[Tensor] = []
            stack, queries, keys = self.last_stack, target_keep, target_keep if place == "decoder" else keep
            stack(packed, rows, memory=memory, maps=found, outputs=outputs)
            if place == "aligner" and self.aligner is not None:
                found.add("none", self.aligner, *self._aligned(outputs, rows, memory, (tokens, keep), packed))
        layers = [block.cross if place == "cross" else block.attention for block in stack.blocks]
        columns = ["tokens"] if place == "aligner" else [layer.facts.columns for layer in layers if layer is not None]
        return [place_map(part, names, keys, queries) for names, part in zip(columns, found.results, strict=True)]

    def _map_places(self) -> tuple[MapPlace, ...]:
        """Where this model has maps, the default first."""
        if self.config.kind != "encoder-decoder":
            return (self.config.kind,)
        return ("cross", "encoder", "decoder") if self.aligner is None else ("cross", "encoder", "decoder", "aligner")

    def _aligned(
        self, outputs: list[Tensor], rows: Rows, memory: Memory, source: tuple[Tensor, Tensor | None], target: Tensor
    ) -> tuple[Tensor, Rows, Memory, Tensor, Tensor, Tensor, Tensor]:
        """What the aligner reads. The last layer but one of a decoder knows best where the translation continues."""
        assert self.encoder is not None, "an aligner stands beside an encoder-decoder"
        assert self.output is not None, "an aligner stands beside an encoder-decoder"
        x, ids = outputs[max(len(outputs) - 2, 0)], pack_ids(*source)[0]
        return x, rows, memory, ids, target, self.encoder.embedding.weight, self.output.weight

    def encode(self, tokens: Tensor, *, keep: Tensor | None = None, segments: Tensor | None = None) -> Memory:
        """The encoder's last layer, with the real tokens of each row on the left."""
        return self._encode(tokens, keep, segments)[1]

    def pooled(self, tokens: Tensor, *, keep: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """One vector per row, [B, E]: tanh(W x + b) of the first real token x."""
        if self.pooler is None:
            raise ValueError("this model has no pooler: build it with pooler=True, or pool what encode returns")
        return torch.tanh(self.pooler(self.encode(tokens, keep=keep, segments=segments).x[:, 0]))

    def _encode(self, tokens: Tensor, keep: Tensor | None, segments: Tensor | None = None) -> tuple[Out, Memory]:
        if self.encoder is None:
            raise ValueError("a model of kind 'decoder' has no encoder: call it on the tokens, or use start and extend")
        packed, rows = pack_ids(tokens, keep)
        out = self.encoder(packed, rows, segments=self._segments(segments, tokens, keep))
        return out, Memory(out.y, None if keep is None else rows.count, out.stream)

    def _segments(self, segments: Tensor | None, tokens: Tensor, keep: Tensor | None) -> Tensor | None:
        """The segment of each token, moved with it."""
        if segments is None:
            return None
        if not self.config.segments:
            raise ValueError("this model knows no segments: call it without them, or build it with segments=2")
        if segments.shape != tokens.shape:
            raise ValueError(f"segments must be {list(tokens.shape)}, one per token, got {list(segments.shape)}")
        return pack_ids(segments, keep)[0]

    def start(self, batch: int, *, memory: Memory | None = None, capacity: int | None = None) -> ModelState:
        """The decoder's state before the first token. A memory of B rows also serves k * B rows: beams."""
        if self.decoder is None:
            raise ValueError("a model of kind 'encoder' does not decode: build kind 'decoder' or 'encoder-decoder'")
        if (memory is None) != (self.encoder is None):
            needs = "needs memory=model.encode(source)" if memory is None else "has no memory to read"
            raise ValueError(f"a model of kind {self.config.kind!r} {needs}")
        if memory is not None and batch % memory.x.shape[0]:
            raise ValueError(f"a memory of {len(memory.x)} rows serves a multiple of them, not a batch of {batch}")
        weight = self.decoder.embedding.weight
        blocks = initial_states(self.decoder.blocks, batch, weight, memory=memory, capacity=capacity)
        return ModelState(blocks, Progress.initial(batch, weight.device))

    def extend(
        self, tokens: Tensor, state: ModelState, *, keep: Tensor | None = None, maps: Recording | None = None
    ) -> tuple[Tensor, ModelState]:
        """New ids [B, n] -> logits [B, n, V] and the next state; the old one is consumed. `maps` collects what the
        layers attend to."""
        x, _, after = self._extend_hidden(tokens, state, keep, maps)
        assert self.output is not None, "a decoder has an output layer"
        logits = self.output(self.transform(x))
        return logits if keep is None else unpack(logits, keep), after

    def prefill(self, tokens: Tensor, state: ModelState, *, keep: Tensor | None = None) -> tuple[Tensor, ModelState]:
        """`extend`, but only the logits [B, V] of the last real token of each row: those of a whole prompt take more
        time and memory than its layers where the vocabulary is large."""
        x, rows, after = self._extend_hidden(tokens, state, keep, None)
        last = x[:, -1] if keep is None else take_tokens(x, (rows.count - 1).clamp(min=0)[:, None])[:, 0]
        assert self.output is not None, "a decoder has an output layer"
        return self.output(self.transform(last)), after

    def _extend_hidden(
        self, tokens: Tensor, state: ModelState, keep: Tensor | None, maps: Recording | None
    ) -> tuple[Tensor, Rows, ModelState]:
        """What the head reads [B, n, E], with the real tokens on the left, where these stand, and the next state."""
        packed, rows = pack_ids(tokens, keep)
        decoder = self._check_state(state, tokens.shape[0])
        rows = state.progress.place(rows)
        out = decoder(packed, rows, states=state.blocks, maps=maps)
        return out.y, rows, ModelState(out.state, state.progress.advance(rows))

    def extend_with_attention(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState, Tensor]:
        """`extend`, and what the last token reads of each token of the memory, [B, S]: the mean over layers and
        heads."""
        if self.encoder is None:
            raise ValueError(f"a model of kind {self.config.kind!r} reads no memory: use extend")

        def keep_call(layer: nn.Module, folded: Tensor, state: Any) -> tuple[nn.Module, Tensor, Any]:
            return layer, folded.reshape(*tokens.shape, -1), state

        found = Recording("cross", keep_call)
        logits, after = self.extend(tokens, state, maps=found)
        return logits, after, last_weights([call[:2] for call in found.results], *(call[2] for call in found.results))

    def fixed_state(self, state: ModelState, capacity: int) -> ModelState:
        """A state that keeps the sizes of its tensors while single tokens are added, up to `capacity` in all: for steps
        that are captured as a CUDA graph. What `extend` returns is to be copied into its tensors."""
        pairs = zip(self.last_stack.self_attentions(), state.blocks, strict=True)
        blocks = (kept._replace(attention=layer.fixed_state(kept.attention, capacity)) for layer, kept in pairs)
        return ModelState(tuple(blocks), state.progress.bounded(capacity))

    def _check_state(self, state: Any, batch: int) -> Stack:
        """The decoder. Refuses a state of another model, or of a different number of rows."""
        if not isinstance(state, ModelState) or self.decoder is None or len(state.blocks) != len(self.decoder.blocks):
            raise ValueError(f"expected the state of this model, from start() or extend(), got {type(state).__name__}")
        rows = state.progress.length.shape[0]
        if rows != batch:
            raise ValueError(f"tokens have {batch} rows and the state {rows}: select rows to match")
        for layer, kept in zip(self.decoder.self_attentions(), state.blocks, strict=True):
            check_form(layer, kept.attention)
        return self.decoder


def check_rows_match(source: Tensor, target: Tensor | None) -> None:
    """Refuses a source and a target of different numbers of rows, which would broadcast."""
    if not isinstance(source, Tensor) or not isinstance(target, Tensor) or source.dim() != 2 or target.dim() != 2:
        return
    if len(source) != len(target):
        raise ValueError(f"target has {len(target)} rows and source {len(source)}: give one target for each source")


def pack_ids(ids: Tensor, keep: Tensor | None) -> tuple[Tensor, Rows]:
    """Ids [B, T] with the real ones of each row moved to the left and zeros behind."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.long, torch.int):
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"token ids must be whole numbers [batch, tokens], int64 or int32, got {got}")
    if keep is None:
        return ids, placed(Rows.full(ids))
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool or keep.shape != ids.shape:
        got = f"{keep.dtype} {list(keep.shape)}" if isinstance(keep, Tensor) else type(keep).__name__
        raise ValueError(f"keep must be boolean {list(ids.shape)}, True = real token, got {got}")
    packed, rows = pack(ids[..., None], keep)
    return packed[..., 0], rows
