"""Selective copying and induction (Gu and Dao 2023, Mamba, arXiv 2312.00752)."""

import functools

import torch

from regard.data.tasks.base import Examples, Task, blank_answers, check_options


def selective(*, copied: int = 16, vocabulary: int = 16) -> Task:
    """`copied` symbols at random places among blanks, then `copied` ask tokens: answered in order."""
    check_options(vocabulary >= 4, f"the vocabulary must have 4 tokens or more, got {vocabulary}")
    draw = functools.partial(_draw_selective, copied, vocabulary - 2)
    options = {"copied": copied, "vocabulary": vocabulary}
    return Task(draw, "causal", vocabulary, 1 / (vocabulary - 2), "selective", length=64, options=options)


def _draw_selective(copied: int, symbols: int, batch: int, length: int, generator: torch.Generator) -> Examples:
    room = length - copied
    check_options(room >= copied, f"{copied} symbols need {2 * copied} tokens or more, got {length}")
    x = torch.randint(symbols, (batch, copied), generator=generator)
    places = torch.rand(batch, room, generator=generator).argsort(1)[:, :copied].sort(1).values
    tokens = torch.full((batch, length), symbols)
    tokens.scatter_(1, places, x)
    tokens[:, room:] = symbols + 1
    answers = blank_answers(tokens)
    answers[:, room:] = x
    return Examples(tokens, answers)


def induction(*, symbols: int = 16) -> Task:
    """Random symbols, a special token somewhere and at the end: what followed it the first time."""
    draw = functools.partial(_draw_induction, symbols)
    return Task(draw, "causal", symbols + 1, 1 / symbols, "induction", length=256, options={"symbols": symbols})


def _draw_induction(symbols: int, batch: int, length: int, generator: torch.Generator) -> Examples:
    check_options(length >= 3, f"induction needs 3 tokens or more, got {length}")
    tokens = torch.randint(symbols, (batch, length), generator=generator)
    place = torch.randint(length - 2, (batch, 1), generator=generator)
    tokens.scatter_(1, place, symbols)
    tokens[:, -1] = symbols
    answers = blank_answers(tokens)
    answers[:, -1:] = tokens.gather(1, place + 1)
    return Examples(tokens, answers)
