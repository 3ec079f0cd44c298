"""The corpus that the package makes itself: both languages say the same, and it is the same everywhere.

Numbers, dates and times are read back here by parsers of their own, which know nothing of how they were made.
"""

import os
import re
import subprocess
import sys
import zlib
from collections import Counter
from decimal import Decimal
from string import Formatter

import pytest

from regard.data import generated
from regard.data.generated import FRAMES, english_number, german_number, pairs, split

VALUES = [*range(1, 21), *range(30, 100, 10)]
ENGLISH_WORDS = """
one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
"""
GERMAN_WORDS = """
eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn
achtzehn neunzehn zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig
"""
ENGLISH = dict(zip(ENGLISH_WORDS.split(), VALUES, strict=True))
GERMAN = dict(zip(GERMAN_WORDS.split(), VALUES, strict=True))
ORDINALS = {"first": 1, "second": 2, "third": 3, "fifth": 5, "eighth": 8, "ninth": 9, "twelfth": 12}
MONTHS = {
    **{"January": "Januar", "February": "Februar", "March": "März", "April": "April", "May": "Mai", "June": "Juni"},
    **{"July": "Juli", "August": "August", "September": "September", "October": "Oktober"},
    **{"November": "November", "December": "Dezember"},
}
WEEKDAYS = {
    **{"Monday": "Montag", "Tuesday": "Dienstag", "Wednesday": "Mittwoch", "Thursday": "Donnerstag"},
    **{"Friday": "Freitag", "Saturday": "Samstag", "Sunday": "Sonntag"},
}
DIGITS = r"\d[\d.,]*\d|\d"


@pytest.fixture(scope="module")
def sample() -> list[tuple[str, str]]:
    return pairs(30_000, 1)


def pattern(frame: str) -> re.Pattern:
    return re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(frame)), re.IGNORECASE)


TIMES = [pattern(english) for english, _ in FRAMES["times"]]


def tells_time(english: str) -> bool:
    return "degrees" not in english and any(frame.fullmatch(english) for frame in TIMES)


def english_value(text: str) -> int:
    total = part = 0
    for word in re.split("[ -]", text):
        if word == "thousand":
            total, part = total + part * 1000, 0
        elif word == "hundred":
            part *= 100
        elif word != "and":
            part += ENGLISH[word]
    return total + part


def german_value(text: str) -> int | None:
    """Of a number as one word; None if it is none."""
    if text in ("ein", "eine", "einen", "einem", "einer"):
        return 1
    for word, size in (("tausend", 1000), ("hundert", 100)):
        if word in text:
            front, back = text.split(word, 1)
            values = german_value(front), german_value(back) if back else 0
            return None if None in values or front == "eins" else values[0] * size + values[1]
    if "und" in text:
        ones, tens = (german_value(part) for part in text.split("und", 1))
        return None if ones is None or tens is None or text.startswith("eins") else ones + tens
    return GERMAN.get(text)


def test_numbers_are_read_back():
    numbers = [*range(1, 3000), *range(3001, 1_000_000, 997), 100_000, 101_000, 101_001, 201_101, 999_999]
    for n in numbers:
        assert english_value(english_number(n)) == n
        assert german_value(german_number(n)) == n, german_number(n)
    assert german_number(101_021) == "einhunderteintausendeinundzwanzig"
    assert english_number(1_234) == "one thousand two hundred and thirty-four"


def english_values(text: str) -> Counter:
    ordinal = re.search(r"the ([a-z-]+) of [A-Z]", text)
    if ordinal:
        tens, _, ones = ordinal[1].rpartition("-")
        value = ORDINALS.get(ones) or ENGLISH[re.sub("ieth$", "y", ones).removesuffix("th")]
        text = text.replace(ordinal[1], str(value + (ENGLISH[tens] if tens else 0)))
    text = text[0].lower() + text[1:]
    word = rf"(?:{'|'.join(sorted(ENGLISH, key=len, reverse=True))}|hundred|thousand)"
    runs = re.findall(rf"\b{word}(?:(?: and |[ -]){word})*\b", text)
    digits = [Decimal(number.replace(",", "")) for number in re.findall(DIGITS, text)]
    return Counter([*map(english_value, runs), *digits])


def german_values(text: str) -> Counter:
    ordinal = re.search(rf"\b(\w+te)n? (?:{'|'.join(MONTHS.values())})", text)
    if ordinal:
        stem = re.sub("(?<=g)ste$|te$", "", ordinal[1])
        value = {"ers": 1, "drit": 3, "sieb": 7, "ach": 8}.get(stem) or german_value(stem)
        text = text.replace(ordinal[1], str(value))
    text = text[0].lower() + text[1:]
    words = [german_value(word) for word in re.findall("[a-zäöüß]+", text)]
    digits = [Decimal(number.replace(".", "").replace(",", ".")) for number in re.findall(DIGITS, text)]
    return Counter([*(value for value in words if value), *digits])


