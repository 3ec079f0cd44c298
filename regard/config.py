"""What a run is made of: dataclasses that are at once the config file and the flags of the command line.

`parse` reads a command line: a YAML file first (`--config`), then dotted flags over it. A key that nobody knows is an
error. `from_json` reads back what a run keeps of its config.
"""

import argparse
import dataclasses
import difflib
import functools
import math
import os
import re
import reprlib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from regard.core.files import check_yaml, decoded, parse_yaml, read_bytes
from regard.core.limits import check_sizes
from regard.models.funnel import FunnelConfig
from regard.models.perceiver import PerceiverConfig
from regard.models.pooling import ClassifierConfig, How
from regard.models.recurrent import RECURRENT_PRESETS, RecurrentConfig
from regard.models.tokenlearner import TokenLearnerConfig
from regard.models.transformer import PRESETS, ModelConfig
from regard.spec import describe, use_canonical_names

LONGEST_MESSAGE = 1000  # characters that are shown of what a parser says


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
        _at_least(self, held_out=1, vocabulary=5, maximum_length=2)
        if self.protect and self.tokenizer != "bpe":
            raise ValueError(f"data.protect needs data.tokenizer bpe, got {self.tokenizer}: its text is split already")
        if self.generated is not None:
            _at_least(self, generated=20)
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
class StackOptions:
    """A preset, and what to change in it: whatever is left out is as the preset says."""

    preset: str = "tiny"
    """the sizes to begin with"""
    attention: str | list[str] | None = None
    """spec of the attention, or a list repeated over the layers"""
    position: str | None = None
    """spec of the positions, such as sinusoidal, rotary, alibi"""
    width: int | None = None
    """of the vectors between layers"""
    heads: int | None = None
    """of each attention"""
    kv_heads: int | None = None
    """key and value heads, fewer than heads to share them"""
    inner: int | None = None
    """width inside the feed-forward layers"""
    layers: int | None = None
    """how many"""
    norm: Literal["post", "pre"] | None = None
    """where the norm stands: after the residual as in the paper, or before the sublayer"""
    norm_epsilon: float | None = None
    """added to the variance in each norm: what is much smaller than its root stays small"""
    final_norm: bool | None = None
    """one more norm after the last layer (default: where norm is pre)"""
    feedforward: str | list[str] | None = None
    """spec of the feed-forward layers, or a list repeated over them, such as "dense(activation='gelu')" """
    reversible: bool | None = None
    """layers that are undone in the backward pass, so that their number costs no memory; with norm pre"""
    bias: bool | Literal["inputs"] | None = None
    """of the projections of attention; inputs: of queries, keys and values only"""
    scaled_embedding: bool | None = None
    """token vectors times the root of their width, as in the paper"""
    dropout: float | None = None
    """of the embeddings and of what each sublayer adds"""

    def __post_init__(self) -> None:
        check_sizes(self, "model.")
        use_canonical_names(self)

    def changes(self) -> dict[str, Any]:
        """What is given beside the preset."""
        given = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {name: value for name, value in given.items() if value is not None and name != "preset"}

    def changes_of_trained(self, *free: str) -> dict[str, Any]:
        """What is changed in a model that is trained already: nothing but what is free."""
        changes = self.changes()
        fixed = [name for name in changes if name not in free]
        fixed += ["preset"] if self.preset not in (type(self).preset, StackOptions.preset) else []
        if fixed:
            given = ", ".join(f"model.{name}" for name in fixed)
            raise ValueError(f"{given}: with --init only {', '.join(free)} can change, the rest is as it was trained")
        return changes

    def resized(self, presets: dict[str, dict[str, Any]], cls: type, **sizes: Any) -> Any:
        """The config of a model: the preset, what is changed in it, and sizes that come from elsewhere."""
        if self.preset not in presets:
            raise ValueError(f"model.preset must be one of {', '.join(presets)}, got {self.preset!r}")
        changes = self.changes()
        fields = {item.name for item in dataclasses.fields(cls)}
        foreign = [name for name in changes if name not in fields]
        if foreign:
            raise ValueError(f"preset {self.preset!r} has no model.{', model.'.join(foreign)}")
        return cls(**presets[self.preset] | changes | sizes)


