"""Pictures of a comparison: what is best at a price, and learning curves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from regard import draw
from regard.compare.results import Results
from regard.compare.store import DONE

FADED, STRONG, LINE = "#b9bec9", "#2f5aa8", "#c2571a"


class Point(NamedTuple):
    """A row in a picture. Less is better on both axes."""

    name: str
    x: float
    y: float
    size: float


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats on one axis without losing on the other, from left to right."""
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
    """A panel for each length of the costs, and one for each task."""
    lengths = list(results.plan.lengths) if results.asks_costs else []
    panels: list[tuple[str, Any]] = [("cost", length) for length in lengths]
    panels += [("score", scores) for scores in results.scores]
    if not panels:
        raise ValueError("there is nothing to draw: the folder has no table of costs or of scores")
    figure = Figure(figsize=(6.4 * len(panels), 5.0), layout="constrained")
    for number, (kind, what) in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), number)
        if kind == "cost":
            _draw_costs(axes, results, what)
        else:
            _draw_curves(axes, what)
    return figure


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
    axes.set_yscale("symlog" if any(point.y < 1 for point in points) else "log")
    if best:
        axes.plot([point.x for point in best], [point.y for point in best], color=LINE, linewidth=1, zorder=1)
    for point in points:
        color = STRONG if point in best else FADED
        axes.scatter(point.x, point.y, s=point.size, color=color, alpha=0.8, zorder=2)
        axes.annotate(
            point.name, (point.x, point.y), fontsize=7, xytext=(4, 4), textcoords="offset points", color=color
        )
    axes.axvline(1.0, color=FADED, linewidth=0.8, linestyle=":")
    axes.set_xlabel("training step, multiple of softmax")
    axes.set_ylabel("peak memory, MiB")
    axes.set_title(f"{length:,} tokens: the line joins what nothing beats on both; area = state", fontsize=9)


def _draw_curves(axes: Any, scores: Any) -> None:
    """The score in training, of the first seed of each row."""
    for row in scores.measured:
        steps, values = zip(*row["curve"], strict=True)
        axes.plot(steps, values, marker="o", markersize=2.5, linewidth=1, label=row["spec"])
    if scores.chance is not None:
        axes.axhline(scores.chance[0], color=FADED, linewidth=0.8, linestyle=":")
    axes.set_xlabel("updates")
    axes.set_ylabel(scores.metric)
    axes.set_title(f"{scores.plan.label}: one seed of each row", fontsize=9)
    if scores.measured:
        axes.legend(fontsize=7, frameon=False)
