"""What a run of images knows beside its model, as other libraries write it: the names of the classes, and the mean and
deviation of the pixels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.interop.families.base import Values
from regard.interop.families.vit import class_names
from regard.interop.huggingface import Model, read_json

PROCESSOR = "preprocessor_config.json"
HALF = (0.5, 0.5, 0.5)  # mean or deviation where Hugging Face has no file that says others
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and deviation
BICUBIC = 3  # as Pillow numbers it


def huggingface_facts(model: Model, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The facts of a run from a folder of Hugging Face, and lines for the user."""
    channels, notes = model.config.channels, []
    mean, deviation = HALF, HALF
    if (folder / PROCESSOR).is_file():
        values = read_json(folder / PROCESSOR)
        _check_scale(values, folder / PROCESSOR)
        if values.get("do_normalize", True):
            mean, deviation = values.get("image_mean", HALF), values.get("image_std", HALF)
        else:
            mean, deviation = (0.0,) * channels, (1.0,) * channels
    else:
        notes.append(f"{folder} has no {PROCESSOR}: pixels are normalized with mean and deviation 0.5")
    labels, more = _distinct(class_names(model.values) if model.config.classes is not None else [])
    return _facts(labels, mean, deviation, channels, str(folder / PROCESSOR)), notes + more


def timm_facts(model: Model, source: Path) -> tuple[dict[str, Any], list[str]]:
    """The facts of a run from a model of timm, and lines for the user."""
    values, channels, classes, notes = model.values, model.config.channels, model.config.classes or 0, []
    mean, deviation = values.get("mean"), values.get("std")
    if mean is None or deviation is None:
        plain = model.config.kind == "vit" and model.config.distillation == "none"
        plain = plain and not source.name.startswith("deit")
        mean, deviation = (HALF, HALF) if plain else IMAGENET
        taken = "0.5, as in most vit_ of timm" if plain else "those of ImageNet, as in deit_ and swin_ of timm"
        notes.append(f"{source} does not say how pixels are normalized: mean and deviation are {taken}")
    names: Any = values.get("label_names")
    if isinstance(names, dict):
        names = [names.get(str(index)) for index in range(classes)]
    if not isinstance(names, list) or len(names) != classes or not all(isinstance(name, str) for name in names):
        names = [str(index) for index in range(classes)]
        notes += [f"{source} does not name the classes: their labels are numbers"] if classes else []
    labels, more = _distinct(names)
    return _facts(labels, mean, deviation, channels, "pretrained_cfg"), notes + more


def processor(config: Any, facts: dict[str, Any]) -> Values:
    """A preprocessor_config.json that normalizes as a run does. They scale a picture to the size without keeping its
    sides in proportion; we keep them, and cut off what stands over."""
    height, width = config.image
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": BICUBIC,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(facts["mean"]),
        "image_std": list(facts["deviation"]),
    }


def label_settings(labels: Sequence[str]) -> Values:
    """The names of the classes for a config.json of Hugging Face."""
    return {
        "id2label": {str(index): name for index, name in enumerate(labels)},
        "label2id": {name: index for index, name in enumerate(labels)},
    }


def _check_scale(values: Values, path: Path) -> None:
    factor = values.get("rescale_factor", 1 / 255)
    if not values.get("do_rescale", True) or not isinstance(factor, float) or abs(factor * 255 - 1) > 1e-3:
        raise ValueError(
            f"{path} leaves pixels at another scale than from 0 to 1 (rescale_factor {factor}): it is not known here"
        )


def _facts(labels: list[str], mean: Any, deviation: Any, channels: int, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {"labels": labels}
    for name, values in (("mean", mean), ("deviation", deviation)):
        values = [values] * channels if isinstance(values, int | float) else values
        numbers = isinstance(values, list | tuple) and all(isinstance(value, int | float) for value in values)
        if not numbers or (len(values) != channels and len(set(values)) > 1):
            raise ValueError(f"{where}: the {name} of the pixels must be {channels} numbers, got {values!r:.100}")
        found[name] = [float(value) for value in (values if len(values) == channels else values[:1] * channels)]
    return found


def _distinct(labels: list[str]) -> tuple[list[str], list[str]]:
    """Labels of which no two are the same: a second one gets its number behind it."""
    seen: set[str] = set()
    found = []
    for index, label in enumerate(labels):
        found.append(f"{label} ({index})" if label in seen else label)
        seen.add(found[-1])
    changed = [name for name, label in zip(found, labels, strict=True) if name != label]
    note = [f"classes of the same name got their number: {', '.join(changed[:5])}"] if changed else []
    return found, note
