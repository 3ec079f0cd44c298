"""The config of a masked language model: its data, its model and its training."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from regard.core.options import Range
from regard.tasks.options import ModelOptions, check_out, derived
from regard.tasks.text import LanguageData
from regard.training.config import TrainingConfig


@dataclass(frozen=True)
class MaskedData(LanguageData):
    """Where the text comes from, how it becomes tokens, and which of them are hidden."""

    tokenizer: Annotated[
        Literal["bpe", "uncased", "characters", "bytes", "words", "stems"],
        "bpe: learn byte pairs from the text; uncased: of small letters, words and signs apart; words: what "
        "spaces separate, and the ends of lines; stems: words whose vectors share those of their first letters",
    ] = "bpe"
    masked: Annotated[
        float,
        "share of the tokens to name: 80 % of them are hidden, 10 % replaced by others, 10 % stay",
        Range(above=0, below=1),
    ] = 0.15
    whole_words: Annotated[bool, "choose whole words instead of single tokens"] = False


@derived
class MaskedOptions(ModelOptions):
    """A preset, and what to change in it: whatever is left out is as the preset says."""

    predicts = "hidden tokens"
    default = "bert-tiny"
    preset: Annotated[
        str,
        "bert-tiny, bert-mini, bert-small, bert or bert-large; perceiver, funnel or tokenlearner, which shorten the "
        "text on the way",
    ] = "bert-tiny"


@dataclass(frozen=True)
class MaskedConfig:
    """A model that names hidden tokens: its data, its model and its training."""

    out: Annotated[str, "the run folder: config, tokenizer, checkpoints and log"] = "runs/masked"
    init: Annotated[str | None, "a run of masked to begin with: its weights, its sizes and its tokenizer"] = None
    data: MaskedData = field(default_factory=MaskedData)
    model: MaskedOptions = field(default_factory=MaskedOptions)
    training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(weight_decay=0.01, label_smoothing=0.0, metric="loss")
    )

    def __post_init__(self) -> None:
        check_out(self)
