"""One image file as pixels. Whatever the file holds, this ends soon: with pixels, or with `BadImage` that names it.

Images are turned upright by their EXIF orientation. Transparent ones are laid on white, palettes are looked up, of an
animation the first frame is taken, and 16 bits become 8. An image of another size is scaled until it covers the size
that is asked for, and what stands over is cut off on both sides.
"""

import io
import os
import stat
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

# the formats that are read: others of Pillow start programs (EPS) or are no images (MPEG)
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm")
MOST_PIXELS = 2**26  # 8192 x 8192: a small file can say that it is of any size
MOST_BYTES = 2**28
AT_ONCE = 1024  # files that are read ahead
EMPTY = "the file is empty"
GREY = ("1", "L", "LA", "I", "I;16", "I;16L", "I;16B")
SIXTEEN_BITS = ("I", "I;16", "I;16L", "I;16B")


class BadImage(ValueError):
    """What is wrong with an image, and where. `reason` is short and the same for all images with the same fault."""

    def __init__(self, file: str, reason: str, detail: str = "") -> None:
        self.file, self.reason, self.detail = file, reason, detail
        super().__init__(f"{file}: {reason}{detail}")


class Header(NamedTuple):
    """What the first bytes of an image file say."""

    size: tuple[int, int]  # height, width
    is_grey: bool


def read_header(path: str | Path) -> Header:
    """Reads no more of an image file than its size and its colours."""
    _check_file(path)
    with _named(path), open(path, "rb") as file, _opened(file, str(path)) as image:
        return Header((image.height, image.width), image.mode in GREY)


def decode_file(path: str | Path, size: tuple[int, int], channels: int) -> np.ndarray:
    """An image file as uint8 [C, h, w]. `channels`: 1 for grey, 3 for colour."""
    return decode(_read(path), size, channels, str(path))


def decode_files(
    paths: Sequence[str | Path],
    size: tuple[int, int],
    channels: int,
    refuse: Callable[[BadImage], None] | None = None,
) -> Iterator[np.ndarray | None]:
    """Image files, several at a time, as uint8 [C, h, w], in their order. A broken one is raised, or given to `refuse`
    and None in its place."""

    def work(path: str | Path) -> np.ndarray | BadImage:
        try:
            return _decode(_read(path), size, channels, str(path))
        except BadImage as bad:
            return bad

    # what Pillow warns of, it reads all the same; the filter is one for all threads, so it is set outside of them
    with warnings.catch_warnings(), ThreadPoolExecutor(min(8, len(paths) or 1)) as pool:
        warnings.simplefilter("ignore")
        for start in range(0, len(paths), AT_ONCE):
            for found in pool.map(work, paths[start : start + AT_ONCE]):
                if not isinstance(found, BadImage):
                    yield found
                elif refuse is None:
                    raise found
                else:
                    refuse(found)
                    yield None


