"""How long a run trains: fitted to a budget and to the machine once, then the same however often it is interrupted; and
what may change in a run that has begun. Clocks are made up: nothing here waits."""

import dataclasses
import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml
from torch.testing import assert_close
from training_runs import assert_same, config, dying, finish, in_child
from verbs import refused, told

from regard import tasks
from regard.tasks import train as train_module
from regard.tasks.load import read_config
from regard.tasks.train import resume, train
from regard.tasks.translate import Task, TranslateConfig
from regard.tasks.translate.task import vocabulary
from regard.training import changes, checkpoint, display, loop, plan
from regard.training.config import TrainingConfig
from regard.training.display import Display
from regard.training.plan import Plan, Speed
from regard.training.run import Run
from regard.training.schedule import FIRST_WARMUP, learning_rate

OPEN = {"steps": None, "evaluate_every": None, "save_every": None, "warmup": None}


class Clock:
    """Time that only passes in steps, evaluations and checkpoints."""

    def __init__(self, step: float = 1.0, evaluation: float = 3.0, save: float = 1.0):
        self.now, self.costs = 1000.0, {"_next_batch": step, "_measure_validation": evaluation, "_save": save}

    def monotonic(self) -> float:
        return self.now

    def set(self, patch) -> "Clock":
        for name, cost in self.costs.items():
            patch.setattr(loop.Loop, name, self.slow(getattr(loop.Loop, name), cost))
        for module in (loop, train_module, display):
            patch.setattr(module, "time", self)
        return self

    def slow(self, original, cost):
        def call(*arguments):
            found = original(*arguments)
            self.now += cost
            return found

        return call


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock().set(monkeypatch)


def made(settings: TranslateConfig) -> Plan:
    return plan.read(Run(settings.out))


# the budget


@pytest.mark.parametrize("minutes", [1, 2])
def test_a_run_takes_the_minutes_it_was_given(tmp_path, clock, minutes):
    settings = config(tmp_path, **OPEN, minutes=minutes, average=2)
    began = clock.now
    state = finish(settings)
    found = made(settings)
    assert state.step == found.steps
    assert 0.93 * 60 * minutes <= clock.now - began <= 60 * minutes
    assert (found.seconds_per_step, found.seconds_per_evaluation, found.minutes) == (1.0, 4.0, minutes)
    events = [record for record in Run(settings.out).records() if record["event"] != "step"]
    assert events[0] == {"event": "plan", "step": found.measured} | dataclasses.asdict(found)
    # evaluations get at most a tenth of the time
    assert [record["event"] for record in events[1:]].count("evaluation") == {1: 1, 2: 3}[minutes]
    # the config stays what was asked for
    assert yaml.safe_load((Path(settings.out) / "config.yaml").read_text())["training"]["steps"] is None


def test_evaluations_and_checkpoints_that_were_asked_for_count(tmp_path, clock):
    settings = config(tmp_path, steps=None, warmup=None, minutes=2, evaluate_every=10, save_every=5)
    began = clock.now
    finish(settings)
    assert made(settings).evaluate_every == 10
    assert 0.9 * 120 <= clock.now - began <= 1.02 * 120


def test_without_a_wish_the_data_decide_or_the_time(tmp_path, clock, monkeypatch, capsys):
    """Some passes over few pairs are soon done; over many they would take too long."""
    monkeypatch.setattr(Task, "epochs", 20)
    monkeypatch.setattr(plan, "STEPS", 10)
    settings = config(tmp_path, "few", **OPEN, tokens=400)
    train(Task, settings, Display())
    found, said = made(settings), capsys.readouterr().err
    epoch = Task(*_ready(settings)).batches.count(0)
    assert found.steps == 20 * epoch
    assert f"plan: {found.steps} steps (20 epochs), about" in said
    assert "--training.minutes N or --training.steps N" in said
    monkeypatch.setattr(Task, "epochs", 1e6)
    monkeypatch.setattr(plan, "MINUTES", 1.0)
    settings = config(tmp_path, "many", **OPEN)
    began = clock.now
    finish(settings)
    assert 0.9 * 60 <= clock.now - began <= 60


def _ready(settings):
    from regard import models

    data = Task.read_data(settings)
    tokenizers = Task.train_tokenizers(data, settings)
    return settings, data, tokenizers, models.build(Task.model_config(settings, tokenizers, data))


