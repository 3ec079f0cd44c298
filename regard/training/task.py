"""What the training loop asks of a task."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from regard.training.loss import Loss


class Batches(Protocol):
    """The batches of an epoch, by their index: a function of nothing but the seed, the epoch and the index."""

    def count(self, epoch: int) -> int: ...

    def get(self, epoch: int, index: int) -> Any:
        """A NamedTuple of tensors or None on the host, with `to(device)`; `index` among them says which examples."""


class TrainingTask(Protocol):
    """What the loop asks of a task."""

    model: nn.Module
    batches: Batches
    epochs: float = 20  # that the data are good for, where nothing says how long to train

    @abstractmethod
    def loss(self, batch: Any, label_smoothing: float) -> Loss:
        """Sums over what is counted in a batch, tokens for the most part."""

    @abstractmethod
    def tokens(self, batch: Any) -> int:
        """How many the loss of the batch is a sum over, known to the host."""

    def tokens_read(self, batch: Any) -> int:
        """Real tokens of a batch, for the speed: those of the loss, where it is a sum over all that is read."""
        return self.tokens(batch)

    def named(self, rows: list[int]) -> tuple[str, list[int]]:
        """What a message calls the rows that `index` of a batch has, and their numbers."""
        return "examples", rows

    @abstractmethod
    def evaluate(self, check: Callable[[], None]) -> tuple[dict[str, float], list[dict[str, str]]]:
        """Metrics of the validation, `loss` among them, and a few samples; calls `check` often, which may raise."""
