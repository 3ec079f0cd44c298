"""A recommendation in sentences. Each is a rule over cells, and none tells two rows apart whose intervals overlap."""

import re
from collections.abc import Sequence
from typing import Any

from regard.compare.plan import BASELINE
from regard.compare.results import Results
from regard.compare.scores import Scores
from regard.compare.statistics import Interval
from regard.compare.store import DONE

MANY = 4  # names in a list before the rest is a number
CLEAR = 1.25  # factor between two figures without an interval that a sentence may mention


def advise(results: Results) -> list[str]:
    """What the tables say, for each length and each task."""
    said = [*(_costs(results) if results.asks_costs else ())]
    for scores in results.scores:
        said += _about_scores(scores)
    if not said and (results.missing or any(scores.missing for scores in results.scores)):
        return [f"Nothing can be compared yet: regard compare --out {results.name} continues."]
    if not said:
        return ["Nothing can be compared: fewer than two rows have numbers."]
    if results.missing:
        said.append(f"{results.missing} rows did not run: regard compare --out {results.name} continues.")
    return [*said, _unclaimed(results)]


def _unclaimed(results: Results) -> str:
    lengths = "this length" if len(results.plan.lengths) == 1 else "these lengths"
    if not results.scores:
        unclaimed = (
            f"Not claimed: anything about other sizes than {lengths}, or about quality, which only training tells"
        )
        return f"{unclaimed}: add --task recall, or --task language --data.text FILE for a text of yours."
    if not results.asks_costs:
        return "Not claimed: anything about other tasks, sizes or budgets."
    return f"Not claimed: anything about other sizes than {lengths}, other tasks or other budgets."


def _costs(results: Results) -> list[str]:
    said: list[str] = []
    for length in results.plan.lengths:
        rows = [row for row in results.rows if row["length"] == length and row["status"] == DONE]
        before = f"At {length:,} tokens: " if len(results.plan.lengths) > 1 else ""
        found = _about_costs(rows, length)
        said += [before + found[0], *found[1:]] if found else []
    return [*said, *_crossovers(results)]


def _crossovers(results: Results) -> list[str]:
    """From which of several lengths on each mechanism is faster to train than the baseline, and stays so."""
    lengths = sorted(results.plan.lengths)
    if len(lengths) < 2:
        return []
    faster: dict[str, set[int]] = {}
    measured: dict[str, set[int]] = {}
    for row in results.rows:
        if row["status"] == DONE:
            measured.setdefault(_without_length(row), set()).add(row["length"])
            if row["train_ratio_high"] < 1:
                faster.setdefault(_without_length(row), set()).add(row["length"])
    first: dict[int, list[str]] = {}
    for name, found in faster.items():
        stays = [length for length in lengths if all(later in found for later in lengths if later >= length)]
        # from there on: at shorter lengths it is known not to be
        if stays and all(length in measured[name] for length in lengths):
            first.setdefault(stays[0], []).append(name)
    before = f"Faster to train than {BASELINE} from"
    return [f"{before} {length:,} tokens on: {_names(first[length])}." for length in sorted(first)]


def _without_length(row: dict[str, Any]) -> str:
    """A spec without an option that is the length itself."""
    return re.sub(rf",? ?longest={row['length']}\b", "", row["spec"]).replace("()", "")


def _about_scores(scores: Scores) -> list[str]:
    """Who is best at a task, if the table may rank at all."""
    rows, name = scores.measured, scores.plan.label
    if len(rows) < 2:
        return []
    if scores.lacks_reference:
        return [f"{name} is not settled without {scores.reference}, so its rows are not ranked: name that row too."]
    if not scores.settled:
        missing = any(row["seeds"] < scores.plan.seeds for row in rows) or scores.missing
        more = "" if missing else f" More of the budget may settle it: --budget {scores.plan.axis}={_more(scores)}."
        return [f"{name} is not settled, so its rows are not ranked.{more}"]
    best = [row for row in rows if "a" in row.get("letters", "")]
    if not best:
        return [f"{name} has one score for each row, so its rows are not ranked."]
    said = [f"Best at {name}: {_listed(best)}" + (", not told apart" if len(best) > 1 else "") + f" ({_range(best)})."]
    behind = [row for row in rows if "a" not in row.get("letters", "a")]
    if behind:
        said.append(f"Behind: {_listed(behind)} ({_range(behind)}).")
    unranked = [row for row in rows if "letters" not in row]
    if unranked:
        said.append(f"Not ranked, one score each: {_listed(unranked)} ({_range(unranked)}).")
    chance = [row for row in rows if row.get("at_chance")]
    if chance:
        said.append(f"At chance: {_listed(chance)}.")
    rising = [row for row in behind if row["rising"]]
    if rising:
        said.append(f"Still improving when the budget ended: {_listed(rising)}.")
    return said


def _more(scores: Scores) -> str:
    return f"{2 * scores.plan.amount:g}"


def _range(rows: Sequence[dict[str, Any]]) -> str:
    low, high = min(row["score_min"] for row in rows), max(row["score_max"] for row in rows)
    return f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"


