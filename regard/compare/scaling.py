"""Loss against parameters, data and counted operations: a ladder of language models on the user's text, and the power
laws that fit it. Where a curve has too few sizes, or a law does not fit, no exponent is given."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from regard.compare.quality import RATE, RATE_WIDTH, QualityPlan
from regard.compare.scores import Scores
from regard.compare.statistics import CONFIDENCE, Interval

SPECS = ("softmax", "linear", "local(window=32)")
MIN_SIZES, MIN_R2 = 4, 0.98  # without which there is no exponent
MAX_EPOCHS = 4  # over the data, beyond which a run is not on the curve
DRAWS = 300  # of the bootstrap over seeds
EXPONENTS = np.linspace(0.02, 2.0, 199)
DATA_SHARES = (1 / 8, 1 / 4, 1 / 2)  # of the tokens, at the size in the middle
LENGTH, HEADS = 128, 4


@dataclass(frozen=True)
class Ladder:
    """Widths and layers of the models, and the tokens that each reads."""

    sizes: tuple[tuple[int, int], ...]
    tokens: float


LADDERS = {
    "smoke": Ladder(((16, 1), (32, 1), (64, 1), (64, 2)), 3e5),
    "small": Ladder(((64, 2), (112, 2), (160, 3), (256, 4), (384, 6)), 2e7),
    "paper": Ladder(((64, 2), (112, 2), (160, 3), (256, 4), (384, 6), (640, 8)), 2e8),
}


def plans(size: str, flags: tuple[str, ...]) -> tuple[QualityPlan, ...]:
    """A plan for each size of the ladder, then for less data at the size in the middle; none where no text is given."""
    if not flags:
        return ()
    ladder = LADDERS[size]
    middle = ladder.sizes[len(ladder.sizes) // 2]
    asked = [(*one, 1.0) for one in ladder.sizes] + [(*middle, share) for share in DATA_SHARES]
    return tuple(_plan(ladder, flags, width, layers, share) for width, layers, share in asked)


def _plan(ladder: Ladder, flags: tuple[str, ...], width: int, layers: int, share: float) -> QualityPlan:
    sizes = {"width": width, "layers": layers, "heads": HEADS, "inner": 4 * width}
    own = [word for name, value in sizes.items() for word in (f"--model.{name}", str(value))]
    rate = float(f"{RATE * math.sqrt(RATE_WIDTH / width):.3g}")
    data = ("--data.tokenizer", "bytes", "--data.length", str(LENGTH), "--training.tokens", "4096")
    # swept at the two smallest sizes; from there on it moves with the root of the width
    is_swept = share == 1.0 and (width, layers) in ladder.sizes[:2]
    rates = tuple(float(f"{rate * factor:.3g}") for factor in (1 / 3, 1, 3)) if is_swept else (rate,)
    of_data = "" if share == 1.0 else f", 1/{round(1 / share)} of the data"
    return QualityPlan(
        "language",
        SPECS,
        axis="tokens",
        amount=share * ladder.tokens,
        flags=(*data, *own, "--training.metric", "loss", *flags),
        rates=rates,
        title=f"width {width}, {layers} layers{of_data}",
    )


class Point(NamedTuple):
    """What the seeds of a row found."""

    size: float  # parameters without embeddings
    tokens: float
    flops: float
    losses: tuple[float, ...]

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)


def points(tables: Sequence[Scores], spec: str) -> list[Point]:
    """The rows of a spec that saw their data less than a few times."""
    found = []
    for scores in tables:
        for cell in scores.cells.get(spec, [])[:1]:
            losses = tuple(one.answer["score"] for one in scores.cells[spec])
            counted = cell.counted
            if cell.answer.get("epochs", 0) < MAX_EPOCHS and {"inside", "flops"} <= set(counted):
                found.append(Point(counted["inside"], scores.plan.amount, counted["flops"], losses))
    return found


class Law(NamedTuple):
    """loss = floor + factor / x^exponent."""

    floor: float
    factor: float
    exponent: float
    r2: float

    def at(self, x: float) -> float:
        return self.floor + self.factor / x**self.exponent


def fit(xs: Sequence[float], losses: Sequence[float]) -> Law:
    """The law with the least squared error."""
    x, y = np.asarray(xs, dtype=float), np.asarray(losses, dtype=float)
    total = float(((y - y.mean()) ** 2).sum())
    best = Law(float(y.mean()), 0.0, 0.0, 0.0)
    for exponent in EXPONENTS:
        columns = np.stack([np.ones_like(x), x**-exponent], 1)
        (floor, factor), *_ = np.linalg.lstsq(columns, y, rcond=None)
        floor = max(float(floor), 0.0)
        factor = float(factor) if floor else float((columns[:, 1] @ y) / (columns[:, 1] @ columns[:, 1]))
        r2 = 1 - float(((y - floor - factor * x**-exponent) ** 2).sum()) / total if total else 0.0
        if factor > 0 and r2 > best.r2:
            best = Law(floor, factor, float(exponent), r2)
    return best


def fit_interval(found: Sequence[Point], axis: Callable[[Point], float], seed: int = 0) -> Interval:
    """The exponent, with its bootstrap interval over the seeds."""
    xs = [axis(point) for point in found]
    middle = fit(xs, [point.loss for point in found]).exponent
    random = np.random.default_rng(seed)
    drawn = []
    for _ in range(DRAWS):
        losses = [float(np.mean(random.choice(point.losses, len(point.losses)))) for point in found]
        drawn.append(fit(xs, losses).exponent)
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(middle, min(float(low), middle), max(float(high), middle))


def hull(found: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of pairs of cost and loss those that nothing cheaper beats."""
    kept: list[tuple[float, float]] = []
    for cost, loss in sorted(found):
        if not kept or loss < kept[-1][1]:
            kept.append((cost, loss))
    return kept


