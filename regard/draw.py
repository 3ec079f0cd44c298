"""Pictures of what attends to what. They show the map of the layer that runs, `layer.weights`: a cell is coloured where
the layer gives a key some weight."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize, PowerNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullLocator

import regard
from regard.core.shape import Role
from regard.metrics.classification import Choice, Report
from regard.spec import Spec, parse

LONGEST = 1024  # tokens; beyond, cells are smaller than pixels
MOST_HEADS = 32
SUFFIXES = (".png", ".svg", ".pdf")

# Okabe and Ito: told apart by colour-blind readers too
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8C510A")
INK, FAINT, UNSEEN, SHARED = "#222222", "#6B6B6B", "#F3F3F0", "#3B3B46"


class Drawn(NamedTuple):
    """The maps [H, T, S] of one layer over random tokens, and what to write beside them."""

    maps: np.ndarray
    parts: list[str]  # the spec of each head
    title: str
    note: str
    columns: str

    @property
    def dense(self) -> bool:
        """Every head sees all keys, or all of the past."""
        seen = self.maps != 0
        return bool(seen.all() or (seen == np.tril(np.ones_like(seen))).all())


class Pattern(NamedTuple):
    """Heads that see the same keys."""

    label: str
    seen: np.ndarray  # [T, S]


def measure(
    spec: str | Spec,
    *,
    length: int = 64,
    heads: int | None = None,
    role: str | None = None,
    position: str | None = None,
    keys: int | None = None,
    seed: int = 0,
) -> Drawn:
    """Builds the layer and takes its map. Without a role: the first one the mechanism takes; without heads: 8, or more
    where nested specs need them."""
    spec = parse(spec)
    heads = -(-8 // spec.heads) * spec.heads if heads is None else heads
    sizes = {"length": (length, LONGEST), "keys": (1 if keys is None else keys, LONGEST), "heads": (heads, MOST_HEADS)}
    for name, (size, most) in sizes.items():
        if not 1 <= size <= most:
            raise ValueError(f"{name} must be between 1 and {most} for a picture, got {size}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be between 0 and {2**63 - 1}, got {seed}")
    role = role or regard.facts(spec).roles[0]
    if keys is not None and role != "cross":
        raise ValueError(f"keys is for role 'cross'; with role {role!r} the {length} tokens are their own keys")
    width = 16 * heads
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        # what is no role is refused there
        layer = regard.attention(spec, width=width, heads=heads, role=cast(Role, role), position=position)
        layer = layer.double().eval()
        x = torch.randn(1, length, width, dtype=torch.float64)
        memory = torch.randn(1, keys or length, width, dtype=torch.float64) if role == "cross" else None
        maps = layer.weights(x, memory=memory)[0].numpy()
    parts = [str(part) for part in spec.parts] or [str(spec)]
    title = f"{spec}, role {role}" + (f", position {position}" if position else "")
    note = f"{heads} head{'s' * (heads > 1)}, {length} tokens" + (f" over {keys or length}" if role == "cross" else "")
    columns = "key" if layer.facts.columns == "tokens" else "slot"
    return Drawn(maps, [parts[head * len(parts) // heads] for head in range(heads)], title, note, columns)


def pattern_picture(drawn: Drawn) -> Figure:
    """Which keys each query sees; heads with a pattern of their own in a colour of their own."""
    unique = patterns(drawn)
    T, S = unique[0].seen.shape
    together = np.any([pattern.seen for pattern in unique], 0)
    shared = np.all([pattern.seen for pattern in unique], 0)
    many = len(unique) > 1
    columns = -(-len(unique) // 4) if many else 0
    figure = Figure(figsize=(6.6 + 1.9 * columns, 7.0), dpi=200, layout="constrained")
    _words(
        figure,
        drawn.title,
        f"{drawn.note}; {_share(together)} of the pairs seen" + many * "; the sparser drawn over the denser",
    )
    grid = figure.add_gridspec(-(-len(unique) // max(columns, 1)), 1 + columns, width_ratios=[6.2, *[1.9] * columns])
    ax = figure.add_subplot(grid[:, 0])
    image = np.broadcast_to(to_rgb(UNSEEN), (T, S, 3)).copy()
    colours = [to_rgb(COLOURS[index % len(COLOURS)]) for index in range(len(unique))]
    # the sparser over the denser, so that none is hidden whole
    for index in sorted(range(len(unique)), key=lambda index: -unique[index].seen.sum()):
        image[unique[index].seen] = colours[index]
    # what all heads see belongs to none of them, unless it is all that one of them sees
    neutral = many and shared.any() and not any(np.array_equal(shared, pattern.seen) for pattern in unique)
    if neutral:
        image[shared] = to_rgb(SHARED)
    _matrix(ax, image, drawn.columns)
    for index, (colour, pattern) in enumerate(zip(colours, unique, strict=True) if many else ()):
        small = figure.add_subplot(grid[index // columns, 1 + index % columns])
        _matrix(small, np.where(pattern.seen[..., None], colour, to_rgb(UNSEEN)), drawn.columns, small=True)
        label = "\n".join(textwrap.wrap(pattern.label, 24, max_lines=2, placeholder=" ..."))
        small.set_title(f"{label}\n{_share(pattern.seen)}", fontsize=7, color=INK)
    if many:
        patches = [Patch(color=colour, label=pattern.label) for colour, pattern in zip(colours, unique, strict=True)]
        patches += [Patch(color=SHARED, label="all heads")] if neutral else []
        longest = max(len(pattern.label) for pattern in unique)
        ax.legend(
            handles=patches,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.09),
            ncols=max(1, min(len(patches), 70 // (longest + 8))),
            frameon=False,
            fontsize=9,
            handlelength=1,
            handleheight=1,
        )
    return figure


def weights_picture(drawn: Drawn) -> Figure:
    """How much of each key's value reaches each query, a panel a head."""
    mixed = len(set(drawn.parts)) > 1
    labels = [f"head {head + 1}" + (f": {part}" if mixed else "") for head, part in enumerate(drawn.parts)]
    H = len(labels)
    # a full grid where there is one that is no long strip
    columns = next((c for c in range(1, 7) if H % c == 0 and c * c >= H), math.ceil(math.sqrt(H)))
    figure, _ = _panels(drawn.maps, labels if H > 1 else [""], columns, 6.0 if H == 1 else 3.4, drawn.columns)
    _words(figure, drawn.title, f"{drawn.note}; random projections of random tokens: nothing is trained")
    return figure


