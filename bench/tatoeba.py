"""Prepares the English-German pairs of tatoeba.org for the translator bundled with Regard, and checks what it copies.

    python bench/tatoeba.py prepare --data deu-eng.txt.xz --out scratch/tatoeba
    regard train translate --config tatoeba --data.source scratch/tatoeba/train.tsv.xz --data.valid_source \
        scratch/tatoeba/valid.tsv --out runs/english-german
    python bench/tatoeba.py check runs/english-german

`prepare` holds out the 2,000 pairs that seed 1 draws, as they are, and adds to the others what the corpus is short of:
numbers in digits (where both sides spell the same one out, a copy with digits), times, addresses and emoji. `check`
translates sentences with entities and counts those that survive.
"""

import argparse
import lzma
import random
import re
from collections import Counter
from functools import cache
from pathlib import Path

from regard.data.entities import find, match
from regard.data.placeholders import _words
from regard.tasks.translate import DataConfig, Translator, read_corpus

Pair = tuple[str, str]

SPELLED = range(2, 100)  # numbers that a sentence may spell out
THINGS = (
    "https://example.com", "www.regard.org/docs", "anna.meier@example.org", "http://news.example.de/a?id=7", "@tom_b",
    "#berlin", "/home/anna/notes.txt", "report.pdf", "A380", "v2.1.0", "`make`", "{name}", "example.com",
    "info@bahn.de",
)  # fmt: skip
SIGNS = ("😀", "❤️", "👍🏽", "🎉", "😂😂", "🇩🇪", ":-)", ";)", "→", "😢")

