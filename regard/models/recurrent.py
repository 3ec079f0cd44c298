"""The recurrent translator: an encoder that reads both ways, a decoder that attends, around any score of the registry.

The same interface as the Transformer, so that training, decoding and alignments are written once. Padding is met once
here too: ids are moved to the left, and the recurrence of a row ends with its last real token.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from regard.core.model import Model, Prediction
from regard.core.options import Range, config_dataclass
from regard.core.rows import Memory, Rows, unpack
from regard.core.shape import Shape
from regard.core.state import check_rows, take_rows
from regard.layers.attention.base import Attention
from regard.models.config import check_config
from regard.models.encoder_decoder import check_beams, check_tokens, embeddings
from regard.models.recording import Recorder, last_weights, place_map, take_map
from regard.models.stack import look_up
from regard.models.transformer import check_rows_match, pack_ids
from regard.spec import ATTENTION

NO_MAPS = (
    "a recurrent model without attention has no maps: its decoder only gets the encoder's last state; build it with "
    "attention='additive' or another score"
)


@config_dataclass
class RecurrentConfig:
    """The config of a recurrent model. `attention` takes a spec of role "cross"; None is the bottleneck, where the
    decoder gets the encoder's last state and nothing else, and `input_feeding` has nothing to feed."""

    kind: Literal["recurrent"] = "recurrent"
    vocabulary: Annotated[int, "tokens of the vocabulary", Range(1)] = 37000
    target_vocabulary: Annotated[int | None, "tokens of the target's own vocabulary (default: shared)", Range(1)] = None
    cell: Annotated[Literal["lstm", "gru"], "kind of the recurrent cells"] = "lstm"
    width: Annotated[int, "width of the embeddings, and of the vector that predicts", Range(1)] = 512
    hidden: Annotated[int, "width of the decoder's state; each direction of the encoder has half of it", Range(1)] = (
        1024
    )
    layers: Annotated[int, "layers of the encoder, and as many of the decoder", Range(1)] = 2
    attention: Annotated[str | None, "spec of the attention from target to source"] = "multiplicative"
    heads: Annotated[int, "heads of the attention", Range(1)] = 1
    input_feeding: Annotated[bool, "the vector that predicted a token is part of the next input"] = True
    dropout: Annotated[
        float,
        "dropout of the embeddings, between layers, of the memory and of the vector that predicts",
        Range(0, below=1),
    ] = 0.2
    tied: Annotated[bool, "the output layer is the embedding of the target"] = True

    def __post_init__(self) -> None:
        if self.kind != "recurrent":
            raise ValueError(f"kind must be 'recurrent', got {self.kind!r}: other kinds are built from ModelConfig")
        check_config(self)
        if self.hidden % 2:
            raise ValueError(f"hidden must be even, half for each direction of the encoder, got {self.hidden}")
        if self.hidden % self.heads:
            raise ValueError(
                f"hidden {self.hidden} is not divisible by heads {self.heads}: choose heads that divide it"
            )


class Encoding(NamedTuple):
    """A `Memory`, and the state in which the encoder left each layer: h, and for an LSTM c."""

    x: Tensor  # [B, S, E], the real tokens of each row on the left
    lengths: Tensor | None  # [B]
    last: tuple[Tensor, ...]  # [B, layers, hidden]

    @property
    def memory(self) -> Memory:
        """What cross-attention reads."""
        return Memory(self.x, self.lengths)


class RecurrentState(NamedTuple):
    """What the decoder keeps. `select` copies rows of it all; `reorder` only those of the tokens, for beams over one
    memory."""

    hidden: tuple[Tensor, ...]  # h, and for an LSTM c: [B, layers, hidden]
    fed: Tensor | None  # [B, width], what predicted the last token
    cross: Any

    def select(self, rows: Tensor) -> "RecurrentState":
        return self.reorder(rows)._replace(cross=take_rows(self.cross, rows))

    def reorder(self, rows: Tensor) -> "RecurrentState":
        check_rows(rows, self.hidden[0])
        return self._replace(hidden=take_rows(self.hidden, rows), fed=take_rows(self.fed, rows))


