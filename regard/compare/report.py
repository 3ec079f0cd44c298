"""Tables for a terminal and in Markdown."""

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from regard.compare import scaling
from regard.compare.advise import advise
from regard.compare.complexity import DEPTH_LENGTHS, PATH_LENGTHS
from regard.compare.plan import BASELINE
from regard.compare.results import NOT_RUN, Results
from regard.compare.scores import Scores
from regard.compare.store import DONE

OLD = "some rows are older: measured with other code or on another machine, they would be measured again"
LONGEST_NAME = 48  # columns of a spec in a terminal; a longer one takes a line of its own


def number(value: float) -> str:
    """Three significant digits."""
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


# title, unit, the field that a row needs for it, how it is shown
COLUMNS: list[tuple[str, str, str, Callable[[dict[str, Any]], str]]] = [
    ("train", f"x {BASELINE} [95 %]", "train_ratio", _ratio("train")),
    ("sees", "tokens", "sees", lambda row: f"{row['sees']:,}"),
    ("train", "ms", "train_ms", lambda row: number(row["train_ms"])),
    ("forward", "ms", "forward_ms", lambda row: number(row["forward_ms"])),
    ("step", "ms", "step_ms", lambda row: number(row["step_ms"])),
    ("state", "", "state_bytes", lambda row: _size(row["state_bytes"])),
    ("peak", "MiB", "peak_mib", lambda row: number(row["peak_mib"])),
    ("counted", "GFLOP", "flops", lambda row: number(row["flops"] / 1e9)),
]


def header(results: Results) -> list[str]:
    """The lines above a table of costs: sizes, machine, rows that are missing, drift and load."""
    plan, facts = results.plan, results.facts()
    machine = facts["machine"]
    where = f"{machine.get('gpu') or machine.get('cpu', plan.device)}"
    counted = "1 thread" if plan.threads == 1 else f"{plan.threads} threads"
    threads = f", {counted}" if plan.device == "cpu" and plan.threads else ""
    torch = f", torch {machine['torch']}" if "torch" in machine else ""
    lengths = ", ".join(f"{length:,}" for length in plan.lengths)
    what = "one layer with its projections" if plan.part == "layer" else "attention alone, without projections"
    backend = f", {BASELINE} = SDPA {facts['backend']}" if facts["backend"] else ""
    sizes = f"width {plan.width}, {plan.heads} heads, {plan.dtype}"
    lines = [
        f"{lengths} tokens, batch {plan.batch}, {plan.role}, {sizes}; {what}",
        f"{where}{threads}{torch}{backend}",
    ]
    if results.folder.old:
        lines.append(OLD)
    if results.missing:
        measured = sum(row["status"] == DONE for row in results.rows)
        lines.append(f"{measured} of {len(results.rows)} rows measured, {results.missing} not run yet")
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
        dropped = max(dropped, names[kept:], key=len)
        if len(results.plan.lengths) > 1:
            lines += ["", f"{length:,} tokens"]
        for at, label in enumerate(["", "", *(row["spec"] for row in measured)]):
            parts = [column[at].rjust(max(map(len, column))) for column in cells[:kept]]
            if len(label) > first:
                lines.append(label)
                label = ""
            if parts:
                lines.append("  ".join([label.ljust(first), *parts]).rstrip())
        lines += _status_lines(others, first, width)
    if dropped:
        rest = f"Columns without room here: {', '.join(dropped)}; a wider terminal, --csv or --json has them."
        lines.append(_fill(rest, width))
    return lines


def _fill(text: str, width: int) -> str:
    return textwrap.fill(text, max(width, 40), break_on_hyphens=False)


def _status_lines(rows: list[dict[str, Any]], first: int, width: int) -> list[str]:
    """A line for each row without numbers; those that did not run for one reason share one."""
    lines = [_status_line(row, first, width) for row in rows if row["status"] != NOT_RUN]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] == NOT_RUN:
            reasons.setdefault(row["note"], []).append(row["spec"])
    for note, specs in reasons.items():
        text = f"{NOT_RUN}: {note}: {', '.join(specs)}"
        lines += textwrap.wrap(text, max(width, 40), subsequent_indent=" " * 4, break_on_hyphens=False)
    return lines


def _status_line(row: dict[str, Any], first: int, width: int) -> str:
    text = f"{row['spec'].ljust(first)}  {row['status']}: {row['note']}"
    return "\n".join(textwrap.wrap(text, max(width, 40), subsequent_indent=" " * 4, break_on_hyphens=False))


