"""The mean of several checkpoints of one model, or of several models of one form."""

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
    run.write_checkpoint("average", {"model": tensors}, state)
    return names


def average_tensors(paths: Sequence[Path], *, stem: str = "model") -> dict[str, Tensor]:
    """The mean of the tensors of several checkpoints, summed in float64, in the dtype they are stored in.

    Integers and booleans are taken from the last, and so are random draws. All must have the same names,
    shapes, dtypes and ties.
    """
    mean = None
    for path in paths:
        tensors, redrawn = _read(path, stem)
        mean = Mean.of(tensors, path, redrawn) if mean is None else mean.plus(tensors, path, redrawn)
    if mean is None:
        raise CheckpointError("nothing to average: give at least one checkpoint")
    return mean.tensors()


class Mean(NamedTuple):
    """The mean of the tensors of models of one form, which are added one at a time."""

    form: _Form
    path: Path  # of the first
    sums: dict[str, Tensor]  # in float64; tensors that are not averaged are those of the last
    averaged: Collection[str]
    number: int  # of models

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], path: Path, redrawn: Collection[str] = ()) -> "Mean":
        """The mean of one. `path` is for messages, `redrawn` names what training draws anew."""
        form = _form(tensors)
        averaged = {name for name in form.tensors if _is_averaged(form, name, redrawn)}
        return cls(form, path, _addends(tensors, form, averaged), averaged, 1)

    def check(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        """Refuses tensors of another form, by the name of the first that differs."""
        _check_form(_form(tensors), self.form, path, self.path)

    def plus(self, tensors: Mapping[str, Tensor], path: Path, redrawn: Collection[str] = ()) -> "Mean":
        """The mean with one more; this one stays as it is."""
        self.check(tensors, path)
        averaged = {name for name in self.averaged if name not in redrawn}
        added = _addends(tensors, self.form, averaged)
        sums = {name: self.sums[name] + tensor if name in averaged else tensor for name, tensor in added.items()}
        return self._replace(sums=sums, averaged=averaged, number=self.number + 1)

    def tensors(self, others: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The mean in the dtypes of the models. Integers, booleans and random draws are those of the last, or of
        `others`."""
        means = {
            name: (total / self.number).to(self.form.tensors[name][1])
            if name in self.averaged
            else (others or self.sums)[name]
            for name, total in self.sums.items()
        }
        return {name: means[self.form.ties.get(name, name)] for name in self.form.tensors}


def _read(path: Path, stem: str) -> tuple[dict[str, Tensor], Collection[str]]:
    """The tensors of a checkpoint, and the names of those that training draws anew: a mean of draws is none of them."""
    found = checkpoint.read(path, only=[stem])
    return found.tensors[stem], found.state.get("drawn", ())


def _form(tensors: Mapping[str, Tensor]) -> _Form:
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    return _Form(shapes, checkpoint.find_ties(tensors))


def _is_averaged(form: _Form, name: str, redrawn: Collection[str]) -> bool:
    return form.tensors[name][1].is_floating_point and name not in redrawn


def _addends(tensors: Mapping[str, Tensor], form: _Form, averaged: Collection[str]) -> dict[str, Tensor]:
    """Tied tensors once; what is averaged in float64."""
    return {
        name: tensors[name].double() if name in averaged else tensors[name]
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
