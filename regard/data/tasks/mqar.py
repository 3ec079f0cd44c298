"""Multi-query associative recall (Arora et al. 2023, Zoology, arXiv 2312.04927), and with values that change."""

import functools

import torch
from torch import Tensor

from regard.data.tasks.base import Examples, Task, blank_answers, check_options, choose_distinct

POWER = 0.01


def mqar(*, pairs: int = 8, vocabulary: int = 128, power: float = POWER, filler: bool = True) -> Task:
    """k1 v1 ... kK vK, then the keys again at places drawn with weight (g + 1)^(power - 1): most of them near. At each
    its value is asked. The other places have 0, or with `filler` random tokens."""
    check_options(pairs >= 1 and vocabulary // 2 > pairs, f"{pairs} pairs need a vocabulary above {2 * pairs + 1}")
    draw = functools.partial(_draw, pairs, 0, vocabulary, power, filler)
    trick = (1 / pairs, "guessing among the values seen")
    options = {"pairs": pairs, "vocabulary": vocabulary, "power": power, "filler": filler}
    return Task(draw, "causal", vocabulary, 2 / vocabulary, "mqar", trick, length=8 * pairs, version=2, options=options)


def forgetting(
    *, pairs: int = 8, updates: int = 4, vocabulary: int = 128, power: float = POWER, filler: bool = True
) -> Task:
    """As mqar, but behind the pairs `updates` of the keys come again with another value: the last one counts."""
    check_options(pairs >= 1 and vocabulary // 2 > pairs, f"{pairs} pairs need a vocabulary above {2 * pairs + 1}")
    check_options(0 <= updates <= pairs, f"updates must be from 0 to the {pairs} pairs, got {updates}")
    draw = functools.partial(_draw, pairs, updates, vocabulary, power, filler)
    trick = (1 / (pairs + updates), "guessing among the values seen")
    options = {"pairs": pairs, "updates": updates, "vocabulary": vocabulary, "power": power, "filler": filler}
    length, groups = 8 * pairs, ("kept", "updated")
    return Task(
        draw, "causal", vocabulary, 2 / vocabulary, "forgetting", trick, groups, length, version=2, options=options
    )


def _draw(
    pairs: int,
    updates: int,
    vocabulary: int,
    power: float,
    filler: bool,
    batch: int,
    length: int,
    generator: torch.Generator,
) -> Examples:
    context = 2 * (pairs + updates)
    check_options(
        context + 2 * pairs <= length < vocabulary,
        f"{pairs} pairs and {updates} updates need {context + 2 * pairs} tokens or more, and fewer than the vocabulary "
        f"of {vocabulary}; got {length}",
    )
    half = vocabulary // 2
    keys = 1 + choose_distinct(batch, pairs, half - 1, generator)
    values = choose_distinct(batch, pairs, vocabulary - half, generator)
    tokens = torch.zeros(batch, length, dtype=torch.long)
    tokens[:, : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, half + values
    changed = torch.zeros(batch, pairs, dtype=torch.bool)
    if updates:
        again = choose_distinct(batch, updates, pairs, generator)
        changed.scatter_(1, again, True)
        # another value than its own
        other = torch.randint(1, vocabulary - half, (batch, updates), generator=generator)
        fresh = (values.gather(1, again) + other) % (vocabulary - half)
        values = values.scatter(1, again, fresh)
        tokens[:, 2 * pairs : context : 2] = keys.gather(1, again)
        tokens[:, 2 * pairs + 1 : context : 2] = half + fresh
    at = context + 2 * _slots(batch, pairs, (length - context) // 2, power, generator)  # [B, K]
    answers, group = blank_answers(tokens), torch.zeros_like(tokens)
    tokens.scatter_(1, at, keys)
    answers.scatter_(1, at, half + values)
    group.scatter_(1, at, changed.long())
    if filler:
        noise = torch.randint(vocabulary, tokens.shape, generator=generator)
        tokens = torch.where(tokens == 0, noise, tokens)
    return Examples(tokens, answers, None, group if updates else None)


def _slots(batch: int, count: int, size: int, power: float, generator: torch.Generator) -> Tensor:
    """Different query slots, slot g with weight (g + 1)^(power - 1)."""
    weights = torch.arange(1, size + 1, dtype=torch.float64) ** (power - 1)
    return torch.multinomial(weights.expand(batch, -1), count, generator=generator)
