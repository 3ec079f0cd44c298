"""Published models as runs, and runs in published formats: `regard import` and `regard export`."""

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import tokenizers as library
from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from tokenizers import models as vocabularies

from regard import __version__, models
from regard.core.files import check_inside
from regard.data.published import Published
from regard.data.tokenizer import BYTE_PAIRS, SPECIAL, Tokenizer
from regard.interop import huggingface, images, llama2c, timm
from regard.interop.families import FAMILIES
from regard.interop.families.base import Tensors, Values, table_length
from regard.interop.vocabularies import read_tokenizers
from regard.models.config import ModelConfig
from regard.tasks import load
from regard.training import checkpoint
from regard.training.compact import expand
from regard.training.run import MANIFEST, Run

Format = Literal["huggingface", "ctranslate2", "timm", "onnx"]
LONGEST = 512  # tokens of a text, if nothing says how many a model was trained for
CARRIED = "published"  # the folder of a run with the original files of its tokenizer
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "target_vocab.json",
    "merges.txt",
    "tokenizer.model",
    "source.spm",
    "target.spm",
    "chat_template.jinja",
    "generation_config.json",
)


class Imported(NamedTuple):
    """The new run, and what to tell the user about it."""

    run: Run
    task: str
    config: Any  # of the model
    parameters: int
    notes: list[str]


class _Source(NamedTuple):
    """What was read of a published model."""

    task: str
    config: Any
    tensors: Tensors
    facts: dict[str, Any]
    notes: list[str]
    tokenizers: Mapping[str, Tokenizer] = MappingProxyType({})
    carried: Sequence[Path] = ()  # files to keep for an export


def import_model(
    source: str | Path, out: str | Path, tokenizer: str | Path | None = None, heads: int | None = None
) -> Imported:
    """Writes a run folder from a folder of Hugging Face or timm, from a safetensors file of timm, from a GGUF file, or
    from a llama2.c file with its tokenizer. Nothing is written before all of it has been read. `heads` is for a file of
    timm whose width does not tell their number."""
    source = Path(source)
    Run.vacant(out)
    found = _read_source(source, None if tokenizer is None else Path(tokenizer), heads)
    with Run.create(out, "regard import") as run:
        for name, part in found.tokenizers.items():
            part.save(run.folder / name)
        for path in found.carried:
            (run.folder / CARRIED).mkdir(exist_ok=True)
            shutil.copyfile(path, run.folder / CARRIED / path.name)
        run.record(*found.tokenizers, *(f"{CARRIED}/{path.name}" for path in found.carried))
        checkpoint.write(run.checkpoints, checkpoint.step_name(0), {"model": found.tensors}, {"step": 0})
        parameters = sum(part.numel() for part in {id(part): part for part in found.tensors.values()}.values())
        run.write_json(
            "run.json",
            {
                "task": found.task,
                "regard": __version__,
                "manifest": MANIFEST,
                "model": dataclasses.asdict(found.config),
                **found.facts,
                "parameters": parameters,
                "tokenizers": {name: checkpoint.digest(run.folder / name) for name in found.tokenizers},
            },
        )
    return Imported(run, found.task, found.config, parameters, found.notes)


def _read_source(source: Path, tokenizer: Path | None, heads: int | None) -> _Source:
    if source.is_file() and source.suffix != ".safetensors":
        if heads is not None:
            raise ValueError(f"--heads is for files of timm, and {source} says it itself")
        return _read_gguf(source, tokenizer) if _is_gguf(source) else _read_llama2c(source, tokenizer)
    if not source.exists():
        raise ValueError(f"there is no folder and no file {source}")
    if source.is_file() or timm.is_timm(source):
        model = timm.read(source, heads)
        facts, notes = images.timm_facts(model, source)
        return _image_source(model, facts, notes, tokenizer)
    if heads is not None:
        raise ValueError(f"--heads is for files of timm, and {source} has a config that says it")
    model = huggingface.read(source)
    if model.family.task == "images":
        facts, notes = images.huggingface_facts(model, source)
        carried = [path for path in [source / images.PROCESSOR] if path.is_file()]
        return _image_source(model, facts, notes, tokenizer, carried)
    place = source if tokenizer is None else tokenizer
    if not place.is_dir():
        raise ValueError(f"--tokenizer must be a folder with the files of a tokenizer, got {place}")
    carried = [place / name for name in TOKENIZER_FILES if (place / name).is_file()]
    config = model.config
    tokenizers = read_tokenizers(place, model.values, config.vocabulary, config.target_vocabulary)
    facts = _facts(model.family.task, model.values, config, tokenizers)
    facts["published"] = {"family": model.family.name}
    return _Source(model.family.task, config, model.tensors, facts, model.notes, tokenizers, carried)


