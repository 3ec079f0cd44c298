"""Associative recall: the value that stood behind a key when it came before."""

import functools

import torch

from regard.data.tasks.base import IGNORED, Examples, Task, blank_answers

KEYS = 8  # that are looked up, with as many values; two layers of softmax learn 8 in 600 updates, and not 16 in 2,000


def recall(*, keys: int = KEYS) -> Task:
    """k1 v1 k2 v2 ... k: the value that stood behind the key when it came before; asked wherever a key comes again."""
    draw = functools.partial(_draw, keys)
    # of 8 keys in 64 tokens about three values are likely enough to be guessed among
    trick = (0.3, "guessing among the values seen") if keys == KEYS else None
    return Task(draw, "causal", 2 * keys, 1 / keys, "recall", shortcut=trick, length=64, options={"keys": keys})


def _draw(keys: int, batch: int, length: int, generator: torch.Generator) -> Examples:
    pairs = length // 2
    asked = torch.randint(keys, (batch, pairs), generator=generator)
    values = torch.randint(keys, (batch, keys), generator=generator).gather(1, asked)
    tokens = torch.stack([asked, keys + values], 2).flatten(1)
    before = (asked[:, :, None] == asked[:, None, :]).tril(-1).any(2)
    answers = blank_answers(tokens)
    answers[:, ::2] = torch.where(before, keys + values, IGNORED)
    return Examples(tokens, answers)
