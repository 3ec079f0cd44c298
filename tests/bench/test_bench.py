"""The benchmarks: each says what it does and takes its flags; the data of SST-2 and the rows made of it; layers and
speeds measured at small sizes."""

import json
import lzma
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from folders import ROOT
from PIL import Image
from processes import in_processes

import regard
from regard import recipes

BENCH = ROOT / "bench"
PROGRAMS = sorted(path.name for path in BENCH.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    """They import each other."""
    monkeypatch.syspath_prepend(str(BENCH))


def test_all_are_found():
    assert len(PROGRAMS) > 10


@pytest.mark.parametrize("name", PROGRAMS)
def test_help(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCH / name), run_name="__main__")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"python bench/{name}" in said


def sst2_data(folder: Path) -> Path:
    for part in ("sst2", "sst2-glue", "imdb"):
        (folder / part).mkdir(parents=True)
    train = "1 a well-made film .\n0 dull -lrb- and long -rrb-\n"
    for name, text in {"train": train, "dev": "1 fine .\n", "test": "0 dull .\n"}.items():
        (folder / "sst2" / f"stsa.binary.{name}").write_text(text, encoding="utf-8")
    with lzma.open(folder / "sst2-glue" / "train.tsv.xz", "wt", encoding="utf-8") as file:
        file.write("sentence\tlabel\nwell-made \t1\ndull .\t0\na well-made film .\t1\n")
    for name in ("train", "test"):
        with lzma.open(folder / "imdb" / f"{name}.jsonl.xz", "wt", encoding="utf-8") as file:
            file.write(json.dumps({"text": f"It's <br />the {name} film... I didn't cry!", "label": 1}) + "\n")
    return folder


def test_sst2_data(tmp_path):
    """Phrases that are sentences of dev or test are not learnt; nothing is twice; reviews look as sentences do."""
    import sst2

    paths = sst2.prepare(sst2_data(tmp_path / "data"), tmp_path / "out")
    read = {name: Path(path).read_text(encoding="utf-8").splitlines() for name, path in paths.items()}
    assert read["train"] == [
        "text\tlabel",
        "well - made\tpositive",
        "a well - made film .\tpositive",
        "dull ( and long )\tnegative",
    ]
    assert read["test"] == ["text\tlabel", "dull .\tnegative"]
    assert read["train-text"] == ["well - made", "a well - made film .", "dull ( and long )"]
    assert read["reviews"] == [f"it 's the {name} film ... i did n't cry !" for name in ("train", "test")]


def test_sst2_rows(monkeypatch, tmp_path):
    """Each row is trained by its config; those that are masked first begin with the body of theirs."""
    import side
    import sst2

    trained = []

    def train(task, rows, common, *_):
        trained.append((task, common[1], rows))

    monkeypatch.setattr(side, "train", train)
    monkeypatch.setattr(side, "evaluate", lambda rows, *_: {name: {"error": "none"} for name in rows})
    only = ["masked first on reviews, seed 2", "from scratch, seed 1"]
    given = ["--data", str(sst2_data(tmp_path / "data")), "--out", str(tmp_path / "out"), "--only", *only]
    monkeypatch.setattr(sys, "argv", ["sst2.py", *given])
    sst2.main()
    found = {(task, config): rows for task, config, rows in trained if rows}
    assert {what: list(rows) for what, rows in found.items()} == {
        ("classify", "sst2"): ["from scratch, seed 1"],
        ("masked", "reviews-masked"): ["masked on reviews"],
        ("classify", "reviews-tuned"): ["masked first on reviews, seed 2"],
    }
    flags = found["classify", "reviews-tuned"]["masked first on reviews, seed 2"]
    assert flags[flags.index("--init") + 1] == str(tmp_path / "out" / side.slug("masked on reviews"))
    assert flags[flags.index("--training.seed") + 1] == "2"
    assert all(recipes.find(config, task) for task, config, _ in trained)


