"""Hugging Face folders: config.json and safetensors into a model of ours, and back.

Only safetensors are read. `.bin` and `.pt` files are pickles, which can run code, and are refused.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard import models
from regard.core.files import parse_json, read_bytes
from regard.interop.families import find
from regard.interop.families.base import Family, Tensors, Values, option_value
from regard.interop.matching import choose_family, with_layout
from regard.models.config import ModelConfig
from regard.spec import POSITIONS

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
LIMIT = 64 * 2**20  # bytes of a JSON file
HEADS = ("output.", "transform.", "answer.", "second_answer.")  # parameters of ours whose tensors have no prefix


class Model(NamedTuple):
    """A published model: our config, our parameters, and what else its folder says."""

    config: Any  # a ModelConfig, or that of a model of images
    tensors: Tensors
    family: Family
    values: Values  # all of their config.json
    notes: list[str]  # for the user: what was omitted


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = parse_json(read_bytes(path, LIMIT), path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


class NamedTensors(Protocol):
    """The tensors of a published file by name, read on demand."""

    @property
    def path(self) -> Path: ...  # for messages

    @property
    def files(self) -> Mapping[str, Any]: ...  # its keys are the names

    def __getitem__(self, name: str) -> Tensor: ...


class Weights:
    """The tensors of some safetensors files by name. Each is read on demand."""

    def __init__(self, path: Path, names: Sequence[Path], files: ExitStack):
        """`path` is for messages; the files stay open as long as `files`."""
        self.path = path
        self.files: dict[str, safe_open] = {}
        for name in names:
            try:
                file = files.enter_context(safe_open(name, "pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{name} is not a readable safetensors file: {error}") from error
            self.files |= dict.fromkeys(file.keys(), file)

    def __getitem__(self, name: str) -> Tensor:
        return self.files[name].get_tensor(name)

    def shape(self, name: str) -> list[int]:
        """The shape of a tensor, which is not read."""
        return self.files[name].get_slice(name).get_shape()


def weight_files(folder: Path) -> list[Path]:
    """The files with the weights of a folder, one or several."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{folder / INDEX} does not say in which file each tensor is")
        names = sorted(set(weight_map.values()))
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ValueError(f"{folder / INDEX} names {name!r}, which is not a safetensors file beside it")
        return [folder / name for name in names]
    if not (folder / SINGLE).is_file():
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
        if pickles:
            raise ValueError(
                f"{folder} has its weights in {pickles[0]}, a pickle, which can run code when it is opened: it is "
                f"not read. Ask for {SINGLE}, or write one with save_pretrained of transformers"
            )
        raise ValueError(f"{folder} has no {SINGLE} and no {INDEX}")
    return [folder / SINGLE]


