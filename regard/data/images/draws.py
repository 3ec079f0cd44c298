"""What is random about the images of a batch: a row of numbers for each, drawn on the CPU from seed, epoch and batch.

The rows travel with the batch, and the pixels are changed on the device by what they say (augment.py). So a resumed run
repeats its augmentation to the bit, it is the same on a CPU and a GPU, and a step can be replayed as a CUDA graph.

All changes of place (crop, flip, rotation, shear, translation) are one matrix per image, multiplied here: what happens
last to the image stands last, since a matrix leads from a place in the output to the place in the input that it shows.
"""

import math
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from regard.core.options import Range, check_options, config_dataclass

# the operations of RandAugment as Cubuk et al. 2020 (arXiv 1909.13719) list them, with those of timm's increasing form
COLOUR = (
    "none",
    "autocontrast",
    "equalize",
    "invert",
    "posterize",
    "solarize",
    "solarize_add",
    "colour",
    "contrast",
    "brightness",
    "sharpness",
)
PLACE = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
OPERATIONS = (*COLOUR[1:], *PLACE)
MAGNITUDES = 10.0  # the largest
MOST_OPERATIONS = 4
# What an operation does at the largest magnitude
DEGREES, SHEAR, TRANSLATION, ENHANCEMENT, ADDED, BITS = 30.0, 0.3, 0.45, 0.9, 110, 4
# The area of an erased box as a share of the image, and its height over its width (Zhong et al. 2017, arXiv 1708.04896)
ERASED_AREA, ERASED_RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)
CROP_RATIO = (3 / 4, 4 / 3)  # height over width of a resized crop (Szegedy et al. 2014, arXiv 1409.4842)
QUANTILES = 4096  # of the distribution of the shares of mixed images

# The numbers in the row of an image: name -> columns
COLUMNS = {
    "matrix": slice(0, 6),  # from places in the output to places in the input, both from -1 to 1: [2, 3]
    "erased": slice(6, 10),  # top, left, bottom, right in pixels; empty: nothing
    "colour": slice(10, 13),  # of the erased box, in deviations from the mean
    "mixed": slice(13, 17),  # the box that comes from the other image
    "weight": slice(17, 18),  # of the image itself outside of the box
    "share": slice(18, 19),  # of the image itself in the mixture, over all its pixels
    "order": slice(19, 20),  # images of the batch from those with most changes of colour to those with none
    "operations": slice(
        20, 20 + MOST_OPERATIONS
    ),  # changes of colour as indices into COLOUR, those that do nothing last
    "arguments": slice(20 + MOST_OPERATIONS, 20 + 2 * MOST_OPERATIONS),
}
WIDTH = 20 + 2 * MOST_OPERATIONS


