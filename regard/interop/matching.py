"""Which published family a model of ours belongs to, and its parameters in the order of that family."""

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from regard.interop.families import FAMILIES, find
from regard.interop.families.base import Family, Tensors, Values, option_value
from regard.models.config import ModelConfig
from regard.models.vision.config import ImageConfig
from regard.spec import ATTENTION, FEEDFORWARD, POSITIONS, Registry, Spec, over_layers, parse


def choose_family(
    config: Any, special: Values, name: str | None = None, families: Sequence[Family] = FAMILIES
) -> Family:
    """The family that a model of ours belongs to: the one of that name, or the first that fits. Refuses a model that
    fits none, with what differs."""
    candidates = {family.name: family for family in (families if name is None else [find(name)])}
    candidates = {name: family for name, family in candidates.items() if family.config_class is type(config)}
    if not candidates:
        known = ", ".join(family.name for family in families)
        raise ValueError(f"a model of kind {config.kind!r} is none of {name or known}: it cannot be exported there")
    differing = {name: differences(family, config, special) for name, family in candidates.items()}
    # a family of another kind is never near, however few settings differ
    nearest = min(differing, key=lambda name: (candidates[name].always["kind"] != config.kind, len(differing[name])))
    if differing[nearest]:
        listed = "; ".join(dict.fromkeys(differing[nearest]))
        if name is not None:
            raise ValueError(f"{name} does not compute what this model computes; it differs in: {listed}")
        raise ValueError(
            f"no published family computes what this model computes; nearest is {nearest}, which differs in: {listed}"
        )
    return candidates[nearest]


def differences(family: Family, config: Any, special: Values) -> list[str]:
    """What keeps a model of ours from belonging to a family, in words; empty if it belongs."""
    ours = full_settings(config)
    try:
        values = family.values(config, special)
        names = {link.theirs for link in family.links(config, values)}
        theirs = full_settings(family.config(values, names))
    except ValueError as error:
        # a config that cannot be written there at all is farther away than any setting
        return [str(error)] * len(ours)
    return [
        f"{name} {_shown(theirs[name])} (here {_shown(ours[name])})"
        for name in ours
        if not _covers(theirs[name], ours[name], name)
    ]


def full_settings(config: Any) -> Values:
    """Everything that decides what a model computes, with defaults filled in, so that two models can be compared."""
    return _image_settings(config) if isinstance(config, ImageConfig) else _transformer_settings(config)


def _transformer_settings(config: ModelConfig) -> Values:
    both = config.kind == "encoder-decoder"
    layers = config.layers if config.decoder_layers is None else config.decoder_layers
    feeds = config.feedforward if config.decoder_feedforward is None else config.decoder_feedforward
    attention = config.attention if config.decoder_attention is None else config.decoder_attention
    settings = {item.name: getattr(config, item.name) for item in fields(config)}
    for name in ("dropout", "aligner"):
        del settings[name]
    return settings | {
        "kv_heads": config.kv_heads or config.heads,
        "head_width": config.head_width or config.width // config.heads,
        "final_norm": config.norm == "pre" if config.final_norm is None else config.final_norm,
        "position": full_spec(POSITIONS, config.position),
        "attention": [full_spec(ATTENTION, spec) for spec in over_layers(config.attention, config.layers)],
        "feedforward": [full_spec(FEEDFORWARD, spec) for spec in over_layers(config.feedforward, config.layers)],
        "decoder_layers": layers if both else None,
        "decoder_attention": [full_spec(ATTENTION, spec) for spec in over_layers(attention, layers)] if both else None,
        "decoder_feedforward": [full_spec(FEEDFORWARD, spec) for spec in over_layers(feeds, layers)] if both else None,
        "cross_attention": (
            [full_spec(ATTENTION, spec) for spec in over_layers(config.cross_attention, layers)] if both else None
        ),
    }


