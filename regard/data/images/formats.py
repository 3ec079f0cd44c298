"""Files that hold many images: idx (MNIST), the binary files of CIFAR, and .npz of NumPy.

Each is read as uint8 [N, C, h, w] with a label for each image. None of them can run code: pickles are refused.
"""

import re
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from regard.core.limits import physical_memory
from regard.data.images.decode import BadImage
from regard.data.text import BadText, opened

IDX_IMAGES = re.compile(r"images[-.]idx3-ubyte(\.gz|\.xz)?$")
SIDE = 32  # of the images of CIFAR
PARTS = {  # the names of arrays in .npz files: images, labels
    "train": (("images", "labels"), ("x_train", "y_train"), ("train_images", "train_labels"), ("x", "y")),
    "test": (("images", "labels"), ("x_test", "y_test"), ("test_images", "test_labels"), ("x", "y")),
}


class Stored(NamedTuple):
    """Images of one size, their labels, and the names of all classes in their order where the files tell them."""

    pixels: np.ndarray  # uint8 [N, C, h, w]
    labels: list[str]
    classes: list[str] | None = None


def read_idx(path: Path) -> Stored:
    """The images of an idx file with three dimensions; the labels are in the file beside it that has `labels-idx1` in
    the place of `images-idx3`."""
    pixels = _idx(path, 3)
    name = re.sub(r"images([-.])idx3", r"labels\1idx1", path.name)
    beside = [path.with_name(name), path.with_name(name.removesuffix(path.suffix)), path.with_name(f"{name}.gz")]
    found = next((other for other in beside if other != path and other.exists()), None)
    if found is None:
        raise BadImage(str(path), "has no labels beside it", f": expected {beside[0]}")
    labels = _idx(found, 1)
    if len(labels) != len(pixels):
        raise BadImage(str(found), "does not fit its images", f": {len(labels):,} labels, {len(pixels):,} images")
    return Stored(pixels[:, None], [str(label) for label in labels])


def _idx(path: Path, dimensions: int) -> np.ndarray:
    """An idx file of bytes: two zeros, 8 for bytes, the number of dimensions, their sizes, and the values."""
    try:
        with opened(path) as stream:
            head = stream.read(4 + 4 * dimensions)
            if len(head) < 4 + 4 * dimensions or head[:4] != bytes([0, 0, 8, dimensions]):
                raise BadImage(
                    str(path), "is no idx file", f" of bytes in {dimensions} dimensions: begins {head[:4]!r}"
                )
            shape = struct.unpack(f">{dimensions}I", head[4:])
            count = int(np.prod(shape, dtype=object))
            check_room(count, path)
            data = stream.read(count + 1)
    except BadText as error:
        raise BadImage(str(path), error.reason, str(error).removeprefix(f"{path}: {error.reason}")) from error
    except (EOFError, OSError) as error:
        raise BadImage(str(path), "cannot be read", f": {error}") from error
    if len(data) != count or not count:
        has = f"more than {count:,}" if len(data) > count else f"{len(data):,}"
        raise BadImage(str(path), "is not as long as it says", f": {has} values, expected {count:,}, {list(shape)}")
    # of a bytearray, so that PyTorch may take the array as it is
    return np.frombuffer(bytearray(data), np.uint8).reshape(shape)


