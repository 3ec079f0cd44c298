"""Where the tokens of an image stand, and what specs need to know of it.

The patches of an image are tokens in the order of reading: row by row. A mechanism of the registry sees a line of them,
unless it has an option for the number of columns. What a model knows it fills in where a spec leaves it out: the
columns, and for layers with a table the number of tokens.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.layers.attention.swin import Swin
from regard.layers.position.base import Position
from regard.models.block import Block
from regard.spec import ATTENTION, POSITIONS, Registry, Spec, parse

M = TypeVar("M", bound=nn.Module)


class Grid(NamedTuple):
    """The tokens of a layer: a grid row by row, behind `leading` tokens (a class token) that are no cells of it."""

    rows: int
    columns: int
    leading: int = 0
    order: Tensor | None = None  # the cell of each token, where the layer reads them in another order

    @property
    def tokens(self) -> int:
        return self.leading + self.rows * self.columns


def fill_attention(spec: str | Spec, grid: Grid) -> Spec:
    """The spec with the columns of the grid and the number of its tokens, where it takes them. Others than those are
    refused in words."""
    spec = ATTENTION.canonical(spec)
    spec = Spec(spec.name, tuple(fill_attention(part, grid) for part in spec.parts), spec.options)
    cls, options, known = ATTENTION.find(spec.name), dict(spec.options), _types(ATTENTION, spec.name)
    columns = cls.grid_option(options)
    if columns is not None:
        if grid.leading:
            raise ValueError(
                f"attention {spec.name!r} reads the cells of a grid, and a class token is no cell: use pooling='mean', "
                f"'sequence' or 'pma' in place of 'first'"
            )
        if options.get(columns) not in (None, grid.columns):
            raise ValueError(
                f"attention {spec.name!r} has {columns}={options[columns]}, and the tokens stand in rows of "
                f"{grid.columns}: leave {columns} out, the model fills it in"
            )
        options[columns] = grid.columns
    if known.get("longest") is int and options.setdefault("longest", grid.tokens) < grid.tokens:
        raise ValueError(
            f"attention {spec.name!r} has longest={options['longest']}, and the model {grid.tokens} tokens: leave "
            f"longest out, the model fills it in"
        )
    return Spec(spec.name, spec.parts, tuple(options.items()))


def fill_windows(spec: str | Spec, grid: Grid, window: int, shifted: bool) -> Spec:
    """`fill_attention`, with the windows of a layer for `swin` where the spec leaves them out: no larger than the map,
    and shifted by half in the directions in which the map is larger."""
    spec = ATTENTION.canonical(spec)
    spec = Spec(spec.name, tuple(fill_windows(part, grid, window, shifted) for part in spec.parts), spec.options)
    if spec.name == "swin":
        options = dict(spec.options)
        sides = grid[:2]
        options.setdefault("window", tuple(min(window, side) for side in sides))
        given = options["window"]
        # a window of other than two sides is for the layer to refuse
        pairs = zip((given, given) if isinstance(given, int) else given, sides, strict=False)
        shift = tuple(m // 2 if shifted and m < side else 0 for m, side in pairs)
        options.setdefault("shift", shift)
        spec = Spec(spec.name, spec.parts, tuple(options.items()))
    return fill_attention(spec, grid)


def fill_position(spec: str | Spec, grid: Grid) -> Spec:
    """The spec with the columns of the grid, whether a token stands before it, and the number of tokens, where it takes
    them. `columns=None` keeps a line; another grid is refused in words."""
    spec = POSITIONS.canonical(parse(spec))
    options, known, filled = dict(spec.options), _types(POSITIONS, spec.name), dict[str, Any]()
    if "columns" in known and options.get("columns", grid.columns) is not None:
        filled |= {"columns": grid.columns, "apart": grid.leading > 0}
    if "longest" in known:
        filled["longest"] = grid.tokens
    for name, value in filled.items():
        if options.setdefault(name, value) != value:
            raise ValueError(
                f"position {spec.name!r} has {name}={options[name]}, and for this model it is {value}: leave it out, "
                f"the model fills it in"
            )
    return Spec(spec.name, spec.parts, tuple(options.items()))


def _types(registry: Registry, name: str) -> dict[str, Any]:
    return {option.name: option.type for option in registry.options(name)}


def place_blocks(blocks: Iterable[Block], grid: Grid) -> None:
    """Tells layers in which order they read the cells, and distances inside attention that a class token has none."""
    for block in blocks:
        assert block.attention is not None, "layers of images attend to themselves"
        order = block.attention.grid_order(grid.rows)
        if order is not None:
            block.read_in_order(order)
        for part in block.attention.modules():
            if isinstance(part, Position) and part.facts.kind in ("bias", "content"):
                part.apart = grid.leading > 0


class Ordered(Protocol):
    """A layer that may read its tokens in another order than they stand in."""

    back: Tensor | None
    attention: Any


def in_reading_order(block: Ordered, maps: Tensor) -> Tensor:
    """A map with its tokens row by row."""
    if block.back is None:
        return maps
    maps = maps[:, :, block.back]
    return maps[..., block.back] if block.attention.facts.columns == "tokens" else maps


def copy_resized(model: M, made: M, grids: tuple[Grid, Grid] | None = None) -> M:
    """The model that was made for images of another size, with the weights of the old one: the learned table of
    positions, `position.table`, from one grid to the other; the tables of windows; and all else as it is, or refused in
    words."""
    made = made.to(next(model.parameters())).train(model.training)
    state, own, parts = dict(model.state_dict()), made.state_dict(), dict(made.named_modules())
    if "position.table" in state and grids is not None:
        state["position.table"] = resize_table(state["position.table"], *grids)
    for name, part in model.named_modules():
        other = parts[name]
        if isinstance(part, Swin) and isinstance(other, Swin) and part.table is not None:
            old, new = (Grid(2 * h - 1, 2 * w - 1) for h, w in (part.window, other.window))
            state[f"{name}.table"] = resize_table(part.table.detach(), old, new)
    for name, tensor in state.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"{name} is {list(tensor.shape)} here and {list(own[name].shape)} for the new size: its weights belong "
                f"to single places of the grid and cannot be resized"
            )
    made.load_state_dict(state)
    return made


def resize_table(table: Tensor, old: Grid, new: Grid) -> Tensor:
    """A vector for each token of one grid, [T, E], as one for each of another: linear in row and column, corners
    kept."""
    if old[:2] == new[:2]:
        return table
    leading, cells = table[: old.leading], table[old.leading :].T.unflatten(1, (old.rows, old.columns))
    size = (new.rows, new.columns)
    # no half precision: rounding would bend what is linear
    wide = cells.to(torch.promote_types(cells.dtype, torch.float32))[None]
    resized = F.interpolate(wide, size, mode="bilinear", align_corners=True)[0].flatten(1).T
    return torch.cat([leading, resized.to(table.dtype)])
