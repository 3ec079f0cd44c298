"""A convolution over tokens in the place of attention."""

from dataclasses import replace
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn

from regard.core.rows import Rows
from regard.core.shape import Order, Shape
from regard.core.state import Initial, Out, Progress
from regard.kernels.convolution import convolve, next_tail
from regard.layers.attention.base import Facts
from regard.layers.attention.mixing import Mixing


class ConvolutionState(NamedTuple):
    """The last inputs of each row, newest at the right, zeros before the first."""

    tail: Tensor  # [B, (kernel - 1) * dilation, E]
    progress: Progress


class Convolution(Mixing):
    """A dense convolution with k taps, `dilation` tokens apart, and an output projection:

        y_t = W_o c_t,    c_t = sum_i W_i x_{t - i dilation},    i = 0 .. k - 1,

    as wide as all heads together. Role "self" has its taps on both sides, i = -(k - 1) / 2 .. (k - 1) / 2. gated=True
    is the gated linear unit of Dauphin et al. 2017 and ConvS2S: a second convolution b makes c_t * sigmoid(b_t). Before
    the first token, and in padding, stand zeros. Each tap is a matrix, so the map is how the norm of the kernel is
    divided among its taps: |W_i| / sum_i |W_i| over the channels of a head. Time k N, memory N, state
    (k - 1) dilation vectors.
    """

    facts = Facts(
        name="convolution",
        paper="Dauphin et al. 2017, Language Modeling with Gated Convolutional Networks; Gehring et al. 2017, "
        "Convolutional Sequence to Sequence Learning",
        link="arXiv 1612.08083",
        family="patterns",
        formula="y_t = W_o c_t, c_t = sum_i W_i x_{t - i dilation}; gated: c_t * sigmoid(b_t), b a second convolution",
        time=Order("N", 1),
        memory=Order("N", 1),
        state=Order("1", 0),
        roles=("self", "causal"),
        refusals=(("cross", "its taps stand around a token of the sequence that is read, and a query has none there"),),
        linear=False,
        signed=True,
    )
    examples = ("convolution", "convolution(kernel=5, dilation=2, gated=True)", "convolution(kernel=1)")

    def __init__(
        self,
        shape: Shape,
        *,
        kernel: Annotated[int, "number of taps (k); odd in role self"] = 3,
        dilation: Annotated[int, "tokens from one tap to the next"] = 1,
        gated: Annotated[bool, "multiply with the sigmoid of a second convolution (GLU)"] = False,
    ):
        super().__init__(shape)
        for name, size in (("kernel", kernel), ("dilation", dilation)):
            if size < 1:
                raise ValueError(f"option {name!r} of 'convolution' must be at least 1, got {size}")
        if shape.role == "self" and kernel % 2 == 0:
            raise ValueError(
                f"option 'kernel' of 'convolution' must be odd in role 'self', as many taps on each side, got {kernel}"
            )
        if kernel == 1:
            # a single tap, of which none stands outside
            self.facts = replace(self.facts, signed=False)
        self.kernel, self.dilation, hidden = kernel, dilation, shape.heads * shape.head_width
        self.taps = nn.Conv1d(shape.width, hidden, kernel, bias=shape.input_bias)
        self.gate = nn.Conv1d(shape.width, hidden, kernel, bias=shape.input_bias) if gated else None
        self.output = nn.Linear(hidden, shape.out_width, bias=shape.output_bias)
        for layer in (self.taps, self.gate, self.output):
            if layer is not None:
                nn.init.xavier_uniform_(layer.weight)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def forward_packed(self, x, rows=None, *, state=None, memory=None, stream=None) -> Out:
        rows = rows or Rows.full(x)
        x, real = self.placed(x, rows), rows.real()
        if self.shape.role == "self" and real is not None:
            # a model leaves numbers in its padding
            x = torch.where(real[..., None], x, 0)
        options = {"dilation": self.dilation, "centred": self.shape.role == "self"}
        options["tail"] = None if state is None else state.tail
        y = convolve(x, self.taps.weight, self.taps.bias, **options)
        if self.gate is not None:
            y = y * convolve(x, self.gate.weight, self.gate.bias, **options).sigmoid()
        after = None
        if state is not None:
            tail = next_tail(state.tail, x, None if real is None else rows.count)
            after = ConvolutionState(tail, state.progress.advance(rows))
        return Out(self.output(y), after)

    def initial_state(self, batch, *, memory=None, stream=None, capacity=None, dtype, device) -> Initial:
        reach = (self.kernel - 1) * self.dilation
        tail = torch.zeros(batch, reach, self.shape.width, dtype=dtype, device=device)
        return Initial(ConvolutionState(tail, Progress.initial(batch, device, self.facts.name)))

    def apply_map(self, values, x, rows=None, *, memory=None, stream=None) -> Tensor:
        rows = rows or Rows.full(x)
        norms = torch.stack([part.norm(dim=(0, 1)) for part in self.taps.weight.tensor_split(self.shape.heads)])
        shares = (norms / norms.sum(1, keepdim=True)).to(values.dtype)  # [H, k]
        real = rows.real()
        values = values if real is None else torch.where(real[:, None, :, None], values, 0)
        B, H, T, n = len(x), self.shape.heads, rows.T, values.shape[3]
        # every head and column is a sequence of its own
        columns = values.expand(B, H, -1, -1).transpose(1, 2).flatten(2)  # [B, T, H n]
        taps = shares.repeat_interleave(n, 0)[:, None]
        centred = self.shape.role == "self"
        o = convolve(columns, taps, dilation=self.dilation, centred=centred, groups=H * n)
        return o.reshape(B, T, H, n).transpose(1, 2)

    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x if self.position is None else self.position.plain_add(x)
        k, T = self.kernel, len(x)
        ahead = (k - 1) // 2 if self.shape.role == "self" else 0

        def convolved(layer: nn.Conv1d, t: int) -> Tensor:
            total = torch.zeros(layer.out_channels, dtype=x.dtype) if layer.bias is None else layer.bias
            for i in range(k):
                at = t + (i - (k - 1) + ahead) * self.dilation
                if 0 <= at < T:
                    total = total + layer.weight[:, :, i] @ x[at]
            return total

        outs = []
        for t in range(T):
            c = convolved(self.taps, t)
            if self.gate is not None:
                c = c / (1 + torch.exp(-convolved(self.gate, t)))
            y = self.output.weight @ c
            outs.append(y if self.output.bias is None else y + self.output.bias)
        return torch.stack(outs)
