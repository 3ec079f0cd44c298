"""The settings of a run that may change later: how long it trains, its learning rate, what is evaluated and kept, and
where its data are now. Any other change would make it another run."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.training.plan import Plan
    from regard.training.run import Run

NAMES = {
    "training.steps": "number of updates in all, more than were planned",
    "training.minutes": "minutes in all, more than were planned",
    "training.learning_rate": "peak learning rate; a factor for schedule paper",
    "training.evaluate_every": "updates between evaluations",
    "training.beam": "translate: beam size in evaluations",
    "training.patience": "stop after this number of evaluations without a better one; null: never",
    "training.stop_at": "stop as soon as the metric is this good; null: never",
    "training.save_every": "updates between checkpoints; null: as evaluate_every",
    "training.keep": "number of newest checkpoints to keep, besides the best",
    "training.average": "number of newest checkpoints to average at the end",
    "training.log_every": "updates between lines of the log",
    "training.threads": "number of CPU threads",
    "training.device": "device: cpu, cuda, cuda:1 ...",
    "training.recompute": "compute layers again in the backward pass, for less memory",
    "training.processes": "number of processes on this machine",
    "training.sharded": "several processes: each keeps a shard of weights and optimizer state",
    "training.restarts": "several processes: number of restarts when one dies",
    "training.timeout": "several processes: seconds to wait for another one",
    "training.tensorboard": "write events for TensorBoard",
    "data.source": "translate: where the same sentences are now",
    "data.target": "translate: where their translations are now",
    "data.valid_source": "translate: where the sentences to validate on are now",
    "data.valid_target": "translate: where their translations are now",
    "data.text": "language, masked, classify: where the same text is now",
    "data.valid": "language, masked: where the text to validate on is now",
    "data.labels": "classify: where the labels are now",
    "data.valid_text": "classify: where the texts to validate on are now",
    "data.valid_labels": "classify: where their labels are now",
    "data.images": "images, captions: where the same images are now",
    "data.valid_images": "images, captions: where the images to validate on are now",
    "data.captions": "captions: where the same captions are now",
    "data.valid_captions": "captions: where the captions to validate on are now",
}


OLD_NAMES = {"training.goal": "training.stop_at"}


def apply_changes(
    run: "Run", config: Any, plan: "Plan | None", requests: Mapping[str, Any]
) -> "tuple[Any, Plan | None, dict[str, list[Any]]]":
    """Config and plan of a run with changed settings, and the changes: {name: [before, now]}."""
    from regard.config import change

    requests = {OLD_NAMES.get(name, name): value for name, value in requests.items()}
    unknown = [name for name in requests if name not in NAMES]
    if unknown:
        raise ValueError(f"{unknown[0]} cannot change in a run that has begun; these can: {', '.join(NAMES)}")
    if {"training.steps", "training.minutes"} <= requests.keys():
        raise ValueError("training.steps and training.minutes both say how long to train: give one of them")
    made = {}
    for name, value in requests.items():
        section, _, field = name.partition(".")
        before = getattr(getattr(config, section), field, None)
        if name == "training.steps":
            before = before if plan is None else plan.steps
            config, plan = _longer(run, config, plan, value)
        elif name == "training.minutes":
            config, plan = _more_minutes(run, config, plan, value)
        else:
            config = change(config, name, value)
        if name == "training.evaluate_every" and plan is not None and value is not None:
            plan = dataclasses.replace(plan, evaluate_every=value)
        now = getattr(getattr(config, section), field)
        if now != before:
            made[name] = [before, now]
    return config, plan, made


def _longer(run: "Run", config: Any, plan: "Plan | None", steps: Any) -> "tuple[Any, Plan | None]":
    from regard.config import change

    if steps is None:
        raise ValueError("training.steps must be a number of updates, got null")
    planned = config.training.steps if plan is None else plan.steps
    for other in ("minutes", "epochs"):
        config = change(config, f"training.{other}", None)
    config = change(config, "training.steps", steps)
    _refuse_shorter(run, f"{steps:,} steps", steps, planned)
    return config, None if plan is None else dataclasses.replace(plan, steps=steps)


def _more_minutes(run: "Run", config: Any, plan: "Plan | None", minutes: Any) -> "tuple[Any, Plan | None]":
    from regard.config import change
    from regard.training import checkpoint
    from regard.training.plan import Plan, extend_plan

    if minutes is None:
        raise ValueError("training.minutes must be a number of minutes, got null")
    before = config.training
    planned = before.steps if plan is None else plan.steps
    for other in ("steps", "epochs"):
        config = change(config, f"training.{other}", None)
    config = change(config, "training.minutes", minutes)
    if planned is None:
        # the plan is still to be made
        return config, None
    last = checkpoint.newest(run.checkpoints, only=()).checkpoint
    step, spent = (0, 0.0) if last is None else (last.state["step"], last.state["seconds"])
    plan = extend_plan(
        plan or Plan(planned, before.warmup, before.evaluate_every), config.training.minutes, step, spent
    )
    words = f"{minutes:g} minutes in all, about {plan.steps:,} steps at the speed so far,"
    _refuse_shorter(run, words, plan.steps, planned)
    return config, plan


def _refuse_shorter(run: "Run", request: str, steps: int, planned: int | None) -> None:
    from regard.training import checkpoint

    names = checkpoint.names(run.checkpoints)
    at = int(names[-1].removeprefix("step-")) if names else 0
    if steps < max(at, planned or 0):
        plan = "" if planned is None else f"is planned for {planned:,} steps and "
        raise ValueError(f"{request} would shorten {run.folder}, which {plan}stands at step {at:,}: ask for more")
