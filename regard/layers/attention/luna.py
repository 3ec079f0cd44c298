"""Two nested attentions through a packed sequence that travels from layer to layer."""

import math
from dataclasses import replace
from typing import Annotated, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.numeric import masked_softmax, wide_dtype
from regard.core.reference import blend
from regard.core.rows import Memory, Rows
from regard.core.shape import Order, Shape
from regard.core.state import Initial, Out, Progress
from regard.kernels.scan import scan
from regard.layers.attention.base import Attention, Facts
from regard.layers.attention.checks import input_position


class PackedState(NamedTuple):
    """The packed memory as keys and values, for role "cross"."""

    parts: tuple[Tensor, Tensor]  # [B, G, l, D]
    count: Tensor  # [B] real tokens of the memory  # pyright: ignore[reportIncompatibleMethodOverride]
    S: int


class LunaState(NamedTuple):
    """The running sums of role "causal", and the queries of the packed sequence."""

    keys: tuple[Tensor, Tensor]  # sum_j k_j w_j^T [B, H, D, l], and the sum of k
    values: tuple[Tensor, Tensor]  # sum_j w_j v_j^T [B, H, l, D], and the sum of w
    packed: Tensor  # [B, H, l, D]
    from_stream: bool  # P came with a stream, it is not the layer's own
    progress: Progress


