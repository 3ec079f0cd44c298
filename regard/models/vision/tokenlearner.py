"""TokenLearner over the patches of an image: half-way through, a few learned tokens take their place."""

from dataclasses import fields
from typing import Annotated, Literal

from torch import Tensor, nn

from regard.core.model import Model, Prediction
from regard.core.options import Range, config_dataclass
from regard.core.rows import Memory, Rows
from regard.core.state import Out
from regard.models.block import Block, gather_auxiliary, normalization
from regard.models.modules import ModuleListOf
from regard.models.pooling import Answer
from regard.models.stack import forward_blocks, link_layers
from regard.models.tokenlearner import GridLearner, Learner
from regard.models.vision.config import IMAGE_POOLING, ImagePooling, PatchConfig, drop_rates
from regard.models.vision.patches import build_stem
from regard.models.vision.vit import Vit, VitConfig
from regard.spec import over_layers


@config_dataclass
class ImageTokenLearnerConfig(PatchConfig):
    """The config of a TokenLearner of images. `attention` takes specs of role "self", repeated over all layers."""

    kind: Literal["image-tokenlearner"] = "image-tokenlearner"
    layers: Annotated[int, "number of layers in all", Range(2)] = 12
    learn_after: Annotated[int | None, "layers before the tokens are learned (default: half of them)"] = None
    tokens: Annotated[int, "learned tokens", Range(1)] = 8
    learner_inner: Annotated[int, "hidden width of the MLP that learns the tokens", Range(1)] = 64
    version: Annotated[Literal["1.0", "1.1"], "version of the learner: convolutions, as in the paper, or an MLP"] = (
        "1.1"
    )
    pooling: Annotated[ImagePooling, IMAGE_POOLING.replace("patches", "learned tokens")] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes is None:
            raise ValueError("a TokenLearner of images needs classes")
        if self.pooling == "first":
            raise ValueError("learned tokens have no order, and no class token: use pooling 'mean'")
        if not 1 <= self.before < self.layers:
            raise ValueError(
                f"learn_after must leave layers on both sides: 1 to {self.layers - 1} of {self.layers}, "
                f"got {self.learn_after}"
            )

    @property
    def before(self) -> int:
        return self.layers // 2 if self.learn_after is None else self.learn_after

    @property
    def grid(self) -> int:
        """Patches in a row."""
        return build_stem(self).grid(*self.image)[1]


class ImageTokenLearner(Model):
    """Ryoo et al. 2021 (arXiv 2106.11297) over the patches of an image, as the paper has it: the first layers, those of
    a ViT, see all N patches, then S learned tokens, each a mean of the patches with weights that they decide, take
    their place; see TokenLearner. Time N^2 of the first layers and S^2 of the others, memory N.

    >>> sizes = {"width": 32, "heads": 4, "inner": 64, "layers": 2, "tokens": 4}
    >>> model = ImageTokenLearner(ImageTokenLearnerConfig(image=(64, 64), patch=8, classes=10, **sizes))
    >>> logits = model(images).logits
    """

    def __init__(self, config: ImageTokenLearnerConfig):
        super().__init__()
        self.config: ImageTokenLearnerConfig = config
        specs, feeds = (over_layers(part, config.layers) for part in (config.attention, config.feedforward))
        before, rates = config.before, drop_rates(config.drop_path, config.layers)
        shared = {item.name: getattr(config, item.name) for item in fields(PatchConfig) if item.name != "kind"}
        # the layers of a ViT without its norm and its head
        own = {"classes": None, "layers": before, "final_norm": False, "drop_path": rates[before - 1]}
        own |= {"pooling": "mean", "seeds": 1, "seed_layers": 0}
        own |= {"attention": list(map(str, specs[:before])), "feedforward": list(map(str, feeds[:before]))}
        self.first = Vit(VitConfig(**(shared | own)))
        self.learner = (Learner if config.version == "1.1" else GridLearner)(config)
        layer = config.layer(position="none")
        self.blocks: ModuleListOf[Block] = ModuleListOf(
            Block(layer, spec, None, feedforward=feed, drop_path=rate)
            for spec, feed, rate in zip(specs[before:], feeds[before:], rates[before:], strict=True)
        )
        link_layers(self.blocks)
        self.norm = normalization(layer) if config.norm == "pre" else nn.Identity()
        self.answer = Answer(config, None, config.width)

    def forward(self, images: Tensor) -> Prediction:
        """[B, C, h, w] -> logits [B, classes]"""
        out = self._encode(images)
        logits, pooled = self.answer(Memory(out.y, None))
        return Prediction(logits, *gather_auxiliary({"encoder": out, "pooling": pooled}))

    def encode(self, images: Tensor) -> Memory:
        """The learned tokens behind the last norm, [B, S, E]."""
        return Memory(self._encode(images).y, None)

    def map(self, images: Tensor) -> Tensor:
        """How much of each patch goes into each learned token, [B, S, T]."""
        x = self.first.hidden(images).x
        return self.learner.map(x, Rows.full(x))

    def _encode(self, images: Tensor) -> Out:
        first = self.first.hidden(images)
        z = self.learner(first.x, Rows.full(first.x))
        out = forward_blocks(self.blocks, z, Rows.full(z))
        parts = {"first": Out(first.x, None, None, first.auxiliary_loss, first.statistics), "learned": out}
        return Out(self.norm(out.y), None, None, *gather_auxiliary(parts))
