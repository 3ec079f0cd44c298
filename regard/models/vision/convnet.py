"""A residual network of convolutions, without attention: what the others are compared with."""

from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from regard.core.model import Model, Prediction
from regard.core.options import Range, config_dataclass
from regard.core.rows import Memory
from regard.kernels.dropout import Dropout, DropPath
from regard.models.modules import ModuleListOf
from regard.models.vision.config import ImageConfig, drop_rates
from regard.models.vision.convolution import convolution
from regard.models.vision.patches import check_images


@config_dataclass
class ConvnetConfig(ImageConfig):
    """The config of a residual network."""

    kind: Literal["convnet"] = "convnet"
    width: Annotated[int, "channels of the first stage; they double from stage to stage", Range(1)] = 64
    layers: Annotated[
        tuple[int, ...],
        "blocks of two convolutions in each stage; every stage after the first halves the map",
        Range(1),
    ] = (2, 2, 2)
    dropout: Annotated[float, "dropout of the vector that the output layer reads", Range(0, below=1)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.layers, tuple | list) or not self.layers:
            raise ValueError(f"layers must be a number for each stage, such as [2, 2, 2], got {self.layers}")


class Residual(nn.Module):
    """ReLU(x + BN(conv(ReLU(BN(conv(x)))))), both convolutions of 3 x 3; where the width changes, x goes through a
    convolution of 1 x 1 and BN, and the map is halved."""

    recomputes_alone = True  # as the layers of a Transformer

    def __init__(self, inside: int, outside: int, drop_path: float):
        super().__init__()
        stride = 1 if inside == outside else 2
        self.first, self.first_norm = convolution(inside, outside, 3, stride=stride), nn.BatchNorm2d(outside)
        self.second, self.second_norm = convolution(outside, outside, 3), nn.BatchNorm2d(outside)
        self.shortcut: nn.Module = nn.Identity()
        if stride == 2:
            self.shortcut = nn.Sequential(convolution(inside, outside, stride=2), nn.BatchNorm2d(outside))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.shortcut(x) + self.drop_path(self.second_norm(self.second(y))))


class Convnet(Model):
    """He et al. 2016 (arXiv 1512.03385) for small images: a convolution of 3 x 3, stages of residual blocks, the mean
    over the map and an output layer. layers=(3, 3, 3) and width=16 are the paper's ResNet-20, with convolutions of
    1 x 1 where the width changes (its option B). Batch norms read all images of a batch in training; in evaluation an
    image alone is the image in a batch. Time and memory N.

    >>> model = Convnet(ConvnetConfig(image=(32, 32), width=8, layers=(1, 1), classes=10))
    >>> logits = model(torch.randn(2, 3, 32, 32)).logits
    """

    def __init__(self, config: ConvnetConfig):
        super().__init__()
        self.config: ConvnetConfig = config
        self.stem, self.stem_norm = convolution(config.channels, config.width, 3), nn.BatchNorm2d(config.width)
        widths = [config.width << stage for stage, count in enumerate(config.layers) for _ in range(count)]
        rates = drop_rates(config.drop_path, len(widths))
        self.blocks: ModuleListOf[Residual] = ModuleListOf(
            Residual(inside, outside, rate)
            for inside, outside, rate in zip([config.width, *widths[:-1]], widths, rates, strict=True)
        )
        self.dropout = Dropout(config.dropout)
        self.output = None if config.classes is None else nn.Linear(widths[-1], config.classes)

    def forward(self, images: Tensor) -> Prediction:
        """[B, C, h, w] -> logits [B, classes]"""
        if self.output is None:
            raise ValueError("this model has no classes: build it with classes, or use encode for its vectors")
        return Prediction(self.output(self.dropout(self._encode(images).mean((2, 3)))), None)

    def encode(self, images: Tensor) -> Memory:
        """The vectors of the cells of the last map, [B, n, E]."""
        return Memory(self._encode(images).flatten(2).mT, None)

    def _encode(self, images: Tensor) -> Tensor:
        check_images(images, self.config.channels, self.config.image)
        x = images
        if x.device.type == "cuda":
            # the layout of the fast kernels
            x = x.contiguous(memory_format=torch.channels_last)
        x = torch.relu(self.stem_norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return x
