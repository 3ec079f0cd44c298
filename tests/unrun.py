"""A plugin of pytest: the last line of a run says which tests were not run, and how to run them."""

from collections import Counter


def pytest_unconfigure(config):
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return
    # (file, line, reason) of each, with a word of pytest's before the reason
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reporter.stats.get("skipped", ()))
    if reasons:
        listed = "; ".join(f"{count} ({reason})" for reason, count in sorted(reasons.items()))
        reporter.write_line(f"Not run: {listed}", yellow=True)
