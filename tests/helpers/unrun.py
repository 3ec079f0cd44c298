"""A plugin of pytest: the last line of a run says which tests were not run, and how to run them."""

from collections import Counter

import pytest

LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="also run the tests marked `exhaustive` (make test-all)")


# last, so that what -k and -m leave out is gone already: a run of few tests is asked for no others
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leaves out the exhaustive tests; a worker of xdist, which collects all of them, tells it to whoever reports."""
    left_out = [item for item in items if item.get_closest_marker("exhaustive") is not None]
    if config.getoption("--exhaustive") or not left_out:
        return
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item.get_closest_marker("exhaustive") is None]
    config.stash[LEFT_OUT] = len(left_out)
    if hasattr(config, "workeroutput"):
        config.workeroutput["exhaustive"] = len(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    count = getattr(node, "workeroutput", {}).get("exhaustive")
    if count:
        node.config.stash[LEFT_OUT] = count


def pytest_unconfigure(config):
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return
    # (file, line, reason) of each, with a word of pytest's before the reason
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reporter.stats.get("skipped", ()))
    if LEFT_OUT in config.stash:
        reasons["exhaustive: make test-all"] = config.stash[LEFT_OUT]
    if reasons:
        listed = "; ".join(f"{count} ({reason})" for reason, count in sorted(reasons.items()))
        reporter.write_line(f"Not run: {listed}", yellow=True)
