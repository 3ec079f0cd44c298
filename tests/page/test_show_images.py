"""Images on the page: what the engine answers about them, and what the server refuses."""

import base64
import io
import json
import re
import shutil
import struct
import zlib

import numpy as np
import pytest
import torch
from painted import write_folders
from patched import LABELS, paint, shown
from PIL import Image
from shown import serving
from verbs import refused

import regard
from regard.cli import main
from regard.draw import save
from regard.models.vision.grid import Grid
from regard.models.vision.swin import Swin, SwinConfig
from regard.models.vision.vit import Vit, VitConfig
from regard.page import export, images, wire
from regard.page.engine import Engine
from regard.page.notebook import still_image
from regard.page.patches import attention_distance, of_map, rollout
from regard.page.printed import image_picture
from regard.page.subjects import of_images, open_run
from regard.tasks.images import ImageClassifier
from regard.tasks.opened import OpenedImages, Sample
from regard.training.run import Run

BLOCKS = torch.arange(48).view(3, 2, 4, 2).transpose(1, 2).flatten()  # the cells of 2 x 2 blocks, block by block
VIT = {"run": "vit", "image": "0"}


@pytest.fixture(scope="module")
def subjects():
    windowed = [Grid(6, 8, 0, BLOCKS), Grid(3, 4), Grid(3, 4)]
    return {
        "vit": shown("vit", ["softmax", "local(window=3)", "softmax"], [Grid(6, 8, 1)] * 3),
        "swin": shown("swin", ["image(block=4, memory=0)", "softmax", "softmax"], windowed, sure=False),
        "coca": shown("coca", ["softmax"] * 2, [Grid(6, 8)] * 2, captions=True),
        "mixed": shown("mixed", ["softmax", "fnet", "compressed(factor=4)"], [Grid(6, 8)] * 3),
    }


@pytest.fixture
def engine(subjects):
    return Engine({name: (lambda subject=subject: subject) for name, subject in subjects.items()})


@pytest.fixture(scope="module")
def page(subjects):
    with serving({}, subjects) as page:
        yield page


def maps_of(subjects, run, sample=0):
    """The maps [H, T, T] of all layers as the layers give them."""
    opened = subjects[run].opened
    pixels = torch.from_numpy(opened.samples[sample].pixels)[None]
    with torch.no_grad():
        return [weights[0] for weights in opened.model.maps(opened.normalise(pixels))]


def to_file(pixels, kind="PNG"):
    file = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(file, kind)
    return file.getvalue()


def in_base64(raw):
    return base64.b64encode(raw).decode()


def test_an_image_is_seen_and_named(engine):
    meta, arrays = engine.answer("see", VIT)
    np.testing.assert_array_equal(arrays["pixels"], paint("disc").transpose(1, 2, 0))
    assert meta["label"] == meta["answers"][0]["label"] == "disc"
    shares = [answer["probability"] for answer in meta["answers"]]
    assert shares == sorted(shares, reverse=True)
    assert len(shares) == 5 < meta["classes"] == len(LABELS)
    assert not meta["unsure"]
    assert engine.answer("see", {"run": "swin", "image": "0"}).meta["unsure"]
    kinds = [(layer["spec"], layer["rows"], layer["columns"], layer["leading"]) for layer in meta["layers"]]
    assert kinds == [("softmax", 6, 8, 1), ("local", 6, 8, 1), ("softmax", 6, 8, 1)]
    about = {run["name"]: run for run in engine.answer("about", {}).meta["runs"]}
    assert about["vit"]["reads"] == "images"
    small = engine.answer("samples", {"run": "vit"})
    assert small.meta["labels"] == list(LABELS)
    assert small.arrays["pixels"].shape == (6, images.THUMB, images.THUMB, 3)