def words_picture(words: Sequence[str], maps: np.ndarray, labels: Sequence[str], title: str, note: str) -> Figure:
    """Maps [P, T, T] of one sentence side by side, words on both axes."""
    columns = min(len(maps), 3)
    figure, axes = _panels(maps, labels, columns, 1.4 + 0.18 * max(len(words), 12), "key")
    for index, ax in enumerate(axes):
        at = range(len(words))
        ax.set_xticks(at, words if index + columns >= len(maps) else [""] * len(words), rotation=90)
        ax.set_yticks(at, words if index % columns == 0 else [""] * len(words))
        ax.tick_params(labelsize=11)
    _words(figure, title, note)
    return figure


def alignment_picture(
    matrix: np.ndarray,
    source: Sequence[str],
    target: Sequence[str],
    links: Iterable[tuple[int, int]],
    title: str,
    note: str,
) -> Figure:
    """The attention [target words, source words] of one pair of sentences, its links (source, target) ringed."""
    if matrix.shape != (len(target), len(source)) or matrix.size == 0:
        raise ValueError(
            f"an alignment picture needs a matrix of at least one target x source word, got {list(matrix.shape)} for "
            f"{len(target)} target and {len(source)} source words"
        )
    figure, (ax,) = _panels(matrix[None], [""], 1, 1.0, "source")
    across, down = ([word if len(word) <= 40 else f"{word[:37]}..." for word in words] for words in (source, target))
    # words stand outside the matrix: what is long beyond the usual makes the picture larger, and the matrix no smaller
    beyond = [max(0, max(map(len, words)) - 12) for words in (down, across)]
    width, height = 3.4 + 0.32 * max(len(source), 8), 2.6 + 0.32 * max(len(target), 6)
    figure.set_size_inches(width + 0.12 * beyond[0], height + 0.12 * beyond[1])
    # words are text, also where they hold the dollars that start a formula
    ax.set_xticks(range(len(source)), across, rotation=90, fontsize=11, parse_math=False)
    ax.set_yticks(range(len(target)), down, fontsize=11, parse_math=False)
    ax.set_ylabel("target", color=INK)
    marks = sorted(links)
    ax.scatter(
        [source for source, _ in marks],
        [target for _, target in marks],
        s=110,
        facecolors="none",
        edgecolors=COLOURS[5],
        linewidths=2,
        label="link",
    )
    _words(figure, title.replace("$", r"\$"), note.replace("$", r"\$"))
    return figure


