"""Mechanisms in the roles they take, and what every check feeds them."""

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

import regard
from regard.core.shape import Role
from regard.layers.attention.base import Attention, Facts
from regard.spec import ATTENTION, POSITIONS

WIDTH, HEADS = 16, 4
LONG = 33  # tokens
CUTS = ([1] * LONG, [4, *[1] * (LONG - 4)], [LONG], [13, 7, 1, 12])


@dataclass(frozen=True)
class Case:
    """A mechanism in a role; `make` replaces the registered class by a broken one in the tests of the suite itself."""

    spec: str
    role: Role
    position: str | None = None
    make: Callable[..., Attention] | None = None

    def build(self, *, seed: int = 0, dtype: torch.dtype = torch.float64, **sizes: Any) -> Attention:
        torch.manual_seed(seed)
        sizes = {"width": WIDTH, "heads": HEADS, "role": self.role, "position": self.position} | sizes
        layer = self.make(**sizes) if self.make else regard.attention(self.spec, **sizes)
        shake(layer)
        return layer.to(dtype).eval()

    def __str__(self) -> str:
        return "-".join(filter(None, (self.spec, self.role, self.position)))


def shake(layer: torch.nn.Module) -> None:
    """Parameters that start at zero or one would hide what they do."""
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.numel() < 2 or parameter.std() == 0:
                parameter.add_(0.3 * torch.randn_like(parameter))


@functools.cache
def facts_of(spec: str) -> Facts:
    """Kept: they are asked for thousands of times, and each time would build a layer."""
    return regard.facts(spec)


def cases(names: Iterable[str] | None = None) -> list[Case]:
    """Every example of the named mechanisms, or of all, in every role it takes."""
    found = []
    for name in ATTENTION.names() if names is None else names:
        for spec in ATTENTION.find(name).examples:
            found += [Case(spec, role) for role in facts_of(spec).roles]
    return found


def position_cases(schemes: Iterable[str] | None = None, mechanisms: Iterable[str] | None = None) -> list[Case]:
    """Every scheme (or the named ones) on every mechanism (or the named ones) that takes its kind; the further examples
    of a scheme on softmax alone."""
    found = []
    inside = ATTENTION.names() if mechanisms is None else list(mechanisms)
    for scheme in POSITIONS.names() if schemes is None else schemes:
        cls = POSITIONS.find(scheme)
        for position, name in itertools.product(cls.examples, inside):
            spec = ATTENTION.find(name).examples[0]
            facts = facts_of(spec)
            takes = name in ("softmax", "linear") if cls.facts.kind == "input" else cls.facts.kind in facts.positions
            if takes and (position == cls.examples[0] or name == "softmax"):
                found += [Case(spec, role, position) for role in cls.facts.roles if role in facts.roles]
    return found


def inputs(case: Case, T: int = LONG, *, B: int = 3, S: int = 21, seed: int = 1, dtype=torch.float64) -> dict[str, Any]:
    """x, and the memory for cross-attention."""
    draw = torch.Generator().manual_seed(seed)
    given = {"x": torch.randn(B, T, WIDTH, generator=draw, dtype=torch.float64).to(dtype)}
    if case.role == "cross":
        given["memory"] = torch.randn(B, S, WIDTH, generator=draw, dtype=torch.float64).to(dtype)
    return given


def holes(T: int, seed: int = 3) -> Tensor:
    """Padding of different amount and place in each row: left, right, inside, none, one token, all. [6, T]"""
    keep = torch.rand(6, T, generator=torch.Generator().manual_seed(seed)) < 0.6
    keep[0, : T // 3], keep[0, T // 3 :] = False, True
    keep[1, : T - T // 4], keep[1, T - T // 4 :] = True, False
    keep[2, 0], keep[2, 1:3], keep[2, -1] = True, False, True
    keep[3] = True
    keep[4] = False
    keep[4, T // 2] = True
    keep[5] = False
    return keep


def reference(layer: Attention, given: dict[str, Tensor]) -> Tensor:
    if "memory" in given:
        return torch.stack([layer.reference(x, memory) for x, memory in zip(given["x"], given["memory"], strict=True)])
    return torch.stack([layer.reference(x) for x in given["x"]])


def same(a: Tensor, b: Tensor) -> None:
    assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@contextlib.contextmanager
def refused(words: str) -> Iterator[None]:
    """Asserts that a ValueError with such words (a regular expression) is raised inside."""
    said = None
    try:
        yield
    except ValueError as error:
        said = str(error)
    assert said is not None, f"nothing was refused; expected a ValueError with words like {words!r}"
    assert re.search(words, said), f"expected words like {words!r}, got {said!r}"


def extended(layer: Attention, x: Tensor, cuts: list[int], keep: Tensor | None = None, **start: Any) -> Tensor:
    state = layer.start(len(x), **start)
    ys, first = [], 0
    for n in cuts:
        y, state = layer.extend(
            x[:, first : first + n], state, keep=None if keep is None else keep[:, first : first + n]
        )
        ys.append(y)
        first += n
    return torch.cat(ys, 1)


def replayed(layer: Attention, x: Tensor, cuts: list[int], keep: Tensor | None = None) -> Tensor:
    """Each piece as the end of the whole sequence up to it: what decoding gives where outputs move with the length."""
    ys, first = [], 0
    for n in cuts:
        y = layer(x[:, : first + n], keep=None if keep is None else keep[:, : first + n])
        ys.append(y[:, first:])
        first += n
    return torch.cat(ys, 1)
