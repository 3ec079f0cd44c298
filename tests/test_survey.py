"""The survey's table: all rows are there, each word exists, and every difference has its reason, and only those."""

import json
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from regard import cli
from regard.core.tally import FLASH, Tally
from regard.models import build, registry
from regard.models.funnel import FunnelConfig
from regard.models.perceiver import PerceiverARConfig
from regard.models.tokenlearner import TokenLearnerConfig
from regard.spec import ATTENTION, FEEDFORWARD
from regard.survey import SYSTEMS, System, differs, here

SMALL = {"vocabulary": 20, "width": 16, "heads": 4, "inner": 32, "dropout": 0.0}
MODELS = {
    "funnel": FunnelConfig(**SMALL, layers=(2, 1), decoder_layers=1),
    "perceiver-ar": PerceiverARConfig(**SMALL, layers=2, latents=8),
    "tokenlearner": TokenLearnerConfig(**SMALL, layers=3, tokens=8),
}


def test_all_systems_of_the_survey():
    assert len(SYSTEMS) == 33
    assert len({system.name for system in SYSTEMS}) == 33
    assert {system.model for system in SYSTEMS} - {None} == set(MODELS)
    for system in SYSTEMS:
        assert [bool(part) for part in (system.word, system.model, system.feedforward)].count(True) == 1
        assert system.word is None or system.word in ATTENTION.names()
        assert system.feedforward is None or system.feedforward in FEEDFORWARD.names()


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_every_difference_has_its_reason(system):
    assert differs(system) == bool(system.note)


def cost(kind: str, T: int) -> tuple[int, int, int]:
    """Operations, elements written, and bytes saved for the backward pass, of a training step."""
    torch.manual_seed(0)
    model, saved = build(MODELS[kind]), {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with FlopCounterMode(display=False, custom_mapping=FLASH) as flops, Tally() as tally:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            logits = model(torch.randint(20, (1, T))).logits
        logits.sum().backward()
    return flops.get_total_flops(), tally.written, sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("system", [system for system in SYSTEMS if system.model], ids=lambda system: system.model)
def test_models_are_counted(system: System):
    short, long = cost(system.model, 1024), cost(system.model, 2048)
    flops, written, saved = (math.log2(more / less) for more, less in zip(long, short, strict=True))
    assert max(flops, written) == pytest.approx(here(system).time, abs=0.15)
    assert saved == pytest.approx(here(system).memory, abs=0.15)
    modules = {form.module for form in registry.find(system.model).forms.values()}
    assert all(hasattr(module, "extend") == here(system).decodes for module in modules)


def test_the_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert cli.main(["list", "--survey"]) == 0
    said = capsys.readouterr().out
    for system in SYSTEMS:
        assert system.name in said
    for word in ("O(N sqrt N)", "FP+M", "[1]", "N^1.75"):
        assert word in said
    assert cli.main(["list", "--survey", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.split("\n")[:-1]]
    assert len(rows) == 33
    assert {row["name"]: row["time"] for row in rows}["Performer"] == 1