# {t} a thing, {n} {m} numbers, {c} a time, {p} a price; English, German
TEMPLATES = """
Visit {t}.|Besuchen Sie {t}.
Please visit {t} for more information.|Bitte besuchen Sie {t} für weitere Informationen.
For more information, see {t}.|Weitere Informationen finden Sie unter {t}.
See {t} for details.|Einzelheiten finden Sie unter {t}.
You can find it at {t}.|Sie finden es unter {t}.
You can find more at {t}.|Mehr dazu findest du unter {t}.
Go to {t} and click on the button.|Gehe auf {t} und klicke auf den Knopf.
Open {t} in your browser.|Öffne {t} in deinem Browser.
Have you seen {t}?|Hast du {t} gesehen?
I read about it on {t}.|Ich habe auf {t} davon gelesen.
I found this picture on {t}.|Ich habe dieses Bild auf {t} gefunden.
My website is {t}.|Meine Webseite ist {t}.
Our new website is {t}.|Unsere neue Webseite ist {t}.
The address is {t}.|Die Adresse ist {t}.
My e-mail address is {t}.|Meine E-Mail-Adresse ist {t}.
My email is {t}.|Meine E-Mail-Adresse lautet {t}.
Write to {t}.|Schreiben Sie an {t}.
Please write to {t}.|Bitte schreiben Sie an {t}.
Send an e-mail to {t}.|Schicken Sie eine E-Mail an {t}.
Send it to {t}, please.|Schick es bitte an {t}.
You can reach me at {t}.|Sie erreichen mich unter {t}.
Contact us at {t}.|Kontaktieren Sie uns unter {t}.
Contact {t} if you have questions.|Wenden Sie sich an {t}, wenn Sie Fragen haben.
If you have questions, write to {t}.|Wenn Sie Fragen haben, schreiben Sie an {t}.
Is {t} your e-mail address?|Ist {t} deine E-Mail-Adresse?
Do you know {t}?|Kennst du {t}?
Thanks, {t}!|Danke, {t}!
Thank you for the book, {t}.|Danke für das Buch, {t}.
Happy birthday, {t}!|Alles Gute zum Geburtstag, {t}!
Follow {t} on the internet.|Folgen Sie {t} im Internet.
I love {t}.|Ich liebe {t}.
{t} is down.|{t} ist nicht erreichbar.
{t} does not work.|{t} funktioniert nicht.
{t} is my favorite website.|{t} ist meine Lieblingswebseite.
{t} was right.|{t} hatte recht.
The file is in {t}.|Die Datei ist in {t}.
The file {t} is missing.|Die Datei {t} fehlt.
The file {t} does not exist.|Die Datei {t} existiert nicht.
Open the file {t}.|Öffne die Datei {t}.
Please open {t}.|Bitte öffnen Sie {t}.
Delete {t} and try again.|Löschen Sie {t} und versuchen Sie es noch einmal.
Save it as {t}.|Speichere es als {t}.
Copy {t} to {u}.|Kopiere {t} nach {u}.
Download {t} from {u}.|Laden Sie {t} von {u} herunter.
I have sent {t} to {u}.|Ich habe {t} an {u} geschickt.
Send {t} to {u}.|Schicke {t} an {u}.
Go to {t} or write to {u}.|Gehen Sie auf {t} oder schreiben Sie an {u}.
Use {t} instead of {u}.|Benutze {t} statt {u}.
Both {t} and {u} are wrong.|Sowohl {t} als auch {u} sind falsch.
Install {t} first.|Installieren Sie zuerst {t}.
You need {t} or newer.|Sie brauchen {t} oder neuer.
We flew in an {t}.|Wir sind mit einer {t} geflogen.
What is {t}?|Was ist {t}?
How does {t} work?|Wie funktioniert {t}?
I don't understand {t}.|Ich verstehe {t} nicht.
Type {t} and press enter.|Geben Sie {t} ein und drücken Sie die Eingabetaste.
Hello {t}, how are you?|Hallo {t}, wie geht es dir?
Dear {t}, thank you for your letter.|Liebe {t}, vielen Dank für deinen Brief.
It costs {p}.|Es kostet {p}.
The book costs {p}.|Das Buch kostet {p}.
This shirt costs {p}.|Dieses Hemd kostet {p}.
The ticket costs {p}.|Die Fahrkarte kostet {p}.
How about {p}?|Wie wäre es mit {p}?
I paid {p} for it.|Ich habe {p} dafür bezahlt.
She paid {p} for the dress.|Sie hat {p} für das Kleid bezahlt.
I owe him {p}.|Ich schulde ihm {p}.
He gave me {p}.|Er hat mir {p} gegeben.
Can you lend me {p}?|Kannst du mir {p} leihen?
I have only {p}.|Ich habe nur {p}.
That will be {p}, please.|Das macht {p}, bitte.
The rent is {p} a month.|Die Miete beträgt {p} im Monat.
He earns {p} a month.|Er verdient {p} im Monat.
The price rose from {p} to {q}.|Der Preis ist von {p} auf {q} gestiegen.
The meeting is at {c}.|Die Besprechung ist um {c} Uhr.
The meeting starts at {c}.|Die Besprechung beginnt um {c} Uhr.
The train leaves at {c}.|Der Zug fährt um {c} Uhr ab.
The train leaves at {c} and arrives at {d}.|Der Zug fährt um {c} Uhr ab und kommt um {d} Uhr an.
It's {c}.|Es ist {c} Uhr.
It is {c} now.|Es ist jetzt {c} Uhr.
I got up at {c}.|Ich bin um {c} Uhr aufgestanden.
I get up at {c} every morning.|Ich stehe jeden Morgen um {c} Uhr auf.
See you at {c}.|Wir sehen uns um {c} Uhr.
See you tomorrow at {c}.|Wir sehen uns morgen um {c} Uhr.
We are open from {c} to {d}.|Wir haben von {c} bis {d} Uhr geöffnet.
The shop closes at {c} p.m.|Das Geschäft schließt um {c} Uhr nachmittags.
I will call you at {c} p.m.|Ich rufe dich um {c} Uhr nachmittags an.
The plane lands at {c} a.m.|Das Flugzeug landet um {c} Uhr morgens.
Be here by {c}.|Sei bis {c} Uhr hier.
It starts at {c} on {n} May.|Es beginnt am {n}. Mai um {c} Uhr.
The concert begins at {c} tonight.|Das Konzert beginnt heute Abend um {c} Uhr.
Let's meet at {c} in front of the station.|Treffen wir uns um {c} Uhr vor dem Bahnhof.
The number is {n}.|Die Nummer ist {n}.
My phone number is {n}.|Meine Telefonnummer ist {n}.
Call {n}.|Rufen Sie {n} an.
Call me at {n}.|Ruf mich unter {n} an.
My phone number is {n} {m}.|Meine Telefonnummer ist {n} {m}.
His number is {n} {m} {o}.|Seine Nummer ist {n} {m} {o}.
She was born in {n}.|Sie wurde {n} geboren.
He was born in {n} and died in {m}.|Er wurde {n} geboren und starb {m}.
It happened in {n}.|Es ist {n} passiert.
The war ended in {n}.|Der Krieg endete {n}.
In {n}, everything changed.|{n} änderte sich alles.
In {n} he moved to Berlin.|{n} zog er nach Berlin.
The house was built in {n}.|Das Haus wurde {n} gebaut.
I have lived here since {n}.|Ich wohne seit {n} hier.
The deadline is {n}.|Die Frist endet am {n}.
The party is on {n}.|Die Feier ist am {n}.
On {n} we leave for Spain.|Am {n} fahren wir nach Spanien.
Today is {n}.|Heute ist der {n}.
The date is {n}.|Das Datum ist der {n}.
It is the {n}th today.|Heute ist der {n}.
He came in {n}rd.|Er wurde {n}.
This is my {n}nd visit.|Das ist mein {n}. Besuch.
She lives on the {n}th floor.|Sie wohnt im {n}. Stock.
It was popular in the {n}s.|In den {n}ern war es beliebt.
The {n}s were better.|Die {n}er waren besser.
Chapter {n} is difficult.|Kapitel {n} ist schwierig.
Open your books to page {n}.|Öffnet eure Bücher auf Seite {n}.
Read pages {n} to {m}.|Lest die Seiten {n} bis {m}.
The answer is {n}.|Die Antwort ist {n}.
{n} plus {m} is {o}.|{n} plus {m} ist {o}.
{n} times {m} is {o}.|{n} mal {m} ist {o}.
{n} is more than {m}.|{n} ist mehr als {m}.
There are {n} people in the room.|Es sind {n} Leute im Zimmer.
There are {n} students in our class.|In unserer Klasse sind {n} Schüler.
{n} people died.|{n} Menschen starben.
{n} people live here.|Hier leben {n} Menschen.
{n} of the students passed.|{n} der Schüler haben bestanden.
About {n} people came to the concert.|Etwa {n} Leute kamen zum Konzert.
More than {n} people were there.|Mehr als {n} Menschen waren da.
The city has {n} inhabitants.|Die Stadt hat {n} Einwohner.
Germany has {n} million inhabitants.|Deutschland hat {n} Millionen Einwohner.
I bought {n} apples and {m} oranges.|Ich habe {n} Äpfel und {m} Orangen gekauft.
We need {n} chairs and {m} tables.|Wir brauchen {n} Stühle und {m} Tische.
He is {n} years old.|Er ist {n} Jahre alt.
She is {n}.|Sie ist {n}.
I am {n} and my brother is {m}.|Ich bin {n} und mein Bruder ist {m}.
My sister is {n} years older than me.|Meine Schwester ist {n} Jahre älter als ich.
It is {n} kilometers from here.|Es ist {n} Kilometer von hier.
It takes {n} minutes.|Es dauert {n} Minuten.
It takes {n} hours and {m} minutes.|Es dauert {n} Stunden und {m} Minuten.
I waited for {n} minutes.|Ich habe {n} Minuten gewartet.
The flight takes {n} hours.|Der Flug dauert {n} Stunden.
The room is {n} meters long and {m} meters wide.|Das Zimmer ist {n} Meter lang und {m} Meter breit.
It weighs {n} kg.|Es wiegt {n} kg.
He is {n} cm tall.|Er ist {n} cm groß.
It is {n}km away.|Es ist {n} km entfernt.
The temperature is {n}.|Die Temperatur beträgt {n}.
It was {n} yesterday.|Gestern waren es {n}.
Prices rose by {n}.|Die Preise sind um {n} gestiegen.
Only {n} voted.|Nur {n} haben gewählt.
I am {n} sure.|Ich bin mir zu {n} sicher.
Pi is about {n}.|Pi ist etwa {n}.
The score was {n}.|Das Ergebnis war {n}.
We won {n} to {m}.|Wir haben {n} zu {m} gewonnen.
Bus number {n} goes to the station.|Der Bus Nummer {n} fährt zum Bahnhof.
Take bus {n}.|Nimm den Bus {n}.
I live at {n} Park Street.|Ich wohne in der Parkstraße {n}.
My room is number {n}.|Mein Zimmer hat die Nummer {n}.
We have version {n}.|Wir haben Version {n}.
Python {n} is out.|Python {n} ist da.
Dial {n} in an emergency.|Wählen Sie im Notfall {n}.
Order {n} was sent on {m} to {t}.|Bestellung {n} wurde am {m} an {t} geschickt.
Tickets cost {p} at {t}.|Karten kosten {p} bei {t}.
Meet me at {c} at {t}.|Triff mich um {c} Uhr bei {t}.
I paid {p} on {n}.|Ich habe am {n} {p} bezahlt.
On {n} at {c} we met at {t}.|Am {n} um {c} Uhr haben wir uns bei {t} getroffen.
"""

