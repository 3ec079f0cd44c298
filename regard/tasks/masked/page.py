"""What the page shows of a masked language model."""

import re
from pathlib import Path

from regard.tasks.masked.masked_model import MARK, MaskedModel
from regard.tasks.opened import Opened, beginnings, of_reader
from regard.tasks.text import read_valid


def open_run(folder: str | Path, device: str) -> Opened:
    """Opens a run folder. A gap is written as for `regard fill`."""
    masked = MaskedModel.load(folder, device=device)
    tokenizer = masked.tokenizer
    found = of_reader("masked", masked, "encoder", masked.length, masked.limit)
    found.examples = beginnings(read_valid, folder)
    encode, names = found.encode, found.names
    if tokenizer.mask is not None:
        found.encode = lambda text: tokenizer.encode_around(text.split(MARK)) if MARK in text else encode(text)
        found.names = lambda ids: [
            MARK if id == tokenizer.mask else token for id, token in zip(ids, names(ids), strict=True)
        ]
        found.examples = tuple(map(_with_a_gap, found.examples))
    found.begins, found.ends = ((tokenizer.bos,), (tokenizer.eos,)) if masked.apart else ((tokenizer.eos,), ())
    return found


def _with_a_gap(text: str) -> str:
    """A text with a gap for its middle word."""
    words = text.split(" ")
    words[len(words) // 2] = re.sub(r"\w+", MARK, words[len(words) // 2], count=1)
    return " ".join(words)