def _image_settings(config: ImageConfig) -> Values:
    settings = {item.name: getattr(config, item.name) for item in fields(config)}
    for name in ("dropout", "drop_path"):
        del settings[name]
    layers, heads = settings["layers"], settings["heads"]
    if settings.get("stem") == "patch":
        # options of the other stem
        settings |= dict.fromkeys((name for name in settings if name.startswith("stem_")), None)
    if "head_width" in settings:
        settings["kv_heads"] = settings["kv_heads"] or heads
        settings["head_width"] = settings["head_width"] or settings["width"] // heads
    if settings.get("final_norm", True) is None:
        settings["final_norm"] = settings["norm"] == "pre"
    count = layers if isinstance(layers, int) else sum(layers)
    return settings | {
        "position": parse(settings["position"]),
        "attention": [full_spec(ATTENTION, spec) for spec in over_layers(settings["attention"], count)],
        "feedforward": [full_spec(FEEDFORWARD, spec) for spec in over_layers(settings["feedforward"], count)],
    }


def full_spec(registry: Registry, spec: Spec | str) -> Spec:
    """A spec with the defaults of the options that it omits."""
    spec = parse(spec)
    defaults = {option.name: option.default for option in registry.options(spec.name)}
    return replace(spec, options=tuple(sorted((defaults | dict(spec.options)).items())))


def _covers(theirs: Any, ours: Any, name: str) -> bool:
    """Whether a setting of theirs can stand for ours: it is the same, or has biases that are then zero, or has its
    positions in another layout (`with_layout`)."""
    if isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        return all(_covers(one, other, name) for one, other in zip(theirs, ours, strict=True))
    if isinstance(theirs, Spec) and isinstance(ours, Spec):
        one, other = dict(theirs.options), dict(ours.options)
        if name == "position" and "layout" in one and "layout" in other:
            other["layout"] = one["layout"]
        if "bias" in one and "bias" in other:
            other["bias"] |= one["bias"]
        return (theirs.name, theirs.parts, one) == (ours.name, ours.parts, other)
    if name in ("bias", "head_bias"):
        return theirs is True or theirs == ours or ours is False
    return theirs == ours


def _shown(value: Any) -> str:
    return ", ".join(dict.fromkeys(map(str, value))) if isinstance(value, list) else str(value)


# pattern of parameter names -> the axis of the token vectors' channels
CHANNEL_AXES = (
    (r"(encoder|decoder)\.embedding\.weight|output\.weight", 1),
    (r".*\.project\.\w+\.weight|.*\.feedforward\.(inner|gate)\.weight", 1),
    (r".*\.(attention|cross)\.output\.(weight|bias)|.*\.feedforward\.outer\.(weight|bias)", 0),
    (r".*norms?\.(\d+\.)?(weight|bias)", 0),
)


def with_layout(config: ModelConfig, tensors: Tensors, layout: str | None) -> Tensors:
    """The parameters of the same model with its sinusoids or rotary pairs in another layout.

    Sines and cosines stand in channels of the token vectors, whose order means nothing as long as all layers agree on
    it. Rotary pairs stand in channels of queries and keys, likewise.
    """
    spec = parse(config.position)
    now = option_value(POSITIONS, spec, "layout")
    if now in (None, layout):
        return tensors
    width = config.width if spec.name == "sinusoidal" else config.head_width or config.width // config.heads
    order = torch.arange(width).view(-1, 2).mT.flatten() if layout == "halves" else torch.arange(width).view(2, -1)
    order = order.mT.flatten() if layout == "interleaved" else order
    permuted = {}
    for name, tensor in tensors.items():
        if spec.name == "sinusoidal":
            axis = next((axis for pattern, axis in CHANNEL_AXES if re.fullmatch(pattern, name)), None)
            permuted[name] = tensor if axis is None else tensor.index_select(axis, order)
        elif re.fullmatch(r".*\.attention\.project\.[qk]\.(weight|bias)", name):
            permuted[name] = tensor.unflatten(0, (-1, width)).index_select(1, order).flatten(0, 1)
        else:
            permuted[name] = tensor
    return permuted