def test_a_slow_evaluation_is_cut_short_and_planned_once(tmp_path, clock, monkeypatch):
    """A model that has learned nothing yet may write long sentences: the budget is not for that."""
    calls, original = [], Task.evaluate

    def slow(self, check):
        if not calls:
            calls.append(clock.now)
            for _ in range(100):
                clock.now += 1.0
                check()
        return original(self, check)

    monkeypatch.setattr(Task, "evaluate", slow)
    settings = config(tmp_path, **OPEN, minutes=1)
    began = clock.now
    finish(settings)
    found = made(settings)
    assert (found.seconds_per_evaluation, found.evaluate_every) == (2 * 3.0 + 1.0, found.steps)
    assert 0.9 * 60 <= clock.now - began <= 60


def test_epochs_are_counted_in_steps(tmp_path):
    settings = config(tmp_path, **OPEN, epochs=1.5, accumulate=2)
    state = finish(settings)
    batches = Task(*_ready(settings)).batches
    assert state.step == made(settings).steps == round(1.5 * batches.count(0) / 2)


def test_minutes_and_epochs_end_at_the_first(tmp_path, clock):
    settings = config(tmp_path, **OPEN, epochs=4, minutes=100)
    finish(settings)
    assert made(settings).steps == 4 * Task(*_ready(settings)).batches.count(0)


def test_how_long_is_said_once():
    with pytest.raises(ValueError, match=r"training.steps 5 and training.minutes 2 both say how long"):
        TrainingConfig(steps=5, minutes=2.0)
    with pytest.raises(ValueError, match=r"training.steps 5 and training.epochs 2 both say how long"):
        TrainingConfig(steps=5, epochs=2.0)
    for minutes in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"training\.minutes must be above 0"):
            TrainingConfig(minutes=minutes)


def test_the_measuring_is_long_enough_and_no_longer():
    ten, nothing, many = TrainingConfig(minutes=10), TrainingConfig(), 10**6
    assert not plan.is_timed_enough(100, 1.0, ten, many)  # too short to tell
    assert not plan.is_timed_enough(5, 20.0, ten, many)  # too few
    assert plan.is_timed_enough(12, 12.0, ten, many)
    assert plan.is_timed_enough(6, 60.0, ten, many)  # slow steps may not eat the budget
    assert not plan.is_timed_enough(1, 60.0, ten, many)  # the first of all is no measure
    assert plan.is_timed_enough(12, 18.0, nothing, many)
    assert plan.is_timed_enough(12, 1.0, nothing, 120)  # nor a tenth of the training
    assert not plan.is_timed_enough(12, 1.0, ten, 120)


def test_a_first_step_that_is_compiled_does_not_count(tmp_path, clock, monkeypatch):
    """It takes as long as many others: neither the budget nor the speed is judged by it."""
    original, calls = loop.Loop._next_batch, []

    def compiled(self):
        calls.append(1)
        clock.now += 20.0 if len(calls) == 1 else 0.0
        return original(self)

    monkeypatch.setattr(loop.Loop, "_next_batch", compiled)
    settings = config(tmp_path, **OPEN, minutes=1.5)
    began = clock.now
    finish(settings)
    found = made(settings)
    assert (found.measured, found.seconds_per_step) == (10, 1.0)
    assert 0.9 * 90 <= clock.now - began <= 90


def test_few_data_get_some_steps_all_the_same():
    nothing, epochs = TrainingConfig(), TrainingConfig(epochs=2)
    assert [plan.most_steps(nothing, 20, an_epoch) for an_epoch in (1, 25, 1000.5)] == [500, 500, 20010]
    assert plan.most_steps(epochs, 20, 3.5) == 7


def test_a_plan_has_at_least_one_more_step():
    for wish in (TrainingConfig(minutes=0.1), TrainingConfig(), TrainingConfig(minutes=0.1, evaluate_every=3)):
        found = plan.make_plan(wish, 4, 50.0, Speed(2000.0, 100.0, 1.0), 1)
        assert (found.steps, found.warmup) == (5, 4)
    assert plan.make_plan(TrainingConfig(minutes=10, warmup=2), 9, 9.0, Speed(1.0, 0.0, 0.0), 1).warmup == 9


# the learning rate


@pytest.mark.parametrize("schedule", ["paper", "cosine", "inverse_root", "constant"])
def test_the_first_steps_do_not_depend_on_the_plan(schedule):
    asked = TrainingConfig(schedule=schedule, learning_rate=2.0 if schedule == "paper" else 0.01)
    one, other = (Plan(steps, warmup, 10, measured=20).apply(asked) for steps, warmup in ((60, 25), (90_000, 900)))
    for step in range(1, 21):
        first = learning_rate(asked, step, 64, None)
        assert first == learning_rate(one, step, 64, 20) == learning_rate(other, step, 64, 20)
    # from there it rises to the same peak as ever, without a jump
    for planned in (one, other):
        rates = [learning_rate(planned, step, 64, 20) for step in range(1, planned.warmup + 2)]
        assert rates == sorted(rates[:-1]) + rates[-1:]
        assert_close(rates[-2], learning_rate(planned, planned.warmup, 64))
    assert_close(learning_rate(asked, FIRST_WARMUP + 7, 64, None), 0.01) if schedule != "paper" else None
    assert all(learning_rate(other, step, 64, 20) == learning_rate(other, step, 64) for step in (900, 1000, 80_000))