def _about_costs(rows: list[dict[str, Any]], length: int) -> list[str]:
    rivals = [row for row in rows if row["spec"] != BASELINE]
    if not rivals:
        return []
    said = [_fastest(rivals, "train", "to train"), *_that_see_all(rivals, length)]
    said += _decoding(rows)
    said += _memory(rows)
    return [sentence for sentence in said if sentence]


def interval(row: dict[str, Any], metric: str) -> Interval:
    """The ratio of a metric to the baseline's."""
    return Interval(*(row[f"{metric}_ratio{end}"] for end in ("", "_low", "_high")))


def leaders(rows: Sequence[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """The fastest of the rows that are clearly faster than the baseline, and after it all whose intervals overlap its
    own, also those that are not clearly faster; empty: none is."""
    known = sorted((row for row in rows if f"{metric}_ratio" in row), key=lambda row: row[f"{metric}_ratio"])
    first = next((row for row in known if row[f"{metric}_ratio_high"] < 1), None)
    if first is None:
        return []
    others = [row for row in known if row is not first]
    return [first, *(row for row in others if interval(row, metric).overlaps(interval(first, metric)))]


def _fastest(rivals: list[dict[str, Any]], metric: str, what: str) -> str:
    """Which is the fastest, and how much faster than the baseline."""
    best = leaders(rivals, metric)
    if not best:
        slower = all(row.get(f"{metric}_ratio_low", 0.0) > 1 for row in rivals)
        return f"Fastest {what} here: {BASELINE}." if slower else f"None is clearly faster {what} than {BASELINE} here."
    return f"Fastest {what} here{_led_by(best, metric)}."


def _led_by(best: list[dict[str, Any]], metric: str) -> str:
    """The rest of a sentence: the row, and how much faster it is; of several that are not told apart, the first."""
    times = _times(interval(best[0], metric))
    return (
        f": {best[0]['spec']}, {times}"
        if len(best) == 1
        else f", and not told apart: {_listed(best)}; the first is {times}"
    )


def _that_see_all(rivals: list[dict[str, Any]], length: int) -> list[str]:
    """The fastest of those whose last token sees the whole text, if the fastest of all does not."""
    best = leaders(rivals, "train")
    blind = [row for row in best if row.get("sees", length) < length]
    if not blind:
        return []
    seen = sorted({row["sees"] for row in blind})
    said = [f"In {_listed(blind)} a token sees {' to '.join(f'{n:,}' for n in _ends(seen))} of the {length:,}."]
    found = leaders([row for row in rivals if row.get("sees") == length], "train")
    if found:
        said.append(f"Of those in which a token sees all of them, the fastest{_led_by(found, 'train')}.")
    elif [row for row in rivals if row.get("sees") == length]:
        said.append(f"Of those in which a token sees all of them, none is clearly faster than {BASELINE}.")
    return said


def _decoding(rows: list[dict[str, Any]]) -> list[str]:
    """Steps and states, where the role decodes."""
    base = next((row for row in rows if row["spec"] == BASELINE and "step_ratio" in row), None)
    rivals = [row for row in rows if row["spec"] != BASELINE and "step_ratio" in row]
    if base is None or not rivals:
        return []
    said = [_fastest(rivals, "step", "to decode")]
    known = sorted((row for row in rivals if row.get("state_bytes")), key=lambda row: row["state_bytes"])
    if known and known[0]["state_bytes"] * CLEAR < base["state_bytes"]:
        smallest = [row for row in known if row["state_bytes"] <= CLEAR * known[0]["state_bytes"]]
        share = base["state_bytes"] / known[0]["state_bytes"]
        said.append(f"Smallest state: {_listed(smallest)}, {_factor(share)} smaller than that of {BASELINE}.")
    return said


def _memory(rows: list[dict[str, Any]]) -> list[str]:
    """The least memory, where the gap is clear: it is measured once, and has no interval."""
    known = sorted((row for row in rows if "peak_mib" in row), key=lambda row: row["peak_mib"])
    # less is what the system rounds to
    if len(known) < 2 or known[0]["peak_mib"] < 1:
        return []
    least = [row for row in known if row["peak_mib"] <= CLEAR * known[0]["peak_mib"]]
    return [f"Least memory to train: {_listed(least)}, about {known[0]['peak_mib']:,.0f} MiB."]


def _ends(values: list[int]) -> list[int]:
    """The smallest and the largest, once if they are one."""
    return [values[0]] if values[0] == values[-1] else [values[0], values[-1]]


def _times(ratio: Interval) -> str:
    """A ratio below one as a factor of speed, with its bounds."""
    middle, low, high = 1 / ratio.middle, 1 / ratio.high, 1 / ratio.low
    return f"{_figure(middle)} times as fast as {BASELINE} ({_figure(low)} to {_figure(high)})"


def _factor(value: float) -> str:
    return f"{_figure(value)} times"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 20 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"


def _listed(rows: Sequence[dict[str, Any]]) -> str:
    return _names([row["spec"] for row in rows])


def _names(names: list[str]) -> str:
    if len(names) > MANY + 1:
        names = [*names[:MANY], f"{len(names) - MANY} more"]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
