"""Scores under an equal budget: the parameters, the sweep and its seeds with a planted trainer, and one real cell."""

import dataclasses
import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from planted import Killed, World, survived

from regard.cli import main
from regard.cli.compare import split_flags
from regard.compare import budget, jobs, recipe_tables, runs, tables
from regard.compare import filling as filling_module
from regard.compare import learn as learning
from regard.compare import run as costs_module
from regard.compare.advise import advise
from regard.compare.budget import Budget, budget_from
from regard.compare.filling import Filling, check_quality, describe_progress, fill_quality
from regard.compare.learn import Diverged, Trial, learn
from regard.compare.page import html_report
from regard.compare.quality import ENSEMBLE, QualityPlan, Variant
from regard.compare.report import score_header, score_markdown, score_table, text_report
from regard.compare.results import Results
from regard.compare.runs import RunTrial, joined_files, learn_run
from regard.compare.scores import Scores
from regard.compare.statistics import corpus_bleu
from regard.compare.store import Cell, Folder
from regard.core.tally import Tally
from regard.models import ModelConfig, build
from regard.tasks import find
from regard.training import loop
from regard.training.run import Run

SIZES = {"width": 16, "heads": 2, "inner": 32, "layers": 1}


def config(spec: str, **more) -> ModelConfig:
    return ModelConfig(kind="decoder", vocabulary=10, attention=spec, norm="pre", **(SIZES | more))


# parameters


def test_what_is_counted_as_parameters():
    model = build(config("softmax", tied=False, position="learned(longest=7)"))
    inside, outside = budget.count(model.config)
    assert outside == 10 * 16 + 16 * 10 + 7 * 16
    assert inside + outside == sum(part.numel() for part in model.parameters())


@pytest.mark.parametrize("spec", ["compressive(segment=4, memory=4)", "gmlp(longest=8)", "additive", "softmax"])
def test_the_feed_forward_width_makes_parameters_equal(spec):
    sizes = {"width": 64, "inner": 1024, "heads": 2}
    target, _ = budget.count(config("softmax", **sizes))
    sized = budget.equalize_parameters(config(spec, **sizes), target)
    found = build(sized.config)
    assert not sized.over
    assert abs(budget.count(found.config)[0] - target) <= 0.01 * target
    assert sized.inner % 8 == 0


def test_a_row_with_two_per_cent_more_is_refused():
    """What no width can mend: a table of its own that exceeds the target, or a planted difference."""
    target, _ = budget.count(config("softmax"))
    sized = budget.equalize_parameters(config("gmlp(longest=256)"), target)
    assert "not within 1 % of" in sized.over
    exact = budget.equalize_parameters(config("softmax"), target)
    assert not exact.over
    assert budget._sized_config(exact.config, round(1.009 * target), 0, target).over == ""
    assert budget._sized_config(exact.config, round(1.02 * target), 0, target).over
    assert budget._sized_config(exact.config, round(0.98 * target), 0, target).over


@pytest.mark.parametrize(
    ("text", "updates"), [("tokens=2k", 20), ("updates=600", 600), ("flops=1M", 10), ("minutes=1", 30), ("tokens=1", 1)]
)
def test_budgets(text, updates):
    assert budget_from(text).updates(tokens=100, flops=1e5, seconds=2.0) == updates


@pytest.mark.parametrize("text", ["2M", "hours=3", "tokens=x", "tokens=", "tokens=0"])
def test_a_bad_budget(text):
    with pytest.raises(ValueError, match="budget"):
        budget_from(text)


# a cell


def test_a_model_learns_and_the_cell_says_what_it_cost():
    options = {"vocabulary": 4}
    trial = Trial("softmax", "mad-memorize", options, 8, 16, budget=Budget("updates", 60), rate=0.02, **SIZES)
    answer, counted = learn(trial)
    assert answer["score"] > 0.9 > answer["chance"] == 0.5
    assert answer["solved_at"] <= answer["updates"] == 60
    assert [step for step, _ in answer["curve"]] == [8, 16, 24, 32, 40, 48, 56, 60]
    assert answer["valid"] == answer["curve"][-1][1]
    assert answer["tokens"] == 60 * trial.batch * trial.length
    assert len(answer["items"]) == 512
    assert sum(answer["items"]) / 512 == pytest.approx(answer["score"], abs=1e-3)
    assert counted["flops"] % 60 == 0
    assert counted["parameters"] == budget.count(trial.config("softmax", trial.find_task()))[0]


def test_a_cell_depends_on_its_question_alone():
    trial = Trial("linear", "mad-recall", {}, 16, 8, budget=Budget("updates", 3), **SIZES)
    one, again = learn(trial)[0], learn(trial)[0]
    other = learn(dataclasses.replace(trial, seed=2))[0]
    same = ("score", "curve", "items")
    assert [one[name] for name in same] == [again[name] for name in same]
    assert one["items"] != other["items"]


def test_a_killed_cell_continues_from_what_it_saved(tmp_path, monkeypatch):
    """Killed after any update, it ends in the same bits; a file that a kill cut short is as good as none."""
    trial = Trial("performer(features=8)", "mad-recall", {}, 16, 8, budget=Budget("updates", 5), **SIZES)
    whole = learn(trial)[0]
    trial = dataclasses.replace(trial, saved=str(tmp_path / "saved" / "cell.pt"))
    clock = iter(range(0, 10**6, 100)).__next__
    update, done = learning._Trainer.update, []

    def killed(trainer, step, updates):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(step)
        update(trainer, step, updates)

    monkeypatch.setattr(learning._Trainer, "update", killed)
    with pytest.raises(KeyboardInterrupt):
        learn(trial, clock)
    continued = []
    monkeypatch.setattr(learning._Trainer, "update", lambda self, *at: continued.append(at[0]) or update(self, *at))
    again = learn(trial, clock)[0]
    assert (done, continued) == ([0, 1, 2], [3, 4])
    assert all(again[name] == whole[name] for name in ("score", "curve", "items"))
    Path(trial.saved).write_bytes(b"PK")
    assert learn(trial, clock)[0]["curve"] == whole["curve"]


def test_self_pretraining_takes_half_of_the_budget(monkeypatch):
    """First every hidden token is asked, and nothing else; then the answers, with a schedule of their own."""
    task = Trial("softmax", "listops").find_task()
    trial = Trial("softmax", "listops", {}, 24, 8, pretrain="self", budget=Budget("updates", 4), **SIZES)
    trainer, seen = learning._Trainer(trial, task, 24, build(trial.config("softmax", task))), []
    monkeypatch.setattr(trainer, "loss", lambda found: seen.append(found) or learning._Trainer.loss(trainer, found))
    rates = []
    for step in range(4):
        trainer.update(step, 4)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates[:2] == rates[2:]
    for step, found in enumerate(seen):
        plain = trainer.draw(8, trial.seed * 10_000_019 + step)
        if step >= 2:
            assert torch.equal(found.tokens, plain.tokens)
            continue
        hidden = found.tokens == task.vocabulary
        assert 0 < hidden.sum() < 0.3 * plain.keep.sum()
        assert not (hidden & ~plain.keep).any()
        assert torch.equal(found.answers[hidden], plain.tokens[hidden])
        assert (found.answers[~hidden] == learning.IGNORED).all()
    with pytest.raises(ValueError, match="pretrain must be none or self"):
        QualityPlan("recall", pretrain="twice")


