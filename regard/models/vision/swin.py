"""The Swin Transformer: attention in windows of a map that is halved from stage to stage."""

from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from regard.core.model import Model, Prediction
from regard.core.options import Range, config_dataclass
from regard.core.rows import Memory, Rows
from regard.core.shape import Bias, Shape
from regard.core.state import Out
from regard.kernels.dropout import Dropout
from regard.layers.position.base import Position
from regard.models.block import Block, gather_auxiliary
from regard.models.config import ModelConfig, Norm, Specs
from regard.models.modules import ModuleListOf
from regard.models.pooling import layer_config
from regard.models.recording import Recorder, Recording, take_map
from regard.models.stack import forward_blocks, link_layers
from regard.models.vision.config import ImageConfig, drop_rates
from regard.models.vision.grid import Grid, copy_resized, fill_position, fill_windows, in_reading_order, place_blocks
from regard.models.vision.initial import draw_small_weights
from regard.models.vision.patches import Patches, check_images
from regard.spec import POSITIONS, over_layers


@config_dataclass
class SwinConfig(ImageConfig):
    """The config of a Swin Transformer. `attention` takes specs of role "self"."""

    kind: Literal["swin"] = "swin"
    image: Annotated[tuple[int, int], "height and width of the images in pixels", Range(1, 2**16)] = (224, 224)
    classes: Annotated[int | None, "number of classes", Range(2)] = 1000
    patch: Annotated[int, "side of a patch in pixels", Range(1)] = 4
    window: Annotated[int, "side of a window in cells; larger than the map, it is that of the map", Range(1)] = 7
    width: Annotated[int, "model width of the first stage; it doubles from stage to stage", Range(1)] = 96
    heads: Annotated[tuple[int, ...], "heads of each stage", Range(1)] = (3, 6, 12, 24)
    inner: Annotated[int, "feed-forward width of the first stage; it doubles from stage to stage", Range(1)] = 384
    layers: Annotated[tuple[int, ...], "layers of each stage; every stage after the first halves the map", Range(1)] = (
        2,
        2,
        6,
        2,
    )
    attention: Annotated[
        Specs,
        "spec of the attention, or a list repeated over all layers; the model fills in the width of the map, and for "
        "swin the window and, in every second layer of a stage, the shift",
    ] = "swin"
    position: Annotated[str, "spec of the positions: those of the first map, or inside attention"] = "none"
    norm: Norm = "pre"
    norm_epsilon: Annotated[float, "epsilon of the norms, added to the variance", Range(above=0)] = 1e-5
    feedforward: Annotated[Specs, "spec of the feed-forward layers, or a list repeated over them"] = (
        "dense(activation='gelu')"
    )
    bias: Annotated[
        Bias,
        "biases of the projections of attention; inputs: of queries, keys and values only; output: of the output only",
    ] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        both = (self.heads, self.layers)
        if not all(isinstance(part, tuple | list) and part for part in both) or len(self.heads) != len(self.layers):
            raise ValueError(
                f"heads and layers have a number for each stage, got heads {self.heads} and layers {self.layers}: give "
                f"lists of the same length"
            )

    def stage(self, index: int, position: str) -> ModelConfig:
        """What a Block of a stage reads."""
        doubled = {"width": self.width << index, "inner": self.inner << index, "heads": self.heads[index]}
        return layer_config(self, **doubled, position=position)


class Merging(nn.Module):
    """Four neighbours become one cell of twice the width: W LN([(0, 0), (1, 0), (0, 1), (1, 1)]) by row and column,
    without bias. Where a map has an odd side, the last cell is merged with copies of what is there."""

    def __init__(self, width: int, epsilon: float):
        super().__init__()
        self.norm = nn.LayerNorm(4 * width, eps=epsilon)
        self.reduce = nn.Linear(4 * width, 2 * width, bias=False)
        nn.init.xavier_uniform_(self.reduce.weight)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """[B, rows columns, E] -> [B, half of the rows times half of the columns, 2 E]"""
        cells = x.unflatten(1, (grid.rows, grid.columns))
        if grid.rows % 2:
            cells = torch.cat([cells, cells[:, -1:]], 1)
        if grid.columns % 2:
            cells = torch.cat([cells, cells[:, :, -1:]], 2)
        high, wide = cells.shape[1] // 2, cells.shape[2] // 2
        # columns before rows: (0, 0), (1, 0), (0, 1), (1, 1)
        four = (
            cells.view(x.shape[0], high, 2, wide, 2, -1).permute(0, 1, 3, 4, 2, 5).reshape(x.shape[0], high * wide, -1)
        )
        return self.reduce(self.norm(four))


class Swin(Model):
    """Liu et al. 2021 (arXiv 2103.14030): patches of 4 x 4 pixels are the cells of a map, and layers of a Transformer
    attend inside windows of M x M cells, in every second layer shifted by M / 2. After each stage but the last, four
    neighbours are merged into one cell of twice the width. At the end y = LN(x), and classes are read off the mean.

    Any word can stand in its layers (`attention`). Where a map is no larger than a window in a direction, the window is
    that side and not shifted, as in the authors' code. What differs: any map is taken. The authors refuse one that
    windows do not divide, and others pad it with zeros that act as keys; here windows are cut at the border, and an odd
    side is merged with copies of its last cells. Stochastic depth rises over all layers. Time and memory N.

    >>> model = Swin(SwinConfig(image=(32, 32), patch=2, window=4, width=16, heads=(2, 4), inner=32, layers=(2, 2)))
    >>> logits = model(torch.randn(2, 3, 32, 32)).logits
    """

    def __init__(self, config: SwinConfig):
        super().__init__()
        self.config: SwinConfig = config
        self.stem = Patches(config.channels, config.width, config.patch)
        self.stem_norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.maps_of_stages = [Grid(*self.stem.grid(*config.image))]
        while len(self.maps_of_stages) < len(config.layers):
            rows, columns = self.maps_of_stages[-1][:2]
            self.maps_of_stages.append(Grid(-(-rows // 2), -(-columns // 2)))
        placed = fill_position(config.position, self.maps_of_stages[0])
        self.position: Position | None = None
        if POSITIONS.find(placed.name).facts.kind == "input":
            shape = Shape.of(width=config.width, heads=config.heads[0])
            self.position = POSITIONS.build(placed, shape)
        self.dropout = Dropout(config.dropout)
        self.stages: ModuleListOf[ModuleListOf[Block]] = ModuleListOf(self._stages())
        for blocks, grid in zip(self.stages, self.maps_of_stages, strict=True):
            draw_small_weights(blocks)
            link_layers(blocks)
            place_blocks(blocks, grid)
        self.merge: ModuleListOf[Merging] = ModuleListOf(
            Merging(config.width << index, config.norm_epsilon) for index in range(len(config.layers) - 1)
        )
        width = config.width << (len(config.layers) - 1)
        self.norm = nn.LayerNorm(width, eps=config.norm_epsilon)
        self.output = None if config.classes is None else nn.Linear(width, config.classes)

    def _stages(self) -> "list[ModuleListOf[Block]]":
        config = self.config
        total, stages = sum(config.layers), []
        specs, feeds = (over_layers(part, total) for part in (config.attention, config.feedforward))
        rates = drop_rates(config.drop_path, total)
        for index, (grid, count) in enumerate(zip(self.maps_of_stages, config.layers, strict=True)):
            first = sum(config.layers[:index])
            inside = self.position is None
            position = str(fill_position(config.position, grid)) if inside else "none"
            layer = config.stage(index, position)
            blocks: ModuleListOf[Block] = ModuleListOf()
            for number in range(count):
                spec = fill_windows(specs[first + number], grid, config.window, bool(number % 2))
                blocks.append(
                    Block(layer, spec, None, feedforward=feeds[first + number], drop_path=rates[first + number])
                )
            stages.append(blocks)
        return stages

    def forward(self, images: Tensor) -> Prediction:
        """[B, C, h, w] -> logits [B, classes]"""
        if self.output is None:
            raise ValueError("this model has no classes: build it with classes, or use encode for its vectors")
        out = self._encode(images)
        return Prediction(self.output(out.y.mean(1)), out.auxiliary_loss, out.statistics)

    def encode(self, images: Tensor) -> Memory:
        """The vectors of the cells of the last map behind the last norm, [B, n, E]."""
        return Memory(self._encode(images).y, None)

    def maps(self, images: Tensor, *, recorder: Recorder = take_map) -> list[Any]:
        """What attends to what, [B, H, T, T] per layer over the map of its stage. A `recorder` is called in place of
        each layer's map."""
        found = Recording("self", recorder)
        self._encode(images, found)
        if recorder is not take_map:
            return found.results
        blocks = (block for stage in self.stages for block in stage)
        return [in_reading_order(block, part) for block, part in zip(blocks, found.results, strict=True)]

    def grids(self) -> list[Grid]:
        """Where the tokens of each layer stand, for those who draw its map."""
        pairs = zip(self.stages, self.maps_of_stages, strict=True)
        return [grid._replace(order=block.order) for stage, grid in pairs for block in stage]

    def resize(self, image: tuple[int, int]) -> "Swin":
        """A model for images of another size, with copies of the weights. Windows stay as large as they are, but for
        maps that are smaller than one before or after: then the table of their bias is resized as a grid, linearly with
        its corners kept, as is a learned table of positions."""
        made = Swin(replace(self.config, image=image))
        return copy_resized(self, made, (self.maps_of_stages[0], made.maps_of_stages[0]))

    def _encode(self, images: Tensor, maps: Recording | None = None) -> Out:
        check_images(images, self.config.channels, self.config.image)
        x = self.stem_norm(self.stem.vectors(images))
        x = self.dropout(x if self.position is None else self.position.add(x, Rows.full(x)))
        outs: dict[str, Out] = {}
        for index, blocks in enumerate(self.stages):
            x = self.merge[index - 1](x, self.maps_of_stages[index - 1]) if index else x
            outs[f"stage{index}"] = out = forward_blocks(blocks, x, Rows.full(x), maps=maps)
            x = out.y
        return Out(self.norm(x), None, None, *gather_auxiliary(outs))