AXES: dict[str, tuple[str, Callable[[Point], float]]] = {
    "parameters": ("N", lambda point: point.size),
    "tokens": ("D", lambda point: point.tokens),
}


def describe(tables: Sequence[Scores]) -> list[str]:
    """The laws in lines, or why there is none; then the best loss for an amount of counted operations."""
    lines: list[str] = []
    whole = [scores for scores in tables if "of the data" not in scores.plan.title]
    middle = [scores for scores in tables if _same_size(scores, tables)]
    for spec in SPECS:
        for axis, group in (("parameters", whole), ("tokens", middle)):
            lines.append(f"{spec}, loss by {axis}: {_law(points(group, spec), axis)}")
        reached = hull([(point.flops, point.loss) for point in points(tables, spec)])
        shown = ", ".join(f"{loss:.3f} at {flops:.2g}" for flops, loss in reached)
        lines.append(f"{spec}, lowest loss by counted operations: {shown or 'nothing ran'}")
    return lines


def _same_size(scores: Scores, tables: Sequence[Scores]) -> bool:
    """Whether a table is of the size at which the data varies."""
    titles = {one.plan.title.partition(", 1/")[0] for one in tables if "of the data" in one.plan.title}
    return scores.plan.title.partition(", 1/")[0] in titles


def _law(found: Sequence[Point], axis: str) -> str:
    letter, of = AXES[axis]
    if len(found) < MIN_SIZES:
        return f"no exponent, {len(found)} of the {MIN_SIZES} points that it needs"
    law = fit([of(point) for point in found], [point.loss for point in found])
    if law.r2 < MIN_R2:
        return f"no exponent, R^2 of the best law is {_cut(law.r2)}, below {MIN_R2}"
    interval = fit_interval(found, of)
    shown = f"{interval.estimate:.2f} ({interval.low:.2f} to {interval.high:.2f})"
    return f"{law.floor:.3f} + {law.factor:.3g} / {letter}^{shown}, R^2 {_cut(law.r2)}"


def _cut(r2: float) -> str:
    """Digits cut off, not rounded: one that is too low never reads as one that is not."""
    return f"{math.floor(1000 * r2) / 1000:.3f}"


def panel(axes: Any, tables: Sequence[Scores], axis: str) -> None:
    """Loss by parameters or by counted operations; the law, or the line that joins what nothing cheaper beats."""
    whole = [scores for scores in tables if "of the data" not in scores.plan.title]
    for spec in SPECS:
        found = points(whole if axis == "parameters" else tables, spec)
        xs = [point.size if axis == "parameters" else point.flops for point in found]
        dots = axes.plot(xs, [point.loss for point in found], "o", label=spec, markersize=4)
        if axis == "operations" and found:
            costs, losses = zip(*hull([(point.flops, point.loss) for point in found]), strict=True)
            axes.plot(costs, losses, color=dots[0].get_color(), linewidth=1)
        elif len(found) >= MIN_SIZES and (law := fit(xs, [point.loss for point in found])).r2 >= MIN_R2:
            line = np.geomspace(min(xs), max(xs), 50)
            axes.plot(line, [law.at(x) for x in line], color=dots[0].get_color(), linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("parameters without embeddings" if axis == "parameters" else "counted operations of training")
    axes.set_ylabel("validation loss, nats per byte")
    axes.legend(fontsize=7, frameon=False)
