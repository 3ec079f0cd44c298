"""Labelled images are read in every form, and what is broken is refused with its name or skipped and counted."""

import io
import random

import numpy as np
import pytest
from painted import bomb, encoded, painted, write_cifar, write_folders, write_idx
from PIL import Image

from regard.data.images import decode as decoding
from regard.data.images import formats
from regard.data.images.decode import FORMATS, BadImage, decode, decode_file, from_image
from regard.data.images.read import hold_out_images, read_images


def test_folders_are_classes(tmp_path):
    folder = write_folders(tmp_path / "set", 3)
    (folder / "red" / ".DS_Store").write_bytes(b"junk")
    (folder / "blue" / "Thumbs.db").write_bytes(b"junk")
    (folder / ".hidden").mkdir()
    deeper = folder / "green" / "more"
    deeper.mkdir()
    (deeper / "x.png").write_bytes(encoded(painted("green", 7)))
    found = read_images(folder)
    assert found.classes == ["blue", "green", "red"]
    assert found.pixels.shape == (10, 3, 12, 12)
    assert found.labels.count("green") == 4
    np.testing.assert_array_equal(found.pixels[found.labels.index("red")], painted("red", 0).transpose(2, 0, 1))


def test_parts_of_a_set_are_not_taken_for_classes(tmp_path):
    for part in ("train", "val"):
        write_folders(tmp_path / part, 1)
    with pytest.raises(BadImage, match="train, val: they look like parts of a set"):
        read_images(tmp_path)


def test_folders_without_images_are_refused(tmp_path):
    with pytest.raises(BadImage, match="has no folders"):
        read_images(tmp_path)
    write_folders(tmp_path, 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadImage, match="empty: has no images"):
        read_images(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "path,label\nred/000.png,warm\nblue/000.png,cold\n"),
        ("a.tsv", "path\tlabel\nred/000.png\twarm\nblue/000.png\tcold\n"),
    ],
)
def test_tables_of_paths(tmp_path, name, text):
    write_folders(tmp_path, 1)
    (tmp_path / name).write_text(text)
    found = read_images(tmp_path / name)
    assert found.labels == ["warm", "cold"]
    assert found.classes == ["cold", "warm"]


@pytest.mark.parametrize("packed", [True, False])
def test_idx(tmp_path, packed):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 5, 7), np.uint8)
    labels = np.arange(20) % 3
    path = write_idx(tmp_path, pixels, labels, packed=packed)
    write_idx(tmp_path, pixels[:4], labels[:4], "t10k", packed=packed)
    for where in (path, tmp_path):
        found = read_images(where)
        np.testing.assert_array_equal(found.pixels[:, 0], pixels)
        assert found.pixels.flags.writeable  # PyTorch warns of others
        assert found.labels == [str(label) for label in labels]
    assert len(read_images(tmp_path, part="test").labels) == 4
    for file in tmp_path.glob("train-labels*"):
        file.unlink()
    with pytest.raises(BadImage, match=r"has no labels beside it: expected .*train-labels-idx1-ubyte"):
        read_images(path)


def test_idx_packed_and_unpacked_under_either_name(tmp_path):
    """Of a file that is there twice, one is read."""
    pixels, labels = np.random.default_rng(0).integers(0, 256, (6, 3, 3), np.uint8), np.arange(6)
    for packed in (True, False):
        write_idx(tmp_path, pixels, labels, packed=packed)
    assert len(read_images(tmp_path).labels) == 6
    for file in tmp_path.iterdir():
        file.rename(file.with_name(file.name.replace("-idx", ".idx")))
    np.testing.assert_array_equal(read_images(tmp_path).pixels[:, 0], pixels)


def test_idx_that_lies_about_its_length(tmp_path):
    pixels = np.zeros((4, 3, 3), np.uint8)
    path = write_idx(tmp_path, pixels, np.arange(4), packed=False)
    whole = path.read_bytes()
    for data in (whole[:-1], whole + b"x"):
        path.write_bytes(data)
        with pytest.raises(BadImage, match="is not as long as it says"):
            read_images(path)
    path.write_bytes(whole[:4] + b"\xff" * 12)
    with pytest.raises(BadImage, match="too large for the memory"):
        read_images(path)
    path.write_bytes(b"\x01\x02")
    with pytest.raises(BadImage, match="is no idx file"):
        read_images(path)
    packed = write_idx(tmp_path, np.random.default_rng(0).integers(0, 256, (40, 9, 9), np.uint8), np.arange(40))
    packed.write_bytes(packed.read_bytes()[:200])
    with pytest.raises(BadImage, match=r"ubyte\.gz"):
        read_images(packed)


