"""The auxiliary losses of all layers of a model of images reach its prediction, and the loss it is trained with."""

import pytest
import torch
from painted import write_folders

from regard import models
from regard.core.state import Out
from regard.data.images.draws import AugmentConfig
from regard.models.vision.coca import Coca, CocaConfig
from regard.spec import FEEDFORWARD
from regard.tasks.images import ImageData, ImageOptions, ImagesConfig, Task

SIZES = {"patch": 4, "width": 16, "heads": 4, "inner": 24}
# preset -> options, layers with a feed-forward part
MODELS = {
    "vit-nano": ({**SIZES, "layers": 3}, 3),
    "swin-nano": ({"patch": 2, "window": 2, "width": 8, "heads": (2, 4), "inner": 16, "layers": (2, 3)}, 5),
    "coatnet-nano": ({"stem_width": 4, "width": 8, "inner": 16, "head_width": 4, "layers": (1, 2, 3)}, 5),
    "perceiver": ({**SIZES, "layers": 2, "latents": 6}, 3),
    "tokenlearner": ({**SIZES, "layers": 4, "tokens": 3}, 4),
}


@pytest.fixture(autouse=True)
def ones(monkeypatch):
    """Mixtures of experts whose auxiliary loss is 1."""

    def forward_packed(self, x, rows):
        return Out(0.5 * x, auxiliary_loss=torch.ones(()))

    monkeypatch.setattr(FEEDFORWARD.find("moe"), "forward_packed", forward_packed)


@pytest.mark.parametrize("preset", MODELS)
def test_they_are_added_up(preset):
    options, layers = MODELS[preset]
    values = ImageOptions(preset=preset, feedforward=FEEDFORWARD.find("moe").examples[0], **options)
    model = models.build(values.resolve(image=(16, 24), channels=3, classes=5))
    assert model(torch.randn(2, 3, 16, 24)).auxiliary_loss.item() == layers


def test_those_of_a_captioner_are_added_up_in_each_pass():
    feed = FEEDFORWARD.find("moe").examples[0]
    sizes = {"layers": 3, "text_layers": 1, "decoder_layers": 2, "queries": 5, "vocabulary": 50, "feedforward": feed}
    model = Coca(CocaConfig(image=(8, 12), **SIZES, **sizes))
    images, tokens = torch.randn(2, 3, 8, 12), torch.randint(4, 50, (2, 7))
    assert model(images, tokens).auxiliary_loss.item() == 6
    assert model.read(images, tokens).words.auxiliary_loss.item() == 6


def test_they_are_part_of_the_loss_of_the_task(tmp_path):
    write_folders(tmp_path, 10)
    options = ImageOptions(preset="vit-nano", feedforward=FEEDFORWARD.find("moe").examples[0], **SIZES, layers=2)
    config = ImagesConfig(data=ImageData(images=str(tmp_path), batch=9), augment=AugmentConfig(), model=options)
    data = Task.read_data(config)
    config, _ = Task.complete_config(config, data)
    task = Task(config, data, {}, Task.build_model(config, Task.model_config(config, {}, data)))
    assert task.loss(task.prepare(task.batches.get(0, 0)), 0.0).auxiliary_loss.item() == 2
