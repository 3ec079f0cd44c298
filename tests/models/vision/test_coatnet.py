"""CoAtNet: published sizes, maps of any size, batch norms, and any attention in its stages."""

import pytest
import torch
from torch.testing import assert_close

from regard.models import Coatnet, CoatnetConfig, build, registry
from regard.models.vision.convolution import halve_map
from regard.models.vision.grid import Grid

PARAMETERS = [
    ("coatnet-nano", {"image": (32, 32), "classes": 10}, 512_402),
    ("coatnet-0", {}, 25_036_820),
    ("coatnet-1", {}, 42_225_776),
    ("coatnet-2", {}, 74_684_744),
    ("coatnet-3", {}, 166_966_264),
    ("coatnet-4", {}, 275_425_288),
]
SPECS = ["axial", "fnet", "linear", "linformer", "local(window=[1, 1])", "luna", "mixer", "routing", "softmax"]


def small(**options) -> Coatnet:
    torch.manual_seed(0)
    sizes = {"image": (32, 48), "stem_width": 4, "width": 8, "inner": 16, "head_width": 4, "layers": (1, 2, 2)}
    return Coatnet(CoatnetConfig(**(sizes | {"convolutions": 1, "classes": 5} | options))).double().eval()


def pictures(B: int = 2, image: tuple[int, int] = (32, 48)) -> torch.Tensor:
    return torch.randn(B, 3, *image, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(("preset", "options", "parameters"), PARAMETERS)
def test_published_parameter_counts(preset, options, parameters):
    values = registry.presets("image class")[preset].values
    with torch.device("meta"):
        model = build(CoatnetConfig(**values | options))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_every_preset_is_counted():
    assert {name for name, *_ in PARAMETERS} == set(registry.find("coatnet").forms["image class"].presets)


def test_attention_sees_the_whole_map():
    model = small()
    assert model.grids() == [Grid(4, 6)] * 2 + [Grid(2, 3)] * 2
    for maps, grid in zip(model.maps(pictures()), model.grids(), strict=True):
        assert maps.shape[2:] == (grid.tokens, grid.tokens)
        assert (maps > 0).all()
        assert_close(maps.sum(-1), torch.ones_like(maps[..., 0]))


def test_batch_norms_read_a_batch_in_training_only():
    model, images = small(), pictures(3)
    assert_close(model(images).logits[1:2], model(images[1:2]).logits)
    model.train()
    assert (model(images).logits[1:2] - model(images[1:2]).logits).abs().max() > 1e-6


@pytest.mark.parametrize("image", [(30, 50), (17, 17), (2, 2)])
def test_any_size_of_image(image):
    model, images = small(image=image), pictures(image=image).requires_grad_()
    logits = model(images).logits
    logits.square().sum().backward()
    assert logits.shape == (2, 5)
    assert torch.isfinite(images.grad).all()


def test_the_mean_at_a_border_is_that_of_what_is_there():
    x = torch.arange(9.0).view(1, 1, 3, 3)
    assert halve_map(x)[0, 0].tolist() == [[2.0, 3.5], [6.5, 8.0]]


@pytest.mark.parametrize("spec", SPECS)
def test_any_attention_in_its_stages_or_refused(spec):
    if spec in ("fnet", "mixer"):
        with pytest.raises(ValueError, match="has no projection: out_width must be the width 8, got 16"):
            small(attention=spec)
        return
    model, images = small(attention=spec), pictures().requires_grad_()
    model(images).logits.square().mean().backward()
    assert torch.isfinite(images.grad).all()


def test_blocks_of_an_image_are_read_in_their_order():
    """A block as large as the map is softmax, whatever the order."""
    blocks = small(attention="image(block=[2, 3], memory=[4, 6])", layers=(1, 2))
    plain = small(attention="softmax", layers=(1, 2))
    plain.load_state_dict(blocks.state_dict())
    assert_close(blocks(pictures()).logits, plain(pictures()).logits)
    assert blocks.grids()[0].order is not None
    for ours, other in zip(blocks.maps(pictures()), plain.maps(pictures()), strict=True):
        assert_close(ours, other)


def test_resize_and_vectors():
    model = small()
    same, larger = model.resize((32, 48)), model.resize((48, 64))
    assert_close(same(pictures()).logits, model(pictures()).logits, rtol=0, atol=0)
    assert larger(pictures(image=(48, 64))).logits.shape == (2, 5)
    assert small(classes=None).encode(pictures()).x.shape == (2, 6, 32)
    with pytest.raises(ValueError, match="no classes: build it with classes, or use encode"):
        small(classes=None)(pictures())


def test_stochastic_depth_rises_over_all_layers():
    model = small(drop_path=0.4)
    parts = [*model.convolve, model.halve[0], *model.stages[0], model.halve[1], *model.stages[1]]
    assert_close(torch.tensor([part.drop_path.p for part in parts]), torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": 3}, r"a number for each stage, such as \[2, 3, 5, 2\], got 3"),
        ({"convolutions": 3}, "must leave a stage of attention: fewer than 3, got 3"),
        ({"convolutions": 0, "stem_width": 3}, "stem_width must be half of width, 4, got 3"),
        ({"head_width": 32}, "head_width 32 does not divide the width 16"),
    ],
)
def test_refusals(options, words):
    with pytest.raises(ValueError, match=words):
        small(**options)
