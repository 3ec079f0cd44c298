"""What was not run is said in the last line; a browser that is missing fails continuous integration."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
# as tests/conftest.py leaves them out
LEAVES_OUT = """
def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if item.get_closest_marker("exhaustive") is not None]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
"""


@pytest.mark.parametrize(("ci", "workers"), [("", 0), ("", 2), ("true", 0)])
def test_a_missing_browser(tmp_path, ci, workers):
    (tmp_path / "test_page.py").write_text(LOOKS)
    (tmp_path / "conftest.py").write_text(LEAVES_OUT)
    here = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "REGARD_"))}
    here |= {"CI": ci, "PATH": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-m", "pytest", "-p", "unrun", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["-n", str(workers), tmp_path]
    found = subprocess.run(command, cwd=tmp_path, env=here, capture_output=True, text=True)
    assert found.returncode == (1 if ci else 0), found.stdout + found.stderr
    missing = "1 (no Chromium: apt-get install chromium, or name it in REGARD_CHROMIUM)"
    last = found.stdout.splitlines()[-1]
    if ci:
        assert "no Chromium" in found.stdout
        assert last == "Not run: 3 (exhaustive: make test-all)"
    else:
        assert last == f"Not run: 3 (exhaustive: make test-all); {missing}"
