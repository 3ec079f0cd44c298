"""Where the files lie that tests read."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
RUNS = TESTS / "runs"  # written by earlier commits
HELPERS = TESTS / "helpers"
SCRIPTS = HELPERS / "scripts"  # run in processes of their own
