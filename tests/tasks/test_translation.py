"""Translators from the outside: the shipped one, one trained here, the command line, and text of any kind."""

import dataclasses
import gzip
import io
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from regard import cli
from regard.cli import demo_content as demo
from regard.data import placeholders
from regard.data.batches import padded
from regard.data.generated import pairs
from regard.data.placeholders import Marked
from regard.decoding import DecodingConfig, decode
from regard.tasks.load import compact_run
from regard.tasks.train import resume, train
from regard.tasks.translate import (
    ENGLISH_GERMAN,
    DataConfig,
    Task,
    TranslateConfig,
    Translator,
    TranslatorOptions,
    alignment,
)
from regard.training import checkpoint
from regard.training.compact import compact, expand
from regard.training.config import TrainingConfig
from regard.training.display import Display
from regard.training.run import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    """A few steps on a generated corpus: it translates badly, and all its parts are there."""
    folder = tmp_path_factory.mktemp("run") / "run"
    train(
        Task,
        TranslateConfig(
            out=str(folder),
            data=DataConfig(generated=300, held_out=20, vocabulary=400, protect=True),
            model=TranslatorOptions(width=32, heads=2, inner=64, layers=2, norm="pre", aligner=True),
            training=TrainingConfig(steps=20, tokens=512, evaluate_every=10, average=2, keep=2, tensorboard=False),
        ),
        Display(quiet=True),
    )
    return str(folder)


@pytest.fixture(scope="module")
def shipped() -> Translator:
    return Translator.load(device="cpu")


def feed(monkeypatch, text: str | bytes) -> None:
    data = text.encode() if isinstance(text, str) else text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def translated(monkeypatch, capsys, text: str | bytes, *flags: str) -> tuple[list[str], str]:
    feed(monkeypatch, text)
    assert cli.main(["translate", *flags]) == 0
    said = capsys.readouterr()
    assert said.out == "" or said.out.endswith("\n")
    return said.out.split("\n")[:-1], said.err


def test_the_shipped_translator(monkeypatch, capsys):
    lines, _ = translated(monkeypatch, capsys, "Where is the station?\n\nI love you.\n")
    assert lines == ["Wo ist der Bahnhof?", "", "Ich liebe dich."]


def test_the_shipped_translator_puts_entities_where_they_belong(shipped):
    """Before it had placeholders it made prose of them: "Die Vitisminst tritt heute eine Apphalle auf."."""
    warnings: list[str] = []
    lines = {
        "Visit https://example.com/help?id=42 today.": "Besuchen Sie heute https://example.com/help?id=42.",
        "My e-mail address is john.doe@example.org.": "Meine E-Mail-Adresse ist john.doe@example.org.",
        "It costs $1,234.56.": "Es kostet 1.234,56 $.",
        "The meeting is at 14:30.": "Die Besprechung ist um 14:30 Uhr.",
        "I love you ❤️": "Ich liebe dich. ❤️",
        "He was born on March 3, 1987.": "Er wurde am 3. März 1987 geboren.",
        "@anna loves #berlin.": "@anna liebt #berlin.",
        "The file is in /home/anna/notes.txt.": "Die Datei ist in /home/anna/notes.txt.",
        "You need version 2.10.3 or newer.": "Sie brauchen Version 2.10.3 oder neuer.",
    }
    assert [best[0].text for best in shipped.translate(lines, warn=warnings.append)] == list(lines.values())
    assert warnings == []


def test_the_shipped_translator_is_small_and_says_where_it_is_from():
    weights = list(ENGLISH_GERMAN.glob("checkpoints/*/*.safetensors"))
    assert len(weights) == 1
    assert weights[0].stat().st_size <= 6_000_000
    card = (ENGLISH_GERMAN / "README.md").read_text(encoding="utf-8")
    for word in ("tatoeba.org", "manythings.org", "CC BY 2.0", "BLEU"):
        assert word in card


def test_alone_and_in_any_batch(shipped):
    lines = ["I am tired.", "Where did you buy that beautiful red car?", "", "Yes.", "He gave me the book yesterday."]
    for decoding in (DecodingConfig(beam=1), DecodingConfig(beam=4)):
        together = [best[0].text for best in shipped.translate(lines, decoding)]
        for at_once in (1, 2):
            assert [best[0].text for best in shipped.translate(lines, decoding, at_once=at_once)] == together
        assert together[2] == ""


@pytest.mark.parametrize(
    "text",
    [
        "one\r\ntwo\r\n",
        "no end of line",
        "\n\n\n",
        "a\u2028b\x85c\x0bd\n",
        "\ufeffone\n",
        "<s> </s> <pad> <unk> [eos]\n",
        "\u202eright to left\u202c\n",
        "x" * 5000 + "\n",
        "∀∂∈ℝ∧∪≡∞ \U0001f600\n",
        "tab\tin the middle\n",
        b"bad \xff\xfe bytes\nand \x00 NUL\n",
        b"",
    ],
)
def test_B1_as_many_lines_out_as_in(monkeypatch, capsys, run, text):
    data = text.encode() if isinstance(text, str) else text
    expected = data.count(b"\n") + (bool(data) and not data.endswith(b"\n"))
    for flags in ([], ["--scores", "--alignments"]):
        lines, _ = translated(monkeypatch, capsys, data, run, "--beam", "2", "--maximum", "8", *flags)
        assert len(lines) == expected
        for line in lines:
            assert len(line.split("\t")) == 1 + len(flags)