def test_cifar(tmp_path):
    draw = np.random.default_rng(0)
    pixels, labels = draw.integers(0, 256, (6, 3, 32, 32), np.uint8), np.array([3, 1, 9, 0, 3, 2])
    write_cifar(tmp_path / "data_batch_1.bin", pixels[:4], labels[:4])
    write_cifar(tmp_path / "data_batch_2.bin", pixels[4:], labels[4:])
    write_cifar(tmp_path / "test_batch.bin", pixels[:1], labels[:1])
    assert read_images(tmp_path).classes == list("0123456789")
    (tmp_path / "batches.meta.txt").write_text("\n".join("abcdefghij") + "\n\n")
    found = read_images(tmp_path)
    np.testing.assert_array_equal(found.pixels, pixels)
    assert found.labels == ["d", "b", "j", "a", "d", "c"]
    assert found.classes == list("abcdefghij")
    assert found.names[4].endswith("data_batch_2.bin, image 0")
    assert read_images(tmp_path, part="test").labels == ["d"]
    assert read_images(tmp_path / "test_batch.bin").labels == ["d"]


def test_cifar_100(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), np.uint8)
    path = write_cifar(tmp_path / "train.bin", pixels, np.array([99, 4, 50]), coarse=True)
    found = read_images(path)
    np.testing.assert_array_equal(found.pixels, pixels)
    assert found.labels == ["99", "4", "50"]
    assert len(found.classes) == 100


def test_cifar_in_other_forms_is_refused_in_words(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x02")
    with pytest.raises(BadImage, match=r"pickles.*cifar-10-binary\.tar\.gz"):
        read_images(tmp_path)
    broken = tmp_path / "some.bin"
    broken.write_bytes(b"x" * 3000)
    with pytest.raises(BadImage, match="no whole binary file"):
        read_images(broken)
    broken.write_bytes(b"\xff" * 3073)
    with pytest.raises(BadImage, match="a label is 255"):
        read_images(broken)
    archive = tmp_path / "cifar-10-binary.tar.gz"
    archive.write_bytes(b"x")
    with pytest.raises(BadImage, match="unpack it first"):
        read_images(archive)
    with pytest.raises(BadImage, match="no such file"):
        read_images(tmp_path / "nowhere")


def test_npz(tmp_path):
    draw, path = np.random.default_rng(0), tmp_path / "set.npz"
    pixels, labels = draw.integers(0, 256, (5, 6, 4, 3), np.uint8), np.array([2, 0, 1, 0, 2])
    np.savez(path, images=pixels, labels=labels)
    np.testing.assert_array_equal(read_images(path).pixels, pixels.transpose(0, 3, 1, 2))
    np.savez(path, images=pixels.transpose(0, 3, 1, 2), labels=labels)
    np.testing.assert_array_equal(read_images(path).pixels, pixels.transpose(0, 3, 1, 2))
    np.savez(path, train_images=pixels, train_labels=labels, test_images=pixels[:1], test_labels=labels[:1])
    assert (len(read_images(path).labels), len(read_images(path, part="test").labels)) == (5, 1)
    np.savez(path, x_train=pixels[..., 0], y_train=labels[:, None], x_test=pixels[:2, ..., 0], y_test=labels[:2])
    assert read_images(path).pixels.shape == (5, 1, 6, 4)
    assert read_images(path, part="test").labels == ["2", "0"]
    wrong = {
        "uint8": {"images": pixels / 255, "labels": labels},
        "one whole number": {"images": pixels, "labels": labels[:2]},
        "N, h, w": {"images": pixels[0, 0], "labels": labels},
        "no arrays images and labels": {"other": labels},
        "labels are objects of Python": {"images": pixels, "labels": np.array([{}] * 5)},
    }
    for says, arrays in wrong.items():
        np.savez(path, **arrays)
        with pytest.raises(BadImage, match=says):
            read_images(path)
    path.write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(BadImage, match=r"no readable \.npz"):
        read_images(path)


def test_images_of_different_sizes_come_out_in_one(tmp_path):
    write_folders(tmp_path, 2)
    (tmp_path / "red" / "wide.png").write_bytes(encoded(painted("red", 1, (20, 50))))
    assert read_images(tmp_path).pixels.shape == (7, 3, 64, 64)
    assert read_images(tmp_path, size=(8, 16)).pixels.shape == (7, 3, 8, 16)
    assert read_images(tmp_path, channels=1, size=(8, 8)).pixels.shape == (7, 1, 8, 8)


@pytest.mark.parametrize("size", [(30, 90), (90, 30)])
def test_the_middle_of_an_image_is_what_is_kept(size):
    """Scaled until it covers the size, and cut on both sides."""
    thirds = np.repeat(np.array([0, 120, 250], np.uint8), 30)
    wide = np.tile(thirds, (30, 1))
    found = decode(encoded(wide if size[1] > size[0] else wide.T), (10, 10), 1)
    # neighbours reach into the border, as bicubic scaling has it
    assert np.abs(found.astype(int) - 120).max() < 15
    both = decode(encoded(wide), (10, 30), 1)
    assert both[0, 0, [0, 15, 29]].tolist() == [0, 120, 250]


def test_one_image_in_colour_makes_all_of_them_so(tmp_path):
    """Wherever it stands among the files."""
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "0.png").write_bytes(encoded(painted("red", number)[..., 0]))
    assert read_images(tmp_path).channels == 1
    for number in range(3):
        kept = (tmp_path / str(number) / "0.png").read_bytes()
        (tmp_path / str(number) / "0.png").write_bytes(encoded(painted("red", number)))
        assert read_images(tmp_path).channels == 3
        (tmp_path / str(number) / "0.png").write_bytes(kept)