def test_layers_of_a_gpu(monkeypatch, tmp_path):
    """Every layer of the table is built in the role it stands under; times are written, and softmax is among them."""
    import attention_gpu

    for role, patterns in attention_gpu.LAYERS.items():
        for pattern in patterns:
            regard.attention(pattern.format(length=64), width=32, heads=2, role=role)
    for name in ("TOKENS", "HEADS", "WIDTH"):
        monkeypatch.setattr(attention_gpu, name, getattr(attention_gpu, name))
    monkeypatch.setattr(attention_gpu, "RESULTS", {})
    given = ["layers", "--small", "--lengths", "64", "--only", "linear", "--json", str(tmp_path / "layers.json")]
    monkeypatch.setattr(sys, "argv", ["attention_gpu.py", *given])
    attention_gpu.main()
    found = json.loads((tmp_path / "layers.json").read_text())
    rows = {f"layers, {role} {name}, 64, ours" for role in attention_gpu.LAYERS for name in ("softmax", "linear")}
    assert found.keys() == rows
    assert all(forward > 0 and both > 0 for forward, both in found.values())


def test_speed_of_rows(monkeypatch, tmp_path, capsys):
    """Rows of Multi30k are trained on a few batches, and no run is left."""
    import speed

    monkeypatch.setattr(speed, "BATCHES", 2)
    data = []
    for part, flag in (("train", ""), ("valid", "valid_")):
        for language, side in (("en", "source"), ("de", "target")):
            (tmp_path / f"{part}.{language}").write_text("a b c\nb c\nc a\nb\n" * 4, encoding="utf-8")
            data += [f"--data.{flag}{side}", str(tmp_path / f"{part}.{language}")]
    asked = [
        "multi30k",
        "--rounds",
        "1",
        "--only",
        "softmax",
        "linear",
        "--split",
        "--json",
        str(tmp_path / "speed.json"),
    ]
    monkeypatch.setattr(sys, "argv", ["speed.py", *asked, *data])
    speed.main()
    found = json.loads((tmp_path / "speed.json").read_text())
    assert found.keys() == {"softmax", "linear"}
    assert all(speed > 0 for speed in found.values())
    # the CPU has no graph
    assert re.search(r"\| softmax \| [\d,]+ \| 1.00 \|  \| \d+\.\d\d \|  \|  \|  \|", capsys.readouterr().out)


