"""Synthetic tasks, to see what an attention can learn: copy, reverse, recall, listops.

Each gives batches of tokens and of answers, drawn from a generator alone. An answer of IGNORED does not count. Tasks
for a decoder are read from left to right; in those for an encoder every token sees every other.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

IGNORED = -100
SYMBOLS = 16  # that are copied or reversed
KEYS = 8  # that are looked up, with as many values; two layers of softmax learn 8 in 600 updates, and not 16 in 2,000


class Examples(NamedTuple):
    tokens: Tensor  # [B, T]
    answers: Tensor  # [B, T], IGNORED where nothing is asked
    keep: Tensor | None  # [B, T], None: all are real


class Task(NamedTuple):
    """`role` is what the attention must be able to do; `chance` the share of answers a blind guess gets right."""

    draw: Callable[[int, int, torch.Generator], Examples]  # batch, length, generator
    role: Literal["self", "causal"]
    vocabulary: int
    chance: float


def copy(batch: int, length: int, generator: torch.Generator) -> Examples:
    """x1 ... xn | x1 ... xn: behind the bar each symbol must be predicted from n tokens back."""
    n = (length - 1) // 2
    x = torch.randint(SYMBOLS, (batch, n), generator=generator)
    tokens = torch.cat([x, torch.full((batch, 1), SYMBOLS), x], 1)
    answers = torch.full_like(tokens, IGNORED)
    answers[:, n:-1] = x
    return Examples(tokens, answers, None)


def reverse(batch: int, length: int, generator: torch.Generator) -> Examples:
    """x1 ... xn: at each place the symbol of the mirrored place."""
    x = torch.randint(SYMBOLS, (batch, length), generator=generator)
    return Examples(x, x.flip(1), None)


def recall(batch: int, length: int, generator: torch.Generator) -> Examples:
    """k1 v1 k2 v2 ... k: the value that stood behind the key when it came before; asked wherever a key comes again."""
    pairs = length // 2
    keys = torch.randint(KEYS, (batch, pairs), generator=generator)
    values = torch.randint(KEYS, (batch, KEYS), generator=generator).gather(1, keys)
    tokens = torch.stack([keys, KEYS + values], 2).flatten(1)
    before = (keys[:, :, None] == keys[:, None, :]).tril(-1).any(2)
    answers = torch.full_like(tokens, IGNORED)
    answers[:, ::2] = torch.where(before, KEYS + values, IGNORED)
    return Examples(tokens, answers, None)


OPERATORS = ("[MAX", "[MIN", "[MED", "[SM")
LISTOPS = ("<answer>", *OPERATORS, "]", *map(str, range(10)))


def listops(batch: int, length: int, generator: torch.Generator) -> Examples:
    """Nested operations on digits (Nangia and Bowman 2018), at most `length` tokens; the first token is asked for the
    value: maximum, minimum, median (rounded down) or sum modulo ten."""
    tokens, answers = torch.zeros(batch, length, dtype=torch.long), torch.full((batch, length), IGNORED)
    keep = torch.zeros(batch, length, dtype=torch.bool)
    for row in range(batch):
        room = int(torch.randint(length // 4, length, (1,), generator=generator))
        words, value = _expression(max(4, room - 1), 1, generator)
        tokens[row, 1 : len(words) + 1] = torch.tensor([LISTOPS.index(word) for word in words])
        keep[row, : len(words) + 1] = True
        answers[row, 0] = LISTOPS.index(str(value))
    return Examples(tokens, answers, keep)


def _expression(room: int, depth: int, generator: torch.Generator) -> tuple[list[str], int]:
    """An expression of at most `room` tokens and its value."""

    def draw(top: int) -> int:
        return int(torch.randint(top, (1,), generator=generator))

    if room < 4 or (depth > 1 and draw(4)):
        digit = draw(10)
        return [str(digit)], digit
    name = OPERATORS[draw(len(OPERATORS))]
    words, values, left = [name], [], room - 2
    for _ in range(2 + draw(4)):
        if left < 1 or depth > 5:
            break
        part, value = _expression(left, depth + 1, generator)
        words, left = words + part, left - len(part)
        values.append(value)
    values = values or [draw(10)]
    if len(words) == 1:
        words.append(str(values[0]))
    return [*words, "]"], evaluate(name, values)


def evaluate(name: str, values: list[int]) -> int:
    if name == "[MED":
        ordered = sorted(values)
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2
    return {"[MAX": max(values), "[MIN": min(values), "[SM": sum(values) % 10}[name]


TASKS = {
    "copy": Task(copy, "causal", SYMBOLS + 1, 1 / SYMBOLS),
    "reverse": Task(reverse, "self", SYMBOLS, 1 / SYMBOLS),
    "recall": Task(recall, "causal", 2 * KEYS, 1 / KEYS),
    "listops": Task(listops, "self", len(LISTOPS), 0.1),
}
