"""Settings that gave the figures of the documentation, to be taken by name: `regard train translate --config multi30k`.

A recipe is a config file of this folder, under the name of its task. Its first comment says what it is for, and below
it stands a command line.
"""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from regard.keywords import did_you_mean

FOLDER = Path(__file__).parent


class Recipe(NamedTuple):
    """A config file bundled with Regard."""

    name: str
    task: str
    about: str  # the comment at its top
    command: str  # a command line that uses it
    path: Path

    def settings(self, section: str) -> dict[str, Any]:
        """What it sets of a section, such as training."""
        import yaml

        return yaml.safe_load(self.path.read_text(encoding="utf-8")).get(section, {})


def recipes(task: str | None = None) -> list[Recipe]:
    """All recipes, or those of a task, by name."""
    found = [_read(path) for path in sorted(FOLDER.glob("*/*.yaml"))]
    return [recipe for recipe in found if task in (None, recipe.task)]


def find(name: str, task: str) -> Recipe:
    """The recipe of a task by its name; a ValueError says which there are."""
    known = {recipe.name: recipe for recipe in recipes()}
    if name not in known:
        names = [recipe.name for recipe in recipes(task)]
        hint = did_you_mean(name, names)
        raise ValueError(
            f"--config {name}: no such file, and no recipe of {task} has that name{hint}; its recipes: "
            f"{', '.join(names)}; or give the path of a YAML file"
        )
    recipe = known[name]
    if recipe.task != task:
        raise ValueError(f"{name!r} is a recipe of {recipe.task}: regard train {recipe.task} --config {name}")
    return recipe


def with_paths(argv: list[str], task: str) -> list[str]:
    """A command line with the paths of recipes in the place of their names."""
    found = list(argv)
    for index, word in enumerate(argv):
        if word.startswith("--config="):
            found[index] = f"--config={_path(word.removeprefix('--config='), task)}"
        elif index and argv[index - 1] == "--config":
            found[index] = _path(word, task)
    return found


def named(argv: Sequence[str], task: str) -> list[Recipe]:
    """The recipes of a task that a command line names."""
    known = {recipe.name: recipe for recipe in recipes(task)}
    values = [value for flag, value in itertools.pairwise(argv) if flag == "--config"]
    values += [word.removeprefix("--config=") for word in argv if word.startswith("--config=")]
    return [known[value] for value in values if value in known and _is_name(value)]


def _path(value: str, task: str) -> str:
    return str(find(value, task).path) if _is_name(value) else value


def _is_name(value: str) -> bool:
    """A plain word names a recipe, unless it is the name of a file here."""
    return bool(re.fullmatch(r"[\w-]+", value)) and (not Path(value).exists() or Path(value).is_dir())


def _read(path: Path) -> Recipe:
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#"))
    about = " ".join(line.strip() for line in comment if not line.startswith("   "))
    code = " ".join(line.strip() for line in comment if line.startswith("   ")).replace("\\ ", "")
    # whatever prepares the data stands before it
    command = code[max(code.find("regard train"), 0) :]
    return Recipe(path.stem, path.parent.name, about, command, path)
