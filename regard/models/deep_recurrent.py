"""Deep recurrent translators: stacks of LSTMs with residuals or fast-forward connections, whose upper layers all read
one attention."""

from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor, nn

from regard.core.options import Range, config_dataclass
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


@config_dataclass
class DeepRecurrentConfig:
    """The config of a GNMT or, with `connections="fast-forward"`, of a Deep-Att. `attention` takes a spec of role
    "cross" that is a function of queries, keys and values; `feedforward` one of a layer between two recurrent ones,
    such as a mixture of experts."""

    kind: Literal["deep-recurrent"] = "deep-recurrent"
    vocabulary: Annotated[int, "tokens of the vocabulary", Range(1)] = 37000
    target_vocabulary: Annotated[int | None, "tokens of the target's own vocabulary (default: shared)", Range(1)] = None
    width: Annotated[int, "width of the embeddings and of every layer", Range(1)] = 1024
    layers: Annotated[int, "layers of the encoder, of which the first reads both ways", Range(2)] = 4
    decoder_layers: Annotated[int | None, "layers of the decoder (default: layers)", Range(2)] = None
    connections: Annotated[
        Literal["residual", "fast-forward"],
        "what passes by a recurrence: what it reads, from residual_from on; or what its gates are given, linearly",
    ] = "residual"
    residual_from: Annotated[
        int,
        "first layer that is added to what it reads; the encoder's second, which reads both ways, never is",
        Range(2),
    ] = 3
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
        if self.feedforward is not None and self.connections != "residual":
            raise ValueError(
                f"feedforward stands between layers with residual connections, got connections {self.connections!r}: "
                "leave one of them out"
            )
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}: choose heads that divide it")


class Passed(NamedTuple):
    """What one layer hands to the next."""

    h: Tensor  # [B, T, width]
    f: Tensor | None = None  # [B, T, 4 width], what its gates were given: a fast-forward connection


