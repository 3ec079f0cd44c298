"""A plugin of pytest: a test that fails is named at once, and with all that is known of it in the file that
REGARD_FAILURES names. A run that a time limit cuts off has said what failed until then."""

import os
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # a worker of xdist sends its reports to the process that started it
    path = os.environ.get("REGARD_FAILURES")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(config, Path(path)))


class Failures:
    def __init__(self, config: pytest.Config, path: Path):
        self.config, self.path = config, path
        path.write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        with self.path.open("a") as file:
            file.write(f"FAILED {report.nodeid} ({report.when})\n{report.longreprtext}\n\n")
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write(f"\nFAILED {report.nodeid}\n", flush=True, red=True)
