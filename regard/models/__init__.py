"""Models, by the kind that their config names."""

from typing import Any

from torch import nn

from regard.models.feedback import Feedback, FeedbackConfig
from regard.models.funnel import Funnel, FunnelConfig
from regard.models.perceiver import Perceiver, PerceiverAR, PerceiverARConfig, PerceiverConfig
from regard.models.pooling import Classifier, ClassifierConfig
from regard.models.recurrent import Recurrent, RecurrentConfig
from regard.models.tokenlearner import TokenLearner, TokenLearnerConfig
from regard.models.transformer import ModelConfig, Transformer

KINDS: dict[str, tuple[type, type[nn.Module]]] = {
    **dict.fromkeys(("encoder", "decoder", "encoder-decoder"), (ModelConfig, Transformer)),
    "recurrent": (RecurrentConfig, Recurrent),
    "feedback": (FeedbackConfig, Feedback),
    "classifier": (ClassifierConfig, Classifier),
    "perceiver": (PerceiverConfig, Perceiver),
    "perceiver-ar": (PerceiverARConfig, PerceiverAR),
    "funnel": (FunnelConfig, Funnel),
    "tokenlearner": (TokenLearnerConfig, TokenLearner),
}


def build(config: Any) -> nn.Module:
    """The model of a config.

    >>> model = build(PerceiverConfig(vocabulary=256, classes=10))
    """
    return KINDS[config.kind][1](config)


def config_class(values: dict[str, Any]) -> type:
    """Which config plain values belong to."""
    kind = values.get("kind")
    if kind not in KINDS:
        raise ValueError(f"no model is of kind {kind!r}; known: {', '.join(KINDS)}")
    return KINDS[kind][0]


def completed(values: dict[str, Any]) -> dict[str, Any]:
    """The plain values of a saved config, with the fields that it does not name as they were before there was a choice:
    a default may follow a paper more closely than it did when a run was saved, and the run keeps its meaning."""
    return dict(getattr(config_class(values), "earlier", {})) | values


def positions(model: nn.Module) -> int | None:
    """How many positions the layers of a model have, where they have an end."""
    found = [part.longest for part in model.modules() if isinstance(getattr(part, "longest", None), int)]
    return min(found, default=None)
