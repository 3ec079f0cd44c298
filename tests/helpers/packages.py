"""Packages of somebody else, as pip would leave them: modules, and a dist-info folder with entry points."""

import re
from pathlib import Path

from folders import ROOT


def install(folder: Path, name: str, version: str, modules: dict[str, str], points: dict[str, dict[str, str]]) -> None:
    """Puts a package into a folder, which is to be on the path: sources by file, entry points by group and word."""
    for path, source in modules.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
    facts = folder / f"{name}-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, words in points.items():
        lines += [f"[{group}]", *(f"{word} = {value}" for word, value in words.items())]
    (facts / "entry_points.txt").write_text("\n".join(lines) + "\n")


def of_the_docs(name: str) -> str:
    """The code of a class that docs/adding.md shows whole."""
    text = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
    [code] = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if f"class {name}(" in code]
    return code