def test_groups_are_scored_apart():
    options = {"pairs": 2, "updates": 1, "vocabulary": 32}
    answer, _ = learn(Trial("softmax", "forgetting", options, 16, 4, budget=Budget("updates", 1), **SIZES))
    assert set(answer["groups"]) == {"kept", "updated"}


def test_what_is_drawn_and_how_fast_it_learns(monkeypatch):
    """Each seed trains on data of its own; what is scored is other data, and the score that chooses a rate has its own.
    The learning rate rises over a twelfth, and falls to zero over the last third."""
    drawn, rates = [], []
    draw, step = learning._Trainer.draw, torch.optim.AdamW.step

    def spied_draw(self, rows, seed, *which):
        drawn.append((rows, seed))
        return draw(self, rows, seed, *which)

    def spied_step(self, *rest):
        rates.append(self.param_groups[0]["lr"])
        return step(self, *rest)

    monkeypatch.setattr(learning._Trainer, "draw", spied_draw)
    monkeypatch.setattr(torch.optim.AdamW, "step", spied_step)
    trained = []
    for seed in (1, 2):
        drawn.clear()
        learn(
            Trial("softmax", "recall", length=16, batch=2, rate=1.0, seed=seed, budget=Budget("updates", 24), **SIZES)
        )
        trained.append({made for rows, made in drawn if rows == 2} - {0})
        scored = [made for rows, made in drawn if rows != 2]
        assert not trained[-1] & set(scored)
    assert len(trained[0]) == len(trained[1]) == 24
    assert not trained[0] & trained[1]
    # the curve and the score: four draws each time, the last four of them new
    assert len(set(scored)) == 8
    assert not set(scored[-4:]) & set(scored[:-4])
    assert rates[:24] == pytest.approx([0.5, *[1.0] * 16, *[3 * (1 - at / 24) for at in range(17, 24)]])


def test_a_length_without_questions_is_refused():
    with pytest.raises(ValueError, match="the task recall asks nothing in 2 tokens"):
        learn(Trial("softmax", "recall", length=2, width=8, heads=2, inner=8))


def test_what_is_not_finite_is_said():
    with pytest.raises(Diverged, match=r"not finite at update \d+ \(learning rate 1e\+30\)"):
        learn(Trial("softmax", "copy", {}, 9, 4, rate=1e30, budget=Budget("updates", 20), **SIZES))


# the table


class School:
    """A trainer that only pretends: scores by spec and rate, with a spread by seed."""

    def __init__(
        self,
        scores: dict[str, dict[float, float]],
        spread: float = 0.001,
        solved_at: int = 100,
        higher: bool = True,
        wave: float = 0.001,
    ):
        self.scores, self.spread, self.solved_at, self.higher, self.wave = scores, spread, solved_at, higher, wave
        self.asked: list[tuple[str, float, int]] = []

    def __call__(self, trial):
        self.asked.append((trial.spec, trial.rate, trial.seed))
        score = self.scores[trial.spec].get(trial.rate, 0.1)
        if score < 0:
            return "broke", "not finite at update 3", ({}, {})
        score += self.spread * (trial.seed - 1)
        phase = {"softmax": 0.0}.get(trial.spec, 1.0)
        items = [score + self.wave * math.sin(at + phase) for at in range(64)]
        answer = {"metric": "accuracy", "higher_is_better": self.higher, "valid": score, "score": score, "items": items}
        answer |= {"right": 10, "asked": 1000, "groups": {}, "chance": 0.125, "curve": [[75, 0.2], [600, score]]}
        answer |= {"updates": 600, "solved_at": self.solved_at if score >= 0.9 else None, "rising": False, "seconds": 1}
        return "done", "", (answer, {"parameters": 100})


LOW, MIDDLE, HIGH = (float(f"{3e-3 * factor:.3g}") for factor in (1 / 3, 1, 3))


def plan(*specs: str, **more) -> QualityPlan:
    return QualityPlan("recall", specs=specs or ("linear", "efficient"), **more)


def taught(path, school: School, asked: QualityPlan) -> Scores:
    fill_quality([asked], Folder(path), World({}).environment(), school)
    return Scores(asked, Folder(path))


def test_the_best_rate_gets_fresh_seeds(tmp_path):
    school = School({"softmax": {MIDDLE: 0.95}, "linear": {LOW: 0.2, MIDDLE: 0.3}, "efficient": {MIDDLE: 0.4}})
    scores = taught(tmp_path, school, plan())
    rows = {row["spec"]: row for row in scores.rows}
    assert {spec: row["rate"] for spec, row in rows.items()} == dict.fromkeys(rows, MIDDLE)
    assert sorted(seed for spec, rate, seed in school.asked if spec == "linear" and rate == MIDDLE) == [0, 1, 2, 3]
    assert rows["linear"]["score"] == pytest.approx(0.301)
    # a rate with two thirds of the best score is none at which it learns
    assert rows["linear"]["rates_ok"] == 1
    assert scores.settled
    assert [rows[spec]["letters"] for spec in ("softmax", "efficient", "linear")] == ["a", "b", "c"]
    said = " ".join(advise(Results(None, Folder(tmp_path), [plan()])))
    assert "Best at recall: softmax (0.95 to 0.952). Behind: efficient and linear" in said
    # again: nothing is trained twice
    before = len(school.asked)
    taught(tmp_path, school, plan())
    assert len(school.asked) == before == len(set(school.asked))
    environment = World({}).environment()
    environment.force = True
    fill_quality([plan()], Folder(tmp_path), environment, school)
    assert school.asked[before:] == school.asked[:before]


def test_the_best_rate_is_that_of_the_validation_set(tmp_path):
    """The best of several scores of the test set would be no score of it."""
    school = School({spec: {LOW: 0.5, MIDDLE: 0.9, HIGH: 0.5} for spec in ("softmax", "linear")})

    def teach(trial):
        status, note, (answer, counted) = school(trial)
        luck = {LOW: 0.99, MIDDLE: 0.6, HIGH: 0.6}[trial.rate]
        return status, note, (answer | {"score": luck}, counted)

    fill_quality([plan("linear")], Folder(tmp_path), World({}).environment(), teach)
    rows = Scores(plan("linear"), Folder(tmp_path)).rows
    assert {(row["rate"], row["score"]) for row in rows} == {(MIDDLE, 0.6)}


def test_groups_of_answers_are_shown_as_means_over_the_seeds(tmp_path):
    school = School({"softmax": {MIDDLE: 0.95}})

    def teach(trial):
        status, note, (answer, counted) = school(trial)
        return status, note, (answer | {"groups": {"kept": 0.1 * trial.seed, "updated": 0.5}}, counted)

    asked = QualityPlan("recall", specs=("softmax",), rates=(MIDDLE,))
    fill_quality([asked], Folder(tmp_path), World({}).environment(), teach)
    results = Results(None, Folder(tmp_path), [asked])
    said = "softmax: kept 0.200, updated 0.500"
    assert f"by group:\n{said}" in text_report(results)
    assert f"{said}  " in score_markdown(results.scores[0])
    assert said in html_report(results)


