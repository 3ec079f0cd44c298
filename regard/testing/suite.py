"""All that is checked of a mechanism, a feed-forward layer or a position scheme."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from regard.spec import Kind
from regard.testing import (
    cases,
    compiled,
    counting,
    decoding,
    feedforward,
    gradients,
    maps,
    masking,
    precision,
    values,
)

CHECKS: dict[str, Callable[[cases.Case], None]] = {
    "reference": values.check_reference,
    "grouped": values.check_grouped,
    "limit": values.check_limit,
    "twice": values.check_twice,
    "roles": values.check_roles,
    "causality": masking.check_causality,
    "prefix": masking.check_prefix,
    "padding": masking.check_padding,
    "split": decoding.check_split,
    "ragged_decode": decoding.check_ragged_decode,
    "select": decoding.check_select,
    "batch": values.check_batch,
    "gradient": gradients.check_gradient,
    "loss": gradients.check_loss,
    "weights": maps.check_weights,
    "cost": counting.check_cost,
    "low_precision": precision.check_low_precision,
    "compile": compiled.check_compile,
    "export": compiled.check_export,
    "autocast": precision.check_autocast,
    "round_trip": values.check_round_trip,
}
# a position scheme changes the logits and where they stand, and nothing else that the suite asks for
POSITION_CHECKS = ("reference", "grouped", "causality", "padding", "split", "ragged_decode", "gradient", "weights")


class Check(NamedTuple):
    """One property of one case."""

    name: str  # of the property
    case: Any  # an example in a role
    function: Callable[[Any], None]

    def __str__(self) -> str:
        return f"{self.case}-{self.name}"

    def run(self) -> None:
        """Raises an AssertionError where the property does not hold."""
        self.function(self.case)


def checks(kind: Kind, name: str) -> Iterator[Check]:
    """Every check of a registered name: of a mechanism also with the position schemes it takes, of a position scheme
    inside the mechanisms that take it."""
    if kind == "feedforward":
        for case, (check, function) in itertools.product(feedforward.cases([name]), feedforward.CHECKS.items()):
            yield Check(check, case, function)
        return
    if kind == "attention":
        for case, (check, function) in itertools.product(cases.cases([name]), CHECKS.items()):
            yield Check(check, case, function)
        placed = cases.position_cases(mechanisms=[name])
    else:
        placed = cases.position_cases(schemes=[name])
    for case, check in itertools.product(placed, POSITION_CHECKS):
        yield Check(check, case, CHECKS[check])
