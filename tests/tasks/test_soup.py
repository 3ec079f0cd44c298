"""Soups: the mean of runs that were fine-tuned from one run."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from painted import write_folders
from reviews import config, finish, reviews, write
from torch import nn
from torch.testing import assert_close
from verbs import refused, told

from regard.tasks import images
from regard.tasks.classify import Classifier
from regard.tasks.classify.corpus import read_valid
from regard.tasks.language import LanguageConfig
from regard.tasks.language import Task as Language
from regard.tasks.load import compact_run, read_config
from regard.tasks.soup import _Validation, make_soup, renew_statistics
from regard.tasks.text import LanguageData
from regard.tasks.train import train
from regard.training.config import TrainingConfig
from regard.training.display import Display
from regard.training.run import Run

RATES = (1e-3, 3e-3, 3e-2)
SHORT = {"steps": 6, "save_every": 6, "evaluate_every": 6}


def silent(message: str) -> None:
    pytest.fail(f"a warning: {message}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One run of language, `body`, and runs `tuned-0` to `tuned-2` from it; `scratch-3` and `scratch-4` from none."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("soups")
    (folder / "text.txt").write_text("\n".join(text for text, _ in reviews()) + "\n")
    data = LanguageData(text=str(folder / "text.txt"), tokenizer="words", documents="line", length=16)
    short = {"steps": 4, "tokens": 128, "evaluate_every": 4, "metric": "loss", "tensorboard": False}
    body = LanguageConfig(out=str(folder / "body"), data=data, training=TrainingConfig(**short))
    body = replace(body, model=replace(body.model, width=16, heads=2, inner=32, layers=1))
    train(Language, body, Display(quiet=True))
    for index, rate in enumerate(RATES):
        finish(config(folder, f"tuned-{index}", init=body.out, learning_rate=rate, data={"tokenizer": None}, **SHORT))
    for seed in (3, 4):
        valid = {"valid_text": str(folder / "reviews.tsv")}
        finish(config(folder, f"scratch-{seed}", seed=seed, data=valid, **SHORT))
    return folder


def tuned(folder) -> list[str]:
    return [str(folder / f"tuned-{index}") for index in range(len(RATES))]


def weights(run) -> dict[str, torch.Tensor]:
    return Run.open(run).find().tensors["model"]


def accuracy(run, valid) -> float:
    truth, probabilities = Classifier.load(run, device="cpu").answers(valid)
    return float((probabilities.argmax(1) == truth).mean())


@pytest.mark.parametrize("how", ["uniform", "greedy"])
def test_a_soup_of_one_run_is_that_run(folder, tmp_path, how):
    soup = make_soup(tuned(folder)[:1], tmp_path / "soup", how, warn=silent)
    assert [part.used for part in soup.measured] == [True]
    ours, theirs = weights(tmp_path / "soup"), weights(tuned(folder)[0])
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_uniform_soup_is_the_mean_in_any_order(folder, tmp_path):
    runs = tuned(folder)
    make_soup(runs, tmp_path / "one", "uniform", warn=silent)
    make_soup(runs[::-1], tmp_path / "other", "uniform", warn=silent)
    one, other = weights(tmp_path / "one"), weights(tmp_path / "other")
    parts = [weights(run) for run in runs]
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name])
        mean = torch.stack([part[name].double() for part in parts]).mean(0)
        assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-12)
    assert any(not torch.equal(one[name], parts[0][name]) for name in one)


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_a_greedy_soup_is_never_worse_than_its_best_run(folder, tmp_path, metric):
    runs = tuned(folder)
    soup = make_soup(runs, tmp_path / "soup", "greedy", metric=metric, warn=silent)
    sign = -1 if metric == "loss" else 1
    values = [sign * part.value for part in soup.measured]
    assert values == sorted(values, reverse=True)
    assert sign * soup.value >= values[0]
    # the value is that of what was written, and what was refused would have made it worse
    recorded = Run.open(tmp_path / "soup").records()[-1]
    assert (recorded["event"], recorded[metric]) == ("average", soup.value)
    used = [str(part.ingredient.run.folder) for part in soup.used]
    assert soup.measured[0].used
    for part in soup.measured[1:]:
        if not part.used:
            more = make_soup(
                [*used, part.ingredient.run.folder], tmp_path / "more", "uniform", metric=metric, warn=silent
            )
            assert sign * more.value < sign * soup.value
            break


def test_a_greedy_soup_leaves_out_what_makes_it_worse(folder, tmp_path, monkeypatch):
    """With planted accuracies: three runs, then the first two together, then the first and the third, then the soup."""
    values = iter((0.9, 0.9, 0.9, 0.8, 0.9, 0.9))

    def planted(self, model):
        value = next(values)
        return value, {"accuracy": value}

    monkeypatch.setattr(_Validation, "_measure", planted)
    soup = make_soup(tuned(folder), tmp_path / "soup", "greedy", metric="accuracy", warn=silent)
    # an equal value is no fall
    assert [part.used for part in soup.measured] == [True, False, True]
    first, _, third = (weights(part.ingredient.run.folder) for part in soup.measured)
    for name, tensor in weights(tmp_path / "soup").items():
        assert_close(tensor.double(), (first[name].double() + third[name].double()) / 2, rtol=1e-6, atol=1e-12)


def test_a_greedy_soup_is_measured_against_itself(folder, tmp_path, monkeypatch):
    """With planted accuracies: what is tried next must reach the soup of the first two, not only the best run."""
    values = iter((0.9, 0.9, 0.9, 0.95, 0.92, 0.95))

    def planted(self, model):
        value = next(values)
        return value, {"accuracy": value}

    monkeypatch.setattr(_Validation, "_measure", planted)
    soup = make_soup(tuned(folder), tmp_path / "soup", "greedy", metric="accuracy", warn=silent)
    assert [part.used for part in soup.measured] == [True, True, False]


def test_its_folder_is_a_run_that_says_what_it_is_made_of(folder, tmp_path, capsys, monkeypatch):
    out = str(tmp_path / "soup")
    said, _ = told(monkeypatch, capsys, "average", *tuned(folder), "--soup", "uniform", "--out", out, "--metric", "f1")
    lines = said.splitlines()
    assert len(lines) == 4
    assert "uniform soup of 3 of 3 runs; f1 " in lines[-1]
    assert "regard classify" in lines[-1]
    facts = Run.open(out).read_json("run.json")
    assert (facts["soup"]["how"], facts["soup"]["metric"]) == ("uniform", "f1")
    assert {part["run"] for part in facts["soup"]["ingredients"]} == set(tuned(folder))
    said, _ = told(monkeypatch, capsys, "evaluate", out, "--json")
    assert json.loads(said)["accuracy"] == pytest.approx(accuracy(out, read_valid(out)))
    assert told(monkeypatch, capsys, "classify", out, stdin=b"a fine film\n")[0].count("\n") == 1
    assert "is a soup and cannot be resumed" in refused(capsys, "resume", out)
    assert read_config(Run.open(out)).out == out
    # and a run to begin with or to mix again
    make_soup([out, tuned(folder)[0]], tmp_path / "again", "greedy", warn=silent)
    compact_run(out, tmp_path / "small")
    make_soup([tmp_path / "small", tuned(folder)[0]], tmp_path / "third", "greedy", warn=silent)


def test_runs_of_different_models_are_refused_by_what_differs(folder, tmp_path):
    init, same = str(folder / "body"), {"tokenizer": None}
    shutil.copy(folder / "reviews.tsv", tmp_path)
    finish(config(tmp_path, "pooled", init=init, data=same, model={"pooling": "mean"}, **SHORT))
    finish(config(tmp_path, "dropped", init=init, data=same, model={"dropout": 0.3}, **SHORT))
    for other, words in (
        (folder / "body", "it is a run of|the other of 'language'"),
        (folder / "scratch-3", r"'\S+' is .* here, .* there"),
        (tmp_path / "pooled", r"model\.pooling is '(mean|last)' here, '(mean|last)' there"),
    ):
        with pytest.raises(ValueError, match=words):
            make_soup([tuned(folder)[0], other], tmp_path / "soup", "uniform", warn=silent)
    # dropout acts in training only
    make_soup([tuned(folder)[0], tmp_path / "dropped"], tmp_path / "soup", "uniform", warn=silent)


def test_other_labels_are_refused(folder, tmp_path):
    write(tmp_path / "reviews.tsv", [(text, {"good": "fine", "bad": "poor"}[label]) for text, label in reviews()])
    finish(config(tmp_path, "other", init=str(folder / "body"), data={"tokenizer": None}, **SHORT))
    with pytest.raises(ValueError, match="differ in their labels"):
        make_soup([tuned(folder)[0], tmp_path / "other"], tmp_path / "soup", "uniform", warn=silent)


def test_runs_from_different_weights_are_refused(folder, tmp_path):
    runs = [folder / "scratch-3", folder / "scratch-4"]
    with pytest.raises(ValueError, match=r"not trained from the same weights: .*\(seed \d\), .*no model"):
        make_soup(runs, tmp_path / "soup", "uniform", warn=silent)
    # the same seed: the same random weights, but no training in common
    data = {name: str(folder / "reviews.tsv") for name in ("text", "valid_text")}
    finish(config(tmp_path, "same", seed=3, learning_rate=1e-4, data=data, **SHORT))
    said: list[str] = []
    make_soup([runs[0], tmp_path / "same"], tmp_path / "soup", "uniform", warn=said.append)
    assert len(said) == 1
    assert "same random weights (seed 3)" in said[0]
    # where nothing is recorded
    said.clear()
    compact_run(runs[1], tmp_path / "small")
    make_soup([runs[0], tmp_path / "small"], tmp_path / "blind", "uniform", warn=said.append)
    assert any("does not record what it began with" in text for text in said)


def test_other_validation_data_is_refused(folder, tmp_path):
    """What is held out depends on the seed: one run would have learned what the other validates on."""
    finish(config(folder, "seeded", init=str(folder / "body"), data={"tokenizer": None}, seed=7, **SHORT))
    runs = [tuned(folder)[0], folder / "seeded"]
    with pytest.raises(ValueError, match="have different data"):
        make_soup(runs, tmp_path / "soup", "greedy", warn=silent)
    said: list[str] = []
    make_soup(runs, tmp_path / "soup", "uniform", warn=said.append)
    assert "may be too good" in said[0]
    # unless both are told what to hold out
    same = {"tokenizer": None, "held_out_seed": 1}
    finish(config(folder, "fixed", init=str(folder / "body"), data=same, seed=7, **SHORT))
    make_soup([runs[0], folder / "fixed"], tmp_path / "fixed", "greedy", warn=silent)


def test_what_the_verb_refuses(folder, tmp_path, capsys):
    one, other, _ = tuned(folder)
    out = str(tmp_path / "soup")
    for words, expected in (
        ((one, other), "--soup uniform or --soup greedy"),
        ((one, "--out", out), "--out is for soups"),
        ((one, other, "--soup", "greedy"), "give --out"),
        ((one, other, "--soup", "greedy", "--out", out, "--last", "2"), "--last is for"),
        ((one, one, "--soup", "greedy", "--out", out), "given twice"),
        ((one, other, "--soup", "greedy", "--out", other), "holds a run already"),
        ((one, other, "--soup", "greedy", "--out", out, "--metric", "bleu"), "accuracy, f1"),
    ):
        assert expected in refused(capsys, "average", *words)
    assert not (tmp_path / "soup").exists()


def tuned_images(folder, **model) -> list[str]:
    """Two runs of images that were tuned from a third, with different seeds."""
    write_folders(folder / "colours", 10)
    data = images.ImageData(images=str(folder / "colours"), batch=9, held_out_seed=1)
    training = TrainingConfig(**SHORT | {"learning_rate": 0.003, "metric": "accuracy", "tensorboard": False})
    options = images.ImageOptions(**model)
    settings = images.ImagesConfig(out=str(folder / "body"), data=data, model=options, training=training)
    train(images.Task, settings, Display(quiet=True))
    for seed in (2, 3):
        tuned = replace(settings, out=str(folder / f"tuned-{seed}"), init=settings.out, model=images.ImageOptions())
        train(images.Task, replace(tuned, training=replace(training, seed=seed)), Display(quiet=True))
    return [str(folder / f"tuned-{seed}") for seed in (2, 3)]


def test_runs_of_images(tmp_path, capsys, monkeypatch):
    out, runs = str(tmp_path / "soup"), tuned_images(tmp_path, width=16, heads=2, inner=16, layers=1, patch=4)
    said, warned = told(monkeypatch, capsys, "average", *runs, "--soup", "greedy", "--out", out, "--metric", "loss")
    assert "greedy soup of" in said
    assert warned == ""
    said, _ = told(monkeypatch, capsys, "evaluate", out, "--json")
    assert json.loads(said)["loss"] == pytest.approx(Run.open(out).read_json("run.json")["soup"]["value"], abs=1e-6)
    picture = next((tmp_path / "colours" / "red").iterdir())
    assert told(monkeypatch, capsys, "classify", out, str(picture))[0].startswith(str(picture))


def test_batch_norms_of_a_soup_are_those_of_its_weights(tmp_path):
    """The first of them reads what all models read alike, so the mean of their statistics is nearly right; the last
    reads what the weights make of it."""
    small = {"stem_width": 8, "width": 16, "inner": 16, "head_width": 8, "layers": (1, 1), "convolutions": 1}
    runs = tuned_images(tmp_path, preset="coatnet-nano", **small)
    make_soup(runs, tmp_path / "soup", "uniform", warn=silent)
    make_soup(runs[:1], tmp_path / "one", "uniform", warn=silent)
    soup, parts = weights(tmp_path / "soup"), [weights(run) for run in runs]
    counters = [name for name in soup if name.endswith("num_batches_tracked")]
    assert counters
    # three batches of an epoch, in place of the steps of the training
    assert {int(soup[name]) for name in counters} == {3}
    means = [name for name in soup if name.endswith("running_mean")]
    assert all(not torch.equal(soup[name], (parts[0][name] + parts[1][name]) / 2) for name in means)
    # one run is left as it is
    one = weights(tmp_path / "one")
    assert all(torch.equal(one[name], parts[0][name]) for name in one)


class Batch(tuple):
    def to(self, device):
        return self


class Normed:
    """A task whose model has a batch norm."""

    def __init__(self, batches):
        self.model = nn.Sequential(nn.BatchNorm1d(3, momentum=0.3), nn.Dropout(0.5))
        self.batches, self.data = self, batches

    def count(self, epoch):
        return len(self.data)

    def get(self, epoch, index):
        return Batch([self.data[index]])

    def prepare(self, batch):
        return batch

    def loss(self, batch, label_smoothing):
        return self.model(batch[0])


def test_statistics_of_batch_norms_are_measured_anew():
    data = list(torch.randn(4, 5, 3, dtype=torch.float64) * 3 + 2)
    task = Normed(data)
    task.model.append(nn.Linear(3, 1)).double()
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    found = renew_statistics(task)
    assert_close(found["0.running_mean"], torch.stack([part.mean(0) for part in data]).mean(0))
    assert_close(found["0.running_var"], torch.stack([part.var(0) for part in data]).mean(0))
    assert found.keys() == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    assert task.model[0].momentum == 0.3
    assert not any(part.training for part in task.model)
    assert all(torch.equal(before[name], task.model.state_dict()[name]) for name in before.keys() - found.keys())
    assert renew_statistics(type("Plain", (), {"model": nn.Linear(2, 2)})()) == {}
