"""What tasks over running text share: documents, one tokenizer, and a model that begins with random weights or with
those of another run."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from regard import models
from regard.core.files import parse_rows
from regard.core.model import Model
from regard.core.options import Range, check_options, config_dataclass
from regard.data.documents import Documents, digest, hold_out, read_documents
from regard.data.tokenizer import Tokenizer, chunks
from regard.spec import parse
from regard.tasks import base
from regard.tasks.load import count_stems, load_weights, read_parts
from regard.training.run import Run

FILE = "tokenizer.json"
TOKENS_AT_ONCE = 16384  # in a batch of an evaluation


@config_dataclass
class LanguageData:
    """The data: text, and its tokenizer."""

    text: Annotated[
        str | list[str] | None,
        "training text: a file, a folder (all files in it) or a list of them; plain, .gz or .xz; - for standard input",
    ] = None
    valid: Annotated[
        str | list[str] | None,
        "validation text, in the same forms (default: the end of the training text is held out)",
    ] = None
    held_out: Annotated[
        float,
        "share of the characters held out if there is no validation text",
        Range(above=0, below=1),
    ] = 0.1
    documents: Annotated[
        Literal["file", "line", "blank"],
        "what a document is: a file, a line, or a paragraph between blank lines; each ends with the end token",
    ] = "file"
    apart: Annotated[
        bool,
        "true: every row of a batch is from one document, so attention never crosses documents; false: rows are cut "
        "from all documents joined together",
    ] = False
    skip_bad: Annotated[bool, "omit and count bad lines, instead of stopping at the first"] = False
    tokenizer: Annotated[
        Literal["bpe", "characters", "bytes", "words"],
        "bpe: byte pairs learned from the text; words: split at spaces, with line ends as words",
    ] = "bpe"
    vocabulary: Annotated[
        int,
        "vocabulary size, at most (characters: all that occur by default; bytes: always 260)",
        Range(5),
    ] = 8000
    length: Annotated[int, "tokens per row: the longest context", Range(1)] = 256

    def __post_init__(self) -> None:
        check_options(self, "data.")
        for name in ("text", "valid"):
            value = getattr(self, name)
            if value is not None and (not value or not all(value)):
                raise ValueError(f"data.{name} must name at least one file or folder, got {value!r}")


class TextTask(base.Task):
    """A task whose config has the text of LanguageData, and `init`."""

    cpu_tokens = 2048
    trains_on = ("text",)
    data_files, test_files = ("text", "valid"), ("text",)
    data: Documents

    @classmethod
    def read_data(cls, config: Any) -> Documents:
        data = config.data
        if data.text is None:
            raise ValueError("there is no training data: give data.text, a file, a folder or a list of them")
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
    def train_tokenizers(cls, data: Documents, config: Any) -> dict[str, Tokenizer]:
        if config.init is not None:
            return read_parts(Run.open(config.init), cls.name).tokenizers
        parts = (part for text in data.train for part in chunks(text))
        return {FILE: Tokenizer.train(parts, config.data.vocabulary, config.data.tokenizer)}

    @classmethod
    def model_config(cls, config: Any, tokenizers: dict[str, Tokenizer], data: Documents) -> Any:
        if config.init is not None:
            changes = config.model.changes_of_trained("dropout")
            return dataclasses.replace(read_parts(Run.open(config.init)).config, **changes)
        tokenizer = tokenizers[FILE]
        model_config = config.model.resolve(vocabulary=tokenizer.size, stems=count_stems(tokenizer))
        if getattr(model_config, "head", None) == "none":
            raise ValueError("model.head none gives no logits, which a loss needs: use linear or transform")
        spec = parse(model_config.position)
        if spec in (parse("learned"), parse("fourier")):
            # no longer than a row: positions that no text reaches would keep their random vectors
            position = f"{spec.name}(longest={config.data.length})"
            model_config = dataclasses.replace(model_config, position=position)
        return model_config

    @classmethod
    def build_model(cls, config: Any, model_config: Any) -> Model:
        model = models.build(model_config)
        limit, length = models.max_positions(model), config.data.length
        if limit is not None and length > limit:
            raise ValueError(
                f"data.length {length} exceeds the {limit} positions of the model: lower it, or give model.position or "
                "model.attention a larger 'longest'"
            )
        if config.init is not None:
            load_weights(model, Run.open(config.init))
        return model

    def files(self) -> dict[str, str]:
        lines = (json.dumps({"text": text}, ensure_ascii=False) for text in self.data.valid)
        return {"valid.jsonl": "".join(line + "\n" for line in lines)}

    def describe_data(self, amount: str, tokenizer: Tokenizer) -> str:
        """The size of the data, for `notes`."""
        documents = f"{len(self.data.train):,} documents" if len(self.data.train) > 1 else "one document"
        valid = f"{self.data.facts['valid']:,} characters to validate on"
        return f"{amount} of {documents}, {valid}; vocabulary {tokenizer.size:,}"


def read_valid(folder: str | Path) -> list[str]:
    """The documents a run validates on."""
    run = Run.open(folder)
    if not run.has("valid.jsonl"):
        raise ValueError(f"{folder} has no validation text: give --text")
    return [text for (text,) in parse_rows(run.read_text("valid.jsonl"), run.folder / "valid.jsonl", ("text",))]


def _several(paths: str | Sequence[str]) -> list[str]:
    return [paths] if isinstance(paths, str) else list(paths)