def decode(data: bytes, size: tuple[int, int], channels: int, name: str = "the image") -> np.ndarray:
    """The bytes of an image file as uint8 [C, h, w]. `channels`: 1 for grey, 3 for colour."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _decode(data, size, channels, name)


def _decode(data: bytes, size: tuple[int, int], channels: int, name: str) -> np.ndarray:
    if not data:
        raise BadImage(name, EMPTY)
    _check_png(data, name)
    with _opened(io.BytesIO(data), name) as image:
        with _decoding(name):
            # a large JPEG is decoded at a fraction of its size, at least twice that which is asked for
            image.draft(None, (2 * max(size), 2 * max(size)))
        return _fitted(image, size, channels, name)


def _check_png(data: bytes, name: str) -> None:
    """Refuses a PNG whose checksums are wrong or whose end is missing: its decoder stops at the last pixel."""
    if not data.startswith(b"\x89PNG"):
        return
    with _opened(io.BytesIO(data), name) as image, _decoding(name):
        image.verify()


def from_image(image: Any, size: tuple[int, int], channels: int, name: str = "the image") -> np.ndarray:
    """A PIL image as uint8 [C, h, w], as `decode` gives its file."""
    if image.width * image.height > MOST_PIXELS:
        raise _too_large(name, image.size)
    return _fitted(image, size, channels, name)


def _fitted(image: Any, size: tuple[int, int], channels: int, name: str) -> np.ndarray:
    """A PIL image, which may not be decoded yet."""
    from PIL import Image, ImageOps

    with _decoding(name):
        image.load()
        upright = ImageOps.exif_transpose(image)
    return fit(_plain(upright, channels, name), size, Image.Resampling.BICUBIC)


def fit(image: Any, size: tuple[int, int], how: Any) -> np.ndarray:
    """A grey or RGB image of PIL as uint8 [C, h, w], scaled to cover the size, and its middle cut out."""
    from PIL import ImageOps

    height, width = size
    if image.size != (width, height):
        image = ImageOps.fit(image, (width, height), method=how)
    pixels = np.asarray(image)
    # a copy in either case: what Pillow gives is read-only, of which PyTorch warns
    return np.array(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1), order="C")


def resize_pixels(pixels: np.ndarray, size: tuple[int, int], channels: int) -> np.ndarray:
    """uint8 [C, h, w] in another size, and grey or in colour, as `decode` would give it."""
    from PIL import Image

    if pixels.shape == (channels, *size):
        return pixels
    image = Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    return from_image(image, size, channels)


@contextmanager
def _decoding(name: str) -> Iterator[None]:
    try:
        yield
    # decoders raise whatever their code runs into: struct.error, KeyError, SyntaxError ...
    except Exception as error:
        raise BadImage(name, "cannot be decoded", f": {_describe(error)}") from error


@contextmanager
def _named(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadImage(str(path), (error.strerror or str(error)).lower()) from error


def _check_file(path: str | Path) -> None:
    with _named(path):
        found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        kind = "is a folder" if stat.S_ISDIR(found.st_mode) else "is a pipe or a device"
        raise BadImage(str(path), f"{kind}, expected an image file")
    if not found.st_size:
        raise BadImage(str(path), EMPTY)


def _read(path: str | Path) -> bytes:
    _check_file(path)
    with _named(path), open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise BadImage(str(path), f"has more than {MOST_BYTES:,} bytes", ": scale it down first")
    return data


def _opened(file: BinaryIO, name: str) -> Any:
    """A PIL image whose pixels are not decoded yet, and whose size is bearable."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:
        known = ", ".join(FORMATS)
        raise BadImage(name, "is no image that can be read", f": expected one of {known}") from error
    except Image.DecompressionBombError as error:
        raise BadImage(
            name, "has too many pixels", f": at most {MOST_PIXELS:,} are read; scale it down first"
        ) from error
    except Exception as error:
        raise BadImage(name, "cannot be decoded", f": {_describe(error)}") from error
    if image.width * image.height > MOST_PIXELS:
        raise _too_large(name, image.size)
    if min(image.size) < 1:
        raise BadImage(name, "has no pixels")
    return image


def _too_large(name: str, size: tuple[int, int]) -> BadImage:
    detail = f": it says {size[0]:,} x {size[1]:,}, at most {MOST_PIXELS:,} are read; scale it down first"
    return BadImage(name, "has too many pixels", detail)


def _plain(image: Any, channels: int, name: str) -> Any:
    """The image as mode L or RGB."""
    from PIL import Image

    if image.mode == "F":
        raise BadImage(name, "has floating-point pixels", ": expected 8 or 16 bits")
    if image.mode in SIXTEEN_BITS:
        values = np.asarray(image).astype(np.int64)
        values = values >> 8 if values.size and values.max() > 255 else values
        image = Image.fromarray(values.clip(0, 255).astype(np.uint8))
    if image.mode in ("LA", "PA", "La", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("L" if channels == 1 else "RGB")


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:200] or type(error).__name__
