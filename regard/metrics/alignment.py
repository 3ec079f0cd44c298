"""Word links: files of them, their error rate against gold links, and the links of two directions made one.

A link is (source word, target word), counted from 0. Files (Pharaoh format, .talp) have one sentence per line and
spaces between links: "0-0 1-2". In gold files a sure link is written "1-2" and a possible one "1p2"; most count from 1.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from regard.core.files import check_regular

Links = frozenset[tuple[int, int]]
Method = Literal["intersection", "union", "grow-diagonal", "grow-diagonal-final", "grow-diagonal-final-and"]

LINK = re.compile(r"([0-9]{1,9})([-p])([0-9]{1,9})")
# sideways before diagonal, in the order of the published algorithm: which links are added depends on it
NEIGHBOURS = ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))


class Gold(NamedTuple):
    """What annotators linked. Sure links are also possible."""

    sure: Links
    possible: Links


class Scores(NamedTuple):
    """Shares from 0 to 1, and the counts they come from."""

    aer: float
    precision: float
    recall: float
    f1: float
    links: int  # proposed
    sure: int
    possible: int
    sure_found: int
    possible_found: int

    def __str__(self) -> str:
        return (
            f"AER = {100 * self.aer:.2f} (precision {100 * self.precision:.2f}, recall {100 * self.recall:.2f}, "
            f"{self.links} links against {self.sure} sure and {self.possible} possible)"
        )


def parse_links(line: str, *, first: int = 0) -> Links:
    """The links of one line; `first` is the number of the first word, 0 or 1."""
    gold = parse_gold(line, first=first)
    if gold.possible != gold.sure:
        raise ValueError("a possible link ('p') stands where plain links are expected, '0-0 1-2': is this a gold file?")
    return gold.sure


def parse_gold(line: str, *, first: int = 0) -> Gold:
    """The sure and possible links of one line."""
    if first not in (0, 1):
        raise ValueError(f"words are counted from 0 or from 1, got first={first!r}")
    sure, possible = set(), set()
    for text in line.split():
        found = LINK.fullmatch(text)
        if found is None:
            raise ValueError(f"expected links such as '0-0' or, in gold files, '0p0', got {text[:40]!r}")
        link = (int(found[1]) - first, int(found[3]) - first)
        if min(link) < 0:
            raise ValueError(f"link {text!r} has a word 0, but words are counted from 1: read it with first=0")
        possible.add(link)
        if found[2] == "-":
            sure.add(link)
    return Gold(frozenset(sure), frozenset(possible))


def format_links(links: Iterable[tuple[int, int]], *, first: int = 0) -> str:
    """'0-0 1-2', in the order of the source."""
    return " ".join(f"{source + first}-{target + first}" for source, target in sorted(links))


def read_links(path: str | Path, *, first: int = 0) -> list[Links]:
    """The links of each line of a file; an empty line is a sentence without links."""
    return [_at(path, number, parse_links, line, first) for number, line in _lines(path)]


def read_gold(path: str | Path, *, first: int = 1) -> list[Gold]:
    """The sure and possible links of each line of a file, by default counted from 1 as most gold files are."""
    return [_at(path, number, parse_gold, line, first) for number, line in _lines(path)]


def write_links(path: str | Path, alignments: Iterable[Iterable[tuple[int, int]]], *, first: int = 0) -> None:
    text = "".join(format_links(links, first=first) + "\n" for links in alignments)
    Path(path).write_text(text, encoding="utf-8", newline="\n")


def flip(links: Iterable[tuple[int, int]]) -> Links:
    """Links of the other direction: target and source swapped."""
    return frozenset((target, source) for source, target in links)


def error_rate(hypotheses: Sequence[Links], gold: Sequence[Gold]) -> Scores:
    """Alignment error rate of the whole corpus (Och & Ney 2003). With links A, sure S and possible P,
    precision = |A∩P| / |A|, recall = |A∩S| / |S|, AER = 1 - (|A∩S| + |A∩P|) / (|A| + |S|)."""
    if len(hypotheses) != len(gold):
        raise ValueError(
            f"each sentence needs links and gold links: got {len(hypotheses)} sentences and gold links of {len(gold)}"
        )
    links = sum(map(len, hypotheses))
    sure = sum(len(part.sure) for part in gold)
    allowed = [part.possible | part.sure for part in gold]
    if not sure:
        raise ValueError("the gold links hold no sure link, so recall and AER mean nothing: is this the gold file?")
    sure_found = sum(len(ours & part.sure) for ours, part in zip(hypotheses, gold, strict=True))
    possible_found = sum(len(ours & part) for ours, part in zip(hypotheses, allowed, strict=True))
    precision, recall = possible_found / max(links, 1), sure_found / sure
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    aer = 1 - (sure_found + possible_found) / (links + sure)
    return Scores(aer, precision, recall, f1, links, sure, sum(map(len, allowed)), sure_found, possible_found)


def symmetrise(
    forward: Iterable[tuple[int, int]], backward: Iterable[tuple[int, int]], method: Method = "grow-diagonal"
) -> Links:
    """One set of links out of two directions, both given as (source, target): `flip` those of the second model.

    grow-diagonal (Koehn, Och & Marcu 2003) starts from what both agree on. A link of either one that touches, sideways
    or by a corner, a link already taken is taken too if its source or its target word has none yet, until nothing
    changes. "-final" then takes what is left, forward before backward, where one of the two words has no link yet;
    "-final-and" only where neither has.
    """
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
    forward, backward = frozenset(forward), frozenset(backward)
    if method in ("intersection", "union"):
        return forward & backward if method == "intersection" else forward | backward
    links, union = set(forward & backward), sorted(forward | backward)
    sources, targets = {source for source, _ in links}, {target for _, target in links}

    def take(link: tuple[int, int]) -> None:
        links.add(link)
        sources.add(link[0])
        targets.add(link[1])

    known, before = frozenset(union), -1
    while len(links) > before:
        before = len(links)
        for source, target in union:
            if (source, target) not in links:
                continue
            for down, across in NEIGHBOURS:
                near = (source + down, target + across)
                if near in known and not (near[0] in sources and near[1] in targets):
                    take(near)
    if method != "grow-diagonal":
        enough = all if method == "grow-diagonal-final-and" else any
        for direction in (forward, backward):
            for link in sorted(direction):
                if enough((link[0] not in sources, link[1] not in targets)):
                    take(link)
    return frozenset(links)


def _lines(path: str | Path) -> Iterable[tuple[int, str]]:
    """Lines numbered from 1, cut at newlines only."""
    check_regular(path, "a file of links")
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}:{number}: not UTF-8 text, byte {error.start + 1} of the line") from None


def _at(path: str | Path, number: int, parse, line: str, first: int):
    try:
        return parse(line, first=first)
    except ValueError as error:
        raise ValueError(f"{path}:{number}: {error}") from None