def read(folder: str | Path) -> Model:
    """The model in a folder that `save_pretrained` wrote."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} has no {CONFIG}: it is not a model of Hugging Face")
    values = read_json(folder / CONFIG)
    family = find(values.get("model_type"))
    with ExitStack() as files:
        weights = Weights(folder, weight_files(folder), files)
        try:
            return assemble(family, values, weights)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder / CONFIG} is not that of a {family.name} model: {error!r}") from error


def assemble(family: Family, values: Values, weights: NamedTensors) -> Model:
    """Our parameters from their tensors. All of ours must be there, and all of theirs must be known."""
    named = {}
    for name in weights.files:
        known = name.removeprefix(family.prefix)
        for pattern, replacement in family.renamed:
            known = re.sub(pattern, replacement, known)
        named[known] = name
    config = family.config(values, set(named))
    named = {name: named[same] for name, same in family.aliases(config).items() if same in named} | named
    expected = shapes(config)
    tensors: Tensors = {}
    for theirs, ours, form in family.links(config, values):
        if theirs not in named:
            raise ValueError(f"{weights.path} lacks the tensor {theirs!r} that a {family.name} model has")
        tensor = weights[named.pop(theirs)]
        check_numbers(tensor, f"{theirs!r} in {weights.path}")
        for name, part in zip(ours, form.read(tensor), strict=True):
            if tuple(part.shape) != expected[name]:
                raise ValueError(
                    f"{theirs!r} in {weights.path} gives {list(part.shape)}, its config {list(expected[name])}"
                )
            # a copy: a view would keep all of the tensor that was read
            tensors[name] = part.float().clone(memory_format=torch.contiguous_format)
    tied = {name for name in named if re.fullmatch(r".*(lm_head|decoder|vocab_projector)\.weight", name)}
    unused = {name for name in named if any(re.fullmatch(pattern, name) for pattern in family.unused)}
    unknown = sorted(set(named) - unused - (tied if getattr(config, "tied", False) else set()))
    if unknown:
        raise ValueError(
            f"{weights.path} has tensors that {family.name} does not have, such as {unknown[0]!r}: "
            f"{', '.join(values.get('architectures') or ['its architecture'])} cannot be imported as it is"
        )
    notes = [f"omitted, not used here: {', '.join(sorted(unused))}"] if unused else []
    return Model(config, complete(config, tensors), family, values, notes)


def check_numbers(tensor: Tensor, what: str) -> None:
    """Refuses weights that are not finite floating point numbers."""
    if not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{what} holds {kind} numbers, expected floating point: quantised weights are not read")
    if not torch.isfinite(tensor).all():
        wrong, of = int((~torch.isfinite(tensor)).sum()), tensor.numel()
        raise ValueError(f"{what} holds {wrong:,} of {of:,} numbers that are NaN or infinite: it is damaged")


def shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters, without any memory for them."""
    with torch.device("meta"):
        return {name: tuple(part.shape) for name, part in models.build(config).state_dict().items()}


def complete(config: Any, tensors: Tensors) -> Tensors:
    """The parameters under all their names, tied ones included."""
    with torch.device("meta"):
        state = models.build(config).state_dict(keep_vars=True)
    shared = {id(part): tensors[name] for name, part in state.items() if name in tensors}
    missing = [name for name, part in state.items() if id(part) not in shared]
    if missing:
        raise ValueError(f"nothing was read for the parameter {missing[0]!r} of the model")
    return {name: shared[id(part)] for name, part in state.items()}


def write(
    folder: str | Path,
    config: Any,
    tensors: Tensors,
    *,
    special: Values | None = None,
    family: str | None = None,
) -> Family:
    """Writes a folder that `from_pretrained` opens. `special` holds their settings without a counterpart in ours, such
    as the ids of special tokens."""
    special = special or {}
    chosen = choose_family(config, special, family)
    values = chosen.values(config, special)
    if isinstance(config, ModelConfig):
        links = {link.theirs for link in chosen.links(config, values)}
        theirs = chosen.config(values, links)
        tensors = with_layout(config, tensors, option_value(POSITIONS, theirs.position, "layout"))
    written = publish(chosen, config, values, tensors)
    folder = vacant(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(written, folder / SINGLE, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return chosen


def publish(family: Family, config: Any, values: Values, tensors: Tensors) -> Tensors:
    """Their tensors from our parameters."""
    links = list(family.links(config, values))
    # tensors of a model without a head have no prefix
    bare = getattr(config, "head", None) == "none" or getattr(config, "classes", 0) is None
    prefix = "" if values["architectures"][0].endswith("Model") and bare else family.prefix
    heads = {link.theirs for link in links if link.ours[0].startswith(HEADS)}
    written, seen = {}, set()
    for link in links:
        parts = tuple(_parameter(name, tensors) for name in link.ours)
        name = link.theirs if link.theirs in heads else prefix + link.theirs
        written[name] = link.form.write(parts).contiguous()
        if link.ours in seen:
            # safetensors refuses one tensor under two names
            written[name] = written[name].clone()
        seen.add(link.ours)
    return written | {prefix + name: part for name, part in family.constants(config, values).items()}


def vacant(folder: str | Path) -> Path:
    """The path of a folder to write to. Refuses one that is not empty."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, not a folder to write to")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: choose another --out")
    return folder


def _parameter(name: str, tensors: Tensors) -> Tensor:
    """A parameter by name; a bias that the model does not have is zero."""
    if name in tensors or not name.endswith(".bias"):
        return tensors[name]
    weight = tensors[name.removesuffix("bias") + "weight"]
    return weight.new_zeros(weight.shape[0])
