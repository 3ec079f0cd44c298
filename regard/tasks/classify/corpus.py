"""Labelled texts: read from files, or the validation texts of a run."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from regard.core.files import parse_rows
from regard.data.labelled import Example, Labelled, class_names, class_numbers, read_labelled
from regard.data.text import hold_out, shown
from regard.tasks.classify.config import LabelledData
from regard.training.run import Run


class Corpus(NamedTuple):
    """Labelled texts to train and to validate on, the classes, facts about the files, and the line of each training
    text."""

    train: list[Example]
    valid: list[Example]
    labels: list[str]
    facts: dict[str, Any]
    lines: list[int]


def read_corpus(config: LabelledData, seed: int) -> Corpus:
    """Reads the texts that a config names. Without a validation file, some are held out."""
    if config.text is None:
        raise ValueError(
            "there is no training data: give data.text, a .csv, .tsv or .jsonl file, or a file of texts and data.labels"
        )

    def read(text: str, labels: str | None) -> Labelled:
        return read_labelled(text, labels, columns=config.columns, skip_bad=config.skip_bad)

    found = read(config.text, config.labels)
    names = class_names(found.labels, shown(config.labels or config.text))
    train = list(zip(found.texts, found.labels, found.lines, strict=True))
    facts = {"skipped": {reason: part._asdict() for reason, part in found.skipped.items()}}
    if config.valid_text is not None:
        found = read(config.valid_text, config.valid_labels)
        class_numbers(found.labels, names, shown(config.valid_labels or config.valid_text))
        valid = list(zip(found.texts, found.labels, strict=True))
        facts["skipped_valid"] = {reason: part._asdict() for reason, part in found.skipped.items()}
    else:
        seed = seed if config.held_out_seed is None else config.held_out_seed
        train, held = hold_out(train, min(config.held_out, len(train) // 10), seed)
        valid = [example[:2] for example in held]
    train, lines = [example[:2] for example in train], [line for *_, line in train]
    digest = hashlib.sha256(json.dumps([train, valid, names]).encode()).hexdigest()
    return Corpus(train, valid, names, facts | {"texts": len(train), "valid": len(valid), "sha256": digest}, lines)


def read_valid(folder: str | Path) -> list[Example]:
    """The validation texts of a run."""
    run = Run.open(folder)
    if not run.has("valid.jsonl"):
        raise ValueError(
            f"{folder} has no validation texts: give --data, and --threshold instead of --recall or --precision"
        )
    rows = parse_rows(run.read_text("valid.jsonl"), run.folder / "valid.jsonl", ("text", "label"))
    return [(text, label) for text, label in rows]
