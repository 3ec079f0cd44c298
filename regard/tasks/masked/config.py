"""The config of a masked language model: its data, its model and its training."""

from dataclasses import field
from typing import Annotated, Literal

from regard.core.options import Range, config_dataclass
from regard.tasks.options import ModelOptions, check_out, derived
from regard.tasks.text import LanguageData
from regard.training.config import TrainingConfig


@config_dataclass
class MaskedData(LanguageData):
    """The data: text, its tokenizer, and which tokens are masked."""

    # more choices than the text of a language model has, which pyright takes for an incompatible override: the field is
    # never assigned
    tokenizer: Annotated[  # pyright: ignore[reportIncompatibleVariableOverride]
        Literal["bpe", "uncased", "characters", "bytes", "words", "stems"],
        "bpe: byte pairs learned from the text; uncased: the same on lower-cased text, words and punctuation split; "
        "words: split at spaces, with line ends as words; stems: words that share vectors with words of the same "
        "beginning",
    ] = "bpe"
    masked: Annotated[
        float,
        "share of the tokens to predict: 80 % of them are masked, 10 % replaced by random ones, 10 % unchanged",
        Range(above=0, below=1),
    ] = 0.15
    whole_words: Annotated[bool, "mask whole words instead of single tokens"] = False


@derived
class MaskedOptions(ModelOptions):
    """The model: a preset, and changes to it; options that are not given are those of the preset."""

    predicts = "hidden tokens"
    default = "bert-tiny"
    preset: Annotated[
        str,
        "bert-tiny, bert-mini, bert-small, bert or bert-large; perceiver, funnel or tokenlearner (which shorten the "
        "text inside)",
    ] = "bert-tiny"


@config_dataclass
class MaskedConfig:
    """A masked language model: its data, its model and its training."""

    out: Annotated[str, "run folder to write: config, tokenizer, checkpoints and log"] = "runs/masked"
    init: Annotated[
        str | None, "pretrained run of masked to begin with: its weights, its model options and its tokenizer"
    ] = None
    data: MaskedData = field(default_factory=MaskedData)
    model: MaskedOptions = field(default_factory=MaskedOptions)
    training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(weight_decay=0.01, label_smoothing=0.0, metric="loss")
    )

    def __post_init__(self) -> None:
        check_out(self)
