"""Where a file of the repository is on the site, and links that follow it there."""

import posixpath
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
BUNDLED = sorted(path.parent.name for path in (REPOSITORY / "regard" / "bundled").glob("*/README.md"))
NOTEBOOKS = sorted(path.stem for path in (DOCS / "notebooks").glob("*.ipynb"))

# files of the repository that are pages of the site, with the page
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    **{f"regard/bundled/{name}/README.md": f"bundled/{name}.md" for name in BUNDLED},
    **{f"docs/notebooks/{name}.ipynb": f"notebooks/{name}.md" for name in NOTEBOOKS},
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2[ \t]*$", re.DOTALL | re.MULTILINE)


def place_of(file: str) -> str | None:
    """The page or picture of the site that a file of the repository becomes; None: it is not on the site."""
    if file in PAGES:
        return PAGES[file]
    inside = file.removeprefix("docs/")
    return inside if inside != file and not inside.startswith("generate/") else None


def relocate(text: str, origin: str, page: str) -> str:
    """Markdown of the file `origin` with its links as they must be on `page`. A link to a file that is not on the site
    becomes the name of the file."""

    def moved(match: re.Match) -> str:
        picture, words, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, _, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        if not (REPOSITORY / file).exists():
            raise ValueError(f"{origin} links to {target}, and there is no {file}: mend the link")
        place = place_of(file)
        if place is None:
            return words if file in words else f"{words} (`{file}`)"
        target = posixpath.relpath(place, posixpath.dirname(page) or ".")
        return f"{picture}[{words}]({target}{'#' * bool(anchor)}{anchor})"

    return outside_code(text, lambda part: LINK.sub(moved, part))


def outside_code(text: str, change) -> str:
    """The text with `change` applied to all but its fenced code."""
    parts, last = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*parts, change(text[last:])])
