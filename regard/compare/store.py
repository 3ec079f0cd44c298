"""A folder of results: one file per answered question, the plan that asked, and a log.

OUT/cells/KEY.json   a cell: the question, its status, the answer, where and when it was found
OUT/plan.json        the table that was asked for
OUT/log.jsonl        begin, end and failure of each cell
OUT/lock             held by the one process that writes; readers need none

A cell is written whole or not at all, so a killed comparison leaves whole cells only, and the next one measures the
rest. Changed code, or another machine, is another question.
"""

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.compare.question import SCHEMA, Question, question_from
from regard.core.files import parse_json, read_bytes
from regard.training import lock

DONE = "done"
# what a cell may end in, and what it means; a blank in a table is a cell that was not asked for
STATUSES = {
    DONE: "measured",
    "refused": "the mechanism cannot take the role or the sizes",
    "over": "its parameters are not within 1 % of those of softmax",
    "memory": "it needs more memory than there is",
    "slow": "it takes longer than its share of the time",
    "broke": "the loss or a weight was not finite",
    "error": "it failed",
    "absent": "a data file is missing or damaged",
}


@dataclass(frozen=True)
class Cell:
    """A question with what was found."""

    question: Question
    status: str = DONE
    note: str = ""
    answer: dict[str, Any] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.question.key

    def to_json(self) -> dict[str, Any]:
        """The cell as its file has it."""
        facts = {"schema": SCHEMA, "key": self.key, "kind": self.question.kind, "status": self.status}
        rest = {name: getattr(self, name) for name in ("note", "answer", "counted", "provenance")}
        return facts | {"question": dataclasses.asdict(self.question)} | rest


# what tables read of a cell that is done, in its answer or among what was counted
NEEDED = {
    "speed": ("forward", "train"),
    "decode": ("step",),
    "memory": ("peak_bytes",),
    "count": ("flops", "sees"),
    "quality": ("score", "valid", "higher_is_better", "updates", "curve"),
    "path": ("spec", "depth", "path"),
}


def cell_from(values: Any, name: str | Path) -> Cell:
    """A cell from the JSON of its file."""
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        raise ValueError(f"{name} is no cell of schema {SCHEMA}: it was written by another version of Regard")
    kinds = {"status": str, "note": str, "question": dict, "answer": dict, "counted": dict, "provenance": dict}
    lacks = [part for part, kind in kinds.items() if not isinstance(values.get(part), kind)]
    if not lacks and values["status"] == DONE:
        found = values["answer"] | values["counted"]
        lacks = [part for part in NEEDED.get(values["question"].get("kind"), ()) if part not in found]
    if lacks:
        raise ValueError(f"{name} is damaged, it has no {', '.join(lacks)}: remove it, and it is measured again")
    return Cell(question_from(values["question"]), **{part: values[part] for part in kinds if part != "question"})


class Folder:
    """A folder of results."""

    def __init__(self, path: str | Path, keep_old: bool = False):
        self.path = Path(path)
        self.cells = self.path / "cells"
        self.keep_old = keep_old  # to report: an answer of other code or of another machine stands in for a missing one
        self.old: set[str] = set()  # keys of the questions that were answered so
        self._by_asked: dict[str, Cell] | None = None

    def writing(self, doing: str) -> AbstractContextManager[None]:
        """Holds the folder for the one process that writes; a second one is refused."""
        self.cells.mkdir(parents=True, exist_ok=True)
        return lock.hold(self.path / "lock", doing)

    def get(self, question: Question) -> Cell | None:
        """The answer to a question, if there is one."""
        path = self.cells / f"{question.key}.json"
        if path.exists():
            return _read(path)
        return self._older(question) if self.keep_old else None

    def _older(self, question: Question) -> Cell | None:
        """The answer that other code or another machine gave, the last one of several."""
        if self._by_asked is None:
            cells = sorted(self.all(), key=lambda cell: cell.provenance.get("when", ""))
            self._by_asked = {cell.question.asked: cell for cell in cells}
        found = self._by_asked.get(question.asked)
        if found is not None:
            self.old.add(question.key)
        return found

    def put(self, cell: Cell) -> None:
        """Writes a cell, whole or not at all, and a line of the log."""
        _write(self.cells / f"{cell.key}.json", json.dumps(cell.to_json(), indent=1))
        self.log({"event": "cell", "key": cell.key, "spec": cell.question.spec, "status": cell.status})

    def all(self) -> Iterator[Cell]:
        """Every cell, in the order of the keys."""
        for path in sorted(self.cells.glob("*.json")):
            yield _read(path)

    def log(self, record: dict[str, Any]) -> None:
        """Adds a line to the log."""
        with open(self.path / "log.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.strftime("%Y-%m-%d %H:%M:%S"), **record}) + "\n")

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Keeps the table that was asked for."""
        self.path.mkdir(parents=True, exist_ok=True)
        _write(self.path / "plan.json", json.dumps(plan, indent=1))

    def read_plan(self) -> dict[str, Any] | None:
        """The table that was asked for; None: nothing was asked here yet."""
        path = self.path / "plan.json"
        if not path.exists():
            return None
        plan = parse_json(read_bytes(path), path)
        if not isinstance(plan, dict) or plan.get("schema") != SCHEMA or not isinstance(plan.get("quality"), list):
            if isinstance(plan, dict) and "schema" not in plan:
                raise ValueError(f"{path} was not written by 'regard compare': give the folder of a comparison")
            raise ValueError(
                f"{path} is no plan of schema {SCHEMA}: remove it, and ask again with the flags of the comparison"
            )
        return plan


def _read(path: Path) -> Cell:
    try:
        values = parse_json(read_bytes(path), path)
    except ValueError as error:
        raise ValueError(f"{error}; remove the file, and it is measured again") from error
    return cell_from(values, path)


def _write(path: Path, text: str) -> None:
    """Replaces a file as a whole."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
