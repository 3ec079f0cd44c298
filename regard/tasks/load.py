"""Runs of any task, opened for inference: the model and its tokenizers, nothing of the training."""

import re
import reprlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard import models
from regard.config import from_json
from regard.core.files import check_inside, parse_yaml
from regard.core.limits import MOST
from regard.core.model import Model
from regard.data.tokenizer import Tokenizer
from regard.kernels.packed import pack_linears
from regard.models.registry import PLUGINS as MODEL_PLUGINS
from regard.models.registry import packages_of
from regard.models.stack import Stack
from regard.plugins import PluginWarning
from regard.spec import REGISTRIES
from regard.tasks import PLUGINS as TASK_PLUGINS
from regard.tasks import of
from regard.training import checkpoint
from regard.training.compact import compact, expand
from regard.training.run import MANIFEST, Run

BUNDLED = Path(__file__).parents[1] / "bundled"  # the models bundled with Regard
TOKENIZERS = ("source.json", "target.json", "tokenizer.json")  # files of a run
NEEDED = {"translate": "source.json", "images": None}  # the one that runs of a task have; others: tokenizer.json
FACTS = {  # the entries of run.json beside the model that are checked: their type, and its name in messages
    "task": (str, "a name"),
    "data": (dict, "an object"),
    "labels": (list, "a list"),
    "mean": (list, "a list"),
    "deviation": (list, "a list"),
    "longest": (int, "a number from 0"),
    "length": (int, "a number from 0"),
    "start": (int | None, "a number from 0, or null"),
    "documents": (str, "a word"),
    "apart": (bool, "true or false"),
    "whole_words": (bool, "true or false"),
    "masked": (float, "a fraction"),
    "published": (dict, "an object"),
    "packages": (dict, "an object"),
    "init": (dict, "an object"),
    "soup": (dict, "an object"),
}


class Parts(NamedTuple):
    """The contents of a run folder beside the weights."""

    facts: dict[str, Any]  # all of run.json
    config: Any  # of the model
    tokenizers: dict[str, Tokenizer]  # by the names of their files


def read_parts(run: Run, task: str | None = None) -> Parts:
    """The model config and the tokenizers of a run, which must fit each other. `task`: the run must be of this one."""
    facts = run.read_json("run.json")
    if task is not None and facts.get("task") != task:
        raise ValueError(f"{run.folder} is a run of {facts.get('task')!r}, not of {task!r}")
    _check_facts(facts, run)
    if not isinstance(facts.get("model"), dict):
        raise ValueError(f"{run.folder}/run.json is damaged: it has no config of the model")
    check_packages(facts, run)
    values = _modern(facts["model"])
    config = from_json(models.config_class(values), values)
    tokenizers, named = {}, tokenizer_names(run)
    needed = NEEDED.get(facts["task"], "tokenizer.json")
    if needed is not None and needed not in named:
        raise ValueError(f"{run.folder}/run.json is damaged: it does not name {needed}, the tokenizer of the run")
    for name in named:
        run.read_bytes(name)  # checks it
        tokenizers[name] = Tokenizer.load(run.folder / name)
        expected = (name == "target.json" and config.target_vocabulary) or config.vocabulary
        digest = facts.get("tokenizers", {}).get(name)
        if tokenizers[name].size != expected or (digest and digest != checkpoint.digest(run.folder / name)):
            raise ValueError(
                f"{run.folder}/{name} is not the tokenizer of this run: "
                f"it has {tokenizers[name].size} tokens, the model {expected}"
            )
    return Parts(facts, config, tokenizers)


