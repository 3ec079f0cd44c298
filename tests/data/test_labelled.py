"""Texts with labels: every format reads the same, and what is bad is said with file and line."""

import gzip
import json
import lzma
import os

import pytest

from regard.data.labelled import class_names, class_numbers, read_labelled
from regard.data.text import BadText

EXAMPLES = [
    ("a fine film", "good"),
    ('he said "no", twice', "bad"),
    ("über\u2028alles", "good"),
    ("1,5 stars\tor so", "bad"),
]


def jsonl(examples):
    return "".join(json.dumps({"id": 7, "label": label, "text": text}) + "\n" for text, label in examples)


def quoted(examples):
    def cell(text):
        return '"' + text.replace('"', '""') + '"'

    return "label,text\n" + "".join(f"{cell(label)},{cell(text)}\n" for text, label in examples)


def write(path, text):
    data = text if isinstance(text, bytes) else text.encode()
    with {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)(path, "wb") as file:
        file.write(data)
    return path


@pytest.mark.parametrize("packing", ["", ".gz", ".xz"])
@pytest.mark.parametrize(("name", "text"), [("a.csv", quoted(EXAMPLES)), ("a.jsonl", jsonl(EXAMPLES))])
def test_formats_read_the_same(tmp_path, name, text, packing):
    found = read_labelled(write(tmp_path / (name + packing), text))
    assert list(zip(found.texts, found.labels, strict=True)) == EXAMPLES
    assert found.skipped == {}


def test_tsv_has_no_quotes_and_columns_by_name_or_number(tmp_path):
    rows = 'sentence\tlabel\nsay "cheese\t1\n" twice\t0\n'
    named = write(tmp_path / "named.tsv", rows)
    bare = write(tmp_path / "bare.tsv", rows.split("\n", 1)[1])
    for found in (read_labelled(named, columns=("sentence", "label")), read_labelled(bare, columns=(0, 1))):
        assert found.texts == ['say "cheese', '" twice']
        assert found.labels == ["1", "0"]


def test_two_files_line_by_line(tmp_path):
    texts = write(tmp_path / "texts.xz", "one\r\ntwo\n")
    labels = write(tmp_path / "labels", "\ufeffa\n b \n")
    assert read_labelled(texts, labels)[:2] == (["one", "two"], ["a", "b"])
    short = write(tmp_path / "short", "a\n")
    with pytest.raises(BadText, match=r"short:2: the files do not have equally many lines"):
        read_labelled(texts, short)


def test_line_breaks_inside_a_text(tmp_path):
    inside = "first\nsecond, third"
    for path in (
        write(tmp_path / "a.csv", quoted([(inside, "x")])),
        write(tmp_path / "a.jsonl", jsonl([(inside, "x")])),
    ):
        assert read_labelled(path).texts == [inside]
    windows = write(tmp_path / "w.csv", quoted([("first\r\nsecond", "x")]).replace("\n", "\r\n").replace("\r\r", "\r"))
    assert read_labelled(windows).texts == ["first\nsecond"]


def test_labels_of_json_may_be_numbers_and_truths(tmp_path):
    lines = [{"text": "a", "label": 1}, {"text": "b", "label": True}, {"text": "c", "label": "one"}]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert read_labelled(path).labels == ["1", "true", "one"]


