"""Default settings of a classifier, which follow from the texts.

Two recipes, for pretrained layers and for new ones. Both count in epochs, the fewer the more texts there are, and are
limited to the tokens that a machine without a GPU reads in minutes: if these are too few, long texts are cut in their
middle first, and then there are fewer epochs.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from regard.data.tokenizer import Tokenizer
from regard.models.config import ModelConfig
from regard.tasks.classify.config import ClassifyConfig

ENGLISH, NONE = "english", "none"  # values of --init: the bundled encoder, and none
KNOWN = 0.6  # least share of words that are one token of the bundled encoder for texts to count as English
SAMPLE = 1000  # texts that are examined
LENGTHS = (382, 254, 190, 126)  # candidates for the longest text, in tokens without bos and eos
OPERATIONS = {"cpu": 2.8e13, "cuda": 6e14}  # of a training: some minutes of two cores, or of a GPU with little load
MOST_READ = 8_000_000  # tokens to read at most, however small the layers are
EVALUATIONS, EVALUATION_SHARE = 10, 0.1  # at most, and their share of the time
FEW_EPOCHS = 3  # texts are cut shorter until this number of epochs fits
BATCH = 32  # texts of mean length in a batch
WORD = re.compile(r"[^\W\d_]+")
UNIT = re.compile(r"\w+|[^\w\s]")

TUNED_TRAINING = {"weight_decay": 0.05, "layer_decay": 1.0}
SCRATCH_TRAINING = {"learning_rate": 1e-3, "weight_decay": 0.5, "layer_decay": 1.0}
SCRATCH_MODEL = {
    "layers": 2,
    "heads": 4,
    "position": "rotary",
    "norm": "pre",
    "norm_epsilon": 0.1,
    "final_norm": False,
    "scaled_embedding": False,
    "dropout": 0.4,
}


class Pretrained(NamedTuple):
    """The parts of a run of another task that a classifier begins with."""

    tokenizer: Tokenizer
    config: ModelConfig
    length: int | None  # tokens per row that it was trained with


def plan(
    config: ClassifyConfig, texts: Sequence[str], valid: int, *, trained: Pretrained | None, bundled: Pretrained | None
) -> tuple[ClassifyConfig, list[str]]:
    """The config with all default settings, and lines that explain them. `valid` is the number of validation texts,
    `trained` the run that --init names, `bundled` the encoder for English texts if --init names nothing."""
    sample = texts[:: max(1, len(texts) // SAMPLE)]
    init, reason = config.init, ""
    if config.init == NONE:
        init, reason = None, "from scratch: --init none"
    elif config.init is None:
        options = _own_options(config)
        known = 0.0 if options or bundled is None else known_share(sample, bundled.tokenizer)
        if bundled is None:
            reason = "from scratch: this installation of Regard has no bundled encoder"
        elif options:
            reason = f"from scratch: {options} is given; --init english would begin with the bundled encoder"
        elif known < KNOWN:
            reason = (
                f"from scratch: the texts do not look English (the bundled encoder knows {100 * known:.0f} % of their "
                "words); --init english uses it nevertheless"
            )
        else:
            init, trained = ENGLISH, bundled
            reason = (
                f"begins with the bundled English encoder, which knows {100 * known:.0f} % of the words; "
                "--init none trains from scratch"
            )
    config = dataclasses.replace(config, init=init)
    config = _fill(config, "data", _data(config, texts, sample, trained))
    config = _fill(config, "model", _model(config, len(texts), trained))
    lengths = token_lengths(sample, config.data.tokenizer, trained)
    recipe, length = _training(config, len(texts), valid, lengths, trained)
    config = _fill(_fill(config, "data", {"maximum_length": length}), "training", recipe)
    return config, [line for line in (reason, _describe(config)) if line]


def known_share(texts: Sequence[str], tokenizer: Tokenizer) -> float:
    """The share of the words in some texts that are one token each."""
    words = [word for text in texts for word in WORD.findall(text[:1000].lower())][:50_000]
    return sum(len(ids) == 1 for ids in tokenizer.encode_batch(words)) / max(1, len(words))


def token_lengths(texts: Sequence[str], kind: str | None, trained: Pretrained | None) -> list[int]:
    """An estimate of the number of tokens of each text."""
    if trained is not None:
        return [len(ids) for ids in trained.tokenizer.encode_batch(texts)]
    if kind in ("characters", "bytes"):
        return [len(text.encode()) for text in texts]
    # a word of byte pairs has about 1.3 tokens
    return [math.ceil((1.3 if kind in ("bpe", "uncased") else 1.0) * len(UNIT.findall(text))) for text in texts]


def epochs_for(texts: int, trained: bool) -> float:
    """Epochs to train for: the fewer, the more texts there are."""
    most = 10 if trained else 40
    return min(most, max(4.0, most * math.sqrt(500 / max(1, texts))))


def _own_options(config: ClassifyConfig) -> str:
    """The options of a config that contradict the bundled encoder, which has a tokenizer and layers of its own."""
    free = ("dropout", "pooling", "seeds", "seed_layers")
    names = [f"data.{name}" for name in ("tokenizer", "vocabulary") if getattr(config.data, name) is not None]
    names += ["model.preset"] * (config.model.preset is not None)
    return ", ".join(names + [f"model.{name}" for name in config.model.changes() if name not in free])


def _data(
    config: ClassifyConfig, texts: Sequence[str], sample: Sequence[str], trained: Pretrained | None
) -> dict[str, Any]:
    if trained is not None:
        return {"cut": "middle", "blanked": 0.0}
    words = sum(len(UNIT.findall(text)) for text in sample) * len(texts) / max(1, len(sample))
    blanked = 0.15 if config.data.tokenizer in (None, "uncased", "bpe", "words", "stems") else 0.0
    vocabulary = int(min(8000, max(1000, words / 20)))
    return {"tokenizer": "uncased", "vocabulary": vocabulary, "cut": "middle", "blanked": blanked}


def _model(config: ClassifyConfig, count: int, trained: Pretrained | None) -> dict[str, Any]:
    if trained is not None:
        # so few steps need no dropout: on four datasets it lost a point
        pooling = {"pooling": "mean"} if trained.config.kind == "encoder" and not _pools(config) else {}
        return {"dropout": 0.0} | pooling
    if config.model.preset is not None:
        return {}
    width = config.model.width or (64 if count < 3000 else 128)
    found = SCRATCH_MODEL | {"width": width, "inner": 2 * width}
    if not config.model.causal and not _pools(config):
        found["pooling"] = "mean_max"
    if config.model.norm == "post":
        del found["final_norm"]
    return found


def _pools(config: ClassifyConfig) -> bool:
    return config.model.seeds is not None or config.model.seed_layers is not None


def operations_per_token(width: int, inner: int, layers: int) -> float:
    """Operations per token of a training step: a forward pass multiplies and adds once per weight of the layers, a
    backward pass twice."""
    return 6.0 * layers * (4 * width**2 + 2 * width * inner)


def _affordable(config: ClassifyConfig, trained: Pretrained | None) -> float:
    """The number of tokens that a training may read, over all epochs."""
    model, device = config.model, config.training.device
    size = model if trained is None else trained.config
    width, inner, layers = size.width or 128, size.inner or 256, size.layers or 4
    each = operations_per_token(width, inner, sum(layers) if isinstance(layers, list | tuple) else layers)
    kind = "cuda" if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()) else "cpu"
    return min(MOST_READ, OPERATIONS[kind] / each)


def _training(
    config: ClassifyConfig, count: int, valid: int, lengths: Sequence[int], trained: Pretrained | None
) -> tuple[dict[str, Any], int]:
    """The recipe, and the longest text in tokens."""
    training, most = config.training, _affordable(config, trained)
    epochs = training.epochs or epochs_for(count, trained is not None)
    choices = LENGTHS if config.data.maximum_length is None else (config.data.maximum_length,)
    if trained is not None and trained.length is not None and config.data.maximum_length is None:
        choices = [length for length in choices if length <= trained.length - 2] or (trained.length - 2,)
    means = [sum(min(tokens, length) + 2 for tokens in lengths) / max(1, len(lengths)) for length in choices]
    fits = [count * mean * FEW_EPOCHS <= most for mean in means]
    # the longest that fits, or the shortest of all
    index = fits.index(True) if any(fits) else len(fits) - 1
    length, mean = choices[index], means[index]
    epochs = max(1.0, min(epochs, most / (count * mean)))
    texts = BATCH if count >= 2000 else BATCH // 2
    recipe: dict[str, Any] = {"tokens": max(int(texts * mean), length + 2)}
    if training.steps is None and training.epochs is None:
        recipe["epochs"] = round(epochs, 1)
        steps = epochs * count * mean / recipe["tokens"]
        # a forward pass is a third of a step
        evaluations = min(EVALUATIONS, max(4, int(3 * EVALUATION_SHARE * epochs * count / max(1, valid))))
        recipe["evaluate_every"] = max(1, round(steps / evaluations))
    if trained is None:
        return recipe | SCRATCH_TRAINING, length
    # the wider the model, the lower its learning rate: 5e-4 for width 256, 5.6e-5 for BERT's 768
    return recipe | TUNED_TRAINING | {"learning_rate": 5e-4 * (256 / trained.config.width) ** 2}, length


def _fill(config: ClassifyConfig, section: str, values: dict[str, Any]) -> ClassifyConfig:
    """Sets the options of a section that are None."""
    options = getattr(config, section)
    missing = {name: value for name, value in values.items() if getattr(options, name) is None}
    return dataclasses.replace(config, **{section: dataclasses.replace(options, **missing)})


def _describe(config: ClassifyConfig) -> str:
    training = config.training
    long = f"{training.epochs:g} epochs" if training.epochs is not None else f"{training.steps} steps"
    stops = f"early stopping after {training.patience} evaluations without a better {training.metric}"
    return (
        f"{long} in batches of {training.tokens:,} tokens, peak learning rate {training.learning_rate:.2g}; "
        f"{'no early stopping' if training.patience is None else stops}"
    )
