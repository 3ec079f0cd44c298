"""Pathfinder (Linsley et al. 2018, arXiv 1805.08315), with the settings of the Long Range Arena (Tay et al. 2020, arXiv
2011.04006): whether two discs lie on the two ends of one dashed curve, read pixel by pixel.

The curves are drawn here, by rules of our own with those settings; they are not the pictures of the authors' script.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch

from regard.data.tasks.base import IGNORED, Examples, Task, check_options
from regard.data.tasks.draws import Draws

PADDLE, GAP = 2.0, 1.0  # length of a dash, and space to the next one and to those of other curves
THICKNESS, RADIUS = 0.5, 1.5  # half the width of a dash; of a disc
TURN = math.pi / 4  # from a dash to the next, at most
CONTRAST = 0.75  # of a dash, where a disc has 1
APART = 7.0  # between the beginnings of the two long curves
BORDER = 1.0  # of the picture, that stays empty
NEAR = GAP + 2 * THICKNESS  # between the middles of dashes of different curves, at least
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of a dash: its points that are looked at
OFFSETS = (0.25, 0.75)  # where a pixel is looked at, along rows and along columns
LEVELS = 16  # of gray
ANSWER, NO, YES = range(3)  # tokens: the first one asks; behind these come the levels of gray
TRIES, RESTARTS = 8, 200  # of a dash, and of a curve, before the picture is begun anew

Point = tuple[float, float]  # row and column
Dash = tuple[Point, Point]


def pathfinder(*, side: int = 32, paddles: int = 14) -> Task:
    """Pictures of `side` x `side` pixels with two curves of `paddles` dashes and some short ones; the first token is
    asked whether the discs belong to one curve."""
    check_options(side >= 12, f"a picture needs a side of 12 pixels or more, got {side}")
    most = side * side // 40
    check_options(2 <= paddles <= most, f"paddles must be from 2 to {most} at a side of {side}, got {paddles}")
    draw, options = functools.partial(_draw, side, paddles), {"side": side, "paddles": paddles}
    length = side * side + 1
    return Task(draw, "self", 3 + LEVELS, 0.5, "pathfinder", length=length, hidden=0.5, options=options)


def _draw(side: int, paddles: int, batch: int, length: int, generator: torch.Generator) -> Examples:
    check_options(
        length == side * side + 1, f"pathfinder of {side} x {side} has {side * side + 1} tokens, got {length}"
    )
    draws = Draws(generator)
    tokens, answers = torch.zeros(batch, length, dtype=torch.long), torch.full((batch, length), IGNORED)
    for row in range(batch):
        scene = draw_scene(side, paddles, draws)
        gray = np.rint(render(scene, side) * (LEVELS - 1)).astype(np.int64)
        tokens[row, 1:] = torch.from_numpy(3 + gray).flatten()
        answers[row, 0] = YES if scene.joined else NO
    return Examples(tokens, answers)


class Scene(NamedTuple):
    """What a picture shows. A curve is [K, 2, 2]: of each dash its two ends, as row and column."""

    curves: list[np.ndarray]  # the two long ones first
    discs: np.ndarray  # [2, 2], centres
    joined: bool  # both on the first curve


def draw_scene(side: int, paddles: int, draws: Draws) -> Scene:
    """Two long curves, then short ones, none of which touches another."""
    short = max(1, paddles // 3)
    lengths = [paddles, paddles, *[short] * (20 // short * side * side // 1024)]
    while True:
        plane, curves = Plane(side), []
        for length in lengths:
            # the beginnings of the long ones are apart
            far_from = curves[0][0][0] if len(curves) == 1 else None
            curve = _curve(length, plane, far_from, draws)
            if curve is None:
                break
            curves.append(curve)
            plane.block(curve)
        # a short one that finds no place is omitted, a long one is not
        if len(curves) >= 2:
            joined = draws() < 0.5
            ends = curves[0][0][0], (curves[0] if joined else curves[1])[-1][1]
            return Scene([np.array(curve) for curve in curves], np.array(ends), joined)


class Plane:
    """Which places are too near to a dash: cells of half a pixel."""

    CELL = 0.5

    def __init__(self, side: int):
        self.side, self.row = side, int(side / self.CELL)
        reach = int(NEAR / self.CELL) + 1
        around = range(-reach, reach + 1)
        self.near = [i * self.row + j for i in around for j in around if (i * i + j * j) * self.CELL**2 < NEAR**2]
        self.blocked: set[int] = set()

    def has(self, point: Point) -> bool:
        """Whether a point is inside the border."""
        return all(BORDER <= part <= self.side - BORDER for part in point)

    def cells(self, dash: Dash) -> list[int]:
        """The cells of some points of a dash."""
        (y, x), (v, u) = dash
        points = ((y + share * (v - y), x + share * (u - x)) for share in SHARES)
        return [int(one / self.CELL) * self.row + int(other / self.CELL) for one, other in points]

    def around(self, dash: Dash) -> set[int]:
        """The cells that are too near to a dash."""
        return {cell + offset for cell in self.cells(dash) for offset in self.near}

    def block(self, curve: list[Dash]) -> None:
        """Takes the place of a curve."""
        for dash in curve:
            self.blocked |= self.around(dash)


def _curve(length: int, plane: Plane, far_from: Point | None, draws: Draws) -> list[Dash] | None:
    """A curve that keeps its distance from others and from itself; None: no place was found."""
    for _ in range(RESTARTS):
        start = (_within(plane.side, draws), _within(plane.side, draws))
        angle = 2 * math.pi * draws()
        if far_from is not None and math.dist(start, far_from) < APART:
            continue
        dashes: list[Dash] = []
        own: set[int] = set()
        while len(dashes) < length:
            found = _next(start, angle, plane, own, draws)
            if found is None:
                break
            dash, angle = found
            # the dash before is one gap away, whatever the turn
            own |= plane.around(dashes[-1]) if dashes else set()
            dashes.append(dash)
            start = (dash[1][0] + GAP * math.sin(angle), dash[1][1] + GAP * math.cos(angle))
        if len(dashes) == length:
            return dashes
    return None


def _within(side: int, draws: Draws) -> float:
    return BORDER + (side - 2 * BORDER) * draws()


def _next(start: Point, angle: float, plane: Plane, own: set[int], draws: Draws) -> tuple[Dash, float] | None:
    """The next dash of a curve, turned a little, and its angle; None: it would touch something or leave the picture."""
    for _ in range(TRIES):
        turned = angle + TURN * (2 * draws() - 1)
        end = (start[0] + PADDLE * math.sin(turned), start[1] + PADDLE * math.cos(turned))
        if plane.has(start) and plane.has(end):
            dash = (start, end)
            if not any(cell in plane.blocked or cell in own for cell in plane.cells(dash)):
                return dash, turned
    return None


def render(scene: Scene, side: int) -> np.ndarray:
    """The picture, [side, side] in [0, 1]: of each pixel the mean over four points."""
    at = (np.arange(side)[:, None] + np.array(OFFSETS)).flatten()  # [2 side]
    points = np.stack(np.meshgrid(at, at, indexing="ij"), -1)  # [2 side, 2 side, 2]
    value = np.zeros(points.shape[:2])
    for first, last in np.concatenate(scene.curves):
        # only the points near it
        low = np.minimum(first, last) - THICKNESS
        high = np.maximum(first, last) + THICKNESS
        rows, columns = (slice(*np.searchsorted(at, [a, b])) for a, b in zip(low, high, strict=True))
        near, along = points[rows, columns], last - first
        share = np.clip(((near - first) @ along) / (along @ along), 0, 1)
        away = near - (first + share[..., None] * along)
        value[rows, columns][(away**2).sum(-1) <= THICKNESS**2] = CONTRAST
    for centre in scene.discs:
        value[((points - centre) ** 2).sum(-1) <= RADIUS**2] = 1.0
    return value.reshape(side, 2, side, 2).mean((1, 3))
