"""The weights that layers over images begin with."""

from collections.abc import Iterable

from torch import nn

from regard.models.block import Block

DEVIATION = 0.02


def draw_small_weights(blocks: Iterable[Block]) -> None:
    """Draws projections and MLPs from a truncated normal of deviation 0.02, as timm, DeiT, Swin and CCT do. At width
    256 Xavier's are three times as large: what the layers add at random then hides the patches for long."""
    for block in blocks:
        attention = block.attention
        parts = [block.feedforward, getattr(attention, "project", None), getattr(attention, "output", None)]
        for part in parts:
            for layer in part.modules() if isinstance(part, nn.Module) else ():
                if isinstance(layer, nn.Linear):
                    nn.init.trunc_normal_(layer.weight, std=DEVIATION)
