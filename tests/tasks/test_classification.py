"""Classifiers of texts from the outside: data, training, exact resuming, trained layers, answers, thresholds, verbs."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from matplotlib.image import imread
from reviews import QUICK, SMALL, config, finish, reviews, write
from torch.testing import assert_close
from training_runs import assert_same, dying, in_child
from verbs import refused, told

from regard import models
from regard.config import from_json, parse
from regard.core.rows import Rows
from regard.data.batches import LabelledBatches
from regard.data.tokenizer import BOS, EOS, PAD, UNK, Tokenizer
from regard.tasks import language, masked
from regard.tasks.classify import (
    Classifier,
    ClassifyConfig,
    LabelledData,
    Task,
    Threshold,
    read_corpus,
    read_valid,
)
from regard.tasks.language import LanguageConfig, LanguageOptions
from regard.tasks.load import load, read_config, read_parts
from regard.tasks.masked import MaskedConfig, MaskedData, MaskedOptions
from regard.tasks.text import LanguageData
from regard.tasks.train import resume, train
from regard.training import loop
from regard.training.config import TrainingConfig
from regard.training.display import Display
from regard.training.graphs import few_lengths
from regard.training.run import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    """One that knows its words."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("classify")
    long = {"steps": 60, "tokens": 400, "evaluate_every": 30, "save_every": None, "learning_rate": 0.01}
    settings = config(folder, data={"maximum_length": 12}, **long)
    finish(settings)
    return settings.out


@pytest.fixture(scope="module")
def classifier(run) -> Classifier:
    return Classifier.load(run, device="cpu")


