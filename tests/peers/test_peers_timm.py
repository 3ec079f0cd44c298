"""timm is there to compare with, without torchvision."""

import sys

import pytest
import torch
from timm_peer import timm

COUNTS = {"vit_tiny_patch16_224": 5_717_416, "swin_tiny_patch4_window7_224": 28_288_354, "coatnet_0_224": 25_036_820}


@pytest.mark.parametrize("name", COUNTS)
def test_its_models_have_the_published_number_of_parameters(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[name]


def test_a_vision_transformer_runs():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=7).eval()
    with torch.no_grad():
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


def test_nothing_remains_that_could_be_taken_for_torchvision():
    left = [name for name in sys.modules if name.split(".")[0] == "torchvision"]
    assert all(getattr(sys.modules[name], "__spec__", None) is not None for name in left)
