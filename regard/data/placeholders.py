"""Text with placeholders for what is not language, as a translator reads and writes it.

An entity of a sentence (entities.py) becomes one token, the placeholder of its kind with its number in the sentence:
the first number is "number 1", the second "number 2". The model learns to put it into the translation, where the entity
takes its place again. Spaces around it stay text. What is more than a tokenizer has placeholders for stays text too.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from regard.data.entities import KINDS, Entity, Kind, Style, find, match, scripts_of
from regard.data.tokenizer import Reserved, Tokenizer

COUNT = 8  # of each kind
COPIED = 0.15  # of the pairs with a word in common are trained on once more, with made-up entities
BESIDE = 0.04  # of the other pairs
SHORT = 3  # letters: shorter words that both sides have may be words of either language

Pair = tuple[str, str]


class Marked(NamedTuple):
    """A text and the entities in it that have a placeholder."""

    text: str
    entities: tuple[Entity, ...] = ()
    marks: tuple[int, ...] = ()

    @property
    def parts(self) -> list[str]:
        """What stands before, between and after the entities."""
        starts = [0, *(entity.end for entity in self.entities)]
        ends = [*(entity.start for entity in self.entities), len(self.text)]
        return [self.text[start:end] for start, end in zip(starts, ends, strict=True)]

    def surfaces(self, style: Style | None = None) -> dict[int, str]:
        """What each placeholder stands for, as it is or in the style of the target."""
        write = (lambda entity: entity.text) if style is None else (lambda entity: style.write(entity, self.text))
        return {mark: write(entity) for mark, entity in zip(self.marks, self.entities, strict=True)}


def reserve(texts: Sequence[str]) -> Reserved:
    """The placeholders of a tokenizer that learns from these texts."""
    return Reserved(KINDS, COUNT, scripts_of(texts))


def entities(tokenizer: Tokenizer, text: str) -> list[Entity]:
    """Those that the tokenizer could have placeholders for."""
    if tokenizer.reserved is None:
        return []
    return [entity for entity in find(text, tokenizer.reserved.scripts) if entity.kind in tokenizer.reserved.kinds]


def mark(tokenizer: Tokenizer, text: str, found: Sequence[Entity] | None = None) -> Marked:
    """A source: its entities numbered in order; `found` are they, where they are known."""
    return _numbered(tokenizer, text, entities(tokenizer, text) if found is None else found, 0)


def mark_pair(source: Tokenizer, target: Tokenizer, pair: Pair, shift: int = 0) -> tuple[Marked, Marked]:
    """A sentence and its translation: what both have gets the same placeholder. What only one of them has stays text.
    Numbers begin with `shift`, where there are enough: so that all of them are learned."""
    if source.reserved is None or target.reserved is None:
        return Marked(pair[0]), Marked(pair[1])
    found = entities(source, pair[0])
    # most sentences have none
    matched = match(found, entities(target, pair[1])) if found else []
    return _paired(source, target, pair, matched, shift)


def mark_target(source: Marked, both: tuple[Tokenizer, Tokenizer], text: str) -> Marked:
    """A translation of a source that is marked already."""
    if not source.marks:
        return Marked(text)
    return _with_marks_of(source, both, match(source.entities, entities(both[1], text)), text)


def _paired(
    source: Tokenizer, target: Tokenizer, pair: Pair, matched: Sequence[tuple[Entity, Entity]], shift: int
) -> tuple[Marked, Marked]:
    ours = _numbered(source, pair[0], [one for one, _ in matched], shift)
    return ours, _with_marks_of(ours, (source, target), matched, pair[1])


def _with_marks_of(
    source: Marked, both: tuple[Tokenizer, Tokenizer], matched: Sequence[tuple[Entity, Entity]], text: str
) -> Marked:
    given = dict(zip(source.entities, source.marks, strict=True))
    offset = both[1].placeholders.start - both[0].placeholders.start
    theirs = sorted((other, given[one] + offset) for one, other in matched if one in given)
    return Marked(text, tuple(other for other, _ in theirs), tuple(id for _, id in theirs))


def _numbered(tokenizer: Tokenizer, text: str, found: Sequence[Entity], shift: int) -> Marked:
    if not found or tokenizer.reserved is None:
        return Marked(text)
    kinds, count, _ = tokenizer.reserved
    totals = {kind: sum(entity.kind == kind for entity in found) for kind in kinds}
    used = {kind: shift % max(count - total + 1, 1) for kind, total in totals.items()}
    kept, marks = [], []
    for entity in found:
        if used[entity.kind] < count:
            kept.append(entity)
            marks.append(tokenizer.placeholders[kinds.index(entity.kind) * count + used[entity.kind]])
            used[entity.kind] += 1
    return Marked(text, tuple(kept), tuple(marks))


def encode(tokenizer: Tokenizer, texts: Sequence[Marked]) -> list[list[int]]:
    """The ids of marked texts."""
    plain = iter(tokenizer.encode_batch([marked.text for marked in texts if not marked.marks]))
    some = [marked for marked in texts if marked.marks]
    coded = iter(
        tokenizer.encode_between([marked.parts for marked in some], [marked.marks for marked in some]) if some else ()
    )
    return [next(coded if marked.marks else plain) for marked in texts]


def words(tokenizer: Tokenizer, marked: Marked) -> tuple[list[int], list[int]]:
    """As `Tokenizer.words`: the ids, and the word of each. An entity belongs to the word that it ends in."""
    if not marked.marks:
        return tokenizer.words(marked.text)
    (ids,) = encode(tokenizer, [marked])
    owners, word, inside = [], -1, False
    for character in marked.text:
        word += not inside and not character.isspace()
        inside = not character.isspace()
        owners += [word if inside else word + 1] * len(character.encode())
    lengths = {mark: len(entity.text.encode()) for mark, entity in zip(marked.marks, marked.entities, strict=True)}
    places, end = [], -1 if marked.parts[0] else 0  # before the text stands one more space
    for id in ids:
        end += lengths[id] if id in lengths else len(tokenizer.names([id])[0])
        places.append(min(owners[max(end - 1, 0)], word))
    return ids, places


class Copies(NamedTuple):
    """More pairs to train on, and which pair each was made of."""

    pairs: list[tuple[Marked, Marked]]
    indices: list[int]


def copies(source: Tokenizer, target: Tokenizer, pairs: Sequence[Pair], seed: int) -> Copies:
    """Pairs with placeholders, made of some of the given ones, so that any corpus teaches a model to copy: words that
    both sides have, such as names, are taken for entities; elsewhere one is put before or behind both."""
    made = Copies([], [])
    if source.reserved is None or target.reserved is None:
        return made
    draws = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, len(pairs)]))).random((len(pairs), 4))
    for index in np.flatnonzero(draws[:, 0] < max(COPIED, BESIDE)).tolist():
        chosen, kind, place, shift = draws[index]
        pair = (pairs[index][0].strip(), pairs[index][1].strip())
        matched = match(entities(source, pair[0]), entities(target, pair[1]))
        shared = _shared_words(pair, matched)
        if shared and chosen < COPIED:
            # mostly as things, now and then as numbers, which many texts spell out
            name = "thing" if kind < 0.8 else "number" if kind < 0.9 else "time"
            matched += [(one._replace(kind=name), other._replace(kind=name)) for one, other in shared]
        elif chosen < BESIDE:
            pair, matched = _put_beside(pair, matched, "sign" if kind < 0.7 else "thing", place < 0.3)
        else:
            continue
        matched.sort()
        marked = _paired(source, target, pair, matched, int(shift * source.reserved.count))
        made.pairs.append(marked)
        made.indices.append(int(index))
    return made


def _put_beside(
    pair: Pair, matched: Sequence[tuple[Entity, Entity]], kind: Kind, first: bool
) -> tuple[Pair, list[tuple[Entity, Entity]]]:
    """An entity before both sides, or behind them."""
    word = "*"
    if first:
        entity, moved = Entity(0, 1, kind, word), [(_shifted(one), _shifted(other)) for one, other in matched]
        return (f"{word} {pair[0]}", f"{word} {pair[1]}"), [(entity, entity), *moved]
    one, other = (Entity(len(text) + 1, len(text) + 2, kind, word) for text in pair)
    return (f"{pair[0]} {word}", f"{pair[1]} {word}"), [*matched, (one, other)]


def _shifted(entity: Entity) -> Entity:
    """Behind a sign and a space."""
    return entity._replace(start=entity.start + 2, end=entity.end + 2)


def _shared_words(pair: Pair, matched: Sequence[tuple[Entity, Entity]]) -> list[tuple[Entity, Entity]]:
    """Words with a capital letter that stand once in either side, as they are: names, mostly."""
    once = []
    for side, text in enumerate(pair):
        found = _words(text)
        counts = Counter(word.text for word in found)
        taken = [both[side] for both in matched]
        once.append(
            {
                word.text: word
                for word in found
                if counts[word.text] == 1 and not any(word.start < one.end and one.start < word.end for one in taken)
            }
        )
    return [
        (word, once[1][text])
        for text, word in once[0].items()
        if len(text) >= SHORT and text[0].isupper() and text in once[1]
    ]


def _words(text: str) -> list[Entity]:
    found, start = [], None
    for place, character in enumerate(text + " "):
        if character.isalpha():
            start = place if start is None else start
        elif start is not None:
            found.append(Entity(start, place, "thing", text[start:place]))
            start = None
    return found
