"""Softmax attention over queries, keys and values that few weights make."""

from dataclasses import replace
from typing import Annotated, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.reference import Row, add_up
from regard.core.rows import Rows
from regard.core.shape import Order, Shape
from regard.core.state import Initial, Out, Progress
from regard.kernels.compiling import surely_at_most
from regard.layers.attention.base import Attention, Facts
from regard.layers.attention.cached import Cached, CacheState
from regard.spec import ATTENTION, POSITIONS, parse

REACH = 3  # tokens, and neighbouring modules, that the convolutions read
Modules = dict[tuple[int, int], Tensor]  # the vector of each token and module, for the reference


class ScalingState(NamedTuple):
    """Keys and values so far, and of the last tokens what the convolutions of the next ones read."""

    cache: CacheState
    tail: Tensor  # [B, REACH - 1, H D], newest at the right, zeros before the first token
    read: Tensor  # the same of what a convolution behind attention reads; empty where there is none
    progress: Progress


class Features(nn.Module):
    """Features `first` to `last` of its input: a projection that is done already."""

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
    only, in any role. With G < H key/value heads, every (H / G)-th module is one. With share_qk=True one convolution
    makes queries and keys. The output projection is dense, so that heads of all kinds can be mixed; the authors' code
    has none (output="none"), or a second multiplicative layer ("mult"), a convolution over three tokens and modules
    ("conv"), or one behind the other ("multconv"), from H modules of D to H modules of E / H. Its `v_concat_type` is
    not here. Time N^2 + N E H D, memory N."""

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
        independent_heads=False,
    )
    examples = ("scaling", "scaling(share_qk=True, output='multconv')")

    def __init__(
        self,
        shape: Shape,
        *,
        share_qk: Annotated[bool, "one convolution for queries and keys, which are then the same"] = False,
        output: Annotated[
            Literal["dense", "none", "mult", "conv", "multconv"],
            "layer behind attention: dense, none, or the sparse layers",
        ] = "dense",
    ):
        super().__init__(shape)
        H, G, D = shape.heads, shape.kv_heads, shape.head_width
        self.share_qk, self.put = share_qk, output
        self.position, inner = None, shape
        if shape.position is not None and POSITIONS.find(parse(shape.position).name).facts.kind == "input":
            # added once, before the convolutions
            self.position, inner = POSITIONS.build(shape.position, shape), replace(shape, position=None)
        self.gates = nn.Parameter(torch.empty(H, shape.width).normal_(std=0.5))
        self.shared = nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape.width, D)))
        self.bias = nn.Parameter(torch.zeros(H * D)) if shape.input_bias else None
        sizes = {"q": REACH * REACH * D, "k": REACH * REACH * D, "v": REACH * D}
        if share_qk:
            del sizes["k"]
        self.convolve = nn.ModuleDict({name: _linear(size, D, shape.input_bias) for name, size in sizes.items()})
        self.inner: Cached = ATTENTION.build("softmax", inner)
        ends = {"q": (0, H * D), "k": (H * D, (H + G) * D), "v": ((H + G) * D, (H + 2 * G) * D)}
        self.inner.project = nn.ModuleDict({name: Features(*pair) for name, pair in ends.items()})
        if output != "dense":
            self._sparse_output()

    def _sparse_output(self) -> None:
        """The layers that take the place of the projection behind attention."""
        shape = self.shape
        H, D, wide = shape.heads, shape.head_width, shape.out_width
        if self.put == "none" and wide != H * D:
            raise ValueError(
                f"attention 'scaling' with output='none' gives the heads side by side, {H} of {D}: it needs that "
                f"width, got {wide}"
            )
        if wide % H:
            raise ValueError(
                f"attention 'scaling' with output={self.put!r} has a module for each head: heads must divide the "
                f"width, got {wide} and {H}"
            )
        # nothing is left for it to project
        self.inner.output = cast(nn.Linear, nn.Identity())
        if "mult" in self.put:
            self.out_gates = nn.Parameter(torch.empty(H, H * D).normal_(std=0.5))
            self.out_shared = nn.Parameter(nn.init.xavier_uniform_(torch.empty(H * D, wide // H)))
            self.out_bias = nn.Parameter(torch.zeros(wide)) if shape.output_bias else None
        if "conv" in self.put:
            module = wide // H if "mult" in self.put else D
            self.out_convolve = _linear(REACH * REACH * module, wide // H, shape.output_bias)

    def forward_packed(self, x, rows=None, *, state=None, memory=None, stream=None) -> Out:
        rows = rows or Rows.full(x)
        made, tail = self._made(x, rows, state)
        out = self.inner.forward_packed(made, rows, state=None if state is None else state.cache)
        y, read = self._written(out.y, rows, state)
        if state is None:
            return Out(y)
        return Out(y, ScalingState(out.state, tail, read, state.progress.advance(rows)))

    def initial_state(self, batch, *, memory=None, stream=None, capacity=None, dtype, device) -> Initial:
        cache = self.inner.initial_state(batch, capacity=capacity, dtype=dtype, device=device).state
        H, D = self.shape.heads, self.shape.head_width
        reads = 0 if "conv" not in self.put else self.shape.out_width if "mult" in self.put else H * D
        tail, read = (torch.zeros(batch, REACH - 1, wide, dtype=dtype, device=device) for wide in (H * D, reads))
        return Initial(ScalingState(cache, tail, read, cache.progress))

    def map(self, x, rows=None, *, state=None, memory=None, stream=None) -> Tensor:
        rows = rows or Rows.full(x)
        made, _ = self._made(x, rows, state)
        return self.inner.map(made, rows, state=None if state is None else state.cache)

    def apply_map(self, values, x, rows=None, *, memory=None, stream=None) -> Tensor:
        rows = rows or Rows.full(x)
        return self.inner.apply_map(values, self._made(x, rows, None)[0], rows)

    def _made(self, x: Tensor, rows: Rows, state: ScalingState | None) -> tuple[Tensor, Tensor]:
        """Queries, keys and values side by side [B, T, (H + 2 G) D], and the tail behind the real tokens."""
        H, G = self.shape.heads, self.shape.kv_heads
        x = x if self.position is None else self.position.add(x, rows)
        z, tail = _behind(
            multiplied(x, self.gates, self.shared, self.bias), rows, None if state is None else state.tail
        )
        window, near = _windows(z, H)
        every = H // G
        modules = {"q": self.convolve["q"](near.flatten(3)), "v": self.convolve["v"](window[:, :, ::every].flatten(3))}
        if self.share_qk:
            modules["k"] = modules["q"][:, :, ::every]
        else:
            modules["k"] = self.convolve["k"](near[:, :, ::every].flatten(3))
        return torch.cat([modules[name].flatten(2) for name in "qkv"], -1), tail

    def _written(self, o: Tensor, rows: Rows, state: ScalingState | None) -> tuple[Tensor, Tensor]:
        """What the sparse layers make of the heads side by side, and the tail that the convolution reads next."""
        read = o[:, :0] if state is None else state.read
        if "mult" in self.put:
            o = multiplied(o, self.out_gates, self.out_shared, self.out_bias)
        if "conv" in self.put:
            o, read = _behind(o, rows, None if state is None else state.read)
            o = self.out_convolve(_windows(o, self.shape.heads)[1].flatten(3)).flatten(2)
        return o, read

    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        H, G, D = self.shape.heads, self.shape.kv_heads, self.shape.head_width
        x = x if self.position is None else self.position.plain_add(x)
        bias = torch.zeros(H * D, dtype=x.dtype) if self.bias is None else self.bias
        z: Modules = {}
        for t, token in enumerate(x):
            for s in range(H):
                total = add_up(u * a * row for u, a, row in zip(token, self.gates[s], self.shared, strict=True))
                z[t, s] = total + bias[s * D : s * D + D]

        def read(name: str, t: int, s: int) -> Tensor:
            """One vector of a convolution: tokens t - 2 to t, and modules s - 1 to s + 1 or s alone."""
            linear = cast(nn.Linear, self.convolve["q" if name == "k" and self.share_qk else name])
            return _plain_convolution(linear, z, t, s, (0,) if name == "v" else (-1, 0, 1))

        scheme, outs = self.inner.position, []
        for head in range(H):
            slot = head * G // H * (H // G)
            values: dict[str, Tensor] = {}
            for name, s in (("q", head), ("k", slot), ("v", slot)):
                vectors = [read(name, t, s) for t in range(len(x))]
                if scheme is not None and name != "v":
                    vectors = [scheme.plain_rotate(vector, t) for t, vector in enumerate(vectors)]
                values[name] = torch.stack(vectors)
            row = Row(head, self.shape.role == "causal", len(x), len(x), values, scheme)
            outs.append(torch.stack([row.attend(i, row.past(i), D**-0.5) for i in range(len(x))]))
        o = torch.cat(outs, -1)
        if self.put == "dense":
            dense = o @ self.inner.output.weight.T
            return dense if self.inner.output.bias is None else dense + self.inner.output.bias
        wide = self.shape.out_width // H
        y: Modules = {(t, s): o[t, s * D : s * D + D] for t in range(len(x)) for s in range(H)}
        if "mult" in self.put:
            bias = torch.zeros(H * wide, dtype=x.dtype) if self.out_bias is None else self.out_bias
            for t, s in y:
                parts = zip(o[t], self.out_gates[s], self.out_shared, strict=True)
                y[t, s] = add_up(u * a * row for u, a, row in parts) + bias[s * wide : s * wide + wide]
        if "conv" in self.put:
            y = {(t, s): _plain_convolution(self.out_convolve, y, t, s, (-1, 0, 1)) for t, s in y}
        return torch.stack([torch.cat([y[t, s] for s in range(H)]) for t in range(len(x))])


def _linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=bias)
    nn.init.xavier_uniform_(linear.weight)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


def multiplied(x: Tensor, gates: Tensor, shared: Tensor, bias: Tensor | None) -> Tensor:
    """sum_i x_i A_si B_im + bias: [B, T, I], A [S, I], B [I, M] -> [B, T, S M]."""
    if surely_at_most(x.shape[0] * x.shape[1] + 1, shared.shape[1]):
        # few tokens: the weights that are there are read, no larger ones made
        z = (x[:, :, None] * gates.to(x.dtype) @ shared.to(x.dtype)).flatten(2)
    else:
        whole = torch.einsum("se,ed->sde", gates, shared).flatten(0, 1)
        z = F.linear(x, whole.to(x.dtype))
    return z if bias is None else z + bias.to(z.dtype)


def _behind(z: Tensor, rows: Rows, tail: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens behind those before them, zeros where there are none, and the last of all that are real."""
    before = z.new_zeros(z.shape[0], REACH - 1, z.shape[2]) if tail is None else tail.to(z.dtype)
    z = torch.cat([before, z], 1)
    if tail is None:
        return z, z[:, :0]
    at = rows.count[:, None] + torch.arange(REACH - 1, device=z.device)
    return z, z.gather(1, at[..., None].expand(-1, -1, z.shape[2]))


def _windows(z: Tensor, modules: int) -> tuple[Tensor, Tensor]:
    """Of each token the last ones of each module, [B, T, S, REACH, M], and of its neighbours too,
    [B, T, S, REACH, REACH, M]."""
    window = z.unfold(1, REACH, 1).unflatten(2, (modules, -1)).transpose(3, 4)
    return window, F.pad(window, (0, 0, 0, 0, 1, 1)).unfold(2, REACH, 1).movedim(-1, 3)


def _plain_convolution(linear: nn.Linear, z: Modules, t: int, s: int, across: tuple[int, ...]) -> Tensor:
    """Tokens t - 2 to t of the modules s + across, by one kernel for all modules."""
    kernel = linear.weight.unflatten(1, (len(across), REACH, -1))
    total = torch.zeros(len(kernel), dtype=kernel.dtype) if linear.bias is None else linear.bias
    for i, step in enumerate(across):
        for j in range(REACH):
            if (t - REACH + 1 + j, s + step) in z:
                total = total + kernel[:, i, j] @ z[t - REACH + 1 + j, s + step]
    return total
