"""A plugin of pytest: the last line of a run says which tests were not run, and how to run them."""

from collections import Counter

import pytest

LEFT_OUT = pytest.StashKey[int]()


def pytest_deselected(items):
    """Counts the exhaustive checks; a worker of xdist, which collects all of them, tells it to whoever reports."""
    count = sum(item.get_closest_marker("exhaustive") is not None for item in items)
    if count:
        config = items[0].config
        config.stash[LEFT_OUT] = count
        if hasattr(config, "workeroutput"):
            config.workeroutput["exhaustive"] = count


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
