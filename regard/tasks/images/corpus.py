"""Labelled images to train and to validate on: read from files, or those of a run."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.data.images.read import Images, hold_out_images, read_images
from regard.data.labelled import class_numbers
from regard.tasks.images.config import ImageData
from regard.tasks.load import read_config, read_parts
from regard.training.run import Run

AT_ONCE = 1024  # images that are summed at a time


class Labelled(NamedTuple):
    """Images with the numbers of their classes, and what each is called."""

    pixels: Tensor  # uint8 [N, C, h, w]
    labels: Tensor  # [N]
    names: list[str]


class Corpus(NamedTuple):
    """Labelled images to train and to validate on, the classes, facts about the files, and the mean and deviation of
    the training pixels, from 0 to 1, by channel."""

    train: Labelled
    valid: Labelled
    classes: list[str]
    facts: dict[str, Any]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @property
    def size(self) -> tuple[int, int]:
        return self.train.pixels.shape[2], self.train.pixels.shape[3]

    @property
    def channels(self) -> int:
        return self.train.pixels.shape[1]


def read_corpus(config: ImageData, seed: int) -> Corpus:
    """Reads the images that a config names. Without validation images, some are held out."""
    if config.images is None:
        raise ValueError(
            "there are no training images: give data.images, a folder with a folder of images for each class, a .csv "
            "file of paths and labels, an .npz or idx file, or the folder of CIFAR's .bin files"
        )
    options: dict[str, Any] = {"columns": config.columns, "skip_bad": config.skip_bad}
    found = read_images(config.images, **options, size=config.shape, channels=config.channels)
    classes, facts = found.classes, {"skipped": {why: part._asdict() for why, part in found.skipped.items()}}
    if config.valid_images is not None:
        held = read_images(config.valid_images, **options, size=found.size, channels=found.channels, part="test")
        facts["skipped_valid"] = {why: part._asdict() for why, part in held.skipped.items()}
        train, valid = labelled(found, classes, config.images), labelled(held, classes, config.valid_images)
    else:
        whole = labelled(found, classes, config.images)
        seed = seed if config.held_out_seed is None else config.held_out_seed
        rest, rows = hold_out_images(whole.labels.tolist(), min(config.held_out, len(whole.names) // 10), seed)
        train, valid = take(whole, rest), take(whole, rows)
    facts |= {"images": len(train.names), "valid": len(valid.names), "sha256": _digest(train, valid, classes)}
    return Corpus(train, valid, classes, facts, *pixel_statistics(train.pixels))


def labelled(found: Images, classes: list[str], name: str) -> Labelled:
    """Images with the numbers of their classes; a label that is no class is an error."""
    numbers = class_numbers(found.labels, classes, name)
    return Labelled(torch.from_numpy(found.pixels), torch.tensor(numbers), found.names)


def take(images: Labelled, rows: np.ndarray) -> Labelled:
    """Some of the images."""
    return Labelled(images.pixels[rows], images.labels[rows], [images.names[row] for row in rows])


def _digest(train: Labelled, valid: Labelled, classes: list[str]) -> str:
    hasher = hashlib.sha256(json.dumps([list(train.pixels.shape), list(valid.pixels.shape), classes]).encode())
    for part in (train, valid):
        hasher.update(part.pixels.numpy().data)
        hasher.update(part.labels.numpy().data)
    return hasher.hexdigest()


def pixel_statistics(pixels: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of the values by channel, from 0 to 1. Whole numbers are summed, so that the order and the
    number of threads do not matter."""
    count = pixels.numel() // pixels.shape[1]
    sums = torch.zeros(2, pixels.shape[1], dtype=torch.int64)
    for part in pixels.split(AT_ONCE):
        values = part.long()
        sums += torch.stack([values.sum((0, 2, 3)), values.square().sum((0, 2, 3))])
    mean, square = (sums.double() / count).unbind()
    deviation = (square - mean.square()).clamp(min=0).sqrt()
    # images of one colour stay what they are
    deviation = torch.where(deviation > 0, deviation, 255.0)
    return tuple((mean / 255).tolist()), tuple((deviation / 255).tolist())


def read_valid(folder: str | Path) -> Labelled:
    """The validation images of a run, read again from where they were."""
    run = Run.open(folder)
    if not run.has("config.yaml"):
        raise ValueError(f"{folder} does not say which images it validates on: give --data")
    config = read_config(run)
    found = read_corpus(config.data, config.training.seed)
    if found.facts["sha256"] != read_parts(run).facts.get("data", {}).get("sha256"):
        raise ValueError(f"the images of {folder} have changed since the run began: restore them, or give --data")
    return found.valid
