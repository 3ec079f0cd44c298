"""What was not run is said in the last line; a browser that is missing fails continuous integration."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LOOKS = """
from browser import launched, needs_chromium

@needs_chromium
def test_looks():
    with launched():
        pass
"""


@pytest.mark.parametrize("ci", ["", "true"])
def test_a_missing_browser(tmp_path, ci):
    (tmp_path / "test_page.py").write_text(LOOKS)
    here = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "REGARD_"))}
    here |= {"CI": ci, "PATH": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-m", "pytest", "-p", "unrun", "-p", "no:cacheprovider", "-c", os.devnull]
    found = subprocess.run([*command, tmp_path], cwd=tmp_path, env=here, capture_output=True, text=True)
    assert found.returncode == (1 if ci else 0), found.stdout + found.stderr
    last = found.stdout.splitlines()[-1]
    if ci:
        assert "no Chromium" in found.stdout
        assert "1 failed" in last
    else:
        assert last == "Not run: 1 (no Chromium: apt-get install chromium, or name it in REGARD_CHROMIUM)"
