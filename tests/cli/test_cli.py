"""The command line: every name is listed and explained, mistakes end with one line, pictures are real."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from matplotlib.image import imread
from verbs import refused

import regard
from regard import draw
from regard.cli import main, program
from regard.cli.explanation import example_lines
from regard.models import registry as models
from regard.spec import REGISTRIES, parse

NAMES = [(kind, name) for kind, registry in REGISTRIES.items() for name in registry.names()]


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    """The workers of pytest-xdist set COLUMNS, which would count as a terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)


def test_list_shows_every_name(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {(line.split()[1], line.split()[0]) for line in lines[2:]}
    assert found == {*NAMES, *(("model", name) for name in models.entries())}


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_list_fits_the_terminal_and_cuts_no_name(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["list"]) == 0
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= columns
    assert "…" not in told
    assert {*models.entries(), *(name for _, name in NAMES)} <= {
        line.split()[0] for line in told.splitlines() if line.strip()
    }


def test_list_as_json_has_all_facts(capsys):
    assert main(["list", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["kind"], row["name"]) for row in rows] == [*NAMES, *(("model", name) for name in models.entries())]
    rows, built = rows[: len(NAMES)], rows[len(NAMES) :]
    for row in built:
        assert all(row[key] for key in ("paper", "link", "family", "time", "memory", "summary", "predicts", "presets"))
        assert all(option["meaning"] for option in row["options"] if option["name"] not in ("kind", "body"))
    row = next(row for row in rows if row["name"] == "softmax")
    assert row["time"] == {"text": "N^2", "exponent": 2}
    assert [row[flag] for flag in ("causal", "cross", "decodes")] == [True, True, True]
    for row in rows:
        assert all(row[key] for key in ("paper", "link", "formula", "summary", "examples"))
        cls = REGISTRIES[row["kind"]].find(row["name"])
        assert row["roles"] == list(cls.facts.roles)
        assert [option["name"] for option in row["options"]] == [
            option.name for option in REGISTRIES[row["kind"]].options(row["name"])
        ]


def test_list_selects(capsys):
    assert main(["list", "--kind", "attention", "--family", "scores", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(row["kind"], row["family"]) for row in rows} == {("attention", "scores")}
    assert main(["list", "--kind", "model"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == list(models.entries())
    assert "did you mean 'attention'" in refused(capsys, "list", "--kind", "atention")
    assert "did you mean 'scores'" in refused(capsys, "list", "--family", "score")


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_explain_every_name(capsys, kind, name):
    assert main(["explain", name, "--kind", kind]) == 0
    told = " ".join(capsys.readouterr().out.split())
    registry = REGISTRIES[kind]
    facts = registry.find(name).facts
    for words in (facts.paper, facts.formula, *(why for _, why in facts.refusals)):
        assert " ".join(words.split()) in told
    for option in registry.options(name):
        assert option.meaning, f"option {option.name} of {name} says nothing of itself"
        assert option.name in told
    for line in example_lines(kind, registry, parse(name)):
        assert line in told
    # every fact is said in words
    bare = [fact for fact, value in vars(facts).items() if f" {fact} {value} " in told and isinstance(value, bool)]
    assert bare == []


@pytest.mark.parametrize(("kind", "name"), [pair for pair in NAMES if pair[0] in ("attention", "position")])
def test_lines_to_copy_work(kind, name, capsys, tmp_path, monkeypatch):
    build, shell = example_lines(kind, REGISTRIES[kind], parse(name))
    space = {"regard": regard}
    exec(build, space)
    assert isinstance(space["layer"], regard.Attention)
    monkeypatch.chdir(tmp_path)
    # laying a figure out takes most of the time, and other tests save theirs
    monkeypatch.setattr(draw, "save", lambda figure, out: out)
    program, *words = shlex.split(shell)
    assert program == "regard"
    assert main(words) == 0


@pytest.mark.parametrize("name", models.entries())
def test_explain_every_model(capsys, name):
    """The names of `regard list --kind model`, with the presets that train them."""
    assert main(["explain", name, "--kind", "model"]) == 0
    told, model = capsys.readouterr().out, models.find(name)
    data = "image" if "image class" in model.forms else "vocabulary"
    for word in (name, "layers", data, "https://arxiv.org/abs/", *model.predicts):
        assert word in told
    for form in model.forms.values():
        assert set(form.presets) <= set(re.findall(r"[\w-]+", told.split("Facts")[1]))
    if name in ("funnel", "perceiver", "perceiver-ar", "tokenlearner", "feedback"):
        assert "authors" in told, "what differs from their code is said"
    lines = [line.strip() for line in told.split("To copy")[1].split("\n") if line.strip()]
    space = {}
    with torch.device("meta"):
        exec("\n".join(lines), space)
    assert type(space["model"]) in {form.module for form in model.forms.values()}


def test_explain_takes_a_spec(capsys):
    assert main(["explain", "heads(softmax, softmax)"]) == 0
    told = capsys.readouterr().out
    assert "heads(softmax, softmax)" in told
    assert "N^2" in told


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["explain", "sofmax"], "did you mean 'softmax'"),
        (["explain", "funel"], "did you mean 'funnel'"),
        (["explain", "funnel", "--kind", "attention"], "nothing is called 'funnel'"),
        (["explain", "softmax("], "cannot read the spec"),
        (["explain", "softmax(depth=3)"], "no option 'depth'"),
        (["explain"], "NAME"),
        (["lst"], "list"),
        (["list", "--jsn"], "--jsn"),
        (["draw", "sofmax"], "did you mean 'softmax'"),
        (["draw", "softmax", "--length", "0"], "length must be between 1 and"),
        (["draw", "softmax", "--length", "100000"], "length must be between 1 and"),
        (["draw", "softmax", "--length", "many"], "many"),
        (["draw", "softmax", "--heads", "-1"], "heads must be between 1 and"),
        (["draw", "softmax", "--keys", "5"], "role 'cross'"),
        (["draw", "softmax", "--keys", "0", "--role", "cross"], "keys must be between 1 and"),
        (["draw", "softmax", "--seed", "-1"], "seed must be"),
        (["draw", "softmax", "--role", "selfish"], "selfish"),
        (["draw", "softmax", "--position", "nowhere"], "nowhere"),
        (["draw", "softmax", "--out", "nowhere/at/all.png"], "nowhere/at"),
        (["draw", "softmax", "--out", "picture.bmp"], ".png, .svg, .pdf"),
        (["draw", "heads(softmax, softmax)", "--heads", "3"], "multiple of 2 heads"),
        (["draw", "linformer(longest=8)", "--length", "9"], "longest=8"),
        (["demo", "--sentence", "alone"], "2 to 40 words"),
    ],
    ids=" ".join,
)
def test_mistakes_end_with_one_line(capsys, tmp_path, monkeypatch, words, part):
    monkeypatch.chdir(tmp_path)
    assert part in refused(capsys, *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["softmax", "--role", "causal"],
        ["softmax", "--role", "cross", "--keys", "5", "--weights", "--heads", "1"],
        ["heads(softmax, local(window=2))", "--heads", "2"],
        ["linformer(rank=3, longest=12)", "--weights", "--heads", "2"],
    ],
    ids=" ".join,
)
def test_draw_writes_a_picture(capsys, tmp_path, words):
    out = tmp_path / "pattern.png"
    assert main(["draw", *words, "--length", "12", "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    pixels = imread(out)
    assert min(pixels.shape[:2]) > 600
    assert len({tuple(pixel) for pixel in pixels[::7, ::7].reshape(-1, pixels.shape[2]).tolist()}) > 5


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_draw_writes_vector_files(tmp_path, suffix, start):
    out = tmp_path / f"pattern.{suffix}"
    assert main(["draw", "softmax", "--length", "6", "--heads", "1", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(start)


def test_patterns_are_those_of_the_layer():
    drawn = draw.measure("softmax", length=9, heads=4, role="causal")
    (pattern,) = draw.patterns(drawn)
    torch.testing.assert_close(torch.from_numpy(pattern.seen), torch.ones(9, 9, dtype=torch.bool).tril())


def test_each_pattern_of_mixed_heads_is_named():
    parts = ["local(window=2)", "strided(stride=4)"]
    drawn = draw.measure(f"heads({', '.join(parts)})", length=12, heads=4, role="causal")
    found = draw.patterns(drawn)
    assert [pattern.label for pattern in found] == parts
    for part, pattern in zip(parts, found, strict=True):
        (alone,) = draw.patterns(draw.measure(part, length=12, heads=2, role="causal"))
        assert (alone.seen == pattern.seen).all()
    unnamed = draw.patterns(drawn._replace(parts=["one"] * 4))
    assert [pattern.label for pattern in unnamed] == ["heads 1, 2", "heads 3, 4"]
    legend = draw.pattern_picture(drawn).axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [*parts, "all heads"]


def test_a_pattern_that_shows_nothing_says_why(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(draw, "save", lambda figure, out: out)
    for words, told in ((["local"], True), (["local(window=2)"], False), (["softmax"], False)):
        assert main(["draw", *words, "--length", "8", "--out", str(tmp_path / "a.png")]) == 0
        assert ("smaller options" in capsys.readouterr().out) is told


def test_the_same_seed_draws_the_same():
    maps = [draw.measure("softmax", length=5, heads=2, seed=seed).maps for seed in (1, 1, 2)]
    assert (maps[0] == maps[1]).all()
    assert (maps[0] != maps[2]).any()


def test_signed_weights_take_diverging_colours_around_zero():
    maps = draw.measure("softmax", length=5, heads=2).maps
    assert draw.shades(maps)[1].vmin == 0
    _, scale, extend = draw.shades(maps - 0.2)
    assert scale.vmin == -scale.vmax
    assert extend == "max"


def test_demo_draws_and_says_where(capsys, tmp_path):
    folder = tmp_path / "new" / "demo"
    assert main(["demo", "--part", "mechanisms", "--out", str(folder), "--sentence", "a rose is a rose"]) == 0
    told = capsys.readouterr().out
    assert str(folder / "attention.png") in told
    assert "Nothing is trained" in " ".join(told.split())
    assert {name for _, name in NAMES} <= {line.split()[0] for line in told.splitlines() if line.strip()}
    assert "softmax: 'rose' attends to 'rose'" in told
    assert min(imread(folder / "attention.png").shape[:2]) > 400


def test_help_and_version(capsys):
    for words in (["--help"], ["list", "--help"], ["explain", "--help"], ["draw", "--help"], ["demo", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        assert "usage: regard" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"regard {regard.__version__}\n"
    assert main([]) == 0
    assert "usage: regard" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["RUN", "in.txt", "b.txt", "--beam", "3"],
        ["RUN", "--beam", "3", "in.txt", "b.txt"],
        ["--beam", "3", "RUN", "in.txt", "b.txt"],
        ["RUN", "in.txt", "--beam=3", "b.txt"],
        ["RUN", "--beam", "3", "--", "in.txt", "b.txt"],
    ],
)
def test_flags_stand_anywhere_among_files(words):
    arguments = program._parser().parse_args(["translate", *words])
    assert (arguments.run, arguments.files, arguments.beam) == ("RUN", ["in.txt", "b.txt"], 3)


def test_a_text_stands_behind_flags(capsys):
    arguments = program._parser().parse_args(["fill", "RUN", "--top", "2", "a [mask]"])
    assert (arguments.run, arguments.text, arguments.top) == ("RUN", "a [mask]", 2)
    assert "required: RUN" in refused(capsys, "fill", "--top", "2")
    assert "unrecognized arguments: --nope" in refused(capsys, "fill", "RUN", "--nope", "a [mask]")


def test_as_a_program(tmp_path):
    """The real thing: bad input, a reader that leaves, an output that knows no accents."""
    regard_program = [sys.executable, "-m", "regard"]
    ended = subprocess.run([*regard_program, "explain", "sofmax"], capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "Traceback" not in ended.stderr
    shell = f"{shlex.join(regard_program)} list --json | head -c 1"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "{", "")


def test_a_closed_pipe_is_no_error(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["list"]) == 0
        assert main(["list", "--json"]) == 0
