"""Retention in somebody else's installed package: listed, explained, drawn, trained, shown, saved and loaded, and
proved by the suite; and the same with a planted bug, which the suite must find."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from folders import ROOT
from packages import install, of_the_docs
from verbs import refused

from regard.testing.finding import find
from regard.testing.suite import CHECKS

# sees one token of the future
LEAKY = """
from dataclasses import replace

from retentive.retention import Retention


class Leaky(Retention):
    facts = replace(Retention.facts, name="leaky")
    examples = ("leaky",)

    def scan(self, real, sums, q, k, v):
        o, sums = super().scan(real, sums, q, k, v)
        return o + 0.1 * v.roll(-1, 2), sums
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where three packages are installed: one that works, one with a bug, one that cannot be imported."""
    folder = tmp_path_factory.mktemp("installed")
    modules = {"retentive/__init__.py": "", "retentive/retention.py": of_the_docs("Retention")}
    point = {"regard.attention": {"retention": "retentive.retention:Retention"}}
    install(folder, "retentive", "0.3", modules, point)
    install(folder, "leaks", "1.0", {"leaks.py": LEAKY}, {"regard.attention": {"leaky": "leaks"}})
    install(folder, "broken", "2.0", {"broken.py": "import no_such_module\n"}, {"regard.position": {"lost": "broken"}})
    return folder


def child(folder: Path, *command: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env = clean | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    return subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=600)


# what a user does with it, in one process
USE = """
import contextlib, io, json, sys
import torch
import regard
from regard.cli import main
from regard.page.engine import Engine
from regard.page import subjects

said = {}
def say(name, *words):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(list(words)) == 0, words
    said[name] = out.getvalue()

say("list", "list", "--kind", "attention")
say("json", "list", "--kind", "attention", "--json")
say("explain", "explain", "retention")
say("draw", "draw", "retention", "--role", "causal", "--length", "8", "--out", "retention.png")
open("text.txt", "w").write("one two three four five six seven\\n" * 20)
small = "--model.width 8 --model.heads 2 --model.inner 8 --model.layers 1 --data.tokenizer words --data.length 4"
few = "--training.steps 2 --training.device cpu --training.tensorboard false --training.evaluate_every 2"
attention = "[retention,heads(retention,softmax)]"
say("train", "train", "language", "--data.text", "text.txt", *small.split(), *few.split(),
    "--model.layers", "2", "--model.attention", attention, "--out", "run")
say("generate", "generate", "run", "one two", "--device", "cpu")
engine = Engine({"run": lambda: subjects.open_run("run", "run")})
said["page"] = [one for one in engine.about().meta["mechanisms"] if one["name"] == "retention"]
said["pattern"] = engine.pattern("retention", "causal", 8, 2).arrays["weights"].shape
said["maps"] = [array.shape for array in engine.read("run", "decoder", "one two three").arrays.values()]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def used(folder) -> dict:
    done = child(folder, "-W", "error::UserWarning:regard", "-c", USE)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_it_is_listed_explained_and_drawn(used, folder):
    [line] = [line for line in used["list"].splitlines() if line.startswith("retention")]
    assert "retentive 0.3" in line
    rows = [json.loads(line) for line in used["json"].splitlines()]
    assert {row["name"]: row["package"] for row in rows if row["package"]} == {
        "leaky": "leaks 1.0",
        "retention": "retentive 0.3",
    }
    assert "from the package retentive 0.3" in used["explain"]
    assert (folder / "retention.png").stat().st_size > 1000


def test_it_is_trained_and_shown(used):
    assert used["generate"].startswith("one two")
    [about] = used["page"]
    assert about["package"] == "retentive 0.3"
    assert used["pattern"] == [2, 8, 8]
    assert len(used["maps"]) == 2