def english_time(text: str) -> list[int]:
    """Minutes since midnight; both candidates where the half of the day is open."""
    if found := re.search(r"(\d+):(\d\d) ([ap])\.m\.", text):
        return [(int(found[1]) % 12 + 12 * (found[3] == "p")) * 60 + int(found[2])]
    if found := re.search(r"(\w+) o'clock(?: in the (\w+))?", text):
        hour = ENGLISH[found[1]] % 12 * 60
        return {None: [hour, hour + 720], "morning": [hour]}.get(found[2], [hour + 720])
    found = re.search(r"(half|a quarter|[a-z-]+) (past|to) (\w+)", text)
    minutes = {"half": 30, "a quarter": 15}.get(found[1]) or english_value(found[1])
    time = (ENGLISH[found[3]] * 60 + (minutes if found[2] == "past" else -minutes)) % 720
    return [time, time + 720]


def german_time(text: str) -> list[int]:
    if found := re.search(r"(\d\d):(\d\d) Uhr", text):
        return [int(found[1]) * 60 + int(found[2])]
    if found := re.search(r"(\w+) Uhr(?: (morgens|nachmittags|abends))?", text):
        hour = german_value(found[1]) % 12 * 60
        assert found[1] != "eins"
        return {None: [hour, hour + 720], "morgens": [hour]}.get(found[2], [hour + 720])
    found = re.search(rf"(?:(\w+) (nach|vor) )?(halb )?\b({'|'.join(GERMAN)})\b", text)
    minutes = 15 if found[1] == "Viertel" else GERMAN[found[1]] if found[1] else 0
    time = GERMAN[found[4]] * 60 - 30 * bool(found[3]) + (minutes if found[2] == "nach" else -minutes)
    return [time % 720, time % 720 + 720]


def test_both_sentences_give_the_same_time(sample):
    found = Counter()
    for english, german in sample:
        if tells_time(english):
            assert english_time(english) == german_time(german), (english, german)
            found[english_time(english)[0]] += 1
    assert len(found) > 1000
    assert found.total() > 4000


def test_both_sentences_give_the_same_values(sample):
    checked = 0
    for english, german in sample:
        if not tells_time(english):
            values = english_values(english)
            assert values == german_values(german), (english, german)
            assert values, english
            checked += 1
    assert checked > 20_000


def test_months_and_weekdays_agree(sample):
    seen = Counter()
    for english, german in sample:
        for words in (MONTHS, WEEKDAYS):
            ours = [words[word] for word in re.findall(r"[A-Z]\w+", english) if word in words]
            theirs = [word for word in re.findall(r"[A-Z]\w+", german) if word in words.values()]
            assert ours == theirs, (english, german)
            seen.update(ours)
    assert set(seen) == {*MONTHS.values(), *WEEKDAYS.values()}


RULES = [
    (r"(?<!-)one (second|minute|hour|week) ago", r"vor einer (Sekunde|Minute|Stunde|Woche) "),
    (r"(?<!-)one (day|month|year) ago", r"vor einem (Tag|Monat|Jahr) "),
    (r"(?<!one )days? ago", r"vor \w+ Tagen "),
    (r"for \S+ months\.", r"seit \w+ Monaten hier\."),
    (r"in \S+ years\.", r"in \w+ Jahren zurück"),
    (r"takes one day", r" einen Tag\b"),
    (r"takes one (minute|hour|week)", r" eine (Minute|Stunde|Woche)\b"),
    (r"is one year old", r" ein Jahr alt"),
    (r"takes (?!one )\S+ days", r" \w+ Tage\b"),
    (r"takes (?!one )\S+ hours", r" \w+ Stunden\b"),
    (r"(?<!-)one (chair|apple|letter|key)", r"einen (Stuhl|Apfel|Brief|Schlüssel)\b"),
    (r"(?<!-)one (ticket|bottle|lamp)", r"eine (Karte|Flasche|Lampe)\b"),
    (r"(?<!-)one (book|picture|egg)", r"ein (Buch|Bild|Ei)\b"),
    (r"(?<!one) apples", r" Äpfel\b"),
    (r"(?<!one) keys", r" Schlüssel\b"),
    (r"(?<!one) books", r" Bücher\b"),
    (r"(?<!-)one euro", r"einen Euro"),
    (r"(?<!-)one pound", r"ein Pfund"),
    (r"(costs|paid|lend me) (two|three) (dollars|francs|pounds)", r" (zwei|drei) (Dollar|Franken|Pfund)\b"),
    (r"(?<!-)one liter of", r"einen Liter (Milch|Wasser|Öl|Saft)"),
    (r"(?<!-)one ton of", r"eine Tonne (Mehl|Zucker|Reis|Salz)"),
    (r"\d\.\d tons of rice", r"\d,\d Tonnen Reis"),
    (r"\d\.\d kilograms of", r"\d,\d Kilogramm (Mehl|Zucker|Reis|Salz)"),
    (r"(?<!-)one kilometer away", r"einen Kilometer entfernt"),
    (r"miles away", r" Meilen entfernt"),
    (r"\$[\d,.]*\d", r"\d \$"),
    (r"€\d,\d\d\d\.\d\d", r"\d\.\d\d\d,\d\d €"),
    (r"[$€£](\d\d)\.(\d\d)\b", r" \d\d,\d\d [$€£]"),
    (r"coat costs .* not buying it", r"der Mantel .* kostet, kaufen wir ihn nicht"),
    (r"lamp costs .* not buying it", r"die Lampe .* kostet, kaufen wir sie nicht"),
    (r"shirt costs .* not buying it", r"das Hemd .* kostet, kaufen wir es nicht"),
    (r"for the hat", r"für den Hut "),
    (r"leaves at", r"fährt um .* ab\.|um .* abfährt\."),
    (r"I think that the train leaves", r"dass der Zug um .* abfährt\.$"),
    (r"takes place on the third of", r"am dritten \w+ statt"),
    (r"Today is the first of", r"Heute ist der erste [A-Z]\w+\."),
    (r"since the twenty-first of", r"seit dem einundzwanzigsten "),
    (r"Today is Monday, ", r"Heute ist Montag, der \d"),
    (r"is on Monday, ", r"am Montag, dem \d"),
    (r"was born on March 3", r"wurde am 3\d?\. März \d{4} geboren"),
    (r"(?<!-)one o'clock", r"\bein Uhr"),
    (r" 12:\d\d a\.m\.", r" 00:\d\d Uhr"),
    (r" 12:\d\d p\.m\.", r" 12:\d\d Uhr"),
    (r"half past twelve", r"halb eins\b"),
    (r"twenty-five past three", r"fünf vor halb vier"),
    (r"twenty-five to four", r"fünf nach halb vier"),
    (r"in (Munich|Vienna)", r"(München|Wien)"),
    (r"^One is less than", r"^Eins ist kleiner als"),
]


