"""Labelled images from whatever holds them:

    a folder of folders     the name of a folder is the class of all images in it
    a .csv or .tsv file     a column of paths, from the folder of the file, and a column of labels
    idx files               MNIST and its like, plain or .gz; the file of labels is beside that of the images
    binary files of CIFAR   data_batch_1.bin ..., or the folder with all of them
    .npz                    arrays `images` and `labels`

All images come out in one size. A broken one is refused with its name, or skipped and counted.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from regard.data.images.decode import BadImage, decode_files, read_header, resize_pixels
from regard.data.images.formats import IDX_IMAGES, Stored, check_room, read_cifar, read_idx, read_npz
from regard.data.labelled import class_names, read_labelled
from regard.data.text import Skipped

SMALL = 96  # images of one size up to this keep it
SIDE = 64  # of others, if nothing else is asked for
SPLITS = {"train", "training", "val", "valid", "validation", "dev", "test"}
IGNORED = {"thumbs.db", "desktop.ini"}  # files that systems leave in folders
TABLES = re.compile(r"\.(csv|tsv|tab)(\.gz|\.xz)?$")


class Images(NamedTuple):
    """Labelled images of one size, what each image is called, and the names of the classes in their order if files list
    them."""

    pixels: np.ndarray  # uint8 [N, C, h, w]
    labels: list[str]
    names: list[str]
    skipped: dict[str, Skipped]
    named_classes: list[str] | None = None

    @property
    def classes(self) -> list[str]:
        """All classes in their order: as the files tell it, else the labels that occur, sorted."""
        return self.named_classes or class_names(self.labels, "the images")

    @property
    def size(self) -> tuple[int, int]:
        return self.pixels.shape[2], self.pixels.shape[3]

    @property
    def channels(self) -> int:
        return self.pixels.shape[1]


def read_images(
    path: str | Path,
    *,
    columns: tuple[str | int, str | int] = ("path", "label"),
    size: tuple[int, int] | None = None,
    channels: int | None = None,
    skip_bad: bool | None = None,
    part: str = "train",
) -> Images:
    """Labelled images. `size` None: that of the images, if all have the same and it is small, else 64 x 64;
    `channels` None: 1 if all are grey, else 3. `part`: "train" or "test" of a folder or file that holds both.

    The first broken image is an error, whose message offers data.skip_bad where `skip_bad` is False; with `skip_bad`,
    broken ones are skipped and counted.
    """
    path = Path(path)
    stored = _stored_files(path, part)
    if stored is not None:
        return _from_stored(stored, size, channels, part)
    if path.is_dir():
        files = list_folder(path)
    elif TABLES.search(path.name.lower()):
        # a bad line of the table would shift no other: it is skipped like a bad image
        found = read_labelled(path, columns=columns, skip_bad=bool(skip_bad))
        files = [(path.parent / file, label) for file, label in zip(found.texts, found.labels, strict=True)]
    else:
        raise BadImage(str(path), _unknown(path))
    return _decoded(files, str(path), size, channels, skip_bad)


def list_folder(folder: Path) -> list[tuple[Path, str]]:
    """The files in a folder of folders, each with its class, in the order of their names."""
    classes = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    names = [entry.name for entry in classes]
    if not classes:
        raise BadImage(str(folder), "has no folders", ": expected a folder for each class, with its images")
    if len(names) > 1 and {name.lower() for name in names} <= SPLITS:
        detail = ": they look like parts of a set; give one as --data.images, another as --data.valid_images"
        raise BadImage(str(folder), f"has the folders {', '.join(names)}", detail)
    found = []
    for entry in classes:
        files = [file for file in sorted(entry.rglob("*")) if not file.is_dir() and _is_meant(file, entry)]
        if not files:
            raise BadImage(str(entry), "has no images", ": remove the folder, or put images of the class into it")
        found += [(file, entry.name) for file in files]
    return found


def _is_meant(file: Path, folder: Path) -> bool:
    """Whether a file is one that a person put there."""
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return not hidden and file.name.lower() not in IGNORED


def _unknown(path: Path) -> str:
    """What is wrong with a path that holds no labelled images in any form."""
    expected = "expected a folder of folders of images, .csv, .tsv, .npz, an idx file or .bin files of CIFAR"
    if not path.exists():
        return f"no such file or folder: {expected}"
    if path.name.lower().endswith((".tar.gz", ".tgz", ".tar", ".zip")):
        return "is an archive: unpack it first, and give the folder"
    return f"does not look like labelled images: {expected}"


def _stored_files(path: Path, part: str) -> list[Path] | None:
    """The files with many images each that a path stands for; None: it is another form."""
    if not path.is_dir():
        is_stored = IDX_IMAGES.search(path.name) or path.suffix.lower() in (".bin", ".npz")
        return [path] if is_stored and path.is_file() else None
    inside = sorted(entry for entry in path.iterdir() if entry.is_file())
    wanted = {
        "train": (r"data_batch_\d+\.bin", r"train\.bin", r"train-images[-.]idx3-ubyte(\.gz)?"),
        "test": (r"test_batch\.bin", r"test\.bin", r"t10k-images[-.]idx3-ubyte(\.gz)?"),
    }
    for pattern in wanted[part]:
        # of a file that is there packed and unpacked, one is read
        found = {entry.name.removesuffix(".gz"): entry for entry in inside if re.fullmatch(pattern, entry.name)}
        if found:
            return list(found.values())
    if any(entry.name in ("batches.meta", "data_batch_1") for entry in inside):
        detail = ": they could run code when they are read; take the binary version, cifar-10-binary.tar.gz"
        raise BadImage(str(path), "holds pickles of Python, the python version of CIFAR", detail)
    return None


def _from_stored(files: Sequence[Path], size: tuple[int, int] | None, channels: int | None, part: str) -> Images:
    """Images of files that hold many each."""
    parts: list[Stored] = []
    for file in files:
        if IDX_IMAGES.search(file.name):
            parts.append(read_idx(file))
        else:
            parts.append(read_npz(file, part) if file.suffix.lower() == ".npz" else read_cifar(file))
    pixels = parts[0].pixels if len(parts) == 1 else np.concatenate([one.pixels for one in parts])
    labels = [label for one in parts for label in one.labels]
    names = [f"{file}, image {n}" for file, one in zip(files, parts, strict=True) for n in range(len(one.labels))]
    return Images(resize_all(pixels, size, channels), labels, names, {}, parts[0].classes)


def resize_all(pixels: np.ndarray, size: tuple[int, int] | None, channels: int | None) -> np.ndarray:
    """uint8 [N, C, h, w] in another size, and grey or in colour; None: as they are, but no larger than 96 x 96."""
    count, height, width = pixels.shape[1:]
    to = size or ((height, width) if max(height, width) <= SMALL else (SIDE, SIDE))
    planes = channels or count
    if pixels.shape[1:] != (planes, *to):
        pixels = np.stack([resize_pixels(one, to, planes) for one in pixels])
    return np.ascontiguousarray(pixels)


def _decoded(
    files: Sequence[tuple[Path, str]],
    name: str,
    size: tuple[int, int] | None,
    channels: int | None,
    skip_bad: bool | None,
) -> Images:
    """Images of one file each."""
    found = decode_all([file for file, _ in files], name, size, channels, skip_bad)
    labels, names = [files[place][1] for place in found.kept], [str(files[place][0]) for place in found.kept]
    return Images(found.pixels, labels, names, found.skipped)


class Decoded(NamedTuple):
    """Images of one size, which of the files they are, and what was skipped."""

    pixels: np.ndarray  # uint8 [N, C, h, w]
    kept: list[int]
    skipped: dict[str, Skipped]


def decode_all(
    files: Sequence[Path], name: str, size: tuple[int, int] | None, channels: int | None, skip_bad: bool | None
) -> Decoded:
    """Image files in one size: None is chosen as `read_images` does. `name` is that of the whole in messages."""
    skipped: dict[str, Skipped] = {}

    def leave_out(bad: BadImage) -> None:
        if skip_bad is None:
            raise bad
        if not skip_bad:
            raise BadImage(
                bad.file, bad.reason, f"{bad.detail}; restore or remove it, or omit such files: data.skip_bad true"
            )
        before = skipped.get(bad.reason, Skipped(0, bad.file))
        skipped[bad.reason] = before._replace(count=before.count + 1)

    if size is None or channels is None:
        chosen = _choose_form(files, leave_out if not skip_bad else lambda bad: None)
        size, channels = size or chosen[0], channels or chosen[1]
    check_room(len(files) * channels * size[0] * size[1], name)
    pixels, kept = np.empty((len(files), channels, *size), np.uint8), []
    for place, one in enumerate(decode_files(files, size, channels, leave_out)):
        if one is not None:
            pixels[len(kept)] = one
            kept.append(place)
    if not kept:
        summary = "; ".join(f"{reason}: {some.count}" for reason, some in skipped.items())
        raise BadImage(name, "no image left", f" after skipping bad ones ({summary})" * bool(summary))
    return Decoded(pixels[: len(kept)], kept, skipped)


def _choose_form(files: Iterable[Path], leave_out: Callable[[BadImage], None]) -> tuple[tuple[int, int], int]:
    """The size and the number of channels for images of any sizes."""
    sizes, is_grey = set(), True
    for file in files:
        try:
            header = read_header(file)
        except BadImage as bad:
            leave_out(bad)
            continue
        sizes.add(header.size)
        is_grey &= header.is_grey
    (size,) = sizes if len(sizes) == 1 else ((SIDE, SIDE),)
    return size if max(size) <= SMALL else (SIDE, SIDE), 1 if is_grey else 3


def hold_out_images(labels: Sequence[int], count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(rest, held out): indices in their order; of each class about the same share is held out, at least one of a class
    with two or more."""
    if count < 1:
        raise ValueError(f"too few images to hold any out: got {len(labels)}, give at least 10, or data.valid_images")
    key, held = np.random.Generator(np.random.PCG64(seed)).random(len(labels)), []
    numbers = np.asarray(labels)
    for number in np.unique(numbers):
        rows = np.flatnonzero(numbers == number)
        share = min(max(round(count * len(rows) / len(labels)), 1), len(rows) - 1)
        held += rows[np.argsort(key[rows], kind="stable")[:share]].tolist()
    if not held:
        raise ValueError(
            f"every class has only one image, so none can be held out: got {len(labels)} images, give more of a class, "
            f"or data.valid_images"
        )
    mask = np.zeros(len(labels), bool)
    mask[held] = True
    return np.flatnonzero(~mask), np.flatnonzero(mask)
