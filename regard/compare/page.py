"""A comparison as one HTML file that opens from the disk and asks no network: tables that sort, frontiers, curves."""

import json
from pathlib import Path
from typing import Any

from regard.compare.advise import advise
from regard.compare.report import header, score_header
from regard.compare.results import Results

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
    "flops": "FLOP",
}


def html_report(results: Results) -> str:
    """The page."""
    tables = []
    for length in results.plan.lengths if results.asks_costs else ():
        rows = [row for row in results.rows if row["length"] == length]
        axes = ["train_ratio", "peak_mib"]
        tables.append(_table(results, f"{length:,} tokens", header(results), rows, COSTS, axes, ["sees"]))
    for scores in results.scores:
        higher = ["score", "score_min", "score_max"] if scores.higher_is_better else []
        head = score_header(scores)
        made = _table(results, scores.plan.label, head, scores.rows, SCORES, ["flops", "score"], higher)
        tables.append(made | {"ranked": scores.settled})
    text = json.dumps({"words": " ".join(advise(results)), "tables": tables}, ensure_ascii=False)
    # no text of a user can end the element that holds it
    safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return TEMPLATE.read_text(encoding="utf-8").replace("@DATA@", safe)


def _table(
    results: Results,
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
        "head": head,
        "rows": rows,
        "columns": list(shown.items()),
        "axes": axes,
        "higher": higher,
        "ranked": True,  # whether some rows may be drawn as the best
        "command": f"regard compare --out {results.name}",
    }
