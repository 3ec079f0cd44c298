"""The API reference: the names of `regard` itself, and every public module by package."""

import importlib
import inspect
import pkgutil

import regard
from regard.spec import REGISTRIES

# packages with a page of their own, with what is said above them; modules of `regard` itself share one
PACKAGES = {
    "tasks": "What a model can be trained for, and what a trained run does: `Translator`, `LanguageModel`, "
    "`MaskedModel`, `Embedder`, `Classifier`.",
    "models": "Models made of the layers, each from its config.",
    "layers": "The contracts of attention, feed-forward layers and position schemes, and the bases to build on. "
    "[Mechanisms](../attention/index.md) have pages of their own.",
    "core": "What all layers speak: rows, masks, shapes, states.",
    "kernels": "Fast paths as plain functions of tensors, and which of them runs.",
    "decoding": "Greedy search, sampling and beam search over `start` and `extend`.",
    "training": "The loop, its schedule, checkpoints and run folders.",
    "data": "From files to tokens and batches.",
    "metrics": "Scores of translation, classification and alignment.",
    "interop": "Models of other libraries in and out.",
    "page": "The page of `regard show`: maps, the engine, the server.",
    "serve": "The server of an API for several users at once.",
    "compare": "Measured comparisons of mechanisms.",
    "testing": "The conformance suite, for mechanisms of other packages.",
}
UNLISTED = (
    *("regard.cli", "regard.bundled", "regard.recipes", "regard.__main__"),
    *("regard.testing.plugin", "regard.testing.test_conformance"),  # need pytest, which the documentation does not
)


def public_objects() -> list[str]:
    """The full path of each name of `regard.__all__`: where it is defined."""
    found = [getattr(regard, name) for name in regard.__all__]
    return [f"{part.__module__}.{part.__qualname__}" for part in found]


def public_modules() -> dict[str, list[str]]:
    """The modules of each page. A mechanism's own module is on its own page instead."""
    mechanisms = {cls.__module__ for registry in REGISTRIES.values() for cls in registry.classes.values()}
    found: dict[str, list[str]] = {}
    for module in pkgutil.walk_packages(regard.__path__, "regard."):
        name = module.name
        private = any(part.startswith("_") for part in name.split("."))
        unlisted = any(name == other or name.startswith(f"{other}.") for other in UNLISTED)
        if private or unlisted or name in mechanisms or "_triton" in name:
            continue
        package = name.split(".")[1]
        found.setdefault(package if _is_package(f"regard.{package}") else "modules", []).append(name)
    return found


def reference_pages() -> dict[str, str]:
    modules = public_modules()
    pages = {"reference/index.md": _top(modules)}
    for package, names in modules.items():
        title = "Other modules" if package == "modules" else f"regard.{package}"
        lines = [f"# {title}", "", PACKAGES.get(package, ""), ""]
        lines += [_module(name) for name in names if _says_something(name)]
        pages[f"reference/{package}.md"] = "\n".join(lines)
    return pages


def _top(modules: dict[str, list[str]]) -> str:
    lines = ["# regard", "", inspect.getdoc(regard) or "", ""]
    lines += [
        f"- [`regard.{package}`]({package}.md): {PACKAGES.get(package, '')}"
        for package in PACKAGES
        if package in modules
    ]
    lines += ["- [The command line](command-line.md): every verb with its flags."]
    lines += ["- [Other modules](modules.md): specs, config files, pictures.", ""]
    for path in sorted(public_objects(), key=lambda path: path.rpartition(".")[2].lower()):
        lines += [f"::: {path}", "    options:", "      heading_level: 2", "      skip_local_inventory: true", ""]
    return "\n".join(lines)


def _module(name: str) -> str:
    return f"::: {name}\n    options:\n      heading_level: 2\n      show_root_full_path: true\n"


def _says_something(name: str) -> bool:
    return bool(importlib.import_module(name).__doc__)


def _is_package(name: str) -> bool:
    return hasattr(importlib.import_module(name), "__path__")
