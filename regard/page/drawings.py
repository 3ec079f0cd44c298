"""Small drawings, for a run that comes with no images of its own: the page begins with a picture all the same."""

from functools import cache
from typing import Any

import numpy as np

from regard.data.images.decode import from_image
from regard.tasks.opened import Sample

SIDE = 256  # pixels in which they are drawn

Point = tuple[float, float]


def drawings(size: tuple[int, int], channels: int) -> tuple[Sample, ...]:
    """A boat, a house and a fish, in the size that a model reads. They have no labels: nobody can tell what a model
    calls them."""
    return tuple(Sample(from_image(image, size, channels)) for image in _draw())


@cache
def _draw() -> list[Any]:
    return [_boat(), _house(), _fish()]


def _canvas(above: tuple[int, int, int], below: tuple[int, int, int]) -> tuple[Any, Any]:
    """A picture that fades from one colour to another, and what draws on it."""
    from PIL import Image, ImageDraw

    share = np.linspace(0, 1, SIDE)[:, None, None]
    rows = (1 - share) * np.array(above) + share * np.array(below)
    picture = Image.fromarray(np.broadcast_to(rows, (SIDE, SIDE, 3)).astype(np.uint8))
    return picture, ImageDraw.Draw(picture)


def _at(*points: Point) -> list[Point]:
    """Points in shares of the side."""
    return [(x * SIDE, y * SIDE) for x, y in points]


def _boat() -> Any:
    picture, draw = _canvas((120, 175, 225), (205, 225, 240))
    draw.rectangle(_at((0, 0.66), (1, 1)), fill=(28, 84, 128))
    draw.polygon(_at((0.16, 0.62), (0.86, 0.62), (0.74, 0.8), (0.28, 0.8)), fill=(150, 45, 38))
    draw.rectangle(_at((0.48, 0.16), (0.505, 0.62)), fill=(70, 48, 34))
    draw.polygon(_at((0.52, 0.18), (0.52, 0.57), (0.82, 0.57)), fill=(248, 246, 236))
    draw.polygon(_at((0.465, 0.26), (0.465, 0.57), (0.24, 0.57)), fill=(228, 222, 205))
    return picture


def _house() -> Any:
    picture, draw = _canvas((150, 195, 235), (225, 232, 220))
    draw.rectangle(_at((0, 0.78), (1, 1)), fill=(82, 132, 62))
    draw.rectangle(_at((0.24, 0.44), (0.74, 0.84)), fill=(222, 196, 150))
    draw.polygon(_at((0.18, 0.46), (0.49, 0.18), (0.8, 0.46)), fill=(165, 62, 48))
    draw.rectangle(_at((0.43, 0.6), (0.55, 0.84)), fill=(92, 62, 42))
    for left in (0.3, 0.6):
        draw.rectangle(_at((left, 0.53), (left + 0.09, 0.64)), fill=(70, 110, 150))
    draw.ellipse(_at((0.82, 0.08), (0.95, 0.21)), fill=(250, 220, 90))
    return picture


def _fish() -> Any:
    picture, draw = _canvas((38, 120, 150), (14, 52, 92))
    draw.polygon(_at((0.7, 0.5), (0.92, 0.32), (0.92, 0.7)), fill=(226, 120, 34))
    draw.ellipse(_at((0.14, 0.32), (0.76, 0.7)), fill=(240, 146, 44))
    draw.polygon(_at((0.38, 0.34), (0.6, 0.2), (0.6, 0.36)), fill=(226, 120, 34))
    draw.ellipse(_at((0.24, 0.43), (0.31, 0.5)), fill=(250, 250, 245))
    draw.ellipse(_at((0.255, 0.445), (0.295, 0.485)), fill=(20, 20, 24))
    return picture
