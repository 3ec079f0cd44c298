"""Pictures of a comparison: Pareto frontiers, learning curves, and the pictures of named tables."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from regard import draw
from regard.compare import scaling
from regard.compare.results import Results
from regard.compare.scores import Scores
from regard.compare.store import DONE
from regard.spec import parse

POINTS = "offset points"
Panel = Callable[[Any], None]
FADED, STRONG, LINE = "#b9bec9", "#2f5aa8", "#c2571a"
FADED_TEXT = "#6b7280"
WIDE_FACTOR = 4  # factor between the ends of a logarithmic axis from which powers of ten, halves and fifths are several


class Point(NamedTuple):
    """A row in a picture. Less is better on both axes."""

    name: str
    x: float
    y: float
    size: float


def frontier(points: Sequence[Point]) -> list[Point]:
    """The Pareto frontier, from left to right: the points that no other one dominates."""
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x, point.y)):
        if not found or point.y < found[-1].y:
            found.append(point)
    return found


def save_plot(results: Results, out: str | Path) -> Path:
    """Draws the frontier, and the curves where something was trained, into a file."""
    path = draw.check(str(out))
    return draw.save(picture(results), path)


def picture(results: Results) -> Figure:
    """The panels of a table that has its own; otherwise one for each length of the costs, and one for each task."""
    kind = "" if results.table is None else results.table.picture
    panels = PANELS.get(kind, _usual_panels)(results)
    if not panels:
        raise ValueError("there is nothing to draw: the folder has no table of costs or of scores")
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6.0 * columns, 4.6 * rows), layout="constrained")
    for number, draw_panel in enumerate(panels, 1):
        draw_panel(figure.add_subplot(rows, columns, number))
    return figure


def _usual_panels(results: Results) -> list[Panel]:
    lengths = list(results.plan.lengths) if results.asks_costs else []
    costs = [partial(_draw_costs, results=results, length=length) for length in lengths]
    # a row has one colour in all panels
    names = dict.fromkeys(row["spec"] for scores in results.scores for row in scores.rows)
    colours = {name: f"C{number % 10}" for number, name in enumerate(names)}
    return [*costs, *(partial(_draw_curves, scores=scores, colours=colours) for scores in results.scores)]


def _width_panels(results: Results) -> list[Panel]:
    """One for each task, with its tables by width."""
    by_task: dict[tuple[str, int], list[Scores]] = {}
    for scores in results.scores:
        by_task.setdefault((scores.plan.task, scores.plan.tokens), []).append(scores)
    return [partial(_draw_widths, tables=tables) for tables in by_task.values()]


def _draw_widths(axes: Any, tables: list[Scores]) -> None:
    """The score by the width of the model; bars from the lowest to the highest seed."""
    names = dict.fromkeys(row["spec"] for scores in tables for row in scores.rows)
    for name in names:
        rows = [(scores.plan.width, row) for scores in tables for row in scores.measured if row["spec"] == name]
        if rows:
            means = [row["score"] for _, row in rows]
            ends = [
                [row["score"] - row["score_min"] for _, row in rows],
                [row["score_max"] - row["score"] for _, row in rows],
            ]
            axes.errorbar(
                [width for width, _ in rows], means, yerr=ends, marker="o", capsize=2, label=name, linewidth=1.2
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks([scores.plan.width for scores in tables], [str(scores.plan.width) for scores in tables])
    axes.set_xlabel("width of the model")
    axes.set_ylabel(f"{tables[0].metric}, {_describe_seeds(tables[0])}")
    _draw_chance(axes, tables[0])
    axes.set_title(f"{tables[0].plan.task}, {tables[0].plan.tokens} tokens", fontsize=9)
    axes.legend(fontsize=7, frameon=False)


def _describe_seeds(scores: Scores) -> str:
    seeds = scores.plan.seeds
    return "one seed" if seeds == 1 else f"mean and range of {seeds} seeds"


def _state_panels(results: Results) -> list[Panel]:
    return [partial(_draw_state, results=results, scores=scores) for scores in results.scores]


def _draw_state(axes: Any, results: Results, scores: Scores) -> None:
    """The score by the bytes that decoding keeps in one layer."""
    sizes = {row["spec"]: row["state_bytes"] for row in results.rows if row.get("state_bytes")}
    rows = sorted((row for row in scores.measured if row["spec"] in sizes), key=lambda row: sizes[row["spec"]])
    for number, row in enumerate(rows):
        ends = [[row["score"] - row["score_min"]], [row["score_max"] - row["score"]]]
        axes.errorbar(sizes[row["spec"]], row["score"], yerr=ends, marker="o", capsize=2, color=STRONG)
        # towards the middle, and above and below in turn: names do not leave the picture or meet their neighbours
        aside = {"xytext": (5, 4), "ha": "left"} if 2 * number < len(rows) else {"xytext": (-5, 4), "ha": "right"}
        aside |= {"xytext": (aside["xytext"][0], -10)} if number % 2 else {}
        place = (sizes[row["spec"]], row["score"])
        axes.annotate(row["spec"], place, fontsize=7, textcoords=POINTS, **aside)
    axes.set_xscale("log")
    axes.set_xlabel(f"bytes that decoding keeps after {results.plan.lengths[0]} tokens, one layer")
    axes.set_ylabel(scores.metric)
    _draw_chance(axes, scores)
    axes.set_title(f"{scores.plan.label}: {_describe_seeds(scores)}", fontsize=9)


def _bubble_panels(results: Results) -> list[Panel]:
    """One for each task, from scratch and self-pretrained, or what was asked for of the two."""
    tasks: dict[str, list[Scores]] = {}
    for scores in results.scores:
        tasks.setdefault(scores.plan.task, []).append(scores)
    speeds = {parse(row["spec"]).name for row in results.rows if row["status"] == DONE}
    scored = {parse(row["spec"]).name for scores in results.scores for row in scores.measured}
    # bubbles need the speed of every row
    panel = _draw_bubbles if scored <= speeds else _draw_dots
    return [partial(panel, results=results, tables=tables) for tables in tasks.values()]


def _draw_dots(axes: Any, results: Results, tables: list[Scores]) -> None:
    """The score of each row, from the lowest to the highest seed, beside what was published of it."""
    task = tables[0].plan.label.partition(",")[0]
    names = list(dict.fromkeys(parse(row["spec"]).name for row in tables[0].rows))[::-1]
    published = [one for one in (results.table.published if results.table else ()) if task in one.columns]
    for one in published:
        values = {row.word: row.values[one.columns.index(task)] for row in one.rows if row.word in names}
        known = [(value / 100, names.index(word)) for word, value in values.items() if value is not None]
        places = [value for value, _ in known], [place for _, place in known]
        axes.scatter(*places, marker="x", s=22, color=LINE, label="published", zorder=2)
    faces = {"none": ("none", "here, from scratch"), "self": (STRONG, "here, self-pretrained")}
    for scores in tables:
        face, label = faces[scores.plan.pretrain]
        rows = [(names.index(parse(row["spec"]).name), row) for row in scores.measured]
        for place, row in rows:
            axes.plot([row["score_min"], row["score_max"]], [place, place], color=STRONG, linewidth=1.2, zorder=1)
        dots = [row["score"] for _, row in rows], [place for place, _ in rows]
        axes.scatter(*dots, s=28, facecolors=face if face != "none" else "white", edgecolors=STRONG, label=label)
    if (chance := tables[0].chance) is not None:
        axes.axvline(chance[0], color=FADED, linewidth=0.8, linestyle=":", label="chance")
        if chance[1] is not None:
            axes.axvline(chance[1][0], color=FADED, linewidth=0.8, linestyle="--", label=chance[1][1])
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel(f"{tables[0].metric}; a line from the lowest to the highest seed")
    axes.set_title(task, fontsize=9)
    axes.legend(fontsize=7, frameon=False)


def _draw_bubbles(axes: Any, results: Results, tables: list[Scores]) -> None:
    """The score by the speed; the area is the memory of a training step. Hollow from scratch, filled self-pretrained"""
    faces = {"none": ("none", "hollow from scratch"), "self": (STRONG, "filled self-pretrained")}
    shown = [faces[scores.plan.pretrain] for scores in tables]
    costs = {parse(row["spec"]).name: row for row in results.rows if row["status"] == DONE and "peak_mib" in row}
    largest = max((row["peak_mib"] for row in costs.values()), default=0) or 1
    rows = [{parse(row["spec"]).name: row for row in scores.measured} for scores in tables]
    speeds: list[float] = []
    for name in dict.fromkeys(name for part in rows for name in part):
        if name not in costs:
            continue
        x, size = 1 / costs[name]["train_ratio"], 20 + 400 * costs[name]["peak_mib"] / largest
        speeds.append(x)
        found = [part[name] for part in rows if name in part]
        axes.plot([x] * len(found), [row["score"] for row in found], color=FADED, linewidth=0.8, zorder=1)
        for part, (face, _) in zip(rows, shown, strict=True):
            if name in part:
                row = part[name]
                axes.plot([x, x], [row["score_min"], row["score_max"]], color=STRONG, linewidth=1, zorder=1)
                axes.scatter(x, row["score"], s=size, facecolors=face, edgecolors=STRONG, alpha=0.7, zorder=2)
        # beside the bubble, below and above in turn: names do not meet those of neighbours
        height = 4 if len(speeds) % 2 else -10
        axes.annotate(name, (x, max(row["score"] for row in found)), fontsize=7, xytext=(7, height), textcoords=POINTS)
    axes.set_xscale("log")
    _set_plain_ticks(axes.xaxis, speeds)
    axes.margins(x=0.2, y=0.15)  # room for names
    axes.set_xlabel(f"speed of a training step at {results.plan.lengths[0]:,} tokens, softmax = 1")
    chance = tables[0].chance
    axes.set_ylabel(tables[0].metric + (f" (chance {chance[0]:.2f})" if chance else ""))
    title = tables[0].plan.label.partition(",")[0]
    words = (*(words for _, words in shown), "area = memory", "line = seeds")
    axes.set_title(f"{title}: {', '.join(words)}", fontsize=9)


def _set_plain_ticks(axis: Any, values: Sequence[float]) -> None:
    """Several numbers without powers on a logarithmic axis, also where the values lie near each other."""
    is_wide = len(values) > 0 and max(values) > WIDE_FACTOR * min(values)
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)) if is_wide else MaxNLocator(4))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _scaling_panels(results: Results) -> list[Panel]:
    return [partial(scaling.panel, tables=results.scores, axis=axis) for axis in ("parameters", "operations")]


def _draw_chance(axes: Any, scores: Scores) -> None:
    if scores.chance is not None:
        axes.axhline(scores.chance[0], color=FADED, linewidth=0.8, linestyle=":")


def _draw_costs(axes: Any, results: Results, length: int) -> None:
    """Time against memory; the area is the state that decoding keeps."""
    rows = [row for row in results.rows if row["length"] == length and row["status"] == DONE]
    largest = max((row.get("state_bytes", 0) for row in rows), default=0) or 1
    points = [
        Point(row["spec"], row["train_ratio"], row["peak_mib"], 30 + 300 * row.get("state_bytes", 0) / largest)
        for row in rows
        if "peak_mib" in row
    ]
    best = frontier(points)
    axes.set_xscale("log")
    axes.set_yscale("log" if all(point.y > 0 for point in points) else "linear")
    for axis, values in ((axes.xaxis, [point.x for point in points]), (axes.yaxis, [point.y for point in points])):
        if axis.get_scale() == "log":
            _set_plain_ticks(axis, values)
    axes.margins(x=0.2, y=0.1)  # room for names
    if best:
        axes.plot([point.x for point in best], [point.y for point in best], color=LINE, linewidth=1, zorder=1)
    middle = math.sqrt(min((point.x for point in points), default=1) * max((point.x for point in points), default=1))
    for point in points:
        color = STRONG if point in best else FADED
        axes.scatter(point.x, point.y, s=point.size, color=color, alpha=0.8, zorder=2)
        named = STRONG if point in best else FADED_TEXT
        # a name stands on the side where it has room
        on_left = point.x > middle
        place = {"xytext": (-6 if on_left else 6, 6), "ha": "right" if on_left else "left"}
        axes.annotate(point.name, (point.x, point.y), fontsize=7, textcoords=POINTS, color=named, **place)
    axes.axvline(1.0, color=FADED, linewidth=0.8, linestyle=":")
    axes.set_xlabel("training step, multiple of softmax")
    axes.set_ylabel("peak memory, MiB")
    axes.set_title(f"{length:,} tokens: the line is the Pareto frontier; area = state", fontsize=9)


def _draw_curves(axes: Any, scores: Scores, colours: dict[str, str]) -> None:
    """The score in training, of the first seed of each row."""
    for row in scores.measured:
        if not row["curve"]:
            continue
        steps, values = zip(*row["curve"], strict=True)
        axes.plot(steps, values, marker="o", markersize=2.5, linewidth=1, label=row["spec"], color=colours[row["spec"]])
    _draw_chance(axes, scores)
    axes.set_xlabel("updates")
    axes.set_ylabel(scores.metric)
    axes.set_title(f"{scores.plan.label}: one seed of each row", fontsize=9)
    if scores.measured:
        axes.legend(fontsize=7, frameon=False)


PANELS: dict[str, Callable[[Results], list[Panel]]] = {
    "widths": _width_panels,
    "state": _state_panels,
    "bubbles": _bubble_panels,
    "scaling": _scaling_panels,
}
