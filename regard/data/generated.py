"""A corpus that needs no download: numbers, dates, times, money and quantities in English and German.

The two languages say the same in another order, so that alignments are worth looking at: 21 is "einundzwanzig", half
past three is "halb vier", March 3 is "3. März", the verb goes to the end of a subordinate clause and its prefix to the
end of a main one. Each English sentence has one German sentence only. Sentences depend on the seed alone, not on the
locale or anything else around.
"""

import random
from collections.abc import Callable, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from functools import cache
from string import Formatter
from typing import Any, NamedTuple

from babel.dates import format_date, format_time, get_month_names
from babel.numbers import format_currency, format_decimal
from num2words import num2words

Pair = tuple[str, str]


class Phrase(NamedTuple):
    """A phrase in English, and in German by case. In a frame, "{day}" is the English and "{day:dative}" a German."""

    english: str
    nominative: str
    accusative: str
    dative: str
    pronoun: str = ""  # accusative

    def __format__(self, form: str) -> str:
        return getattr(self, form or "english")


def pairs(count: int, seed: int = 0) -> list[Pair]:
    """English sentences, no two the same, each with its German. A longer list begins with the shorter one."""
    if count < 1:
        raise ValueError(f"count must be at least 1 pair, got {count}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    draw = Draw(seed)
    found: dict[str, str] = {}
    kinds = list(FRAMES)
    while len(found) < count:
        english, german = sentence(draw, draw.one(FRAMES[draw.one(kinds)]))
        found[english] = german
    return list(found.items())


def split(count: int, held_out: int, seed: int = 0) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on and pairs held out, with no English sentence in both. The held-out ones are the same for every
    `count`."""
    if count < 1 or held_out < 1:
        raise ValueError(f"expected at least 1 pair to train on and 1 held out, got {count} and {held_out}")
    both = pairs(count + held_out, seed)
    return both[held_out:], both[:held_out]


class Draw:
    """Draws that are the same on every machine and Python: only `random()` is promised to stay as it is."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed).random

    def between(self, first: int, last: int) -> int:
        """An integer, both ends included."""
        return first + int(self.random() * (last - first + 1))

    def one(self, choices: Sequence[Any]) -> Any:
        return choices[self.between(0, len(choices) - 1)]

    def skewed(self, last: int = 999_999) -> int:
        """A number from 1 to `last`, mostly small."""
        chance = self.random()
        top = 9 if chance < 0.2 else 99 if chance < 0.65 else 999 if chance < 0.85 else 9_999 if chance < 0.95 else last
        return self.between(1, min(top, last))


def sentence(draw: Draw, frame: Pair) -> Pair:
    english, german = frame
    slots = {name: SLOTS[name](draw) for _, name, _, _ in Formatter().parse(english) if name}
    # One full stop is enough after "p.m.".
    return begin(english.format(**slots)).replace(".m..", ".m."), begin(german.format(**slots))


def begin(text: str) -> str:
    return text[0].upper() + text[1:]


@cache
def english_number(n: int) -> str:
    return num2words(n, lang="en").replace(",", "")


@cache
def german_number(n: int) -> str:
    # num2words writes 101,000 as "einhunderteinstausend".
    return num2words(n, lang="de").replace("einstausend", "eintausend")


def same(english: str, german: str) -> Phrase:
    """A phrase that is the same in all cases."""
    return Phrase(english, german, german, german)


def number(draw: Draw) -> Phrase:
    n = draw.skewed()
    return same(english_number(n), german_number(n))


def small_number(draw: Draw) -> Phrase:
    n = draw.between(1, 20)
    return same(english_number(n), german_number(n))


def degrees(draw: Draw) -> Phrase:
    n = draw.between(2, 40)
    cold = draw.one(["", "minus "])
    return same(f"{cold}{english_number(n)} degrees", f"{cold}{german_number(n)} Grad")


def decimal(draw: Draw, last: int) -> Phrase:
    value = Decimal(draw.between(1, last)) + Decimal(draw.between(1, 9)) / 10
    return same(format_decimal(value, locale="en_US"), format_decimal(value, locale="de_DE"))


def percentage(draw: Draw) -> Phrase:
    value = decimal(draw, 99)
    return same(f"{value} percent", f"{value:nominative} Prozent")


def addition(draw: Draw) -> Phrase:
    n, m = draw.between(1, 99), draw.between(1, 99)
    german = f"{german_number(n)} plus {german_number(m)} ist {german_number(n + m)}"
    return same(f"{english_number(n)} plus {english_number(m)} is {english_number(n + m)}", german)


def comparison(draw: Draw) -> Phrase:
    n, m = draw.skewed(9_999), draw.skewed(9_999)
    english, german = "equal to", "gleich"
    if n != m:
        english, german = ("less than", "kleiner als") if n < m else ("greater than", "größer als")
    return same(
        f"{english_number(n)} is {english} {english_number(m)}",
        f"{german_number(n)} ist {german} {german_number(m)}",
    )


class Noun(NamedTuple):
    english: str
    many: str
    gender: str  # "m", "f" or "n"
    german: str
    plural: str  # nominative and accusative
    dative: str  # plural

    def counted(self, n: int, as_digits: bool = False) -> Phrase:
        """A number of it. One is written as a word, and inflected."""
        if n == 1:
            article = {"m": ("ein", "einen", "einem"), "f": ("eine", "eine", "einer"), "n": ("ein", "ein", "einem")}
            cases = [f"{form} {self.german}" for form in article[self.gender]]
            return Phrase(f"one {self.english}", *cases)
        if as_digits:
            english, german = format_decimal(n, locale="en_US"), format_decimal(n, locale="de_DE")
        else:
            english, german = english_number(n), german_number(n)
        plural = f"{german} {self.plural}"
        return Phrase(f"{english} {self.many}", plural, plural, f"{german} {self.dative}")


def countable(n: int) -> int:
    """The same number, but none like 101, whose German before a noun is unsettled (hundertein, hunderteins)."""
    return n + 1 if n % 100 == 1 and n > 1 else n


THINGS = [
    Noun("chair", "chairs", "m", "Stuhl", "Stühle", "Stühlen"),
    Noun("table", "tables", "m", "Tisch", "Tische", "Tischen"),
    Noun("apple", "apples", "m", "Apfel", "Äpfel", "Äpfeln"),
    Noun("letter", "letters", "m", "Brief", "Briefe", "Briefen"),
    Noun("key", "keys", "m", "Schlüssel", "Schlüssel", "Schlüsseln"),
    Noun("ticket", "tickets", "f", "Karte", "Karten", "Karten"),
    Noun("bottle", "bottles", "f", "Flasche", "Flaschen", "Flaschen"),
    Noun("lamp", "lamps", "f", "Lampe", "Lampen", "Lampen"),
    Noun("flower", "flowers", "f", "Blume", "Blumen", "Blumen"),
    Noun("book", "books", "n", "Buch", "Bücher", "Büchern"),
    Noun("picture", "pictures", "n", "Bild", "Bilder", "Bildern"),
    Noun("egg", "eggs", "n", "Ei", "Eier", "Eiern"),
]
DURATIONS = [
    Noun("second", "seconds", "f", "Sekunde", "Sekunden", "Sekunden"),
    Noun("minute", "minutes", "f", "Minute", "Minuten", "Minuten"),
    Noun("hour", "hours", "f", "Stunde", "Stunden", "Stunden"),
    Noun("day", "days", "m", "Tag", "Tage", "Tagen"),
    Noun("week", "weeks", "f", "Woche", "Wochen", "Wochen"),
    Noun("month", "months", "m", "Monat", "Monate", "Monaten"),
    Noun("year", "years", "n", "Jahr", "Jahre", "Jahren"),
]
# German measures of masculine and neuter gender have no plural after a number.
WEIGHTS = [
    Noun("gram", "grams", "n", "Gramm", "Gramm", "Gramm"),
    Noun("kilogram", "kilograms", "n", "Kilogramm", "Kilogramm", "Kilogramm"),
    Noun("ton", "tons", "f", "Tonne", "Tonnen", "Tonnen"),
]
LITER = Noun("liter", "liters", "m", "Liter", "Liter", "Litern")
LENGTHS = [
    Noun("meter", "meters", "m", "Meter", "Meter", "Metern"),
    Noun("kilometer", "kilometers", "m", "Kilometer", "Kilometer", "Kilometern"),
    Noun("mile", "miles", "f", "Meile", "Meilen", "Meilen"),
]
CURRENCIES = [
    Noun("euro", "euros", "m", "Euro", "Euro", "Euro"),
    Noun("dollar", "dollars", "m", "Dollar", "Dollar", "Dollar"),
    Noun("pound", "pounds", "n", "Pfund", "Pfund", "Pfund"),
    Noun("franc", "francs", "m", "Franken", "Franken", "Franken"),
]
SOLIDS = [same("flour", "Mehl"), same("sugar", "Zucker"), same("rice", "Reis"), same("salt", "Salz")]
LIQUIDS = [same("water", "Wasser"), same("milk", "Milch"), same("oil", "Öl"), same("juice", "Saft")]


def things(draw: Draw) -> Phrase:
    n = countable(draw.skewed(9_999))
    return draw.one(THINGS).counted(n, as_digits=n > 99 and draw.random() < 0.5)


def measured(draw: Draw, unit: Noun, last: int) -> Phrase:
    """An amount of a unit: mostly in words, else a decimal fraction."""
    if draw.random() < 0.7:
        return unit.counted(countable(draw.skewed(last)))
    value = decimal(draw, last)
    return same(f"{value} {unit.many}", f"{value:nominative} {unit.plural}")


def substance(draw: Draw) -> Phrase:
    is_liquid = draw.random() < 0.5
    amount = measured(draw, LITER if is_liquid else draw.one(WEIGHTS), 99)
    kind = draw.one(LIQUIDS if is_liquid else SOLIDS)
    forms = [f"{form} {kind:nominative}" for form in (amount.nominative, amount.accusative, amount.dative)]
    return Phrase(f"{amount} of {kind}", *forms)


def goods(draw: Draw) -> Phrase:
    return things(draw) if draw.random() < 0.5 else substance(draw)


def distance(draw: Draw) -> Phrase:
    return measured(draw, draw.one(LENGTHS), 999)


def size(draw: Draw) -> Phrase:
    return measured(draw, LENGTHS[0], 99)


def duration(draw: Draw) -> Phrase:
    return draw.one(DURATIONS).counted(draw.skewed(99))


def minutes_to_weeks(draw: Draw) -> Phrase:
    return draw.one(DURATIONS[1:5]).counted(draw.skewed(99))


def days_to_years(draw: Draw) -> Phrase:
    return draw.one(DURATIONS[3:]).counted(draw.skewed(99))


def age(draw: Draw) -> Phrase:
    return DURATIONS[-1].counted(countable(draw.skewed(999)))


def money(draw: Draw) -> Phrase:
    """In words, or in digits with the sign that German puts behind."""
    if draw.random() < 0.5:
        return draw.one(CURRENCIES).counted(countable(draw.skewed(9_999)))
    code, whole, is_round = draw.one(["EUR", "USD", "GBP"]), draw.skewed(9_999), draw.random() < 0.4
    value = Decimal(whole) + (0 if is_round else Decimal(draw.between(1, 99)) / 100)
    digits = "#,##0" if is_round else "#,##0.00"
    english = format_currency(value, code, f"¤{digits}", locale="en_US", currency_digits=False)
    return same(english, format_currency(value, code, f"{digits} ¤", locale="de_DE", currency_digits=False))


def calendar_day(draw: Draw) -> date:
    return date(1950, 1, 1) + timedelta(days=draw.between(0, 29_000))


def month_day(draw: Draw) -> Phrase:
    """A day of the year. The dative goes with am, vom and zum."""
    day = calendar_day(draw)
    return dated(format_date(day, "MMMM d", locale="en_US"), format_date(day, "d. MMMM", locale="de_DE"))


def spelled_day(draw: Draw) -> Phrase:
    day = calendar_day(draw)
    english, german = (get_month_names("wide", locale=locale)[day.month] for locale in ("en_US", "de_DE"))
    ordinal = num2words(day.day, lang="de", to="ordinal")
    text = f"the {num2words(day.day, lang='en', to='ordinal')} of {english}"
    return dated(text, f"{ordinal} {german}", f"{ordinal}n {german}")


def full_day(draw: Draw) -> Phrase:
    day = calendar_day(draw)
    return dated(format_date(day, "MMMM d, y", locale="en_US"), format_date(day, "d. MMMM y", locale="de_DE"))


def weekday(draw: Draw) -> Phrase:
    day = calendar_day(draw)
    name, german = (format_date(day, form, locale="de_DE") for form in ("EEEE", "d. MMMM y"))
    english = format_date(day, "EEEE, MMMM d, y", locale="en_US")
    return Phrase(english, f"{name}, der {german}", f"{name}, den {german}", f"{name}, dem {german}")


def dated(english: str, german: str, dative: str | None = None) -> Phrase:
    dative = dative or german
    return Phrase(english, f"der {german}", f"den {dative}", dative)


def day(draw: Draw) -> Phrase:
    return draw.one([month_day, spelled_day, full_day])(draw)


def any_day(draw: Draw) -> Phrase:
    return draw.one([month_day, spelled_day, full_day, weekday])(draw)


def month(draw: Draw) -> Phrase:
    day = calendar_day(draw)
    return same(format_date(day, "MMMM y", locale="en_US"), format_date(day, "MMMM y", locale="de_DE"))


def clock(draw: Draw) -> Phrase:
    return draw.one([spoken_time, spoken_time, digital_time, whole_hour])(draw)


# German counts the half hour towards the hour to come, and the minutes around it from there.
MINUTES = [
    ("five past {hour}", "fünf nach {hour}"),
    ("ten past {hour}", "zehn nach {hour}"),
    ("a quarter past {hour}", "Viertel nach {hour}"),
    ("twenty past {hour}", "zwanzig nach {hour}"),
    ("twenty-five past {hour}", "fünf vor halb {coming}"),
    ("half past {hour}", "halb {coming}"),
    ("twenty-five to {coming}", "fünf nach halb {coming}"),
    ("twenty to {coming}", "zwanzig vor {coming}"),
    ("a quarter to {coming}", "Viertel vor {coming}"),
    ("ten to {coming}", "zehn vor {coming}"),
    ("five to {coming}", "fünf vor {coming}"),
]


def spoken_time(draw: Draw) -> Phrase:
    hour = draw.between(1, 12)
    coming = hour % 12 + 1
    english, german = draw.one(MINUTES)
    return same(
        english.format(hour=english_number(hour), coming=english_number(coming)),
        german.format(hour=german_number(hour), coming=german_number(coming)),
    )


def digital_time(draw: Draw) -> Phrase:
    hour, minute = draw.between(0, 23), draw.between(0, 59)
    german = format_time(time(hour, minute), "HH:mm", locale="de_DE")
    return same(f"{(hour - 1) % 12 + 1}:{minute:02} {'a.m.' if hour < 12 else 'p.m.'}", f"{german} Uhr")


def whole_hour(draw: Draw) -> Phrase:
    hour = draw.between(1, 12)
    parts = [("", "")]
    if 5 <= hour <= 11:
        parts.append((" in the morning", " morgens"))
    if hour <= 5:
        parts.append((" in the afternoon", " nachmittags"))
    if 6 <= hour <= 11:
        parts.append((" in the evening", " abends"))
    english, german = draw.one(parts)
    word = "ein" if hour == 1 else german_number(hour)
    return same(f"{english_number(hour)} o'clock{english}", f"{word} Uhr{german}")


def definite(english: str, gender: str, german: str) -> Phrase:
    forms = {"m": ("der", "den", "dem"), "f": ("die", "die", "der"), "n": ("das", "das", "dem")}[gender]
    pronoun = {"m": "ihn", "f": "sie", "n": "es"}[gender]
    nominative, accusative, dative = (f"{article} {german}" for article in forms)
    return Phrase(f"the {english}", nominative, accusative, dative, pronoun)


PERSONS = [
    same("he", "er"),
    same("she", "sie"),
    same("Anna", "Anna"),
    same("Peter", "Peter"),
    same("my brother", "mein Bruder"),
    same("my sister", "meine Schwester"),
    same("our neighbor", "unser Nachbar"),
    same("the teacher", "der Lehrer"),
]
CITIES = [
    same("Berlin", "Berlin"),
    same("Hamburg", "Hamburg"),
    same("Munich", "München"),
    same("Cologne", "Köln"),
    same("Vienna", "Wien"),
    same("Zurich", "Zürich"),
]
EVENTS = [
    definite("meeting", "n", "Treffen"),
    definite("party", "f", "Feier"),
    definite("concert", "n", "Konzert"),
    definite("exam", "f", "Prüfung"),
    definite("course", "m", "Kurs"),
    definite("lecture", "m", "Vortrag"),
]
VEHICLES = [
    definite("train", "m", "Zug"),
    definite("bus", "m", "Bus"),
    definite("ferry", "f", "Fähre"),
    definite("tram", "f", "Straßenbahn"),
    definite("ship", "n", "Schiff"),
]
ITEMS = [
    definite("coat", "m", "Mantel"),
    definite("table", "m", "Tisch"),
    definite("hat", "m", "Hut"),
    definite("lamp", "f", "Lampe"),
    definite("bag", "f", "Tasche"),
    definite("book", "n", "Buch"),
    definite("shirt", "n", "Hemd"),
    definite("bicycle", "n", "Fahrrad"),
]
STRUCTURES = [
    definite("bridge", "f", "Brücke"),
    definite("wall", "f", "Mauer"),
    definite("garden", "m", "Garten"),
    definite("boat", "n", "Boot"),
]
JOURNEYS = [definite("trip", "f", "Reise"), definite("flight", "m", "Flug"), definite("drive", "f", "Fahrt")]

SLOTS: dict[str, Callable[[Draw], Phrase]] = {
    "addition": addition,
    "age": age,
    "any_day": any_day,
    "city": lambda draw: draw.one(CITIES),
    "clock": clock,
    "comparison": comparison,
    "day": day,
    "days_to_years": days_to_years,
    "degrees": degrees,
    "distance": distance,
    "duration": duration,
    "event": lambda draw: draw.one(EVENTS),
    "full_day": full_day,
    "goods": goods,
    "item": lambda draw: draw.one(ITEMS),
    "journey": lambda draw: draw.one(JOURNEYS),
    "last_day": month_day,
    "minutes_to_weeks": minutes_to_weeks,
    "money": money,
    "month": month,
    "month_day": month_day,
    "number": number,
    "percentage": percentage,
    "person": lambda draw: draw.one(PERSONS),
    "size": size,
    "small": small_number,
    "structure": lambda draw: draw.one(STRUCTURES),
    "substance": substance,
    "things": things,
    "vehicle": lambda draw: draw.one(VEHICLES),
}

FRAMES: dict[str, list[Pair]] = {
    "numbers": [
        ("The number is {number}.", "Die Zahl ist {number:nominative}."),
        ("{addition}.", "{addition:nominative}."),
        ("{comparison}.", "{comparison:nominative}."),
        ("{person} counted to {number}.", "{person:nominative} zählte bis {number:nominative}."),
        (
            "{person} says that the answer is {number}.",
            "{person:nominative} sagt, dass die Antwort {number:nominative} ist.",
        ),
        ("I do not know whether the number is {number}.", "Ich weiß nicht, ob die Zahl {number:nominative} ist."),
        ("Please count from {small} to {number}.", "Bitte zählen Sie von {small:dative} bis {number:nominative}."),
        ("It is {degrees} in {city}.", "In {city:dative} sind es {degrees:nominative}."),
        (
            "Prices rose by {percentage} in {month}.",
            "Die Preise sind im {month:dative} um {percentage:accusative} gestiegen.",
        ),
    ],
    "dates": [
        ("Today is {any_day}.", "Heute ist {any_day:nominative}."),
        ("{event} is on {any_day}.", "{event:nominative} ist am {any_day:dative}."),
        ("{event} takes place on {day}.", "{event:nominative} findet am {day:dative} statt."),
        ("{person} was born on {full_day}.", "{person:nominative} wurde am {full_day:dative} geboren."),
        ("I know that {event} was on {day}.", "Ich weiß, dass {event:nominative} am {day:dative} war."),
        ("The letter arrived on {day}.", "Der Brief kam am {day:dative} an."),
        (
            "{person} has lived in {city} since {day}.",
            "{person:nominative} wohnt seit dem {day:dative} in {city:dative}.",
        ),
        (
            "The shop is closed from {month_day} to {last_day}.",
            "Der Laden ist vom {month_day:dative} bis zum {last_day:dative} geschlossen.",
        ),
        ("It happened in {month}.", "Es ist im {month:dative} passiert."),
        (
            "Because {event} is on {day}, we are leaving today.",
            "Weil {event:nominative} am {day:dative} ist, reisen wir heute ab.",
        ),
    ],
    "times": [
        ("It is {clock}.", "Es ist {clock:nominative}."),
        ("We are meeting at {clock}.", "Wir treffen uns um {clock:accusative}."),
        ("{vehicle} leaves at {clock}.", "{vehicle:nominative} fährt um {clock:accusative} ab."),
        (
            "{vehicle} arrives in {city} at {clock}.",
            "{vehicle:nominative} kommt um {clock:accusative} in {city:dative} an.",
        ),
        (
            "I think that {vehicle} leaves at {clock}.",
            "Ich glaube, dass {vehicle:nominative} um {clock:accusative} abfährt.",
        ),
        ("Please call me at {clock}.", "Bitte rufen Sie mich um {clock:accusative} an."),
        ("When {person} woke up, it was {clock}.", "Als {person:nominative} aufwachte, war es {clock:nominative}."),
        ("{person} got up at {clock}.", "{person:nominative} ist um {clock:accusative} aufgestanden."),
        ("Does {event} begin at {clock}?", "Beginnt {event:nominative} um {clock:accusative}?"),
    ],
    "money": [
        ("{item} costs {money}.", "{item:nominative} kostet {money:accusative}."),
        (
            "{person} paid {money} for {item}.",
            "{person:nominative} hat für {item:accusative} {money:accusative} bezahlt.",
        ),
        (
            "{person} asked whether {item} costs {money}.",
            "{person:nominative} fragte, ob {item:nominative} {money:accusative} kostet.",
        ),
        (
            "Because {item} costs {money}, we are not buying it.",
            "Weil {item:nominative} {money:accusative} kostet, kaufen wir {item:pronoun} nicht.",
        ),
        ("{person} saves {money} every month.", "{person:nominative} spart jeden Monat {money:accusative}."),
        (
            "{person} earned {money} last year.",
            "{person:nominative} hat letztes Jahr {money:accusative} verdient.",
        ),
        ("Can you lend me {money}?", "Können Sie mir {money:accusative} leihen?"),
    ],
    "quantities": [
        ("We need {goods}.", "Wir brauchen {goods:accusative}."),
        ("{person} bought {goods}.", "{person:nominative} hat {goods:accusative} gekauft."),
        ("{person} says that we need {goods}.", "{person:nominative} sagt, dass wir {goods:accusative} brauchen."),
        ("Please add {substance}.", "Bitte fügen Sie {substance:accusative} hinzu."),
        ("I see {things} in the kitchen.", "Ich sehe in der Küche {things:accusative}."),
        ("The village is {distance} away.", "Das Dorf ist {distance:accusative} entfernt."),
        ("{structure} is {size} long.", "{structure:nominative} ist {size:accusative} lang."),
        ("{structure} is {age} old.", "{structure:nominative} ist {age:accusative} alt."),
        ("{person} arrived {duration} ago.", "{person:nominative} ist vor {duration:dative} angekommen."),
        (
            "{person} has worked here for {days_to_years}.",
            "{person:nominative} arbeitet seit {days_to_years:dative} hier.",
        ),
        ("We will be back in {duration}.", "Wir sind in {duration:dative} zurück."),
        ("{journey} takes {minutes_to_weeks}.", "{journey:nominative} dauert {minutes_to_weeks:accusative}."),
        (
            "If {journey} takes {minutes_to_weeks}, we will be late.",
            "Wenn {journey:nominative} {minutes_to_weeks:accusative} dauert, kommen wir zu spät.",
        ),
    ],
}
