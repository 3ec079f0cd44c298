"""An image and its maps as one figure for paper: what the page shows one by one."""

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from regard.draw import COLOURS, FAINT, INK
from regard.models.vision.grid import Grid
from regard.page.images import ImageSubject, Sight, distances, glance, rolled, why_no_rollout

MOST_LAYERS, MOST_HEADS = 12, 16  # drawn, evenly chosen from more


def image_picture(subject: ImageSubject, sight: Sight) -> Figure:
    """The image, its rollout and the distances of its heads; below, each head of each layer: the row of the class
    token, or without one the mean over all patches."""
    layers = _some([at for at, call in enumerate(sight.calls) if call.layer.facts.columns == "tokens"], MOST_LAYERS)
    heads = max((min(sight.calls[at].heads, MOST_HEADS) for at in layers), default=1)
    inches = 1.1 if heads > 6 else 1.5
    height, width = sight.pixels.shape[1:]
    tall = inches * max(height / width, 0.4)
    ratios = [2.3, *[(tall + 0.2) * len(layers)] * bool(layers)]
    figure = Figure(figsize=(max(inches * heads + 1, 6.5), sum(ratios)), dpi=200, layout="constrained")
    # an array, also of one
    parts = figure.subfigures(len(ratios), 1, height_ratios=ratios, squeeze=False).flatten()
    image, whole, far = parts[0].subplots(1, 3)
    _image(image, sight, None, None)
    image.set_title(_answer(subject, sight), fontsize=10, color=INK)
    last = len(sight.layers) - 1
    why = why_no_rollout(sight, last)
    if why is None:
        rows = torch.from_numpy(rolled(sight, last, None).arrays["weights"])
        leading = sight.layers[last].grid.leading
        row = rows[0] if leading else rows.mean(0)
        _image(whole, sight, row.numpy(), sight.layers[0].grid)
    else:
        _image(whole, sight, None, None)
    whole.set_title("rollout" if why is None else "no rollout", fontsize=10, color=INK)
    _distances(far, sight)
    if layers:
        panels = parts[1].subplots(len(layers), heads, squeeze=False)
        for line, number in zip(panels, layers, strict=True):
            grid = sight.layers[number].grid
            rows = glance(sight, number, 0 if grid.leading else None, "query").arrays["weights"]
            chosen = _some(range(len(rows)), MOST_HEADS)
            for ax, head in zip(line, chosen, strict=False):
                _image(ax, sight, rows[head], grid)
                ax.set_title(f"layer {number + 1}, head {head + 1}", fontsize=7, color=FAINT, pad=2)
            for ax in line[len(chosen) :]:
                ax.set_axis_off()
    return figure


def _image(ax: Axes, sight: Sight, weights: np.ndarray | None, grid: Grid | None) -> None:
    """The image, under the weights of its patches."""
    pixels = sight.pixels if len(sight.pixels) == 3 else sight.pixels.repeat(3, 0)
    height, width = pixels.shape[1:]
    place = (-0.5, width - 0.5, height - 0.5, -0.5)
    ax.imshow(pixels.transpose(1, 2, 0), extent=place, interpolation="bilinear")
    if weights is not None and grid is not None:
        patches = weights[grid.leading :].reshape(grid.rows, grid.columns)
        most = float(np.abs(patches).max()) or 1.0
        # as on the page: the root of a weight tells small ones apart
        shown = np.sign(patches) * np.sqrt(np.abs(patches) / most)
        signed = bool((patches < 0).any())
        colours, low = ("RdBu_r", -1) if signed else ("cividis", 0)
        ax.imshow(shown, extent=place, cmap=colours, vmin=low, vmax=1, alpha=0.7, interpolation="nearest")
    ax.xaxis.set_major_locator(NullLocator())
    ax.yaxis.set_major_locator(NullLocator())
    for edge in ax.spines.values():
        edge.set_visible(False)


def _distances(ax: Axes, sight: Sight) -> None:
    """A dot for each head: how far it looks, layer by layer."""
    found = distances(sight).meta["distances"]
    for at, values in enumerate(found):
        for head, value in enumerate(values or ()):
            ax.plot(at + 1, value, "o", markersize=4, color=COLOURS[head % len(COLOURS)], alpha=0.85)
    ax.set_title("mean attention distance", fontsize=10, color=INK)
    ax.set_xlabel("layer", fontsize=8, color=FAINT)
    ax.set_ylabel("pixels", fontsize=8, color=FAINT)
    ax.set_ylim(0, 1.1 * max((value for values in found for value in values or ()), default=1.0))
    ax.set_xlim(0.5, len(sight.layers) + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.tick_params(colors=FAINT, labelsize=7, length=2)
    for edge in ("top", "right"):
        ax.spines[edge].set_visible(False)


def _answer(subject: ImageSubject, sight: Sight) -> str:
    if sight.probabilities is None:
        return subject.title.replace("$", r"\$")
    share, best = sight.probabilities.max(0)
    unsure = "unsure: " if share < subject.opened.unsure_below else ""
    return f"{unsure}{subject.opened.labels[int(best)]}, {float(share):.2f}".replace("$", r"\$")


def _some(numbers: Sequence[int], most: int) -> list[int]:
    """At most `most` of the numbers, the first and the last among them."""
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[round(at * (len(numbers) - 1) / (most - 1))] for at in range(most)]
