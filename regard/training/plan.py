"""How long a run trains: steps, warm-up and evaluations, from what was asked for and the speed of this machine.

Where a config leaves the steps open, the first of them are timed, and so are one evaluation and one checkpoint. Then
the plan is made, once, and written into the run: a resumed run reads it and never measures again, so its bits are a
function of seed and plan. Until then the learning rate rises by a slope that does not depend on the plan.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from regard.config import from_json
from regard.training.config import TrainingConfig
from regard.training.run import Run

FILE = "plan.json"
# Where the config does not say how long to train:
MINUTES = 15.0  # at most
STEPS = 500  # at least, if there is time: a small corpus has short epochs
EVALUATIONS = 10  # at most
EVALUATION_SHARE = 0.1  # of the time, at most
# When enough steps are timed: this number of them, in this share of the time and these seconds; or earlier, when they
# take a tenth of the time or are a tenth of the steps.
FEWEST, SHARE, SECONDS, LONGEST_SHARE = 12, 0.02, 2.0, 0.1


@dataclass(frozen=True)
class Plan:
    """What was decided, and from what."""

    steps: int
    warmup: int
    evaluate_every: int
    measured: int = 0  # steps before it was made
    seconds_per_step: float | None = None  # without evaluations and checkpoints
    seconds_per_evaluation: float | None = None  # with its checkpoint
    minutes: float | None = None  # that were asked for

    def apply(self, config: TrainingConfig) -> TrainingConfig:
        """The config with the settings that it left open."""
        return dataclasses.replace(
            config, steps=self.steps, epochs=None, minutes=None, warmup=self.warmup, evaluate_every=self.evaluate_every
        )


@dataclass(frozen=True)
class Speed:
    """What was measured, in seconds."""

    step: float
    evaluation: float
    save: float


def warmup_steps(config: TrainingConfig, steps: int) -> int:
    """Steps of the warm-up: a tenth of all, at most 1,000. Schedule paper has a higher peak the shorter its warm-up is,
    so its warm-up takes 400 to 4,000."""
    if config.warmup is not None:
        return config.warmup
    if config.schedule == "paper":
        return min(4000, max(400, steps // 10))
    return min(1000, math.ceil(steps / 10))


def plan_without_timing(config: TrainingConfig, steps_per_epoch: float) -> Plan | None:
    """The plan of a config that says how many steps or epochs to train; None: steps have to be timed first."""
    if config.minutes is not None:
        return None
    if config.steps is not None:
        steps = config.steps
    elif config.epochs is not None:
        steps = max(1, round(config.epochs * steps_per_epoch))
    else:
        return None
    every = config.evaluate_every or min(1000, math.ceil(steps / EVALUATIONS))
    return Plan(steps, warmup_steps(config, steps), every)


def most_steps(config: TrainingConfig, epochs: float, steps_per_epoch: float) -> int:
    """The number of steps that a plan does not exceed unless minutes are asked for: the epochs of the config, or those
    that the task trains for by default."""
    if config.epochs:
        return math.ceil(config.epochs * steps_per_epoch)
    return max(STEPS, math.ceil(epochs * steps_per_epoch))


def is_timed_enough(steps: int, seconds: float, config: TrainingConfig, most: int) -> bool:
    """Whether `steps` timed steps, in `seconds`, tell the speed without taking too much of a short training. `most` is
    that of `most_steps`."""
    whole = 60 * (config.minutes or MINUTES)
    if steps >= FEWEST and seconds >= max(SECONDS, SHARE * whole):
        return True
    ends_by_steps = config.minutes is None or config.epochs is not None
    return steps >= 2 and (seconds >= LONGEST_SHARE * whole or (ends_by_steps and steps >= LONGEST_SHARE * most))


def longest_trial_evaluation(config: TrainingConfig) -> float:
    """Seconds after which a trial evaluation is cut short: there will be time for one only."""
    return EVALUATION_SHARE / 2 * 60 * (config.minutes or MINUTES)


def make_plan(config: TrainingConfig, step: int, spent: float, speed: Speed, most: int) -> Plan:
    """The plan of a run that took `step` steps in `spent` seconds. `most` is that of `most_steps`."""
    minutes = config.minutes or MINUTES
    seconds_left = 60 * minutes - spent
    evaluation = speed.evaluation + speed.save
    seconds_per_step = speed.step + (0.0 if config.save_every is None else speed.save / config.save_every)
    averaging = evaluation * (config.average > 0)
    count = max(1, min(EVALUATIONS, int(EVALUATION_SHARE * 60 * minutes / max(evaluation, 1e-9))))
    if config.evaluate_every is not None:
        seconds_per_step += evaluation / config.evaluate_every
        # the last step is evaluated too
        fixed = evaluation + averaging
    else:
        fixed = evaluation * count + averaging
    steps = step + max(1, int((seconds_left - fixed) / seconds_per_step))
    if config.minutes is None or config.epochs is not None:
        steps = max(step + 1, min(steps, most))
    if config.warmup is not None:
        warmup = max(config.warmup, step)
    else:
        # the learning rate has hardly begun to rise while the steps were timed
        warmup = min(steps - 1, step + warmup_steps(config, steps))
    return Plan(
        steps=steps,
        warmup=warmup,
        evaluate_every=config.evaluate_every or math.ceil(steps / count),
        measured=step,
        seconds_per_step=round(speed.step, 6),
        seconds_per_evaluation=round(evaluation, 6),
        minutes=config.minutes,
    )


def extend_plan(plan: Plan, minutes: float, step: int, spent: float) -> Plan:
    """The plan of a run that is to train for `minutes` in all, of which `spent` seconds went into `step` steps already,
    at the speed so far, evaluations included."""
    each = spent / step if step else (plan.seconds_per_step or 1.0)
    return dataclasses.replace(plan, steps=step + max(1, int((60 * minutes - spent) / each)), minutes=minutes)


def describe(plan: Plan, steps_per_epoch: float) -> str:
    """A timed plan for people."""
    if plan.seconds_per_step is None or plan.seconds_per_evaluation is None:
        raise ValueError("only a plan whose steps were timed can be described: this one came from the config alone")
    seconds = plan.steps * plan.seconds_per_step + plan.steps / plan.evaluate_every * plan.seconds_per_evaluation
    pace = f"{1 / plan.seconds_per_step:.2g} steps/s"
    epochs = plan.steps / max(1, steps_per_epoch)
    passes = f"{epochs:.2g} epochs" if epochs < 10 else f"{epochs:.0f} epochs"
    rest = f"warm-up {plan.warmup:,}, an evaluation every {plan.evaluate_every:,}"
    if plan.minutes is not None:
        return f"plan: {plan.steps:,} steps ({passes}) in {_minutes(plan.minutes)} at {pace}; {rest}"
    about = _minutes(float(f"{seconds / 60:.2g}")) if seconds >= 90 else f"{seconds:.0f} seconds"
    return (
        f"plan: {plan.steps:,} steps ({passes}), about {about} at {pace}; {rest}. "
        "For longer or shorter: --training.minutes N or --training.steps N"
    )


def _minutes(minutes: float) -> str:
    return "1 minute" if minutes == 1 else f"{minutes:g} minutes"


def read(run: Run) -> Plan | None:
    """The plan of a run; None: it was not made yet."""
    return from_json(Plan, run.read_json(FILE)) if run.has(FILE) else None


def write(run: Run, plan: Plan) -> None:
    run.write_json(FILE, dataclasses.asdict(plan))


def log_record(plan: Plan) -> dict[str, Any]:
    """The line of the log about it."""
    return {"event": "plan", "step": plan.measured, **dataclasses.asdict(plan)}
