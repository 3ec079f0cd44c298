"""Activation checkpointing (Chen et al. 2016, arXiv 1604.06174): what `training.recompute` does to a model."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from regard.core.rerun import Rerun


def recompute_layers(model: nn.Module) -> None:
    """Makes every layer of a model keep its inputs alone, and compute the rest again in the backward pass: the same
    numbers, for about a third more computation."""
    for layer in list_recomputed(model):
        layer.forward = partial(_forward, layer, layer.forward)


def list_recomputed(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that can be recomputed one by one. A model without such layers is refused."""
    config: Any = model.config
    if getattr(config, "reversible", False):
        raise ValueError(
            "training.recompute does not go with model.reversible, whose layers are recomputed already: leave one of "
            "them out"
        )
    layers = [part for part in model.modules() if getattr(part, "recomputes_alone", False)]
    if not layers:
        raise ValueError(
            f"training.recompute is for models of layers that can be computed one by one, and a model of kind "
            f"{config.kind!r} has none: leave it out"
        )
    return layers


def _forward(layer: nn.Module, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    if not (layer.training and torch.is_grad_enabled()):
        return forward(*inputs, **named)
    rerun = Rerun(layer, next(layer.parameters()).device)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return rerun.first(), rerun.again()

    # random numbers are restored by `again`, with the buffers
    return checkpoint(
        partial(forward, **named), *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )
