"""Images on the page in a real browser: pointed at, given as files, saved and opened again."""

from importlib import resources

import pytest
import torch
from browser import AXE, READY, data, needs_chromium, opened, visit
from patched import paint, shown
from PIL import Image
from shown import serving

from regard.models.vision.grid import Grid

pytestmark = needs_chromium

BLOCKS = torch.arange(48).view(3, 2, 4, 2).transpose(1, 2).flatten()


@pytest.fixture(scope="module")
def subjects():
    windowed = [Grid(6, 8, 0, BLOCKS), Grid(3, 4)]
    return {
        "vit": shown("vit", ["softmax"] * 3, [Grid(6, 8, 1)] * 3),
        "swin": shown("swin", ["image(block=4, memory=0)", "softmax"], windowed, sure=False),
        "coca": shown("coca", ["softmax"] * 2, [Grid(6, 8)] * 2, captions=True),
        "mixed": shown("mixed", ["softmax", "fnet", "compressed(factor=4)"], [Grid(6, 8)] * 3),
    }


@pytest.fixture(scope="module")
def server(subjects):
    with serving({}, subjects) as server:
        yield server


def maps_of(subject):
    pixels = torch.from_numpy(subject.samples[0].pixels)[None]
    with torch.no_grad():
        return [weights[0] for weights in subject.model.maps(subject.opened.normalise(pixels))]


def point(page, row, column, rows=6, columns=8):
    box = page.locator("canvas.stage").bounding_box()
    page.mouse.move(
        box["x"] + (column + 0.5) * box["width"] / columns, box["y"] + (row + 0.5) * box["height"] / rows, steps=2
    )


def lists(page, row):
    """Waits until the five largest of a row are listed, and compares them to the last digit."""
    best = row.topk(5)
    listed = "[...document.querySelectorAll('.numbers .best li')].map((node) => Number(node.dataset.key))"
    page.wait_for_function(f"wanted => {listed}.join() === wanted", arg=",".join(map(str, best.indices.tolist())))
    torch.testing.assert_close(torch.tensor(data(page, ".numbers .best")), best.values, atol=1e-6, rtol=0)


def test_point_at_a_patch(page, subjects):
    """What it looks at, with Shift who looks at it, in the average and in one head; a click keeps it."""
    maps = maps_of(subjects["vit"])
    visit(page, run="vit")
    assert page.get_attribute("#view", "data-view") == "image"
    offered = page.eval_on_selector_all("nav button", "nodes => nodes.map(node => node.dataset.view)")
    assert offered == ["image", "mechanisms", "positions"]
    # at first, the class token in the last layer
    lists(page, maps[2][:, 0].mean(0))
    assert page.get_attribute(".lead", "aria-pressed") == "true"
    assert "disc, with a probability of 1.00" in page.inner_text(".answers")
    point(page, 2, 3)
    lists(page, maps[2][:, 1 + 2 * 8 + 3].mean(0))
    assert "row 3, column 4" in page.inner_text(".numbers .reading")
    page.keyboard.down("Shift")
    lists(page, maps[2][:, :, 1 + 2 * 8 + 3].mean(0))
    page.keyboard.up("Shift")
    lists(page, maps[2][:, 1 + 2 * 8 + 3].mean(0))
    # what the class token gets is told apart
    torch.testing.assert_close(data(page, ".lead")[0], maps[2][:, 1 + 2 * 8 + 3, 0].mean().item(), atol=1e-6, rtol=0)
    page.click(".image-thumbs .thumb >> nth=1")
    point(page, 5, 0)
    page.mouse.down()
    page.mouse.up()
    page.wait_for_function("() => location.hash.includes('pin=41') && location.hash.includes('head=1')")
    page.mouse.move(1, 1)
    lists(page, maps[2][1, 41])
    # a link shows the same, and keys move on
    page.reload()
    page.wait_for_function(READY)
    lists(page, maps[2][1, 41])
    for keyed, wanted, row in (
        ("ArrowUp", "pin=33", maps[2][1, 33]),
        ("ArrowLeft", "pin=33", maps[2][1, 33]),
        ("ArrowRight", "pin=34", maps[2][1, 34]),
        ("k", "layer=1", maps[1][1, 34]),
        ("h", "head=0", maps[1][0, 34]),
    ):
        page.keyboard.press(keyed)
        page.wait_for_function("text => location.hash.includes(text)", arg=wanted)
        lists(page, row)
    page.click('.chips[aria-label="side"] button:has-text("who")')
    lists(page, maps[1][0, :, 34])
    page.keyboard.press("Escape")
    lists(page, maps[1][0, :, 0])


