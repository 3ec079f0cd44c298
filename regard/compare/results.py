"""The rows of a comparison, from the plan and the cells of a folder. Nothing is measured here."""

import csv
import io
from pathlib import Path
from typing import Any

from regard.compare.plan import BASELINE, CostPlan, Row, cost_plan
from regard.compare.store import DONE, Cell, Folder

NOT_RUN = "not run"
# of table.csv: the unit is in the name
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
    "parameters",
    "status",
    "note",
)


class Results:
    """What a folder has of a plan.

    `Results.load("runs/compare").rows` are plain dictionaries, one per mechanism and length.
    """

    def __init__(self, plan: CostPlan, folder: Folder):
        self.plan, self.folder = plan, folder
        self.rows: list[dict[str, Any]] = [self._row(row) for row in plan.rows()]

    @classmethod
    def load(cls, folder: str | Path) -> "Results":
        """The results of a folder."""
        found = Folder(folder)
        values = found.read_plan()
        if values is None:
            raise ValueError(f"{folder} has no plan.json: it is no folder of 'regard compare'")
        return cls(cost_plan(values), found)

    @property
    def name(self) -> str:
        """The folder, as a command line names it."""
        return str(self.folder.path)

    @property
    def missing(self) -> int:
        """Rows that have no answer yet."""
        return sum(row["status"] == NOT_RUN for row in self.rows)

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
        writer.writerows(self.rows)
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


def _metric(name: str, answer: dict[str, Any]) -> dict[str, Any]:
    found = {f"{name}_ms": answer["median_ms"], f"{name}_ratio": answer["ratio"]}
    found |= {f"{name}_ratio_{end}": answer[f"ratio_{end}"] for end in ("low", "high")}
    return found | ({"rounds": len(answer["rounds"])} if name == "train" else {})
