"""Language models: trained on running text, to continue a text."""

from typing import TYPE_CHECKING

from regard.lazy import lazy_names

if TYPE_CHECKING:
    from regard.tasks.language.config import LanguageConfig, LanguageOptions
    from regard.tasks.language.language_model import Continuation, LanguageModel
    from regard.tasks.language.task import Task

__all__ = [
    "Continuation",
    "LanguageConfig",
    "LanguageModel",
    "LanguageOptions",
    "Task",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Continuation": "language_model",
        "LanguageConfig": "config",
        "LanguageModel": "language_model",
        "LanguageOptions": "config",
        "Task": "task",
    },
)
