"""What is not language: found by its form, matched between two languages, written as the other language writes it; and
lines that are split into sentences."""

import time

import pytest

from regard.data.entities import Entity, Style, find, match, scripts_of
from regard.data.sentences import Span, clauses, sentences

GERMAN = Style(".", ",", True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Visit https://example.com/a?b=1&c=(x), ok?", "thing https://example.com/a?b=1&c=(x)"),
        ("(see https://en.wikipedia.org/wiki/A_(b))", "thing https://en.wikipedia.org/wiki/A_(b)"),
        ("Go to www.example.org or foo.de/bar.", "thing www.example.org|thing foo.de/bar"),
        ("Mail john.doe+x@mail.example.org, please.", "thing john.doe+x@mail.example.org"),
        ("@anna loves #paris2024!", "thing @anna|thing #paris2024"),
        ("in /etc/passwd, ~/notes.txt and src/main.py", "thing /etc/passwd|thing ~/notes.txt|thing src/main.py"),
        (r"Open C:\Users\x\a.pdf.", r"thing C:\Users\x\a.pdf"),
        ("and/or 90 km/h, either/or", "number 90"),
        ("version 2.10.3 of v1.2", "thing 2.10.3|thing v1.2"),
        (
            "an A380, mp3, GPT-4, COVID-19, snake_case",
            "thing A380|thing mp3|thing GPT-4|thing COVID-19|thing snake_case",
        ),
        ("a well-known T-shirt, e.g. this; C++", ""),
        ("Run `ls -la` --all {name} ${HOME} %s", "thing `ls -la`|thing --all|thing {name}|thing ${HOME}|thing %s"),
        ("<b>Hi</b> &amp; 5 < 6", "sign <b>|sign </b>|sign &amp;|number 5|number 6"),
        ("I ❤️ you 👨‍👩‍👧‍👦👍🏽!", "sign ❤️|sign 👨‍👩‍👧‍👦👍🏽"),
        ("🇩🇪 1️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿 → :-) ;) <3", "sign 🇩🇪|sign 1️⃣|sign 🏴󠁧󠁢󠁥󠁮󠁧󠁿|sign →|sign :-)|sign ;)|sign <3"),
        ("It costs $1,234.56, €5 or 5 %.", "number $1,234.56|number €5|number 5 %"),
        ("3rd, 1990s, 16GB, 5km, mid-1990s", "number 3|number 1990|number 16|number 5|number 1990"),
        ("Call +49 30 1234567 or 555-0199.", "number +49 30 1234567|number 555-0199"),
        ("Call +49 (0)30 123456-78, +1 (555) 123-4567", "number +49 (0)30 123456-78|number +1 (555) 123-4567"),
        ("10^6, 3.14e-5, -1E9 and 0x1F; 2e", "number 10^6|number 3.14e-5|number -1E9|number 0x1F|number 2"),
        ("-5°C, +49, 3/4, 1914-1918, 223-1374", "number -5°C|number +49|number 3/4|number 1914-1918|number 223-1374"),
        ("at 7:45 on 2024-05-17", "time 7:45|number 2024-05-17"),
        ("17.05.2024 or 5/17/2024 2:05:30", "number 17.05.2024|number 5/17/2024|time 2:05:30"),
        ("The word Москва, 你好 too, Ärger and naïve", "thing Москва|thing 你好"),
        ('A plain sentence, isn\'t it? Yes; (no) - "quoted".', ""),
    ],
)
def test_each_kind_is_found(text, expected):
    found = find(text, ("LATIN",))
    assert "|".join(f"{entity.kind} {entity.text}" for entity in found) == expected
    assert all(text[entity.start : entity.end] == entity.text for entity in found)


def test_a_text_of_any_kind_is_read_in_linear_time():
    """A pattern that could begin at every character and read to the end would take more than the bound; these
    take a fiftieth of it."""
    for piece in (
        "a",
        "a.",
        "1,",
        "/a",
        "@",
        "<a ",
        "a-",
        "A",
        "a_",
        "-",
        "{",
        "`a",
        "1:",
        "a@",
        "Я",
        "www.",
        "1e",
        "1^",
        "0x",
        "😀",
    ):
        text = (piece * 60_000)[:60_000]
        began = time.process_time()
        find(text, ("LATIN",))
        assert time.process_time() - began < 5, piece


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("$1,234.56", "1.234,56 $"),
        ("€5", "5 €"),
        ("3.5%", "3,5%"),
        ("It is 3.14159.", "3,14159"),
        ("100,000,000 people", "100.000.000"),
        ("Python 3.12 is out.", "3.12"),
        ("in section 2.1", "2.1"),
        ("$5 million", "$5"),
        ("at 7:45", "7:45"),
        ("on 2024-05-17", "2024-05-17"),
        ("192.168.0.1", "192.168.0.1"),
        ("1,2 and", "1,2"),
        ("007", "007"),
    ],
)
def test_only_quantities_change_their_signs(line, expected):
    entity = find(line)[0]
    assert GERMAN.write(entity, line) == expected
    assert Style().write(entity, line) == entity.text
    assert sorted(entity.digits) == sorted(filter(str.isdigit, expected))


