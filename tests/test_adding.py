"""A mechanism is one file: put one into a copy of the package and see the suite and the command line pick it up."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

THROWAWAY = '''"""A mechanism that exists for one test."""

from typing import Annotated

import torch

from regard.core.shape import Order
from regard.layers.attention.base import Facts
from regard.layers.attention.cached import Scored


class Warm(Scored):
    """Softmax with a temperature."""

    facts = Facts(
        name="warm",
        paper="This test",
        link="none",
        family="scores",
        formula="softmax(q k / t) v",
        time=Order("N^2", 2),
        memory=Order("N", 1),
        state=Order("N", 1),
    )
    examples = ("warm(temperature=3.0)",)

    def __init__(self, shape, *, temperature: Annotated[float, "divides the logits"] = 2.0):
        super().__init__(shape)
        self.temperature = temperature

    def score(self, mask, q, k):
        return (q / self.temperature) @ k.mT

    def plain(self, row):
        return torch.stack([row.mix(i, row.past(i), 1 / FACTOR) for i in range(row.T)])
'''


def in_copy(tmp_path: Path, factor: str, *command: str) -> subprocess.CompletedProcess:
    shutil.copytree(
        ROOT / "regard", tmp_path / "regard", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
    )
    (tmp_path / "regard" / "layers" / "attention" / "warm.py").write_text(THROWAWAY.replace("FACTOR", factor))
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
    )


def suite(tmp_path: Path, factor: str, tests: str = "warm") -> subprocess.CompletedProcess:
    test = str(ROOT / "tests" / "test_conformance.py")
    config = str(ROOT / "pyproject.toml")
    flags = ("-q", "-c", config, "--rootdir", str(tmp_path), "-n", "0", "-p", "no:cacheprovider", "-k", tests)
    return in_copy(tmp_path, factor, "-m", "pytest", *flags, test)


def test_one_file_is_enough(tmp_path):
    result = suite(tmp_path, "self.temperature")
    assert result.returncode == 0, result.stdout[-3000:]
    assert "passed" in result.stdout
    listed = in_copy(tmp_path, "self.temperature", "-m", "regard", "list")
    assert "warm" in listed.stdout, listed.stderr
    explained = in_copy(tmp_path, "self.temperature", "-m", "regard", "explain", "warm")
    assert "divides the logits" in explained.stdout, explained.stderr


def test_the_suite_judges_it(tmp_path):
    result = suite(tmp_path, "2.5", "warm and reference")
    assert result.returncode == 1, result.stdout[-3000:]
    assert "warm(temperature=3.0)-causal-reference" in result.stdout
