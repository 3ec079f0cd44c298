"""The Funnel-Transformer: blocks of layers on ever shorter sequences, and a decoder at full length where it is needed.

Padding is met once, on token ids, as in the Transformer: a pooled vector is the mean of the real tokens of its window.
"""

from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.model import Hidden, Model, Prediction
from regard.core.options import Range, config_dataclass
from regard.core.rows import Memory, Rows, blank
from regard.core.state import Out
from regard.layers.position.base import Position
from regard.models.block import Block, gather_auxiliary
from regard.models.config import Norm
from regard.models.modules import ModuleListOf
from regard.models.pooling import POOLING, Answer, EncoderConfig
from regard.models.stack import Stack, forward_blocks, link_layers
from regard.models.transformer import pack_ids
from regard.spec import Spec, over_layers


@config_dataclass
class FunnelConfig(EncoderConfig):
    """The config of a Funnel-Transformer. `attention` takes specs of role "self", repeated over all layers;
    `cross_attention` a spec of role "cross", for the pooled queries over what is not pooled yet."""

    kind: Literal["funnel"] = "funnel"
    layers: Annotated[
        tuple[int, ...], "layers of each block; every block after the first halves the sequence", Range(1)
    ] = (4, 4, 4)
    decoder_layers: Annotated[int, "layers at full length, without classes", Range(0)] = 2
    cross_attention: Annotated[str, "spec of the attention of pooled queries to what is not pooled yet"] = "softmax"
    queries_only: Annotated[bool, "only queries are pooled where a block begins; false: keys and values too"] = True
    apart: Annotated[bool, "the first token, a [CLS], is pooled with no other"] = True
    places: Annotated[
        Literal["tokens", "vectors"],
        "what positions inside attention count: tokens, 2^b apart in block b; or the vectors of each block",
    ] = "tokens"
    norm: Norm = "post"
    pooling: Annotated[Literal["pma", "mean", "first"], POOLING] = "first"
    earlier: ClassVar[dict[str, Any]] = {"places": "vectors"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.layers, int) or not self.layers:
            raise ValueError(f"layers must be a number for each block, such as [4, 4, 4], got {self.layers}")


