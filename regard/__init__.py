"""Regard: every attention, one Transformer. Train it, run it, see it, compare it."""

from regard.api import attend, attention, facts, feedforward, names, position
from regard.attention.base import Attention, Facts, detach, select
from regard.models.transformer import ModelConfig, Transformer
from regard.show.notebook import show
from regard.spec import over_layers

__all__ = [
    "Attention",
    "Facts",
    "ModelConfig",
    "Transformer",
    "attend",
    "attention",
    "detach",
    "facts",
    "feedforward",
    "names",
    "over_layers",
    "position",
    "select",
    "show",
]
__version__ = "0.1.0"
