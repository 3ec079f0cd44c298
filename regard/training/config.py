"""How a model is trained: a section of every config."""

import math
from dataclasses import dataclass
from typing import Literal

from regard.config import renamed
from regard.core.limits import check_bounds


@dataclass(frozen=True)
class TrainingConfig:
    """How a model is trained. Every draw is a function of the seed and the step, so a run can be resumed exactly."""

    steps: int | None = None
    """number of updates (default: as many as the data are good for, within 15 minutes on this machine)"""
    epochs: float | None = None
    """passes over the training data, instead of steps"""
    minutes: float | None = None
    """training time, evaluations and checkpoints included: steps and warm-up are fitted to the speed of this machine"""
    tokens: int | None = None
    """most padded tokens per batch; translate counts the longer side (default: 4096, fewer on a CPU)"""
    accumulate: int = 1
    """batches per update (gradient accumulation); the loss is the mean over all their tokens"""
    learning_rate: float | None = None
    """peak learning rate (default: 0.001); a factor for schedule paper (default: 1, as in the paper)"""
    schedule: Literal["paper", "inverse_root", "cosine", "constant"] = "cosine"
    """shape of the learning rate; paper: width^-0.5 min(step^-0.5, step warmup^-1.5); others follow a linear warm-up"""
    warmup: int | None = None
    """updates of learning-rate warm-up (default: a tenth of the updates, at most 1000; schedule paper: 400 to 4000)"""
    betas: tuple[float, float] = (0.9, 0.98)
    """Adam's betas"""
    epsilon: float = 1e-9
    """Adam's epsilon"""
    weight_decay: float | None = 0.0
    """weight decay, decoupled from the gradient as in AdamW"""
    weight_decay_on: Literal["matrices", "all"] = "matrices"
    """matrices: parameters of two or more dimensions, not biases and norms; all: every parameter"""
    layer_decay: float | None = 1.0
    """learning rate of a layer as a fraction of the rate of the layer above it; the embedding has the lowest"""
    clip: float | None = 1.0
    """largest norm of the gradient; a larger one is scaled down (null: no clipping)"""
    label_smoothing: float = renamed("smoothing", 0.1)
    """label smoothing: the share of probability that is spread evenly over all classes"""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of matrix products on a GPU; weights and sums stay float32"""
    graphs: bool = True
    """on a GPU: capture a CUDA graph of the step for each batch shape and replay it, much faster for small models"""
    compile: bool = False
    """compile the model instead of capturing CUDA graphs: minutes before the first step, faster steps"""
    evaluate_every: int | None = None
    """updates between evaluations, each followed by a checkpoint (default: ten evaluations, fewer if they are slow)"""
    save_every: int | None = None
    """updates between checkpoints (default: as evaluate_every)"""
    log_every: int = 50
    """updates between lines of the log"""
    metric: str = "bleu"
    """validation metric, such as loss or bleu, that picks the best checkpoint and that patience and stop_at read"""
    beam: int = 1
    """translate: beam size of the validation"""
    patience: int | None = None
    """stop after this number of evaluations without a better one"""
    stop_at: float | None = renamed("goal", None)
    """stop as soon as the metric is this good"""
    keep: int = 5
    """number of newest checkpoints to keep, besides the best"""
    average: int = 0
    """number of newest checkpoints to average at the end (at most `keep`)"""
    seed: int = 1
    """random seed of weights, data order and dropout"""
    device: str = "auto"
    """cpu, cuda, cuda:1 ...; auto: a GPU where there is one"""
    threads: int | None = None
    """CPU threads (default: PyTorch's own choice)"""
    deterministic: bool = False
    """on a GPU: deterministic operations only, so that a resumed run equals an uninterrupted one bit for bit"""
    auxiliary: float = 1.0
    """weight of the auxiliary losses that some mechanisms have"""
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
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"training.label_smoothing must be at least 0 and below 1, got {self.label_smoothing}")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ValueError(f"training.learning_rate must be above 0, got {self.learning_rate}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"training.clip must be above 0 or null, got {self.clip}")