@pytest.fixture(scope="module")
def bodies(tmp_path_factory) -> dict[str, str]:
    """Runs of masked and of language to begin with."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("bodies")
    text = folder / "text.txt"
    text.write_text("".join(f"{line}\n" for line, _ in reviews()))
    wishes = {"text": str(text), "documents": "line", "apart": True, "tokenizer": "words", "length": 16}
    training = TrainingConfig(**QUICK | {"tensorboard": False, "metric": "loss", "steps": 5})
    sizes = SMALL | {"layers": 2}
    masks = MaskedConfig(
        out=str(folder / "masked"), data=MaskedData(**wishes), model=MaskedOptions(**sizes), training=training
    )
    gpt = LanguageConfig(
        out=str(folder / "language"), data=LanguageData(**wishes), model=LanguageOptions(**sizes), training=training
    )
    train(masked.Task, masks, Display(quiet=True))
    train(language.Task, gpt, Display(quiet=True))
    return {"masked": masks.out, "language": gpt.out}


# data


def test_corpus_without_a_validation_file_holds_texts_out(tmp_path):
    found = read_corpus(config(tmp_path).data, seed=1)
    assert found.labels == ["bad", "good"]
    assert len(found.valid) == 12
    assert not {text for text, _ in found.train} & {text for text, _ in found.valid}
    other = write(tmp_path / "valid.tsv", [("fine", "good"), ("odd", "neutral")])
    with pytest.raises(ValueError, match=r"valid.tsv: example 2 has the label 'neutral', the classes are bad, good"):
        read_corpus(config(tmp_path, data={"valid_text": str(other)}).data, seed=1)


@pytest.mark.parametrize("multiple", [1, 8])
def test_batches_hold_every_text_once_with_its_class(multiple):
    draw = np.random.default_rng(0)
    rows = [[BOS, *draw.integers(4, 50, draw.integers(0, 20)).tolist(), EOS] for _ in range(200)]
    labels = draw.integers(0, 5, 200).tolist()
    batches = LabelledBatches(rows, labels, tokens=96, seed=3, multiple=multiple)
    seen = []
    for i in range(batches.count(1)):
        batch = batches.get(1, i)
        assert batch.tokens.numel() <= 96
        assert batch.tokens.shape[1] % multiple == 0
        for place, index in enumerate(batch.indices.tolist()):
            padding = batch.tokens.shape[1] - len(rows[index])
            assert batch.tokens[place].tolist() == rows[index] + [PAD] * padding
            assert batch.keep is None or int(batch.keep[place].sum()) == len(rows[index])
            assert int(batch.labels[place]) == labels[index]
        seen += batch.indices.tolist()
    assert sorted(seen) == list(range(200))


def test_blanked_tokens_are_drawn_by_seed_epoch_and_batch():
    rows = [[BOS, *[9] * 30, EOS]] * 100
    plain, blanked, again = (
        LabelledBatches(rows, [0] * 100, tokens=640, blanked=share, unknown=UNK) for share in (0.0, 0.3, 0.3)
    )
    again.get(1, 0)
    torch.manual_seed(5)
    assert_close(blanked.get(0, 2), again.get(0, 2), rtol=0, atol=0)
    assert not torch.equal(blanked.get(0, 2).tokens, blanked.get(1, 2).tokens)
    found = torch.cat([blanked.get(0, i).tokens for i in range(blanked.count(0))])
    assert (found[:, 0] == BOS).all()
    assert (found[:, -1] == EOS).all()
    assert float((found[:, 1:-1] == UNK).double().mean()) == pytest.approx(0.3, abs=0.03)
    assert (plain.get(0, 0).tokens != UNK).all()


# models


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "performer"},
        {"attention": ["local(window=4)", "softmax"], "layers": 2, "pooling": "pma", "seeds": 2},
        {"causal": True},
        {"preset": "perceiver", "latents": 4},
        {"preset": "funnel", "layers": [1, 1]},
        {"preset": "tokenlearner", "tokens": 2, "layers": 2},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_every_kind_of_classifier_trains_and_loads(tmp_path, options):
    settings = config(tmp_path, model=options, steps=3)
    finish(settings)
    loaded = Classifier.load(settings.out, device="cpu")
    again = Classifier.load(settings.out, device="cpu")
    texts = [text for text, _ in reviews()[:9]]
    assert_close(loaded.probabilities(texts), again.probabilities(texts), rtol=0, atol=0)
    size = read_parts(Run.open(settings.out)).config
    expected = {"causal": "last", "funnel": "first", "perceiver": "mean", "tokenlearner": "mean"}
    name = "causal" if options.get("causal") else options.get("preset")
    assert size.pooling == options.get("pooling", expected.get(name, "mean_max"))


@pytest.mark.parametrize(("name", "pooling"), [("masked", "mean"), ("language", "last"), ("masked", "first")])
def test_trained_layers_are_where_it_begins(bodies, tmp_path, name, pooling):
    chosen = {} if (name, pooling) != ("masked", "first") else {"pooling": pooling}
    settings = config(tmp_path, init=bodies[name], model={**chosen, "dropout": 0.3})
    data = Task.read_data(settings)
    tokenizers = Task.train_tokenizers(data, settings)
    size = Task.model_config(settings, tokenizers, data)
    assert size.pooling == pooling
    assert size.body.dropout == 0.3
    model = Task.build_model(settings, size).eval()
    body = load(bodies[name], name, device="cpu").model
    ids = torch.tensor([tokenizers["tokenizer.json"].framed(tokenizers["tokenizer.json"].encode("a fine film"))])
    x = body.hidden(ids).x
    # the head of masked models stands behind what a classifier reads
    if name == "masked":
        x = body.encode(ids).x
    read = {"mean": x.mean(1), "first": x[:, 0], "last": x[:, -1]}[pooling]
    assert_close(model(ids).logits, F.linear(read, model.answer.output.weight, model.answer.output.bias))
    finish(settings)
    loaded = Classifier.load(settings.out, device="cpu")
    assert loaded.tokenizer.vocabulary == tokenizers["tokenizer.json"].vocabulary
    moved = models.build(read_parts(Run.open(settings.out)).config)
    moved.load_state_dict(Run.open(settings.out).find().tensors["model"])
    assert not torch.equal(moved.stack.blocks[0].norms[0].weight, model.stack.blocks[0].norms[0].weight)


@pytest.mark.parametrize("how", ["scratch", "masked"])
def test_words_of_one_stem_share_a_part(tmp_path, how):
    texts = [(text.replace("fine", "lovingly"), label) for text, label in reviews()]
    write(tmp_path / "reviews.tsv", texts)
    bare = {"position": "buckets"}  # nothing is added to the token vectors
    others = {"data": {"tokenizer": "stems"}, "model": bare}
    if how == "masked":
        lines = tmp_path / "text.txt"
        lines.write_text("".join(f"{text}\n" for text, _ in texts))
        wishes = MaskedData(text=str(lines), documents="line", apart=True, tokenizer="stems", length=16)
        training = TrainingConfig(**QUICK | {"tensorboard": False, "metric": "loss", "steps": 3})
        sizes = MaskedOptions(**SMALL, **bare, normed_embedding=False)
        body = MaskedConfig(out=str(tmp_path / "body"), data=wishes, model=sizes, training=training)
        train(masked.Task, body, Display(quiet=True))
        others = {"init": body.out}
    settings = config(tmp_path, steps=3, **others)
    finish(settings)
    loaded = Classifier.load(settings.out, device="cpu")
    tokenizer, stack = loaded.tokenizer, loaded.model.stack
    parts = {
        "lovingly": ("lovingly", "lovi…", "lovin…"),
        "lovely": ("lovely", "love…", "lovel…"),
        "loves": ("love…",),  # not seen
        "dull": ("dull", "dull…"),
        "the": ("the",),
    }
    ids = torch.tensor([tokenizer.encode(" ".join(parts))])
    table = stack.embedding.weight
    expected = torch.stack([sum(table[tokenizer.ids[part]] for part in row) for row in parts.values()])
    assert_close(stack.embed(ids, Rows.full(ids))[0], expected * stack.scale)
    unseen, never = loaded.probabilities(["a lovelorn film", "a xylophone film"])
    assert not np.allclose(unseen, never)


def test_the_loss_is_of_the_right_class(tmp_path):
    settings = config(tmp_path, model={"dropout": 0.0})
    data = Task.read_data(settings)
    tokenizers = Task.train_tokenizers(data, settings)
    torch.manual_seed(0)
    ready = Task(settings, data, tokenizers, models.build(Task.model_config(settings, tokenizers, data)))
    batch = ready.batches.get(0, 0)
    found = ready.loss(batch, 0.1)
    rows = [
        ready.model(ids[None, :n]).logits for ids, n in zip(batch.tokens, (batch.tokens != PAD).sum(1), strict=True)
    ]
    logits = torch.cat(rows)
    assert_close(found.total, F.cross_entropy(logits, batch.labels, reduction="sum", label_smoothing=0.1))
    assert_close(found.plain, F.cross_entropy(logits, batch.labels, reduction="sum"))
    assert int(found.tokens) == ready.count_tokens(batch) == len(batch.labels)
    for place, index in enumerate(batch.indices.tolist()):
        text, label = data.train[index]
        what, (line,) = ready.describe_rows([index])
        assert what == f"lines of {settings.data.text}"
        assert Path(settings.data.text).read_text().split("\n")[line - 1] == f"{text}\t{label}"
        assert data.labels[batch.labels[place]] == label
        assert batch.tokens[place, : len(text.split()) + 2].tolist() == tokenizers["tokenizer.json"].framed(
            tokenizers["tokenizer.json"].encode(text)
        )


@pytest.mark.parametrize("longest", [1, 62, 512, 513, 4094, 16384])
def test_rows_have_few_lengths_on_a_gpu(longest):
    multiple = few_lengths(longest)
    assert multiple % 8 == 0
    assert -(-(longest + 2) // multiple) <= 65


# runs


@pytest.mark.parametrize("how", ["scratch", "masked"])
def test_R1_killed_runs_go_on_bit_for_bit(tmp_path, bodies, how):
    torch.set_num_threads(1)
    options = {"data": {"blanked": 0.2}} | ({} if how == "scratch" else {"init": bodies[how], "layer_decay": 0.7})
    whole, other = (config(tmp_path, name, **options) for name in ("whole", "other"))
    finish(whole)
    assert in_child(lambda: (dying(loop.Loop, "_update", 8), finish(other))) < 0
    resume(other.out, Display(quiet=True))
    assert_same(whole.out, other.out)
    early = config(tmp_path, "early", **options)
    assert in_child(lambda: (dying(loop.Loop, "_update", 2), finish(early))) < 0
    resume(early.out, Display(quiet=True))
    assert_same(whole.out, early.out)


@pytest.mark.parametrize("name", ["masked", "language"])
def test_a_run_goes_on_without_what_it_was_begun_from(tmp_path, bodies, name):
    torch.set_num_threads(1)
    first = shutil.copytree(bodies[name], tmp_path / "first")
    whole, other = (config(tmp_path, name, init=str(first)) for name in ("whole", "other"))
    finish(whole)
    assert in_child(lambda: (dying(loop.Loop, "_update", 8), finish(other))) < 0
    shutil.rmtree(first)
    resume(other.out, Display(quiet=True))
    assert_same(whole.out, other.out)


def test_a_run_does_not_go_on_with_other_data(tmp_path):
    settings = config(tmp_path, steps=3)
    finish(settings)
    write(tmp_path / "reviews.tsv", [*reviews()[:-1], ("new", "good")])
    with pytest.raises(ValueError, match="has changed since the run began"):
        resume(settings.out, Display(quiet=True), steps=5)


def test_config_round_trip(tmp_path):
    settings = parse(
        ClassifyConfig,
        [
            "--data.text",
            "a.csv",
            "--data.columns",
            "[sentence, 1]",
            "--model.preset",
            "funnel",
            "--model.layers",
            "[1, 2]",
        ],
        "x",
        "y",
    )
    assert settings.data.columns == ("sentence", 1)
    assert settings.model.resolve(vocabulary=50, classes=3).layers == (1, 2)
    assert settings.training.metric == "loss"
    plain = json.loads(json.dumps({"columns": ["sentence", 1]}))
    assert from_json(LabelledData, plain).columns == ("sentence", 1)


# answers


def test_it_learns(classifier):
    for text, label in (("a superb film .", "good"), ("the story and a weak film", "bad")):
        found = classifier(text)
        assert found.label == label
        assert found.probability == max(found.probabilities.values()) > 0.8
        assert sum(found.probabilities.values()) == pytest.approx(1)


def test_a_text_gets_the_same_answer_in_any_company(classifier):
    texts = [text for text, _ in reviews(40)] + ["film " * 50]
    together = classifier.probabilities(texts)
    alone = np.concatenate([classifier.probabilities([text]) for text in texts])
    assert_close(together, alone, rtol=1e-5, atol=1e-6)
    assert len(classifier.probabilities([])) == 0


def test_answers_stay_in_order_and_blank_lines_blank(classifier):
    lines = ["fine film", "", " \t", "a dull story", "great"]
    for at_once in (1, 2, 100):
        found = list(classifier.classify(lines, at_once=at_once))
        assert [None if one is None else one.label for one in found] == ["good", None, None, "bad", "good"]


def test_what_is_too_long_is_cut_with_its_number(classifier):
    said = []
    list(classifier.classify(["fine", "", "film " * 20, "dull"], at_once=2, first=11, warn=said.append))
    assert said == ["text 13: 20 tokens, only the first 3 and the last 9 are read"]
    assert_close(classifier.probabilities(["film " * 20]), classifier.probabilities(["film " * 12]), rtol=0, atol=0)


def test_threshold_moves_the_answer(classifier):
    chances = np.array([0.6, 0.4])
    assert classifier.answer(chances).label == "bad"
    assert classifier.answer(chances, Threshold("good", 0.4)).label == "good"
    assert classifier.answer(chances, Threshold("good", 0.41)).label == "bad"
    assert classifier.answer(chances[::-1], Threshold("good", 0.7)).label == "bad"
    assert classifier.positive(None) == "good"


# verbs


def test_classify_gives_as_many_lines_as_come(run, monkeypatch, capsys):
    lines = [
        b"a fine film",
        b"",
        b"\xff dull",
        b"great\x00 film",
        b"</s> <pad> weak",
        "poor\u2028story".encode(),
        b"film " * 3000,
    ]
    out, err = told(monkeypatch, capsys, "classify", run, stdin=b"\r\n".join(lines))
    rows = [line.split("\t") for line in out.split("\n")[:-1]]
    assert len(rows) == len(lines)
    assert [row[0] for row in rows[:5]] == ["good", "", "bad", "good", "bad"]
    assert all(0.5 <= float(row[1]) <= 1 for row in rows if row[0])
    assert "text 7: 3000 tokens, only the first 3 and the last 9 are read" in err
    assert "not UTF-8" in err
    out, _ = told(monkeypatch, capsys, "classify", run, "--json", stdin=b"\n".join(lines) + b"\n")
    records = [json.loads(line) for line in out.split("\n")[:-1]]
    assert len(records) == len(lines)
    assert records[1] is None
    assert set(records[0]["probabilities"]) == {"good", "bad"}


def test_warnings_of_long_lines_are_few(run, monkeypatch, capsys):
    out, err = told(monkeypatch, capsys, "classify", run, stdin=b"film " * 20 + b"\n" + (b"film " * 13 + b"\n") * 24)
    assert out.count("\n") == 25
    assert err.count("only the first 3 and the last 9 are read") == 10
    assert err.endswith("regard: 15 more such warnings\n")
    _, err = told(monkeypatch, capsys, "classify", run, stdin=(b"film " * 13 + b"\n") * 10)
    assert err.count("\n") == err.count("only the first 3 and the last 9 are read") == 10


def test_evaluate_says_everything(run, monkeypatch, capsys, tmp_path):
    data = write(tmp_path / "test.tsv", [*reviews(200)[120:], ("fine film", "bad")])
    out, _ = told(monkeypatch, capsys, "evaluate", run, "--data", str(data))
    for word in (
        "accuracy",
        "precision",
        "recall",
        "F1",
        "AP",
        "macro",
        "micro",
        "truth \\ answer",
        "average precision",
    ):
        assert word in out
    found = json.loads(told(monkeypatch, capsys, "evaluate", run, "--data", str(data), "--json")[0])
    classifier = Classifier.load(run, device="cpu")
    right = [classifier(text).label == label for text, label in [*reviews(200)[120:], ("fine film", "bad")]]
    assert found["accuracy"] == pytest.approx(sum(right) / len(right))
    assert found["examples"] == 81
    assert np.array(found["confusion"]).sum() == 81
    assert f"{100 * found['accuracy']:.2f} %" in out
    validation = json.loads(told(monkeypatch, capsys, "evaluate", run, "--json")[0])
    assert validation["examples"] == len(read_valid(run))


def test_evaluate_chooses_a_threshold_on_the_validation_texts(run, monkeypatch, capsys, tmp_path):
    data = write(tmp_path / "test.tsv", reviews(200)[120:])
    wish = ("evaluate", run, "--data", str(data), "--recall", "0.9", "--json")
    found = json.loads(told(monkeypatch, capsys, *wish)[0])["threshold"]
    classifier = Classifier.load(run, device="cpu")
    threshold, chosen = classifier.choose(read_valid(run), recall=0.9)
    assert found["value"] == threshold.value
    assert found["label"] == "good"
    assert found["validation"]["recall"] == chosen.recall >= 0.9
    taken = [classifier(text).probabilities["good"] >= threshold.value for text, _ in reviews(200)[120:]]
    assert found["here"]["taken"] == sum(taken)
    other = json.loads(told(monkeypatch, capsys, *wish, "--positive", "bad")[0])["threshold"]
    assert other["label"] == "bad"
    out, err = told(monkeypatch, capsys, "classify", run, "--recall", "0.9", stdin=b"fine\n")
    assert "recall" in err
    assert out.startswith("good\t")
    none = told(monkeypatch, capsys, "classify", run, "--threshold", "1", stdin=b"fine\n")[0]
    assert none.startswith("bad\t")


def test_few_examples_of_a_label_are_said(run, monkeypatch, capsys, tmp_path):
    data = write(tmp_path / "test.tsv", reviews(30))
    out, err = told(monkeypatch, capsys, "evaluate", run, "--data", str(data), "--recall", "0.9")
    assert re.search(r"here .*\n +few examples of 'good' \(\d\d\): on other texts both may differ", out)
    assert "few examples" not in err
    many = write(tmp_path / "many.tsv", reviews(200))
    out, _ = told(monkeypatch, capsys, "evaluate", run, "--data", str(many), "--threshold", "0.5")
    assert "few examples" not in out
    _, err = told(monkeypatch, capsys, "classify", run, "--recall", "0.9", stdin=b"")
    assert "regard: few examples of 'good' (" in err
    assert err.endswith("regard: standard input is empty\n")


def test_evaluate_draws(run, monkeypatch, capsys, tmp_path):
    _, err = told(monkeypatch, capsys, "evaluate", run, "--recall", "0.9", "--plot", str(tmp_path / "report.png"))
    assert str(tmp_path / "report.png") in err
    assert imread(tmp_path / "report.png").std() > 0.05


def test_B1_training_data_with_faults(tmp_path, capsys, monkeypatch):
    bad = tmp_path / "bad.csv"
    bad.write_bytes(b"text,label\n" + b"fine film,good\ndull film,bad\n" * 30 + b"\xff,good\n")
    out = ("--out", str(tmp_path / "none"))
    assert f"{bad}:62: not UTF-8" in refused(capsys, "train", "classify", "--data.text", str(bad), *out)
    quick = ("--training.steps", "1", "--model.width", "8", "--model.heads", "1", "--data.tokenizer", "words")
    quick += ("--training.device", "cpu", "--training.tensorboard", "false")
    _, err = told(
        monkeypatch, capsys, "train", "classify", "--data.text", str(bad), "--data.skip_bad", "true",
        "--data.valid_text", str(bad), *quick, "--out", str(tmp_path / "skipped"),
    )  # fmt: skip
    assert "omitted 1 lines: not UTF-8" in err
    one = write(tmp_path / "one.tsv", [("a", "x")] * 20)
    assert "needs at least two labels" in refused(capsys, "train", "classify", "--data.text", str(one), *out)
    few = write(tmp_path / "few.tsv", [("a", "x"), ("b", "y")])
    assert "too few to hold any out" in refused(capsys, "train", "classify", "--data.text", str(few), *out)
    assert "give data.text" in refused(capsys, "train", "classify", *out)
    assert "is a folder" in refused(
        capsys, "train", "classify", "--data.text", str(tmp_path) + "/", "--data.labels", str(one), *out
    )
    assert "data.labels needs data.text" in refused(capsys, "train", "classify", "--data.labels", str(one), *out)
    assert "data.blanked must be" in refused(capsys, "train", "classify", "--data.blanked", "1", *out)
    assert not (tmp_path / "none").exists()


def test_wishes_that_do_not_fit_together(run, bodies, capsys, tmp_path):
    data, out = write(tmp_path / "a.tsv"), ("--out", str(tmp_path / "none"))
    train = ("train", "classify", "--data.text", str(data), *out)
    begun = (*train, "--init", bodies["masked"])
    assert "model.width cannot change with --init" in refused(capsys, *begun, "--model.width", "8")
    assert "expected masked or language" in refused(capsys, *train, "--init", run)
    assert "there is no run folder" in refused(capsys, *train, "--init", str(tmp_path / "nothing"))
    assert "preset 'tiny' has no model.latents" in refused(capsys, *train, "--model.latents", "3")
    for preset, layers, words in (
        ("funnel", "2", "model.layers must be a list of whole numbers, got 2"),
        ("tiny", "[1, 1]", "model.layers must be a whole number, got"),
    ):
        assert words in refused(capsys, *train, "--model.preset", preset, "--model.layers", layers)
    stems = ("--data.tokenizer", "stems")
    assert "data.tokenizer stems cannot be used with model.preset 'funnel'" in refused(
        capsys, *train, *stems, "--model.preset", "funnel"
    )
    assert "stems is for kind 'encoder'" in refused(capsys, *train, *stems, "--model.causal", "true")
    assert "model.preset must be one of tiny, base, big, perceiver" in refused(capsys, *train, "--model.preset", "x")
    assert "training.metric of classify must be one of accuracy" in refused(capsys, *train, "--training.metric", "bleu")
    assert "give only one of --recall, --precision" in refused(
        capsys, "evaluate", run, "--recall", "0.5", "--precision", "0.5"
    )
    assert "above 0 and at most 1" in refused(capsys, "evaluate", run, "--recall", "2")
    assert "known: bad, good" in refused(capsys, "evaluate", run, "--recall", "0.5", "--positive", "x")
    assert "--positive needs a threshold" in refused(capsys, "evaluate", run, "--positive", "bad")
    assert "--beam is for runs of 'translate'" in refused(capsys, "evaluate", run, "--beam", "3")
    assert "a picture ends in" in refused(capsys, "evaluate", run, "--plot", "report.doc")
    assert "--columns must be two" in refused(capsys, "evaluate", run, "--data", str(data), "--columns", "text")
    assert "no column 'body'" in refused(capsys, "evaluate", run, "--data", str(data), "--columns", "body,label")
    assert "--labels needs --data" in refused(capsys, "evaluate", run, "--labels", str(data))
    assert "from 0 to 1, got 3" in refused(capsys, "evaluate", run, "--threshold", "3")
    other = write(tmp_path / "other.tsv", [("a", "neutral")])
    assert "the classes are bad, good" in refused(capsys, "evaluate", run, "--data", str(other))


def test_options_that_no_classifier_has(run, tmp_path, capsys):
    """They are not offered; a run of the time when they were, which left them open, goes on."""
    data = write(tmp_path / "a.tsv")
    said = refused(capsys, "train", "classify", "--data.text", str(data), "--model.tied", "true")
    assert "unrecognized arguments: --model.tied" in said
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    values = yaml.safe_load((copy / "config.yaml").read_text())
    for tied, goes_on in ((None, True), (True, False)):
        (copy / "config.yaml").write_text(yaml.safe_dump(values | {"model": values["model"] | {"tied": tied}}))
        Run(copy).record("config.yaml")
        if goes_on:
            assert read_config(Run.open(copy)) == read_config(Run.open(run))
        else:
            with pytest.raises(ValueError, match="ClassifierOptions has no tied"):
                read_config(Run.open(copy))


def test_a_damaged_run_is_said_to_be(run, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    facts = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(facts | {"labels": ["one"]}))
    Run(copy).record("run.json")
    assert "it must have the 2 labels" in refused(capsys, "evaluate", str(copy))


def test_tokenizers_of_every_kind(tmp_path):
    for kind in ("bpe", "characters", "bytes"):
        settings = config(tmp_path, kind, data={"tokenizer": kind, "vocabulary": 300, "maximum_length": 60}, steps=2)
        finish(settings)
        assert Classifier.load(settings.out, device="cpu").tokenizer.kind == kind
    assert isinstance(Tokenizer.load(tmp_path / "bytes" / "tokenizer.json"), Tokenizer)
