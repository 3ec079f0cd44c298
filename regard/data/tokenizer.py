"""Text to token ids and back.

Kind "bpe" is byte-pair encoding over bytes (Sennrich et al. 2016; Radford et al. 2019): no text is unknown and every
text comes back from its ids exactly, runs of spaces included. Words, numbers and punctuation never share a token,
digits stand alone, and a word carries the space before it; one space is put before the text and taken away again in
`decode`, so that a word has the same ids at the start of a line and inside it. Text is not normalised.

Kind "uncased" are byte pairs of small letters, for models that only read: words, digits and runs of one sign each stand
alone with one space before, however the text was spaced, "don't" and "do n't" are both do, n't, and <br> is a space.
What comes back is that text.

Kind "units" is for text that is split into units by spaces already, where a unit that ends in "@@" continues in the
next one (subword-nmt). Kind "words" is for running text: what white space separates, and the end of each line; other
white space is not kept. Kind "stems" are words too, and the beginnings that words share, "perce…": a word that it does
not know is read as the longest beginning that it does, and a model can give words of one stem a common part (`stems`).
Kind "characters" are the characters of the text it was trained on. What is not in the vocabulary of these four is
unknown. Kind "bytes" are the 256 bytes of UTF-8, and learns nothing.

Text never turns into one of the special tokens, whatever it looks like. One tokenizer trained on both languages is a
shared vocabulary, two are separate ones.

A tokenizer of kind "bpe" can have placeholders: the last ids, which stand for what is not language. `encode` never
gives one; placeholders.py puts them in and takes them out again.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

PAD, UNK, BOS, EOS = range(4)
SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")  # as they are shown; text that reads so is plain text

Kind = Literal["bpe", "uncased", "units", "words", "stems", "characters", "bytes"]
FORMAT = "regard tokenizer 1"
CONTINUES = "@@"

STEMS = (4, 5)  # letters of the beginnings that words share
CUT = "…"  # behind such a beginning

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())  # one character for each byte
# Words, single digits, runs of other signs, each with the space before; white space that is left over.
SPLIT: dict[str, Callable[[str], list[str]]] = {
    "units": str.split,
    "words": re.compile(r"\n|\S+").findall,
    "stems": re.compile(r"\n|\S+").findall,
    "characters": list,
}
BYTE_PAIRS = ("bpe", "uncased")
LONG = 1 << 20  # characters that are encoded at a time
PIECES = r" ?\p{L}[\p{L}\p{M}]*| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Of kind "uncased": what comes before n't, n't itself, 's and its like, words, single digits, runs of one sign.
UNCASED = (
    r"\p{L}+?(?=n't(?!\p{L}))|n't(?!\p{L})|'(?:s|re|ve|ll|d|m)(?!\p{L})"
    r"|\p{L}[\p{L}\p{M}]*|\p{N}|([^\s\p{L}\p{N}])\1*"
)


class Reserved(NamedTuple):
    """Placeholders: of each kind of entity this many, and the scripts of the text that was learned, in which words are
    language."""

    kinds: tuple[str, ...]
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] - saved tokenizers have this name
    scripts: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        # no byte-level token has a space: text cannot be one of them
        return [f"{kind} {number}" for kind in self.kinds for number in range(1, self.count + 1)]


class Tokenizer:
    """Made by `Tokenizer.train` or `Tokenizer.load`. `pieces` are the merges of kinds "bpe" and "uncased", none of
    "bytes", and the vocabulary of the others."""

    reserved: Reserved | None = None

    def __init__(
        self, kind: Kind, pieces: Sequence[str] | Sequence[tuple[str, str]], reserved: Reserved | None = None
    ) -> None:
        if reserved is not None and kind != "bpe":
            raise ValueError(f"placeholders are for kind 'bpe', got {kind!r}")
        self.kind, self.pieces, self.reserved = kind, pieces, reserved
        self.pad, self.unk, self.bos, self.eos = PAD, UNK, BOS, EOS
        # padding is marked by `keep` and not by its id, so the same id can hide a real token
        self.mask = PAD
        if kind in (*BYTE_PAIRS, "bytes"):
            merges = [(left, right) for left, right in pieces]
            # A token can come from several merges; its id is that of the first.
            self.vocabulary = list(dict.fromkeys([*BYTES, *(left + right for left, right in merges)]))
            self.vocabulary += reserved.names if reserved is not None else []
            self.bpe = byte_pair_encoder(self.vocabulary, merges, kind)
            # for what continues a text
            self.bare = self.bpe if kind == "uncased" else byte_pair_encoder(self.vocabulary, merges, "bare")
        else:
            self.vocabulary = [unit for unit in pieces if isinstance(unit, str)]
        self.ids = {unit: id for id, unit in enumerate(self.vocabulary, len(SPECIAL))}

    @classmethod
    def train(
        cls,
        lines: Iterable[str],
        size: int,
        kind: Kind = "bpe",
        *,
        minimum: int = 1,
        reserved: Reserved | None = None,
    ) -> "Tokenizer":
        """Learn a vocabulary of at most `size` ids, the special and reserved ones included, from lines of text. Merges
        or units seen fewer than `minimum` times are dropped. Equal lines give equal ids, on every machine."""
        if kind not in get_args(Kind):
            raise ValueError(f"unknown kind of tokenizer {kind!r}, expected one of: {', '.join(get_args(Kind))}")
        kept = len(SPECIAL) + (0 if reserved is None else len(reserved.names))
        least = kept + (len(BYTES) if kind in (*BYTE_PAIRS, "bytes") else 1)
        if size < least:
            told = (
                "" if reserved is None else f", {len(reserved.names)} of it placeholders (--data.protect false: none)"
            )
            raise ValueError(f"the vocabulary of kind {kind!r} needs a size of at least {least}, got {size}{told}")
        if minimum < 1:
            raise ValueError(f"minimum must be at least 1, got {minimum}")
        if kind in BYTE_PAIRS:
            return cls(kind, learned_merges(lines, size - kept, minimum, kind), reserved)
        if kind == "bytes":
            return cls(kind, [])
        counts: Counter[str] = Counter()
        for line in lines:
            units = SPLIT[kind](line)
            counts.update(units)
            if kind == "stems":
                counts.update(stem for unit in units for stem in stems_of(unit))
        # Sorted by count and then by the unit itself, not by where it came first, so the order of lines is no matter.
        units = sorted((-count, unit) for unit, count in counts.items() if count >= minimum)
        if not units:
            raise ValueError("no unit to learn: the text is empty, or nothing in it comes often enough")
        return cls(kind, [unit for _, unit in units[: size - len(SPECIAL)]])

    @property
    def size(self) -> int:
        """How many ids there are, the special ones included."""
        return len(SPECIAL) + len(self.vocabulary)

    @cached_property
    def placeholders(self) -> range:
        """The ids of the placeholders, in the order of `Reserved.names`."""
        return range(self.size - (0 if self.reserved is None else len(self.reserved.names)), self.size)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special ones (but for UNK)."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self.kind in BYTE_PAIRS:
            return [encoding.ids for encoding in self.bpe.encode_batch_fast(texts)]
        return [self.encode_text(text).tolist() for text in texts]

    def encode_text(self, text: str) -> np.ndarray:
        """The ids of a text of any length, a book: as `encode`, with little memory."""
        if self.kind == "bytes":
            table = np.array([self.ids[CHARACTER_OF[byte]] for byte in range(256)], dtype=np.int32)
            return table[np.frombuffer(text.encode(), np.uint8)]
        if self.kind == "characters":
            found, places = np.unique(np.frombuffer(text.encode("utf-32-le"), np.uint32), return_inverse=True)
            return np.array([self.ids.get(chr(code), UNK) for code in found], dtype=np.int32)[places]
        if self.kind not in BYTE_PAIRS:
            return np.array([self.find(unit) for unit in SPLIT[self.kind](text)], dtype=np.int32)
        ids: list[int] = []
        for number, part in enumerate(chunks(text)):
            ids += (self.bare if number else self.bpe).encode(part).ids
        return np.array(ids, dtype=np.int32)

    def find(self, unit: str) -> int:
        """The id of a unit; of kind "stems" that of its longest known beginning where the whole is not known."""
        if unit in self.ids or self.kind != "stems":
            return self.ids.get(unit, UNK)
        return next((self.ids[stem] for stem in reversed(stems_of(unit)) if stem in self.ids), UNK)

    @property
    def stems(self) -> np.ndarray | None:
        """Of each id those of its beginnings, [V, K], 0 where there is none; None of other kinds."""
        if self.kind != "stems":
            return None
        table = np.zeros((self.size, len(STEMS)), dtype=np.int64)
        for unit, id in self.ids.items():
            found = [self.ids[stem] for stem in stems_of(unit) if stem in self.ids]
            table[id, : len(found)] = found
        return table

    def encode_around(self, parts: Sequence[str]) -> list[int]:
        """The ids of a text with the mask between each two of its parts. The mask stands for one token, and where that
        is more than a character, for the space before it too."""
        ids: list[int] = []
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            if not last and self.kind not in ("characters", "bytes"):
                part = part.removesuffix(" ")
            if self.kind not in BYTE_PAIRS:
                found = self.encode(part)
            else:
                # an empty text is no space
                found = (self.bare if number else self.bpe).encode(part).ids if part else []
            ids += found if last else [*found, self.mask]
        return ids

    def encode_between(self, texts: Sequence[Sequence[str]], marks: Sequence[Sequence[int]]) -> list[list[int]]:
        """Of each text the ids of its parts, with one of its marks between each two. Unlike `encode_around`, spaces
        beside a mark stay tokens, so that text comes back exactly."""
        first = iter(self.encode_batch([parts[0] for parts in texts]))
        others = iter(self.bare.encode_batch_fast([part for parts in texts for part in parts[1:]]))
        rows = []
        for parts, ids in zip(texts, marks, strict=True):
            begin = next(first)
            row = begin if parts[0] else []  # an empty text is no space
            for mark, _ in zip(ids, parts[1:], strict=True):
                row += [mark, *next(others).ids]
            rows.append(row)
        return rows

    def framed(self, ids: Sequence[int]) -> list[int]:
        """A text that stands alone: between bos and eos, where the tokenizer has them."""
        return [id for id in (self.bos, *ids, self.eos) if id is not None]

    @property
    def special(self) -> list[int]:
        """The ids that no text has."""
        return sorted({id for id in (self.pad, self.unk, self.bos, self.eos, self.mask) if id is not None})

    def decode(self, ids: Iterable[int], unknown: Iterable[str] = ()) -> str:
        """The text of ids. Special ones are omitted, but an unknown unit is shown as <unk>, or as the next text of
        `unknown`. A text may hold any character, also "\\n", if the ids say so; bytes that are not UTF-8 become
        U+FFFD."""
        ids = self.checked(ids)
        if self.placeholders and any(id in self.placeholders for id in ids):
            return self.decode_between(ids, {})
        if self.kind in (*BYTE_PAIRS, "bytes"):
            text = self.bpe.decode([id for id in ids if id >= len(SPECIAL)])
            return text.removeprefix(" ") if self.kind != "bytes" else text
        ids, texts = [id for id in ids if id not in (PAD, BOS, EOS)], iter(unknown)
        units = [next(texts, name) if id == UNK else name for id, name in zip(ids, self.names(ids), strict=True)]
        if self.kind == "characters":
            return "".join(units)
        return joined(units) if self.kind == "units" else re.sub(" ?\n ?", "\n", " ".join(units))

    def decode_between(self, ids: Iterable[int], surfaces: Mapping[int, str]) -> str:
        """As `decode`, with the text that each placeholder stands for; one without is shown by its name."""
        text, run = "", []
        for place, id in enumerate([*self.checked(ids), None]):
            if id is not None and id not in self.placeholders:
                run.append(id)
                continue
            part = self.bpe.decode([id for id in run if id >= len(SPECIAL)])
            # the space before a text is not part of it
            text += part.removeprefix(" ") if len(run) == place else part
            run = []
            if id is not None:
                text += surfaces[id] if id in surfaces else self.tokens([id])[0]
        return text

    def names(self, ids: Iterable[int]) -> list[str]:
        return [SPECIAL[id] if id < len(SPECIAL) else self.vocabulary[id - len(SPECIAL)] for id in ids]

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Each token in a form to print: "▁" stands for a space, and what is no text is escaped."""
        ids = self.checked(ids)
        names = self.names(ids)
        if self.reserved is not None:
            shown = self.placeholders
            return [f"⟨{name}⟩" if id in shown else printable(name) for id, name in zip(ids, names, strict=True)]
        if self.kind == "units":
            return names
        return [printable(name) if self.kind in (*BYTE_PAIRS, "bytes") else visible(name) for name in names]

    def words(self, text: str) -> tuple[list[int], list[int]]:
        """The ids of a text, and for each the number of the word it is part of, from 0. Words are what white space
        separates, see `split_words`; a blank text has none, and no ids."""
        words = self.split_words(text)
        if not words:
            return [], []
        ids = self.encode(text)
        if self.kind == "units":
            ends = accumulate((not unit.endswith(CONTINUES) for unit in text.split()), initial=0)
            return ids, [min(place, len(words) - 1) for place, _ in zip(ends, ids, strict=False)]
        if self.kind in ("words", "stems"):
            ends = accumulate((unit != "\n" for unit in SPLIT["words"](text)), initial=0)
            return ids, [min(place, len(words) - 1) for place, _ in zip(ends, ids, strict=False)]
        if self.kind == "uncased":
            found = self.bpe.encode(text)
            starts = accumulate(
                this > 0 and text[this - 1].isspace() and not text[this].isspace() for this in range(len(text))
            )
            first = 1 if text[:1].isspace() else 0
            places = [number - first for number in starts]
            return found.ids, [places[end - 1] for _, end in found.offsets]
        # White space belongs to the word after it, and every token to the word of its last byte; before the text of
        # kind "bpe" stands one more.
        owners, word, inside = [0] if self.kind == "bpe" else [], -1, False
        for character in text:
            word += not inside and not character.isspace()
            inside = not character.isspace()
            owners += [word if inside else word + 1] * len(character.encode())
        places, end = [], 0
        lengths = [len(letter.encode()) for letter in text] if self.kind == "characters" else None
        for number, id in enumerate(ids):
            end += len(self.vocabulary[id - len(SPECIAL)]) if lengths is None else lengths[number]
            places.append(min(owners[end - 1], len(words) - 1))
        return ids, places

    def split_words(self, text: str) -> list[str]:
        """The words that `words` numbers."""
        return joined(text.split()).split() if self.kind == "units" else text.split()

    def unknown(self, texts: Iterable[str]) -> Counter[str]:
        """The units without an id and how often they come; none ever of byte pairs and bytes."""
        if self.kind in (*BYTE_PAIRS, "bytes"):
            return Counter()
        return Counter(unit for text in texts for unit in SPLIT[self.kind](text) if self.find(unit) == UNK)

    def save(self, path: str | Path) -> None:
        """Write a JSON file, whole or not at all."""
        path = Path(path)
        part = path.with_name(path.name + ".part")
        with open(part, "w", encoding="utf-8", newline="\n") as file:
            json.dump(self.saved(), file, ensure_ascii=False, indent=0)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)

    def saved(self) -> dict[str, Any]:
        """What the file says."""
        content = {"format": FORMAT, "kind": self.kind, "pieces": self.pieces}
        return content if self.reserved is None else content | {"reserved": self.reserved._asdict()}

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
        except OSError as error:
            raise ValueError(f"{path}: cannot read the tokenizer: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not a tokenizer of Regard: no JSON ({error})") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{path}: not a tokenizer of Regard: expected JSON with format {FORMAT!r}")
        kind, pieces = content.get("kind"), content.get("pieces")
        if kind == "published":
            from regard.data.published import Published

            try:
                return Published.restored(content)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
        if kind in BYTE_PAIRS and are_merges(pieces):
            try:
                reserved = reserved_from(content.get("reserved"))
                return cls(kind, [(left, right) for left, right in pieces], reserved)
            except ValueError as error:
                raise ValueError(f"{path}: the tokenizer is damaged: {error}") from error
        if kind in list(SPLIT) and are_units(pieces):
            return cls(kind, pieces)
        if kind == "bytes" and pieces == []:
            return cls(kind, [])
        raise ValueError(f"{path}: the tokenizer is damaged: its pieces do not make a vocabulary of kind {kind!r}")

    def checked(self, ids: Iterable[int]) -> list[int]:
        ids, size = [int(id) for id in ids], self.size
        for id in ids:
            if not 0 <= id < size:
                raise ValueError(f"token id {id} is not in the vocabulary of {size}: wrong tokenizer?")
        return ids


