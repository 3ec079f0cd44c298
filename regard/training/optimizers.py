"""Which optimizer trains a model."""

import torch
from torch import nn

from regard.training.config import TrainingConfig
from regard.training.groups import parameter_groups
from regard.training.muon import Muon


def build_optimizer(model: nn.Module, config: TrainingConfig, *, captured: bool = False) -> torch.optim.Optimizer:
    """The optimizer that the config names, with a learning rate of 0. `captured`: its steps may be CUDA graphs."""
    groups = parameter_groups(
        model,
        layer_decay=config.layer_decay or 1.0,
        weight_decay=config.weight_decay or 0.0,
        weight_decay_on=config.weight_decay_on,
        orthogonal=config.optimizer == "muon",
    )
    device = next(model.parameters()).device.type
    options = {"lr": 0.0, "betas": config.betas, "eps": config.epsilon, "fused": device in ("cpu", "cuda")}
    if config.optimizer == "muon":
        return Muon(groups, captured=captured, **options)
    return torch.optim.AdamW(groups, **options)
