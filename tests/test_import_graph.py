"""Which package may import which: the arrows of the architecture, drawn from the source.

Lower packages know nothing of higher ones, so that each can be read, tested and used without what stands on it. `core`
may use `kernels`, which know nothing of ours: a mask tells a kernel where its keys stand. `spec` holds the registries;
it finds layers by looking at the files of a package and imports none, so that layers and models may name each other by
spec strings through it.
"""

import ast
import functools
from pathlib import Path
from typing import NamedTuple

import pytest

import regard
from regard import tasks

ROOT = Path(regard.__file__).parent
NEUTRAL = {"aliases", "keywords", "lazy", "plugins", "spec"}  # top-level modules that import no package of ours
LAYERS = {"layers.attention", "layers.feedforward", "layers.position"}
BELOW = {
    "kernels": set(),
    "aliases": set(),
    "keywords": set(),
    "lazy": set(),
    "plugins": set(),
    "spec": {"aliases", "keywords", "plugins"},
    "core": {"kernels", "keywords"},
    "http": set(),
    "layers": set(),
    "layers.position": {"core", "kernels", "spec"},
    "layers.feedforward": {"core", "kernels", "spec"},
    "layers.attention": {"core", "kernels", "spec", "layers.position"},
    "models": {"core", "kernels", "keywords", "plugins", "spec", *LAYERS},
    "data": {"core"},
    "metrics": {"core"},
    "decoding": {"core"},
    "config": {"core", "spec"},
    "training": {"core", "kernels", "data", "config"},
    "api": {"core", "kernels", "keywords", "spec", *LAYERS},
    "survey": {"core", "spec", "models"},
    "testing": {"", "core", "spec", *LAYERS},
}
# what stands on tasks may know everything below, and of these packages those that are named
TOP = {
    "tasks": set(),
    "interop": {"tasks"},
    "page": {"tasks"},
    "compare": {"tasks"},
    "serve": {"tasks"},
    "cli": {"tasks", "interop", "page", "compare", "serve"},
}
BASES = {"base", "checks", "projected", "attending", "cached", "tailed", "digested", "scanned", "segmented", "mixing"}
SHARED = {
    "layers.attention": BASES | {"draws"},
    "layers.feedforward": {"base", "experts", "pairs"},
    "layers.position": {"base"},
}


class Import(NamedTuple):
    module: str
    names: tuple[str, ...]  # of `from module import names`
    line: int
    loads: bool  # where the file is loaded, not where a function of it is called or types are checked


def modules(root: Path = ROOT) -> dict[str, str]:
    """The sources of the package by dotted name, without `regard.`; of packages those of their `__init__.py`."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


@functools.cache
def parsed(source: str) -> list[Import]:
    tree, found = ast.parse(source), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, (), node.lineno, node in tree.body) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            found.append(Import("." * node.level + (node.module or ""), names, node.lineno, node in tree.body))
    return found


def imports(module: str, known: dict[str, str], loads: bool = False) -> dict[str, int]:
    """The modules of ours that one imports, by dotted name, with a line of each; `loads`: only when it is loaded."""
    found = {}
    for one in parsed(known[module]):
        inside = [f"{one.module}.{name}" for name in one.names]
        names = [name if name.removeprefix("regard.") in known else one.module for name in inside] or [one.module]
        for name in names:
            assert not name.startswith("."), f"{where(module, one.line)}: a relative import; write from regard..."
            if name.partition(".")[0] == "regard" and (one.loads or not loads):
                found.setdefault(name.partition(".")[2], one.line)
    return found


def where(module: str, line: int) -> str:
    file = ROOT / module.replace(".", "/")
    path = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    return f"{path.relative_to(ROOT.parent)}:{line}"


def package(module: str) -> str:
    """`layers.attention` for what is in it, the first word for the rest."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def wrong_arrows(known: dict[str, str], allowed: dict[str, set[str]]) -> list[str]:
    found = []
    for module in known:
        own = package(module)
        for other, line in imports(module, known).items():
            to = package(other)
            if own in allowed and to != own and to not in allowed[own]:
                may = ", ".join(sorted(allowed[own])) or "nothing of ours"
                found.append(f"{where(module, line)}: {own} imports {other or 'regard'}; it may import {may}")
    return found


