"""The config of a translator: its data, its model and its training."""

import dataclasses
from dataclasses import field
from typing import Annotated, Any, Literal

from regard.core.options import Range, check_options, config_dataclass
from regard.models.recurrent import RecurrentConfig
from regard.tasks.options import ModelOptions, check_out, derived
from regard.training.config import TrainingConfig


@config_dataclass
class DataConfig:
    """The data: pairs of sentences, and their tokenizers."""

    source: Annotated[
        str | None,
        "training file of source sentences, one per line; plain, .gz or .xz, or - for standard input; without "
        "data.target: a TSV file of pairs",
    ] = None
    target: Annotated[str | None, "file of translations, one per line of data.source"] = None
    generated: Annotated[
        int | None,
        "instead of files: number of English-German pairs to generate, of numbers, dates, times and amounts",
        Range(20),
    ] = None
    columns: Annotated[
        tuple[int, int],
        "columns of source and target in a TSV file, numbered from 0",
        Range(0),
    ] = (0, 1)
    valid_source: Annotated[
        str | None,
        "validation file of source sentences (default: some training pairs are held out)",
    ] = None
    valid_target: Annotated[
        str | None, "file of their translations; without it, data.valid_source is a TSV file of pairs"
    ] = None
    held_out: Annotated[
        int,
        "pairs held out if there is no validation file, at most a tenth of all",
        Range(1),
    ] = 1000
    skip_bad: Annotated[bool, "omit and count bad lines, instead of stopping at the first"] = False
    tokenizer: Annotated[
        Literal["bpe", "units"],
        "bpe: byte pairs learned from the text; units: tokens are separated by spaces already, @@ joins parts of words",
    ] = "bpe"
    vocabulary: Annotated[
        int | None,
        "vocabulary size, at most (default: by the number of pairs, 1,000 to 8,000)",
        Range(5),
    ] = None
    shared: Annotated[bool, "one vocabulary for source and target"] = True
    protect: Annotated[
        bool | None,
        "bpe: learn to copy numbers, addresses, tags and emoji by placeholders in the vocabulary (default: true, "
        "except for generated pairs)",
    ] = None
    maximum_length: Annotated[
        int,
        "longest sentence in tokens; pairs with a longer one are omitted and counted",
        Range(2),
    ] = 256

    def __post_init__(self) -> None:
        check_options(self, "data.")
        if self.protect and self.tokenizer != "bpe":
            raise ValueError(f"data.protect needs data.tokenizer bpe, got {self.tokenizer}: its text is split already")
        for name in ("target", "valid_target"):
            before = name.replace("target", "source")
            if getattr(self, name) is not None and getattr(self, before) is None:
                raise ValueError(f"data.{name} needs data.{before}, the sentences it translates: give both")
        if len(self.columns) != 2:
            raise ValueError(f"data.columns must be two columns, got {list(self.columns)}")
        pairs = (self.source, self.target), (self.valid_source, self.valid_target)
        has_table = any(source is not None and target is None for source, target in pairs)
        if tuple(self.columns) != (0, 1) and not has_table:
            raise ValueError("data.columns needs a TSV file: data.source without data.target")


@derived
class TranslatorOptions(ModelOptions):
    """The model: a preset, and changes to it; options that are not given are those of the preset."""

    predicts = "translation"
    default = "tiny"
    preset: Annotated[
        str | None,
        "mini (two layers, for minutes on a CPU), tiny, base or big (Transformers); lstm, gru, gnmt or deep-att "
        "(recurrent); moe-lstm (with experts); bytenet or convs2s (convolutional) (default: mini on a CPU, tiny on a "
        "GPU)",
    ] = None
    bottleneck: Annotated[
        bool | None, "lstm and gru: no attention, the decoder gets only the last state of the encoder"
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


@config_dataclass
class TranslateConfig:
    """A translator: its data, its model and its training."""

    out: Annotated[str, "run folder to write: config, tokenizer, checkpoints and log"] = "runs/translate"
    data: DataConfig = field(default_factory=DataConfig)
    model: TranslatorOptions = field(default_factory=TranslatorOptions)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        check_out(self)
