"""What the training loop asks of a task."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from regard.core.model import Model
from regard.training.loss import Loss


class Batches(Protocol):
    """The batches of each epoch. A batch is a function of the seed, the epoch and its index, and of nothing else."""

    def __len__(self) -> int:
        """The number of examples in an epoch."""
        ...

    def count(self, epoch: int, /) -> int:
        """The number of batches in an epoch."""
        ...

    def get(self, epoch: int, index: int, /) -> Any:
        """A NamedTuple of CPU tensors or None, with a method `to(device)`. Its field `indices` has the numbers of its
        examples."""
        ...


class TrainingTask(Protocol):
    """What the loop asks of a task."""

    model: Model
    batches: Batches
    epochs: float = 20  # to train for at most, where no setting says how long to train
    speed_unit: str = "tokens"  # what its speed is counted in

    def prepare(self, batch: Any, /) -> Any:
        """What is done to a batch on the device before processes share its rows, such as mixing them; a NamedTuple of
        tensors [B, ...] or None."""
        return batch

    @abstractmethod
    def loss(self, batch: Any, label_smoothing: float, /) -> Loss:
        """The loss of a prepared batch, summed over its target tokens (of a classifier: over its texts)."""
        ...

    @abstractmethod
    def count_tokens(self, batch: Any, /) -> int:
        """The number of tokens that the loss of a batch is a sum over, without waiting for the device."""
        ...

    def count_tokens_read(self, batch: Any, /) -> int:
        """The number of real tokens in a batch, for the speed in the log."""
        return self.count_tokens(batch)

    def describe_rows(self, rows: list[int], /) -> tuple[str, list[int]]:
        """What an error message calls the examples whose numbers `indices` of a batch has ("lines of FILE"), and their
        numbers there."""
        return "examples", rows

    @abstractmethod
    def evaluate(self, check: Callable[[], None], /) -> tuple[dict[str, float], list[dict[str, str]]]:
        """The validation metrics, `loss` among them, and a few samples. Calls `check` between batches, which may
        raise."""
        ...
