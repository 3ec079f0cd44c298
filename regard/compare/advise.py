"""A recommendation in sentences. Each is a rule over cells, and none tells two rows apart whose intervals overlap."""

from collections.abc import Sequence
from typing import Any

from regard.compare.plan import BASELINE
from regard.compare.results import Results
from regard.compare.statistics import Interval
from regard.compare.store import DONE

MANY = 4  # names in a list before the rest is a number
CLEAR = 1.25  # factor between two figures without an interval that a sentence may mention


def advise(results: Results) -> list[str]:
    """What the table says, for each length."""
    said: list[str] = []
    for length in results.plan.lengths:
        rows = [row for row in results.rows if row["length"] == length and row["status"] == DONE]
        before = f"At {length:,} tokens: " if len(results.plan.lengths) > 1 else ""
        found = _about_costs(rows, length)
        said += [before + found[0], *found[1:]] if found else []
    if not said:
        return [f"Nothing is measured yet: regard compare --out {results.name} continues."]
    if results.missing:
        said.append(f"{results.missing} rows did not run: regard compare --out {results.name} continues.")
    lengths = "this length" if len(results.plan.lengths) == 1 else "these lengths"
    return [
        *said,
        f"Not claimed: anything about other sizes than {lengths}, or about quality, which only training tells.",
    ]


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
    """The row with the smallest ratio, and all whose intervals overlap its own."""
    known = sorted((row for row in rows if f"{metric}_ratio" in row), key=lambda row: row[f"{metric}_ratio"])
    return [row for row in known if interval(row, metric).overlaps(interval(known[0], metric))]


def _fastest(rivals: list[dict[str, Any]], metric: str, what: str) -> str:
    """Which is the fastest, and how much faster than the baseline."""
    faster = [row for row in rivals if row.get(f"{metric}_ratio_high", 1.0) < 1]
    if not faster:
        slower = all(row.get(f"{metric}_ratio_low", 0.0) > 1 for row in rivals)
        return f"Fastest {what} here: {BASELINE}." if slower else f"None is faster {what} than {BASELINE} here."
    best = leaders(faster, metric)
    if len(best) == 1:
        return f"Fastest {what} here: {best[0]['spec']}, {_times(interval(best[0], metric))}."
    return (
        f"Fastest {what} here, and not told apart: {_listed(best)}; the first is {_times(interval(best[0], metric))}."
    )


def _that_see_all(rivals: list[dict[str, Any]], length: int) -> list[str]:
    """The fastest of those whose last token sees the whole text, if the fastest of all does not."""
    best = leaders([row for row in rivals if row["train_ratio_high"] < 1], "train")
    blind = [row for row in best if row.get("sees", length) < length]
    if not blind:
        return []
    seen = sorted({row["sees"] for row in blind})
    said = [f"In {_listed(blind)} a token sees {' to '.join(f'{n:,}' for n in _ends(seen))} of the {length:,}."]
    whole = [row for row in rivals if row.get("sees") == length and row["train_ratio_high"] < 1]
    found = leaders(whole, "train") if whole else []
    if found:
        said.append(
            f"Of those in which a token sees all of them, the fastest: {_listed(found)}, "
            f"{_times(interval(found[0], 'train'))}."
        )
    elif [row for row in rivals if row.get("sees") == length]:
        said.append(f"Of those in which a token sees all of them, none is faster than {BASELINE}.")
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
    if len(known) < 2 or not known[0]["peak_mib"]:
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
    names = [row["spec"] for row in rows]
    if len(names) > MANY + 1:
        names = [*names[:MANY], f"{len(names) - MANY} more"]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