class Funnel(Model):
    """Dai et al. 2020 (arXiv 2006.03236).

    Where a block b > 0 begins, windows of two tokens become one, h' = mean(h), and the first layer has the queries h'
    over the keys and values h,

        h <- LN(h' + Attention(h', h, h)),    h <- LN(h + FFN(h)),

    so that the model learns what to keep of the window; the other layers of the block see the short sequence only. The
    last window of an odd number of tokens is one token. Without classes a decoder predicts every token: the last
    block's vectors, each repeated over the tokens it stands for, plus the first block's output, through
    `decoder_layers` more.

    Positions inside attention (relative ones, as in the paper) count tokens: slot i of block b stands at
    2^b (i - c) + c, where c = 1 if the first token is apart and 0 otherwise, so that with position="xl" the pooled
    queries read by

        ((q_i + u) . k_j + (q_i + v) . W_R R_d) / sqrt(D),    d = 2^(b - 1) (2 i - j - c),

    without the second term where i or j is the first token and that is apart (but for rotations and windows, which give
    it its place). Positions that are added to the input are there for all. With places="vectors" each block counts its
    own slots and its first layer reads by content alone. What differs from the authors' code: its positions
    are always those of "xl", which is not the default here, it also has a term
    for the relation of two segments and drops the last token before it pools (`truncate_seq`), its queries have no
    bias, its GELU is the one by tanh and the epsilon of its norms 1e-9.

    Not causal: a pooled vector knows the token behind. Time (N / 2^b)^2 of each layer, less than 4/3 of the first
    block's in all; memory N.

    >>> model = Funnel(FunnelConfig(vocabulary=8000, layers=(4, 4, 4), classes=2))
    >>> logits = model(tokens, keep=keep).logits
    """

    def __init__(self, config: FunnelConfig):
        super().__init__()
        self.config: FunnelConfig = config
        layer = config.layer()
        specs, feeds = (over_layers(part, sum(config.layers)) for part in (config.attention, config.feedforward))
        first, *others = config.layers
        self.first = Stack(layer, config.vocabulary, first, specs[:first], None, feeds[:first])
        # pre-norm layers are followed by one norm, behind the last of them
        self.first.norm = nn.Identity()
        self.blocks: ModuleListOf[ModuleListOf[Block]] = ModuleListOf()
        for count in others:
            done = first + sum(len(block) for block in self.blocks)
            self.blocks.append(self._block(specs[done : done + count], feeds[done : done + count]))
            self._place(self.blocks[-1], len(self.blocks))
        self.decoder: ModuleListOf[Block] = ModuleListOf()
        if config.classes is None and config.decoder_layers:
            self.decoder.extend(Block(layer, spec, None) for spec in over_layers(specs[:1], config.decoder_layers))
            link_layers(self.decoder)
        for part in (self.first, self.decoder):
            self._place(part, 0)
        self.norm = nn.LayerNorm(config.width) if config.norm == "pre" else nn.Identity()
        self.answer = Answer(config, self.first.embedding, config.width)

    def forward(self, tokens: Tensor, *, keep: Tensor | None = None) -> Prediction:
        """ids [B, T] -> logits [B, T, V], or [B, classes]"""
        if self.config.classes is None:
            return self.answer.at_tokens(self.hidden(tokens, keep=keep), keep)
        outs, _, short = self._encode(tokens, keep)
        logits, pooled = self.answer(Memory(self.norm(outs[-1].y), None if keep is None else short.count))
        return Prediction(logits, *gather_auxiliary(_named(outs) | {"pooling": pooled}))

    @property
    def output(self) -> nn.Linear:
        """The output layer."""
        return self.answer.output

    def hidden(self, tokens: Tensor, *, keep: Tensor | None = None) -> Hidden:
        """What the output layer reads where there are no classes, with the real tokens of each row on the left."""
        self.answer.check_tokens()
        outs, rows, _ = self._encode(tokens, keep)
        x = outs[0].y + stretch(outs[-1].y, rows.T, 2 ** len(self.blocks), self.config.apart)
        outs.append(forward_blocks(self.decoder, x, rows))
        return Hidden(self.norm(outs[-1].y), *gather_auxiliary(_named(outs)))

    def _encode(self, tokens: Tensor, keep: Tensor | None) -> tuple[list[Out], Rows, Rows]:
        """What each block makes of the tokens, where they stand, and where the vectors of the last block stand."""
        packed, rows = pack_ids(tokens, keep)
        outs, short = [self.first(packed, rows)], rows
        for block in self.blocks:
            out, short = self._shorten(block, outs[-1].y, short)
            outs.append(out)
        return outs, rows, short

    def _block(self, specs: list[Spec], feeds: list[Spec]) -> "ModuleListOf[Block]":
        layer = self.config.layer()
        pairs: list[tuple[Spec | None, str | None]] = [(spec, None) for spec in specs]
        if self.config.queries_only:
            pairs[0] = (None, self.config.cross_attention)
        pace = 2 if self.config.places == "tokens" else None
        block: ModuleListOf[Block] = ModuleListOf(
            Block(layer, *pair, feedforward=feed, pace=pace) for pair, feed in zip(pairs, feeds, strict=True)
        )
        link_layers(block)
        return block

    def _place(self, block: nn.Module, index: int) -> None:
        """Tells the position schemes of a block where its vectors stand."""
        if self.config.places == "vectors":
            return
        for part in block.modules():
            if isinstance(part, Position) and part.facts.kind != "input":
                # with pooled queries a step is that of the keys, which are of the block before
                part.step, part.apart = 2**index // part.pace, self.config.apart

    def _shorten(self, block: "ModuleListOf[Block]", x: Tensor, rows: Rows) -> tuple[Out, Rows]:
        """What a block makes of rows that it halves, and the rows."""
        pooled, short = halve(x, rows, self.config.apart)
        memory = None
        if self.config.queries_only:
            keys = block[0].norms[0](x) if block[0].pre else x
            memory = Memory(keys, None if rows.uniform_start is not None else rows.count)
        return forward_blocks(block, pooled, short, memory=memory), short


def _named(outs: list[Out]) -> dict[str, Out]:
    return {f"block{index}": out for index, out in enumerate(outs)}


def halve(x: Tensor, rows: Rows, apart: bool) -> tuple[Tensor, Rows]:
    """The means of windows of two real tokens, [B, T, E] -> [B, about T / 2, E]; the first token is left apart."""
    real = rows.real()
    x = x if real is None else blank(x, real)
    # with a copy of itself the first token is a window
    x = torch.cat([x[:, :1], x], 1) if apart else x
    count = rows.count + (rows.count > 0) if apart else rows.count
    T = (x.shape[1] + 1) // 2
    sums = F.pad(x, (0, 0, 0, 2 * T - x.shape[1])).unflatten(1, (T, 2)).sum(2)
    left = count[:, None] - 2 * torch.arange(T, device=x.device)
    short = rows._replace(count=(count + 1) // 2, T=T)
    return sums / left.clamp(1, 2)[..., None], short


def stretch(x: Tensor, T: int, times: int, apart: bool) -> Tensor:
    """Each vector repeated over the tokens it stands for: [B, n, E] -> [B, T, E]."""
    steps = torch.arange(T, device=x.device)
    return x[:, (steps + times - 1) // times if apart else steps // times]
