"""The state of an optimizer in a checkpoint: tensors by the names of parameters, and its groups for state.json."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.training.checkpoint import CheckpointError
from regard.training.distributed.tensors import placed_like

# How a step is computed, not what it computes: the optimizer that is loaded into keeps its own.
IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}


def pack_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of an optimizer as tensors named "parameter/entry" and facts for state.json.

    A tied parameter has one state, under its first name. Written for AdamW and Muon; it takes any optimizer whose state
    is tensors.
    """
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors, groups = {}, []
    for index, group in enumerate(optimizer.param_groups):
        members, states = [], []
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise CheckpointError(
                    f"the optimizer's group {index} has a parameter of shape {tuple(parameter.shape)} that is not "
                    "the model's; pass the model the optimizer was made for"
                )
            name = known[id(parameter)]
            members.append(name)
            states += [name] if optimizer.state.get(parameter) else []
            for entry, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor):
                    raise CheckpointError(f"optimizer state {entry!r} of {name!r} must be a tensor, got {value!r}")
                tensors[f"{name}/{entry}"] = value
        # a learning rate may be a tensor, for compiled steps
        options = {
            option: value.item() if isinstance(value, Tensor) else value
            for option, value in group.items()
            if option != "params" and option not in IMPLEMENTATION
        }
        groups.append({"parameters": members, "states": states, "options": options})
    return tensors, {"kind": type(optimizer).__name__, "groups": groups}


def unpack_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Restore the state that `pack_optimizer` returned into `optimizer`, a new one for `model`, bit for bit.

    Everything is checked before anything changes. `optimizer` keeps its own choice of fused or foreach steps. With Muon
    the checkpoint says which matrices have orthogonal updates: a run keeps the rule that it was begun with.
    """
    owned, names, stored = _matching_groups(optimizer, model, facts)
    entries = _by_parameter(tensors)
    for is_matrix in (False, True):
        groups = zip(names, owned, strict=True)
        alike = [name for members, group in groups if group.get("orthogonal", False) == is_matrix for name in members]
        _check_complete({name: entries[name] for name in alike if name in entries})
    held = set(entries)
    states = [
        (parameter, _parameter_state(entries.pop(name, {}), parameter, name, group))
        for group, members in zip(owned, names, strict=True)
        for parameter, name in zip(group["params"], members, strict=True)
    ]
    if entries:
        raise CheckpointError(f"the checkpoint has optimizer state of {min(entries)!r}, which the optimizer lacks")
    # older checkpoints do not say which parameters have a state
    lost = {name for group in stored for name in group.get("states", ())} - held
    if lost:
        raise CheckpointError(f"the optimizer state of {min(lost)!r} is missing, and of {len(lost) - 1} more")

    optimizer.param_groups[:] = owned
    optimizer.state.clear()
    for parameter, state in states:
        if state:
            optimizer.state[parameter] = state
    for group, other in zip(optimizer.param_groups, stored, strict=True):
        for option, value in other["options"].items():
            if isinstance(group.get(option), Tensor):
                group[option].fill_(value)
            elif option != "params" and option not in IMPLEMENTATION:
                group[option] = tuple(value) if isinstance(group.get(option), tuple) else value


def _matching_groups(
    optimizer: torch.optim.Optimizer, model: nn.Module, facts: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[list[str]], list[dict[str, Any]]]:
    """The optimizer's groups, the names of their parameters, and the groups of the checkpoint; they must agree."""
    fresh = pack_optimizer(optimizer, model)[1]
    if facts.get("kind") != fresh["kind"]:
        raise CheckpointError(f"the checkpoint's optimizer is {facts.get('kind')!r}, this one is {fresh['kind']!r}")
    stored = facts.get("groups")
    if not isinstance(stored, list) or not all(
        isinstance(group, dict) and isinstance(group.get("options"), dict) for group in stored
    ):
        raise CheckpointError("the checkpoint's optimizer facts must be a list of groups with options")
    here = [group["parameters"] for group in fresh["groups"]]
    there = [group.get("parameters") for group in stored]
    if here != there:
        regrouped = _regrouped(optimizer, here, stored)
        if regrouped is not None:
            return regrouped, there, stored
        raise CheckpointError(
            f"the optimizer's groups do not match: the checkpoint has {_group_words(there)}, the model "
            f"{_group_words(here)}; resume with the configuration of the run"
        )
    return optimizer.param_groups, here, stored


def _regrouped(
    optimizer: torch.optim.Optimizer, here: list[list[str]], stored: list[dict[str, Any]]
) -> list[dict[str, Any]] | None:
    """The groups as a checkpoint has them, where it differs only in which matrices have orthogonal updates, or in which
    layer a parameter belongs to by its share of the learning rate."""
    known = {
        name: (parameter, group)
        for names, group in zip(here, optimizer.param_groups, strict=True)
        for name, parameter in zip(names, group["params"], strict=True)
    }
    named = [name for group in stored for name in group.get("parameters") or ()]
    is_muon = "orthogonal" in optimizer.defaults
    may_differ = is_muon or all("share" in group for group in optimizer.param_groups)
    if not may_differ or len(named) != len(known) or set(named) != set(known):
        return None
    found = []
    for group in stored:
        options, members = group["options"], [known[name] for name in group.get("parameters") or ()]
        is_matrix = options.get("orthogonal") if is_muon else False
        for parameter, own in members:
            differs = options.get("weight_decay") != own.get("weight_decay") or ("share" in options) != ("share" in own)
            if differs or not isinstance(is_matrix, bool) or (is_matrix and parameter.ndim != 2):
                return None
        params = [parameter for parameter, _ in members]
        found += [own | {"params": params} | ({"orthogonal": is_matrix} if is_muon else {}) for _, own in members[:1]]
    return found if len(found) == len(stored) else None


def _by_parameter(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """{parameter: {entry: tensor}}"""
    entries: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition("/")
        entries.setdefault(name, {})[entry] = tensor
    return entries


def _check_complete(entries: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Parameters that are updated alike must have the same entries."""
    if len({frozenset(state) for state in entries.values()}) > 1:
        name = min(entries, key=lambda name: len(entries[name]))
        raise CheckpointError(f"the optimizer state of {name!r} is not complete: it has only {sorted(entries[name])}")


def _parameter_state(
    entries: Mapping[str, Tensor], parameter: Tensor, name: str, group: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The state of one parameter, on the device and in the memory layout that a step expects."""
    state = {}
    for entry, tensor in entries.items():
        if tensor.dtype != parameter.dtype and entry != "step":
            raise CheckpointError(
                f"optimizer state {entry!r} of {name!r} is {tensor.dtype}, the parameter {parameter.dtype}"
            )
        if entry == "step" and tensor.ndim == 0 and tensor.is_floating_point():
            on_device = group.get("fused") or group.get("capturable")
            state[entry] = tensor.to(parameter.device if on_device else "cpu", copy=True)
        elif tensor.shape == parameter.shape:
            # strides like those of the parameter, which fused steps count on
            room = torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False)
            state[entry] = room.copy_(placed_like(tensor, parameter))
        else:
            raise CheckpointError(
                f"optimizer state {entry!r} of {name!r} has shape {tuple(tensor.shape)}, the parameter "
                f"{tuple(parameter.shape)}; resume with the configuration of the run"
            )
    return state


def _group_words(groups: Sequence[Any]) -> str:
    return " + ".join(str(len(group)) if isinstance(group, list) else "?" for group in groups) + " parameters"
