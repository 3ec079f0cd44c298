"""ByteNet: two stacks of dilated convolutions, one upon the other, without attention."""

import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.options import Range, config_dataclass
from regard.core.rows import Memory, Rows
from regard.core.state import Out
from regard.kernels.convolution import convolve, next_tail
from regard.models.config import check_config
from regard.models.encoder_decoder import Decoded, DecoderState, EncoderDecoder, embeddings
from regard.models.modules import ModuleListOf
from regard.models.recording import KnownMap, Recorder, place_map, take_map
from regard.models.stack import look_up
from regard.models.transformer import check_rows_match, pack_ids


@config_dataclass
class ByteNetConfig:
    """The config of a ByteNet. Vectors between blocks are twice as wide as `width`, that of the convolutions."""

    kind: Literal["bytenet"] = "bytenet"
    vocabulary: Annotated[int, "tokens of the vocabulary", Range(1)] = 37000
    target_vocabulary: Annotated[int | None, "tokens of the target's own vocabulary (default: shared)", Range(1)] = None
    width: Annotated[int, "width of the convolutions; vectors between blocks have twice as many numbers", Range(1)] = (
        800
    )
    layers: Annotated[int, "blocks of the encoder, and as many of the decoder", Range(1)] = 30
    kernel: Annotated[int, "taps of a convolution, odd", Range(1)] = 3
    dilations: Annotated[
        tuple[int, ...], "tokens from one tap to the next, in each block; repeated over the blocks", Range(1)
    ] = (1, 2, 4, 8, 16)
    unfold_ratio: Annotated[float, "columns of the encoder for each source token, at least one", Range(1, 100)] = 1.2
    unfold_extra: Annotated[int, "columns of the encoder beside those", Range(0)] = 0
    join: Annotated[
        Literal["add", "concatenate"],
        "how the decoder reads a column: added to the target's embedding, or beside it through a linear map",
    ] = "add"
    dropout: Annotated[float, "dropout of the embeddings and of what each block adds", Range(0, below=1)] = 0.1
    tied: Annotated[bool, "the output layer is the embedding of the target"] = True

    def __post_init__(self) -> None:
        if self.kind != "bytenet":
            raise ValueError(f"kind must be 'bytenet', got {self.kind!r}: other kinds have configs of their own")
        check_config(self)
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, as many taps on each side in the encoder, got {self.kernel}")
        if not self.dilations:
            raise ValueError("dilations must name at least one")

    @property
    def block_dilations(self) -> list[int]:
        """That of each block."""
        return [self.dilations[block % len(self.dilations)] for block in range(self.layers)]

    @property
    def receptive_field(self) -> int:
        """The number of tokens that one vector of a side depends on."""
        return 1 + (self.kernel - 1) * sum(self.block_dilations)


class ResidualBlock(nn.Module):
    """norm - ReLU - 1x1 (2d -> d) - norm - ReLU - dilated convolution (d -> d) - norm - ReLU - 1x1 (d -> 2d), added to
    the input: (4 + k) d^2 + 12 d parameters."""

    def __init__(self, width: int, kernel: int, dilation: int):
        super().__init__()
        self.dilation = dilation
        self.norms = nn.ModuleList(nn.LayerNorm(size) for size in (2 * width, width, width))
        self.narrow, self.widen = nn.Linear(2 * width, width), nn.Linear(width, 2 * width)
        self.taps = nn.Conv1d(width, width, kernel)
        for layer in (self.narrow, self.taps, self.widen):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            assert layer.bias is not None, "all of them have one"
            nn.init.zeros_(layer.bias)
        # a new block adds little: many of them stand upon each other
        nn.init.normal_(self.widen.weight, std=0.1 / math.sqrt(width))

    def read(self, x: Tensor) -> Tensor:
        """What the convolution reads, [B, T, d]."""
        first, second, _ = self.norms
        return F.relu(second(self.narrow(F.relu(first(x)))))

    def convolve(self, x: Tensor, tail: Tensor | None, centred: bool) -> Tensor:
        """From there to what is added to the input, [B, T, 2d]."""
        options = {"dilation": self.dilation, "tail": tail, "centred": centred}
        y = convolve(x, self.taps.weight, self.taps.bias, **options)
        return self.widen(F.relu(self.norms[2](y)))