CHECKS = """
Visit https://example.com/help?id=42 today.
My e-mail address is john.doe+news@mail.example.org.
You can reach me at anna@example.de or at +49 30 1234567.
Please write to support@example.com if you have any questions.
The file is in /home/anna/notes.txt.
Open C:\\Users\\Tom\\report.pdf and read it.
I am reading www.example.org right now.
@anna loves #berlin.
Thank you, @tom_b!
I love you ❤️
I love you 👨‍👩‍👧‍👦 and you love me 👍🏽!
🎉 Happy birthday!
We are going to Italy 🇮🇹 tomorrow.
The meeting is at 14:30.
The train leaves at 7:45 and arrives at 9:15.
It is 3:30.
It costs $1,234.56.
The book costs €9.99 and the pen costs £2.
Prices rose by 3.5% in 2023.
I have 17 cats and 4 dogs.
There are 1,250 people in the room.
He was born on March 3, 1987.
He was born on 1987-03-03.
The deadline is 31.12.2024.
She lives on the 21st floor.
It was popular in the 1990s.
Python 3.12 is faster than Python 3.11.
You need version 2.10.3 or newer.
We flew in an A380.
Call 223-1374.
The answer is 42.
12 times 12 is 144.
The room is 3.5 meters long and 2.75 meters wide.
It is -5°C outside.
<b>Tom</b> is my <i>best</i> friend.
Hello {name}, you have %s new messages.
Run `regard demo` and wait 10 minutes.
The word Москва means Moscow.
On 2024-05-17 at 10:00 I paid $25 to bob@example.com for 3 tickets.
https://example.com
😀
1. Buy 2 liters of milk.
Tom, who was born in 1990, has 3 children, 2 cars and 1 dog.
Mary's number is 555-0199 and mine is 555-0142.
Is #metoo still important?
He ran 42.195 km in 2:05:30.
Two times 3 is 6 :-)
In 2015, 1,000,000 people came to Germany.
"""


