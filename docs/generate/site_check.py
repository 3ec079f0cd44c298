"""The built site must load nothing from elsewhere: no font, style, script or picture."""

import re
import sys
from pathlib import Path

# what a browser fetches by itself; links that a reader follows may lead anywhere
LOADS = {
    ".html": (
        r"""<(?:script|img|iframe|source|video|audio|embed|input|track)\b[^>]*?\s(?:src|srcset)\s*=\s*["']?\s*((?:https?:)?//[^"'\s>]+)""",
        r"""<link\b(?![^>]*\brel=["']?(?:canonical|prev|next|edit|me|license)\b)[^>]*?\shref\s*=\s*["']?\s*((?:https?:)?//[^"'\s>]+)""",
        r"""<object\b[^>]*?\sdata\s*=\s*["']?\s*((?:https?:)?//[^"'\s>]+)""",
    ),
    ".css": (),
}
STYLES = (
    r"""@import\s+(?:url\()?\s*["']?\s*((?:https?:)?//[^"'\s);]+)""",
    r"""url\(\s*["']?\s*((?:https?:)?//[^"'\s)]+)""",
)


def foreign_loads(site: Path) -> list[str]:
    """Each page or style of a built site that loads something from elsewhere, and what."""
    found = []
    for path in sorted(site.rglob("*")):
        if path.suffix not in LOADS:
            continue
        text = path.read_text(encoding="utf-8")
        for pattern in (*LOADS[path.suffix], *STYLES):
            found += [f"{path.relative_to(site)} loads {address}" for address in re.findall(pattern, text, re.I)]
    return found


def check(site: Path) -> None:
    found = foreign_loads(site)
    if found:
        sys.exit(
            "the site loads from elsewhere, so it does not work offline and tells others who reads it:\n"
            + "\n".join(found)
        )
