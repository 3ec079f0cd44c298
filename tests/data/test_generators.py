"""Generated tasks against slow readers in loops: each answer follows from the tokens as the definition says."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

from regard.data.tasks import BUILDERS, IGNORED, LISTOPS, Task, build, evaluate, given, listops, pathfinder
from regard.data.tasks.base import choose_distinct
from regard.data.tasks.draws import Draws
from regard.data.tasks.groups import elements, products

SMALL = {
    "listops-long": (32, {"shortest": 12}),
    "mqar": (32, {"pairs": 4, "vocabulary": 64}),
    "forgetting": (48, {"pairs": 6, "updates": 3, "vocabulary": 64}),
    "mad-selective": (64, {}),
    "needle": (48, {}),
    "pathfinder": (257, {"side": 16, "paddles": 5}),
}


def drawn(name: str, batch: int = 40, seed: int = 0, **options):
    length, own = SMALL.get(name, (0, {}))
    task = build(name, **(own | options))
    return task, task.draw(batch, length or min(task.length, 40), torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("count", "size"), [(3, 8), (3, 1500), (38, 1500), (39, 1500)])
def test_different_numbers_in_random_order(count, size):
    """Few of many, and many of few: every number is as likely at every place."""
    found = choose_distinct(4000, count, size, torch.Generator().manual_seed(0))
    assert found.shape == (4000, count)
    assert 0 <= found.min() <= found.max() < size
    assert all(len(set(row)) == count for row in found.tolist())
    # the mean of a place is that of all numbers, within five standard errors
    error = size / (12 * 4000) ** 0.5
    torch.testing.assert_close(
        found.double().mean(0), torch.full((count,), (size - 1) / 2).double(), atol=5 * error, rtol=0
    )


@pytest.mark.parametrize("name", BUILDERS)
def test_draws(name):
    (task, one), (_, again), (_, other) = drawn(name), drawn(name), drawn(name, seed=1)
    assert isinstance(task, Task)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not torch.equal(one.tokens, other.tokens)
    assert one.tokens.shape == one.answers.shape
    for part in (one.tokens, one.answers[one.answers != IGNORED]):
        assert 0 <= part.min() <= part.max() < task.vocabulary
    asked = (one.answers != IGNORED).any(1)
    assert asked.all() or name in ("mad-fuzzy", "mad-noisy")
    assert asked.float().mean() > 0.3
    assert name == task.name
    assert set(task.options) == set(BUILDERS[name].__kwdefaults__ or ())


def read_mqar(row: list[int], wanted: list[int], pairs: int, updates: int) -> dict[int, bool]:
    """Checks a row against the definition. Returns the places that are asked, and whether their key was updated."""
    first, last = {}, {}
    context = 2 * (pairs + updates)
    for key, value in zip(row[:context:2], row[1:context:2], strict=True):
        # an update has another value than the one before
        assert last.get(key) != value
        first.setdefault(key, value)
        last[key] = value
    assert len(first) == pairs
    assert len({*first.values()}) == pairs
    assert sum(first[key] != last[key] for key in first) == updates
    asked = [place for place, answer in enumerate(wanted) if answer != IGNORED]
    assert sorted(row[place] for place in asked) == sorted(first)
    for place in asked:
        assert place >= context
        assert place % 2 == 0
        assert wanted[place] == last[row[place]]
    return {place: first[row[place]] != last[row[place]] for place in asked}


@pytest.mark.parametrize("filler", [False, True])
@pytest.mark.parametrize("name", ["mqar", "forgetting"])
def test_mqar(name, filler):
    task, (tokens, answers, _, group) = drawn(name, filler=filler)
    pairs, updates = task.options["pairs"], task.options.get("updates", 0)
    half, context = task.vocabulary // 2, 2 * (pairs + updates)
    for at, (row, wanted) in enumerate(zip(tokens.tolist(), answers.tolist(), strict=True)):
        asked = read_mqar(row, wanted, pairs, updates)
        assert all(1 <= key < half for key in row[:context:2])
        assert all(half <= value < task.vocabulary for value in row[1:context:2])
        assert not updates or {place: bool(group[at, place]) for place in asked} == asked
        assert any(row[place] for place in range(context, len(row)) if place not in asked) == filler


def test_the_example_that_zoology_publishes():
    """That of its generator's docstring: the answer stands where the key is asked."""
    row = [2, 8, 4, 7, 0, 0, 4, 0, 0, 0, 0, 0, 2, 0, 0]
    wanted = [IGNORED] * 6 + [7] + [IGNORED] * 5 + [8] + [IGNORED] * 2
    assert read_mqar(row, wanted, pairs=2, updates=0) == {6: False, 12: False}
    # keys A to D are 1 to 4 here, of which A and C come again; B and D are left as they were
    pairs, updates = [1, 5, 2, 3, 3, 7, 4, 2], [1, 9, 3, 1]
    wanted = [IGNORED] * 12 + [9, IGNORED, 3, IGNORED, 1, IGNORED, 2, IGNORED]
    asked = read_mqar([*pairs, *updates, 1, 0, 2, 0, 3, 0, 4, 0], wanted, pairs=4, updates=2)
    assert asked == {12: True, 14: False, 16: True, 18: False}


