"""What a task is. A task is a package with one class `Task` on the class below, and one line in the registry of
tasks/__init__.py (or an entry point of the group `regard.tasks` in somebody else's package)."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import nn

from regard import models
from regard.data.tokenizer import Tokenizer
from regard.tasks.opened import Opened
from regard.training.task import TrainingTask


class Data(Protocol):
    """What a task trains and validates on. The `sha256` among its facts tells whether it is still the same."""

    facts: dict[str, Any]


class Task(TrainingTask, ABC):
    """One kind of run: what its command line, its run folder and the training loop ask of it.

    The class says how data, tokenizers and model come to be. An instance has them all, and what the loop asks for:
    `model`, `batches`, `loss`, `tokens` and `evaluate` (training/task.py).
    """

    name: ClassVar[str]
    about: ClassVar[str]  # one sentence for the help
    examples: ClassVar[tuple[str, ...]]  # command lines
    use: ClassVar[str]  # what to do with a finished run, with {run} for its folder
    config: ClassVar[type]  # a dataclass with out, data, model and training
    predicts: ClassVar[str] = ""  # what its models predict, see regard.models.registry; empty: it builds its own
    metrics: ClassVar[tuple[str, ...]]  # names in the result of `evaluate` that training.metric may be
    cpu_tokens: ClassVar[int] = 4096  # of a batch on a CPU, where nothing is said

    @classmethod
    @abstractmethod
    def read(cls, config: Any) -> Data:
        """The data that a config names."""

    @classmethod
    def plan(cls, config: Any, data: Any) -> tuple[Any, list[str]]:
        """The config of a new run with what was left open chosen by the data, and what to say of it."""
        return config, []

    @classmethod
    @abstractmethod
    def learn(cls, data: Any, config: Any) -> dict[str, Tokenizer]:
        """The tokenizers of a new run, by the names of their files."""

    @classmethod
    @abstractmethod
    def size(cls, config: Any, tokenizers: dict[str, Tokenizer], data: Any) -> Any:
        """The config of the model of a new run."""

    @classmethod
    def build(cls, config: Any, size: Any) -> nn.Module:
        """The model before its first step: drawn at random, where nothing else is said."""
        return models.build(size)

    @abstractmethod
    def __init__(self, config: Any, data: Any, tokenizers: dict[str, Tokenizer], model: nn.Module):
        """Everything ready for the first step, on the model's device."""

    @classmethod
    def open(cls, folder: str | Path, device: str) -> Opened:
        """What the page shows of a run."""
        raise ValueError(f"{folder} is a run of {cls.name!r}, which the page does not show")

    # what the run folder keeps beside config, tokenizers and checkpoints

    def facts(self) -> dict[str, Any]:
        """What has to be known of the task to use the model, for run.json."""
        return {}

    def files(self) -> dict[str, str]:
        """Texts by the names of their files."""
        return {}

    def notes(self) -> list[str]:
        """What is said before the first step."""
        return []
