"""Blocks of convolutions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.dropout import DropPath


def halve_map(x: Tensor) -> Tensor:
    """The means of 2 x 2 cells, [B, C, h, w] -> [B, C, h / 2, w / 2]; at an odd border, of those that are there."""
    return F.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False)


def convolution(
    inside: int, outside: int, kernel: int = 1, *, stride: int = 1, groups: int = 1, bias: bool = False
) -> nn.Conv2d:
    """A convolution that keeps the size of a map, or with stride 2 halves it, rounded up."""
    made = nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=bias)
    # of the numbers that go out of it, so that depthwise ones begin as large as others
    nn.init.kaiming_normal_(made.weight, mode="fan_out" if made.groups == 1 else "fan_in")
    if made.bias is not None:
        nn.init.zeros_(made.bias)
    return made


class SqueezeExcite(nn.Module):
    """Hu et al. 2018 (arXiv 1709.01507): channels times sigmoid(W2 SiLU(W1 s + b1) + b2), where s is their mean over
    the map."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        gates = torch.sigmoid(self.outer(F.silu(self.inner(x.mean((2, 3))))))
        return x * gates[:, :, None, None]


class InvertedBottleneck(nn.Module):
    """MBConv (Sandler et al. 2018, arXiv 1801.04381) behind a norm: BN, a convolution of 1 x 1 to `inner` channels, BN,
    GELU, a depthwise one of 3 x 3, BN, GELU, squeeze and excite, and 1 x 1 to `outside` channels; added to its input.
    Where it halves the map, the depthwise convolution has stride 2, and the input is the mean of 2 x 2 cells, mapped
    to `outside` channels where these are others.

    A batch norm reads all images of a batch in training; in evaluation an image alone is the image in a batch."""

    recomputes_alone = True  # as the layers of a Transformer

    def __init__(self, inside: int, outside: int, inner: int, halves: bool = False, drop_path: float = 0.0):
        super().__init__()
        self.halves = halves
        self.norm = nn.BatchNorm2d(inside)
        self.expand, self.expand_norm = convolution(inside, inner), nn.BatchNorm2d(inner)
        self.depthwise = convolution(inner, inner, 3, stride=2 if halves else 1, groups=inner)
        self.depthwise_norm = nn.BatchNorm2d(inner)
        self.excite = SqueezeExcite(inner, max(outside // 4, 1))
        self.project = convolution(inner, outside, bias=True)
        self.shortcut = convolution(inside, outside, bias=True) if inside != outside else nn.Identity()
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.expand_norm(self.expand(self.norm(x))))
        y = self.excite(F.gelu(self.depthwise_norm(self.depthwise(y))))
        return self.shortcut(halve_map(x) if self.halves else x) + self.drop_path(self.project(y))
