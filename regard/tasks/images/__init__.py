"""Classifiers of images: trained from labelled images, alone or from another run."""

from typing import TYPE_CHECKING

from regard.lazy import lazy_names

if TYPE_CHECKING:
    from regard.tasks.images.classifier import ImageClassifier
    from regard.tasks.images.config import ImageData, ImageOptions, ImagesConfig
    from regard.tasks.images.corpus import Corpus, read_corpus, read_valid
    from regard.tasks.images.task import Task

__all__ = [
    "Corpus",
    "ImageClassifier",
    "ImageData",
    "ImageOptions",
    "ImagesConfig",
    "Task",
    "read_corpus",
    "read_valid",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Corpus": "corpus",
        "ImageClassifier": "classifier",
        "ImageData": "config",
        "ImageOptions": "config",
        "ImagesConfig": "config",
        "Task": "task",
        "read_corpus": "corpus",
        "read_valid": "corpus",
    },
)
