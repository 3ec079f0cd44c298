"""Captions of pictures, in all their forms."""

import gzip
import json

import numpy as np
import pytest
from PIL import Image

from regard.data.captioned import read_captioned, read_captions
from regard.data.images.decode import BadImage
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
        ("a.txt", "", "a.txt:1: the file is empty"),
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


def paint(path, shade, size=(10, 8)):
    Image.new("RGB", size, (shade, 255 - shade, 7)).save(path)
    return path


class TestPictures:
    def test_files_of_a_folder(self, tmp_path):
        (tmp_path / "photos").mkdir()
        for shade in (0, 200):
            paint(tmp_path / "photos" / f"{shade}.png", shade)
        captions = write(tmp_path / "a.csv", "image,caption\n200.png,bright\n0.png,dark\n200.png,light\n")
        found = read_captioned(captions, tmp_path / "photos")
        assert found.captions == [["bright", "light"], ["dark"]]
        assert (found.size, found.channels) == ((8, 10), 3)
        assert found.pixels[:, 0, 0, 0].tolist() == [200, 0]
        assert found.names == [str(tmp_path / "photos" / name) for name in ("200.png", "0.png")]
        write(tmp_path / "photos" / "a.csv", captions.read_text())
        assert (read_captioned(tmp_path / "photos" / "a.csv", size=(4, 4)).pixels.shape) == (2, 3, 4, 4)
        second = found.take(np.array([1]))
        assert (second.captions, second.names[0][-5:], len(second.pixels)) == ([["dark"]], "0.png", 1)

    def test_an_array(self, tmp_path):
        images = np.arange(3 * 4 * 6 * 3, dtype=np.uint8).reshape(3, 4, 6, 3)
        np.savez(tmp_path / "a.npz", images=images)
        captions = write(tmp_path / "a.tsv", "2\tlast\n0\tfirst\n")
        found = read_captioned(captions, tmp_path / "a.npz", columns=(0, 1))
        assert np.array_equal(found.pixels, images[[2, 0]].transpose(0, 3, 1, 2))
        assert found.names == ["2", "0"]
        for name in ("3", "-1", "dog.jpg"):
            write(tmp_path / "b.tsv", f"{name}\tx\n")
            with pytest.raises(BadText, match=f"no picture is called '{name}'.*by their numbers, 0 to 2"):
                read_captioned(tmp_path / "b.tsv", tmp_path / "a.npz", columns=(0, 1))
        np.savez(tmp_path / "c.npz", x=images)
        with pytest.raises(BadImage, match="has no array images: it has x"):
            read_captioned(captions, tmp_path / "c.npz", columns=(0, 1))

    def test_broken_pictures(self, tmp_path):
        paint(tmp_path / "a.png", 9)
        (tmp_path / "b.png").write_bytes(b"no picture")
        captions = write(tmp_path / "a.csv", "image,caption\nb.png,one\na.png,two\nc.png,three\n")
        with pytest.raises(BadImage, match=r"b\.png: is no image that can be read"):
            read_captioned(captions)
        found = read_captioned(captions, skip_bad=True)
        assert found.captions == [["two"]]
        assert sum(part.count for part in found.skipped.values()) == 2
        with pytest.raises(BadImage, match="no such folder"):
            read_captioned(captions, tmp_path / "photos")
        (tmp_path / "other").mkdir()
        with pytest.raises(BadImage, match=r"names no picture of its own folder, among them 'b\.png': give the folder"):
            read_captioned(write(tmp_path / "other" / "a.csv", captions.read_text()))
        with pytest.raises(BadImage, match="is no folder of pictures"):
            read_captioned(captions, captions)
