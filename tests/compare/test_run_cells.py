"""Cells that are trained by `regard train`: what is counted of them, and their score on a test set."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from regard.compare import runs
from regard.compare.budget import Budget
from regard.training.config import TrainingConfig


class Batches:
    """As many as a device has."""

    def __init__(self, device):
        self.size = {"cpu": 4, "meta": 8}[device.type]

    def count(self, epoch):
        return 2 * self.size

    def get(self, epoch, index):
        return (torch.ones(self.size, 3),)


class Counted:
    """A task of one linear layer, whose batches depend on the device of its model."""

    read_data = classmethod(lambda cls, config: None)
    complete_config = classmethod(lambda cls, config, data: (config, []))
    choose_batch_size = classmethod(lambda cls, config, device: (config, None))
    train_tokenizers = classmethod(lambda cls, data, config: {})
    model_config = classmethod(lambda cls, config, tokenizers, data: None)
    build_model = classmethod(lambda cls, config, sizes: nn.Linear(3, 5, bias=False))

    def __init__(self, config, data, tokenizers, model):
        self.model, self.batches = model, Batches(model.weight.device)

    def prepare(self, batch):
        return batch

    def loss(self, batch, label_smoothing):
        return SimpleNamespace(total=self.model(batch[0]).sum())


@dataclasses.dataclass(frozen=True)
class Config:
    training: TrainingConfig


def test_operations_are_counted_on_the_batches_of_the_device(monkeypatch):
    """Which may be padded otherwise than those of the CPU, where they are counted."""
    alone = runs.count_run(Counted, Config(TrainingConfig(device="cpu")))
    # of 4 rows: a product forward, and one backward for the weights, for nothing asks for the gradient of the input
    assert alone == {"flops": 2 * (2 * 4 * 3 * 5), "epoch": 8}
    monkeypatch.setattr(runs, "pick_device", lambda *_: torch.device("meta"))
    there = runs.count_run(Counted, Config(TrainingConfig(device="cuda", accumulate=2)))
    assert there == {"flops": 2 * 2 * (2 * 8 * 3 * 5), "epoch": 8}


def test_operations_are_counted_once_for_all_seeds(tmp_path, monkeypatch):
    """And rates, and budgets; other sizes are counted anew."""
    found = []

    def count(task, config):
        found.append(config.training.seed)
        return {"flops": 1.0, "epoch": 2.0}

    monkeypatch.setattr(runs, "count_run", count)
    flags = ("--data.generated", "50")
    for seed, rate, budget in (
        (1, 0.1, Budget("epochs", 1)),
        (2, 0.1, Budget("epochs", 1)),
        (1, 0.2, Budget("flops", 9)),
    ):
        run = (str(tmp_path / "runs" / f"{seed}-{rate}"),)
        trial = runs.RunTrial("translate", flags, ("--model.width", "16"), run, rate, seed, budget)
        assert runs._counts(trial, []) == {"flops": 1.0, "epoch": 2.0}
    assert found == [0]
    runs._counts(dataclasses.replace(trial, row_flags=("--model.width", "32")), [])
    assert found == [0, 0]


TRAINED = ("--data.generated", "50")


def check(tmp_path, *flags, **more):
    """Checks a row of translate with these flags of all rows."""
    trial = runs.RunTrial("translate", flags, (), (str(tmp_path / "run"),), 0.01, 0, Budget("updates", 1))
    runs.check_run(dataclasses.replace(trial, **more))


def test_flags_of_a_single_row_are_for_that_row_to_say(tmp_path):
    """Here a flag that is none, and a file that is not there: the other rows may well be trained."""
    for row_flags in (("--model.nosuch", "1"), ("--data.source", "nosuch.en")):
        check(tmp_path, *TRAINED, row_flags=row_flags)
        with pytest.raises(ValueError, match=r"nosuch"):
            check(tmp_path, *TRAINED, *row_flags)


def test_words_of_a_single_row_are_joined_when_it_is_trained(tmp_path):
    """Nothing is read or written before."""
    files = {name: tmp_path / f"{name}.txt" for name in runs.FILES}
    for path in files.values():
        path.write_bytes(b"\xff")
    flags = [word for name, path in files.items() for word in (f"--data.{name}", str(path))]
    check(tmp_path, *flags, words=str(tmp_path / "words"))
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in files.values()}


@pytest.mark.parametrize("name", runs.FILES)
def test_each_file_of_all_rows_is_looked_for(tmp_path, name):
    for other in runs.FILES:
        (tmp_path / other).write_text("a\n")
    flags = [word for other in runs.FILES for word in (f"--data.{other}", str(tmp_path / other))]
    check(tmp_path, *flags)
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"^--data.{name} {tmp_path / name}: "):
        check(tmp_path, *flags)


def test_files_of_a_test_set_are_looked_for(tmp_path):
    here = tmp_path / "here"
    here.write_text("a\n")
    check(tmp_path, *TRAINED, test=("--source", str(here), "--target", str(here), "--beam", "2"))
    for name in ("source", "target"):
        files = {"source": here, "target": here} | {name: tmp_path / "gone"}
        test = tuple(word for flag, path in files.items() for word in (f"--{flag}", str(path)))
        with pytest.raises(ValueError, match=f"^--test.{name} {tmp_path / 'gone'}: "):
            check(tmp_path, *TRAINED, test=test)


def test_a_wrong_flag_of_a_test_set_is_said(tmp_path, capsys):
    with pytest.raises(ValueError, match="unrecognized arguments: --beams 3"):
        runs.evaluate("translate", [str(tmp_path), "--beams", "3"])
    # nothing of it on the terminal, where the table stands
    assert capsys.readouterr() == ("", "")
