"""Pictures with captions: read from files, or the validation pictures of a run."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.data.captioned import Captioned, read_captioned
from regard.tasks.captions.config import CaptionsData
from regard.tasks.load import read_config, read_parts
from regard.training.run import Run


class Corpus(NamedTuple):
    """Pictures with captions to train and to validate on, and facts about the files."""

    train: Captioned
    valid: Captioned
    facts: dict[str, Any]


def read_corpus(config: CaptionsData, seed: int) -> Corpus:
    """Reads the pictures and captions that a config names. Without a validation file, some pictures are held out."""
    if config.captions is None:
        raise ValueError(
            "there is no training data: give data.captions, a .csv, .tsv or .jsonl file of pictures and captions"
        )
    options: dict[str, Any] = {"columns": config.columns, "skip_bad": config.skip_bad}
    train = read_captioned(config.captions, config.images, size=config.shape, **options)
    facts = {"skipped": {reason: part._asdict() for reason, part in train.skipped.items()}}
    if config.valid_captions is not None:
        options |= {"size": train.size, "channels": train.channels}
        valid = read_captioned(config.valid_captions, config.valid_images, **options)
        facts["skipped_valid"] = {reason: part._asdict() for reason, part in valid.skipped.items()}
    else:
        seed = seed if config.held_out_seed is None else config.held_out_seed
        train, valid = hold_out(train, min(config.held_out, len(train.names) // 10), seed)
    digest = hashlib.sha256(json.dumps([train.captions, valid.captions]).encode())
    for part in (train, valid):
        digest.update(np.ascontiguousarray(part.pixels).data)
    count = sum(map(len, train.captions))
    facts |= {"pictures": len(train.names), "captions": count, "valid": len(valid.names), "sha256": digest.hexdigest()}
    return Corpus(train, valid, facts)


def hold_out(pictures: Captioned, count: int, seed: int) -> tuple[Captioned, Captioned]:
    """(rest, held out), each in the order of the file."""
    total = len(pictures.names)
    if count < 1:
        raise ValueError(f"too few pictures to hold any out: got {total}, give at least 10, or data.valid_captions")
    order = np.argsort(np.random.Generator(np.random.PCG64(seed)).random(total), kind="stable")
    return pictures.take(np.sort(order[count:])), pictures.take(np.sort(order[:count]))


def read_valid(folder: str | Path) -> Captioned:
    """The validation pictures of a run, read again from the files of its data."""
    run = Run.open(folder)
    if not run.has("config.yaml"):
        raise ValueError(f"{folder} has no config.yaml that names its validation pictures: give --data")
    config = read_config(run)
    found = read_corpus(config.data, config.training.seed)
    if found.facts["sha256"] != read_parts(run).facts.get("data", {}).get("sha256"):
        raise ValueError(f"the data of {folder} has changed since the run began: restore it, or give --data")
    return found.valid
