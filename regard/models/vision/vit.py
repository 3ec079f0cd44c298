"""The Vision Transformer: an image as a sequence of patches, with any attention of the registry over them."""

from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from regard.core.model import Hidden, Model, Prediction
from regard.core.options import Range, config_dataclass
from regard.core.rows import Memory, Rows
from regard.core.shape import Shape
from regard.core.state import Out
from regard.kernels.dropout import Dropout
from regard.layers.position.base import Position
from regard.models.block import Block, gather_auxiliary, normalization
from regard.models.modules import ModuleListOf
from regard.models.pooling import Answer
from regard.models.recording import Recorder, Recording, take_map
from regard.models.stack import forward_blocks, link_layers
from regard.models.vision.config import IMAGE_POOLING, ImagePooling, PatchConfig, drop_rates
from regard.models.vision.grid import Grid, copy_resized, fill_attention, fill_position, in_reading_order, place_blocks
from regard.models.vision.initial import draw_small_weights
from regard.models.vision.patches import build_stem, check_images
from regard.spec import POSITIONS, over_layers, parse


@config_dataclass
class VitConfig(PatchConfig):
    """The config of a Vision Transformer. `attention` takes specs of role "self"."""

    kind: Literal["vit"] = "vit"
    layers: Annotated[int, "number of layers", Range(1)] = 12
    final_norm: Annotated[bool | None, "a final norm after the last layer (default: where norm is pre)"] = None
    pooling: Annotated[ImagePooling, IMAGE_POOLING] = "first"
    distillation: Annotated[
        Literal["none", "token", "answer"],
        "token: a second learned token behind the class token, as in DeiT; answer: it has an output layer of its own, "
        "and the logits are the mean of both",
    ] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distillation == "none":
            return
        if self.pooling != "first":
            raise ValueError(
                f"distillation {self.distillation!r} adds a token behind the class token, and pooling {self.pooling!r} "
                "has none: use pooling 'first'"
            )
        if parse(self.position).name not in ("learned", "none"):
            raise ValueError(
                f"distillation {self.distillation!r} takes position 'learned' or 'none', got {self.position!r}: others "
                "would count the second token among the patches"
            )