BAD = {
    "csv, empty label": ("a.csv", "text,label\nx,1\ny,\n", 3, "empty label"),
    "csv, empty text": ("a.csv", "text,label\n ,1\n", 2, "empty text"),
    "csv, few": ("a.csv", "text,label\nx\n", 2, "too few columns"),
    "csv, blank line": ("a.csv", "text,label\n\nx,1\n", 2, "too few columns"),
    "csv, quote never closed": ("a.csv", 'text,label\n"a\nb\n', 2, "not CSV"),
    "csv, quote inside": ("a.csv", 'text,label\n"a"b,1\n', 2, "not CSV"),
    "csv, UTF-8 inside a record": ("a.csv", b'text,label\n"a\n\xff",1\n', 3, "not UTF-8"),
    "csv, no such column": ("a.csv", "text,class\nx,1\n", 1, "no column 'label'"),
    "tsv, few": ("a.tsv", "text\tlabel\nx 1\n", 2, "too few columns"),
    "tsv, NUL": ("a.tsv", "text\tlabel\na\0\t1\n", 2, "NUL"),
    "json, not": ("a.jsonl", '{"text": "a", "label": 1}\n{"text"\n', 2, "not JSON"),
    "json, deep": ("a.jsonl", "[" * 200_000 + "\n", 1, "not JSON"),
    "json, list": ("a.jsonl", '["text"]\n', 1, "not a JSON object"),
    "json, no field": ("a.jsonl", '{"text": "a"}\n', 1, "no field 'label'"),
    "json, number for text": ("a.jsonl", '{"text": 7, "label": 1}\n', 1, "the text is not a string"),
    "json, fraction for label": ("a.jsonl", '{"text": "a", "label": 0.5}\n', 1, "the label is neither"),
    "json, half of a character": ("a.jsonl", '{"text": "\\ud800", "label": 1}\n', 1, "not UTF-8"),
    "json, escaped NUL": ("a.jsonl", '{"text": "a\\u0000", "label": 1}\n', 1, "NUL"),
    "json, line break in a label": ("a.jsonl", '{"text": "a", "label": "b\\nc"}\n', 1, "control character"),
    "empty": ("a.csv", "", 1, "the file is empty"),
}


@pytest.mark.parametrize(("name", "text", "line", "reason"), BAD.values(), ids=list(BAD))
def test_faults_name_file_and_line(tmp_path, name, text, line, reason):
    path = write(tmp_path / name, text)
    with pytest.raises(BadText) as error:
        read_labelled(path)
    assert str(error.value).startswith(f"{path}:{line}: ")
    assert reason in str(error.value)


def test_skip_bad_leaves_out_and_counts(tmp_path):
    path = write(tmp_path / "a.csv", b'text,label\nx,1\n\xff,1\ny,\n"a\n\xff",1\nz,0\nw,\n')
    found = read_labelled(path, skip_bad=True)
    assert (found.texts, found.labels) == (["x", "z"], ["1", "0"])
    assert {reason: tuple(part) for reason, part in found.skipped.items()} == {
        "not UTF-8": (2, f"{path}:3"),
        "empty label": (2, f"{path}:4"),
    }
    nothing = write(tmp_path / "b.csv", "text,label\n,1\n")
    with pytest.raises(BadText, match="no example left"):
        read_labelled(nothing, skip_bad=True)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda folder: folder, "is a folder"),
        (lambda folder: folder / "none.csv", "no such file"),
        (lambda folder: write(folder / "texts.txt", "a\n"), "does not say where its labels are"),
        (lambda folder: write(folder / "texts.txt", ""), "texts.txt:1: the file is empty"),
        (lambda folder: folder / "none.txt", "no such file"),
        (lambda folder: "-", "standard input: does not say where its labels are"),
        (lambda folder: (os.mkfifo(folder / "pipe.csv"), folder / "pipe.csv")[1], "is a pipe"),
    ],
    ids=["folder", "missing", "unknown format", "empty", "missing text", "standard input", "pipe"],
)
def test_no_such_file(tmp_path, make, part):
    path = make(tmp_path)
    with pytest.raises(ValueError, match=part):
        read_labelled(path if path != tmp_path else tmp_path.rename(tmp_path.with_suffix(".csv")))


def test_classes_are_sorted_as_numbers_or_text():
    assert class_names(["10", "9", "-1"], "a") == ["-1", "9", "10"]
    assert class_names(["b", "10", "9"], "a") == ["10", "9", "b"]
    assert class_numbers(["9", "10"], ["9", "10"], "a") == [0, 1]
    with pytest.raises(ValueError, match="at least two labels, got only 'x'"):
        class_names(["x", "x"], "a")
    with pytest.raises(ValueError, match="is that the column of the labels"):
        class_names(map(str, range(2000)), "a")
    with pytest.raises(ValueError, match=r"a.csv: example 2 has the label 'c', the classes are a, b"):
        class_numbers(["a", "c"], ["a", "b"], "a.csv")