def test_other_views_of_a_run_of_images(page):
    for view in ("mechanisms", "positions"):
        visit(page, run="vit", view=view)
        assert page.get_attribute("#view", "data-view") == view
        assert page.locator(".problem").count() == page.locator("textarea").count() == 0
        assert page.locator("canvas:visible").count() > 0
    visit(page, run="vit", view="heads", pin="7")
    assert "reads no texts" in page.inner_text(".notice")
    visit(page, run="shipped", view="image")
    assert "reads no images" in page.inner_text(".notice")


def pixel(page, x, y):
    """Red, green and blue at a place of the image, in shares of its width and height."""
    script = """(node, [x, y]) => [...node.getContext('2d').getImageData(
        Math.round(x * (node.width - 1)), Math.round(y * (node.height - 1)), 1, 1).data].slice(0, 3)"""
    return page.locator("canvas.stage").evaluate(script, [x, y])


def test_windows_and_what_has_no_map(page, subjects):
    back = BLOCKS.argsort()
    weights = maps_of(subjects["swin"])[0][:, back][..., back].mean(0)
    visit(page, run="swin", layer="0", pin="9")
    # only its own window is seen, whose borders are drawn
    order = weights[9].topk(4)
    listed = page.eval_on_selector_all(".numbers .best li", "nodes => nodes.map(node => Number(node.dataset.key))")
    assert listed == order.indices.tolist()
    assert sorted(listed) == [0, 1, 8, 9]
    assert min(pixel(page, 0.25, 1 / 12)) > 240
    assert min(pixel(page, 0.125, 1 / 12)) < 200
    assert "Unsure" in page.inner_text(".answers")
    # from the least weight on, the least of the window is as dark as can be
    row, bright = weights[9], page.inner_text(".legend-line")
    middle = ((int(order.indices[3]) % 8 + 0.5) / 8, (int(order.indices[3]) // 8 + 0.5) / 6)
    before = sum(pixel(page, *middle))
    page.click('.chips[aria-label="scale"] button:has-text("least")')
    page.wait_for_function("old => document.querySelector('.legend-line').innerText !== old", arg=bright)
    assert sum(pixel(page, *middle)) < before
    assert page.inner_text(".legend-line").split()[1] == f"{row[order.indices[3]].item():.3g}"
    # in a layer with fewer patches the mark stays where it was
    page.keyboard.press("j")
    page.wait_for_function("() => location.hash.includes('layer=1') && location.hash.includes('pin=0')")
    # what there is none of is said
    visit(page, run="mixed", layer="2")
    assert "slots and not patches" in page.inner_text(".picture .misfit")
    page.click('.chips[aria-label="picture"] button:has-text("rollout")')
    page.wait_for_function("() => document.querySelector('.picture .misfit')?.textContent.includes('no rollout')")
    page.click('.chips[aria-label="picture"] button:has-text("distances")')
    page.wait_for_function("() => document.querySelector('.far figcaption')?.textContent.includes('of layer 2, 3')")


def test_where_each_word_looks(page, subjects):
    tokens, weights = subjects["coca"].opened.caption(None, "")[1:]
    visit(page, run="coca")
    lists(page, weights[2].mean((0, 1)))
    assert page.locator(".caption-words .word").count() == page.locator(".image-thumbs .thumb").count() == len(tokens)
    assert "a disc in orange" in page.inner_text(".answers")
    assert page.locator(".caption-words .dot").count() == 0
    page.hover(".caption-words .word >> nth=1")
    lists(page, weights[2][:, 1].mean(0))
    assert "attention of disc goes to" in page.inner_text(".numbers")
    page.click('.chips[aria-label="head"] button:has-text("2")')
    page.keyboard.press("k")
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "() => /layer=1/.test(location.hash) && /head=1/.test(location.hash) && /word=0/.test(location.hash)"
    )
    lists(page, weights[1][1, 0])
    # a caption of one's own, and the patches among themselves
    page.fill("textarea", "just this")
    page.press("textarea", "Enter")
    page.wait_for_function("() => document.querySelectorAll('.caption-words .word').length === 3")
    page.click('.chips[aria-label="picture"] button:has-text("attention")')
    page.wait_for_selector(".caption-words", state="hidden")
    lists(page, maps_of(subjects["coca"])[1].mean((0, 1)))


def test_a_file_is_given_or_refused(page, tmp_path):
    Image.fromarray(paint("cross", (90, 120)).transpose(1, 2, 0)).save(tmp_path / "my cross.png")
    (tmp_path / "notes.png").write_text("no image", encoding="utf-8")
    visit(page, run="vit")
    page.set_input_files('input[type="file"]', tmp_path / "notes.png")
    page.wait_for_selector(".upload-problem .problem")
    assert "is no image that can be read" in page.inner_text(".upload-problem")
    page.wrong.clear()  # the browser notes every refusal
    page.set_input_files('input[type="file"]', tmp_path / "my cross.png")
    page.wait_for_selector('.sample[aria-pressed="true"]:has-text("my cross.png")')
    page.wait_for_function(READY)
    assert page.locator(".upload-problem .problem").count() == 0
    assert page.locator(".truth").count() == 0
    own = page.url
    page.click(".sample >> nth=1")
    page.wait_for_function("() => location.hash.includes('image=0')")
    # the server still has it, so a link leads there
    page.goto("about:blank")
    page.goto(own)
    page.wait_for_function(READY)
    assert page.locator(".answers .best li").count() == 5
    assert page.inner_text('.sample[aria-pressed="true"]') == "your image"
    # dropped
    page.evaluate(
        """() => {
        const dataTransfer = new DataTransfer();
        dataTransfer.items.add(new File(["no"], "x.txt", { type: "text/plain" }));
        document.querySelector(".input").dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true }));
        }"""
    )
    page.wait_for_selector(".upload-problem .problem")
    page.wrong.clear()


def test_rollout_distances_and_a_saved_file(page, subjects, tmp_path):
    from regard.page.patches import of_map, rollout

    layers = [of_map(weights, Grid(6, 8, 1)) for weights in maps_of(subjects["vit"])]
    visit(page, run="vit", mode="rollout", layer="2")
    lists(page, rollout(layers, torch.eye(49))[0])
    assert page.locator(".image-thumbs .thumb").count() == 3
    with page.expect_download() as download:
        page.click("#html")
    download.value.save_as(tmp_path / "page.html")
    with page.expect_download() as download:
        page.click("#png")
    assert download.value.suggested_filename == "regard-image.png"
    page.click('.chips[aria-label="picture"] button:has-text("distances")')
    page.wait_for_selector("canvas.chart")
    assert page.locator(".numbers .best li").count() == 2
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_function(READY)
    assert page.locator(".choose").count() == 0
    point(page, 1, 1)
    lists(page, rollout(layers, torch.eye(49))[10])


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("dark", 1024),
        *(pytest.param("light", width, marks=pytest.mark.exhaustive) for width in (1280, 360)),
    ],
)
def test_axe_finds_nothing_serious_at_any_width(browser, server, scheme, width):
    small = {"has_touch": True, "is_mobile": True} if width < 400 else {}
    script = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    with opened(
        browser, server.address, viewport={"width": width, "height": 740}, color_scheme=scheme, **small
    ) as page:
        for state in ({"pin": "20"}, {"run": "swin"}, {"run": "coca", "word": "1"}, {"mode": "distance"}):
            visit(page, **{"run": "vit"} | state)
            assert page.evaluate("document.documentElement.scrollWidth") == width
            page.evaluate(script)
            assert page.evaluate(AXE, None) == [], state
        if width < 400:
            visit(page, run="vit")
            page.tap("canvas.stage")
            page.wait_for_function("() => location.hash.includes('pin=')")
            box = page.locator(".numbers .reading").bounding_box()
            assert 0 <= box["y"] < box["y"] + box["height"] <= 740
