"""All generated pages of the site, and its navigation."""

import functools
import io
from typing import Any

import layers
import notebooks
import reference
from command_line import command_page
from paths import NOTEBOOKS, PAGES, REPOSITORY, relocate

from regard.spec import REGISTRIES, parse


def generated(pictures: bool = False) -> dict[str, str | bytes]:
    """Path on the site -> its Markdown or picture. Pictures, and what notebooks give, take a minute."""
    found: dict[str, str | bytes] = {}
    for origin, page in PAGES.items():
        if not origin.endswith(".ipynb"):
            found[page] = relocate((REPOSITORY / origin).read_text(encoding="utf-8"), origin, page)
    found |= _code_pages()
    found |= reference.reference_pages()
    for name in NOTEBOOKS:
        page, files = notebooks.as_page(name, executed=pictures)
        found[f"notebooks/{name}.md"] = page
        found |= {f"notebooks/{file}": content for file, content in files.items()}
    return found | (drawn() if pictures else {})


@functools.cache
def _code_pages() -> dict[str, str]:
    return layers.layer_pages() | command_page()


def navigation(nav: list[Any]) -> list[Any]:
    """The navigation of mkdocs.yml, with the generated pages of a folder in the place of "folder/*"."""
    pages = [page for page in generated() if page.endswith(".md")]
    return [_expanded(entry, pages) for entry in nav]


def _expanded(entry: Any, pages: list[str]) -> Any:
    if isinstance(entry, str):
        return entry
    [(title, inside)] = entry.items()
    if isinstance(inside, list):
        return {title: [_expanded(part, pages) for part in inside]}
    if not inside.endswith("/*"):
        return entry
    folder = inside.removesuffix("*")
    own = [page for page in pages if page.startswith(folder)]
    return {title: sorted(own, key=lambda page: (not page.endswith("/index.md"), page))}


def drawn() -> dict[str, bytes]:
    from regard import draw

    found = {}
    for kind, registry in REGISTRIES.items():
        for name in registry.names():
            for file, arguments in layers.drawn_specs(kind, name).items():
                drawn = draw.measure(**arguments)
                # where every pair is seen, how much tells more than whether
                if drawn.dense or kind == "position":
                    least = parse(arguments["spec"]).heads
                    drawn = draw.measure(**arguments, heads=-(-4 // least) * least)
                    picture = draw.weights_picture(drawn)
                else:
                    picture = draw.pattern_picture(drawn)
                stream = io.BytesIO()
                picture.savefig(stream, format="png", dpi=110)
                found[f"{kind}/pictures/{file}.png"] = stream.getvalue()
    return found
