"""The Swin Transformer: published sizes, merging, maps of any size, and any attention in its stages."""

import pytest
import torch
from torch.testing import assert_close

from regard.models import Swin, SwinConfig, build, registry
from regard.models.vision.grid import Grid
from regard.models.vision.swin import Merging

PARAMETERS = [
    ("swin-nano", {"image": (32, 32), "classes": 10}, 567_046),
    ("swin-tiny", {}, 28_288_354),
    ("swin-small", {}, 49_606_258),
    ("swin-base", {}, 87_768_224),
    ("swin-base", {"image": (384, 384), "window": 12}, 87_903_584),
    ("swin-large", {}, 196_532_476),
]
SPECS = ["axial", "fnet", "linear", "linformer", "local(window=[1, 1])", "luna", "mixer", "routing", "softmax"]


def small(**options) -> Swin:
    torch.manual_seed(0)
    sizes = {"image": (16, 24), "patch": 2, "window": 4, "width": 8, "heads": (2, 4), "inner": 16, "layers": (2, 2)}
    return Swin(SwinConfig(**(sizes | {"classes": 5} | options))).double().eval()


def pictures(B: int = 2, image: tuple[int, int] = (16, 24)) -> torch.Tensor:
    return torch.randn(B, 3, *image, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(("preset", "options", "parameters"), PARAMETERS)
def test_published_parameter_counts(preset, options, parameters):
    values = registry.presets("image class")[preset].values
    with torch.device("meta"):
        model = build(SwinConfig(**values | options))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_every_preset_is_counted():
    assert {name for name, *_ in PARAMETERS} == set(registry.find("swin").forms["image class"].presets)


def test_windows_are_shifted_in_every_second_layer_and_no_larger_than_the_map():
    model = small(layers=(2, 3), window=5)
    layers = [block.attention for stage in model.stages for block in stage]
    assert [layer.window for layer in layers] == [(5, 5)] * 2 + [(4, 5)] * 3
    assert [layer.shift for layer in layers] == [(0, 0), (2, 2), (0, 0), (0, 2), (0, 0)]
    assert [layer.width for layer in layers] == [12, 12, 6, 6, 6]
    assert model.grids() == [Grid(8, 12)] * 2 + [Grid(4, 6)] * 3


def test_maps_are_those_of_the_windows():
    """Two cells see each other where the plane is cut alike for both."""
    model = small(image=(14, 22))
    for maps, grid, block in zip(
        model.maps(pictures(image=(14, 22))), model.grids(), [b for stage in model.stages for b in stage], strict=True
    ):
        (h, w), (s, t) = block.attention.window, block.attention.shift
        window = [((i // grid.columns - s) // h, (i % grid.columns - t) // w) for i in range(grid.tokens)]
        same = torch.tensor([[a == b for b in window] for a in window])
        assert (maps[..., same] > 0).all()
        assert not maps[..., ~same].any()
        assert_close(maps.sum(-1), torch.ones_like(maps[..., 0]))


def test_merging_takes_columns_last():
    """Of a map of 4 x 4 made by hand, in the order (0, 0), (1, 0), (0, 1), (1, 1)."""
    merge = Merging(1, 1e-5)
    read = []
    merge.norm.register_forward_hook(lambda module, inputs, output: read.append(inputs[0]))
    merge(torch.arange(16.0)[None, :, None], Grid(4, 4))
    assert read[0][0].tolist() == [[0, 4, 1, 5], [2, 6, 3, 7], [8, 12, 9, 13], [10, 14, 11, 15]]


def test_an_odd_map_is_merged_with_what_is_there():
    merge = Merging(1, 1e-5)
    read = []
    merge.norm.register_forward_hook(lambda module, inputs, output: read.append(inputs[0]))
    merge(torch.arange(9.0)[None, :, None], Grid(3, 3))
    assert read[0][0].tolist() == [[0, 3, 1, 4], [2, 5, 2, 5], [6, 6, 7, 7], [8, 8, 8, 8]]


@pytest.mark.parametrize("image", [(14, 22), (2, 6), (10, 10)])
def test_any_size_of_image(image):
    """Each cell of a small image changes the answer."""
    model, images = small(image=image), pictures(image=image).requires_grad_()
    logits = model(images).logits
    logits.square().sum().backward()
    assert logits.shape == (2, 5)
    assert (images.grad.abs().sum(1) > 0).all()


@pytest.mark.parametrize("spec", SPECS)
def test_any_attention_in_its_stages(spec):
    model, images = small(attention=spec), pictures().requires_grad_()
    logits = model.train()(images).logits
    logits.square().mean().backward()
    assert torch.isfinite(logits).all()
    assert torch.isfinite(images.grad).all()


def test_a_list_of_words_and_options_of_the_windows():
    model = small(attention=["swin(shift=1)", "axial", "swin(window=2)", "image(block=[2, 2], memory=[1, 1])"])
    first, second, third, fourth = (block.attention for stage in model.stages for block in stage)
    assert (first.shift, third.window, third.shift) == ((1, 1), (2, 2), (0, 0))
    assert second.width == 12
    assert fourth.width == 6
    assert model(pictures()).logits.shape == (2, 5)
    assert model.maps(pictures())[3].shape == (2, 4, 24, 24)


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "rotary", "none"])
def test_positions(position):
    model = small(position=position)
    assert torch.isfinite(model(pictures()).logits).all()
    larger = model.resize((24, 32))
    assert larger(pictures(image=(24, 32))).logits.shape == (2, 5)
    same = model.resize((16, 24))
    assert_close(same(pictures()).logits, model(pictures()).logits, rtol=0, atol=0)


def test_images_in_a_batch_do_not_meet():
    model, images = small(), pictures(3)
    assert_close(model(images).logits[1:2], model(images[1:2]).logits)


def test_without_classes_there_are_vectors():
    model = small(classes=None)
    assert model.encode(pictures()).x.shape == (2, 24, 16)
    with pytest.raises(ValueError, match="no classes: build it with classes, or use encode"):
        model(pictures())


def test_stochastic_depth_rises_over_all_layers():
    model = small(drop_path=0.3)
    rates = [block.drop_path.p for stage in model.stages for block in stage]
    assert_close(torch.tensor(rates), torch.tensor([0.0, 0.1, 0.2, 0.3]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"heads": (2, 4, 8)}, r"got heads \(2, 4, 8\) and layers \(2, 2\): give lists of the same length"),
        ({"heads": 2}, r"got heads 2 and layers \(2, 2\)"),
        ({"heads": (3, 4)}, "width 8 is not divisible by heads 3"),
        ({"attention": "swin(width=5)"}, "'swin' has width=5, and the tokens stand in rows of 12"),
        ({"attention": "swin(window=2, shift=2)"}, "shifted by less than its side"),
        ({"attention": "swin(window=[1, 2, 3])"}, r"a number or \[rows, columns\]"),
        ({"patch": 5}, "not cut into patches of 5 x 5 without a rest"),
    ],
)
def test_refusals(options, words):
    with pytest.raises(ValueError, match=words):
        small(**options)


def test_windows_that_become_smaller_have_a_resized_bias():
    """A table that is linear in rows and columns stays so."""
    model = small()
    with torch.no_grad():
        rows, columns = torch.meshgrid(torch.linspace(-1, 1, 7), torch.linspace(-1, 1, 7), indexing="ij")
        model.stages[0][0].attention.table.copy_((rows + 2 * columns).flatten()[:, None].expand(-1, 2))
    made = model.resize((4, 24))
    assert made.stages[0][0].attention.window == (2, 4)
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, 3), torch.linspace(-1, 1, 7), indexing="ij")
    table = made.stages[0][0].attention.table
    assert_close(table, (rows + 2 * columns).flatten()[:, None].expand(-1, 2).double(), rtol=0, atol=1e-6)
    assert made(pictures(image=(4, 24))).logits.shape == (2, 5)
