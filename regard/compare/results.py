"""The rows of a comparison, from the plan and the cells of a folder. Nothing is measured here."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.compare.complexity import DEPTH_LENGTHS, PATH_LENGTHS, question
from regard.compare.plan import BASELINE, CostPlan, Row, cost_plan
from regard.compare.quality import QualityPlan, quality_plan
from regard.compare.question import SCHEMA, short
from regard.compare.scores import Scores
from regard.compare.store import DONE, Cell, Folder
from regard.compare.tables import Table, build
from regard.data.tasks import READERS
from regard.spec import parse

NOT_RUN = "not run"
# of table.csv; names include the unit
COLUMNS: tuple[str, ...] = (
    "spec",
    "length",
    "role",
    "batch",
    "train_ratio",
    "train_ratio_low",
    "train_ratio_high",
    "train_ms",
    "forward_ratio",
    "forward_ratio_low",
    "forward_ratio_high",
    "forward_ms",
    "step_ratio",
    "step_ratio_low",
    "step_ratio_high",
    "step_ms",
    "rounds",
    "peak_mib",
    "state_bytes",
    "flops",
    "flops_forward",
    "written",
    "saved_bytes",
    "sees",
    "depth",
    "hops",
    "parameters",
    "active",
    "dropped",
    "busiest",
    "task",
    "budget",
    "score",
    "score_min",
    "score_max",
    "chance",
    "seeds",
    "solved",
    "solved_at",
    "letters",
    "rate",
    "rates_ok",
    "rates",
    "embedding",
    "speed",
    "speed_unit",
    "device_seconds",
    "status",
    "note",
)


class Results:
    """The rows of the plans of a folder, with what was measured of them.

    `Results.load("runs/compare").rows` are plain dictionaries, one per mechanism and length; `scores` has a table for
    each task.
    """

    def __init__(
        self,
        plan: CostPlan | None,
        folder: Folder,
        quality: Sequence[QualityPlan] = (),
        table: Table | None = None,
    ):
        self.asks_costs = plan is not None
        self.plan, self.folder = plan or CostPlan(), folder
        self.rows: list[dict[str, Any]] = [self._row(row) for row in self.plan.rows()] if self.asks_costs else []
        self.scores = [Scores(one, folder) for one in quality]
        self.table = table

    @property
    def complexity(self) -> list[dict[str, Any]]:
        """The counted rows of a table that has some."""
        asked = [question(*row) for row in (self.table.complexity if self.table is not None else ())]
        return [cell.answer for one in asked if (cell := self.folder.get(one)) is not None]

    @classmethod
    def load(cls, folder: str | Path, table: str | None = None) -> "Results":
        """The results of a folder, also those of other code or of another machine; the report says so. `table` is the
        name of one of its tables; None: what was asked for last."""
        found = Folder(folder, keep_old=True)
        values = found.read_plan()
        if values is None:
            raise ValueError(f"{folder} has no plan.json: it is no folder of 'regard compare'")
        known = {values["table"][0]: values} if values.get("table") else {}
        known |= {one["table"][0]: one for one in values.get("others", ())}
        if table is not None and table not in known:
            raise ValueError(f"{folder} has no table {table!r}; it has {', '.join(known) or 'none with a name'}")
        return cls(*read_plans(values if table is None else known[table], found, reads=False))

    @property
    def name(self) -> str:
        """The folder, as a command line names it."""
        return str(self.folder.path)

    @property
    def missing(self) -> int:
        """Rows of costs that have no answer yet."""
        return sum(row["status"] == NOT_RUN for row in self.rows)

    def all_rows(self) -> list[dict[str, Any]]:
        """The rows of all tables. What is counted of a mechanism at a length stands in its row of costs, if there is
        one, or in a row of its own."""
        counted = self._counted()
        rows = [row | counted.pop((row["spec"], row["length"], row["role"]), {}) for row in self.rows]
        names = ("spec", "length", "role")
        rows += [{**dict(zip(names, at, strict=True)), **found, "status": DONE} for at, found in counted.items()]
        return [*rows, *(row for scores in self.scores for row in scores.rows)]

    def _counted(self) -> dict[tuple[str, int, str], dict[str, Any]]:
        """The sequential operations of the counted rows, and the layers between two tokens, by length."""
        found: dict[tuple[str, int, str], dict[str, Any]] = {}
        for row in self.complexity:
            hops = ("never" if layers is None else layers for layers in row["path"])
            for name, lengths, values in (("depth", DEPTH_LENGTHS, row["depth"]), ("hops", PATH_LENGTHS, hops)):
                for length, value in zip(lengths, values, strict=True):
                    found.setdefault((short(row["spec"]), length, row["role"]), {})[name] = value
        return found

    def facts(self) -> dict[str, Any]:
        """What holds for all rows: machine, backend, load, drift."""
        cells = [cell for row in self.plan.rows() if (cell := self._cell("speed", row)) is not None]
        measured = [cell for cell in cells if cell.status == DONE]
        base = [cell for cell in measured if cell.question.spec == BASELINE]
        return {
            "machine": measured[0].provenance if measured else {},
            "backend": base[0].answer.get("backend", "") if base else "",
            "load": max((cell.provenance.get("load", 0.0) for cell in measured), default=0.0),
            "drift": any(cell.answer.get("drift") for cell in measured),
        }

    def to_csv(self) -> str:
        """The table as CSV."""
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.all_rows())
        return text.getvalue()

    def _cell(self, kind: Any, row: Row) -> Cell | None:
        return self.folder.get(self.plan.question(kind, row.spec, row.length))

    def _row(self, row: Row) -> dict[str, Any]:
        plan = self.plan
        found: dict[str, Any] = {"spec": row.spec, "length": row.length, "role": plan.role, "batch": plan.batch}
        if row.refusal:
            return found | {"status": "refused", "note": row.refusal}
        cells = {kind: self._cell(kind, row) for kind in plan.kinds(row)}
        count, memory, speed = (cells.get(kind) for kind in ("count", "memory", "speed"))
        if count is not None and count.status == DONE:
            found |= count.counted
        if memory is not None and memory.status == DONE:
            found["peak_mib"] = memory.answer["peak_bytes"] / 2**20
        for cell, metrics in ((speed, ("forward", "train")), (cells.get("decode"), ("step",))):
            if cell is not None and cell.status == DONE:
                for metric in metrics:
                    found |= _metric(metric, cell.answer[metric])
        if speed is None:
            why = f"time limit {plan.minutes:g} min" if any(cells.values()) or self._began() else "nothing ran yet"
            return found | {"status": NOT_RUN, "note": f"{why}; regard compare --out {self.name} continues"}
        return found | {"status": speed.status, "note": speed.note, "key": speed.key}

    def _began(self) -> bool:
        return (self.folder.path / "log.jsonl").exists()


def read_plans(
    values: dict[str, Any], folder: Folder, reads: bool = True
) -> tuple[CostPlan | None, Folder, list[QualityPlan], Table | None]:
    """The plans that a folder keeps, and the table that they are of. `reads` says whether the files of tasks are read:
    to train they are, to report they need not be there."""
    costs, table = values.get("cost"), values.get("table")
    known = [None if reads else _described(one, folder) for one in values["quality"]]
    quality = [quality_plan(one | {"described": this}) for one, this in zip(values["quality"], known, strict=True)]
    found = None if table is None else build(*table, plans=quality)
    return (None if costs is None else cost_plan(costs)), folder, quality, found


def _described(plan: dict[str, Any], folder: Folder) -> dict[str, Any] | None:
    """What the plan says of a task on files, or, of an older folder, its last cell; None: the task has no files."""
    name, _, rest = str(plan.get("task")).partition("(")
    if name not in READERS or plan.get("described"):
        return plan.get("described")
    options = dict(parse(f"task({rest}").options) if rest else {}
    found: dict[str, Any] = {}
    for cell in sorted(folder.all(), key=lambda cell: cell.provenance.get("when", "")):
        task = cell.question.task or {}
        asked = {option: value for option, value in task.get("options", {}).items() if option != "sha256"}
        if task.get("name") == name and asked == options:
            found |= {"length": cell.question.length, "options": task["options"]}
            found |= {fact: cell.answer[fact] for fact in ("chance",) if fact in cell.answer}
    return found


HOW = ("minutes", "jobs", "exclusive")  # settings that change no question


def write_plans(
    folder: Folder,
    costs: CostPlan | None,
    quality: Sequence[QualityPlan],
    table: tuple[str, ...] | None = None,
    command: str = "",
) -> str | None:
    """Keeps the plans in the folder; `table` is the name and the size of a table that has a name, and the flags of its
    data. Other tables that were filled in the folder are kept beside it. Returns the command of the comparison whose
    place this one takes, if there was another."""
    kept = {"cost": None if costs is None else costs.to_json(), "quality": [plan.to_json() for plan in quality]}
    before = folder.read_plan() or {}
    others = [one for one in (*before.get("others", ()), before) if one.get("table")]
    others = [one for one in others if table is None or one["table"][0] != table[0]]
    rest = [{name: part for name, part in one.items() if name != "others"} for one in others]
    is_same = _asked({**kept, "table": table}) == _asked(before)
    # going on does not change what was asked for
    command = before.get("command", command) if is_same else command
    folder.write_plan({"schema": SCHEMA, **kept, "table": table, "others": rest, "command": command})
    return None if is_same or not before or before.get("table") else before.get("command", "")


def _asked(plan: dict[str, Any]) -> str:
    """What a plan asks for, without how long that may take."""
    parts = [plan.get("cost"), *plan.get("quality", ())]
    asked = [{name: part for name, part in one.items() if name not in HOW} for one in parts if one]
    return json.dumps([asked, plan.get("table")])


def _metric(name: str, answer: dict[str, Any]) -> dict[str, Any]:
    found = {f"{name}_ms": answer["median_ms"], f"{name}_ratio": answer["ratio"]}
    found |= {f"{name}_ratio_{end}": answer[f"ratio_{end}"] for end in ("low", "high")}
    return found | ({"rounds": len(answer["rounds"])} if name == "train" else {})