def stems_of(unit: str) -> list[str]:
    """The beginnings of a word, or of a longer beginning, from short to long."""
    letters = unit.removesuffix(CUT)
    stems = (letters[:size] + CUT for size in STEMS if len(letters) >= size)
    return [stem for stem in stems if stem != unit]


def joined(units: Sequence[str]) -> str:
    """Text of units: those that continue are put together, also a last one that nothing follows."""
    return re.sub(f"{CONTINUES}( |$)", "", " ".join(units))


def printable(piece: str) -> str:
    """A byte-level token as text where its bytes are, as escapes where they are not."""
    if piece in SPECIAL:
        return piece
    return visible(bytes(BYTE_OF[character] for character in piece).decode(errors="backslashreplace"))


def visible(text: str) -> str:
    text = text.replace(" ", "▁")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def chunks(text: str) -> Iterator[str]:
    """A long text in parts that no token of kind "bpe" crosses: cut between a line and the next, both of ink."""
    start = 0
    while len(text) - start > LONG:
        cut = re.compile(r"(?<=\S)\n(?=\S)").search(text, start + LONG)
        if cut is None:
            break
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def skeleton(model: models.BPE, kind: str) -> tokenizers.Tokenizer:
    """What is done to text before and after its pairs; kind "bare" is "bpe" without a space before the text."""
    encoder = tokenizers.Tokenizer(model)
    encoder.decoder = decoders.ByteLevel()
    if kind == "uncased":
        breaks, apostrophe = tokenizers.Regex(r"<br\s*/?>"), tokenizers.Regex("[\u2018\u2019]")
        encoder.normalizer = normalizers.Sequence(
            [normalizers.Lowercase(), normalizers.Replace(breaks, " "), normalizers.Replace(apostrophe, "'")]
        )
        words = pre_tokenizers.Split(tokenizers.Regex(UNCASED), "removed", invert=True)
        encoder.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)]
        )
        return encoder
    if kind != "bare":
        encoder.normalizer = normalizers.Prepend(" ")
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return encoder


