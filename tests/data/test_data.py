"""Text files, tokenizers and batches: what is read, what is refused and how, and that nothing goes missing."""

import gzip
import io
import json
import lzma
import os
import random
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.data import tokenizer as tokenizer_file
from regard.data.batches import Batches, keep_short, padded, similar
from regard.data.text import BadText, Skipped, open_lines, read_pairs, read_sentences
from regard.data.tokenizer import BOS, EOS, PAD, UNK, Tokenizer

CORPUS = [
    "Two young, White males are outside near many bushes.",
    "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
    "A man in a blue shirt is standing on a ladder, cleaning 23 windows.",
    "Ein Mann in einem blauen Hemd steht auf einer Leiter und putzt 23 Fenster.",
] * 3


def write(folder: Path, name: str, data: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def stdin_of(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


# Text


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"\xef\xbb\xbfa\nb\n", ["a", "b"]),
        (b"\xef\xbb\xbf\n", [""]),
        (b"a\n\nb\n\n", ["a", "", "b", ""]),
        (b" a\tb ", [" a\tb "]),
        ("a\u2028b\u2029c\u00a0d\u3000\u202ee\u200f\n".encode(), ["a\u2028b\u2029c\u00a0d\u3000\u202ee\u200f"]),
        ("a\n\ufeffb\n".encode(), ["a", "\ufeffb"]),
        ("🦉 größer\n".encode(), ["🦉 größer"]),
    ],
)
@pytest.mark.parametrize("suffix", ["txt", "gz", "xz", "-"])
def test_lines_end_at_newlines_only(tmp_path, monkeypatch, data, lines, suffix):
    packed = {"gz": gzip.compress, "xz": lzma.compress}.get(suffix, bytes)(data)
    path = write(tmp_path, f"a.{suffix}", packed)
    if suffix == "-":
        stdin_of(monkeypatch, data)
        path = "-"
    assert list(open_lines(path)) == lines


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"caf\xe9", "not UTF-8: byte 0xe9 at byte 4"),
        (b"\xed\xa0\x80", "not UTF-8"),  # a surrogate
        (b"a\xf0\x9f\xa6", "not UTF-8"),  # cut in the middle of a character
        (b"a\x00b", "NUL character U+0000 at character 2"),
        (b"a\x0bb", "control character U+000B at character 2"),
        (b"a\x0cb", "control character U+000C"),
        (b"a\rb", "control character U+000D at character 2"),
        (b"a\r\r", "control character U+000D at character 2"),
        (b"a\x1b[31m", "control character U+001B"),
        (b"\x7f", "control character U+007F"),
        ("a\u0085b".encode(), "control character U+0085"),
        ("\u009b".encode(), "control character U+009B"),
        (b"x" * 51, "line longer than 50 characters: it has 51"),
        (b"x" * 400, "line longer than 50 characters"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, words):
    path = write(tmp_path, "a.txt", b"good\n" + line + b"\nx\n")
    with pytest.raises(BadText) as caught:
        list(open_lines(path, longest=50))
    assert str(caught.value).startswith(f"{path}:2: ")
    assert words in str(caught.value)
    assert isinstance(caught.value, ValueError)

    good = write(tmp_path, "b.txt", "eins\nzwei\ndrei\n")
    pairs = read_pairs(path, good, skip_bad=True, longest=50)
    assert (pairs.source, pairs.target) == (["good", "x"], ["eins", "drei"])
    assert list(pairs.skipped.values()) == [Skipped(1, f"{path}:2")]
    assert str(caught.value).startswith(f"{path}:2: {next(iter(pairs.skipped))}")

    good.write_text("eins\nzwei\n")
    flipped = read_pairs(
        write(tmp_path, "c.txt", b"x\ny"), write(tmp_path, "d.txt", b"ok\n" + line), skip_bad=True, longest=50
    )
    assert (flipped.source, flipped.target) == (["x"], ["ok"])


def test_control_characters_are_exactly_c0_and_c1_without_tab(tmp_path):
    for code in [*range(0x20), *range(0x7E, 0xA2), 0x2028, 0xFEFF, 0xFFFE]:
        path = write(tmp_path, "a.txt", f"x{chr(code)}y\n")
        is_bad = (code < 0x20 or 0x7F <= code <= 0x9F) and code not in (0x09, 0x0A)
        if is_bad:
            with pytest.raises(BadText, match=f"U\\+{code:04X}"):
                list(open_lines(path))
        else:
            assert "\n".join(open_lines(path)) == f"x{chr(code)}y"


