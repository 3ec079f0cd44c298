"""The suite over the whole registry: every example of every mechanism, feed-forward layer and position scheme, in every
role it takes. The pairs of case and check that are marked `exhaustive` run in `make test-all`: see `is_quick`."""

import itertools

import pytest
from quick import is_quick

from regard.testing import (
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
from regard.testing.cases import cases, position_cases
from regard.testing.suite import CHECKS, POSITION_CHECKS


def pairs(cases, checks):
    found = []
    for case, check in itertools.product(cases, checks):
        marks = () if is_quick(case, check) else pytest.mark.exhaustive
        found.append(pytest.param(case, check, marks=marks, id=f"{case}-{check}"))
    return found


def test_every_check_is_listed():
    modules = (compiled, counting, decoding, gradients, maps, masking, precision, values)
    written = {name.removeprefix("check_") for module in modules for name in vars(module) if name.startswith("check_")}
    assert written == set(CHECKS)


@pytest.mark.parametrize(("case", "check"), pairs(cases(), CHECKS))
def test_mechanism(case, check):
    CHECKS[check](case)


@pytest.mark.parametrize(("case", "check"), pairs(position_cases(), POSITION_CHECKS))
def test_position(case, check):
    CHECKS[check](case)


@pytest.mark.parametrize("check", feedforward.CHECKS)
@pytest.mark.parametrize("case", feedforward.cases(), ids=str)
def test_feedforward(case, check):
    feedforward.CHECKS[check](case)
