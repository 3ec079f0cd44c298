"""CoAtNet: stages of convolutions, then stages of attention with a bias by rows and columns."""

from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from regard.core.model import Model, Prediction
from regard.core.options import Range, config_dataclass
from regard.core.rows import Memory, Rows
from regard.core.shape import Shape
from regard.core.state import Out
from regard.kernels.dropout import Dropout, DropPath
from regard.layers.attention.base import Attention
from regard.layers.feedforward.base import FeedForward, Sizes
from regard.models.block import Block, gather_auxiliary
from regard.models.config import Specs
from regard.models.modules import ModuleListOf
from regard.models.pooling import layer_config
from regard.models.recording import Recorder, Recording, take_map
from regard.models.stack import forward_blocks, link_layers
from regard.models.vision.config import ImageConfig, drop_rates
from regard.models.vision.convolution import InvertedBottleneck, convolution, halve_map
from regard.models.vision.grid import Grid, copy_resized, fill_windows, in_reading_order, place_blocks
from regard.models.vision.patches import check_images
from regard.spec import ATTENTION, FEEDFORWARD, Spec, over_layers


@config_dataclass
class CoatnetConfig(ImageConfig):
    """The config of a CoAtNet. `attention` takes specs of role "self"."""

    kind: Literal["coatnet"] = "coatnet"
    image: Annotated[tuple[int, int], "height and width of the images in pixels", Range(1, 2**16)] = (224, 224)
    classes: Annotated[int | None, "number of classes", Range(2)] = 1000
    stem_width: Annotated[int, "channels of the stem, two convolutions of which the first halves the image"] = 64
    width: Annotated[int, "channels of the first stage; they double from stage to stage", Range(1)] = 96
    inner: Annotated[
        int, "channels inside the blocks of the first stage; they double from stage to stage", Range(1)
    ] = 384
    head_width: Annotated[int, "width of a head; a stage has as many as its width holds", Range(1)] = 32
    layers: Annotated[tuple[int, ...], "layers of each stage; every stage halves the map", Range(1)] = (2, 3, 5, 2)
    convolutions: Annotated[int, "stages of convolutions, before those of attention", Range(0)] = 2
    attention: Annotated[
        Specs,
        "spec of the attention, or a list repeated over the layers that attend; the model fills in the width of the "
        "map, and for swin a window as large as the map",
    ] = "swin"
    norm_epsilon: Annotated[float, "epsilon of the layer norms, added to the variance", Range(above=0)] = 1e-6
    feedforward: Annotated[Specs, "spec of the feed-forward layers, or a list repeated over them"] = (
        "dense(activation='gelu')"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.layers, tuple | list) or not self.layers:
            raise ValueError(f"layers must be a number for each stage, such as [2, 3, 5, 2], got {self.layers}")
        if self.convolutions >= len(self.layers):
            raise ValueError(
                f"convolutions must leave a stage of attention: fewer than {len(self.layers)}, got {self.convolutions}"
            )
        if self.convolutions == 0 and self.stem_width * 2 != self.width:
            raise ValueError(
                f"without convolutions stem_width must be half of width, {self.width // 2}, got {self.stem_width}"
            )
        first = self.width << self.convolutions
        if first % self.head_width:
            raise ValueError(
                f"head_width {self.head_width} does not divide the width {first} of the first stage of attention: "
                f"choose one that does"
            )


