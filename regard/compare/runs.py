"""Quality cells of the tasks of `regard train`: the user's own data and flags, through the task's own loop. The score
is that of validation, or with a test set what `regard evaluate` says."""

import dataclasses
import hashlib
import io
import itertools
import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard import recipes
from regard import tasks as run_tasks
from regard.compare import budget
from regard.compare.budget import Budget
from regard.compare.learn import CURVE_POINTS, Diverged
from regard.compare.plan import BASELINE
from regard.compare.question import shared_code
from regard.config import parse
from regard.core.tally import Tally
from regard.data.text import STANDARD_INPUT, BadText, opened, read_sentences
from regard.tasks.command import read_evaluation
from regard.tasks.load import pick_device, read_config, read_parts
from regard.tasks.train import resume, train
from regard.training import lock
from regard.training.display import Display, summarize_experts
from regard.training.loop import LOWER_IS_BETTER, TrainingError
from regard.training.run import Run
from regard.training.state import State

FILES = ("source", "target", "valid_source", "valid_target")  # flags of translate that name text
COUNTED_BATCHES = 4  # batches of which operations are counted


@dataclass(frozen=True)
class RunTrial:
    """What a quality cell trains by `regard train`, or evaluates."""

    task: str
    flags: tuple[str, ...]  # of all rows
    row_flags: tuple[str, ...]  # of this row
    runs: tuple[str, ...]  # folders: that of the cell, or those of an ensemble
    rate: float
    seed: int
    budget: Budget
    device: str = "cpu"
    test: tuple[str, ...] = ()  # flags of `regard evaluate`; empty: the score is that of validation
    trains: bool = True  # False: the runs are there
    equal: str = ""  # the spec whose parameters are made equal to those of the baseline; empty: they stay
    words: str = ""  # folder for files in which subword units are joined into words; empty: files are read as they are
    alone: bool = True  # no other cell trains meanwhile, so that its speed is one to compare
    turns: str = ""  # lock file that a training holds, for one at a time; empty: none
    threads: int = 0  # of the CPU, beside other cells; 0: chosen by PyTorch
    afresh: bool = False  # a run that is there is trained again from its beginning

    @property
    def run(self) -> str:
        """The folder of the run."""
        return self.runs[0]

    def command(self) -> list[str]:
        """The command line behind `regard train TASK`."""
        common = ["--out", self.run, "--training.learning_rate", f"{self.rate:g}", "--training.seed", str(self.seed)]
        common += ["--training.device", self.device, "--training.tensorboard", "false"]
        flags = joined_files(self.flags, self.words) if self.words else list(self.flags)
        return [*recipes.with_paths(flags, self.task), *self.row_flags, *common]

    def turn(self) -> AbstractContextManager[None]:
        """Waits until no other cell trains, where cells take turns."""
        return lock.hold(Path(self.turns), "regard compare", waits=True) if self.turns else nullcontext()

    def config(self, *words: str) -> Any:
        """The config of the run, with more flags."""
        task = run_tasks.find(self.task)
        return parse(task.config, [*self.command(), *words], f"regard train {task.name}", "")


def check_run(trial: RunTrial) -> None:
    """Raises ValueError where no row can be trained and scored: by a wrong flag, without data, or in a precision that
    the device does not have."""
    task = run_tasks.find(trial.task)
    config = dataclasses.replace(trial, row_flags=(), words="").config()
    if task.trains_on and all(getattr(config.data, flag) is None for flag in task.trains_on):
        known = " or ".join(f"--data.{flag}" for flag in task.trains_on)
        raise ValueError(f"there is no training data: give {known}; see regard train {trial.task} --help")
    pick_device(config.training.device, config.training.precision)
    _check_files("--data", config.data, task.data_files)
    if trial.test:
        _, asked = _read_test(trial.task, [trial.run, *trial.test])
        _check_files("--test", asked, task.test_files)


