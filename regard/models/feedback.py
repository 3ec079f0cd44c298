"""The Feedback Transformer: every layer reads one memory of the past, made of all layers.

The same interface as a Transformer of kind "decoder". Tokens are read one after the other, in training too, for the
memory of a token is needed by all layers of the next. Padding is met once: ids are moved to the left.
"""

import math
from functools import reduce
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.model import Hidden, Model, Prediction
from regard.core.options import Range, config_dataclass
from regard.core.rows import Mask, Rows, unpack
from regard.core.shape import Shape
from regard.core.state import Progress, check_rows, take_rows, trim
from regard.kernels.dropout import Dropout
from regard.layers.attention.cached import Cached
from regard.layers.feedforward.base import FeedForward, Sizes
from regard.layers.position.base import Position
from regard.models.config import Norm, Specs, check_config
from regard.models.modules import ModuleListOf
from regard.models.stack import look_up
from regard.models.transformer import pack_ids
from regard.spec import ATTENTION, FEEDFORWARD, POSITIONS, Spec, over_layers, parse


@config_dataclass
class FeedbackConfig:
    """The config of a Feedback Transformer. `attention` takes a spec that compares a query with keys one by one."""

    kind: Literal["feedback"] = "feedback"
    vocabulary: Annotated[int, "tokens of the vocabulary", Range(1)] = 37000
    width: Annotated[int, "model width (d_model)", Range(1)] = 512
    heads: Annotated[int, "heads of each attention", Range(1)] = 8
    kv_heads: Annotated[int | None, "key and value heads, fewer than heads to share them", Range(1)] = None
    inner: Annotated[int, "feed-forward width (d_ff)", Range(1)] = 2048
    layers: Annotated[int, "number of layers", Range(1)] = 6
    attention: Annotated[str, "spec of the attention to the memories"] = "softmax"
    # the paper's: a learned vector for each distance, with the keys
    position: Annotated[str, "spec of the positions, such as rotary or shaw"] = "shaw(distance=128, values=False)"
    span: Annotated[int | None, "number of newest memories that a token reads (default: all)", Range(1)] = None
    adaptive_span: Annotated[bool, "each head learns how many of the span newest memories it reads"] = False
    span_ramp: Annotated[int, "memories over which an adaptive span fades out", Range(1)] = 32
    span_begin: Annotated[float, "initial adaptive spans, as a share of span", Range(0, 1)] = 0.0
    span_loss: Annotated[
        float, "weight of the auxiliary loss that keeps adaptive spans short; the paper's for enwik8 is 5e-7", Range(0)
    ] = 0.0
    shared: Annotated[bool, "keys and values of a memory projected once for all layers; false: by each layer"] = True
    shared_position: Annotated[bool, "one position scheme inside attention for all layers"] = True
    normed_memory: Annotated[
        bool, "with norm pre: keys and values projected from the memory after the norm of the layer"
    ] = True
    norm: Norm = "post"
    feedforward: Annotated[Specs, "spec of the feed-forward layers, or a list repeated over them"] = "dense"
    bias: Annotated[bool, "biases of the projections of attention"] = False
    dropout: Annotated[float, "dropout of the embeddings and of what each sublayer adds", Range(0, below=1)] = 0.1
    tied: Annotated[bool, "the output layer shares its weights with the token embedding"] = True
    earlier: ClassVar[dict[str, Any]] = {"shared_position": False, "normed_memory": False}

    def __post_init__(self) -> None:
        if self.kind != "feedback":
            raise ValueError(f"kind must be 'feedback', got {self.kind!r}: other kinds are built from ModelConfig")
        check_config(self)
        if self.adaptive_span and self.span is None:
            raise ValueError("adaptive_span needs span, the longest that it may become: set span")


class FeedbackState(NamedTuple):
    """The memories as keys and values, newest at the right: of each layer, or once where layers share them."""

    parts: tuple[tuple[Tensor, Tensor], ...]  # [B, G, S, D]
    progress: Progress
    newest_last = ("parts",)

    def select(self, rows: Tensor) -> "FeedbackState":
        check_rows(rows, self)
        return FeedbackState(*(take_rows(part, rows) for part in self))

    def reorder(self, rows: Tensor) -> "FeedbackState":
        """As `select`: there is no second memory that beams share."""
        return self.select(rows)

    def mask(self) -> Mask:
        """Of one new token over the memories; its own is not yet among them."""
        S, (length, _, uniform, _) = self.parts[0][0].shape[2], self.progress
        return Mask(length, length - S, length, 1, S, causal=False, full=uniform, shift=S)


