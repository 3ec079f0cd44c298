"""ListOps (Nangia and Bowman 2018, arXiv 1804.06028): nested operations on digits, short ones and those of the Long
Range Arena."""

import functools

import torch

from regard.data.tasks.base import IGNORED, Examples, Task, check_options
from regard.data.tasks.draws import Draws

DEEPEST, ARGUMENTS, OPERATOR = 10, 10, 0.25  # of the Long Range Arena: depth, most arguments, share of operators
HIDDEN = 0.1  # of the tokens, in self-pretraining
TRIES = 10_000  # expressions of any length, until one fits

OPERATORS = ("[MAX", "[MIN", "[MED", "[SM")
LISTOPS = ("<answer>", *OPERATORS, "]", *map(str, range(10)))


def listops() -> Task:
    """At most `length` tokens; the first token is asked for the value: maximum, minimum, median (rounded down) or sum
    modulo ten."""
    trick = (0.22, "the first operator alone")
    return Task(_draw, "self", len(LISTOPS), 0.1, "listops", trick, length=64, hidden=HIDDEN)


def _draw(batch: int, length: int, generator: torch.Generator) -> Examples:
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


def listops_long(*, shortest: int = 500) -> Task:
    """The expressions of the Long Range Arena (Tay et al. 2020, arXiv 2011.04006): `shortest` tokens or more, depth 10
    and 10 arguments at most. The first token is asked."""
    draw = functools.partial(_draw_long, shortest)
    options = {"shortest": shortest}
    return Task(draw, "self", len(LISTOPS), 0.1, "listops-long", length=2000, hidden=HIDDEN, options=options)


def _draw_long(shortest: int, batch: int, length: int, generator: torch.Generator) -> Examples:
    check_options(shortest < length, f"listops-long needs more than {shortest} tokens, got {length}")
    tokens, answers = torch.zeros(batch, length, dtype=torch.long), torch.full((batch, length), IGNORED)
    keep = torch.zeros(batch, length, dtype=torch.bool)
    draws = Draws(generator)
    for row in range(batch):
        words, value = _fitting(shortest, length - 1, draws)
        tokens[row, 1 : len(words) + 1] = torch.tensor([LISTOPS.index(word) for word in words])
        keep[row, : len(words) + 1] = True
        answers[row, 0] = LISTOPS.index(str(value))
    return Examples(tokens, answers, keep)


def _fitting(shortest: int, longest: int, draws: Draws) -> tuple[list[str], int]:
    """An expression of between `shortest` and `longest` tokens: the first of many that is."""
    for _ in range(TRIES):
        words: list[str] = []
        value = _tree(words, 1, longest, draws)
        if shortest <= len(words) <= longest:
            return words, value
    raise ValueError(f"no expression of {shortest} to {longest} tokens in {TRIES:,} draws: allow a wider range")


def _tree(words: list[str], depth: int, longest: int, draws: Draws) -> int:
    """Appends an expression to the words, and returns its value. A single digit is too short to be asked, so the root
    is an operator. What is too long already is left as it is."""
    if len(words) > longest or (depth > 1 and (depth > DEEPEST or draws() > OPERATOR)):
        digit = draws.below(10)
        words.append(str(digit))
        return digit
    name = OPERATORS[draws.below(len(OPERATORS))]
    words.append(name)
    values = [_tree(words, depth + 1, longest, draws) for _ in range(2 + draws.below(ARGUMENTS - 1))]
    words.append("]")
    return evaluate(name, values)
