"""Softmax attention over queries, keys and values that few weights make."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.base import Attention, CacheState, Facts, Order, Out, Rows, Shape, select
from regard.reference import Row
from regard.spec import ATTENTION, POSITIONS

REACH = 3  # tokens, and neighbouring modules, that the convolutions read


class ScalingState(NamedTuple):
    """Keys and values so far, and of the last tokens what the convolutions of the next ones read."""

    cache: CacheState
    tail: Tensor  # [B, REACH - 1, H D], newest at the right, zeros before the first token
    seen: Tensor  # [B]
    top: int
    even: bool

    def select(self, rows: Tensor) -> "ScalingState":
        return self._replace(cache=select(self.cache, rows), tail=self.tail[rows], seen=self.seen[rows])


class Part(nn.Module):
    """Features `first` to `last` of what is given: a projection that is done already."""

    def __init__(self, first: int, last: int):
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.first : self.last]


class Scaling(Attention):
    """Jaszczur et al. 2021 (Scaling Transformers), sparse QKV: a multiplicative layer, which queries, keys and values
    share, with a module for each of the H heads,

        z_(t, s, m) = sum_i x_(t, i) A_(s, i) B_(i, m),    A [H, E], B [E, D],

    then convolutions over the last three tokens, for q and k also over three neighbouring modules, whose weights all
    modules share; then softmax attention. E H + E D + 21 D^2 weights instead of 3 E H D. The convolutions look back
    only, in any role. With G < H key/value heads, every (H / G)-th module is one. The authors' code has no output
    projection; here it is kept, so that heads of all kinds can be mixed. Time N^2 + N E H D, memory N."""

    facts = Facts(
        name="scaling",
        paper="Jaszczur et al. 2021, Sparse is Enough in Scaling Transformers",
        link="arXiv 2111.12763",
        family="scores",
        formula="o_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j;  q, k, v = conv(z),  z_sm = sum_i x_i A_si B_im",
        time=Order("N^2", 2),
        memory=Order("N", 1),
        state=Order("N", 1),
        roles=("self", "causal"),
        refusals=(("cross", "its queries are convolved over tokens that a state of cross-attention does not keep"),),
        positions=("rotation", "bias", "content"),
        apart=False,
    )
    examples = ("scaling",)

    def __init__(self, shape: Shape):
        super().__init__(shape)
        H, G, D = shape.heads, shape.kv_heads, shape.head_width
        placed = shape.position is not None and POSITIONS.find(shape.position.split("(")[0]).facts.kind == "input"
        self.position = POSITIONS.build(shape.position, shape) if placed else None
        self.gates = nn.Parameter(torch.empty(H, shape.width).normal_(std=0.5))
        self.shared = nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape.width, D)))
        self.bias = nn.Parameter(torch.zeros(H * D)) if shape.bias else None
        sizes = {"q": REACH * REACH * D, "k": REACH * REACH * D, "v": REACH * D}
        self.convolve = nn.ModuleDict({name: nn.Linear(size, D, bias=shape.bias) for name, size in sizes.items()})
        for linear in self.convolve.values():
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        self.inner = ATTENTION.build("softmax", replace(shape, position=None) if placed else shape)
        ends = {"q": (0, H * D), "k": (H * D, (H + G) * D), "v": ((H + G) * D, (H + 2 * G) * D)}
        self.inner.project = nn.ModuleDict({name: Part(*pair) for name, pair in ends.items()})

    def run(self, x, rows=None, *, state=None, memory=None, stream=None) -> Out:
        rows = rows or Rows.full(x)
        made, tail = self._made(x, rows, state)
        out = self.inner.run(made, rows, state=None if state is None else state.cache)
        if state is None:
            return out
        even = state.even and rows.at is not None
        return Out(out.y, ScalingState(out.state, tail, state.seen + rows.count, state.top + rows.T, even))

    def begin(self, batch, *, memory=None, stream=None, capacity=None, dtype, device) -> Out:
        cache = self.inner.begin(batch, capacity=capacity, dtype=dtype, device=device).state
        tail = torch.zeros(batch, REACH - 1, self.shape.heads * self.shape.head_width, dtype=dtype, device=device)
        return Out(None, ScalingState(cache, tail, cache.seen, 0, True))

    def map(self, x, rows=None, *, state=None, memory=None, stream=None) -> Tensor:
        rows = rows or Rows.full(x)
        made, _ = self._made(x, rows, state)
        return self.inner.map(made, rows, state=None if state is None else state.cache)

    def carry(self, values, x, rows=None, *, memory=None, stream=None) -> Tensor:
        rows = rows or Rows.full(x)
        return self.inner.carry(values, self._made(x, rows, None)[0], rows)

    def _made(self, x: Tensor, rows: Rows, state: ScalingState | None) -> tuple[Tensor, Tensor]:
        """Queries, keys and values side by side [B, T, (H + 2 G) D], and the tail behind the real tokens."""
        H, G, D = self.shape.heads, self.shape.kv_heads, self.shape.head_width
        x = x if self.position is None else self.position.add(x, rows)
        z = self._multiplied(x)
        before = z.new_zeros(len(z), REACH - 1, H * D) if state is None else state.tail.to(z.dtype)
        z = torch.cat([before, z], 1)
        window = z.unfold(1, REACH, 1).unflatten(2, (H, D)).transpose(3, 4)  # [B, T, H, REACH, D]
        near = F.pad(window, (0, 0, 0, 0, 1, 1)).unfold(2, REACH, 1).movedim(-1, 3)  # [B, T, H, REACH, REACH, D]
        parts = []
        for name, linear in self.convolve.items():
            seen = window if name == "v" else near
            modules = linear((seen if name == "q" else seen[:, :, :: H // G]).flatten(3))
            parts.append(modules.flatten(2))
        at = rows.count[:, None] + torch.arange(REACH - 1, device=z.device)
        tail = z.gather(1, at[..., None].expand(-1, -1, H * D)) if state is not None else z[:, :0]
        return torch.cat(parts, -1), tail

    def _multiplied(self, x: Tensor) -> Tensor:
        """z [B, T, H D]"""
        if len(x) * x.shape[1] < self.shape.head_width:
            # few tokens: the weights that are there are read, no larger ones made
            z = (x[:, :, None] * self.gates.to(x.dtype) @ self.shared.to(x.dtype)).flatten(2)
        else:
            whole = torch.einsum("se,ed->sde", self.gates, self.shared).flatten(0, 1)
            z = F.linear(x, whole.to(x.dtype))
        return z if self.bias is None else z + self.bias.to(z.dtype)

    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        H, G, D = self.shape.heads, self.shape.kv_heads, self.shape.head_width
        x = x if self.position is None else self.position.plain_add(x)
        bias = torch.zeros(H * D, dtype=x.dtype) if self.bias is None else self.bias
        z = {}
        for t, token in enumerate(x):
            for s in range(H):
                z[t, s] = sum(u * a * row for u, a, row in zip(token, self.gates[s], self.shared, strict=True))
                z[t, s] = z[t, s] + bias[s * D : s * D + D]

        def read(name: str, t: int, s: int) -> Tensor:
            """One vector of a convolution: tokens t - 2 to t, and modules s - 1 to s + 1 or s alone."""
            linear, across = self.convolve[name], (0,) if name == "v" else (-1, 0, 1)
            kernel = linear.weight.view(D, len(across), REACH, D)
            total = torch.zeros(D, dtype=x.dtype) if linear.bias is None else linear.bias
            for i, step in enumerate(across):
                for j in range(REACH):
                    if (t - REACH + 1 + j, s + step) in z:
                        total = total + kernel[:, i, j] @ z[t - REACH + 1 + j, s + step]
            return total

        scheme, outs = self.inner.position, []
        for head in range(H):
            slot = head * G // H * (H // G)
            values: dict[str, Any] = {}
            for name, s in (("q", head), ("k", slot), ("v", slot)):
                vectors = [read(name, t, s) for t in range(len(x))]
                if scheme is not None and name != "v":
                    vectors = [scheme.plain_rotate(vector, t) for t, vector in enumerate(vectors)]
                values[name] = torch.stack(vectors)
            row = Row(head, self.shape.role == "causal", len(x), len(x), values, scheme)
            outs.append(torch.stack([row.mix(i, row.past(i), D**-0.5) for i in range(len(x))]))
        y = torch.cat(outs, -1) @ self.inner.output.weight.T
        return y if self.inner.output.bias is None else y + self.inner.output.bias
