"""The config of a masked language model: its data, its model and its training."""

from dataclasses import dataclass, field
from typing import Literal

from regard.tasks.options import TokenOptions, check_out
from regard.tasks.text import LanguageData
from regard.training.config import TrainingConfig


@dataclass(frozen=True)
class MaskedData(LanguageData):
    """Where the text comes from, how it becomes tokens, and which of them are hidden."""

    tokenizer: Literal["bpe", "uncased", "characters", "bytes", "words", "stems"] = "bpe"
    """bpe: learn byte pairs from the text; uncased: of small letters, words and signs apart; words: what spaces
    separate, and the ends of lines; stems: words whose vectors share those of their first letters"""
    masked: float = 0.15
    """share of the tokens to name: 80 % of them are hidden, 10 % replaced by others, 10 % stay"""
    whole_words: bool = False
    """choose whole words instead of single tokens"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.masked < 1:
            raise ValueError(f"data.masked must be above 0 and below 1, got {self.masked}")


@dataclass(frozen=True)
class MaskedOptions(TokenOptions):
    """A preset, and what to change in it: whatever is left out is as the preset says."""

    preset: str = "bert-tiny"
    """bert-tiny, bert-mini, bert-small, bert, bert-large"""


@dataclass(frozen=True)
class MaskedConfig:
    """A model that names hidden tokens: its data, its model and its training."""

    out: str = "runs/masked"
    """the run folder: config, tokenizer, checkpoints and log"""
    init: str | None = None
    """a run of masked to begin with: its weights, its sizes and its tokenizer"""
    data: MaskedData = field(default_factory=MaskedData)
    model: MaskedOptions = field(default_factory=MaskedOptions)
    training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(weight_decay=0.01, label_smoothing=0.0, metric="loss")
    )

    def __post_init__(self) -> None:
        check_out(self)
