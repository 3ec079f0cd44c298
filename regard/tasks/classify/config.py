"""The config of a classifier: its data, its model and its training."""

import dataclasses
from dataclasses import field
from typing import Annotated, Any, Literal

from regard.core.options import Range, check_options, config_dataclass
from regard.models.config import ModelConfig
from regard.models.pooling import POOLING, How
from regard.tasks.options import ModelOptions, check_out, derived
from regard.training.config import TrainingConfig


@config_dataclass
class LabelledData:
    """The data: texts, their labels, and the tokenizer."""

    text: Annotated[
        str | None,
        "training file of texts and labels: .csv, .tsv or .jsonl, plain, .gz or .xz; with data.labels: a file of texts "
        "alone, one per line",
    ] = None
    labels: Annotated[str | None, "file of labels, one per line of data.text"] = None
    columns: Annotated[
        tuple[str | int, str | int],
        "columns of text and label: names, or numbers from 0 if a CSV or TSV file has no header",
    ] = ("text", "label")
    valid_text: Annotated[str | None, "validation file, in the form of data.text (default: texts are held out)"] = None
    valid_labels: Annotated[str | None, "file of labels, one per line of data.valid_text"] = None
    held_out: Annotated[
        int,
        "texts held out if there is no validation file, at most a tenth of all",
        Range(1),
    ] = 1000
    held_out_seed: Annotated[
        int | None,
        "seed by which texts are held out, so that runs of different training.seed hold out the same (default: "
        "training.seed)",
        Range(0),
    ] = None
    skip_bad: Annotated[bool, "omit and count bad lines, instead of stopping at the first"] = False
    tokenizer: Annotated[
        Literal["bpe", "uncased", "words", "stems", "characters", "bytes"] | None,
        "bpe: byte pairs learned from the texts; uncased: the same on lower-cased text, words and punctuation split; "
        "words: split at white space; stems: words that share vectors with words of the same beginning; characters; "
        "bytes (default: that of init, or uncased)",
    ] = None
    vocabulary: Annotated[
        int | None,
        "vocabulary size, at most (default: by the number of words, up to 8,000)",
        Range(5),
    ] = None
    maximum_length: Annotated[
        int | None,
        "longest text in tokens; longer ones are cut (default: by the number of texts, up to 512)",
        Range(1),
    ] = None
    cut: Annotated[
        Literal["end", "middle"] | None,
        "where a text that is too long is cut: its end, or its middle, which keeps a quarter of the tokens from its "
        "beginning and the rest from its end (default: middle)",
    ] = None
    blanked: Annotated[
        float | None,
        "share of the tokens that training replaces by the unknown token, drawn anew for each epoch (default: 0.15, "
        "with init 0)",
        Range(0, below=1),
    ] = None

    def __post_init__(self) -> None:
        check_options(self, "data.")
        for name in ("labels", "valid_labels"):
            before = name.replace("labels", "text")
            if getattr(self, name) is not None and getattr(self, before) is None:
                raise ValueError(f"data.{name} needs data.{before}, the texts of these labels: give both")
        if len(self.columns) != 2:
            raise ValueError(f"data.columns must be two, of text and label, got {list(self.columns)}")


@derived
class ClassifierOptions(ModelOptions):
    """The model: a preset, and changes to it; options that are not given are those of the preset. With init, only
    dropout, pooling, seeds and seed_layers can change: the rest comes from that run."""

    predicts = "class"
    default = "tiny"
    preset: Annotated[
        str | None,
        "tiny, base or big (Transformers); perceiver, funnel or tokenlearner (which shorten the text) (default: two "
        "layers of width 64 or 128, by the number of texts)",
    ] = None
    pooling: Annotated[
        How | None,
        f"{POOLING} (default: mean; from scratch without a preset: mean_max; causal: last; funnel: first)",
    ] = None

    def resolve(self, *, body: ModelConfig | None = None, **sizes: Any) -> Any:
        """The config of the model; `body` is the config of a pretrained model whose layers it takes."""
        if body is not None:
            self.changes_of_trained("dropout", "pooling", "seeds", "seed_layers")
            body = dataclasses.replace(body, dropout=body.dropout if self.dropout is None else self.dropout)
            shared = ("width", "heads", "kv_heads", "inner", "layers", "attention", "feedforward", "position", "norm")
            sizes |= {name: getattr(body, name) for name in shared}
            sizes |= {"body": body, "dropout": body.dropout, "causal": body.kind == "decoder"}
        if (self.causal or sizes.get("causal")) and self.pooling is None:
            sizes["pooling"] = "last"
        return super().resolve(**sizes)


@config_dataclass
class ClassifyConfig:
    """A classifier: its data, its model and its training."""

    out: Annotated[str, "run folder to write: config, tokenizer, checkpoints and log"] = "runs/classify"
    init: Annotated[
        str | None,
        "pretrained run of masked or language, whose tokenizer and layers to begin with; english: the encoder bundled "
        "with Regard; none: train from scratch (default: english for English texts, unless a tokenizer or a model "
        "option is given)",
    ] = None
    data: LabelledData = field(default_factory=LabelledData)
    model: ClassifierOptions = field(default_factory=ClassifierOptions)
    training: TrainingConfig = field(
        # the results in docs/classify.md were measured with weight decay on every parameter
        default_factory=lambda: TrainingConfig(
            weight_decay=None, weight_decay_on="all", layer_decay=None, metric="loss", patience=4, keep=1
        )
    )

    def __post_init__(self) -> None:
        check_out(self)
