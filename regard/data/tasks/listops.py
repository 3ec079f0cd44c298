"""ListOps (Nangia and Bowman 2018, arXiv 1804.06028): nested operations on digits, short ones and those of the Long
Range Arena."""

import functools
from typing import NamedTuple

import numpy as np
import torch

from regard.data.tasks.base import IGNORED, Examples, Task, check_options

DEEPEST, ARGUMENTS, OPERATOR = 10, 10, 0.25  # of the Long Range Arena: depth, most arguments, share of operators
HIDDEN = 0.1  # of the tokens, in self-pretraining
TRIES = 2_000  # expressions of any length for each that must fit
CANDIDATES = 4  # expressions that are drawn at a time for each that must fit

OPERATORS = ("[MAX", "[MIN", "[MED", "[SM")
LISTOPS = ("<answer>", *OPERATORS, "]", *map(str, range(10)))
CLOSING, DIGIT = LISTOPS.index("]"), LISTOPS.index("0")


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
    # 0.33 of expressions of 128 to 511 tokens, 0.35 of those of 500 to 1,999
    trick = (0.34, "the first operator alone")
    return Task(
        draw, "self", len(LISTOPS), 0.1, "listops-long", trick, length=2000, hidden=HIDDEN, version=2, options=options
    )


def _draw_long(shortest: int, batch: int, length: int, generator: torch.Generator) -> Examples:
    check_options(shortest < length, f"listops-long needs more than {shortest} tokens, got {length}")
    tokens, answers = np.zeros((batch, length), np.int64), np.full((batch, length), IGNORED)
    keep = np.zeros((batch, length), bool)
    done = tried = 0
    while done < batch:
        if tried > TRIES * batch:
            why = f"no expression of {shortest} to {length - 1} tokens in {tried:,} draws"
            raise ValueError(f"{why}: allow a wider range")
        levels = _grow(CANDIDATES * batch, length - 1, generator)
        tried += CANDIDATES * batch
        sizes = _sizes(levels)
        rows = np.flatnonzero((shortest <= sizes[0]) & (sizes[0] < length))[: batch - done]
        if not len(rows):
            continue
        levels, sizes = _only(levels, sizes, rows)
        filled = slice(done, done + len(rows))
        _write(levels, sizes, tokens[filled])
        answers[filled, 0] = DIGIT + _values(levels)
        keep[filled] = np.arange(length) <= sizes[0][:, None]
        done += len(rows)
    return Examples(torch.from_numpy(tokens), torch.from_numpy(answers), torch.from_numpy(keep))


class Level(NamedTuple):
    """The nodes of one depth of many expressions, in their order: those of an operator follow each other."""

    operator: np.ndarray  # [N] index of OPERATORS, -1: a digit
    digit: np.ndarray  # [N] 0 to 9, of an operator without meaning
    counts: np.ndarray  # [operators] arguments of each, which are the nodes of the next level


def _grow(count: int, longest: int, generator: torch.Generator) -> list[Level]:
    """Expressions, level by level. A single digit is too short to be asked, so a root is an operator. What is too long
    already grows no further."""
    levels: list[Level] = []
    tree, tokens = np.arange(count), np.zeros(count, np.int64)  # which expression a node is of, and their sizes so far
    while len(tree):
        draws = torch.rand(3, len(tree), generator=generator).numpy()
        depth, grows = len(levels) + 1, tokens[tree] <= longest
        branches = grows & (draws[0] <= OPERATOR if depth > 1 else True) & (depth <= DEEPEST)
        operator = np.where(branches, _below(len(OPERATORS), draws[1]), -1)
        counts = 2 + _below(ARGUMENTS - 1, draws[2][branches])
        levels.append(Level(operator, _below(10, draws[2]), counts))
        tokens += np.bincount(tree, 1.0 + branches, count).astype(np.int64)
        tree = np.repeat(tree[branches], counts)
    return levels


def _below(top: int, draws: np.ndarray) -> np.ndarray:
    """Whole numbers from 0 on, from uniform ones."""
    return np.minimum(top - 1, (draws * top).astype(np.int64))


def _first(counts: np.ndarray) -> np.ndarray:
    """Where the arguments of each operator begin in the next level."""
    return np.cumsum(counts) - counts


def _sizes(levels: list[Level]) -> list[np.ndarray]:
    """The number of tokens of each node with all that is in it, by level: an operator has a closing bracket."""
    sizes: list[np.ndarray] = []
    below = np.zeros(0, np.int64)
    for operator, _, counts in reversed(levels):
        size = np.ones(len(operator), np.int64)
        if len(counts):
            size[operator >= 0] = 2 + np.add.reduceat(below, _first(counts))
        sizes.append(size)
        below = size
    return sizes[::-1]


def _only(levels: list[Level], sizes: list[np.ndarray], roots: np.ndarray) -> tuple[list[Level], list[np.ndarray]]:
    """Some of the expressions, and the sizes of their nodes."""
    kept = np.zeros(len(sizes[0]), bool)
    kept[roots] = True
    found: list[Level] = []
    found_sizes: list[np.ndarray] = []
    for (operator, digit, counts), size in zip(levels, sizes, strict=True):
        branches = kept[operator >= 0]
        found.append(Level(operator[kept], digit[kept], counts[branches]))
        found_sizes.append(size[kept])
        kept = np.repeat(branches, counts)
        if not kept.any():
            break
    return found, found_sizes


def _values(levels: list[Level]) -> np.ndarray:
    """The values of the roots, from the deepest level up."""
    below = np.zeros(0, np.int64)
    for operator, digit, counts in reversed(levels):
        value = digit.copy()
        if len(counts):
            value[operator >= 0] = _evaluate_all(operator[operator >= 0], below, counts)
        below = value
    return below


def _evaluate_all(operator: np.ndarray, values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`evaluate` of many operators, whose arguments follow each other."""
    first = _first(counts)
    # sorted by operator, then by value
    ordered = np.sort(10 * np.repeat(np.arange(len(counts)), counts) + values) % 10
    least, most = ordered[first], ordered[first + counts - 1]
    median = (ordered[first + (counts - 1) // 2] + ordered[first + counts // 2]) // 2
    return np.choose(operator, [most, least, median, np.add.reduceat(values, first) % 10])


def _write(levels: list[Level], sizes: list[np.ndarray], tokens: np.ndarray) -> None:
    """Puts each expression into its row of the tokens [B, T], behind the first one."""
    rows, at = np.arange(len(tokens)), np.ones(len(tokens), np.int64)  # of each node: its row, and its place there
    for (operator, digit, counts), size, below in zip(levels, sizes, [*sizes[1:], None], strict=True):
        is_operator = operator >= 0
        tokens[rows, at] = np.where(is_operator, 1 + operator, DIGIT + digit)
        tokens[rows[is_operator], at[is_operator] + size[is_operator] - 1] = CLOSING
        if below is None:
            return
        before = np.cumsum(below) - below
        inside = before - np.repeat(before[_first(counts)], counts)  # tokens of the arguments before it
        rows, at = np.repeat(rows[is_operator], counts), np.repeat(at[is_operator], counts) + 1 + inside
