"""Stems: from pixels to the vectors of a grid of patches."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.modules import ModuleListOf
from regard.models.vision.config import PatchConfig


class Patches(nn.Module):
    """Dosovitskiy et al. 2021 (ViT): each patch of P x P pixels is flattened and goes through one linear map, which is
    a convolution of P x P with stride P. [B, C, h, w] -> [B, E, h / P, w / P]."""

    def __init__(self, channels: int, width: int, patch: int):
        super().__init__()
        self.patch = patch
        # the layout of a convolution, as others save it
        self.weight = nn.Parameter(torch.empty(width, channels, patch, patch))
        self.bias = nn.Parameter(torch.zeros(width))
        nn.init.xavier_uniform_(self.weight.view(width, -1))

    def forward(self, images: Tensor) -> Tensor:
        return self.vectors(images).mT.unflatten(2, self.grid(*images.shape[2:]))

    def vectors(self, images: Tensor) -> Tensor:
        """[B, C, h, w] -> [B, n, E], row by row."""
        P = self.patch
        h, w = self.grid(*images.shape[2:])
        cells = images.unflatten(3, (w, P)).unflatten(2, (h, P)).permute(0, 2, 4, 1, 3, 5)  # [B, h, w, C, P, P]
        return F.linear(cells.reshape(images.shape[0], h * w, -1), self.weight.flatten(1), self.bias)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Patches in a column and in a row of an image."""
        P = self.patch
        if height % P or width % P:
            raise ValueError(
                f"an image of {height} x {width} pixels is not cut into patches of {P} x {P} without a rest: choose "
                f"a patch that divides both sides, or resize the images to "
                f"{max(height // P, 1) * P} x {max(width // P, 1) * P}"
            )
        return height // P, width // P


class Convolutions(nn.Module):
    """Hassani et al. 2021 (Compact Transformers, arXiv 2104.05704): n layers of convolution without bias, ReLU, and the
    largest of 3 x 3 at every second place. What lies outside of the image is zero to a convolution and nothing to the
    pooling. [B, C, h, w] -> [B, E, rows, columns], each layer with half the rows and columns, rounded up, where the
    stride is 1. `pooling` as a number: only after that many of the last layers. `norm`: batch norm before each ReLU,
    as in the stems of Xiao et al. 2021 (arXiv 2106.14881)."""

    compiles_alone = recomputes_alone = True  # beside the layers behind it

    def __init__(
        self,
        channels: int,
        width: int,
        *,
        layers: int,
        kernel: int,
        stride: int,
        between: int,
        pooling: bool | int,
        norm: bool,
    ):
        super().__init__()
        self.kernel, self.stride = kernel, stride
        self.pooled = layers if pooling is True else int(pooling)
        if not 0 <= self.pooled <= layers:
            raise ValueError(f"stem_pooling must be true, false or at most stem_layers ({layers}), got {pooling}")
        widths = [channels, *[between] * (layers - 1), width]
        self.convolve: ModuleListOf[nn.Conv2d] = ModuleListOf(
            nn.Conv2d(widths[index], widths[index + 1], kernel, stride, kernel // 2, bias=False)
            for index in range(layers)
        )
        self.norms: ModuleListOf[nn.Module] = ModuleListOf(
            nn.BatchNorm2d(one.out_channels) if norm else nn.Identity() for one in self.convolve
        )
        for convolution in self.convolve:
            nn.init.kaiming_normal_(convolution.weight)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        if x.device.type == "cuda":
            # the layout of the fast kernels; the grid is flattened into tokens without a copy behind them
            x = x.contiguous(memory_format=torch.channels_last)
        for convolution, norm, is_pooled in zip(self.convolve, self.norms, self._is_pooled(), strict=True):
            x = torch.relu(norm(convolution(x)))
            x = F.max_pool2d(x, 3, 2, 1) if is_pooled else x
        return x

    def _is_pooled(self) -> list[bool]:
        """For each layer, whether pooling follows it."""
        return [index >= len(self.convolve) - self.pooled for index in range(len(self.convolve))]

    def vectors(self, images: Tensor) -> Tensor:
        """[B, C, h, w] -> [B, n, E], row by row."""
        return self(images).flatten(2).mT

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns that are left of an image."""
        sides = [height, width]
        for is_pooled in self._is_pooled():
            sides = [(side + 2 * (self.kernel // 2) - self.kernel) // self.stride + 1 for side in sides]
            sides = [(side - 1) // 2 + 1 for side in sides] if is_pooled else sides
        if min(sides) < 1:
            raise ValueError(
                f"an image of {height} x {width} pixels is smaller than the kernels of the stem, of {self.kernel} x "
                f"{self.kernel}: choose a smaller stem_kernel, or larger images"
            )
        return sides[0], sides[1]


def build_stem(config: PatchConfig) -> Patches | Convolutions:
    """The stem that a config names."""
    if config.stem == "patch":
        return Patches(config.channels, config.width, config.patch)
    return Convolutions(
        config.channels,
        config.width,
        layers=config.stem_layers,
        kernel=config.stem_kernel,
        stride=config.stem_stride,
        between=config.stem_width,
        pooling=config.stem_pooling,
        norm=config.stem_norm,
    )


def check_images(images: Tensor, channels: int, image: tuple[int, int]) -> None:
    """Refuses what is no batch of images of this size."""
    expected = f"[batch, {channels}, {image[0]}, {image[1]}]"
    if not isinstance(images, Tensor) or images.dim() != 4 or tuple(images.shape[1:]) != (channels, *image):
        got = list(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"images must be {expected}, got {got}: resize them, or build the model for their size")
    if not images.is_floating_point():
        raise ValueError(f"images must hold floating-point numbers, got {images.dtype}: divide by 255 and normalize")
