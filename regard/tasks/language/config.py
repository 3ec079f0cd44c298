"""The config of a language model: its data, its model and its training."""

from dataclasses import dataclass, field

from regard.tasks.options import TokenOptions, check_out
from regard.tasks.text import LanguageData
from regard.training.config import TrainingConfig


@dataclass(frozen=True)
class LanguageOptions(TokenOptions):
    """A preset, and what to change in it: whatever is left out is as the preset says."""

    preset: str = "gpt-nano"
    """gpt-nano; gpt2, gpt2-medium, gpt2-large, gpt2-xl; modern, smollm2-135m: RMSNorm, SwiGLU, rotary, shared keys"""


@dataclass(frozen=True)
class LanguageConfig:
    """A language model: its data, its model and its training."""

    out: str = "runs/language"
    """the run folder: config, tokenizer, checkpoints and log"""
    init: str | None = None
    """a run of language to begin with: its weights, its sizes and its tokenizer"""
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