@dataclass(frozen=True)
class TokenOptions(StackOptions):
    """A preset, and what to change in it: whatever is left out is as the preset says. For models that answer with
    tokens."""

    head_width: int | None = None
    """of each head (default: width / heads)"""
    norm_kind: Literal["layer", "rms"] | None = None
    """layer norm, or the root mean square alone (RMSNorm)"""
    normed_embedding: bool | None = None
    """a norm over the sum of token vectors and positions, as in BERT"""
    tied: bool | None = None
    """the output layer is the embedding of the tokens"""
    head: Literal["linear", "transform"] | None = None
    """transform: a dense layer, GELU and a norm before the output layer, as in BERT"""
    head_bias: bool | None = None
    """a number for each token, added to its logit"""


# Translators that learn in minutes on a CPU: twice the steps of `tiny` in the same time, and layers that bear a high
# learning rate from the start.
QUICK_PRESETS = {"mini": {"width": 128, "heads": 4, "inner": 256, "layers": 2, "norm": "pre"}}


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
class TrainingConfig:
    """How a model is trained. Every draw is a function of the seed and the step, so a run can go on exactly."""

    steps: int | None = None
    """updates in all (default: as many as the data are good for, within 15 minutes on this machine)"""
    epochs: float | None = None
    """passes over the training data, instead of steps"""
    minutes: float | None = None
    """time to train for, with evaluations and checkpoints: steps and warm-up are fitted to the speed of this machine"""
    tokens: int | None = None
    """padded tokens of a batch, at most; of translate on the longer of the two sides (default: 4096, on a CPU fewer)"""
    accumulate: int = 1
    """batches an update; the loss is the mean over all their tokens"""
    learning_rate: float | None = None
    """its peak (default: 0.001); of schedule paper a factor (default: 1, as in the paper)"""
    schedule: Literal["paper", "inverse_root", "cosine", "constant"] = "cosine"
    """paper: width^-0.5 min(step^-0.5, step warmup^-1.5); the others rise to learning_rate, then fall or stay"""
    warmup: int | None = None
    """updates in which the learning rate rises (default: a tenth of them, at most 1000; schedule paper: 400 to 4000)"""
    betas: tuple[float, float] = (0.9, 0.98)
    """of Adam"""
    epsilon: float = 1e-9
    """of Adam"""
    weight_decay: float | None = 0.0
    """decoupled from the gradient, as in AdamW"""
    layer_decay: float | None = 1.0
    """learning rate of a layer, as a share of that of the layer above it; that of the embedding is the lowest"""
    clip: float | None = 1.0
    """largest norm of the gradient"""
    smoothing: float = 0.1
    """of the labels"""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """of matrix products on a GPU; weights and sums stay float32"""
    graphs: bool = True
    """on a GPU: record the step of each shape of batch once and replay it, many times faster for small models"""
    compile: bool = False
    """compile the model first, instead of recording: minutes before the first step, faster steps"""
    evaluate_every: int | None = None
    """updates between evaluations, each followed by a checkpoint (default: ten evaluations, fewer if they are slow)"""
    save_every: int | None = None
    """updates between checkpoints (default: as evaluate_every)"""
    log_every: int = 50
    """updates between lines of the log"""
    metric: str = "bleu"
    """of the validation, such as loss or bleu: what makes a checkpoint the best, and what patience and goal look at"""
    beam: int = 1
    """translate: beam of the validation"""
    patience: int | None = None
    """stop after so many evaluations without a better one"""
    goal: float | None = None
    """stop as soon as the metric is this good"""
    keep: int = 5
    """newest checkpoints kept, besides the best"""
    average: int = 0
    """at the end, average so many of the newest checkpoints (at most `keep`)"""
    seed: int = 1
    """of weights, order and dropout"""
    device: str = "auto"
    """cpu, cuda, cuda:1 ...; auto: a GPU where there is one"""
    threads: int | None = None
    """of the CPU (default: PyTorch's own choice)"""
    deterministic: bool = False
    """on a GPU: only operations that give the same bits each time, so that a resumed run equals an uninterrupted one"""
    auxiliary: float = 1.0
    """weight of the second losses that some mechanisms train"""
    tensorboard: bool = True
    """write events for TensorBoard where it is installed"""

    def __post_init__(self) -> None:
        _at_least(
            self, steps=1, tokens=1, accumulate=1, warmup=0, evaluate_every=1, log_every=1, keep=1, average=0, beam=1
        )
        for name in ("save_every", "patience", "threads"):
            _at_least(self, **{name: 1})
        if self.epochs is not None and not self.epochs > 0:
            raise ValueError(f"training.epochs must be above 0, got {self.epochs}")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise ValueError(f"training.minutes must be above 0, got {self.minutes}")
        for other in ("minutes", "epochs"):
            if self.steps is not None and getattr(self, other) is not None:
                raise ValueError(
                    f"training.steps {self.steps} and training.{other} {getattr(self, other):g} both say how long to "
                    "train: give one of them, and null for the other where a config file has it"
                )
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise ValueError(f"training.layer_decay must be above 0 and at most 1, got {self.layer_decay}")
        if self.average > self.keep:
            raise ValueError(f"training.average must be at most training.keep ({self.keep}), got {self.average}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"training.seed must be at least 0 and below 2^63, got {self.seed}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"training.betas must be two numbers from 0 to below 1, got {list(self.betas)}")
        if not self.epsilon > 0 or (self.weight_decay or 0) < 0:
            raise ValueError(
                f"training.epsilon must be above 0 and weight_decay at least 0, got {self.epsilon}, {self.weight_decay}"
            )
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"training.smoothing must be at least 0 and below 1, got {self.smoothing}")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ValueError(f"training.learning_rate must be above 0, got {self.learning_rate}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"training.clip must be above 0 or null, got {self.clip}")


@dataclass(frozen=True)
class TranslateConfig:
    """A translator: its data, its model and its training."""

    out: str = "runs/translate"
    """the run folder: config, tokenizer, checkpoints and log"""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelOptions = field(default_factory=ModelOptions)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        _named(self)


@dataclass(frozen=True)
class LanguageData:
    """Where the text comes from, and how it becomes tokens."""

    text: str | list[str] | None = None
    """file, folder (all files in it) or a list of them; plain, .gz or .xz, or - for standard input"""
    valid: str | list[str] | None = None
    """the same, to validate on; none: the last part of the text is held out"""
    held_out: float = 0.1
    """share of the characters that is held out where there is no validation file"""
    documents: Literal["file", "line", "blank"] = "file"
    """what one document is: a file, a line, or what blank lines separate; each ends in the end token"""
    apart: bool = False
    """true: a row of a batch is of one document, so attention never crosses into another; false: rows are cut from all
    documents one after the other"""
    skip_bad: bool = False
    """leave out bad lines and count them, instead of stopping at the first"""
    tokenizer: Literal["bpe", "characters", "bytes", "words"] = "bpe"
    """bpe: learn byte pairs from the text; words: what spaces separate, and the ends of lines"""
    vocabulary: int = 8000
    """tokens to learn, at most (characters: all there are by default, bytes: always 260)"""
    length: int = 256
    """tokens that are read at a time, the longest context"""

    def __post_init__(self) -> None:
        _at_least(self, vocabulary=5, length=1)
        if not 0 < self.held_out < 1:
            raise ValueError(f"data.held_out must be above 0 and below 1, got {self.held_out}")
        for name in ("text", "valid"):
            value = getattr(self, name)
            if value is not None and (not value or not all(value)):
                raise ValueError(f"data.{name} must name at least one file or folder, got {value!r}")


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
            smoothing=0.0,
            metric="loss",
        )
    )

    def __post_init__(self) -> None:
        _named(self)


