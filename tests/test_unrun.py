"""What was not run is said in the last line; a browser that is missing fails continuous integration."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from folders import HELPERS

LOOKS = """
import pytest
from browser import launched, needs_chromium

@needs_chromium
def test_looks():
    with launched():
        pass

@pytest.mark.exhaustive
@pytest.mark.parametrize("n", range(3))
def test_all_of_it(n):
    pass
"""


def run(folder: Path, *flags: str, ci: str = "") -> tuple[int, list[str]]:
    (folder / "test_page.py").write_text(LOOKS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = exhaustive\n")
    here = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "REGARD_"))}
    here |= {"CI": ci, "PATH": str(folder), "PYTHONPATH": str(HELPERS)}
    # plugins of others take seconds to import
    plugins = ["-p", "unrun", "-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:hypothesispytest"]
    command = [sys.executable, "-m", "pytest", *plugins, *flags, folder]
    found = subprocess.run(command, cwd=folder, env=here, capture_output=True, text=True)
    return found.returncode, found.stdout.splitlines()


MISSING = "1 (no Chromium: apt-get install chromium, or name it in REGARD_CHROMIUM)"


@pytest.mark.parametrize(
    ("flags", "left_out"),
    [
        (["-n", "2"], "3 (exhaustive: make test-all); "),
        (["-n", "0", "-k", "looks or 1"], "1 (exhaustive: make test-all); "),
        (["-n", "0", "-k", "looks or 1", "--exhaustive"], ""),
        (["-n", "2", "--exhaustive"], ""),
    ],
    ids=str,
)
def test_what_was_not_run(tmp_path, flags, left_out):
    code, lines = run(tmp_path, *flags)
    assert (code, lines[-1]) == (0, f"Not run: {left_out}{MISSING}")


def test_a_browser_that_is_missing_fails_continuous_integration(tmp_path):
    code, lines = run(tmp_path, "-n", "0", ci="true")
    assert code == 1
    assert any("no Chromium" in line for line in lines)
    assert lines[-1] == "Not run: 3 (exhaustive: make test-all)"