def test_a_best_rate_at_the_edge_widens_the_grid_for_all(tmp_path):
    wider = float(f"{HIGH**2 / MIDDLE:.3g}")
    school = School({"softmax": {MIDDLE: 0.95}, "linear": {HIGH: 0.3, wider: 0.6}, "efficient": {MIDDLE: 0.4}})
    scores = taught(tmp_path, school, plan())
    assert {spec for spec, rate, _ in school.asked if rate == wider} == {"softmax", "linear", "efficient"}
    rows = {row["spec"]: row for row in scores.rows}
    assert rows["linear"]["rate"] == wider
    assert rows["linear"]["rates"] == 4
    # and below
    lower = float(f"{LOW**2 / MIDDLE:.3g}")
    school = School({"softmax": {MIDDLE: 0.95}, "linear": {LOW: 0.3, lower: 0.6}, "efficient": {MIDDLE: 0.4}})
    rows = {row["spec"]: row for row in taught(tmp_path / "low", school, plan()).rows}
    assert (rows["linear"]["rate"], rows["linear"]["rates"]) == (lower, 4)


def test_a_row_that_cannot_be_captured_trains_again_without_graphs(tmp_path):
    """The cell starts again, once, and the others of its row never try."""
    school, tried, world = School({"softmax": {0.1: 0.95}, "linear": {0.1: 0.3}}), [], World({})

    def train(trial):
        tried.append((trial.spec, trial.seed, trial.graphs))
        if trial.spec == "linear" and trial.graphs:
            return "uncaptured", "training without CUDA graphs: it waits", ({}, {})
        return school(trial)

    asked = plan("linear", rates=(0.1,), seeds=2)
    fill_quality([asked], Folder(tmp_path), world.environment(), train)
    linear = [(seed, graphs) for spec, seed, graphs in tried if spec == "linear"]
    assert linear == [(1, True), (1, False), (2, False)]
    assert [(seed, graphs) for spec, seed, graphs in tried if spec == "softmax"] == [(1, True), (2, True)]
    assert [line for line in world.said if "CUDA" in line] == ["linear recall: training without CUDA graphs: it waits"]
    assert {row["spec"] for row in Scores(asked, Folder(tmp_path)).rows if row["score"] is not None} == {
        "softmax",
        "linear",
    }


def test_all_tables_get_a_seed_before_one_gets_its_second(tmp_path):
    """Each after its own sweep."""
    swept, given = plan("linear", seeds=2), plan("linear", rates=(0.1,), seeds=3, length=32)
    school = School({"softmax": {MIDDLE: 0.9}, "linear": {MIDDLE: 0.9}})
    seeds = []

    def train(trial):
        seeds.append((trial.length, trial.seed))
        return school(trial)

    fill_quality([given, swept], Folder(tmp_path), World({}).environment(), train)
    order = [(32, 1), (0, 0), (0, 1), (32, 2), (0, 2), (32, 3)]
    assert list(dict.fromkeys(seeds)) == order
    assert [seeds.count(one) for one in order] == [2, 6, 2, 2, 2, 2]


def test_progress_says_how_many_cells_are_done_and_about_how_long_the_rest_takes(tmp_path):
    """By the times of the same row, or of the table. What is stored is done; a row that breaks gets no seeds."""
    scores = {"softmax": {MIDDLE: 0.95}, "linear": {MIDDLE: 0.3}, "efficient": dict.fromkeys((LOW, MIDDLE, HIGH), -1)}
    school, world, minutes = School(scores), World({}), {"softmax": 10, "linear": 2, "efficient": 0.5}

    def train(trial):
        world.now += 60 * minutes[trial.spec]
        return school(trial)

    def progress() -> list[str]:
        world.said.clear()
        fill_quality([plan(seeds=2)], Folder(tmp_path), world.environment(), train)
        return [line.rpartition("; ")[2] for line in world.said]

    said = progress()
    assert world.said[0].startswith(f"softmax recall rate {LOW:g} seed 0: 0.099, 1 s; 1 of 15")
    # three rows of three rates and two seeds, each like the first; what broke says nothing of the time
    assert said[:3] == [
        "1 of 15 cells done, about 2.3 h left",
        "2 of 15 cells done, about 78 min left",
        "3 of 15 cells done, about 72 min left",
    ]
    assert said[8:] == [
        "9 of 13 cells done, about 24 min left",
        "10 of 13 cells done, about 14 min left",
        "11 of 13 cells done, about 12 min left",
        "12 of 13 cells done, about 2 min left",
        "13 of 13 cells done",
    ]
    (tmp_path / "cells" / f"{plan().question('linear', MIDDLE, 2).key}.json").unlink()
    assert progress() == ["13 of 13 cells done"]


def test_a_wider_grid_has_more_cells(tmp_path):
    school, world = School({"softmax": {MIDDLE: 0.95}, "linear": {HIGH: 0.3}}), World({})
    fill_quality([plan("linear", seeds=1)], Folder(tmp_path), world.environment(), school)
    said = [line.rpartition("; ")[2].partition(",")[0] for line in world.said]
    assert said[5:7] == ["6 of 8 cells done", "7 of 10 cells done"]
    assert said[-1] == "10 of 10 cells done"


def test_the_time_that_is_left_is_that_of_all_tables_and_jobs(tmp_path):
    """Cells in progress count by half where half of their time is over; a table without times leaves it open."""
    tables = [plan("linear", rates=(0.1,), length=length) for length in (16, 32)]
    world, school = World({}), School({"softmax": {0.1: 0.9}, "linear": {0.1: 0.5}})
    fillings = [Filling(one, Folder(tmp_path), world.environment()) for one in tables]
    Folder(tmp_path).cells.mkdir()
    for filling in fillings:
        filling.begin()
    first, second = fillings
    trial = first.trial(("linear", 0.1, 1))
    world.now += 600
    first.end(("linear", 0.1, 1), school(trial))
    assert describe_progress(fillings, 1) == "1 of 12 cells done"
    trial = second.trial(("softmax", 0.1, 1))
    world.now += 1200
    second.end(("softmax", 0.1, 1), school(trial))
    assert describe_progress(fillings, 1) == "2 of 12 cells done, about 2.5 h left"
    assert describe_progress(fillings, 3) == "2 of 12 cells done, about 50 min left"
    first.trial(("linear", 0.1, 2))
    world.now += 300
    assert describe_progress(fillings, 1) == "2 of 12 cells done, about 2.4 h left"


def test_a_budget_of_minutes_needs_a_machine_without_other_work(tmp_path):
    school, world = School({"softmax": {0.1: 0.9}, "linear": {0.1: 0.5}}), World({})
    asked = plan("linear", rates=(0.1,), seeds=1, axis="minutes", amount=1.0)

    def fill(one: QualityPlan, load: float, **more) -> int:
        before = len(school.asked)
        fill_quality([one], Folder(tmp_path), world.environment(load=lambda: load, **more), school)
        return len(school.asked) - before

    with pytest.raises(ValueError, match=rf"is 0\.6 per core.* at most 0\.5.*--out {tmp_path}; .* --force"):
        fill(asked, 0.6)
    # other budgets do not depend on it
    assert fill(plan("linear", rates=(0.1,), seeds=1), 0.6) == 2
    assert fill(asked, 0.6, force=True) == 2
    # nothing is left to train
    assert fill(asked, 0.6) == 0
    more = dataclasses.replace(asked, seeds=2)
    assert fill(more, 0.5) == 2
    # a system that does not say
    assert fill(dataclasses.replace(asked, seeds=3), math.nan) == 2


