"""The suite over the whole registry: every example of every mechanism, in every role it takes."""

import pytest
from suite import CHECKS, POSITION_CHECKS, cases, position_cases


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_mechanism(case, check):
    CHECKS[check](case)


@pytest.mark.parametrize("check", POSITION_CHECKS)
@pytest.mark.parametrize("case", position_cases(), ids=str)
def test_position(case, check):
    CHECKS[check](case)
