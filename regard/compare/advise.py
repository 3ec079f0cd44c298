"""A recommendation in sentences. Each follows from a rule over cells; none ranks two rows whose intervals overlap."""

import re
from collections.abc import Sequence
from typing import Any

from regard.compare.measure import DECODING_STEPS
from regard.compare.plan import BASELINE
from regard.compare.results import Results
from regard.compare.scores import Scores
from regard.compare.statistics import Interval
from regard.compare.store import DONE

MAX_NAMES = 4  # names in a list before the rest is a number
CLEAR_FACTOR = 1.25  # between two figures that have no interval, from which on a sentence ranks them


def advise(results: Results) -> list[str]:
    """The recommendation, for each length and each task."""
    sentences = _recommend_by_costs(results) if results.asks_costs else []
    for scores in results.scores:
        sentences += _recommend_by_scores(scores)
    if not sentences and (results.missing or any(scores.missing for scores in results.scores)):
        return [f"Nothing can be compared yet: regard compare --out {results.name} continues."]
    if not sentences:
        return ["Nothing can be compared: fewer than two rows have numbers."]
    if results.missing:
        sentences.append(f"{results.missing} rows did not run: regard compare --out {results.name} continues.")
    return [*sentences, _limits(results)]


def _limits(results: Results) -> str:
    """What the tables do not show."""
    lengths = "this length" if len(results.plan.lengths) == 1 else "these lengths"
    if not results.scores:
        return (
            f"Not measured: other sizes than {lengths}, and quality, which only training shows: add --task recall, or "
            "--task language --data.text FILE for a text of yours."
        )
    if not results.asks_costs:
        return "Not measured: other tasks, sizes or budgets."
    return f"Not measured: other sizes than {lengths}, other tasks or other budgets."


def _recommend_by_costs(results: Results) -> list[str]:
    """The fastest, the smallest state and the least memory at each length, then the crossover lengths."""
    sentences: list[str] = []
    for length in results.plan.lengths:
        rows = [row for row in results.rows if row["length"] == length and row["status"] == DONE]
        prefix = f"At {length:,} tokens: " if len(results.plan.lengths) > 1 else ""
        first, *others = _recommend_at_length(rows, length) or [""]
        sentences += [prefix + first, *others] if first else []
    return [*sentences, *_crossovers(results), *_left_out(results)]


def _left_out(results: Results) -> list[str]:
    """What was not measured because of an estimate."""
    names = [row["spec"] for row in results.rows if row["status"] == "slow"] if results.asks_costs else []
    return [f"Not measured, as too slow by an estimate: {_join_names(list(dict.fromkeys(names)))}."] if names else []


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
    crossovers: dict[int, list[str]] = {}
    for name, faster_at in faster.items():
        stays = [length for length in lengths if all(later in faster_at for later in lengths if later >= length)]
        # a crossover is known only where the shorter lengths were measured too
        if stays and all(length in measured[name] for length in lengths):
            crossovers.setdefault(stays[0], []).append(name)
    return [
        f"Faster to train than {BASELINE} from {length:,} tokens on: {_join_names(crossovers[length])}."
        for length in sorted(crossovers)
    ]


def _without_length(row: dict[str, Any]) -> str:
    """A spec without an option that follows from the length."""
    longest = f"(?:{row['length']}|{row['length'] + DECODING_STEPS})"
    return re.sub(rf",? ?longest={longest}\b", "", row["spec"]).replace("()", "")


