"""The config of a language model: its data, its model and its training."""

from dataclasses import field
from typing import Annotated

from regard.core.options import config_dataclass
from regard.tasks.options import ModelOptions, check_out, derived
from regard.tasks.text import LanguageData
from regard.training.config import TrainingConfig


@derived
class LanguageOptions(ModelOptions):
    """The model: a preset, and changes to it; options that are not given are those of the preset."""

    predicts = "next token"
    default = "gpt-nano"
    preset: Annotated[
        str,
        "gpt-nano, gpt2, gpt2-medium, gpt2-large or gpt2-xl; modern or smollm2-135m (RMSNorm, SwiGLU, rotary, "
        "grouped-query attention); feedback; perceiver-ar",
    ] = "gpt-nano"


@config_dataclass
class LanguageConfig:
    """A language model: its data, its model and its training."""

    out: Annotated[str, "run folder to write: config, tokenizer, checkpoints and log"] = "runs/language"
    init: Annotated[
        str | None, "pretrained run of language to begin with: its weights, its model options and its tokenizer"
    ] = None
    data: LanguageData = field(default_factory=LanguageData)
    model: LanguageOptions = field(default_factory=LanguageOptions)
    training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(
            betas=(0.9, 0.99),
            epsilon=1e-8,
            weight_decay=0.1,
            label_smoothing=0.0,
            metric="loss",
        )
    )

    def __post_init__(self) -> None:
        check_out(self)
        if self.data.apart and self.training.shares == "tokens":
            raise ValueError(
                "training.shares tokens needs rows of running text, and with data.apart each row is one document: "
                "leave one of them out"
            )