@pytest.mark.parametrize("most", [images.SMALL, 0])
def test_rows_and_columns_are_those_of_the_map(engine, subjects, monkeypatch, most):
    """Sent at once, or one by one."""
    monkeypatch.setattr(images, "SMALL", most)
    for number, weights in enumerate(maps_of(subjects, "vit")):
        place = VIT | {"layer": number}
        whole = engine.answer("attention", place).arrays
        assert ("weights" in whole) == (most > 0)
        if whole:
            torch.testing.assert_close(torch.from_numpy(whole["weights"]), weights)
        for at in (0, 20):
            row = engine.answer("glance", place | {"at": at}).arrays["weights"]
            torch.testing.assert_close(torch.from_numpy(row), weights[:, at])
            column = engine.answer("glance", place | {"at": at, "side": "key"}).arrays["weights"]
            torch.testing.assert_close(torch.from_numpy(column), weights[:, :, at])
        mean = engine.answer("glance", place).arrays["weights"]
        torch.testing.assert_close(torch.from_numpy(mean), weights[:, 1:].mean(1))


def test_a_layer_with_an_order_of_its_own_is_shown_row_by_row(engine, subjects):
    own, back = maps_of(subjects, "swin")[0], BLOCKS.argsort()
    found = engine.answer("attention", {"run": "swin", "image": "0", "layer": 0})
    torch.testing.assert_close(torch.from_numpy(found.arrays["weights"]), own[:, back][..., back])
    # and its blocks are squares
    assert found.meta["windows"][:5] == [[0, 0, 2, 2], [0, 2, 2, 4], [0, 4, 2, 6], [0, 6, 2, 8], [2, 0, 4, 2]]
    assert engine.answer("attention", {"run": "swin", "image": "0", "layer": 1}).meta["windows"] == []
    # one row or column of it, where there are too many for all
    one = {"run": "swin", "image": "0", "layer": 0, "at": 9}
    row, column = (engine.answer("glance", one | {"side": side}).arrays["weights"] for side in ("query", "key"))
    torch.testing.assert_close(torch.from_numpy(row), own[:, back][..., back][:, 9])
    torch.testing.assert_close(torch.from_numpy(column), own[:, back][..., back][..., 9])


def test_rollout_and_distances(engine, subjects, monkeypatch):
    grid, maps = Grid(6, 8, 1), maps_of(subjects, "vit")
    layers = [of_map(weights, grid) for weights in maps]
    for number in range(3):
        R = rollout(layers[: number + 1], torch.eye(49))
        meta, arrays = engine.answer("rollout", VIT | {"layer": number})
        assert meta["all"]
        torch.testing.assert_close(torch.from_numpy(arrays["weights"]), R)
    far = engine.answer("distances", VIT).meta
    expected = torch.stack([attention_distance(layer, (4, 4)) for layer in layers])
    torch.testing.assert_close(torch.tensor(far["distances"]), expected)
    # patches that are higher than wide
    tall = shown("tall", ["softmax"], [Grid(3, 8)])
    [weights] = maps_of({"tall": tall}, "tall")
    [found] = images.distances(tall.see(tall.sample(0))).meta["distances"]
    torch.testing.assert_close(torch.tensor(found), attention_distance(of_map(weights, Grid(3, 8)), (8, 4)))
    # local attention in a row of a line looks less far than attention to all
    assert max(far["distances"][1]) < min(far["distances"][0])
    assert far["diagonal"] == 40
    # through merging, over the patches of the first layer, and one by one where there are many
    merged = engine.answer("rollout", {"run": "swin", "image": "0", "layer": 2}).arrays["weights"]
    assert merged.shape == (12, 48)
    np.testing.assert_allclose(merged.sum(1), 1, rtol=1e-5)
    monkeypatch.setattr(images, "SMALL", 0)
    one = engine.answer("rollout", {"run": "swin", "image": "0", "layer": 2, "at": 5})
    assert not one.meta["all"]
    np.testing.assert_allclose(one.arrays["weights"][0], merged[5], rtol=1e-5)
    mean = images.rolled(engine._sight("swin", "0"), 2, None).arrays["weights"]
    np.testing.assert_allclose(mean[0], merged.mean(0), rtol=1e-5)
    # where there is a class token, it is that which is shown at first
    first = images.rolled(engine._sight("vit", "0"), 2, None).arrays["weights"]
    torch.testing.assert_close(torch.from_numpy(first[0]), R[0])


