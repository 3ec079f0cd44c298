"""A needle in noise (after RULER's niah_single_1, Hsieh et al. 2024, arXiv 2404.06654)."""

import functools

import torch

from regard.data.tasks.base import Examples, Task, blank_answers, check_options

DIGITS = 7
NOISE = 12  # words of the sentence that is repeated
TOP = 10  # digits are 0 to 9, then come the words of the noise, then the key words


def needle(*, keys: int = 8) -> Task:
    """One sentence repeated, in it at any depth a key word and seven digits. At the end the key word again: its digits
    are answered. The groups are the quarters of the depth."""
    draw = functools.partial(_draw, keys)
    groups = ("first quarter", "second quarter", "third quarter", "last quarter")
    size = TOP + NOISE + keys
    return Task(draw, "causal", size, 1 / TOP, "needle", groups=groups, length=256, options={"keys": keys})


def _draw(keys: int, batch: int, length: int, generator: torch.Generator) -> Examples:
    room = length - 2 * (DIGITS + 1)
    check_options(room >= 1, f"a needle needs {2 * (DIGITS + 1) + 1} tokens or more, got {length}")
    noise = TOP + torch.arange(room) % NOISE
    depth = torch.randint(room + 1, (batch,), generator=generator)
    key = TOP + NOISE + torch.randint(keys, (batch, 1), generator=generator)
    digits = torch.randint(TOP, (batch, DIGITS), generator=generator)
    planted = torch.cat([key, digits], 1)
    tokens = torch.empty(batch, length, dtype=torch.long)
    for row, at in enumerate(depth.tolist()):
        tokens[row] = torch.cat([noise[:at], planted[row], noise[at:], planted[row]])
    answers = blank_answers(tokens)
    # the last digit is not read: the token before each predicts it
    answers[:, -DIGITS - 1 : -1] = digits
    group = (4 * depth // (room + 1))[:, None].expand(-1, length)
    return Examples(tokens, answers, None, group)