# title, the field that a row needs for it, how it is shown
SCORE_COLUMNS: list[tuple[str, str, Callable[[dict[str, Any]], str]]] = [
    ("score", "score", lambda row: f"{row['score']:.3f}{' =' if row.get('at_chance') else ''}"),
    ("min, max", "score_min", lambda row: f"{row['score_min']:.3f} {row['score_max']:.3f}"),
    ("rank", "letters", lambda row: row["letters"]),
    ("solved", "solved", lambda row: f"{row['solved']:.0%}"),
    ("solved at", "solved", lambda row: f"{row['solved_at']:,}" if row["solved_at"] else f"> {row['updates']:,}"),
    ("learning rate", "rate", lambda row: f"{row['rate']:g}"),
    ("learns at", "rates_ok", lambda row: f"{row['rates_ok']} of {row['rates']}"),
    ("parameters", "parameters", lambda row: f"{row['parameters']:,}"),
    ("active", "active", lambda row: f"{row['active']:,}"),
    ("dropped", "dropped", lambda row: f"{row['dropped']:.1%}"),
    ("busiest", "busiest", lambda row: f"{row['busiest']:.1f}x"),
    ("counted FLOP", "flops", lambda row: f"{row['flops']:.2e}"),
    ("trains at", "speed", lambda row: f"{row['speed']:,.0f} {row['speed_unit']}/s"),
    ("device s", "device_seconds", lambda row: number(row["device_seconds"])),
    ("trend", "rising", lambda row: "still improving" if row["rising"] and row.get("solved", 0) < 1 else ""),
]


def score_header(scores: Scores) -> list[str]:
    """The lines above a table of scores: task, budget, chance, and whether the table is settled."""
    plan, chance = scores.plan, scores.chance
    sizes = f", width {plan.width}, {plan.layers} layers, {plan.position} positions, {plan.dtype}"
    sizes = "" if plan.is_run else sizes
    rates, seeds = _counted(len(scores.filling.rates), "learning rate"), _counted(plan.seeds, "seed")
    tried = f"{rates}, then {seeds} at the best" if plan.sweeps else f"{rates}, {seeds}"
    what = f"{plan.task}, {plan.tokens:,} tokens" if not plan.is_run else f"regard train {plan.task}"
    equal = "parameters as each model has them" if plan.is_run and plan.variants else "parameters within 1 %"
    lines = [
        f"{plan.title or what}: {scores.metric}{sizes}",
        f"budget: {plan.budget} for each, {equal}, {tried}, the same for all",
    ]
    if plan.lost_precision:
        lines.append(plan.lost_precision)
    if chance is not None:
        trick = f", {chance[1][1]} {chance[1][0]:.2f}" if chance[1] else ""
        lines.append(f"chance {chance[0]:.2f}{trick}; = marks a score that is not significantly above chance")
    if scores.folder.old:
        lines.append(OLD)
    if scores.lacks_reference:
        lines.append(f"not settled: it is not known whether {scores.reference} solves it; name that row too")
    elif scores.awaits_reference:
        seeds = f"{scores.reference_seeds} of {_counted(plan.seeds, 'seed')}"
        lines.append(f"not settled yet: {scores.reference} has {seeds}, so no row is ranked")
    elif not scores.settled:
        lines.append(
            f"not settled: {scores.reference} does not solve it with every seed in half of the budget, so the order is "
            "one of luck"
        )
    return [*lines, *([scores.rule] if scores.rule else ())]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def score_table(scores: Scores, width: int) -> list[str]:
    """The rows of a table of scores as lines."""
    rows = scores.measured
    first = min(LONGEST_NAME, max(len(row["spec"]) for row in scores.rows))
    columns = [column for column in SCORE_COLUMNS if any(column[1] in row for row in rows)]
    shown = [[title, *(show(row) if needs in row else "-" for row in rows)] for title, needs, show in columns]
    cells = [column for column in shown if any(column[1:])]
    room, kept = width - first, 0
    for column in cells:
        room -= max(map(len, column)) + 2
        if room < 0:
            break
        kept += 1
    lines = []
    for at, label in enumerate(["", *(row["spec"] for row in rows)]):
        parts = [column[at].rjust(max(map(len, column))) for column in cells[:kept]]
        if len(label) > first:
            lines.append(label)
            label = ""
        lines.append("  ".join([label.ljust(first), *parts]).rstrip())
    if kept < len(cells):
        names = ", ".join(title for title, *_ in cells[kept:])
        lines.append(_fill(f"Columns without room here: {names}.", width))
    if groups := group_lines(scores):
        lines += ["", "by group:", *(_fill(line, width) for line in groups)]
    return [*(lines if rows else []), *_status_lines([row for row in scores.rows if row["note"]], first, width)]


def group_lines(scores: Scores) -> list[str]:
    """The scores of each group of answers that a task distinguishes, as means over the seeds: a line for each row."""
    rows = [row for row in scores.measured if row.get("groups")]
    shares = [", ".join(f"{name} {share:.3f}" for name, share in row["groups"].items()) for row in rows]
    return [f"{row['spec']}: {share}" for row, share in zip(rows, shares, strict=True)]


