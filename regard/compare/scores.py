"""The rows of a table of scores, from the cells of a folder: seeds, spread, rank letters, and whether it is settled."""

import math
from typing import Any

import numpy as np

from regard.compare import statistics
from regard.compare.filling import Filling, best_rate, scores_of, wider_rate
from regard.compare.learn import SOLVED
from regard.compare.plan import BASELINE
from regard.compare.quality import ENSEMBLE, SWEEP_SEED, QualityPlan
from regard.compare.question import short
from regard.compare.run import Environment
from regard.compare.store import DONE, Cell, Folder

NEAR_BEST = 0.9  # share of the best score from which a rate counts as one at which a row learns
COUNTED = ("parameters", "active", "embedding", "flops")  # what rows have of what was counted


class Scores:
    """A table of scores."""

    def __init__(self, plan: QualityPlan, folder: Folder):
        self.plan, self.folder = plan, folder
        self.filling = Filling(plan, folder, Environment())
        specs = [spec for spec, refusal in plan.rows() if not refusal and not plan.variant(spec).of]
        known = [spec for spec in specs if self._failure(spec) is None]
        if (wider := wider_rate(self.filling, known)) is not None:
            self.filling.rates.append(wider)
        self.cells: dict[str, list[Cell]] = {}
        self._drawn: dict[str, np.ndarray | None] = {}
        self.chance = self._find_chance()
        self.rows: list[dict[str, Any]] = [self._row(spec, refusal) for spec, refusal in plan.rows()]
        if all(row.get("active") == row.get("parameters") for row in self.rows):
            # no model has experts, and no table needs the same number twice
            for row in self.rows:
                row.pop("active", None)
        self._rank()

    @property
    def measured(self) -> list[dict[str, Any]]:
        """The rows with a score, the best first."""
        found = [row for row in self.rows if "score" in row]
        return sorted(found, key=lambda row: row["score"], reverse=self.higher_is_better)

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher score is a better one."""
        return next((cells[0].answer["higher_is_better"] for cells in self.cells.values() if cells), True)

    @property
    def subject(self) -> str:
        """What a row is."""
        return "model" if self.plan.variants else "attention"

    @property
    def metric(self) -> str:
        """What the scores are."""
        return next((cells[0].answer["metric"] for cells in self.cells.values() if cells), "score")

    @property
    def reference(self) -> str:
        """The row that must learn the task before others are ranked."""
        return BASELINE if self.plan.is_run else short(self.plan.find_task().reference)

    @property
    def lacks_reference(self) -> bool:
        """Whether that row is not asked for: then no budget settles the table."""
        return not self.plan.is_run and self.reference not in (row["spec"] for row in self.rows)

    @property
    def settled(self) -> bool:
        """Whether the reference solves the task with every seed in half of the budget: only then is the order no luck.
        Scores of real data have no such bar."""
        if self.plan.is_run:
            return True
        return self.reference_seeds == self.plan.seeds and self._reference_solves

    @property
    def awaits_reference(self) -> bool:
        """Whether seeds of that row, or all of them, are still to be trained, and none shows that it is not settled."""
        status = next((row["status"] for row in self.rows if row["spec"] == self.reference), "")
        return not self.plan.is_run and status == "not run" and self._reference_solves

    @property
    def reference_seeds(self) -> int:
        """The seeds of that row that are trained."""
        return len(self.cells.get(self.reference, []))

    @property
    def _reference_solves(self) -> bool:
        """Whether each of these solves the task in half of the budget."""
        return all(
            cell.answer["score"] >= SOLVED and (cell.answer["solved_at"] or math.inf) <= cell.answer["updates"] / 2
            for cell in self.cells.get(self.reference, [])
        )

    def _find_chance(self) -> tuple[float, tuple[float, str] | None] | None:
        """The score of a blind guess, and of a cheap trick; None: the task has no such thing."""
        if self.plan.is_run:
            return None
        task = self.plan.find_task()
        return None if math.isnan(task.chance) else (task.chance, task.shortcut)

    @property
    def missing(self) -> int:
        """Rows that have no answer yet."""
        return sum(row["status"] == "not run" for row in self.rows)

    def _failure(self, spec: str) -> Cell | None:
        """A cell that says why a row has no score."""
        spec = self.plan.variant(spec).of or spec
        cells = [self.filling.cell(spec, rate, SWEEP_SEED) for rate in self.filling.rates]
        found = [cell for cell in cells if cell is not None]
        failed = [cell for cell in found if cell.status in ("over", "refused", "memory", "absent")]
        if failed:
            return failed[0]
        broke = [cell for cell in found if cell.status != DONE]
        return broke[0] if len(broke) == len(cells) else None

    def _row(self, spec: str, refusal: str) -> dict[str, Any]:
        plan = self.plan
        row: dict[str, Any] = {"spec": spec, "task": plan.task, "length": plan.tokens, "budget": str(plan.budget)}
        row |= {} if self.chance is None else {"chance": self.chance[0]}
        if refusal:
            return row | {"status": "refused", "note": refusal}
        failure = self._failure(spec)
        if failure is not None:
            return row | {"status": failure.status, "note": failure.note}
        variant = plan.variant(spec)
        rate, sweep = best_rate(self.filling, spec), scores_of(self.filling, variant.of or spec)
        if rate is None:
            note = f"{len(sweep)} of {len(self.filling.rates)} learning rates tried"
            return row | {"status": "not run", "note": f"{note}; {self._continues()}"}
        cells = [
            self.filling.cell(spec, rate, seed) for seed in ((ENSEMBLE,) if variant.ensemble else plan.seed_numbers)
        ]
        broke = [cell for cell in cells if cell is not None and cell.status != DONE]
        done = [cell for cell in cells if cell is not None and cell.status == DONE]
        if not done:
            status, note = (broke[0].status, broke[0].note) if broke else ("not run", self._continues())
            return row | {"status": status, "note": note}
        self.cells[spec] = done
        scores = [cell.answer["score"] for cell in done]
        missing = len(cells) - len(done)
        row |= {
            "score": sum(scores) / len(scores),
            "score_min": min(scores),
            "score_max": max(scores),
            "seeds": len(scores),
            "rate": rate,
            "rising": sum(bool(cell.answer.get("rising")) for cell in done) * 2 > len(done),
            "updates": done[0].answer["updates"],
            "curve": done[0].answer["curve"],
            "status": DONE if not missing else "not run" if not broke else broke[0].status,
            "note": "" if not missing else f"{len(done)} of {len(cells)} seeds; {self._continues()}",
            **{name: done[0].counted[name] for name in COUNTED if name in done[0].counted},
        }
        if rate in sweep:
            best, higher = sweep[rate], done[0].answer["higher_is_better"]
            near = [
                score
                for score in sweep.values()
                if (score >= NEAR_BEST * best if higher else score <= best / NEAR_BEST)
            ]
            row |= {"rates_ok": len(near), "rates": len(self.filling.rates)}
        if plan.is_run:
            for name in ("dropped", "busiest"):
                if all(name in cell.answer for cell in done):
                    row[name] = sum(cell.answer[name] for cell in done) / len(done)
            row["device_seconds"] = sum(cell.answer["device_seconds"] for cell in done) / len(done)
            if all("speed" in cell.answer for cell in done):
                row["speed"] = sum(cell.answer["speed"] for cell in done) / len(done)
                row["speed_unit"] = done[0].answer["speed_unit"]
        else:
            times = [cell.answer["solved_at"] for cell in done]
            row["solved"] = sum(score >= SOLVED for score in scores) / len(scores)
            row["solved_at"] = sorted(times, key=lambda step: step or math.inf)[len(times) // 2]
            names = list(done[0].answer["groups"])
            row["groups"] = {
                name: sum(cell.answer["groups"].get(name, 0.0) for cell in done) / len(done) for name in names
            }
            row["at_chance"] = row["score"] <= self._chance_bound(done)
        return row

    def _chance_bound(self, cells: list[Cell]) -> float:
        """The highest score that is within the sampling error of a blind guess."""
        asked = sum(cell.answer["asked"] for cell in cells)
        chance = cells[0].answer["chance"]
        return statistics.wilson(round(chance * asked), asked).high

    def _continues(self) -> str:
        return f"regard compare --out {self.folder.path} continues"

    def _rank(self) -> None:
        """Gives the rows of a settled table their letters, by `rule`; a single seed has none."""
        if not self.settled:
            return
        rows = [row for row in self.measured if self._has_spread(row)]
        found = statistics.rank_letters(range(len(rows)), lambda one, other: not self.differ(rows[one], rows[other]))
        for row, letters in zip(rows, found, strict=True):
            row["letters"] = letters

    def differ(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        """Whether two rows differ significantly: their seeds do not overlap, and a paired bootstrap of the difference
        over the test set excludes zero; where no scores of single items were kept, their means differ by more than
        twice the standard error of the difference."""
        ranges = [statistics.Interval(row["score"], row["score_min"], row["score_max"]) for row in (one, other)]
        if ranges[0].overlaps(ranges[1]):
            return False
        first, second = (self._draws(row["spec"]) for row in (one, other))
        if first is not None and second is not None:
            return statistics.draws_differ(first, second)
        return statistics.means_differ(
            *([cell.answer["score"] for cell in self.cells[row["spec"]]] for row in (one, other))
        )

    @property
    def rule(self) -> str:
        """The rule by which two rows count as different, in words; empty: no row is ranked."""
        ranked = [row for row in self.measured if "letters" in row]
        if not ranked:
            return ""
        if all(self._draws(row["spec"]) is not None for row in ranked):
            rule = "different letters: seeds do not overlap, and a paired bootstrap over the test set excludes 0"
            return f"rank: {rule}{'; an ensemble has one score' if any(map(self._is_ensemble, ranked)) else ''}"
        rule = "different letters: three seeds or more do not overlap, and means are over two standard errors apart"
        is_unranked = any(self._is_ensemble(row) for row in self.measured if "letters" not in row)
        unranked = "; ensembles have one score each, and no rank" if is_unranked else ""
        return f"rank: {rule}; no scores of single items were kept{unranked}"

    def _has_spread(self, row: dict[str, Any]) -> bool:
        """Whether it is known how much the score of a row varies: over seeds, or of an ensemble over the test set."""
        return self._draws(row["spec"]) is not None if self._is_ensemble(row) else row["seeds"] > 1

    def _is_ensemble(self, row: dict[str, Any]) -> bool:
        return self.plan.variant(row["spec"]).ensemble

    def _draws(self, spec: str) -> np.ndarray | None:
        """The score on each of the drawn test sets, as a mean over the seeds; None: a cell has no items."""
        if spec not in self._drawn:
            found = [_cell_draws(cell.answer) for cell in self.cells[spec]]
            known = [draws for draws in found if draws is not None]
            self._drawn[spec] = np.mean(known, axis=0) if len(known) == len(found) else None
        return self._drawn[spec]


def _cell_draws(answer: dict[str, Any]) -> np.ndarray | None:
    if "items" in answer:
        return statistics.resample_mean(answer["items"])
    if "sentences" in answer:
        return statistics.resample_bleu([[int(count) for count in line.split()] for line in answer["sentences"]])
    return None
