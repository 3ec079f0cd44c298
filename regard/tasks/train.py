"""Training runs of any task.

train    reads the data, trains the tokenizers, builds the model, writes the run folder, and trains
resume   opens the run folder, reads the data again, and continues
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from regard import __version__, models
from regard.core.model import Model
from regard.data.tokenizer import Tokenizer
from regard.layers.feedforward.base import active_parameters
from regard.tasks import of
from regard.tasks.base import Data, Task
from regard.tasks.load import Parts, needed_packages, pick_device, read_config, read_parts
from regard.training import checkpoint, loop
from regard.training import plan as plans
from regard.training.changes import apply_changes
from regard.training.compiling import check_compiles
from regard.training.config import TrainingConfig
from regard.training.display import Display
from regard.training.distributed.join import joined
from regard.training.distributed.world import Alone, World
from regard.training.recomputing import list_recomputed
from regard.training.run import MANIFEST, ReadOnlyRun, Run
from regard.training.state import State


def train(task: type[Task], config: Any, display: Display, turn: AbstractContextManager[Any] | None = None) -> State:
    """`regard train`: a new run. Nothing is written before data, tokenizers and model are known to fit. Started again
    after one of its processes died, it continues. `turn` is entered when all is ready, for the steps."""
    with joined(config.training) as world:
        if not world.is_main:
            world.barrier()
            return _follow(config.out, world)
        # torchrun also starts processes again that refused a folder because it holds another run
        if world.has_begun_run() and Run(config.out).exists():
            return _continue(Run.open(config.out), display, world, {}, turn)
        return _begin(task, config, display, world, turn)


def resume(
    folder: str | Path,
    display: Display,
    steps: int | None = None,
    changes: Mapping[str, Any] | None = None,
    turn: AbstractContextManager[Any] | None = None,
) -> State:
    """`regard resume`: continues a run, or makes a finished one longer. `changes` are settings that may change, by
    their dotted names (`regard.training.changes.NAMES`); `steps` is one of them. `turn` is entered when all is ready,
    for the steps."""
    run = Run.open(folder)
    requests = dict(changes or {}) | ({} if steps is None else {"training.steps": steps})
    with joined(read_training(run, requests)) as world:
        return _continue(run, display, world, requests, turn)


def read_training(run: Run, changes: Mapping[str, Any]) -> TrainingConfig:
    """The training settings that a run continues with; settings that it cannot continue with are refused."""
    if "soup" in run.read_json("run.json"):
        raise ValueError(f"{run.folder} is a soup and cannot be resumed: begin a new run with --init {run.folder}")
    config, _, _ = apply_changes(run, read_config(run), plans.read(run), changes)
    return config.training


def _begin(
    task: type[Task], config: Any, display: Display, world: World, turn: AbstractContextManager[Any] | None
) -> State:
    """The main process of a new run."""
    began = time.monotonic()
    _check_metric(task, config)
    Run.vacant(config.out, trains=True)
    data = task.read_data(config)
    config, chosen = task.complete_config(config, data)
    device = pick_device(config.training.device, config.training.precision).type
    config, note = task.choose_batch_size(config, device)
    chosen = chosen if note is None else [*chosen, note]
    tokenizers = task.train_tokenizers(data, config)
    model_config = task.model_config(config, tokenizers, data)
    ready = _ready(task, config, data, tokenizers, partial(task.build_model, config, model_config), world)
    with Run.create(config.out, f"regard train {task.name}") as run:
        world.mark_run_begun()
        for name, tokenizer in tokenizers.items():
            tokenizer.save(run.folder / name)
        run.record(*tokenizers)
        for name, text in ready.files().items():
            run.write_text(name, text)
        run.write_text("config.yaml", to_yaml(config))
        facts = {
            "task": task.name,
            "regard": __version__,
            "manifest": MANIFEST,
            "model": dataclasses.asdict(model_config),
            **ready.facts(),
            "parameters": sum(part.numel() for part in ready.model.parameters()),
            "active": active_parameters(ready.model),
            "tokenizers": {name: checkpoint.digest(run.folder / name) for name in tokenizers},
            "data": data.facts,
        }
        if (init := task.init_folder(config)) is not None:
            facts["init"] = {"run": init, "sha256": checkpoint.listed_digest(Run.open(init).find().path)}
        if packages := needed_packages(task.name, model_config):
            facts["packages"] = packages
        run.write_json("run.json", facts)
        world.barrier()
        for note in chosen:
            display.note(note)
        return _go(ready, data, config, run, display, world, spent=time.monotonic() - began, turn=turn)


def _follow(folder: str | Path, world: World) -> State:
    """Every other process, of a run that the main one has written: it reads, and leaves writing and speaking to it."""
    run = ReadOnlyRun.open(folder)
    config, parts = read_config(run), read_parts(run)
    data = _read_data_again(run, config, parts, "its processes do not train on the same data")
    return _go(_ready_to_continue(run, config, data, parts, world), data, config, run, Display(quiet=True), world)


def _continue(
    run: Run,
    display: Display,
    world: World,
    requests: Mapping[str, Any],
    turn: AbstractContextManager[Any] | None = None,
) -> State:
    if not world.is_main:
        world.barrier()
        return _follow(run.folder, world)
    with run.writing("regard resume"):
        run.adopt()
        return _resume(run, display, world, requests, turn)


def _resume(
    run: Run, display: Display, world: World, requests: Mapping[str, Any], turn: AbstractContextManager[Any] | None
) -> State:
    """The main process of a run that continues."""
    config, plan, made = apply_changes(run, read_config(run), plans.read(run), requests)
    parts = read_parts(run)
    data = _read_data_again(run, config, parts, "it cannot be resumed exactly: restore the data, or begin a new run")
    ready = _ready_to_continue(run, config, data, parts, world)
    if made:
        run.write_text("config.yaml", to_yaml(config))
        if plan is not None:
            plans.write(run, plan)
        step = (checkpoint.names(run.checkpoints) or ["step-0"])[-1].removeprefix("step-")
        history = [*parts.facts.get("changes", []), {"step": int(step), **made}]
        run.write_json("run.json", parts.facts | {"changes": history})
        for name, (before, now) in made.items():
            display.note(f"{name}: {now}, was {before}")
    world.barrier()
    return _go(ready, data, config, run, display, world, changes=made, turn=turn)


def open_to_evaluate(run: Run, device: str = "auto") -> tuple[Task, Any]:
    """The task of a run that has checkpoints, with its data, to call `evaluate` on other weights; and its config. The
    weights of its model are random."""
    config, parts = read_config(run), read_parts(run)
    precision = config.training.precision if pick_device(device).type == "cuda" else "float32"
    config = dataclasses.replace(
        config, training=dataclasses.replace(config.training, device=device, precision=precision)
    )
    data = _read_data_again(run, config, parts, "other models cannot be compared with it: restore the data")
    return _ready_again(run, config, data, parts, Alone()), config


def _read_data_again(run: Run, config: Any, parts: Parts, consequence: str) -> Data:
    """The data of a run, which must be what it was; `consequence` is for the message if it is not."""
    data = of(run).read_data(config)
    if data.facts["sha256"] != parts.facts.get("data", {}).get("sha256"):
        raise ValueError(f"the training data of {run.folder} has changed since the run began, so {consequence}")
    return data


def _ready_to_continue(run: Run, config: Any, data: Data, parts: Parts, world: World) -> Task:
    if checkpoint.names(run.checkpoints):
        return _ready_again(run, config, data, parts, world)
    task = of(run)
    return _ready(task, config, data, parts.tokenizers, partial(task.build_model, config, parts.config), world)


def _ready_again(run: Run, config: Any, data: Data, parts: Parts, world: World) -> Task:
    """The task of a run that has checkpoints. The run that --init named may be gone: the checkpoints have all of it."""
    if getattr(config, "init", None) is not None:
        config = dataclasses.replace(config, init=str(run.folder))
    return _ready(of(run), config, data, parts.tokenizers, partial(models.build, parts.config), world)


def _ready(
    task: type[Task],
    config: Any,
    data: Data,
    tokenizers: dict[str, Tokenizer],
    build: Callable[[], Model],
    world: World,
) -> Task:
    training = config.training
    device = world.device(pick_device(training.device, training.precision))
    torch.manual_seed(training.seed)
    ready = task(config, data, tokenizers, build().to(device))
    if training.compile:
        check_compiles(ready.model)
    if training.recompute:
        list_recomputed(ready.model)
    world.check(ready)
    return ready


def _go(
    task: Task,
    data: Data,
    config: Any,
    run: Run,
    display: Display,
    world: World,
    spent: float = 0.0,
    changes: dict[str, Any] | None = None,
    turn: AbstractContextManager[Any] | None = None,
) -> State:
    if config.training.threads is not None:
        torch.set_num_threads(config.training.threads)
    for name, part in data.facts.items():
        if name.startswith("skipped"):
            for reason, skipped in part.items():
                display.note(f"omitted {skipped['count']} {task.data_unit}: {reason}, first at {skipped['first']}")
    count, device = (sum(part.numel() for part in task.model.parameters()), next(task.model.parameters()).device)
    active = active_parameters(task.model)
    of_them = "" if active == count else f", {active:,} of them active"
    *before, last = task.notes()
    processes = f" in {world.size} processes" if world.size > 1 else ""
    for note in (*before, f"{last}; {count:,} parameters{of_them} on {device}{processes}; {run.folder}"):
        display.note(note)
    with turn or nullcontext():
        return loop.train(task, config.training, run, display, world=world, before=spent, changes=changes)


def _check_metric(task: type[Task], config: Any) -> None:
    if config.training.metric not in task.metrics:
        known = ", ".join(task.metrics)
        raise ValueError(f"training.metric of {task.name} must be one of {known}, got {config.training.metric!r}")


def to_yaml(config: Any) -> str:
    """The text of a config file."""
    return yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False)


def _plain(values: Any) -> Any:
    """Tuples as lists, for YAML."""
    if isinstance(values, dict):
        return {name: _plain(value) for name, value in values.items()}
    return [_plain(value) for value in values] if isinstance(values, tuple | list) else values