@dataclass(frozen=True)
class MaskedData(LanguageData):
    """Where the text comes from, how it becomes tokens, and which of them are hidden."""

    tokenizer: Literal["bpe", "uncased", "characters", "bytes", "words", "stems"] = "bpe"
    """bpe: learn byte pairs from the text; uncased: of small letters, words and signs apart; words: what spaces
    separate, and the ends of lines; stems: words whose vectors share those of their first letters"""
    masked: float = 0.15
    """share of the tokens to name: 80 % of them are hidden, 10 % replaced by others, 10 % stay"""
    whole_words: bool = False
    """choose whole words instead of single tokens"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.masked < 1:
            raise ValueError(f"data.masked must be above 0 and below 1, got {self.masked}")


@dataclass(frozen=True)
class MaskedOptions(TokenOptions):
    """A preset, and what to change in it: whatever is left out is as the preset says."""

    preset: str = "bert-tiny"
    """bert-tiny, bert-mini, bert-small, bert, bert-large"""


@dataclass(frozen=True)
class MaskedConfig:
    """A model that names hidden tokens: its data, its model and its training."""

    out: str = "runs/masked"
    """the run folder: config, tokenizer, checkpoints and log"""
    init: str | None = None
    """a run of masked to begin with: its weights, its sizes and its tokenizer"""
    data: MaskedData = field(default_factory=MaskedData)
    model: MaskedOptions = field(default_factory=MaskedOptions)
    training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(weight_decay=0.01, smoothing=0.0, metric="loss")
    )

    def __post_init__(self) -> None:
        _named(self)


def _named(config: Any) -> None:
    if not config.out.strip():
        raise ValueError("out must name a folder for the run")


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
        _at_least(self, held_out=1, vocabulary=5, maximum_length=1)
        if self.blanked is not None and not 0 <= self.blanked < 1:
            raise ValueError(f"data.blanked must be at least 0 and below 1, got {self.blanked}")
        for name in ("labels", "valid_labels"):
            before = name.replace("labels", "text")
            if getattr(self, name) is not None and getattr(self, before) is None:
                raise ValueError(f"data.{name} is given without data.{before}")
        if len(self.columns) != 2:
            raise ValueError(f"data.columns must be those of text and label, got {list(self.columns)}")


SHORTENING = {
    "perceiver": (PerceiverConfig, {"width": 128, "heads": 4, "inner": 256, "layers": 4, "latents": 64}),
    "funnel": (FunnelConfig, {"width": 128, "heads": 4, "inner": 256, "layers": (2, 2, 2)}),
    "tokenlearner": (TokenLearnerConfig, {"width": 128, "heads": 4, "inner": 256, "layers": 4, "tokens": 8}),
}


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
        default_factory=lambda: TrainingConfig(weight_decay=None, layer_decay=None, metric="loss", patience=4, keep=1)
    )

    def __post_init__(self) -> None:
        _named(self)


def _at_least(config: Any, **least: int) -> None:
    section = next(name for name in ("data", "model", "training") if name in type(config).__name__.lower())
    for name, bound in least.items():
        if getattr(config, name) is not None and getattr(config, name) < bound:
            raise ValueError(f"{section}.{name} must be at least {bound}, got {getattr(config, name)}")
    check_sizes(config, f"{section}.")


def parse(cls: type, argv: list[str], program: str, description: str) -> Any:
    """A config from a command line. --help and --print_config print and exit; bad input raises ValueError."""
    from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter, set_parsing_settings

    class Formatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
        pass

    _check_files(cls, argv)
    _bound_yaml()
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(prog=program, description=description, exit_on_error=False, formatter_class=Formatter)
    parser.add_argument(
        "--config", action="config", help="a recipe, or a YAML file with any of the keys below; flags go over it"
    )
    parser.add_class_arguments(cls, as_group=False)
    try:
        values = parser.parse_args(argv).as_dict()
    except RecursionError as error:
        raise ValueError(f"a value nests too deep; see {program} --help") from error
    except ArgumentError as error:
        message = " ".join(str(error).split())
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[: LONGEST_MESSAGE // 2]} ... {message[-LONGEST_MESSAGE // 2 :]}"
        if message.startswith("Unexpected config"):
            raise ValueError(f"the config is not a YAML file of keys and values; see {program} --help") from error
        wrong = re.search(r'Parser key "([\w.]+)": .*(?:Given|Got) value: (.*)$', message)
        if wrong and wrong[1] in names(cls):
            expected = _described(cls, wrong[1])
            raise ValueError(f"{wrong[1]} must be {expected}, got {wrong[2]!r}; see {program} --help") from error
        unknown = re.search(r"(?:unrecognized arguments: |Key )'?(?:--)?([\w.]+)", message)
        hint = near(unknown[1], names(cls)) if unknown else ""
        raise ValueError(f"{message}{hint}; see {program} --help") from error
    values.pop("config", None)
    return from_json(cls, values)


def _check_files(cls: type, argv: list[str]) -> None:
    """Refuses config files that would not end, or are no text: --config, and those of a section."""
    sections = [name for name, hint in typing.get_type_hints(cls).items() if dataclasses.is_dataclass(hint)]
    for index, word in enumerate(argv):
        flag, _, value = word.partition("=")
        if flag in {f"--{name}" for name in ("config", *sections)}:
            path = value or "".join(argv[index + 1 : index + 2])
            # what is no file is YAML itself, or said to be missing
            if len(path) < 4096 and os.path.exists(path):
                parse_yaml(decoded(read_bytes(path), f"{flag} {path}"), f"{flag} {path}")


@functools.cache
def _bound_yaml() -> None:
    """Has jsonargparse refuse YAML without bounds, in files and in flags."""
    import yaml
    from jsonargparse import get_loader, set_loader

    plain = get_loader("yaml")

    def load(text: str) -> Any:
        check_yaml(text)
        return plain(text)

    set_loader("yaml", load, exceptions=(yaml.YAMLError,))


def names(cls: type, before: str = "") -> list[str]:
    """The dotted names of all fields."""
    found = []
    for name, hint in typing.get_type_hints(cls).items():
        found += names(hint, f"{before}{name}.") if dataclasses.is_dataclass(hint) else [before + name]
    return found


def _described(cls: type, name: str) -> str:
    """In words, what the field of a dotted name takes."""
    hint: Any = cls
    for part in name.split("."):
        hint = typing.get_type_hints(hint)[part]
    return describe(hint).replace("True or False", "true or false").replace("None", "null")


def near(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def from_json(cls: type, values: dict[str, Any]) -> Any:
    """A config from plain values, field by field: a name nobody knows, or a value of the wrong type, is an error."""
    fields = {item.name: item for item in dataclasses.fields(cls)}
    if not isinstance(values, dict):
        raise ValueError(f"expected the fields of {cls.__name__}: {', '.join(fields)}; got {reprlib.repr(values)}")
    unknown = set(values) - set(fields)
    if unknown:
        raise ValueError(f"{cls.__name__} has no {', '.join(sorted(unknown))}; it has {', '.join(fields)}")
    hints = typing.get_type_hints(cls)
    return cls(**{name: _fit(hints[name], value, name) for name, value in values.items()})


def change(config: Any, name: str, value: Any) -> Any:
    """A config with another value of a dotted name."""
    section, _, rest = name.partition(".")
    hints = typing.get_type_hints(type(config))
    if section not in hints:
        raise ValueError(f"{type(config).__name__} has no {name}")
    if rest:
        return dataclasses.replace(config, **{section: change(getattr(config, section), rest, value)})
    return dataclasses.replace(config, **{section: _fit(hints[section], value, section)})


def _fit(hint: Any, value: Any, name: str) -> Any:
    """The value as the type says: JSON has lists for tuples and whole numbers for fractions."""
    if dataclasses.is_dataclass(hint):
        return from_json(hint, value)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for part in arguments:
            try:
                return _fit(part, value, name)
            except ValueError:
                continue
    elif origin is Literal:
        if value in arguments:
            return value
    elif origin is tuple and isinstance(value, (list, tuple)):
        parts = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(parts) == len(value):
            return tuple(_fit(part, item, name) for part, item in zip(parts, value, strict=True))
    elif origin is dict and isinstance(value, dict):
        return value
    elif origin in (list, Sequence) and isinstance(value, list):
        return [_fit(arguments[0], item, name) for item in value]
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ValueError(f"{name} must be {describe(hint)}, got {reprlib.repr(value)}")
