"""Convolutional translators: gated convolutions on both sides, attention in every layer of the decoder."""

import math
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.options import Range, config_dataclass
from regard.core.rows import Memory, Rows
from regard.core.shape import Shape
from regard.core.state import Out
from regard.kernels.convolution import convolve, next_tail
from regard.layers.position.base import Position
from regard.models.config import check_config
from regard.models.encoder_decoder import AttentiveEncoderDecoder, Decoded, DecoderState, embeddings
from regard.models.modules import ModuleListOf
from regard.models.plain_cross import PlainCross
from regard.models.stack import look_up
from regard.spec import POSITIONS

HALF = math.sqrt(0.5)  # keeps the variance of a sum of two
Blocks = tuple[tuple[int, int], ...]


@config_dataclass
class ConvolutionalConfig:
    """The config of a ConvS2S. `attention` takes a spec of role "cross" that is a function of queries, keys and values.
    `blocks` names the width and the kernel of each block; without it there are `layers` of them, all alike."""

    kind: Literal["convolutional"] = "convolutional"
    vocabulary: Annotated[int, "tokens of the vocabulary", Range(1)] = 37000
    target_vocabulary: Annotated[int | None, "tokens of the target's own vocabulary (default: shared)", Range(1)] = None
    width: Annotated[int, "width of the embeddings, and of the attention", Range(1)] = 512
    out_width: Annotated[int | None, "width of the vector that predicts (default: as width)", Range(1)] = None
    hidden: Annotated[int, "width of the convolutions", Range(1)] = 512
    kernel: Annotated[int, "tokens of a convolution, odd", Range(1)] = 3
    layers: Annotated[int, "blocks of the encoder, and as many of the decoder", Range(1)] = 4
    blocks: Annotated[Blocks | None, "width and kernel of each block, in the place of hidden, kernel and layers"] = None
    decoder_blocks: Annotated[Blocks | None, "those of the decoder (default: as the encoder)"] = None
    attention: Annotated[str, "spec of the attention from target to source"] = "dot"
    heads: Annotated[int, "heads of the attention", Range(1)] = 1
    longest: Annotated[int, "maximum number of positions, on each side", Range(1)] = 1024
    dropout: Annotated[
        float,
        "dropout of the embeddings, of what each convolution reads and of the vector that predicts",
        Range(0, below=1),
    ] = 0.2
    tied: Annotated[bool, "the output layer is the embedding of the target"] = True

    def __post_init__(self) -> None:
        if self.kind != "convolutional":
            raise ValueError(f"kind must be 'convolutional', got {self.kind!r}: other kinds have configs of their own")
        check_config(self)
        for name in ("blocks", "decoder_blocks"):
            for block in getattr(self, name) or ():
                if len(block) != 2 or min(block) < 1:
                    raise ValueError(f"{name} must be pairs of a width and a kernel, both at least 1, got {block}")
        for _, kernel in self.encoder_sizes:
            if kernel % 2 == 0:
                raise ValueError(f"the kernels of the encoder must be odd, as many tokens on each side, got {kernel}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}: choose heads that divide it")
        if self.tied and self.out_width not in (None, self.width):
            raise ValueError(f"tied needs out_width as width {self.width}, got {self.out_width}: set tied=False")

    @property
    def encoder_sizes(self) -> Blocks:
        """Width and kernel of each block of the encoder."""
        return self.blocks or ((self.hidden, self.kernel),) * self.layers

    @property
    def decoder_sizes(self) -> Blocks:
        """Width and kernel of each block of the decoder."""
        return self.decoder_blocks or self.encoder_sizes

    @property
    def receptive_field(self) -> int:
        """The number of source tokens that one vector of the encoder depends on."""
        return 1 + sum(kernel - 1 for _, kernel in self.encoder_sizes)