def _check_files(section: str, settings: Any, names: Sequence[str]) -> None:
    """Raises ValueError where a setting names a file or a folder that does not exist."""
    for name in names:
        value = getattr(settings, name)
        for path in value if isinstance(value, list) else [value]:
            if path not in (None, STANDARD_INPUT) and not Path(path).exists():
                raise ValueError(f"{section}.{name} {path}: no such file or folder")


def learn_run(trial: RunTrial) -> tuple[dict[str, Any], dict[str, int]]:
    """Trains a run, or continues it, and returns the answer of the cell and its counts."""
    began = time.monotonic()
    if trial.trains:
        _train(trial)
    answer, counted = _answer(Path(trial.run))
    if trial.trains and trial.alone:
        answer |= _speed(Path(trial.run), run_tasks.find(trial.task).speed_unit)
    if trial.test or len(trial.runs) > 1:
        answer |= _evaluated(trial, answer["metric"])
    if not trial.trains:
        answer["curve"], answer["rising"] = [], False
        counted = {name: len(trial.runs) * amount for name, amount in counted.items()}
        answer["device_seconds"] = sum(_costs(Path(run)).get("seconds", 0.0) for run in trial.runs)
    answer["metric"] += " (test)" if trial.test else " (validation)"
    return answer | {"seconds": round(time.monotonic() - began, 2)}, counted


def _train(trial: RunTrial) -> None:
    """Trains a run to its end, or what is left of it, and keeps what it cost beside it."""
    folder = Path(trial.run)
    try:
        is_there = (folder / "run.json").exists() and not trial.afresh
        state = _continue(trial) if is_there else _begin(trial)
    except TrainingError as error:
        raise Diverged(str(error)) from error
    _keep_costs(folder, seconds=round(state.seconds, 1))


def _continue(trial: RunTrial) -> State:
    return resume(trial.run, Display(quiet=True), turn=trial.turn())


def _begin(trial: RunTrial) -> State:
    """Trains a new run: as many parameters as the baseline's, and as much of what the budget counts."""
    task = run_tasks.find(trial.task)
    words = ["--model.inner", str(_inner(trial))] if trial.equal and has_free_inner(trial.config()) else []
    counts = _counts(trial, words)
    words += _duration(trial, trial.config(*words), counts)
    folder = Path(trial.run)
    # what a kill left behind before there was anything to continue from
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _keep_costs(folder, **counts)
    return train(task, trial.config(*words), Display(quiet=True), turn=trial.turn())


def _counts(trial: RunTrial, words: list[str]) -> dict[str, float]:
    """What an update of a row costs; it is counted once for all seeds, rates and budgets."""
    code = shared_code("models", "layers")
    about = [trial.task, trial.device, bool(trial.words), code, *trial.flags, *trial.row_flags, *words]
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]
    path = Path(trial.run).parent / f"counts-{key}.json"
    if trial.afresh or not path.exists():
        task = run_tasks.find(trial.task)
        counts = count_run(task, trial.config(*words, "--training.seed", "0"))
        _write_whole(path, json.dumps(counts))
    return json.loads(path.read_text(encoding="utf-8"))