class HalvingBlock(nn.Module):
    """The first layer of a stage of attention: x <- W Pool(x) + Attention(Pool(LN(x))), x <- x + MLP(LN(x)), where Pool
    is the mean of 2 x 2 cells and attention gives vectors of the new width."""

    recomputes_alone = True  # as in Block

    def __init__(self, config: CoatnetConfig, width: int, spec: Spec, feed: Spec, drop_path: float, grid: Grid):
        """`grid`: the map that it leaves."""
        super().__init__()
        inner = config.inner * width // config.width
        inside, heads = width // 2, width // config.head_width
        self.norms = nn.ModuleList(nn.LayerNorm(size, eps=config.norm_epsilon) for size in (inside, width))
        shape = Shape.of(width=inside, heads=heads, head_width=config.head_width, out_width=width, bias=True)
        self.attention: Attention = ATTENTION.build(spec, shape)
        self.feedforward: FeedForward = FEEDFORWARD.build(feed, Sizes(width, inner))
        self.shortcut = nn.Linear(inside, width)
        nn.init.xavier_uniform_(self.shortcut.weight)
        nn.init.zeros_(self.shortcut.bias)
        self.dropout, self.drop_path = Dropout(config.dropout), DropPath(drop_path)
        # as in Block
        order = self.attention.grid_order(grid.rows)
        self.order: Tensor | None
        self.back: Tensor | None
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("back", None if order is None else order.argsort(), persistent=False)

    def forward(self, x: Tensor, grid: Grid, maps: Recording | None = None) -> Out:
        """[B, n, E] over a grid -> [B, n / 4, 2 E]"""
        read, kept = halve_tokens(self.norms[0](x), grid), halve_tokens(x, grid)
        rows = Rows.full(read)
        read = read if self.order is None else read[:, self.order]
        if maps is not None:
            maps.add("self", self.attention, read, rows, state=None, stream=None)
        attended = self.attention.forward_packed(read, rows)
        y = attended.y if self.back is None else attended.y[:, self.back]
        x = self.shortcut(kept) + self.drop_path(self.dropout(y))
        fed = self.feedforward.forward_packed(self.norms[1](x), rows)
        x = x + self.drop_path(self.dropout(fed.y))
        return Out(x, None, None, *gather_auxiliary({"attention": attended, "feedforward": fed}))