def test_scores_come_before_costs(tmp_path, monkeypatch, capsys):
    """Costs are known soon; a table that is cut short should have scores."""
    order = []
    monkeypatch.setattr(filling_module, "fill_quality", lambda *_: order.append("scores"))
    monkeypatch.setattr(costs_module, "fill_costs", lambda *_: order.append("costs"))
    assert main(["compare", "--table", "state", "--out", str(tmp_path)]) == 0
    assert order == ["scores", "costs"]


def test_rows_whose_seeds_overlap_share_a_letter(tmp_path):
    school = School({"softmax": {MIDDLE: 0.95}, "linear": {MIDDLE: 0.95}, "efficient": {MIDDLE: 0.5}}, spread=0.01)
    rows = {row["spec"]: row["letters"] for row in taught(tmp_path, school, plan()).rows}
    assert rows == {"softmax": "a", "linear": "a", "efficient": "b"}
    # every item is better by a little, but so is another seed
    school = School({"softmax": {MIDDLE: 0.96}, "linear": {MIDDLE: 0.95}, "efficient": {MIDDLE: 0.5}}, spread=0.01)
    rows = {row["spec"]: row["letters"] for row in taught(tmp_path / "near", school, plan()).rows}
    assert rows == {"softmax": "a", "linear": "a", "efficient": "b"}
    # seeds apart, but on as many items better as worse
    school = School({"softmax": {MIDDLE: 0.96}, "linear": {MIDDLE: 0.95}, "efficient": {MIDDLE: 0.5}}, wave=0.1)
    rows = {row["spec"]: row["letters"] for row in taught(tmp_path / "wave", school, plan()).rows}
    assert rows == {"softmax": "a", "linear": "a", "efficient": "b"}
    # one seed shows no spread
    scores = taught(tmp_path / "one", school, plan(seeds=1))
    assert scores.settled
    assert not any("letters" in row for row in scores.rows)
    said = advise(Results(None, scores.folder, [scores.plan]))
    assert said[0] == "recall has one seed for each row, so its rows are not ranked."
    assert not scores.rule


def translated(path, rows: dict[str, tuple[list[float], list[int] | None]]) -> Scores:
    """A table of translators that only pretend: for each its scores of the seeds, and how many of ten words are right
    in the sentences of the test set, 60 in turn. None: its cells keep no sentences."""
    variants = tuple(
        Variant(name, of=name.removesuffix(", ensemble"), ensemble=True) if "ensemble" in name else Variant(name)
        for name in rows
    )
    asked = QualityPlan("translate", rates=(0.01,), flags=("--a", "b"), test=("--c", "d"), variants=variants)
    folder = Folder(path)
    with folder.writing("a test"):
        for name, (scores, right) in rows.items():
            for seed, score in zip([ENSEMBLE] if "ensemble" in name else asked.seed_numbers, scores, strict=True):
                answer = {"metric": "bleu (test)", "higher_is_better": True, "valid": score, "score": score}
                answer |= {"groups": {}, "curve": [], "updates": 1, "rising": False, "device_seconds": 1.0}
                if right is not None:
                    counts = [[max(0, right[at % len(right)] - n) for n in range(4)] for at in range(60)]
                    answer["sentences"] = [" ".join(map(str, [*count, 10, 10])) for count in counts]
                folder.put(Cell(asked.question(name, 0.01, seed), "done", "", answer, {"parameters": 1}))
    return Scores(asked, folder)


def test_translators_are_ranked_by_seeds_and_sentences(tmp_path):
    rows: dict[str, tuple[list[float], list[int] | None]] = {
        "A, ensemble": ([42.0], [9, 10]),
        "A": ([40.0, 40.5, 41.0], [8, 9]),
        # seeds as good as those of A
        "B": ([39.0, 39.5, 40.2], [8, 9]),
        # seeds apart from B's, but better on as many sentences as worse
        "C": ([38.0, 38.1, 38.2], [9, 8]),
        "D": ([20.0, 20.5, 21.0], [4, 5]),
    }
    scores = translated(tmp_path, rows)
    found = {row["spec"]: row["letters"] for row in scores.rows}
    assert found == {"A, ensemble": "a", "A": "b", "B": "b", "C": "b", "D": "c"}
    assert scores.rule == (
        "rank: different letters: seeds do not overlap, and a paired bootstrap over the test set excludes 0; "
        "an ensemble has one score"
    )
    assert scores.rule in score_header(scores)
    said = " ".join(advise(Results(None, scores.folder, [scores.plan])))
    assert "Best at translate: A, ensemble (42). Behind: A, B, C and D" in said


def test_an_ensemble_waits_for_the_runs_of_all_seeds(tmp_path):
    variants = (Variant("A"), Variant("A, ensemble", of="A", ensemble=True))
    asked = QualityPlan("translate", rates=(0.01,), flags=("--a", "b"), test=("--c", "d"), variants=variants)
    folder = Folder(tmp_path)
    filling = Filling(asked, folder, World({}).environment())
    filling.begin()
    answer = {"valid": 1.0, "score": 1.0, "higher_is_better": True, "updates": 1, "curve": []}
    with folder.writing("a test"):
        for seed in asked.seed_numbers:
            assert ("A, ensemble", 0.01, ENSEMBLE) not in filling.ready()
            folder.put(Cell(asked.question("A", 0.01, seed), "done", "", answer))
    assert filling.ready() == [("A, ensemble", 0.01, ENSEMBLE)]


def test_translators_without_sentences_are_ranked_by_seeds(tmp_path):
    rows: dict[str, tuple[list[float], list[int] | None]] = {
        "A, ensemble": ([42.0], None),
        "A": ([40.0, 40.5, 41.0], None),
        "B": ([39.0, 39.5, 40.2], None),
        # its seeds do not overlap those of B, but are spread as widely as the gap
        "C": ([28.0, 33.0, 38.9], None),
        "D": ([10.0, 10.5, 11.0], None),
    }
    scores = translated(tmp_path, rows)
    found = {row["spec"]: row.get("letters") for row in scores.rows}
    assert found == {"A, ensemble": None, "A": "a", "B": "ab", "C": "b", "D": "c"}
    assert "means are over two standard errors apart" in scores.rule
    assert scores.rule.endswith("no scores of single items were kept; ensembles have one score each, and no rank")
    said = " ".join(advise(Results(None, scores.folder, [scores.plan])))
    assert "Best at translate: A (40 to 41); not significantly worse: B (39 to 40.2). Behind: C and D" in said
    assert "Not ranked, with one score each: A, ensemble (42)." in said


def test_a_score_within_the_sampling_error_of_a_blind_guess_is_marked(tmp_path):
    """Chance is 0.125; of 3,000 answers a blind guess has up to 0.137 right."""
    school = School({"softmax": {MIDDLE: 0.95}, "linear": {MIDDLE: 0.13}, "efficient": {MIDDLE: 0.14}})
    scores = taught(tmp_path, school, plan())
    assert {row["spec"]: row["at_chance"] for row in scores.rows} == {
        "softmax": False,
        "linear": True,
        "efficient": False,
    }
    assert "0.131 =" in " ".join(score_table(scores, 200))
    assert "At chance: linear." in advise(Results(None, scores.folder, [scores.plan]))


