"""Pairs of sentences: read from files, generated, or the validation pairs of a run."""

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
    """Pairs to train and to validate on, facts about the files, and the line of each training pair."""

    train: list[Pair]
    valid: list[Pair]
    facts: dict[str, Any]
    lines: list[int]


def read_corpus(config: DataConfig, seed: int) -> Corpus:
    """Reads the pairs that a config names. Without a validation file, some pairs are held out."""
    facts: dict[str, Any] = {}
    if config.generated is not None and config.source is None:
        from regard.data.generated import pairs

        train = [(*pair, number) for number, pair in enumerate(pairs(config.generated, seed), 1)]
    elif config.source is not None and config.generated is None:
        found = read_pairs(config.source, config.target, columns=config.columns, skip_bad=config.skip_bad)
        train = list(zip(found.source, found.target, found.lines, strict=True))
        facts["skipped"] = {reason: part._asdict() for reason, part in found.skipped.items()}
    else:
        raise ValueError(
            "training data: give either data.source and data.target (two files with the same number of lines), "
            "data.source alone (a TSV file of pairs), or data.generated (the number of pairs to generate)"
        )
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
    """The validation pairs of a run."""
    run = Run.open(folder)
    if not run.has("valid.jsonl"):
        raise ValueError(f"{folder} has no validation pairs: give --source and --target")
    rows = parse_rows(run.read_text("valid.jsonl"), run.folder / "valid.jsonl", ("source", "target"))
    return [(source, target) for source, target in rows]
