"""Table 2: what its plans ask for, and that its rows train without waiting for the device."""

import json
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regard import models
from regard.compare import tables, wmt
from regard.compare.quality import ENSEMBLE, quality_plan
from regard.config import parse
from regard.tasks.translate.config import TranslateConfig

DATA = ("--data.source", "a", "--data.valid_source", "b", "--data.tokenizer", "units")
aten = torch.ops.aten
# what copies a number to the host, or a result of unknown size
WAITING = (aten._local_scalar_dense, aten.is_nonzero, aten.nonzero, aten.masked_select, aten.item)


class Waits(TorchDispatchMode):
    """Notes the operators that a CUDA graph cannot capture."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        picks = function.overloadpacket in (aten.index, aten.index_put, aten.index_put_)
        by_mask = picks and any(part is not None and part.dtype == torch.bool for part in args[1])
        if function.overloadpacket in WAITING or by_mask:
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


def test_the_epochs_may_be_others():
    epochs, flops = tables.build("wmt", "small", *DATA, "--training.epochs", "3").quality
    assert (epochs.axis, epochs.amount) == ("epochs", 3)
    # what is counted stays, and the flag is not handed to `regard train`, which gets steps
    assert flops.amount == wmt.AMOUNTS["small"].flops
    assert "--training.epochs" not in epochs.flags
    assert epochs.flags[-len(DATA) :] == DATA
    assert tables.build("wmt", "small", *DATA, "--training.epochs=3").quality == (epochs, flops)
    for wrong in (("--training.epochs", "few"), ("--training.epochs", "0"), ("--training.epochs",)):
        with pytest.raises(ValueError, match=r"--training\.epochs must be a number above 0, got"):
            tables.build("wmt", "small", *DATA, *wrong)


@pytest.mark.parametrize("size", tables.SIZES)
def test_a_report_finds_the_cells(size):
    """A plan that was written and read again asks the same questions, to the last digit of their keys."""
    for plan in tables.build("wmt", size, *DATA).quality:
        again = quality_plan(json.loads(json.dumps(plan.to_json())))
        for spec, seed in (("GNMT", 1), ("Deep-Att on words, unknown replaced, ensemble", ENSEMBLE)):
            assert again.question(spec, 0.003, seed).key == plan.question(spec, 0.003, seed).key


def test_an_ensemble_decodes_as_its_members():
    """With the penalty on coverage, or with unknown words replaced."""
    plan = tables.build("wmt", "smoke", *DATA).quality[0]
    rows = {one.name: one for one in plan.variants}
    members = [one for one in rows.values() if not one.ensemble]
    assert [one.test for one in members if one.test] == [("--coverage", "0.2"), ("--replace-unknown",)]
    for one in members:
        both = rows[f"{one.name}, ensemble"]
        assert (both.test, both.words, both.of) == (one.test, one.words, one.of or one.name)


def test_what_a_user_says_comes_last():
    """A flag of the user's counts, not that of the table."""
    plan = tables.build("wmt", "small", *DATA, "--training.tokens", "4096").quality[0]
    config = parse(TranslateConfig, list(plan.flags), "regard train translate", "")
    assert config.training.tokens == 4096


@pytest.mark.parametrize("row", [row for row in (*wmt.ROWS, *wmt.DEEP_ROWS) if not row.of], ids=lambda row: row.name)
def test_a_row_trains_without_waiting_for_the_device(row, monkeypatch):
    """So that its step can be captured as a CUDA graph. What only a CPU looks at is left out."""
    monkeypatch.setattr("regard.layers.position.learned.check_end", lambda *_: None)
    monkeypatch.setattr("regard.kernels.grouped._counted", lambda _: False)
    torch.manual_seed(0)
    config = parse(TranslateConfig, [*wmt.SHORT, *row.flags], "regard train translate", "")
    model: Any = models.build(config.model.resolve(vocabulary=30)).train()
    source, target = torch.randint(4, 30, (3, 9)), torch.randint(4, 30, (3, 7))
    keep, target_keep = (torch.arange(part.shape[1]) < torch.tensor([[7], [4], [2]]) for part in (source, target))
    with Waits() as waits:
        found = model.hidden(source, target, keep=keep, target_keep=target_keep)
        found.x.square().mean().backward()
    assert waits.found == []
