"""Dropout that draws 16 bits per number on the CPU, where PyTorch's takes four times as long; and stochastic depth."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """nn.Dropout; on the CPU the probability is rounded to a multiple of 2^-16, and the scale with it."""

    def forward(self, input: Tensor) -> Tensor:
        return dropped(input, self.p) if self.training else input


class DropPath(nn.Module):
    """Huang et al. 2016, Deep Networks with Stochastic Depth (arXiv 1603.09382): in training, what a sublayer adds is
    left out of a row with probability p, and scaled by 1 / (1 - p) where it is kept. The draw is made on the device,
    so that a CUDA graph can hold it, and the share that is kept is a tensor, so that layers of different shares are
    compiled once."""

    share: Tensor

    def __init__(self, p: float = 0.0):
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"the rate of stochastic depth must be at least 0 and below 1, got {p}")
        self.p, self.acts = p, p > 0
        self.register_buffer("share", torch.tensor(1.0 - p), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not (self.acts and self.training):
            return x
        kept = torch.rand(len(x), *[1] * (x.dim() - 1), device=x.device) < self.share
        return x * (kept / self.share).to(x.dtype)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def dropped(x: Tensor, p: float) -> Tensor:
    """x with a share p of its numbers at zero and the others scaled up."""
    if x.device.type != "cpu" or p == 0:
        return F.dropout(x, p)
    share = round(p * 2**16)
    drawn = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    kept = drawn[: x.numel()].view(x.shape) >= share - 2**15
    return x * (kept * (2**16 / (2**16 - share))).to(x.dtype)
