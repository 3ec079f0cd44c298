"""What a classifier is trained with where nothing is said, the encoder it begins with, and the baseline beside it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from reviews import config, finish, reviews, write
from torch import nn
from verbs import told

from regard.config import from_json, parse
from regard.models import SwinConfig, VitConfig, build
from regard.models.registry import presets
from regard.tasks.classify import Classifier, ClassifyConfig, LabelledData, Task, baseline, evaluation
from regard.tasks.classify import plan as classifier_plan
from regard.tasks.classify import task as classification
from regard.tasks.load import read_parts
from regard.training.config import TrainingConfig
from regard.training.groups import parameter_groups
from regard.training.run import Run

ENGLISH = [
    "The actors are good but the story is far too long for what it has to say.",
    "I was surprised by how much we laughed, and the music was lovely.",
    "You will have seen all of this before in much better films.",
]
GERMAN = [
    "Die Schauspieler sind gut, aber die Geschichte ist viel zu lang.",
    "Ich war überrascht, wie viel wir gelacht haben, und die Musik war schön.",
    "Das alles hat man schon in viel besseren Filmen gesehen.",
]


@pytest.fixture(scope="module")
def bundled() -> classifier_plan.Pretrained:
    return classification._trained(classifier_plan.ENGLISH)


@pytest.fixture
def planned(bundled, monkeypatch):
    """The config that a command line leads to for some texts, and what is said of it."""
    monkeypatch.setattr(classifier_plan, "SAMPLE", 20)

    def plan(texts: list[str], *flags: str):
        settings = parse(ClassifyConfig, ["--data.text", "texts.tsv", *flags], "regard train classify", "")
        return classifier_plan.plan(settings, texts, len(texts) // 10, trained=None, bundled=bundled)

    return plan


def test_english_begins_with_the_bundled_encoder_and_other_languages_from_scratch(planned):
    english, said = planned(ENGLISH * 10)
    assert english.init == "english"
    assert "bundled English encoder" in said[0]
    assert "--init none" in said[0]
    german, said = planned(GERMAN * 10)
    assert german.init is None
    assert german.data.tokenizer == "uncased"
    assert "do not look English" in said[0]
    scratch, said = planned(ENGLISH * 10, "--init", "none")
    assert scratch.init is None
    assert said[0] == "from scratch: --init none"


def test_sizes_that_are_given_mean_from_scratch(planned):
    for flags in (["--model.attention", "performer"], ["--data.tokenizer", "bpe"], ["--model.preset", "base"]):
        found, said = planned(ENGLISH * 10, *flags)
        assert found.init is None
        assert flags[0][2:] in said[0]
    found, _ = planned(ENGLISH * 10, "--model.dropout", "0.3", "--model.pooling", "max")
    assert (found.init, found.model.dropout, found.model.pooling) == ("english", 0.3, "max")


def test_what_is_given_stays(planned):
    flags = "--training.learning_rate 0.01 --training.tokens 999 --data.maximum_length 77 --data.cut end"
    length = "--data.blanked 0.1 --training.epochs 2.5 --training.patience null --training.evaluate_every 7"
    found, said = planned(ENGLISH * 10, *flags.split(), *length.split())
    training = found.training
    assert (training.learning_rate, training.tokens, training.epochs, training.steps) == (0.01, 999, 2.5, None)
    assert (training.patience, training.evaluate_every) == (None, 7)
    assert (found.data.maximum_length, found.data.cut, found.data.blanked) == (77, "end", 0.1)
    assert "no early stopping" in said[1]
    found, said = planned(ENGLISH * 10, "--training.steps", "30")
    assert (found.training.steps, found.training.epochs) == (30, None)
    assert "30 steps" in said[1]
    assert "early stopping after 4 evaluations without a better" in said[1]


def test_length_and_epochs_follow_the_number_of_texts(planned):
    assert classifier_plan.epochs_for(500, True) > classifier_plan.epochs_for(5000, True) >= 4
    assert classifier_plan.epochs_for(100, True) == classifier_plan.epochs_for(400, True)
    long, device = [" ".join(ENGLISH) * 12], ("--training.device", "cpu")
    few, _ = planned(long * 200, *device)
    many, _ = planned(long * 9000, *device)
    assert few.data.maximum_length > many.data.maximum_length
    assert few.training.epochs > many.training.epochs >= 1
    assert few.data.cut == many.data.cut == "middle"
    assert planned(long * 200, *device)[0] == few


def test_work_is_bounded(planned):
    """All tokens that a training reads, forward and backward, are a few minutes of a CPU."""
    for count in (300, 3000, 9000):
        found, _ = planned([" ".join(ENGLISH) * 12] * count, "--training.device", "cpu")
        size = read_parts(Run.open(classification.ENGLISH)).config
        tokens = found.training.epochs * count * (found.data.maximum_length + 2)
        each = classifier_plan.operations_per_token(size.width, size.inner, size.layers)
        assert tokens * each <= 1.1 * classifier_plan.OPERATIONS["cpu"]


def test_a_run_from_the_bundled_encoder(tmp_path, monkeypatch, capsys):
    torch.set_num_threads(1)
    rows = [(f"{text} {number}", ("no", "yes")[number % 2]) for number, text in enumerate(ENGLISH * 5)]
    file = write(tmp_path / "texts.tsv", rows)
    out = str(tmp_path / "run")
    flags = ["--training.steps", "2", "--training.tensorboard", "false", "--training.threads", "1"]
    _, err = told(monkeypatch, capsys, "train", "classify", "--data.text", str(file), "--out", out, *flags)
    assert "begins with the bundled English encoder" in err
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (settings["init"], settings["data"]["cut"]) == ("english", "middle")
    loaded = Classifier.load(out, device="cpu")
    assert loaded.tokenizer.kind == "uncased"
    assert loaded.cut == "middle"
    assert loaded.model.config.pooling == "mean"
    # the settings of the run say all: with them it is trained again to the bit
    again = str(tmp_path / "again")
    told(monkeypatch, capsys, "train", "classify", "--config", f"{out}/config.yaml", "--out", again)
    theirs = Classifier.load(again, device="cpu")
    np.testing.assert_array_equal(loaded.probabilities(ENGLISH), theirs.probabilities(ENGLISH))


def test_the_bundled_encoder_is_small_and_has_a_card():
    files = [path for path in classification.ENGLISH.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 6_000_000
    card = (classification.ENGLISH / "README.md").read_text(encoding="utf-8")
    assert all(source in card for source in ("WikiText", "Tatoeba", "IMDb", "SST-2", "CC BY"))


def test_without_the_bundled_encoder_training_goes_on_from_scratch(tmp_path, monkeypatch):
    monkeypatch.setattr(classification, "ENGLISH", tmp_path / "nothing")
    settings = ClassifyConfig(data=LabelledData(text=str(write(tmp_path / "texts.tsv"))))
    found, said = Task.complete_config(settings, Task.read_data(settings))
    assert found.init is None
    assert "no bundled encoder" in said[0]


def test_runs_of_before_mean_what_they_meant(tmp_path):
    """A config of before there were plans: nothing is open but what did not exist."""
    training = {"steps": 2000, "tokens": 4096, "warmup": 200, "weight_decay": 0.0, "evaluate_every": 200}
    training["patience"] = None
    data = {"text": "a.tsv", "tokenizer": "bpe", "vocabulary": 8000, "maximum_length": 512, "blanked": 0.0}
    old = from_json(ClassifyConfig, {"init": None, "data": data, "model": {"preset": "tiny"}, "training": training})
    assert (old.training.layer_decay, old.training.epochs, old.data.cut) == (1.0, None, None)
    found, _ = classifier_plan.plan(old, ENGLISH, 1, trained=None, bundled=None)
    assert found.init is None
    assert found.training.steps == 2000
    assert (found.training.tokens, found.training.patience, found.data.blanked) == (4096, None, 0.0)
    assert found.model == old.model


def test_a_text_that_is_too_long_loses_its_middle():
    class Letters:
        bos, eos = 1, 2

        def encode_batch(self, texts):
            return [[int(letter) for letter in text] for text in texts]

        def framed(self, ids):
            return list(ids)

    said: list[str] = []
    ids = Classifier(nn.Identity(), Letters(), ["a", "b"], 4, cut="middle").encode(["345678", "3456"], warn=said.append)
    assert ids == [[3, 6, 7, 8], [3, 4, 5, 6]]
    assert said == ["text 1: 6 tokens, only the first 1 and the last 3 are read"]
    ids = Classifier(nn.Identity(), Letters(), ["a", "b"], 4).encode(["345678"])
    assert ids == [[3, 4, 5, 6]]


def test_epochs_are_counted_in_steps(tmp_path):
    settings = config(tmp_path, steps=None, epochs=2.0, evaluate_every=None, warmup=None)
    state = finish(settings)
    data = Task.read_data(settings)
    ready = Task(settings, data, Task.train_tokenizers(data, settings), nn.Linear(1, 1))
    assert state.step == round(2.0 * ready.batches.count(0))


def test_lower_layers_learn_more_slowly():
    model = nn.ModuleDict({"stack": nn.Module(), "answer": nn.Linear(2, 2)})
    model["stack"].embedding = nn.Embedding(3, 2)
    model["stack"].blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model["stack"].norm = nn.LayerNorm(2)
    groups = parameter_groups(model, layer_decay=0.5)
    shares = {id(part): group["share"] for group in groups for part in group["params"]}
    assert len(shares) == len(list(model.parameters()))
    expected = {"embedding": 0.125, "blocks.0": 0.25, "blocks.1": 0.5, "norm": 1.0, "answer": 1.0}
    for name, part in model.named_parameters():
        assert shares[id(part)] == next(share for key, share in expected.items() if key in name)
    (group,) = parameter_groups(model)
    assert "share" not in group
    # with weight decay too, a layer's biases and gains learn at its rate
    groups = parameter_groups(model, layer_decay=0.5, weight_decay=0.1)
    assert {id(part): group["share"] for group in groups for part in group["params"]} == shares
    for group in groups:
        for part in group["params"]:
            assert group["weight_decay"] == (0.1 if part.ndim >= 2 else 0.0)


def test_layers_of_images_learn_more_slowly_too():
    """Patches and a class token are below the first layer, and the stages of Swin and CoAtNet follow each other."""
    sizes = {"image": (32, 32), "width": 8, "classes": 5}
    vit = VitConfig(patch=8, heads=2, inner=16, layers=2, **sizes)
    swin = SwinConfig(patch=4, window=2, heads=(2, 2), inner=16, layers=(1, 2), **sizes)
    found = presets("image class")["coatnet-nano"]
    orders = {
        vit: ("stem.", "blocks.0.", "blocks.1.", "answer."),
        swin: ("stem.", "stages.0.0.", "stages.1.0.", "stages.1.1.", "output."),
        found.form.config(**found.values): (
            "stem.",
            "convolve.0.",
            "halve.0.",
            "stages.0.0.",
            "halve.1.",
            "stages.1.0.",
            "output.",
        ),
    }
    equal = {vit: (("stem.", "first"), ("stem.", "position.")), swin: (("stages.1.0.", "merge.0."),)}
    for size, order in orders.items():
        with torch.device("meta"):
            model = build(size)
        groups = parameter_groups(model, layer_decay=0.5)
        shares = {id(part): group["share"] for group in groups for part in group["params"]}

        def share(start: str, model=model, shares=shares) -> float:
            (one,) = {shares[id(part)] for name, part in model.named_parameters() if name.startswith(start)}
            return one

        assert [share(start) for start in order] == [0.5**depth for depth in range(len(order))][::-1]
        assert all(share(one) == share(other) for one, other in equal.get(size, ()))


def test_layer_decay_reaches_the_weights(tmp_path):
    """After one step of Adam without decay every weight moved by about its own learning rate."""
    moved = {}
    for decay in (1.0, 0.1):
        settings = config(tmp_path, f"decay-{decay}", steps=1, warmup=0, layer_decay=decay, weight_decay=0.0)
        finish(settings)
        run = Run.open(settings.out)
        torch.manual_seed(settings.training.seed)
        begun, name = Task.build_model(settings, read_parts(run).config).state_dict(), "stack.embedding.weight"
        after = run.find("last").tensors["model"]
        moved[decay] = (after[name] - begun[name]).abs().max()
    assert moved[0.1] < 0.2 * moved[1.0]


# the baseline


def test_the_baseline_learns_and_chooses_on_validation():
    examples = reviews(200)
    found = baseline.fit(examples[:150], examples[150:175], ["bad", "good"])
    assert found.validation == 1.0
    assert found.strength == baseline.STRENGTHS[0] or found.strength in baseline.STRENGTHS
    report = found.report(examples[175:])
    assert report.accuracy == 1.0
    assert report.examples == 25
    with pytest.raises(ValueError, match="needs words of two letters"):
        baseline.fit([("a", "good"), ("b", "bad")], [("a", "good")], ["bad", "good"])


def test_the_baseline_is_that_of_scikit_learn():
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    examples = [(text, label if number % 7 else "bad") for number, (text, label) in enumerate(reviews(240))]
    found = baseline.fit(examples[:120], examples[120:180], ["bad", "good"])
    vectorizer = TfidfVectorizer(ngram_range=(1, 2))
    x = vectorizer.fit_transform([text for text, _ in examples[:120]])
    model = LogisticRegression(C=found.strength, max_iter=1000).fit(x, [label for _, label in examples[:120]])
    asked = examples[180:]
    expected = model.score(vectorizer.transform([text for text, _ in asked]), [label for _, label in asked])
    assert found.report(asked).accuracy == pytest.approx(expected)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.set_num_threads(1)
    settings = config(tmp_path_factory.mktemp("baseline"), steps=3)
    finish(settings)
    return settings


def test_evaluate_prints_the_baseline_beside_the_run(run, monkeypatch, capsys):
    out, err = told(monkeypatch, capsys, "evaluate", run.out, "--baseline")
    assert "training the baseline" in err
    assert "this run" in out
    assert "points below the baseline: TF-IDF of 1- and 2-grams" in out or "points above the baseline" in out
    values = json.loads(told(monkeypatch, capsys, "evaluate", run.out, "--baseline", "--json")[0])
    assert values["baseline"]["accuracy"] >= 0.9
    assert values["baseline"]["C"] in baseline.STRENGTHS
    assert values["baseline"].keys() >= {"macro", "confusion", "average_precision"}


def test_a_baseline_of_other_texts_is_refused(run):
    file = Path(run.data.text)
    whole = file.read_text()
    file.write_text(whole + "a new film\tgood\n")
    try:
        with pytest.raises(ValueError, match="has changed since"):
            evaluation.measure_baseline(run.out, reviews()[:5])
    finally:
        file.write_text(whole)


def test_defaults_stop_early():
    assert (ClassifyConfig().training.patience, ClassifyConfig().training.metric) == (4, "loss")
    assert TrainingConfig().patience is None
