"""What the page shows of a translator."""

from pathlib import Path

from regard.tasks.opened import Opened
from regard.tasks.translate.alignment import has_aligner
from regard.tasks.translate.corpus import read_valid
from regard.tasks.translate.translator import Translator


def open_run(folder: str | Path, device: str) -> Opened:
    """Opens a run folder."""
    translator = Translator.load(folder, device=device)
    try:
        examples = tuple(source for source, _ in read_valid(folder)[:4])
    except ValueError:
        examples = ()
    return opened(translator, examples)


def opened(translator: Translator, examples: tuple[str, ...] = ()) -> Opened:
    """What the page shows of a translator."""
    model = translator.model
    places: tuple[str, ...] = ("cross",)
    if model.config.kind == "encoder-decoder":
        places = ("cross", "encoder", "decoder", *(("aligner",) if has_aligner(model) else ()))
    return Opened(
        "translate",
        model,
        translator.encode,
        translator.source.tokens,
        places,
        translator.longest,
        examples=examples,
        ends=(translator.source.eos,),
        translator=translator,
    )