def _check_facts(facts: dict[str, Any], run: Run) -> None:
    """Refuses a run.json with an entry of another type than tasks write."""
    for name, (kind, words) in FACTS.items():
        value = facts.get(name)
        sized = not isinstance(value, int) or isinstance(value, bool) or 0 <= value <= MOST
        if name in facts and not (isinstance(value, kind) and sized and isinstance(value, bool) == (kind is bool)):
            raise ValueError(f"{run.folder}/run.json is damaged: {name} must be {words}, got {reprlib.repr(value)}")
    if not all(isinstance(label, str) for label in facts.get("labels", ())):
        raise ValueError(f"{run.folder}/run.json is damaged: labels must be strings")
    if "task" not in facts:
        raise ValueError(f"{run.folder}/run.json is damaged: it does not name the task")


def needed_packages(task: str, config: Any) -> dict[str, dict[str, str]]:
    """The packages beside Regard that a run needs: what a model and its task are made of, by kind and name."""
    found = packages_of(config)
    if (package := TASK_PLUGINS.package(task)) is not None:
        found["task"] = {task: package}
    return found


def check_packages(facts: dict[str, Any], run: Run) -> None:
    """Refuses a run that needs a package which is not installed; warns where a word now comes from another one."""
    for kind, words in facts.get("packages", {}).items():
        if not isinstance(words, dict) or not all(isinstance(package, str) for package in words.values()):
            raise ValueError(f"{run.folder}/run.json is damaged: packages must be names by kind and word")
        for word, package in words.items():
            needs = f"{run.folder} was trained with {kind} {reprlib.repr(word)} of the package {reprlib.repr(package)}"
            if kind in REGISTRIES:
                known, now = word in REGISTRIES[kind], REGISTRIES[kind].source(word)
            else:
                plugins = TASK_PLUGINS if kind == "task" else MODEL_PLUGINS
                known, now = word in {*plugins.points(), *plugins.taken()}, plugins.package(word)
            if not known:
                raise ValueError(f"{needs}, which is not installed: install it, if you trust it, to use the run")
            if now is None or now.split()[0] != package.split(" ")[0]:
                warnings.warn(f"{needs}; here it is that of {now or 'Regard'}", PluginWarning, stacklevel=2)


def _modern(values: dict[str, Any]) -> dict[str, Any]:
    """The config of a model under the present names. The first runs had one kind of feed-forward layer, and another
    aligner, which is omitted: such a model still translates."""
    values = dict(values)
    if "activation" in values:
        values["feedforward"] = f"dense(activation={values.pop('activation')!r})"
    if not isinstance(values.get("aligner", False), bool):
        values["aligner"] = False
    return models.complete_config(values)


def tokenizer_names(run: Run) -> list[str]:
    """The files of a run's tokenizers; the run.json of the first runs does not name them."""
    named = run.read_json("run.json").get("tokenizers")
    if named is not None and (not isinstance(named, dict) or not set(named) <= set(TOKENIZERS)):
        raise ValueError(
            f"{run.folder}/run.json is damaged: its tokenizers are some of {', '.join(TOKENIZERS)}, got "
            f"{reprlib.repr(named)}"
        )
    return list(named) if named else [name for name in ("source.json", "target.json") if run.has(name)]


class Loaded(NamedTuple):
    """A trained model on its device, and the contents of its run folder. It is for inference, not for training."""

    model: Model
    parts: Parts
    run: Run


def load(folder: str | Path, task: str, *, which: str | int | None = None, device: str = "auto") -> Loaded:
    """Loads a run folder. `which` is a checkpoint: best, last, average or a step; None: the average if there is one,
    else the best."""
    run = Run.open(folder)
    parts = read_parts(run, task)
    model = models.build(parts.config)
    load_weights(model, run, which)
    model = model.to(pick_device(device)).eval()
    if next(model.parameters()).device.type == "cpu":
        pack_linears(model)
    return Loaded(model, parts, run)


def load_weights(model: nn.Module, run: Run, which: str | int | None = None) -> None:
    """Loads the weights of a checkpoint of a run into a model of the same config."""
    found = run.find(which)
    set_weights(model, expand(found.tensors["model"]), found.path)


