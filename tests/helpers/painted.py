"""Small images that tests make: of a shape that a model can learn, as files, as folders, as the formats of sets."""

import gzip
import io
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"red": (200, 40, 30), "green": (40, 180, 60), "blue": (30, 60, 210)}


def painted(colour: str, seed: int, size: tuple[int, int] = (12, 12)) -> np.ndarray:
    """uint8 [h, w, 3]: noise around a colour."""
    noise = np.random.default_rng(seed).integers(-30, 30, (*size, 3))
    return (np.array(COLOURS[colour]) + noise).clip(0, 255).astype(np.uint8)


def write_folders(folder: Path, count: int = 8, size: tuple[int, int] = (12, 12)) -> Path:
    """A folder for each colour with this number of PNG files."""
    for place, colour in enumerate(COLOURS):
        (folder / colour).mkdir(parents=True)
        for number in range(count):
            image = Image.fromarray(painted(colour, 100 * place + number, size))
            image.save(folder / colour / f"{number:03}.png")
    return folder


def encoded(pixels: np.ndarray, how: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, how, **options)
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is of this size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(b"\0" * 100)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def write_idx(folder: Path, pixels: np.ndarray, labels: np.ndarray, part: str = "train", packed: bool = True) -> Path:
    """Two idx files, of images [N, h, w] and labels; the path of the images."""
    images = bytes([0, 0, 8, 3]) + struct.pack(">III", *pixels.shape) + pixels.tobytes()
    numbers = bytes([0, 0, 8, 1]) + struct.pack(">I", len(labels)) + labels.astype(np.uint8).tobytes()
    end, pack = (".gz", gzip.compress) if packed else ("", bytes)
    (folder / f"{part}-labels-idx1-ubyte{end}").write_bytes(pack(numbers))
    path = folder / f"{part}-images-idx3-ubyte{end}"
    path.write_bytes(pack(images))
    return path


def write_cifar(path: Path, pixels: np.ndarray, labels: np.ndarray, coarse: bool = False) -> Path:
    """A binary file of CIFAR-10, or of CIFAR-100 with coarse labels too; pixels are [N, 3, 32, 32]."""
    rows = [labels[:, None] // 5] * coarse + [labels[:, None], pixels.reshape(len(pixels), -1)]
    path.write_bytes(np.concatenate(rows, 1).astype(np.uint8).tobytes())
    return path


def digits() -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's digits: uint8 [1797, 8, 8] and labels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return (found.images * 15.9375).astype(np.uint8), found.target
