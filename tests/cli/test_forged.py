"""Run folders forged by somebody who knows the format, manifests and all: every verb ends in words."""

import hashlib
import io
import json
import os
import shutil
import sys

import pytest

from regard import cli
from regard.training import checkpoint


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of each of two tasks, of two steps."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "a.txt").write_text("a b c\nb c a\nc a b\nd e f\n" * 20)
    rows = "".join(f"word {number},{'a' if number % 2 else 'b'}\n" for number in range(40))
    (folder / "a.csv").write_text(f"text,label\n{rows}")
    sizes = "--model.width 8 --model.heads 2 --model.inner 8 --model.layers 1 --training.tokens 128"
    steps = "--training.steps 2 --training.evaluate_every 1 --training.tensorboard false"
    words = [*sizes.split(), *steps.split(), "--data.tokenizer", "words", "--data.vocabulary", "50"]
    text = ["--data.text", str(folder / "a.txt"), "--data.length", "8"]
    assert cli.main(["train", "language", *text, *words, "--out", str(folder / "language")]) == 0
    text = ["--data.text", str(folder / "a.csv")]
    assert cli.main(["train", "classify", *text, *words, "--out", str(folder / "classify")]) == 0
    return folder


def refused(capsys, *words):
    """The last line of a verb that refuses."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    said = capsys.readouterr()
    assert (ended.value.code, "Traceback" in said.err) == (2, False)
    return said.err.splitlines()[-1]


def fact(path):
    data = path.read_bytes()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def forge(run, name, change):
    """Changes a JSON file of a run, or a line of one, and all manifests with it."""
    path = sorted(run.glob(f"checkpoints/*/{name}"))[-1] if name == "state.json" else run / name
    if name.endswith(".jsonl"):
        lines = path.read_text().splitlines()
        path.write_text("\n".join([change if isinstance(change, str) else json.dumps(change), *lines[1:]]) + "\n")
    else:
        values = json.loads(path.read_text())
        for place, value in change.items():
            *parents, last = place.split(".")
            inside = values
            for parent in parents:
                inside = inside[int(parent)] if parent.isdigit() else inside[parent]
            if value is ...:
                del inside[last]
            else:
                inside[last] = value
        path.write_text(json.dumps(values))
    for manifest in (run / "manifest.json", *run.glob("checkpoints/*/manifest.json")):
        values = json.loads(manifest.read_text())
        values["files"] = {file: fact(manifest.parent / file) for file in values["files"]}
        manifest.write_bytes(checkpoint.canonical(values))


USE, RESUME = ("classify",), ("resume", "--steps", "3")
FORGED = {
    "no task": ("run.json", {"task": ...}, USE, "a run of the task None"),
    "a list for a task": ("run.json", {"task": []}, USE, "a run of the task []"),
    "no model": ("run.json", {"model": 3}, USE, "has no config of the model"),
    "a list for a kind": ("run.json", {"model.kind": [1]}, USE, "no model is of kind"),
    "text for a size": ("run.json", {"model.width": "wide"}, USE, "width must be a whole number"),
    "a size without end": ("run.json", {"model.layers": 10**12}, USE, "layers must be at most 4,096"),
    "heads that do not divide": ("run.json", {"model.heads": 3}, USE, "not divisible by heads 3"),
    "another layer": ("run.json", {"model.layers": 2}, USE, "does not fit the model config"),
    "another layer, resumed": ("run.json", {"model.layers": 2}, RESUME, "does not fit the model config"),
    "a spec": ("run.json", {"model.attention": "local(window={[]: 1})"}, USE, "must be a plain value"),
    "labels": ("run.json", {"labels": [1, 2]}, USE, "labels must be strings"),
    "labels that are none": ("run.json", {"labels": "ab"}, USE, "labels must be a list"),
    "a length": ("run.json", {"longest": [[]]}, USE, "longest must be a number"),
    "a tokenizer elsewhere": (
        "run.json",
        {"tokenizers": {"../../secret.json": "0"}},
        USE,
        "its tokenizers",
    ),
    "no tokenizer": ("run.json", {"tokenizers": ...}, USE, "does not name tokenizer.json"),
    "data": ("run.json", {"data": 12}, RESUME, "data must be an object"),
    "no step": ("state.json", {"step": ...}, RESUME, "state.json"),
    "a step of text": ("state.json", {"step": "2"}, RESUME, "state.json"),
    "a step below zero": ("state.json", {"step": -1}, RESUME, "state.json"),
    "a step without end": ("state.json", {"step": 10**400}, RESUME, "state.json"),
    "a best of a list": ("state.json", {"best": [1]}, RESUME, "best must be"),
    "a best step": ("state.json", {"best_step": [1]}, USE, "best_step must be a step"),
    "a sum": ("state.json", {"loss_sum": "much"}, RESUME, "loss_sum must be"),
    "statistics": ("state.json", {"statistics": {"x": {}}}, RESUME, "statistics must be numbers"),
    "an unknown field": ("state.json", {"more": 1}, RESUME, "has no more"),
    "no optimizer": ("state.json", {"optimizer": ...}, RESUME, "groups of the optimizer"),
    "an option": (
        "state.json",
        {"optimizer.groups.0.options.eps": None},
        RESUME,
        "eps of the optimizer",
    ),
    "another option": ("state.json", {"optimizer.groups.0.options.betas": [1]}, RESUME, "betas of the optimizer"),
    "a row": (
        "valid.jsonl",
        {"text": 3, "label": "a"},
        ("evaluate",),
        "valid.jsonl:1 must be",
    ),
    "a row that is a number": ("valid.jsonl", "12", ("evaluate",), "valid.jsonl:1 must be a JSON object"),
    "a deep row": ("valid.jsonl", "[" * 100_000, ("evaluate",), "valid.jsonl:1 is not readable JSON"),
    "a long number": ("valid.jsonl", "9" * 5000, ("evaluate",), "valid.jsonl:1 is not readable JSON"),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_runs_end_in_words(trained, tmp_path, capsys, monkeypatch, case):
    name, change, (verb, *flags), words = FORGED[case]
    run = shutil.copytree(trained / "classify", tmp_path / "run")
    forge(run, name, change)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"word\n")))
    assert words in refused(capsys, verb, str(run), *flags)


@pytest.mark.parametrize(
    "line", ["[]", "1", "null", "{}", '{"step": "x"}', '{"step": null}', "[" * 100_000, "9" * 5000, ""]
)
def test_lines_of_the_log_that_are_no_records_are_left_out(trained, tmp_path, capsys, line):
    run = shutil.copytree(trained / "language", tmp_path / "run")
    forge(run, "log.jsonl", line)
    assert cli.main(["resume", str(run), "--steps", "3"]) == 0
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert records[-1]["step"] == 3
    assert all(isinstance(record["step"], int) for record in records)


def test_lengths_of_exports(trained, tmp_path, capsys):
    run = shutil.copytree(trained / "language", tmp_path / "run")
    forge(run, "run.json", {"length": [[]]})
    out = ["--format", "huggingface", "--out", str(tmp_path / "out")]
    assert "length must be a number from 0" in refused(capsys, "export", str(run), *out)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
@pytest.mark.parametrize("name", ["manifest.json", "log.jsonl", "tokenizer.json", "valid.jsonl", "config.yaml"])
def test_pipes_in_a_run(trained, tmp_path, capsys, name):
    """Reading a pipe that nobody writes to would never end."""
    run = shutil.copytree(trained / "language", tmp_path / "run")
    (run / name).unlink()
    os.mkfifo(run / name)
    refused(capsys, *(("evaluate", str(run)) if name == "valid.jsonl" else ("resume", str(run), "--steps", "3")))
