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
MINUTES = 15.0  # where nothing is asked for, a plan takes no longer
STEPS = 500  # and no fewer, if there is time: few data have short epochs
EVALUATIONS = 10  # at most, where nothing is said about them
EVALUATION_SHARE = 0.1  # of the time, at most
FEWEST, LONGEST_SHARE, SHARE, SECONDS = 12, 0.1, 0.02, 2.0  # of the measuring: steps, shares of the time, seconds


@dataclass(frozen=True)
class Plan:
    """What was decided, and from what."""

    steps: int
    warmup: int
    evaluate_every: int
    measured: int = 0  # steps before it was made
    seconds_per_step: float | None = None  # without evaluations and checkpoints
    seconds_per_evaluation: float | None = None  # with its checkpoint
    minutes: float | None = None  # that it was made to fit

    def apply(self, config: TrainingConfig) -> TrainingConfig:
        """The config with what was left open."""
        return dataclasses.replace(
            config, steps=self.steps, epochs=None, minutes=None, warmup=self.warmup, evaluate_every=self.evaluate_every
        )


@dataclass(frozen=True)
class Speed:
    """What was measured, in seconds."""

    step: float
    evaluation: float
    save: float


def warmup(config: TrainingConfig, steps: int) -> int:
    """A tenth of the steps, at most 1,000. The paper's schedule peaks the higher the shorter it rises, so it rises for
    400 to 4,000."""
    if config.warmup is not None:
        return config.warmup
    if config.schedule == "paper":
        return min(4000, max(400, steps // 10))
    return min(1000, math.ceil(steps / 10))


def given(config: TrainingConfig, an_epoch: float) -> Plan | None:
    """The plan of a config that says how long to train, with so many steps an epoch; None: it has to be measured."""
    if config.minutes is not None or (config.steps is None and config.epochs is None):
        return None
    steps = config.steps or max(1, round(config.epochs * an_epoch))
    every = config.evaluate_every or min(1000, math.ceil(steps / EVALUATIONS))
    return Plan(steps, warmup(config, steps), every)


def enough(config: TrainingConfig, epochs: float, an_epoch: float) -> int:
    """Steps that were asked for in epochs, or that data are good for which are good for so many of them."""
    return math.ceil(config.epochs * an_epoch) if config.epochs else max(STEPS, math.ceil(epochs * an_epoch))


def measured_enough(steps: int, seconds: float, config: TrainingConfig, enough: int) -> bool:
    """Whether so many timed steps tell the speed: some seconds of them, but not too much of a short training."""
    whole = 60 * (config.minutes or MINUTES)
    if steps >= FEWEST and seconds >= max(SECONDS, SHARE * whole):
        return True
    ends_by_steps = config.minutes is None or config.epochs is not None
    return steps >= 2 and (seconds >= LONGEST_SHARE * whole or (ends_by_steps and steps >= LONGEST_SHARE * enough))


def longest_trial(config: TrainingConfig) -> float:
    """Seconds of an evaluation after which it is known that there is time for one only."""
    return EVALUATION_SHARE / 2 * 60 * (config.minutes or MINUTES)


def make(config: TrainingConfig, step: int, spent: float, speed: Speed, enough: int) -> Plan:
    """The plan of a run that took `step` steps in `spent` seconds. `enough` are the steps asked for in epochs, or those
    that the data are good for, which count where no time was asked for."""
    minutes = config.minutes or MINUTES
    left = 60 * minutes - spent
    evaluation = speed.evaluation + speed.save
    extra = 0.0 if config.save_every is None else speed.save / config.save_every
    if config.evaluate_every is not None:
        extra += evaluation / config.evaluate_every
        # the average is one more
        last = evaluation * (1 + (config.average > 0))
    else:
        most = int(EVALUATION_SHARE * 60 * minutes / max(evaluation, 1e-9))
        count = max(1, min(EVALUATIONS, most))
        last = evaluation * (count + (config.average > 0))
    steps = step + max(1, int((left - last) / (speed.step + extra)))
    if config.minutes is None or config.epochs is not None:
        steps = max(step + 1, min(steps, enough))
    every = config.evaluate_every or math.ceil(steps / count)
    return Plan(
        steps=steps,
        # it has hardly begun to rise while it was measured
        warmup=max(config.warmup, step) if config.warmup is not None else min(steps - 1, step + warmup(config, steps)),
        evaluate_every=every,
        measured=step,
        seconds_per_step=round(speed.step, 6),
        seconds_per_evaluation=round(evaluation, 6),
        minutes=config.minutes,
    )


def extend(plan: Plan, minutes: float, step: int, spent: float) -> Plan:
    """The plan of a run that is to take more minutes in all, `spent` seconds of them for `step` steps already, at the
    speed so far, evaluations included."""
    each = spent / step if step else (plan.seconds_per_step or 1.0)
    return dataclasses.replace(plan, steps=step + max(1, int((60 * minutes - spent) / each)), minutes=minutes)


def words(plan: Plan, batches: int) -> str:
    """The plan for people; an epoch has so many steps' worth of batches."""
    seconds = plan.steps * plan.seconds_per_step + plan.steps / plan.evaluate_every * plan.seconds_per_evaluation
    pace = f"{1 / plan.seconds_per_step:.2g} steps/s"
    epochs = plan.steps / max(1, batches)
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
    """The plan of a run, where one was made."""
    return from_json(Plan, run.read_json(FILE)) if run.has(FILE) else None


def write(run: Run, plan: Plan) -> None:
    run.write_json(FILE, dataclasses.asdict(plan))


def record(plan: Plan) -> dict[str, Any]:
    """What the log says of it."""
    return {"event": "plan", "step": plan.measured, **dataclasses.asdict(plan)}