def read_cifar(path: Path) -> Stored:
    """A binary file of CIFAR-10 (label, then 32 x 32 of red, green and blue) or CIFAR-100 (coarse label, label, ...).
    The names of the classes are in `batches.meta.txt` or `fine_label_names.txt` beside it."""
    check_room(path.stat().st_size, path)
    data, pixels = np.fromfile(path, np.uint8), 3 * SIDE * SIDE
    if not len(data) or (len(data) % (pixels + 1) and len(data) % (pixels + 2)):
        detail = f": {len(data):,} bytes are no multiple of {pixels + 1:,} (CIFAR-10) or {pixels + 2:,} (CIFAR-100)"
        raise BadImage(str(path), "is no whole binary file of CIFAR", f"{detail}; is it complete?")
    before = 1 if len(data) % (pixels + 1) == 0 else 2
    rows = data.reshape(-1, pixels + before)
    labels, count = rows[:, before - 1], 10 if before == 1 else 100
    if labels.max() >= count:
        raise BadImage(str(path), "is no binary file of CIFAR", f": a label is {labels.max()}, expected below {count}")
    names = path.with_name("batches.meta.txt" if before == 1 else "fine_label_names.txt")
    classes = [str(number) for number in range(count)]
    if names.exists():
        lines = names.read_text(encoding="utf-8").split()
        if len(lines) != count or len(set(lines)) != count:
            raise BadImage(str(names), "does not name the classes", f": {len(lines)} names, expected {count} of them")
        classes = lines
    return Stored(rows[:, before:].reshape(-1, 3, SIDE, SIDE), [classes[label] for label in labels], classes)


def read_npz(path: Path, part: str = "train") -> Stored:
    """The arrays `images` and `labels` of an .npz file, or those of a part: x_train and y_train, train_images and
    train_labels. Images are uint8, [N, h, w], [N, h, w, C] or [N, C, h, w]."""
    found, labels = _npz_arrays(path, PARTS[part])
    pixels = _in_planes(found, path)
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.shape != (len(pixels),) or labels.dtype.kind not in "iuU":
        raise BadImage(
            str(path),
            "labels must be one whole number or name for each image",
            f": got {labels.dtype} of shape {list(labels.shape)} for {len(pixels):,} images",
        )
    return Stored(pixels, [str(label) for label in labels])


def read_npz_pixels(path: Path) -> np.ndarray:
    """The array `images` of an .npz file as uint8 [N, C, h, w]."""
    return _in_planes(_npz_arrays(path, (("images",),))[0], path)


def _npz_arrays(path: Path, choices: Sequence[tuple[str, ...]]) -> list[np.ndarray]:
    """The first of some groups of arrays that the file has."""
    try:
        with zipfile.ZipFile(path) as packed:
            check_room(sum(entry.file_size for entry in packed.infolist()), path)
        with np.load(path, allow_pickle=False) as arrays:
            names = next((names for names in choices if set(names) <= set(arrays)), None)
            if names is None:
                has, expected = ", ".join(list(arrays)[:10]) or "none", " and ".join(choices[0])
                noun = "array" if len(choices[0]) == 1 else "arrays"
                raise BadImage(str(path), f"has no {noun} {expected}", f": it has {has}")
            return [_array(arrays, name, path) for name in names]
    except BadImage:
        raise
    # whatever a broken archive makes its readers run into
    except Exception as error:
        raise BadImage(str(path), "is no readable .npz file", f": {' '.join(str(error).split())[:200]}") from error


def _array(arrays: Mapping[str, np.ndarray], name: str, path: Path) -> np.ndarray:
    """One array of an .npz file."""
    try:
        return arrays[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        detail = ": they could run code when they are read; save numbers, or names as strings, labels.astype(str)"
        raise BadImage(str(path), f"{name} are objects of Python", detail) from error


def _in_planes(pixels: np.ndarray, path: Path) -> np.ndarray:
    """Images of an array as [N, C, h, w]."""
    if pixels.dtype != np.uint8:
        raise BadImage(str(path), "images must be uint8, 0 to 255", f", got {pixels.dtype}: scale and convert them")
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    elif pixels.ndim == 4 and pixels.shape[3] in (1, 3):
        pixels = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    if pixels.ndim != 4 or pixels.shape[1] not in (1, 3) or not pixels.size:
        shape = list(pixels.shape)
        raise BadImage(str(path), "images must be [N, h, w], [N, h, w, C] or [N, C, h, w]", f", got {shape}")
    return pixels


def check_room(count: int, path: str | Path) -> None:
    """Refuses images that would take more than half of the memory."""
    has = physical_memory()
    if has is not None and count > has // 2:
        detail = (
            f": {count:,} bytes of pixels, and the machine has {has:,}; choose a smaller data.size, or fewer images"
        )
        raise BadImage(str(path), "is too large for the memory", detail)
