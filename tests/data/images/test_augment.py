"""Augmentation equals what Pillow and loops over single images give; draws follow from seed, epoch and batch."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from regard.data.batches import drawing
from regard.data.images.augment import augment, mix, move, normalise, smoothed, soft_targets
from regard.data.images.batches import ImageBatches
from regard.data.images.colour import recolour
from regard.data.images.draws import COLOUR, COLUMNS, OPERATIONS, AugmentConfig, Draws, rooms

MEAN, DEVIATION = torch.tensor([0.5, 0.4, 0.45]), torch.tensor([0.25, 0.2, 0.3])
EVERYTHING = AugmentConfig(crop="pad", operations=2, erase=0.5, mixup=0.8, cutmix=1.0, padded_with="mirror")


def photographs(count: int = 6, size: tuple[int, int] = (16, 12), channels: int = 3) -> torch.Tensor:
    """uint8: smooth colours with noise, one image flat, one dark."""
    draw = np.random.default_rng(5)
    images = []
    for _ in range(count):
        small = draw.integers(0, 256, (4, 4, 3), np.uint8)
        large = np.asarray(Image.fromarray(small).resize(size[::-1], Image.Resampling.BICUBIC)).astype(int)
        images.append((large + draw.integers(-9, 9, large.shape)).clip(0, 255).transpose(2, 0, 1)[:channels])
    images[-1][:] = 77
    images[-2] = images[-2] // 4 + 10
    return torch.from_numpy(np.stack(images).astype(np.uint8))


def named(draws: torch.Tensor, name: str) -> torch.Tensor:
    return draws[:, COLUMNS[name]]


def with_pillow(image: torch.Tensor, operation: str, argument: float) -> np.ndarray:
    picture = Image.fromarray(np.ascontiguousarray(image.numpy().transpose(1, 2, 0)))
    if operation == "solarize_add":
        table = [min(255, level + int(argument)) if level < 128 else level for level in range(256)]
        return np.asarray(picture.point(table * 3)).transpose(2, 0, 1)
    work = {
        "none": lambda: picture,
        "autocontrast": lambda: ImageOps.autocontrast(picture),
        "equalize": lambda: ImageOps.equalize(picture),
        "invert": lambda: ImageOps.invert(picture),
        "posterize": lambda: ImageOps.posterize(picture, 8 - int(math.log2(argument))),
        "solarize": lambda: ImageOps.solarize(picture, int(argument)),
        "colour": lambda: ImageEnhance.Color(picture).enhance(argument),
        "contrast": lambda: ImageEnhance.Contrast(picture).enhance(argument),
        "brightness": lambda: ImageEnhance.Brightness(picture).enhance(argument),
        "sharpness": lambda: ImageEnhance.Sharpness(picture).enhance(argument),
    }
    return np.asarray(work[operation]()).transpose(2, 0, 1)


ARGUMENTS = {
    "invert": (0.0,),
    "posterize": (16.0, 128.0),
    "solarize": (0.0, 26.0, 200.0, 256.0),
    "solarize_add": (1.0, 99.0, 128.0),
}


@pytest.mark.parametrize("operation", COLOUR)
def test_an_operation_on_colours_is_that_of_pillow(operation):
    images = photographs(6, (32, 24))
    for argument in ARGUMENTS.get(operation, (0.1, 0.45, 1.0, 1.9)):
        ours = recolour(
            images.float(),
            torch.full((len(images),), float(COLOUR.index(operation))),
            torch.full((len(images),), argument),
        )
        theirs = np.stack([with_pillow(image, operation, argument) for image in images])
        # Pillow multiplies by a rounded quotient, and truncates: a whole number may come out one lower
        most = 1 if operation == "autocontrast" else 0
        assert np.abs(ours.numpy() - theirs).max() <= most
        assert operation == "none" or argument in (1, 256) or (ours != images).any()


def test_each_image_of_a_batch_has_its_own_operation():
    images, count = photographs(len(COLOUR)), len(COLOUR)
    arguments = torch.tensor([ARGUMENTS.get(name, (1.7,))[0] for name in COLOUR])
    whole = recolour(images.float(), torch.arange(count).float(), arguments)
    for row in range(count):
        alone = recolour(images[row : row + 1].float(), torch.tensor([float(row)]), arguments[row : row + 1])
        assert_close(whole[row : row + 1], alone, rtol=0, atol=0)


@pytest.mark.parametrize("probability", [0.5, 1.0])
def test_images_without_changes_of_colour_are_left_alone(probability):
    """A batch in which only those that need it are taken through an operation is one in which all are."""
    config = AugmentConfig(flip=0.0, crop="none", operations=2, probability=probability)
    images, draw = photographs(48), Draws(config, (16, 12), 3)
    draws = draw(drawing(1, 0, 0), 48)
    matrices = named(draws, "matrix").view(-1, 2, 3)
    x = move(images.float(), matrices, draw.config, 255 * MEAN.view(3, 1, 1)).round().clamp(0, 255)
    for slot in range(2):
        x = recolour(x, named(draws, "operations")[:, slot], named(draws, "arguments")[:, slot])
    ours = augment(images, draws, draw.config, MEAN, DEVIATION)
    assert_close(ours, normalise(x, MEAN, DEVIATION), rtol=0, atol=0)
    assert (named(draws, "operations")[:, 1] > 0).any()


def test_there_is_room_for_every_change_of_colour():
    for probability, shares in ((0.5, (5 / 9, 1 / 9)), (1.0, (8 / 9, 4 / 9)), (0.0, (0, 0))):
        config = AugmentConfig(operations=2, probability=probability, flip=0.0)
        draws = Draws(config, (8, 8), 3)(drawing(3, 0, 0), 2000)
        found = (named(draws, "operations")[:, :2] > 0).double().mean(0).tolist()
        room = rooms(config, 2000)
        for share, most, expected in zip(found, room, shares, strict=True):
            assert share == pytest.approx(expected, abs=0.04)
            assert 2000 * share <= most <= 2000 * expected + 250
        # the other third of the operations changes places
        is_moved = (named(draws, "matrix") != torch.tensor([1.0, 0, 0, 0, 1, 0])).any(1)
        assert is_moved.double().mean().item() == pytest.approx(1 - (1 - probability / 3) ** 2, abs=0.04)
        assert sorted(named(draws, "order")[:, 0].tolist()) == list(range(2000))
    assert rooms(AugmentConfig(operations=1), 4) == [4]


def test_smoothing_of_an_image_that_is_all_border():
    images = photographs(2, (2, 5))
    ours = recolour(images.float(), torch.full((2,), float(COLOUR.index("sharpness"))), torch.full((2,), 0.1))
    theirs = [np.asarray(Image.fromarray(i.numpy().transpose(1, 2, 0)).filter(ImageFilter.SMOOTH)) for i in images]
    assert_close(ours, images.float(), rtol=0, atol=0)
    np.testing.assert_array_equal(np.stack(theirs).transpose(0, 3, 1, 2), images.numpy())


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_images_are_augmented_too(channels):
    images = photographs(8, (8, 8), channels)
    draw = Draws(EVERYTHING, (8, 8), channels)
    out = augment(images, draw(drawing(1, 0, 0), 8), draw.config, MEAN[:channels], DEVIATION[:channels])
    assert out.shape == images.shape
    assert out.isfinite().all()


def sampled(image: np.ndarray, matrix: np.ndarray, fill: np.ndarray) -> np.ndarray:
    """Bilinear resampling in loops: an output pixel shows the input where the matrix leads."""
    _, height, width = image.shape
    out = np.zeros(image.shape)
    for row in range(height):
        for column in range(width):
            place = np.array([(2 * column + 1) / width - 1, (2 * row + 1) / height - 1, 1.0])
            x, y = matrix @ place
            x, y = ((x + 1) * width - 1) / 2, ((y + 1) * height - 1) / 2
            for i in (math.floor(y), math.floor(y) + 1):
                for j in (math.floor(x), math.floor(x) + 1):
                    share = (1 - abs(y - i)) * (1 - abs(x - j))
                    inside = 0 <= i < height and 0 <= j < width
                    out[:, row, column] += share * (image[:, i, j] if inside else fill)
    return out


def test_changes_of_place_are_one_resampling():
    images, config = photographs(4), AugmentConfig(crop="resized", operations=3, probability=1.0)
    draw = Draws(config, (16, 12), 3)
    matrices = named(draw(drawing(3, 0, 0), 4), "matrix").view(4, 2, 3)
    fill = torch.tensor([100.0, 50.0, 7.0])
    ours = move(images.float(), matrices, draw.config, fill.view(3, 1, 1))
    theirs = [sampled(*pair, fill.numpy()) for pair in zip(images.numpy(), matrices.double().numpy(), strict=True)]
    assert_close(ours.double(), torch.from_numpy(np.stack(theirs)), rtol=0, atol=2e-3)


@pytest.mark.parametrize("padded_with", ["mean", "mirror"])
def test_crops_move_by_whole_pixels(padded_with):
    images, config = photographs(32, (8, 10)), AugmentConfig(flip=0.5, crop="pad", padding=2, padded_with=padded_with)
    draw = Draws(config, (8, 10), 3)
    out = move(
        images.float(), named(draw(drawing(1, 0, 0), 32), "matrix").view(-1, 2, 3), draw.config, torch.zeros(3, 1, 1)
    )
    mode = {"mean": "constant", "mirror": "reflect"}[padded_with]
    seen = set()
    for image, ours in zip(images.float(), out, strict=True):
        padded = torch.nn.functional.pad(image[None], [2] * 4, mode=mode)[0]
        cuts = {
            (top, left, flipped): padded[:, top : top + 8, left : left + 10].flip([2] * flipped)
            for top in range(5)
            for left in range(5)
            for flipped in (0, 1)
        }
        found = [place for place, cut in cuts.items() if torch.allclose(ours, cut, atol=1e-2)]
        seen |= {found[0]} if len(found) == 1 else set()
        assert found
    assert len({top for top, _, _ in seen}) == len({left for _, left, _ in seen}) == 5
    assert {flipped for _, _, flipped in seen} == {0, 1}


def test_a_resized_crop_lies_within_the_image():
    draw = Draws(AugmentConfig(crop="resized", area=(0.2, 0.9), flip=0.0), (20, 30), 3)
    matrix = named(draw(drawing(1, 0, 0), 500), "matrix").view(-1, 2, 3)
    corners = torch.tensor([[-1.0, -1, 1], [1, 1, 1]]).T
    places = matrix @ corners
    assert places.abs().max() <= 1 + 1e-6
    area = matrix[:, 0, 0] * matrix[:, 1, 1]
    assert area.min() >= 0.15
    assert area.max() <= 0.9 + 1e-6
    # and lies anywhere in it
    for axis in (0, 1):
        room = 1 - matrix[:, axis, axis]
        where = (matrix[:, axis, 2] / room)[room > 0.05]
        assert where.min() < -0.9
        assert where.max() > 0.9
        assert abs(where.mean()) < 0.1


@pytest.mark.parametrize("operation", ["rotate", "shear_x", "shear_y", "translate_x", "translate_y"])
def test_operations_on_places_have_their_magnitude(operation):
    config = AugmentConfig(crop="none", flip=0.0, operations=1, probability=1.0, deviation=0.0, magnitude=10.0)
    height, width = 40, 20
    draws = Draws(config, (height, width), 3)(drawing(2, 0, 0), 4000)
    matrix = named(draws, "matrix").view(-1, 2, 3).double()
    # in pixels: x' = a x + b y + c
    pixels = matrix * torch.tensor([[1, width / height, width / 2], [height / width, 1, height / 2]])
    sine = math.sin(math.radians(30))
    expected = {
        "rotate": [math.cos(math.radians(30)), sine, 0, sine, math.cos(math.radians(30)), 0],
        "shear_x": [1, 0.3, 0, 0, 1, 0],
        "shear_y": [1, 0, 0, 0.3, 1, 0],
        "translate_x": [1, 0, 0.45 * width, 0, 1, 0],
        "translate_y": [1, 0, 0, 0, 1, 0.45 * height],
    }[operation]
    is_it = (pixels.flatten(1).abs() - torch.tensor(expected).double()).abs().amax(1) < 1e-4
    # one of 15 operations, in either direction
    assert abs(is_it.double().mean() - 1 / len(OPERATIONS)) < 0.02
    moved = pixels.flatten(1)[is_it]
    if operation == "rotate":
        turned = pixels[is_it][:, :, :2]
        assert_close(turned @ turned.mT, torch.eye(2).double().expand_as(turned), rtol=0, atol=1e-4)
        assert_close(turned.det(), torch.ones(len(turned)).double(), rtol=0, atol=1e-4)
    changed = next(
        n for n, value in enumerate(expected) if abs(value - [1, 0, 0, 0, 1, 0][n]) > 1e-9 and n not in (0, 4)
    )
    assert 0.3 < (moved[:, changed] > 0).double().mean() < 0.7


def test_places_are_changed_by_one_option_after_the_other():
    """An image is cropped, then mirrored, then changed by RandAugment; no option moves the draws of another. A matrix
    leads from the last image to the first."""
    alone = {"flip": 0.5}, {"crop": "resized"}, {"operations": 2, "probability": 1.0}

    def matrices(**options) -> torch.Tensor:
        config = AugmentConfig(**{"flip": 0.0, "crop": "none"} | options)
        found = named(Draws(config, (20, 30), 3)(drawing(3, 0, 0), 200), "matrix").view(-1, 2, 3).double()
        return torch.cat([found, torch.tensor([0.0, 0, 1]).expand(200, 1, 3).double()], 1)

    flip, crop, operations = (matrices(**options) for options in alone)
    assert_close(matrices(**alone[0] | alone[1] | alone[2]), crop @ flip @ operations, rtol=0, atol=1e-5)


def test_magnitudes_are_spread():
    config = AugmentConfig(operations=1, probability=1.0, magnitude=5.0, deviation=0.5)
    draws = Draws(config, (8, 8), 3)(drawing(2, 0, 0), 9000)
    is_it = named(draws, "operations")[:, 0] == COLOUR.index("brightness")
    level = 10 * (named(draws, "arguments")[is_it, 0] - 1).abs().double() / 0.9
    assert level.mean().item() == pytest.approx(5, abs=0.1)
    assert level.std().item() == pytest.approx(0.5, abs=0.05)


def test_magnitudes_of_colours():
    config = AugmentConfig(operations=1, probability=1.0, deviation=0.0, magnitude=9.0)
    draws = Draws(config, (8, 8), 3)(drawing(2, 0, 0), 3000)
    operations, arguments = named(draws, "operations")[:, 0], named(draws, "arguments")[:, 0]
    expected = {"posterize": {128.0}, "solarize": {26.0}, "solarize_add": {99.0}}
    expected |= {name: {1.81, 0.19} for name in ("colour", "contrast", "brightness", "sharpness")}
    for name, values in expected.items():
        found = arguments[operations == COLOUR.index(name)].unique().tolist()
        assert {round(value, 5) for value in found} == values
    assert abs((operations == 0).double().mean() - 5 / 15) < 0.03


def test_mixing_is_what_the_targets_say():
    """The share of a label is the true share of the pixels that come from its image."""
    config = AugmentConfig(mixup=0.8, cutmix=1.0, mixed=0.8, switch=0.7)
    count, size = 400, (10, 14)
    draws = Draws(config, size, 3)(drawing(4, 0, 0), count)
    # an image that is its own number: what comes out is a mean of two numbers, weighted by their shares
    x = torch.arange(count, dtype=torch.float64).view(-1, 1, 1, 1).expand(-1, 1, *size)
    out = mix(x, draws.double())
    own, other = torch.arange(count), torch.arange(count).flip(0)
    share = named(draws, "share")[:, 0].double()
    assert_close(out.mean((1, 2, 3)), share * own + (1 - share) * other, rtol=1e-5, atol=1e-4)
    labels = torch.arange(count) % 7
    targets = smoothed(soft_targets(labels, draws, 7), 0.1)
    assert_close(targets.sum(1), torch.ones(count))
    expected = torch.zeros(count, 7)
    for row in range(count):
        expected[row, labels[row]] += share[row].float()
        expected[row, labels[count - 1 - row]] += 1 - share[row].float()
    assert_close(targets, 0.9 * expected + 0.1 / 7)
    boxes = named(draws, "mixed")
    is_cut = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    is_blend = named(draws, "weight")[:, 0] < 1
    assert not (is_cut & is_blend).any()
    assert 0.45 < is_cut.double().mean() < 0.65
    assert 0.15 < is_blend.double().mean() < 0.35
    unmixed = Draws(config, size, 3)(drawing(4, 0, 0), count, mixes=False)
    assert (named(unmixed, "share") == 1).all()
    assert_close(mix(x, unmixed.double()), x, rtol=0, atol=0)


@pytest.mark.parametrize("size", [(8, 64), (64, 8)])
def test_boxes_of_other_images_lie_anywhere(size):
    """Small ones are as often in one half of the rows and of the columns as in the other."""
    boxes = named(Draws(AugmentConfig(cutmix=1.0), size, 3)(drawing(5, 0, 0), 4000), "mixed").double()
    sides = boxes[:, 2:] - boxes[:, :2]
    small = boxes[((sides > 0) & (sides < torch.tensor(size) / 4)).all(1)]
    middles = (small[:, :2] + small[:, 2:]) / 2 / torch.tensor(size)
    assert (abs((middles > 0.5).double().mean(0) - 0.5) < 0.1).all()


def test_boxes_of_other_images_have_the_area_that_is_drawn():
    """Uniform for alpha 1, before they are cut at the border: of a box whose sides are a share s of those of the image,
    (s - s^2 / 4)^2 of the area remains on average, and s^2 is uniform."""
    share = named(Draws(AugmentConfig(cutmix=1.0), (200, 200), 3)(drawing(5, 0, 0), 4000), "share").double()
    assert (1 - share).mean().item() == pytest.approx(1 / 2 - 1 / 5 + 1 / 48, abs=0.015)


def test_shares_follow_the_beta_distribution():
    draws = Draws(AugmentConfig(mixup=0.3), (8, 8), 3)(drawing(1, 0, 0), 20000)
    share = named(draws, "share").double()
    assert abs(share.mean() - 0.5) < 0.02
    assert abs(share.var() - 1 / (4 * (2 * 0.3 + 1))) < 0.005


def test_erased_boxes():
    config = AugmentConfig(erase=0.25, flip=0.0, crop="none")
    draw, images = Draws(config, (16, 12), 3), photographs(200)
    draws = draw(drawing(1, 0, 0), 200)
    out = augment(images, draws, draw.config, MEAN, DEVIATION)
    changed = (out != normalise(images, MEAN, DEVIATION)).any(1)
    top, left, bottom, right = named(draws, "erased").long().unbind(1)
    area = (bottom - top) * (right - left)
    assert_close(changed.sum((1, 2)), area)
    assert 0.15 < (area > 0).double().mean() < 0.35
    assert 0.28 * 16 * 12 < area.max() <= 0.4 * 16 * 12
    assert area[area > 0].min() < 0.06 * 16 * 12
    # a box may touch any border
    is_erased = area > 0
    assert (top[is_erased].min(), left[is_erased].min()) == (0, 0)
    assert (bottom.max(), right.max()) == (16, 12)
    for row in torch.nonzero(area).flatten().tolist():
        box = out[row, :, top[row] : bottom[row], left[row] : right[row]]
        assert_close(box, named(draws, "colour")[row].view(3, 1, 1).expand_as(box), rtol=0, atol=0)


def test_without_augmentation_images_are_only_normalised():
    config, images = AugmentConfig(flip=0.0, crop="none"), photographs()
    draw = Draws(config, (16, 12), 3)
    out = augment(images, draw(drawing(1, 0, 0), len(images)), draw.config, MEAN, DEVIATION)
    expected = (images.double() / 255 - MEAN.view(3, 1, 1)) / DEVIATION.view(3, 1, 1)
    assert_close(out, expected.float(), rtol=1e-5, atol=1e-6)


class Kernels(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if not any(
            argument.alias_info is not None and not argument.alias_info.is_write
            for argument in function._schema.arguments
        ):
            self.names.append(str(function))
        return out


def test_the_kernels_do_not_depend_on_the_draws():
    """So that a step can be captured as a CUDA graph, and that it is cheap."""
    draw, images = Draws(EVERYTHING, (16, 12), 3), photographs(8)
    found = []
    for batch in range(3):
        with Kernels() as kernels:
            augment(images, draw(drawing(1, 0, batch), 8), draw.config, MEAN, DEVIATION)
        found.append(kernels.names)
        assert not any("item" in name or "nonzero" in name or "_local_scalar" in name for name in kernels.names)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) < 250


def batches(**options) -> ImageBatches:
    images = photographs(23, (8, 8))
    return ImageBatches(images, torch.arange(23), EVERYTHING, **{"size": 5, "seed": 3} | options)


def test_batches_follow_from_seed_epoch_and_index():
    one, other = batches(), batches()
    late = other.get(2, 3)
    for name, part in one.get(2, 3)._asdict().items():
        assert part is None or torch.equal(part, getattr(late, name))
    assert not torch.equal(one.get(2, 3).draws, one.get(2, 2).draws)
    assert not torch.equal(one.get(2, 3).draws, one.get(1, 3).draws)
    assert not torch.equal(one.get(2, 3).indices, one.get(1, 3).indices)
    assert not torch.equal(one.get(2, 3).draws, batches(seed=4).get(2, 3).draws)


def test_an_epoch_shows_an_image_at_most_once():
    found = batches()
    assert found.count(0) == 4
    indices = torch.cat([found.get(0, i).indices for i in range(4)])
    assert len(indices) == len(indices.unique()) == 20
    assert batches(size=99).count(0) == 1
    with pytest.raises(IndexError, match="has 4 batches"):
        found.get(0, 4)


def test_a_batch_may_carry_its_pixels():
    plain, full = batches().get(0, 1), batches(carries=True).get(0, 1)
    assert plain.pixels is None
    assert torch.equal(full.pixels, photographs(23, (8, 8))[full.indices])
    assert torch.equal(full.labels, full.indices)


def test_the_end_of_training_is_not_mixed():
    found = batches(unmixed_from=6)
    assert (named(found.get(1, 1).draws, "share") < 1).any()
    assert (named(found.get(1, 2).draws, "share") == 1).all()
    # the other draws are those that they would be
    assert torch.equal(named(found.get(1, 2).draws, "erased"), named(batches().get(1, 2).draws, "erased"))


def test_options_are_checked():
    with pytest.raises(ValueError, match=r"augment\.flip must be at least 0 and at most 1, got 2"):
        AugmentConfig(flip=2.0)
    with pytest.raises(ValueError, match=r"augment\.area must be two shares, the least first"):
        AugmentConfig(area=(0.9, 0.1))
    with pytest.raises(ValueError, match=r"augment\.padding must be below the side of the images, 8, got 9"):
        AugmentConfig(crop="pad", padding=9, padded_with="mirror").resolved((8, 8), 3)
    assert AugmentConfig().resolved((28, 28), 1).describe() == "crops after padding by 3"
    assert AugmentConfig().resolved((224, 224), 3).describe() == "flips, resized crops"
    assert AugmentConfig().resolved((8, 8), 1).describe() == "none"


@pytest.mark.gpu
def test_a_gpu_changes_images_as_the_cpu_does():
    images = photographs(256, (32, 32))
    draw = Draws(EVERYTHING, (32, 32), 3)
    draws = draw(drawing(1, 0, 0), 256)
    slow = augment(images, draws, draw.config, MEAN, DEVIATION)
    fast = augment(images.cuda(), draws.cuda(), draw.config, MEAN.cuda(), DEVIATION.cuda()).cpu()
    # a pixel on the edge between two values may fall to either side
    assert ((slow - fast).abs() > 1e-3).double().mean() < 0.01


@pytest.mark.gpu
def test_augmentation_is_replayed_as_a_cuda_graph():
    images, draw = photographs(64, (32, 32)).cuda(), Draws(EVERYTHING, (32, 32), 3)
    mean, deviation = MEAN.cuda(), DEVIATION.cuda()
    rows = [draw(drawing(1, 0, batch), 64).cuda() for batch in range(3)]
    plain = [augment(images, row, draw.config, mean, deviation) for row in rows]
    kept, graph = rows[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = augment(images, kept, draw.config, mean, deviation)
    for row, expected in zip(rows, plain, strict=True):
        kept.copy_(row)
        graph.replay()
        assert_close(out, expected, rtol=0, atol=0)
