"""Parameter groups of the optimizer: a learning rate for each layer, and weight decay or none."""

import re
from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

BLOCK = re.compile(r"(?:^|\.)blocks\.(\d+)\.")
# layers of models whose map shrinks from stage to stage: Swin's `stages` and the `merge` before each, CoAtNet's
# convolutions and the layer that halves the map before each of its `stages`
STAGED = re.compile(r"^(convolve|halve|merge|stages)\.(\d+)\.(?:(\d+)\.)?")
# embeddings of tokens, patches and positions; alone at the end of a name, the tokens that a ViT puts before its patches
BELOW = re.compile(r"(?:^|\.)(?:(?:embedding|position|segments|embedding_norm|stem|stem_norm)\.|(?:first|second)$)")


def parameter_groups(
    model: nn.Module,
    *,
    layer_decay: float = 1.0,
    weight_decay: float = 0.0,
    weight_decay_on: Literal["matrices", "all"] = "matrices",
    orthogonal: bool = False,
) -> list[dict[str, Any]]:
    """The parameter groups to build an optimizer with. `share` of a group is the fraction of the learning rate that it
    gets.

    `layer_decay` below 1: each layer has this fraction of the learning rate of the layer above it (Howard and Ruder
    2018, arXiv 1801.06146). Embeddings, those of patches too, are below the first layer; parameters that belong to no
    layer, such as those of the output, have the full learning rate.

    `weight_decay_on` "matrices": parameters of fewer than two dimensions, which are biases and the gains of norms, do
    not decay. Pulling a gain towards zero shrinks the output of a layer, and a bias has little capacity to overfit.

    `orthogonal`: the weights of linear maps inside layers are groups of their own, with `orthogonal` True, as Muon
    takes them.
    """
    matrices = _matrices_in_layers(model) if orthogonal else set()
    depths = _depths([name for name, _ in model.named_parameters()])
    top = 1 + max((depth for depth in depths.values() if depth is not None), default=0)
    exempts = weight_decay > 0 and weight_decay_on == "matrices"
    groups: dict[tuple[int, bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        depth = depths[name]
        is_matrix = id(parameter) in matrices
        depth = top if depth is None or layer_decay == 1 else depth
        groups.setdefault((depth, exempts and parameter.ndim < 2, is_matrix), []).append(parameter)
    return [
        {
            "params": groups[depth, is_exempt, is_matrix],
            "weight_decay": 0.0 if is_exempt else weight_decay,
            **({"orthogonal": is_matrix} if orthogonal else {}),
            **({} if layer_decay == 1 else {"share": layer_decay ** (top - depth)}),
        }
        for depth, is_exempt, is_matrix in sorted(groups)
    ]


def _matrices_in_layers(model: nn.Module) -> set[int]:
    """The ids of the weights of linear maps inside layers. A layer is what can be recomputed alone, under any name: the
    stages of Swin, what reads in a Perceiver; or a member of `blocks`. The layers of an answer are none of them."""
    layers = [
        part
        for name, part in model.named_modules()
        if "answer." not in name and (getattr(part, "recomputes_alone", False) or BLOCK.search(f"{name}."))
    ]
    return {id(part.weight) for layer in layers for part in layer.modules() if isinstance(part, nn.Linear)}


def _depths(names: Sequence[str]) -> dict[str, int | None]:
    """For each parameter 0 if it belongs to the embeddings, 1 to the first layer, ...; None above all layers."""
    order = sorted({stage for name in names if (stage := _stage(name)) is not None})
    found: dict[str, int | None] = {}
    for name in names:
        block, stage = BLOCK.search(name), _stage(name)
        if stage is not None:
            found[name] = order.index(stage) + 1
        elif block is not None and "answer." not in name:
            found[name] = int(block[1]) + 1
        else:
            found[name] = 0 if BELOW.search(name) else None
    return found


def _stage(name: str) -> tuple[int, int] | None:
    """A key that orders the layers of models of stages from the first to the last."""
    matched = STAGED.search(name)
    if matched is None:
        return None
    kind, number, layer = matched[1], int(matched[2]), matched[3]
    if kind == "convolve":
        return -1, number
    if kind == "merge":
        return number + 1, 0  # with the first layer of the next stage
    return number, -1 if kind == "halve" else int(layer or 0)
