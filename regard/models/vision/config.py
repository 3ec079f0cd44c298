"""What the configs of image models have in common."""

from typing import Annotated, Any, ClassVar, Literal

from regard.core.options import Range, config_dataclass
from regard.core.shape import Bias
from regard.models.config import ModelConfig, Norm, Specs, check_config
from regard.models.pooling import layer_config

ImagePooling = Literal["first", "mean", "sequence", "pma", "max", "mean_max", "root"]
IMAGE_POOLING = (
    "what is read: first (a class token before the patches), the mean of the patches, sequence (their mean with "
    "learned weights), pma (learned seeds attend to them), their max, mean_max (both), root (their sum over the root "
    "of their number)"
)


@config_dataclass
class ImageConfig:
    """The images, and what they are classified into. Without `classes` a model has no head: its vectors are what it
    gives."""

    kind: str = ""
    image: Annotated[tuple[int, int], "height and width of the images in pixels", Range(1, 2**16)] = (32, 32)
    channels: Annotated[int, "channels of the images: 3 for colours, 1 for grey", Range(1)] = 3
    classes: Annotated[int | None, "number of classes", Range(2)] = 10
    dropout: Annotated[float, "dropout of the patches and of what each sublayer adds", Range(0, below=1)] = 0.0
    drop_path: Annotated[
        float,
        "stochastic depth: the probability with which the last layer is left out of an image in training; it rises "
        "linearly from 0 in the first",
        Range(0, below=1),
    ] = 0.0
    earlier: ClassVar[dict[str, Any]] = {}  # fields that a saved run may not name, and what they were then

    def __post_init__(self) -> None:
        expected = type(self).__dataclass_fields__["kind"].default
        if self.kind != expected:
            raise ValueError(f"kind must be {expected!r}, got {self.kind!r}: other kinds have configs of their own")
        if not isinstance(self.image, tuple | list) or len(self.image) != 2:
            raise ValueError(f"image must be height and width in pixels, such as [32, 32], got {self.image!r}")
        # configs are frozen
        object.__setattr__(self, "image", tuple(self.image))
        check_config(self)


@config_dataclass
class PatchConfig(ImageConfig):
    """The stem that makes tokens of an image, and the layers of a Transformer over them."""

    patch: Annotated[int, "side of a patch in pixels, for stem patch", Range(1)] = 4
    stem: Annotated[
        Literal["patch", "convolution"],
        "from pixels to vectors: patch (each patch on its own, by one linear map), or convolution (layers of "
        "convolution, ReLU and pooling, as in Compact Transformers)",
    ] = "patch"
    stem_layers: Annotated[int, "stem convolution: number of its layers", Range(1, 16)] = 1
    stem_kernel: Annotated[int, "stem convolution: side of its kernels", Range(1)] = 3
    stem_stride: Annotated[int, "stem convolution: stride of its kernels", Range(1)] = 1
    stem_width: Annotated[int, "stem convolution: channels between its layers", Range(1)] = 64
    stem_pooling: Annotated[
        bool | int,
        "stem convolution: the largest of 3 x 3 at every second place, after each layer; a number: after that many of "
        "the last layers",
    ] = True
    stem_norm: Annotated[bool, "stem convolution: batch norm between convolution and ReLU"] = False
    width: Annotated[int, "model width (d_model)", Range(1)] = 192
    heads: Annotated[int, "heads of each attention", Range(1)] = 3
    kv_heads: Annotated[int | None, "key and value heads, fewer than heads to share them", Range(1)] = None
    head_width: Annotated[int | None, "width of a head (default: width / heads)", Range(1)] = None
    inner: Annotated[int, "feed-forward width (d_ff)", Range(1)] = 768
    attention: Annotated[
        Specs,
        "spec of the attention over the patches, or a list repeated over the layers; the model fills in the width of "
        "its grid and the number of its tokens",
    ] = "softmax"
    position: Annotated[
        str, "spec of the positions: learned, sinusoidal, fourier or rotary (of rows and columns), none"
    ] = "learned"
    norm: Norm = "pre"
    norm_kind: Annotated[Literal["layer", "rms"], "kind of the norms: layer norm or RMSNorm"] = "layer"
    norm_epsilon: Annotated[float, "epsilon of the norms, added to the variance", Range(above=0)] = 1e-6
    feedforward: Annotated[
        Specs, "spec of the feed-forward layers, or a list repeated over them, such as \"dense(activation='gelu')\""
    ] = "dense(activation='gelu')"
    bias: Annotated[
        Bias,
        "biases of the projections of attention; inputs: of queries, keys and values only; output: of the output only",
    ] = True
    pooling: Annotated[ImagePooling, IMAGE_POOLING] = "mean"
    seeds: Annotated[int, "pma: number of vectors that it leaves", Range(1)] = 1
    seed_layers: Annotated[int, "pma: layers of self-attention among these vectors", Range(0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pooling != "pma" and (self.seeds > 1 or self.seed_layers):
            raise ValueError(f"seeds and seed_layers are for pooling 'pma', got pooling {self.pooling!r}")

    def layer(self, **changes: Any) -> ModelConfig:
        """What a Block reads, perhaps of another width."""
        return layer_config(self, **changes)


def drop_rates(last: float, layers: int) -> list[float]:
    """The rates of stochastic depth of each layer, from 0 to that of the last; of a single layer, 0."""
    return [last * index / max(layers - 1, 1) for index in range(layers)]