def test_how_numbers_are_written_is_learned_from_pairs():
    pairs = [("It costs $1.50.", "Es kostet 1,50 $."), ("7.25 or 1,000", "7,25 oder 1.000"), ("v 2.5", "v 2.5")]
    matched = [both for one, other in pairs for both in match(find(one), find(other))]
    assert Style.learn(matched) == GERMAN
    back = [(other, one) for one, other in matched]
    assert Style.learn(back) == Style(",", ".", None)
    assert Style.learn([]) == Style()
    assert Style.learn([(one, one) for one, _ in matched]) == Style(None, None, False)


def test_entities_are_matched_in_order_and_by_their_digits():
    source, target = find("From 7:45 to 9 with 1,000 of 9 a@b.de"), find("Um 7.45 mit 1000 a@b.de von 9 bis 9, nicht 8")
    found = match(source, target)
    assert [(one.text, other.text) for one, other in found] == [
        ("7:45", "7.45"), ("9", "9"), ("1,000", "1000"), ("9", "9"), ("a@b.de", "a@b.de"),
    ]  # fmt: skip
    assert len({other.start for _, other in found}) == 5
    assert match(find("$5"), find("5 €")) == []
    assert Entity(0, 1, "number", "5").key != Entity(0, 2, "number", "$5").key


def test_scripts_are_counted():
    assert scripts_of(["Grüße an alle" * 100, "мир"]) == ("CYRILLIC", "LATIN")
    assert scripts_of(["Grüße an alle" * 10_000, "мир"]) == ("LATIN",)
    assert scripts_of([]) == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Mr. Smith left. He saw Dr. Jones at 5 p.m. on Main St. before.", 2),
        ('"Stop!" he said. "Why?" she asked.', 2),
        ("J. R. Tolkien wrote z. B. books. Am 3. Mai war es. In 1990. He left… What now?", 5),
        ("Das ist z. B. gut. Prof. Dr. Müller kommt d. h. heute.", 2),
        ("It is 3.5 meters. See https://a.org/b?c. Now!  Yes.", 4),
        ("你好。再见！好", 3),
        ("Wait... what? Yes. 😀 Hi. “No,” he said. (Really?) Yes!", 6),
        ("one sentence without an end", 1),
        ("  ", 0),
    ],
)
def test_sentences(text, expected):
    kept = [(entity.start, entity.end) for entity in find(text)]
    found = sentences(text, kept)
    assert len(found) == expected, [text[start:end] for start, end in found]
    assert_nothing_lost(text, found)


def assert_nothing_lost(text: str, found: list[Span]) -> None:
    places = [place for start, end in found for place in range(start, end)]
    assert places == sorted(set(places))
    missing = set(range(len(text))) - set(places)
    assert all(text[place].isspace() for place in missing)


@pytest.mark.parametrize(
    "text",
    [
        "This is a long clause, and another one; then one more, which is here: the end of it all comes here, or there.",
        "word " * 40,
        "x" * 200,
        "https://example.com/a/very/long/address/that/is/longer/than/fits and, then: https://b.org; a word",
        "a",
    ],
)
def test_clauses_fit_and_lose_nothing(text):
    text = text.strip()
    kept = [(entity.start, entity.end) for entity in find(text)]
    found = list(clauses(text, Span(0, len(text)), lambda part: len(part) <= 40, kept))
    assert_nothing_lost(text, found)
    assert all(end - start <= 40 or (start, end) in kept for start, end in found)
    assert set(kept) == {span for span in kept if any(a <= span[0] and span[1] <= b for a, b in found)}
    # no more than needed
    assert len(found) <= 2 + len(text) // 16


def test_clauses_end_where_a_reader_would_pause():
    text = "We came, we saw; then we went home, all of us."
    found = [text[a:b] for a, b in clauses(text, Span(0, len(text)), lambda part: len(part) <= 32)]
    assert found == ["We came, we saw;", "then we went home, all of us."]
