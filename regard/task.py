"""What a model is trained for. A task is one file with one class `Task` on the class below, and one line in TASKS.

    train    reads the data, learns the tokenizers, builds the model, writes the run folder, and trains
    resume   opens the run folder, reads the data again, and goes on
    load     opens the run folder for use: the model and its tokenizers, nothing of the training

Which of its tasks a run folder belongs to is written in its run.json.
"""

import dataclasses
import importlib
import re
import reprlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import yaml
from torch import nn

from regard import __version__, models
from regard.config import from_json
from regard.core.files import check_inside, parse_yaml
from regard.core.limits import MOST
from regard.data.tokenizer import Tokenizer
from regard.kernels.packed import pack_linears
from regard.layers.feedforward.base import active_parameters
from regard.models.transformer import Stack
from regard.training import checkpoint, loop
from regard.training import plan as plans
from regard.training.changes import changed
from regard.training.compact import compact, expand
from regard.training.display import Display
from regard.training.loop import State
from regard.training.run import MANIFEST, Run

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
}
TASKS = {  # in which module
    "translate": "regard.translation",
    "language": "regard.language",
    "masked": "regard.masked",
    "classify": "regard.classification",
}


class Data(Protocol):
    """What a task trains and validates on. The `sha256` among its facts tells whether it is still the same."""

    facts: dict[str, Any]


class Task(loop.Trained, ABC):
    """One kind of run: what its command line, its run folder and the training loop ask of it.

    The class says how data, tokenizers and model come to be. An instance has them all, and what the loop asks for:
    `model`, `batches`, `loss`, `tokens` and `evaluate` (training/loop.py).
    """

    name: ClassVar[str]
    about: ClassVar[str]  # one sentence for the help
    examples: ClassVar[tuple[str, ...]]  # command lines
    use: ClassVar[str]  # what to do with a finished run, with {run} for its folder
    config: ClassVar[type]  # a dataclass with out, data, model and training
    metrics: ClassVar[tuple[str, ...]]  # names in the result of `evaluate` that training.metric may be
    cpu_tokens: ClassVar[int] = 4096  # of a batch on a CPU, where nothing is said

    @classmethod
    @abstractmethod
    def read(cls, config: Any) -> Data:
        """The data that a config names."""

    @classmethod
    def plan(cls, config: Any, data: Any) -> tuple[Any, list[str]]:
        """The config of a new run with what was left open chosen by the data, and what to say of it."""
        return config, []

    @classmethod
    @abstractmethod
    def learn(cls, data: Any, config: Any) -> dict[str, Tokenizer]:
        """The tokenizers of a new run, by the names of their files."""

    @classmethod
    @abstractmethod
    def size(cls, config: Any, tokenizers: dict[str, Tokenizer], data: Any) -> Any:
        """The config of the model of a new run."""

    @classmethod
    def build(cls, config: Any, size: Any) -> nn.Module:
        """The model before its first step: drawn at random, where nothing else is said."""
        return models.build(size)

    @abstractmethod
    def __init__(self, config: Any, data: Any, tokenizers: dict[str, Tokenizer], model: nn.Module):
        """Everything ready for the first step, on the model's device."""

    # what the run folder keeps beside config, tokenizers and checkpoints

    def facts(self) -> dict[str, Any]:
        """What has to be known of the task to use the model, for run.json."""
        return {}

    def files(self) -> dict[str, str]:
        """Texts by the names of their files."""
        return {}

    def notes(self) -> list[str]:
        """What is said before the first step."""
        return []


def find(name: Any) -> type[Task]:
    """The class of a task."""
    if not isinstance(name, str) or name not in TASKS:
        raise ValueError(f"no task {name!r}; known: {', '.join(TASKS)}")
    return importlib.import_module(TASKS[name]).Task


def of(run: Run) -> type[Task]:
    """The class of the task that a run folder belongs to."""
    name = run.read_json("run.json").get("task")
    if not isinstance(name, str) or name not in TASKS:
        raise ValueError(f"{run.folder} is a run of {name!r}, which is none of {', '.join(TASKS)}")
    return find(name)


def train(task: type[Task], config: Any, display: Display) -> State:
    """`regard train`: a new run. Nothing is written before all is known to fit."""
    began = time.monotonic()
    _check_metric(task, config)
    Run.vacant(config.out)
    data = task.read(config)
    config, chosen = task.plan(config, data)
    config, chosen = _batch_size(task, config, chosen)
    tokenizers = task.learn(data, config)
    size = task.size(config, tokenizers, data)
    ready = _ready(task, config, data, tokenizers, partial(task.build, config, size))
    with Run.create(config.out, f"regard train {task.name}") as run:
        for name, tokenizer in tokenizers.items():
            tokenizer.save(run.folder / name)
        run.record(*tokenizers)
        for name, text in ready.files().items():
            run.write_text(name, text)
        run.write_text("config.yaml", _yaml(config))
        facts = {
            "task": task.name,
            "regard": __version__,
            "manifest": MANIFEST,
            "model": dataclasses.asdict(size),
            **ready.facts(),
            "parameters": sum(part.numel() for part in ready.model.parameters()),
            "active": active_parameters(ready.model),
            "tokenizers": {name: checkpoint.digest(run.folder / name) for name in tokenizers},
            "data": data.facts,
        }
        run.write_json("run.json", facts)
        for note in chosen:
            display.note(note)
        return _go(ready, data, config, run, display, spent=time.monotonic() - began)


