"""ViT and DeiT, as Hugging Face and timm have them: one Transformer over patches, with different names."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from regard.interop.families.base import (
    JOINT_QKV_ROWS,
    ROW,
    TOKEN,
    Family,
    Link,
    Values,
    dense_spec,
    link,
    published_activation,
)
from regard.models.vision.vit import VitConfig

VIT_ALWAYS = {"kind": "vit", "norm": "pre", "norm_kind": "layer", "final_norm": True, "position": "learned"}


def pair(values: Values, name: str, default: int) -> tuple[int, int]:
    """Their setting of a side or of two, height first."""
    found = values.get(name, default)
    if isinstance(found, int):
        return found, found
    if not isinstance(found, list | tuple) or len(found) != 2 or not all(isinstance(side, int) for side in found):
        raise ValueError(f"{name} must be a number or two, height and width, got {found!r}")
    return found[0], found[1]


def side(values: Values, name: str, default: int) -> int:
    """Their setting of the side of a square."""
    height, width = pair(values, name, default)
    if height != width:
        raise ValueError(f"{name} must be a square, got {height} x {width}")
    return height


def shown_pair(sides: tuple[int, int]) -> int | list[int]:
    """A pair in the form of their files: one number for a square."""
    return sides[0] if sides[0] == sides[1] else list(sides)


def class_names(values: Values) -> list[str]:
    """The names of the classes in a config.json of Hugging Face, which leaves them out where there are two."""
    names = values.get("id2label")
    if not names:
        return [f"LABEL_{index}" for index in range(values.get("num_labels", 2))]
    if not isinstance(names, dict) or {str(key) for key in names} != {str(index) for index in range(len(names))}:
        raise ValueError(f"id2label must name the classes from 0 on, got {len(names)} entries of other numbers")
    numbered = {str(key): str(name) for key, name in names.items()}
    return [numbered[str(index)] for index in range(len(numbered))]


def class_settings(classes: int, values: Values) -> Values:
    """The names of classes for a config.json of Hugging Face, as `values` has them, or by number."""
    names = class_names(values if values.get("id2label") else {"num_labels": classes})
    return {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


# theirs: ours
HUGGINGFACE_LAYER = {
    "layernorm_before": "norms.0",
    "attention.attention.query": "attention.project.q",
    "attention.attention.key": "attention.project.k",
    "attention.attention.value": "attention.project.v",
    "attention.output.dense": "attention.output",
    "layernorm_after": "norms.1",
    "intermediate.dense": "feedforward.inner",
    "output.dense": "feedforward.outer",
}
# since version 5 the models have other names, and the files that save_pretrained writes the old ones
HUGGINGFACE_RENAMED = (
    (r"(encoder\.)?layers\.(\d+)\.attention\.q_proj\.", r"encoder.layer.\2.attention.attention.query."),
    (r"(encoder\.)?layers\.(\d+)\.attention\.k_proj\.", r"encoder.layer.\2.attention.attention.key."),
    (r"(encoder\.)?layers\.(\d+)\.attention\.v_proj\.", r"encoder.layer.\2.attention.attention.value."),
    (r"(encoder\.)?layers\.(\d+)\.attention\.o_proj\.", r"encoder.layer.\2.attention.output.dense."),
    (r"(encoder\.)?layers\.(\d+)\.mlp\.fc1\.", r"encoder.layer.\2.intermediate.dense."),
    (r"(encoder\.)?layers\.(\d+)\.mlp\.fc2\.", r"encoder.layer.\2.output.dense."),
    (r"(encoder\.)?layers\.(\d+)\.layernorm_", r"encoder.layer.\2.layernorm_"),
)


@dataclass(frozen=True, kw_only=True)
class HuggingFaceVit(Family):
    """ViT and DeiT. DeiT has a second token, and a head of its own for it or none."""

    second_token: bool

    def our_settings(self, values: Values, names: set[str]) -> Values:
        heads = [name for name in ("classifier.weight", "cls_classifier.weight") if name in names]
        second = "distillation_classifier.weight" in names
        return {
            "image": pair(values, "image_size", 224),
            "patch": side(values, "patch_size", 16),
            "classes": len(class_names(values)) if heads else None,
            "distillation": ("answer" if second else "token") if self.second_token else "none",
            "pooling": "first",
            "bias": True if values.get("qkv_bias", True) else "output",
            "feedforward": dense_spec(values.get("hidden_act", "gelu")),
        }

    def their_settings(self, config: VitConfig, values: Values) -> Values:
        architecture = self.architecture
        if config.classes is None:
            architecture = architecture.replace("ForImageClassification", "Model")
        elif config.distillation == "answer":
            architecture += "WithTeacher"
        classes = {} if config.classes is None else class_settings(config.classes, values)
        return classes | {
            "architectures": [architecture],
            "image_size": shown_pair(config.image),
            "patch_size": config.patch,
            "qkv_bias": config.bias in (True, "inputs"),
            "hidden_act": published_activation(config),
            "attention_probs_dropout_prob": 0.0,
        }

    def links(self, config: VitConfig, values: Values) -> Iterator[Link]:
        yield from link("embeddings.patch_embeddings.projection", "stem")
        yield Link("embeddings.cls_token", ("first",), TOKEN)
        if config.distillation != "none":
            yield Link("embeddings.distillation_token", ("second",), TOKEN)
        yield Link("embeddings.position_embeddings", ("position.table",), ROW)
        for n in range(config.layers):
            for theirs, ours in HUGGINGFACE_LAYER.items():
                bias = "project" not in ours or values.get("qkv_bias", True)
                yield from link(f"encoder.layer.{n}.{theirs}", f"blocks.{n}.{ours}", bias=bias)
        yield from link("layernorm", "norm")
        if config.classes is not None:
            both = config.distillation == "answer"
            yield from link("cls_classifier" if both else "classifier", "answer.output")
            if both:
                yield from link("distillation_classifier", "second_answer.output")


VIT_FIELDS = {
    "width": ("hidden_size", 768),
    "heads": ("num_attention_heads", 12),
    "layers": ("num_hidden_layers", 12),
    "inner": ("intermediate_size", 3072),
    "channels": ("num_channels", 3),
    "norm_epsilon": ("layer_norm_eps", 1e-12),
    "dropout": ("hidden_dropout_prob", 0.0),
}

VIT = HuggingFaceVit(
    name="vit",
    architecture="ViTForImageClassification",
    task="images",
    prefix="vit.",
    fields=VIT_FIELDS,
    always=VIT_ALWAYS,
    unused=(r"pooler\.dense\..*", r"embeddings\.mask_token"),
    renamed=HUGGINGFACE_RENAMED,
    config_class=VitConfig,
    second_token=False,
)
DEIT = HuggingFaceVit(
    name="deit",
    architecture="DeiTForImageClassification",
    task="images",
    prefix="deit.",
    fields=VIT_FIELDS,
    always=VIT_ALWAYS,
    unused=(r"pooler\.dense\..*", r"embeddings\.mask_token"),
    renamed=HUGGINGFACE_RENAMED,
    config_class=VitConfig,
    second_token=True,
)


class TimmVit(Family):
    """The VisionTransformer of timm. Its settings are the arguments of that class."""

    def our_settings(self, values: Values, names: set[str]) -> Values:
        first, activation = bool(values["class_token"]), str(values["act_layer"])
        pooling = {"token": "first", "avg": "mean"}.get(values["global_pool"])
        if pooling is None or (pooling == "first") != first:
            raise ValueError(
                f"{self.name} with global_pool={values['global_pool']!r} and class_token={first} is not known here, "
                "only 'token' with a class token and 'avg' without one"
            )
        return {
            "image": pair(values, "img_size", 224),
            "patch": side(values, "patch_size", 16),
            "inner": int(values["embed_dim"] * values["mlp_ratio"]),
            "classes": values["num_classes"] or None,
            "distillation": "answer" if "dist_token" in names else "none",
            "pooling": pooling,
            "bias": _bias(bool(values["qkv_bias"]), bool(values["proj_bias"])),
            "feedforward": dense_spec({"gelu_tanh": "gelu_new"}.get(activation, activation)),
        }

    def their_settings(self, config: VitConfig, values: Values) -> Values:
        ratio = config.inner / config.width
        if int(config.width * ratio) < config.inner:
            # rounded down: timm multiplies and cuts
            ratio = math.nextafter(ratio, math.inf)
        first, both = config.pooling == "first", config.distillation != "none"
        return {
            "architectures": ["deit_base_distilled_patch16_224" if both else self.architecture],
            "img_size": list(config.image),
            "patch_size": config.patch,
            "mlp_ratio": ratio,
            "num_classes": config.classes or 0,
            "class_token": first,
            "global_pool": "token" if first else "avg",
            "fc_norm": False,
            "qkv_bias": config.bias in (True, "inputs"),
            "proj_bias": config.bias in (True, "output"),
            "act_layer": {"gelu_new": "gelu_tanh"}.get(name := published_activation(config), name),
        }

    def links(self, config: VitConfig, values: Values) -> Iterator[Link]:
        yield from link("patch_embed.proj", "stem")
        if config.pooling == "first":
            yield Link("cls_token", ("first",), TOKEN)
        if config.distillation != "none":
            yield Link("dist_token", ("second",), TOKEN)
        yield Link("pos_embed", ("position.table",), ROW)
        for n in range(config.layers):
            theirs, ours = f"blocks.{n}", f"blocks.{n}"
            inputs = [f"{ours}.attention.project.{name}" for name in "qkv"]
            yield from link(f"{theirs}.norm1", f"{ours}.norms.0")
            yield from link(f"{theirs}.attn.qkv", *inputs, form=JOINT_QKV_ROWS, bias=values["qkv_bias"])
            yield from link(f"{theirs}.attn.proj", f"{ours}.attention.output", bias=values["proj_bias"])
            yield from link(f"{theirs}.norm2", f"{ours}.norms.1")
            yield from link(f"{theirs}.mlp.fc1", f"{ours}.feedforward.inner")
            yield from link(f"{theirs}.mlp.fc2", f"{ours}.feedforward.outer")
        yield from link("norm", "norm")
        if config.classes is not None:
            yield from link("head", "answer.output")
            if config.distillation == "answer":
                yield from link("head_dist", "second_answer.output")


def _bias(inputs: bool, output: bool) -> Any:
    """Our word for where projections have biases."""
    return inputs if inputs == output else "inputs" if inputs else "output"


TIMM_VIT = TimmVit(
    name="timm-vit",
    architecture="vit_base_patch16_224",
    task="images",
    prefix="",
    fields={
        "width": ("embed_dim", 768),
        "heads": ("num_heads", 12),
        "layers": ("depth", 12),
        "channels": ("in_chans", 3),
        "dropout": ("drop_rate", 0.0),
    },
    always=VIT_ALWAYS | {"norm_epsilon": 1e-6},
    renamed=(),
    config_class=VitConfig,
)