@config_dataclass
class AugmentConfig:
    """Augmentation of the training images. What is random follows from the seed, the epoch and the batch."""

    flip: Annotated[
        float | None,
        "probability that an image is mirrored left to right (default: 0.5 for colour images, 0 for grey ones, which "
        "are often letters or digits)",
        Range(0, 1),
    ] = None
    crop: Annotated[
        Literal["pad", "resized", "none"] | None,
        "pad: pad the image and cut out its size; resized: cut out a part and scale it up (default: pad for images up "
        "to 64 x 64, else resized; none below 16 x 16)",
    ] = None
    padding: Annotated[int | None, "crop pad: pixels on each side (default: an eighth of the side)", Range(0)] = None
    padded_with: Annotated[
        Literal["mirror", "mean"],
        "crop pad: what stands in the padding: the mirrored image, or the mean colour of the training images",
    ] = "mean"
    area: Annotated[
        tuple[float, float],
        "crop resized: least and largest share of the image that is cut out",
        Range(above=0, most=1),
    ] = (0.35, 1.0)
    operations: Annotated[int, "RandAugment: number of operations per image; 0: none", Range(0, MOST_OPERATIONS)] = 0
    magnitude: Annotated[float, "RandAugment: mean magnitude of an operation", Range(0, MAGNITUDES)] = 9.0
    deviation: Annotated[float, "RandAugment: standard deviation of the magnitude", Range(0)] = 0.5
    probability: Annotated[float, "RandAugment: probability that an operation is applied", Range(0, 1)] = 0.5
    erase: Annotated[float, "probability that a box of the image is filled with one random colour", Range(0, 1)] = 0.0
    mixup: Annotated[
        float, "mixup: alpha of the Beta distribution of the shares of two mixed images; 0: no mixup", Range(0)
    ] = 0.0
    cutmix: Annotated[
        float,
        "CutMix: alpha of the Beta distribution of the area that comes from another image; 0: no CutMix",
        Range(0),
    ] = 0.0
    mixed: Annotated[float, "probability that an image is mixed, by mixup or CutMix", Range(0, 1)] = 1.0
    switch: Annotated[float, "with mixup and CutMix: probability of CutMix", Range(0, 1)] = 0.5
    unmixed_end: Annotated[
        float,
        "last share of the training in which no images are mixed; needs training.steps or training.epochs",
        Range(0, below=1),
    ] = 0.0

    def __post_init__(self) -> None:
        check_options(self, "augment.")
        if len(self.area) != 2 or self.area[0] > self.area[1]:
            raise ValueError(f"augment.area must be two shares, the least first, got {list(self.area)}")

    def resolved(self, size: tuple[int, int], channels: int) -> "AugmentConfig":
        """With the defaults for images of this size."""
        flip = self.flip if self.flip is not None else 0.5 * (channels == 3)
        crop = self.crop or ("none" if min(size) < 16 else "pad" if max(size) <= 64 else "resized")
        padding = max(1, min(size) // 8) if self.padding is None else self.padding
        if crop == "pad" and self.padded_with == "mirror" and padding >= min(size):
            raise ValueError(f"augment.padding must be below the side of the images, {min(size)}, got {padding}")
        return replace(self, flip=flip, crop=crop, padding=padding)

    @property
    def mixes(self) -> bool:
        return self.mixed > 0 and (self.mixup > 0 or self.cutmix > 0)

    def describe(self) -> str:
        """What is done to the images, for people."""
        parts = [
            "flips" * bool(self.flip),
            {"pad": f"crops after padding by {self.padding}", "resized": "resized crops"}.get(self.crop or "none", ""),
            f"RandAugment ({self.operations} of {len(OPERATIONS)} operations)" * (self.operations > 0),
            "erasing" * (self.erase > 0),
            "mixup" * (self.mixed > 0 and self.mixup > 0),
            "CutMix" * (self.mixed > 0 and self.cutmix > 0),
        ]
        return ", ".join(filter(None, parts)) or "none"


class Draws:
    """Draws the rows of a batch."""

    def __init__(self, config: AugmentConfig, size: tuple[int, int], channels: int):
        self.config, self.size, self.channels = config.resolved(size, channels), size, channels
        self.quantiles = {alpha: _quantiles(alpha) for alpha in {config.mixup, config.cutmix} - {0.0}}

    def __call__(self, generator: np.random.Generator, count: int, mixes: bool = True) -> Tensor:
        """[B, WIDTH]. `mixes` False: no image is mixed."""
        config, rows = self.config, np.zeros((count, WIDTH))
        # all that may be needed, so that an option that is off moves no draw of another
        uniform = generator.random((count, 24))
        operations = generator.random((count, 5, MOST_OPERATIONS))
        colour = generator.random((count, 2, 3))

        def named(name: str) -> np.ndarray:
            return rows[:, COLUMNS[name]]

        matrix = self._crop(uniform[:, :4])
        matrix = matrix @ _flip(uniform[:, 4] < config.flip) if config.flip else matrix
        for slot in range(config.operations):
            place, number, argument = self._operation(operations[:, :, slot])
            matrix = matrix @ place
            named("operations")[:, slot], named("arguments")[:, slot] = number, argument
        self._order(named("operations"), named("arguments"), named("order"))
        named("matrix")[:] = matrix[:, :2].reshape(count, 6)
        if config.erase:
            boxes = self._erased(uniform[:, 5:9])
            named("erased")[:] = boxes * (uniform[:, 9] < config.erase)[:, None]
            named("colour")[:] = _normal(colour[:, 0], colour[:, 1])
        named("weight")[:] = named("share")[:] = 1.0
        if mixes and config.mixes:
            self._mix(uniform[:, 10:15], named("mixed"), named("weight"), named("share"))
        return torch.from_numpy(rows.astype(np.float32))

    def _crop(self, uniform: np.ndarray) -> np.ndarray:
        """Matrices [B, 3, 3] from places in the cut-out image to places in the image, both from -1 to 1."""
        config, (height, width) = self.config, self.size
        if config.crop == "pad":
            padding = config.padding or 0
            # whole pixels from -padding to padding
            moved = np.floor(uniform[:, :2] * (2 * padding + 1)) - padding
            return _affine(down=2 * moved[:, 0] / height, right=2 * moved[:, 1] / width)
        if config.crop == "resized":
            area = config.area[0] + (config.area[1] - config.area[0]) * uniform[:, 0]
            ratio = np.exp(_between(uniform[:, 1], *np.log(CROP_RATIO)))
            tall, wide = np.sqrt(area * ratio).clip(max=1.0), np.sqrt(area / ratio).clip(max=1.0)
            return _affine(
                tall=tall,
                wide=wide,
                down=(1 - tall) * (2 * uniform[:, 2] - 1),
                right=(1 - wide) * (2 * uniform[:, 3] - 1),
            )
        return _affine(down=np.zeros(len(uniform)))

    def _operation(self, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each image a matrix, an index into COLOUR, and the argument of that operation; one of the two is of the
        operation that was drawn, the other does nothing."""
        config, (height, width) = self.config, self.size
        which = np.floor(uniform[:, 0] * len(OPERATIONS)).astype(int)
        which = np.where(uniform[:, 1] < config.probability, which, -1)
        sign = np.where(uniform[:, 2] < 0.5, -1.0, 1.0)
        noise = config.deviation * _normal(uniform[:, 3], uniform[:, 4])
        level = (config.magnitude + noise).clip(0, MAGNITUDES) / MAGNITUDES

        def only(name: str, value: np.ndarray) -> np.ndarray:
            return np.where(which == OPERATIONS.index(name), value, 0.0)

        place = _affine(
            angle=only("rotate", sign * level * math.radians(DEGREES)),
            aspect=height / width,
            shear_x=only("shear_x", sign * level * SHEAR) * height / width,
            shear_y=only("shear_y", sign * level * SHEAR) * width / height,
            right=only("translate_x", sign * level * 2 * TRANSLATION),
            down=only("translate_y", sign * level * 2 * TRANSLATION),
        )
        factor = np.maximum(0.1, 1 + sign * level * ENHANCEMENT)
        argument = (
            only("posterize", 2.0 ** (8 - (BITS - np.floor(level * BITS)).clip(1)))
            + only("solarize", 256 - np.floor(level * 256))
            + only("solarize_add", np.minimum(128, np.floor(level * ADDED)))
            + sum(only(name, factor) for name in ("colour", "contrast", "brightness", "sharpness"))
        )
        return place, np.where(which < len(COLOUR) - 1, which + 1, 0), argument

    def _order(self, operations: np.ndarray, arguments: np.ndarray, order: np.ndarray) -> None:
        """Moves what changes colours to the first slots of each image, and orders the images by it. More than a slot
        has room for lose it, which is all but impossible."""
        first = np.argsort(operations == 0, axis=1, kind="stable")
        operations[:] = np.take_along_axis(operations, first, 1)
        arguments[:] = np.take_along_axis(arguments, first, 1)
        order[:, 0] = np.argsort((operations == 0).sum(1), kind="stable")
        for slot, room in enumerate(rooms(self.config, len(order))):
            operations[order[room:, 0].astype(int), slot] = 0

    def _erased(self, uniform: np.ndarray) -> np.ndarray:
        height, width = self.size
        area = _between(uniform[:, 0], *ERASED_AREA) * height * width
        ratio = np.exp(_between(uniform[:, 1], *np.log(ERASED_RATIO)))
        tall = np.sqrt(area * ratio).round().clip(1, height)
        wide = np.sqrt(area / ratio).round().clip(1, width)
        top, left = np.floor(uniform[:, 2] * (height - tall + 1)), np.floor(uniform[:, 3] * (width - wide + 1))
        return np.stack([top, left, top + tall, left + wide], 1)

    def _mix(self, uniform: np.ndarray, box: np.ndarray, weight: np.ndarray, share: np.ndarray) -> None:
        """Fills in, for each image, the box that comes from the other one, and its own weight outside of it."""
        config, (height, width) = self.config, self.size
        both = config.mixup > 0 and config.cutmix > 0
        cuts = uniform[:, 0] < config.switch if both else np.full(len(uniform), config.cutmix > 0)
        is_mixed = uniform[:, 1] < config.mixed
        if config.mixup:
            drawn = np.interp(uniform[:, 2], *self.quantiles[config.mixup])
            weight[:, 0] = np.where(is_mixed & ~cuts, drawn, 1.0)
        if config.cutmix:
            side = np.sqrt(1 - np.interp(uniform[:, 2], *self.quantiles[config.cutmix]))
            tall, wide = np.floor(side * height), np.floor(side * width)
            middle = np.floor(uniform[:, 3] * height), np.floor(uniform[:, 4] * width)
            top, left = middle[0] - tall // 2, middle[1] - wide // 2
            corners = np.stack([top, left, top + tall, left + wide], 1).clip(0, [height, width, height, width])
            box[:] = corners * (is_mixed & cuts)[:, None]
        area = (box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1]) / (height * width)
        share[:, 0] = weight[:, 0] * (1 - area)


def rooms(config: AugmentConfig, count: int) -> list[int]:
    """The number of images of a batch that are taken through the first, second ... change of colour. It is static, for
    CUDA graphs, and eight deviations above the mean of those that need it: most images need none."""
    n, share, found = config.operations, config.probability * (len(COLOUR) - 1) / len(OPERATIONS), []
    for slot in range(n):
        more = sum(math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(slot + 1, n + 1))
        found.append(min(count, math.ceil(count * more + 8 * math.sqrt(count * more * (1 - more)))))
    return found


def _affine(
    *,
    angle: np.ndarray | float = 0.0,
    aspect: float = 1.0,
    shear_x: np.ndarray | float = 0.0,
    shear_y: np.ndarray | float = 0.0,
    tall: np.ndarray | float = 1.0,
    wide: np.ndarray | float = 1.0,
    down: np.ndarray | float = 0.0,
    right: np.ndarray | float = 0.0,
) -> np.ndarray:
    """Matrices [B, 3, 3] on (x, y, 1), x to the right and y down, from -1 to 1. `aspect`: height over width in pixels,
    in which angles are measured."""
    numbers = np.broadcast_arrays(*map(np.atleast_1d, (angle, shear_x, shear_y, tall, wide, down, right)))
    angle, shear_x, shear_y, tall, wide, down, right = numbers
    matrix = np.zeros((len(angle), 3, 3))
    matrix[:, 0, 0], matrix[:, 0, 1] = wide * np.cos(angle), shear_x - aspect * np.sin(angle)
    matrix[:, 1, 0], matrix[:, 1, 1] = shear_y + np.sin(angle) / aspect, tall * np.cos(angle)
    matrix[:, 0, 2], matrix[:, 1, 2], matrix[:, 2, 2] = right, down, 1
    return matrix


def _flip(is_flipped: np.ndarray) -> np.ndarray:
    matrix = np.tile(np.eye(3), (len(is_flipped), 1, 1))
    matrix[:, 0, 0] = np.where(is_flipped, -1.0, 1.0)
    return matrix


def _between(uniform: np.ndarray, low: float, high: float) -> np.ndarray:
    return low + (high - low) * uniform


def _normal(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Box and Muller: NumPy promises the same `random` in all versions, not the same normal numbers."""
    return np.sqrt(-2 * np.log(1 - first)) * np.cos(2 * math.pi * second)


def _quantiles(alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities, and the quantiles of Beta(alpha, alpha) at them, to interpolate between."""
    from scipy.special import betaincinv

    at = np.linspace(0, 1, QUANTILES + 1)
    return at, betaincinv(alpha, alpha, at)
