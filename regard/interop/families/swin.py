"""Swin, as Hugging Face and timm have it.

Both pad a map that windows do not divide with zeros, which are read as keys; ours cuts windows at the border. So a
model belongs here only if windows divide all its maps, and merging finds even sides.
"""

from collections.abc import Iterator

from regard.interop.families.base import (
    JOINT_QKV_ROWS,
    ROW,
    SAME,
    Family,
    Link,
    Values,
    dense_spec,
    link,
    published_activation,
)
from regard.interop.families.vit import class_names, class_settings, pair, shown_pair, side
from regard.models.vision.swin import SwinConfig

ALWAYS = {"kind": "swin", "norm": "pre", "norm_epsilon": 1e-5, "attention": "swin"}


def map_sides(image: tuple[int, int], patch: int, stages: int) -> list[tuple[int, int]]:
    """Rows and columns of the map of each stage. Sides that are not divided without a rest are refused."""
    for length in image:
        if length % (patch << (stages - 1)):
            raise ValueError(
                f"an image of {image[0]} x {image[1]} in patches of {patch} cannot be halved {stages - 1} times: "
                "others pad what is odd, which is not done here"
            )
    return [(image[0] // (patch << stage), image[1] // (patch << stage)) for stage in range(stages)]


def check_windows(config: SwinConfig, *, clipped: bool) -> None:
    """Refuses maps on which others pad. `clipped`: a side that is smaller than a window is one."""
    M = config.window
    for sides in map_sides(config.image, config.patch, len(config.layers)):
        if not all(length % M == 0 or (clipped and length < M) for length in sides):
            raise ValueError(
                f"windows of {M} x {M} do not divide a map of {sides[0]} x {sides[1]}: others pad it with zeros that "
                "act as keys, and here windows are cut"
            )
        if not clipped and M in sides and sides[0] != sides[1]:
            raise ValueError(
                f"a map of {sides[0]} x {sides[1]} is as narrow as its windows: {SWIN.name} shifts them in neither "
                "direction, and here they are shifted in the other"
            )


def stage_width(width: int, ratio: float) -> int:
    """The feed-forward width of the first stage, which is to double from stage to stage."""
    inner = width * ratio
    if abs(inner - round(inner)) > 1e-6:
        raise ValueError(f"mlp_ratio {ratio} times the width {width} must be a whole number, got {inner}")
    return round(inner)


# theirs: ours
HUGGINGFACE_LAYER = {
    "layernorm_before": "norms.0",
    "attention.self.query": "attention.project.q",
    "attention.self.key": "attention.project.k",
    "attention.self.value": "attention.project.v",
    "attention.output.dense": "attention.output",
    "layernorm_after": "norms.1",
    "intermediate.dense": "feedforward.inner",
    "output.dense": "feedforward.outer",
}
# since version 5 the models have other names, and the files that save_pretrained writes the old ones
HUGGINGFACE_RENAMED = (
    (r"\.attention\.q_proj\.", ".attention.self.query."),
    (r"\.attention\.k_proj\.", ".attention.self.key."),
    (r"\.attention\.v_proj\.", ".attention.self.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.attention\.relative_position_bias\.", ".attention.self."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)


class HuggingFaceSwin(Family):
    def config(self, values: Values, names: set[str]) -> SwinConfig:
        config = super().config(values, names)
        check_windows(config, clipped=False)
        return config

    def our_settings(self, values: Values, names: set[str]) -> Values:
        width = values.get("embed_dim", 96)
        return {
            "image": pair(values, "image_size", 224),
            "patch": side(values, "patch_size", 4),
            "window": side(values, "window_size", 7),
            "layers": tuple(values.get("depths", (2, 2, 6, 2))),
            "heads": tuple(values.get("num_heads", (3, 6, 12, 24))),
            "inner": stage_width(width, values.get("mlp_ratio", 4.0)),
            "classes": len(class_names(values)) if "classifier.weight" in names else None,
            "bias": True if values.get("qkv_bias", True) else "output",
            "feedforward": dense_spec(values.get("hidden_act", "gelu")),
            "position": "learned" if values.get("use_absolute_embeddings", False) else "none",
        }

    def their_settings(self, config: SwinConfig, values: Values) -> Values:
        bare = config.classes is None
        classes = {} if config.classes is None else class_settings(config.classes, values)
        return classes | {
            "architectures": [
                self.architecture.replace("ForImageClassification", "Model") if bare else self.architecture
            ],
            "image_size": shown_pair(config.image),
            "patch_size": config.patch,
            "window_size": config.window,
            "depths": list(config.layers),
            "num_heads": list(config.heads),
            "mlp_ratio": config.inner / config.width,
            "qkv_bias": config.bias in (True, "inputs"),
            "hidden_act": published_activation(config),
            "use_absolute_embeddings": config.position != "none",
            "layer_norm_eps": 1e-5,
            "attention_probs_dropout_prob": 0.0,
        }

    def links(self, config: SwinConfig, values: Values) -> Iterator[Link]:
        yield from link("embeddings.patch_embeddings.projection", "stem")
        yield from link("embeddings.norm", "stem_norm")
        if config.position != "none":
            yield Link("embeddings.position_embeddings", ("position.table",), ROW)
        for stage, layers in enumerate(config.layers):
            for n in range(layers):
                theirs, ours = f"encoder.layers.{stage}.blocks.{n}", f"stages.{stage}.{n}"
                for one, other in HUGGINGFACE_LAYER.items():
                    bias = "project" not in other or values.get("qkv_bias", True)
                    yield from link(f"{theirs}.{one}", f"{ours}.{other}", bias=bias)
                yield Link(f"{theirs}.attention.self.relative_position_bias_table", (f"{ours}.attention.table",), SAME)
            if stage < len(config.layers) - 1:
                yield from link(f"encoder.layers.{stage}.downsample.norm", f"merge.{stage}.norm")
                yield from link(f"encoder.layers.{stage}.downsample.reduction", f"merge.{stage}.reduce", bias=False)
        yield from link("layernorm", "norm")
        if config.classes is not None:
            yield from link("classifier", "output")


SWIN = HuggingFaceSwin(
    name="swin",
    architecture="SwinForImageClassification",
    task="images",
    prefix="swin.",
    fields={
        "width": ("embed_dim", 96),
        "channels": ("num_channels", 3),
        "dropout": ("hidden_dropout_prob", 0.0),
        "drop_path": ("drop_path_rate", 0.1),
    },
    always=ALWAYS,
    # some of its norms have this epsilon whatever the config says
    required={"layer_norm_eps": 1e-5},
    unused=(r".*\.relative_position_index", r"embeddings\.mask_token"),
    renamed=HUGGINGFACE_RENAMED,
    config_class=SwinConfig,
)


class TimmSwin(Family):
    """The SwinTransformer of timm. Its settings are the arguments of that class; `old_names`: in older files and in
    those of the authors a stage ends with its merging, now it begins with it."""

    def config(self, values: Values, names: set[str]) -> SwinConfig:
        config = super().config(values, names)
        check_windows(config, clipped=True)
        return config

    def our_settings(self, values: Values, names: set[str]) -> Values:
        return {
            "image": pair(values, "img_size", 224),
            "patch": side(values, "patch_size", 4),
            "window": side(values, "window_size", 7),
            "layers": tuple(values["depths"]),
            "heads": tuple(values["num_heads"]),
            "inner": stage_width(values["embed_dim"], values["mlp_ratio"]),
            "classes": values["num_classes"] or None,
            "bias": True if values["qkv_bias"] else "output",
            "feedforward": dense_spec("gelu"),
            "position": "none",
        }

    def their_settings(self, config: SwinConfig, values: Values) -> Values:
        return {
            "img_size": list(config.image),
            "patch_size": config.patch,
            "window_size": config.window,
            "depths": list(config.layers),
            "num_heads": list(config.heads),
            "mlp_ratio": config.inner / config.width,
            "num_classes": config.classes or 0,
            "qkv_bias": config.bias in (True, "inputs"),
        }

    def links(self, config: SwinConfig, values: Values) -> Iterator[Link]:
        old = values.get("old_names", False)
        yield from link("patch_embed.proj", "stem")
        yield from link("patch_embed.norm", "stem_norm")
        for stage, layers in enumerate(config.layers):
            if stage:
                theirs, ours = f"layers.{stage - old}.downsample", f"merge.{stage - 1}"
                yield from link(f"{theirs}.norm", f"{ours}.norm")
                yield from link(f"{theirs}.reduction", f"{ours}.reduce", bias=False)
            for n in range(layers):
                theirs, ours = f"layers.{stage}.blocks.{n}", f"stages.{stage}.{n}"
                inputs = [f"{ours}.attention.project.{name}" for name in "qkv"]
                yield from link(f"{theirs}.norm1", f"{ours}.norms.0")
                yield from link(f"{theirs}.attn.qkv", *inputs, form=JOINT_QKV_ROWS, bias=values["qkv_bias"])
                yield from link(f"{theirs}.attn.proj", f"{ours}.attention.output")
                yield Link(f"{theirs}.attn.relative_position_bias_table", (f"{ours}.attention.table",), SAME)
                yield from link(f"{theirs}.norm2", f"{ours}.norms.1")
                yield from link(f"{theirs}.mlp.fc1", f"{ours}.feedforward.inner")
                yield from link(f"{theirs}.mlp.fc2", f"{ours}.feedforward.outer")
        yield from link("norm", "norm")
        if config.classes is not None:
            yield from link("head" if old else "head.fc", "output")


TIMM_SWIN = TimmSwin(
    name="timm-swin",
    architecture="swin_base_patch4_window7_224",
    task="images",
    prefix="",
    fields={
        "width": ("embed_dim", 96),
        "channels": ("in_chans", 3),
        "dropout": ("drop_rate", 0.0),
        "drop_path": ("drop_path_rate", 0.1),
    },
    always=ALWAYS,
    unused=(r".*\.relative_position_index", r".*\.attn_mask"),
    renamed=(),
    config_class=SwinConfig,
)
