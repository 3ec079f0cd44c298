"""Pairs of sentences: read from files or generated, and those that a run validates on."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from regard.core.files import parse_rows
from regard.data.text import hold_out, read_pairs
from regard.tasks.translate.config import DataConfig
from regard.training.run import Run

Pair = tuple[str, str]


class Corpus(NamedTuple):
    """Pairs to train on and to validate on, what was done to get them, and which line or number each of the first has
    where it came from."""

    train: list[Pair]
    valid: list[Pair]
    facts: dict[str, Any]
    lines: list[int]


def read_corpus(config: DataConfig, seed: int) -> Corpus:
    """The pairs a config names. Without a validation file, some pairs are held out."""
    if (config.source is None) == (config.generated is None):
        raise ValueError(
            "training data: give data.source and data.target (two files of equally many lines), data.source alone "
            "(a TSV file), or data.generated (how many pairs to make up)"
        )
    facts: dict[str, Any] = {}
    if config.generated is not None:
        from regard.data.generated import pairs

        train = [(*pair, number) for number, pair in enumerate(pairs(config.generated, seed), 1)]
    else:
        found = read_pairs(config.source, config.target, columns=config.columns, skip_bad=config.skip_bad)
        train = list(zip(found.source, found.target, found.lines, strict=True))
        facts["skipped"] = {reason: part._asdict() for reason, part in found.skipped.items()}
    if config.valid_source is not None:
        found = read_pairs(config.valid_source, config.valid_target, columns=config.columns, skip_bad=config.skip_bad)
        valid = list(zip(found.source, found.target, strict=True))
        facts["skipped_valid"] = {reason: part._asdict() for reason, part in found.skipped.items()}
    else:
        train, held = hold_out(train, min(config.held_out, len(train) // 10), seed)
        valid = [pair[:2] for pair in held]
    train, lines = [pair[:2] for pair in train], [line for *_, line in train]
    digest = hashlib.sha256(json.dumps([train, valid]).encode()).hexdigest()
    return Corpus(train, valid, facts | {"pairs": len(train), "valid": len(valid), "sha256": digest}, lines)


def read_valid(folder: str | Path) -> list[Pair]:
    """The pairs a run validates on."""
    run = Run.open(folder)
    if not run.has("valid.jsonl"):
        raise ValueError(f"{folder} keeps no validation pairs: give --source and --target")
    return parse_rows(run.read_text("valid.jsonl"), run.folder / "valid.jsonl", ("source", "target"))
