"""What is not language: numbers, times, addresses, paths, tags, emoji. It is found by its form alone, in any language.

    number   1,234.56  -5 %  $3.50  2024-05-17  3/4  223-1374     what is said with it is language: "3rd" is 3 and "rd"
    time     7:45  14:30:05
    thing    what stands for a noun: https://a.org  a@b.de  ~/notes.txt  @name  #tag  v1.2.3  A380  {name}  `code`,
             and words of a script that the model was not trained on
    sign     what stands beside the words: emoji, emoticons, <b>, &amp;, arrows and other symbols

`find` gives them with their places. `match` pairs those of a sentence with those of its translation: a number is the
same when its digits are, however they are grouped. `Style` is how the target language writes numbers, counted from
such pairs; `Style.write` gives a number in it, if that is sure to be a quantity, and anything else as it is.
"""

import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Literal, NamedTuple

Kind = Literal["number", "time", "thing", "sign"]
KINDS: tuple[Kind, ...] = ("number", "time", "thing", "sign")

# A bound on every repetition keeps the search linear in the text, whatever the text is.
DOMAINS = "com|org|net|edu|gov|info|io|dev|app|ai|eu|de|at|ch|fr|es|uk|nl|pl|jp|cn|br|ca|au"
ENDINGS = (
    "txt|md|rst|pdf|docx?|xlsx?|pptx?|odt|csv|tsv|json|jsonl|ya?ml|xml|html?|css|js|ts|py|ipynb|c|h|cpp|rs|go|java|sh|"
    "tex|jpe?g|png|gif|svg|webp|mp3|mp4|wav|avi|mov|zip|gz|xz|tar|exe|log|ini|cfg|toml|sql|bak"
)
EMOJI = (
    "\U0001f000-\U0001f1e5\U0001f200-\U0001f3fa\U0001f400-\U0001faff\u2190-\u21ff\u2300-\u23ff\u25a0-\u27bf"
    "\u2900-\u297f\u2b00-\u2bff\u3030\u303d\u3297\u3299\xa9\xae\u2122\u2022"
)
PICTURE = (
    # flags of two letters, keycaps, or a picture with variation selector, skin tone and tags
    "(?:[\U0001f1e6-\U0001f1ff]{2}|[0-9#*]\ufe0f?\u20e3"
    f"|[{EMOJI}][\ufe0e\ufe0f]?[\U0001f3fb-\U0001f3ff]?[\U000e0020-\U000e007f]{{0,8}})"
)
CURRENCY = "[$€£¥₹₽₩₺¢]|(?:USD|EUR|GBP|CHF|JPY)"
DIGITS = r"\d{1,40}(?:[.,'’]\d{1,40}){0,20}"
AMOUNT = rf"(?:(?<![\w.,])[-+−±])?(?:(?:{CURRENCY})[ \xa0]?)?[-−]?{DIGITS}"
AFTER = rf"(?:[ \xa0]?(?:[%‰°](?:[CF]\b)?|{CURRENCY})(?!\w))?"

