"""Translators: trained on pairs of sentences; translations, scores and word alignments."""

from typing import TYPE_CHECKING

from regard.lazy import lazy_names

if TYPE_CHECKING:
    from regard.tasks.translate.alignment import align, align_both, choose_layers, read_maps
    from regard.tasks.translate.config import DataConfig, TranslateConfig, TranslatorOptions
    from regard.tasks.translate.corpus import Corpus, read_corpus, read_valid
    from regard.tasks.translate.task import Task
    from regard.tasks.translate.translator import ENGLISH_GERMAN, Translation, Translator

__all__ = [
    "ENGLISH_GERMAN",
    "Corpus",
    "DataConfig",
    "Task",
    "TranslateConfig",
    "Translation",
    "Translator",
    "TranslatorOptions",
    "align",
    "align_both",
    "choose_layers",
    "read_corpus",
    "read_maps",
    "read_valid",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Corpus": "corpus",
        "DataConfig": "config",
        "ENGLISH_GERMAN": "translator",
        "TranslatorOptions": "config",
        "Task": "task",
        "TranslateConfig": "config",
        "Translation": "translator",
        "Translator": "translator",
        "align": "alignment",
        "align_both": "alignment",
        "choose_layers": "alignment",
        "read_corpus": "corpus",
        "read_maps": "alignment",
        "read_valid": "corpus",
    },
)