def test_a_line_as_long_as_allowed_is_read_with_any_ending(tmp_path):
    for character in "xö€🦉":
        for mark in ("", "\ufeff"):
            for end in ("", "\n", "\r\n"):
                path = write(tmp_path, "a.txt", f"{mark}{character * 30}{end}")
                assert list(open_lines(path, longest=30)) == [character * 30]
                path = write(tmp_path, "a.txt", f"{mark}{character * 31}{end}")
                with pytest.raises(BadText, match="longer than 30"):
                    list(open_lines(path, longest=30))


def test_a_line_of_10_mb_takes_no_memory_to_refuse_and_the_next_is_read(tmp_path):
    path = write(tmp_path, "a.txt", b"first\n" + b"x" * 10_000_000 + b"\nlast\n")
    with pytest.raises(BadText, match=r"a\.txt:2: line longer than 1000000 characters"):
        list(open_lines(path))
    tracemalloc.start()
    pairs = read_pairs(path, write(tmp_path, "b.txt", "a\nb\nc\n"), skip_bad=True, longest=10_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert pairs.source == ["first", "last"]
    assert pairs.target == ["a", "c"]
    assert peak < 2_000_000
    assert len(list(open_lines(path, longest=10_000_000))[1]) == 10_000_000


def test_blank_lines_are_bad_only_where_text_is_needed(tmp_path):
    path = write(tmp_path, "a.txt", "a\n \u3000\t\nb\n")
    assert list(open_lines(path)) == ["a", " \u3000\t", "b"]
    with pytest.raises(BadText, match=r"a\.txt:2: empty line"):
        list(open_lines(path, needs_text=True))
    with pytest.raises(BadText, match=r"a\.txt:2: empty line"):
        read_pairs(write(tmp_path, "b.txt", "1\n2\n3\n"), path)


@pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("xz", lzma.compress)])
def test_damaged_archives_are_refused_even_when_bad_lines_are_skipped(tmp_path, suffix, pack):
    text = "".join(f"line {n} {random.Random(n).random()}\n" for n in range(2000)).encode()
    data = pack(text)
    other = write(tmp_path, "b.txt", text)
    damaged = {
        "cut": data[: len(data) // 2],
        "cut at the end": data[:-3],
        "flipped": data[:-6] + bytes([data[-6] ^ 1]) + data[-5:],
        "flipped inside": data[:3000] + bytes([data[3000] ^ 0xFF]) + data[3001:],
        "plain": text,
        "header only": data[:4],
    }
    for name, content in damaged.items():
        path = write(tmp_path, f"a.{suffix}", content)
        for skip_bad in (False, True):
            with pytest.raises(BadText) as caught:
                read_pairs(path, other, skip_bad=skip_bad)
            assert str(caught.value).startswith(f"{path}:"), name
            assert caught.value.line >= 1


def test_what_is_no_text_file_is_refused(tmp_path):
    with pytest.raises(BadText, match=r"none\.txt: no such file"):
        list(open_lines(tmp_path / "none.txt"))
    with pytest.raises(BadText, match="is a folder"):
        list(open_lines(tmp_path))
    with pytest.raises(BadText, match="not a directory"):
        list(open_lines(write(tmp_path, "a.txt", "a\n") / "b"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadText, match=r"is a pipe or a device.*'-'"):
        list(open_lines(tmp_path / "pipe"))
    with pytest.raises(BadText, match="is a pipe or a device"):
        list(open_lines("/dev/zero"))
    for suffix, data in (("txt", b""), ("gz", gzip.compress(b"")), ("gz", b""), ("xz", lzma.compress(b""))):
        with pytest.raises(BadText, match=":1: the file is empty"):
            list(open_lines(write(tmp_path, f"e.{suffix}", data)))


def test_standard_input_can_be_closed_or_empty(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(BadText, match="closed"):
        list(open_lines("-"))
    stdin_of(monkeypatch, b"")
    with pytest.raises(BadText, match="standard input:1: the file is empty"):
        list(open_lines("-"))
    with pytest.raises(ValueError, match="cannot both be standard input"):
        read_pairs("-", "-")


@pytest.mark.parametrize(("first", "second"), [(3, 5), (5, 3), (1, 1000)])
@pytest.mark.parametrize("skip_bad", [False, True])
def test_unequal_line_counts_say_both(tmp_path, first, second, skip_bad):
    source = write(tmp_path, "a.en", "x\n" * first)
    target = write(tmp_path, "a.de", "y\n" * second)
    with pytest.raises(BadText) as caught:
        read_pairs(source, target, skip_bad=skip_bad)
    short = source if first < second else target
    assert str(caught.value).startswith(f"{short}:{min(first, second) + 1}: ")
    assert f"{source} has {first}" in str(caught.value)
    assert f"{target} has {second}" in str(caught.value)


def test_pairs_of_two_files(tmp_path):
    source = write(tmp_path, "a.en.gz", gzip.compress(b"one\r\ntwo\r\n\r\nfo\x00ur\r\nfive\r\nsix\r\n"))
    target = write(tmp_path, "a.de.xz", lzma.compress(b"eins\nzwei\ndrei\nvier\n\t\nsechs\n"))
    pairs = read_pairs(source, target, skip_bad=True)
    assert (pairs.source, pairs.target) == (["one", "two", "six"], ["eins", "zwei", "sechs"])
    assert pairs.lines == [1, 2, 6]
    assert pairs.skipped == {
        "empty line": Skipped(2, f"{source}:3"),
        "NUL character": Skipped(1, f"{source}:4"),
    }
    with pytest.raises(BadText, match=r"a\.en\.gz:3: empty line"):
        read_pairs(source, target)
    assert read_pairs(source, target, limit=2) == (["one", "two"], ["eins", "zwei"], {}, [1, 2])
    # The third pair that is good comes after three bad ones.
    assert read_pairs(source, target, limit=3, skip_bad=True).source == ["one", "two", "six"]


def test_pairs_of_one_table(tmp_path, monkeypatch):
    data = 'one\teins\tx\ntwo\t"zwei\ty\nthree\nfour\t \tz\nfive\tfünf\n'.encode()
    path = write(tmp_path, "a.tsv", data)
    pairs = read_pairs(path, skip_bad=True)
    assert (pairs.source, pairs.target) == (["one", "two", "five"], ["eins", '"zwei', "fünf"])
    assert pairs.skipped == {"too few columns": Skipped(1, f"{path}:3"), "empty column": Skipped(1, f"{path}:4")}
    assert read_pairs(path, columns=(2, 0), limit=2)[:2] == (["x", "y"], ["one", "two"])
    with pytest.raises(BadText, match=r"a\.tsv:3: too few columns: 1, expected at least 2"):
        read_pairs(path)
    with pytest.raises(BadText, match=r"no pair left.*too few columns: 5"):
        read_pairs(path, columns=(0, 7), skip_bad=True)
    with pytest.raises(ValueError, match="columns"):
        read_pairs(path, columns=(-1, 0))
    with pytest.raises(ValueError, match="limit"):
        read_pairs(path, limit=0)
    stdin_of(monkeypatch, data)
    assert read_pairs("-", limit=2).target == ["eins", '"zwei']


def test_no_sentence_is_ever_dropped():
    data = (
        b"\xef\xbb\xbfone\n\n caf\xe9 \xff\r\na\x00b\x1b[0m\n" + "u\u2028v\u0085w\n".encode() + b"x" * 500 + b"\n\nlast"
    )
    said = []
    lines = list(read_sentences(io.BytesIO(data), longest=20, warn=said.append))
    assert lines == ["one", "", " caf\ufffd \ufffd", "a b [0m", "u\u2028v w", "x" * 20, "", "last"]
    assert len(lines) == data.count(b"\n") + 1
    assert [message.split(": ")[0] for message in said] == [f"standard input:{n}" for n in (3, 4, 5, 6)]
    assert "U+FFFD: byte 0xe9 at byte 5, which is 'é' in Windows-1252" in said[0]
    assert said[0].endswith("iconv -f CP1252 -t UTF-8")
    assert "control" in said[1]
    assert "cut" in said[3]


def test_random_bytes_give_as_many_lines_as_newlines():
    generator = random.Random(0)
    for _ in range(300):
        data = bytes(
            generator.choice(b"\n\r\x00\x0b\x85\xe2\x80\xa8\xc3\xa4 ab") for _ in range(generator.randrange(60))
        )
        lines = list(read_sentences(io.BytesIO(data), longest=7, warn=lambda message: None))
        assert len(lines) == data.count(b"\n") + (data != b"" and not data.endswith(b"\n"))
        for line in lines:
            assert "\n" not in line
            assert len(line) <= 7


def test_warnings_go_to_standard_error_and_do_not_flood(capsys):
    assert len(list(read_sentences(io.BytesIO(b"\xff\n" * 1000)))) == 1000
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 11
    assert err.count("iconv") == 1
    assert "990 more lines" in err


def test_sentences_come_one_by_one():
    read, write_end = os.pipe()
    with open(read, "rb") as stream, open(write_end, "wb", buffering=0) as other:
        sentences = read_sentences(stream)
        other.write(b"one\n")
        assert next(sentences) == "one"
        other.write(b"two\n")
        assert next(sentences) == "two"


# Tokenizers


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer.train(CORPUS, 400)


@pytest.fixture(scope="module")
def units() -> Tokenizer:
    return Tokenizer.train(["ein M@@ ann geht", "ein H@@ und geht .", "ein"], 100, "units")


STRANGE = [
    "",
    " ",
    "   ",
    "a  b   c ",
    "  leading",
    "tab\there\n",
    "\u2028\u00a0x\u3000",
    "naïve ☃ 漢字 🦉👩‍👩‍👧 e\u0301",
    "1234567890 3.14 ½ ٣",
    "<s> </s> <pad> <unk> [eos] <|endoftext|> special <s>",
    "\x00\x01\x7f\x80\xff",
    "don't, -- ??!",
    "Ġ▁@@ ĊÃ",
    "\ufffd\ufeff",
]


def test_any_text_comes_back_and_nothing_is_unknown(bpe):
    generator = random.Random(0)
    texts = [*STRANGE, *CORPUS]
    for _ in range(300):
        texts.append(
            "".join(
                chr(generator.choice([32, 32, 97, 98, 0xE4, 0x2028, 0x1F989, 0x4E2D, 0x301, 10, 48]))
                for _ in range(generator.randrange(15))
            )
        )
    for text, ids in zip(texts, bpe.encode_batch(texts), strict=True):
        assert ids == bpe.encode(text)
        assert bpe.decode(ids) == text
        assert all(EOS < id < bpe.size for id in ids)
    assert bpe.unknown(texts) == {}
    assert bpe.decode([BOS, *bpe.encode("Zwei Männer"), EOS, PAD, PAD]) == "Zwei Männer"
    assert bpe.decode(torch.tensor(bpe.encode("Zwei"))) == "Zwei"


def test_every_byte_has_an_id_and_bad_bytes_are_shown(bpe):
    assert bpe.size == 400
    assert sorted(bpe.tokens([PAD, UNK, BOS, EOS])) == ["</s>", "<pad>", "<s>", "<unk>"]
    snowman = bpe.encode("☃")
    assert len(snowman) == 4  # a space and three bytes
    assert bpe.tokens(snowman) == ["▁", "\\xe2", "\\x98", "\\x83"]
    assert bpe.decode(snowman[:3]) == "\ufffd"
    assert bpe.tokens(bpe.encode("\n\x00ä ")) == ["▁", "\\n", "\\x00", "ä", "▁"]
    assert "".join(bpe.tokens(bpe.encode("Zwei Männer sind"))) == "▁Zwei▁Männer▁sind"


def test_words_are_the_same_everywhere_and_never_share_tokens(bpe):
    word = bpe.encode("Männer")
    assert bpe.encode("Männer Männer") == word * 2
    assert bpe.encode("23") == bpe.encode("2") + bpe.encode("x3")[-1:]
    assert bpe.tokens(bpe.encode("1995 in")) == ["▁", "1", "9", "9", "5", "▁in"]
    # However often they come together, punctuation and digits do not merge with words.
    glued = Tokenizer.train(["man.man.man 23,23,23 man9"] * 50, 300)
    for token in glued.tokens(range(glued.size))[4 + 256 :]:
        text = token.removeprefix("▁")
        assert text.isalpha() or text == "" or len(text) == 1, token


@pytest.mark.parametrize(
    "text", ["Zwei Männer, sind im 23. Freien!", "  a  b ", "ü\u00a0Männer  x\u2028y z", "😀 🦉!", "x"]
)
def test_words_number_the_tokens(bpe, text):
    ids, places = bpe.words(text)
    assert ids == bpe.encode(text)
    words = text.split()
    assert bpe.split_words(text) == words
    assert len(places) == len(ids)
    assert places == sorted(places)
    assert set(places) == set(range(len(words)))
    for number, word in enumerate(words):
        own = bpe.decode(id for id, place in zip(ids, places, strict=True) if place == number)
        assert own.strip() == word


def test_blank_text_has_no_words(bpe, units):
    for tokenizer in (bpe, units):
        assert tokenizer.words("") == ([], [])
        assert tokenizer.words("  ") == ([], [])


TRAINING = """
import random, runpy, zlib
Tokenizer = runpy.run_path({path!r})["Tokenizer"]
draw = random.Random(1)
words = ["".join(draw.choice("abcdeäö") for _ in range(draw.randrange(1, 6))) for _ in range(2400)]
lines = [" ".join(words[n : n + 8]) for n in range(0, 2400, 8)]
tokenizer = Tokenizer.train(lines, 800)
assert tokenizer.pieces == Tokenizer.train(lines[::-1], 800).pieces
print(tokenizer.size, zlib.crc32(repr(tokenizer.pieces).encode()))
"""


def test_training_is_the_same_in_every_process_and_order():
    """Words of few letters, so that many pairs come equally often."""
    found = set()
    for threads in ("1", "3", "1"):
        command = [sys.executable, "-c", TRAINING.format(path=tokenizer_file.__file__)]
        environment = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        found.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert found == {"800 3430106868\n"}


def test_merges_break_ties_by_the_sorted_bytes():
    """All pairs come once: the first in the order of the alphabet is merged first."""
    tokenizer = Tokenizer.train(["zy", "ba", "dc"], 4 + 256 + 3)
    assert tokenizer.vocabulary[256:] == ["ba", "dc", "zy"]


def test_errors_in_the_text_reach_the_one_who_trains(tmp_path):
    path = write(tmp_path, "a.txt", b"good\nb\xff\n")
    with pytest.raises(BadText, match=r"a\.txt:2: not UTF-8"):
        Tokenizer.train(open_lines(path), 300)
    for kind, size in (("bpe", 259), ("units", 4)):
        with pytest.raises(ValueError, match=f"at least {size + 1}, got {size}"):
            Tokenizer.train(["a"], size, kind)
    with pytest.raises(ValueError, match="'sounds', expected one of: bpe, uncased, units"):
        Tokenizer.train(["a"], 300, "sounds")
    with pytest.raises(ValueError, match="minimum"):
        Tokenizer.train(["a"], 300, minimum=0)
    for kind in ("bpe", "units"):
        for lines, minimum in (([], 1), (["ab cd"], 2)):
            with pytest.raises(ValueError, match="empty, or nothing in it comes often enough"):
                Tokenizer.train(lines, 300, kind, minimum=minimum)
    assert Tokenizer.train(["aaa"], 260).size == 260


def test_rare_merges_and_units_can_be_left_out():
    lines = ["ab ab ab cd cd ef"]
    assert Tokenizer.train(lines, 400, minimum=3).vocabulary[256:] == ["ab", "Ġab"]
    assert Tokenizer.train(lines, 400, "units", minimum=2).pieces == ["ab", "cd"]


def test_units_are_the_most_frequent_ones(units):
    assert units.pieces == ["ein", "geht", ".", "H@@", "M@@", "ann", "und"]
    assert units.size == 11
    assert Tokenizer.train(["b a c b"], 6, "units").pieces == ["b", "a"]
    assert units.encode("ein H@@ ann  geht") == [4, 7, 9, 5]
    assert units.encode_batch(["ein", "", "geht ."]) == [[4], [], [5, 6]]
    assert units.tokens([BOS, 7, 9, UNK, EOS]) == ["<s>", "H@@", "ann", "<unk>", "</s>"]


def test_units_join_to_words(units):
    text = "ein H@@ und geht M@@ ann ."
    assert units.decode(units.encode(text)) == "ein Hund geht Mann ."
    ids, places = units.words(text)
    assert ids == units.encode(text)
    assert places == [0, 1, 1, 2, 3, 3, 4]
    assert units.split_words(text) == ["ein", "Hund", "geht", "Mann", "."]
    # A last unit that nothing follows ends its word.
    assert units.decode(units.encode("ein H@@")) == "ein H"
    assert units.words("ein H@@") == ([4, 7], [0, 1])
    assert units.split_words("ein H@@") == ["ein", "H"]
    assert units.decode([BOS, *units.encode("ein H@@ und"), EOS, PAD]) == "ein Hund"
    for odd in ("@@", "ein @@", "@@ ein", "a @@ b @@", "M@@ M@@ M@@"):
        ids, places = units.words(odd)
        assert set(places) == set(range(len(units.split_words(odd))))


def test_unknown_units_are_counted(units):
    texts = ["ein Kater geht", "<unk> Kater", "ein"]
    assert units.unknown(texts) == {"Kater": 2, "<unk>": 1}
    assert units.encode(texts[1]) == [UNK, UNK]
    assert units.decode(units.encode(texts[0])) == "ein <unk> geht"
    # Text that looks like a special token is a unit like any other.
    plain = Tokenizer.train(["<s> <pad> x"], 100, "units")
    assert min(plain.encode("<s> <pad> x")) > EOS
    assert plain.decode(plain.encode("<s> <pad> x")) == "<s> <pad> x"


@pytest.mark.parametrize("kind", ["bpe", "units"])
def test_saved_and_loaded_is_the_same(tmp_path, kind):
    tokenizer = Tokenizer.train(CORPUS, 350, kind)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    tokenizer.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]
    loaded = Tokenizer.load(path)
    assert (loaded.kind, loaded.size, loaded.vocabulary) == (kind, tokenizer.size, tokenizer.vocabulary)
    for text in [*CORPUS, *STRANGE]:
        assert loaded.encode(text) == tokenizer.encode(text)
        assert loaded.decode(loaded.encode(text)) == tokenizer.decode(tokenizer.encode(text))


def test_damaged_files_are_refused_in_words(tmp_path, bpe, units):
    path = tmp_path / "t.json"
    bpe.save(path)
    whole = path.read_text()
    content = json.loads(whole)
    form = {"format": content["format"]}
    bad = {
        "": "no JSON",
        whole[:-50]: "no JSON",
        "[" * 100_000: "no JSON",
        "[]": "not a tokenizer of Regard",
        '{"version": "1.0", "model": {}}': "not a tokenizer of Regard",
        json.dumps(content | {"format": "regard tokenizer 2"}): "not a tokenizer of Regard",
        json.dumps(form): "damaged",
        json.dumps(content | {"kind": "units"}): "damaged",
        json.dumps(content | {"kind": ["bpe"]}): "damaged",
        json.dumps(form | {"kind": "bpe", "pieces": [["a", "bc"]]}): "damaged",
        json.dumps(form | {"kind": "bpe", "pieces": [["a", "b"], ["a", "b"]]}): "damaged",
        json.dumps(form | {"kind": "bpe", "pieces": [["a", 1]]}): "damaged",
        json.dumps(form | {"kind": "bpe", "pieces": ["ab"]}): "damaged",
        json.dumps(form | {"kind": "units", "pieces": ["a", "a"]}): "damaged",
        json.dumps(form | {"kind": "units", "pieces": ["a", ""]}): "damaged",
        json.dumps(form | {"kind": "units", "pieces": [["a"]]}): "damaged",
    }
    for text, words in bad.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=words) as caught:
            Tokenizer.load(path)
        assert str(caught.value).startswith(f"{path}: ")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not a tokenizer of Regard"):
        Tokenizer.load(path)
    for place in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(ValueError, match="cannot read the tokenizer"):
            Tokenizer.load(place)


def test_ids_of_another_vocabulary_are_refused(bpe, units):
    for tokenizer in (bpe, units):
        for ids in ([tokenizer.size], [-1]):
            for method in (tokenizer.decode, tokenizer.tokens):
                with pytest.raises(ValueError, match=r"not in the vocabulary of \d+"):
                    method(ids)


def test_long_lines_and_many_tokens_are_encoded(bpe):
    ids = bpe.encode("x" * 1_000_000)
    assert len(ids) == 1_000_001
    assert bpe.decode(ids) == "x" * 1_000_000
    assert len(bpe.encode("7" * 100_000)) == 100_001
    ids, places = bpe.words("Zwei " * 20_000)
    assert places[-2] == 19_999
    assert len(ids) >= 20_000


# Batches


def corpus(count: int, seed: int = 0, longest: int = 30) -> tuple[list[list[int]], list[list[int]]]:
    generator = random.Random(seed)

    def side() -> list[list[int]]:
        return [[generator.randrange(4, 99) for _ in range(generator.randrange(longest))] for _ in range(count)]

    return side(), side()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize(("count", "tokens"), [(1, 64), (7, 32), (500, 32), (500, 256), (500, 100_000)])
def test_every_pair_comes_once_an_epoch_within_the_budget(count, tokens, multiple, shuffle):
    source, target = corpus(count)
    batches = Batches(source, target, tokens=tokens, seed=3, shuffle=shuffle, multiple=multiple)
    assert len(batches) == count
    for epoch in (0, 1, 5):
        seen = []
        for i in range(batches.count(epoch)):
            batch = batches.get(epoch, i)
            rows = len(batch.indices)
            assert batch.source.shape[1] % multiple == batch.target_in.shape[1] % multiple == 0
            assert rows * max(batch.source.shape[1], batch.target_in.shape[1]) <= tokens
            assert batch.target_in.shape == batch.target_out.shape
            for row, pair in enumerate(batch.indices.tolist()):
                parts = [
                    (batch.source, batch.source_keep, [*source[pair], EOS]),
                    (batch.target_in, batch.target_keep, [BOS, *target[pair]]),
                    (batch.target_out, batch.target_keep, [*target[pair], EOS]),
                ]
                for ids, keep, expected in parts:
                    assert ids.dtype == torch.int64
                    padding = ids.shape[1] - len(expected)
                    assert ids[row].tolist() == expected + [PAD] * padding
                    if keep is None:
                        assert padding == 0
                    else:
                        assert keep[row].tolist() == [True] * len(expected) + [False] * padding
            for keep in (batch.source_keep, batch.target_keep):
                assert keep is None or not keep.all()
            seen += batch.indices.tolist()
        assert sorted(seen) == list(range(count))


def plans(batches: Batches, epoch: int) -> list[list[int]]:
    return [part.tolist() for part in batches.epoch(epoch)]


def test_the_order_depends_on_seed_and_epoch_alone():
    source, target = corpus(400)

    def made(seed: int) -> Batches:
        return Batches(source, target, tokens=300, seed=seed)

    first, second = made(1), made(1)
    straight = [plans(first, epoch) for epoch in range(4)]
    np.random.seed(7)
    random.seed(7)
    # Another way round, with batches taken in between.
    second.get(3, 2)
    assert [plans(second, epoch) for epoch in (2, 0, 3, 1)] == [straight[epoch] for epoch in (2, 0, 3, 1)]
    torch.testing.assert_close(first.get(2, 5).source, made(1).get(2, 5).source)
    assert plans(made(2), 0) != straight[0]
    # (1, 2) and (2, 1) are different, as are all others.
    every = [plans(made(seed), epoch) for seed in range(4) for epoch in range(4)]
    assert all(one != other for n, one in enumerate(every) for other in every[:n])
    state = (np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist())
    plans(made(5), 5)
    assert state == (np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist())


def test_the_order_is_the_one_of_last_year():
    """A change of order would break the resuming of runs that are under way."""
    source = [[9] * (n * 7 % 11) for n in range(12)]
    target = [[9] * (n * 5 % 9) for n in range(12)]
    batches = Batches(source, target, tokens=30, seed=42)
    assert plans(batches, 1) == [[4, 5, 1], [3], [7, 9, 6], [0, 11, 2, 8, 10]]


def test_batches_are_mixed_anew_and_hold_similar_lengths():
    source, target = corpus(3000, longest=60)
    batches = Batches(source, target, tokens=2000)
    groups = [{frozenset(part) for part in plans(batches, epoch)} for epoch in (0, 1)]
    assert len(groups[0] & groups[1]) <= 0.1 * len(groups[0])
    lengths = [max(batches.lengths[part]) for part in batches.epoch(0)]
    assert lengths != sorted(lengths)
    padded = sum(len(part) * max(batches.lengths[part]) for part in batches.epoch(0))
    assert padded <= 1.1 * batches.lengths.sum()
    # About as few as there could be.
    assert batches.count(0) <= 1.15 * batches.lengths.sum() / 2000 + 1


def test_without_shuffling_batches_go_from_short_to_long():
    source, target = corpus(300)
    batches = Batches(source, target, tokens=200, seed=1, shuffle=False)
    assert (
        plans(batches, 0) == plans(batches, 9) == plans(Batches(source, target, tokens=200, seed=2, shuffle=False), 4)
    )
    lengths = [batches.lengths[n] for part in plans(batches, 0) for n in part]
    assert lengths == sorted(lengths)


def test_what_cannot_be_batched_is_refused_in_words():
    with pytest.raises(ValueError, match="pair 2 is too long: it takes 11 tokens and a batch has at most 10"):
        Batches([[5], [5] * 10], [[5], [5]], tokens=10)
    with pytest.raises(ValueError, match="pair 1 is too long: it takes 16 tokens"):
        Batches([[5]], [[5] * 8], tokens=10, multiple=8)
    assert Batches([[5] * 9], [[5]], tokens=10).count(0) == 1
    with pytest.raises(ValueError, match="got 1 and 2"):
        Batches([[5]], [[5], [6]], tokens=10)
    with pytest.raises(ValueError, match="no pair"):
        Batches([], [], tokens=10)
    with pytest.raises(ValueError, match="seed"):
        Batches([[5]], [[5]], tokens=10, seed=-1)
    batches = Batches([[5]], [[5]], tokens=10)
    for epoch, i in ((0, 1), (0, -1)):
        with pytest.raises(IndexError, match="has 1 batches"):
            batches.get(epoch, i)
    with pytest.raises(ValueError, match="epochs are counted from 0"):
        batches.epoch(-1)


def test_long_pairs_are_dropped_and_counted():
    source, target = [[5], [5] * 4, [6], []], [[7], [7], [7] * 5, []]
    short = keep_short(source, target, 4)
    assert short == ([[5], [5] * 4, []], [[7], [7], []], [0, 1, 3], 1)
    assert keep_short(source, target, 3).dropped == 2
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        keep_short(source, target[:2], 4)


def test_batches_move_to_a_device():
    batch = Batches([[5], [5, 6]], [[7], [7]], tokens=100).get(0, 0).to("meta")
    assert batch.source.device.type == batch.source_keep.device.type == batch.indices.device.type == "meta"
    assert batch.target_keep is None


def test_a_million_pairs_are_planned_quickly():
    lengths = np.random.Generator(np.random.PCG64(0)).integers(0, 50, 1_000_000)
    batches = Batches([()] * 1_000_000, [()] * 1_000_000, tokens=4096)
    batches.lengths = lengths + 1
    start = time.process_time()
    plan = batches.epoch(1)
    assert time.process_time() - start < 3  # about 0.4 s on a quiet machine
    assert np.array_equal(np.sort(np.concatenate(plan)), np.arange(1_000_000))


def test_similar_lengths_under_a_budget():
    lengths = [3, 9, 1, 4, 4, 12, 2, 9]
    groups = list(similar(lengths, 12))
    assert sorted(place for group in groups for place in group) == list(range(8))
    assert [[lengths[place] for place in group] for group in groups] == [[12], [9], [9], [4, 4, 3], [2, 1]]
    assert list(similar([50], 12)) == [[0]]
    assert list(similar([], 12)) == []


def test_padded_rows():
    ids, keep = padded([[5, 6, 7], [8]], torch.device("cpu"))
    assert ids.tolist() == [[5, 6, 7], [8, PAD, PAD]]
    assert keep.tolist() == [[True] * 3, [True, False, False]]
    assert padded([[5], [6]], torch.device("cpu"))[1] is None


def test_stems_are_beginnings_that_words_share(tmp_path):
    text = "perceptive film\nperceptively filmed film …"
    stems = Tokenizer.train([text], 100, "stems")
    units = ("perceptive", "perceptively", "film", "filmed", "…", "\n", "perc…", "perce…", "film…", "filme…")
    assert sorted(stems.vocabulary) == sorted(units)
    assert stems.decode(stems.encode(text)) == text
    # what is not known is its longest beginning, or unknown
    assert stems.decode(stems.encode("perceiving percolate filming films per x")) == (
        "perce… perc… film… film… <unk> <unk>"
    )
    assert stems.unknown(["perceiving per"]) == {"per": 1}
    found = {
        stems.vocabulary[id - 4]: stems.names(row[row > 0].tolist()) for id, row in enumerate(stems.stems) if id >= 4
    }
    assert found == {
        "perceptive": ["perc…", "perce…"],
        "perceptively": ["perc…", "perce…"],
        "film": ["film…"],
        "filmed": ["film…", "filme…"],
        "perce…": ["perc…"],
        "filme…": ["film…"],
    } | {unit: [] for unit in ("perc…", "film…", "…", "\n")}
    assert not stems.stems[:4].any()
    assert stems.words("perceiving a film") == ([stems.ids["perce…"], 1, stems.ids["film"]], [0, 1, 2])
    stems.save(tmp_path / "stems.json")
    assert Tokenizer.load(tmp_path / "stems.json").encode(text + " films") == stems.encode(text + " films")
    assert Tokenizer.train([text], 100, "words").stems is None