def test_an_empty_input_is_said(monkeypatch, capsys, run, tmp_path):
    assert translated(monkeypatch, capsys, b"", run) == ([], "regard: standard input is empty\n")
    (tmp_path / "empty.txt").write_bytes(b"")
    _, said = translated(monkeypatch, capsys, b"", run, str(tmp_path / "empty.txt"))
    assert said == f"regard: {tmp_path / 'empty.txt'} is empty\n"
    assert translated(monkeypatch, capsys, b"\n", run)[1] == ""


def test_B1_faults_are_said(monkeypatch, capsys, run):
    _, said = translated(monkeypatch, capsys, b"good\nbad \xff\n" + b"long " * 600 + b"\n", run, "--maximum", "4")
    assert "standard input:2: bytes that are not UTF-8" in said
    assert "line 3:" in said
    assert "a sentence of 1800 tokens is translated in" in said


ENTITIES = [
    "Visit https://example.com/help?id=42 today.",
    "My e-mail address is john.doe@mail.example.org, and his is tom@example.org.",
    "The file is in /home/anna/notes.txt or C:\\Users\\a.txt.",
    "@anna loves #berlin ❤️ 👨‍👩‍👧‍👦👍🏽!",
    "😀",
    "https://example.com",
    "<b>Tom</b> is my friend.",
    "Hello {name}, you have %s new messages.",
    "The word Москва means Moscow.",
]
NUMBERS = [
    "It is 3:30 on 2024-05-17 and 17.05.2024.",
    "It costs $1,234.56 or 3.5% of 10,000 in 1990.",
    "You need version 2.10.3 of the A380, 12 times.",
    "1 2 3 4 5 6 7 8 9 10 11 12 apples",
    "1. Buy 2 liters of milk.",
    "12 + 3 = 15",
    "Call +49 30 1234567.",
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> str:
    """A run without placeholders, as runs were before there were any."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    train(
        Task,
        TranslateConfig(
            out=str(folder),
            data=DataConfig(generated=100, held_out=10, vocabulary=300),
            model=TranslatorOptions(width=16, heads=1, inner=16, layers=1),
            training=TrainingConfig(steps=1, tokens=512, tensorboard=False),
        ),
        Display(quiet=True),
    )
    facts = json.loads((folder / "run.json").read_text())
    for name in ("usual_length", "trained_length", "numbers"):
        del facts[name]
    (folder / "run.json").write_text(json.dumps(facts))
    Run(folder).record("run.json")
    return str(folder)


@pytest.mark.parametrize("decoding", [DecodingConfig(beam=2, maximum=5), DecodingConfig(sample=True, maximum=5)])
def test_no_entity_is_lost_whatever_the_model_does(run, plain, decoding):
    """Also not by a model that has learned next to nothing, nor by one without placeholders (but for numbers, which it
    may spell out)."""
    for folder, lines in ((run, ENTITIES + NUMBERS), (plain, ENTITIES)):
        translator = Translator.load(folder)
        warnings: list[str] = []
        found = [best[0].text for best in translator.translate(lines, decoding, warn=warnings.append)]
        for line, text in zip(lines, found, strict=True):
            for entity in translator.entities(line):
                if translator.protects or entity.kind in ("thing", "sign"):
                    assert translator.style.write(entity, line) in text
        assert any("translated in parts around" in said for said in warnings)
        assert [next(translator.translate([line], decoding))[0].text for line in lines[1:3]] == found[1:3]


def test_a_line_is_ready_when_all_of_it_is_translated_and_nothing_is_lost(run, plain):
    """Not all at once, as a beam is done with some before others; never twice, and never another translation."""
    for folder, lines in ((run, ENTITIES + NUMBERS), (plain, ENTITIES)):
        translator, told = Translator.load(folder), {}
        lines = [*lines, "", lines[0], "First this. " * 20]

        def ready(number: int, best: list, told=told) -> None:
            assert number not in told
            told[number] = best

        decoding = DecodingConfig(beam=2, nbest=2, maximum=5)
        found = list(translator.translate(lines, decoding, first=7, ready=ready))
        assert told
        assert {number - 7 for number in told} < set(range(len(lines)))
        assert all(found[number - 7] == best for number, best in told.items())
        lost = [number for number, best in enumerate(found) if number + 7 not in told and lines[number]]
        assert lost, "what lost an entity is translated again"
    translator.dictionary = {}
    assert list(translator.translate(lines, decoding, ready=pytest.fail)) == found, "then all are known at once"


def test_only_the_placeholders_of_a_source_are_written(run):
    """Nearly uniform draws would write others, and some of them twice."""
    translator = Translator.load(run)
    wild = DecodingConfig(sample=True, temperature=100.0, maximum=40)
    offset = translator.target.placeholders.start - translator.source.placeholders.start
    for line in ("a plain sentence", "it costs $5 at 7:45"):
        known = {mark + offset for mark in translator.mark(line).marks}
        source, keep = padded([translator.encode(line)] * 8, translator.device)
        special = {"bos": translator.target.bos, "eos": translator.target.eos, "forbidden": (translator.target.pad,)}
        for (one,) in decode(translator.copying(source), source, keep, wild, **special):
            written = [id for id in one.ids if id in translator.target.placeholders]
            assert set(written) <= known
            assert len(set(written)) == len(written)


def test_what_has_no_words_is_copied(run, plain):
    lines = ["😀 😀", "https://a.org", "<p>😀</p>", "12 + 3 = 15", "- ***", "3:30 – 4:45", "1. 2024-05-17", "→"]
    for folder in (run, plain):
        warnings: list[str] = []
        found = Translator.load(folder).translate(lines, warn=warnings.append)
        assert [best[0].text for best in found] == lines
        assert warnings == []


def test_a_long_address_is_never_cut(run, plain):
    address = "https://example.com/" + "deep/" * 400
    lines = [f"It is in {address}, of course.", address, f"{address} {address}", "1 2 3 " * 2000]
    for folder in (run, plain):
        found = Translator.load(folder).translate(lines, DecodingConfig(beam=1, maximum=4))
        texts = [best[0].text for best in found]
        assert address in texts[0]
        assert texts[1:] == lines[1:]


def test_white_space_and_signs_stand_where_they_stood(run):
    translator = Translator.load(run)
    decoding = DecodingConfig(beam=1, maximum=6)

    def text(line: str) -> str:
        return next(translator.translate([line], decoding))[0].text

    plain = text("It is two o'clock.")
    assert plain == plain.strip() != ""
    assert text("  It is two o'clock. \u00a0") == f"  {plain} \u00a0"
    assert text("<p>😀 It is two o'clock. 😀</p>") == f"<p>😀 {plain} 😀</p>"
    assert text("- It is two o'clock.") == f"- {plain}"
    assert text("a) It is two o'clock. →") == f"a) {plain} →"


def test_long_lines_are_split_into_sentences(run, plain):
    """Each is translated as if it stood alone, and what stood between them still does."""
    decoding = DecodingConfig(beam=2, maximum=8, nbest=2)
    sentences = ["Mr. Smith has it.", "It is two o'clock!", "Is it in the kitchen?", "We paid Dr. Brown for it."]
    for folder in (run, plain):
        translator = Translator.load(folder)
        translator.usual_length = 20
        warnings: list[str] = []
        line = "  ".join(sentences)
        (found,) = translator.translate([line], decoding, warn=warnings.append)
        parts = [next(translator.translate([sentence], decoding))[0].text for sentence in sentences]
        assert found[0].text == "  ".join(parts)
        assert warnings == []
        assert len(found) == 2
        assert found[0].score >= found[1].score
        assert found[0].text != found[1].text
        # one sentence that is too long is cut between clauses, and that is said
        translator.trained_length = 12
        (found,) = translator.translate(["a, b; c d e " * 6 + "."], decoding, first=7, warn=warnings.append)
        assert len(warnings) == 1
        assert warnings[0].startswith("line 7: a sentence of ")
        assert "the run was trained on have at most 12" in warnings[0]


def test_runs_say_how_long_their_sentences_were_and_how_numbers_are_written(run):
    facts = Run.open(run).read_json("run.json")
    assert 2 < facts["usual_length"] <= facts["trained_length"] < 256
    assert facts["numbers"] == {"source": ".", "target": ",", "currency_last": True}
    for name, value in (("usual_length", -1), ("usual_length", "x"), ("numbers", {"a": 1}), ("numbers", 3)):
        assert facts[name] != value


def test_damaged_lengths_are_said(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    facts = Run.open(run).read_json("run.json")
    for name, value in (("usual_length", -1), ("trained_length", "x"), ("numbers", {"a": 1}), ("numbers", 3)):
        (folder / "run.json").write_text(json.dumps(facts | {name: value}), encoding="utf-8")
        Run(folder).record("run.json")
        with pytest.raises(ValueError, match=r"run\.json is damaged: numbers or lengths"):
            Translator.load(folder)


def test_the_page_shows_entities_and_not_placeholders(run):
    from regard.page.engine import Engine
    from regard.page.subjects import open_run

    engine = Engine({"run": lambda: open_run(run, "run")})
    text, steps = "It costs $1,234.56 at 7:45.", []
    hypotheses = engine.translate("run", text, 2, steps.append)["hypotheses"]
    assert {"$1,234.56", "7:45"} <= set(steps[0]["source"])
    names = {name["token"] for step in steps[1:] for name in step["beams"]}
    assert not any("⟨" in name for name in names)
    assert not any("⟨" in one["text"] for one in hypotheses)
    for place in ("cross", "encoder", "decoder", "aligner"):
        reading = engine.reading("run", place, text, "Es kostet um 7:45 Uhr 1.234,56 $.")
        assert "7:45" in reading.queries
        assert ("1.234,56▁$" in reading.queries) == (place != "encoder")
        assert ("$1,234.56" in reading.keys) == (place != "decoder")
        assert len(reading.queries) == reading.layers[0].T


def test_words_are_aligned_over_placeholders(run):
    translator = Translator.load(run)
    pair = ("It costs $1,234.56 at 7:45.", "Es kostet um 7:45 Uhr 1.234,56 $.")
    (found,) = alignment.align(translator.model, translator.source, translator.target, [pair])
    assert found.matrix.shape == (7, 5)
    assert (found.source, found.target) == (pair[0].split(), pair[1].split())
    assert (found.matrix.sum(1) > 0).all()


def test_files_in_and_out(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("It is two o'clock.\n\nYes.\n", encoding="utf-8")
    Path("b.txt").write_text("😀\n", encoding="utf-8")
    flags = ["--beam", "1", "--maximum", "6"]
    expected, _ = translated(monkeypatch, capsys, Path("a.txt").read_bytes(), run, *flags)
    assert cli.main(["translate", run, "a.txt", "-o", "out.txt", *flags]) == 0
    assert Path("out.txt").read_text(encoding="utf-8").split("\n")[:-1] == expected
    assert capsys.readouterr().out == ""
    assert cli.main(["translate", run, "b.txt", "a.txt", "--out", "out.txt.gz", *flags]) == 0
    assert gzip.decompress(Path("out.txt.gz").read_bytes()).decode().split("\n")[:-1] == ["😀", *expected]
    assert cli.main(["translate", run, "b.txt", "a.txt", "--nbest", "1", *flags]) == 0
    assert [line.split("\t")[0] for line in capsys.readouterr().out.split("\n")[:-1]] == ["1", "2", "3", "4"]
    assert cli.main(["translate", run, "--input", "a.txt", "-o", "-", *flags]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == expected
    # without a run it is the bundled model
    assert cli.main(["translate", "b.txt", "-o", "signs.txt"]) == 0
    assert Path("signs.txt").read_text(encoding="utf-8") == "😀\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt", "out.txt", "out.txt.gz", "signs.txt"]


def test_what_fails_leaves_the_file_as_it_was(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("It is two o'clock.\n" * 2, encoding="utf-8")
    Path("out.txt").write_text("before", encoding="utf-8")
    Path("folder").mkdir()

    def fail(*arguments, **options):
        yield [Translator.load(run).translate(["a"])]
        raise OSError("the disk is gone")

    for arguments, words in (
        (["a.txt", "-o", "a.txt"], "--out a.txt is the text to translate"),
        (["a.txt", "-o", "folder"], "--out folder is a folder"),
        (["a.txt", "-o", "no/such/file"], "--out no/such/file cannot be written: no such file or directory"),
        (["a.txt", "--input", "a.txt"], "give the text once"),
        (["-", "-"], "standard input (-) can be read once only"),
        (["missing.txt", "-o", "out.txt"], "missing.txt: no such file"),
        (["a.txt", "missing.txt", "-o", "out.txt"], "missing.txt: no such file"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(["translate", run, *arguments, "--beam", "1", "--maximum", "3"])
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
    monkeypatch.setattr(Translator, "translate", fail)
    with pytest.raises(SystemExit):
        cli.main(["translate", run, "a.txt", "-o", "out.txt"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "folder", "out.txt"]
    assert Path("out.txt").read_text(encoding="utf-8") == "before"


def test_runs_of_the_first_version_still_translate(run, tmp_path):
    """Their blocks had an activation and the two products in themselves, and the aligner was another."""
    old = tmp_path / "old"
    shutil.copytree(run, old)
    facts = json.loads((old / "run.json").read_text())
    del facts["model"]["feedforward"], facts["model"]["decoder_feedforward"], facts["tokenizers"]
    facts["model"] |= {"activation": "relu", "aligner": "softmax"}
    del facts["manifest"]
    (old / "run.json").write_text(json.dumps(facts))
    (old / "manifest.json").unlink()
    found = Run.open(run).find("best")
    tensors = {name.replace(".feedforward.", "."): part for name, part in found.tensors["model"].items()}
    shutil.rmtree(old / "checkpoints")
    checkpoint.write(old / "checkpoints", "average", {"model": tensors}, {"step": found.state["step"]})
    lines = ["It is two o'clock.", "The book costs nine dollars."]
    ours, theirs = (
        [best[0].text for best in Translator.load(folder, which=which).translate(lines)]
        for folder, which in ((run, "best"), (old, None))
    )
    assert ours == theirs
    wishes = (old / "config.yaml").read_text()
    (old / "config.yaml").write_text(wishes.replace("model:\n", "model:\n  activation: gelu\n", 1))
    with pytest.raises(ValueError, match=r"cannot be resumed; .* \"dense\(activation='gelu'\)\"$"):
        resume(old, Display(quiet=True))


def test_columns_are_of_a_table():
    with pytest.raises(ValueError, match=r"data\.columns needs a TSV file"):
        DataConfig(source="a.en", target="a.de", columns=(2, 0))
    DataConfig(source="a.tsv", columns=(2, 0))
    DataConfig(source="a.en", target="a.de", valid_source="v.tsv", columns=(2, 0))


def test_columns(monkeypatch, capsys, run):
    source = "It is two o'clock.\n\nThe book costs nine dollars.\n"
    lines, _ = translated(monkeypatch, capsys, source, run, "--nbest", "2", "--scores", "--alignments", "--beam", "3")
    cells = [line.split("\t") for line in lines]
    assert [cell[0] for cell in cells] == ["1", "1", "2", "3", "3"]
    assert all(len(cell) == 4 for cell in cells)
    assert float(cells[0][2]) >= float(cells[1][2])
    words = len(cells[0][1].split())
    links = [tuple(map(int, link.split("-"))) for link in cells[0][3].split()]
    assert len(links) <= words
    assert all(source < 4 and target < words for source, target in links)
    plain, _ = translated(monkeypatch, capsys, source, run, "--beam", "3")
    assert plain == [cells[0][1], "", cells[3][1]]


def test_samples(monkeypatch, capsys, run):
    draw = ["--sample", "--temperature", "2", "--maximum", "12"]
    first, _ = translated(monkeypatch, capsys, "It is two o'clock.\n" * 2, run, *draw, "--seed", "1")
    again, _ = translated(monkeypatch, capsys, "It is two o'clock.\n" * 2, run, *draw, "--seed", "1")
    other, _ = translated(monkeypatch, capsys, "It is two o'clock.\n" * 2, run, *draw, "--seed", "2")
    assert first == again != other


def test_evaluate(capsys, run, tmp_path):
    assert cli.main(["evaluate", run, "--beam", "1"]) == 0
    said = capsys.readouterr().out
    for word in ("20 pairs", "BLEU|nrefs:1", "chrF2|nrefs:1", "exact match", "perplexity"):
        assert word in said
    test = pairs(30, seed=5)
    (tmp_path / "a.en").write_text("".join(source + "\n" for source, _ in test), encoding="utf-8")
    (tmp_path / "a.de").write_text("".join(target + "\n" for _, target in test), encoding="utf-8")
    out = tmp_path / "out.de"
    files = ["--source", str(tmp_path / "a.en"), "--target", str(tmp_path / "a.de"), "--out", str(out)]
    assert cli.main(["evaluate", run, *files, "--json", "--checkpoint", "last"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pairs"] == 30
    hypotheses = out.read_text(encoding="utf-8").split("\n")[:-1]
    assert len(hypotheses) == 30
    # what fails leaves no file, and one that was there as it was
    for path, left in ((tmp_path / "none.de", False), (out, True)):
        with pytest.raises(SystemExit):
            cli.main(["evaluate", run, *files[:4], "--out", str(path), "--beam", "0"])
        assert path.exists() == left
    assert out.read_text(encoding="utf-8").split("\n")[:-1] == hypotheses
    capsys.readouterr()
    table = tmp_path / "a.tsv"
    table.write_text("".join(f"{target}\t7\t{source}\n" for source, target in test), encoding="utf-8")
    columns = ["--source", str(table), "--columns", "2,0"]
    assert cli.main(["evaluate", run, *columns, "--json", "--checkpoint", "last"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert cli.main(["align", run, *columns]) == 0
    links = capsys.readouterr().out
    assert cli.main(["align", run, *files[:4]]) == 0
    assert capsys.readouterr().out == links
    with pytest.raises(SystemExit):
        cli.main(["align", run, *columns[:3], "text,label"])
    assert "two numbers from 0" in capsys.readouterr().err
    from sacrebleu.metrics import BLEU

    assert_close(found["bleu"]["value"], BLEU().corpus_score(hypotheses, [[target for _, target in test]]).score)
    translator = Translator.load(run, which="last")
    total, count = 0.0, 0
    for pair in test:
        source, target = placeholders.mark_pair(translator.source, translator.target, pair)
        ours, theirs = (placeholders.encode(translator.source, [side])[0] for side in (source, target))
        ids = [torch.tensor([side]) for side in ([*ours, 3], [2, *theirs])]
        logs = torch.log_softmax(translator.model(*ids).logits[0], -1)
        wanted = torch.tensor([*ids[1][0, 1:].tolist(), 3])
        total -= float(logs.gather(1, wanted[:, None]).sum())
        count += len(wanted)
    assert_close(found["loss"], total / count, rtol=1e-4, atol=1e-5)


def test_align(capsys, run, tmp_path):
    assert cli.main(["align", run, "--picture", str(tmp_path / "a.png"), "--sentence", "2"]) == 0
    lines = capsys.readouterr().out.split("\n")[:-1]
    assert len(lines) == 20
    assert (tmp_path / "a.png").stat().st_size > 5000
    (tmp_path / "a.tsv").write_text("It is two o'clock.\tEs ist zwei Uhr.\n", encoding="utf-8")
    (tmp_path / "gold").write_text("1-1 2-2 3p3 4-4\n")
    flags = ["--source", str(tmp_path / "a.tsv"), "--gold", str(tmp_path / "gold")]
    assert cli.main(["align", run, *flags]) == 0
    assert "AER" in capsys.readouterr().err
    for more in (["--reverse", run], ["--layer", "0"], ["--layer", "average", "--head", "1", "--read", "predict"]):
        assert cli.main(["align", run, *flags[:2], *more]) == 0
        assert len(capsys.readouterr().out.split("\n")) == 2


def test_compact(run, tmp_path, capsys):
    assert cli.main(["compact", run, "--out", str(tmp_path / "small")]) == 0
    whole, small = Translator.load(run), Translator.load(tmp_path / "small")
    tensors = {name: part.detach() for name, part in whole.model.named_parameters()}
    for name, part in small.model.named_parameters():
        bound = tensors[name].abs().amax(-1, keepdim=True) / 127 * 0.51 if part.dim() == 2 else 0
        assert ((part - tensors[name]).abs() <= bound).all(), name
    with pytest.raises(ValueError, match="holds a run already"):
        compact_run(run, tmp_path / "small")


def test_a_compact_run_stays_what_it_is(run, tmp_path):
    first, second = tmp_path / "one", tmp_path / "two"
    compact_run(run, first)
    compact_run(first, second)
    ours, theirs = (Translator.load(folder).model.state_dict() for folder in (first, second))
    assert_close(ours, theirs, rtol=0, atol=0)
    with pytest.raises(ValueError, match="compact and imported runs are for inference"):
        resume(first, Display(quiet=True))


def test_output_keeps_its_characters(shipped):
    for text in (
        "oui\u00a0!",
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
        "co\u00adop",
        "\U0001f469\u200d\U0001f680",
    ):
        assert shipped.text(shipped.target.encode(text), Marked("")) == text
    assert shipped.text(shipped.target.encode("a\tb\nc\u2028d"), Marked("")) == "a b c d"


def test_damage_is_said(run, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    last = sorted((folder / "checkpoints").glob("step-*"))[-1]
    data = bytearray((last / "model.safetensors").read_bytes())
    data[-3] ^= 16
    (last / "model.safetensors").write_bytes(data)
    _, said = translated(monkeypatch, capsys, "Yes.\n", str(folder), "--checkpoint", "last", "--maximum", "3")
    assert f"{last.name} is damaged" in said
    for name, content, words in (
        ("run.json", "{}", "not of 'translate'"),
        ("run.json", '{"task": "translate"}', "is damaged"),
        ("source.json", (ENGLISH_GERMAN / "source.json").read_text(encoding="utf-8"), "not the tokenizer of this run"),
        ("config.yaml", "a: [", "not readable YAML"),
        ("config.yaml", "", "expected the fields"),
    ):
        before = (folder / name).read_text(encoding="utf-8")
        (folder / name).write_text(content, encoding="utf-8")
        Run(folder).record(name)
        verb = ["resume", str(folder)] if name == "config.yaml" else ["translate", str(folder)]
        feed(monkeypatch, "Yes.\n")
        with pytest.raises(SystemExit) as ended:
            cli.main(verb)
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
        (folder / name).write_text(before, encoding="utf-8")
        Run(folder).record(name)


def test_links_of_both_directions_come_from_the_aligners(run, tmp_path, capsys):
    pairs = [("It is two o'clock.", "Es ist zwei Uhr."), ("Yes, today.", "Ja, heute.")]
    (tmp_path / "a.tsv").write_text("".join(f"{one}\t{two}\n" for one, two in pairs), encoding="utf-8")
    assert cli.main(["align", run, "--reverse", run, "--source", str(tmp_path / "a.tsv")]) == 0
    lines = capsys.readouterr().out.split("\n")[:-1]
    translator = Translator.load(run)
    both = translator.model, translator.source, translator.target
    there = alignment.read_maps(*both, pairs, layer="aligner")
    back = alignment.read_maps(*both, [(two, one) for one, two in pairs], layer="aligner")
    assert lines == [str(part) for part in alignment.align_both(there, back)]
    flags = ["--symmetrise", "agreement", "--source", str(tmp_path / "a.tsv")]
    assert cli.main(["align", run, "--reverse", run, *flags]) == 0
    agreed = [str(part) for part in alignment.align_both(there, back, method="agreement")]
    assert capsys.readouterr().out.split("\n")[:-1] == agreed != lines


def test_links_of_both_directions_where_only_one_has_an_aligner(run, tmp_path, capsys, monkeypatch):
    """They come from the layers that translate, in both."""
    other = tmp_path / "other"
    shutil.copytree(run, other)
    facts = json.loads((other / "run.json").read_text(encoding="utf-8"))
    facts["model"]["aligner"] = False
    (other / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    Run(other).record("run.json")
    (tmp_path / "a.tsv").write_text("It is two o'clock.\tEs ist zwei Uhr.\n", encoding="utf-8")
    found = {}
    for pair in ((run, str(other)), (str(other), run), (str(other), str(other))):
        assert cli.main(["align", pair[0], "--reverse", pair[1], "--source", str(tmp_path / "a.tsv")]) == 0
        found[pair] = capsys.readouterr()
        assert "the layers that agree best" in found[pair].err
    assert len(set(found.values())) == 1
    # and of those layers that are chosen
    asked = set()
    for chosen in ((0, 0), (1, 0)):
        monkeypatch.setattr(alignment, "align_both", lambda *maps, layers, method: asked.add(layers) or [])
        agreement = alignment.Agreement(*chosen, np.zeros((2, 2)))
        monkeypatch.setattr(alignment, "choose_layers", lambda *maps, agreement=agreement: agreement)
        assert cli.main(["align", run, "--reverse", str(other), "--source", str(tmp_path / "a.tsv")]) == 0
    assert asked == {(0, 0), (1, 0)}


def test_text_in_units(tmp_path, capsys, monkeypatch):
    """BLEU of units is of their words as they are: joined, and not split again."""
    monkeypatch.chdir(tmp_path)
    lines = [f"{one} a@@ b ,\tx@@ y {two} don't\n" for one in "cdefg" for two in "uvwst"]
    Path("a.tsv").write_text("".join(lines), encoding="utf-8")
    flags = ["--data.source", "a.tsv", "--data.tokenizer", "units", "--data.held_out", "2", "--training.steps", "1"]
    flags += ["--model.width", "16", "--model.layers", "1", "--model.heads", "1", "--out", "r"]
    assert cli.main(["train", "translate", *flags, "--training.tensorboard", "false"]) == 0
    capsys.readouterr()
    translator = Translator.load("r")
    score = translator.scores(["xy u don't"] * 2, ["x@@ y u don't"] * 2)["bleu"]
    assert "tok:none" in score.signature
    assert translator.scores(["xy u don't so"], ["x@@ y u don't so"])["bleu"].value == pytest.approx(100)


def test_compact_numbers():
    big, zero = torch.randn(100, 80), torch.zeros(100, 80)
    tied = {"a": big, "b": big, "c": zero, "d": torch.randn(7)}
    found = compact(tied)
    assert found["a"].dtype == torch.int8
    assert found["a"] is found["b"]
    back = expand(found)
    assert back.keys() == tied.keys()
    assert_close(back["c"], zero)
    assert_close(back["d"], tied["d"], rtol=0, atol=0)
    assert (back["a"] - big).abs().max() <= big.abs().amax(1).max() / 127 / 2 + 1e-6
    assert expand(tied)["a"] is big
    tall = compact({"tall": torch.randn(5000, 8)})
    assert_close(compact(tall), tall, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["translate", "nowhere"], "there is no run folder"),
        (["translate", "RUN", "--checkpoint", "7"], "no checkpoint of step 7"),
        (["translate", "RUN", "--checkpoint", "worst"], "best, last, average or a step"),
        (["translate", "RUN", "--beam", "0"], "beam"),
        (["translate", "RUN", "--input", "missing.txt"], "missing.txt"),
        (["translate", "RUN", "--device", "toaster"], "toaster"),
        (["evaluate", "FOLDER"], "is not a run"),
        (["evaluate", "RUN", "--source", "missing.en"], "missing.en"),
        (["align", "RUN", "--picture", "a.png", "--sentence", "21"], "from 1 to 20"),
        (["align", "RUN", "--picture", "a.bmp"], ".png, .svg, .pdf"),
        (["align", "RUN", "--gold", "missing.gold"], "missing.gold"),
        (["align", "RUN", "--gold", "one.gold"], "gold alignments of 1 sentences, expected 20"),
        (["evaluate", "RUN", "--out", "missing/out.de"], "missing/out.de"),
        (["translate", "RUN", "--top-k", "3"], "give --sample too"),
        (["translate", "RUN", "--temperature", "0.5"], "give --sample too"),
        (["translate", "RUN", "--bem", "3"], "regard translate: unrecognized arguments: --bem 3; see regard translate"),
        (
            ["train", "translate", "--training.learning_rate", "fast"],
            "learning_rate must be a number or null, got 'fast'",
        ),
        (["train", "translate", "--training.schedule", "fast"], "'paper' or 'inverse_root' or 'cosine' or 'constant'"),
        (["train", "translate", "--data.shared", "maybe"], "data.shared must be true or false, got 'maybe'"),
        (["train", "translate", "--config", "one.gold"], "not a YAML file of keys"),
        (["train", "translate", "--config", "bytes"], "bytes:1: not UTF-8"),
        (["align", "RUN", "--head", "7", "--layer", "0"], "head"),
        (["align", "RUN", "--layer", "top"], "top"),
        (["average", "FOLDER"], "is not a run"),
        (["average", "RUN", "--last", "0"], "must be at least 1, got 0"),
        (["evaluate", "RUN", "--target", "a.de"], "--target needs --source"),
        (["align", "RUN", "--symmetrise", "union"], "--symmetrise needs --reverse"),
        (["align", "RUN", "--layer", "aligner", "--head", "1"], "head"),
        (["translate", "RUN", "--checkpoint", "²"], "best, last, average or a step"),
        (["train", "translate", "--data.generated", "100", "--out", ""], "out must name a folder"),
        (["resume", "FOLDER"], "is not a run"),
        (["train", "sing"], "no task 'sing'"),
        (["train", "translate"], "data.source"),
        (["train", "translate", "--data.source", "missing.tsv"], "missing.tsv"),
        (["train", "translate", "--data.generated", "100", "--model.attention", "sofmax"], "softmax"),
        (["train", "translate", "--data.generated", "100", "--out", "RUN"], "or choose another --out"),
    ],
)
def test_mistakes_end_in_one_line(arguments, words, run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    feed(monkeypatch, "one\n")
    Path("one.gold").write_text("1-1\n")
    Path("bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(SystemExit) as ended:
        cli.main([{"RUN": run, "FOLDER": str(tmp_path)}.get(part, part) for part in arguments])
    assert ended.value.code == 2
    out, said = capsys.readouterr()
    assert words in said
    assert not out  # what is wrong is said before the work
    assert "Traceback" not in said


def test_B1_bad_training_text_names_file_and_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [f"{source}\t{target}".encode() for source, target in pairs(40, seed=1)]
    lines[7] = b"bad \xff\tline"
    Path("a.tsv").write_bytes(b"\n".join(lines) + b"\n")
    flags = ["train", "translate", "--data.source", "a.tsv", "--data.vocabulary", "300", "--training.steps", "1"]
    flags += ["--model.width", "16", "--model.layers", "1", "--model.heads", "1", "--out", "r"]
    with pytest.raises(SystemExit):
        cli.main(flags)
    assert "a.tsv:8: not UTF-8" in capsys.readouterr().err
    assert not Path("r").exists()
    assert cli.main([*flags, "--data.skip_bad", "true", "--training.tensorboard", "false"]) == 0
    assert "omitted 1 lines: not UTF-8, first at a.tsv:8" in capsys.readouterr().err
    facts = json.loads(Path("r/run.json").read_text())["data"]
    assert facts["pairs"] + facts["valid"] == 39


def test_train_resume_average_by_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--data.generated", "100", "--data.vocabulary", "300", "--training.steps", "3", "--model.width", "16"]
    flags += [
        "--model.layers",
        "1",
        "--model.heads",
        "1",
        "--training.evaluate_every",
        "2",
        "--training.log_every",
        "1",
    ]
    assert cli.main(["train", "translate", *flags, "--out", "r", "--training.tensorboard", "false"]) == 0
    said = capsys.readouterr().err
    for word in ("step      1", "tokens/s", "MiB", "left", "validation", "regard translate r"):
        assert word in said
    assert cli.main(["resume", "r", "--steps", "5"]) == 0
    assert "resuming from step 3" in capsys.readouterr().err
    assert cli.main(["average", "r", "--last", "2"]) == 0
    said = capsys.readouterr()
    assert "averaged 2 checkpoints" in said.out
    assert not said.err
    assert cli.main(["average", "r", "--last", "20"]) == 0
    assert re.search(r"r has only \d checkpoints instead of 20: --training.save_every", capsys.readouterr().err)
    assert cli.main(["train", "translate", "--config", "r/config.yaml", "--out", "again"]) == 0


@pytest.mark.parametrize(
    "flags",
    [
        ["--model.attention", "performer"],
        [
            "--model.attention",
            '["local(window=4)", softmax]',
            "--model.cross_attention",
            "additive",
            "--model.layers",
            "2",
        ],
        ["--model.preset", "lstm", "--model.attention", "additive"],
        ["--model.preset", "gru", "--model.bottleneck", "true"],
        ["--data.shared", "false", "--model.norm", "pre", "--model.position", "rotary"],
    ],
)
def test_one_word_swaps_the_attention(flags, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["--model.width", "16", "--model.layers", "1"]
    small += ["--model.hidden", "16"] if "--model.preset" in flags else ["--model.heads", "2", "--model.inner", "16"]
    common = ["--data.generated", "60", "--data.vocabulary", "300", "--training.steps", "1", "--out", "r"]
    assert cli.main(["train", "translate", *common, *small, *flags, "--training.tensorboard", "false"]) == 0
    capsys.readouterr()
    lines, _ = translated(monkeypatch, capsys, "It is two o'clock.\nYes.\n", "r", "--maximum", "5")
    assert len(lines) == 2


def test_demo(tmp_path, capsys, monkeypatch):
    """The demo as it is, but for fewer steps on fewer pairs."""
    original, open_ended = demo.small_translator, {"epochs": None, "minutes": None, "warmup": 100}

    def brief(folder):
        config = original(folder)
        # it ends in minutes on any machine
        assert (config.training.steps, config.training.minutes) == (None, 10)
        data = dataclasses.replace(config.data, generated=200, held_out=10, vocabulary=300)
        return dataclasses.replace(
            config, data=data, training=dataclasses.replace(config.training, steps=3, **open_ended)
        )

    monkeypatch.setattr(demo, "small_translator", brief)
    for _ in range(2):  # the second time over what the first left
        assert cli.main(["demo", "--part", "translate", "--out", str(tmp_path)]) == 0
        said = capsys.readouterr()
        assert "exact match" in said.out
        assert "BLEU" in said.out
        assert "Wo ist der Bahnhof?" in said.out
        assert "step" in said.err
    assert (tmp_path / "alignment.png").stat().st_size > 5000


def test_a_demo_that_learned_nothing_goes_on(tmp_path, capsys):
    """On a slow machine the translator may have had so few steps that it writes nothing."""
    from regard.cli import demo as verbs
    from regard.cli.console import open_console

    verbs._draw_alignment(open_console(100), tmp_path, lambda source: "", "five o'clock")
    assert "No word alignment is drawn" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_help_prints_examples(capsys):
    for verb in ("resume", "translate", "evaluate", "align", "average", "compact"):
        with pytest.raises(SystemExit) as ended:
            cli.main([verb, "--help"])
        assert ended.value.code == 0
        assert f"regard {verb}" in capsys.readouterr().out.split("examples:")[1]
    assert cli.main(["train"]) == 0
    assert "regard train translate --data" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "translate", "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for word in ("examples:", "--model.attention", "--training.label_smoothing", "--data.skip_bad", "--print_config"):
        assert word in said