def test_mqar_asks_near_by_or_anywhere():
    """Slots have the weight (g + 1)^(power - 1): with power 1 all the same."""

    def first_half(power: float) -> float:
        task = build("mqar", pairs=4, vocabulary=128, power=power)
        _, answers, _, _ = task.draw(400, 100, torch.Generator().manual_seed(0))
        places = (answers != IGNORED).nonzero()[:, 1]
        return float((places < 8 + 46).float().mean())

    assert 0.45 < first_half(1.0) < 0.55
    assert first_half(0.01) > 0.75


def test_mqar_refuses_what_does_not_fit():
    generator = torch.Generator()
    with pytest.raises(ValueError, match="need 32 tokens or more"):
        build("mqar", pairs=8).draw(1, 31, generator)
    with pytest.raises(ValueError, match="fewer than the vocabulary of 64"):
        build("mqar", pairs=8, vocabulary=64).draw(1, 64, generator)
    with pytest.raises(ValueError, match="no option 'keys'; it takes pairs, vocabulary, power, filler"):
        build("mqar", keys=3)
    with pytest.raises(ValueError, match="no generated task 'mqr'"):
        build("mqr")


@pytest.mark.parametrize("name", ["mad-recall", "mad-noisy"])
def test_mad_recall(name):
    task, (tokens, answers, _, _) = drawn(name)
    half = task.options["vocabulary"] // 2
    noisy = 0
    for row, wanted in zip(tokens.tolist(), answers.tolist(), strict=True):
        known = {}
        for at in range(0, len(row), 2):
            key, value = row[at : at + 2]
            assert wanted[at + 1] == IGNORED
            if key >= 2 * half:
                noisy += 1
                assert value >= 2 * half
                assert wanted[at] == IGNORED
                continue
            assert wanted[at] == known.get(key, IGNORED)
            assert known.setdefault(key, value) == value
    share = noisy / (tokens.numel() / 2)
    assert (0.1 < share < 0.3) if name == "mad-noisy" else share == 0


def test_mad_fuzzy():
    task, (tokens, answers, _, _) = drawn("mad-fuzzy")
    half, seen_asked = task.options["vocabulary"] // 2, 0
    for row, wanted in zip(tokens.tolist(), answers.tolist(), strict=True):
        words = [token for token in row if token < 2 * half]
        assert row == [2 * half] * (len(row) - len(words)) + words
        start, known, at = len(row) - len(words), {}, 0
        while at < len(words):
            key = tuple(itertools.takewhile(lambda token: token < half, words[at:]))
            at += len(key)
            value = tuple(itertools.takewhile(lambda token: token >= half, words[at:]))
            asked = [wanted[start + at - 1 + step] for step in range(len(value))]
            if len(key) == 3 and key in known:
                assert known[key] == value
                assert tuple(asked) == value
                seen_asked += 1
            else:
                assert set(asked) <= {IGNORED}
            assert known.setdefault(key, value) == value
            at += len(value)
    assert seen_asked > 10


@pytest.mark.parametrize("name", ["mad-selective", "selective", "mad-compress"])
def test_given_back_in_order(name):
    task, (tokens, answers, _, _) = drawn(name)
    symbols = task.vocabulary - 2
    for row, wanted in zip(tokens.tolist(), answers.tolist(), strict=True):
        said = [answer for answer in wanted if answer != IGNORED]
        assert [token for token in row if token < symbols] == said
        last_symbol = max(at for at, token in enumerate(row) if token < symbols)
        assert min(at for at, answer in enumerate(wanted) if answer != IGNORED) > last_symbol


def test_memorize_has_one_map_for_good():
    task, (tokens, answers, _, _) = drawn("mad-memorize")
    known = {}
    for key, value in zip(tokens[:, ::2].flatten().tolist(), answers[:, 1::2].flatten().tolist(), strict=True):
        assert known.setdefault(key, value) == value
    assert not task.attention
    assert (answers[:, ::2] == IGNORED).all()


def test_induction():
    task, (tokens, answers, _, _) = drawn("induction")
    # of three tokens the first is the only place with another behind it that is not the last
    assert (task.draw(40, 3, torch.Generator().manual_seed(0)).tokens[:, 0] == 16).all()
    for row, wanted in zip(tokens.tolist(), answers.tolist(), strict=True):
        assert row.count(16) == 2
        assert wanted == [IGNORED] * (len(row) - 1) + [row[row.index(16) + 1]]
        assert row[-1] == 16


