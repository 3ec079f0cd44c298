"""What a table of scores asks: rows under an equal budget, learning rates that each may try, and seeds.

The tasks are generated ones, and all tasks of `regard train` with the user's own data and flags; those go through
their own training loop, and their runs stay in the folder of the results.
"""

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from regard import recipes
from regard import tasks as run_tasks
from regard.compare.budget import Budget
from regard.compare.learn import Trial
from regard.compare.plan import BASELINE, check_minutes, fair_for_task
from regard.compare.question import Question, code_of, machine_of, shared_code, short
from regard.compare.runs import RunTrial, check_run
from regard.compare.store import Folder
from regard.config import from_json
from regard.data import tasks as generated
from regard.spec import ATTENTION, parse

RATE, RATE_WIDTH = 3e-3, 64  # the middle of the grid at a width
SWEEP_SEED = 0  # of the cells that choose a learning rate; the score has other seeds
PRETRAININGS = ("none", "self")
DTYPES = ("float32", "bfloat16")
ENSEMBLE = -1  # in place of a seed: the runs of all seeds as one model
TrialKey = tuple[str, float, int]  # row, learning rate, seed


@dataclass(frozen=True)
class Variant:
    """A row that is no word for the attention: of a generated task another kind of model, of a task of `regard train`
    flags."""

    name: str
    flags: tuple[str, ...] = ()  # of `regard train`
    of: str = ""  # the row whose runs it evaluates in another way; empty: it is trained
    test: tuple[str, ...] = ()  # more flags of `regard evaluate`
    ensemble: bool = False  # of the runs of all seeds
    words: bool = False  # translate: subword units of the data, which end in @@, are joined into words
    kind: str = ""  # of the model, of a generated task
    options: dict[str, Any] = field(default_factory=dict)  # of that kind
    role: str = ""  # that it takes


