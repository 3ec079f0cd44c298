"""What the page shows of a model that reads images: the pixels as it sees them, its answer, its maps over patches."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from regard.data.images.decode import decode, resize_pixels
from regard.models.recording import Recorder
from regard.models.vision.grid import Grid
from regard.page import maps
from regard.page.drawings import drawings
from regard.page.maps import LayerCall, expect_layer, record_calls
from regard.page.patches import Layer, attention_distance, find_windows, of_map, rollout
from regard.page.wire import Reply, to_numpy
from regard.tasks.opened import CaptionedImage, OpenedImages, Sample

MOST_UPLOADED = 8 << 20  # bytes of an image file
THUMB = 64  # pixels of a side of a small image
SMALL = 500_000  # weights of a layer, or of a rollout, that are sent at once
BEST = 5  # answers that are listed


@runtime_checkable
class HasGrids(Protocol):
    """A model of images: `maps` calls a recorder for each attention layer, `grids` says where its tokens stand."""

    def maps(self, images: Tensor, *, recorder: Recorder = ...) -> list[Any]: ...

    def grids(self) -> Sequence[Grid]: ...


class Sight(NamedTuple):
    """An image as a model sees it."""

    pixels: np.ndarray  # uint8 [C, h, w]
    calls: list[LayerCall]
    layers: list[Layer]
    backs: list[Tensor | None]  # the token of each patch, where a layer has them in an order of its own
    probabilities: Tensor | None  # [classes]
    label: str | None  # the true one, if it is known

    @property
    def size(self) -> int:
        """Bytes that are kept with it: the inputs, and the projections that will be."""
        return self.pixels.nbytes + sum(4 * call.x.nbytes for call in self.calls)


@dataclass
class ImageSubject:
    """A model that reads images, under a name. It has no texts."""

    name: str
    title: str
    opened: OpenedImages
    facts: dict[str, Any] = field(default_factory=dict)
    places: tuple[str, ...] = ("encoder",)
    examples: tuple[str, ...] = ()
    longest: int = 0

    @property
    def task(self) -> str:
        return self.opened.task

    @property
    def model(self) -> torch.nn.Module:
        return self.opened.model

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """The images to begin with: those of the run, or drawings if it has none."""
        return self.opened.samples or drawings(self.opened.size, self.opened.channels)

    def sample(self, number: int) -> Sample:
        if number >= len(self.samples):
            raise ValueError(f"{self.name} has no image {number}: it has {len(self.samples)}, counted from 0")
        found = self.samples[number]
        return found._replace(pixels=resize_pixels(found.pixels, self.opened.size, self.opened.channels))

    def decode(self, data: bytes, name: str = "the image") -> Sample:
        """The bytes of an image file, in the size that the model reads."""
        return Sample(decode(data, self.opened.size, self.opened.channels, name))

    @torch.no_grad()
    def see(self, sample: Sample) -> Sight:
        """The calls of all layers, in one pass, and the answer."""
        opened = self.opened
        if not isinstance(opened.model, HasGrids):
            raise TypeError(f"{type(opened.model).__name__} has no maps() and grids(): the page cannot show it")
        device = next(opened.model.parameters()).device
        pixels = torch.from_numpy(np.ascontiguousarray(sample.pixels))[None].to(device)
        calls = [expect_layer(call) for call in record_calls(partial(self._read, opened.normalise(pixels)))]
        if not all(bool(part.isfinite().all()) for call in calls for part in call.tensors()):
            raise ValueError("the model's activations are not finite: its weights are damaged")
        grids = opened.model.grids()
        layers = [_layer(call, grid) for call, grid in zip(calls, grids, strict=True)]
        backs = [None if grid.order is None else grid.order.argsort() for grid in grids]
        probabilities = None if opened.predict is None else opened.predict(pixels)[0].float().cpu()
        return Sight(sample.pixels, calls, layers, backs, probabilities, sample.label)

    @torch.no_grad()
    def caption(self, sight: Sight, text: str) -> CaptionedImage:
        """How a caption of an image is written; without a text, the model's own."""
        if self.opened.caption is None:
            raise ValueError(f"{self.name} writes no captions: choose another run")
        device = next(self.opened.model.parameters()).device
        found = self.opened.caption(torch.from_numpy(np.ascontiguousarray(sight.pixels))[None].to(device), text)
        patches = sight.layers[-1].patches
        if any(weights.shape[1:] != (len(found.tokens), patches) for weights in found.weights):
            raise ValueError(f"a caption of {len(found.tokens)} tokens needs weights of each for {patches} patches")
        return found

    def _read(self, images: Tensor, recorder: Recorder) -> None:
        if isinstance(self.opened.model, HasGrids):
            self.opened.model.maps(images, recorder=recorder)