class Normed(nn.Module):
    """A linear map or a convolution with weight normalization (Salimans & Kingma 2016, arXiv 1602.07868): each row of
    the weight is `gain` times a direction. Starts at a normal of this deviation."""

    def __init__(self, size: tuple[int, ...], deviation: float):
        super().__init__()
        self.direction = nn.Parameter(torch.empty(size).normal_(std=deviation))
        self.gain = nn.Parameter(self.direction.detach().flatten(1).norm(dim=1))
        self.bias = nn.Parameter(torch.zeros(size[0]))

    @property
    def weight(self) -> Tensor:
        norms = self.direction.flatten(1).norm(dim=1)
        return self.direction * (self.gain / norms).view(-1, *[1] * (self.direction.dim() - 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def _linear(width: int, out: int, dropout: float = 0.0) -> Normed:
    """Variance in is variance out, where a share of the inputs is dropped."""
    return Normed((out, width), math.sqrt((1 - dropout) / width))


class Block(nn.Module):
    """A gated convolution and what it is added to."""

    def __init__(self, width: int, out: int, kernel: int, dropout: float):
        super().__init__()
        # a gated unit passes about a quarter of the variance
        self.convolution = Normed((2 * out, width, kernel), math.sqrt(4 * (1 - dropout) / (kernel * width)))
        self.residual = _linear(width, out) if width != out else None

    def bypass(self, x: Tensor) -> Tensor:
        return x if self.residual is None else self.residual(x)

    def convolve(self, x: Tensor, tail: Tensor | None, centred: bool) -> Tensor:
        y = convolve(x, self.convolution.weight, self.convolution.bias, tail=tail, centred=centred)
        return F.glu(y, -1)


class Reading(nn.Module):
    """What a block of the decoder asks the source, and how the answer comes back."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.query, self.answer = _linear(hidden, width), _linear(width, hidden)


def _blocks(width: int, sizes: Blocks, dropout: float) -> "ModuleListOf[Block]":
    widths = [width, *(size for size, _ in sizes)]
    return ModuleListOf(Block(widths[i], out, kernel, dropout) for i, (out, kernel) in enumerate(sizes))


class Convolutional(AttentiveEncoderDecoder):
    """Gehring et al. 2017, ConvS2S. With r = sqrt(1/2), e = word + position of the source and x_0 = W_1 e, a block is
    x <- r (GLU(Conv(x)) + x), and behind the last one the encoder leaves keys z = W_2 x and values v = r (z + e). In
    the decoder, with g = word + position of the target, convolutions read the past only, and in every block

        h = GLU(Conv(x)),   q = r (W h + g),   c = sqrt(m) sum_j softmax_j(q . z_j) v_j,   x <- r (r (W' c + h) + x),

    m is the number of source tokens. W_3 W_2 x predicts. All weights are normalized. The gradient of the keys is
    divided by twice the number of attentions. A token of the target is one step of constant size: each convolution
    keeps its last k - 1 inputs.

    >>> model = Convolutional(ConvolutionalConfig(vocabulary=8000, width=256, hidden=256))
    >>> logits = model(source, target, keep=source_keep, target_keep=target_keep).logits
    """

    def __init__(self, config: ConvolutionalConfig):
        super().__init__()
        self.config: ConvolutionalConfig = config
        width, p = config.width, config.dropout
        encoder, decoder = config.encoder_sizes, config.decoder_sizes
        self.source_embedding, self.target_embedding = embeddings(config, width, 0.1)
        self.source_position, self.target_position = (_positions(config, role) for role in ("self", "causal"))
        self.encoder_in, self.encoder_out = _linear(width, encoder[0][0], p), _linear(encoder[-1][0], width)
        self.encoder = _blocks(encoder[0][0], encoder, p)
        self.decoder_in = _linear(width, decoder[0][0], p)
        self.decoder = _blocks(decoder[0][0], decoder, p)
        self.readings: ModuleListOf[Reading] = ModuleListOf(Reading(hidden, width) for hidden, _ in decoder)
        self.cross = PlainCross(config.attention, width, config.heads)
        out, vocabulary = config.out_width or width, self.target_embedding.num_embeddings
        self.decoder_out = _linear(decoder[-1][0], out)
        if config.tied:
            self.output: nn.Module = nn.Linear(width, vocabulary)
            nn.init.zeros_(self.output.bias)
            self.output.weight = self.target_embedding.weight
        else:
            self.output = _linear(out, vocabulary, p)
        self.dropout = nn.Dropout(p)

    def encode_packed(self, ids: Tensor, rows: Rows) -> tuple[Out, Tensor | None]:
        """Keys and values side by side, [B, S, 2 width]."""
        real = rows.real()

        def blanked(x: Tensor) -> Tensor:
            return x if real is None else torch.where(real[..., None], x, 0)

        e = self._embed(self.source_embedding, self.source_position, ids, rows)
        x = self.encoder_in(e)
        for block in self.encoder:
            x = HALF * (block.convolve(blanked(self.dropout(x)), None, True) + block.bypass(x))
        z = blanked(self.encoder_out(x))
        # every attention sends a gradient here, through keys and values: together they are as large as one
        z = z.detach() + (z - z.detach()) / (2 * len(self.readings))
        return Out(PlainCross.join(z, HALF * (z + e))), None if real is None else rows.count

    def initial_layers(self, batch: int, memory: Memory) -> tuple[Tensor, ...]:
        """The last inputs of each convolution, [B, kernel - 1, E], newest at the right."""
        sizes = (block.convolution.direction.shape for block in self.decoder)
        return tuple(memory.x.new_zeros(batch, kernel - 1, width) for _, width, kernel in sizes)

    def decode_packed(self, ids: Tensor, rows: Rows, state: DecoderState, count: Tensor | None) -> Decoded:
        g = self._embed(self.target_embedding, self.target_position, ids, rows)
        x, tails, queries = self.decoder_in(g), [], []
        for block, reading, tail in zip(self.decoder, self.readings, state.layers, strict=True):
            bypass, x = block.bypass(x), self.dropout(x)
            tails.append(next_tail(tail, x, count))
            h = block.convolve(x, tail, False)
            queries.append(HALF * (reading.query(h) + g))
            x = HALF * (HALF * (reading.answer(self._answer(queries[-1], state)) + h) + bypass)
        return Decoded(Out(self.dropout(self.decoder_out(x))), tuple(tails), tuple(queries))

    def _embed(self, embedding: nn.Embedding, position: Position, ids: Tensor, rows: Rows) -> Tensor:
        return self.dropout(position.add(look_up(embedding, ids), rows))

    def _answer(self, query: Tensor, state: DecoderState) -> Tensor:
        """sqrt(m) sum_j a_j v_j; a sum of m values of like size is smaller by sqrt(m) than they are."""
        count = state.source.count
        scale = count.to(query.dtype).sqrt().repeat_interleave(query.shape[0] // count.shape[0])
        return self.attend(query, state) * scale[:, None, None]


def _positions(config: ConvolutionalConfig, role: Literal["self", "causal"]) -> Position:
    position: Any = POSITIONS.build(
        f"learned(longest={config.longest})", Shape.of(width=config.width, heads=1, role=role)
    )
    nn.init.normal_(position.table, std=0.1)
    return position