def test_a_row_is_behind_only_if_it_differs_from_the_best(tmp_path):
    """The seeds of the best row are spread so widely that it differs from the last row only, while the two others
    differ from each other."""
    rows: dict[str, tuple[list[float], list[int] | None]] = {
        "A": ([20.0, 55.0, 60.0], None),
        "B": ([44.0, 44.2, 44.5], None),
        "C": ([30.0, 30.5, 31.0], None),
        "D": ([10.0, 10.5, 11.0], None),
    }
    scores = translated(tmp_path, rows)
    assert {row["spec"]: row["letters"] for row in scores.rows} == {"A": "ab", "B": "a", "C": "b", "D": "c"}
    said = " ".join(advise(Results(None, scores.folder, [scores.plan])))
    expected = "Best at translate: A (20 to 60); not significantly worse: B and C (30 to 44.5). Behind: D (10 to 11)."
    assert expected in said


def test_the_best_rate_of_a_loss_is_the_lowest(tmp_path):
    losses = {LOW: 0.5, MIDDLE: 0.3, HIGH: 0.31}
    school = School({"softmax": losses, "linear": losses, "efficient": losses}, higher=False)
    rows = taught(tmp_path, school, plan()).rows
    assert {row["rate"] for row in rows} == {MIDDLE}
    # a loss that is little higher than the best is one at which it learns
    assert {(row["rates_ok"], row["rates"]) for row in rows} == {(2, 3)}


@pytest.mark.parametrize(("times", "median"), [((300, None, 100), 300), ((None, 100, None), None)])
def test_a_seed_that_never_solves_a_task_is_the_slowest(tmp_path, times, median):
    school = School({"softmax": {MIDDLE: 0.95}, "linear": {MIDDLE: 0.9}, "efficient": {MIDDLE: 0.4}})

    def train(trial):
        status, note, (answer, counted) = school(trial)
        is_asked = trial.spec == "linear" and trial.seed > 0
        return status, note, (answer | ({"solved_at": times[trial.seed - 1]} if is_asked else {}), counted)

    fill_quality([plan()], Folder(tmp_path), World({}).environment(), train)
    rows = {row["spec"]: row for row in Scores(plan(), Folder(tmp_path)).rows}
    assert rows["linear"]["solved_at"] == median


@pytest.mark.parametrize(("score", "solved_at"), [(0.5, 100), (0.95, 400)])
def test_a_table_that_is_not_settled_ranks_nothing(tmp_path, score, solved_at):
    school = School({"softmax": {MIDDLE: score}, "linear": {MIDDLE: 0.3}, "efficient": {MIDDLE: 0.4}}, 0.001, solved_at)
    taught(tmp_path, school, plan())
    assert '"ranked": false' in html_report(Results(None, Folder(tmp_path), [plan()]))
    scores = taught(tmp_path, school, plan())
    assert not scores.settled
    assert not any("letters" in row for row in scores.rows)
    said = " ".join(advise(Results(None, Folder(tmp_path), [plan()])))
    assert "recall is not settled, so its rows are not ranked." in said
    assert "Best at" not in said


def test_a_table_whose_reference_is_not_done_is_not_settled_yet(tmp_path):
    """Unless a seed of it has failed already: then no other can settle it."""
    for score, says in (
        (0.95, " yet: softmax has 2 of 3 seeds, so no row is ranked"),
        (0.5, ": softmax does not solve"),
    ):
        folder = tmp_path / str(score)
        taught(folder, School({"softmax": {MIDDLE: score}, "linear": {MIDDLE: 0.3}}), plan("linear"))
        (folder / "cells" / f"{plan().question('softmax', MIDDLE, 3).key}.json").unlink()
        scores = Scores(plan("linear"), Folder(folder))
        assert score_header(scores)[-1].startswith(f"not settled{says}")
        said = " ".join(advise(Results(None, scores.folder, [scores.plan])))
        assert ("recall is not settled yet, so its rows are not ranked." in said) == (score == 0.95)
    nothing = Scores(plan("linear"), Folder(tmp_path / "empty"))
    assert score_header(nothing)[-1] == "not settled yet: softmax has 0 of 3 seeds, so no row is ranked"


def test_a_word_problem_is_settled_by_a_recurrence(tmp_path):
    """Softmax does not learn it, so a GRU is the row that must, before others are ranked."""
    gru = "recurrent(cell='gru')"
    for score, settled in ((0.95, True), (0.5, False)):
        school = School({"softmax": {MIDDLE: 0.3}, gru: {MIDDLE: score}})
        asked = QualityPlan("word(group='S3')", specs=(gru,))
        scores = taught(tmp_path / str(score), school, asked)
        assert scores.settled == settled
        assert scores.reference == gru
    # who did not ask for it is told to: no budget settles a table without it
    asked = QualityPlan("word(group='S3')", specs=("linear",))
    scores = taught(tmp_path / "without", School({"softmax": {MIDDLE: 0.3}, "linear": {MIDDLE: 0.3}}), asked)
    head, said = score_header(scores)[-1], " ".join(advise(Results(None, scores.folder, [asked])))
    assert head == f"not settled: it is not known whether {gru} solves it; name that row too"
    assert f"not settled without {gru}" in said
    assert "--budget" not in said


def test_several_tables_share_the_processes(tmp_path):
    """While one waits for the last rate of its sweep, another has cells to train."""
    one, other = plan("linear"), QualityPlan("copy", specs=("linear",), seeds=1, rates=(MIDDLE,))
    fillings = [Filling(asked, Folder(tmp_path), World({}).environment()) for asked in (one, other)]
    for filling in fillings:
        filling.begin()
    begun = []
    while (pair := filling_module._next(fillings)) is not None:
        pair[0].trial(pair[1])
        begun.append(pair)
    # the sweep of the first, and the one seed of the second, which sweeps nothing; no seed of the first yet
    assert [(fillings.index(filling), asked[2]) for filling, asked in begun] == [(0, 0)] * 6 + [(1, 1)] * 2


def test_killed_at_any_cell_it_ends_in_the_same_table(tmp_path):
    """Begun again after each kill: every cell is trained to its end once, and the rows are the same."""
    scores = {"softmax": {MIDDLE: 0.95}, "linear": {HIGH: 0.3}, "efficient": {MIDDLE: 0.4}}
    whole = School(scores)
    expected = taught(tmp_path / "whole", whole, plan()).rows
    for at in range(1, len(whole.asked), 6):
        school = School(scores)

        def killed(trial, school=school, at=at):
            if len(school.asked) == at:
                raise Killed
            return school(trial)

        folder = Folder(tmp_path / str(at))
        with survived():
            fill_quality([plan()], folder, World({}).environment(), killed)
        rows = taught(folder.path, school, plan()).rows
        assert [row | {"key": ""} for row in rows] == [row | {"key": ""} for row in expected]
        assert sorted(school.asked) == sorted(whole.asked)


def test_statuses(tmp_path):
    """A rate that breaks leaves the others; a row without a role, or with too many parameters, says so."""
    specs = ("linear", "linformer(longest=64)", "gmlp(longest=2048)")
    school = School({"softmax": {MIDDLE: 0.95}, "linear": {LOW: -1, MIDDLE: 0.3, HIGH: -1}})
    rows = {row["spec"].split("(")[0]: row for row in taught(tmp_path, school, plan(*specs)).rows}
    assert rows["linear"]["status"] == "done"
    assert (rows["linformer"]["status"], rows["gmlp"]["status"]) == ("refused", "over")
    assert "not within 1 %" in rows["gmlp"]["note"]
    assert not any(spec.startswith("gmlp") for spec, *_ in school.asked)


