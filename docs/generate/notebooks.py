"""Notebooks, executed, and as pages of the site. Neither needs Jupyter."""

import ast
import contextlib
import io
import json
import re
from typing import Any, NamedTuple

from paths import DOCS, relocate


class Cell(NamedTuple):
    """A cell with its output: printed text, values as HTML, figures as PNG."""

    kind: str
    source: str
    text: str = ""
    html: str = ""
    figures: tuple[bytes, ...] = ()


def read(name: str) -> list[Cell]:
    content = json.loads((DOCS / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
    return [Cell(cell["cell_type"], "".join(cell["source"])) for cell in content["cells"]]


def run(name: str) -> list[Cell]:
    """The cells in order, in a namespace of their own, as a kernel would run them."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    return [_run(cell, f"{name}.ipynb, cell {index}", namespace) for index, cell in enumerate(read(name))]


def as_page(name: str, executed: bool = True) -> tuple[str, dict[str, bytes]]:
    """The notebook as Markdown, and the files beside it; unless `executed`, without what the cells give."""
    cells = run(name) if executed else read(name)
    lines, files = [], {}
    for index, cell in enumerate(cells):
        own = f"{name}-{index}"
        if cell.kind == "markdown":
            lines += [relocate(cell.source, f"docs/notebooks/{name}.ipynb", f"notebooks/{name}.md"), ""]
            continue
        lines += [f"```python\n{cell.source}\n```", ""]
        lines += [f"```text\n{cell.text.rstrip()}\n```", ""] if cell.text else []
        if cell.html:
            # in a file of its own: neither Markdown nor the styles of the site touch it
            files[f"{own}.html"] = f"<!doctype html><meta charset=utf-8><body style=margin:0>{cell.html}".encode()
            height = re.search(r"height: (\d+)px", cell.html)
            frame = f'style="width: 100%; height: {height[1] if height else 400}px; border: 0"'
            lines += [f'<iframe src="{own}.html" title="What the cell above shows" {frame}></iframe>', ""]
        for number, figure in enumerate(cell.figures):
            files[f"{own}-{number}.png"] = figure
            lines += [f"![What the cell above draws]({own}-{number}.png){{ width=600 }}", ""]
    return "\n".join(lines), files


def _run(cell: Cell, place: str, namespace: dict[str, Any]) -> Cell:
    if cell.kind != "code":
        return cell
    tree = ast.parse(cell.source, place)
    # a semicolon at the end hides the value, as in Jupyter
    shows = tree.body and isinstance(tree.body[-1], ast.Expr) and not cell.source.rstrip().endswith(";")
    last = tree.body.pop() if shows else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, place, "exec"), namespace)
        value = eval(compile(ast.Expression(last.value), place, "eval"), namespace) if last is not None else None
    # a value is shown as a kernel shows it: as a figure, as HTML, or in words
    if hasattr(value, "savefig"):
        stream = io.BytesIO()
        value.savefig(stream, format="png", dpi=110)
        return cell._replace(text=printed.getvalue(), figures=(stream.getvalue(),))
    if hasattr(value, "_repr_html_"):
        return cell._replace(text=printed.getvalue(), html=value._repr_html_())
    return cell._replace(text=printed.getvalue() + ("" if value is None else repr(value)))
