"""Files and flags made to break things: each ends in words, soon, and without much memory."""

import os
import re
import subprocess
import sys

import pytest
from verbs import refused, told

import regard
from regard import cli, files
from regard.spec import ATTENTION, FEEDFORWARD, POSITIONS, REGISTRIES

BOMB = "".join(f"{name}: &{name} [{', '.join([f'*{chr(ord(name) - 1)}'] * 9)}]\n" for name in "bcdefghijk")
CONFIGS = {
    "deep": (b"[" * 200_000, "nests more than 64"),
    "deep map": (b"{a: " * 200_000, "nests more than 64"),
    "deep blocks": (b"".join(b" " * n + b"a:\n" for n in range(3000)), "nests more than 64"),
    "alias bomb": (b"a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + BOMB.encode(), "more than 1,000,000 values"),
    "alias of itself": (b"&a [*a]", "config"),
    "cp1252": ("training:\n  metric: é\n".encode("cp1252"), "cp.yaml:2: not UTF-8: byte 0xe9"),
    "utf-16": ("training:\n  steps: 3\n".encode("utf-16"), "UTF-16"),
    "a long number": (b"training: {steps: " + b"9" * 5000 + b"}", "digits"),
    "a list": (b"- 1\n", "not a YAML file of keys and values"),
    "a tag": (b"out: !!python/object/apply:os.system [true]\n", "not readable YAML"),
}


@pytest.mark.parametrize(("data", "words"), CONFIGS.values(), ids=CONFIGS)
def test_configs(capsys, tmp_path, data, words):
    (tmp_path / "cp.yaml").write_bytes(data)
    said = refused(capsys, "train", "translate", "--config", str(tmp_path / "cp.yaml"))
    assert words in said
    assert len(said) < 3000
    if "YAML" in said or "UTF" in said:
        assert "cp.yaml" in said or "keys and values" in said


def test_deep_values_of_flags(capsys):
    said = refused(capsys, "train", "translate", "--data.generated", "30", "--model.attention", "[" * 100_000)
    assert "at most 10,000 characters" in said
    assert len(said) < 3000
    assert len(refused(capsys, "train", "translate", "--data.columns", "[" * 50_000)) < 3000


def test_too_many_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b" " * 101)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        files.read_bytes(tmp_path / "a", 100)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
@pytest.mark.parametrize("flag", ["--config", "--data", "--training"])
def test_pipes_as_config(capsys, tmp_path, flag):
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe or a device" in refused(capsys, "train", "translate", flag, str(tmp_path / "pipe"))
    assert "is a pipe or a device" in refused(capsys, "train", "translate", f"{flag}={tmp_path / 'pipe'}")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_pipes_as_gold(tmp_path):
    from regard.metrics.alignment import read_gold

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a pipe or a device, expected a file of links"):
        read_gold(tmp_path / "pipe")


SPECS = {
    "local(window={[]: 1})": "must be a plain value",
    "local(window={{}})": "must be a plain value",
    "local(window={1: {2: []}})": "must be a whole number",
    f"local(window={'-' * 2000}1)": "window",
    "x" * 20_000: "at most 10,000 characters",
    "local(window=99999999999999)": "must be at most 2,147,483,647, got 99,999,999,999,999",
    f"local(window={'9' * 5000})": "cannot read",
    "performer(epsilon=1e999)": "finite",
    "local(window=b'a')": "whole number",
    "local(window=1j)": "whole number",
    "local(window=...)": "whole number",
    "lambda: 0": "cannot read",
    "local(window:=3)": "cannot read",
    "loc\0al": "cannot read",
    "softmax\ud800": "cannot read",
}


@pytest.mark.parametrize(("spec", "words"), SPECS.items(), ids=[spec[:24].encode("ascii", "replace") for spec in SPECS])
def test_specs_end_in_words(spec, words):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        regard.attention(spec, width=64, heads=64)
    assert len(str(error.value)) < 3000


def test_deep_specs_that_mean_something():
    assert regard.attention(f"local(window={'(' * 150}1{')' * 150})", width=8, heads=2).window == 1
    assert regard.attention(f"{'heads(' * 60}softmax{')' * 60}", width=8, heads=2).facts.name == "heads"


# names that people use


def test_aliases_mean_names_of_ours():
    for registry in REGISTRIES.values():
        for name in registry.names():
            for alias in registry.aliases(name):
                assert alias not in registry.names()
                assert registry.find(alias) is registry.find(name)
    assert ATTENTION.canonical("heads(swa(window=3), MHA)") == regard.spec.parse("heads(local(window=3), softmax)")
    assert str(FEEDFORWARD.canonical("swiglu(bias=False)")) == "dense(activation='silu', gated=True, bias=False)"
    assert POSITIONS.canonical("RoPE(base=500.0)").name == "rotary"
    layer = regard.attention("sliding_window(window=3)", width=8, heads=2, role="causal", position="rope")
    assert (layer.facts.name, layer.window, layer.position.facts.name) == ("local", 3, "rotary")