def test_a_run_follows_the_rates_of_its_plan(tmp_path, clock):
    settings = config(tmp_path, **OPEN, minutes=1, schedule="cosine", learning_rate=0.01)
    finish(settings)
    found = made(settings)
    log = {record["step"]: record["learning_rate"] for record in Run(settings.out).records() if "norm" in record}
    assert sorted(log) == list(range(1, found.steps + 1))
    assert_close(log[1], 0.01 / FIRST_WARMUP)
    assert_close(log[found.warmup], 0.01)
    assert log[found.steps] < 1e-6


# exactness

DEATHS = {
    "before the plan": [(loop.Loop, "_update", 2)],
    "before the plan is written": [(plan, "make_plan", 1)],
    "in the writing of the plan": [(plan, "write", 1)],
    "just after the plan": [(loop.Loop, "_update", 5)],
    "later": [(loop.Loop, "_update", 15)],
    "twice": [(loop.Loop, "_update", 6), (loop.Loop, "_update", 8)],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> TranslateConfig:
    torch.set_num_threads(1)
    settings = config(tmp_path_factory.mktemp("whole"), **OPEN, minutes=0.5)
    with pytest.MonkeyPatch.context() as patch:
        Clock(evaluation=0.0, save=0.0).set(patch)
        finish(settings)
    assert made(settings).measured == 4 < made(settings).steps == 30
    return settings


@pytest.mark.parametrize("deaths", DEATHS.values(), ids=DEATHS)
def test_killed_runs_keep_their_plan_and_go_on_bit_for_bit(whole, tmp_path, monkeypatch, deaths):
    (tmp_path / "pairs.tsv").write_bytes(Path(whole.data.source).read_bytes())
    settings = config(tmp_path, **OPEN, minutes=0.5)
    Clock(evaluation=0.0, save=0.0).set(monkeypatch)
    for index, death in enumerate(deaths):

        def work(index=index, death=death):
            dying(*death)
            finish(settings) if index == 0 else resume(settings.out, Display(quiet=True))

        assert in_child(work) == -signal.SIGKILL
    planned = plan.read(Run(settings.out))
    if planned is not None:
        # a machine of another speed: the plan stays
        Clock(step=7.0, evaluation=9.0).set(monkeypatch)
        assert planned == made(whole)
    if deaths is DEATHS["in the writing of the plan"] or deaths is DEATHS["before the plan is written"]:
        # the steps before it were saved, and those after them are measured anew
        assert resume(settings.out, Display(quiet=True)).step == made(settings).steps
        assert made(settings).measured == 8
        return
    resume(settings.out, Display(quiet=True))
    assert_same(whole.out, settings.out)


# what may change


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """At step 7 of 300, with its data beside it."""
    torch.set_num_threads(1)
    settings = config(tmp_path_factory.mktemp("begun"), steps=300, save_every=7, evaluate_every=100)

    def work():
        dying(loop.Loop, "_update", 8)
        finish(settings)

    assert in_child(work) == -signal.SIGKILL
    return Path(settings.out)


@pytest.fixture
def run(begun, tmp_path) -> Path:
    return shutil.copytree(begun, tmp_path / "run")


def test_what_would_shorten_a_run_is_refused(run, capsys):
    before = {path: path.read_bytes() for path in run.rglob("[!.]*") if path.is_file()}
    for flags, words in (
        (["--steps", "5"], "5 steps would shorten"),
        (["--training.steps", "299"], "is planned for 300 steps and stands at step 7"),
        (["--training.minutes", "1e-9"], "1e-09 minutes in all, about 8 steps at the speed so far, would shorten"),
        (["--steps", "400", "--training.minutes", "9"], "both say how long to train"),
        (["--training.steps", "null"], "must be a number of updates"),
        (["--training.learning_rate", "-1"], "training.learning_rate must be above 0"),
        (["--training.learning_rate", "much"], "learning_rate must be"),
        (["--data.text", "here"], "has no text"),
        (["--training.processes", "0"], "training.processes must be at least 1, got 0"),
        (["--training.processes", "two"], "processes must be"),
    ):
        assert words in refused(capsys, "resume", str(run), *flags)
    with pytest.raises(
        ValueError, match=r"training\.seed cannot change in a run that has begun; these can: training\.steps"
    ):
        resume(run, Display(quiet=True), changes={"training.seed": 3})
    after = {path: path.read_bytes() for path in run.rglob("[!.]*") if path.is_file()}
    assert before == after


def test_a_run_of_unknown_length_is_not_shortened_either(tmp_path, clock):
    settings = config(tmp_path, **OPEN | {"save_every": 4}, minutes=100)
    assert in_child(lambda: (dying(loop.Loop, "_update", 7), finish(settings))) == -signal.SIGKILL
    with pytest.raises(ValueError, match=r"3 steps would shorten .*which stands at step 4"):
        resume(settings.out, Display(quiet=True), steps=3)
    assert resume(settings.out, Display(quiet=True), steps=6).step == 6


def test_settings_that_may_change_do_and_the_run_records_it(run, tmp_path, capsys, monkeypatch):
    data = shutil.copy(yaml.safe_load((run / "config.yaml").read_text())["data"]["source"], tmp_path / "moved.tsv")
    wishes = {
        "training.learning_rate": 0.5,
        "training.evaluate_every": 4,
        "training.save_every": None,
        "data.source": str(data),
    }
    monkeypatch.setattr(loop.Loop, "_is_finished", lambda self: self.state.step == 9)
    resume(run, Display(), changes=wishes)
    said = capsys.readouterr().err
    assert "training.learning_rate: 0.5, was 0.003" in said
    now = yaml.safe_load((run / "config.yaml").read_text())
    assert [now["training"]["learning_rate"], now["data"]["source"]] == [0.5, str(data)]
    records = Run(run).records()
    change = next(record for record in records if record["event"] == "change")
    assert change["step"] == 7
    assert change["changes"]["training.learning_rate"] == [0.003, 0.5]
    assert [record["step"] for record in records if record["event"] == "evaluation"] == [8]
    settings = read_config(Run(run)).training
    expected = learning_rate(plan.read(Run(run)).apply(settings), 8, 16)
    assert_close(next(record for record in records if record["step"] == 8)["learning_rate"], expected)
    facts = json.loads((run / "run.json").read_text())
    (known,) = facts["changes"]
    assert known["step"] == 7
    assert known["training.evaluate_every"] == [100, 4]
    # and goes on with them, without being told again
    monkeypatch.setattr(loop.Loop, "_is_finished", lambda self: self.state.step == 12)
    assert resume(run, Display(quiet=True)).evaluated == 12
    assert len(json.loads((run / "run.json").read_text())["changes"]) == 1


def test_a_run_gets_more_minutes(tmp_path, clock):
    settings = config(tmp_path, **OPEN, minutes=1)
    began = clock.now
    finish(settings)
    before = made(settings)
    resume(settings.out, Display(quiet=True), changes={"training.minutes": 2})
    after = made(settings)
    assert 0.9 * 120 <= clock.now - began <= 1.05 * 120
    assert after.steps > 1.8 * before.steps
    assert dataclasses.replace(after, steps=before.steps, minutes=before.minutes) == before
    # also one that was begun with steps
    settings = config(tmp_path, "steps", steps=30, warmup=3, evaluate_every=10, save_every=None)
    began = clock.now
    finish(settings)
    state = resume(settings.out, Display(quiet=True), changes={"training.minutes": 1})
    assert 0.9 * 60 <= clock.now - began <= 1.05 * 60
    assert (state.step, made(settings).warmup) == (made(settings).steps, 3)


def test_every_name_that_may_change_is_a_setting():
    from regard.config import names

    known = {name for kind in tasks.TASKS for name in names(tasks.find(kind).config)}
    assert set(changes.NAMES) <= known


# what is said


def test_another_number_of_threads_is_said(run, capsys, monkeypatch):
    assert checkpoint.newest(run / "checkpoints").checkpoint.state["threads"] == 1
    monkeypatch.setattr(loop.Loop, "_is_finished", lambda self: self.state.step == 8)
    resume(run, Display())
    assert "trained with" not in capsys.readouterr().err
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    resume(run, Display())
    assert "trained with 1 threads so far, now with 2" in capsys.readouterr().err


def test_a_lost_log_is_said(run, capsys, monkeypatch):
    monkeypatch.setattr(loop.Loop, "_is_finished", lambda self: True)
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    for content, words in (
        (None, "log.jsonl is missing, the checkpoint is of step 7"),
        ("", "log.jsonl ends at step 0"),
        ("".join(lines[:3]), "log.jsonl ends at step 3"),
        ("".join(lines), None),
    ):
        (run / "log.jsonl").unlink(missing_ok=True)
        if content is not None:
            (run / "log.jsonl").write_text(content)
        resume(run, Display())
        said = capsys.readouterr().err
        assert (words in said) if words else ("is lost" not in said)


def test_the_time_left_is_that_of_this_process(run, clock, capsys, monkeypatch):
    """The process before was slower, or faster: its seconds say nothing."""
    monkeypatch.setattr(loop.Loop, "_is_finished", lambda self: self.state.step == 10)
    resume(run, Display())
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step")]
    assert [line.rsplit("  ", 1)[1] for line in lines] == ["0:04:52 left", "0:04:51 left", "0:04:50 left"]


def test_the_time_left_is_not_made_up_before_there_is_a_plan(tmp_path, clock, capsys):
    train(Task, config(tmp_path, **OPEN, minutes=0.5), Display())
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step")]
    assert "left" not in lines[3]
    assert "left" in lines[4]


def test_the_speed_counts_tokens_that_are_read(tmp_path, clock, monkeypatch):
    """Not the labels of a classifier, the hidden tokens of a masked model, or what an earlier process read."""
    from regard.data.batches import Examples
    from regard.data.masking import Hidden
    from regard.tasks import masked
    from regard.tasks.classify import task as classification

    keep = torch.tensor([[True, True, True], [True, False, False]])
    tokens = torch.zeros(2, 3, dtype=torch.long)
    examples = Examples(**{name: None for name in Examples._fields} | {"tokens": tokens, "keep": keep})
    hidden = Hidden(**{name: None for name in Hidden._fields} | {"tokens": tokens, "keep": keep})
    assert classification.Task.count_tokens_read(None, examples) == masked.Task.count_tokens_read(None, hidden) == 4
    assert classification.Task.count_tokens_read(None, examples._replace(keep=None)) == 6
    assert masked.Task.count_tokens_read(None, hidden._replace(keep=None)) == 6
    # a line of the log that two processes share: the speed is that of the second
    settings = config(tmp_path, log_every=5, save_every=3, steps=5)
    monkeypatch.setattr(Task, "count_tokens_read", lambda self, batch: 1000)
    assert in_child(lambda: (dying(loop.Loop, "_update", 5), finish(settings))) == -signal.SIGKILL
    resume(settings.out, Display(quiet=True))
    (line,) = [record for record in Run(settings.out).records() if record["event"] == "step"]
    assert line["tokens_per_second"] == 1000


def test_flags_of_every_task_take_minutes(monkeypatch, capsys):
    for name in tasks.TASKS:
        out, _ = _printed(monkeypatch, capsys, "train", name, "--training.minutes", "2.5", "--print_config")
        values = yaml.safe_load(out)["training"]
        assert (values["minutes"], values["steps"], values["epochs"]) == (2.5, None, None)


def _printed(monkeypatch, capsys, *words):
    from regard import cli

    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    assert ended.value.code == 0
    return capsys.readouterr()


def test_what_is_left_open_is_chosen_and_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "pairs.tsv").write_text("".join(f"one two {n}\teins zwei {n}\n" for n in range(60)))
    flags = ["--data.source", str(tmp_path / "pairs.tsv"), "--out", str(tmp_path / "run"), "--training.steps", "2"]
    sizes = ["--model.width", "8", "--model.heads", "2", "--model.inner", "8"]
    _, said = told(monkeypatch, capsys, "train", "translate", *flags, *sizes)
    values = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    found = [values["data"]["vocabulary"], values["model"]["preset"], values["training"]["learning_rate"]]
    assert found == [1000, "mini", 0.003]
    assert (values["model"]["width"], values["training"]["tokens"]) == (8, 1024)
    assert "on a CPU: data.vocabulary 1,000, model.preset mini, model.norm pre, training.learning_rate 0.003" in said
    assert "training.tokens 1,024, chosen for a CPU" in said
    assert json.loads((tmp_path / "run" / "run.json").read_text())["model"]["layers"] == 2


def test_what_is_given_is_not_chosen(tmp_path):
    settings = config(tmp_path, learning_rate=0.02)
    given = dataclasses.replace(settings, model=dataclasses.replace(settings.model, preset="lstm"))
    assert Task.complete_config(given, Task.read_data(given)) == (given, [])
    paper = config(tmp_path, schedule="paper")
    assert Task.complete_config(paper, Task.read_data(paper))[0].training.learning_rate is None
    assert [vocabulary(pairs) for pairs in (10, 5_000, 30_000, 120_000, 10**7)] == [1000, 1500, 4000, 8000, 8000]
