"""Made-up tasks: each answer follows from the tokens as the definition says; draws depend on the generator alone."""

import pytest
import torch

from regard.data.tasks import IGNORED, LISTOPS, SYMBOLS, TASKS, evaluate


def drawn(name: str, length: int = 33, seed: int = 0, batch: int = 40):
    return TASKS[name].draw(batch, length, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", TASKS)
def test_draws(name):
    one, again, other = drawn(name), drawn(name), drawn(name, seed=1)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not torch.equal(one.tokens, other.tokens)
    assert one.tokens.shape == one.answers.shape
    assert one.tokens.shape[1] <= 33
    assert 0 <= one.tokens.min() <= one.tokens.max() < TASKS[name].vocabulary
    asked = one.answers[one.answers != IGNORED]
    assert 0 <= asked.min() <= asked.max() < TASKS[name].vocabulary
    assert (one.answers != IGNORED).any(1).all()


def test_copy():
    tokens, answers, _, _ = drawn("copy")
    n = 16
    assert (tokens[:, n] == SYMBOLS).all()
    assert torch.equal(tokens[:, :n], tokens[:, n + 1 :])
    # what is asked at a place is the next token, and it stands n places back
    assert torch.equal(answers[:, n:-1], tokens[:, n + 1 :])
    assert (answers[:, :n] == IGNORED).all()
    assert (answers[:, -1] == IGNORED).all()


def test_reverse():
    tokens, answers, _, _ = drawn("reverse")
    assert torch.equal(answers, tokens.flip(1))


def test_recall():
    tokens, answers, _, _ = drawn("recall")
    for row, wanted in zip(tokens.tolist(), answers.tolist(), strict=True):
        known = {}
        for at, token in enumerate(row):
            if at % 2 == 0:
                assert wanted[at] == known.get(token, IGNORED)
            else:
                known[row[at - 1]] = token
                assert wanted[at] == IGNORED


def parsed(words: list[str]) -> int:
    stack = []
    for word in words:
        if word == "]":
            values = []
            while isinstance(stack[-1], int):
                values.append(stack.pop())
            stack.append(evaluate(stack.pop(), values))
        else:
            stack.append(int(word) if word.isdigit() else word)
    (value,) = stack
    return value


def test_listops():
    tokens, answers, keep, _ = drawn("listops", length=64, batch=200)
    values, depths, lengths = [], [], []
    for row, wanted, real in zip(tokens, answers, keep, strict=True):
        words = [LISTOPS[token] for token in row[real].tolist()]
        assert words[0] == "<answer>"
        assert (wanted[1:] == IGNORED).all()
        assert (row[~real] == 0).all()
        value = parsed(words[1:])
        assert LISTOPS[wanted[0]] == str(value)
        values.append(value)
        lengths.append(len(words))
        depths.append(
            max(sum(word[0] == "[" for word in words[:at]) - words[:at].count("]") for at in range(len(words)))
        )
    assert len(set(values)) == 10
    assert max(values.count(value) for value in set(values)) < 80
    assert max(depths) >= 3
    assert min(lengths) < 20 < max(lengths) <= 64


def test_listops_by_hand():
    assert [evaluate(name, [7, 2, 9, 4]) for name in ("[MAX", "[MIN", "[MED", "[SM")] == [9, 2, 5, 2]
    assert evaluate("[MED", [3, 1, 2]) == 2