def test_a_large_jpeg_is_decoded_at_no_less_than_is_asked_for():
    """It is decoded at a fraction of its size, which must not be seen."""
    row, column = np.mgrid[:256, :256]
    stripes = (127 + 120 * np.sin(row / 4) * np.sin(column / 4)).astype(np.uint8)
    data = encoded(stripes, "JPEG", quality=95)
    whole = from_image(Image.open(io.BytesIO(data)), (64, 64), 1)
    assert np.abs(decode(data, (64, 64), 1).astype(int) - whole).mean() < 4


def test_broken_files_are_refused_or_skipped(tmp_path):
    write_folders(tmp_path, 2)
    (tmp_path / "red" / "cut.png").write_bytes(encoded(painted("red", 1))[:-40])
    (tmp_path / "red" / "notes.txt").write_text("no image")
    (tmp_path / "blue" / "empty.jpg").write_bytes(b"")
    (tmp_path / "red" / "void.png").write_bytes(b"")
    (tmp_path / "blue" / "huge.png").write_bytes(bomb(60000, 60000))
    with pytest.raises(BadImage, match=r"blue/empty\.jpg: the file is empty"):
        read_images(tmp_path)
    found = read_images(tmp_path, skip_bad=True)
    assert len(found.labels) == 6
    assert sum(part.count for part in found.skipped.values()) == 5
    assert found.skipped["the file is empty"] == (2, str(tmp_path / "blue" / "empty.jpg"))
    assert found.skipped["has too many pixels"].first.endswith("huge.png")
    assert read_images(tmp_path, skip_bad=True, size=(12, 12)).skipped == found.skipped


def test_what_is_larger_than_the_memory_is_refused(tmp_path, monkeypatch):
    write_folders(tmp_path, 2)
    monkeypatch.setattr(formats, "physical_memory", lambda: 2 * 6 * 3 * 12 * 12)
    assert read_images(tmp_path).pixels.nbytes == 6 * 3 * 12 * 12
    with pytest.raises(BadImage, match=r"too large for the memory: 2,646 bytes .* choose a smaller data\.size"):
        read_images(tmp_path, size=(7, 21))
    file = tmp_path / "red" / "000.png"
    monkeypatch.setattr(decoding, "MOST_BYTES", file.stat().st_size)
    assert decode_file(file, (8, 8), 3).shape == (3, 8, 8)
    monkeypatch.setattr(decoding, "MOST_BYTES", file.stat().st_size - 1)
    with pytest.raises(BadImage, match=r"000\.png: has more than \d+ bytes: scale it down first"):
        decode_file(file, (8, 8), 3)


@pytest.mark.parametrize("size", [(60000, 60000), (9000, 9000), (2**31 - 1, 2**31 - 1)])
def test_bombs_are_refused(size):
    with pytest.raises(BadImage, match="too many pixels"):
        decode(bomb(*size), (8, 8), 3, "bomb.png")


