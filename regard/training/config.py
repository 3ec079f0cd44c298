"""The settings of training, a section of every config."""

from typing import Annotated, Literal

from regard.config import renamed
from regard.core.options import Range, check_options, config_dataclass


@config_dataclass
class TrainingConfig:
    """The training. Every random draw is a function of the seed and the step, so a run can be resumed exactly."""

    steps: Annotated[
        int | None,
        "number of updates (default: by the amount of data, for at most 15 minutes on this machine)",
        Range(1),
    ] = None
    epochs: Annotated[float | None, "passes over the training data, instead of steps", Range(above=0)] = None
    minutes: Annotated[
        float | None,
        "training time, with evaluations and checkpoints; steps and warm-up follow from the speed of this machine",
        Range(above=0),
    ] = None
    tokens: Annotated[
        int | None,
        "most padded tokens per batch; translate counts the longer side (default: 4096, fewer on a CPU)",
        Range(1),
    ] = None
    accumulate: Annotated[
        int,
        "batches per update (gradient accumulation); the loss is the mean over all their tokens",
        Range(1),
    ] = 1
    learning_rate: Annotated[
        float | None,
        "peak learning rate (default: 0.001); a factor for schedule paper (default: 1, as in the paper)",
        Range(above=0),
    ] = None
    schedule: Annotated[
        Literal["paper", "inverse_root", "cosine", "constant"],
        "learning-rate schedule, after a linear warm-up; paper: width^-0.5 min(step^-0.5, step warmup^-1.5)",
    ] = "cosine"
    warmup: Annotated[
        int | None,
        "updates of learning-rate warm-up (default: a tenth of the updates, at most 1000; schedule paper: 400 to 4000)",
        Range(0),
    ] = None
    optimizer: Annotated[
        Literal["adamw", "muon"],
        "optimizer; muon: orthogonal updates of the weight matrices in the layers, AdamW for all other parameters",
    ] = "adamw"
    betas: Annotated[tuple[float, float], "Adam's betas", Range(0, below=1)] = (0.9, 0.98)
    epsilon: Annotated[float, "Adam's epsilon", Range(above=0)] = 1e-9
    weight_decay: Annotated[float | None, "weight decay, decoupled from the gradient as in AdamW", Range(0)] = 0.0
    weight_decay_on: Annotated[
        Literal["matrices", "all"],
        "matrices: parameters of two or more dimensions, not biases and norms; all: every parameter",
    ] = "matrices"
    layer_decay: Annotated[
        float | None,
        "learning rate of a layer as a fraction of that of the layer above it; the embedding has the lowest",
        Range(above=0, most=1),
    ] = 1.0
    clip: Annotated[
        float | None,
        "largest norm of the gradient; larger gradients are scaled down (null: no clipping)",
        Range(above=0),
    ] = 1.0
    label_smoothing: Annotated[
        float,
        "label smoothing: share of the probability that is spread evenly over all classes",
        Range(0, below=1),
    ] = renamed("smoothing", 0.1)
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"],
        "dtype of matrix products on a GPU; weights and sums stay float32",
    ] = "float32"
    graphs: Annotated[
        bool,
        "on a GPU: capture a CUDA graph of the step for each batch shape and replay it; much faster for small models",
    ] = True
    compile: Annotated[
        bool,
        "compile the layers: a minute or more before the first step, then faster steps",
    ] = False
    recompute: Annotated[
        bool,
        "activation checkpointing: layers keep their inputs alone and are computed again in the backward pass; less "
        "memory, slower steps, the same numbers; without CUDA graphs",
    ] = False
    evaluate_every: Annotated[
        int | None,
        "updates between evaluations, each followed by a checkpoint (default: ten evaluations, fewer if they are slow)",
        Range(1),
    ] = None
    save_every: Annotated[int | None, "updates between checkpoints (default: as evaluate_every)", Range(1)] = None
    log_every: Annotated[int, "updates between lines of the log", Range(1)] = 50
    metric: Annotated[
        str,
        "validation metric, such as loss or bleu, for the best checkpoint, patience and stop_at",
    ] = "bleu"
    beam: Annotated[int, "translate: beam size in evaluations", Range(1)] = 1
    patience: Annotated[int | None, "stop after this number of evaluations without a better one", Range(1)] = None
    stop_at: Annotated[float | None, "stop as soon as the metric is this good"] = renamed("goal", None)
    keep: Annotated[int, "number of newest checkpoints to keep, besides the best", Range(1)] = 5
    ema: Annotated[
        float | None,
        "decay of an exponential moving average of the weights, such as 0.9995, which is evaluated, saved and used in "
        "their place (default: none)",
        Range(0, below=1),
    ] = None
    average: Annotated[int, "number of newest checkpoints to average at the end (at most `keep`)", Range(0)] = 0
    seed: Annotated[int, "random seed of weights, data order and dropout", Range(0, below=2**63)] = 1
    device: Annotated[str, "device: cpu, cuda, cuda:1 ...; auto: a GPU if there is one"] = "auto"
    threads: Annotated[int | None, "number of CPU threads (default: chosen by PyTorch)", Range(1)] = None
    processes: Annotated[
        int,
        "number of processes on this machine that share every batch, one per GPU; more machines: torchrun, see "
        "docs/scale.md",
        Range(1),
    ] = 1
    shares: Annotated[
        Literal["rows", "tokens"],
        "several processes: what each gets of a batch, some of its rows, or some tokens of every row (language models "
        "with very long rows)",
    ] = "rows"
    sharded: Annotated[
        bool,
        "several processes: each keeps a shard of weights, gradients and optimizer state (FSDP2), for models that do "
        "not fit on one GPU",
    ] = False
    spread_experts: Annotated[
        bool,
        "with sharded: experts stay where their shard is, and tokens travel to them (all-to-all); otherwise their "
        "weights are gathered",
    ] = False
    restarts: Annotated[
        int, "several processes: number of times to start again from the last checkpoint when one dies", Range(0)
    ] = 3
    timeout: Annotated[
        float, "several processes: seconds to wait for another one before it counts as stuck", Range(above=0)
    ] = 600.0
    deterministic: Annotated[
        bool,
        "on a GPU: deterministic operations only, so that a resumed run equals an uninterrupted one bit for bit",
    ] = False
    auxiliary: Annotated[float, "weight of the auxiliary losses that some mechanisms have"] = 1.0
    tensorboard: Annotated[bool, "write events for TensorBoard if it is installed"] = True

    def __post_init__(self) -> None:
        check_options(self, "training.")
        for other in ("minutes", "epochs"):
            if self.steps is not None and getattr(self, other) is not None:
                raise ValueError(
                    f"training.steps {self.steps} and training.{other} {getattr(self, other):g} both say how long to "
                    "train: give one of them, and null for the other if a config file has it"
                )
        if self.recompute and self.compile:
            raise ValueError(
                "training.recompute does not go with training.compile, which decides itself what is computed again: "
                "leave one of them out"
            )
        if self.spread_experts and not self.sharded:
            raise ValueError("training.spread_experts is for training.sharded true: give both")
        if self.sharded and self.optimizer == "muon":
            raise ValueError(
                "training.optimizer muon needs whole matrices, and training.sharded cuts them: use adamw, or leave "
                "training.sharded out"
            )
        if self.average > self.keep:
            raise ValueError(f"training.average must be at most training.keep ({self.keep}), got {self.average}")
        if len(self.betas) != 2:
            raise ValueError(f"training.betas must be two numbers, got {list(self.betas)}")