class Recurrent(Model):
    """Sutskever et al. 2014 without attention; with it, Bahdanau et al. 2014 in the form of Luong et al. 2015.

    The decoder starts from the encoder's last states, both directions side by side, layer by layer. At each token its
    state h reads the memory, c = attention(h), and v = tanh(W [c; h]) predicts (Luong's attentional vector, here as
    wide as the embeddings so that they can be the output layer). With input feeding v is part of the next input.

    >>> model = Recurrent(RecurrentConfig(vocabulary=8000, cell="gru", attention="additive"))
    >>> logits = model(source, target, keep=source_keep, target_keep=target_keep).logits
    """

    def __init__(self, config: RecurrentConfig):
        super().__init__()
        self.config: RecurrentConfig = config
        width, hidden = config.width, config.hidden
        self.source_embedding, self.target_embedding = embeddings(config, width, width**-0.5)
        cell = {"lstm": nn.LSTM, "gru": nn.GRU}[config.cell]
        between = config.dropout if config.layers > 1 else 0.0
        options = {"num_layers": config.layers, "batch_first": True, "dropout": between}
        self.encoder = cell(width, hidden // 2, bidirectional=True, **options)
        self.feeds = config.input_feeding and config.attention is not None
        self.decoder = cell(2 * width if self.feeds else width, hidden, **options)
        self.cross: Attention | None = None
        if config.attention is not None:
            shape = Shape.of(width=hidden, heads=config.heads, role="cross")
            cross: Attention = ATTENTION.build(config.attention, shape)
            cross.link_layers(None, False, False)
            self.cross = cross
        self.mix = nn.Linear(hidden if self.cross is None else 2 * hidden, width)
        self.output = nn.Linear(width, self.target_embedding.num_embeddings, bias=False)
        if config.tied:
            self.output.weight = self.target_embedding.weight
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        keep: Tensor | None = None,
        target_keep: Tensor | None = None,
    ) -> Prediction:
        """ids [B, S] and [B, T] -> logits at each position of the target."""
        _, _, vectors = self._read(source, target, keep, target_keep)
        return Prediction(self._predict(vectors, target_keep), None)

    def maps(
        self,
        source: Tensor,
        target: Tensor,
        *,
        keep: Tensor | None = None,
        target_keep: Tensor | None = None,
        recorder: Recorder = take_map,
    ) -> list[Tensor]:
        """What each target token reads of the source when it comes in: one map [B, H, T, S], for there is one layer of
        attention. A `recorder` is called in place of it."""
        if self.cross is None:
            raise ValueError(NO_MAPS)
        memory, states, _ = self._read(source, target, keep, target_keep)
        found = recorder(self.cross, states, memory=memory.memory)
        return [place_map(found, self.cross.facts.columns, keep, target_keep)]

    def encode(self, source: Tensor, *, keep: Tensor | None = None) -> Encoding:
        """The encoder's last layer with the real tokens of each row on the left, and its last states."""
        packed, rows = pack_ids(source, keep)
        count = None if keep is None else rows.count
        y, last = _recur(self.encoder, self._embed(self.source_embedding, packed), count, None)
        return Encoding(self.dropout(y), count, last)

    def start(self, batch: int, *, memory: Encoding | None = None, capacity: int | None = None) -> RecurrentState:
        """The decoder's state before the first token. A memory of B rows also serves k * B rows: beams. The state has
        one size, so that `capacity` reserves nothing."""
        if not isinstance(memory, Encoding):
            raise ValueError(f"a recurrent model needs memory=model.encode(source), got {type(memory).__name__}")
        rows = len(memory.x)
        check_beams(batch, rows)
        hidden = tuple(part.repeat_interleave(batch // rows, 0) for part in memory.last)
        fed = memory.x.new_zeros(batch, self.config.width) if self.feeds else None
        cross = None
        if self.cross is not None:
            options = {"dtype": memory.x.dtype, "device": memory.x.device}
            cross = self.cross.initial_state(rows, memory=memory.memory, **options).state
        return RecurrentState(hidden, fed, cross)

    def extend(
        self, tokens: Tensor, state: RecurrentState, *, keep: Tensor | None = None
    ) -> tuple[Tensor, RecurrentState]:
        """New ids [B, n] -> logits [B, n, V] and the next state; a padded token leaves it as it was."""
        _, vectors, state = self._extend(tokens, state, keep)
        return self._predict(vectors, keep), state

    def extend_with_attention(self, tokens: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState, Tensor]:
        """`extend`, and what the last token reads of each token of the memory, [B, S]."""
        if self.cross is None:
            raise ValueError(NO_MAPS)
        states, vectors, state = self._extend(tokens, state, None)
        return self._predict(vectors, None), state, last_weights([(self.cross, states)], state.cross)

    def _extend(
        self, tokens: Tensor, state: RecurrentState, keep: Tensor | None
    ) -> tuple[Tensor, Tensor, RecurrentState]:
        packed, rows = pack_ids(tokens, keep)
        if not isinstance(state, RecurrentState):
            raise ValueError(f"expected the state of this model, from start() or extend(), got {type(state).__name__}")
        check_tokens(tokens, len(state.hidden[0]))
        return self._decode(packed, state, None if keep is None else rows.count)

    def _read(
        self, source: Tensor, target: Tensor, keep: Tensor | None, target_keep: Tensor | None
    ) -> tuple[Encoding, Tensor, Tensor]:
        """The memory, and the decoder's states and vectors over the whole target, with its real tokens on the left."""
        packed, _ = pack_ids(target, target_keep)
        check_rows_match(source, target)
        memory = self.encode(source, keep=keep)
        # the state behind the last token is not used, so that padding needs no care here
        states, vectors, _ = self._decode(packed, self.start(len(target), memory=memory), None)
        return memory, states, vectors

    def _embed(self, embedding: nn.Embedding, ids: Tensor) -> Tensor:
        return self.dropout(look_up(embedding, ids) * math.sqrt(self.config.width))

    def _predict(self, vectors: Tensor, keep: Tensor | None) -> Tensor:
        # the output layer has no bias: zeros put in the padding stay zeros, and are moved at the width of the vectors
        return self.output(self.dropout(vectors if keep is None else unpack(vectors, keep)))

    def _decode(
        self, ids: Tensor, state: RecurrentState, count: Tensor | None
    ) -> tuple[Tensor, Tensor, RecurrentState]:
        """States [B, n, hidden], vectors that predict [B, n, width], and the state after `count` tokens of each row
        (None: after all)."""
        x = self._embed(self.target_embedding, ids)
        if state.fed is not None:
            return self._decode_fed(x, state, state.fed, count)
        states, hidden = _recur(self.decoder, x, count, state.hidden)
        return states, self._attend(states, state.cross, None), state._replace(hidden=hidden)

    def _decode_fed(
        self, x: Tensor, state: RecurrentState, fed: Tensor, count: Tensor | None
    ) -> tuple[Tensor, Tensor, RecurrentState]:
        """One step per token, since each needs the vector of the one before."""
        layers = list(zip(*(part.unbind(1) for part in state.hidden), strict=True))  # of each: h, and for an LSTM c
        states, vectors = [], []
        real: Sequence[Tensor | None] = [None] * x.shape[1]
        if count is not None:
            real = (torch.arange(x.shape[1], device=x.device)[:, None] < count).unsqueeze(-1).unbind(0)
        memories = len(state.cross.count)
        rows = Rows.full(x.new_empty(memories, len(x) // memories))
        for token, is_real in zip(x.unbind(1), real, strict=True):
            after = self._step(torch.cat([token, fed], -1), layers)
            top = after[-1][0]
            vector = self._attend(top[:, None], state.cross, rows)[:, 0]
            states.append(top)
            vectors.append(vector)
            if is_real is None:
                layers, fed = after, vector
            else:
                layers = [_choose(is_real, new, old) for new, old in zip(after, layers, strict=True)]
                fed = torch.where(is_real, vector, fed)
        hidden = tuple(torch.stack(parts, 1) for parts in zip(*layers, strict=True))
        return torch.stack(states, 1), torch.stack(vectors, 1), state._replace(hidden=hidden, fed=fed)

    def _step(self, x: Tensor, layers: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        """One token [B, 2 width] through the layers of the decoder, with the weights that `nn.LSTM` or `nn.GRU` holds.

        The library's cell is two products and, on a GPU, one kernel for all gates. Taking the embedding's share of the
        gates out of the loop would save no launch and require computing the gates here; on a CPU it measures the
        same."""
        after = []
        for index, (old, weights) in enumerate(zip(layers, self.decoder.all_weights, strict=True)):
            x = self.dropout(x) if index else x
            if self.config.cell == "lstm":
                after.append(torch.lstm_cell(x, old, *weights))
            else:
                after.append((torch.gru_cell(x, *old, *weights),))
            x = after[-1][0]
        return after

    def _attend(self, states: Tensor, cross: Any, rows: Rows | None) -> Tensor:
        """[B, n, hidden] -> tanh(W [c; h]), [B, n, width]"""
        if self.cross is None:
            return torch.tanh(self.mix(states))
        # beams of one sentence fold into the queries of its memory
        folded = states.reshape(len(cross.count), -1, states.shape[2])
        context = self.cross.forward_packed(folded, rows, state=cross).y.reshape(states.shape)
        return torch.tanh(self.mix(torch.cat([context, states], -1)))


def _recur(
    network: nn.LSTM | nn.GRU, x: Tensor, count: Tensor | None, first: tuple[Tensor, ...] | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A whole network over rows that are real from the left: outputs [B, n, hidden], and the states [B, layers, hidden]
    behind the last real token of each row. With a count, outputs in the padding are zeros."""
    start = None
    if first is not None:
        start = tuple(part.transpose(0, 1).contiguous() for part in first)
        start = start if len(start) == 2 else start[0]
    if count is None:
        y, last = network(x, start)
    else:
        # lengths must be on the host and above 0: a row without tokens reads one of padding, and is put right below
        lengths = count.clamp(min=1).cpu()
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, last = network(packed, start)
        y, _ = pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])
    last = last if isinstance(last, tuple) else (last,)
    # [layers * directions, B, E] -> [B, layers, directions * E]
    last = tuple(part.unflatten(0, (network.num_layers, -1)).permute(2, 0, 1, 3).flatten(2) for part in last)
    # under autocast a library may answer in another half precision than autocast's own, and the two do not mix
    y, last = y.to(x.dtype), tuple(part.to(x.dtype) for part in last)
    if count is None:
        return y, last
    some = (count > 0)[:, None, None]
    old = first or tuple(torch.zeros_like(part) for part in last)
    return torch.where(some, y, 0), _choose(some, last, old)


def _choose(which: Tensor, new: tuple[Tensor, ...], old: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.where(which, after, before) for after, before in zip(new, old, strict=True))
