"""Tables for a terminal and in Markdown."""

import math
import textwrap
from collections.abc import Callable
from typing import Any

from regard.compare.advise import advise
from regard.compare.plan import BASELINE
from regard.compare.results import Results
from regard.compare.store import DONE

LONGEST_NAME = 48  # columns of a spec in a terminal; a longer one takes a line of its own


def number(value: float) -> str:
    """Three digits that count."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _size(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{number(value) if unit != 'B' else f'{value:.0f}'} {unit}"
        value /= 1000
    raise AssertionError


def _ratio(metric: str) -> Callable[[dict[str, Any]], str]:
    def show(row: dict[str, Any]) -> str:
        low, high = row[f"{metric}_ratio_low"], row[f"{metric}_ratio_high"]
        return f"{row[f'{metric}_ratio']:.2f} [{low:.2f} {high:.2f}]"

    return show


# title, unit, what a row needs for it, how it is shown
COLUMNS: list[tuple[str, str, str, Callable[[dict[str, Any]], str]]] = [
    ("train", f"x {BASELINE} [95 %]", "train_ratio", _ratio("train")),
    ("train", "ms", "train_ms", lambda row: number(row["train_ms"])),
    ("forward", "ms", "forward_ms", lambda row: number(row["forward_ms"])),
    ("step", "ms", "step_ms", lambda row: number(row["step_ms"])),
    ("state", "", "state_bytes", lambda row: _size(row["state_bytes"])),
    ("peak", "MiB", "peak_mib", lambda row: number(row["peak_mib"])),
    ("counted", "GFLOP", "flops", lambda row: number(row["flops"] / 1e9)),
    ("sees", "tokens", "sees", lambda row: f"{row['sees']:,}"),
]


def header(results: Results) -> list[str]:
    """What holds for the whole table, in lines."""
    plan, facts = results.plan, results.facts()
    machine = facts["machine"]
    where = f"{machine.get('gpu') or machine.get('cpu', plan.device)}"
    counted = "1 thread" if plan.threads == 1 else f"{plan.threads} threads"
    threads = f", {counted}" if plan.device == "cpu" and plan.threads else ""
    lengths = ", ".join(f"{length:,}" for length in plan.lengths)
    what = "one layer with its projections" if plan.part == "layer" else "attention alone, without projections"
    backend = f", {BASELINE} = SDPA {facts['backend']}" if facts["backend"] else ""
    sizes = f"width {plan.width}, {plan.heads} heads, {plan.dtype}"
    lines = [
        f"{lengths} tokens, batch {plan.batch}, {plan.role}, {sizes}; {what}",
        f"{where}{threads}, torch {machine.get('torch', '-')}{backend}",
    ]
    if results.missing:
        lines.append(f"{len(results.rows) - results.missing} of {len(results.rows)} rows done")
    if facts["drift"]:
        lines.append(f"drift: {BASELINE} became faster or slower by more than 5 % while it was measured")
    if machine and facts["load"] > machine.get("cores", math.inf) / 2 and plan.device == "cpu":
        lines.append(f"the machine was shared (load {facts['load']:.1f}): trust the ratios, not the milliseconds")
    return lines


def table(results: Results, width: int) -> list[str]:
    """The rows as lines of at most `width` columns; columns that find no room are named below."""
    lines: list[str] = []
    dropped: list[str] = []
    for length in results.plan.lengths:
        rows = [row for row in results.rows if row["length"] == length]
        measured = [row for row in rows if row["status"] == DONE]
        measured.sort(key=lambda row: (row["train_ratio"], row["spec"]))
        others = [row for row in rows if row["status"] != DONE]
        first = min(LONGEST_NAME, max([len(row["spec"]) for row in rows], default=0))
        cells = [
            [title, unit, *(show(row) if needs in row else "-" for row in measured)]
            for title, unit, needs, show in COLUMNS
            if any(needs in row for row in measured)
        ]
        names = [title if unit in ("", "ms") else f"{title} {unit}".split(" [")[0] for title, unit, *_ in cells]
        room, kept = width - first, 0
        for column in cells:
            room -= max(map(len, column)) + 2
            if room < 0:
                break
            kept += 1
        dropped = names[kept:]
        if len(results.plan.lengths) > 1:
            lines += ["", f"{length:,} tokens"]
        for at, label in enumerate(["", "", *(row["spec"] for row in measured)]):
            parts = [column[at].rjust(max(map(len, column))) for column in cells[:kept]]
            if len(label) > first:
                lines.append(label)
                label = ""
            if parts:
                lines.append("  ".join([label.ljust(first), *parts]).rstrip())
        lines += [_status_line(row, first, width) for row in others]
    if dropped:
        rest = f"Columns without room here: {', '.join(dropped)}; a wider terminal, --csv or --json has them."
        lines.append(_fill(rest, width))
    return lines


def _fill(text: str, width: int) -> str:
    return textwrap.fill(text, max(width, 40), break_on_hyphens=False)


def _status_line(row: dict[str, Any], first: int, width: int) -> str:
    text = f"{row['spec'].ljust(first)}  {row['status']}: {row['note']}"
    return "\n".join(textwrap.wrap(text, max(width, 40), subsequent_indent=" " * 4, break_on_hyphens=False))


def text_report(results: Results, width: int = 120) -> str:
    """Everything for a terminal: head, table, words."""
    words = "In words. " + " ".join(advise(results))
    return "\n".join(
        [*(_fill(line, width) for line in header(results)), "", *table(results, width), "", _fill(words, width)]
    )


def markdown_report(results: Results) -> str:
    """The same in Markdown."""
    lines = [*(f"{line}  " for line in header(results)), ""]
    for length in results.plan.lengths:
        rows = [row for row in results.rows if row["length"] == length]
        measured = sorted((r for r in rows if r["status"] == DONE), key=lambda row: (row["train_ratio"], row["spec"]))
        columns = [column for column in COLUMNS if any(column[2] in row for row in measured)]
        titles = [" ".join(filter(None, (title, unit))) for title, unit, *_ in columns]
        lines += [f"| {length:,} tokens | " + " | ".join(titles) + " |", "|---|" + "---:|" * len(titles)]
        for row in measured:
            cells = [show(row) if needs in row else "" for _, _, needs, show in columns]
            lines.append(f"| `{row['spec']}` | " + " | ".join(cells) + " |")
        for row in rows:
            if row["status"] != DONE:
                lines.append(f"| `{row['spec']}` | {row['status']}: {row['note']} |" + " |" * (len(titles) - 1))
        lines.append("")
    return "\n".join([*lines, "In words. " + " ".join(advise(results)), ""])
