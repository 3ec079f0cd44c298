"""Two folders of results: what changed between them, by how much, and whether it is noise."""

from typing import Any

from regard.compare.statistics import Interval, wilson
from regard.compare.store import DONE, Cell, Folder


def changes(new: Folder, old: Folder) -> list[dict[str, Any]]:
    """The questions that both folders answer, with both answers. Costs are compared as multiples of the baseline, so
    that two machines can be; a change is one where the intervals do not overlap."""
    before = {cell.question.asked: cell for cell in old.all() if cell.status == DONE}
    found = []
    for cell in new.all():
        known = before.get(cell.question.asked)
        if known is not None and cell.status == DONE:
            found += _compared(known, cell)
    return sorted(found, key=lambda change: (change["spec"], change["length"], change["metric"]))


def describe_changes(new: Folder, old: Folder) -> str:
    """The changes in lines."""
    found = changes(new, old)
    if not found:
        return f"{new.path} and {old.path} answer no question in common."
    clear = [change for change in found if change["changed"]]
    lines = [
        f"{change['spec']} {change['length']:,} {change['metric']}: {change['before']:.3g}, now {change['now']:.3g}"
        for change in clear
    ]
    others = "; the intervals of the others overlap" if clear else ": all intervals overlap"
    rest = f"{len(clear)} of {len(found)} answers changed{others}."
    return "\n".join([*lines, rest])


def _compared(before: Cell, now: Cell) -> list[dict[str, Any]]:
    question = now.question
    found = []
    if question.kind in ("speed", "decode"):
        for metric in ("forward", "train", "step"):
            if metric in now.answer and metric in before.answer:
                pair = (_ratio(cell.answer[metric]) for cell in (before, now))
                found.append((f"{metric}, x {now.answer[metric]['against']}", *pair))
    if question.kind == "quality":
        # one seed has no interval: sampling error stands in for it
        found.append(("score", *(_sampled(cell) for cell in (before, now))))
    if question.kind == "count":
        for name in ("flops", "written", "state_bytes", "parameters"):
            if name in now.counted and name in before.counted:
                found.append((name, *(Interval(*[float(cell.counted[name])] * 3) for cell in (before, now))))
    return [
        {
            "spec": question.spec,
            "length": question.length,
            "metric": metric,
            "before": one.estimate,
            "now": other.estimate,
            "changed": not one.overlaps(other),
        }
        for metric, one, other in found
    ]


def _ratio(answer: dict[str, Any]) -> Interval:
    return Interval(answer["ratio"], answer["ratio_low"], answer["ratio_high"])


def _sampled(cell: Cell) -> Interval:
    answer = cell.answer
    if "asked" not in answer:
        return Interval(*[float(answer["score"])] * 3)
    return wilson(answer["right"], answer["asked"])
