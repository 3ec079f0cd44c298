"""The config of a classifier: its data, its model and its training."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from regard.core.options import Range, check_options
from regard.models.config import ModelConfig
from regard.models.pooling import POOLING, How
from regard.tasks.options import ModelOptions, check_out, derived
from regard.training.config import TrainingConfig


@dataclass(frozen=True)
class LabelledData:
    """Where texts and their labels come from, and how text becomes tokens."""

    text: Annotated[
        str | None,
        "file of texts and labels: .csv, .tsv or .jsonl, plain, .gz or .xz; with labels: of texts alone, one per line",
    ] = None
    labels: Annotated[str | None, "file of their labels, line by line"] = None
    columns: Annotated[
        tuple[str | int, str | int],
        "columns of text and label: names, or numbers from 0 where a CSV or TSV file has no line of names",
    ] = ("text", "label")
    valid_text: Annotated[str | None, "file to validate on, as text; none: some texts are held out"] = None
    valid_labels: Annotated[str | None, "file of their labels, as labels"] = None
    held_out: Annotated[
        int,
        "texts held out where there is no validation file, at most a tenth of all; none of them is trained on",
        Range(1),
    ] = 1000
    skip_bad: Annotated[bool, "leave out bad lines and count them, instead of stopping at the first"] = False
    tokenizer: Annotated[
        Literal["bpe", "uncased", "words", "stems", "characters", "bytes"] | None,
        "bpe: learn byte pairs from the text; uncased: of small letters, words and signs apart; words: what white"
        " space separates; stems: words whose vectors share those of their first letters; or characters; or bytes"
        " (default: that of init, or uncased)",
    ] = None
    vocabulary: Annotated[
        int | None,
        "tokens to learn, at most (default: follows the number of words, up to 8,000)",
        Range(5),
    ] = None
    maximum_length: Annotated[
        int | None,
        "longest text in tokens; what is longer is cut (default: follows the number of texts, up to 512)",
        Range(1),
    ] = None
    cut: Annotated[
        Literal["end", "middle"] | None,
        "what a text that is too long loses: its end, or its middle, so that a quarter is of its beginning and "
        "the rest of its end (default: middle)",
    ] = None
    blanked: Annotated[
        float | None,
        "share of the tokens that training replaces by the unknown one, drawn anew each time a text comes "
        "(default: 0.15, with init 0)",
        Range(0, below=1),
    ] = None

    def __post_init__(self) -> None:
        check_options(self, "data.")
        for name in ("labels", "valid_labels"):
            before = name.replace("labels", "text")
            if getattr(self, name) is not None and getattr(self, before) is None:
                raise ValueError(f"data.{name} is given without data.{before}")
        if len(self.columns) != 2:
            raise ValueError(f"data.columns must be those of text and label, got {list(self.columns)}")


@derived
class ClassifierOptions(ModelOptions):
    """A preset, and what to change in it: whatever is left out is as the preset says. With init: only dropout, pooling,
    seeds and seed_layers; the rest comes from that run."""

    predicts = "class"
    default = "tiny"
    preset: Annotated[
        str | None,
        "tiny, base or big (Transformers), perceiver, funnel or tokenlearner (which shorten the text); default: two "
        "layers of width 64 to 128, which follows the number of texts",
    ] = None
    pooling: Annotated[
        How | None,
        f"{POOLING} (default: mean; from scratch without a preset: mean_max; of causal layers: last; of funnel: first)",
    ] = None

    def resolve(self, *, body: ModelConfig | None = None, **sizes: Any) -> Any:
        """The config of the model; a `body` is that of a trained model, whose layers it takes."""
        if body is not None:
            self.changes_of_trained("dropout", "pooling", "seeds", "seed_layers")
            body = dataclasses.replace(body, dropout=body.dropout if self.dropout is None else self.dropout)
            shared = ("width", "heads", "kv_heads", "inner", "layers", "attention", "feedforward", "position", "norm")
            sizes |= {name: getattr(body, name) for name in shared}
            sizes |= {"body": body, "dropout": body.dropout, "causal": body.kind == "decoder"}
        if (self.causal or sizes.get("causal")) and self.pooling is None:
            sizes["pooling"] = "last"
        return super().resolve(**sizes)


@dataclass(frozen=True)
class ClassifyConfig:
    """A classifier: its data, its model and its training."""

    out: Annotated[str, "the run folder: config, tokenizer, checkpoints and log"] = "runs/classify"
    init: Annotated[
        str | None,
        "a run of masked or language whose tokenizer and layers to begin with; english: the encoder that is "
        "bundled with Regard; none: train from scratch (default: english where the texts are, unless a tokenizer "
        "or sizes are given)",
    ] = None
    data: LabelledData = field(default_factory=LabelledData)
    model: ClassifierOptions = field(default_factory=ClassifierOptions)
    training: TrainingConfig = field(
        # what docs/classify.md publishes was measured with a decay of every parameter
        default_factory=lambda: TrainingConfig(
            weight_decay=None, weight_decay_on="all", layer_decay=None, metric="loss", patience=4, keep=1
        )
    )

    def __post_init__(self) -> None:
        check_out(self)
