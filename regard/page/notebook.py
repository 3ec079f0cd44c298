"""`regard.show`: a model and a text as a page, inline in a notebook or in a file."""

import html
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

BEAM = 4  # the default of the page


class Shown:
    """Displays itself in a notebook; `save` writes the file that opens without a server."""

    def __init__(self, page: str, height: int):
        self.page, self.height = page, height

    def _repr_html_(self) -> str:
        # in a sandboxed frame, so that no script of the page reaches the notebook, nor the other way round
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
    """A page that shows what attends to what when a model reads a text.

    `model` is a Translator, a run folder, None (the translator bundled with Regard), or a model of kind encoder or
    decoder with a tokenizer. `place` is "encoder", "decoder", "cross" or "aligner"; `target` is a translation to read.

    >>> regard.show(model, "the bank of the river", tokenizer=tokenizer)
    >>> regard.show(None, "Where is the station?").save("page.html")
    """
    from regard.page.subjects import of_model, of_translator, open_run
    from regard.tasks.translate import Translator

    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"text must be some words to read, got {text!r}")
    if model is None or isinstance(model, str | Path):
        name = "shipped" if model is None else Path(model).resolve().name
        subject = open_run(model, name)
    elif isinstance(model, Translator):
        subject = of_translator("translator", "translator", model)
    else:
        subject = of_model("model", model, tokenizer)
    return Shown(still(subject, text, target or "", place), height)


def still(subject: Any, text: str, target: str = "", place: str | None = None) -> str:
    """A text in the Heads view as one HTML file; of a translator in Translate, unless a place or a target is given."""
    from regard.page.engine import Engine
    from regard.page.maps import farthest

    engine = Engine({subject.name: lambda: subject})
    about: dict[str, Any] = {"name": "about", "values": {}}
    if subject.task == "translate" and place is None and not target:
        search = {"run": subject.name, "text": text, "beam": BEAM}
        best = engine.translate(**search, emit=lambda step: None)["hypotheses"][0]["text"]
        reading = {"run": subject.name, "text": text, "target": best}
        questions = [about, {"name": "translate", "values": search}]
        places = [place for place in ("aligner", "cross") if place in subject.places]
        questions += [{"name": "read", "values": reading | {"place": place}} for place in places]
        return _page(engine, {"view": "translate", "run": subject.name, "text": text}, questions)
    place = place or subject.places[0]
    reading = {"run": subject.name, "place": place, "text": text, "target": target}
    meta = engine.answer("read", reading).meta
    questions = [about, {"name": "read", "values": reading}]
    if not meta["small"]:
        # all heads of the first layer, at the zoom level that shows the whole map
        level = farthest(len(meta["queries"]), meta["layers"][0]["columns"])
        down, across = (size << level for size in meta["layers"][0]["tiles"][level])
        questions += [
            {"name": "tile", "values": reading | {"layer": 0, "level": level, "row": row, "column": column}}
            for row in range(-(-len(meta["queries"]) // down))
            for column in range(-(-meta["layers"][0]["columns"] // across))
        ]
    state = {"view": "heads", "run": subject.name, "place": place, "text": text, "target": target}
    return _page(engine, {name: value for name, value in state.items() if value}, questions)


def _page(engine: Any, state: dict[str, str], questions: list[dict[str, Any]]) -> str:
    from regard.page.export import page

    return page(engine, f"Regard: {state['text'][:60]}", "#" + urlencode(state), "auto", questions)
