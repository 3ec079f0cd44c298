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


def test_a_wrong_flag_of_a_test_set_is_said(tmp_path, capsys):
    with pytest.raises(ValueError, match="unrecognized arguments: --beams 3"):
        runs.evaluate("translate", [str(tmp_path), "--beams", "3"])
    # nothing of it on the terminal, where the table stands
    assert capsys.readouterr() == ("", "")
