"""Quality cells of the tasks of `regard train`: the user's own data and flags, through the task's own loop."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard import recipes
from regard import tasks as run_tasks
from regard.compare import budget
from regard.compare.learn import Broke
from regard.compare.plan import BASELINE
from regard.config import parse
from regard.tasks.train import resume, train
from regard.training.display import Display
from regard.training.loop import LOWER_IS_BETTER, TrainingError


@dataclass(frozen=True)
class RunLesson:
    """What a quality cell trains by `regard train`."""

    spec: str
    task: str
    flags: tuple[str, ...]
    run: str  # folder
    rate: float
    seed: int
    axis: str
    amount: float
    device: str = "cpu"

    def words(self, spec: str) -> list[str]:
        """The command line behind `regard train TASK`."""
        own = ["--out", self.run, "--model.attention", spec, "--training.learning_rate", f"{self.rate:g}"]
        own += ["--training.seed", str(self.seed), "--training.device", self.device, "--training.tensorboard", "false"]
        return [*recipes.with_paths(list(self.flags), self.task), *own]


def learn_run(lesson: RunLesson) -> tuple[dict[str, Any], dict[str, int]]:
    """Trains a run, or continues it, and returns the answer of the cell and its counts."""
    began = time.monotonic()
    folder = Path(lesson.run)
    try:
        if (folder / "run.json").exists():
            resume(folder, Display(quiet=True))
        else:
            task = run_tasks.find(lesson.task)
            train(task, _config(task, lesson), Display(quiet=True))
    except TrainingError as error:
        raise Broke(str(error)) from error
    return _answer(folder, time.monotonic() - began)


def _config(task: Any, lesson: RunLesson) -> Any:
    """The config of the run: as many parameters as the baseline's, and as much of what the budget counts."""
    words = lesson.words(lesson.spec)
    name = f"regard train {task.name}"
    config = parse(task.config, words, name, "")
    words += _duration(lesson, config)
    if short_of_inner(config):
        words += ["--model.inner", str(_inner(task, lesson))]
    return parse(task.config, words, name, "")


def _duration(lesson: RunLesson, config: Any) -> list[str]:
    if lesson.axis == "minutes":
        return ["--training.minutes", f"{lesson.amount:g}", "--training.steps", "null", "--training.epochs", "null"]
    if lesson.axis == "tokens" and config.training.tokens is None:
        raise ValueError("a budget of tokens needs --training.tokens, the tokens of a batch")
    each = config.training.tokens * config.training.accumulate if lesson.axis == "tokens" else 1
    steps = max(1, int(lesson.amount / each))
    return ["--training.steps", str(steps), "--training.minutes", "null", "--training.epochs", "null"]


def short_of_inner(config: Any) -> bool:
    """Whether the feed-forward width of the model may be chosen: a pretrained model has its own."""
    return hasattr(config.model, "inner") and getattr(config, "init", None) in (None, "none")


def _inner(task: Any, lesson: RunLesson) -> int:
    """The feed-forward width with which the model has as many parameters as that of the baseline."""
    built = {}
    for spec in (BASELINE, lesson.spec):
        config = parse(task.config, lesson.words(spec), f"regard train {task.name}", "")
        data = task.read_data(config)
        config, _ = task.complete_config(config, data)
        built[spec] = task.model_config(config, task.train_tokenizers(data, config), data)
    target, _ = budget.count(built[BASELINE])
    sized = budget.solve(built[lesson.spec], target)
    if sized.over:
        raise budget.OverBudget(sized.over)
    return sized.inner or built[lesson.spec].inner


def _answer(folder: Path, seconds: float) -> tuple[dict[str, Any], dict[str, int]]:
    """The answer of a finished run, from its log and its facts."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [line for line in lines if line["event"] == "evaluation"]
    facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    from regard.tasks.load import read_config
    from regard.training.run import Run

    metric = read_config(Run.open(folder)).training.metric
    lower = metric in LOWER_IS_BETTER
    curve = [[line["step"], line[metric]] for line in found]
    if not curve:
        raise ValueError(f"{folder} has no evaluation in its log")
    score = (min if lower else max)(value for _, value in curve)
    answer = {
        "metric": f"{metric} (validation)",
        "higher_is_better": not lower,
        "valid": score,
        "score": score,
        "groups": {},
        "curve": curve,
        "updates": curve[-1][0],
        "rising": curve[-1][1] == score and len(curve) > 1,
        "run": str(folder),
        "seconds": round(seconds, 2),
    }
    return answer, {"parameters": facts["parameters"]}