@pytest.mark.parametrize(("group", "size"), [("Z2", 2), ("S3", 6), ("S5", 120), ("A5", 60), ("Z60", 60), ("A4xZ5", 60)])
def test_groups(group, size):
    known = elements(group)
    assert len(known) == len(set(known)) == size
    table = products(group)
    # every row and every column has each element once, and some element does nothing
    assert all(sorted(line) == list(range(size)) for line in (*table.tolist(), *table.T.tolist()))
    assert torch.arange(size).tolist() in table.tolist()
    task = build("word", group=group)
    tokens, answers, _, _ = task.draw(4, 9, torch.Generator().manual_seed(0))
    for row, wanted in zip(tokens.tolist(), answers.tolist(), strict=True):
        points = list(range(len(known[0])))
        for x, y in zip(row, wanted, strict=True):
            points = [known[x][point] for point in points]
            assert tuple(points) == known[y]
    commutes = torch.equal(table, table.T)
    assert commutes == group.startswith("Z")


def test_parity():
    _, (tokens, answers, keep, _) = drawn("parity")
    lengths = set()
    for row, wanted, real in zip(tokens.tolist(), answers.tolist(), keep.tolist(), strict=True):
        n = sum(real)
        assert real == [True] * n + [False] * (len(row) - n)
        assert [at for at, answer in enumerate(wanted) if answer != IGNORED] == [n - 1]
        assert wanted[n - 1] == sum(row[:n]) % 2
        lengths.add(n)
    assert min(lengths) >= 3
    assert len(lengths) > 10


def test_needle():
    task, (tokens, answers, _, group) = drawn("needle", batch=100)
    depths = set()
    for row, wanted, quarter in zip(tokens.tolist(), answers.tolist(), group.tolist(), strict=True):
        key = row[-8]
        assert key >= 22
        at = row.index(key)
        assert row[at : at + 8] == row[-8:]
        assert wanted == [IGNORED] * (len(row) - 8) + row[-7:] + [IGNORED]
        noise = row[:at] + row[at + 8 : -8]
        assert noise == [10 + place % 12 for place in range(len(noise))]
        assert quarter[0] == 4 * at // (len(noise) + 1)
        depths.add(at)
    assert len(depths) > 20
    assert len(task.groups) == 4


def test_listops_of_the_long_range_arena():
    _, (tokens, answers, keep, _) = drawn("listops-long")
    for row, wanted, real in zip(tokens, answers, keep, strict=True):
        words = [LISTOPS[token] for token in row[real].tolist()][1:]
        assert 12 <= len(words) <= 31
        stack: list = []
        for word in words:
            if word != "]":
                stack.append(int(word) if word.isdigit() else word)
                continue
            values = []
            while isinstance(stack[-1], int):
                values.append(stack.pop())
            assert 2 <= len(values) <= 10
            stack.append(evaluate(stack.pop(), values))
        assert [LISTOPS[wanted[0]]] == [str(value) for value in stack]


def test_long_expressions_are_those_of_the_long_range_arena():
    """A quarter of the arguments are operators, each of the four as often, with 2 to 10 arguments, up to depth 10; the
    lengths reach from end to end."""
    levels = listops._grow(200, 10**9, torch.Generator().manual_seed(0))
    assert len(levels) == 11
    assert [(level.operator >= 0).mean() for level in (levels[0], levels[-1])] == [1, 0]
    for operator, _, counts in levels[4:-1]:
        assert np.bincount(1 + operator) / len(operator) == pytest.approx([0.75, *[0.0625] * 4], abs=0.03)
        assert np.bincount(counts) / len(counts) == pytest.approx([0, 0, *[1 / 9] * 9], abs=0.04)
    task = build("listops-long", shortest=100)
    tokens, answers, keep, _ = task.draw(200, 300, torch.Generator().manual_seed(0))
    depth = ((tokens >= 1) & (tokens <= 4)).int() - (tokens == 5).int()
    assert depth.cumsum(1).max() <= 10
    lengths = keep.sum(1) - 1
    assert 100 <= lengths.min() < 120
    assert 280 < lengths.max() <= 299
    assert len(answers[:, 0].unique()) == 10
    with pytest.raises(ValueError, match="no expression of 1 to 2 tokens in 2,0"):
        build("listops-long", shortest=1).draw(1, 3, torch.Generator().manual_seed(0))


