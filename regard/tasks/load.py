"""Run folders of any task, opened for use: the model and its tokenizers, nothing of the training."""

import re
import reprlib
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from regard import models
from regard.config import from_json
from regard.core.files import check_inside, parse_yaml
from regard.core.limits import MOST
from regard.data.tokenizer import Tokenizer
from regard.kernels.packed import pack_linears
from regard.models.registry import PLUGINS as MODEL_PLUGINS
from regard.models.registry import packages_of
from regard.models.transformer import Stack
from regard.plugins import PluginWarning
from regard.spec import REGISTRIES
from regard.tasks import PLUGINS as TASK_PLUGINS
from regard.tasks import of
from regard.training import checkpoint
from regard.training.compact import compact, expand
from regard.training.run import MANIFEST, Run

BUNDLED = Path(__file__).parents[1] / "bundled"  # the models that are bundled with Regard
TOKENIZERS = ("source.json", "target.json", "tokenizer.json")  # files of a run
FACTS = {  # what run.json may say beside the model
    "task": (str, "a name"),
    "data": (dict, "an object"),
    "labels": (list, "a list"),
    "longest": (int, "a number from 0"),
    "length": (int, "a number from 0"),
    "start": (int | None, "a number from 0, or null"),
    "documents": (str, "a word"),
    "apart": (bool, "true or false"),
    "whole_words": (bool, "true or false"),
    "masked": (float, "a fraction"),
    "published": (dict, "an object"),
    "packages": (dict, "an object"),
}


class Parts(NamedTuple):
    """What a run folder says of its model."""

    facts: dict[str, Any]  # all of run.json
    size: Any  # the config of the model
    tokenizers: dict[str, Tokenizer]  # by the names of their files


def read_parts(run: Run, task: str | None = None) -> Parts:
    """Sizes and tokenizers of a run (of a task); what does not belong together is an error in words."""
    facts = run.read_json("run.json")
    if task is not None and facts.get("task") != task:
        raise ValueError(f"{run.folder} is a run of {facts.get('task')!r}, not of {task!r}")
    _check_facts(facts, run)
    if not isinstance(facts.get("model"), dict):
        raise ValueError(f"{run.folder}/run.json is damaged: it does not say the sizes of the model")
    check_packages(facts, run)
    values = _modern(facts["model"])
    size = from_json(models.config_class(values), values)
    tokenizers, named = {}, tokenizer_names(run)
    needed = "source.json" if facts.get("task") == "translate" else "tokenizer.json"
    if needed not in named:
        raise ValueError(f"{run.folder}/run.json is damaged: it does not name {needed}, the tokenizer of the run")
    for name in named:
        run.read_bytes(name)  # checks it
        tokenizers[name] = Tokenizer.load(run.folder / name)
        expected = (name == "target.json" and size.target_vocabulary) or size.vocabulary
        digest = facts.get("tokenizers", {}).get(name)
        if tokenizers[name].size != expected or (digest and digest != checkpoint.digest(run.folder / name)):
            raise ValueError(
                f"{run.folder}/{name} is not the tokenizer of this run: "
                f"it has {tokenizers[name].size} tokens, the model {expected}"
            )
    return Parts(facts, size, tokenizers)


def _check_facts(facts: dict[str, Any], run: Run) -> None:
    """Refuses a run.json whose facts are not of the kind that tasks write."""
    for name, (kind, words) in FACTS.items():
        value = facts.get(name)
        sized = not isinstance(value, int) or isinstance(value, bool) or 0 <= value <= MOST
        if name in facts and not (isinstance(value, kind) and sized and isinstance(value, bool) == (kind is bool)):
            raise ValueError(f"{run.folder}/run.json is damaged: {name} must be {words}, got {reprlib.repr(value)}")
    if not all(isinstance(label, str) for label in facts.get("labels", ())):
        raise ValueError(f"{run.folder}/run.json is damaged: labels must be texts")
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
    """Sizes as they are named now. The first runs had one kind of feed-forward layer, and another aligner, which is
    left out: a model that had it translates."""
    values = dict(values)
    if "activation" in values:
        values["feedforward"] = f"dense(activation={values.pop('activation')!r})"
    if not isinstance(values.get("aligner", False), bool):
        values["aligner"] = False
    return models.completed(values)


