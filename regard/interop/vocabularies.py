"""The tokenizer of a published model, from whichever of the usual files lie beside it.

tokenizer.json is taken as it is. Older formats are converted: vocab.txt (BERT), vocab.json with merges.txt (GPT-2,
RoBERTa), tokenizer.model (Llama), and source.spm with target.spm and vocab.json (Marian). SentencePiece files are
protocol buffers, of which a few fields matter; they are read here.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from regard.data.published import Published
from regard.interop.families.base import Values
from regard.interop.huggingface import read_json

SPACE = "▁"
LIMIT = 256 * 2**20  # bytes of a file


def read_tokenizers(folder: Path, values: Values, size: int, target_size: int | None) -> dict[str, Published]:
    """The tokenizers by the names of our files: one for all text, or one each for source and target."""
    if values.get("model_type") == "marian" and not (folder / "tokenizer.json").is_file():
        return _marian(folder, values, size, target_size)
    content = _content(folder)
    _check_ids(content, folder)
    try:
        library = tokenizers.Tokenizer.from_str(json.dumps(content))
    except Exception as error:
        # the library raises plain Exception
        raise ValueError(f"{folder / 'tokenizer.json'} is not one of the `tokenizers` library: {error}") from error
    special = special_ids(folder, values, library)
    if values.get("model_type") == "marian":
        special["bos"] = values.get("decoder_start_token_id", special["pad"])
        return {"source.json": Published(content, special, size)}
    return {"tokenizer.json": Published(content, special, size)}


def _check_ids(content: dict[str, Any], folder: Path) -> None:
    """Refuses a tokenizer that gives one id to several tokens: the model could not tell them apart."""
    model, added = content.get("model"), content.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    pairs = list(vocabulary.items()) if isinstance(vocabulary, dict) else []
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            pairs.append((token.get("content"), token.get("id")))
    owners: dict[Any, Any] = {}
    for name, id in pairs:
        if not isinstance(id, int) or isinstance(id, bool) or id < 0:
            raise ValueError(f"the tokenizer in {folder} gives {name!r} the id {id!r}, expected a number from 0")
        if owners.setdefault(id, name) != name:
            raise ValueError(f"the tokenizer in {folder} gives the id {id} to {owners[id]!r} and to {name!r}")


def _content(folder: Path) -> dict[str, Any]:
    if (folder / "tokenizer.json").is_file():
        return read_json(folder / "tokenizer.json")
    if (folder / "vocab.txt").is_file():
        library = word_pieces(folder)
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        library = byte_pairs(folder)
    elif (folder / "tokenizer.model").is_file():
        library = from_pieces(read_pieces(folder / "tokenizer.model"))
        if _settings(folder).get("add_bos_token", True):
            prepend(library, "<s>")
    else:
        raise ValueError(
            f"{folder} has no tokenizer: expected tokenizer.json, vocab.txt, vocab.json with merges.txt, or "
            "tokenizer.model"
        )
    return json.loads(library.to_str())


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def prepend(library: tokenizers.Tokenizer, name: str) -> tokenizers.Tokenizer:
    """Adds a special token before each text that is encoded with special tokens."""
    id = library.token_to_id(name)
    if id is not None:
        library.add_special_tokens([name])
        library.post_processor = processors.TemplateProcessing(single=f"{name} $A", special_tokens=[(name, id)])
    return library


def special_ids(folder: Path, values: Values, library: tokenizers.Tokenizer) -> dict[str, int | None]:
    """Ids by our names. The tokens around a text of BERT, [CLS] and [SEP], count as its beginning and end."""
    stated: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            stated |= {key: value for key, value in read_json(folder / name).items() if key.endswith("_token")}
    encoder = values.get("model_type") in ("bert", "roberta", "distilbert")
    usual = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"} if encoder else {}

    def find(*names: str) -> int | None:
        for name in names:
            id = values.get(f"{name}_token_id")
            id = id[0] if isinstance(id, list) and id else id
            if isinstance(id, int):
                return id
            token = stated.get(f"{name}_token", usual.get(name))
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and library.token_to_id(token) is not None:
                return library.token_to_id(token)
        return None

    if encoder:
        ends = {"bos": find("cls", "bos"), "eos": find("sep", "eos")}
    else:
        ends = {"bos": find("bos"), "eos": find("eos")}
    return ends | {name: find(name) for name in ("pad", "unk", "mask")}


def word_pieces(folder: Path) -> tokenizers.Tokenizer:
    """BERT's vocab.txt, one token per line."""
    names = _text(folder / "vocab.txt").split("\n")
    names = names[:-1] if names and not names[-1] else names
    settings = _settings(folder)
    lower = bool(settings.get("do_lower_case", True))
    library = tokenizers.Tokenizer(
        models.WordPiece({name: id for id, name in enumerate(names)}, unk_token="[UNK]", max_input_chars_per_word=100)
    )
    library.normalizer = normalizers.BertNormalizer(
        lowercase=lower,
        strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    library.add_special_tokens([name for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if name in names])
    return library


def byte_pairs(folder: Path) -> tokenizers.Tokenizer:
    """GPT-2's vocab.json and merges.txt."""
    lines = [line for line in _text(folder / "merges.txt").split("\n") if line and not line.startswith("#version")]
    if not all(line.count(" ") == 1 for line in lines):
        raise ValueError(f"{folder / 'merges.txt'} must hold two tokens per line")
    merges = [(left, right) for left, right in (line.split(" ") for line in lines)]
    vocabulary = read_json(folder / "vocab.json")
    _check_ids({"model": {"vocab": vocabulary}}, folder)
    try:
        library = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    except Exception as error:
        # the library raises plain Exception
        raise ValueError(f"{folder}: vocab.json and merges.txt do not belong together: {error}") from error
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    names = ("<|endoftext|>", "<s>", "<pad>", "</s>", "<unk>", "<mask>")
    library.add_special_tokens([name for name in names if name in vocabulary])
    return library


class Pieces(NamedTuple):
    """A SentencePiece model. Kinds of piece: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 a byte."""

    names: list[str]
    scores: list[float]
    kinds: list[int]
    pairs: bool  # byte pairs; otherwise unigrams
    byte_fallback: bool  # characters that are not known become bytes
    character_map: bytes
    prefix: bool  # a space is put before each text
    squeezes: bool  # runs of spaces become one, those at the ends none

    @property
    def unknown(self) -> int:
        return self.kinds.index(2) if 2 in self.kinds else 0


def read_pieces(path: Path) -> Pieces:
    """A .model or .spm file."""
    try:
        if path.stat().st_size > LIMIT:
            raise ValueError("too large")
        names, scores, kinds, trainer, normalizer = [], [], [], {}, {}
        for number, value in _fields(path.read_bytes()):
            if number == 1:
                piece = dict(_fields(value))
                names.append(piece[1].decode())
                scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
                kinds.append(piece.get(3, 1))
            elif number == 2:
                trainer = dict(_fields(value))
            elif number == 3:
                normalizer = dict(_fields(value))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"{path} is not a SentencePiece model: {error}") from error
    kind = trainer.get(3, 1)
    if not names or kind not in (1, 2):
        raise ValueError(f"{path} is not a SentencePiece model of unigrams or byte pairs")
    return Pieces(
        names,
        scores,
        kinds,
        pairs=kind == 2,
        byte_fallback=bool(trainer.get(35, 0)),
        character_map=normalizer.get(2, b""),
        prefix=bool(normalizer.get(3, 1)),
        squeezes=bool(normalizer.get(4, 1)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The numbered fields of a protocol buffer: integers or bytes."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("a number without an end")

    while at < len(data):
        key = number()
        wire = key & 7
        if wire == 0:
            yield key >> 3, number()
            continue
        size = {1: 8, 5: 4}.get(wire) if wire != 2 else number()
        if size is None or at + size > len(data):
            raise ValueError("a field goes over the end")
        yield key >> 3, data[at : at + size]
        at += size


def from_pieces(pieces: Pieces) -> tokenizers.Tokenizer:
    """The same tokenizer in the `tokenizers` library."""
    # Control tokens are not text. No merge makes one, but a unigram model would find one that a text spells out: there
    # they get a name with a space, which no text has at that point.
    hidden = () if pieces.pairs else (3, 5)
    names = [
        f"special {name}" if kind in hidden else name for name, kind in zip(pieces.names, pieces.kinds, strict=True)
    ]
    unknown = names[pieces.unknown]
    steps: list[Any] = [normalizers.Precompiled(pieces.character_map)] if pieces.character_map else []
    if pieces.squeezes:
        steps += [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    if pieces.pairs:
        vocabulary = {name: id for id, name in enumerate(names)}
        plain = {
            name: score for name, score, kind in zip(names, pieces.scores, pieces.kinds, strict=True) if kind in (1, 4)
        }
        library = tokenizers.Tokenizer(
            models.BPE(
                vocabulary,
                merges_of(plain),
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=pieces.byte_fallback,
            )
        )
        steps += [normalizers.Prepend(SPACE)] if pieces.prefix else []
        library.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
        library.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
            + ([decoders.Strip(" ", 1, 0)] if pieces.prefix else [])
        )
        return library
    unigrams = list(zip(names, pieces.scores, strict=True))
    library = tokenizers.Tokenizer(models.Unigram(unigrams, pieces.unknown, pieces.byte_fallback))
    library.normalizer = normalizers.Sequence(steps)
    scheme = "always" if pieces.prefix else "never"
    library.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    library.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    return library


def merges_of(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Scored byte pairs as merges in order: the best piece is merged first, from any two others."""
    order = {name: place for place, name in enumerate(scores)}
    merges = []
    for name, score in scores.items():
        halves = ((name[:cut], name[cut:]) for cut in range(1, len(name)))
        known = [pair for pair in halves if pair[0] in order and pair[1] in order]
        merges += [(-score, order[name], order[left], order[right], left, right) for left, right in known]
    return [(left, right) for *_, left, right in sorted(merges)]


def _marian(folder: Path, values: Values, size: int, target_size: int | None) -> dict[str, Published]:
    """Two SentencePiece models with the ids of their pieces, in one vocabulary or in one each."""
    shared = target_size is None
    files = {
        "source.json": ("source.spm", "vocab.json", size),
        "target.json": ("target.spm", "vocab.json" if shared else "target_vocab.json", target_size or size),
    }
    read = {}
    for name, (spm, vocabulary, count) in files.items():
        for needed in (spm, vocabulary):
            if not (folder / needed).is_file():
                raise ValueError(f"{folder} has no {needed}, which the tokenizer of a Marian model is made of")
        ids = read_json(folder / vocabulary)
        if not all(isinstance(id, int) for id in ids.values()):
            raise ValueError(f"{folder / vocabulary} must give a number for each token")
        special = {key: ids.get(token) for key, token in (("unk", "<unk>"), ("eos", "</s>"), ("pad", "<pad>"))}
        if None in special.values() or sorted(ids.values()) != list(range(len(ids))):
            raise ValueError(f"{folder / vocabulary} must number <unk>, </s>, <pad> and its other tokens from 0")
        special["bos"] = values.get("decoder_start_token_id", special["pad"])
        content = json.loads(from_pieces(read_pieces(folder / spm)).to_str())
        read[name] = Published(content, special, count, sorted(ids, key=lambda token: ids[token]))
    return read


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > LIMIT:
            raise ValueError(f"{path} has more than {LIMIT:,} bytes")
        return path.read_text(encoding="utf-8").replace("\r\n", "\n")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
