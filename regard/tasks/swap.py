"""The same trained model with another attention: `regard swap`.

A layer keeps its queries, keys, values and output, and attends with them by another mechanism. All other weights stay.
What a mechanism has beside these begins as in a new model, and the user is told. The new run can be measured as it is,
and tuned with --init.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from regard import __version__, models
from regard.layers.attention.base import Attention
from regard.tasks.load import files_for_inference, load_weights, needed_packages, read_parts
from regard.training import checkpoint
from regard.training.run import MANIFEST, Run

PROJECTION = re.compile(r"(^|\.)(project\.[qkv]|output)\.(weight|bias)$")
FIELDS = ("attention", "decoder_attention", "cross_attention", "position")  # of a model's config, that may change


class Swapped(NamedTuple):
    """The new run, and what to tell the user about it."""

    run: Run
    config: Any  # of the model
    notes: list[str]


def swap_attention(
    folder: str | Path, out: str | Path, changes: dict[str, str | Sequence[str]], *, which: str | int | None = None
) -> Swapped:
    """Writes a run folder with the weights of another run and other specs, by the names in FIELDS. `which` is the
    checkpoint. Nothing is written before the new model has all its weights."""
    run = Run.open(folder)
    Run.vacant(out)
    parts = read_parts(run)
    known = {field.name for field in dataclasses.fields(parts.config)}
    for name in changes:
        if name not in known & set(FIELDS):
            had = ", ".join(field for field in FIELDS if field in known) or "none of them"
            raise ValueError(f"a model of kind {parts.config.kind!r} has no {name} to exchange; it has {had}")
    config = dataclasses.replace(parts.config, **changes)
    before = models.build(parts.config)
    load_weights(before, run, which)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        after = models.build(config)
    notes = transfer(before, after)
    if "position" in changes and config.position != parts.config.position:
        notes.append(f"positions were {parts.config.position} in training, and are now {config.position}")
    facts = {
        name: fact for name, fact in parts.facts.items() if name not in ("packages", "published", "soup", "changes")
    }
    found = run.find(which)
    facts |= {
        "regard": __version__,
        "manifest": MANIFEST,
        "model": dataclasses.asdict(config),
        "parameters": sum(part.numel() for part in after.parameters()),
        "init": {"run": str(run.folder), "sha256": checkpoint.listed_digest(found.path)},
    }
    if packages := needed_packages(parts.facts["task"], config):
        facts["packages"] = packages
    with Run.create(out, "regard swap") as new:
        new.write_files(files_for_inference(run))
        checkpoint.write(new.checkpoints, checkpoint.step_name(0), {"model": after.state_dict()}, {"step": 0})
        new.write_json("run.json", facts)
    return Swapped(new, config, notes)


def transfer(before: nn.Module, after: nn.Module) -> list[str]:
    """Gives a model the weights of another that differs in its attention. Returns, in words, what begins anew and what
    was not kept."""
    old, new = outer_attentions(before), outer_attentions(after)
    kept = {f"{name}.{part}" for name, layer in new.items() for part in _transfer_layer(old[name], layer)}
    given, state = before.state_dict(), after.state_dict()
    inside = tuple(f"{name}." for name in {*old, *new})
    for name, tensor in state.items():
        if not name.startswith(inside) and name in given and given[name].shape == tensor.shape:
            tensor.copy_(given[name])
            kept.add(name)
    trained = {id(part) for name, part in after.named_parameters(remove_duplicate=False) if name in kept}
    fresh = [name for name, part in after.named_parameters() if id(part) not in trained]
    carried = {f"{name}.{part}" for name, layer in old.items() for part in _carried(layer)}
    gone = [name for name, _ in before.named_parameters() if name not in kept and name not in carried]
    notes = [f"begins as in a new model: {_listed(fresh)}"] if fresh else []
    return notes + ([f"not kept: {_listed(gone)}"] if gone else [])


def outer_attentions(model: nn.Module) -> dict[str, Attention]:
    """The attention layers of a model by name, without those that are parts of another."""
    found: dict[str, Attention] = {}
    for name, part in model.named_modules():
        if isinstance(part, Attention) and not name.startswith(tuple(f"{outer}." for outer in found)):
            found[name] = part
    return found


def _transfer_layer(old: Attention, new: Attention) -> set[str]:
    """Gives a layer what it can take of another. Returns the names of the parameters and buffers that it got."""
    given, state = old.state_dict(), new.state_dict()
    same = {name: part.shape for name, part in given.items()} == {name: part.shape for name, part in state.items()}
    if type(old) is type(new) and same:
        new.load_state_dict(given)
        return set(state)
    if not (projections := old.projections()):
        raise ValueError(
            f"attention {old.facts.name!r} of the run has no queries, keys and values of the usual kind, so no other "
            "can take its place: train a new model"
        )
    names = new.take_projections(projections)
    # positions that are learned inside the layer
    for name, tensor in state.items():
        if name.startswith("position.") and name in given and given[name].shape == tensor.shape:
            tensor.copy_(given[name])
            names.add(name)
    return names


def _carried(layer: Attention) -> list[str]:
    """The names of a layer's parameters whose values go over with its projections."""
    return [name for name, _ in layer.named_parameters() if layer.projections() and PROJECTION.search(name)]


def _listed(names: Sequence[str]) -> str:
    """Names of parameters, those of all layers once."""
    return ", ".join(dict.fromkeys(re.sub(r"\bblocks\.\d+\.", "blocks.*.", name) for name in names))