class DeepRecurrent(AttentiveEncoderDecoder):
    """Wu et al. 2016, GNMT, in the form of NVIDIA's code. The first layer of the encoder reads both ways, the others
    from left to right. From the third layer on (`residual_from`), a layer is added to what it reads. The bottom layer
    of the decoder asks for a context,

        c_t = sum_j softmax_j(g v / |v| . tanh(W_q h_t + W_k m_j + b)) m_j,

    and every upper layer reads it beside the layer below: LSTM([x; c]). The last one predicts. All states start at
    zero. (In the paper the bottom layer reads the context of the step before as well, so that training takes one step
    per token.)

    With `feedforward` a token passes through one more layer, x + FFN(x), behind the second layer of the encoder and the
    first of the decoder: the mixture of experts between LSTMs of Shazeer et al. 2017, whose own layers are LSTMs with a
    projection and which has a sigmoid behind the experts. It adds every layer to what it reads: `residual_from=2`.

    With `connections="fast-forward"` it has the connections of Zhou et al. 2016, Deep-Att. What the gates of a layer
    are given is a linear map of what those of the layer below were given, past its recurrence:

        f_k = W_k [f_{k-1}; h_{k-1}] + b_k,    h_k(t) = LSTM gates of f_k(t) + U_k h_k(t - 1),

    with f_1 = W_1 e of the embeddings. The encoder has two columns whose layers read in turns from the left and from
    the right, the second column always the other way; a linear map of [f; h] of both leaves the memory. In the decoder
    upper layers read [f; h; c], and a linear map of the last [f; h] predicts. Dropout spares f. (Attention stays that
    of GNMT: the paper's bottom layer reads the context too.)

    >>> model = DeepRecurrent(DeepRecurrentConfig(vocabulary=8000, width=256))
    >>> logits = model(source, target, keep=source_keep, target_keep=target_keep).logits
    """

    def __init__(self, config: DeepRecurrentConfig):
        super().__init__()
        self.config: DeepRecurrentConfig = config
        width, layers = config.width, config.layers
        decoder_layers = layers if config.decoder_layers is None else config.decoder_layers
        self.source_embedding, self.target_embedding = embeddings(config, width)
        fast = config.connections == "fast-forward"
        passed = 5 * width if fast else width
        if fast:
            sizes = [width, *[passed] * (layers - 1)]
            self.columns: ModuleListOf[ModuleListOf[Cells]] = ModuleListOf(_cells(width, sizes) for _ in range(2))
            self.encoder_out, self.decoder_out = nn.Linear(2 * passed, width), nn.Linear(passed, width)
        else:
            self.backward_layer = Cells("lstm", width, width)
            self.encoder = _cells(width, [width, 2 * width, *[width] * (layers - 2)])
        self.decoder = _cells(width, [width, *[passed + width] * (decoder_layers - 1)])
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.cross = PlainCross(config.attention, width, config.heads)
        self.output = nn.Linear(width, self.target_embedding.num_embeddings)
        self._draw()
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

    def _draw(self) -> None:
        for name, parameter in self.named_parameters():
            if not name.startswith("cross."):
                nn.init.uniform_(parameter, -0.1, 0.1)
        for cells in self.modules():
            if isinstance(cells, Cells):
                nn.init.zeros_(cells.bias_hh)
                if self.config.connections == "fast-forward":
                    # no gate bounds what passes through all layers: each leaves its size as it is
                    nn.init.normal_(cells.weight_ih, std=cells.width**-0.5)

    def encode_packed(self, ids: Tensor, rows: Rows) -> tuple[Out, Tensor | None]:
        """Keys and values side by side, [B, S, 2 width]."""
        e = look_up(self.source_embedding, ids)
        out = (
            self._encode_both_ways(e, rows) if self.config.connections == "residual" else self._encode_columns(e, rows)
        )
        return out._replace(y=PlainCross.join(self.key(out.y), out.y)), None if rows.real() is None else rows.count

    def _encode_both_ways(self, e: Tensor, rows: Rows) -> Out:
        x = self.dropout(e)
        first, second, *others = self.encoder
        back = reverse_rows(self.backward_layer(reverse_rows(x, rows))[0], rows)
        x = second(self.dropout(torch.cat([first(x)[0], back], -1)))[0]
        out = _feed(self.encoder_feed, x, rows)
        x = out.y
        for number, cells in enumerate(others, 3):
            y = cells(self.dropout(x))[0]
            x = x + y if number >= self.config.residual_from else y
        return out._replace(y=x)

    def _encode_columns(self, e: Tensor, rows: Rows) -> Out:
        tops = []
        for column, stack in enumerate(self.columns):
            below = Passed(e)
            for number, cells in enumerate(stack):
                read = self._join(below)
                leftwards = (column + number) % 2 == 1
                h = cells(reverse_rows(read, rows) if leftwards else read)[0]
                below = Passed(reverse_rows(h, rows) if leftwards else h, cells.given(read))
            tops.append(self._join(below))
        return Out(self.encoder_out(torch.cat(tops, -1)))

    def _join(self, below: Passed, *others: Tensor) -> Tensor:
        """What a layer reads: [f; h; ...]"""
        read = self.dropout(torch.cat([below.h, *others], -1))
        return read if below.f is None else torch.cat([below.f, read], -1)

    def initial_layers(self, batch: int, memory: Memory) -> tuple[State, ...]:
        """h and c of each layer, [B, width]."""
        return tuple(cells.zero(batch, memory.x.dtype, memory.x.device) for cells in self.decoder)

    def decode_packed(self, ids: Tensor, rows: Rows, state: DecoderState, count: Tensor | None) -> Decoded:
        bottom, *uppers = self.decoder
        fast = self.config.connections == "fast-forward"
        read = self.dropout(look_up(self.target_embedding, ids))
        h, last = bottom(read, state.layers[0], count)
        queries, layers = self.query(h), [last]
        context = self.attend(queries, state)
        out = _feed(self.decoder_feed, h, rows)
        below = Passed(out.y, bottom.given(read) if fast else None)
        for number, (cells, before) in enumerate(zip(uppers, state.layers[1:], strict=True), 2):
            read = self._join(below, context)
            y, last = cells(read, before, count)
            layers.append(last)
            below = (
                Passed(y, cells.given(read))
                if fast
                else Passed(below.h + y if number >= self.config.residual_from else y)
            )
        top = self.decoder_out(self._join(below)) if fast else below.h
        return Decoded(out._replace(y=top), tuple(layers), (queries,))


def _cells(width: int, inputs: list[int]) -> "ModuleListOf[Cells]":
    return ModuleListOf(Cells("lstm", size, width) for size in inputs)


def _feed(layer: FeedForward | None, x: Tensor, rows: Rows) -> Out:
    """x + FFN(x), or x without a layer."""
    if layer is None:
        return Out(x)
    out = layer.forward_packed(x, rows)
    return out._replace(y=x + out.y)