def score_markdown(scores: Scores) -> list[str]:
    """A table of scores in Markdown."""
    rows = scores.measured
    columns = [column for column in SCORE_COLUMNS if any(column[1] in row for row in rows)]
    lines = [*(f"{line}  " for line in score_header(scores)), ""]
    # a table without scores yet has one column, for the reasons
    titles = [title for title, *_ in columns] or ["score"]
    lines += [f"| {scores.subject} | " + " | ".join(titles) + " |", "|---|" + "---:|" * len(titles)]
    for row in rows:
        lines.append(
            f"| `{row['spec']}` | "
            + " | ".join(show(row) if needs in row else "-" for _, needs, show in columns)
            + " |"
        )
    for row in scores.rows:
        if row["note"] and "score" not in row:
            lines.append(f"| `{row['spec']}` | {row['status']}: {row['note']} |" + " |" * (len(titles) - 1))
    fewer: dict[str, list[str]] = {}
    for row in rows:
        if row["note"]:
            fewer.setdefault(row["note"], []).append(f"`{row['spec']}`")
    lines += ["", *(f"{note}: {', '.join(specs)}  " for note, specs in fewer.items())] if fewer else []
    if groups := group_lines(scores):
        lines += ["", "By group:  ", *(f"{line}  " for line in groups)]
    return [*lines, ""]


def text_report(results: Results, width: int = 120) -> str:
    """The whole report for a terminal: headers, tables, recommendation."""
    lines: list[str] = []
    if results.asks_costs:
        lines += [*(_fill(line, width) for line in header(results)), "", *table(results, width), ""]
    for scores in results.scores:
        lines += [*(_fill(line, width) for line in score_header(scores)), "", *score_table(scores, width), ""]
    lines += [_fill(line, width) for line in table_lines(results)]
    if results.asks_costs or results.scores:
        lines.append(_fill("In words. " + " ".join(advise(results)), width))
    return "\n".join(lines)


def table_lines(results: Results) -> list[str]:
    """What a named table has beside its plans: counted rows, published figures, commands for what it does not run."""
    table = results.table
    if table is None:
        return []
    lines = [f"Table {table.name}: {table.head}", ""]
    if results.complexity:
        titles = (
            "work ~ n^",
            "work ~ d^",
            f"depth at {_joined(DEPTH_LENGTHS)}",
            f"layers between, {_joined(PATH_LENGTHS)}",
        )
        cells = [
            (
                row["spec"],
                f"{row['work_length']:.2f}",
                f"{row['work_width']:.2f}",
                ", ".join(f"{depth:,}" for depth in row["depth"]),
                ", ".join("never" if layers is None else str(layers) for layers in row["path"]),
            )
            for row in results.complexity
        ]
        lines += [*_aligned([("", *titles), *cells]), ""]
    if table.name == "scaling" and results.scores:
        lines += [*scaling.describe(results.scores), ""]
    for published in table.published:
        lines += [f"Published, {published.tag}: {published.title} ({published.source})"]
        rows = [(row.row, *("-" if value is None else f"{value:g}" for value in row.values)) for row in published.rows]
        lines += [*_aligned([("", *published.columns), *rows]), ""] if rows else [""]
    lines += [f"not run: {what}: {command}" for what, command in table.commands]
    return [*lines, *table.notes, ""]


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _joined(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def markdown_report(results: Results) -> str:
    """The same in Markdown."""
    lines = [*(f"{line}  " for line in header(results)), ""] if results.asks_costs else []
    for length in results.plan.lengths if results.asks_costs else ():
        lines += _cost_markdown(results, length)
    for scores in results.scores:
        lines += score_markdown(scores)
    if extra := table_lines(results):
        lines += ["```", *extra, "```", ""]
    return "\n".join([*lines, "In words. " + " ".join(advise(results)), ""])


def _cost_markdown(results: Results, length: int) -> list[str]:
    rows = [row for row in results.rows if row["length"] == length]
    measured = sorted((row for row in rows if row["status"] == DONE), key=lambda row: (row["train_ratio"], row["spec"]))
    columns = [column for column in COLUMNS if any(column[2] in row for row in measured)]
    titles = [" ".join(filter(None, (title, unit))) for title, unit, *_ in columns]
    lines = [f"| {length:,} tokens | " + " | ".join(titles) + " |", "|---|" + "---:|" * len(titles)]
    for row in measured:
        cells = [show(row) if needs in row else "" for _, _, needs, show in columns]
        lines.append(f"| `{row['spec']}` | " + " | ".join(cells) + " |")
    for row in rows:
        if row["status"] != DONE:
            lines.append(f"| `{row['spec']}` | {row['status']}: {row['note']} |" + " |" * (len(titles) - 1))
    return [*lines, ""]
