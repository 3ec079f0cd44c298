"""Options of configs: a field declares its help and its bounds once, in its annotation, and one function checks them.

    width: Annotated[int, "model width (d_model)", Range(1, 2**20)] = 512

The help is that of the command line. The options of a mechanism are declared in the same way (see regard/spec.py).
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from regard.core.limits import check_sizes
from regard.keywords import check_keywords

C = TypeVar("C")


@dataclass(frozen=True)
class Range:
    """The finite numbers that an option takes; in a list, each number must be one of them."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def __contains__(self, number: float) -> bool:
        return math.isfinite(number) and self.least <= number <= self.most and self.above < number < self.below

    def __or__(self, other: "Range") -> "Range":
        """What either takes."""
        lower, upper = ("least", "above"), ("most", "below")
        bounds = {name: min(getattr(self, name), getattr(other, name)) for name in lower}
        return Range(**bounds | {name: max(getattr(self, name), getattr(other, name)) for name in upper})

    def __str__(self) -> str:
        words = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{word} {bound:,}" for word, bound in words.items() if math.isfinite(bound))


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def config_dataclass(cls: type[C]) -> type[C]:
    """As `dataclass(frozen=True)`, for configs: an error about an unknown or missing keyword has the known ones."""
    made = dataclass(frozen=True)(cls)
    made.__init__ = check_keywords()(made.__init__)
    return made


class Option(NamedTuple):
    """What the field of a config declares."""

    name: str
    type: Any  # without its annotations
    default: Any
    help: str
    range: Range | None


@functools.cache
def options(cls: type) -> dict[str, Option]:
    """The options of a dataclass by their names."""
    hints, by_name = get_type_hints(cls, include_extras=True), {}
    for field in dataclasses.fields(cls):
        hint, extras = hints[field.name], ()
        if get_origin(hint) is Annotated:
            hint, *extras = get_args(hint)
        texts = [extra for extra in extras if isinstance(extra, str)]
        ranges = [extra for extra in extras if isinstance(extra, Range)]
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        option = Option(field.name, hint, default, texts[0] if texts else "", ranges[0] if ranges else None)
        by_name[field.name] = option
    return by_name


def check_options(config: Any, section: str = "") -> None:
    """Refuses a config with a number out of its range, or a word that its field does not take; errors say `section`
    before the name of the option."""
    check_sizes(config, section)
    for option in options(type(config)).values():
        value, name = getattr(config, option.name), f"{section}{option.name}"
        if get_origin(option.type) is Literal and value not in get_args(option.type):
            raise ValueError(f"{name} must be {' or '.join(map(repr, get_args(option.type)))}, got {value!r}")
        if option.range is None or value is None:
            continue
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise ValueError(f"{name} must be a number, got {number!r}")
            if number not in option.range:
                raise ValueError(f"{name} must be {option.range}, got {number}")
