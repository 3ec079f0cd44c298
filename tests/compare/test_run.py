"""Filling a table with planted contestants and their clock: rounds, groups, kills, limits, and what is said of it."""

import dataclasses
import json
import math
import random
import signal

import pytest
from planted import Planted, World, survived

from regard.compare import run
from regard.compare.measure import CannotMeasure
from regard.compare.plan import CostPlan
from regard.compare.question import BASES, code_of
from regard.compare.results import NOT_RUN, Results
from regard.compare.store import Folder

SPECS = ("linear", "local(window=8)", "efficient", "dot", "additive", "rfa", "predictive", "entmax")
SECONDS = {"softmax": 1.0, "linear": 0.1, "local(window=8)": 0.2, "efficient": 0.3, "dot": 1.0, "additive": 4.0}
SECONDS |= {"rfa": 0.5, "predictive": 0.7, "entmax": 2.0, "multiplicative": 1.0}


def plan(*specs: str, minutes: float = 600, **more) -> CostPlan:
    sizes = {"lengths": (64,), "width": 16, "heads": 2, "threads": 1} | more
    return CostPlan(specs=specs or SPECS, minutes=minutes, **sizes)


def by_spec(results: Results) -> dict[str, dict]:
    return {row["spec"]: row for row in results.rows}


def test_all_rows_are_measured_against_softmax_in_groups_of_six(tmp_path):
    world, folder = World(SECONDS), Folder(tmp_path)
    world.fill(plan(), folder)
    results = Results(plan(), folder)
    assert {spec: round(row["train_ratio"], 6) for spec, row in by_spec(results).items()} == {
        spec: SECONDS[spec] for spec in ("softmax", *SPECS)
    }
    assert world.most_alive == 6
    assert world.alive == 0
    # softmax plays in both groups, is counted once, and each round has a turn of each
    assert world.prepared.count("softmax") == 2
    assert len({*world.prepared}) == 9
    assert world.turns.count("linear") == run.MIN_ROUNDS
    first = world.turns[:6]
    assert world.turns[6:12] == first[::-1]


def test_the_rivals_of_a_group_start_side_by_side_and_all_end(tmp_path, monkeypatch):
    """Also those for whose turn there is no time."""
    world, alive = World({"softmax": 1.0, "linear": 1.0, "dot": 1.0, "rfa": 1.0}), {}
    prepare = Planted.prepare

    def prepared(contestant):
        alive[contestant.setting.spec] = world.alive
        return prepare(contestant)

    monkeypatch.setattr(Planted, "prepare", prepared)
    world.fill(plan("linear", "dot", "rfa", minutes=0.1), Folder(tmp_path))
    assert alive == {"softmax": 1, "linear": 4}
    assert world.alive == 0


def test_nothing_is_measured_twice(tmp_path):
    world, folder = World(SECONDS), Folder(tmp_path)
    world.fill(plan("linear", "dot"), folder)
    turns = len(world.turns)
    world.fill(plan("linear", "dot"), folder)
    assert len(world.turns) == turns
    # another row: softmax plays again, the rows that are there do not
    world.fill(plan("linear", "dot", "rfa"), folder)
    assert {*world.turns[turns:]} == {"softmax", "rfa"}
    world.fill(plan("linear", "dot"), folder, force=True)
    assert world.turns.count("linear") == 2 * run.MIN_ROUNDS


