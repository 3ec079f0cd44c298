"""Augmentation on the device: pixels of a batch, changed as the numbers drawn for each image say (draws.py).

All images of a batch go through the same kernels, whatever was drawn for them, and no kernel needs the host: the whole
can be replayed as a CUDA graph. The order is: changes of place, all in one resampling; changes of colour; erasing;
mixing with another image.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.images.colour import recolour
from regard.data.images.draws import COLUMNS, AugmentConfig, rooms


def normalise(pixels: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """uint8 [B, C, h, w] -> float32: (value / 255 - mean) / deviation of the channel."""
    scale = (1 / (255 * deviation)).view(-1, 1, 1)
    return torch.addcmul(-(mean / deviation).view(-1, 1, 1), pixels.float(), scale)


@torch.no_grad()
def augment(pixels: Tensor, draws: Tensor, config: AugmentConfig, mean: Tensor, deviation: Tensor) -> Tensor:
    """uint8 [B, C, h, w] and a row of draws for each -> images as a model takes them. `config` is resolved."""
    with torch.autocast(pixels.device.type, enabled=False):
        x = pixels.float()
        if config.flip or config.crop != "none" or config.operations:
            x = move(x, _named(draws, "matrix").view(-1, 2, 3), config, 255 * mean.view(-1, 1, 1))
        if config.operations:
            x = x.round_().clamp_(0, 255)
            operations, arguments = _named(draws, "operations"), _named(draws, "arguments")
            order = _named(draws, "order")[:, 0].long()
            for slot, room in enumerate(rooms(config, len(x))):
                rows = order[:room]
                x.index_copy_(0, rows, recolour(x[rows], operations[rows, slot], arguments[rows, slot]))
        x = normalise(x, mean, deviation)
        if config.erase:
            colour = _named(draws, "colour")[:, : x.shape[1], None, None]
            x = torch.where(_inside(_named(draws, "erased"), x), colour, x)
        return mix(x, draws) if config.mixes else x


def move(x: Tensor, matrix: Tensor, config: AugmentConfig, fill: Tensor) -> Tensor:
    """Images resampled where the matrices [B, 2, 3] lead; what lies outside of an image is `fill` [C, 1, 1]."""
    height, width = x.shape[2:]
    x = x - fill
    if config.crop == "pad" and config.padded_with == "mirror" and config.padding:
        x = F.pad(x, [config.padding] * 4, mode="reflect")
    # places on the padded image, from -1 to 1
    wide, tall = width / x.shape[3], height / x.shape[2]
    matrix = torch.stack([matrix[:, 0] * wide, matrix[:, 1] * tall], 1)[:, None, None]  # [B, 1, 1, 2, 3]
    across, down = _middles(width, x)[:, None], _middles(height, x)[:, None, None]
    # written out: a product of matrices may round to 10 bits on a GPU
    grid = matrix[..., 0] * across + (matrix[..., 1] * down + matrix[..., 2])  # [B, h, w, 2]
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False) + fill


def mix(x: Tensor, draws: Tensor) -> Tensor:
    """Each image mixed with the one at the same place from the end of the batch (mixup, Zhang et al. 2017, arXiv
    1710.09412; CutMix, Yun et al. 2019, arXiv 1905.04899)."""
    weight = _named(draws, "weight")[..., None, None]
    return torch.lerp(x.flip(0), x, torch.where(_inside(_named(draws, "mixed"), x), 0.0, weight))


def soft_targets(labels: Tensor, draws: Tensor, classes: int) -> Tensor:
    """The target of each mixed image, [B, K]: the shares of the two labels; each row sums to one."""
    targets = (labels[:, None] == torch.arange(classes, device=labels.device)).to(draws.dtype)
    return torch.lerp(targets.flip(0), targets, _named(draws, "share"))


def smoothed(targets: Tensor, label_smoothing: float) -> Tensor:
    """Targets [B, K] of which a share is spread evenly over all classes."""
    return targets * (1 - label_smoothing) + label_smoothing / targets.shape[1]


def _named(draws: Tensor, name: str) -> Tensor:
    return draws[:, COLUMNS[name]]


def _middles(count: int, like: Tensor) -> Tensor:
    """The middles of pixels in a row of them that reaches from -1 to 1."""
    return (2 * torch.arange(count, dtype=like.dtype, device=like.device) + 1) / count - 1


def _inside(box: Tensor, x: Tensor) -> Tensor:
    """Which pixels lie in a box (top, left, bottom, right) [B, 4], as [B, 1, h, w]."""
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape[2:])
    box = box[:, None, :, None]  # [B, 1, 4, 1]
    is_row = (rows >= box[:, :, 0]) & (rows < box[:, :, 2])
    is_column = (columns >= box[:, :, 1]) & (columns < box[:, :, 3])
    return is_row[..., None] & is_column[:, :, None]