def prepare(data: str, folder: Path) -> None:
    corpus = read_corpus(DataConfig(source=data, held_out=2000), seed=1)
    draw = random.Random(1)
    kept = len(corpus.train)
    held = {source for source, _ in corpus.valid}
    train = [with_digits(pair) for pair in corpus.train]
    added = Counter[str]()
    for name, pairs in {
        "digits for number words": [made for pair in corpus.train for made in spelled_out(pair, draw)],
        "generated": numbers_in_digits(12_000),
        "templates": [filled(line, draw) for line in TEMPLATES.strip().split("\n") for _ in range(24)],
        "two sentences with a sign between": [beside(train[:kept], draw) for _ in range(3000)],
        "a name in tags": [made for pair in train[:kept] for made in in_tags(pair, draw)],
    }.items():
        pairs = [pair for pair in pairs if pair[0] not in held]
        added[name] = len(pairs)
        train += pairs
    folder.mkdir(parents=True, exist_ok=True)
    for path, pairs in (("train.tsv.xz", train), ("valid.tsv", corpus.valid)):
        with (lzma.open if path.endswith("xz") else open)(folder / path, "wt", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{source}\t{target}\n" for source, target in pairs)
    print(f"{len(corpus.train):,} pairs, {len(corpus.valid):,} held out; added: {dict(added)}")


def num2words(number: int, lang: str) -> str:
    # imported here, since only `prepare` needs it
    from num2words import num2words

    return num2words(number, lang=lang)


@cache
def spelling(lang: str) -> dict[str, int]:
    return {num2words(number, lang): number for number in SPELLED}


def word(text: str) -> str:
    return rf"(?<![\w-]){text}(?![\w-])"


def with_digits(pair: Pair) -> Pair:
    """Where the source has digits that the target spells out, the target gets digits too."""
    source, target = pair
    known = {entity.key for entity in find(target)}
    for entity in find(source):
        number = entity.text.lstrip("$")
        if entity.kind == "time" and entity.key not in known:
            hour, minute = (num2words(int(part), lang="de") for part in entity.text.split(":")[:2])
            spoken = rf"{hour} uhr" if entity.text.endswith("00") else rf"{hour} uhr {minute}"
            if entity.text.endswith("30"):
                spoken += (
                    f"|halb {num2words(int(entity.text.split(':')[0]) % 12 + 1, lang='de').replace('eins', 'ein')}s?"
                )
            target = re.sub(word(f"(?:{spoken})"), f"{entity.text} Uhr", target, count=1, flags=re.I)
            target = re.sub(rf"\b{entity.text.replace(':', ' Uhr ')}\b", f"{entity.text} Uhr", target)
        if entity.kind != "number" or entity.key in known or not number.isdigit():
            continue
        spoken = word(num2words(int(number), lang="de"))
        amount = f"{number} $" if entity.text.startswith("$") else number
        unit = r"(?:\s(?:us-)?dollars?)" if entity.text.startswith("$") else ""
        target = re.sub(rf"(?:{spoken}|\b{number}){unit}", amount, target, count=1, flags=re.I)
    return source, target


def spelled_out(pair: Pair, draw: random.Random) -> list[Pair]:
    """A copy of a pair with digits for a number that both sides spell out, and sometimes a time for an hour."""
    source, target = pair
    numbers = spelling("en")
    words = [found for found in re.findall(r"[a-z]+(?:-[a-z]+)?", source) if found in numbers]
    made = source, target
    for english in sorted(set(words)):
        digits = str(numbers[english])
        german = num2words(numbers[english], lang="de")
        if words.count(english) != 1 or len(re.findall(word(german), target)) != 1:
            return []
        hour = re.search(word(rf"{english} o'clock"), made[0]) and re.search(word(rf"{german} Uhr"), made[1])
        if hour and draw.random() < 0.6:
            time = f"{digits}:{draw.randrange(60):02}"
            made = re.sub(word(rf"{english} o'clock"), time, made[0]), re.sub(word(german), time, made[1])
        else:
            made = re.sub(word(english), digits, made[0]), re.sub(word(german), digits, made[1])
    return [made] if words else []


def numbers_in_digits(count: int) -> list[Pair]:
    """Generated pairs whose numbers are the same on both sides."""
    from regard.data import generated

    pairs = generated.pairs(count, seed=7)
    return [pair for pair in pairs if (found := find(pair[0])) and len(match(found, find(pair[1]))) == len(found)]


def filled(line: str, draw: random.Random) -> Pair:
    things = draw.sample(THINGS, 2)
    numbers = [str(draw.choice((draw.randrange(2, 100), draw.randrange(100, 3000)))) for _ in range(3)]
    times = [f"{draw.randrange(1, 24)}:{draw.randrange(60):02}" for _ in range(2)]
    prices = [draw.randrange(2, 500) for _ in range(2)]
    values = {
        "t": things[0],
        "u": things[1],
        "n": numbers[0],
        "m": numbers[1],
        "o": numbers[2],
        "c": times[0],
        "d": times[1],
    }
    english, german = line.split("|")
    source = english.format(**values, p=f"${prices[0]}", q=f"${prices[1]}")
    return source, german.format(**values, p=f"{prices[0]} $", q=f"{prices[1]} $")


def beside(pairs: list[Pair], draw: random.Random) -> Pair:
    one, two, sign = draw.choice(pairs), draw.choice(pairs), draw.choice(SIGNS)
    return f"{one[0]} {sign} {two[0]}", f"{one[1]} {sign} {two[1]}"


def in_tags(pair: Pair, draw: random.Random) -> list[Pair]:
    """A name that both sides have once, between tags."""
    if draw.random() > 0.05:
        return []
    counts = [Counter(found.text for found in _words(text)) for text in pair]
    names = [
        name for name, count in counts[0].items() if count == counts[1][name] == 1 and name[0].isupper() and name[2:]
    ]
    tag = draw.choice(("b", "i", "em", "a"))
    return [tuple(re.sub(word(names[0]), f"<{tag}>{names[0]}</{tag}>", text) for text in pair)] if names else []


def check(run: str | None) -> None:
    translator, warnings = Translator.load(run, device="cpu"), []
    lines = CHECKS.strip().split("\n")
    kept = total = 0
    for line, (best, *_) in zip(lines, translator.translate(lines, warn=warnings.append), strict=True):
        found = translator.entities(line)
        written = [translator.style.write(entity, line) for entity in found]
        total, kept = total + len(found), kept + sum(text in best.text for text in written)
        print(f"{line}\n  {best.text}")
    print(*warnings, sep="\n")
    print(f"{kept} of {total} entities kept; {len(warnings)} of {len(lines)} sentences translated in parts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    added = verbs.add_parser("prepare")
    added.add_argument("--data", required=True)
    added.add_argument("--out", type=Path, required=True)
    added = verbs.add_parser("check")
    added.add_argument("run", nargs="?")
    arguments = parser.parse_args()
    if arguments.verb == "prepare":
        prepare(arguments.data, arguments.out)
    else:
        check(arguments.run)


if __name__ == "__main__":
    main()
