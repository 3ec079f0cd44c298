"""A view as one HTML file that opens without a server: the page's own modules and style, and the replies they need.

The modules are joined into one script in the order of their imports. That needs no bundler because they follow two
rules: an import is one line that names what it takes, and an export is declared at the beginning of a line.
"""

import base64
import hashlib
import html
import json
import re
import zlib
from pathlib import Path
from typing import Annotated, Any, Literal

from regard.page import wire
from regard.page.cancel import IsCancelled
from regard.page.engine import Engine
from regard.page.questions import Bounds, chars

PAGE = Path(__file__).parent / "static"
IMPORT = re.compile(r'^import \{ ([^}]+) \} from "(\.[^"]+)";$', re.M)
EXPORT = re.compile(r"^export (?:async )?(?:function|class|const|let) (\w+)", re.M)

QUESTIONS = Bounds(
    maxItems=64,
    items={
        "type": "object",
        "properties": {
            "name": {"type": "string", "enum": [*Engine.questions(), "translate"]},
            "values": {"type": "object"},
        },
        "required": ["name", "values"],
        "additionalProperties": False,
    },
)


def page(
    engine: Engine,
    title: Annotated[str, chars(0, 200)],
    hash: Annotated[str, chars(0, 600_000)],
    theme: Literal["light", "dark", "auto"],
    questions: Annotated[list[dict[str, Any]], QUESTIONS],
    is_cancelled: IsCancelled | None = None,
) -> str:
    """A view and its data as one HTML file."""
    kept = []
    for question in questions:
        name, values = question["name"], question["values"]
        if name == "translate":
            lines: list[dict[str, Any]] = []
            lines.append(engine.translate(**values, emit=lines.append, is_cancelled=is_cancelled))
            raw = json.dumps(lines, ensure_ascii=False).encode()
        else:
            raw = wire.encode(engine.answer(name, values, is_cancelled), by_planes=True)
        kept.append({"name": name, "values": values, "reply": base64.b64encode(zlib.compress(raw, 9)).decode()})
    # escaped, so that no text of a user can end the element that holds it
    data = json.dumps({"hash": hash, "theme": theme, "kept": kept})
    for letter in "<>&":
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    script = bundle()
    style = (PAGE / "style.css").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    index = (PAGE / "index.html").read_text(encoding="utf-8")
    body = index[index.index("<body>") + len("<body>") : index.index("</body>")]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{style}</style></head>\n"
        f'<body>{body}\n<template id="kept">{data}</template>\n<script>{script}</script></body></html>\n'
    )


def bundle() -> str:
    """All modules of the page as one script."""
    done: dict[Path, str] = {}
    parts: list[str] = []

    def add(path: Path) -> str:
        if path in done:
            return done[path]
        text = path.read_text(encoding="utf-8")

        def replaced(match: re.Match[str]) -> str:
            names = re.sub(r"\bas\b", ":", match[1])
            return f"const {{ {names} }} = {add((path.parent / match[2]).resolve())};"

        text = IMPORT.sub(replaced, text)
        names = EXPORT.findall(text)
        done[path] = f"module{len(done)}"
        text = re.sub(r"^export ", "", text, flags=re.M)
        parts.append(f"const {done[path]} = (() => {{\n{text}\nreturn {{ {', '.join(names)} }};\n}})();")
        return done[path]

    main = add((PAGE / "main.js").resolve())
    script = "\n".join(['"use strict";', *parts, f"{main}.start();"])
    if "</script" in script.lower() or re.search(r"^import ", script, re.M):
        raise ValueError("a module of the page breaks the rules of export.py")
    return script


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
