"""Masked language models (BERT): trained on text, to fill gaps and to turn texts into vectors."""

from typing import TYPE_CHECKING

from regard.lazy import lazy_names

if TYPE_CHECKING:
    from regard.tasks.masked.config import MaskedConfig, MaskedData, MaskedOptions
    from regard.tasks.masked.embedder import Embedder
    from regard.tasks.masked.masked_model import Filled, MaskedModel
    from regard.tasks.masked.task import Task

__all__ = [
    "Embedder",
    "Filled",
    "MaskedConfig",
    "MaskedData",
    "MaskedModel",
    "MaskedOptions",
    "Task",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Embedder": "embedder",
        "Filled": "masked_model",
        "MaskedConfig": "config",
        "MaskedData": "config",
        "MaskedModel": "masked_model",
        "MaskedOptions": "config",
        "Task": "task",
    },
)