def _recommend_by_scores(scores: Scores) -> list[str]:
    """The best rows of a task, if the table is settled."""
    rows, name = scores.measured, scores.plan.label
    if len(rows) < 2:
        return []
    if scores.lacks_reference:
        return [f"{name} is not settled without {scores.reference}, so its rows are not ranked: name that row too."]
    if scores.awaits_reference:
        return [f"{name} is not settled yet, so its rows are not ranked."]
    if not scores.settled:
        missing = any(row["seeds"] < scores.plan.seeds for row in rows) or scores.missing
        larger = f"{scores.plan.axis}={2 * scores.plan.amount:g}"
        more = "" if missing else f" A larger budget may settle it: --budget {larger}."
        return [f"{name} is not settled, so its rows are not ranked.{more}"]
    ranked = [row for row in rows if "letters" in row]
    if not ranked:
        return [f"{name} has one seed for each row, so its rows are not ranked."]
    first = ranked[0]
    ties = [row for row in ranked[1:] if set(row["letters"]) & set(first["letters"])]
    behind = [row for row in ranked[1:] if row not in ties]
    tie = f"; not significantly worse: {_listed(ties)} ({_range(ties)})" if ties else ""
    sentences = [f"Best at {name}: {first['spec']} ({_range([first])}){tie}."]
    if behind:
        sentences.append(f"Behind: {_listed(behind)} ({_range(behind)}).")
    unranked = [row for row in rows if "letters" not in row]
    if unranked:
        sentences.append(f"Not ranked, with one score each: {_listed(unranked)} ({_range(unranked)}).")
    chance = [row for row in rows if row.get("at_chance")]
    if chance:
        sentences.append(f"At chance: {_listed(chance)}.")
    rising = [row for row in behind if row["rising"]]
    if rising:
        sentences.append(f"Still improving when the budget ended: {_listed(rising)}.")
    return sentences


def _range(rows: Sequence[dict[str, Any]]) -> str:
    low, high = min(row["score_min"] for row in rows), max(row["score_max"] for row in rows)
    return f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"


def _recommend_at_length(rows: list[dict[str, Any]], length: int) -> list[str]:
    """The sentences about the costs at one length."""
    rivals = [row for row in rows if row["spec"] != BASELINE]
    if not rivals:
        return []
    return [
        _fastest(rivals, "train", "to train"),
        *_fastest_that_see_all(rivals, length),
        *_decoding(rows, length),
        *_memory(rows),
    ]


def interval(row: dict[str, Any], metric: str) -> Interval:
    """The ratio of a metric to the baseline's."""
    return Interval(*(row[f"{metric}_ratio{end}"] for end in ("", "_low", "_high")))