def test_a_run_without_its_package_is_refused(used, folder, capsys):
    """Here, in the process of the tests, the package is not installed."""
    facts = json.loads((folder / "run" / "run.json").read_text())
    assert facts["packages"] == {"attention": {"retention": "retentive 0.3"}}
    for words in (["generate", str(folder / "run"), "one"], ["resume", str(folder / "run")]):
        said = refused(capsys, *words)
        assert "was trained with attention 'retention' of the package 'retentive 0.3', which is not installed" in said


def test_a_broken_package_breaks_nothing(folder):
    done = child(folder, "-m", "regard", "list", "--kind", "position")
    assert done.returncode == 0
    [line] = done.stderr.splitlines()
    expected = (
        "position 'lost' of the package broken 2.0 is left out: ModuleNotFoundError: No module named 'no_such_module'"
    )
    assert line == f"regard: {expected}"
    assert "rotary" in done.stdout


QUICK = (
    "reference",
    "causality",
    "padding",
    "split",
    "ragged_decode",
    "round_trip",
    "roles",
    "select",
    "batch",
    "prefix",
)


@pytest.mark.parametrize(
    "checks",
    [pytest.param(QUICK, id="quick"), pytest.param(tuple(CHECKS), id="all", marks=pytest.mark.exhaustive)],
)
def test_the_suite_judges_it(folder, checks):
    """All that is asked of it holds; of the one with a bug, what a bug of that kind must break does not."""
    chosen = ["-k", " or ".join(checks)] if checks is QUICK else []
    command = [
        "-m",
        "regard.testing",
        "retention",
        "leaks:Leaky",
        "-q",
        "-rA",
        "-p",
        "no:schemathesis",
        "-p",
        "no:xdist",
    ]
    done = child(folder, *command, "-p", "no:cacheprovider", "--no-header", "--tb=line", *chosen)
    found = re.findall(r"^(PASSED|FAILED) .*\[(\w+)-causal-(\w+)\]", done.stdout, re.MULTILINE)
    verdicts = {(name, check): verdict for verdict, name, check in found}
    assert {check for name, check in verdicts if name == "retention"} == {*checks}, done.stdout[-3000:] + done.stderr
    assert {verdict for (name, _), verdict in verdicts.items() if name == "retention"} == {"PASSED"}
    leaks = {check for (name, check), verdict in verdicts.items() if name == "leaky" and verdict == "FAILED"}
    assert {"reference", "causality", "prefix", "split", "ragged_decode"} <= leaks
    assert "roles" not in leaks
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("linera", "nothing is called 'linera': give a word of 'regard list', or what can be imported here"),
        ("no.such.module", r"nothing is called 'no\.such\.module'"),
        ("regard.spec", "the module defines no class with facts; name a class as regard.spec:Class"),
        ("regard.spec:Nothing", "the module regard.spec has no 'Nothing'"),
        ("regard.spec:Spec", "expected a class that is built on one of Attention, FeedForward, Position"),
        ("regard.layers.attention.base:Attention", "cannot be checked: Attention has no facts"),
        ("regard.layers.attention.cached:Cached", "cannot be checked: Cached has no facts"),
    ],
)
def test_what_cannot_be_checked_is_said(name, words):
    with pytest.raises(ValueError, match=words):
        find(name)


def test_without_a_name_nothing_is_checked(folder):
    done = child(folder, "-m", "pytest", "--pyargs", "regard.testing", "-rs", "-p", "no:schemathesis", "-p", "no:xdist")
    assert done.returncode == 0
    assert "python -m regard.testing NAME" in done.stdout
    assert "1 skipped" in done.stdout


def test_without_pytest(folder, monkeypatch, capsys):
    from regard.testing.__main__ import main

    monkeypatch.setitem(sys.modules, "pytest", None)
    assert main(["softmax"]) == 2
    assert capsys.readouterr().err == "regard.testing needs pytest: pip install 'regard[testing]'\n"
    assert main([]) == 2
    assert "python -m regard.testing retention" in capsys.readouterr().out