def byte_pair_encoder(vocabulary: Sequence[str], merges: Sequence[tuple[str, str]], kind: str) -> tokenizers.Tokenizer:
    # The names of the special tokens hold a space, which no byte-level token does: text cannot be one of them.
    names = [f"special {name}" for name in SPECIAL]
    ids = {name: id for id, name in enumerate([*names, *vocabulary])}
    return skeleton(models.BPE(ids, list(merges)), kind)


def learned_merges(lines: Iterable[str], size: int, minimum: int, kind: str) -> list[tuple[str, str]]:
    # The library breaks ties between pairs by their ids, which start from the sorted bytes: no chance is left.
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=minimum, initial_alphabet=BYTES, special_tokens=[], show_progress=False
    )
    encoder = skeleton(models.BPE(), kind)
    encoder.train_from_iterator(lines, trainer)
    merges = [(left, right) for left, right in json.loads(encoder.to_str())["model"]["merges"]]
    if not merges and size > len(BYTES):
        raise ValueError("no merge to learn: the text is empty, or nothing in it comes often enough")
    return merges


def are_merges(pieces: object) -> TypeGuard[list[list[str]]]:
    """Whether each is a pair of tokens that come before it."""
    if not isinstance(pieces, list):
        return False
    known = set(BYTES)
    for pair in pieces:
        is_pair = isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)
        if not is_pair or not known.issuperset(pair):
            return False
        known.add(pair[0] + pair[1])
    return len({tuple(pair) for pair in pieces}) == len(pieces)


