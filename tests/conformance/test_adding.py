"""A mechanism is one file: put two into a copy of the package, and see the suite and the command line pick them up."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from folders import HELPERS, ROOT

from regard.testing.suite import CHECKS

THROWAWAY = '''"""A mechanism that exists for one test."""

from typing import Annotated

import torch

from regard.core.shape import Order
from regard.layers.attention.base import Facts
from regard.layers.attention.cached import Scored


class Throwaway(Scored):
    """Softmax with a temperature."""

    facts = Facts(
        name="NAME",
        paper="This test",
        link="none",
        family="scores",
        formula="softmax(q k / t) v",
        time=Order("N^2", 2),
        memory=Order("N", 1),
        state=Order("N", 1),
    )
    examples = ("NAME(temperature=3.0)",)

    def __init__(self, shape, *, temperature: Annotated[float, "divides the logits"] = 2.0):
        super().__init__(shape)
        self.temperature = temperature

    def score(self, mask, q, k):
        return (q / self.temperature) @ k.mT

    def plain(self, row):
        return torch.stack([row.attend(i, row.past(i), 1 / FACTOR) for i in range(row.T)])
'''

# what `make test` would run of them, and what the command line says
CHILD = """
import contextlib, io, json, os, sys

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
sys.path.insert(0, sys.argv[1])
from regard.testing.suite import CHECKS
from regard.testing.cases import cases
from quick import is_quick

from regard.cli import main

said, failed, passed = {}, [], 0
for words in ("list", "explain warm"):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(words.split())
    said[words] = out.getvalue()
for case in cases():
    for name, check in CHECKS.items():
        wanted = case.spec.startswith("warm") and is_quick(case, name)
        if wanted or (case.spec.startswith("lukewarm") and name == "reference"):
            try:
                check(case)
                passed += 1
            except AssertionError:
                failed.append(f"{case}-{name}")
print(json.dumps({"said": said, "failed": failed, "passed": passed}))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "regard", folder / "regard", ignore=shutil.ignore_patterns("__pycache__"))
    for name, factor in (("warm", "self.temperature"), ("lukewarm", "2.5")):
        text = THROWAWAY.replace("NAME", name).replace("FACTOR", factor)
        (folder / "regard" / "layers" / "attention" / f"{name}.py").write_text(text)
    env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(HELPERS)]
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_one_file_is_enough(told):
    assert {"warm", "lukewarm"} <= {line.split()[0] for line in told["said"]["list"].splitlines() if line.strip()}
    assert "divides the logits" in told["said"]["explain warm"]
    assert told["passed"] == 3 * (len(CHECKS) - 1), "every check but export, in each of three roles"


def test_the_suite_judges_it(told):
    """One whose reference is another formula."""
    roles = ("self", "causal", "cross")
    assert told["failed"] == [f"lukewarm(temperature=3.0)-{role}-reference" for role in roles]