def test_pathfinder_draws_curves_that_keep_their_distance():
    """Read in loops: dashes follow each other, curves do not touch, discs are where the answer says."""
    draws, seen = Draws(torch.Generator().manual_seed(3)), set()
    for _ in range(6):
        curves, discs, joined = pathfinder.draw_scene(32, 14, draws)
        assert [len(curve) for curve in curves] == [14, 14] + [4] * 5
        for curve in curves:
            assert 1 <= curve.min() <= curve.max() <= 31
            for (first, last), (start, end) in itertools.pairwise(curve):
                assert math.dist(first, last) == pytest.approx(pathfinder.PADDLE)
                assert math.dist(last, start) == pytest.approx(pathfinder.GAP)
                turns = [math.atan2(*(b - a)) for a, b in ((first, last), (start, end))]
                turn = (turns[1] - turns[0] + math.pi) % (2 * math.pi) - math.pi
                assert abs(turn) <= pathfinder.TURN + 1e-9
        for one, other in itertools.combinations(curves, 2):
            apart = min(math.dist(a, b) for a in one.reshape(-1, 2) for b in other.reshape(-1, 2))
            # looked at in cells of half a pixel
            assert apart >= pathfinder.NEAR - 1
        assert math.dist(curves[0][0, 0], curves[1][0, 0]) >= pathfinder.APART
        ends = [tuple(curves[0][0, 0]), tuple(curves[0 if joined else 1][-1, 1])]
        assert [tuple(disc) for disc in discs] == ends
        seen.add(joined)
    assert seen == {True, False}


def test_pathfinder_is_drawn_point_by_point():
    """A picture equals one of which every point is looked at in loops."""
    side, draws = 16, Draws(torch.Generator().manual_seed(0))
    scene = pathfinder.draw_scene(side, 5, draws)
    slow = [[0.0] * side for _ in range(side)]
    for y, x, v, u in itertools.product(range(side), range(side), pathfinder.OFFSETS, pathfinder.OFFSETS):
        point, value = (y + v, x + u), 0.0
        for first, last in (dash for curve in scene.curves for dash in curve):
            along = [b - a for a, b in zip(first, last, strict=True)]
            share = sum((p - a) * d for p, a, d in zip(point, first, along, strict=True)) / sum(d * d for d in along)
            nearest = [a + min(1, max(0, share)) * d for a, d in zip(first, along, strict=True)]
            value = pathfinder.CONTRAST if math.dist(point, nearest) <= pathfinder.THICKNESS else value
        if any(math.dist(point, disc) <= pathfinder.RADIUS for disc in scene.discs):
            value = 1.0
        slow[y][x] += value / 4
    torch.testing.assert_close(
        torch.from_numpy(pathfinder.render(scene, side)), torch.tensor(slow, dtype=torch.float64)
    )


def test_tasks_on_files(tmp_path):
    """Text byte by byte and pictures pixel by pixel; what is scored is of other files, or held out."""
    for name, texts in (
        ("train", [f"good {n}" for n in range(30)] + [f"bad {n}" for n in range(10)]),
        ("test", ["bad"]),
    ):
        lines = [json.dumps({"text": text, "label": text.split()[0]}) for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*lines, json.dumps({"text": "good x", "label": "good"})]))
    task = build("lra-text", train=str(tmp_path / "train.jsonl"), test=str(tmp_path / "test.jsonl"))
    found = task.draw(20, 8, torch.Generator().manual_seed(0))
    for row, answer, keep in zip(found.tokens.tolist(), found.answers.tolist(), found.keep.tolist(), strict=True):
        text = bytes(token - 3 for token, is_real in zip(row[1:], keep[1:], strict=True) if is_real)
        assert (row[0], answer[1:]) == (0, [IGNORED] * 7)
        # classes are numbered in the order of their names
        assert answer[0] == 1 + [b"bad", b"good"].index(text.split()[0])
    rows = task.scored("test", 20, 8, torch.Generator().manual_seed(0)).tokens
    assert {bytes(token - 3 for token in row if token >= 3) for row in rows.tolist()} == {b"bad", b"good x"}
    with pytest.raises(ValueError, match="lra-image needs a folder"):
        build("lra-image")
    pixels = np.arange(48, dtype=np.uint8).reshape(1, 3, 4, 4)
    assert given._gray(pixels)[0, 0].tolist() == [13, 14, 15, 16]


def test_the_first_operator_of_a_long_expression_says_so_much_of_its_value():
    task = build("listops-long", shortest=128)
    examples = task.draw(1024, 512, torch.Generator().manual_seed(0))
    first, answers = examples.tokens[:, 1], examples.answers[:, 0]
    right = sum(int(answers[first == operator].bincount().max()) for operator in first.unique())
    share, said = task.shortcut or (0.0, "")
    assert said == "the first operator alone"
    assert right / 1024 == pytest.approx(share, abs=0.03)
