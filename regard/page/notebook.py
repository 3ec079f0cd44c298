"""`regard.show`: a model and a text or an image as a page, inline in a notebook or in a file."""

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
    text: str | None = None,
    *,
    image: str | Path | None = None,
    tokenizer: Any = None,
    target: str | None = None,
    place: str | None = None,
    height: int = 720,
) -> Shown:
    """A page that shows what attends to what when a model reads a text or an image.

    `model` is a Translator, a run folder, None (the translator bundled with Regard), or a model of kind encoder or
    decoder with a tokenizer. `place` is "encoder", "decoder", "cross" or "aligner"; `target` is a translation to read.
    `image` is a file, for a run folder whose model reads images: show("runs/images", image="cat.jpg").

    >>> regard.show(model, "the bank of the river", tokenizer=tokenizer)
    >>> regard.show(None, "Where is the station?").save("page.html")
    """
    from regard.page.images import ImageSubject
    from regard.page.subjects import of_model, of_translator, open_run
    from regard.tasks.translate import Translator

    if image is not None:
        if text is not None or not isinstance(model, str | Path):
            raise ValueError("an image is shown with a run folder whose model reads images, and without a text")
        subject = open_run(model, Path(model).resolve().name)
        if not isinstance(subject, ImageSubject):
            raise ValueError(f"{model} reads texts and no images: give it a text")
        return Shown(still_image(subject, Path(image).read_bytes(), Path(image).name), height)
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


def still_image(subject: Any, data: bytes, name: str) -> str:
    """An image file in the Image view as one HTML file, with the maps and the rollout of its layers, and the words of
    its caption if the model writes one."""
    from regard.page.engine import Engine

    engine = Engine({subject.name: lambda: subject})
    subject.decode(data, name)  # an error names the file
    seen = {"run": subject.name, "image": engine.keep_image(data)}
    meta = engine.answer("see", seen).meta
    questions = [{"name": "about", "values": {}}, {"name": "samples", "values": {"run": subject.name}}]
    questions += [{"name": "see", "values": seen}, {"name": "distances", "values": seen}]
    if subject.opened.caption is not None:
        heads = engine.answer("caption", seen | {"layer": 0}).meta["heads"]
        questions += [{"name": "caption", "values": seen | {"layer": layer}} for layer in range(len(heads))]
    # from the last layer, which is shown first
    for layer in reversed(range(len(meta["layers"]))):
        if not meta["layers"][layer]["slots"]:
            questions.append({"name": "attention", "values": seen | {"layer": layer}})
            if not meta["layers"][layer]["small"]:
                at = {"at": 0, "side": "query"} if meta["layers"][layer]["leading"] else {}
                questions.append({"name": "glance", "values": seen | {"layer": layer} | at})
        if meta["rollout"][layer] is None:
            questions.append({"name": "rollout", "values": seen | {"layer": layer}})
    return _page(engine, {"view": "image", **seen}, questions, name)


def _page(engine: Any, state: dict[str, str], questions: list[dict[str, Any]], title: str | None = None) -> str:
    from regard.page.export import page

    return page(engine, f"Regard: {(title or state['text'])[:60]}", "#" + urlencode(state), "auto", questions)
