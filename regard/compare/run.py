"""Fills the cells of a plan: what is stored already is never measured again.

Contestants run in groups: the baseline and at most five rivals, each in a process of its own. In a round each has one
turn, and the order is reversed every other round, so that what else happens on the machine meets all of them alike. A
time is compared within its round.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from regard import __version__
from regard.compare import statistics
from regard.compare.measure import CannotMeasure, Contestant, Process, Setting, free_memory, load_average, load_per_core
from regard.compare.plan import BASELINE, CostPlan, Row, groups, usual_place
from regard.compare.question import Question, machine_facts
from regard.compare.store import DONE, Cell, Folder

MAX_RIVALS = 5  # of a group, beside the baseline
MIN_ROUNDS, MAX_ROUNDS = 9, 60  # rounds
MIN_ROUNDS_AT_END = 5  # rounds that suffice where the time ends
STEPS_PER_TURN = 1.5  # training steps that a turn takes: one, a forward pass and decoding steps
# what a contestant takes in all, in training steps: estimates, counts and warm-up, and the fewest rounds of a forward
# pass and a training step
STEPS_PER_CONTESTANT = 22
LIMIT_FACTOR = 3.0  # times its equal share of the time that a contestant may take: most take less
PLANNED_SHARE = 0.92  # of the time that measuring plans with: what is begun is finished within the rest
STEPS_PER_GROUP = 15  # of the baseline, after two are prepared, without which a group is not worth beginning
MEMORY_SHARE = 0.7  # of the free memory
SCREENING_SHARE = 0.3  # of the time, that estimates may take
# times the time of the baseline, by shorter lengths, at which a row is not measured: what calls cost counts more there
TOO_SLOW = 2.0
HOPELESS = 8.0  # the same, from which on an estimate is not repeated
METRICS = {"speed": ("forward", "train"), "decode": ("step",)}
LIMITS = {"slow": "seconds", "memory": "room"}  # statuses that a larger limit may change, and the limit


class Interrupted(Exception):
    """A signal came. What is measured so far is stored."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.code = 128 + number


