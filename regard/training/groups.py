"""Groups of parameters that the optimizer treats differently: learning rates by layer, and weight decay or none."""

import re
from typing import Any, Literal

from torch import nn

BLOCK = re.compile(r"(?:^|\.)blocks\.(\d+)\.")


def parameter_groups(
    model: nn.Module,
    *,
    layer_decay: float = 1.0,
    weight_decay: float = 0.0,
    weight_decay_on: Literal["matrices", "all"] = "matrices",
) -> list[dict[str, Any]]:
    """What an optimizer is built with.

    `layer_decay` below 1: each layer has this fraction of the learning rate of the layer above it (Howard and Ruder
    2018, arXiv 1801.06146). Embeddings are below the first layer; what belongs to no layer, such as the output, learns
    at the full rate.

    `weight_decay_on` "matrices": parameters of fewer than two dimensions, which are biases and the gains of norms, do
    not decay. Pulling a gain towards zero shrinks what a layer says, and a bias has little to overfit with.
    """
    depths = {name: _depth(name) for name, _ in model.named_parameters()}
    top = 1 + max((depth for depth in depths.values() if depth is not None), default=0)
    exempts = weight_decay > 0 and weight_decay_on == "matrices"
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        depth = top if depths[name] is None or layer_decay == 1 else depths[name]
        groups.setdefault((depth, exempts and parameter.ndim < 2), []).append(parameter)
    return [
        {
            "params": groups[depth, is_exempt],
            "weight_decay": 0.0 if is_exempt else weight_decay,
            **({} if layer_decay == 1 else {"share": layer_decay ** (top - depth)}),
        }
        for depth, is_exempt in sorted(groups)
    ]


def _depth(name: str) -> int | None:
    """0 for embeddings, 1 for the first layer; None for what is above all layers."""
    found = BLOCK.search(name)
    if found is not None and "answer." not in name:
        return int(found[1]) + 1
    return 0 if re.search(r"(?:^|\.)(embedding|position|segments|embedding_norm)\.", name) else None
