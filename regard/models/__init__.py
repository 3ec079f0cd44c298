"""Models, by the kind their config names."""

from typing import Any

from regard.models.recurrent import Recurrent, RecurrentConfig
from regard.models.transformer import ModelConfig, Transformer


def build(config: ModelConfig | RecurrentConfig) -> Transformer | Recurrent:
    return Recurrent(config) if config.kind == "recurrent" else Transformer(config)


def config_class(values: dict[str, Any]) -> type[ModelConfig] | type[RecurrentConfig]:
    """Which config plain values belong to."""
    return RecurrentConfig if values.get("kind") == "recurrent" else ModelConfig
