"""The config of a classifier: its data, its model and its training."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from regard.core.limits import check_bounds
from regard.models.funnel import FunnelConfig
from regard.models.perceiver import PerceiverConfig
from regard.models.pooling import ClassifierConfig, How
from regard.models.tokenlearner import TokenLearnerConfig
from regard.models.transformer import PRESETS, ModelConfig
from regard.tasks.options import StackOptions, check_out
from regard.training.config import TrainingConfig

SHORTENING = {
    "perceiver": (PerceiverConfig, {"width": 128, "heads": 4, "inner": 256, "layers": 4, "latents": 64}),
    "funnel": (FunnelConfig, {"width": 128, "heads": 4, "inner": 256, "layers": (2, 2, 2)}),
    "tokenlearner": (TokenLearnerConfig, {"width": 128, "heads": 4, "inner": 256, "layers": 4, "tokens": 8}),
}


@dataclass(frozen=True)
class LabelledData:
    """Where texts and their labels come from, and how text becomes tokens."""

    text: str | None = None
    """file of texts and labels: .csv, .tsv or .jsonl, plain, .gz or .xz; with labels: of texts alone, one a line"""
    labels: str | None = None
    """file of their labels, line by line"""
    columns: tuple[str | int, str | int] = ("text", "label")
    """of text and label: names, or numbers from 0 where a CSV or TSV file has no line of names"""
    valid_text: str | None = None
    """file to validate on, as text; none: some texts are held out"""
    valid_labels: str | None = None
    """file of their labels, as labels"""
    held_out: int = 1000
    """texts held out where there is no validation file, at most a tenth of all; none of them is trained on"""
    skip_bad: bool = False
    """leave out bad lines and count them, instead of stopping at the first"""
    tokenizer: Literal["bpe", "uncased", "words", "stems", "characters", "bytes"] | None = None
    """bpe: learn byte pairs from the text; uncased: of small letters, words and signs apart; words: what white space
    separates; stems: words whose vectors share those of their first letters; or characters; or bytes (default: that of
    init, or uncased)"""
    vocabulary: int | None = None
    """tokens to learn, at most (default: follows the number of words, up to 8,000)"""
    maximum_length: int | None = None
    """longest text in tokens; what is longer is cut (default: follows the number of texts, up to 512)"""
    cut: Literal["end", "middle"] | None = None
    """what a text that is too long loses: its end, or its middle, so that a quarter is of its beginning and the rest of
    its end (default: middle)"""
    blanked: float | None = None
    """share of the tokens that training replaces by the unknown one, drawn anew each time a text comes (default: 0.15,
    with init 0)"""

    def __post_init__(self) -> None:
        check_bounds(self, held_out=1, vocabulary=5, maximum_length=1)
        if self.blanked is not None and not 0 <= self.blanked < 1:
            raise ValueError(f"data.blanked must be at least 0 and below 1, got {self.blanked}")
        for name in ("labels", "valid_labels"):
            before = name.replace("labels", "text")
            if getattr(self, name) is not None and getattr(self, before) is None:
                raise ValueError(f"data.{name} is given without data.{before}")
        if len(self.columns) != 2:
            raise ValueError(f"data.columns must be those of text and label, got {list(self.columns)}")


@dataclass(frozen=True)
class ClassifierOptions(StackOptions):
    """A preset, and what to change in it: whatever is left out is as the preset says. With init: only dropout, pooling,
    seeds and seed_layers; the rest comes from that run."""

    preset: str | None = None
    """tiny, base or big (Transformers), perceiver, funnel or tokenlearner (which shorten the text); default: two layers
    of width 64 to 128, which follows the number of texts"""
    layers: int | list[int] | None = None
    """how many; of funnel: in each block"""
    causal: bool | None = None
    """a token sees those before it only, as in a decoder"""
    pooling: How | None = None
    """what is read: pma (learned seeds attend to all tokens), their mean, max, mean_max (both), root (their sum over
    the root of their number), the first or the last (default: mean; from scratch without a preset: mean_max; of causal
    layers: last; of funnel: first)"""
    seeds: int | None = None
    """of pma: vectors that it leaves"""
    seed_layers: int | None = None
    """of pma: layers of self-attention among these vectors"""
    latents: int | None = None
    """perceiver: vectors that read the text"""
    tokens: int | None = None
    """tokenlearner: learnt tokens"""

    def resolve(self, vocabulary: int, classes: int, body: ModelConfig | None = None, *, stems: int = 0) -> Any:
        """The config of the model; a `body` is that of a trained model, whose layers it takes."""
        sizes: dict[str, Any] = {"vocabulary": vocabulary, "classes": classes}
        if stems:
            if self.preset in SHORTENING:
                raise ValueError(f"data.tokenizer stems is for tiny, base and big, not for preset {self.preset!r}")
            sizes["stems"] = stems
        if body is not None:
            self.changes_of_trained("dropout", "pooling", "seeds", "seed_layers")
            body = dataclasses.replace(body, dropout=body.dropout if self.dropout is None else self.dropout)
            shared = ("width", "heads", "kv_heads", "inner", "layers", "attention", "feedforward", "position", "norm")
            sizes |= {name: getattr(body, name) for name in shared}
            sizes |= {"body": body, "dropout": body.dropout, "causal": body.kind == "decoder"}
        cls = SHORTENING[self.preset][0] if self.preset in SHORTENING else ClassifierConfig
        options = self
        if cls is FunnelConfig and isinstance(self.layers, list):
            sizes["layers"], options = tuple(self.layers), dataclasses.replace(self, layers=None)
        if (self.causal or sizes.get("causal")) and self.pooling is None:
            sizes["pooling"] = "last"
        if options.preset is None:
            options = dataclasses.replace(options, preset="tiny")
        known = PRESETS | {name: sizes for name, (_, sizes) in SHORTENING.items()}
        return options.resized(known, cls, **sizes)


@dataclass(frozen=True)
class ClassifyConfig:
    """A classifier: its data, its model and its training."""

    out: str = "runs/classify"
    """the run folder: config, tokenizer, checkpoints and log"""
    init: str | None = None
    """a run of masked or language whose tokenizer and layers to begin with; english: the encoder that is bundled with
    Regard; none: train from scratch (default: english where the texts are, unless a tokenizer or sizes are given)"""
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