def test_german_grammar(sample):
    for english, german in RULES:
        cases = [(one, other) for one, other in sample if re.search(english, one)]
        assert cases, english
        for one, other in cases:
            assert re.search(german, other), (one, other)


def test_sentences_are_well_formed(sample):
    for sentence in (text for pair in sample for text in pair):
        assert sentence[-1] in ".?"
        assert not sentence[0].islower()
        assert not re.search(r"\.\.|\s\s|[{}\u00a0\u202f]|^\s", sentence), sentence
        assert len(sentence.split()) <= 18, sentence


def test_no_sentence_comes_twice_and_counts_are_as_asked():
    for count in (1, 7, 5000):
        made = pairs(count, 3)
        assert len(made) == len({english for english, _ in made}) == count
    assert pairs(100, 3) == made[:100]
    assert pairs(100, 4) != pairs(100, 3)


def test_an_english_sentence_has_one_german_sentence(sample):
    """Over frames and seeds: what is asked for can be learnt."""
    known = dict(sample)
    again = [(english, german) for english, german in pairs(5000, 2) if english in known]
    assert len(again) > 500
    for english, german in again:
        assert german == known[english]


def test_held_out_sentences_are_not_trained_on():
    train, held_out = split(3000, 300, 5)
    assert (len(train), len(held_out)) == (3000, 300)
    assert not {english for english, _ in train} & {english for english, _ in held_out}
    assert split(10, 300, 5)[1] == held_out
    assert sorted(train + held_out) == sorted(pairs(3300, 5))
    for bad in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1 pair"):
            split(*bad)
    with pytest.raises(ValueError, match="count"):
        pairs(0)
    with pytest.raises(ValueError, match="seed"):
        pairs(1, -1)


def test_every_frame_is_used_and_values_vary(sample):
    frames = [frame for kind in FRAMES.values() for frame in kind]
    assert len(frames) >= 40
    for english, german in frames:
        slots = [{name for _, name, _, _ in Formatter().parse(text) if name} for text in (english, german)]
        assert slots[0] == slots[1]
        assert sum(bool(pattern(english).fullmatch(text)) for text, _ in sample[:5000]) >= 10, english
    values = Counter()
    for english, _ in sample:
        values.update(english_values(english).keys())
    assert len(values) > 3000
    assert max(values) < 1_000_000
    assert sum(count for value, count in values.items() if value < 100) > 0.4 * values.total()


RUN = """
import runpy, zlib
print(zlib.crc32(repr(runpy.run_path({path!r})["pairs"](3000, 7)).encode()))
"""


def test_the_environment_does_not_matter():
    expected = zlib.crc32(repr(pairs(3000, 7)).encode())
    strange = {"LC_ALL": "tr_TR.UTF-8", "LANG": "C", "LANGUAGE": "fr", "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "5"}
    command = [sys.executable, "-c", RUN.format(path=generated.__file__)]
    done = subprocess.run(command, env=os.environ | strange, capture_output=True, text=True, check=True)
    assert int(done.stdout) == expected


def test_the_corpus_stays_as_it_is():
    assert pairs(3, 0) == [
        ("Peter has worked here for forty-one weeks.", "Peter arbeitet seit einundvierzig Wochen hier."),
        ("Peter asked whether the bag costs $75.25.", "Peter fragte, ob die Tasche 75,25 $ kostet."),
        (
            "If the drive takes seventy-three weeks, we will be late.",
            "Wenn die Fahrt dreiundsiebzig Wochen dauert, kommen wir zu spät.",
        ),
    ]
