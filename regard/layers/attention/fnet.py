"""Fourier mixing: the discrete transform over tokens and channels in the place of attention."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.numeric import wide_dtype
from regard.core.rows import Rows
from regard.core.shape import Order, Shape
from regard.core.state import Out
from regard.kernels.compiling import exporting
from regard.layers.attention.base import Facts
from regard.layers.attention.mixing import Mixing


class Fourier(Mixing):
    """Lee-Thorp et al. 2021: y = Re(F_seq(F_hidden(x))), the unnormalised discrete Fourier transform over the channels
    and then over the tokens,

        y_kc = sum_nm x_nm cos(2 pi (k n / N + c m / E)),

    without a parameter. N is the number of real tokens of a row: where rows differ, each is transformed at its own
    length, by Bluestein's convolution with a chirp, so padding is left out exactly and costs no more than a constant.
    (The authors' code knows no padding: there pads are tokens.) F_hidden(x) is complex: the map is the weight of its
    real part, cos(2 pi k n / N), the same in every head; that of its imaginary part is the sine.
    Time N log N, memory N.
    """

    facts = Facts(
        name="fnet",
        paper="Lee-Thorp et al. 2021, FNet: Mixing Tokens with Fourier Transforms",
        link="arXiv 2105.03824",
        family="mixers",
        formula="y = Re(F_seq(F_hidden(x))), y_kc = sum_nm x_nm cos(2 pi (k n / N + c m / E))",
        time=Order("N log N", 1),
        memory=Order("N", 1),
        roles=("self",),
        refusals=(
            ("causal", "every frequency sums over all tokens, those of the future too"),
            ("cross", "the tokens that are read and those that are made are one axis of one transform"),
        ),
        signed=True,
    )
    examples = ("fnet",)

    def __init__(self, shape: Shape):
        super().__init__(shape)
        self.kept_channels = self.channels()

    def forward_packed(self, x, rows=None, *, state=None, memory=None, stream=None) -> Out:
        rows = rows or Rows.full(x)
        # no half precision: a transform sums over all tokens and channels, and kernels know none
        wide = self.placed(x, rows).to(wide_dtype(x.dtype))
        if exporting():
            real = rows.real()
            wide = wide if real is None else torch.where(real[..., None], wide, 0)
            y = _transform_by_pairs(wide, rows.count, self.kept_channels)
        elif rows.uniform_start is not None:
            y = torch.fft.fft2(wide)[..., self.kept_channels].real
        else:
            real = rows.real()
            wide = wide if real is None else torch.where(real[..., None], wide, 0)
            y = _transform(torch.fft.fft(wide)[..., self.kept_channels], rows.count).real
        return Out(F.pad(y, (self.kept_channels.start, self.shape.width - self.kept_channels.stop)).to(x.dtype))

    def apply_map(self, values, x, rows=None, *, memory=None, stream=None) -> Tensor:
        rows = rows or Rows.full(x)
        wide = values.transpose(1, 2).flatten(2).to(wide_dtype(values.dtype))
        if rows.uniform_start is not None:
            o = torch.fft.fft(wide, dim=1).real
        else:
            real = rows.real()
            wide = wide if real is None else torch.where(real[..., None], wide, 0)
            o = _transform(torch.complex(wide, torch.zeros_like(wide)), rows.count).real
        o = o.unflatten(2, (values.shape[1], -1)).transpose(1, 2).to(values.dtype)
        return o.expand(-1, self.shape.heads, -1, -1)

    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x if self.position is None else self.position.plain_add(x)
        N, E = x.shape

        def wave(function: Callable[[float], float], steps: int, size: int) -> float:
            return function(2 * math.pi * steps / size)

        cosines = [torch.stack([wave(math.cos, c * m, E) * x[:, m] for m in range(E)]).sum(0) for c in range(E)]
        sines = [torch.stack([wave(math.sin, c * m, E) * x[:, m] for m in range(E)]).sum(0) for c in range(E)]
        rows = []
        for k in range(N):
            row = torch.zeros(E, dtype=x.dtype)
            for n in range(N):
                even, odd = (torch.stack([part[n] for part in parts]) for parts in (cosines, sines))
                row = row + wave(math.cos, k * n, N) * even - wave(math.sin, k * n, N) * odd
            rows.append(row)
        y = torch.stack(rows)
        return F.pad(y[:, self.kept_channels], (self.kept_channels.start, E - self.kept_channels.stop))


def _transform(x: Tensor, count: Tensor) -> Tensor:
    """The Fourier transform of the first `count` of T complex rows, [B, T, E], zeros behind them; after Bluestein 1970:
    since -2 k n = (k - n)^2 - k^2 - n^2, it is a convolution, and that a transform of any length from 2 T - 1 on."""
    T = x.shape[1]
    steps, N = torch.arange(T, device=x.device), count.clamp(min=1)[:, None]
    real = x.real.dtype
    # the square is reduced as a whole number, lest a long row lose the angle to rounding
    angle = (steps * steps % (2 * N)).to(real) * (math.pi / N.to(real))
    chirp = torch.polar(torch.ones_like(angle), angle)[..., None]  # [B, T, 1]
    length = 1 << (2 * T - 2).bit_length()
    around = torch.cat([chirp, chirp.new_zeros(len(x), length - 2 * T + 1, 1), chirp[:, 1:].flip(1)], 1)
    mixed = torch.fft.fft(x * chirp.conj(), n=length, dim=1) * torch.fft.fft(around, dim=1)
    return torch.fft.ifft(mixed, dim=1)[:, :T] * chirp.conj()


def _transform_by_pairs(x: Tensor, count: Tensor, channels: slice) -> Tensor:
    """Re(F_seq(F_hidden(x))) of the first `count` of T rows, zeros behind them, as sums over all pairs of places and of
    channels: a program that is exported leaves the length open, which a fast transform would fix, and other formats
    know no complex numbers."""
    (_, T, E), dtype = x.shape, x.dtype
    time, channel = (torch.arange(size, device=x.device) for size in (T, E))
    N = count.clamp(min=1)[:, None, None]
    # products are reduced as whole numbers, lest a long row lose the angle to rounding
    over_time = (time[:, None] * time % N).to(dtype) * (2 * math.pi / N.to(dtype))  # [B, T, T]
    over_channels = (channel[:, None] * channel[channels] % E).to(dtype) * (2 * math.pi / E)  # [E, kept]
    return over_time.cos() @ (x @ over_channels.cos()) - over_time.sin() @ (x @ over_channels.sin())
