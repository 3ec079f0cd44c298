"""Batches of images, in an order and with draws that depend on nothing but the seed and the epoch.

The pixels of a training set stay on the device if they fit there: then a batch only names its images.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.data.batches import drawing, to_device
from regard.data.images.draws import AugmentConfig, Draws


class ImageBatch(NamedTuple):
    """Images by their numbers, their classes, and what was drawn for each."""

    pixels: Tensor | None  # uint8 [B, C, h, w]; None: they are on the device already
    labels: Tensor  # [B], numbers of classes
    draws: Tensor  # [B, P]
    indices: Tensor  # [B], which images

    def to(self, device: torch.device | str) -> "ImageBatch":
        return to_device(self, device)


class ImageBatches:
    """Batches of one size. Each epoch shuffles the images anew; the few that do not fill a batch are omitted from it.

    `unmixed_from`: the number of batches after which images are not mixed any more. `carries`: a batch has its pixels.
    """

    def __init__(
        self,
        pixels: Tensor,
        labels: Tensor,
        config: AugmentConfig,
        *,
        size: int,
        seed: int,
        unmixed_from: float | None = None,
        carries: bool = False,
    ):
        if len(pixels) != len(labels) or not len(labels):
            raise ValueError(f"expected as many labels as images, at least one, got {len(labels)} and {len(pixels)}")
        self.pixels, self.labels = pixels, labels
        self.size, self.seed, self.unmixed_from, self.carries = min(size, len(labels)), seed, unmixed_from, carries
        height, width = pixels.shape[2:]
        self.draw = Draws(config, (height, width), pixels.shape[1])
        self.order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        """How many images there are."""
        return len(self.labels)

    def count(self, epoch: int) -> int:
        """How many batches an epoch has."""
        return len(self) // self.size

    def rows(self, epoch: int, i: int) -> np.ndarray:
        """Which images batch `i` of an epoch has."""
        if epoch < 0 or not 0 <= i < self.count(epoch):
            raise IndexError(f"epoch {epoch} has {self.count(epoch)} batches, counted from 0, got {i}")
        if self.order is None or self.order[0] != epoch:
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
            self.order = epoch, np.argsort(generator.random(len(self)), kind="stable")
        return self.order[1][i * self.size : (i + 1) * self.size]

    def get(self, epoch: int, i: int) -> ImageBatch:
        """Batch `i` of an epoch."""
        index = torch.from_numpy(self.rows(epoch, i).copy())
        mixes = self.unmixed_from is None or epoch * self.count(epoch) + i < self.unmixed_from
        draws = self.draw(drawing(self.seed, epoch, i), len(index), mixes)
        return ImageBatch(self.pixels[index] if self.carries else None, self.labels[index], draws, index)