class FeedbackBlock(nn.Module):
    """Attention to the memories, feed-forward: each around a residual."""

    recomputes_alone = True  # as in Block

    def __init__(self, config: FeedbackConfig, feedforward: Spec | str):
        super().__init__()
        sizes = {"width": config.width, "heads": config.heads, "kv_heads": config.kv_heads, "bias": config.bias}
        inside = POSITIONS.find(parse(config.position).name).facts.kind != "input"
        # the role of one sequence, though queries and keys are made of different vectors: it has positions
        shape = Shape.of(role="causal", position=config.position if inside else None, **sizes)
        attention = ATTENTION.build(config.attention, shape)
        facts = attention.facts
        by_pairs = isinstance(attention, Cached) and set(attention.inputs) == {"q", "k", "v"}
        if not by_pairs or "cross" not in facts.roles:
            raise ValueError(
                f"a feedback model cannot take attention {facts.name!r}: it must compare a query with keys one by one, "
                f"wherever they stand, such as softmax or additive"
            )
        self.attention: Cached = attention
        self.attention.link_layers(None, False, False)
        self.feedforward: FeedForward = FEEDFORWARD.build(feedforward, Sizes(config.width, config.inner, "causal"))
        feeds = self.feedforward.facts
        if feeds.auxiliary_loss or feeds.training != "token":
            raise ValueError(
                f"a feedback model reads tokens one by one: it cannot take feedforward {feeds.name!r}, which lets "
                f"tokens compete or trains an auxiliary loss; use one that works on each token alone, such as dense"
            )
        self.norms = nn.ModuleList(nn.LayerNorm(config.width) for _ in range(2))
        self.dropout = Dropout(config.dropout)
        self.pre = config.norm == "pre"
        self.normed_memory = self.pre and config.normed_memory
        self.spans: nn.Parameter | None = None
        self.span, self.ramp = config.span, config.span_ramp
        if config.adaptive_span:
            if getattr(self.attention.position, "value_table", None) is not None:
                raise ValueError(
                    f"adaptive_span cannot take a position scheme that adds to values, got {config.position!r}: "
                    f"give it the option values=False"
                )
            self.spans = nn.Parameter(torch.full((config.heads,), config.span_begin))

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor], mask: Mask, maps: list[Tensor] | None = None) -> Tensor:
        """One token [B, 1, E]; `maps` collects [B, H, 1, S]."""

        def attend_memories(x: Tensor) -> Tensor:
            if maps is not None:
                maps.append(self._map(x, past[0], mask))
            if mask.S == 0:
                return torch.zeros_like(x)
            o = self._read(x, *past, mask)
            y = self.attention.output(o.transpose(1, 2).flatten(2))
            # a row without a memory adds nothing, not even a bias
            return y if mask.full else torch.where(mask.end[:, None, None] > 0, y, 0)

        def feed(x: Tensor) -> Tensor:
            return self.feedforward.forward_packed(x, Rows.full(x)).y

        for sublayer, norm in zip((attend_memories, feed), self.norms, strict=True):
            x = x + self.dropout(sublayer(norm(x))) if self.pre else norm(x + self.dropout(sublayer(x)))
        return x

    def project_memory(self, memory: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, 1, D] of a memory [B, 1, E] at its places [B]."""
        source = self.attention.project_sources(self.norms[0](memory) if self.normed_memory else memory)
        return self._placed(source["k"], at), source["v"]

    def shares(self) -> Tensor:
        """Adaptive spans [H], as shares of the longest."""
        assert self.spans is not None, "spans are learned where the config says adaptive_span"
        return self.spans.clamp(0, 1)

    def _read(self, x: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        q = self._placed(self.attention.project_heads("q", x), mask.q0)
        if self.spans is None or self.span is None:
            return self.attention.attend(mask, q=q, **self.attention.repeat_heads({"k": k, "v": v}))
        times = self.attention.shape.heads // k.shape[1]
        k, v = (part.repeat_interleave(times, 1) for part in (k, v))
        # a step back from the newest, at the right
        steps = torch.arange(mask.S - 1, -1, -1, device=x.device)
        through = ((self.shares()[:, None] * self.span - steps) / self.ramp + 1).clamp(0, 1)[..., None]  # [H, S, 1]
        through = through.to(v.dtype)
        # what is read is linear in the values: beside them, how much of the weights is let through
        values = torch.cat([v * through, through.expand(len(v), -1, -1, -1)], -1)
        o = self.attention.attend(mask, q=q, k=k, v=values)
        return o[..., :-1] / (o[..., -1:] + 1e-8)

    def _placed(self, part: Tensor, at: Tensor) -> Tensor:
        scheme = self.attention.position
        if scheme is None or scheme.facts.kind != "rotation":
            return part
        return scheme.rotate(part, at[:, None])

    def _map(self, x: Tensor, k: Tensor, mask: Mask) -> Tensor:
        """By values that are unit vectors, less what a position scheme adds to values of zero."""
        at, maps = torch.arange(mask.S, device=x.device)[None], [k.new_zeros(len(x), self.attention.shape.heads, 1, 0)]
        for first in range(0, mask.S, self.attention.shape.head_width):
            unit = self.attention.unit_vectors(at, first, len(x), k.dtype)
            maps.append(self._read(x, k, unit, mask) - self._read(x, k, torch.zeros_like(unit), mask))
        return torch.cat(maps, -1)[..., : mask.S]


class Feedback(Model):
    """Fan et al. 2020: at step t, with x_t^0 the embedded token and x_t^l what comes out of layer l,

        m_t = sum_(l = 0..L) softmax(w)_l x_t^l,
        z_t^l = Attn(x_t^l; m_(t - span) .. m_(t - 1)),    x_t^(l + 1) = FF(z_t^l),

    so that the lowest layer of a token reads the highest of the tokens before it. The token itself is no key; the first
    one has nothing to read, and its attention adds zeros. Keys and values are projected from m_t, with norm="pre" from
    LN(m_t) by the norm of the layer, once for all layers (`shared`, which then share that norm), and are all that
    decoding keeps: a cache for one layer. The position scheme is one for all layers. With `adaptive_span` head h reads

        sum_j a_j w_j v_j / (sum_j a_j w_j + 1e-8),    w_j = clamp((z_h span - (t - 1 - j)) / ramp + 1, 0, 1),

    with a the softmax over the memories that any head reads and z_h in [0, 1] learned; `span_loss` times span times the
    mean of z over the heads, added up over the layers, joins the loss. Time N span in N steps, state span.

    What differs from the authors' code: it begins with `span` memories of zeros, which take part in the softmax; it
    does not scale the embedding; its table of positions has a row for each distance of the span, where "shaw" clips
    them; it shares keys and values only if asked to (--share-proj-kv).

    >>> model = Feedback(FeedbackConfig(vocabulary=8000, layers=4, span=100))
    >>> logits = model(tokens, keep=keep).logits
    """

    def __init__(self, config: FeedbackConfig):
        super().__init__()
        self.config: FeedbackConfig = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        nn.init.normal_(self.embedding.weight, std=config.width**-0.5)
        kind = POSITIONS.find(parse(config.position).name).facts.kind
        shape = Shape.of(width=config.width, heads=config.heads, role="causal")
        self.position: Position | None = POSITIONS.build(config.position, shape) if kind == "input" else None
        self.blocks: ModuleListOf[FeedbackBlock] = ModuleListOf(
            FeedbackBlock(config, feedforward) for feedforward in over_layers(config.feedforward, config.layers)
        )
        first = self.blocks[0]
        for block in self.blocks[1:]:
            for name in ("k", "v") if config.shared else ():
                block.attention.project[name] = first.attention.project[name]
            if config.shared and first.normed_memory:
                block.norms[0] = first.norms[0]
            if config.shared_position:
                block.attention.position = first.attention.position
        self.mixing = nn.Parameter(torch.zeros(config.layers + 1))
        self.norm = nn.LayerNorm(config.width) if config.norm == "pre" else nn.Identity()
        self.dropout = Dropout(config.dropout)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor, *, keep: Tensor | None = None) -> Prediction:
        """ids [B, T] -> logits at each position."""
        hidden = self.hidden(tokens, keep=keep)
        logits = self.output(hidden.x)
        return Prediction(logits if keep is None else unpack(logits, keep), hidden.auxiliary_loss, hidden.statistics)

    def hidden(self, tokens: Tensor, *, keep: Tensor | None = None) -> Hidden:
        """`forward` before the output layer, which a loss puts on the real tokens only."""
        packed, _ = pack_ids(tokens, keep)
        # the state behind the last token is not used, so that padding needs no care here
        x = self._read(packed, Rows.full(packed), self.start(len(packed)))[0]
        if not self.training or not self.config.adaptive_span or not self.config.span_loss or self.config.span is None:
            return Hidden(x, None)
        spans = reduce(torch.add, [block.shares().mean() for block in self.blocks]) * self.config.span
        return Hidden(x, self.config.span_loss * spans, {"span": spans.detach() / len(self.blocks)})

    def maps(self, tokens: Tensor, *, keep: Tensor | None = None) -> list[Tensor]:
        """How much of each memory reaches each token, [B, H, T, T] per layer."""
        packed, rows = pack_ids(tokens, keep)
        steps: list[Tensor] = []
        self._read(packed, Rows.full(packed), self.start(len(packed)), maps=steps)
        found = []
        for layer in range(self.config.layers):
            own = steps[layer :: self.config.layers]
            made = torch.cat([F.pad(part, (t - part.shape[3], rows.T - t)) for t, part in enumerate(own)], 2)
            if keep is not None:
                made = unpack(unpack(made, keep[:, None], dim=2), keep[:, None, None], dim=3)
            found.append(made)
        return found

    def start(self, batch: int, *, memory: None = None, capacity: int | None = None) -> FeedbackState:
        """The state before the first token; it grows by one memory per token, so that `capacity` reserves nothing."""
        if memory is not None:
            raise ValueError("a feedback model reads only its own memories: call start without memory")
        weight, shape = self.output.weight, self.blocks[0].attention.shape
        empty = weight.new_zeros(batch, shape.kv_heads, 0, shape.head_width)
        kept = 1 if self.config.shared else self.config.layers
        return FeedbackState(((empty, empty),) * kept, Progress.initial(batch, weight.device))

    def extend(
        self, tokens: Tensor, state: FeedbackState, *, keep: Tensor | None = None
    ) -> tuple[Tensor, FeedbackState]:
        """New ids [B, n] -> logits [B, n, V] and the next state; a padded token leaves it as it was."""
        packed, rows = pack_ids(tokens, keep)
        if not isinstance(state, FeedbackState):
            raise ValueError(f"expected the state of this model, from start() or extend(), got {type(state).__name__}")
        batch = len(state.progress.length)
        if len(tokens) != batch:
            raise ValueError(f"tokens have {len(tokens)} rows and the state {batch}: select rows to match")
        x, state = self._read(packed, state.progress.place(rows), state)
        logits = self.output(x)
        if keep is None:
            return logits, state
        # padding takes no room: no row has more memories than the longest
        progress = trim(state.progress)
        longest = progress.longest
        parts = tuple((_newest(keys, longest), _newest(values, longest)) for keys, values in state.parts)
        return unpack(logits, keep), FeedbackState(parts, progress)

    def _read(
        self, ids: Tensor, rows: Rows, state: FeedbackState, maps: list[Tensor] | None = None
    ) -> tuple[Tensor, FeedbackState]:
        """What the output layer reads [B, T, E], and the state behind the real tokens."""
        x = look_up(self.embedding, ids) * math.sqrt(self.config.width)
        x = self.dropout(x if self.position is None else self.position.add(x, rows))
        flags, outs, reach = rows.real(), [], self._reach()
        for t, token in enumerate(x.split(1, 1)):
            out, memory = self._step(token, state, maps)
            outs.append(out)
            state = self._remember(memory, state, None if flags is None else flags[:, t], reach)
        return self.norm(torch.cat(outs, 1)), state

    def _step(self, x: Tensor, state: FeedbackState, maps: list[Tensor] | None) -> tuple[Tensor, Tensor]:
        """One token [B, 1, E] through the layers: what comes out, and its memory."""
        mask, levels = state.mask(), [x]
        for index, block in enumerate(self.blocks):
            x = block(x, state.parts[0 if self.config.shared else index], mask, maps)
            levels.append(x)
        shares = torch.softmax(self.mixing, 0)
        return x, reduce(torch.add, (share * level for share, level in zip(shares, levels, strict=True)))

    @torch.no_grad()
    def _reach(self) -> int | None:
        """The memories that some head reads."""
        if not self.config.adaptive_span or self.config.span is None:
            return self.config.span
        for block in self.blocks if self.training else ():
            # as the authors do after every update: beyond these bounds no gradient would bring a span back
            assert block.spans is not None, "spans are learned where the config says adaptive_span"
            block.spans.clamp_(0, 1)
        longest = max(block.shares().max().item() for block in self.blocks)
        return max(1, min(self.config.span, math.ceil(longest * self.config.span + self.config.span_ramp)))

    def _remember(self, memory: Tensor, state: FeedbackState, real: Tensor | None, reach: int | None) -> FeedbackState:
        """The state with a memory more in the rows where the token was real."""
        blocks = self.blocks[:1] if self.config.shared else self.blocks
        parts = []
        for block, (old_keys, old_values) in zip(blocks, state.parts, strict=True):
            key, value = block.project_memory(memory, state.progress.length)
            keys, values = _append(old_keys, key, real), _append(old_values, value, real)
            parts.append((keys[:, :, -(reach or 0) :], values[:, :, -(reach or 0) :]))
        length, longest, uniform, _ = state.progress
        progress = Progress(length + (1 if real is None else real), longest + 1, uniform and real is None)
        return FeedbackState(tuple(parts), progress)


def _newest(x: Tensor, longest: int) -> Tensor:
    """The last `longest` of the memories [B, G, S, D]."""
    return x[:, :, max(x.shape[2] - longest, 0) :]


def _append(old: Tensor, new: Tensor, real: Tensor | None) -> Tensor:
    """[B, G, S, D] and one more at the right; where it is not real the old ones move there, and the first is empty."""
    grown = torch.cat([old, new.to(old.dtype)], 2)
    return grown if real is None else torch.where(real[:, None, None, None], grown, F.pad(old, (0, 0, 1, 0)))