def _batch_size(task: type[Task], config: Any, chosen: list[str]) -> tuple[Any, list[str]]:
    """The config with a batch size that suits the machine, where it has none."""
    training = config.training
    if training.tokens is not None:
        return config, chosen
    device = pick_device(training.device, training.precision).type
    tokens = max(task.cpu_tokens if device == "cpu" else 4096, getattr(config.data, "length", 0))
    note = f"training.tokens {tokens:,}, chosen for a {'CPU' if device == 'cpu' else 'GPU'}"
    return dataclasses.replace(config, training=dataclasses.replace(training, tokens=tokens)), [*chosen, note]


def resume(
    folder: str | Path, display: Display, steps: int | None = None, changes: Mapping[str, Any] | None = None
) -> State:
    """`regard resume`: goes on with a run, or makes a finished one longer. `changes` are settings that may change, by
    their dotted names (`regard.training.changes.NAMES`); `steps` is one of them."""
    run = Run.open(folder)
    wishes = dict(changes or {}) | ({} if steps is None else {"training.steps": steps})
    with run.writing("regard resume"):
        run.adopt()
        return _resume(run, display, wishes)


def _resume(run: Run, display: Display, wishes: Mapping[str, Any]) -> State:
    task, (config, plan, made) = of(run), changed(run, read_config(run), plans.read(run), wishes)
    parts = read_parts(run)
    data = task.read(config)
    if data.facts["sha256"] != parts.facts.get("data", {}).get("sha256"):
        raise ValueError(f"the training data of {run.folder} has changed since the run began: it cannot go on exactly")
    begun, build = config, partial(task.build, config, parts.size)
    if checkpoint.names(run.checkpoints):
        # what it was begun from need not be there any more: the run has all of that
        build = partial(models.build, parts.size)
        if getattr(config, "init", None) is not None:
            begun = dataclasses.replace(config, init=str(run.folder))
    ready = _ready(task, begun, data, parts.tokenizers, build)
    if made:
        run.write_text("config.yaml", _yaml(config))
        if plan is not None:
            plans.write(run, plan)
        step = (checkpoint.names(run.checkpoints) or ["step-0"])[-1].removeprefix("step-")
        history = [*parts.facts.get("changes", []), {"step": int(step), **made}]
        run.write_json("run.json", parts.facts | {"changes": history})
        for name, (before, now) in made.items():
            display.note(f"{name}: {now}, was {before}")
    return _go(ready, data, config, run, display, changes=made)


def _ready(
    task: type[Task], config: Any, data: Data, tokenizers: dict[str, Tokenizer], build: Callable[[], nn.Module]
) -> Task:
    device = pick_device(config.training.device, config.training.precision)
    torch.manual_seed(config.training.seed)
    return task(config, data, tokenizers, build().to(device))


def _go(
    task: Task,
    data: Data,
    config: Any,
    run: Run,
    display: Display,
    spent: float = 0.0,
    changes: dict[str, Any] | None = None,
) -> State:
    if config.training.threads is not None:
        torch.set_num_threads(config.training.threads)
    for name, part in data.facts.items():
        if name.startswith("skipped"):
            for reason, skipped in part.items():
                display.note(f"left out {skipped['count']} lines: {reason}, first at {skipped['first']}")
    count, device = (sum(part.numel() for part in task.model.parameters()), next(task.model.parameters()).device)
    active = active_parameters(task.model)
    of_them = "" if active == count else f", {active:,} of them active"
    *before, last = task.notes()
    for note in (*before, f"{last}; {count:,} parameters{of_them} on {device}; {run.folder}"):
        display.note(note)
    return loop.train(task, config.training, run, display, before=spent, changes=changes)


def _check_metric(task: type[Task], config: Any) -> None:
    if config.training.metric not in task.metrics:
        known = ", ".join(task.metrics)
        raise ValueError(f"training.metric of {task.name} must be one of {known}, got {config.training.metric!r}")


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
        raise ValueError(f"{run.folder} has no config.yaml: compact and imported runs are to be used, and cannot go on")
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


def _yaml(config: Any) -> str:
    return yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False)


def _plain(values: Any) -> Any:
    """Tuples as lists, for YAML."""
    if isinstance(values, dict):
        return {name: _plain(value) for name, value in values.items()}
    return [_plain(value) for value in values] if isinstance(values, tuple | list) else values
