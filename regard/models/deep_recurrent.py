"""Deep recurrent translators: stacks of LSTMs with residuals, whose upper layers all read one attention."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from regard.core.model import Hidden, Model, Prediction
from regard.core.options import Range
from regard.core.rows import Memory, Rows, reverse_rows, unpack
from regard.core.state import Out, Progress, check_rows, take_rows
from regard.kernels.recurrence import Cells, State
from regard.layers.feedforward.base import FeedForward, Sizes
from regard.models.block import gather_auxiliary
from regard.models.config import check_config
from regard.models.modules import ModuleListOf
from regard.models.plain_cross import PlainCross
from regard.models.recording import Recorder, last_weights, take_map
from regard.models.stack import look_up
from regard.models.transformer import check_rows_match, pack_ids
from regard.spec import FEEDFORWARD

RESIDUAL = 2  # layers before the first that is added to what it reads


@dataclass(frozen=True)
class DeepRecurrentConfig:
    """The config of a GNMT. `attention` takes a spec of role "cross" that is a function of queries, keys and values;
    `feedforward` one of a layer between two recurrent ones, such as a mixture of experts."""

    kind: Literal["deep-recurrent"] = "deep-recurrent"
    vocabulary: Annotated[int, "tokens of the vocabulary", Range(1)] = 37000
    target_vocabulary: Annotated[int | None, "tokens of the target's own vocabulary (default: shared)", Range(1)] = None
    width: Annotated[int, "width of the embeddings and of every layer", Range(1)] = 1024
    layers: Annotated[int, "layers of the encoder, of which the first reads both ways", Range(2)] = 4
    decoder_layers: Annotated[int | None, "layers of the decoder (default: layers)", Range(2)] = None
    attention: Annotated[str, "spec of the attention from target to source"] = "additive(normed=True)"
    heads: Annotated[int, "heads of the attention", Range(1)] = 1
    feedforward: Annotated[
        str | None, "spec of a feed-forward layer behind the encoder's second and the decoder's first layer"
    ] = None
    inner: Annotated[int, "feed-forward width (d_ff)", Range(1)] = 2048
    dropout: Annotated[float, "dropout of what each layer reads", Range(0, below=1)] = 0.2
    tied: Annotated[bool, "the output layer is the embedding of the target"] = True

    def __post_init__(self) -> None:
        if self.kind != "deep-recurrent":
            raise ValueError(f"kind must be 'deep-recurrent', got {self.kind!r}: other kinds have configs of their own")
        check_config(self)
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}: choose heads that divide it")


class DeepRecurrentState(NamedTuple):
    """What the decoder keeps. `select` copies rows of it all; `reorder` only those of the tokens, for beams over one
    memory."""

    layers: tuple[State, ...]  # h and c of each layer, [B, width]
    cross: Any
    progress: Progress

    def select(self, rows: Tensor) -> "DeepRecurrentState":
        return self.reorder(rows)._replace(cross=take_rows(self.cross, rows))

    def reorder(self, rows: Tensor) -> "DeepRecurrentState":
        check_rows(rows, self)
        return self._replace(layers=take_rows(self.layers, rows), progress=take_rows(self.progress, rows))


class _Read(NamedTuple):
    """What reading a pair of sentences leaves."""

    memory: Memory
    queries: Tensor  # [B, T, width]
    x: Tensor  # [B, T, width], what predicts
    auxiliary: tuple[Tensor | None, dict[str, Tensor] | None]


class DeepRecurrent(Model):
    """Wu et al. 2016, GNMT, in the form of NVIDIA's code. The first layer of the encoder reads both ways, the others
    from left to right. From the third layer on, a layer is added to what it reads. The bottom layer of the decoder asks
    for a context,

        c_t = sum_j softmax_j(g v / |v| . tanh(W_q h_t + W_k m_j + b)) m_j,

    and every upper layer reads it beside the layer below: LSTM([x; c]). The last one predicts. All states start at
    zero. (In the paper the bottom layer reads the context of the step before as well, so that training takes one step
    per token.)

    With `feedforward` a token passes through one more layer, x + FFN(x), behind the second layer of the encoder and the
    first of the decoder: the mixture of experts between LSTMs of Shazeer et al. 2017, whose own layers are LSTMs with a
    projection and which has a sigmoid behind the experts.

    >>> model = DeepRecurrent(DeepRecurrentConfig(vocabulary=8000, width=256))
    >>> logits = model(source, target, keep=source_keep, target_keep=target_keep).logits
    """

    def __init__(self, config: DeepRecurrentConfig):
        super().__init__()
        self.config: DeepRecurrentConfig = config
        width, layers = config.width, config.layers
        decoder_layers = layers if config.decoder_layers is None else config.decoder_layers
        self.source_embedding = self.target_embedding = nn.Embedding(config.vocabulary, width)
        if config.target_vocabulary is not None:
            self.target_embedding = nn.Embedding(config.target_vocabulary, width)
        self.backward_layer = Cells("lstm", width, width)
        self.encoder = _cells(width, [width, 2 * width, *[width] * (layers - 2)])
        self.decoder = _cells(width, [width, *[2 * width] * (decoder_layers - 1)])
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.cross = PlainCross(config.attention, width, config.heads)
        self.output = nn.Linear(width, self.target_embedding.num_embeddings)
        drawn = (self.source_embedding, self.target_embedding, self.backward_layer, self.encoder, self.decoder)
        for parameter in nn.ModuleList((*drawn, self.query, self.key, self.output)).parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)
        for cells in (self.backward_layer, *self.encoder, *self.decoder):
            nn.init.zeros_(cells.bias_hh)
        if config.tied:
            self.output.weight = self.target_embedding.weight
        self.encoder_feed, self.decoder_feed = (
            None
            if config.feedforward is None
            else FEEDFORWARD.build(config.feedforward, Sizes(width, config.inner, role))
            for role in ("self", "causal")
        )
        if self.encoder_feed is not None and self.decoder_feed is not None:
            self.encoder_feed.link_layers(None)
            self.decoder_feed.link_layers(self.encoder_feed)
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
        return Hidden(read.x, *read.auxiliary)

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
        read = self._read(source, target, keep, target_keep)
        found = recorder(self.cross, read.queries, memory=read.memory)
        found = found if target_keep is None else unpack(found, target_keep[:, None], dim=2)
        if keep is not None and self.cross.facts.columns == "tokens":
            found = unpack(found, keep[:, None, None], dim=3)
        return [found]

    def encode(self, source: Tensor, *, keep: Tensor | None = None) -> Memory:
        """Keys and values side by side, [B, S, 2 width], with the real tokens of each row on the left."""
        return self._encode(source, keep)[1]

    def start(self, batch: int, *, memory: Memory | None = None, capacity: int | None = None) -> DeepRecurrentState:
        """The decoder's state before the first token. A memory of B rows also serves k * B rows: beams. The state has
        one size, so that `capacity` reserves nothing."""
        if not isinstance(memory, Memory):
            raise ValueError(f"a deep recurrent model needs memory=model.encode(source), got {type(memory).__name__}")
        if batch < 1 or batch % len(memory.x):
            raise ValueError(f"a memory of {len(memory.x)} rows serves a multiple of them, not a batch of {batch}")
        options = {"dtype": memory.x.dtype, "device": memory.x.device}
        layers = tuple(cells.zero(batch, **options) for cells in self.decoder)
        cross = self.cross.initial_state(len(memory.x), memory=memory, **options).state
        return DeepRecurrentState(layers, cross, Progress.initial(batch, memory.x.device))

    def extend(
        self, tokens: Tensor, state: DeepRecurrentState, *, keep: Tensor | None = None
    ) -> tuple[Tensor, DeepRecurrentState]:
        """New ids [B, n] -> logits [B, n, V] and the next state; a padded token leaves it as it was."""
        x, _, state = self._extend(tokens, state, keep)
        logits = self.output(x)
        return logits if keep is None else unpack(logits, keep), state

    def extend_with_attention(
        self, tokens: Tensor, state: DeepRecurrentState
    ) -> tuple[Tensor, DeepRecurrentState, Tensor]:
        """`extend`, and what the last token reads of each token of the memory, [B, S]."""
        x, queries, state = self._extend(tokens, state, None)
        return self.output(x), state, last_weights([(self.cross, queries)], state.cross)

    def fixed_state(self, state: DeepRecurrentState, capacity: int) -> DeepRecurrentState:
        """A state for steps that are captured as a CUDA graph: its tensors keep their sizes anyway."""
        return state._replace(progress=state.progress.bounded(capacity))

    def _extend(
        self, tokens: Tensor, state: DeepRecurrentState, keep: Tensor | None
    ) -> tuple[Tensor, Tensor, DeepRecurrentState]:
        packed, rows = pack_ids(tokens, keep)
        if not isinstance(state, DeepRecurrentState):
            raise ValueError(f"expected the state of this model, from start() or extend(), got {type(state).__name__}")
        batch = len(state.progress.length)
        if len(tokens) != batch:
            raise ValueError(f"tokens have {len(tokens)} rows and the state {batch}: select rows to match")
        out, queries, state = self._decode(packed, state.progress.place(rows), state)
        return out.y, queries, state

    def _read(self, source: Tensor, target: Tensor, keep: Tensor | None, target_keep: Tensor | None) -> _Read:
        """The whole target, with its real tokens on the left."""
        packed, rows = pack_ids(target, target_keep)
        check_rows_match(source, target)
        encoded, memory = self._encode(source, keep)
        # the state behind the last token is not used, so that padding needs no care there
        out, queries, _ = self._decode(packed, rows, self.start(len(target), memory=memory), ends=False)
        return _Read(memory, queries, out.y, gather_auxiliary({"encoder": encoded, "decoder": out}))

    def _encode(self, source: Tensor, keep: Tensor | None) -> tuple[Out, Memory]:
        ids, rows = pack_ids(source, keep)
        x = self.dropout(look_up(self.source_embedding, ids))
        first, second, *others = self.encoder
        back = reverse_rows(self.backward_layer(reverse_rows(x, rows))[0], rows)
        x = second(self.dropout(torch.cat([first(x)[0], back], -1)))[0]
        out = _feed(self.encoder_feed, x, rows)
        x = out.y
        for cells in others:
            x = x + cells(self.dropout(x))[0]
        memory = Memory(PlainCross.join(self.key(x), x), None if keep is None else rows.count)
        return out, memory

    def _decode(
        self, ids: Tensor, rows: Rows, state: DeepRecurrentState, ends: bool = True
    ) -> tuple[Out, Tensor, DeepRecurrentState]:
        """What predicts [B, n, width], the queries, and the next state; `ends`: rows may end before the last token, and
        their state is wanted."""
        count = rows.count if ends and rows.real() is not None else None
        bottom, *uppers = self.decoder
        x, last = bottom(self.dropout(look_up(self.target_embedding, ids)), state.layers[0], count)
        queries, layers = self.query(x), [last]
        # beams of one sentence fold into the queries of its memory
        folded = queries.reshape(len(state.cross.count), -1, queries.shape[2])
        context = self.cross.forward_packed(folded, state=state.cross).y.reshape(queries.shape)
        out = _feed(self.decoder_feed, x, rows)
        x = out.y
        for number, (cells, before) in enumerate(zip(uppers, state.layers[1:], strict=True), 1):
            y, last = cells(self.dropout(torch.cat([x, context], -1)), before, count)
            x = x + y if number >= RESIDUAL else y
            layers.append(last)
        state = state._replace(layers=tuple(layers), progress=state.progress.advance(rows))
        return out._replace(y=x), queries, state


def _cells(width: int, inputs: list[int]) -> "ModuleListOf[Cells]":
    return ModuleListOf(Cells("lstm", size, width) for size in inputs)


def _feed(layer: FeedForward | None, x: Tensor, rows: Rows) -> Out:
    """x + FFN(x), or x without a layer."""
    if layer is None:
        return Out(x)
    out = layer.forward_packed(x, rows)
    return out._replace(y=x + out.y)
