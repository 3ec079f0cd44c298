"""The operations of RandAugment on colours, for a whole batch at once: each image has an operation of its own.

They are those of Pillow (ImageOps and ImageEnhance), which the definition of RandAugment rests on. Most of them give a
pixel a new value by its old one alone: they are a table of 256 entries per image and channel, and the batch is looked
up in its tables once. `colour` and `sharpness` move each pixel away from or towards another image, its grey or its
smoothed form. The number of kernels does not depend on the draws, and the host waits for nothing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.images.draws import COLOUR

LEVELS = 256
LUMA = (19595, 38470, 7471)  # of 65536: ITU-R 601, as Pillow rounds it
MIDDLE = 5  # weight of a pixel among its neighbours, each 1, in the smoothed image


def recolour(x: Tensor, operation: Tensor, argument: Tensor) -> Tensor:
    """Images [B, C, h, w] with whole values 0 to 255 in float32, the operation of each as an index into COLOUR [B], and
    its argument [B] -> such images."""
    argument, grey, index = argument.view(-1, 1, 1), _grey(x), x.flatten(2).long()
    drawn = _Drawn(operation[:, None] == torch.arange(len(COLOUR), device=x.device))
    y = _tables(x, index, grey, drawn, argument).gather(2, index).view_as(x)
    base = torch.where(drawn["sharpness"][..., None], _smoothed(x), grey)
    factor = torch.where(drawn["sharpness"] | drawn["colour"], argument, 1.0)[..., None]
    return _whole(base + factor * (y - base))


class _Drawn:
    """Which operation each image has, [B, operations]; by name [B, 1, 1]."""

    def __init__(self, table: Tensor):
        self.table = table

    def __getitem__(self, name: str) -> Tensor:
        return self.table[:, COLOUR.index(name), None, None]


def _whole(x: Tensor) -> Tensor:
    return x.clamp_(0, 255).floor_()


def _grey(x: Tensor) -> Tensor:
    """[B, 1, h, w]"""
    if x.shape[1] == 1:
        return x
    red, green, blue = LUMA
    grey = (green * x[:, 1:2]).add_(x[:, :1], alpha=red).add_(x[:, 2:], alpha=blue)
    return grey.add_(32768).div_(65536).floor_()


def _smoothed(x: Tensor) -> Tensor:
    """Each pixel as the mean over itself, counted five times, and its eight neighbours; the border stays."""
    soft = x.clone()
    if min(x.shape[2:]) > 2:
        box = F.avg_pool2d(x, 3, 1, divisor_override=1).add_(x[..., 1:-1, 1:-1], alpha=MIDDLE - 1)
        soft[..., 1:-1, 1:-1] = box.div_(MIDDLE + 8).add_(0.5).floor_()
    return soft


def _tables(x: Tensor, index: Tensor, grey: Tensor, drawn: "_Drawn", argument: Tensor) -> Tensor:
    """The new value of each value, [B, C, 256]."""
    level = torch.arange(LEVELS, dtype=x.dtype, device=x.device)
    mean = (grey.mean((1, 2, 3)) + 0.5).floor_().view(-1, 1, 1)
    base = torch.where(drawn["contrast"], mean, 0.0)
    factor = torch.where(drawn["contrast"] | drawn["brightness"], argument, 1.0)
    table = base + factor * (level - base)
    rough = (level / argument.clamp(min=1)).floor_() * argument
    table = torch.where(drawn["posterize"], rough, table)
    # to invert is to solarize from 0 on, which is the argument of operations that have none
    turns = (drawn["solarize"] | drawn["invert"]) & (level >= argument)
    table = torch.where(turns, 255 - level, table)
    table = torch.where(drawn["solarize_add"] & (level < 128), level + argument, table)  # [B, 1, 256]
    low, high = x.amin((2, 3)).unsqueeze(2), x.amax((2, 3)).unsqueeze(2)
    stretched = torch.where(high > low, (level - low) * 255 / (high - low), level)
    table = torch.where(drawn["autocontrast"], stretched, table)  # [B, C, 256]
    return _whole(torch.where(drawn["equalize"], _equalized(index, high.long(), level), table))


def _equalized(index: Tensor, high: Tensor, level: Tensor) -> Tensor:
    """The table that spreads the values of each channel evenly: its cumulative histogram. `high` is the largest value
    of a channel."""
    one = torch.ones((), dtype=torch.int32, device=index.device)
    counts = torch.zeros((*index.shape[:2], LEVELS), dtype=torch.int32, device=index.device)
    counts.scatter_add_(2, index, one.expand(index.shape))
    step = (index.shape[2] - counts.gather(2, high)) // 255
    below = counts.cumsum(2) - counts
    spread = (below + step // 2) // step.clamp(min=1)
    return torch.where(step > 0, spread.to(level.dtype), level)