class Luna(Attention):
    """Ma et al. 2021: the packed sequence P [l, E] reads the context C (X itself, or a memory), and X reads that,

        Y_P = Attn(P, C, C),    Y_X = Attn(X, Y_P, Y_P) W_O,    next layer: P <- LN(P + Y_P).

    In a model whose norms stand before the layers, P is normed where it reads, and the residual is raw, P <- P + Y_P;
    the stream that leaves an encoder for a decoder is normed once more, and the causal layers of that read it as it is.

    Y_P has no output projection. tied=True, the authors' default, takes keys and values of either attention from one
    projection. The first layer of a stack learns P; the following ones read what comes out of the one before (the
    stream) and share P where none comes. The authors' scaling of P and its sinusoids are taken into the learned P, and
    all l places are used however short the context is.

    Causal: with w_j = f(P Q_P . K_P x_j / sqrt(D)) in R^l, f(s) = log2(1 + 2^s) or elu(s) + 1,

        a_t = softmax((1 / t) (q_t / sqrt(D)) sum_(j <= t) k_j w_j^T),    o_t = (1 / t) a_t sum_(j <= t) w_j v_j^T,

    and P is handed to the next layer unchanged. Its map is w_j . a_t / t; otherwise the map is the product of the maps
    of the two attentions. Time N l, memory N, state l.
    """

    facts = Facts(
        name="luna",
        paper="Ma et al. 2021, Luna: Linear Unified Nested Attention",
        link="arXiv 2106.01540",
        family="memory",
        formula="Y = Attn(X, Z, Z), Z = Attn(P, C, C); causal: o_t = softmax(q_t sum k_j w_j^T / t) sum w_j v_j^T / t",
        time=Order("N l", 1),
        memory=Order("N", 1),
        state=Order("l", 0),
        exact=False,
        independent_heads=False,
        linear=False,
        stream=True,
    )
    examples = ("luna(length=5)", "luna(length=3, tied=False, activation='elu')", "luna(length=4, pack_heads=2)")

    def __init__(
        self,
        shape: Shape,
        *,
        length: Annotated[int, "length of the packed sequence (l in the paper)"] = 16,
        tied: Annotated[bool, "one projection for keys and values"] = True,
        activation: Annotated[
            Literal["softplus", "elu"], "causal: f of the pack weights, log2(1 + 2^s) or elu(s) + 1"
        ] = "softplus",
        pack_heads: Annotated[
            int | None, "number of heads with which P reads the context; None: that of the layer"
        ] = None,
    ):
        if pack_heads is not None:
            why = "it packs with the heads that read; leave pack_heads out"
            roles, refusals = ("self", "cross"), (("causal", why),)
            self.facts = replace(self.facts, roles=roles, state=None, refusals=refusals)
        super().__init__(shape)
        if length < 1:
            raise ValueError(f"option 'length' of 'luna' must be at least 1, got {length}")
        self.length, self.tied, self.activation = length, tied, activation
        causal = shape.role == "causal"
        if causal:
            self.facts = replace(self.facts, signed=True, independent_heads=True, linear=True)
        self.pack_heads = shape.heads if pack_heads is None else pack_heads
        self._check_pack_heads(pack_heads)
        self.position = input_position("luna", shape, "queries and tokens meet through a packed sequence")
        wide, narrow = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        context = shape.memory_width if shape.role == "cross" else shape.width
        sizes = {"q": (shape.width, wide), "packed_q": (shape.width, wide)}
        if causal:
            sizes |= {"packed_k": (context, narrow), "k": (context, narrow), "v": (context, narrow)}
        else:
            sizes |= {"packed_k": (context, narrow), "packed_v": (context, narrow), "k": (wide, narrow)}
            sizes["v"] = (wide, narrow)
        if tied:
            sizes = {name: size for name, size in sizes.items() if name not in ("packed_v", "v")}
        linears = {name: nn.Linear(*size, bias=shape.input_bias) for name, size in sizes.items()}
        self.linears = nn.ModuleDict(linears)
        self.output = nn.Linear(wide, shape.out_width, bias=shape.output_bias)
        for name, linear in (*linears.items(), ("output", self.output)):
            nn.init.xavier_uniform_(linear.weight, gain=1.0 if name == "output" else 2**-0.5)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        self.packed = nn.Parameter(torch.randn(length, shape.width))
        self.packed_norm: nn.LayerNorm | None = None
        self.pre, self.hands_on = False, False

    def _check_pack_heads(self, count: int | None) -> None:
        wide, serves = self.shape.heads * self.shape.head_width, self.shape.heads // self.shape.kv_heads
        if count is not None and (count < 1 or wide % count or count % serves):
            raise ValueError(
                f"option 'pack_heads' of 'luna' must divide heads * head_width = {wide} and be a multiple of heads / "
                f"kv_heads = {serves}, got {count}"
            )

    def link_layers(self, first: Attention | None, fed: bool, read: bool, pre: bool = False) -> None:
        if isinstance(first, Luna):
            if first.packed.shape != self.packed.shape:
                raise ValueError(
                    f"the layers of a stack hand on one packed sequence: got length={self.length} after "
                    f"length={first.length}; give them the same"
                )
            self.packed = first.packed
        self.packed_norm, self.pre, self.hands_on = None, pre, read and self.shape.role != "causal"
        if self.hands_on and self.output.in_features != self.shape.width:
            raise ValueError(
                f"the packed sequence of 'luna' is as wide as the model: heads * head_width must be "
                f"{self.shape.width}, got {self.output.in_features}"
            )
        if self.shape.role != "causal" and (pre or self.hands_on):
            self.packed_norm = nn.LayerNorm(self.shape.width)

    def forward_packed(self, x, rows=None, *, state=None, memory=None, stream=None) -> Out:
        rows = rows or Rows.full(x)
        x = x if self.position is None else self.position.add(x, rows)
        if self.shape.role == "causal":
            o, state = self._past(x, rows, state, stream)
            return Out(self._merge(o), state, stream)
        if state is None:
            state, stream = self._pack(self._context(x, rows, memory), stream)
        q, (k, v) = self._split("q", x), state.parts
        y = self._merge(F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=self._grouped))
        if self.shape.role == "self":
            return Out(y, stream=stream)
        return Out(torch.where(state.count[:, None, None] > 0, y, 0), state, stream)

    def initial_state(self, batch, *, memory=None, stream=None, capacity=None, dtype, device) -> Initial:
        if self.shape.role == "cross":
            assert memory is not None, "role 'cross' reads a memory"
            return Initial(*self._pack(memory, stream))
        H, D, l = self.shape.heads, self.shape.head_width, self.length
        wide = wide_dtype(dtype)

        def zeros(R: int, width: int) -> tuple[Tensor, Tensor]:
            options = {"dtype": wide, "device": device}
            return torch.zeros(batch, H, R, width, **options), torch.zeros(batch, H, R, **options)

        packed = self._split("packed_q", self._packed(batch, stream))
        progress = Progress.initial(batch, device)
        return Initial(LunaState(zeros(D, l), zeros(l, D), packed, stream is not None, progress), stream)

    def apply_map(self, values, x, rows=None, *, memory=None, stream=None) -> Tensor:
        rows = rows or Rows.full(x)
        x = x if self.position is None else self.position.add(x, rows)
        if self.shape.role == "causal":
            pack, read, _ = self._weights(x, rows, None, stream)
            o = scan(read, pack, values.expand(-1, self.shape.heads, -1, -1), real=rows.real())[0]
            return (o / (rows.positions() + 1)[:, None, :, None]).to(values.dtype)
        memory = self._context(x, rows, memory)
        queries, keys = self._pack_query(self._packed(len(x), stream)), self._split("packed_k", memory.x)
        reading = self._attention(queries, keys, self._visible(memory))  # [B, pack heads, l, S]
        if self.pack_heads != self.shape.heads:
            # every head reads what all of them packed
            reading = reading.mean(1, keepdim=True)
        weights = self._attention(self._split("q", x), self._pack(memory, stream)[0].parts[0])
        # weights are wider than the values of a layer in half precision
        return (weights @ (reading @ values.to(weights.dtype))).to(values.dtype)

    @property
    def scale(self) -> float:
        return self.shape.head_width**-0.5

    @property
    def _grouped(self) -> bool:
        return self.shape.heads != self.shape.kv_heads

    def _packed(self, batch: int, stream: Tensor | None) -> Tensor:
        """P [B, l, E]"""
        return self.packed.expand(batch, -1, -1) if stream is None else stream

    def _split(self, name: str, x: Tensor) -> Tensor:
        """[B, n, E] -> [B, H or G, n, D]"""
        return self._linear(name)(x).unflatten(2, (-1, self._head_width(name))).transpose(1, 2)

    def _head_width(self, name: str) -> int:
        packs = name.startswith("packed_")
        return self.shape.heads * self.shape.head_width // self.pack_heads if packs else self.shape.head_width

    def _pack_query(self, P: Tensor) -> Tensor:
        """The queries of P [B, l, E] over the context, normed before where the model is built so."""
        return self._split("packed_q", self.packed_norm(P) if self.pre and self.packed_norm is not None else P)

    def _linear(self, name: str) -> nn.Linear:
        """The projection of an input; a ModuleDict does not say what it holds."""
        shared = {"packed_v": "packed_k", "v": "k"} if self.tied else {}
        return cast(nn.Linear, self.linears[shared.get(name, name)])

    def _repeated(self, part: Tensor, heads: int | None = None) -> Tensor:
        return part.repeat_interleave((heads or self.shape.heads) // part.shape[1], 1)

    def _merge(self, o: Tensor) -> Tensor:
        return self.output(o.transpose(1, 2).flatten(2))

    def _context(self, x: Tensor, rows: Rows, memory: Memory | None) -> Memory:
        """C, what P reads."""
        if self.shape.role == "cross":
            assert memory is not None, "role 'cross' reads a memory or a state"
            return memory
        return Memory(x, None if rows.uniform_start is not None else rows.count)

    def _visible(self, memory: Memory) -> Tensor | None:
        """[B, 1, 1, S]"""
        real = memory.rows().real()
        return None if real is None else real[:, None, None]

    def _pack(self, memory: Memory, stream: Tensor | None) -> tuple[PackedState, Tensor | None]:
        """What the queries read, and the packed sequence of the next layer."""
        rows, P = memory.rows(), self._packed(memory.x.shape[0], stream)
        q, k, v = self._pack_query(P), self._split("packed_k", memory.x), self._split("packed_v", memory.x)
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self._visible(memory), scale=q.shape[-1] ** -0.5, enable_gqa=self._grouped
        )
        packed = o.transpose(1, 2).flatten(2)  # [B, l, H D]
        state = PackedState((self._split("k", packed), self._split("v", packed)), rows.count, rows.T)
        if not self.hands_on:
            return state, None
        return state, P + packed if self.pre or self.packed_norm is None else self.packed_norm(P + packed)

    def _attention(self, q: Tensor, k: Tensor, visible: Tensor | None = None) -> Tensor:
        """The weights of one of the two attentions."""
        return masked_softmax(q * q.shape[-1] ** -0.5 @ self._repeated(k, q.shape[1]).mT, visible)

    def _past(
        self, x: Tensor, rows: Rows, state: LunaState | None, stream: Tensor | None
    ) -> tuple[Tensor, LunaState | None]:
        pack, read, keys = self._weights(x, rows, state, stream)
        v, sums = self._repeated(self._split("v", x)), None if state is None else state.values
        o, _, values = scan(read, pack, v, state=sums, real=rows.real())
        o = (o / (rows.positions() + 1)[:, None, :, None]).to(v.dtype)
        if state is None:
            return o, None
        return o, state._replace(keys=keys, values=values, progress=state.progress.advance(rows))

    def _weights(
        self, x: Tensor, rows: Rows, state: LunaState | None, stream: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """w and a [B, H, T, l], and the sums of k_j w_j^T after the last token."""
        if state is None or (torch.is_grad_enabled() and not state.from_stream):
            # what a state keeps may have been cut from the gradients of P
            packed = self._split("packed_q", self._packed(len(x), stream))
        else:
            packed = state.packed
        wide = wide_dtype(packed.dtype)
        scores = (self._repeated(self._split("packed_k", x)) @ (packed * self.scale).mT).to(wide)
        pack = F.softplus(scores, beta=math.log(2)) if self.activation == "softplus" else F.elu(scores) + 1
        # sums of products of the inputs' own dtype: the kernel adds up in float32, and float32 products take it longer
        pack = pack.to(packed.dtype)
        q, k, sums = self._split("q", x) * self.scale, self._repeated(self._split("k", x)), state and state.keys
        logits, _, sums = scan(q, k, pack, state=sums, real=rows.real())
        read = torch.softmax(logits / (rows.positions() + 1)[:, None, :, None], -1)
        return pack, read.to(pack.dtype), sums

    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x if self.position is None else self.position.plain_add(x)
        heads = range(self.shape.heads)
        if self.shape.role == "causal":
            outs = [self._plain_past(h, x) for h in heads]
        else:
            context = x if memory is None else memory
            names = ("packed_q", "packed_k", "packed_v")
            read = [self._plain_attention(h, self.packed, context, *names) for h in range(self.pack_heads)]
            packed = torch.cat(read, -1)
            outs = [self._plain_attention(h, x, packed, "q", "k", "v") for h in heads]
        y = torch.cat(outs, -1) @ self.output.weight.T
        return y if self.output.bias is None else y + self.output.bias

    def _plain(self, name: str, h: int, x: Tensor) -> Tensor:
        D, linear = self._head_width(name), self._linear(name)
        first = (h if name in ("q", "packed_q") else h * self.shape.kv_heads // self.shape.heads) * D
        part = x @ linear.weight[first : first + D].T
        return part if linear.bias is None else part + linear.bias[first : first + D]

    def _plain_attention(self, h: int, x: Tensor, context: Tensor, *names: str) -> Tensor:
        q, k, v = (self._plain(name, h, part) for name, part in zip(names, (x, context, context), strict=True))
        scale = q.shape[-1] ** -0.5
        return torch.stack([blend(torch.stack([scale * (row @ key) for key in k]), list(v)) for row in q])

    def _plain_past(self, h: int, x: Tensor) -> Tensor:
        q, k, v, near = (self._plain(name, h, x) for name in ("q", "k", "v", "packed_k"))
        packed, outs = self._plain("packed_q", h, self.packed), []
        keys, values = (
            torch.zeros(len(k[0]), self.length, dtype=x.dtype),
            torch.zeros(self.length, len(v[0]), dtype=x.dtype),
        )
        for t in range(len(x)):
            score = torch.stack([self.scale * (near[t] @ row) for row in packed])
            if self.activation == "softplus":
                pack = torch.log2(1 + 2**score)
            else:
                pack = torch.where(score > 0, score + 1, torch.exp(score))
            keys, values = keys + torch.outer(k[t], pack), values + torch.outer(pack, v[t])
            outs.append(blend(self.scale * (q[t] @ keys) / (t + 1), list(values)) / (t + 1))
        return torch.stack(outs)
