"""Models, by the kind that their config names."""

import functools
from typing import Any

import torch
from torch import nn

from regard.core.limits import check_memory
from regard.core.model import Model
from regard.core.options import options
from regard.models import registry
from regard.models.bytenet import ByteNet, ByteNetConfig
from regard.models.config import ModelConfig
from regard.models.convolutional import Convolutional, ConvolutionalConfig
from regard.models.deep_recurrent import DeepRecurrent, DeepRecurrentConfig
from regard.models.feedback import Feedback, FeedbackConfig
from regard.models.funnel import Funnel, FunnelConfig
from regard.models.perceiver import Perceiver, PerceiverAR, PerceiverARConfig, PerceiverConfig
from regard.models.pooling import Classifier, ClassifierConfig
from regard.models.recurrent import Recurrent, RecurrentConfig
from regard.models.tokenlearner import TokenLearner, TokenLearnerConfig
from regard.models.transformer import Transformer
from regard.models.vision.coatnet import Coatnet, CoatnetConfig
from regard.models.vision.coca import Coca, CocaConfig
from regard.models.vision.convnet import Convnet, ConvnetConfig
from regard.models.vision.perceiver import ImagePerceiver, ImagePerceiverConfig
from regard.models.vision.swin import Swin, SwinConfig
from regard.models.vision.tokenlearner import ImageTokenLearner, ImageTokenLearnerConfig
from regard.models.vision.vit import Vit, VitConfig
from regard.spec import FIELDS, Spec, spec_list

LARGE, LARGE_OPTION = (
    10**8,
    10**4,
)  # from this many parameters, or this large an option, a model is measured before it is built

__all__ = [
    "ByteNet",
    "ByteNetConfig",
    "Classifier",
    "ClassifierConfig",
    "Coatnet",
    "CoatnetConfig",
    "Coca",
    "CocaConfig",
    "Convnet",
    "ConvnetConfig",
    "Convolutional",
    "ConvolutionalConfig",
    "DeepRecurrent",
    "DeepRecurrentConfig",
    "Feedback",
    "FeedbackConfig",
    "Funnel",
    "FunnelConfig",
    "ImagePerceiver",
    "ImagePerceiverConfig",
    "ImageTokenLearner",
    "ImageTokenLearnerConfig",
    "ModelConfig",
    "Perceiver",
    "PerceiverAR",
    "PerceiverARConfig",
    "PerceiverConfig",
    "Recurrent",
    "RecurrentConfig",
    "Swin",
    "SwinConfig",
    "TokenLearner",
    "TokenLearnerConfig",
    "Transformer",
    "Vit",
    "VitConfig",
    "build",
    "complete_config",
    "config_class",
    "kinds",
    "max_positions",
]


@functools.cache
def kinds() -> dict[str, tuple[type, type[Model]]]:
    """Configs and models by the kind that a config names."""
    return {
        form.fixed.get("kind", options(form.config)["kind"].default): (form.config, form.module)
        for model in registry.entries().values()
        for form in model.forms.values()
    }


def build(config: Any) -> Model:
    """The model of a config.

    >>> model = build(PerceiverConfig(vocabulary=256, classes=10))
    """
    _check_fits(config)
    return kinds()[config.kind][1](config)


def _check_fits(config: Any) -> None:
    """Refuses a model that is larger than the memory before any of it is allocated."""
    if torch.get_default_device().type == "meta":
        return
    layers = sum(config.layers) if isinstance(config.layers, tuple | list) else config.layers
    inner = getattr(config, "inner", config.width)
    rough = getattr(config, "vocabulary", 0) * config.width + layers * config.width * (config.width + inner)
    check_memory(rough, "the model")
    specs = [spec for name in FIELDS if getattr(config, name, None) for spec in spec_list(getattr(config, name))]
    if rough > LARGE or any(size > LARGE_OPTION for spec in specs for size in _sizes(spec)):
        # tables may depend on options in any way: the layers themselves say how large they would be
        with torch.device("meta"):
            parts = kinds()[config.kind][1](config).state_dict(keep_vars=True).values()
        check_memory(sum(part.numel() for part in {id(part): part for part in parts}.values()), "the model")


def _sizes(spec: Spec) -> list[int]:
    """All whole numbers among the options of a spec."""
    own = [value for _, value in spec.options if isinstance(value, int)]
    return own + [size for part in spec.parts for size in _sizes(part)]


def config_class(values: dict[str, Any]) -> type:
    """The config class that plain values belong to."""
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in kinds():
        raise ValueError(f"no model is of kind {kind!r}; known: {', '.join(kinds())}")
    return kinds()[kind][0]


def complete_config(values: dict[str, Any]) -> dict[str, Any]:
    """The plain values of a saved config, with omitted fields as they were before there was a choice:
    a default may follow a paper more closely than it did when a run was saved, and the run keeps its meaning."""
    return dict(getattr(config_class(values), "earlier", {})) | values


def max_positions(model: nn.Module) -> int | None:
    """The number of positions that the layers of a model have, where it is bounded."""
    bounds = (getattr(module, "longest", None) for module in model.modules())
    return min((longest for longest in bounds if isinstance(longest, int)), default=None)
