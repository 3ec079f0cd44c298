"""Files and flags made to break things: each ends in words, soon, and without much memory."""

import gzip
import json
import lzma
import os
import re
import shutil

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from verbs import refused, told

import regard
from regard import cli
from regard.cli import mechanisms
from regard.core import files, limits
from regard.data import text
from regard.decoding import DecodingConfig
from regard.interop import families, huggingface
from regard.interop.runs import export_run, import_model
from regard.spec import ATTENTION, FEEDFORWARD, POSITIONS, REGISTRIES
from regard.tasks.language import fewshot
from regard.tasks.load import compact_run
from regard.tasks.translate import ENGLISH_GERMAN

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
    "a key twice": (
        b"model: {width: 16}\nmodel: {width: 32}\n",
        "cp.yaml is not readable YAML: it has the key 'model' twice",
    ),
    "a key twice, within": (b"model: {width: 16, heads: 2, width: 32}\n", "it has the key 'width' twice"),
    "a number of 5,000 digits": (b"training: {seed: " + b"9" * 5000 + b"}\n", "cp.yaml is not readable YAML"),
    "a date that is none": (b"training: {steps: 2020-13-01}\n", "cp.yaml is not readable YAML"),
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


def test_bombs_in_other_files(tmp_path):
    path = tmp_path / "task.yaml"
    path.write_text("a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + BOMB)
    with pytest.raises(ValueError, match=r"task\.yaml is not readable YAML: it stands for more than 1,000,000 values"):
        fewshot.load(path)
    path.write_text("queries: rows.jsonl\nchoices: [a, b]\nprompt: '{text}'\nanswer: '{label}'\n")
    (tmp_path / "rows.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl:1 is not readable JSON: it nests too deep"):
        fewshot.load(path)


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
    # what people type first
    used = {
        "sliding_window": "local",
        "swa": "local",
        "mha": "softmax",
        "flash": "softmax",
        "linear_attention": "linear",
    }
    assert {alias: str(ATTENTION.canonical(alias)) for alias in used} == used
    assert str(POSITIONS.canonical("rope")) == "rotary"
    assert ATTENTION.canonical("heads(swa(window=3), MHA)") == regard.spec.parse("heads(local(window=3), softmax)")
    assert str(FEEDFORWARD.canonical("swiglu(bias=False)")) == "dense(activation='silu', gated=True, bias=False)"


def test_values_of_earlier_versions_mean_those_of_today():
    """Saved runs hold specs with the spelling 'learnt'."""
    old = "heads(compressed(factor=2, first='learnt'), entmax(alpha='learnt'))"
    assert str(ATTENTION.canonical(old)) == old.replace("learnt", "learned")
    assert regard.attention("entmax(alpha='learnt')", width=8, heads=2).alpha == "learned"
    assert regard.attention("compressed(first='learnt')", width=8, heads=2).first == "learned"
    assert POSITIONS.canonical("RoPE(base=500.0)").name == "rotary"
    layer = regard.attention("sliding_window(window=3)", width=8, heads=2, role="causal", position="rope")
    assert (layer.facts.name, layer.window, layer.position.facts.name) == ("local", 3, "rotary")


def test_saved_specs_have_one_name_for_one_thing(tmp_path):
    config = regard.ModelConfig(attention=["swa(window=3)", "flash"], position="rope", feedforward="swiglu")
    assert config.attention == ["local(window=3)", "softmax"]
    assert (config.position, config.feedforward) == ("rotary", "dense(activation='silu', gated=True)")
    # what needs no change stays as it is written
    assert regard.ModelConfig(attention="local( window=3 )").attention == "local( window=3 )"
    from regard.config import from_json
    from regard.tasks.translate import TranslateConfig

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
    monkeypatch.setattr(mechanisms, "parse", fail(KeyError("step")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "softmax").touch()
    assert cli.main(["explain", "softmax"]) == 70
    said = capsys.readouterr()
    assert said.out == ""
    first, second, third = said.err.splitlines()
    assert re.match(r"regard explain: .* at regard/cli/mechanisms\.py:\d+: KeyError: 'step'", first)
    assert second == "The files it was given: softmax"
    assert "report" in third
    assert "--debug" in third
    assert "Traceback" not in said.err
    assert cli.main(["explain", "softmax", "--debug"]) == 70
    assert "Traceback" in capsys.readouterr().err


class Panic(BaseException):
    """As libraries in Rust raise."""


def test_panics_memory_and_signals(capsys, monkeypatch):
    monkeypatch.setattr(mechanisms, "parse", fail(Panic("capacity overflow")))
    assert cli.main(["explain", "softmax"]) == 70
    assert "capacity overflow" in capsys.readouterr().err
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 4 bytes.")):
        monkeypatch.setattr(mechanisms, "parse", fail(error))
        assert cli.main(["explain", "softmax"]) == 1
        assert "not enough memory" in capsys.readouterr().err
    monkeypatch.setattr(mechanisms, "parse", fail(KeyboardInterrupt()))
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


def test_arguments_in_other_encodings(capsys, monkeypatch):
    """As Python hands over bytes that are not UTF-8."""
    word = os.fsdecode(b"caf\xe9")
    monkeypatch.setattr(mechanisms, "parse", lambda spec: spec.encode())
    said = refused(capsys, "explain", word)
    assert "argument 2 is not UTF-8: b'caf\\xe9'" in said
    assert "cp1252" in said
    # the flag, where it is one
    monkeypatch.setattr(mechanisms, "list_mechanisms", lambda arguments: arguments.family.encode())
    assert "--family is not UTF-8" in refused(capsys, "list", "--family", word)


def test_a_forgotten_target(capsys, tmp_path):
    (tmp_path / "a.en").write_text("one\ntwo\n")
    said = refused(capsys, "train", "translate", "--data.source", str(tmp_path / "a.en"))
    assert "--data.target" in said
    assert "column" not in said


# memory from small files

BOUNDS = {
    "--data.vocabulary 999999999999": "data.vocabulary must be at most 16,777,216, got 999,999,999,999",
    "--model.layers 1000000000": "model.layers must be at most 4,096, got 1,000,000,000",
    "--model.width 99999999": "model.width must be at most 1,048,576",
    "--model.heads 99999999": "model.heads must be at most 65,536",
    "--training.beam 99999999": "training.beam must be at most 10,000",
    "--training.threads 1000000000": "training.threads must be at most 1,024",
    "--training.steps 9999999999999999999999": "training.steps must be at most",
    "--data.generated 999999999999": "data.generated must be at most 10,000,000",
    "--data.maximum_length 999999999999": "data.maximum_length must be at most 16,777,216",
    "--model.position learned(longest=2000000000)": "2,048.0 GB in float32, and this machine has 8.0",
    "--model.width 1000000 --model.inner 1000000": "GB in float32, and this machine has",
}


@pytest.mark.parametrize("flags", BOUNDS)
def test_sizes_are_bounded_before_they_are_allocated(capsys, tmp_path, monkeypatch, flags):
    monkeypatch.setattr(limits, "physical_memory", lambda: 8 * 10**9)
    given = ["--data.generated", "20", "--out", str(tmp_path / "run"), *flags.split(" ")]
    assert BOUNDS[flags] in refused(capsys, "train", "translate", *given)
    assert not (tmp_path / "run").exists()


def test_decoding_is_bounded(capsys):
    assert "beam must be at most 10,000, got 99,999,999" in refused(capsys, "translate", "--beam", "99999999")
    for name in ("beam", "nbest", "minimum", "maximum", "maximum_extra", "seed"):
        with pytest.raises(ValueError, match=f"{name} must be at most"):
            DecodingConfig(**{"beam": 10_000, "sample": True, name: 10**20})


def test_packed_text_that_unpacks_to_far_more(capsys, tmp_path, monkeypatch):
    """Some kilobytes that would fill the memory; every reader of text stops early."""
    monkeypatch.setattr(text, "UNPACKED", 1 << 20)
    lines = b"a b c d e f g h i j k l m n o p q r s t u v w x y z\n" * (1 << 16)  # 3.4 MB
    with lzma.open(tmp_path / "a.txt.xz", "wb", preset=0) as file:
        file.write(lines)
    with gzip.open(tmp_path / "a.txt.gz", "wb") as file:
        file.write(lines)
    for name in ("a.txt.xz", "a.txt.gz"):
        said = refused(capsys, "train", "language", "--data.text", str(tmp_path / name))
        assert f"--data.text {tmp_path / name}: unpacks to far more than text does: more than 1,048,576 bytes" in said
    # what packs as well as text does comes through whole
    with gzip.open(tmp_path / "b.txt.gz", "wb") as file:
        file.write(lines[: 1 << 19])
    with text.opened(tmp_path / "b.txt.gz") as stream:
        assert stream.read() == lines[: 1 << 19]


# what others publish


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A small folder that can be imported."""
    config = regard.ModelConfig(
        kind="decoder",
        vocabulary=8,
        width=8,
        heads=2,
        inner=16,
        layers=1,
        norm="pre",
        position="learned(longest=16)",
        feedforward="dense(activation='gelu_tanh')",
        bias=True,
        scaled_embedding=False,
        dropout=0.0,
    )
    folder = tmp_path_factory.mktemp("gpt2") / "model"
    torch.manual_seed(0)
    huggingface.write(folder, config, regard.Transformer(config).state_dict(), family="gpt2")
    vocabulary = {name: id for id, name in enumerate(["<end>", "a", "b", "c", "d", "e", "f", "g"])}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "a"))
    library.add_special_tokens(["<end>"])
    library.save(str(folder / "tokenizer.json"))
    values = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 0, "bos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture
def foreign(gpt2, tmp_path):
    return shutil.copytree(gpt2, tmp_path / "model")


def change(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_folder_can_be_imported(foreign, tmp_path):
    assert import_model(foreign, tmp_path / "run").task == "language"


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(foreign, tmp_path, number):
    weights = load_file(foreign / "model.safetensors")
    name = next(name for name in weights if name.endswith("mlp.c_fc.weight"))
    weights[name][3, 5] = number
    save_file(weights, foreign / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="holds 1 of 128 numbers that are NaN or infinite") as error:
        import_model(foreign, tmp_path / "run")
    assert "mlp.c_fc.weight" in str(error.value)
    assert not (tmp_path / "run").exists()


def test_weights_that_are_whole_numbers(foreign, tmp_path):
    weights = load_file(foreign / "model.safetensors")
    name = next(name for name in weights if name.endswith("wte.weight"))
    weights[name] = weights[name].mul(100).to(torch.int8)
    save_file(weights, foreign / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="holds int8 numbers, expected floating point"):
        import_model(foreign, tmp_path / "run")


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ({"c": 4}, "gives the id 4 to 'c' and to 'd'"),
        ({"c": -1}, "gives 'c' the id -1"),
        ({"c": "4"}, "gives 'c' the id '4'"),
    ],
)
def test_tokenizers_of_equal_ids(foreign, tmp_path, ids, words):
    content = json.loads((foreign / "tokenizer.json").read_text())
    content["model"]["vocab"] |= ids
    (foreign / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=words):
        import_model(foreign, tmp_path / "run")


@pytest.mark.parametrize("name", ["n_layer", "n_embd", "n_head", "vocab_size", "n_positions", "n_inner"])
@pytest.mark.parametrize("size", [10**9, 10**30, -1, 0, 1.5, "12", None, [1], True])
def test_sizes_of_others(foreign, tmp_path, name, size):
    if (name, size) in (("n_layer", True), ("n_head", True), ("n_inner", None), ("n_inner", 0)):
        return  # what the model has, or leaves to a default
    change(foreign / "config.json", **{name: size})
    with pytest.raises(ValueError, match=r".") as error:
        import_model(foreign, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert len(str(error.value)) < 1000


def test_layers_of_llamas_are_bounded_before_they_are_listed():
    family = families.find("llama")
    with pytest.raises(ValueError, match="num_hidden_layers must be at most 4,096, got 1,000,000,000,000"):
        family.config({"num_hidden_layers": 10**12, "hidden_size": 8, "num_attention_heads": 2}, set())


# what is passed on


def test_compact_and_export_follow_no_link_out_of_the_run(foreign, tmp_path):
    run = tmp_path / "run"
    import_model(foreign, run)
    secret = tmp_path / "secret.json"
    shutil.copy(run / "published" / "tokenizer.json", secret)
    (run / "published" / "tokenizer.json").unlink()
    (run / "published" / "tokenizer.json").symlink_to(secret)
    for verb in (lambda out: compact_run(run, out), lambda out: export_run(run, out, "huggingface")):
        with pytest.raises(ValueError, match="leads out of"):
            verb(tmp_path / "out")
        assert not (tmp_path / "out").exists()
    (run / "published" / "tokenizer.json").unlink()
    shutil.copy(secret, run / "published" / "tokenizer.json")
    compact_run(run, tmp_path / "out")
    assert (tmp_path / "out" / "published" / "tokenizer.json").read_bytes() == secret.read_bytes()
    os.rename(run / "tokenizer.json", tmp_path / "other.json")
    (run / "tokenizer.json").symlink_to(tmp_path / "other.json")
    with pytest.raises(ValueError, match="leads out of"):
        compact_run(run, tmp_path / "again")


# flags that were taken in silence

ALIGN = {
    "--layer -1": "--layer must be a number from 0 or 'average' or 'aligner', got '-1'",
    "--layer 99": "layer",
    "--layer 1.5": "--layer must be a number from 0",
    "--head -1": "--head must be a number from 0 or 'average', got '-1'",
    "--head aligner": "--head must be a number from 0 or 'average', got 'aligner'",
    "--head 99": "head",
    "--sentence 2": "--sentence needs --picture",
}


@pytest.mark.parametrize("flags", ALIGN)
def test_flags_of_align(capsys, tmp_path, flags):
    (tmp_path / "a.tsv").write_text("Good morning.\tGuten Morgen.\n")
    given = ["align", str(ENGLISH_GERMAN), "--source", str(tmp_path / "a.tsv"), *flags.split()]
    assert ALIGN[flags] in refused(capsys, *given)


def test_columns_of_nothing(capsys):
    assert "--columns needs --source" in refused(capsys, "align", str(ENGLISH_GERMAN), "--columns", "0,2")
    assert "--place needs --out" in refused(capsys, "show", "--place", "cross")


def test_penalties_are_bounded():
    for name in ("penalty", "maximum_ratio"):
        for wrong in (-1, 99999999.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=f"{name} must be a number from 0 to"):
                DecodingConfig(**{name: wrong})
