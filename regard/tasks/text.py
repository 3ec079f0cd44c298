"""What tasks over running text share: documents in, one tokenizer, and layers that begin as a preset says or with the
weights of another run."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import nn

from regard import models
from regard.core.files import parse_rows
from regard.core.options import Range, check_options
from regard.data.documents import Documents, digest, hold_out, read_documents
from regard.data.tokenizer import Tokenizer, chunks
from regard.models.transformer import ModelConfig
from regard.spec import parse
from regard.tasks import base
from regard.tasks.load import load_weights, read_parts, stems
from regard.training.run import Run

FILE = "tokenizer.json"
TOKENS_AT_ONCE = 16384  # in a batch that is only measured


@dataclass(frozen=True)
class LanguageData:
    """Where the text comes from, and how it becomes tokens."""

    text: Annotated[
        str | list[str] | None,
        "file, folder (all files in it) or a list of them; plain, .gz or .xz, or - for standard input",
    ] = None
    valid: Annotated[
        str | list[str] | None,
        "the same, to validate on; none: the last part of the text is held out",
    ] = None
    held_out: Annotated[
        float,
        "share of the characters that is held out where there is no validation file",
        Range(above=0, below=1),
    ] = 0.1
    documents: Annotated[
        Literal["file", "line", "blank"],
        "what one document is: a file, a line, or what blank lines separate; each ends in the end token",
    ] = "file"
    apart: Annotated[
        bool,
        "true: a row of a batch is of one document, so attention never crosses into another; false: rows are cut "
        "from all documents one after the other",
    ] = False
    skip_bad: Annotated[bool, "leave out bad lines and count them, instead of stopping at the first"] = False
    tokenizer: Annotated[
        Literal["bpe", "characters", "bytes", "words"],
        "bpe: learn byte pairs from the text; words: what spaces separate, and the ends of lines",
    ] = "bpe"
    vocabulary: Annotated[
        int,
        "tokens to learn, at most (characters: all there are by default, bytes: always 260)",
        Range(5),
    ] = 8000
    length: Annotated[int, "tokens that are read at a time, the longest context", Range(1)] = 256

    def __post_init__(self) -> None:
        check_options(self, "data.")
        for name in ("text", "valid"):
            value = getattr(self, name)
            if value is not None and (not value or not all(value)):
                raise ValueError(f"data.{name} must name at least one file or folder, got {value!r}")


class TextTask(base.Task):
    """A task whose config has the text of LanguageData, and `init`."""

    cpu_tokens = 2048
    data: Documents

    @classmethod
    def read(cls, config: Any) -> Documents:
        data = config.data
        if data.text is None:
            raise ValueError("training data: give data.text, a file, a folder or a list of them")
        train, skipped = read_documents(_several(data.text), data.documents, data.skip_bad)
        facts: dict[str, Any] = {"skipped": {reason: part._asdict() for reason, part in skipped.items()}}
        if data.valid is not None:
            valid, skipped = read_documents(_several(data.valid), data.documents, data.skip_bad)
            facts["skipped_valid"] = {reason: part._asdict() for reason, part in skipped.items()}
        else:
            train, valid = hold_out(train, data.held_out)
        facts |= {"documents": len(train), "characters": sum(map(len, train)), "valid": sum(map(len, valid))}
        return Documents(train, valid, facts | {"sha256": digest(train, valid)})

    @classmethod
    def learn(cls, data: Documents, config: Any) -> dict[str, Tokenizer]:
        if config.init is not None:
            return read_parts(Run.open(config.init), cls.name).tokenizers
        parts = (part for text in data.train for part in chunks(text))
        return {FILE: Tokenizer.train(parts, config.data.vocabulary, config.data.tokenizer)}

    @classmethod
    def size(cls, config: Any, tokenizers: dict[str, Tokenizer], data: Documents) -> ModelConfig:
        if config.init is not None:
            changes = config.model.changes_of_trained("dropout")
            return dataclasses.replace(read_parts(Run.open(config.init)).size, **changes)
        tokenizer = tokenizers[FILE]
        size = config.model.resolve(vocabulary=tokenizer.size, stems=stems(tokenizer))
        if getattr(size, "head", None) == "none":
            raise ValueError("model.head none gives no logits, which a loss needs: use linear or transform")
        if parse(size.position) == parse("learned"):
            # as long as what is read: positions that no text reached would stay as they were drawn
            size = dataclasses.replace(size, position=f"learned(longest={config.data.length})")
        return size

    @classmethod
    def build(cls, config: Any, size: ModelConfig) -> nn.Module:
        model = models.build(size)
        limit, length = models.positions(model), config.data.length
        if limit is not None and length > limit:
            raise ValueError(
                f"data.length {length} is more than the model has positions for, {limit}: "
                "lower it, or give model.position or model.attention a larger 'longest'"
            )
        if config.init is not None:
            load_weights(model, Run.open(config.init))
        return model

    def files(self) -> dict[str, str]:
        lines = (json.dumps({"text": text}, ensure_ascii=False) for text in self.data.valid)
        return {"valid.jsonl": "".join(line + "\n" for line in lines)}

    def note(self, amount: str, tokenizer: Tokenizer) -> str:
        """What there is to train on, for `notes`."""
        documents = f"{len(self.data.train):,} documents" if len(self.data.train) > 1 else "one document"
        valid = f"{self.data.facts['valid']:,} characters to validate on"
        return f"{amount} of {documents}, {valid}; vocabulary {tokenizer.size:,}"


def read_valid(folder: str | Path) -> list[str]:
    """The documents a run validates on."""
    run = Run.open(folder)
    if not run.has("valid.jsonl"):
        raise ValueError(f"{folder} keeps no text to validate on: give --text")
    return [text for (text,) in parse_rows(run.read_text("valid.jsonl"), run.folder / "valid.jsonl", ("text",))]


def _several(paths: str | Sequence[str]) -> list[str]:
    return [paths] if isinstance(paths, str) else list(paths)