def test_what_has_no_rollout_says_why(engine):
    mixed = {"run": "mixed", "image": "0"}
    reasons = engine.answer("see", mixed).meta["rollout"]
    assert reasons[0] is None
    assert "'fnet' in layer 2 are no shares" in reasons[1]
    with pytest.raises(ValueError, match="no shares: there is no rollout"):
        engine.answer("rollout", mixed | {"layer": 2})
    with pytest.raises(ValueError, match="slots and not patches: there is no map"):
        engine.answer("glance", mixed | {"layer": 2})
    far = engine.answer("distances", mixed).meta["distances"]
    assert far[0] is not None
    assert far[1:] == [None, None]


def test_a_caption_word_by_word(engine, subjects):
    place = {"run": "coca", "image": "0", "layer": 1}
    for text in ("", "two words"):
        found = engine.answer("caption", place | {"text": text})
        expected = subjects["coca"].opened.caption(None, text)
        assert found.meta == {"text": expected.text, "tokens": expected.tokens, "heads": [2, 2, 2]}
        torch.testing.assert_close(torch.from_numpy(found.arrays["weights"]), expected.weights[1])
    about = {run["name"]: run for run in engine.answer("about", {}).meta["runs"]}
    assert about["coca"]["captions"]
    assert not about["vit"]["captions"]
    assert engine.answer("see", {"run": "coca", "image": "0"}).meta["answers"] == []
    with pytest.raises(ValueError, match="no layer 3"):
        engine.answer("caption", place | {"layer": 3})
    with pytest.raises(ValueError, match="vit writes no captions"):
        engine.answer("caption", place | {"run": "vit"})


def test_a_file_is_seen_as_the_model_reads_it(page):
    """A sample that comes as a file is the same image, by the same name each time."""
    raw = to_file(paint("square"))
    given = page.ask("upload", data=in_base64(raw))
    assert given.arrays["pixels"].shape == (images.THUMB, images.THUMB, 3)
    assert page.ask("upload", data=in_base64(raw)).meta == given.meta
    mine, sample = (page.ask("see", run="vit", image=image) for image in (given.meta["image"], "1"))
    np.testing.assert_array_equal(mine.arrays["pixels"], sample.arrays["pixels"])
    assert mine.meta["answers"] == sample.meta["answers"]
    assert mine.meta["label"] is None
    # another size and shape covers what the model reads
    large = page.ask("upload", data=in_base64(to_file(paint("disc", (200, 90)), "JPEG"))).meta["image"]
    assert page.ask("see", run="vit", image=large).arrays["pixels"].shape == (24, 32, 3)


