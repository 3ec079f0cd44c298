"""What a model can be trained for: a package for each task, found by its name.

A new task is a package with a class `Task` (see base.py) and a line in TASKS. A task in somebody else's package is an
entry point of the group `regard.tasks`, whose name is that of the task and whose value is such a package:

    [project.entry-points."regard.tasks"]
    summarize = "mypackage.summarize"

What belongs to a task of ours lies in its package:

    config.py   what its config file and its flags may say
    corpus.py   the data it trains and validates on
    task.py     `Task`: model, batches, loss and evaluation, for training
    verbs.py    its verbs and its flags of `regard evaluate`, for the command line; PyTorch is imported by the verbs
"""

import functools
import importlib
import importlib.util
from importlib.metadata import entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.tasks.base import Task
    from regard.training.run import Run

GROUP = "regard.tasks"
TASKS = {
    "translate": "regard.tasks.translate",
    "language": "regard.tasks.language",
    "masked": "regard.tasks.masked",
    "classify": "regard.tasks.classify",
}


@functools.cache
def packages() -> dict[str, str]:
    """The package of each task: ours, and those of other people, which cannot take the names of ours."""
    return {point.name: point.module for point in entry_points(group=GROUP)} | TASKS


def names() -> list[str]:
    """The names of all tasks, ours first."""
    return [*TASKS, *sorted(set(packages()) - set(TASKS))]


def find(name: Any) -> "type[Task]":
    """The class of a task."""
    if not isinstance(name, str) or name not in packages():
        raise ValueError(f"no task {name!r}; known: {', '.join(names())}")
    return importlib.import_module(packages()[name]).Task


def describe(name: str) -> tuple[str, tuple[str, ...]]:
    """What a task is, in one sentence, and command lines that train for it; of ours without importing PyTorch."""
    own = verbs(name)
    if own is not None and hasattr(own, "ABOUT"):
        return own.ABOUT, own.EXAMPLES
    return find(name).about, find(name).examples


def of(run: "Run") -> "type[Task]":
    """The class of the task that a run folder belongs to."""
    name = run.read_json("run.json").get("task")
    if not isinstance(name, str) or name not in packages():
        raise ValueError(f"{run.folder} is a run of {name!r}, which is none of {', '.join(names())}")
    return find(name)


def verbs(name: str) -> ModuleType | None:
    """The module of the verbs of a task, where it has one."""
    package = importlib.import_module(packages()[name])
    if not hasattr(package, "__path__") or importlib.util.find_spec(f"{package.__name__}.verbs") is None:
        return None
    return importlib.import_module(f"{package.__name__}.verbs")