def siblings(known: dict[str, str]) -> list[str]:
    """A mechanism that imports another."""
    return [
        f"{where(module, line)}: imports its sibling {other}; share through a base, or build it by its spec"
        for kind, shared in SHARED.items()
        for module in known
        if package(module) == kind and module != kind
        for other, line in imports(module, known).items()
        if package(other) == kind and other != kind and other.rpartition(".")[2] not in shared
    ]


def cycles(known: dict[str, str]) -> list[list[str]]:
    """Modules that import each other in a circle when they are loaded."""
    edges = {module: sorted({*imports(module, known, loads=True)} - {module}) for module in known}
    found, done = [], set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            found.append([*trail[trail.index(module) :], module])
        elif module not in done:
            for other in edges.get(module, ()):
                visit(other, [*trail, module])
            done.add(module)

    for module in edges:
        visit(module, [])
    return found


KNOWN = modules()


def test_arrows_point_down():
    below = set(BELOW) - {"testing"} | {"draw", "recipes", "", *NEUTRAL}
    allowed = BELOW | {name: below | others for name, others in TOP.items()}
    wrong = wrong_arrows(KNOWN, allowed)
    assert not wrong, "\n".join(wrong)


def test_no_mechanism_imports_another():
    wrong = siblings(KNOWN)
    assert not wrong, "\n".join(wrong)


def test_no_cycle():
    found = cycles(KNOWN)
    assert not found, "\n".join(" -> ".join(circle) for circle in found)


@pytest.mark.parametrize("top", ["cli", "testing", "compare"])
def test_nobody_imports_the_command_line_or_the_suite(top):
    """Only the command line imports what compares."""
    may = (top, "__main__", "cli") if top == "compare" else (top, "__main__")
    wrong = [
        f"{module}: {other}"
        for module in KNOWN
        if package(module) not in may
        for other in imports(module, KNOWN)
        if package(other) == top
    ]
    assert not wrong, "\n".join(wrong)


def reads_arguments(known: dict[str, str]) -> list[str]:
    """Modules that parse a command line."""
    return [module for module in known if any(one.module == "argparse" for one in parsed(known[module]))]


def test_only_verbs_know_the_command_line():
    """`config` makes flags of dataclasses; what a verb does, the others offer as functions."""
    allowed = ("config", "tasks.command", *(f"tasks.{name}.verbs" for name in tasks.TASKS))
    wrong = [module for module in reads_arguments(KNOWN) if package(module) != "cli" and module not in allowed]
    assert not wrong, wrong
    assert reads_arguments({"page.engine": "import argparse\n", "page.maps": "import torch\n"}) == ["page.engine"]


@pytest.mark.parametrize(
    ("name", "line", "says"),
    [
        (
            "kernels.tiles",
            "from regard.core.rows import Rows",
            "kernels imports core.rows; it may import nothing of ours",
        ),
        ("layers.position.none", "from regard.layers.attention.base import Facts", "layers.position imports"),
        (
            "training.loop",
            "    from regard.layers.attention.base import Attention",
            "training imports layers.attention",
        ),
        ("decoding.beam", "    import regard.models.transformer", "decoding imports models.transformer"),
        ("layers.attention.local", "from regard.layers.attention.softmax import Softmax", "its sibling"),
        ("core.rows", "from regard.core import state", "core.rows -> core.state -> core.rows"),
    ],
)
def test_a_wrong_import_is_found(name, line, says):
    late = "\n\ndef late():\n" if line.startswith(" ") else "\n"
    known = KNOWN | {name: f"{KNOWN[name]}{late}{line}\n"}
    circles = [" -> ".join(circle) for circle in cycles(known)]
    assert any(says in found for found in [*wrong_arrows(known, BELOW), *siblings(known), *circles])