class Vit(Model):
    """Dosovitskiy et al. 2021 (arXiv 2010.11929): an image [C, h, w] is cut into n patches of P x P pixels. Each,
    flattened and mapped to E numbers, is a token; a learned class token may stand before them; positions are added, and
    layers of the Transformer follow, pre-norm with GELU,

        x <- x + Attention(LN(x)),    x <- x + MLP(LN(x)),    y = LN(x),

    and classes are read off y at the class token (pooling="first") or off the mean of all patches. Images come
    normalized.

    Tokens are in the order of rows. Words with an option for the number of columns read the grid, and the model fills
    it in (`axial`, `swin`, `local` with a window of rows and columns, `image` with such a block, which also gets its
    tokens in the order of its blocks); all others see a line, in which a neighbour above is as far as a row is long.
    The class token is no cell of a grid: a word that reads one takes another pooling. Positions: "learned" has a vector
    for each token, "sinusoidal", "fourier" and "rotary" count rows and columns (with columns=None the tokens of the
    line), and none but "learned" touches the class token.

    stem="convolution" and pooling="sequence" make it a Compact Convolutional Transformer (Hassani et al. 2021, arXiv
    2104.05704), the latter alone a CVT; their code also norms the sum before each MLP, which is not done here.
    distillation="answer" makes it a distilled DeiT (Touvron et al. 2021, arXiv 2012.12877): a second token, which was
    trained to agree with another model, with an output layer of its own; logits are the mean of both. What
    differs from the authors' of ViT: they start the output layer at zero, and their MLP has the GELU by tanh
    (feedforward="dense(activation='gelu_tanh')"). Time N^2 and memory N of N = h w / P^2 patches.

    >>> model = Vit(VitConfig(image=(32, 32), patch=8, width=32, heads=4, inner=64, layers=2, classes=10))
    >>> logits = model(torch.randn(2, 3, 32, 32)).logits
    """

    def __init__(self, config: VitConfig):
        super().__init__()
        self.config: VitConfig = config
        self.stem = build_stem(config)
        self.grid = grid = Grid(*self.stem.grid(*config.image), leading=_leading_tokens(config))
        placed = fill_position(config.position, grid)
        layer = config.layer(position=str(placed))
        # zero at first, as the authors have it
        self.first = nn.Parameter(torch.zeros(config.width)) if grid.leading else None
        self.second = nn.Parameter(torch.zeros(config.width)) if grid.leading > 1 else None
        inside = POSITIONS.find(placed.name).facts.kind != "input"
        shape = Shape.of(width=config.width, heads=config.heads, head_width=config.head_width)
        self.position: Position | None = None if inside else POSITIONS.build(placed, shape)
        specs = [fill_attention(spec, grid) for spec in over_layers(config.attention, config.layers)]
        feeds, rates = over_layers(config.feedforward, config.layers), drop_rates(config.drop_path, config.layers)
        self.blocks: ModuleListOf[Block] = ModuleListOf(
            Block(layer, spec, None, feedforward=feed, drop_path=rate)
            for spec, feed, rate in zip(specs, feeds, rates, strict=True)
        )
        draw_small_weights(self.blocks)
        link_layers(self.blocks)
        place_blocks(self.blocks, grid)
        final = config.norm == "pre" if config.final_norm is None else config.final_norm
        self.norm = normalization(layer) if final else nn.Identity()
        self.dropout = Dropout(config.dropout)
        self.answer = None if config.classes is None else Answer(config, None, config.width)
        both = self.answer is not None and config.distillation == "answer"
        self.second_answer = Answer(config, None, config.width) if both else None

    def forward(self, images: Tensor) -> Prediction:
        """[B, C, h, w] -> logits [B, classes]"""
        if self.answer is None:
            raise ValueError("this model has no classes: build it with classes, or use encode for its vectors")
        out = self._encode(images)
        logits, pooled = self.answer(Memory(out.y, None))
        if self.second_answer is not None:
            logits = (logits + self.second_answer(Memory(out.y[:, 1:], None))[0]) / 2
        return Prediction(logits, *gather_auxiliary({"encoder": out, "pooling": pooled}))

    def encode(self, images: Tensor) -> Memory:
        """The vectors of the tokens behind the last norm, [B, n, E]; a class token is the first of them."""
        return Memory(self._encode(images).y, None)

    def hidden(self, images: Tensor) -> Hidden:
        """The same with the auxiliary losses of the layers, for a model that is built on it."""
        out = self._encode(images)
        return Hidden(out.y, out.auxiliary_loss, out.statistics)

    def maps(self, images: Tensor, *, recorder: Recorder = take_map) -> list[Any]:
        """What attends to what, [B, H, T, S] per layer, in the order of rows behind a class token. A `recorder` is
        called in place of each layer's map and sees the tokens in the order of that layer (see `grids`)."""
        found = Recording("self", recorder)
        self._encode(images, found)
        if recorder is not take_map:
            return found.results
        return [in_reading_order(block, part) for block, part in zip(self.blocks, found.results, strict=True)]

    def grids(self) -> list[Grid]:
        """Where the tokens of each layer stand, for those who draw its map."""
        return [self.grid._replace(order=block.order) for block in self.blocks]

    def resize(self, image: tuple[int, int]) -> "Vit":
        """A model for images of another size, with copies of the weights. The learned table of positions, as a grid,
        is resized linearly along rows and columns with its corners kept, as in the authors' code; the row of the class
        token stays as it is, and the same size changes nothing. Weights of other layers that belong to single places
        cannot be carried over."""
        made = Vit(replace(self.config, image=image))
        return copy_resized(self, made, (self.grid, made.grid))

    def _encode(self, images: Tensor, maps: Recording | None = None) -> Out:
        check_images(images, self.config.channels, self.config.image)
        x = self.stem.vectors(images)
        leading = [token.expand(x.shape[0], 1, -1) for token in (self.first, self.second) if token is not None]
        x = torch.cat([*leading, x], 1) if leading else x
        rows = Rows.full(x)
        x = x if self.position is None else self.position.add(x, rows)
        out = forward_blocks(self.blocks, self.dropout(x), rows, maps=maps)
        return out._replace(y=self.norm(out.y))


def _leading_tokens(config: VitConfig) -> int:
    """Tokens before those of the patches."""
    return int(config.pooling == "first") + int(config.distillation != "none")
