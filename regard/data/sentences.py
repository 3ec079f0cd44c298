"""Lines of text into sentences, and sentences into clauses, without losing a character.

A sentence ends in . ! ? or …, perhaps with quotes and brackets behind, before white space and something that can
begin one. It does not after an abbreviation, a single letter, the number of a day ("am 3. Mai"), or inside an address.
A split that is missed makes a long sentence; a wrong one makes two that mean nothing, so in doubt none is made.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

# As they stand before the point, in lower case. Of several languages at once: what is one in any is not split.
ABBREVIATIONS = frozenset(
    re.findall(
        r"\S+",
        """
        mr mrs ms mx dr prof st sr jr rev hon gen col capt lt sgt maj gov sen rep pres no nos vs etc al e.g i.e eg
        ie cf viz approx dept est fig figs eq ed eds vol vols ch sec pp p a.m p.m inc ltd co corp bros ave blvd rd
        mt ft u.s u.k jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thurs fri sat sun z.b
        d.h u.a u.ä o.ä s.o s.u i.d.r u.u z.t v.a bzw usw ca nr str tel abs art bd bzgl dipl ing evtl exkl fr frl
        ggf hr hrn hrsg inkl jh jhd kap lfd max min mio mrd mind mwst o.k od resp s sog std tsd u usf vgl zzgl m
        mm mme mlle env ex p.ex c.-à-d sra dra ud uds pág núm sig sigg dott ecc
        """,
    )
)
OPENING = r"\"'„“‘»«¿¡(\["
END = re.compile(
    rf"[.!?…]{{1,20}}[\"'”’»“)\]]{{0,4}}(?P<space>\s+)(?=[{OPENING}]{{0,4}}(?:[^\W_]|[^\w\s{OPENING}.,;:!?…-]))"
    r"|[。！？]{1,20}[」』）]{0,2}(?P<none>\s*)"
)
BEFORE = re.compile(r"(\S+)$")
# where a long sentence may be cut, from the best places to the worst
CUTS = tuple(map(re.compile, (r"[;:—–](?=\s)", r"[,，、](?=\s|(?<=[，、]))", r"(?=\s)")))


class Span(NamedTuple):
    start: int
    end: int


def sentences(text: str, kept: Sequence[tuple[int, int]] = ()) -> list[Span]:
    """The sentences of a line, without the white space around them. No end is seen inside the spans in `kept`."""
    ends = []
    for found in END.finditer(text):
        stop = found.start("space") if found["space"] is not None else found.start("none")
        if not is_inside(kept, found.start() + 1) and not is_abbreviation(text, found.start(), found.end()):
            ends.append((stop, found.end()))
    return spans(text, ends)


def is_inside(kept: Sequence[tuple[int, int]], place: int) -> bool:
    """Whether a cut at a place would cut one of some spans, which are in order."""
    number = bisect_left(kept, (place, place)) - 1
    return number >= 0 and kept[number][0] < place < kept[number][1]


def is_abbreviation(text: str, place: int, after: int) -> bool:
    """Whether the point at a place ends no sentence. What comes after it begins in lower case, or is a word that never
    stands alone before it."""
    if text[place] != "." or text[place : place + 2] == "..":
        # "Stop!" he said; "What?" she asked
        return (
            text[place] in "!?." and after < len(text) and text[after].islower() and text[place + 1 : place + 2] != ""
        )
    if after < len(text) and text[after].islower():
        return True
    word = BEFORE.search(text[max(place - 40, 0) : place])
    bare = re.sub(f"^[{OPENING}]+", "", word[1]) if word else ""
    lower = bare.lower()
    if lower in ABBREVIATIONS or lower.rsplit("-", 1)[-1] in ABBREVIATIONS:
        return True
    # initials, "z. B." and days of a month
    return (len(bare) == 1 and bare.isalpha() and bare != "I") or (bare.isdigit() and len(bare) <= 2)


def spans(text: str, ends: Sequence[tuple[int, int]]) -> list[Span]:
    """The pieces between cuts, each (end of one, start of the next), without white space around."""
    starts = [0, *(after for _, after in ends)]
    stops = [*(stop for stop, _ in ends), len(text)]
    found = []
    for start, stop in zip(starts, stops, strict=True):
        piece = text[start:stop]
        if piece.strip():
            start += len(piece) - len(piece.lstrip())
            found.append(Span(start, start + len(piece.strip())))
    return found


def clauses(text: str, span: Span, fits: Callable[[str], bool], kept: Sequence[tuple[int, int]] = ()) -> Iterator[Span]:
    """Pieces of a sentence that fit, as long as they can be: cut behind ; and :, if that does not do behind commas,
    then between words, then anywhere but in a span of `kept`: what such a span holds is one piece, fit or not."""
    if fits(text[span.start : span.end]):
        yield span
        return
    inner = kept[bisect_left(kept, (span.start, span.start)) : bisect_left(kept, (span.end, span.end))]
    edges = [place for both in inner for place in both]
    for cut in (*CUTS, None):
        places = edges if cut is None else [found.end() for found in cut.finditer(text, span.start, span.end)]
        places = [p for p in dict.fromkeys(places) if span.start < p < span.end and not is_inside(kept, p)]
        if places:
            pieces = spans(text[span.start : span.end], [(p - span.start, p - span.start) for p in places])
            if len(pieces) > 1:
                yield from packed(text, [Span(a + span.start, b + span.start) for a, b in pieces], fits, kept)
                return
    half = (span.start + span.end) // 2
    if half == span.start or tuple(span) in inner:
        yield span
        return
    for part in (Span(span.start, half), Span(half, span.end)):
        yield from clauses(text, part, fits, kept)


def packed(
    text: str, pieces: Sequence[Span], fits: Callable[[str], bool], kept: Sequence[tuple[int, int]]
) -> Iterator[Span]:
    """Neighbours put together while they fit; what does not fit alone is cut further. How many fit is searched by
    halves, so that a long line is not read once per word."""
    at = 0
    while at < len(pieces):
        low, high = at, at + 1
        while high < len(pieces) and fits(text[pieces[at].start : pieces[high].end]):
            low, high = high, min(2 * high - at, len(pieces) - 1) if high < len(pieces) - 1 else len(pieces)
        high = min(high, len(pieces))
        while high - low > 1:
            middle = (low + high) // 2
            if fits(text[pieces[at].start : pieces[middle].end]):
                low = middle
            else:
                high = middle
        if low == at:
            yield from clauses(text, pieces[at], fits, kept)
        else:
            yield Span(pieces[at].start, pieces[low].end)
        at = low + 1
