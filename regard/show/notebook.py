"""`regard.show`: a model and a text as a page, inline in a notebook or in a file."""

import html
from pathlib import Path
from typing import Any
from urllib.parse import urlencode


class Shown:
    """Displays itself in a notebook; `save` writes the file that opens without a server."""

    def __init__(self, page: str, height: int):
        self.page, self.height = page, height

    def _repr_html_(self) -> str:
        # a frame of its own: no script of the page reaches the notebook, and none of the notebook the page
        return (
            f'<iframe srcdoc="{html.escape(self.page)}" sandbox="allow-scripts allow-downloads" '
            f'style="width: 100%; height: {self.height}px; border: 0"></iframe>'
        )

    def save(self, path: str | Path) -> Path:
        path = Path(path)
        path.write_text(self.page, encoding="utf-8")
        return path

    def __repr__(self) -> str:
        return f"<a page of {len(self.page):,} characters: display it in a notebook, or save('page.html')>"


def show(
    model: Any,
    text: str,
    *,
    tokenizer: Any = None,
    target: str | None = None,
    place: str | None = None,
    height: int = 720,
) -> Shown:
    """What attends to what when a model reads a text, as a page.

    `model` is a Translator, a run folder, None (the translator that comes with Regard), or a model of kind encoder or
    decoder with a tokenizer. `place` is "encoder", "decoder", "cross" or "aligner"; `target` a translation to read.

    >>> regard.show(model, "the bank of the river", tokenizer=tokenizer)
    >>> regard.show(None, "Where is the station?").save("page.html")
    """
    from regard.show.subjects import of_model, of_translator, open_run
    from regard.translation import Translator

    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"text must be some words to read, got {text!r}")
    if model is None or isinstance(model, str | Path):
        name = "shipped" if model is None else Path(model).resolve().name
        subject = open_run(model, name)
    elif isinstance(model, Translator):
        subject = of_translator("translator", "translator", model)
    else:
        subject = of_model("model", model, tokenizer)
    return Shown(still(subject, text, target or "", place or subject.places[0]), height)


def still(subject: Any, text: str, target: str, place: str) -> str:
    """The Heads view of a text as one file; a translator's as Translate, unless a place is asked for."""
    from regard.show.engine import Engine
    from regard.show.export import page
    from regard.show.maps import TILE_ROWS

    engine = Engine({subject.name: lambda: subject})
    reading = {"run": subject.name, "place": place, "text": text, "target": target}
    found = engine.answer("read", reading).meta
    questions: list[dict[str, Any]] = [{"name": "about", "values": {}}, {"name": "read", "values": reading}]
    if not found["small"]:
        # the picture of all heads of the first layer, from far enough away to fit
        span = max(len(found["queries"]), len(found["keys"]))
        level = max(0, (span - 1).bit_length() - 9)
        bands = -(-len(found["queries"]) // (TILE_ROWS << level))
        questions += [
            {"name": "tile", "values": reading | {"layer": 0, "level": level, "row": row, "column": 0}}
            for row in range(bands)
        ]
    state = {"view": "heads", "run": subject.name, "place": place, "text": text, "target": target}
    hash = "#" + urlencode({name: value for name, value in state.items() if value})
    return page(engine, f"Regard: {text[:60]}", hash, "auto", questions)