def _image_source(
    model: huggingface.Model,
    facts: dict[str, Any],
    notes: list[str],
    tokenizer: Path | None,
    carried: Sequence[Path] = (),
) -> _Source:
    if tokenizer is not None:
        raise ValueError("--tokenizer is for models of text, and this is one of images")
    facts = facts | {"published": {"family": model.family.name}}
    return _Source("images", model.config, model.tensors, facts, [*model.notes, *notes], carried=carried)


def _is_gguf(source: Path) -> bool:
    if source.suffix == ".gguf":
        return True
    try:
        with source.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise ValueError(f"{source}: cannot be read: {error.strerror}") from error


def _read_gguf(source: Path, tokenizer: Path | None) -> _Source:
    try:
        from regard.interop import gguf
    except ImportError as error:
        raise ValueError("GGUF files are read by the package gguf: pip install 'regard[gguf]'") from error
    if tokenizer is not None:
        raise ValueError(f"{source} has its tokenizer in it: leave --tokenizer out")
    model, found = gguf.read(source)
    tokenizers = {"tokenizer.json": found}
    facts = _facts(model.family.task, model.values, model.config, tokenizers)
    facts["published"] = {"family": model.family.name}
    return _Source(model.family.task, model.config, model.tensors, facts, model.notes, tokenizers)


def _read_llama2c(source: Path, tokenizer: Path | None) -> _Source:
    config, tensors, length = llama2c.read(source)
    if tokenizer is None:
        raise ValueError(f"{source} holds no tokenizer: give the tok*.bin that belongs to it as --tokenizer")
    found = llama2c.read_tokenizer(tokenizer, config.vocabulary)
    facts = {"length": length, "start": found.bos, "apart": False, "documents": "file"}
    facts["published"] = {"family": "llama2.c"}
    return _Source("language", config, tensors, facts, [], {"tokenizer.json": found})


def _facts(kind: str, values: Values, config: ModelConfig, tokenizers: dict[str, Published]) -> dict[str, Any]:
    """What a task must know about its runs beside the model."""
    stated = values.get("max_position_embeddings", values.get("n_positions", LONGEST))
    length = table_length(config) or int(stated)
    if kind == "translate":
        return {"longest": min(length, LONGEST)}
    (tokenizer,) = tokenizers.values()
    if tokenizer.eos is None or (kind == "masked" and tokenizer.bos is None):
        raise ValueError(
            "the tokenizer does not say which token ends a text (and, for an encoder, which one begins it)"
        )
    if kind == "masked":
        return {"length": length, "documents": "line", "apart": True, "masked": 0.15, "whole_words": False}
    # whether the tokenizer itself puts a token before each text
    ids = tokenizer.library.encode("a").ids
    start = tokenizer.bos if ids and ids[0] == tokenizer.bos else None
    return {"length": length, "start": start, "apart": False, "documents": "file"}


class Exported(NamedTuple):
    """The new folder, and what to tell the user about it."""

    folder: Path
    family: str
    notes: list[str]


