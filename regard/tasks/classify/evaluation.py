"""The quality of a classifier, and of the baseline on the same texts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.labelled import Example
from regard.metrics.classification import Choice, Report, decide, report
from regard.tasks.classify import baseline
from regard.tasks.classify.classifier import Classifier, Threshold, mean_loss
from regard.tasks.classify.task import Task
from regard.tasks.load import read_config, read_parts
from regard.training.run import Run

FEW = 30  # examples of a label below which recall and precision are rough


class Evaluation(NamedTuple):
    """What `regard evaluate` prints of a classifier."""

    loss: float
    report: Report
    threshold: Threshold | None
    chosen: Choice | None  # what the threshold achieves on the validation texts of the run, where it was chosen
    reached: Choice | None  # and on these texts
    baseline: "Compared | None" = None
    top5: float | None = None  # share of examples whose class is among the five most probable ones

    def to_json(self) -> dict[str, Any]:
        values = {"loss": self.loss} | self.report.to_json()
        if self.top5 is not None:
            values["top5"] = self.top5
        if self.threshold is not None:
            values["threshold"] = self.threshold._asdict() | {
                "validation": None if self.chosen is None else self.chosen._asdict(),
                "here": None if self.reached is None else self.reached._asdict(),
            }
        if self.baseline is not None:
            values["baseline"] = self.baseline.to_json()
        return values

    def lines(self) -> list[str]:
        """For people."""
        found, score = self.report, "{:<{wide}}  {:>9} {:>9} {:>9} {:>9} {:>9}"
        wide = max(len("micro"), *(len(label) for label in found.labels))
        top5 = "" if self.top5 is None else f"top-5 accuracy = {100 * self.top5:.2f} %, "
        lines = [
            f"accuracy = {100 * found.accuracy:.2f} %, {top5}loss = {self.loss:.4f}, "
            f"average precision = {_share(found.average_precision)}",
            "",
            score.format("", "precision", "recall", "F1", "AP", "examples", wide=wide),
        ]
        for part in found.classes:
            shares = map(_share, (*part.shares, part.average_precision))
            lines.append(score.format(part.label, *shares, part.examples, wide=wide))
        for name, shares in (("macro", found.macro), ("micro", found.micro)):
            lines.append(score.format(name, *map(_share, shares), "", found.examples, wide=wide))
        cell = max(6, len(f"{found.confusion.max():,}"), *(min(12, len(label)) for label in found.labels))
        lines += [
            "",
            "truth \\ answer".ljust(max(wide, 14)) + "".join(f"  {name[:12]:>{cell}}" for name in found.labels),
        ]
        for label, row in zip(found.labels, found.confusion, strict=True):
            lines.append(label.ljust(max(wide, 14)) + "".join(f"  {count:>{cell},}" for count in row))
        if self.threshold is not None:
            lines += ["", f"{self.threshold.label!r} from probability {self.threshold.value:.6g} on:"]
            for where, part in (("validation", self.chosen), ("here", self.reached)):
                if part is not None:
                    lines.append(
                        f"  {where:<10}  recall {part.recall:.4f} ({part.right:,} of {part.positives:,} found), "
                        f"precision {part.precision:.4f} ({part.taken - part.right:,} of {part.taken:,} taken wrongly)"
                    )
                    lines += [f"  {'':<10}  {remark}" for remark in few_positives(part, self.threshold.label)]
        return lines + self._baseline_lines()

    def _baseline_lines(self) -> list[str]:
        """The run beside the baseline."""
        if self.baseline is None:
            return []
        rows = (("this run", self.report), ("baseline", self.baseline.report))
        gap = 100 * (self.report.accuracy - self.baseline.report.accuracy)
        return [
            "",
            f"{'':<9} {'accuracy':>9} {'macro F1':>9} {'AP':>9}",
            *(
                f"{name:<9} {100 * part.accuracy:>7.2f} % {_share(part.macro.f1):>9} "
                f"{_share(part.average_precision):>9}"
                for name, part in rows
            ),
            f"this run is {abs(gap):.2f} points {'above' if gap >= 0 else 'below'} the baseline: TF-IDF of 1- and "
            f"2-grams with logistic regression, C = {self.baseline.strength:g} chosen on the validation texts",
        ]


class Compared(NamedTuple):
    """The baseline, trained on the texts of a run, evaluated on the same examples as the run."""

    strength: float  # C of the logistic regression, chosen on the validation texts
    validation: float  # its accuracy there
    report: Report

    def to_json(self) -> dict[str, Any]:
        return {"C": self.strength, "validation_accuracy": self.validation} | self.report.to_json()


def measure_baseline(folder: str | Path, examples: Sequence[Example], name: str = "the data") -> Compared:
    """Trains TF-IDF with logistic regression on the training texts of a run, and evaluates it on some examples."""
    run = Run.open(folder)
    data = Task.read_data(read_config(run))
    if data.facts["sha256"] != read_parts(run).facts.get("data", {}).get("sha256"):
        raise ValueError(
            f"the training data of {folder} has changed since the run began, so the baseline would be of other texts: "
            "restore the data"
        )
    found = baseline.fit(data.train, data.valid, data.labels)
    return Compared(found.strength, found.validation, found.report(examples, name))


def evaluate(
    classifier: Classifier,
    examples: Sequence[Example],
    *,
    name: str = "the data",
    threshold: Threshold | None = None,
    chosen: Choice | None = None,
    warn: Callable[[str], None] = lambda message: None,
) -> Evaluation:
    """All measures of the answers to some examples."""
    truth, probabilities = classifier.answers(examples, name=name, warn=warn)
    reached = None
    if threshold is not None:
        index = classifier.labels.index(threshold.label)
        reached = decide(truth == index, probabilities[:, index], threshold.value)
    found = report(truth.tolist(), probabilities, classifier.labels)
    return Evaluation(mean_loss(truth, probabilities), found, threshold, chosen, reached)


def few_positives(found: Choice, label: str) -> list[str]:
    """A remark where too few examples have the label of a threshold to measure it well."""
    if found.positives >= FEW:
        return []
    return [f"few examples of {label!r} ({found.positives}): on other texts both may differ by 0.1 or more"]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