PATTERNS: tuple[tuple[Kind, str], ...] = (
    ("thing", r"`[^`\n]{1,200}`"),
    ("thing", r"(?<![\w@])(?:[A-Za-z][A-Za-z0-9+.-]{1,15}://|www\.|mailto:)[^\s<>\"„“”«»]{1,20000}"),
    ("thing", r"(?<![\w.+%-])[\w.+%-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64}){1,8}"),
    ("sign", r"</?[A-Za-z][^<>\n]{0,300}>|<!--[^<>\n]{0,300}-->|&(?:[A-Za-z]{2,10}|#\d{1,7}|#x[0-9A-Fa-f]{1,6});"),
    ("thing", r"\$?\{\{?[^\s{}]{0,60}\}?\}|%\(\w{1,40}\)[sd]|%[sd](?!\w)"),
    ("thing", rf"(?<![\w.@-])(?:[a-z0-9-]{{1,63}}\.){{1,5}}(?:{DOMAINS})\b(?:[:/][^\s<>\"„“”«»]{{0,20000}})?"),
    ("thing", r"(?<!\w)[A-Za-z]:\\[^\s\"<>|]{1,300}"),
    ("thing", r"(?<![\w/])(?:~|\.{1,2})?/(?:[\w.@+-]{1,100}/){0,30}[\w.@+-]{1,100}/?"),
    ("thing", rf"(?<![\w/.])(?:[\w.@+-]{{1,100}}/){{0,30}}[\w@+-][\w.@+-]{{0,100}}\.(?:{ENDINGS})(?!\w)"),
    ("thing", r"(?<![\w@])@\w(?:[\w.-]{0,60}\w)?"),
    ("thing", r"(?<![\w#&])#\w{1,100}"),
    ("thing", r"(?<![\w-])--[a-z][\w-]{0,40}"),
    ("sign", rf"{PICTURE}(?:\u200d?{PICTURE}){{0,60}}"),
    ("sign", r"(?<!\S)(?:[:;=]['’]?-?[)(DPpOo|\\/*\]\[]|<3|\^\^|:-?[xX])(?=[\s.,!?]|$)"),
    ("number", r"(?<!\w)\+\d{1,3}(?:[ \xa0/-](?:\(\d{1,8}\)\d{0,8}|\d{1,8})){1,6}(?!\w)"),
    # hexadecimal; powers and what computers write for them: 10^6, 3.14e-5
    ("number", r"(?<![\w.])0[xX][0-9A-Fa-f]{1,40}(?!\w)"),
    ("number", r"(?<![\w.,])[-+−]?\d{1,40}(?:[.,]\d{1,40})?(?:[eE][-+−]?\d{1,4}|\^[-+−]?\d{1,9})(?!\w)"),
    # names with digits or underscores: A380, mp3, GPT-4, snake_case; versions
    ("number", r"(?<![\w.])(?:\d{1,2}\.\d{1,2}\.\d{4}|\d{1,2}\.\d{1,2}\.\d{2})(?![\w]|\.\d)"),
    ("thing", r"(?<![\w.-])v?\d{1,9}(?:\.\d{1,9}){2,6}(?:[-+][\w.]{1,40})?(?!\w)(?!\.\d)"),
    ("thing", r"(?<!\w)v\d{1,9}(?:\.\d{1,9}){0,6}(?!\w)"),
    ("thing", r"(?<![\w-])(?:[A-Z][A-Za-z]{0,30}-)?(?=[^\W\d]{1,60}\d|[^\W_]{1,60}_)[^\W\d]\w{1,100}(?:-\w{1,40})*"),
    ("thing", r"(?<![\w-])[A-Z][A-Za-z]{0,30}-\d[\w-]{0,40}(?!\w)"),
    ("time", r"(?<![\w:.,])\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?![\d:])"),
    ("number", r"(?<![\w])\d{4}-\d{2}-\d{2}(?:T[\d:.]{4,18}(?:Z|[+-]\d{2}:?\d{2})?)?(?!\w)"),
    ("number", rf"(?<![\w]){AMOUNT}(?:[:/×x–-]{DIGITS}){{0,20}}{AFTER}|[½⅓⅔¼¾⅛]"),
    # symbols of mathematics and the like; those of ASCII belong to the text
    ("sign", "[\u2200-\u22ff\u2a00-\u2aff\u27c0-\u27ef\u2100-\u214f]{1,40}"),
)
FOUND = re.compile("|".join(f"(?P<{kind}{number}>{pattern})" for number, (kind, pattern) in enumerate(PATTERNS)))
KIND_OF_GROUP: dict[str | None, Kind] = {f"{kind}{number}": kind for number, (kind, _) in enumerate(PATTERNS)}

# Nothing is found in a text without one of these, and most sentences have none.
HINT = re.compile(r"[\d@#/\\<>&{}%$`_:;=^½⅓⅔¼¾⅛]|\w\.\w|--|[^\x00-\x7f\xc0-\u024f‘’“”„«»…–—]")

