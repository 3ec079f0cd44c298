"""Captioners: trained on pictures with captions; captions of pictures, and pictures and captions that find each
other."""

from typing import TYPE_CHECKING

from regard.lazy import lazy_names

if TYPE_CHECKING:
    from regard.tasks.captions.captioner import Caption, Captioner, Match
    from regard.tasks.captions.config import CaptionerOptions, CaptionsConfig, CaptionsData
    from regard.tasks.captions.corpus import Corpus, read_corpus, read_valid
    from regard.tasks.captions.evaluation import Evaluation, evaluate
    from regard.tasks.captions.task import Task

__all__ = [
    "Caption",
    "Captioner",
    "CaptionerOptions",
    "CaptionsConfig",
    "CaptionsData",
    "Corpus",
    "Evaluation",
    "Match",
    "Task",
    "evaluate",
    "read_corpus",
    "read_valid",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Caption": "captioner",
        "Captioner": "captioner",
        "CaptionerOptions": "config",
        "CaptionsConfig": "config",
        "CaptionsData": "config",
        "Corpus": "corpus",
        "Evaluation": "evaluation",
        "Match": "captioner",
        "Task": "task",
        "evaluate": "evaluation",
        "read_corpus": "corpus",
        "read_valid": "corpus",
    },
)
