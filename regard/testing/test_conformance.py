"""Every check of what --regard-mechanism names; collected by `pytest --pyargs regard.testing`."""

import pytest

USAGE = "nothing is named: python -m regard.testing NAME, or -p regard.testing.plugin --regard-mechanism NAME"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = metafunc.config.getoption("--regard-mechanism", default=None)
    if not names:
        metafunc.parametrize("check", [pytest.param(None, marks=pytest.mark.skip(reason=USAGE))], ids=["nothing"])
        return
    # PyTorch is imported only where something is checked
    from regard.testing.finding import find
    from regard.testing.suite import checks

    targets = dict.fromkeys(target for name in names for target in find(name))
    metafunc.parametrize("check", [check for target in targets for check in checks(*target)], ids=str)


def test_conformance(check) -> None:
    check.run()
