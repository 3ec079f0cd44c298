"""Images that a run keeps of its validation data, so that the page has something to show wherever the run goes."""

import base64
import binascii
import io
import json
from collections.abc import Sequence

import numpy as np

from regard.data.images.decode import BadImage, decode
from regard.tasks.opened import Sample
from regard.training.run import Run

FILE = "samples.json"
MOST = 8


def choose_samples(labels: Sequence[int]) -> list[int]:
    """The numbers of the samples: the first of each class, then the second, until there are enough."""
    seen: dict[int, int] = {}
    turns = []
    for label in labels:
        seen[label] = seen.get(label, -1) + 1
        turns.append(seen[label])
    return sorted(sorted(range(len(labels)), key=lambda at: (turns[at], at))[:MOST])


def write_samples(samples: Sequence[Sample]) -> str:
    """The text of the file: PNG in base64, with labels."""
    from PIL import Image

    rows = []
    for sample in samples:
        file, pixels = io.BytesIO(), sample.pixels
        Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0))).save(
            file, "PNG"
        )
        rows.append({"label": sample.label, "png": base64.b64encode(file.getvalue()).decode()})
    return json.dumps({"samples": rows}, ensure_ascii=False) + "\n"


def read_samples(run: Run, size: tuple[int, int], channels: int) -> tuple[Sample, ...]:
    """The samples of a run; none if it keeps none."""
    if not run.has(FILE):
        return ()
    rows = run.read_json(FILE).get("samples")
    try:
        return tuple(Sample(_decode(row["png"], size, channels), _label(row["label"])) for row in rows or ())
    except (BadImage, TypeError, KeyError, ValueError, binascii.Error) as error:
        raise ValueError(
            f"{run.folder}/{FILE} is damaged ({error}): remove it, and its entry in the manifest"
        ) from error


def _decode(text: str, size: tuple[int, int], channels: int) -> np.ndarray:
    return decode(base64.b64decode(text, validate=True), size, channels)


def _label(label: object) -> str | None:
    if label is not None and not isinstance(label, str):
        raise TypeError(f"a label must be a text, got {label!r}")
    return label
