"""How a model is trained: a section of every config."""

import math
from dataclasses import dataclass
from typing import Literal

from regard.core.limits import check_bounds


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
        check_bounds(
            self, steps=1, tokens=1, accumulate=1, warmup=0, evaluate_every=1, log_every=1, keep=1, average=0, beam=1
        )
        for name in ("save_every", "patience", "threads"):
            check_bounds(self, **{name: 1})
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