def bomb(width, height):
    """A PNG of a few bytes that says it is of any size."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"no image at all", "is no image that can be read"),
        (to_file(paint("disc"))[:300], "cannot be decoded"),
        (bomb(60_000, 60_000), "too many pixels"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no image that can be read"),
    ],
)
def test_what_is_no_image_is_refused_in_words(page, raw, says):
    status, _, body = page.request("POST", "/api/upload", json.dumps({"data": in_base64(raw)}))
    assert status == 400
    assert says in json.loads(body)["error"]


def test_what_is_too_large_or_not_there_is_refused(page):
    def turned_down(name, **values):
        status, _, body = page.request("POST", f"/api/{name}", json.dumps(values))
        assert status in (400, 413)
        return json.loads(body)["error"]

    assert "not in base64" in turned_down("upload", data="****")
    assert "larger than" in turned_down("upload", data="A" * (images.MOST_UPLOADED * 4 // 3 + 2000))
    assert "not here any more" in turned_down("see", run="vit", image="0123456789abcdef0123")
    assert "no image 99" in turned_down("see", run="vit", image="99")
    assert "no layer 7" in turned_down("glance", run="vit", image="0", layer=7)
    assert "no token 49" in turned_down("glance", run="vit", image="0", layer=0, at=49)
    assert "no token 49" in turned_down("rollout", run="vit", image="0", layer=0, at=49)
    # a run that reads texts has no images, and the other way round
    assert "reads texts and no images" in turned_down("see", run="shipped", image="0")
    assert "reads images and no texts" in turned_down("read", run="vit", place="encoder", text="a")
    assert "does not translate" in turned_down("translate", run="vit", text="a", beam=1)
    assert page.ask("example").meta["scale"] == 0.125


def test_images_that_were_given_are_kept_up_to_a_size(engine):
    engine._images.most = 3000
    names = [engine.answer("upload", {"data": in_base64(to_file(paint(label)))}).meta["image"] for label in LABELS]
    engine.answer("see", {"run": "vit", "image": names[-1]})
    with pytest.raises(ValueError, match="choose it again"):
        engine.answer("see", {"run": "vit", "image": names[0]})


@pytest.mark.parametrize("run", ["vit", "swin", "mixed", "coca"])
def test_an_image_is_drawn_and_written_as_a_page(subjects, run, tmp_path):
    subject = subjects[run]
    figure = image_picture(subject, subject.see(subject.sample(0)))
    with Image.open(save(figure, tmp_path / "image.png")) as drawn:
        assert min(drawn.size) > 600
    panels = {ax.get_title() for part in (figure, *figure.subfigs) for ax in part.axes}
    assert {"mean attention distance", "layer 1, head 2"} <= panels
    assert ("no rollout" in panels) == (run == "mixed")
    page = still_image(subject, to_file(paint("cross")), "cross.png")
    assert "<title>Regard: cross.png</title>" in page
    # all that the page asks for when it opens, and in any layer
    kept = held(page)["kept"]
    assert {"about", "samples", "see", "distances"} <= {one["name"] for one in kept}
    layers = [one["values"]["layer"] for one in kept if one["name"] == "caption"]
    assert layers == (list(range(len(subject.opened.caption(None, "").weights))) if run == "coca" else [])
    with pytest.raises(ValueError, match=r"broken\.png: is no image"):
        still_image(subject, b"nothing", "broken.png")


def held(page):
    """What a page holds besides its scripts."""
    return json.loads(re.search(r'<template id="kept">([^<]+)<', page)[1])


def unpacked(text):
    """A reply that a page holds: its 32-bit numbers byte by byte, all first bytes before the second ones."""
    raw = bytearray(zlib.decompress(base64.b64decode(text)))
    (length,) = struct.unpack_from("<I", raw)
    at = 4 + length
    for array in json.loads(raw[4:at])["arrays"]:
        size = int(np.prod(array["shape"])) * np.dtype(array["dtype"]).itemsize
        if array["dtype"] in ("float32", "int32"):
            planes = np.frombuffer(bytes(raw[at : at + size]), np.uint8).reshape(4, -1)
            raw[at : at + size] = planes.T.tobytes()
        at += -(-size // 8) * 8
    return wire.decode(bytes(raw))


def test_a_page_holds_exactly_what_it_is_asked_and_less_than_the_numbers_take(engine):
    questions = [
        ("see", VIT),
        *((name, VIT | {"layer": layer}) for name in ("attention", "rollout") for layer in range(3)),
    ]
    title = "</template><script>&amp; ü \u2028"
    asked = [{"name": name, "values": values} for name, values in questions]
    page = export.page(engine, "title", f"#text={title}", "auto", asked)
    state, taken = held(page), 0
    assert state["hash"] == f"#text={title}"
    for (name, values), kept in zip(questions, state["kept"], strict=True):
        found, expected = unpacked(kept["reply"]), engine.answer(name, values)
        assert (kept["name"], kept["values"]) == (name, values)
        assert found.meta == expected.meta
        assert found.arrays.keys() == expected.arrays.keys()
        assert all(np.array_equal(found.arrays[part], expected.arrays[part]) for part in found.arrays)
        taken += len(wire.encode(expected))
    assert sum(len(kept["reply"]) for kept in state["kept"]) < taken


@pytest.mark.parametrize("model", ["swin", "vit"])
def test_models_of_the_registry(model):
    """The windows of Swin, shifted and cut at the border; blocks, rows and columns in the order of reading."""
    torch.manual_seed(0)
    sizes = {"image": (24, 20), "classes": 3, "patch": 2, "inner": 16}
    if model == "swin":
        made = Swin(SwinConfig(**sizes, window=4, width=8, heads=(1, 2), layers=(2, 1)))
    else:
        made = Vit(VitConfig(**sizes, width=8, heads=2, layers=2, pooling="mean", attention=["axial", "softmax"]))
    pixels = paint("disc", (24, 20))
    opened = OpenedImages("images", made, (24, 20), 3, lambda pixels: pixels / 255, samples=(Sample(pixels),))
    engine = Engine({"run": lambda: of_images("run", "run", opened)})
    expected = made.maps(torch.from_numpy(pixels)[None] / 255)
    found = [engine.answer("attention", {"run": "run", "image": "0", "layer": at}) for at in range(len(expected))]
    for reply, weights in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(reply.arrays["weights"]), weights[0].detach())
    rolled = engine.answer("rollout", {"run": "run", "image": "0", "layer": len(expected) - 1}).arrays["weights"]
    assert rolled.shape[1] == 120
    np.testing.assert_allclose(rolled.sum(1), 1, rtol=1e-5)
    windows = [reply.meta["windows"] for reply in found]
    if model == "swin":
        assert windows[0][:4] == [[0, 0, 4, 4], [0, 4, 4, 8], [0, 8, 4, 10], [4, 0, 8, 4]]
        assert windows[1][:4] == [[0, 0, 2, 2], [0, 2, 2, 6], [0, 6, 2, 10], [2, 0, 6, 2]]
    else:
        assert windows == [[], []]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A classifier of images, a few steps old."""
    folder = tmp_path_factory.mktemp("runs")
    write_folders(folder / "colours", 12)
    words = f"train images --data.images {folder / 'colours'} --data.batch 12 --data.held_out 9 --out {folder / 'run'}"
    words += " --model.patch 4 --model.width 16 --model.heads 2 --model.inner 16 --model.layers 2"
    words += " --training.steps 3 --training.tensorboard false --training.device cpu"
    assert main(words.split()) == 0
    return folder / "run"


