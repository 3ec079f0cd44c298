"""Models over the patches of an image, small and of any layers, for the tests of the page."""

import numpy as np
import torch
from torch import nn

import regard
from regard.core.rows import Rows
from regard.models.recording import take_map
from regard.page.subjects import of_images
from regard.tasks.opened import CaptionedImage, OpenedImages, Sample

WIDTH, HEADS, LABELS = 16, 2, ("disc", "square", "stripes", "cross", "plain", "noise")


class Patched(nn.Module):
    """Attention over grids of patches, layer by layer. Where a grid is smaller than the last, patches are averaged."""

    def __init__(self, specs, places, size=(24, 32)):
        super().__init__()
        torch.manual_seed(0)
        self.places, first = places, places[0]
        self.patch = size[0] // first.rows, size[1] // first.columns
        self.stem = nn.Conv2d(3, WIDTH, self.patch, self.patch)
        self.table = nn.Parameter(torch.randn(first.leading + first.rows * first.columns, WIDTH))
        layers = [regard.attention(spec, width=WIDTH, heads=HEADS, role="self") for spec in specs]
        self.layers = nn.ModuleList(layers)
        self.eval()

    def grids(self):
        return self.places

    def maps(self, images, *, recorder=take_map):
        x = self.stem(images).flatten(2).mT
        x = torch.cat([x.new_zeros(1, self.places[0].leading, WIDTH), x], 1) + self.table
        found, last = [], self.places[0]
        for layer, place in zip(self.layers, self.places, strict=True):
            if place[:2] != last[:2]:
                x = nn.functional.adaptive_avg_pool2d(x.mT.unflatten(2, last[:2]), place[:2]).flatten(2).mT
            seen = x if place.order is None else x[:, place.order]
            found.append(recorder(layer, seen, Rows.full(seen)))
            y = layer(seen)
            x, last = x + (y if place.order is None else y[:, place.order.argsort()]), place
        return found


def paint(label, size=(24, 32), seed=0):
    """uint8 [3, h, w]"""
    random, (height, width) = np.random.default_rng(seed), size
    down, across = np.mgrid[:height, :width]
    far = np.hypot(down - height / 2, across - width / 2)
    shape = {
        "disc": far < height / 3,
        "square": np.maximum(abs(down - height / 2), abs(across - width / 2)) < height / 3,
        "stripes": across % 8 < 4,
        "cross": (abs(down - height / 2) < 3) | (abs(across - width / 2) < 3),
        "plain": far < 0,
        "noise": random.random(size) < 0.5,
    }[label]
    ink, paper = np.array([230, 120, 40]), np.array([40, 70, 110])
    pixels = np.where(shape[..., None], ink, paper) + random.integers(-20, 20, (*size, 3))
    return pixels.clip(0, 255).astype(np.uint8).transpose(2, 0, 1)


def shown(name, specs, places, size=(24, 32), sure=True, captions=False):
    """A subject of the page, with an image of each label."""
    model = Patched(specs, places, size)

    def predict(pixels):
        # whoever has the same mean colour is the same
        means = torch.stack([torch.from_numpy(paint(label, size)).float().mean((1, 2)) for label in LABELS])
        far = (pixels.float().mean((2, 3))[:, None] - means).norm(dim=2)
        return (-far * (1 if sure else 1e-3)).softmax(1)

    def caption(pixels, text):
        # as many tokens as words, each with weights of its own
        tokens = [f"▁{word}" for word in (text or "a disc in orange on blue").split()] + ["</s>"]
        patches = places[-1].rows * places[-1].columns
        weights = torch.rand(3, HEADS, len(tokens), patches, generator=torch.Generator().manual_seed(1))
        return CaptionedImage(text or "a disc in orange on blue", tokens, list((8 * weights).softmax(3)))

    samples = tuple(Sample(paint(label, size), label) for label in LABELS)
    opened = OpenedImages(
        "images", model, size, 3, lambda pixels: pixels.float() / 127.5 - 1, predict, LABELS, samples=samples
    )
    if captions:
        opened.predict, opened.caption = None, caption
    return of_images(name, name, opened)