def test_another_question_is_another_cell(tmp_path, monkeypatch):
    world, folder = World(SECONDS), Folder(tmp_path)
    one = plan("linear")
    world.fill(one, folder)
    keys = {one.question("speed", "linear", 64).key}
    for other in (plan("linear", batch=2), plan("linear", dtype="bfloat16"), plan("linear", role="self")):
        keys.add(other.question("speed", "linear", 64).key)
        assert Results(other, folder).missing == 2
    keys |= {one.question(kind, "linear", 64).key for kind in ("speed", "memory", "count", "decode")}
    keys.add(one.question("speed", "linear", 65).key)
    assert len(keys) == 8
    # times are those of a machine and of its threads, what is counted is the same everywhere
    before = {kind: one.question(kind, "linear", 64).key for kind in ("speed", "count")}
    monkeypatch.setattr("regard.compare.plan.machine_of", lambda device: "another")
    assert one.question("speed", "linear", 64).key != before["speed"]
    assert plan("linear", threads=2).question("count", "linear", 64).key == before["count"]
    # the code of mechanisms inside another is part of it
    assert len({one.question("speed", f"heads({part}, softmax)", 64).code for part in ("linear", "dot")}) == 2
    # and so is that of the classes that all of them are built on
    code_of.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr("regard.compare.question.BASES", BASES[1:])
        assert one.question("count", "linear", 64).key != before["count"]
    code_of.cache_clear()
    assert one.question("count", "linear", 64).key == before["count"]
    # aliases are one mechanism
    assert one.question("speed", "softmax", 64).key == one.question("speed", "mha", 64).key


def test_a_killed_comparison_ends_in_the_same_table(tmp_path):
    """Killed at twenty moments, each time begun again: the same rows, and no cell is measured twice."""
    whole = World(SECONDS)
    whole.fill(plan(), Folder(tmp_path / "whole"))
    expected = Results(plan(), Folder(tmp_path / "whole")).rows
    draw = random.Random(0)
    for at in sorted(draw.sample(range(len(whole.turns)), 20)):
        folder = Folder(tmp_path / str(at))
        world = World(SECONDS)
        world.kill_after = at
        with survived():
            world.fill(plan(), folder)
        world.kill_after = None
        # what a kill in the middle of writing leaves behind
        (folder.cells / ".0123456789abcdef.json.1").write_text("{")
        world.fill(plan(), folder)
        results = Results(plan(), folder).rows
        assert [{**row, "key": ""} for row in results] == [{**row, "key": ""} for row in expected]
        lines = [json.loads(line) for line in (tmp_path / str(at) / "log.jsonl").read_text().splitlines()]
        keys = [line["key"] for line in lines if line["event"] == "cell"]
        assert len(keys) == len(set(keys))


def test_a_signal_ends_it_between_turns(tmp_path):
    world = World(SECONDS)
    environment = world.environment()
    environment.received = 15
    with pytest.raises(run.Interrupted) as ended:
        run.fill_costs(plan("linear"), Folder(tmp_path), environment)
    assert ended.value.code == 143
    assert world.alive == 0


@pytest.mark.parametrize("moment", ["prepare", "turn", "estimate"])
def test_a_signal_to_the_whole_group_is_no_answer(tmp_path, monkeypatch, moment):
    """What ends the contestants too leaves no cell that says that they failed."""
    asked = plan() if moment != "estimate" else CostPlan(lengths=(64,), width=16, heads=2, threads=1)
    world, folder = World({row.spec: 1.0 for row in asked.rows()}), Folder(tmp_path)
    environment = world.environment()
    calls = getattr(Planted, moment)

    def called(contestant):
        if contestant.setting.spec == "softmax":
            return calls(contestant)
        environment.received = signal.SIGTERM
        raise CannotMeasure("error", "its process ended with status 255")

    monkeypatch.setattr(Planted, moment, called)
    with pytest.raises(run.Interrupted):
        run.fill_costs(asked, folder, environment)
    assert world.alive == 0
    assert not [cell for cell in folder.all() if cell.status == "error"]


@pytest.mark.parametrize(("share", "is_slower"), [(1.05, True), (1.0, False)])
def test_five_per_cent_are_detected_and_none_is_not(tmp_path, share, is_slower):
    """In 19 of 20 tries, at a noise of 3 % and a load that rises while it takes its minutes."""
    called = 0
    for seed in range(20, 40):
        world = World({"softmax": 1.0, "dot": share}, noise=0.03, seed=seed, drift=0.1)
        folder = Folder(tmp_path / str(seed))
        world.fill(plan("dot"), folder)
        row = by_spec(Results(plan("dot"), folder))["dot"]
        called += row["train_ratio_low"] > 1
    assert called >= 19 if is_slower else called <= 1


