"""Captions of pictures, in all their forms."""

import gzip
import json

import pytest

from regard.data.captioned import read_captions
from regard.data.text import BadText, Skipped


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_of_one_picture_are_gathered(tmp_path):
    path = write(tmp_path / "a.csv", 'image,caption\nb.jpg,"A dog, running ."\na.jpg,Two  men .\nb.jpg,A dog .\n')
    found = read_captions(path)
    assert found.pictures == ["b.jpg", "a.jpg"]
    assert found.captions == [["A dog, running .", "A dog ."], ["Two men ."]]


def test_further_columns_and_blank_ones(tmp_path):
    path = write(tmp_path / "a.tsv", "0\tone\ttwo\n1\tthree\t\n")
    found = read_captions(path, columns=(0, 1, 2))
    assert found == (["0", "1"], [["one", "two"], ["three"]], {})


def test_json_lines(tmp_path):
    rows = [{"file": "a.png", "text": ["one", "two"]}, {"file": 3, "text": "three"}]
    with gzip.open(tmp_path / "a.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    found = read_captions(tmp_path / "a.jsonl.gz", columns=("file", "text"))
    assert (found.pictures, found.captions) == (["a.png", "3"], [["one", "two"], ["three"]])


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("a.txt", "x", "does not say where its captions are: name a file that ends in .csv"),
        ("a.csv", "image,text\na,b\n", "no column 'caption'"),
        ("a.csv", "image,caption\na\n", "a.csv:2: too few columns"),
        ("a.csv", "image,caption\na, \n", "a.csv:2: empty caption"),
        ("a.csv", "image,caption\n ,b\n", "a.csv:2: empty picture"),
        ("a.csv", "image,caption\n", "no caption left"),
        ("a.jsonl", "{}\n", "no field 'image'"),
        ("a.jsonl", '{"image": "a", "caption": [1]}\n', "a caption is not a string"),
        ("a.jsonl", '{"image": ["a"], "caption": "b"}\n', "neither a name nor a number"),
        ("a.jsonl", '{"image": "a", "caption": "b\\u0007"}\n', "control character U.0007"),
        ("a.jsonl", '{"image": "a", "caption": "b\\ud800"}\n', "half of a character"),
        ("a.jsonl", "[]\n", "not a JSON object"),
    ],
)
def test_faults(tmp_path, name, text, match):
    with pytest.raises(ValueError, match=match):
        read_captions(write(tmp_path / name, text))


def test_columns_are_a_picture_and_captions(tmp_path):
    path = write(tmp_path / "a.csv", "image,caption\na,b\n")
    with pytest.raises(ValueError, match=r"one or more of captions, got \['image'\]"):
        read_captions(path, columns=("image",))
    with pytest.raises(ValueError, match="all names or all numbers"):
        read_captions(path, columns=("image", 1))


def test_bad_lines_are_skipped_and_counted(tmp_path):
    path = write(tmp_path / "a.csv", "image,caption\na.jpg,one\nb.jpg,\nc.jpg,\n")
    found = read_captions(path, skip_bad=True)
    assert found.pictures == ["a.jpg"]
    assert found.skipped == {"empty caption": Skipped(2, f"{path}:3")}
    with pytest.raises(BadText, match=r"no caption left after skipping bad lines \(empty caption: 1\)"):
        read_captions(write(tmp_path / "b.csv", "image,caption\na,\n"), skip_bad=True)