def set_weights(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Gives a model of the same config the weights of a checkpoint of a run; `path` is that of the checkpoint."""
    tensors = {
        # in the first runs the feed-forward layer was not a module of its own
        re.sub(r"(blocks\.\d+\.)(inner|outer)\.", r"\1feedforward.\2.", name): part
        for name, part in tensors.items()
        if not name.startswith("aligner.") or getattr(model, "aligner", None) is not None
    }
    checkpoint.check_dtypes(tensors, model, path)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        reason, facts = " ".join(str(error).split())[:200], path.parents[1] / "run.json"
        raise ValueError(f"the checkpoint does not fit the model config in {facts}: {reason}") from error


def count_stems(tokenizer: Tokenizer) -> int:
    """The largest number of stems of a token, for the config of a model."""
    return 0 if tokenizer.stems is None else tokenizer.stems.shape[1]


def set_stems(model: nn.Module, tokenizer: Tokenizer) -> None:
    """Gives a new model the stems of each token of a tokenizer of kind "stems"."""
    for part in model.modules():
        if isinstance(part, Stack) and isinstance(part.stems, Tensor) and tokenizer.stems is not None:
            part.stems.copy_(torch.from_numpy(tokenizer.stems))


def read_config(run: Run) -> Any:
    """The config that a run was begun with."""
    path = run.folder / "config.yaml"
    if not run.has("config.yaml"):
        raise ValueError(
            f"{run.folder} has no config.yaml: compact and imported runs are for inference, and cannot be resumed"
        )
    values = parse_yaml(run.read_text("config.yaml"), path)
    if isinstance(values, dict) and isinstance(values.get("model"), dict):
        # null is what the preset says, even for an option that no longer exists
        values["model"] = {name: value for name, value in values["model"].items() if value is not None}
        if "activation" in values["model"]:
            spec = f"dense(activation={values['model']['activation']!r})"
            raise ValueError(
                f"{path} was written by an early version of Regard, with model.activation: the run can be used for "
                f'inference, but cannot be resumed; for a new run give --model.feedforward "{spec}"'
            )
    if isinstance(values, dict) and isinstance(values.get("training"), dict):
        # weight decay was on every parameter before there was a choice: a run keeps the rule that it began with
        values["training"].setdefault("weight_decay_on", "all")
    return from_json(of(run).config, values)


def compact_run(folder: str | Path, out: str | Path, which: str | int | None = None) -> Path:
    """Writes a small run folder to share: one checkpoint in 8 bits, and nothing of the training."""
    run = Run.open(folder)
    facts = run.read_json("run.json") | {"manifest": MANIFEST}
    contents = files_for_inference(run)
    found = run.find(which)
    with Run.create(out, "regard compact") as small:
        small.write_files(contents)
        state = {"step": found.state["step"], "compact": True}
        path = checkpoint.write(small.checkpoints, "average", {"model": compact(found.tensors["model"])}, state)
        small.write_json("run.json", facts)
    return path


def files_for_inference(run: Run) -> dict[str, bytes]:
    """The files of a run that a copy of it needs beside run.json and a checkpoint, by name."""
    published = run.folder / "published"
    carried = [f"published/{path.name}" for path in sorted(published.iterdir())] if published.is_dir() else []
    names = (*tokenizer_names(run), *carried)
    for name in names:
        # only files of the run are shared: a link could lead to any file of this machine
        check_inside(run.folder / name, run.folder)
    return {name: run.read_bytes(name) for name in names}


def pick_device(name: str, precision: str = "float32") -> torch.device:
    """The device of a setting; auto: a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"no device is called {name!r}: use auto, cpu, cuda or cuda:1") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r}: Regard runs on cpu and cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: PyTorch sees no GPU here; use cpu")
    if device.type == "cpu" and precision != "float32":
        raise ValueError(
            f"training.precision {precision} is for a GPU, and the device is the CPU: give --training.precision "
            "float32, or a GPU as the device"
        )
    return device
