"""The config of a translator: its data, its model and its training."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from regard.core.limits import check_bounds
from regard.models.recurrent import RECURRENT_PRESETS, RecurrentConfig
from regard.models.transformer import PRESETS, ModelConfig
from regard.tasks.options import TokenOptions, check_out
from regard.training.config import TrainingConfig

# Translators that learn in minutes on a CPU: twice the steps of `tiny` in the same time, and layers that bear a high
# learning rate from the start.
QUICK_PRESETS = {"mini": {"width": 128, "heads": 4, "inner": 256, "layers": 2, "norm": "pre"}}


@dataclass(frozen=True)
class DataConfig:
    """Where the pairs come from, and how text becomes tokens."""

    source: str | None = None
    """file of source sentences, one a line; plain, .gz or .xz, or - for standard input; without a target: a TSV file"""
    target: str | None = None
    """file of their translations, line by line"""
    generated: int | None = None
    """instead of files: so many pairs of numbers, dates, times and amounts, English to German, made on the spot"""
    columns: tuple[int, int] = (0, 1)
    """columns of source and target in a TSV file, the first is 0"""
    valid_source: str | None = None
    """file of source sentences to validate on; none: some pairs are held out of the training files"""
    valid_target: str | None = None
    """file of their translations; without it, valid_source is a TSV file"""
    held_out: int = 1000
    """pairs held out where there is no validation file, at most a tenth of all; none of their sources is trained on"""
    skip_bad: bool = False
    """leave out bad lines and count them, instead of stopping at the first"""
    tokenizer: Literal["bpe", "units"] = "bpe"
    """bpe: learn byte pairs from the text; units: the text is split by spaces already, @@ where a word goes on"""
    vocabulary: int | None = None
    """tokens to learn, at most (default: follows the number of pairs, 1,000 to 8,000)"""
    shared: bool = True
    """one vocabulary for source and target"""
    protect: bool | None = None
    """bpe: learn to copy what is not language (numbers, addresses, tags, emoji) by placeholders in the vocabulary
    (default: true, but for generated pairs, whose numbers are what is learned)"""
    maximum_length: int = 256
    """longest sentence in tokens; longer pairs are left out and counted"""

    def __post_init__(self) -> None:
        check_bounds(self, held_out=1, vocabulary=5, maximum_length=2)
        if self.protect and self.tokenizer != "bpe":
            raise ValueError(f"data.protect needs data.tokenizer bpe, got {self.tokenizer}: its text is split already")
        if self.generated is not None:
            check_bounds(self, generated=20)
        for name in ("target", "valid_target"):
            before = name.replace("target", "source")
            if getattr(self, name) is not None and getattr(self, before) is None:
                raise ValueError(f"data.{name} is given without data.{before}")
        if len(self.columns) != 2 or min(self.columns) < 0:
            raise ValueError(f"data.columns must be two columns, counted from 0, got {list(self.columns)}")
        pairs = (self.source, self.target), (self.valid_source, self.valid_target)
        has_table = any(source is not None and target is None for source, target in pairs)
        if tuple(self.columns) != (0, 1) and not has_table:
            raise ValueError("data.columns are those of a TSV file, which is a data.source without a data.target")


@dataclass(frozen=True)
class ModelOptions(TokenOptions):
    """A preset, and what to change in it: whatever is left out is as the preset says."""

    preset: str | None = None
    """tiny, base or big (Transformers), lstm or gru (recurrent), or mini, two layers, for minutes on a CPU
    (default: mini on a CPU, tiny on a GPU)"""
    attention: str | list[str] | None = None
    """spec of the encoder's attention, or a list repeated over the layers; of lstm and gru: from target to source"""
    decoder_attention: str | list[str] | None = None
    """spec of the decoder's own attention (default: as attention)"""
    cross_attention: str | list[str] | None = None
    """spec of the attention from target to source (default: softmax)"""
    bottleneck: bool | None = None
    """lstm and gru: no attention, only the last state of the encoder is handed over"""
    width: int | None = None
    """of the vectors between layers; of lstm and gru: of the embeddings"""
    hidden: int | None = None
    """lstm and gru: width of the state"""
    layers: int | None = None
    """of the encoder, and of the decoder unless decoder_layers says otherwise"""
    decoder_layers: int | None = None
    """of the decoder"""
    decoder_feedforward: str | list[str] | None = None
    """spec of the decoder's feed-forward layers (default: as feedforward)"""
    aligner: bool | None = None
    """one more layer, which learns word alignments beside the translation"""
    input_feeding: bool | None = None
    """lstm and gru: the last attention output is part of the next input"""

    def resolve(self, vocabulary: int, target_vocabulary: int | None) -> ModelConfig | RecurrentConfig:
        """The config of the model, for these vocabularies (None: the target shares the source's)."""
        options = self if self.preset is not None else dataclasses.replace(self, preset="tiny")
        cls = RecurrentConfig if options.preset in RECURRENT_PRESETS else ModelConfig
        sizes: dict[str, Any] = {"vocabulary": vocabulary, "target_vocabulary": target_vocabulary}
        if self.bottleneck:
            if cls is ModelConfig:
                raise ValueError(f"model.bottleneck is for {' and '.join(RECURRENT_PRESETS)}, not {options.preset!r}")
            if self.attention is not None:
                raise ValueError("model.bottleneck means no attention: leave model.attention out")
            sizes["attention"] = None
        if self.bottleneck is not None:
            options = dataclasses.replace(options, bottleneck=None)
        return options.resized(PRESETS | RECURRENT_PRESETS | QUICK_PRESETS, cls, **sizes)


@dataclass(frozen=True)
class TranslateConfig:
    """A translator: its data, its model and its training."""

    out: str = "runs/translate"
    """the run folder: config, tokenizer, checkpoints and log"""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelOptions = field(default_factory=ModelOptions)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        check_out(self)