def test_a_run_comes_with_images_of_its_own(run, tmp_path):
    """Also where the data that it was trained on are gone."""
    moved = shutil.copytree(run, tmp_path / "moved")
    subject = open_run(moved, "moved")
    assert {sample.label for sample in subject.samples} == {"red", "green", "blue"}
    engine = Engine({"moved": lambda: subject})
    classifier = ImageClassifier.load(run, device="cpu")
    for number, sample in enumerate(subject.samples):
        meta = engine.answer("see", {"run": "moved", "image": str(number)}).meta
        assert meta["label"] == sample.label
        answer = classifier(sample.pixels.transpose(1, 2, 0))
        assert meta["answers"][0]["label"] == answer.label
        assert meta["answers"][0]["probability"] == pytest.approx(answer.probability, rel=1e-5)
    model = classifier.model
    weights = model.maps(classifier.normalise(torch.from_numpy(subject.samples[0].pixels)[None]))
    for number, expected in enumerate(weights):
        found = engine.answer("attention", {"run": "moved", "image": "0", "layer": number}).arrays["weights"]
        torch.testing.assert_close(torch.from_numpy(found), expected[0].detach())
    # a run without them is shown all the same, with drawings, and one with damaged ones is not
    Run.open(moved).write_text("samples.json", '{"samples": [{"png": "AAAA", "label": "red"}]}')
    with pytest.raises(ValueError, match=r"samples\.json is damaged"):
        open_run(moved, "moved")
    Run.open(moved).write_text("samples.json", "{}")
    drawn = open_run(moved, "moved").samples
    assert [(sample.pixels.shape, sample.label) for sample in drawn] == 3 * [((3, 12, 12), None)]
    assert len({sample.pixels.tobytes() for sample in drawn}) == 3


def test_from_the_command_line(run, tmp_path, capsys):
    image = tmp_path / "cross.png"
    image.write_bytes(to_file(paint("cross")))
    for name, begins in (("page.html", b"<!doctype html>"), ("maps.png", b"\x89PNG"), ("maps.svg", b"<?xml")):
        assert main(["show", str(run), "--image", str(image), "--out", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(begins)
        assert name in capsys.readouterr().out
    broken = tmp_path / "broken.png"
    broken.write_text("no image")
    for words, says in (
        ([str(run), "--image", str(broken), "--out", "x.html"], "broken.png: is no image"),
        ([str(run), "--image", str(tmp_path / "gone.png"), "--out", "x.html"], "cannot read"),
        ([str(run), "--text", "a", "--out", "x.html"], "reads images and no texts"),
        ([str(run), "--out", "x.html"], "--out needs --text"),
    ):
        assert says in refused(capsys, "show", *words)
    shown = regard.show(str(run), image=image)
    assert "cross.png" in shown.page
    with pytest.raises(ValueError, match="without a text"):
        regard.show(str(run), "a text", image=image)