def test_a_file_that_was_missing_is_read_the_next_time(tmp_path):
    text = tmp_path / "book.txt"
    asked = QualityPlan("language", specs=("linear",), rates=(0.001,), flags=("--data.text", str(text)))
    trial = asked.run_trial("linear", 0.001, 1, Folder(tmp_path))
    status, note, found = jobs.run_cell(trial)
    assert (status, note) == ("absent", f"{text}: no such file or directory")
    fill_quality([asked], Folder(tmp_path), World({}).environment(), lambda trial: (status, note, found))
    assert {row["status"] for row in Scores(asked, Folder(tmp_path)).rows} == {"absent"}
    answer = {"score": 1.0, "valid": 1.0, "metric": "loss", "higher_is_better": False, "updates": 1, "curve": []}
    answer |= {"seconds": 1.0, "device_seconds": 1.0}
    fill_quality([asked], Folder(tmp_path), World({}).environment(), lambda trial: ("done", "", (answer, {})))
    assert {row["status"] for row in Scores(asked, Folder(tmp_path)).rows} == {"done"}


def test_a_column_without_values_is_left_out(tmp_path):
    """What is still improving is said of those rows; where there are none, the column takes no room."""
    school = School({"softmax": {MIDDLE: 0.95}, "linear": {MIDDLE: 0.3}, "efficient": {MIDDLE: 0.4}})
    scores = taught(tmp_path, school, plan())
    assert "trend" not in " ".join(score_table(scores, 200))
    assert "trend" not in " ".join(score_table(scores, 40))
    next(row for row in scores.rows if row["spec"] == "linear")["rising"] = True
    head, *lines = score_table(scores, 200)
    assert head.endswith("trend")
    assert [line.split()[0] for line in lines if line.endswith("still improving")] == ["linear"]
    assert "trend" in " ".join(line for line in score_table(scores, 40) if line.startswith("Columns"))


def test_half_done(tmp_path, capsys):
    school = School({"softmax": {MIDDLE: 0.95}, "linear": {MIDDLE: 0.3}, "efficient": {MIDDLE: 0.4}})
    taught(tmp_path, school, plan("linear"))
    rows = {row["spec"]: row for row in Scores(plan(), Folder(tmp_path)).rows}
    assert rows["linear"]["status"] == "done"
    assert rows["efficient"]["note"] == f"0 of 3 learning rates tried; regard compare --out {tmp_path} continues"
    # a sweep that is not done has no best rate yet
    (tmp_path / "cells" / f"{plan('linear').question('linear', HIGH, 0).key}.json").unlink()
    rows = {row["spec"]: row for row in Scores(plan("linear"), Folder(tmp_path)).rows}
    assert rows["linear"]["status"] == "not run"
    assert rows["linear"]["note"].startswith("2 of 3 learning rates tried")
    # in Markdown too: a row with fewer seeds, and a table without scores
    (tmp_path / "cells" / f"{plan().question('softmax', MIDDLE, 3).key}.json").unlink()
    lines = score_markdown(Scores(plan("linear"), Folder(tmp_path)))
    assert f"2 of 3 seeds; regard compare --out {tmp_path} continues: `softmax`  " in lines
    lines = score_markdown(Scores(plan("linear"), Folder(tmp_path / "empty")))
    assert lines[lines.index("") + 1 :][:2] == ["| attention | score |", "|---|---:|"]


