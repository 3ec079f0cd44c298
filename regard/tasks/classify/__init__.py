"""Classifiers of texts: trained from labelled text, alone or over the layers of a trained model."""

from typing import TYPE_CHECKING

from regard.lazy import lazy_names

if TYPE_CHECKING:
    from regard.tasks.classify.classifier import Answer, Classifier, Threshold
    from regard.tasks.classify.config import ClassifierOptions, ClassifyConfig, LabelledData
    from regard.tasks.classify.corpus import Corpus, read_corpus, read_valid
    from regard.tasks.classify.evaluation import Evaluation, evaluate
    from regard.tasks.classify.task import Task

__all__ = [
    "Answer",
    "Classifier",
    "ClassifierOptions",
    "ClassifyConfig",
    "Corpus",
    "Evaluation",
    "LabelledData",
    "Task",
    "Threshold",
    "evaluate",
    "read_corpus",
    "read_valid",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Answer": "classifier",
        "Classifier": "classifier",
        "ClassifierOptions": "config",
        "ClassifyConfig": "config",
        "Corpus": "corpus",
        "Evaluation": "evaluation",
        "LabelledData": "config",
        "Task": "task",
        "Threshold": "classifier",
        "evaluate": "evaluation",
        "read_corpus": "corpus",
        "read_valid": "corpus",
    },
)