def leaders(rows: Sequence[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """The fastest of the rows whose interval lies below that of the baseline, then all whose intervals overlap that of
    the fastest; empty: no row is clearly faster than the baseline."""
    known = sorted((row for row in rows if f"{metric}_ratio" in row), key=lambda row: row[f"{metric}_ratio"])
    first = next((row for row in known if row[f"{metric}_ratio_high"] < 1), None)
    if first is None:
        return []
    others = [row for row in known if row is not first]
    return [first, *(row for row in others if interval(row, metric).overlaps(interval(first, metric)))]


def _fastest(rivals: list[dict[str, Any]], metric: str, purpose: str) -> str:
    """Which row is the fastest, and by how much it is faster than the baseline."""
    best = leaders(rivals, metric)
    if best:
        return f"Fastest {purpose} here: {_describe_leaders(best, metric)}."
    slower = all(row.get(f"{metric}_ratio_low", 0.0) > 1 for row in rivals)
    return (
        f"Fastest {purpose} here: {BASELINE}." if slower else f"None is clearly faster {purpose} than {BASELINE} here."
    )


def _describe_leaders(best: list[dict[str, Any]], metric: str) -> str:
    """How much faster than the baseline the first of them is, and whose intervals overlap its own."""
    first, *others = best
    tie = f"; not significantly slower: {_listed(others)}" if others else ""
    return f"{first['spec']}, {_speed_up(interval(first, metric))}{tie}"


def _fastest_that_see_all(rivals: list[dict[str, Any]], length: int) -> list[str]:
    """The fastest of the rows whose last token sees the whole text, if the fastest of all does not."""
    blind = [row for row in leaders(rivals, "train") if row.get("sees", length) < length]
    if not blind:
        return []
    fewest, most = (choose(row["sees"] for row in blind) for choose in (min, max))
    seen = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
    sentences = [f"In {_listed(blind)} a token sees {seen} of the {length:,}."]
    seeing = [row for row in rivals if row.get("sees") == length]
    best = leaders(seeing, "train")
    if best:
        sentences.append(f"Fastest of those in which a token sees all of them: {_describe_leaders(best, 'train')}.")
    elif seeing:
        sentences.append(f"Of those in which a token sees all of them, none is clearly faster than {BASELINE}.")
    return sentences


def _decoding(rows: list[dict[str, Any]], length: int) -> list[str]:
    """The fastest decoding step and the smallest state, where the role decodes; both also of the rows whose last token
    sees the whole text, if it is not one of these."""
    base = next((row for row in rows if row["spec"] == BASELINE and "step_ratio" in row), None)
    rivals = [row for row in rows if row["spec"] != BASELINE and "step_ratio" in row]
    if base is None or not rivals:
        return []
    sentences = [_fastest(rivals, "step", "to decode")]
    seeing = [row for row in rivals if row.get("sees") == length]
    best = leaders(seeing, "step")
    if best and _are_blind(leaders(rivals, "step"), length):
        sentences.append(f"Of those in which a token sees all {length:,}: {_describe_leaders(best, 'step')}.")
    smallest = _smallest_states(rivals, base)
    if smallest:
        sentences.append(f"Smallest state: {_describe_states(smallest, base)}.")
    of_seeing = _smallest_states(seeing, base)
    if of_seeing and _are_blind(smallest, length):
        sentences.append(f"Of those in which a token sees all {length:,}: {_describe_states(of_seeing, base)}.")
    return sentences


def _are_blind(rows: Sequence[dict[str, Any]], length: int) -> bool:
    """Whether the last token sees the whole text in none of the rows."""
    return all(row.get("sees", length) < length for row in rows)


def _smallest_states(rows: list[dict[str, Any]], base: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with about the smallest state, if it is clearly smaller than that of the baseline."""
    known = sorted((row for row in rows if row.get("state_bytes")), key=lambda row: row["state_bytes"])
    if not known or known[0]["state_bytes"] * CLEAR_FACTOR >= base["state_bytes"]:
        return []
    return [row for row in known if row["state_bytes"] <= CLEAR_FACTOR * known[0]["state_bytes"]]


def _describe_states(smallest: list[dict[str, Any]], base: dict[str, Any]) -> str:
    factor = _figure(base["state_bytes"] / smallest[0]["state_bytes"])
    return f"{_listed(smallest)}, {factor} times smaller than that of {BASELINE}"


def _memory(rows: list[dict[str, Any]]) -> list[str]:
    """The least memory, where the gap is clear: it is measured once, and has no interval."""
    known = sorted((row for row in rows if "peak_mib" in row), key=lambda row: row["peak_mib"])
    # below one MiB the system rounds
    if len(known) < 2 or known[0]["peak_mib"] < 1:
        return []
    least = [row for row in known if row["peak_mib"] <= CLEAR_FACTOR * known[0]["peak_mib"]]
    low, high = (f"{row['peak_mib']:,.0f}" for row in (least[0], least[-1]))
    return [f"Least memory to train: {_listed(least)}, {low if low == high else f'{low} to {high}'} MiB."]


def _speed_up(ratio: Interval) -> str:
    """A ratio of times below one as a factor of speed, with its bounds."""
    factor, low, high = (_figure(1 / bound) for bound in (ratio.estimate, ratio.high, ratio.low))
    return f"{factor} times as fast as {BASELINE} ({low} to {high})"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 20 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"


def _listed(rows: Sequence[dict[str, Any]]) -> str:
    """The names of rows."""
    return _join_names([row["spec"] for row in rows])


def _join_names(names: list[str]) -> str:
    if len(names) > MAX_NAMES + 1:
        names = [*names[:MAX_NAMES], f"{len(names) - MAX_NAMES} more"]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
