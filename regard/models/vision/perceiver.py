"""The Perceiver over the patches of an image."""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from torch import Tensor, nn

from regard.core.model import Prediction
from regard.core.options import Range, config_dataclass
from regard.core.rows import Memory, Rows
from regard.core.shape import Shape
from regard.core.state import Out
from regard.kernels.dropout import Dropout
from regard.models.block import gather_auxiliary, normalization
from regard.models.perceiver import LatentModel
from regard.models.pooling import Answer
from regard.models.vision.config import IMAGE_POOLING, ImagePooling, PatchConfig, drop_rates
from regard.models.vision.grid import Grid, copy_resized, fill_position
from regard.models.vision.patches import build_stem, check_images
from regard.spec import POSITIONS, parse


@config_dataclass
class ImagePerceiverConfig(PatchConfig):
    """The config of a Perceiver of images. `attention` (among the latents) takes specs of role "self",
    `cross_attention` (latents to patches) a spec of role "cross". Of `width` are the patches."""

    kind: Literal["image-perceiver"] = "image-perceiver"
    latents: Annotated[int, "number of latent vectors, which read the patches", Range(1)] = 64
    latent_width: Annotated[int | None, "width of the latents (default: as width)", Range(1)] = None
    layers: Annotated[int, "layers of self-attention in a block", Range(1)] = 6
    blocks: Annotated[
        int, "number of times that the latents pass through these layers, with the same weights", Range(1)
    ] = 1
    reads: Annotated[Literal["once", "each"], "each: the latents read the patches again before every block"] = "once"
    cross_attention: Annotated[str, "spec of the attention from latents to patches"] = "softmax"
    cross_heads: Annotated[int | None, "heads of that attention (default: as heads)", Range(1)] = None
    position: Annotated[str, "spec of the positions: fourier or sinusoidal (of rows and columns), learned, none"] = (
        "fourier"
    )
    final_norm: Annotated[bool | None, "a final norm after the last layer (default: where norm is pre)"] = None
    pooling: Annotated[ImagePooling, IMAGE_POOLING.replace("patches", "latents")] = "mean"
    earlier: ClassVar[dict[str, Any]] = {"final_norm": False}

    def __post_init__(self) -> None:
        super().__post_init__()
        found = POSITIONS.find(parse(self.position).name).facts
        if found.kind != "input":
            raise ValueError(
                f"a Perceiver cannot take position {found.name!r}: latents have no place that a distance could be "
                f"measured from; use one that is added to the patches, such as fourier, sinusoidal or learned"
            )
        if self.pooling == "first":
            raise ValueError("a Perceiver has no class token: use pooling 'mean', or 'pma', which reads the latents")
        if self.classes is None:
            raise ValueError("a Perceiver of images needs classes")


class ImagePerceiver(LatentModel):
    """Jaegle et al. 2021 (Perceiver, arXiv 2103.03206) over the patches of an image: M learned latents read the
    patches, with positions of rows and columns added, and think among themselves; see Perceiver. patch=1 reads pixels,
    as the authors do. Their Fourier features of the position are the default, `fourier`: added to the patches, which is
    the same as concatenated with the pixels before the linear map of the stem. A norm stands behind the last pre-norm
    layer, as in a ViT: without it logits grow with what the layers add. The paper averages the latents as they are
    (final_norm=False). Time N M + layers M^2, memory N.

    >>> sizes = {"width": 32, "heads": 4, "inner": 64, "layers": 2, "latents": 8}
    >>> model = ImagePerceiver(ImagePerceiverConfig(image=(64, 64), patch=8, classes=10, **sizes))
    >>> logits = model(images).logits
    """

    def __init__(self, config: ImagePerceiverConfig):
        super().__init__()
        self.config: ImagePerceiverConfig = config
        self.stem = build_stem(config)
        self.grid = Grid(*self.stem.grid(*config.image))
        shape = Shape.of(width=config.width, heads=config.heads, head_width=config.head_width)
        self.position = POSITIONS.build(fill_position(config.position, self.grid), shape)
        self.dropout = Dropout(config.dropout)
        self.add_latents(config, drop_rates(config.drop_path, config.layers))
        wide = config.latent_width or config.width
        final = config.norm == "pre" if config.final_norm is None else config.final_norm
        self.norm = normalization(config.layer(width=wide)) if final else nn.Identity()
        self.answer = Answer(config, None, wide)

    def forward(self, images: Tensor) -> Prediction:
        """[B, C, h, w] -> logits [B, classes]"""
        thought = self._encode(images)
        logits, pooled = self.answer(Memory(thought.y, None))
        return Prediction(logits, *gather_auxiliary({"latents": thought, "pooling": pooled}))

    def encode(self, images: Tensor) -> Memory:
        """The latents behind the last norm, [B, M, E]."""
        return Memory(self._encode(images).y, None)

    def resize(self, image: tuple[int, int]) -> "ImagePerceiver":
        """A copy for images of another size, height and width. Fourier features have no table: their coordinates run
        from -1 to 1 over the new grid, and their frequencies follow its size unless the spec gives `highest`. A learned
        table is resized as by `Vit.resize`."""
        made = ImagePerceiver(replace(self.config, image=image))
        return copy_resized(self, made, (self.grid, made.grid))

    def read(self, images: Tensor) -> Memory:
        """What the latents read."""
        check_images(images, self.config.channels, self.config.image)
        x = self.stem.vectors(images)
        return Memory(self.dropout(self.position.add(x, Rows.full(x))), None)

    def _encode(self, images: Tensor) -> Out:
        thought = self.think(self.read(images))
        return thought._replace(y=self.norm(thought.y))
