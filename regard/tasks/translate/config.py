"""The config of a translator: its data, its model and its training."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from regard.core.options import Range, check_options
from regard.models.recurrent import RecurrentConfig
from regard.tasks.options import ModelOptions, check_out, derived
from regard.training.config import TrainingConfig


@dataclass(frozen=True)
class DataConfig:
    """Where the pairs come from, and how text becomes tokens."""

    source: Annotated[
        str | None,
        "file of source sentences, one per line; plain, .gz or .xz, or - for standard input; without a target: a "
        "TSV file",
    ] = None
    target: Annotated[str | None, "file of their translations, line by line"] = None
    generated: Annotated[
        int | None,
        "instead of files: this number of pairs of numbers, dates, times and amounts, English to German, made on "
        "the spot",
        Range(20),
    ] = None
    columns: Annotated[
        tuple[int, int],
        "columns of source and target in a TSV file, the first is 0",
        Range(0),
    ] = (0, 1)
    valid_source: Annotated[
        str | None,
        "file of source sentences to validate on; none: some pairs are held out of the training files",
    ] = None
    valid_target: Annotated[str | None, "file of their translations; without it, valid_source is a TSV file"] = None
    held_out: Annotated[
        int,
        "pairs held out where there is no validation file, at most a tenth of all; none of their sources is trained on",
        Range(1),
    ] = 1000
    skip_bad: Annotated[bool, "leave out bad lines and count them, instead of stopping at the first"] = False
    tokenizer: Annotated[
        Literal["bpe", "units"],
        "bpe: learn byte pairs from the text; units: the text is split by spaces already, @@ where a word continues",
    ] = "bpe"
    vocabulary: Annotated[
        int | None,
        "tokens to learn, at most (default: follows the number of pairs, 1,000 to 8,000)",
        Range(5),
    ] = None
    shared: Annotated[bool, "one vocabulary for source and target"] = True
    protect: Annotated[
        bool | None,
        "bpe: learn to copy what is not language (numbers, addresses, tags, emoji) by placeholders in the "
        "vocabulary (default: true, but for generated pairs, whose numbers are what is learned)",
    ] = None
    maximum_length: Annotated[
        int,
        "longest sentence in tokens; longer pairs are left out and counted",
        Range(2),
    ] = 256

    def __post_init__(self) -> None:
        check_options(self, "data.")
        if self.protect and self.tokenizer != "bpe":
            raise ValueError(f"data.protect needs data.tokenizer bpe, got {self.tokenizer}: its text is split already")
        for name in ("target", "valid_target"):
            before = name.replace("target", "source")
            if getattr(self, name) is not None and getattr(self, before) is None:
                raise ValueError(f"data.{name} is given without data.{before}")
        if len(self.columns) != 2:
            raise ValueError(f"data.columns must be two columns, got {list(self.columns)}")
        pairs = (self.source, self.target), (self.valid_source, self.valid_target)
        has_table = any(source is not None and target is None for source, target in pairs)
        if tuple(self.columns) != (0, 1) and not has_table:
            raise ValueError("data.columns are those of a TSV file, which is a data.source without a data.target")


@derived
class TranslatorOptions(ModelOptions):
    """A preset, and what to change in it: whatever is left out is as the preset says."""

    predicts = "translation"
    default = "tiny"
    preset: Annotated[
        str | None,
        "tiny, base or big (Transformers), lstm or gru (recurrent), or mini, two layers, for minutes on a CPU "
        "(default: mini on a CPU, tiny on a GPU)",
    ] = None
    bottleneck: Annotated[
        bool | None, "lstm and gru: no attention, only the last state of the encoder is handed over"
    ] = None

    def resolve(self, **sizes: Any) -> Any:
        options, preset = dataclasses.replace(self, bottleneck=None), self.find()
        if self.bottleneck:
            if preset.form.config is not RecurrentConfig:
                raise ValueError(f"model.bottleneck is for lstm and gru, not {self.preset or self.default!r}")
            if self.attention is not None:
                raise ValueError("model.bottleneck means no attention: leave model.attention out")
            sizes["attention"] = None
        return super(TranslatorOptions, options).resolve(**sizes)


@dataclass(frozen=True)
class TranslateConfig:
    """A translator: its data, its model and its training."""

    out: Annotated[str, "the run folder: config, tokenizer, checkpoints and log"] = "runs/translate"
    data: DataConfig = field(default_factory=DataConfig)
    model: TranslatorOptions = field(default_factory=TranslatorOptions)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        check_out(self)