def _layer(call: LayerCall, grid: Grid) -> Layer:
    """A layer with its tokens row by row, in whatever order it reads them."""
    if grid.order is None:
        return Layer(partial(maps.rows, call), call.heads, grid)
    back = grid.order.argsort()

    def take(queries: Sequence[int]) -> Tensor:
        found = maps.rows(call, back[list(queries)].tolist())
        return found if call.layer.facts.columns == "slots" else found[..., back.to(found.device)]

    return Layer(take, call.heads, grid._replace(order=None))


# replies


def thumbnails(subject: ImageSubject) -> Reply:
    """The images that a run comes with, small, [n, h, w, 3]."""
    small = [resize_pixels(sample.pixels, (THUMB, THUMB), 3).transpose(1, 2, 0) for sample in subject.samples]
    labels = [sample.label for sample in subject.samples]
    return Reply({"labels": labels}, {"pixels": np.stack(small)} if small else {})


def overview(subject: ImageSubject, sight: Sight) -> Reply:
    """The pixels as the model sees them, [h, w, 3], its answer, and the facts of its layers."""
    pixels = sight.pixels if len(sight.pixels) == 3 else sight.pixels.repeat(3, 0)
    meta: dict[str, Any] = {"label": sight.label, "answers": [], "unsure": False}
    if sight.probabilities is not None:
        best = sight.probabilities.topk(min(BEST, len(sight.probabilities)))
        meta["answers"] = [
            {"label": subject.opened.labels[at], "probability": share}
            for at, share in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        meta["unsure"] = bool(best.values[0] < subject.opened.unsure_below)
        meta["classes"] = len(sight.probabilities)
    meta["layers"] = [_facts(call, layer) for call, layer in zip(sight.calls, sight.layers, strict=True)]
    meta["rollout"] = [why_no_rollout(sight, number) for number in range(len(sight.layers))]
    return Reply(meta, {"pixels": np.ascontiguousarray(pixels.transpose(1, 2, 0))})


def _facts(call: LayerCall, layer: Layer) -> dict[str, Any]:
    grid, facts = layer.grid, call.layer.facts
    return {
        "spec": call.name,
        "heads": call.heads,
        "rows": grid.rows,
        "columns": grid.columns,
        "leading": grid.leading,
        "signed": facts.signed,
        "slots": facts.columns == "slots",
        "zeros_are_hidden": maps.zeros_are_hidden(call.layer),
        "small": call.heads * grid.tokens**2 <= SMALL,
    }


def whole_layer(sight: Sight, number: int) -> Reply:
    """All weights of a layer if they are few, [H, T, T], and its windows."""
    call, layer = _over_patches(sight, number)
    T, arrays = layer.grid.tokens, {}
    if call.heads * T**2 <= SMALL:
        weights = layer.take(range(T))
        layer, arrays = of_map(weights, layer.grid), {"weights": to_numpy(weights)}
    windows = [] if call.layer.facts.signed else find_windows(layer)
    return Reply({"windows": [list(window) for window in windows]}, arrays)


def glance(sight: Sight, number: int, at: int | None, side: str) -> Reply:
    """What a token looks at, or who looks at it, of all heads [H, T]; without a token: the mean over all patches."""
    call, layer = _over_patches(sight, number)
    T, leading = layer.grid.tokens, layer.grid.leading
    if at is not None and at >= T:
        raise ValueError(f"there is no token {at}: the layer has {T}, counted from 0")
    if at is None:
        total = torch.zeros(call.heads, T)
        size = max(1, maps.HELD // call.heads)
        for first in range(leading, T, size):
            total += layer.take(range(first, min(first + size, T))).sum(1).float().cpu()
        return Reply({}, {"weights": to_numpy(total / layer.patches)})
    if side == "query":
        return Reply({}, {"weights": to_numpy(layer.take([at])[:, 0])})
    back = sight.backs[number]
    own = at if back is None else int(back[at])
    column = maps.columns(call, own, own + 1)[..., 0]
    return Reply({}, {"weights": to_numpy(column if back is None else column[:, back.to(column.device)])})


def rolled(sight: Sight, number: int, at: int | None) -> Reply:
    """Rollout over the layers up to one, over the tokens of the first, [k, T]: of all tokens if these are few,
    otherwise of one; without one, of the class token, or the mean over all patches."""
    why = why_no_rollout(sight, number)
    if why is not None:
        raise ValueError(why)
    layers, grid = sight.layers[: number + 1], sight.layers[number].grid
    if at is not None and at >= grid.tokens:
        raise ValueError(f"there is no token {at}: the layer has {grid.tokens}, counted from 0")
    if grid.tokens * layers[0].grid.tokens <= SMALL:
        return Reply({"all": True}, {"weights": to_numpy(rollout(layers, torch.eye(grid.tokens)))})
    start = torch.zeros(1, grid.tokens)
    if at is not None or grid.leading:
        start[0, at or 0] = 1
    else:
        start[:] = 1 / grid.tokens
    return Reply({"all": False}, {"weights": to_numpy(rollout(layers, start))})


def why_no_rollout(sight: Sight, number: int) -> str | None:
    """Why the layers up to one have no rollout, in words; None: they have one."""
    for at, call in enumerate(sight.calls[: number + 1]):
        if call.layer.facts.columns == "slots":
            return f"the columns of {call.name!r} in layer {at + 1} are slots and not patches: there is no rollout"
        if call.layer.facts.signed:
            return f"weights of {call.name!r} in layer {at + 1} are no shares: there is no rollout"
    return None


def written(found: CaptionedImage, number: int) -> Reply:
    """A caption token by token, and where each looks in a layer, [H, tokens, patches]."""
    if number >= len(found.weights):
        raise ValueError(f"there is no layer {number}: captions have {len(found.weights)}, counted from 0")
    meta = {"text": found.text, "tokens": found.tokens, "heads": [len(weights) for weights in found.weights]}
    return Reply(meta, {"weights": to_numpy(found.weights[number])})


def distances(sight: Sight) -> Reply:
    """The mean distance that the attention of each head bridges, in pixels, layer by layer; None where weights are no
    shares of patches."""
    height, width = sight.pixels.shape[1:]
    found: list[list[float] | None] = []
    for call, layer in zip(sight.calls, sight.layers, strict=True):
        shares = not call.layer.facts.signed and call.layer.facts.columns == "tokens"
        patch = height / layer.grid.rows, width / layer.grid.columns
        found.append(attention_distance(layer, patch).tolist() if shares else None)
    return Reply({"distances": found, "diagonal": float(np.hypot(height, width))})


def _over_patches(sight: Sight, number: int) -> tuple[LayerCall, Layer]:
    if number >= len(sight.layers):
        raise ValueError(f"there is no layer {number}: there are {len(sight.layers)}, counted from 0")
    call = sight.calls[number]
    if call.layer.facts.columns == "slots":
        raise ValueError(f"the columns of {call.name!r} are slots and not patches: there is no map over the image")
    return call, sight.layers[number]