@dataclass
class Environment:
    """What a comparison needs from outside: processes, a clock, progress lines, the load and signals. Tests replace
    them."""

    contestant: Callable[[Setting], Contestant] = Process
    clock: Callable[[], float] = time.monotonic
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
    load: Callable[[], float] = load_per_core
    received: int | None = None  # signal
    force: bool = False
    command: str = ""

    def check_signals(self) -> None:
        """Raises `Interrupted` if a signal came."""
        if self.received is not None:
            raise Interrupted(self.received)

    def check_end(self, error: CannotMeasure) -> None:
        """Raises `Interrupted` if a process ended because a signal came: a signal to the whole group ends contestants
        too, which is no answer to their questions."""
        if error.status == "error":
            self.check_signals()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside the block the first signal is remembered, and a second one ends the program."""

        def remember(number: int, _: Any) -> None:
            if self.received is not None:
                raise KeyboardInterrupt
            self.received = number

        before = {}
        with suppress(ValueError):  # not in the main thread: signals are someone else's
            before = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def fill_costs(plan: CostPlan, folder: Folder, environment: Environment | None = None) -> None:
    """Measures every cell of a plan that has no answer yet, until the time ends."""
    environment = environment or Environment()
    load = load_average()
    if load > (os.cpu_count() or 1) / 2:
        # threads that spin while they wait for each other take the cores from those they wait for
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    deadline = environment.clock() + PLANNED_SHARE * 60 * plan.minutes
    rows = plan.rows()
    with folder.writing("regard compare"), environment.listening():
        for row in rows:
            if row.refusal:
                _fail(plan, folder, row, "refused", row.refusal, {})
        waiting = [row for row in rows if not row.refusal]
        room = MEMORY_SHARE * free_memory(plan.device)
        # alone in its group a contestant would have so much time
        most = LIMIT_FACTOR * 60 * plan.minutes / 2 / STEPS_PER_CONTESTANT
        open_rows = [row for row in waiting if environment.force or _missing(plan, folder, row, most, room)]
        by_length = {length: [row for row in open_rows if row.length == length] for length in plan.lengths}
        screening = Screening(plan, folder, environment, deadline, room)
        # who is named is measured; of all others those that could be the answer
        by_length = by_length if plan.specs else {at: screening.run(rows) for at, rows in by_length.items()}
        parts = [part for rows in by_length.values() for part in _grouped(rows)]
        done = 0
        needed: dict[int, float] = {}  # seconds without which a group is not worth beginning, by length
        for number, part in enumerate(parts):
            left = deadline - environment.clock()
            share = left / (len(parts) - number)
            group = Group(plan, folder, environment, part, deadline, share, room, screening.estimates, load)
            length = part[0].length
            if left <= 0 or left < needed.get(length, 0.0):
                environment.report(f"the time ends: {sum(map(len, parts[number:]))} rows are not measured")
                break
            group.run()
            if group.rounds.get(BASELINE, {}).get("train"):
                step = statistics.quartiles(group.rounds[BASELINE]["train"]).estimate
                needed[length] = STEPS_PER_GROUP * step + 2 * group.preparing
            done += group.stored
            environment.report(
                f"{done} of {len(open_rows)} rows measured, {_minutes(deadline - environment.clock())} of the time left"
            )


def _grouped(rows: list[Row]) -> list[list[Row]]:
    """Groups of rivals; the baseline is in each, and not counted."""
    rivals = [row for row in rows if row.spec != BASELINE]
    found = list(groups(rivals, MAX_RIVALS))
    if len(rivals) < len(rows):
        found = [[rows[0]], *found] if not found else [[rows[0], *found[0]], *found[1:]]
    return found


def _missing(plan: CostPlan, folder: Folder, row: Row, seconds: float, room: float) -> list[Question]:
    """The questions of a row that have no answer, or one that a larger limit may change."""
    found = []
    limits = {"seconds": seconds, "room": room}
    for kind in plan.kinds(row):
        question = plan.question(kind, row.spec, row.length)
        cell = folder.get(question)
        if cell is None or cell.status == "error":
            found.append(question)
        elif "screened" in cell.answer:
            # only who is named is measured after all
            found += [question] if plan.specs else []
        elif cell.status in LIMITS:
            limit = LIMITS[cell.status]
            if limits[limit] > 1.2 * cell.answer.get(limit, 0.0):
                found.append(question)
    return found


def _fail(plan: CostPlan, folder: Folder, row: Row, status: str, note: str, answer: dict[str, Any]) -> None:
    """Stores why a row has no numbers."""
    for kind in plan.kinds(row) or ("speed",):
        question = plan.question(kind, row.spec, row.length)
        known = folder.get(question)
        if known is None or known.status != DONE:
            folder.put(Cell(question, status, note, answer, {}, provenance(plan.device, "")))


def _setting(plan: CostPlan, row: Row, **more: Any) -> Setting:
    """What a contestant gets to measure."""
    shared = {name: getattr(plan, name) for name in ("width", "heads", "batch", "part", "device", "dtype", "threads")}
    return Setting(row.spec, plan.role, row.length, decodes=row.decodes, **shared, **more)


class Screening:
    """Cheap estimates of many rows at shorter lengths, before any is measured: which of them are worth their time."""

    def __init__(self, plan: CostPlan, folder: Folder, environment: Environment, deadline: float, room: float):
        self.plan, self.folder, self.environment, self.deadline, self.room = plan, folder, environment, deadline, room
        self.estimates: dict[tuple[str, int], float] = {}  # seconds of a training step

    def run(self, rows: list[Row]) -> list[Row]:
        """The rows that are not clearly slower than the baseline: those that people ask for first, then the fastest
        first. The others are stored as slow, with what shorter lengths tell."""
        rivals = [row for row in rows if row.spec != BASELINE]
        if len(rivals) <= MAX_RIVALS:
            return rows
        base = self._estimate(Row(BASELINE, rivals[0].length), math.inf)
        if base is None or not base["seconds"]:
            return rows
        until = self.environment.clock() + SCREENING_SHARE * (self.deadline - self.environment.clock())
        kept, tried = [], 0
        for row in rivals:
            self.environment.check_signals()
            limit = TOO_SLOW * base["seconds"]
            found: dict[str, float] | None = {"seconds": math.inf, "length": 0.0}
            if self.environment.clock() < until:
                found, tried = self._estimate(row, limit), tried + 1
                if found is not None and limit < found["seconds"] < HOPELESS * base["seconds"]:
                    # something else may have had the machine meanwhile
                    again = self._estimate(row, limit)
                    found = found if again is None else min(found, again, key=lambda tried: tried["seconds"])
            if found is None:
                continue
            if found["length"] and found["seconds"] > limit:
                ratio = found["seconds"] / base["seconds"]
                note = f"about {ratio:.2g} times the time of {BASELINE}, going by {found['length']:,.0f} tokens"
                answer = {"screened": round(ratio, 3)}
                _fail(self.plan, self.folder, row, "slow", f"{note}; name it to have it measured", answer)
                continue
            self.estimates[row.spec, row.length] = found["seconds"]
            kept.append(row)
        untried = len(rivals) - tried
        more = f"; for {untried} more there was no time" if untried else ""
        self.environment.report(
            f"{len(kept) - untried} of {tried} mechanisms could be as fast as {BASELINE}, by shorter lengths{more}"
        )
        kept.sort(key=lambda row: (usual_place(row.spec), self.estimates[row.spec, row.length]))
        return [*(row for row in rows if row.spec == BASELINE), *kept]

    def _estimate(self, row: Row, limit: float) -> dict[str, float] | None:
        """Seconds of a training step at the whole length, and the length they were estimated from; None: it failed."""
        contestant = self.environment.contestant(_setting(self.plan, row, seconds=limit, room=self.room))
        try:
            return contestant.estimate()
        except CannotMeasure as error:
            self.environment.check_end(error)
            if row.spec != BASELINE:
                _fail(self.plan, self.folder, row, error.status, error.note, {"room": self.room})
            return None
        finally:
            contestant.close()


class Group:
    """The baseline and some rivals, in turns."""

    def __init__(
        self,
        plan: CostPlan,
        folder: Folder,
        environment: Environment,
        rows: list[Row],
        deadline: float,
        share: float,
        room: float,
        estimates: Mapping[tuple[str, int], float],
        load: float,
    ):
        self.plan, self.folder, self.environment, self.rows, self.estimates = plan, folder, environment, rows, estimates
        self.began = environment.clock()
        self.deadline, self.end = deadline, self.began + share
        equal = share / (len(rows) + 1)
        self.limit = LIMIT_FACTOR * equal / STEPS_PER_CONTESTANT
        self.room = room
        # that before the comparison, or now without its own threads
        self.load = max(load, load_average() - (plan.threads or os.cpu_count() or 1))
        self.begun: dict[str, Contestant] = {}
        self.playing: dict[str, Contestant] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.rounds: dict[str, dict[str, list[float]]] = {}
        self.preparing = 0.0  # seconds until a contestant is warm, as a mean
        self.stored = 0  # rows

    def run(self) -> None:
        """Prepares all, plays the rounds, and stores the cells."""
        try:
            rivals = [row for row in self.rows if row.spec != BASELINE]
            own = [row for row in self.rows if row.spec == BASELINE]
            base = own[0] if own else Row(BASELINE, rivals[0].length, decodes=True)
            self._begin(base, is_baseline=True, counts=bool(own))
            if not self._enter(base, is_baseline=True, counts=bool(own)):
                return
            # their processes start side by side, which on a GPU takes seconds
            for row in rivals:
                self._begin(row)
            for row in rivals:
                self.environment.check_signals()
                if row.spec in self.begun and self._has_time_for_another():
                    self._enter(row)
            self.preparing = (self.environment.clock() - self.began) / max(1, len(self.playing))
            if not self._play():
                return
            for row in (*own, *rivals):
                if row.spec in self.playing:
                    self._store(row)
                    self.stored += 1
        finally:
            for contestant in (*self.begun.values(), *self.playing.values()):
                contestant.close()

    def _has_time_for_another(self) -> bool:
        """Whether a further rival can be prepared and the fewest rounds be played before the time ends: those that wait
        are for the next call, where a group that is too large would have no round to show for its time."""
        now = self.environment.clock()
        rivals = len(self.playing) - 1
        if rivals < 1:
            return now < self.deadline
        turns = [
            STEPS_PER_TURN * facts.get("seconds", 0.0) for spec, facts in self.facts.items() if spec in self.playing
        ]
        # the next one as those before it
        preparing = (now - self.began) / len(turns)
        playing = MIN_ROUNDS_AT_END * (sum(turns) + sum(turns) / len(turns))
        return now + preparing + playing < self.deadline

    def _begin(self, row: Row, is_baseline: bool = False, counts: bool = True) -> None:
        """Starts a contestant, unless nothing of it is asked."""
        plan, limit = self.plan, math.inf if is_baseline else self.limit
        if not is_baseline and not (self.environment.force or _missing(plan, self.folder, row, limit, self.room)):
            return
        screened = math.isfinite(self.estimates.get((row.spec, row.length), math.inf))
        setting = _setting(plan, row, seconds=limit, room=self.room, counts=counts, screened=screened)
        self.begun[row.spec] = self.environment.contestant(setting)

    def _enter(self, row: Row, is_baseline: bool = False, counts: bool = True) -> bool:
        """Prepares a contestant, and stores what is measured once. False: it cannot play."""
        plan, limit = self.plan, math.inf if is_baseline else self.limit
        contestant = self.begun.pop(row.spec)
        try:
            facts = contestant.prepare()
        except CannotMeasure as error:
            contestant.close()
            self.environment.check_end(error)
            self._say(row, f"{error.status}: {error.note}")
            if counts:
                limits = {"seconds": limit, "room": self.room}
                known = {name: value for name, value in limits.items() if not math.isinf(value)}
                _fail(plan, self.folder, row, error.status, error.note, known)
            return False
        self.playing[row.spec], self.facts[row.spec] = contestant, facts
        if is_baseline:
            # who is faster than the baseline is who is looked for
            self.limit = max(self.limit, facts.get("seconds", 0.0))
        if counts:
            self._put("count", row, {}, facts["counted"])
            self._put("memory", row, {"peak_bytes": facts["peak"]}, {})
        return True

    def _play(self) -> bool:
        """Rounds, until the intervals are narrow or the time ends. False: it ended before there were enough."""
        self.rounds = {spec: {} for spec in self.playing}
        began = self.environment.clock()
        wanted, played = MIN_ROUNDS, 0
        while played < wanted:
            order = list(self.playing)
            for spec in order if played % 2 == 0 else reversed(order):
                self.environment.check_signals()
                self._turn(spec)
            played += 1
            now = self.environment.clock()
            if now > self.deadline:
                if played >= MIN_ROUNDS_AT_END:
                    break
                if (MIN_ROUNDS_AT_END - played) * (now - began) / played > (
                    1 - PLANNED_SHARE
                ) / 2 * 60 * self.plan.minutes:
                    self.environment.report(
                        f"{self.plan.minutes:g} min are too few for {MIN_ROUNDS_AT_END} rounds: give more, such as "
                        f"--minutes {math.ceil(2 * self.plan.minutes)}"
                    )
                    return False
            if now > self.end and played >= MIN_ROUNDS_AT_END:
                break
            if played == wanted and wanted < MAX_ROUNDS and now < min(self.end, self.deadline):
                base = self.rounds[BASELINE]["train"]
                if not self._is_narrow():
                    wanted += 3
                elif statistics.drifts(base) and played < 2 * MIN_ROUNDS:
                    wanted = 2 * played
        return True

    def _turn(self, spec: str) -> None:
        try:
            found = self.playing[spec].turn()
        except CannotMeasure as error:
            self.environment.check_end(error)
            if spec == BASELINE:
                raise ValueError(f"{BASELINE} failed, which all others are compared with: {error.note}") from error
            self.playing.pop(spec).close()
            row = next(row for row in self.rows if row.spec == spec)
            self._say(row, f"{error.status}: {error.note}")
            _fail(self.plan, self.folder, row, error.status, error.note, {})
            return
        for metric, seconds in found.items():
            self.rounds[spec].setdefault(metric, []).append(seconds)

    def _is_narrow(self) -> bool:
        base = self.rounds[BASELINE]["train"]
        found = [statistics.ratios(self.rounds[spec]["train"], base) for spec in self.playing if spec != BASELINE]
        return all(statistics.bootstrap(one).width < statistics.NARROW_WIDTH for one in found)

    def _store(self, row: Row) -> None:
        for kind, metrics in METRICS.items():
            if kind not in self.plan.kinds(row):
                continue
            found = {metric: self._summary(row.spec, metric) for metric in metrics}
            answer: dict[str, Any] = {name: values for name, values in found.items() if values is not None}
            if kind == "speed":
                answer |= {
                    "backend": self.facts[row.spec].get("backend", ""),
                    "drift": statistics.drifts(self.rounds[BASELINE]["train"]),
                    "group": list(self.rounds),
                }
            if found and all(values is not None for values in found.values()):
                self._put(kind, row, answer, {})
            else:
                question = self.plan.question("decode", row.spec, row.length)
                self.folder.put(Cell(question, "refused", "it keeps no state", provenance=self._provenance()))
        speed = self._summary(row.spec, "train") or {}
        self._say(row, f"{speed['median_ms']:.4g} ms per training step, {speed['ratio']:.2f} x {BASELINE}")

    def _summary(self, spec: str, metric: str) -> dict[str, Any] | None:
        """The rounds of a metric in milliseconds, and their ratio to the baseline; None: it has none."""
        rounds, base = (self.rounds[name].get(metric, [math.nan]) for name in (spec, BASELINE))
        if any(map(math.isnan, rounds)) or any(map(math.isnan, base)):
            return None
        middle, low, high = statistics.quartiles(rounds)
        ratio = statistics.bootstrap(statistics.ratios(rounds, base))
        return {
            "unit": "ms",
            "higher_is_better": False,
            "rounds": [round(1e3 * seconds, 6) for seconds in rounds],
            "median_ms": 1e3 * middle,
            "low_ms": 1e3 * low,
            "high_ms": 1e3 * high,
            "against": BASELINE,
            "against_rounds": [round(1e3 * seconds, 6) for seconds in base],
            "ratio": ratio.estimate,
            "ratio_low": ratio.low,
            "ratio_high": ratio.high,
        }

    def _put(self, kind: Any, row: Row, answer: dict[str, Any], counted: dict[str, int]) -> None:
        question = self.plan.question(kind, row.spec, row.length)
        if self.environment.force or (known := self.folder.get(question)) is None or known.status != DONE:
            self.folder.put(Cell(question, DONE, "", answer, counted, self._provenance()))

    def _provenance(self) -> dict[str, Any]:
        spent = {"seconds": round(self.environment.clock() - self.began, 3), "load": round(self.load, 2)}
        return provenance(self.plan.device, self.environment.command) | spent

    def _say(self, row: Row, what: str) -> None:
        self.environment.report(f"{row.spec} {row.length:,}: {what}")


def provenance(device: str, command: str) -> dict[str, Any]:
    """Where and when a cell was found."""
    facts = {"regard": __version__, "when": time.strftime("%Y-%m-%d %H:%M:%S"), "command": command}
    return facts | machine_facts(device)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds > 0 else "none"


def with_threads(plan: CostPlan) -> CostPlan:
    """A plan that says how many threads it runs on."""
    import torch

    return plan if plan.threads else replace(plan, threads=torch.get_num_threads())
