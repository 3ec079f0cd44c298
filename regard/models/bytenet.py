"""ByteNet: two stacks of dilated convolutions, one upon the other, without attention."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.model import Hidden, Model, Prediction
from regard.core.options import Range
from regard.core.rows import Memory, Rows, unpack
from regard.core.state import Progress, check_rows, take_rows
from regard.kernels.convolution import convolve, next_tail
from regard.models.config import check_config
from regard.models.modules import ModuleListOf
from regard.models.recording import KnownMap, Recorder, take_map
from regard.models.stack import look_up
from regard.models.transformer import check_rows_match, pack_ids


@dataclass(frozen=True)
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


class ByteNetState(NamedTuple):
    """What the decoder keeps. `select` copies rows of it all; `reorder` only those of the tokens, for beams over one
    memory."""

    tails: tuple[Tensor, ...]  # [B, (kernel - 1) dilation, width]: the last inputs of each convolution
    columns: Tensor  # [B, M, 2 width] of the encoder, zeros behind the last of each row
    progress: Progress

    def select(self, rows: Tensor) -> "ByteNetState":
        return self.reorder(rows)._replace(columns=self.columns[rows])

    def reorder(self, rows: Tensor) -> "ByteNetState":
        check_rows(rows, self)
        return self._replace(tails=take_rows(self.tails, rows), progress=take_rows(self.progress, rows))


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


class ByteNet(Model):
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
        self.source_embedding = self.target_embedding = _embedding(config.vocabulary, double)
        if config.target_vocabulary is not None:
            self.target_embedding = _embedding(config.target_vocabulary, double)
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

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        keep: Tensor | None = None,
        target_keep: Tensor | None = None,
    ) -> Prediction:
        """ids [B, S] and [B, T] -> logits at each position of the target."""
        logits = self.output(self.hidden(source, target, keep=keep, target_keep=target_keep).x)
        return Prediction(logits if target_keep is None else unpack(logits, target_keep), None)

    def hidden(
        self,
        source: Tensor,
        target: Tensor,
        *,
        keep: Tensor | None = None,
        target_keep: Tensor | None = None,
    ) -> Hidden:
        """`forward` before the output layer, which a loss puts on the real tokens only."""
        check_rows_match(source, target)
        memory = self.encode(source, keep=keep)
        return Hidden(self._decode(*pack_ids(target, target_keep), self.start(len(target), memory=memory))[0], None)

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
            state = self.start(len(ids), memory=self._encode(e, rows))
            logits = self.output(self._decode(written, places, state)[0])
            behind = torch.arange(1, places.T + 1, device=ids.device) < places.count[:, None]
            after = torch.where(behind, F.pad(written[:, 1:], (0, 1)), logits.argmax(-1))
            chosen = logits.gather(2, after[..., None]).sum((0, 2))  # [T]: rows do not meet
            grads = [torch.autograd.grad(step, e, retain_graph=True)[0].norm(dim=2) for step in chosen]
            sizes = torch.stack(grads, 1)
            real = rows.real()
            sizes = sizes if real is None else torch.where(real[:, None], sizes, 0)
            shares = sizes / sizes.sum(2, keepdim=True).clamp(min=torch.finfo(sizes.dtype).tiny)
        found = recorder(KnownMap("gradients"), shares.detach(), memory=Memory(e.detach(), None))
        found = found if target_keep is None else unpack(found, target_keep[:, None], dim=2)
        return [found if keep is None else unpack(found, keep[:, None, None], dim=3)]

    def encode(self, source: Tensor, *, keep: Tensor | None = None) -> Memory:
        """The columns of the encoder, [B, M, 2 width], and how many each row has."""
        ids, rows = pack_ids(source, keep)
        return self._encode(look_up(self.source_embedding, ids), rows)

    def start(self, batch: int, *, memory: Memory | None = None, capacity: int | None = None) -> ByteNetState:
        """The decoder's state before the first token. A memory of B rows also serves k * B rows: beams. The state has
        one size, so that `capacity` reserves nothing."""
        if not isinstance(memory, Memory):
            raise ValueError(f"ByteNet needs memory=model.encode(source), got {type(memory).__name__}")
        if batch < 1 or batch % len(memory.x):
            raise ValueError(f"a memory of {len(memory.x)} rows serves a multiple of them, not a batch of {batch}")
        reach, width = self.config.kernel - 1, self.config.width
        tails = tuple(memory.x.new_zeros(batch, reach * block.dilation, width) for block in self.decoder)
        return ByteNetState(tails, memory.x, Progress.initial(batch, memory.x.device))

    def extend(self, tokens: Tensor, state: ByteNetState, *, keep: Tensor | None = None) -> tuple[Tensor, ByteNetState]:
        """New ids [B, n] -> logits [B, n, V] and the next state; a padded token leaves it as it was."""
        packed, rows = pack_ids(tokens, keep)
        if not isinstance(state, ByteNetState):
            raise ValueError(f"expected the state of this model, from start() or extend(), got {type(state).__name__}")
        batch = len(state.progress.length)
        if len(tokens) != batch:
            raise ValueError(f"tokens have {len(tokens)} rows and the state {batch}: select rows to match")
        x, state = self._decode(packed, state.progress.place(rows), state)
        logits = self.output(x)
        return logits if keep is None else unpack(logits, keep), state

    def fixed_state(self, state: ByteNetState, capacity: int) -> ByteNetState:
        """A state for steps that are captured as a CUDA graph: its tensors keep their sizes anyway."""
        return state._replace(progress=state.progress.bounded(capacity))

    def _encode(self, e: Tensor, rows: Rows) -> Memory:
        """Columns of embeddings [B, S, 2 width]."""
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
        return Memory(x if inside is None else torch.where(inside, x, 0), None if inside is None else count)

    def _decode(self, ids: Tensor, rows: Rows, state: ByteNetState) -> tuple[Tensor, ByteNetState]:
        """What predicts [B, n, 2 width], and the next state."""
        x, columns = self.dropout(look_up(self.target_embedding, ids)), self._columns(rows, state)
        x = x + columns if self.joined is None else self.joined(torch.cat([x, columns], -1))
        count, tails = None if rows.real() is None else rows.count, []
        for block, tail in zip(self.decoder, state.tails, strict=True):
            read = block.read(x)
            tails.append(next_tail(tail, read, count))
            x = x + self.dropout(block.convolve(read, tail, False))
        state = state._replace(tails=tuple(tails), progress=state.progress.advance(rows))
        return F.relu(self.norm(x)), state

    def _columns(self, rows: Rows, state: ByteNetState) -> Tensor:
        """The column of each new token, [B, n, 2 width]; zeros behind the last."""
        batch, (memories, M, _) = len(rows.count), state.columns.shape
        # beams of one sentence share its columns
        of_row = torch.arange(batch, device=rows.count.device) // (batch // memories)
        at = rows.positions()
        found = state.columns[of_row[:, None], at.clamp(max=M - 1)]
        return torch.where((at < M)[..., None], found, 0)


def _embedding(vocabulary: int, width: int) -> nn.Embedding:
    embedding = nn.Embedding(vocabulary, width)
    nn.init.normal_(embedding.weight, std=width**-0.5)
    return embedding