@pytest.mark.parametrize("how", [name for name in FORMATS if name != "PPM"])
def test_any_bytes_end_in_pixels_or_in_words(how):
    """Cut and changed files of every format: never another error, never other pixels than asked for."""
    whole, draw = encoded(painted("green", 3, (24, 20)), how), random.Random(how)
    cuts = [whole[:length] for length in (0, 1, 5, len(whole) // 3, len(whole) // 2, len(whole) - 3)]
    flips = []
    for _ in range(40):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 8)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        flips.append(bytes(data))
    refused = []
    for data in cuts + flips:
        try:
            assert decode(data, (8, 8), 3, "some file").shape == (3, 8, 8)
        except BadImage as bad:
            refused.append(str(bad))
    assert len(refused) >= 3
    assert all(words.startswith("some file: ") for words in refused)


def test_a_png_is_whole_to_its_end():
    """Also where all pixels are there, but the end is missing, or where a bit was changed on the way."""
    whole = encoded(np.random.default_rng(0).integers(0, 256, (9, 9, 3), np.uint8))
    assert decode(whole, (9, 9), 3).shape == (3, 9, 9)
    at = whole.index(b"IDAT") + 20
    for data in (
        *(whole[:-length] for length in (8, 12, 16, 20)),
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :],
    ):
        with pytest.raises(BadImage, match=r"some\.png: cannot be decoded: \w"):
            decode(data, (9, 9), 3, "some.png")


def test_other_formats_of_pillow_are_not_tried():
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
    with pytest.raises(BadImage, match="is no image that can be read"):
        decode(program, (8, 8), 3)


def test_orientation():
    pixels = painted("red", 1, (4, 8))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    data = encoded(pixels, "PNG", exif=exif)
    turned = np.rot90(pixels, -1)
    np.testing.assert_array_equal(decode(data, (8, 4), 3), turned.transpose(2, 0, 1))
    np.testing.assert_array_equal(from_image(Image.open(io.BytesIO(data)), (8, 4), 3), turned.transpose(2, 0, 1))
    # what is opened is not decoded yet
    with pytest.raises(BadImage, match=r"a\.png: cannot be decoded"):
        from_image(Image.open(io.BytesIO(data[:-40])), (8, 4), 3, "a.png")


def test_palettes_transparency_and_depth():
    grey = np.arange(16, dtype=np.uint8).reshape(4, 4) * 16
    file = io.BytesIO()
    Image.fromarray(painted("blue", 2, (4, 4))).convert("P", palette=Image.Palette.ADAPTIVE).save(file, "PNG")
    assert decode(file.getvalue(), (4, 4), 3)[2].mean() > 150
    seen = np.dstack([painted("blue", 2, (4, 4)), np.zeros((4, 4), np.uint8)])
    assert (decode(encoded(seen), (4, 4), 3) == 255).all()
    file = io.BytesIO()
    Image.fromarray(grey.astype(np.uint16) * 256 + 7).save(file, "PNG")
    np.testing.assert_array_equal(decode(file.getvalue(), (4, 4), 1)[0], grey)
    np.testing.assert_array_equal(decode(encoded(grey), (4, 4), 3), np.repeat(grey[None], 3, 0))
    # PyTorch warns of arrays that cannot be written to
    assert decode(encoded(grey), (4, 4), 1).flags.writeable
    with pytest.raises(BadImage, match="floating-point"):
        from_image(Image.fromarray(np.ones((4, 4), np.float32)), (4, 4), 1)


def test_files_that_are_no_files(tmp_path):
    with pytest.raises(BadImage, match="is a folder"):
        decode_file(tmp_path, (8, 8), 3)
    with pytest.raises(BadImage, match="no such file"):
        decode_file(tmp_path / "nothing.png", (8, 8), 3)


def test_held_out_images_are_of_every_class():
    labels = [0] * 80 + [1] * 15 + [2] * 2 + [3]
    rest, held = hold_out_images(labels, 9, seed=1)
    assert sorted([*rest, *held]) == list(range(len(labels)))
    counts = [[labels[row] for row in held].count(number) for number in range(4)]
    assert counts == [7, 1, 1, 0]
    again = hold_out_images(labels, 9, seed=1)[1]
    np.testing.assert_array_equal(held, again)
    assert held.tolist() != hold_out_images(labels, 9, seed=2)[1].tolist()


def test_single_images_are_not_held_out():
    with pytest.raises(ValueError, match="every class has only one image, so none can be held out: got 12"):
        hold_out_images(list(range(12)), 1, seed=1)
