"""What models are trained for: a package for each task, found by its name.

A new task is a package with a class `Task` (see base.py) and a line in TASKS. A task in somebody else's package is an
entry point of the group `regard.tasks`, whose name is that of the task and whose value is such a package:

    [project.entry-points."regard.tasks"]
    summarize = "mypackage.summarize"

The package of a task of ours has:

    config.py   the settings of its config file and flags
    corpus.py   the data it trains and validates on
    task.py     `Task`: model, batches, loss and evaluation, for training
    page.py     what the page shows of a run
    verbs.py    its verbs and its flags of `regard evaluate`; a verb imports PyTorch when it is called
"""

import importlib
import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING, Any

from regard.plugins import Plugins

if TYPE_CHECKING:
    from regard.tasks.base import Task
    from regard.training.run import Run

GROUP = "regard.tasks"
TASKS = {
    "translate": "regard.tasks.translate",
    "language": "regard.tasks.language",
    "masked": "regard.tasks.masked",
    "classify": "regard.tasks.classify",
    "images": "regard.tasks.images",
    "captions": "regard.tasks.captions",
}


def _check(name: str, value: Any) -> ModuleType:
    """Checks the value of an entry point: a package, whose verbs can be loaded if it has some."""
    if not isinstance(value, ModuleType):
        raise ValueError(f"expected a package with a class Task, got {value!r}")
    _verbs(value)
    return value


PLUGINS = Plugins("task", GROUP, lambda: TASKS, _check)


def names() -> list[str]:
    """The names of all tasks, ours first; those of other people cannot take the names of ours."""
    return [*TASKS, *sorted(PLUGINS.load_all())]


def package(name: str) -> ModuleType:
    """The package of a task."""
    return importlib.import_module(TASKS[name]) if name in TASKS else PLUGINS.load(name)


def is_known(name: Any) -> bool:
    """Whether there is a task of that name."""
    return isinstance(name, str) and (name in TASKS or name in PLUGINS.points())


def find(name: Any) -> "type[Task]":
    """The class of a task."""
    if not is_known(name):
        raise ValueError(f"no task {name!r}; known: {', '.join(names())}")
    return package(name).Task


def describe(name: str) -> tuple[str, tuple[str, ...]]:
    """What a task is, in one sentence, and command lines that train for it; for our tasks without importing PyTorch."""
    own = verbs(name)
    if own is not None and hasattr(own, "ABOUT"):
        return own.ABOUT, own.EXAMPLES
    return find(name).about, find(name).examples


def of(run: "Run") -> "type[Task]":
    """The class of the task that a run folder belongs to."""
    facts = run.read_json("run.json")
    name = facts.get("task")
    if not is_known(name):
        packages = facts.get("packages")
        words = packages.get("task") if isinstance(packages, dict) and isinstance(name, str) else None
        needs = f" of the package {words[name]!r}" if isinstance(words, dict) and name in words else ""
        raise ValueError(f"{run.folder} is a run of the task {name!r}{needs}, expected one of {', '.join(names())}")
    return find(name)


def verbs(name: str) -> ModuleType | None:
    """The module of the verbs of a task, if it has one."""
    return _verbs(package(name))


def _verbs(task: ModuleType) -> ModuleType | None:
    if not hasattr(task, "__path__") or importlib.util.find_spec(f"{task.__name__}.verbs") is None:
        return None
    return importlib.import_module(f"{task.__name__}.verbs")
