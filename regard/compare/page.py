"""A comparison as one HTML file that opens from the disk and asks no network: tables that sort, frontiers, curves."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.compare.advise import advise
from regard.compare.plan import CostPlan
from regard.compare.quality import QualityPlan
from regard.compare.report import group_lines, header, score_header, table_lines
from regard.compare.results import Results
from regard.compare.store import DONE

TEMPLATE = Path(__file__).parent / "static" / "report.html"
COSTS = {
    "train_ratio": "train, x softmax",
    "train_ratio_low": "from",
    "train_ratio_high": "to",
    "forward_ms": "forward ms",
    "step_ms": "step ms",
    "state_bytes": "state bytes",
    "peak_mib": "peak MiB",
    "flops": "FLOP",
    "sees": "sees",
}
SCORES = {
    "score": "score",
    "score_min": "lowest seed",
    "score_max": "highest seed",
    "letters": "rank",
    "solved_at": "solved at",
    "rate": "rate",
    "parameters": "parameters",
    "active": "active parameters",
    "dropped": "dropped choices",
    "busiest": "busiest expert, x even",
    "flops": "FLOP",
}


def html_report(results: Results) -> str:
    """The page."""
    tables = []
    for length in results.plan.lengths if results.asks_costs else ():
        rows = [row for row in results.rows if row["length"] == length]
        # as in a terminal: the fastest first, then those without numbers
        rows.sort(key=lambda row: (row["status"] != DONE, row.get("train_ratio", 0.0)))
        rows = [row | {"command": _cost_command(results.plan, row)} for row in rows]
        axes = ["train_ratio", "peak_mib"]
        tables.append(_table(f"{length:,} tokens", header(results), rows, COSTS, axes, ["sees"]))
    for scores in results.scores:
        higher = ["score", "score_min", "score_max"] if scores.higher_is_better else []
        head = [*score_header(scores), *(f"by group, {line}" for line in group_lines(scores))]
        rows = [*scores.measured, *(row for row in scores.rows if "score" not in row)]
        rows = [row | {"command": _score_command(results, scores.plan, row)} for row in rows]
        made = _table(scores.plan.label, head, rows, SCORES, ["flops", "score"], higher)
        tables.append(made | {"subject": scores.subject, "ranked": any("letters" in row for row in rows)})
    words = " ".join(advise(results)) if results.asks_costs or results.scores else ""
    parts = {"words": words, "tables": tables, "lines": table_lines(results)}
    text = json.dumps(parts, ensure_ascii=False)
    # no text of a user can end the element that holds it
    safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return TEMPLATE.read_text(encoding="utf-8").replace("@DATA@", safe)


def _cost_command(plan: CostPlan, row: dict[str, Any]) -> str:
    """The command that measures a row again, in a folder of its own."""
    names = ("role", "batch", "width", "heads", "part", "device", "dtype", "threads")
    return _command([row["spec"], "--length", str(row["length"]), *_flags(plan, CostPlan(), names)])


def _score_command(results: Results, plan: QualityPlan, row: dict[str, Any]) -> str:
    """The command that trains a row again, in a folder of its own."""
    if results.table is not None:
        return _command([*_table_words(results, plan), row["spec"]])
    words = [row["spec"], "--task", plan.task, "--budget", f"{plan.axis}={plan.amount:g}"]
    words += ["--rates", ",".join(f"{rate:g}" for rate in plan.rates)] if plan.rates else []
    words += ["--task-length", str(plan.length)] if plan.length else []
    words += ["--task-batch", str(plan.batch)] if plan.batch != QualityPlan(plan.task).batch else []
    names = ("seeds", "width", "heads", "position", "device", "dtype", "pretrain")
    tests = [f"--test.{word[2:]}" if word.startswith("--") else word for word in plan.test]
    return _command([*words, *_flags(plan, QualityPlan(plan.task), names), *plan.flags, *tests])


def _table_words(results: Results, plan: QualityPlan) -> list[str]:
    """The words that ask for the tables of a task among those of a named table, with the flags of the user's data."""
    assert results.table is not None
    kept = results.folder.read_plan() or {}
    asked = [one["table"] for one in (kept, *kept.get("others", ())) if one.get("table")]
    name, size, *flags = next((one for one in asked if one[0] == results.table.name), (results.table.name, "smoke"))
    words = ["--table", name, "--size", size, "--task", plan.name, *flags]
    words += ["--width", str(plan.width)] if name == "mqar" else []
    words += ["--pretrain", plan.pretrain] if name == "arena" else []
    plans = [scores.plan for scores in results.scores]
    # a table whose plans differ in them has rates and budgets of its own, which no flag replaces
    if plan.rates and len({one.rates for one in plans}) == 1:
        words += ["--rates", ",".join(f"{rate:g}" for rate in plan.rates)]
    if len({(one.axis, one.amount) for one in plans}) == 1:
        words += ["--budget", f"{plan.axis}={plan.amount:g}"]
    return [*words, *_flags(plan, QualityPlan(plan.task), ("seeds", "device", "dtype"))]


def _flags(plan: Any, usual: Any, names: Sequence[str]) -> list[str]:
    """The settings that are not the usual ones, as flags."""
    changed = [name for name in names if getattr(plan, name) != getattr(usual, name)]
    return [word for name in changed for word in (f"--{name}", str(getattr(plan, name)))]


def _command(words: Sequence[str]) -> str:
    return shlex.join(["regard", "compare", *words, "--out", "again"])


def _table(
    title: str,
    head: list[str],
    rows: list[dict[str, Any]],
    columns: dict[str, str],
    axes: list[str],
    higher: list[str],
) -> dict[str, Any]:
    shown = {name: label for name, label in columns.items() if any(name in row for row in rows)}
    return {
        "title": title,
        "subject": "attention",
        "head": head,
        "rows": rows,
        "columns": list(shown.items()),
        "axes": axes,
        "higher": higher,
        "ranked": True,  # whether some rows may be drawn as the best
    }
