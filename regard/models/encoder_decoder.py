"""What the translators that are no Transformers share: padding is met once, on token ids; beams share a memory.

A model writes `encode_packed`, `initial_layers` and `decode_packed`, and finds the real tokens of each row on the left.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.core.model import Hidden, Model, Prediction
from regard.core.rows import Memory, Rows, unpack
from regard.core.state import Out, Progress, check_rows, take_rows
from regard.models.block import gather_auxiliary
from regard.models.plain_cross import PlainCross
from regard.models.recording import Recorder, last_weights, place_map, take_map
from regard.models.transformer import check_rows_match, pack_ids


class DecoderState(NamedTuple):
    """What a decoder keeps. `select` copies rows of it all; `reorder` only those of the tokens, for beams over one
    memory."""

    layers: tuple[Any, ...]  # of each layer, a row for each row of tokens
    source: Any  # what was made of the memory, a row for each source
    progress: Progress

    def select(self, rows: Tensor) -> "DecoderState":
        return self.reorder(rows)._replace(source=take_rows(self.source, rows))

    def reorder(self, rows: Tensor) -> "DecoderState":
        check_rows(rows, self)
        return self._replace(layers=take_rows(self.layers, rows), progress=take_rows(self.progress, rows))


class Decoded(NamedTuple):
    """What the decoder makes of new tokens."""

    out: Out  # y is what the output layer reads, [B, n, E]
    layers: tuple[Any, ...]  # what each layer keeps behind them
    queries: tuple[Tensor, ...] = ()  # [B, n, E] of each attention to the source


class _Read(NamedTuple):
    """What reading a pair of sentences leaves."""

    encoded: Out
    memory: Memory
    decoded: Decoded


class EncoderDecoder(Model, ABC):
    """A translator that decodes with steps of one size. The methods in front are those of every translator."""

    output: nn.Module

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        keep: Tensor | None = None,
        target_keep: Tensor | None = None,
    ) -> Prediction:
        """ids [B, S] and [B, T] -> logits at each position of the target."""
        x, loss, statistics = self.hidden(source, target, keep=keep, target_keep=target_keep)
        logits = self.output(x)
        return Prediction(logits if target_keep is None else unpack(logits, target_keep), loss, statistics)

    def hidden(
        self,
        source: Tensor,
        target: Tensor,
        *,
        keep: Tensor | None = None,
        target_keep: Tensor | None = None,
    ) -> Hidden:
        """`forward` before the output layer, which a loss puts on the real tokens only."""
        read = self._read(source, target, keep, target_keep)
        return Hidden(read.decoded.out.y, *gather_auxiliary({"encoder": read.encoded, "decoder": read.decoded.out}))

    def encode(self, source: Tensor, *, keep: Tensor | None = None) -> Memory:
        """What the decoder reads of the source, with the real tokens of each row on the left."""
        return self._encode(source, keep)[1]

    def start(self, batch: int, *, memory: Memory | None = None, capacity: int | None = None) -> DecoderState:
        """The decoder's state before the first token. A memory of B rows also serves k * B rows: beams. The state has
        one size, so that `capacity` reserves nothing."""
        if not isinstance(memory, Memory):
            raise ValueError(
                f"a {self.config.kind} model needs memory=model.encode(source), got {type(memory).__name__}"
            )
        check_beams(batch, memory.x.shape[0])
        progress = Progress.initial(batch, memory.x.device, self.config.kind)
        return DecoderState(self.initial_layers(batch, memory), self.project_memory(memory), progress)

    def extend(self, tokens: Tensor, state: DecoderState, *, keep: Tensor | None = None) -> tuple[Tensor, DecoderState]:
        """New ids [B, n] -> logits [B, n, V] and the next state; a padded token leaves it as it was."""
        decoded, state = self._extend(tokens, state, keep)
        logits = self.output(decoded.out.y)
        return logits if keep is None else unpack(logits, keep), state

    def fixed_state(self, state: DecoderState, capacity: int) -> DecoderState:
        """A state for steps that are captured as a CUDA graph: its tensors keep their sizes anyway."""
        return state._replace(progress=state.progress.bounded(capacity))

    @abstractmethod
    def encode_packed(self, ids: Tensor, rows: Rows) -> tuple[Out, Tensor | None]:
        """What the decoder reads, as the y of an `Out`, [B, S, E]; and how much of it is real, [B] (None: all)."""

    @abstractmethod
    def initial_layers(self, batch: int, memory: Memory) -> tuple[Any, ...]:
        """What each layer of the decoder keeps before the first token."""

    @abstractmethod
    def project_memory(self, memory: Memory) -> Any:
        """What decoding makes of the memory once."""

    @abstractmethod
    def decode_packed(self, ids: Tensor, rows: Rows, state: DecoderState, count: Tensor | None) -> Decoded:
        """New ids [B, n] behind those of the state. `count` [B]: layers keep what stands behind this number of
        them (None: behind all, or nobody asks)."""

    def _encode(self, source: Tensor, keep: Tensor | None) -> tuple[Out, Memory]:
        out, count = self.encode_packed(*pack_ids(source, keep))
        return out, Memory(out.y, count)

    def _read(self, source: Tensor, target: Tensor, keep: Tensor | None, target_keep: Tensor | None) -> _Read:
        """The whole target, with its real tokens on the left."""
        packed, rows = pack_ids(target, target_keep)
        check_rows_match(source, target)
        encoded, memory = self._encode(source, keep)
        # the state behind the last token is not used, so that padding needs no care there
        decoded = self.decode_packed(packed, rows, self.start(len(target), memory=memory), None)
        return _Read(encoded, memory, decoded)

    def _extend(self, tokens: Tensor, state: DecoderState, keep: Tensor | None) -> tuple[Decoded, DecoderState]:
        packed, rows = pack_ids(tokens, keep)
        if not isinstance(state, DecoderState) or state.progress.mechanism != self.config.kind:
            raise ValueError(f"expected the state of this model, from start() or extend(), got {type(state).__name__}")
        check_tokens(tokens, state.progress.length.shape[0])
        rows = state.progress.place(rows)
        decoded = self.decode_packed(packed, rows, state, None if rows.real() is None else rows.count)
        return decoded, state._replace(layers=decoded.layers, progress=state.progress.advance(rows))


class AttentiveEncoderDecoder(EncoderDecoder):
    """One whose layers ask the source through one `cross`, of which they make queries, keys and values themselves."""

    cross: PlainCross

    def maps(
        self,
        source: Tensor,
        target: Tensor,
        *,
        keep: Tensor | None = None,
        target_keep: Tensor | None = None,
        recorder: Recorder = take_map,
    ) -> list[Tensor]:
        """What each target token reads of the source when it comes in, [B, H, T, S] of every layer that attends. A
        `recorder` is called in place of the map."""
        _, memory, decoded = self._read(source, target, keep, target_keep)
        maps = (recorder(self.cross, query, memory=memory) for query in decoded.queries)
        return [place_map(found, self.cross.facts.columns, keep, target_keep) for found in maps]

    def extend_with_attention(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState, Tensor]:
        """`extend`, and what the last token reads of each token of the memory, [B, S]: the mean over the layers."""
        decoded, state = self._extend(tokens, state, None)
        weights = last_weights([(self.cross, query) for query in decoded.queries], state.source)
        return self.output(decoded.out.y), state, weights

    def project_memory(self, memory: Memory) -> Any:
        options = {"dtype": memory.x.dtype, "device": memory.x.device}
        return self.cross.initial_state(memory.x.shape[0], memory=memory, **options).state

    def attend(self, queries: Tensor, state: DecoderState) -> Tensor:
        """[B, n, E] -> what they read, [B, n, E]; beams of one sentence fold into the queries of its memory."""
        folded = queries.reshape(state.source.count.shape[0], -1, queries.shape[2])
        return self.cross.forward_packed(folded, state=state.source).y.reshape(queries.shape)


def embeddings(config: Any, width: int, deviation: float | None = None) -> tuple[nn.Embedding, nn.Embedding]:
    """Those of source and target: one for both, unless the target has a vocabulary of its own."""
    source = target = _embedding(config.vocabulary, width, deviation)
    if config.target_vocabulary is not None:
        target = _embedding(config.target_vocabulary, width, deviation)
    return source, target


def _embedding(vocabulary: int, width: int, deviation: float | None) -> nn.Embedding:
    embedding = nn.Embedding(vocabulary, width)
    if deviation is not None:
        nn.init.normal_(embedding.weight, std=deviation)
    return embedding


def check_beams(batch: int, memories: int) -> None:
    """Refuses a batch whose rows cannot be shared out among those of a memory."""
    if batch < 1 or batch % memories:
        raise ValueError(f"a memory of {memories} rows serves a multiple of them, not a batch of {batch}")


def check_tokens(tokens: Tensor, batch: int) -> None:
    """Refuses tokens of another number of rows than the state has."""
    if tokens.shape[0] != batch:
        raise ValueError(f"tokens have {len(tokens)} rows and the state {batch}: select rows to match")