def export_run(
    folder: str | Path,
    out: str | Path,
    format: Format,
    *,
    which: str | int | None = None,
    family: str | None = None,
    length: int | None = None,
) -> Exported:
    """Writes a run in a published format. The folder appears when all of it is written, and not before. `family` is for
    huggingface, `length` (the tokens of the longest text) for onnx."""
    if family is not None and format != "huggingface":
        raise ValueError(f"--family is for the format huggingface, got the format {format}")
    if length is not None and format != "onnx":
        raise ValueError(f"--length is for the format onnx, got the format {format}")
    run = Run.open(folder)
    parts = load.read_parts(run)
    if format == "onnx":
        return _export_onnx(run, parts, out, which, length)
    config, task = parts.config, parts.facts["task"]
    of_images = task == "images"
    if not isinstance(config, ModelConfig) and not of_images:
        raise ValueError(
            f"{run.folder} is a model of kind {config.kind!r}: only Transformers and classifiers of images can be "
            "exported"
        )
    for name, possible in (("ctranslate2", task == "translate"), ("timm", of_images)):
        if format == name and not possible:
            what, where = ("translators", "CTranslate2") if name == "ctranslate2" else ("models of images", "timm")
            raise ValueError(f"only {what} are exported to {where}, and {run.folder} is a run of {task!r}")
    tensors = expand(run.find(which).tensors["model"])
    notes = ["the aligner is omitted: it takes no part in translating"] if getattr(config, "aligner", False) else []
    target = huggingface.vacant(out)
    with _whole_folder(target) as partial:
        if format == "ctranslate2":
            from regard.interop import ctranslate2

            ctranslate2.write(partial, config, tensors, _sides(parts.tokenizers), int(parts.facts["longest"]))
            _write_tokenizers(partial, parts)
            chosen = "ctranslate2"
        elif format == "timm":
            published = {"mean": parts.facts["mean"], "std": parts.facts["deviation"]}
            published["label_names"] = parts.facts["labels"]
            chosen = timm.write(partial, config, tensors, published).name
        else:
            chosen = _export_huggingface(partial, parts, tensors, run, family or _family(parts.facts))
    return Exported(target, chosen, notes)


def _export_onnx(run: Run, parts: load.Parts, out: str | Path, which: str | int | None, length: int | None) -> Exported:
    from regard.interop import onnx

    model = models.build(parts.config)
    load.load_weights(model, run, which)
    target = huggingface.vacant(out)
    about = {"task": parts.facts["task"], "regard": __version__}
    about |= {name: parts.facts[name] for name in ("labels",) if name in parts.facts}
    if parts.tokenizers:
        *_, tokenizer = parts.tokenizers.values()
        names = ("pad", "unk", "bos", "eos", *(["mask"] if parts.facts["task"] == "masked" else []))
        about["tokens"] = {name: getattr(tokenizer, name) for name in names}
    with _whole_folder(target) as partial:
        written = onnx.write(partial, model.eval(), parts.facts, about, length)
        _write_tokenizers(partial, parts)
    return Exported(target, "onnx", [*written.notes, written.describe()])


def _export_huggingface(folder: Path, parts: load.Parts, tensors: Tensors, run: Run, family: str | None) -> str:
    """Writes a folder of Hugging Face, and returns the name of the family."""
    of_images = parts.facts["task"] == "images"
    special = images.label_settings(parts.facts["labels"]) if of_images else _special(parts)
    chosen = huggingface.write(folder, parts.config, tensors, special=special, family=family).name
    if not of_images:
        _write_generation(folder, parts, special)
    carried = run.folder / CARRIED
    if carried.is_dir():
        for path in sorted(carried.iterdir()):
            check_inside(path, run.folder)
            run.read_bytes(f"{CARRIED}/{path.name}")  # checks it
            shutil.copyfile(path, folder / path.name)
    elif of_images:
        _write_json(folder / images.PROCESSOR, images.processor(parts.config, parts.facts))
    else:
        _write_tokenizers(folder, parts)
    return chosen


@contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder to write to, renamed at the end. After an error nothing of it is left."""
    partial = folder.absolute().with_name(f".{folder.absolute().name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _family(facts: dict[str, Any]) -> str | None:
    """The Hugging Face family that a run was imported from; None: another, or none."""
    published = facts.get("published")
    name = published.get("family") if isinstance(published, dict) else None
    return name if name in {family.name for family in FAMILIES} else None


def _sides(tokenizers: dict[str, Tokenizer]) -> tuple[Tokenizer, Tokenizer]:
    source = tokenizers["source.json"]
    return source, tokenizers.get("target.json", source)


def _special(parts: load.Parts) -> Values:
    """Their settings that come from tokenizers and lengths."""
    *_, tokenizer = parts.tokenizers.values()
    ids = {f"{name}_token_id": getattr(tokenizer, name) for name in ("pad", "bos", "eos")}
    if parts.facts["task"] == "translate":
        # room for the longest translation: 1.5 times the source, and 10
        return ids | {
            "decoder_start_token_id": tokenizer.bos,
            "forced_eos_token_id": None,
            "max_position_embeddings": 2 * int(parts.facts["longest"]) + 16,
        }
    return ids | {"max_position_embeddings": int(parts.facts["length"])}


def _write_generation(folder: Path, parts: load.Parts, special: Values) -> None:
    """Writes how their `generate` begins and ends a text."""
    if parts.facts["task"] == "masked":
        return
    settings = {name: special[name] for name in special if name.endswith("_token_id") and special[name] is not None}
    if parts.facts["task"] == "translate":
        never = {special["pad_token_id"], special["bos_token_id"]} - {special["eos_token_id"], None}
        settings |= {"max_length": special["max_position_embeddings"], "bad_words_ids": [[id] for id in sorted(never)]}
    _write_json(folder / "generation_config.json", settings)


def _write_tokenizers(folder: Path, parts: load.Parts) -> None:
    """Writes tokenizer.json for the `tokenizers` library and for Hugging Face. A tokenizer of the target gets a folder
    of its own."""
    for name, tokenizer in parts.tokenizers.items():
        place = folder / "target" if name == "target.json" else folder
        place.mkdir(exist_ok=True)
        content = tokenizer.content if isinstance(tokenizer, Published) else published(tokenizer, parts.facts)
        _write_json(place / "tokenizer.json", content)
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        for role in ("pad", "unk", "bos", "eos", "mask"):
            id = getattr(tokenizer, role, None)
            if id is not None and (role != "mask" or parts.facts["task"] == "masked"):
                settings[f"{role}_token"] = tokenizer.names([id])[0]
        _write_json(place / "tokenizer_config.json", settings)


def published(tokenizer: Tokenizer, facts: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer of ours as a tokenizer.json, which adds the special tokens of the task to a text. Every text has the
    same ids. Kinds that forget white space decode with single spaces."""
    ids = {name: id for id, name in enumerate(tokenizer.names(range(tokenizer.size)))}
    if tokenizer.kind in (*BYTE_PAIRS, "bytes"):
        content = json.loads((tokenizer.bare if tokenizer.kind == "bytes" else tokenizer.bpe).to_str())
        content["model"]["vocab"] = ids
        made = library.Tokenizer.from_str(json.dumps(content))
        if tokenizer.kind in BYTE_PAIRS:
            made.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    else:
        made = library.Tokenizer(vocabularies.WordLevel(ids, SPECIAL[tokenizer.unk]))
        letters = tokenizer.kind == "characters"
        pattern = r"[\s\S]" if letters else r"\n|\S+" if tokenizer.kind == "words" else r"\S+"
        made.pre_tokenizer = pre_tokenizers.Split(library.Regex(pattern), "removed", invert=True)
        if letters:
            made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    before, after = _frame(tokenizer, facts)
    template = [*(SPECIAL[id] for id in before), "$A", *(SPECIAL[id] for id in after)]
    made.post_processor = processors.TemplateProcessing(
        single=" ".join(template), special_tokens=[(SPECIAL[id], id) for id in {*before, *after}]
    )
    return json.loads(made.to_str())


def _frame(tokenizer: Tokenizer, facts: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The special ids before and after a text."""
    if facts["task"] == "translate":
        return [], [tokenizer.eos]
    if facts["task"] == "classify":
        return [tokenizer.bos], [tokenizer.eos]
    if facts["task"] == "masked":
        return ([tokenizer.bos], [tokenizer.eos]) if facts.get("apart") else ([tokenizer.eos], [])
    start = facts.get("start")
    return ([] if start is None else [start]), []


def _write_json(path: Path, values: Values) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
