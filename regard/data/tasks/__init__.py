"""Synthetic tasks, to see what an attention can learn. Each gives batches of tokens and of answers, drawn from a
generator alone. Tasks for a decoder are read from left to right; in those for an encoder every token sees every other.

`build("mqar", pairs=4, vocabulary=64)` is a task; `TASKS` has four with their defaults.
"""

import inspect
from collections.abc import Callable

from regard.data.tasks import copying, groups, listops, mad, mqar, needle, recall, selective
from regard.data.tasks.base import IGNORED, Examples, Task
from regard.data.tasks.copying import SYMBOLS
from regard.data.tasks.listops import LISTOPS, evaluate
from regard.data.tasks.recall import KEYS

__all__ = ["BUILDERS", "IGNORED", "KEYS", "LISTOPS", "SYMBOLS", "TASKS", "Examples", "Task", "build", "evaluate"]

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
}
TASKS = {name: BUILDERS[name]() for name in ("copy", "reverse", "recall", "listops")}


def build(name: str, **options: object) -> Task:
    """A task by its name, with options: `build("mqar", pairs=4)`."""
    if name not in BUILDERS:
        raise ValueError(f"no generated task {name!r}; known: {', '.join(BUILDERS)}")
    known = inspect.signature(BUILDERS[name]).parameters
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"task {name!r} has no option {unknown[0]!r}; it takes {', '.join(known)}")
    return BUILDERS[name](**options)