def test_the_time_limit_holds_and_says_how_to_continue(tmp_path):
    folder, world = Folder(tmp_path), World(SECONDS)
    world.fill(plan(minutes=1.5), folder)
    results = Results(plan(minutes=1.5), folder)
    assert world.now < 1.4 * 90
    assert by_spec(results)["linear"]["status"] == "done"
    assert by_spec(results)["additive"]["status"] in (NOT_RUN, "slow")
    assert results.missing or any(row["status"] == "slow" for row in results.rows)
    # with more time, what was slow or not run is measured, and nothing else
    more = plan(minutes=600)
    before = {row["spec"] for row in results.rows if row["status"] == "done"}
    turns = len(world.turns)
    world.fill(more, folder)
    assert all(row["status"] == "done" for row in Results(more, folder).rows)
    assert not {*world.turns[turns:]} & (before - {"softmax"})


def test_however_short_the_time_each_call_measures_some_rows(tmp_path):
    """A group that is too large for the time would have no round to show for it, and so would every call after it."""
    specs = ("linear", "dot", "rfa", "efficient", "predictive")
    asked, folder = plan(*specs, minutes=0.7), Folder(tmp_path)
    done = 0
    for _ in specs:
        world = World(dict.fromkeys(("softmax", *specs), 1.0))
        world.fill(asked, folder)
        before, done = done, sum(row["status"] == "done" for row in Results(asked, folder).rows)
        if done == len(specs) + 1:
            break
        assert done > before
        assert world.now < 1.1 * 42
    assert done == len(specs) + 1


def test_of_all_mechanisms_those_that_could_be_fastest_are_measured(tmp_path):
    """Cheap estimates come first: who is hopeless is not measured unless it is named, and says so; the rest is measured
    in the order of worth, so that a short time ends in an answer."""
    folder, everything = Folder(tmp_path), CostPlan(lengths=(64,), width=16, heads=2, threads=1)
    specs = [row.spec for row in everything.rows() if not row.refusal]
    seconds = {spec: 0.5 + 0.1 * place for place, spec in enumerate(specs)} | {"softmax": 1.0}
    world = World(seconds)
    # something else had the machine while these were estimated
    world.disturbed = {"linear", "local(window=256)"}
    world.fill(everything, folder)
    assert world.now < 600
    rows = by_spec(Results(everything, folder))
    slow = {spec for spec in specs if seconds[spec] > run.TOO_SLOW}
    assert slow
    assert {spec for spec, row in rows.items() if row["status"] == "slow"} == slow
    assert slow.isdisjoint(world.prepared)
    some = min(slow, key=lambda spec: seconds[spec])
    assert rows[some]["note"].startswith(f"about {seconds[some]:.2g} times the time of softmax, going by 8 tokens")
    first = list(dict.fromkeys(world.prepared))[1:4]
    assert [spec.partition("(")[0] for spec in first] == ["linear", "local", "longformer"]
    # nothing is estimated twice, and what is named is measured
    before = len(world.estimated)
    world.fill(everything, folder)
    assert len(world.estimated) == before
    world.fill(plan(some), folder)
    assert by_spec(Results(plan(some), folder))[some]["status"] == "done"


def test_a_row_that_cannot_is_a_sentence(tmp_path):
    folder = Folder(tmp_path)
    World(SECONDS).fill(plan("linformer", "linear"), folder)
    row = next(row for row in Results(plan("linformer", "linear"), folder).rows if row["spec"].startswith("linformer"))
    assert row["status"] == "refused"
    assert "every slot mixes all positions" in row["note"]


