"""Quality under an equal budget: a sweep of learning rates, then fresh seeds at the best one, for all rows alike.

The tasks are generated ones, and all tasks of `regard train` with the user's own data and flags; those go through
their own training loop, and their runs stay in the folder of the results.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from regard import tasks as run_tasks
from regard.compare import budget as budgets
from regard.compare.budget import Budget
from regard.compare.learn import Broke, Lesson, learn
from regard.compare.measure import describe_failure, process_context
from regard.compare.plan import BASELINE, short_fair
from regard.compare.question import Question, code_of, machine_of, short
from regard.compare.run import Tools, provenance
from regard.compare.runs import RunLesson, learn_run
from regard.compare.store import DONE, Cell, Folder
from regard.config import from_json
from regard.data import tasks as generated
from regard.spec import ATTENTION, parse

RATE, RATE_WIDTH = 3e-3, 64  # the middle of the grid at a width
SWEEP_SEED = 0  # of the cells that choose a learning rate; the score has other seeds
Answer = tuple[dict[str, Any], dict[str, int]]


@dataclass(frozen=True)
class QualityPlan:
    """A table of scores."""

    task: str  # a generated task with options, such as mqar(pairs=4), or a task of `regard train`
    specs: tuple[str, ...] = ()  # empty: every mechanism
    length: int = 0  # 0: that of the task
    batch: int = 32
    width: int = 64
    heads: int = 4
    inner: int = 128
    layers: int = 2
    position: str = "sinusoidal"
    rates: tuple[float, ...] = ()  # empty: three around one that follows from the width
    seeds: int = 3
    axis: str = "updates"
    amount: float = 600.0
    device: str = "cpu"
    jobs: int = 1
    minutes: float = 60.0
    flags: tuple[str, ...] = ()  # of `regard train`
    anyway: bool = False  # also rows whose parameters are not within 1 %

    def __post_init__(self) -> None:
        for name in ("batch", "width", "heads", "inner", "layers", "seeds", "jobs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.is_run and any(rate <= 0 for rate in self.rates):
            raise ValueError(f"rates must be above 0, got {min(self.rates):g}")
        if self.axis == "minutes" and self.jobs > 1:
            raise ValueError("a budget of minutes needs the machine for one cell at a time: leave --jobs out")
        if not self.is_run:
            self.lesson(BASELINE, 1.0, 0).find_task()
        elif self.axis == "flops":
            raise ValueError(f"a budget of flops is for generated tasks; {self.task} takes tokens, updates or minutes")
        for spec in self.specs:
            ATTENTION.find(parse(spec).name)
        _ = self.budget

    @property
    def name(self) -> str:
        """The task without its options."""
        return self.task.partition("(")[0].strip()

    @property
    def options(self) -> dict[str, Any]:
        """The options of a generated task."""
        rest = self.task.partition("(")[2]
        return dict(parse(f"task({rest}").options) if rest else {}

    @property
    def is_run(self) -> bool:
        """Whether the task is one of `regard train`."""
        return self.name not in generated.BUILDERS and run_tasks.is_known(self.name)

    @property
    def budget(self) -> Budget:
        return Budget(self.axis, self.amount)

    @property
    def role(self) -> str:
        """The role that a row must take."""
        if self.is_run:
            return {"language": "causal"}.get(self.name, "self")
        return self.lesson(BASELINE, 1.0, 0).find_task().role

    @property
    def tokens(self) -> int:
        """The length of the rows that are read."""
        return self.length or (512 if self.is_run else self.lesson(BASELINE, 1.0, 0).find_task().length)

    def grid(self) -> tuple[float, ...]:
        """The learning rates that every row tries."""
        middle = RATE * math.sqrt(RATE_WIDTH / self.width) if not self.is_run else 1e-3
        return self.rates or tuple(float(f"{middle * factor:.3g}") for factor in (1 / 3, 1, 3))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """The specs, the baseline first, each with why it cannot be asked."""
        asked = self.specs or tuple(name for name in ATTENTION.names() if name != "heads")
        specs = dict.fromkeys(short(spec) for item in (BASELINE, *asked) for spec in short_fair(item, self.tokens))
        return [(spec, self._refusal(spec)) for spec in specs]

    def _refusal(self, spec: str) -> str:
        import regard

        try:
            facts = regard.facts(spec)
        except ValueError as error:
            return str(error)
        if self.role in facts.roles:
            return ""
        why = dict(facts.refusals).get(self.role, "the mechanism is not defined for it")
        return f"no role {self.role!r}: {why}"

    def lesson(self, spec: str, rate: float, seed: int) -> Lesson:
        """What a cell trains."""
        shared = {name: getattr(self, name) for name in ("length", "batch", "width", "heads", "inner", "layers")}
        more = {"position": self.position, "device": self.device, "budget": self.budget, "equal": True}
        if self.name not in generated.BUILDERS:
            known = ", ".join([*generated.BUILDERS, *run_tasks.names()])
            raise ValueError(f"no task {self.name!r}; known: {known}")
        return Lesson(spec, self.name, self.options, rate=rate, seed=seed, **shared, **more)

    def run_lesson(self, spec: str, rate: float, seed: int, folder: Folder) -> RunLesson:
        """What a cell trains by `regard train`."""
        run = folder.path / "runs" / self.question(spec, rate, seed).key
        return RunLesson(spec, self.name, self.flags, str(run), rate, seed, self.axis, self.amount, self.device)

    def question(self, spec: str, rate: float, seed: int) -> Question:
        """The question of a cell."""
        names = ("width", "heads", "inner", "layers", "position")
        task: dict[str, Any] = {"name": self.name, "options": self.options, "version": 1}
        model: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.is_run:
            task["flags"], model = list(self.flags), {}
        else:
            found = self.lesson(spec, rate, seed).find_task()
            task |= {"version": found.version, "options": dict(found.options)}
        return Question(
            kind="quality",
            spec=short(spec),
            role=self.role,
            length=self.tokens,
            batch=self.batch,
            model=model,
            device=self.device,
            task=task,
            budget={"axis": self.axis, "amount": self.amount},
            rate=rate,
            seed=seed,
            code=code_of(spec, "models", "layers/feedforward", "data/tasks", "compare/learn.py"),
            machine=machine_of(self.device) if self.axis == "minutes" else "",
        )


def quality_plan(values: dict[str, Any]) -> QualityPlan:
    """A plan from plain values."""
    return from_json(QualityPlan, values)


def run_cell(lesson: Lesson | RunLesson) -> tuple[str, str, Answer]:
    """Trains a cell, in a process of its own: status, note, and what was found."""
    import torch

    if lesson.device == "cpu":
        torch.set_num_threads(1)
    try:
        return DONE, "", learn(lesson) if isinstance(lesson, Lesson) else learn_run(lesson)
    except Broke as error:
        return "broke", str(error), ({}, {})
    except budgets.OverBudget as error:
        return "over", str(error), ({}, {})
    except Exception as error:
        return *describe_failure(error), ({}, {})


class Filling:
    """The cells of a quality plan, in progress."""

    def __init__(self, plan: QualityPlan, folder: Folder, tools: Tools, train: Callable[[Any], Any] | None = None):
        self.plan, self.folder, self.tools, self.train = plan, folder, tools, train
        self.deadline = tools.clock() + 60 * plan.minutes
        self.rates = list(plan.grid())

    def run(self) -> None:
        """The sweep, wider by a rate if a best one is at its edge, then the seeds."""
        specs = [spec for spec, refusal in self.plan.rows() if not refusal and self._fits(spec)]
        self._fill([(spec, rate, SWEEP_SEED) for rate in self.rates for spec in specs])
        if not self.plan.rates and (wider := wider_rate(self, specs)) is not None:
            self.rates.append(wider)
            self._fill([(spec, wider, SWEEP_SEED) for spec in specs])
        best = [(spec, rate) for spec in specs if (rate := best_rate(self, spec)) is not None]
        self._fill([(spec, rate, seed) for seed in range(1, self.plan.seeds + 1) for spec, rate in best])

    def _fits(self, spec: str) -> bool:
        """Whether a row has as many parameters as the baseline; a row that has not is stored as such."""
        plan = self.plan
        if plan.is_run or plan.anyway:
            return True
        lesson = plan.lesson(spec, self.rates[0], SWEEP_SEED)
        task = lesson.find_task()
        try:
            target, _ = budgets.count(lesson.config(BASELINE, task))
            sized = budgets.solve(lesson.config(spec, task), target)
        except ValueError as error:
            self._put((spec, self.rates[0], SWEEP_SEED), "refused", str(error), ({}, {}))
            return False
        if sized.over:
            self._put((spec, self.rates[0], SWEEP_SEED), "over", sized.over, ({}, {}))
        return not sized.over

    def cell(self, spec: str, rate: float, seed: int) -> Cell | None:
        """The answer of a cell, if it has one."""
        return self.folder.get(self.plan.question(spec, rate, seed))

    def _fill(self, cells: list[tuple[str, float, int]]) -> None:
        """Trains the cells that have no answer, until the time ends."""
        waiting = [cell for cell in cells if (known := self.cell(*cell)) is None or known.status == "error"]
        for number, (cell, (status, note, found)) in enumerate(self._trained(waiting), 1):
            self._put(cell, status, note, found)
            score = f"{found[0]['score']:.3f}, {found[0]['seconds']:.0f} s" if status == DONE else f"{status}: {note}"
            where = f"{self.plan.name} rate {cell[1]:g} seed {cell[2]}"
            self.tools.tell(f"{number}/{len(waiting)} {cell[0]} {where}: {score}")

    def _trained(self, cells: list[tuple[str, float, int]]) -> Iterator[tuple[tuple[str, float, int], Any]]:
        lesson = self._lesson
        if self.train is not None:
            for cell in cells:
                self.tools.check_signals()
                if self.tools.clock() > self.deadline:
                    return
                yield cell, self.train(lesson(*cell))
            return
        with ProcessPoolExecutor(self.plan.jobs, mp_context=process_context()) as pool:
            running: dict[Future[Any], tuple[str, float, int]] = {}
            left = iter(cells)
            try:
                while True:
                    self.tools.check_signals()
                    while len(running) < self.plan.jobs and self.tools.clock() < self.deadline:
                        if (cell := next(left, None)) is None:
                            break
                        running[pool.submit(run_cell, lesson(*cell))] = cell
                    if not running:
                        return
                    for done in wait(running, 1.0, FIRST_COMPLETED).done:
                        yield running.pop(done), done.result()
            finally:
                if running:
                    _end(pool)

    def _lesson(self, spec: str, rate: float, seed: int) -> Lesson | RunLesson:
        if self.plan.is_run:
            return self.plan.run_lesson(spec, rate, seed, self.folder)
        return self.plan.lesson(spec, rate, seed)

    def _put(self, cell: tuple[str, float, int], status: str, note: str, found: Answer) -> None:
        where = provenance(self.plan.device, self.tools.command)
        self.folder.put(Cell(self.plan.question(*cell), status, note, *found, where))


def _end(pool: ProcessPoolExecutor) -> None:
    """Ends the processes of a pool at once: what they train is not finished, and will be trained again."""
    for process in list((pool._processes or {}).values()):
        process.kill()


def fill_quality(
    plan: QualityPlan, folder: Folder, tools: Tools | None = None, train: Callable[[Any], Any] | None = None
) -> None:
    """Trains every cell of a plan that has no answer yet, until the time ends. `train` stands in for the processes."""
    tools = tools or Tools()
    with folder.writing("regard compare"), tools.listening():
        Filling(plan, folder, tools, train).run()


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
    if len(rates) < 2 or len(best) < len(specs):
        return None
    if rates[0] in best and rates[-1] not in best:
        return float(f"{rates[0] ** 2 / rates[1]:.3g}")
    return float(f"{rates[-1] ** 2 / rates[-2]:.3g}") if rates[-1] in best else None