def test_mistakes(tmp_path, capsys):
    for words, says in (
        (["--task", "nosuch"], "no task 'nosuch'; known: copy"),
        (["--task", "mqar(keys=3)"], "no option 'keys'"),
        (["--task", "recall", "--budget", "10"], "a budget is written"),
        (["--task", "recall", "--rates", "x"], "--rates takes numbers"),
        (["--task", "recall", "--rates", "0"], "rates must be above 0, got 0"),
        (["--task", "recall", "--task-length", "-1"], "length of a task must be at least 1, got -1"),
        (["--task", "mqar(pairs=3"], "cannot read the task 'mqar(pairs=3'"),
        (["--task", "recall", "--budget", "minutes=1", "--jobs", "2"], "one cell at a time"),
        (["--seeds", "2"], "--seeds is for training: name a task"),
        (["--data.text", "x"], "--data.text is for training: name a task"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["compare", "softmax", *words, "--out", str(tmp_path / "out")])
        assert ended.value.code == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# tasks of `regard train`


def test_generated_pairs_are_training_data(tmp_path):
    table = tables.build("multi30k", "smoke", "--data.generated", "50")
    table.quality[0].check(Folder(tmp_path))


PAIRS = ["--data.source", "here", "--data.target", "here"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--task", "language"], "there is no training data: give --data.text; see regard train language --help"),
        (["--task", "language", "--data.txt", "a"], "unrecognized arguments: --data.txt"),
        (
            ["--task", "images", "--data.images", "a", "--training.precision", "bfloat16"],
            "training.precision bfloat16 is for a GPU, and the device is the CPU: give --training.precision float32",
        ),
        # of a file of the user's own, precision is an explicit choice
        (
            ["--task", "language", "--config", "halves.yaml", "--data.text", "here"],
            "training.precision bfloat16 is for a GPU",
        ),
        (["--table", "cifar10", "--data.valid_images", "a"], "there is no training data: give --data.images;"),
        (["--task", "classify"], "there is no training data: give --data.text;"),
        (["--task", "masked"], "there is no training data: give --data.text;"),
        (["--task", "captions"], "there is no training data: give --data.captions;"),
        (["--task", "translate"], "there is no training data: give --data.source or --data.generated;"),
        (["--task", "language", "--data.text", "a"], "--data.text a: no such file or folder"),
        (["--task", "masked", "--data.text", '["here", "a"]'], "--data.text a: no such file or folder"),
        (["--task", "language", "--data.text", "here", "--data.valid", "b"], "--data.valid b: no such file or folder"),
        (["--task", "classify", "--data.text", "here", "--data.labels", "b"], "--data.labels b: no such file or"),
        (["--task", "captions", "--data.captions", "a"], "--data.captions a: no such file or folder"),
        (["--task", "captions", "--data.captions", "here", "--data.images", "b"], "--data.images b: no such file or"),
        (["--task", "images", "--data.images", "a"], "--data.images a: no such file or folder"),
        (["--config", "settings.yaml", "--task", "images"], "--data.images c: no such file or folder"),
        (["--task", "images", "--data.images", "here", "--test.data", "b"], "--test.data b: no such file or folder"),
        (["--task", "language", "--data.text", "here", "--test.text", "b"], "--test.text b: no such file or folder"),
        (["--task", "language", "--data.text", "here", "--test.txet", "b"], "unrecognized arguments: --txet b"),
        (["--table", "wmt", *PAIRS, "--data.valid_source", "b"], "--data.valid_source b: no such file or folder"),
        (["--table", "multi30k", "--data.source", "here", "--data.target", "b"], "--data.target b: no such file or"),
        (["--table", "scaling", "--data.text", "a"], "--data.text a: no such file or folder"),
        (["--table", "arena", "--data.text", "a", "--test.text", "a"], "--data.text a: no such file or directory"),
    ],
)
def test_what_no_row_can_be_trained_with_is_said_once(tmp_path, capsys, monkeypatch, words, says):
    """Before anything is written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").write_text("some text\n")
    (tmp_path / "settings.yaml").write_text("data:\n  images: c\n")
    (tmp_path / "halves.yaml").write_text("training:\n  precision: bfloat16\n")
    with pytest.raises(SystemExit) as ended:
        main(["compare", *words, "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("regard compare: ")
    assert said.count(says) == said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def trained_precision(plan, folder):
    return plan.run_trial(plan.rows()[0][0], plan.grid()[0], 1, folder).config().training.precision


@pytest.mark.parametrize("name", ["multi30k", "imdb", "cifar10"])
def test_a_recipe_for_a_gpu_is_trained_in_float32_on_a_cpu(tmp_path, name):
    """And the table says so; other devices have the precision of the recipe, and a flag goes before it."""
    folder, data = Folder(tmp_path), recipe_tables.TABLES[name].data.split()
    on_cpu = tables.build(name, "smoke", *data).quality[0]
    on_gpu = dataclasses.replace(on_cpu, device="cuda")
    given = tables.build(name, "smoke", *data, "--training.precision=float16").quality[0]
    assert [trained_precision(plan, folder) for plan in (on_cpu, on_gpu, given)] == ["float32", "bfloat16", "float16"]
    recipe = recipe_tables.TABLES[name].recipe
    said = [line for line in score_header(Scores(on_cpu, folder)) if "precision" in line]
    assert len(said) == 1
    for fact in ("float32", "bfloat16", f"recipe {recipe}", "--device cuda", "CPU"):
        assert fact in said[0]
    for plan in (on_gpu, given, QualityPlan("language", flags=("--data.text", "a"))):
        assert not plan.lost_precision
        assert not any("precision" in line for line in score_header(Scores(plan, folder)))


def test_a_recipe_that_a_user_names_is_trained_in_float32_on_a_cpu(tmp_path):
    for config in (("--config", "wikitext"), ("--config=wikitext",)):
        plan = QualityPlan("language", flags=(*config, "--data.text", "a"))
        assert trained_precision(plan, Folder(tmp_path)) == "float32"
        assert "recipe wikitext has bfloat16" in plan.lost_precision
    # a file of the user's own may not be where the report is read
    assert not QualityPlan("language", flags=("--config", "settings", "--data.text", "a")).lost_precision


def test_what_is_finished_is_shown_without_its_data(tmp_path):
    """Only for cells that are left must the files be there."""
    flags = ("--data.text", str(tmp_path / "gone.txt"))
    asked = QualityPlan("language", specs=("linear",), rates=(0.001,), seeds=1, flags=flags)
    folder, environment = Folder(tmp_path / "out"), World({}).environment()
    with pytest.raises(ValueError, match=f"--data.text {flags[1]}: no such file or folder"):
        check_quality([asked], folder, environment)
    assert not folder.path.exists()
    answer = {"score": 1.0, "valid": 1.0, "metric": "loss", "higher_is_better": False, "updates": 1, "curve": []}
    answer |= {"seconds": 1.0, "device_seconds": 1.0}
    fill_quality([asked], folder, environment, lambda trial: ("done", "", (answer, {})))
    check_quality([asked], folder, environment)
    environment.force = True
    with pytest.raises(ValueError, match="no such file or folder"):
        check_quality([asked], folder, environment)


def test_standard_input_is_no_missing_file(tmp_path):
    QualityPlan("language", specs=("linear",), flags=("--data.text", "-")).check(Folder(tmp_path))


def test_flags_of_training_are_handed_on():
    words = ["softmax", "--task", "language", "--data.text", "a.txt", "--config=x.yaml", "linear", "--init", "run"]
    own, rest = split_flags(words)
    assert own == ["softmax", "--task", "language", "linear"]
    assert rest == ["--data.text", "a.txt", "--config=x.yaml", "--init", "run"]


def test_a_task_of_regard_train_goes_through_its_own_loop(tmp_path):
    torch.set_num_threads(1)
    book = tmp_path / "book.txt"
    book.write_text("the cat sat on the mat and the dog sat on the log\n" * 40)
    sizes = ["--model.width", "16", "--model.heads", "2", "--model.inner", "256", "--model.layers", "1"]
    data = ["--data.text", str(book), "--data.tokenizer", "bytes", "--data.length", "16", "--training.tokens", "64"]
    spec, budget = "gmlp(longest=16)", Budget("tokens", 256.0)
    run, own = (str(tmp_path / "run"),), ("--model.attention", spec)
    trial = RunTrial("language", (*data, *sizes), own, run, 0.01, 1, budget, equal=spec)
    answer, counted = learn_run(trial)
    assert answer["metric"] == "loss (validation)"
    assert not answer["higher_is_better"]
    assert answer["updates"] == 4
    assert answer["score"] == min(value for _, value in answer["curve"])
    facts = json.loads(Path(tmp_path / "run" / "run.json").read_text())
    # the width that makes its parameters equal to those of softmax
    assert facts["model"]["inner"] != 256
    assert counted["parameters"] == facts["parameters"]
    # a run that is there is not trained again, unless that is asked for: its data may be another
    assert learn_run(trial)[0]["curve"] == answer["curve"]
    book.write_text("a quick brown fox jumps over a lazy dog, he said\n" * 40)
    assert learn_run(dataclasses.replace(trial, afresh=True))[0]["curve"] != answer["curve"]
    plan, environment = QualityPlan("language", specs=("linear",), flags=tuple(data)), World({}).environment()
    for force in (False, True):
        environment.force = force
        assert Filling(plan, Folder(tmp_path), environment).trial(("linear", 0.01, 1)).afresh == force


def test_a_run_of_images_has_its_speed_where_none_trains_beside_it(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", images=draw.integers(0, 256, (40, 8, 8), np.uint8), labels=np.arange(40) % 2)
    sizes = ("--model.width", "16", "--model.heads", "2", "--model.inner", "32", "--model.layers", "1")
    data = ("--data.images", str(tmp_path / "data.npz"), "--data.batch", "8", "--training.log_every", "1")
    data = (*data, "--training.metric", "accuracy", "--augment.mixup", "0.8")
    rows = (Variant("softmax", sizes), Variant("linear", (*sizes, "--model.attention", "linear")))
    plan = QualityPlan("images", rates=(0.01,), seeds=1, axis="epochs", amount=1, flags=data, variants=rows, jobs=2)
    folder, held, counted = Folder(tmp_path / "out"), [], []
    images, steps = find("images"), loop.train
    read = images.read_data

    def reading(config):
        assert not (folder.path / "turn").exists()
        return read(config)

    def training(*given, **more):
        held.append((folder.path / "turn").exists())
        return steps(*given, **more)

    class Counted(Tally):
        def __init__(self):
            super().__init__()
            counted.append(self)

    # the next one reads its data while another trains
    monkeypatch.setattr(images, "read_data", reading)
    monkeypatch.setattr(loop, "train", training)
    monkeypatch.setattr(runs, "Tally", Counted)
    taking_turns = dataclasses.replace(plan, variants=rows[:1], exclusive=True)
    for asked in (taking_turns, plan):
        fill_quality([asked], folder, World({}).environment(), lambda trial: ("done", "", learn_run(trial)))
    assert held == [True, False]
    # the batches of an epoch have one shape
    assert len(counted) == 2
    scores = Scores(plan, folder)
    softmax, linear = scores.rows
    assert (softmax["speed"] > 0, softmax["speed_unit"]) == (True, "images")
    assert "speed" not in linear
    assert linear["flops"] != softmax["flops"] > 0
    lines = score_markdown(scores)
    assert any(" images/s |" in line for line in lines if line.startswith("| `softmax`"))
    assert any("| - |" in line for line in lines if line.startswith("| `linear`"))


def test_rows_of_experts_have_what_their_logs_say_of_them(tmp_path):
    """Means over the seeds; a dense row has no experts, and a table of such rows no active parameters."""
    torch.set_num_threads(1)
    (tmp_path / "pairs.tsv").write_text("a b c d\tc b a\nb c\tc b\nd d a\ta d d\nb b\tb b\n" * 4)
    pairs = str(tmp_path / "pairs.tsv")
    data = ("--data.source", pairs, "--data.valid_source", pairs, "--training.precision", "float32")
    data = (*data, "--training.log_every", "1", "--model.width", "16", "--model.heads", "2", "--model.inner", "32")
    plan = tables.build("experts", "smoke", *data, budget=Budget("updates", 2)).quality[0]
    plan, folder = dataclasses.replace(plan, seeds=2), Folder(tmp_path / "out")
    both, alone = (plan.only(rows) for rows in (("dense", "switch(experts=8)"), ("dense",)))
    fill_quality([both], folder, World({}).environment(), lambda trial: ("done", "", learn_run(trial)))
    scores = Scores(both, folder)
    dense, switch = scores.rows
    assert dense["active"] == dense["parameters"] < switch["active"] < switch["parameters"]
    assert not {"dropped", "busiest"} & dense.keys()
    logs = [Run.open(plan.run_trial(switch["spec"], 0.005, seed, folder).run).records() for seed in (1, 2)]
    last = [[line for line in log if line["event"] == "step"][-1]["layers"].values() for log in logs]
    assert [len(layers) for layers in last] == [4, 4]
    dropped = [layer["dropped"] for layers in last for layer in layers]
    assert switch["dropped"] == pytest.approx(sum(dropped) / len(dropped))
    busiest = [max(8 * max(layer["load"]) for layer in layers) for layers in last]
    assert switch["busiest"] == pytest.approx(sum(busiest) / 2)
    lines = score_markdown(scores)
    titles, of_dense, of_switch = (
        next(line for line in lines if line.startswith(start)).split(" | ")
        for start in ("| model |", "| `dense`", "| `switch")
    )
    shown = {title: (one, other) for title, one, other in zip(titles, of_dense, of_switch, strict=True)}
    assert shown["active"] == (f"{dense['active']:,}", f"{switch['active']:,}")
    assert shown["dropped"] == ("-", f"{100 * switch['dropped']:.1f}%")
    assert shown["busiest"] == ("-", f"{switch['busiest']:.1f}x")
    assert '"subject": "model"' in html_report(Results(None, folder, [both]))
    assert not {"active", "dropped"} & Scores(alone, folder).rows[0].keys()


def test_cells_beside_each_other_share_the_threads_of_the_host(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr(jobs, "learn_run", lambda trial: ({"threads": torch.get_num_threads()}, {}))
    before, found = torch.get_num_threads(), []
    plan = QualityPlan("images", rates=(0.01,), variants=(Variant("softmax"),), device="cuda", jobs=2)
    try:
        for asked in (plan, dataclasses.replace(plan, jobs=3)):
            trial = asked.run_trial("softmax", 0.01, 1, Folder(tmp_path))
            found.append(jobs.run_cell(trial)[2][0]["threads"])
    finally:
        torch.set_num_threads(before)
    assert found == [2, 1]
    assert dataclasses.replace(plan, jobs=1).run_trial("softmax", 0.01, 1, Folder(tmp_path)).threads == 0


def test_units_are_joined_into_words_once(tmp_path):
    """Files that flags name are replaced, compressed ones too; other flags stay."""
    with gzip.open(tmp_path / "a.en.gz", "wt") as file:
        file.write("a b@@ c\n\nd@@ e f\n")
    flags = ("--data.source", str(tmp_path / "a.en.gz"), "--model.width", "8", "--source", str(tmp_path / "a.en.gz"))
    found = joined_files(flags, str(tmp_path / "words"))
    assert Path(found[1]).read_text() == "a bc\n\nde f\n"
    assert (found[0], found[2:4], found[5]) == ("--data.source", ["--model.width", "8"], found[1])
    # a file that is not there yet is no refusal, which would be kept
    with pytest.raises(OSError, match="no such file"):
        joined_files(("--source", str(tmp_path / "b.en")), str(tmp_path / "words"))
    before = Path(found[1]).stat().st_mtime_ns
    assert joined_files(flags, str(tmp_path / "words")) == found
    assert Path(found[1]).stat().st_mtime_ns == before


@pytest.mark.exhaustive
def test_runs_are_scored_on_a_test_set_alone_and_as_an_ensemble(tmp_path):
    """From the pairs to the rows: equal counted operations, a row that is only decoded anew, an ensemble."""
    pairs = "".join(f"a {word} b\tx {word} y\n" for word in "cdefghijkl" * 8)
    (tmp_path / "pairs.tsv").write_text(pairs)
    sizes = ("--model.width", "16", "--model.heads", "2", "--model.inner", "32", "--model.layers", "1")
    variants = (
        Variant("tiny", ("--model.preset", "tiny", *sizes)),
        Variant("tiny, greedy", of="tiny", test=("--beam", "1")),
        Variant("tiny, ensemble", of="tiny", ensemble=True),
    )
    data = [part for flag in ("source", "valid_source") for part in (f"--data.{flag}", str(tmp_path / "pairs.tsv"))]
    data = (*data, "--data.tokenizer", "units", "--training.tokens", "128")
    more = {"flags": data, "test": ("--source", str(tmp_path / "pairs.tsv")), "variants": variants, "jobs": 2}
    asked = QualityPlan("translate", rates=(0.01,), seeds=2, axis="flops", amount=2e8, **more)
    folder = Folder(tmp_path / "out")
    fill_quality([asked], folder)
    rows = {row["spec"]: row for row in Scores(asked, folder).rows}
    assert {spec: row["status"] for spec, row in rows.items()} == dict.fromkeys(rows, "done")
    assert [rows[spec]["seeds"] for spec in rows] == [2, 2, 1]
    assert rows["tiny"]["flops"] == pytest.approx(2e8, rel=0.2)
    assert rows["tiny, ensemble"]["flops"] == pytest.approx(2 * rows["tiny"]["flops"], rel=0.01)
    assert Scores(asked, folder).metric == "bleu (test)"
    # what each sentence adds to the score has that score
    for spec, cells in Scores(asked, folder).cells.items():
        for cell in cells:
            counts = np.array([[int(count) for count in line.split()] for line in cell.answer["sentences"]])
            totals = np.maximum(counts[:, 4:5] - np.arange(4), 0)
            whole = corpus_bleu(np.concatenate([counts, totals], 1).sum(0))
            assert len(counts) == 80, spec
            assert whole == pytest.approx(cell.answer["score"], abs=1e-9), spec
    assert len(list((tmp_path / "out" / "runs").glob("*/run.json"))) == 2
