"""What the page shows of a language model."""

from pathlib import Path

from regard.tasks.language.language_model import LanguageModel
from regard.tasks.opened import Opened, beginnings, of_reader
from regard.tasks.text import read_valid


def open_run(folder: str | Path, device: str) -> Opened:
    """Opens a run folder."""
    language = LanguageModel.load(folder, device=device)
    found = of_reader("language", language, "decoder", language.length, language.limit)
    found.examples = beginnings(read_valid, folder)
    found.begins = () if language.start is None else (language.start,)
    return found