def test_a_row_that_fails_in_its_turn_is_tried_again(tmp_path):
    """The others play on, and what was counted of it stays."""
    world, folder = World(SECONDS), Folder(tmp_path)
    world.broken = {"linear"}
    world.fill(plan("linear", "dot"), folder)
    rows = by_spec(Results(plan("linear", "dot"), folder))
    assert (rows["linear"]["status"], rows["linear"]["note"]) == ("error", "its process ended")
    assert rows["linear"]["flops"] == 10
    assert rows["dot"]["status"] == "done"
    world.broken = set()
    world.fill(plan("linear", "dot"), folder)
    assert by_spec(Results(plan("linear", "dot"), folder))["linear"]["train_ratio"] == pytest.approx(0.1)


def test_a_machine_that_slows_down_gets_more_rounds(tmp_path):
    world, folder = World(SECONDS, drift=0.5), Folder(tmp_path)
    world.fill(plan("linear"), folder)
    assert world.turns.count("linear") == 2 * run.MIN_ROUNDS
    results = Results(plan("linear"), folder)
    assert results.facts()["drift"]
    # a ratio is one of times in the same round, which the machine slows down alike
    row = by_spec(results)["linear"]
    assert row["train_ratio"] == pytest.approx(0.1, rel=0.02)
    assert row["train_ratio_high"] - row["train_ratio_low"] < 0.04 * row["train_ratio"]


def test_limits_of_a_contestant(tmp_path, monkeypatch):
    """A share of the free memory, and of the time; who may be faster than softmax is measured however long it takes."""
    monkeypatch.setattr(run, "free_memory", lambda device: 1000.0)
    world = World({"softmax": 2.0, "linear": 2.1, "dot": 1.9})
    world.fill(plan("linear", "dot", minutes=0.6), Folder(tmp_path))
    assert {setting.room for setting in world.settings} == {run.MEMORY_SHARE * 1000}
    assert {setting.spec: setting.seconds for setting in world.settings} == {"softmax": math.inf} | dict.fromkeys(
        ("linear", "dot"), 2.0
    )
    assert by_spec(Results(plan("linear", "dot", minutes=0.6), Folder(tmp_path)))["linear"]["status"] == "slow"


@pytest.mark.parametrize(("loads", "noted"), [((0.1, 2.1), 0.1), ((0.1, 5.0), 3.0), ((4.0, 2.0), 4.0)])
def test_its_own_threads_are_no_other_work(tmp_path, monkeypatch, loads, noted):
    """The load of a group is that before the comparison, or what is left of it without two threads of its own."""
    before, after = loads
    readings = iter([before])
    monkeypatch.setattr(run, "load_average", lambda: next(readings, after))
    folder, asked = Folder(tmp_path), dataclasses.replace(plan("linear"), threads=2)
    World({"softmax": 1.0, "linear": 0.5}).fill(asked, folder)
    found = [cell.provenance["load"] for cell in folder.all() if cell.question.kind == "speed"]
    assert found == [noted, noted]


def test_a_second_signal_ends_the_program():
    environment = World(SECONDS).environment()
    with environment.listening():
        signal.raise_signal(signal.SIGINT)
        assert environment.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_one_writer(tmp_path):
    folder = Folder(tmp_path)
    with folder.writing("regard compare"), pytest.raises(ValueError, match="is being written"):
        World(SECONDS).fill(plan("linear"), folder)
    World(SECONDS).fill(plan("linear"), folder)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"width": 10, "heads": 3}, "width 10 is not divisible by heads 3"),
        ({"lengths": (0,)}, "lengths must be at least 1"),
        ({"minutes": 0.0}, "minutes must be above 0"),
        ({"specs": ("sofmax",)}, "did you mean 'softmax'"),
        ({"dtype": "float31"}, "dtype must be"),
    ],
)
def test_a_bad_plan_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        CostPlan(**wrong)
