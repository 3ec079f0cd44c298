"""Synthetic tasks, to see what an attention can learn. Each gives batches of tokens and of answers, drawn from a
generator alone. Tasks for a decoder are read from left to right; in those for an encoder every token sees every other.

`build("mqar", pairs=4, vocabulary=64)` is a task; `TASKS` has four with their defaults.
"""

import inspect
from collections.abc import Callable

from regard.data.tasks import copying, given, groups, listops, mad, mqar, needle, pathfinder, recall, selective
from regard.data.tasks.base import IGNORED, Examples, Task
from regard.data.tasks.copying import SYMBOLS
from regard.data.tasks.listops import LISTOPS, evaluate
from regard.data.tasks.recall import KEYS

__all__ = [
    "BUILDERS",
    "IGNORED",
    "KEYS",
    "LISTOPS",
    "READERS",
    "SYMBOLS",
    "TASKS",
    "Examples",
    "Task",
    "build",
    "evaluate",
]

BUILDERS: dict[str, Callable[..., Task]] = {
    "copy": copying.copy,
    "reverse": copying.reverse,
    "recall": recall.recall,
    "listops": listops.listops,
    "listops-long": listops.listops_long,
    "mqar": mqar.mqar,
    "forgetting": mqar.forgetting,
    "mad-recall": mad.mad_recall,
    "mad-fuzzy": mad.mad_fuzzy,
    "mad-noisy": mad.mad_noisy,
    "mad-selective": mad.mad_selective,
    "mad-compress": mad.mad_compress,
    "mad-memorize": mad.mad_memorize,
    "selective": selective.selective,
    "induction": selective.induction,
    "word": groups.word,
    "parity": groups.parity,
    "needle": needle.needle,
    "pathfinder": pathfinder.pathfinder,
}
# tasks on files that the user names in the options
READERS: dict[str, Callable[..., Task]] = {"lra-text": given.text, "lra-image": given.image}
TASKS = {name: BUILDERS[name]() for name in ("copy", "reverse", "recall", "listops")}


def build(name: str, **options: object) -> Task:
    """A task by its name, with options: `build("mqar", pairs=4)`."""
    builders = BUILDERS | READERS
    if name not in builders:
        raise ValueError(f"no generated task {name!r}; known: {', '.join(builders)}")
    known = inspect.signature(builders[name]).parameters
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"task {name!r} has no option {unknown[0]!r}; it takes {', '.join(known)}")
    return builders[name](**options)