def report_picture(
    report: Report, title: str, note: str, *, only: int | None = None, chosen: Choice | None = None
) -> Figure:
    """The confusion matrix beside the precision-recall curve of each class, or of `only` one; a chosen threshold is
    marked on the curve."""
    C = len(report.labels)
    side = min(9.0, max(4.2, 1.6 + 0.45 * C))
    figure = Figure(figsize=(side + 6.4, max(4.8, side + 0.4)), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[side, 6.0])
    names = [
        textwrap.shorten(label, 16, placeholder="...") if C > 2 else textwrap.fill(label, 14) for label in report.labels
    ]
    # shades are shares of the truth, so that a rare class is as visible as a common one
    shares = report.confusion / np.maximum(report.confusion.sum(1, keepdims=True), 1)
    left.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    ticks = range(0, C, -(-C // 40))
    left.set_xticks(ticks, [names[at] for at in ticks], rotation=90 if C > 4 else 0, fontsize=9, parse_math=False)
    left.set_yticks(ticks, [names[at] for at in ticks], fontsize=9, parse_math=False)
    left.set_xlabel("answer", color=INK)
    left.set_ylabel("truth", color=INK)
    for truth, answer in np.ndindex(C, C) if C <= 12 else ():
        count, share = report.confusion[truth, answer], shares[truth, answer]
        words = f"{count:,}\n{100 * share:.1f} %" if C <= 6 else f"{count:,}"
        left.text(
            answer,
            truth,
            words,
            ha="center",
            va="center",
            fontsize=12 if C <= 4 else 8,
            color="white" if share > 0.5 else INK,
        )
    left.set_title(f"accuracy {100 * report.accuracy:.2f} %, macro F1 {report.macro.f1:.3f}", fontsize=11, color=INK)
    drawn = [only] if only is not None else [index for index, curve in enumerate(report.curves) if curve is not None]
    for place, index in enumerate(drawn[: len(COLOURS)]):
        curve, score = report.curves[index], report.classes[index]
        if curve is None:
            continue
        # the point that takes nothing ends the curve at the left
        label = f"{names[index]}: AP {score.average_precision:.3f}".replace("$", r"\$")
        steps = np.append(curve.recall, 0.0), np.append(curve.precision, 1.0)
        right.plot(*steps, color=COLOURS[place], linewidth=1.8, label=label, drawstyle="steps-post")
        if len(drawn) == 1:
            always = score.examples / report.examples
            right.axhline(always, color=FAINT, linewidth=1, linestyle=":", label=f"answering it always: {always:.3f}")
    if chosen is not None:
        words = f"from {chosen.threshold:.3f} on: recall {chosen.recall:.3f}, precision {chosen.precision:.3f}"
        right.plot(chosen.recall, chosen.precision, "o", markersize=9, color=COLOURS[5], label=words)
    right.set(xlim=(0, 1.01), ylim=(0, 1.01), xlabel="recall", ylabel="precision")
    right.grid(color="#E4E4E4", linewidth=0.6)
    more = len(drawn) - len(COLOURS)
    right.set_title(
        "precision and recall" + (f", {more} more classes not drawn" if more > 0 else ""), fontsize=11, color=INK
    )
    right.legend(loc="lower left", frameon=False, fontsize=9)
    for edge in ("top", "right"):
        right.spines[edge].set_visible(False)
    _words(figure, title.replace("$", r"\$"), note.replace("$", r"\$"))
    return figure


def save(figure: Figure, out: str | Path) -> Path:
    out = check(out)
    figure.savefig(out, facecolor="white")
    return out


def check(out: str | Path) -> Path:
    """The path of a picture, or a ValueError that says what is wrong with it: call it before the work."""
    out = Path(out)
    if out.suffix.lower() not in SUFFIXES:
        raise ValueError(f"a picture ends in {', '.join(SUFFIXES)}, got {str(out)!r}")
    if not out.parent.is_dir():
        raise ValueError(
            f"there is no folder {str(out.parent)!r} for the picture: create it first, mkdir -p {out.parent}"
        )
    if out.is_dir():
        raise ValueError(f"{str(out)!r} is a folder: name a file in it")
    return out


def patterns(drawn: Drawn) -> list[Pattern]:
    """The distinct patterns of the heads, in the order of the heads."""
    groups: dict[bytes, list[int]] = {}
    for head, seen in enumerate(drawn.maps != 0):
        groups.setdefault(seen.tobytes(), []).append(head)
    mixed = len(set(drawn.parts)) > 1
    distinct = []
    for group in groups.values():
        label = f"head{'s' * (len(group) > 1)} {', '.join(str(head + 1) for head in group)}"
        if mixed:
            label = " and ".join(dict.fromkeys(drawn.parts[head] for head in group))
        distinct.append(Pattern(label, drawn.maps[group[0]] != 0))
    return distinct


def shades(maps: np.ndarray) -> tuple[Colormap, Normalize, str]:
    """Colours, scale and which ends of the colour bar are open. A few weights of 1 (the first causal token sees only
    itself) would leave all others dark: the scale ends at the 98th percentile, and without signs follows the root."""
    sizes = np.abs(maps[maps != 0])
    top = float(np.quantile(sizes, 0.98)) if sizes.size else 1.0
    over, under = bool((maps > top).any()), bool((maps < -top).any())
    signed = bool((maps < 0).any())
    colours = colormaps["RdBu_r" if signed else "viridis"].with_extremes(bad=UNSEEN)
    extend = {(True, True): "both", (True, False): "max", (False, True): "min"}.get((over, under), "neither")
    return colours, Normalize(-top, top) if signed else PowerNorm(0.5, 0, top), extend


def _panels(
    maps: np.ndarray, labels: Sequence[str], columns: int, inches: float, across: str
) -> tuple[Figure, list[Axes]]:
    """Maps in a grid under one colour scale; only the outer panels name their axes."""
    rows = -(-len(maps) // columns)
    figure = Figure(figsize=(inches * columns + 1.4, inches * rows + 1.1), dpi=200, layout="constrained")
    colours, scale, extend = shades(maps)
    axes = []
    for index, (part, label) in enumerate(zip(maps, labels, strict=True)):
        ax = figure.add_subplot(rows, columns, index + 1)
        _matrix(ax, np.ma.masked_equal(part, 0), across, colours, scale)
        if index + columns < len(maps):
            ax.set_xlabel("")
            ax.tick_params(labelbottom=False)
        if index % columns:
            ax.set_ylabel("")
            ax.tick_params(labelleft=False)
        size = 9 if inches < 4 else 13
        ax.set_title("\n".join(textwrap.wrap(label, int(inches * 100 / size))), fontsize=size, color=INK)
        axes.append(ax)
    bar = figure.colorbar(ScalarMappable(scale, colours), ax=axes, extend=extend, fraction=0.05, pad=0.02, aspect=30)
    bar.set_label("weight" if (maps != 0).all() else "weight (pale: not seen)", color=INK)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=FAINT, labelsize=9, length=2)
    return figure, axes


def _matrix(
    ax: Axes,
    image: np.ndarray,
    across: str,
    colours: Colormap | None = None,
    scale: Normalize | None = None,
    small: bool = False,
) -> None:
    """One matrix: queries down, keys across."""
    T, S = image.shape[:2]
    ax.imshow(image, cmap=colours, norm=scale, aspect="equal" if T == S else "auto")
    if max(T, S) <= 96:
        ax.vlines(np.arange(0.5, S - 1), -0.5, T - 0.5, color="white", linewidth=0.1 if small else 0.5)
        ax.hlines(np.arange(0.5, T - 1), -0.5, S - 0.5, color="white", linewidth=0.1 if small else 0.5)
    ax.tick_params(length=0, colors=FAINT, labelsize=9)
    for edge in ax.spines.values():
        edge.set_color("#CCCCCC")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(NullLocator() if small else MaxNLocator(8, integer=True, steps=[1, 2, 4, 8, 10]))
    if not small:
        ax.set_xlabel(across, color=INK)
        ax.set_ylabel("query", color=INK)


def _words(figure: Figure, title: str, note: str) -> None:
    """A title above and a note below, in letters that grow with the figure."""
    wide = figure.get_figwidth()
    size = max(12, 1.2 * min(wide, 1.4 * figure.get_figheight()))
    figure.suptitle("\n".join(textwrap.wrap(title, int(120 * wide / size))), fontsize=size, color=INK)
    figure.supxlabel("\n".join(textwrap.wrap(note, int(160 * wide / size))), fontsize=0.75 * size, color=FAINT)


def _share(seen: np.ndarray) -> str:
    return f"{100 * seen.mean():.3g} %"
