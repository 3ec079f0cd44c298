"""Tokenizers that others trained, over the `tokenizers` library (its tokenizer.json).

They keep their ids, so that a published model can be used with them, and know which ids are special. As with our own,
text never turns into a special token, whatever it looks like.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders

from regard.data.tokenizer import BYTE_OF, FORMAT, Tokenizer, chunks, printable, visible

KIND = "published"
NAMES = ("pad", "unk", "bos", "eos", "mask")  # of the special ids


class Published(Tokenizer):
    """The interface of `Tokenizer` over a tokenizer of the library. `special` gives ids by name, None where there is
    none; `size` may be more than the tokenizer has ids, as embeddings are often rounded up. `vocabulary` are the
    tokens by id where the ids are not the tokenizer's own (Marian)."""

    kind = KIND

    def __init__(
        self,
        content: dict[str, Any],
        special: dict[str, int | None],
        size: int,
        vocabulary: Sequence[str] | None = None,
    ) -> None:
        self.content, self.named, self._size = content, {name: special.get(name) for name in NAMES}, size
        try:
            self.library = tokenizers.Tokenizer.from_str(json.dumps(content))
        except Exception as error:
            # the library knows no other class
            raise ValueError(f"the tokenizer is not one of the `tokenizers` library: {error}") from error
        self.library.no_padding()
        self.library.no_truncation()
        self.library.encode_special_tokens = True
        self.pad, self.unk, self.bos, self.eos, self.mask = self.named.values()
        known = self.library.get_vocab(with_added_tokens=True)
        self.vocabulary = vocabulary
        self.map: dict[int, int] | None = None
        if vocabulary is not None:
            if self.unk is None:
                raise ValueError("a tokenizer with ids of another vocabulary needs an unknown token; this one has none")
            ids = {name: id for id, name in enumerate(vocabulary)}
            self.map = {place: ids.get(name, self.unk) for name, place in known.items()}
        most = max(known.values(), default=-1) + 1 if vocabulary is None else len(vocabulary)
        if most > size:
            raise ValueError(f"the tokenizer has {most} ids and the model {size}: they do not belong together")
        for name, id in self.named.items():
            if id is not None and not 0 <= id < size:
                raise ValueError(f"the special token {name!r} has the id {id}, which is not among the model's {size}")

    @property
    def size(self) -> int:
        return self._size

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        found = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._out(part.ids) for part in found]

    def encode_around(self, parts: Sequence[str]) -> list[int]:
        if self.mask is None:
            raise ValueError("this tokenizer has no mask: its model was not trained to fill gaps")
        added = self.library.get_added_tokens_decoder().get(self.mask)
        ids: list[int] = []
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            # some masks stand for a word with the space before it
            ids += self.encode(part if last or added is None or not added.lstrip else part.rstrip(" "))
            ids += [] if last else [self.mask]
        return ids

    def encode_text(self, text: str) -> np.ndarray:
        ids = [id for part in chunks(text) for id in self.encode(part)]
        return np.array(ids, dtype=np.int32)

    def decode(self, ids: Iterable[int], unknown: Iterable[str] = ()) -> str:
        left_out = {id for id in self.named.values() if id is not None} - {self.unk}
        inside = [id for id in self.checked(ids) if id not in left_out]
        texts, decoder = list(unknown), self.library.decoder
        if self.vocabulary is None and not texts:
            return self.library.decode(inside, skip_special_tokens=True)
        # a unit that begins a word has a mark for the space before it
        marked = iter(f"▁{text}" if isinstance(decoder, decoders.Metaspace) else text for text in texts)
        names = zip(inside, self.names(inside), strict=True)
        units = [next(marked, name) if id == self.unk else name for id, name in names]
        return " ".join(units) if decoder is None else decoder.decode(units)

    def names(self, ids: Iterable[int]) -> list[str]:
        if self.vocabulary is not None:
            return [self.vocabulary[id] if id < len(self.vocabulary) else f"<{id}>" for id in ids]
        return [self.library.id_to_token(id) or f"<{id}>" for id in ids]

    def tokens(self, ids: Iterable[int]) -> list[str]:
        names = self.names(self.checked(ids))
        # the letters of byte-level tokens stand for bytes
        whole = isinstance(self.library.decoder, decoders.ByteLevel)
        return [printable(name) if whole and BYTE_OF.keys() >= set(name) else visible(name) for name in names]

    def words(self, text: str) -> tuple[list[int], list[int]]:
        words = self.split_words(text)
        if not words:
            return [], []
        found = self.library.encode(text, add_special_tokens=False)
        owners, word, inside = [], -1, False
        for character in text:
            word += not inside and not character.isspace()
            inside = not character.isspace()
            owners.append(word if inside else word + 1)
        places = [min(owners[max(end, 1) - 1], len(words) - 1) for _, end in found.offsets]
        return self._out(found.ids), places

    def split_words(self, text: str) -> list[str]:
        return text.split()

    def unknown(self, texts: Iterable[str]) -> Counter[str]:
        return Counter(
            text[start:end]
            for text in texts
            for id, (start, end) in zip(*self._placed(text), strict=True)
            if id == self.unk
        )

    def _placed(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = self.library.encode(text, add_special_tokens=False)
        return self._out(found.ids), found.offsets

    def _out(self, ids: Sequence[int]) -> list[int]:
        return list(ids) if self.map is None else [self.map[id] for id in ids]

    def saved(self) -> dict[str, Any]:
        content = {"format": FORMAT, "kind": KIND, "pieces": self.content, "special": self.named, "size": self.size}
        return content if self.vocabulary is None else content | {"vocabulary": list(self.vocabulary)}

    @classmethod
    def restored(cls, content: dict[str, Any]) -> "Published":
        """From what `saved` gave."""
        special, size, names = content.get("special"), content.get("size"), content.get("vocabulary")
        listed = names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names))
        if (
            not isinstance(content.get("pieces"), dict)
            or not isinstance(special, dict)
            or not all(isinstance(id, int | None) for id in special.values())
            or not listed
            or not isinstance(size, int)
        ):
            raise ValueError("the tokenizer is damaged: it does not say its pieces, special ids and size")
        return cls(content["pieces"], special, size, names)
