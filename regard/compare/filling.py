"""Fills tables of scores: a sweep of learning rates, then fresh seeds at the best one, for all rows alike.

What can be trained next follows from the cells that are stored, so a killed comparison continues where it was. Several
tables share the processes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from regard.compare import budget
from regard.compare.jobs import STOPPED, UNCAPTURED, Job, Outcome, finished
from regard.compare.learn import Trial
from regard.compare.plan import BASELINE
from regard.compare.quality import ENSEMBLE, SWEEP_SEED, QualityPlan, TrialKey
from regard.compare.run import Environment, provenance
from regard.compare.runs import RunTrial
from regard.compare.store import DONE, Cell, Folder

MAX_LOAD = 0.5  # per core, with which a budget of minutes is a fair one
RETRIED = ("error", "absent")  # statuses of cells that are trained again: what failed may have been mended


class Filling:
    """The cells of a plan while they are trained: which have their answer, which are begun, and which are ready."""

    def __init__(self, plan: QualityPlan, folder: Folder, environment: Environment):
        self.plan, self.folder, self.environment = plan, folder, environment
        self.rates = list(plan.grid())
        self.begun: set[TrialKey] = set()
        self.ended: set[TrialKey] = set()
        self.started: dict[TrialKey, float] = {}  # when the cells in progress began
        self.seconds: dict[str, list[float]] = {}  # that cells took in this call, by row
        self.uncaptured: set[str] = set()  # rows that train without CUDA graphs
        self.specs: list[str] = []

    def begin(self) -> None:
        """Finds the rows that can be trained, and stores why the others cannot."""
        self.specs = [spec for spec, refusal in self.plan.rows() if not refusal and self._fits(spec)]

    def ready(self) -> list[TrialKey]:
        """The cells that can be trained now and are not begun: those of the sweep, then those of one more learning rate
        if a best one is at the edge of the grid, then the seeds, then what is derived from their runs."""
        trained = [spec for spec in self.specs if not self.plan.variant(spec).of]
        sweep = [(spec, rate, SWEEP_SEED) for rate in self.rates for spec in trained] if self.plan.sweeps else []
        if waiting := self._unanswered(sweep):
            return self._fresh(waiting)
        is_first = len(self.rates) == len(self.plan.grid())
        if is_first and (wider := wider_rate(self, trained)) is not None:
            self.rates.append(wider)
            return self.ready()
        best = [(spec, rate) for spec in trained if (rate := best_rate(self, spec)) is not None]
        seeds = [(spec, rate, seed) for seed in self.plan.seed_numbers for spec, rate in best]
        # a row whose runs are there need not wait for the others
        return self._fresh([*self._unanswered(seeds), *self._unanswered(self._derived())])

    def _derived(self) -> Iterable[TrialKey]:
        """Cells that evaluate trained runs in another way: with other decoding, or as an ensemble."""
        for spec in self.specs:
            variant = self.plan.variant(spec)
            rate = best_rate(self, spec)
            if not variant.of or rate is None:
                continue
            runs = {seed: self.cell(variant.of, rate, seed) for seed in self.plan.seed_numbers}
            done = [seed for seed, cell in runs.items() if cell is not None and cell.status == DONE]
            if not variant.ensemble:
                yield from ((spec, rate, seed) for seed in done)
            elif len(done) == len(runs):
                yield spec, rate, ENSEMBLE

    def _unanswered(self, cells: Iterable[TrialKey]) -> list[TrialKey]:
        waiting = [cell for cell in cells if cell not in self.ended]
        if self.environment.force:
            return waiting
        return [cell for cell in waiting if (known := self.cell(*cell)) is None or known.status in RETRIED]

    def _fresh(self, cells: list[TrialKey]) -> list[TrialKey]:
        return [cell for cell in cells if cell not in self.begun]

    def answered(self, spec: str) -> list[bool]:
        """Of every cell of a row, as far as it is known now which there are, whether it has its answer: a best rate at
        an edge adds one to the sweep, and a row of which every rate fails gets no seeds."""
        plan, variant = self.plan, self.plan.variant(spec)
        trained = variant.of or spec
        sweep = [(trained, rate, SWEEP_SEED) for rate in self.rates] if plan.sweeps else []
        swept = [not self._unanswered([cell]) for cell in sweep]
        own = [] if variant.of else swept
        rate = best_rate(self, spec)
        if rate is None:
            return own if all(swept) else [*own, *[False] * (1 if variant.ensemble else plan.seeds)]
        seeds = list(plan.seed_numbers)
        if variant.of:
            runs = {seed: self.cell(trained, rate, seed) for seed in seeds}
            seeds = [seed for seed, run in runs.items() if run is None or run.status in (DONE, *RETRIED)]
        if variant.ensemble:
            seeds = [ENSEMBLE] if len(seeds) == plan.seeds else []
        return [*own, *(not self._unanswered([(spec, rate, seed)]) for seed in seeds)]

    def seconds_left(self, left: dict[str, int]) -> float | None:
        """What the cells that are left of each row take, one after another: as those of the row took, or before it has
        one, those of the table; None: none has ended yet."""
        every = [seconds for row in self.seconds.values() for seconds in row]
        if not any(left.values()) or not every:
            return None if any(left.values()) else 0.0
        each = {spec: fmean(self.seconds.get(spec, every)) for spec in left}
        now = self.environment.clock()
        begun = sum(min(now - since, each.get(spec, 0.0)) for (spec, *_), since in self.started.items())
        return max(0.0, sum(count * each[spec] for spec, count in left.items()) - begun)

    def _fits(self, spec: str) -> bool:
        """Whether a row has as many parameters as the baseline; a row that has not is stored as such."""
        plan = self.plan
        if plan.is_run or plan.anyway:
            return True
        trial = plan.trial(spec, self.rates[0], SWEEP_SEED)
        task = trial.find_task()
        try:
            target, _ = budget.count(trial.config(BASELINE, task))
            sized = budget.equalize_parameters(trial.config(spec, task), target)
        except ValueError as error:
            self.put((spec, self.rates[0], SWEEP_SEED), ("refused", str(error), ({}, {})))
            return False
        if sized.over:
            self.put((spec, self.rates[0], SWEEP_SEED), ("over", sized.over, ({}, {})))
        return not sized.over

    def cell(self, spec: str, rate: float, seed: int) -> Cell | None:
        """The answer of a cell, if it has one."""
        return self.folder.get(self.plan.question(spec, rate, seed))

    def trial(self, asked: TrialKey) -> Trial | RunTrial:
        """The settings of a cell, for the process that trains it."""
        self.begun.add(asked)
        self.started[asked] = self.environment.clock()
        if self.plan.is_run:
            return replace(self.plan.run_trial(*asked, self.folder), afresh=self.environment.force)
        return replace(self.plan.trial(*asked, self.folder), graphs=asked[0] not in self.uncaptured)

    def end(self, asked: TrialKey, outcome: Outcome) -> str:
        """Stores an outcome, and returns the line about it; empty: the cell has no answer yet."""
        status, note, found = outcome
        spec, rate, seed = asked
        taken = self.environment.clock() - self.started.pop(asked)
        if status == UNCAPTURED:
            self.environment.report(f"{spec} {self.plan.name}: {note}")
            self.uncaptured.add(spec)
            self.begun.remove(asked)
            return ""
        self.ended.add(asked)
        if status == STOPPED:
            return ""
        if status == DONE:
            self.seconds.setdefault(spec, []).append(taken)
        self.put(asked, outcome)
        if not self.plan.is_run:
            Path(self.plan.trial(*asked, self.folder).saved).unlink(missing_ok=True)
        score = f"{found[0]['score']:.3f}, {found[0]['seconds']:.0f} s" if status == DONE else f"{status}: {note}"
        who = "ensemble" if seed == ENSEMBLE else f"seed {seed}"
        return f"{spec} {self.plan.name} rate {rate:g} {who}: {score}"

    def put(self, asked: TrialKey, outcome: Outcome) -> None:
        status, note, found = outcome
        where = provenance(self.plan.device, self.environment.command)
        self.folder.put(Cell(self.plan.question(*asked), status, note, *found, where))


def check_quality(plans: Sequence[QualityPlan], folder: Folder, environment: Environment) -> None:
    """Raises ValueError where none of the cells that are left can be trained, which each of them would say. What is
    finished is shown without its data."""
    for plan in plans:
        if plan.is_run:
            filling = Filling(plan, folder, environment)
            filling.begin()
            if filling.ready():
                plan.check(folder)


def fill_quality(
    plans: Sequence[QualityPlan],
    folder: Folder,
    environment: Environment | None = None,
    train: Callable[[Any], Outcome] | None = None,
) -> None:
    """Trains every cell of the plans that has no answer yet, until the time ends; what is in progress then continues
    the next time. `train` stands in for the processes."""
    environment = environment or Environment()
    if not plans:
        return
    with folder.writing("regard compare"), environment.listening():
        fillings = [Filling(plan, folder, environment) for plan in plans]
        for filling in fillings:
            filling.begin()
        _check_load(fillings, folder, environment)
        if train is None:
            _train(fillings, environment)
            return
        while pair := _next(fillings):
            filling, asked = pair
            environment.check_signals()
            _end(fillings, filling, asked, train(filling.trial(asked)))


def _check_load(fillings: list[Filling], folder: Folder, environment: Environment) -> None:
    """Raises where cells are to be trained for minutes beside other work, which would get less done in them."""
    if environment.force or not any(filling.plan.axis == "minutes" and filling.ready() for filling in fillings):
        return
    load = environment.load()
    if load > MAX_LOAD:
        raise ValueError(
            "a budget of minutes needs a machine without other work: the load average of the last minute is "
            f"{load:.2g} per core, and should be at most {MAX_LOAD:g}. Wait until it is, and continue with "
            f"regard compare --out {folder.path}; or use a budget of updates or tokens; or train all the same with "
            "--force"
        )


def _train(fillings: list[Filling], environment: Environment) -> None:
    """Processes, as many at a time as the plans allow, until nothing is left or the time ends."""
    jobs = min(filling.plan.jobs for filling in fillings)
    deadline = environment.clock() + 60 * max(filling.plan.minutes for filling in fillings)
    running: dict[Job, tuple[Filling, TrialKey]] = {}
    free: list[Job] = []
    again: list[tuple[Filling, TrialKey]] = []  # cells that get a new process
    try:
        while environment.clock() < deadline:
            environment.check_signals()
            while len(running) < jobs and (pair := _next(fillings)) is not None:
                filling, asked = pair
                running[_job(filling.trial(asked), [] if pair in again else free)] = pair
            if not running:
                return
            for job in finished(list(running), 1.0):
                filling, asked = running.pop(job)
                outcome = job.outcome()
                if outcome[0] == "error":
                    # a signal to the whole group ends the processes too
                    environment.check_signals()
                free += [job] if job.is_free else []
                if job.fails_alone(outcome):
                    _end(fillings, filling, asked, outcome, jobs)
                else:
                    filling.begun.remove(asked)
                    filling.started.pop(asked)
                    again.append((filling, asked))
        environment.report("the time ends: what is in progress continues the next time")
    finally:
        jobs_left = [*running, *free]
        for job in jobs_left:
            job.process.terminate()
        for job in jobs_left:
            job.close()


def _end(fillings: list[Filling], filling: Filling, asked: TrialKey, outcome: Outcome, jobs: int = 1) -> None:
    """Stores an outcome, and reports it together with the progress of all tables."""
    if said := filling.end(asked, outcome):
        filling.environment.report(f"{said}; {describe_progress(fillings, jobs)}")


def describe_progress(fillings: Sequence[Filling], jobs: int) -> str:
    """How many cells of all tables are done, and about how long the rest takes, by the cells that ended in this call;
    where a table has none yet, the time is left out."""
    rows = [{spec: filling.answered(spec) for spec in filling.specs} for filling in fillings]
    every = [done for row in rows for cells in row.values() for done in cells]
    counted = f"{sum(every)} of {len(every)} cells done"
    left = [{spec: cells.count(False) for spec, cells in row.items()} for row in rows]
    seconds = [filling.seconds_left(counts) for filling, counts in zip(fillings, left, strict=True)]
    known = [one for one in seconds if one is not None]
    if all(every) or len(known) < len(seconds):
        return counted
    return f"{counted}, {_about(sum(known) / min(jobs, every.count(False)))} left"


def _about(seconds: float) -> str:
    """An estimated time in words."""
    if seconds < 60:
        return "less than 1 min"
    return f"about {seconds / 60:.0f} min" if seconds < 90 * 60 else f"about {seconds / 3600:.1f} h"


def _job(trial: Trial | RunTrial, free: list[Job]) -> Job:
    """A process that trains a cell: one that is free, or a new one."""
    while free:
        job = free.pop()
        if job.process.is_alive():
            job.begin(trial)
            return job
        job.close()
    return Job(trial)


def _next(fillings: list[Filling]) -> tuple[Filling, TrialKey] | None:
    """The cell to train now: every table gets its first seed, after its sweep, before any gets its second, so that
    those that are cut short have all rows."""
    cells = ((filling, asked) for filling in fillings for asked in filling.ready())
    return min(cells, key=lambda pair: max(pair[1][2], SWEEP_SEED + 1), default=None)


def scores_of(filling: Filling, spec: str) -> dict[float, float]:
    """The validation score of each rate of the sweep."""
    cells = {rate: filling.cell(spec, rate, SWEEP_SEED) for rate in filling.rates}
    return {rate: cell.answer["valid"] for rate, cell in cells.items() if cell is not None and cell.status == DONE}


def is_higher_better(filling: Filling, spec: str) -> bool:
    """Whether a higher score is a better one."""
    cells = [filling.cell(spec, rate, SWEEP_SEED) for rate in filling.rates]
    return next((cell.answer["higher_is_better"] for cell in cells if cell and cell.status == DONE), True)


def best_rate(filling: Filling, spec: str) -> float | None:
    """The rate with the best validation score; None: the sweep is not done, or every rate broke."""
    spec = filling.plan.variant(spec).of or spec
    if not filling.plan.sweeps:
        return filling.rates[0]
    cells = [filling.cell(spec, rate, SWEEP_SEED) for rate in filling.rates]
    found = scores_of(filling, spec)
    if not found or any(cell is None for cell in cells):
        return None
    pick = max if is_higher_better(filling, spec) else min
    return pick(found, key=lambda rate: found[rate])


def wider_rate(filling: Filling, specs: list[str]) -> float | None:
    """One more rate for all rows, where the best of some row is at an edge of the grid."""
    rates = sorted(filling.rates)
    best = [rate for spec in specs if (rate := best_rate(filling, spec)) is not None]
    if filling.plan.rates or len(rates) < 2 or len(best) < len(specs):
        return None
    if rates[0] in best and rates[-1] not in best:
        return float(f"{rates[0] ** 2 / rates[1]:.3g}")
    return float(f"{rates[-1] ** 2 / rates[-2]:.3g}") if rates[-1] in best else None
