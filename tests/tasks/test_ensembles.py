"""`regard translate RUN RUN RUN`: runs of different kinds as one translator; and unknown words replaced."""

import json

import pytest
import tokenizers
import torch
from verbs import refused, told

from regard.data.published import Published
from regard.data.tokenizer import Tokenizer
from regard.decoding import DecodingConfig
from regard.models import DeepRecurrentConfig, build
from regard.tasks.translate import Translator, align

WORDS = ["one", "two", "three", "four", "five", "six"]
LINES = [f"{WORDS[i % 6]} {WORDS[(i + 1) % 6]} {WORDS[i * i % 6]}" for i in range(40)]
MODELS = {
    "transformer": ["--model.preset", "mini", "--model.heads", "2", "--model.inner", "8", "--model.layers", "1"],
    "gnmt": ["--model.preset", "gnmt", "--model.layers", "2"],
    "bytenet": ["--model.preset", "bytenet", "--model.layers", "2"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run of each kind over one vocabulary, and one over another."""
    from regard.cli import main

    folder = tmp_path_factory.mktemp("runs")
    (folder / "pairs.tsv").write_text("".join(f"{line}\t{line.upper()}\n" for line in LINES))
    (folder / "other.tsv").write_text("".join(f"{line} more\t{line.upper()}\n" for line in LINES))
    quick = ["--training.tokens", "64", "--training.device", "cpu", "--training.tensorboard", "false"]
    quick += ["--training.steps", "2", "--model.width", "8", "--data.tokenizer", "units"]
    for name, model in (*MODELS.items(), ("other", MODELS["gnmt"])):
        pairs = str(folder / ("other.tsv" if name == "other" else "pairs.tsv"))
        assert not main(["train", "translate", "--data.source", pairs, *model, *quick, "--out", str(folder / name)])
    return folder


def test_runs_of_different_kinds(runs, tmp_path, monkeypatch, capsys):
    names = [str(runs / name) for name in MODELS]
    (tmp_path / "in.txt").write_text("one two three\nfour five\n")
    text = ["--maximum", "5", "--scores"]
    alone = told(monkeypatch, capsys, "translate", names[0], *text, stdin=b"one two three\nfour five\n")[0]
    twice = told(monkeypatch, capsys, "translate", names[0], names[0], str(tmp_path / "in.txt"), *text)[0]
    assert twice == alone
    together = told(monkeypatch, capsys, "translate", *names, str(tmp_path / "in.txt"), *text, "--alignments")[0]
    assert len(together.splitlines()) == 2
    assert {len(line.split("\t")) for line in together.splitlines()} == {3}
    translator = Translator.load_ensemble(names, device="cpu")
    best = next(translator.translate(["one two three"], DecodingConfig(maximum=5)))[0]
    assert together.splitlines()[0].split("\t")[:2] == [best.text, f"{best.score:.4f}"]
    text += ["--alignments", "--mean", "geometric"]
    assert told(monkeypatch, capsys, "translate", *names, str(tmp_path / "in.txt"), *text)[0] != together
    out = told(monkeypatch, capsys, "evaluate", names[0], "--ensemble", *names[1:], "--json", "--per-sentence")[0]
    found = json.loads(out)
    assert [len(counts) for counts in found["bleu"]["sentences"]] == [6] * found["pairs"]
    alone = [json.loads(told(monkeypatch, capsys, "evaluate", name, "--json")[0]) for name in names]
    assert "sentences" not in alone[0]["bleu"]
    losses = [values["loss"] for values in alone]
    # the logarithm is concave: a mean of probabilities is no worse than the mean of the models
    assert min(losses) - 1 < found["loss"] <= sum(losses) / 3


def test_another_vocabulary_is_refused(runs, capsys):
    said = refused(capsys, "translate", str(runs / "gnmt"), str(runs / "other"))
    assert "has another source vocabulary than" in said
    assert "trained on the same text with the same tokenizer" in said
    with pytest.raises(ValueError, match="an ensemble needs at least one run"):
        Translator.load_ensemble([])


def test_unknown_words_are_those_that_are_attended_to(tmp_path):
    torch.manual_seed(8)  # whose words are several
    tokenizer = Tokenizer.train(["the cat sat", "the dog ran"], 20, "units")
    model = build(DeepRecurrentConfig(vocabulary=tokenizer.size, width=8, layers=2, dropout=0.0)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    with torch.no_grad():
        model.output.bias[tokenizer.unk] += 20
    translator, line = Translator(model, tokenizer, tokenizer, 30), "the zebra ran quickly"
    decoding = DecodingConfig(beam=2, maximum=4, minimum=4)
    plain = next(translator.translate([line], decoding))[0]
    assert plain.text == "<unk> <unk> <unk> <unk>"
    translator.dictionary = {}
    found = next(translator.translate([line], decoding))[0]
    # the links of the same output, read as a text
    (expected,) = align(model, tokenizer, tokenizer, [(line, "w x y z")])
    words = {target: expected.source[source] for source, target in expected.links}
    assert found.text.split() == [words[target] for target in range(4)]
    assert found.text.split() != found.text.split()[::-1]
    assert (found.score, found.hypothesis) == (plain.score, plain.hypothesis)
    translator.dictionary = {word: word.upper() for word in line.split()}
    assert next(translator.translate([line], decoding))[0].text == found.text.upper()


def test_a_dictionary_in_a_file(runs, tmp_path, monkeypatch, capsys):
    words = tmp_path / "words.tsv"
    words.write_text("one\tEINS\ntwo\tZWEI\n")
    flags = ["--maximum", "4", "--replace-unknown"]
    out = told(monkeypatch, capsys, "translate", str(runs / "gnmt"), *flags, str(words), stdin=b"one two zebra\n")[0]
    assert out.strip()
    assert "<unk>" not in out
    assert (
        "no such file" in refused(capsys, "translate", str(runs / "gnmt"), *flags, str(tmp_path / "none.tsv")).lower()
    )


@pytest.mark.parametrize(
    ("decoder", "spaced"), [(None, ("the", "cat")), (tokenizers.decoders.Metaspace(), ("▁the", "▁cat"))], ids=str
)
def test_unknown_words_of_published_tokenizers(decoder, spaced):
    vocabulary = {"<unk>": 0, **{word: id for id, word in enumerate(spaced, 1)}}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    if decoder is not None:
        library.decoder = decoder
    published = Published(json.loads(library.to_str()), {"unk": 0}, 3)
    assert published.decode([1, 0, 2, 0], ["zebra", "gnu"]) == "the zebra cat gnu"
    assert published.decode([1, 2]) == "the cat"
