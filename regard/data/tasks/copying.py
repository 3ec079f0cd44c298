"""Copy and reverse: symbols that must be given back, from a fixed distance or from the mirrored place."""

import functools

import torch

from regard.data.tasks.base import Examples, Task, blank_answers

SYMBOLS = 16  # that are copied or reversed


def copy(*, symbols: int = SYMBOLS) -> Task:
    """x1 ... xn | x1 ... xn: behind the bar each symbol must be predicted from n tokens back."""
    draw = functools.partial(_draw_copy, symbols)
    return Task(draw, "causal", symbols + 1, 1 / symbols, "copy", length=128, options={"symbols": symbols})


def _draw_copy(symbols: int, batch: int, length: int, generator: torch.Generator) -> Examples:
    n = (length - 1) // 2
    x = torch.randint(symbols, (batch, n), generator=generator)
    tokens = torch.cat([x, torch.full((batch, 1), symbols), x], 1)
    answers = blank_answers(tokens)
    answers[:, n:-1] = x
    return Examples(tokens, answers)


def reverse(*, symbols: int = SYMBOLS) -> Task:
    """x1 ... xn: at each place the symbol of the mirrored place."""
    draw = functools.partial(_draw_reverse, symbols)
    return Task(draw, "self", symbols, 1 / symbols, "reverse", length=128, options={"symbols": symbols})


def _draw_reverse(symbols: int, batch: int, length: int, generator: torch.Generator) -> Examples:
    x = torch.randint(symbols, (batch, length), generator=generator)
    return Examples(x, x.flip(1))
