"""The survey's table: all rows are there, each word exists, and every difference has its reason, and only those."""

import json

import pytest

from regard import cli
from regard.models.funnel import Funnel
from regard.models.perceiver import Perceiver
from regard.models.tokenlearner import TokenLearner
from regard.spec import ATTENTION, FEEDFORWARD
from regard.survey import SYSTEMS, differs

MODELS = {"funnel": Funnel, "perceiver": Perceiver, "tokenlearner": TokenLearner}


def test_all_systems_of_the_survey():
    assert len(SYSTEMS) == 33
    assert len({system.name for system in SYSTEMS}) == 33
    assert {system.model for system in SYSTEMS} - {None} == set(MODELS)
    assert {system.feedforward for system in SYSTEMS} - {None} <= set(FEEDFORWARD.names())
    assert all(system.word or system.model or system.feedforward for system in SYSTEMS)


@pytest.mark.parametrize("system", [system for system in SYSTEMS if system.word], ids=lambda system: system.word)
def test_every_difference_has_its_reason(system):
    facts = ATTENTION.find(system.word).facts
    decodes = facts.state is not None and "causal" in facts.roles
    assert differs(system, facts.time.exponent, decodes) == bool(system.note)


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
