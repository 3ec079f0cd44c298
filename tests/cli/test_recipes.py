"""Recipes: settings that come with the package and are taken by name."""

import json
import shlex
from itertools import pairwise

import pytest
from verbs import refused, told

from regard import cli, recipes, tasks
from regard.config import parse
from regard.recipes import with_paths

ALL = recipes.recipes()


def read(words: list[str], name: str):
    cls = tasks.find(name).config
    return parse(cls, with_paths(words, name), f"regard train {name}", "")


@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.name)
def test_every_recipe_is_read_by_name_from_anywhere(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, verb, name, *words = shlex.split(recipe.command)
    assert (program, verb, name) == ("regard", "train", recipe.task)
    assert ("--config", recipe.name) in pairwise(words)
    config = read(words, name)
    by_path = [str(recipe.path) if word == recipe.name else word for word in words]
    assert config == read(by_path, name)
    assert config.training != tasks.find(name).config().training
    assert recipe.about.endswith(".")


def test_names_are_unique_and_tasks_known():
    assert len({recipe.name for recipe in ALL}) == len(ALL) > 10
    assert {recipe.task for recipe in ALL} <= set(tasks.TASKS)


def test_with_an_equals_sign_and_with_flags_over_it():
    config = read(["--config=multi30k", "--training.steps", "7"], "translate")
    assert (config.training.steps, config.data.tokenizer) == (7, "units")


def test_a_file_of_that_name_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "multi30k").write_text("training:\n  steps: 3\n")
    assert read(["--config", "multi30k"], "translate").training.steps == 3
    # a folder of data may well be called like the recipe for it
    (tmp_path / "tatoeba").mkdir()
    assert read(["--config", "tatoeba"], "translate").data.vocabulary == 5500


def test_refusals(capsys):
    said = refused(capsys, "train", "translate", "--config", "multi30")
    assert "did you mean 'multi30k'" in said
    assert "hansards, multi30k, tatoeba" in said
    assert "path of a YAML file" in said
    said = refused(capsys, "train", "translate", "--config", "imdb")
    assert "regard train classify --config imdb" in said
    assert "nowhere.yaml" in refused(capsys, "train", "translate", "--config", "nowhere.yaml")


def test_list_and_help_name_them(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = told(monkeypatch, capsys, "list", "--recipes")[0].splitlines()
    assert {tuple(line.split()[:2]) for line in lines} >= {(recipe.name, recipe.task) for recipe in ALL}
    rows = [json.loads(line) for line in told(monkeypatch, capsys, "list", "--recipes", "--json")[0].splitlines()]
    assert [(row["name"], row["task"], row["command"]) for row in rows] == [
        (recipe.name, recipe.task, recipe.command) for recipe in ALL
    ]
    with pytest.raises(SystemExit):
        cli.main(["train", "masked", "--help"])
    said = capsys.readouterr().out
    assert all(f"{recipe.name}: " in said for recipe in recipes.recipes("masked"))
