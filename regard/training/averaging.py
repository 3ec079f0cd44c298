"""The mean of several checkpoints of one model."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.training import checkpoint
from regard.training.checkpoint import CheckpointError
from regard.training.run import Run


class _Form(NamedTuple):
    """What all checkpoints of an average have in common."""

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype by name
    ties: dict[str, str]  # of tensors that are one: the name of the first


def average_run(run: Run, count: int, included: Callable[[int], bool] = lambda step: True) -> list[str]:
    """Writes checkpoints/average: the mean of the newest `count` checkpoints whose steps are included. Returns their
    names."""
    if count < 1:
        raise ValueError(f"the number of checkpoints to average must be at least 1, got {count}")
    names = [name for name in checkpoint.names(run.checkpoints) if included(checkpoint.step_of(name))][-count:]
    if not names:
        raise ValueError(f"{run.folder} has no checkpoints to average")
    tensors = average_tensors([run.checkpoints / name for name in names])
    state = {"step": checkpoint.step_of(names[-1]), "averaged": names}
    checkpoint.write(run.checkpoints, "average", {"model": tensors}, state)
    return names


def average_tensors(paths: Sequence[Path], *, stem: str = "model") -> dict[str, Tensor]:
    """The mean of the tensors of several checkpoints, summed in float64, in the dtype they are stored in.

    Integers and booleans are taken from the last, and so are random draws. All must have the same names,
    shapes, dtypes and ties.
    """
    if not paths:
        raise CheckpointError("nothing to average: give at least one checkpoint")
    tensors, redrawn = _read(paths[0], stem)
    form = _form(tensors)
    sums = _addends(tensors, form, redrawn)
    for path in paths[1:]:
        tensors, redrawn = _read(path, stem)
        _check_form(_form(tensors), form, path, paths[0])
        for name, tensor in _addends(tensors, form, redrawn).items():
            sums[name] = sums[name] + tensor if _is_averaged(form, name, redrawn) else tensor
    means = {
        name: (total / len(paths)).to(form.tensors[name][1]) if _is_averaged(form, name, redrawn) else total
        for name, total in sums.items()
    }
    return {name: means[form.ties.get(name, name)] for name in form.tensors}


def _read(path: Path, stem: str) -> tuple[dict[str, Tensor], Collection[str]]:
    """The tensors of a checkpoint, and the names of those that training draws anew: a mean of draws is none of them."""
    found = checkpoint.read(path, only=[stem])
    return found.tensors[stem], found.state.get("drawn", ())


def _form(tensors: Mapping[str, Tensor]) -> _Form:
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    return _Form(shapes, checkpoint.find_ties(tensors))


def _is_averaged(form: _Form, name: str, redrawn: Collection[str]) -> bool:
    return form.tensors[name][1].is_floating_point and name not in redrawn


def _addends(tensors: Mapping[str, Tensor], form: _Form, redrawn: Collection[str]) -> dict[str, Tensor]:
    """Tied tensors once; what is averaged in float64."""
    return {
        name: tensors[name].double() if _is_averaged(form, name, redrawn) else tensors[name]
        for name in form.tensors.keys() - form.ties.keys()
    }


def _check_form(form: _Form, first: _Form, path: Path, first_path: Path) -> None:
    different = _differences(form.tensors, first.tensors) or _differences(form.ties, first.ties)
    if different:
        name = min(different)
        raise CheckpointError(
            f"{path}: cannot be averaged with {first_path}: {name!r} is {_describe(form, name)} here, "
            f"{_describe(first, name)} there; average checkpoints of one model"
        )


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]


def _describe(form: _Form, name: str) -> str:
    if name not in form.tensors:
        return "missing"
    shape, dtype = form.tensors[name]
    return f"{dtype} of shape {shape}" + (f" tied to {form.ties[name]!r}" if name in form.ties else "")
