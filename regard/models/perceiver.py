"""Perceivers: a few latent vectors read a long input, think among themselves, and are read in turn.

`Perceiver` is the Perceiver and Perceiver IO, for whole sequences. `PerceiverAR` is a language model whose latents are
the last tokens of the sequence. Padding is met once, on token ids, as in the Transformer.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.model import Hidden, Model, Prediction
from regard.core.options import Range, config_dataclass
from regard.core.rows import Memory, Rows, unpack
from regard.core.shape import Shape
from regard.core.state import Out, Progress, check_rows, merge_fields, take_rows
from regard.kernels.dropout import Dropout
from regard.layers.attention.base import Attention
from regard.layers.attention.cached import Cached, CacheState, append_to_cache
from regard.models.block import Block, BlockState, combine_outputs, gather_auxiliary
from regard.models.config import ModelConfig, Norm, Specs, check_config
from regard.models.modules import ModuleListOf
from regard.models.pooling import Answer, EncoderConfig
from regard.models.stack import Stack, forward_blocks, link_layers, look_up
from regard.models.transformer import pack_ids
from regard.spec import POSITIONS, over_layers, parse


@config_dataclass
class PerceiverConfig(EncoderConfig):
    """The config of a Perceiver. `attention` (among the latents) takes specs of role "self", `cross_attention`
    (latents to input, outputs to latents) a spec of role "cross". Of `width` are the input and the outputs."""

    kind: Literal["perceiver"] = "perceiver"
    latents: Annotated[int, "number of latent vectors, which read the text", Range(1)] = 256
    latent_width: Annotated[int | None, "width of the latents (default: as width)", Range(1)] = None
    layers: Annotated[int, "layers of self-attention in a block", Range(1)] = 6
    blocks: Annotated[
        int, "number of times that the latents pass through these layers, with the same weights", Range(1)
    ] = 1
    reads: Annotated[Literal["once", "each"], "each: the latents read the input again before every block"] = "once"
    cross_attention: Annotated[str, "spec of the attention from latents to input and outputs to latents"] = "softmax"
    cross_heads: Annotated[int | None, "heads of that attention (default: as heads)", Range(1)] = None
    query_residual: Annotated[bool, "without classes: what an output query reads is added to the query"] = False
    earlier: ClassVar[dict[str, Any]] = {"query_residual": True}

    def __post_init__(self) -> None:
        super().__post_init__()
        found = POSITIONS.find(parse(self.position).name).facts
        if found.kind != "input":
            raise ValueError(
                f"a Perceiver cannot take position {found.name!r}: latents have no place that a distance could be "
                f"measured from; use one that is added to the input, such as sinusoidal or learned"
            )


class Reader(nn.Module):
    """x + Attention(LN(x), LN(memory)), then the feed-forward layer: a Block without self-attention whose memory has a
    norm of its own where the layers are pre-norm. Without the residual, what is read takes the place of x."""

    def __init__(self, config: ModelConfig, spec: str, memory_width: int, residual: bool = True):
        super().__init__()
        self.residual = residual
        self.norm = nn.LayerNorm(memory_width) if config.norm == "pre" else nn.Identity()
        self.block = Block(config, None, spec, memory_width=memory_width)
        link_layers([self.block])

    def forward(self, x: Tensor, rows: Rows, memory: Memory) -> Out:
        memory = memory._replace(x=self.norm(memory.x))
        if self.residual:
            return self.block(x, rows, memory=memory)
        look, feed = self.block.sublayers(rows, memory=memory)
        first, second = self.block.norms
        looked = look(x, None)
        x = looked.y if self.block.pre else first(looked.y)
        fed = feed(x, None)
        return combine_outputs(x + fed.y if self.block.pre else second(x + fed.y), None, [looked, fed], None)


class LatentsConfig(Protocol):
    """What a config says of latents, in a model of texts or of images."""

    @property
    def width(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def latents(self) -> int: ...

    @property
    def latent_width(self) -> int | None: ...

    @property
    def layers(self) -> int: ...

    @property
    def blocks(self) -> int: ...

    @property
    def reads(self) -> Literal["once", "each"]: ...

    @property
    def attention(self) -> Specs: ...

    @property
    def feedforward(self) -> Specs: ...

    @property
    def cross_attention(self) -> str: ...

    @property
    def cross_heads(self) -> int | None: ...

    def layer(self, **changes: Any) -> ModelConfig: ...


class LatentModel(Model):
    """Latents that read a memory and think among themselves: what Perceivers of texts and of images have in common."""

    def add_latents(self, config: LatentsConfig, rates: Sequence[float] | None = None) -> None:
        """`rates`: of stochastic depth, for each layer of a block."""
        wide, heads = config.latent_width or config.width, config.cross_heads or config.heads
        self.rounds, self.reads_again = config.blocks, config.reads == "each"
        self.latents = nn.Parameter(torch.empty(config.latents, wide).normal_(std=0.02))
        reading = config.layer(width=wide, heads=heads, kv_heads=None, position="none")
        again = self.reads_again and config.blocks > 1
        self.readers: ModuleListOf[Reader] = ModuleListOf(
            Reader(reading, config.cross_attention, config.width) for _ in range(2 if again else 1)
        )
        layer = config.layer(width=wide, position="none")
        specs = (over_layers(part, config.layers) for part in (config.attention, config.feedforward))
        self.blocks: ModuleListOf[Block] = ModuleListOf(
            Block(layer, spec, None, feedforward=feed, drop_path=rate)
            for spec, feed, rate in zip(*specs, rates or [0.0] * config.layers, strict=True)
        )
        link_layers(self.blocks)

    def think(self, memory: Memory) -> Out:
        """The latents [B, M, E] after all blocks, and the auxiliary losses."""
        z = self.latents.expand(memory.x.shape[0], -1, -1)
        rows, outs = Rows.full(z), {}
        for index in range(self.rounds):
            if index < len(self.readers) or self.reads_again:
                outs[f"reader{index}"] = out = self.readers[min(index, 1)](z, rows, memory)
                z = out.y
            outs[f"block{index}"] = out = forward_blocks(self.blocks, z, rows)
            z = out.y
        loss, statistics = gather_auxiliary(outs)
        return Out(z, None, None, loss, statistics)


class Perceiver(LatentModel):
    """Jaegle et al. 2021 (Perceiver, arXiv 2103.03206) and 2022 (Perceiver IO, arXiv 2107.14795).

    M learned latents z read the input x once or, with reads="each", before every block; a block is `layers` of
    self-attention among the latents, and all blocks are the same one. A second reading has weights of its own, which
    all later ones share. In the papers' pre-norm form, with Z = LN(z) and X = LN(x),

        z <- z + Attention(Z, X, X),  z <- z + MLP(LN(z));    then of each layer  z <- z + Attention(Z, Z, Z), ...

    Without classes, an output query o for each token reads the latents (IO) and predicts the token: o is one learned
    vector with the token's position put in, y = Attention(LN(o), LN(z)), y + MLP(LN(y)). The query itself is not added,
    as in the authors' decoder and its language model; `query_residual` adds it, as their script for ImageNet and
    Hugging Face's decoders of images do. The authors' MLPs have the GELU by tanh, and their queries and keys are as
    wide as what is read, or as configured; here they are as wide as the querying vectors. With classes the latents are
    pooled: "mean" is the Perceiver's, "pma" reads them by one more layer, as IO does. A padded token is read by nobody.
    Time N M + layers M^2, memory N.

    >>> model = Perceiver(PerceiverConfig(vocabulary=256, latents=64, blocks=4, reads="each"))
    >>> logits = model(tokens, keep=keep).logits
    """

    def __init__(self, config: PerceiverConfig):
        super().__init__()
        self.config: PerceiverConfig = config
        wide = config.latent_width or config.width
        heads = config.cross_heads or config.heads
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        nn.init.normal_(self.embedding.weight, std=config.width**-0.5)
        shape = Shape.of(width=config.width, heads=heads, role="self")
        self.position = POSITIONS.build(config.position, shape)
        self.dropout = Dropout(config.dropout)
        self.add_latents(config)
        if config.classes is None:
            self.query = nn.Parameter(torch.empty(config.width).normal_(std=0.02))
            self.places = POSITIONS.build(config.position, shape)
            answering = config.layer(heads=heads, kv_heads=None)
            self.asker = Reader(answering, config.cross_attention, wide, config.query_residual)
        self.answer = Answer(config, self.embedding, config.width if config.classes is None else wide)

    def forward(self, tokens: Tensor, *, keep: Tensor | None = None) -> Prediction:
        """ids [B, T] -> logits [B, T, V], or [B, classes]"""
        if self.config.classes is None:
            return self.answer.at_tokens(self.hidden(tokens, keep=keep), keep)
        thought = self.think(self._input(tokens, keep)[0])
        logits, pooled = self.answer(Memory(thought.y, None))
        return Prediction(logits, *gather_auxiliary({"latents": thought, "pooling": pooled}))

    @property
    def output(self) -> nn.Linear:
        """The output layer."""
        return self.answer.output

    def hidden(self, tokens: Tensor, *, keep: Tensor | None = None) -> Hidden:
        """What the output layer reads where there are no classes, with the real tokens of each row on the left."""
        self.answer.check_tokens()
        memory, rows = self._input(tokens, keep)
        thought = self.think(memory)
        query = self.dropout(self.places.add(self.query.expand(*tokens.shape, -1), rows))
        asked = self.asker(query, rows, Memory(thought.y, None))
        return Hidden(asked.y, *gather_auxiliary({"latents": thought, "asker": asked}))

    def _input(self, tokens: Tensor, keep: Tensor | None) -> tuple[Memory, Rows]:
        """What the latents read, and where its tokens stand."""
        packed, rows = pack_ids(tokens, keep)
        x = look_up(self.embedding, packed) * math.sqrt(self.config.width)
        return Memory(self.dropout(self.position.add(x, rows)), None if keep is None else rows.count), rows


@config_dataclass
class PerceiverARConfig:
    """The config of a Perceiver AR. Both attentions take specs of role "causal"."""

    kind: Literal["perceiver-ar"] = "perceiver-ar"
    vocabulary: Annotated[int, "tokens of the vocabulary", Range(1)] = 37000
    width: Annotated[int, "model width (d_model)", Range(1)] = 512
    heads: Annotated[int, "heads of each attention", Range(1)] = 8
    kv_heads: Annotated[int | None, "key and value heads, fewer than heads to share them", Range(1)] = None
    inner: Annotated[int, "feed-forward width (d_ff)", Range(1)] = 2048
    latents: Annotated[int, "number of latents: the last tokens of a sequence, which predict", Range(2)] = 1024
    layers: Annotated[int, "layers of attention among the latents, after the one that reads", Range(1)] = 6
    attention: Annotated[
        Specs | None, "spec of the attention among the latents (default: local(window=latents - 1))"
    ] = None
    cross_attention: Annotated[str, "spec of the attention from the latents to all tokens"] = "softmax"
    position: Annotated[str, "spec of the positions, such as sinusoidal, rotary, alibi"] = "sinusoidal"
    norm: Norm = "pre"
    feedforward: Annotated[Specs, "spec of the feed-forward layers, or a list repeated over them"] = (
        "dense(activation='gelu')"
    )
    bias: Annotated[bool, "biases of the projections of attention"] = True
    dropout: Annotated[float, "dropout of the embeddings and of what each sublayer adds", Range(0, below=1)] = 0.1
    tied: Annotated[bool, "the output layer shares its weights with the token embedding"] = True

    def __post_init__(self) -> None:
        if self.kind != "perceiver-ar":
            raise ValueError(f"kind must be 'perceiver-ar', got {self.kind!r}: other kinds have configs of their own")
        check_config(self)


class PerceiverARState(NamedTuple):
    """What a Perceiver AR keeps: in its first block of all tokens, in the others of the latents."""

    blocks: tuple[BlockState, ...]
    prefix: Tensor | None  # [B] tokens of each row that are only read; None: the first call decides
    fixed: int | None  # the host knows: the prefix of every row
    waiting: bool  # some row may still be in its prefix
    progress: Progress

    def select(self, rows: Tensor) -> "PerceiverARState":
        check_rows(rows, self)
        blocks = tuple(BlockState(take_rows(kept, rows), None) for kept, *_ in self.blocks)
        prefix, progress = take_rows(self.prefix, rows), take_rows(self.progress, rows)
        return self._replace(blocks=blocks, prefix=prefix, progress=progress)

    def reorder(self, rows: Tensor) -> "PerceiverARState":
        return self.select(rows)

    def merge(self, other: "PerceiverARState", rows: Tensor | None) -> "PerceiverARState":
        fixed = self.fixed if self.fixed == other.fixed else None
        known = {"fixed": fixed, "waiting": self.waiting or other.waiting}
        return merge_fields(self._replace(**known), other._replace(**known), rows)


class PerceiverAR(Model):
    """Hawthorne et al. 2022 (arXiv 2202.07765): a language model over a long context, at the depth of a few tokens.

    Of a sequence, the first tokens are a prefix that is only read, and those behind it are the latents, by default the
    last M. A latent begins as the embedding of its own token, reads all tokens up to itself in the first layer
    (causally, prefix included), then the latents up to itself in the others, and predicts the next token. At the prefix
    there is nothing to predict with: logits are zeros there.

    In decoding the latents grow beyond M. A latent then reads the M latents that end with itself, each as it was
    when it was made (the published cache of fixed size), which is what "local(window=M - 1)" says in any call: while
    there are at most M latents this is the paper's full attention, and `extend` equals `forward` at any number. What
    does not equal is the answer at a token when the prefix is another one, which decides what its latents know.

    One norm serves queries and keys of the first layer, where the authors have two: both are affine, so that they
    differ by what projections with bias can hold. Their activation is the square of ReLU, their rotations turn a
    quarter of the channels (position="rotary(fraction=0.25)" here), and in training they may drop keys of the
    first layer and latents at random. Time N M + layers M^2, memory N; state N + layers M.

    >>> model = PerceiverAR(PerceiverARConfig(vocabulary=256, latents=512))
    >>> logits = model(tokens).logits[:, -512:]
    """

    def __init__(self, config: PerceiverARConfig):
        super().__init__()
        self.config: PerceiverARConfig = config
        names = ("vocabulary", "width", "heads", "kv_heads", "inner", "position", "norm", "feedforward", "bias")
        layer = ModelConfig(kind="decoder", dropout=config.dropout, **{name: getattr(config, name) for name in names})
        own = f"local(window={config.latents - 1})" if config.attention is None else config.attention
        specs = [parse(config.cross_attention), *over_layers(own, config.layers)]
        self.stack = Stack(layer, config.vocabulary, len(specs), specs, None)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.output.weight = self.stack.embedding.weight

    @property
    def predicts_last(self) -> int:
        """Tokens at the end of a sequence that predict, where no prefix is given."""
        return self.config.latents

    def forward(self, tokens: Tensor, *, keep: Tensor | None = None, prefix: int | Tensor | None = None) -> Prediction:
        """ids [B, T] -> logits [B, T, V], zeros at the prefix. `prefix`: real tokens of each row that are only read,
        one number or [B]; None: all but the last `latents`."""
        x, loss, statistics = self.hidden(tokens, keep=keep, prefix=prefix)
        # the output layer has no bias: zeros stay zeros
        return Prediction(self.output(x if keep is None else unpack(x, keep)), loss, statistics)

    def hidden(self, tokens: Tensor, *, keep: Tensor | None = None, prefix: int | Tensor | None = None) -> Hidden:
        """`forward` before the output layer, which a loss puts on the real tokens behind the prefix only."""
        packed, rows = pack_ids(tokens, keep)
        out, _ = self._read(packed, rows, self.start(len(tokens), prefix=prefix), whole=True)
        return Hidden(out.y, out.auxiliary_loss, out.statistics)

    def start(self, batch: int, *, prefix: int | Tensor | None = None, capacity: int | None = None) -> PerceiverARState:
        """The state before the first token. `prefix` as in `forward`; None: the tokens of the first call but its last
        `latents`, so that a prompt is read as `forward` reads it. With a prefix the tokens may be cut anywhere."""
        weight = self.output.weight
        fixed = None
        if isinstance(prefix, int) and not isinstance(prefix, bool):
            fixed, prefix = prefix, torch.full((batch,), prefix, device=weight.device)
        if prefix is not None:
            if not isinstance(prefix, Tensor) or prefix.shape != (batch,) or prefix.dtype != torch.long:
                got = f"{prefix.dtype} {list(prefix.shape)}" if isinstance(prefix, Tensor) else repr(prefix)
                raise ValueError(
                    f"prefix must be a whole number, or {batch} of them as a tensor, one per row; got {got}"
                )
            least = int(prefix.min()) if fixed is None else fixed
            if least < 0:
                raise ValueError(f"prefix must not be negative, got {least}")
        blocks = []
        for layer in self.stack.self_attentions():
            made = layer.initial_state(batch, capacity=capacity, dtype=weight.dtype, device=weight.device)
            blocks.append(BlockState(made.state, None))
        return PerceiverARState(tuple(blocks), prefix, fixed, True, Progress.initial(batch, weight.device))

    def extend(
        self, tokens: Tensor, state: PerceiverARState, *, keep: Tensor | None = None
    ) -> tuple[Tensor, PerceiverARState]:
        """New ids [B, n] -> logits [B, n, V], zeros at the prefix, and the next state; the old one is consumed."""
        packed, rows = pack_ids(tokens, keep)
        if not isinstance(state, PerceiverARState):
            raise ValueError(f"expected the state of this model, from start() or extend(), got {type(state).__name__}")
        batch = len(state.progress.length)
        if len(tokens) != batch:
            raise ValueError(f"tokens have {len(tokens)} rows and the state {batch}: select rows to match")
        out, state = self._read(packed, rows, state, whole=False)
        return self.output(out.y if keep is None else unpack(out.y, keep)), state

    def _read(self, ids: Tensor, rows: Rows, state: PerceiverARState, whole: bool) -> tuple[Out, PerceiverARState]:
        """Ids that are real from the left -> what predicts, [B, T, E] in their places, with the auxiliary losses, and
        the next state. Of a whole sequence only the prefix goes by way of the state, and the next one is of no use."""
        starts = state.prefix
        if starts is None:
            fixed = None if rows.uniform_start is None else max(0, rows.T - self.config.latents)
            starts = (rows.count - self.config.latents).clamp(min=0)
            state = state._replace(prefix=starts, fixed=fixed)
        rows = state.progress.place(rows if state.fixed is not None else rows._replace(uniform_start=None))
        even = rows.uniform_start is not None
        after = state._replace(progress=state.progress.advance(rows))
        prefix, latents = _part(rows, starts, state.fixed, state.waiting)
        if not even and state.waiting:
            after = after._replace(waiting=bool((after.progress.length < starts).any()))
        x = self.stack.embed(ids, rows)
        first, *others = self.stack.blocks
        own, rest = state.blocks[0], state.blocks[1:]
        if prefix.T:
            read = x[:, : prefix.T]
            read = first.norms[0](read) if first.pre else read
            own = BlockState(_absorb(self.stack.self_attentions()[0], read, prefix, own.attention), None)
        if not latents.T:
            return Out(torch.zeros_like(x)), after._replace(blocks=(own, *rest))
        steps = torch.arange(rows.T, device=x.device)
        y = x[:, prefix.T :] if even else _gather(x, prefix.count[:, None] + steps[: latents.T])
        read = first(y, latents, state=None if whole and not prefix.T else own)
        at = None
        if latents.uniform_start is not None and state.fixed is not None:
            at = latents.uniform_start - state.fixed
        among = latents._replace(start=(latents.start - starts).clamp(min=0), uniform_start=at)
        out = forward_blocks(others, read.y, among, states=None if whole else rest)
        y = self.stack.norm(out.y)
        if even:
            y = F.pad(y, (0, 0, prefix.T, 0))
        else:
            y = torch.where((steps >= prefix.count[:, None])[..., None], _gather(y, steps - prefix.count[:, None]), 0)
        loss, statistics = gather_auxiliary({"first": read, "others": out})
        return Out(y, None, None, loss, statistics), after._replace(blocks=(read.state, *out.state))


def _part(rows: Rows, prefix: Tensor, fixed: int | None, waiting: bool) -> tuple[Rows, Rows]:
    """The tokens of a call that belong to the prefix, and those behind it; see `PerceiverARState`."""
    if rows.uniform_start is not None and fixed is not None:
        P = min(max(fixed - rows.uniform_start, 0), rows.T)
        skip, T = torch.full_like(rows.count, P), rows.T - P
        return Rows(rows.start, skip, P, rows.uniform_start), Rows(
            rows.start + P, rows.count - P, T, rows.uniform_start + P
        )
    if not waiting:
        return rows._replace(count=torch.zeros_like(rows.count), T=0), rows
    skip = torch.minimum((prefix - rows.start).clamp(min=0), rows.count)
    P, T = torch.stack([skip.max(), (rows.count - skip).max()]).tolist()
    return Rows(rows.start, skip, P, None), Rows(rows.start + skip, rows.count - skip, T, None)


def _gather(x: Tensor, at: Tensor) -> Tensor:
    """Rows of [B, T, E] at slots [B, n]; beyond the ends, those at the ends."""
    return x.gather(1, at.clamp(0, x.shape[1] - 1)[..., None].expand(-1, -1, x.shape[2]))


def _absorb(layer: Attention, x: Tensor, rows: Rows, state: Any) -> Any:
    """The state after tokens whose answers nobody needs: where keys and values are kept, no query is answered."""
    if not isinstance(layer, Cached):
        return layer.forward_packed(x, rows, state=state).state
    _, source = layer.project_inputs(x, rows, None)
    parts = tuple(
        append_to_cache(old, new, rows, state.progress.longest)
        for old, new in zip(state.parts, source.values(), strict=True)
    )
    return CacheState(parts, state.progress.advance(rows))
