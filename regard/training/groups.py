"""Groups of parameters that learn at different rates."""

import re
from typing import Any

from torch import nn

BLOCK = re.compile(r"(?:^|\.)blocks\.(\d+)\.")


def parameter_groups(model: nn.Module, layer_decay: float) -> list[dict[str, Any]]:
    """What an optimizer is built with. Below 1, each layer has the share `layer_decay` of the learning rate of the one
    above it (Howard and Ruder 2018, arXiv 1801.06146): embeddings lie under the first layer, and what belongs to no
    layer, such as the output, learns at the full rate."""
    if layer_decay == 1:
        return [{"params": list(model.parameters())}]
    depths = {name: _depth(name) for name, _ in model.named_parameters()}
    top = 1 + max((depth for depth in depths.values() if depth is not None), default=0)
    groups: dict[int, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(top if depths[name] is None else depths[name], []).append(parameter)
    return [{"params": groups[depth], "share": layer_decay ** (top - depth)} for depth in sorted(groups)]


def _depth(name: str) -> int | None:
    """0 of embeddings, 1 of the first layer; None of what is above all layers."""
    found = BLOCK.search(name)
    if found is not None and "answer." not in name:
        return int(found[1]) + 1
    return 0 if re.search(r"(?:^|\.)(embedding|position|segments|embedding_norm)\.", name) else None