class Coatnet(Model):
    """Dai et al. 2021 (arXiv 2106.04803): a stem of two convolutions of 3 x 3, stages of MBConv, stages of a
    Transformer whose attention sees the whole map with a learned bias for each head and distance in rows and columns
    (`swin` with a window as large as the map). The first layer of each stage halves the map. At the end the mean of the
    cells goes through LN, a linear layer with tanh, and the output layer.

    The authors published no code. This is the form of timm, with its parameter counts: the depthwise convolution has
    the stride, where the paper puts it into the convolution of 1 x 1 before it; layers are pre-norm, with batch norms
    in the convolutions. So images of a batch meet in training and not in evaluation. An odd map is halved to the larger
    half, the mean at its border being that of the cells that are there. Any word that can change the width can stand in
    its layers. Time N^2 and memory N of the cells of the first map that attends.

    >>> sizes = {"stem_width": 8, "width": 16, "inner": 32, "head_width": 8, "layers": (1, 1, 1, 1)}
    >>> model = Coatnet(CoatnetConfig(image=(64, 64), classes=10, **sizes))
    >>> logits = model(torch.randn(2, 3, 64, 64)).logits
    """

    def __init__(self, config: CoatnetConfig):
        super().__init__()
        self.config: CoatnetConfig = config
        self.stem = nn.Sequential(
            convolution(config.channels, config.stem_width, 3, stride=2),
            nn.BatchNorm2d(config.stem_width),
            nn.GELU(),
            convolution(config.stem_width, config.stem_width, 3),
        )
        total = sum(config.layers)
        rates = iter(drop_rates(config.drop_path, total))
        self.convolve: ModuleListOf[InvertedBottleneck] = ModuleListOf()
        inside = config.stem_width
        for index in range(config.convolutions):
            width, inner = config.width << index, config.inner << index
            for number in range(config.layers[index]):
                self.convolve.append(InvertedBottleneck(inside, width, inner, not number, next(rates)))
                inside = width
        self.maps_of_stages = self._grids()
        attending = total - sum(config.layers[: config.convolutions])
        specs, feeds = (iter(over_layers(part, attending)) for part in (config.attention, config.feedforward))
        self.halve: ModuleListOf[HalvingBlock] = ModuleListOf()
        self.stages: ModuleListOf[ModuleListOf[Block]] = ModuleListOf()
        for index, grid in enumerate(self.maps_of_stages, config.convolutions):
            width, inner, window = config.width << index, config.inner << index, max(grid[:2])
            first = fill_windows(next(specs), grid, window, False)
            self.halve.append(HalvingBlock(config, width, first, next(feeds), next(rates), grid))
            sizes = {"width": width, "inner": inner, "heads": width // config.head_width, "bias": True}
            layer = layer_config(config, **sizes, norm="pre", position="none")
            blocks: ModuleListOf[Block] = ModuleListOf()
            for _ in range(config.layers[index] - 1):
                spec = fill_windows(next(specs), grid, window, False)
                blocks.append(Block(layer, spec, None, feedforward=next(feeds), drop_path=next(rates)))
            link_layers(blocks)
            place_blocks(blocks, grid)
            self.stages.append(blocks)
        width = config.width << (len(config.layers) - 1)
        self.norm = nn.LayerNorm(width, eps=config.norm_epsilon)
        self.hidden_layer: nn.Linear | None = None
        self.output: nn.Linear | None = None
        if config.classes is not None:
            self.hidden_layer, self.output = nn.Linear(width, width), nn.Linear(width, config.classes)

    def _grids(self) -> list[Grid]:
        """The maps of the stages that attend; the stem halves the image, and each stage the map."""
        (rows, columns), grids = self.config.image, list[Grid]()
        for index in range(1 + len(self.config.layers)):
            rows, columns = -(-rows // 2), -(-columns // 2)
            if index > self.config.convolutions:
                grids.append(Grid(rows, columns))
        return grids

    def forward(self, images: Tensor) -> Prediction:
        """[B, C, h, w] -> logits [B, classes]"""
        if self.output is None or self.hidden_layer is None:
            raise ValueError("this model has no classes: build it with classes, or use encode for its vectors")
        out = self._encode(images)
        pooled = torch.tanh(self.hidden_layer(self.norm(out.y.mean(1))))
        return Prediction(self.output(pooled), out.auxiliary_loss, out.statistics)

    def encode(self, images: Tensor) -> Memory:
        """The vectors of the cells of the last map, each behind the last norm, [B, n, E]."""
        return Memory(self.norm(self._encode(images).y), None)

    def maps(self, images: Tensor, *, recorder: Recorder = take_map) -> list[Any]:
        """What attends to what, [B, H, T, T] per layer that attends, over the map of its stage. A `recorder` is called
        in place of each layer's map."""
        found = Recording("self", recorder)
        self._encode(images, found)
        if recorder is not take_map:
            return found.results
        blocks = [block for first, stage in zip(self.halve, self.stages, strict=True) for block in (first, *stage)]
        return [in_reading_order(block, part) for block, part in zip(blocks, found.results, strict=True)]

    def grids(self) -> list[Grid]:
        """Where the tokens of each layer that attends stand, for those who draw its map."""
        parts = zip(self.maps_of_stages, self.halve, self.stages, strict=True)
        return [grid._replace(order=block.order) for grid, first, stage in parts for block in (first, *stage)]

    def resize(self, image: tuple[int, int]) -> "Coatnet":
        """A model for images of another size, with copies of the weights. The table of a bias by rows and columns is
        resized as a grid, linearly with its corners kept."""
        return copy_resized(self, Coatnet(replace(self.config, image=image)))

    def _encode(self, images: Tensor, maps: Recording | None = None) -> Out:
        check_images(images, self.config.channels, self.config.image)
        x = images
        if x.device.type == "cuda":
            # the layout of the fast kernels, and of tokens
            x = x.contiguous(memory_format=torch.channels_last)
        x = self.stem(x)
        for block in self.convolve:
            x = block(x)
        grid, outs = Grid(x.shape[2], x.shape[3]), dict[str, Out]()
        x = x.flatten(2).mT
        for index, (first, blocks) in enumerate(zip(self.halve, self.stages, strict=True)):
            outs[f"halving{index}"] = out = first(x, grid, maps)
            outs[f"stage{index}"] = out = forward_blocks(blocks, out.y, Rows.full(out.y), maps=maps)
            x, grid = out.y, self.maps_of_stages[index]
        return Out(x, None, None, *gather_auxiliary(outs))


def halve_tokens(x: Tensor, grid: Grid) -> Tensor:
    """`halve_map` of tokens [B, rows columns, E]."""
    return halve_map(x.mT.unflatten(2, (grid.rows, grid.columns))).flatten(2).mT
