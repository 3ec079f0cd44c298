"""Models of timm: a folder as its `save_for_hf` and its hub have it, or a safetensors file of a state dict alone.

A state dict has no settings: sizes are read off the shapes of its tensors, and the number of heads, which no shape
tells, off the width.
"""

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from regard.interop.families import TIMM_FAMILIES
from regard.interop.families.base import Family, Tensors, Values
from regard.interop.families.swin import TIMM_SWIN
from regard.interop.families.vit import TIMM_VIT
from regard.interop.huggingface import (
    CONFIG,
    SINGLE,
    Model,
    Weights,
    assemble,
    publish,
    read_json,
    vacant,
    weight_files,
)
from regard.interop.matching import choose_family

# heads of its vit_ and deit_ models by width; narrower ones have 64 numbers in a head
HEADS = {1280: 16, 1408: 16, 1664: 16}
NARROW = 1024
LAYER, TABLE = r"layers\.(\d+)\.blocks\.(\d+)\.", "attn.relative_position_bias_table"


def is_timm(folder: Path) -> bool:
    """Whether a folder has a config.json of timm."""
    if not (folder / CONFIG).is_file():
        return False
    values = read_json(folder / CONFIG)
    return "model_type" not in values and "architecture" in values


def read(source: str | Path, heads: int | None = None) -> Model:
    """The model in a folder or a safetensors file. `heads`: where the width does not tell their number."""
    source = Path(source)
    settings: Values = read_json(source / CONFIG) if source.is_dir() else {}
    with ExitStack() as files:
        weights = Weights(source, weight_files(source) if source.is_dir() else [source], files)
        family = _family(weights)
        given = _arguments(settings)
        values = _vit_values(weights, given, heads) if family is TIMM_VIT else _swin_values(weights, given)
        values["architectures"] = [settings.get("architecture") or family.name]
        found = assemble(family, values, weights)
    if family is TIMM_SWIN and "img_size" not in given:
        height, width = found.config.image
        assumed = (
            f"{source} does not say the size of the images: {height} x {width}, at which the last map is one window"
        )
        found.notes.append(assumed)
    published = settings.get("pretrained_cfg", settings)
    return found._replace(values=published | {"label_names": settings.get("label_names")} | values)


def _arguments(settings: Values) -> Values:
    """The arguments of their class that a config.json gives, and the size of the images."""
    published = settings.get("pretrained_cfg", settings)
    found = dict(settings.get("model_args") or {})
    size = published.get("input_size") if isinstance(published, dict) else None
    if "img_size" not in found and isinstance(size, list) and len(size) == 3:
        found["img_size"] = size[1:]
    return found


def _family(weights: Weights) -> Family:
    if "patch_embed.proj.weight" in weights.files:
        if "blocks.0.attn.qkv.weight" in weights.files:
            return TIMM_VIT
        if "layers.0.blocks.0.attn.relative_position_bias_table" in weights.files:
            return TIMM_SWIN
    known = ", ".join(family.name for family in TIMM_FAMILIES)
    raise ValueError(f"{weights.path} does not have the tensors of a model of timm that is known here: {known}")


def _vit_values(weights: Weights, given: Values, heads: int | None) -> Values:
    """The arguments of their class: read off the tensors, with those of a config.json where the tensors do not tell."""
    names = weights.files
    width, channels, *patch = weights.shape("patch_embed.proj.weight")
    depth = 1 + max(int(match[1]) for name in names if (match := re.match(r"blocks\.(\d+)\.", name)))
    first = "cls_token" in names
    cells = weights.shape("pos_embed")[-2] - first - ("dist_token" in names)
    side = round(cells**0.5)
    size = given.get("img_size", [side * patch[0], side * patch[1]])
    if "img_size" not in given and side**2 != cells:
        raise ValueError(
            f"{weights.path} has positions for {cells} patches, which are no square: its size is not known"
        )
    return {
        "img_size": size,
        "patch_size": patch,
        "in_chans": channels,
        "embed_dim": width,
        "depth": depth,
        "num_heads": heads or given.get("num_heads") or _heads(width, weights.path),
        "mlp_ratio": weights.shape("blocks.0.mlp.fc1.weight")[0] / width,
        "num_classes": weights.shape("head.weight")[0] if "head.weight" in names else 0,
        "class_token": first,
        "global_pool": given.get("global_pool", "token" if first else "avg"),
        "qkv_bias": "blocks.0.attn.qkv.bias" in names,
        "proj_bias": "blocks.0.attn.proj.bias" in names,
        "act_layer": given.get("act_layer", "gelu"),
    }


def _swin_values(weights: Weights, given: Values) -> Values:
    """The same of a Swin. Its tensors do not tell the size of the images: without a config.json it is the one at which
    the last map is one window, as in all models of timm."""
    names = weights.files
    width, channels, *patch = weights.shape("patch_embed.proj.weight")
    places = {(int(match[1]), int(match[2])) for name in names if (match := re.match(LAYER, name))}
    stages = 1 + max(stage for stage, _ in places)
    tables = [weights.shape(f"layers.{stage}.blocks.0.{TABLE}") for stage in range(stages)]
    windows = [(round(rows**0.5) + 1) // 2 for rows, _ in tables]
    size = (patch[0] << (stages - 1)) * windows[-1]
    old = "layers.0.downsample.norm.weight" in names
    head = "head.weight" if old else "head.fc.weight"
    return {
        "img_size": given.get("img_size", [size, size]),
        "patch_size": patch,
        "in_chans": channels,
        "embed_dim": width,
        "depths": [sum(place[0] == stage for place in places) for stage in range(stages)],
        "num_heads": [heads for _, heads in tables],
        "window_size": windows[0],
        "mlp_ratio": weights.shape("layers.0.blocks.0.mlp.fc1.weight")[0] / width,
        "num_classes": weights.shape(head)[0] if head in names else 0,
        "qkv_bias": "layers.0.blocks.0.attn.qkv.bias" in names,
        "old_names": old,
    }


def _heads(width: int, path: Path) -> int:
    if width in HEADS:
        return HEADS[width]
    if width % 64 or width > NARROW:
        raise ValueError(f"{path} does not say how many heads a layer of width {width} has: give --heads")
    return width // 64


def write(folder: str | Path, config: Any, tensors: Tensors, published: Values) -> Family:
    """Writes a folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` opens. `published` has what is not
    in the config: mean, std and label_names."""
    family = choose_family(config, {}, families=TIMM_FAMILIES)
    values = family.values(config, {})
    arguments = {name: value for name, value in values.items() if name not in ("model_type", "architectures")}
    classes = arguments.pop("num_classes")
    settings = {
        "architecture": values["architectures"][0],
        "num_classes": classes,
        "num_features": config.width << (len(config.layers) - 1 if config.kind == "swin" else 0),
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [config.channels, *config.image],
            "fixed_input_size": True,
            "num_classes": classes,
            **{name: list(published[name]) for name in ("mean", "std") if name in published},
        },
    }
    if published.get("label_names"):
        settings["label_names"] = published["label_names"]
    written = publish(family, config, values, tensors)
    folder = vacant(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(written, folder / SINGLE, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return family
