"""Which optimizer trains a model."""

import torch
from torch import nn

from regard.training.adamw import AdamW
from regard.training.config import TrainingConfig
from regard.training.groups import parameter_groups
from regard.training.muon import Muon


def build_optimizer(model: nn.Module, config: TrainingConfig, *, captured: bool = False) -> torch.optim.Optimizer:
    """The optimizer that the config names, with a learning rate of 0. `captured`: gradients keep their addresses, as
    those of CUDA graphs do, and its steps may be CUDA graphs."""
    groups = parameter_groups(
        model,
        layer_decay=config.layer_decay or 1.0,
        weight_decay=config.weight_decay or 0.0,
        weight_decay_on=config.weight_decay_on,
        orthogonal=config.optimizer == "muon",
    )
    device = next(model.parameters()).device.type
    options = {"lr": 0.0, "betas": config.betas, "eps": config.epsilon}
    is_fused = device in ("cpu", "cuda")
    if config.optimizer == "muon":
        return Muon(groups, captured=captured, fused=is_fused, **options)
    return AdamW(groups, **options) if captured and is_fused else torch.optim.AdamW(groups, fused=is_fused, **options)