def reserved_from(content: object) -> Reserved | None:
    """What a file says of placeholders."""
    if content is None:
        return None
    fields = set(Reserved._fields)
    if not isinstance(content, dict) or set(content) != fields:
        raise ValueError(f"its reserved tokens must say {', '.join(sorted(fields))}")
    kinds, count, scripts = (content[name] for name in Reserved._fields)
    if (
        not are_units(kinds)
        or not isinstance(count, int)
        or not 1 <= count <= 1000
        or (scripts and not are_units(scripts))
    ):
        raise ValueError(f"its reserved tokens must be kinds, a count from 1 to 1000 and scripts, got {content}")
    return Reserved(tuple(kinds), count, tuple(scripts))


def are_units(pieces: object) -> TypeGuard[list[str]]:
    return (
        isinstance(pieces, list) and all(isinstance(p, str) and p for p in pieces) and len(set(pieces)) == len(pieces)
    )


def byte_of_characters() -> dict[str, int]:
    """The byte that each character of the byte-level alphabet stands for: printable ones of Latin-1 for themselves,
    the others in turn from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_OF = byte_of_characters()
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}


class Streamed:
    """Text that comes token by token: `add` gives what a token adds, as soon as its last byte is there. What a token
    costs does not grow: only those since the last text but one are decoded again."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self.tokenizer, self.ids = tokenizer, list(before[-8:])
        self.done = len(self.ids)  # tokens whose text was given

    def add(self, id: int) -> str:
        self.ids.append(int(id))
        text = self.pending()
        # no character has more than four bytes: what is longer than that is none
        if not text or (text.endswith("\ufffd") and len(self.ids) - self.done < 4):
            return ""
        self.ids, self.done = self.ids[self.done :], len(self.ids) - self.done
        return text

    def pending(self) -> str:
        """What was not given yet, also half a character."""
        before = self.tokenizer.decode(self.ids[: self.done])
        return self.tokenizer.decode(self.ids)[len(before) :]