def _write_whole(path: Path, text: str) -> None:
    """Writes a file that other processes may write as well, with the same text: each sees it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _costs(folder: Path) -> dict[str, float]:
    """What a run cost: counted operations of an update, and seconds."""
    # beside the run, which must not exist before it begins
    path = folder.with_suffix(".json")
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _keep_costs(folder: Path, **costs: float) -> None:
    folder.with_suffix(".json").write_text(json.dumps(_costs(folder) | costs), encoding="utf-8")


def _duration(trial: RunTrial, config: Any, counts: dict[str, float]) -> list[str]:
    axis, amount = trial.budget.axis, trial.budget.amount
    if axis == "minutes":
        return ["--training.minutes", f"{amount:g}", "--training.steps", "null", "--training.epochs", "null"]
    if axis == "tokens" and config.training.tokens is None:
        raise ValueError("a budget of tokens needs --training.tokens, the tokens of a batch")
    each = {"updates": 1.0, "flops": counts["flops"], "epochs": 1 / counts["epoch"]}
    if axis == "tokens":
        each["tokens"] = config.training.tokens * config.training.accumulate
    steps = max(1, int(amount / (each[axis] or 1.0)))
    words = ["--training.steps", str(steps), "--training.minutes", "null", "--training.epochs", "null"]
    if config.training.evaluate_every is None:
        words += ["--training.evaluate_every", str(math.ceil(steps / CURVE_POINTS))]
    return words


def has_free_inner(config: Any) -> bool:
    """Whether the feed-forward width of the model may be chosen: a pretrained model has its own."""
    return hasattr(config.model, "inner") and getattr(config, "init", None) in (None, "none")


class Parts(NamedTuple):
    """What a config makes of its data."""

    config: Any
    data: Any
    tokenizers: Any
    model: Any  # its config


def _parts(task: Any, config: Any) -> Parts:
    data = task.read_data(config)
    config, _ = task.complete_config(config, data)
    config, _ = task.choose_batch_size(config, "cpu" if config.training.device == "cpu" else "cuda")
    tokenizers = task.train_tokenizers(data, config)
    return Parts(config, data, tokenizers, task.model_config(config, tokenizers, data))


def _inner(trial: RunTrial) -> int:
    """The feed-forward width with which the model has as many parameters as that of the baseline."""
    task = run_tasks.find(trial.task)
    built = {spec: _parts(task, trial.config("--model.attention", spec)).model for spec in (BASELINE, trial.equal)}
    target, _ = budget.count(built[BASELINE])
    sized = budget.equalize_parameters(built[trial.equal], target)
    if sized.over:
        raise budget.OverBudget(sized.over)
    return sized.inner or built[trial.equal].inner


def count_run(task: Any, config: Any) -> dict[str, float]:
    """What an update costs, as a mean over some batches: counted operations; and the updates of an epoch. Counted on
    the CPU, so that no kernel hides any, on the batches of the device, which may pad them otherwise; those of one shape
    are counted once."""
    parts = _parts(task, config)
    training = dataclasses.replace(parts.config.training, device="cpu", precision="float32")
    ready = _build(task, parts._replace(config=dataclasses.replace(parts.config, training=training)), "cpu")
    device = pick_device(parts.config.training.device, parts.config.training.precision)
    epoch = ready.batches if device.type == "cpu" else _build(task, parts, device).batches
    ready.model.train()
    batches = [epoch.get(0, at) for at in range(min(COUNTED_BATCHES, epoch.count(0)))]
    shapes = [tuple(None if part is None else part.shape for part in batch) for batch in batches]
    flops: dict[tuple[Any, ...], int] = {}
    for shape, batch in zip(shapes, batches, strict=True):
        if shape not in flops:
            prepared = ready.prepare(batch)
            with Tally() as tally:
                ready.loss(prepared, 0.0).total.backward()
            flops[shape] = tally.flops
    mean = sum(flops[shape] for shape in shapes) / len(shapes)
    accumulate = config.training.accumulate
    return {"flops": mean * accumulate, "epoch": epoch.count(0) / accumulate}


def _build(task: Any, parts: Parts, device: torch.device | str) -> Any:
    torch.manual_seed(0)
    model = task.build_model(parts.config, parts.model).to(device)
    return task(parts.config, parts.data, parts.tokenizers, model)


def _answer(folder: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The answer of a finished run, from its log and its facts."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [line for line in lines if line["event"] == "evaluation"]
    facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    metric = read_config(Run.open(folder)).training.metric
    lower = metric in LOWER_IS_BETTER
    curve = [[line["step"], line[metric]] for line in found]
    if not curve:
        raise ValueError(f"{folder} has no evaluation in its log")
    score = (min if lower else max)(value for _, value in curve)
    updates = curve[-1][0]
    answer = {
        "metric": metric,
        "higher_is_better": not lower,
        "valid": score,
        "score": score,
        "groups": {},
        "curve": curve,
        "updates": updates,
        "epochs": found[-1]["epoch"],
        "rising": curve[-1][1] == score and len(curve) > 1,
        "run": str(folder),
        "device_seconds": _costs(folder).get("seconds", 0.0),
    }
    steps = [line for line in lines if line["event"] == "step"]
    answer |= summarize_experts(steps[-1].get("layers", {})) if steps else {}
    flops = _costs(folder).get("flops")
    inside, _ = budget.count(read_parts(Run.open(folder)).config)
    counted = {"parameters": facts["parameters"], "active": facts["active"], "inside": inside}
    return answer, counted | ({} if flops is None else {"flops": round(flops * updates)})


def _speed(folder: Path, unit: str) -> dict[str, Any]:
    """What a run trains in a second, evaluations apart: the median over the lines of its log, of which the first has
    what compiling and capturing took."""
    lines = map(json.loads, (folder / "log.jsonl").read_text(encoding="utf-8").splitlines())
    speeds = [line[f"{unit}_per_second"] for line in lines if line["event"] == "step"]
    return {"speed": statistics.median(speeds), "speed_unit": unit} if speeds else {}


def _evaluated(trial: RunTrial, metric: str) -> dict[str, Any]:
    """The score that `regard evaluate` gives, of one run or of several as an ensemble."""
    others = ["--ensemble", *trial.runs[1:]] if len(trial.runs) > 1 else []
    test = joined_files(trial.test, trial.words) if trial.words else trial.test
    found = evaluate(trial.task, [trial.run, *test, *others, "--device", trial.device])
    score = found[metric]
    if not isinstance(score, dict):
        return {"score": score}
    # a sentence is a line of the cell's file
    lines = [" ".join(map(str, counts)) for counts in score.get("sentences", ())]
    return {"score": score["value"], "signature": score["signature"], **({"sentences": lines} if lines else {})}


def evaluate(task: str, words: list[str]) -> dict[str, Any]:
    """What `regard evaluate` says with --json, in this process, which has all that it needs loaded."""
    own, asked = _read_test(task, [*words, "--json"])
    # what a paired bootstrap needs, of the tasks that have it
    asked.per_sentence = True
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(io.StringIO()):
        own.evaluate(asked)
    return json.loads(said.getvalue())


def _read_test(task: str, words: list[str]) -> tuple[Any, Any]:
    """The verbs of a task, and what a command line of its `regard evaluate` asks for."""
    own, warned = run_tasks.verbs(task), io.StringIO()
    if own is None:
        raise ValueError(f"the task {task!r} has no verbs.py, so its runs cannot be evaluated")
    try:
        with redirect_stderr(warned):
            return own, read_evaluation(own, task, words)
    except SystemExit as error:
        raise ValueError(warned.getvalue().strip().splitlines()[-1]) from error


def joined_files(flags: Sequence[str], folder: str) -> list[str]:
    """Flags whose files of subword units are replaced by files of words in a folder, which are written once."""
    found = list(flags)
    for at, (flag, value) in enumerate(itertools.pairwise(flags), 1):
        if flag.rpartition(".")[2].removeprefix("--") in FILES:
            try:
                with opened(value) as file:
                    lines = read_sentences(file, name=value)
                    text = "".join(" ".join(line.split()).replace("@@ ", "") + "\n" for line in lines)
            except BadText as error:
                # not the model's refusal: with the file in its place the cell is trained
                raise OSError(str(error)) from error
            path = Path(folder) / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.txt"
            if not path.exists():
                _write_whole(path, text)
            found[at] = str(path)
    return found
