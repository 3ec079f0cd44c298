"""Tasks of the Long Range Arena (Tay et al. 2020, arXiv 2011.04006) on files that the user gives: text byte by byte,
and pictures pixel by pixel. The first token is asked for the class."""

import functools
import hashlib
import json
import math
import random
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.data.images.read import read_images
from regard.data.labelled import class_names, class_numbers, read_labelled
from regard.data.tasks.base import IGNORED, Examples, Task, check_options

HELD_OUT = 0.05  # of the training examples, to choose learning rates by
BYTES, GRAYS = 256, 256
LUMA = np.array([0.299, 0.587, 0.114])  # of red, green and blue
GRAYED = 512  # pictures at a time, which stay in the cache
ORDER_SEED = 0  # of the examples that are held out, the same for every cell


class Given(NamedTuple):
    """Examples as sequences of small numbers, with their classes; by the set they belong to."""

    sets: dict[str, tuple[list[np.ndarray], list[int]]]  # train, valid, test
    classes: int
    digest: str


def text(*, train: str = "", test: str = "") -> Task:
    """Labelled texts byte by byte, cut at the length: IMDb in the Long Range Arena. `train` and `test` are files such
    as `regard train classify` reads."""
    check_options(bool(train and test), "lra-text needs files: lra-text(train='train.jsonl', test='test.jsonl')")
    found = _read_text(train, test)
    options = {"train": train, "test": test}
    return _task("lra-text", found, BYTES, 1024, 0.15, options)


def image(*, images: str = "") -> Task:
    """Pictures in gray, pixel by pixel: CIFAR-10 in the Long Range Arena. `images` is a folder such as
    `regard train images` reads, with a training and a test set."""
    check_options(bool(images), "lra-image needs a folder: lra-image(images='cifar-10-batches-bin')")
    found = _read_images(images)
    length = len(found.sets["train"][0][0])
    return _task("lra-image", found, GRAYS, length, 0.5, {"images": images})


def facts(task: Task) -> dict[str, Any]:
    """What a report must know of a task, where its files are not."""
    return {"length": task.length, "chance": task.chance, "options": dict(task.options)}


def describe(name: str, options: dict[str, Any], known: dict[str, Any]) -> Task:
    """A task whose files are not read, to report what was learned of it: `known` is what `facts` says, or as much as
    there is of it."""

    def draw(*_: object) -> Examples:
        raise ValueError(f"the files of {name} were not read: it can be reported, and not be trained")

    found = {"length": 1025, "chance": math.nan, "options": options} | known
    return Task(draw, "self", 0, found["chance"], name, length=found["length"], options=found["options"])


def _task(name: str, found: Given, symbols: int, length: int, hidden: float, options: dict[str, str]) -> Task:
    # the asking token, then the classes, then the symbols
    vocabulary = 1 + found.classes + symbols
    return Task(
        functools.partial(_draw, found, "train"),
        "self",
        vocabulary,
        1 / found.classes,
        name,
        length=length + 1,
        scored=functools.partial(_draw, found),
        hidden=hidden,
        options=options | {"sha256": found.digest},
    )


def _draw(found: Given, which: str, batch: int, length: int, generator: torch.Generator) -> Examples:
    """Examples of a set, drawn with replacement."""
    sequences, classes = found.sets[which]
    picks = torch.randint(len(sequences), (batch,), generator=generator).tolist()
    tokens, answers = torch.zeros(batch, length, dtype=torch.long), torch.full((batch, length), IGNORED)
    keep = torch.zeros(batch, length, dtype=torch.bool)
    for row, pick in enumerate(picks):
        sequence = sequences[pick][: length - 1]
        tokens[row, 1 : len(sequence) + 1] = torch.from_numpy(1 + found.classes + sequence.astype(np.int64))
        keep[row, : len(sequence) + 1] = True
        answers[row, 0] = 1 + classes[pick]
    return Examples(tokens, answers, None if bool(keep.all()) else keep)


def _split(sequences: list[np.ndarray], classes: list[int]) -> dict[str, tuple[list[np.ndarray], list[int]]]:
    """Some of the training examples are held out."""
    order = list(range(len(sequences)))
    random.Random(ORDER_SEED).shuffle(order)
    held = max(1, round(HELD_OUT * len(order)))
    parts = {"valid": order[:held], "train": order[held:]}
    return {name: ([sequences[at] for at in part], [classes[at] for at in part]) for name, part in parts.items()}


@functools.cache
def _read_text(train: str, test: str) -> Given:
    found = [read_labelled(path, None, skip_bad=True) for path in (train, test)]
    names = class_names(found[0].labels, train)
    sets = []
    for part, path in zip(found, (train, test), strict=True):
        bytes_of = [np.frombuffer(one.encode(), np.uint8) for one in part.texts]
        sets.append((bytes_of, class_numbers(part.labels, names, path)))
    digest = hashlib.sha256(json.dumps([part[:2] for part in found]).encode()).hexdigest()[:12]
    return Given(_split(*sets[0]) | {"test": sets[1]}, len(names), digest)


@functools.cache
def _read_images(path: str) -> Given:
    parts = [read_images(path, part=part) for part in ("train", "test")]
    sets = []
    for part in parts:
        gray = _gray(part.pixels).reshape(len(part.pixels), -1)
        sets.append((list(gray), class_numbers(part.labels, parts[0].classes, path)))
    digest = hashlib.sha256(b"".join(part.pixels.tobytes() for part in parts)).hexdigest()[:12]
    return Given(_split(*sets[0]) | {"test": sets[1]}, len(parts[0].classes), digest)


def _gray(pixels: np.ndarray) -> np.ndarray:
    """[N, C, h, w] in gray, [N, h, w]."""
    if pixels.shape[1] == 1:
        return pixels[:, 0]
    parts = np.array_split(pixels, 1 + len(pixels) // GRAYED)
    gray = [np.einsum("nchw,c->nhw", part.astype(np.float32), LUMA) for part in parts]
    return np.concatenate([np.rint(part).astype(np.uint8) for part in gray])