def test_speed_beside_timm(monkeypatch, tmp_path, capsys):
    """timm's models have the parameters of ours, also behind the stem of convolutions."""
    import speed
    import timm_peer  # noqa: F401  (torchvision may be missing)

    monkeypatch.setattr(speed, "BATCHES", 2)
    rows = np.random.default_rng(0).integers(0, 10, (40, 3073), np.uint8)
    rows.tofile(tmp_path / "data_batch_1.bin")
    given = ["--data", str(tmp_path), "--batch", "2", "--rounds", "1", "--eager"]
    monkeypatch.setattr(sys, "argv", ["cifar10.py", *given])
    runpy.run_path(str(BENCH / "cifar10.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "| `cifar10-vit` | 3,190,026 |" in said
    assert "| `cifar10-cct` | 3,624,330 |" in said


def test_flickr8k_data(tmp_path):
    """Tiles are cut row by row, each with its captions; the black ones have the same captions."""
    import flickr8k

    for part in flickr8k.PARTS:
        tiles = np.zeros((128, 6400, 3), np.uint8)
        tiles[:64, 64:128], tiles[64:, :64] = 50, 200  # tile 1 and tile 100
        Image.fromarray(tiles).save(tmp_path / f"{part}.webp", lossless=True)
        with lzma.open(tmp_path / f"{part}.tsv.xz", "wt", encoding="utf-8") as file:
            file.writelines(f"id{n}\ta {n}\tb\n" for n in range(101))
    paths = flickr8k.prepare(tmp_path, tmp_path / "out", 101)
    with np.load(paths["dev"]) as arrays:
        assert arrays["images"].shape == (101, 64, 64, 3)
        assert [int(image[0, 0, 0]) for image in arrays["images"][[0, 1, 99, 100]]] == [0, 50, 0, 200]
    with np.load(paths["dev-black"]) as arrays:
        assert not arrays["images"].any()
    lines = Path(paths["train-captions"]).read_text(encoding="utf-8").splitlines()
    assert (len(lines), lines[100]) == (101, "100\ta 100\tb")


def test_flickr8k_table():
    """Scores beside chance; a row that failed says why."""
    import flickr8k

    recall = {"recall@1": 0.05, "recall@5": 0.2, "recall@10": 0.3, "median_rank": 40.0}
    both = {"pictures": recall, "captions": recall | {"median_rank": 41.2}}
    one = {name: {"value": value} for name, value in (("bleu", 12.345), ("chrf", 30.0), ("cider", 0.4567))}
    found = {"CoCa": one | {"perplexity": 20.0, "retrieval": both, "chance": both}, "no picture": {"error": "broken"}}
    lines = flickr8k.table(["CoCa", "no picture"], found).splitlines()
    assert lines[2] == "| CoCa | 12.35 | 30.00 | 0.457 | 20.00 | 5.0 / 20.0 / 30.0 | 40 | 5.0 / 20.0 / 30.0 | 41 |"
    assert "broken" in lines[3]
    assert lines[4].startswith("| chance | | | | | 5.0 / 20.0 / 30.0")
    assert len({line.count("|") for line in lines}) == 1


def test_tasks_of_shots(tmp_path):
    """Task files that `regard prompt` reads; answers follow from the rows; no query is an example."""
    import shots

    from regard.tasks.language import fewshot

    sst2_data(tmp_path)
    for name in shots.TASKS:
        loaded = fewshot.load(shots.write(name, tmp_path, tmp_path, 30, 0))
        assert len(loaded.queries) == (1 if name == "sst2" else 30)
        assert not [row for row in loaded.queries if row in loaded.examples]
        for row in loaded.queries:
            if name == "recall":
                assert f"{row['key']} = {row['label']}" in row["pairs"].split(", ")
            if name == "groups":
                assert (row["label"] == "A") == row["word"].islower()
    assert len(loaded.examples) == 32
    assert fewshot.load(tmp_path / "sst2.yaml").queries == [{"text": "dull .", "label": "negative"}]


def test_every_row_of_swapped_is_a_model(tmp_path, capsys):
    """And results that are there are not lost, while failures are tried again."""
    import swapped

    from regard import models
    from regard.models.config import ModelConfig
    from regard.tasks.swap import transfer

    config = ModelConfig(kind="decoder", vocabulary=9, width=36, heads=9, kv_heads=3, inner=8, layers=2)
    model = models.build(replace(config, position="rotary"))
    for flags in swapped.ROWS.values():
        attention, position = flags[1], flags[3] if len(flags) > 2 else "rotary"
        transfer(model, models.build(replace(config, attention=attention, position=position)))
    results = swapped.Results(tmp_path / "results.json")
    results.add("softmax", "before", {"perplexity": 20.125})
    results.add("linear", "before", {"error": "no such word"})
    results.add("softmax", "after", {"perplexity": 15.0, "trained": 2_500_000})
    results.show(["softmax", "linear"], header=False)
    assert capsys.readouterr().out == "| `softmax` | 20.12 | 15.00 | 2.5M |\n| `linear` | no such word | not run |  |\n"
    assert swapped.Results(tmp_path / "results.json").of("softmax")["after"]["trained"] == 2_500_000
    assert "before" not in swapped.Results(tmp_path / "results.json").of("linear")


@pytest.mark.exhaustive
def test_the_projection_has_the_operations_and_bytes_of_an_update(tmp_path):
    import scaling

    def count(rank: int) -> None:
        plain, sharded = scaling.count(tmp_path)
        for counted in (plain, sharded):
            assert counted.operations == pytest.approx(counted.formula, rel=0.01)
        assert plain.bytes_per_parameter == {"all-reduce": pytest.approx(4, rel=1e-3)}
        # what is gathered for the whole step is gathered once
        assert 7 < sharded.bytes_per_parameter["all-gather"] < 8
        assert sharded.bytes_per_parameter["reduce-scatter"] == pytest.approx(4, rel=1e-3)

    assert in_processes(2, count) == [0, 0]
