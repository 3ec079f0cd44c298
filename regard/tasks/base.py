"""What a task is. A task is a package with one class `Task` on the class below, and one line in the registry of
tasks/__init__.py (or an entry point of the group `regard.tasks` in somebody else's package)."""

import dataclasses
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Protocol

from regard import models
from regard.core.model import Model
from regard.data.tokenizer import Tokenizer
from regard.tasks.opened import Opened, OpenedImages
from regard.training.config import TrainingConfig
from regard.training.task import TrainingTask


def batch_tokens(training: TrainingConfig) -> int:
    """Tokens per batch, which `train` has chosen if the config did not."""
    if training.tokens is None:
        raise ValueError("training.tokens is not chosen yet: give it")
    return training.tokens


class Data(Protocol):
    """The data that a task trains and validates on. The `sha256` among its facts tells whether it is unchanged."""

    @property
    def facts(self) -> dict[str, Any]: ...


class Task(TrainingTask, ABC):
    """One kind of run: what the command line, the run folder and the training loop ask of it.

    The class makes data, tokenizers and model. An instance has them, and what the loop asks for: `model`, `batches`,
    `loss`, `count_tokens` and `evaluate` (training/task.py).
    """

    name: ClassVar[str]
    about: ClassVar[str]  # one sentence for the help
    examples: ClassVar[tuple[str, ...]]  # command lines
    use: ClassVar[str]  # what to do with a finished run, with {run} for its folder
    config: ClassVar[type]  # a dataclass with out, data, model and training
    predicts: ClassVar[str] = ""  # what its models predict, see regard.models.registry; empty: it builds its own
    metrics: ClassVar[tuple[str, ...]]  # names in the result of `evaluate` that training.metric may be
    cpu_tokens: ClassVar[int] = 4096  # default of training.tokens on a CPU
    data_unit: ClassVar[str] = "lines"  # what its data are counted in
    trains_on: ClassVar[tuple[str, ...]] = ()  # settings of its data of which one names what is trained on
    data_files: ClassVar[tuple[str, ...]] = ()  # settings of its data that name files or folders
    test_files: ClassVar[tuple[str, ...]] = ()  # flags of `regard evaluate` that name files or folders

    @classmethod
    @abstractmethod
    def read_data(cls, config: Any) -> Data:
        """Reads the data that a config names."""

    @classmethod
    def complete_config(cls, config: Any, data: Any) -> tuple[Any, list[str]]:
        """The config of a new run with defaults that follow from the data, and lines that tell the user of them."""
        return config, []

    @classmethod
    def choose_batch_size(cls, config: Any, device: str) -> tuple[Any, str | None]:
        """The config with a batch size for a device, cpu or cuda, and a line that tells the user; None: it has one."""
        training = config.training
        if training.tokens is not None:
            return config, None
        tokens = max(cls.cpu_tokens if device == "cpu" else 4096, getattr(config.data, "length", 0))
        note = f"training.tokens {tokens:,}, chosen for a {'CPU' if device == 'cpu' else 'GPU'}"
        return dataclasses.replace(config, training=dataclasses.replace(training, tokens=tokens)), note

    @classmethod
    @abstractmethod
    def train_tokenizers(cls, data: Any, config: Any) -> dict[str, Tokenizer]:
        """The tokenizers of a new run, by the names of their files."""

    @classmethod
    @abstractmethod
    def model_config(cls, config: Any, tokenizers: dict[str, Tokenizer], data: Any) -> Any:
        """The config of the model of a new run."""

    @classmethod
    def build_model(cls, config: Any, model_config: Any) -> Model:
        """The model before its first step; by default with random weights."""
        return models.build(model_config)

    @classmethod
    def init_folder(cls, config: Any) -> str | None:
        """The folder of the run whose weights a new run begins with; None: it begins with random ones."""
        return getattr(config, "init", None)

    @abstractmethod
    def __init__(self, config: Any, data: Any, tokenizers: dict[str, Tokenizer], model: Model):
        """Everything ready for the first step, on the model's device."""

    @classmethod
    def open_for_page(cls, folder: str | Path, device: str) -> Opened | OpenedImages:
        """What the page shows of a run."""
        raise ValueError(f"{folder} is a run of {cls.name!r}, which the page does not show")

    # further contents of the run folder, beside config, tokenizers and checkpoints

    def facts(self) -> dict[str, Any]:
        """Entries of run.json that inference needs."""
        return {}

    def files(self) -> dict[str, str]:
        """Text files, by name."""
        return {}

    def notes(self) -> list[str]:
        """Lines that are shown before the first step."""
        return []