def tokenizer_names(run: Run) -> list[str]:
    """The files of a run that hold its tokenizers; in the first runs run.json did not name them."""
    named = run.read_json("run.json").get("tokenizers")
    if named is not None and (not isinstance(named, dict) or not set(named) <= set(TOKENIZERS)):
        raise ValueError(
            f"{run.folder}/run.json is damaged: its tokenizers are some of {', '.join(TOKENIZERS)}, got "
            f"{reprlib.repr(named)}"
        )
    return list(named) if named else [name for name in ("source.json", "target.json") if run.has(name)]


class Loaded(NamedTuple):
    """A model that was trained, on its device, and what its run folder says of it. It is not for training on."""

    model: nn.Module
    parts: Parts
    run: Run


def load(folder: str | Path, task: str, *, which: str | int | None = None, device: str = "auto") -> Loaded:
    """From a run folder. `which` is a checkpoint: best, last, average or a step; None: the average where there is one,
    else the best."""
    run = Run.open(folder)
    parts = read_parts(run, task)
    model = models.build(parts.size)
    load_weights(model, run, which)
    model = model.to(pick_device(device)).eval()
    if next(model.parameters()).device.type == "cpu":
        pack_linears(model)
    return Loaded(model, parts, run)


def load_weights(model: nn.Module, run: Run, which: str | int | None = None) -> None:
    """Those of a checkpoint of a run into a model of its sizes."""
    found = run.find(which)
    tensors = {
        # in the first runs a block had its feed-forward layer in itself
        re.sub(r"(blocks\.\d+\.)(inner|outer)\.", r"\1feedforward.\2.", name): part
        for name, part in expand(found.tensors["model"]).items()
        if not name.startswith("aligner.") or getattr(model, "aligner", None) is not None
    }
    checkpoint.check_dtypes(tensors, model, found.path)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"the checkpoint does not fit the sizes in {run.folder}/run.json: {reason}") from error


def stems(tokenizer: Tokenizer) -> int:
    """How many beginnings a token can have, for the sizes of a model."""
    return 0 if tokenizer.stems is None else tokenizer.stems.shape[1]


def give_stems(model: nn.Module, tokenizer: Tokenizer) -> None:
    """Tells a new model which tokens are the beginnings of which."""
    for part in model.modules():
        if isinstance(part, Stack) and part.stems is not None:
            part.stems.copy_(torch.from_numpy(tokenizer.stems))


def read_config(run: Run) -> Any:
    """What a run was begun with."""
    path = run.folder / "config.yaml"
    if not run.has("config.yaml"):
        raise ValueError(
            f"{run.folder} has no config.yaml: compact and imported runs are to be used, and cannot be resumed"
        )
    values = parse_yaml(run.read_text("config.yaml"), path)
    if isinstance(values, dict) and isinstance(values.get("model"), dict):
        # what was left to the preset is so still, also where there was an option that is no more
        values["model"] = {name: value for name, value in values["model"].items() if value is not None}
        if "activation" in values["model"]:
            spec = f"dense(activation={values['model']['activation']!r})"
            raise ValueError(
                f"{path} is of one of the first runs, with model.activation: it can be used, but not gone on with; "
                f'a new run has --model.feedforward "{spec}"'
            )
    if isinstance(values, dict) and isinstance(values.get("training"), dict):
        # before there was a choice, every parameter decayed: a run keeps the rule that it began with
        values["training"].setdefault("weight_decay_on", "all")
    return from_json(of(run).config, values)


def compact_run(folder: str | Path, out: str | Path, which: str | int | None = None) -> Path:
    """A run folder with one checkpoint in 8 bits and nothing of its training: to be passed on."""
    run = Run.open(folder)
    facts = run.read_json("run.json") | {"manifest": MANIFEST}
    names = tokenizer_names(run)
    published = run.folder / "published"
    carried = [f"published/{path.name}" for path in sorted(published.iterdir())] if published.is_dir() else []
    for name in (*names, *carried):
        # what is passed on must be the run's own: a link could lead to anything on this machine
        check_inside(run.folder / name, run.folder)
    contents = {name: run.read_bytes(name) for name in (*names, *carried)}
    found = run.find(which)
    with Run.create(out, "regard compact") as small:
        if carried:
            (small.folder / "published").mkdir()
        for name, data in contents.items():
            (small.folder / name).write_bytes(data)
        small.record(*contents)
        state = {"step": found.state["step"], "compact": True}
        path = checkpoint.write(small.checkpoints, "average", {"model": compact(found.tensors["model"])}, state)
        small.write_json("run.json", facts)
    return path


def pick_device(name: str, precision: str = "float32") -> torch.device:
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
        raise ValueError(f"precision {precision!r} is for a GPU; on the CPU it is float32")
    return device