def test_saved_specs_have_one_name_for_one_thing(tmp_path):
    config = regard.ModelConfig(attention=["swa(window=3)", "flash"], position="rope", feedforward="swiglu")
    assert config.attention == ["local(window=3)", "softmax"]
    assert (config.position, config.feedforward) == ("rotary", "dense(activation='silu', gated=True)")
    # what needs no change stays as it is written
    assert regard.ModelConfig(attention="local( window=3 )").attention == "local( window=3 )"
    from regard.config import TranslateConfig, from_json

    given = from_json(TranslateConfig, {"model": {"attention": "[swa(window=3), mha]", "cross_attention": "mha"}})
    assert given.model.attention == ["local(window=3)", "softmax"]
    assert given.model.cross_attention == "softmax"


def test_names_that_are_settings():
    with pytest.raises(ValueError, match="softmax with kv_heads=1"):
        regard.attention("mqa", width=8, heads=2)
    with pytest.raises(ValueError, match="did you mean 'sliding_window'"):
        regard.attention("slidin_window", width=8, heads=2)


def test_aliases_are_told(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert "rope" in told(monkeypatch, capsys, "list", "--aliases")[0]
    said = told(monkeypatch, capsys, "explain", "swa")[0]
    assert said.startswith("local ")
    assert "sliding_window" in said
    assert "softmax --position rotary" in refused(capsys, "draw", "rope")
    assert "kv_heads" in refused(capsys, "explain", "gqa")


# the last resort


def fail(error):
    def verb(*_):
        raise error

    return verb


def test_the_last_resort(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "parse", fail(KeyError("step")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "softmax").touch()
    assert cli.main(["explain", "softmax"]) == 70
    said = capsys.readouterr()
    assert said.out == ""
    first, second, third = said.err.splitlines()
    assert re.match(r"regard explain: .* at regard/cli\.py:\d+: KeyError: 'step'", first)
    assert second == "The files it was given: softmax"
    assert "report" in third
    assert "--debug" in third
    assert "Traceback" not in said.err
    assert cli.main(["explain", "softmax", "--debug"]) == 70
    assert "Traceback" in capsys.readouterr().err


class Panic(BaseException):
    """As libraries in Rust raise."""


def test_panics_memory_and_signals(capsys, monkeypatch):
    monkeypatch.setattr(cli, "parse", fail(Panic("capacity overflow")))
    assert cli.main(["explain", "softmax"]) == 70
    assert "capacity overflow" in capsys.readouterr().err
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 4 bytes.")):
        monkeypatch.setattr(cli, "parse", fail(error))
        assert cli.main(["explain", "softmax"]) == 1
        assert "not enough memory" in capsys.readouterr().err
    monkeypatch.setattr(cli, "parse", fail(KeyboardInterrupt()))
    assert cli.main(["explain", "softmax"]) == 130


def test_debug_shows_where_an_error_of_input_comes_from(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--debug", "explain", "sofmax"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.splitlines()[-1].startswith("regard explain: nothing is called")


# text


def test_other_encodings_name_flag_and_encoding(capsys, tmp_path):
    (tmp_path / "a.tsv").write_bytes("coffee\tKaffee\nmilk\tKaffee für zwei\n".encode("cp1252"))
    said = refused(capsys, "train", "translate", "--data.source", str(tmp_path / "a.tsv"))
    assert f"--data.source {tmp_path / 'a.tsv'}:2: not UTF-8: byte 0xfc" in said
    assert "'ü' in Windows-1252 (cp1252)" in said
    assert "iconv -f CP1252" in said
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "b.txt").write_bytes("a\n".encode("utf-16"))
    assert "UTF-16" in refused(capsys, "train", "language", f"--data.text={tmp_path / 'texts'}")


def test_arguments_in_other_encodings():
    code = "import sys; from regard.cli import main; sys.exit(main())"
    words = [
        sys.executable,
        "-c",
        code,
        "demo",
        "--part",
        "mechanisms",
        "--out",
        os.devnull,
        "--sentence",
        b"caf\xe9 noir",
    ]
    ended = subprocess.run(words, capture_output=True, check=False, env=os.environ | {"PYTHONUTF8": "1"})
    assert ended.returncode == 2
    assert b"Traceback" not in ended.stderr


def test_a_forgotten_target(capsys, tmp_path):
    (tmp_path / "a.en").write_text("one\ntwo\n")
    said = refused(capsys, "train", "translate", "--data.source", str(tmp_path / "a.en"))
    assert "--data.target" in said
    assert "column" not in said
