"""Deep recurrent translators: stacks of LSTMs with residuals, whose upper layers all read one attention."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from regard.core.options import Range
from regard.core.rows import Memory, Rows, reverse_rows
from regard.core.state import Out
from regard.kernels.recurrence import Cells, State
from regard.layers.feedforward.base import FeedForward, Sizes
from regard.models.config import check_config
from regard.models.encoder_decoder import AttentiveEncoderDecoder, Decoded, DecoderState, embeddings
from regard.models.modules import ModuleListOf
from regard.models.plain_cross import PlainCross
from regard.models.stack import look_up
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


class DeepRecurrent(AttentiveEncoderDecoder):
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
        self.source_embedding, self.target_embedding = embeddings(config, width)
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

    def encode_packed(self, ids: Tensor, rows: Rows) -> tuple[Out, Tensor | None]:
        """Keys and values side by side, [B, S, 2 width]."""
        x = self.dropout(look_up(self.source_embedding, ids))
        first, second, *others = self.encoder
        back = reverse_rows(self.backward_layer(reverse_rows(x, rows))[0], rows)
        x = second(self.dropout(torch.cat([first(x)[0], back], -1)))[0]
        out = _feed(self.encoder_feed, x, rows)
        x = out.y
        for cells in others:
            x = x + cells(self.dropout(x))[0]
        return out._replace(y=PlainCross.join(self.key(x), x)), None if rows.real() is None else rows.count

    def initial_layers(self, batch: int, memory: Memory) -> tuple[State, ...]:
        """h and c of each layer, [B, width]."""
        return tuple(cells.zero(batch, memory.x.dtype, memory.x.device) for cells in self.decoder)

    def decode_packed(self, ids: Tensor, rows: Rows, state: DecoderState, count: Tensor | None) -> Decoded:
        bottom, *uppers = self.decoder
        x, last = bottom(self.dropout(look_up(self.target_embedding, ids)), state.layers[0], count)
        queries, layers = self.query(x), [last]
        context = self.attend(queries, state)
        out = _feed(self.decoder_feed, x, rows)
        x = out.y
        for number, (cells, before) in enumerate(zip(uppers, state.layers[1:], strict=True), 1):
            y, last = cells(self.dropout(torch.cat([x, context], -1)), before, count)
            x = x + y if number >= RESIDUAL else y
            layers.append(last)
        return Decoded(out._replace(y=x), tuple(layers), (queries,))


def _cells(width: int, inputs: list[int]) -> "ModuleListOf[Cells]":
    return ModuleListOf(Cells("lstm", size, width) for size in inputs)


def _feed(layer: FeedForward | None, x: Tensor, rows: Rows) -> Out:
    """x + FFN(x), or x without a layer."""
    if layer is None:
        return Out(x)
    out = layer.forward_packed(x, rows)
    return out._replace(y=x + out.y)
