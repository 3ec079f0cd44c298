"""Word problems of groups (Merrill et al. 2024, The Illusion of State in State-Space Models, arXiv 2404.08819), and
parity: what needs a state that is updated token by token."""

import functools
import itertools

import torch
from torch import Tensor

from regard.data.tasks.base import Examples, Task, blank_answers, check_options

Permutation = tuple[int, ...]
RECURRENT = "recurrent(cell='gru')"  # which has such a state
GROUPS = ("Z2", "Z60", "S3", "S5", "A5", "A4xZ5")


def word(*, group: str = "S3") -> Task:
    """x_t is an element of the group; asked at every t: y_t = x_1 x_2 ... x_t, where x_1 acts first."""
    check_options(group in GROUPS, f"no group {group!r}; known: {', '.join(GROUPS)}")
    size = len(elements(group))
    draw, options = functools.partial(_draw, group), {"group": group}
    return Task(draw, "causal", size, 1 / size, "word", length=16, reference=RECURRENT, options=options)


def _draw(group: str, batch: int, length: int, generator: torch.Generator) -> Examples:
    table = products(group)
    tokens = torch.randint(len(table), (batch, length), generator=generator)
    answers = blank_answers(tokens)
    so_far = tokens[:, 0]
    answers[:, 0] = so_far
    for t in range(1, length):
        so_far = table[so_far, tokens[:, t]]
        answers[:, t] = so_far
    return Examples(tokens, answers)


def parity(*, shortest: int = 3) -> Task:
    """Bits, between `shortest` and the length of them; the last one is asked for the parity of all."""

    def draw(batch: int, length: int, generator: torch.Generator) -> Examples:
        check_options(length >= shortest, f"parity needs {shortest} tokens or more, got {length}")
        tokens = torch.randint(2, (batch, length), generator=generator)
        counts = torch.randint(shortest, length + 1, (batch, 1), generator=generator)
        keep = torch.arange(length) < counts
        tokens = tokens * keep
        answers = blank_answers(tokens)
        answers.scatter_(1, counts - 1, tokens.sum(1, keepdim=True) % 2)
        return Examples(tokens, answers, keep)

    return Task(draw, "causal", 2, 0.5, "parity", length=40, reference=RECURRENT, options={"shortest": shortest})


@functools.cache
def elements(group: str) -> tuple[Permutation, ...]:
    """The elements of a group as permutations, in the order of their numbers."""
    if group.startswith("Z"):
        n = int(group[1:])
        return tuple(tuple((i + k) % n for i in range(n)) for k in range(n))
    if group == "A4xZ5":
        shifts = [tuple(4 + (i + k) % 5 for i in range(5)) for k in range(5)]
        return tuple((*even, *shift) for even in elements("A4") for shift in shifts)
    every = itertools.permutations(range(int(group[1:])))
    return tuple(p for p in every if group[0] == "S" or _is_even(p))


def _is_even(permutation: Permutation) -> bool:
    return sum(a > b for a, b in itertools.combinations(permutation, 2)) % 2 == 0


@functools.cache
def products(group: str) -> Tensor:
    """[n, n]: the number of the element that acts like a, then b."""
    known = elements(group)
    number = {element: at for at, element in enumerate(known)}
    return torch.tensor([[number[tuple(b[i] for i in a)] for b in known] for a in known])
