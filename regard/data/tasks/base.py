"""What a generated task is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

IGNORED = -100
MANY = 1024  # numbers, of which sorting all to choose a few takes long


class Examples(NamedTuple):
    """A batch. An answer of IGNORED does not count."""

    tokens: Tensor  # [B, T]
    answers: Tensor  # [B, T], IGNORED where nothing is asked
    keep: Tensor | None = None  # [B, T], None: all are real
    group: Tensor | None = None  # [B, T], what kind of question an answer belongs to, an index of `Task.groups`

    def to(self, device: torch.device | str) -> "Examples":
        """The same on a device."""
        return self._each(lambda part: part.to(device))

    def pinned(self) -> "Examples":
        """The same where a GPU reads it without the host."""
        return self._each(lambda part: part.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Examples":
        tokens, answers, *others = self
        return Examples(change(tokens), change(answers), *(None if part is None else change(part) for part in others))


@dataclass(frozen=True)
class Task:
    """A generator with what a reader of its scores must know. `version` is raised where the examples change."""

    draw: Callable[[int, int, torch.Generator], Examples]  # batch, length, generator
    role: Literal["self", "causal"]  # what the attention must be able to do
    vocabulary: int
    chance: float  # share of answers that a blind guess gets right
    name: str = ""
    shortcut: tuple[float, str] | None = None  # share of answers that a cheap trick gets right, and the trick
    groups: tuple[str, ...] = ()
    length: int = 64  # tokens at which it is usually asked
    next_token: bool = False  # trained on every next token, tested on the answers
    scored: Callable[[str, int, int, torch.Generator], Examples] | None = (
        None  # from the set "valid" or "test", if apart
    )
    hidden: float = 0.15  # share of the tokens that self-pretraining hides
    attention: bool = True  # False: tests parameters, and belongs in no mean over attentions
    reference: str = "softmax"  # spec of a layer that learns it: while that one does not, an order is one of luck
    version: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


def blank_answers(tokens: Tensor) -> Tensor:
    """Answers for these tokens, none of which is asked yet."""
    return torch.full_like(tokens, IGNORED)


def choose_distinct(batch: int, count: int, size: int, generator: torch.Generator) -> Tensor:
    """[batch, count] different numbers below `size` in each row, in random order."""
    if size < MANY or count * count > size:
        return torch.rand(batch, size, generator=generator).argsort(1)[:, :count]
    # few of many: a row with a number twice is drawn again, until none has
    found = torch.randint(size, (batch, count), generator=generator)
    while len(again := (found.sort(1).values.diff(dim=1) == 0).any(1).nonzero()[:, 0]):
        found[again] = torch.randint(size, (len(again), count), generator=generator)
    return found


def check_options(holds: bool, message: str) -> None:
    """Refuses options that no example fits."""
    if not holds:
        raise ValueError(message)