class ByteNet(EncoderDecoder):
    """Kalchbrenner et al. 2016: the decoder stands on the encoder, column by column. The encoder reads the source with
    blanks behind it, |t| = a |s| + b columns, through blocks whose taps stand on both sides. Step t of the decoder
    reads column t and the tokens before it, through blocks whose taps stand in the past; it may continue behind the
    last column, where it reads zeros ("dynamic unfolding"). A last norm and ReLU stand before the output layer. Time
    and memory grow with the length; a step of decoding has one size.

    There are no weights to look at. `maps` are gradients: |d logit of the next token / d embedding of a source token|,
    divided by their sum, as the paper shows them.

    >>> model = ByteNet(ByteNetConfig(vocabulary=300, width=64, layers=10))
    >>> logits = model(source, target, keep=source_keep, target_keep=target_keep).logits
    """

    def __init__(self, config: ByteNetConfig):
        super().__init__()
        self.config: ByteNetConfig = config
        double = 2 * config.width
        self.source_embedding, self.target_embedding = embeddings(config, double, double**-0.5)
        self.encoder, self.decoder = (
            ModuleListOf(ResidualBlock(config.width, config.kernel, dilation) for dilation in config.block_dilations)
            for _ in range(2)
        )
        self.joined = nn.Linear(2 * double, double) if config.join == "concatenate" else None
        self.norm = nn.LayerNorm(double)
        self.output = nn.Linear(double, self.target_embedding.num_embeddings)
        nn.init.zeros_(self.output.bias)
        if config.tied:
            self.output.weight = self.target_embedding.weight
        self.dropout = nn.Dropout(config.dropout)

    def maps(
        self,
        source: Tensor,
        target: Tensor,
        *,
        keep: Tensor | None = None,
        target_keep: Tensor | None = None,
        recorder: Recorder = take_map,
    ) -> list[Tensor]:
        """How much the logit of the token behind each target token (the best, behind the last) depends on each source
        token: one map [B, 1, T, S] of gradients. It takes a backward pass for each target token."""
        # a graph of gradients, whatever mode the caller is in
        with torch.inference_mode(False), torch.enable_grad():
            (ids, rows), (written, places) = (
                pack_ids(part.clone(), None if real is None else real.clone())
                for part, real in ((source, keep), (target, target_keep))
            )
            check_rows_match(source, target)
            e = look_up(self.source_embedding, ids).detach().requires_grad_()
            state = self.start(len(ids), memory=Memory(*self._columns(e, rows)))
            logits = self.output(self.decode_packed(written, places, state, None).out.y)
            behind = torch.arange(1, places.T + 1, device=ids.device) < places.count[:, None]
            after = torch.where(behind, F.pad(written[:, 1:], (0, 1)), logits.argmax(-1))
            chosen = logits.gather(2, after[..., None]).sum((0, 2))  # [T]: rows do not meet
            grads = [torch.autograd.grad(step, e, retain_graph=True)[0].norm(dim=2) for step in chosen]
            sizes = torch.stack(grads, 1)
            real = rows.real()
            sizes = sizes if real is None else torch.where(real[:, None], sizes, 0)
            shares = sizes / sizes.sum(2, keepdim=True).clamp(min=torch.finfo(sizes.dtype).tiny)
        found = recorder(KnownMap("gradients"), shares.detach(), memory=Memory(e.detach(), None))
        return [place_map(found, "tokens", keep, target_keep)]

    def encode_packed(self, ids: Tensor, rows: Rows) -> tuple[Out, Tensor | None]:
        """The columns of the encoder, [B, M, 2 width], and how many each row has."""
        columns, count = self._columns(look_up(self.source_embedding, ids), rows)
        return Out(columns), count

    def initial_layers(self, batch: int, memory: Memory) -> tuple[Tensor, ...]:
        """The last inputs of each convolution, [B, (kernel - 1) dilation, width]."""
        reach, width = self.config.kernel - 1, self.config.width
        return tuple(memory.x.new_zeros(batch, reach * block.dilation, width) for block in self.decoder)

    def project_memory(self, memory: Memory) -> Tensor:
        """The columns as they are, zeros behind the last of each row."""
        return memory.x

    def decode_packed(self, ids: Tensor, rows: Rows, state: DecoderState, count: Tensor | None) -> Decoded:
        x, columns = self.dropout(look_up(self.target_embedding, ids)), self._read_columns(rows, state.source)
        x, tails = x + columns if self.joined is None else self.joined(torch.cat([x, columns], -1)), []
        for block, tail in zip(self.decoder, state.layers, strict=True):
            read = block.read(x)
            tails.append(next_tail(tail, read, count))
            x = x + self.dropout(block.convolve(read, tail, False))
        return Decoded(Out(F.relu(self.norm(x))), tuple(tails))

    def _columns(self, e: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Those of embeddings [B, S, 2 width], and how many each row has (None: all)."""
        ratio, extra = self.config.unfold_ratio, self.config.unfold_extra
        real, M = rows.real(), math.ceil(ratio * rows.T + extra)
        e = e if real is None else torch.where(real[..., None], e, 0)
        x = F.pad(self.dropout(e), (0, 0, 0, M - rows.T))
        count = torch.ceil(ratio * rows.count.double() + extra).long()
        inside = None if real is None else (torch.arange(M, device=e.device) < count[:, None])[..., None]
        for block in self.encoder:
            read = block.read(x)
            read = read if inside is None else torch.where(inside, read, 0)
            x = x + self.dropout(block.convolve(read, None, True))
        return (x, None) if inside is None else (torch.where(inside, x, 0), count)

    @staticmethod
    def _read_columns(rows: Rows, columns: Tensor) -> Tensor:
        """The column of each new token, [B, n, 2 width]; zeros behind the last."""
        batch, (memories, M, _) = rows.count.shape[0], columns.shape
        # beams of one sentence share its columns
        of_row = torch.arange(batch, device=rows.count.device) // (batch // memories)
        at = rows.positions()
        found = columns[of_row[:, None], at.clamp(max=M - 1)]
        return torch.where((at < M)[..., None], found, 0)