@dataclass(frozen=True)
class QualityPlan:
    """A table of scores."""

    task: str  # a generated task with options, such as mqar(pairs=4), or a task of `regard train`
    specs: tuple[str, ...] = ()  # empty: every mechanism
    length: int = 0  # 0: that of the task
    batch: int = 32
    width: int = 64
    heads: int = 4
    inner: int = 0  # 0: twice the width, of which the parameters of a recurrence can be taken
    layers: int = 2
    position: str = "sinusoidal"
    rates: tuple[float, ...] = ()  # empty: three around one that follows from the width
    seeds: int = 3
    axis: str = "updates"
    amount: float = 600.0
    device: str = "cpu"
    dtype: str = "float32"  # of matrix products, of a generated task
    jobs: int = 1
    exclusive: bool = False  # of several jobs one trains at a time, and the others prepare and evaluate meanwhile
    minutes: float = 60.0
    flags: tuple[str, ...] = ()  # of `regard train`
    test: tuple[str, ...] = ()  # of `regard evaluate`, for the score; empty: the score is that of validation
    variants: tuple[Variant, ...] = ()  # rows that are not attentions, instead of `specs`
    pretrain: str = "none"  # "self": half of the budget on the task's own tokens, before the answers
    anyway: bool = False  # also rows whose parameters are not within 1 %
    title: str = ""  # of the table, where the task does not say it all
    # what a report must know of a task on files that are not read; None: they are read
    described: dict[str, Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.inner:
            object.__setattr__(self, "inner", 2 * self.width)
        for name in ("batch", "width", "heads", "inner", "layers", "seeds", "jobs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_minutes(self.minutes)
        if self.length < 0:
            raise ValueError(f"the length of a task must be at least 1, got {self.length}")
        if any(rate <= 0 for rate in self.rates):
            raise ValueError(f"rates must be above 0, got {min(self.rates):g}")
        if self.pretrain not in PRETRAININGS or (self.is_run and self.pretrain != "none"):
            known = f"{' or '.join(PRETRAININGS)}, and none for a task of regard train"
            raise ValueError(f"pretrain must be {known}, got {self.pretrain!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be {' or '.join(DTYPES)} for a task, got {self.dtype}: no loss scale is kept")
        if self.is_run and self.dtype != DTYPES[0]:
            raise ValueError(f"--dtype is for generated tasks, got {self.dtype}: {self.name} has --training.precision")
        if self.axis == "minutes" and self.jobs > 1:
            raise ValueError("a budget of minutes needs the machine for one cell at a time: leave --jobs out")
        if not self.is_run:
            self.find_task()
        if not self.is_run and (self.test or self.axis == "epochs"):
            what = "epochs" if self.axis == "epochs" else "a test set"
            raise ValueError(f"the task {self.task} is generated and has no {what}: leave it out")
        for spec in self.specs:
            ATTENTION.find(parse(spec).name)
        _ = self.budget

    @property
    def name(self) -> str:
        """The task without its options."""
        return self.task.partition("(")[0].strip()

    @property
    def label(self) -> str:
        """What the table is called."""
        return self.title or self.task

    @property
    def options(self) -> dict[str, Any]:
        """The options of a generated task."""
        rest = self.task.partition("(")[2]
        try:
            # a name may have a hyphen, which no spec has
            return dict(parse(f"task({rest}").options) if rest else {}
        except ValueError as error:
            known = "expected a form such as 'mqar(pairs=4, vocabulary=64)'"
            raise ValueError(f"cannot read the task {self.task!r}: {known}") from error

    @property
    def is_run(self) -> bool:
        """Whether the task is one of `regard train`."""
        return not self.is_generated and run_tasks.is_known(self.name)

    @property
    def is_generated(self) -> bool:
        """Whether a small model of `regard compare` is trained on batches that are drawn."""
        return self.name in generated.BUILDERS or self.name in generated.READERS

    @property
    def budget(self) -> Budget:
        return Budget(self.axis, self.amount)

    @property
    def role(self) -> str:
        """The role that a row must take."""
        if self.is_run:
            return {"language": "causal"}.get(self.name, "self")
        return self.find_task().role

    @property
    def tokens(self) -> int:
        """The length of the rows that are read."""
        return self.length or (512 if self.is_run else self.find_task().length)

    @property
    def sweeps(self) -> bool:
        """Whether learning rates are tried, or one is given."""
        return len(self.rates) != 1

    @property
    def seed_numbers(self) -> range:
        """The seeds of the score."""
        return range(SWEEP_SEED + 1, SWEEP_SEED + 1 + self.seeds)

    def variant(self, spec: str) -> Variant:
        """The row of a name; an attention is a row without flags of its own."""
        return next((one for one in self.variants if one.name == spec), Variant(spec))

    def grid(self) -> tuple[float, ...]:
        """The learning rates that every row tries."""
        middle = RATE * math.sqrt(RATE_WIDTH / self.width) if not self.is_run else 1e-3
        return self.rates or tuple(float(f"{middle * factor:.3g}") for factor in (1 / 3, 1, 3))

    def find_task(self) -> generated.Task:
        """The task of a plan that is generated."""
        if self.described is not None:
            return generated.given.describe(self.name, self.options, self.described)
        return self.trial(BASELINE, 1.0, 0).find_task()

    def to_json(self) -> dict[str, Any]:
        """The plan as its file has it, with what a report must know where the files of its task are not."""
        known = generated.given.facts(self.find_task()) if self.name in generated.READERS else None
        return dataclasses.asdict(self) | {"described": known}

    def rows(self) -> list[tuple[str, str]]:
        """The specs, the baseline first, each with why it cannot be asked; then the variants, or these alone."""
        variants = [(one.name, self._wrong_role(one)) for one in self.variants]
        if self.variants and not self.specs:
            return variants
        asked = self.specs or tuple(name for name in ATTENTION.names() if name != "heads")
        specs = dict.fromkeys(short(spec) for item in (BASELINE, *asked) for spec in fair_for_task(item, self.tokens))
        return [*((spec, self._refusal(spec)) for spec in specs), *variants]

    def only(self, names: Sequence[str]) -> "QualityPlan | None":
        """The plan with the rows of these names, those that they evaluate and, beside specs, the baseline; None where
        it has none of them."""
        asked = [name for name, _ in self.rows() if name in names]
        variants = [one for one in self.variants if one.name in asked]
        evaluated = {one.of for one in variants}
        kept = tuple(one for one in self.variants if one.name in (*asked, *evaluated))
        specs = tuple(name for name in asked if not self.is_variant(name))
        if self.specs or not self.variants:
            specs = specs or (BASELINE,)
        return dataclasses.replace(self, specs=specs, variants=kept) if asked else None

    def _wrong_role(self, variant: Variant) -> str:
        return f"no role {self.role!r}" if variant.role not in ("", self.role) else ""

    def is_variant(self, spec: str) -> bool:
        """Whether a row is no word for the attention."""
        return any(one.name == spec for one in self.variants)

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

    @property
    def lost_precision(self) -> str:
        """What to say where a recipe has a precision that a CPU has not, and no flag another; empty: it is kept."""
        is_given = any(word.partition("=")[0] == "--training.precision" for word in self.flags)
        found = recipes.named(self.flags, self.name) if self.is_run and self.device == "cpu" and not is_given else []
        precision = found[0].settings("training").get("precision", DTYPES[0]) if len(found) == 1 else DTYPES[0]
        if precision == DTYPES[0]:
            return ""
        return (
            f"precision {DTYPES[0]}, as all rows are trained on the CPU: the recipe {found[0].name} has {precision}, "
            "which is for a GPU (--device cuda)"
        )

    def trial(self, spec: str, rate: float, seed: int, folder: Folder | None = None) -> Trial:
        """What a cell trains; in a folder it is saved now and then."""
        shared = {name: getattr(self, name) for name in ("length", "batch", "width", "heads", "inner", "layers")}
        names = ("position", "device", "dtype", "budget", "pretrain")
        more: dict[str, Any] = {name: getattr(self, name) for name in names}
        if folder is not None:
            more["saved"] = str(folder.path / "saved" / f"{self.question(spec, rate, seed).key}.pt")
        if not self.is_generated:
            known = ", ".join([*generated.BUILDERS, *generated.READERS, *run_tasks.names()])
            raise ValueError(f"no task {self.name!r}; known: {known}")
        variant = self.variant(spec)
        # JSON has lists for tuples
        own = {name: tuple(value) if isinstance(value, list) else value for name, value in variant.options.items()}
        more |= {"kind": variant.kind, "model_options": own}
        return Trial(spec, self.name, self.options, rate=rate, seed=seed, **shared, **more)

    def run_trial(self, spec: str, rate: float, seed: int, folder: Folder) -> RunTrial:
        """What a cell trains by `regard train`, or evaluates."""
        variant = self.variant(spec)
        trained = variant.of or spec
        seeds = self.seed_numbers if variant.ensemble else (seed,)
        runs = [str(folder.path / "runs" / self._question(trained, rate, one, ()).key) for one in seeds]
        own = variant.flags if self.is_variant(spec) else ("--model.attention", spec)
        return RunTrial(
            self.name,
            (*self.flags, "--training.precision", DTYPES[0]) if self.lost_precision else self.flags,
            own,
            tuple(runs),
            rate,
            seed,
            self.budget,
            self.device,
            test=self.tests(variant),
            trains=not variant.of,
            equal="" if self.is_variant(spec) else spec,
            words=str(folder.path / "words") if variant.words else "",
            alone=self.jobs == 1 or self.exclusive,
            turns=str(folder.path / "turn") if self.exclusive else "",
            threads=0 if self.jobs == 1 else max(1, (os.cpu_count() or 1) // self.jobs),
        )

    def check(self, folder: Folder) -> None:
        """Raises ValueError where none of its rows can be trained, which each of them would say."""
        if self.is_run:
            check_run(self.run_trial(self.rows()[0][0], self.grid()[0], SWEEP_SEED, folder))

    def tests(self, variant: Variant) -> tuple[str, ...]:
        """The flags of `regard evaluate` for a row; empty: it is not evaluated apart."""
        return (*self.test, *variant.test)

    def question(self, spec: str, rate: float, seed: int) -> Question:
        """The question of a cell."""
        return self._question(spec, rate, seed, self.tests(self.variant(spec)) if self.is_run else ())

    def _question(self, spec: str, rate: float, seed: int, test: tuple[str, ...]) -> Question:
        names = ("width", "heads", "inner", "layers", "position")
        task: dict[str, Any] = {"name": self.name, "options": self.options, "version": 1}
        model: dict[str, Any] = {name: getattr(self, name) for name in names}
        code = "models", "layers/feedforward"
        if self.is_run:
            task |= {"flags": list(self.flags)} | ({"test": list(test)} if test else {})
            variant = self.variant(spec)
            model = {"flags": list(self.variant(variant.of or spec).flags)} if self.is_variant(spec) else {}
            model |= {"words": True} if variant.words else {}
        else:
            found = self.find_task()
            task |= {"version": found.version, "options": dict(found.options)}
            task |= {} if self.pretrain == "none" else {"pretrain": self.pretrain}
            code = *code, "data/tasks", "compare/learn.py"
            if self.is_variant(spec):
                model |= {"kind": self.variant(spec).kind, "options": self.variant(spec).options}
        return Question(
            kind="quality",
            spec=spec if self.is_variant(spec) else short(spec),
            role=self.role,
            length=self.tokens,
            batch=self.batch,
            model=model,
            device=self.device,
            dtype=self.dtype,
            task=task,
            budget={"axis": self.axis, "amount": self.amount},
            rate=rate,
            seed=seed,
            code=shared_code("layers/attention", *code) if self.is_variant(spec) else code_of(spec, *code),
            machine=machine_of(self.device) if self.axis == "minutes" else "",
        )


def quality_plan(values: dict[str, Any]) -> QualityPlan:
    """A plan from plain values."""
    return from_json(QualityPlan, values)