GROUPED = {".": re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?"), ",": re.compile(r"\d{1,3}(?:\.\d{3})+(?:,\d+)?")}
DECIMAL = {".": re.compile(r"\d+\.\d+"), ",": re.compile(r"\d+,\d+")}
PARTS = re.compile(rf"^([-+−±]?)(?:({CURRENCY})[ \xa0]?)?([-−]?)([\d.,'’]+)(?:([ \xa0]?)([%‰°][CF]?|{CURRENCY}))?$")
SWAPPED = str.maketrans(".,", ",.")
# A number with one point after such a word, or after a name, is a version or a section and no quantity.
NAMED = re.compile(r"\b(?:version|release|section|chapter|figure|table|build|[A-Z]\w*)[ \xa0]$")
MAGNITUDE = re.compile(r"[ \xa0-](?:thousand|million|billion|trillion)s?\b")  # "$5 million": the sign stays in front


class Entity(NamedTuple):
    start: int
    end: int
    kind: Kind
    text: str

    @property
    def digits(self) -> str:
        return "".join(character for character in self.text if character.isdigit())

    @property
    def key(self) -> tuple[str, str]:
        """Equal of an entity and its translation: of numbers the digits and the currency."""
        if self.kind in ("number", "time"):
            sign = re.search(CURRENCY, self.text)
            return self.digits, sign[0] if sign else ""
        return self.text, ""


def find(text: str, scripts: Collection[str] | None = None) -> list[Entity]:
    """All entities of a text, in order. With `scripts`, those that are known, words of other scripts are among them."""
    if not HINT.search(text):
        return []
    found = []
    for match in FOUND.finditer(text):
        kind = KIND_OF_GROUP[match.lastgroup]
        start, end = match.span()
        if kind == "thing":
            end = start + len(trimmed(match[0]))
        if end > start:
            found.append(Entity(start, end, kind, text[start:end]))
    if scripts and not text.isascii():
        found = sorted([*found, *foreign_words(text, found, scripts)])
    return found


def trimmed(text: str) -> str:
    """Without the marks that end the sentence around it, and without a bracket that was not opened inside."""
    while text and (text[-1] in ".,;:!?'’\"”“…" or (text[-1] in ")]}" and unbalanced(text))):
        text = text[:-1]
    return text


def unbalanced(text: str) -> bool:
    opening = {")": "(", "]": "[", "}": "{"}[text[-1]]
    return text.count(text[-1]) > text.count(opening)


def foreign_words(text: str, found: Sequence[Entity], scripts: Collection[str]) -> list[Entity]:
    """Runs of words of other scripts, outside what is found already."""
    taken = [False] * (len(text) + 1)
    for entity in found:
        taken[entity.start : entity.end] = [True] * (entity.end - entity.start)
    runs: list[list[int]] = []
    last = ""
    for place, character in enumerate(text):
        if taken[place] or character.isascii() or not character.isalpha() or script(character) in scripts:
            continue
        # the spaces and marks between words of one script belong to the run
        is_next = runs and script(character) == last
        if is_next and not any(taken[at] or text[at].isalnum() for at in range(runs[-1][1], place)):
            runs[-1][1] = place + 1
        else:
            runs.append([place, place + 1])
        last = script(character)
    for run in runs:
        while run[1] < len(text) and unicodedata.category(text[run[1]]).startswith("M"):
            run[1] += 1
    return [Entity(start, end, "thing", text[start:end]) for start, end in runs]


@cache
def script(letter: str) -> str:
    """The first word of the letter's name in Unicode, such as LATIN, CYRILLIC or CJK."""
    return unicodedata.name(letter, "UNKNOWN").split()[0].split("-")[0]


def scripts_of(texts: Iterable[str], share: float = 1e-4) -> tuple[str, ...]:
    """The scripts of some texts that have at least this share of the letters."""
    counts: dict[str, int] = {}
    for text in texts:
        for letter in text:
            if letter.isalpha():
                name = "LATIN" if letter.isascii() else script(letter)
                counts[name] = counts.get(name, 0) + 1
    total = sum(counts.values())
    return tuple(sorted(name for name, count in counts.items() if count >= share * total))


def match(source: Sequence[Entity], target: Sequence[Entity]) -> list[tuple[Entity, Entity]]:
    """The entities of a sentence that its translation has too, in the order of the source: equal keys in turn."""
    left = list(target)
    pairs = []
    for entity in source:
        other = next((one for one in left if one.key == entity.key and comparable(entity, one)), None)
        if other is not None:
            left.remove(other)
            pairs.append((entity, other))
    return pairs


def comparable(one: Entity, other: Entity) -> bool:
    """A time may be written with a point; otherwise kinds are the same."""
    return one.kind == other.kind or {one.kind, other.kind} == {"number", "time"}


class Style(NamedTuple):
    """How numbers change on the way: the decimal signs of the two languages, and whether the target puts the sign of a
    currency behind the amount. None: unknown, and they stay as they are."""

    source: str | None = None
    target: str | None = None
    currency_last: bool | None = None

    @classmethod
    def learn(cls, pairs: Iterable[tuple[Entity, Entity]]) -> "Style":
        """By the majority of the matched entities that show one."""
        swapped, same, last, first = {".": 0, ",": 0}, 0, 0, 0
        for ours, theirs in pairs:
            one, other = PARTS.match(ours.text), PARTS.match(theirs.text)
            if one is None or other is None:
                continue
            if one[2]:
                last, first = last + (other[6] == one[2]), first + (other[2] == one[2])
            if "." in one[4] or "," in one[4]:
                same += other[4] == one[4]
                for sign in swapped:
                    reads = GROUPED[sign].fullmatch(one[4]) or DECIMAL[sign].fullmatch(one[4])
                    swapped[sign] += bool(reads) and other[4] == one[4].translate(SWAPPED)
        sign = max(swapped, key=lambda sign: swapped[sign])  # of equals the point
        changes = swapped[sign] > same
        return cls(
            sign if changes else None,
            sign.translate(SWAPPED) if changes else None,
            last > first if last + first else None,
        )

    def write(self, entity: Entity, line: str) -> str:
        """An entity of a line as the target language writes it. Only what is certainly a quantity changes: an amount
        of money or with a unit sign, thousands in groups, and a decimal fraction that no name stands before."""
        parts = PARTS.match(entity.text) if entity.kind == "number" else None
        if parts is None:
            return entity.text
        plus, before, minus, digits, space, after = parts.groups(default="")
        if self.is_quantity(digits, bool(before or after), line[max(entity.start - 80, 0) : entity.start]):
            digits = digits.translate(SWAPPED)
        if before and self.currency_last and not after and not MAGNITUDE.match(line, entity.end):
            return f"{plus}{minus}{digits}\xa0{before}" if before.isalpha() else f"{plus}{minus}{digits} {before}"
        gap = entity.text[len(plus) + len(before) : entity.text.index(parts[4])].removesuffix(minus) if before else ""
        return f"{plus}{before}{gap}{minus}{digits}{space}{after}"

    def is_quantity(self, digits: str, measured: bool, before: str) -> bool:
        if self.source is None:
            return False
        if GROUPED[self.source].fullmatch(digits):
            return True
        if not DECIMAL[self.source].fullmatch(digits):
            return False
        return measured or NAMED.search(before) is None
