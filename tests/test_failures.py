"""A run of the tests that is cut off has named what failed until then."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from folders import HELPERS

STUCK = """
import time

def test_holds():
    pass

def test_breaks():
    assert 1 == 2

def test_lasts():
    time.sleep(600)
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_failed_before_a_run_was_killed(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_stuck.py").write_text(STUCK)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    here = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "REGARD_"))}
    file = tmp_path / "failures.txt"
    here |= {"PYTHONPATH": str(HELPERS), "REGARD_FAILURES": str(file)}
    plugins = ["-p", "failures", "-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:hypothesispytest"]
    command = [sys.executable, "-m", "pytest", *plugins, "-n", workers, tmp_path]
    with subprocess.Popen(
        command, cwd=tmp_path, env=here, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        assert run.stdout is not None
        try:
            lines = []
            while not any(line.startswith("FAILED") for line in lines) and (line := run.stdout.readline()):
                lines.append(line)
        finally:
            os.killpg(run.pid, signal.SIGKILL)
    assert lines[-1].strip() == "FAILED test_stuck.py::test_breaks"
    assert file.read_text().startswith("FAILED test_stuck.py::test_breaks (call)\n")
    assert "assert 1 == 2" in file.read_text()
