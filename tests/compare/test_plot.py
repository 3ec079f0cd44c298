"""Pictures against their data: where marks, lines and ticks stand, and how large they are."""

from types import SimpleNamespace

import pytest

from regard.compare import plot
from regard.compare.store import DONE

SPEEDS = {"softmax": 1.0, "linear": 2.5, "local(window=8)": 4.0, "rfa": 0.5}  # times softmax
PEAKS = {"softmax": 400.0, "linear": 100.0, "local(window=8)": 50.0, "rfa": 200.0}  # MiB
SCORES = {
    "softmax": (0.5, 0.55, 0.6),
    "linear": (0.3, 0.4, 0.45),
    "local(window=8)": (0.2, 0.3, 0.4),
}  # low, mean, high
GAIN = 0.2  # of self-pretraining


def cost(spec, speed=None, peak=None, **more):
    row = {"spec": spec, "status": DONE, "length": 64, "train_ratio": 1 / (speed or SPEEDS[spec])}
    return row | {"peak_mib": peak or PEAKS[spec]} | more


def scores(pretrain="none", gain=0.0, **plan):
    """A table of planted scores, raised by `gain`."""
    names = ("score_min", "score", "score_max")
    rows = [
        {"spec": spec} | dict(zip(names, (value + gain for value in ends), strict=True))
        for spec, ends in SCORES.items()
    ]
    settings = {
        "task": "listops",
        "label": "ListOps, 64 tokens",
        "pretrain": pretrain,
        "seeds": 3,
        "tokens": 64,
        **plan,
    }
    made = {"plan": SimpleNamespace(**settings), "rows": rows, "measured": rows, "chance": (0.1, None)}
    return SimpleNamespace(metric="accuracy", **made)


def results(*tables, rows=(), picture="", published=()):
    table = SimpleNamespace(picture=picture, published=published)
    plan = SimpleNamespace(lengths=(64,))
    return SimpleNamespace(table=table, plan=plan, rows=list(rows), scores=list(tables), asks_costs=bool(rows))


def drawn(*tables, **more):
    (axes,) = plot.picture(results(*tables, **more)).axes
    return axes


def bubbles(*tables, rows=None):
    rows = [cost(spec) for spec in SCORES] if rows is None else rows
    return drawn(*tables, rows=rows, picture="bubbles")


def segments(axes):
    """Every line by its points, rounded."""
    return [tuple((round(float(x), 6), round(float(y), 6)) for x, y in line.get_xydata()) for line in axes.lines]


def shown_ticks(axis):
    """The labelled ticks that a reader sees, as numbers, and where they stand."""
    axis.axes.figure.draw_without_rendering()
    low, high = sorted(axis.get_view_interval())
    ticks = [(tick.get_loc(), tick.label1.get_text()) for tick in axis.get_major_ticks()]
    minor = [tick.label1.get_text() for tick in axis.get_minor_ticks()]
    assert not any(minor)
    return [(place, text) for place, text in ticks if low <= place <= high and text]


def test_a_bubble_stands_at_its_speed_and_score_and_its_area_follows_its_memory():
    axes = bubbles(scores())
    areas = {}
    for (spec, (_, mean, _)), dots in zip(SCORES.items(), axes.collections, strict=True):
        assert dots.get_offsets().tolist() == [[pytest.approx(SPEEDS[spec]), pytest.approx(mean)]]
        areas[spec] = dots.get_sizes()[0]
    # equal steps of memory are equal steps of area
    slope = (areas["softmax"] - areas["linear"]) / (PEAKS["softmax"] - PEAKS["linear"])
    assert slope > 0
    assert areas["linear"] - areas["local(window=8)"] == pytest.approx(50 * slope)
    # what takes hardly any memory is still seen, and names are those of the rows
    assert areas["local(window=8)"] > 50 * slope
    names = {text.get_text(): text.xy for text in axes.texts}
    assert names == {
        spec.partition("(")[0]: (pytest.approx(SPEEDS[spec]), pytest.approx(mean))
        for spec, (_, mean, _) in SCORES.items()
    }
    assert axes.get_xscale() == "log"


def test_lines_of_bubbles_span_the_seeds_and_join_what_self_pretraining_makes_of_a_row():
    expected = []
    for spec, (low, mean, high) in SCORES.items():
        x = SPEEDS[spec]
        expected.append(((x, mean), (x, mean + GAIN)))
        expected += [((x, low + gain), (x, high + gain)) for gain in (0, GAIN)]
    axes = bubbles(scores(), scores("self", GAIN))
    assert segments(axes) == [tuple((x, round(y, 6)) for x, y in line) for line in expected]
    # a name is beside the higher of the two
    assert [text.xy[1] for text in axes.texts] == [pytest.approx(mean + GAIN) for _, mean, _ in SCORES.values()]
    # hollow from scratch
    assert [len(dots.get_facecolors()) for dots in axes.collections] == [0, 1] * len(SCORES)
    hollow, filled, title = "hollow from scratch", "filled self-pretrained", axes.get_title()
    assert hollow in title
    assert filled in title
    assert filled not in bubbles(scores()).get_title()


@pytest.mark.parametrize("factor", [1.1, 1.5, 3.0, 10.0, 100.0])
def test_ticks_of_speeds_are_plain_numbers_at_their_places(factor):
    """Also where the speeds lie near each other."""
    names = list(SCORES)
    speeds = [1.0, factor**0.5, factor]
    axes = bubbles(scores(), rows=[cost(spec, speed) for spec, speed in zip(names, speeds, strict=True)])
    low, high = axes.get_xlim()
    assert low < 1 < factor < high
    ticks = shown_ticks(axes.xaxis)
    assert len(ticks) >= 3
    for place, text in ticks:
        assert float(text) == pytest.approx(place, rel=1e-5)
    assert len(ticks) <= 12
    # in both halves of the picture
    assert ticks[0][0] < (low * high) ** 0.5 < ticks[-1][0]


def test_a_frontier_leads_over_the_rows_that_none_dominates():
    rows = [cost(spec, state_bytes=state) for spec, state in zip(SPEEDS, (800, 400, 0, 800), strict=True)]
    # linear is slower and larger than local; softmax and rfa slower and larger than both
    rows.append(cost("dot", speed=8.0, peak=300.0, state_bytes=800))
    axes = drawn(rows=rows)
    places = {row["spec"]: (row["train_ratio"], row["peak_mib"]) for row in rows}
    line, base = segments(axes)
    assert line == (places["dot"], places["local(window=8)"])
    assert {x for x, _ in base} == {1.0}
    dots = {row["spec"]: part for row, part in zip(rows, axes.collections, strict=True)}
    assert all(dots[spec].get_offsets().tolist() == [pytest.approx(place)] for spec, place in places.items())
    areas = {spec: part.get_sizes()[0] for spec, part in dots.items()}
    assert areas["softmax"] == areas["rfa"] > areas["linear"] > areas["local(window=8)"] > 0
    for axis in (axes.xaxis, axes.yaxis):
        ticks = shown_ticks(axis)
        assert len(ticks) >= 3
        assert all(float(text) == pytest.approx(place, rel=1e-5) for place, text in ticks)


def test_dots_have_lines_from_the_lowest_to_the_highest_seed_at_their_row():
    """Where speeds are missing: rows from top to bottom, chance as an upright line."""
    axes = drawn(scores(), picture="bubbles")
    height = {"softmax": 2, "linear": 1, "local(window=8)": 0}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["local", "linear", "softmax"]
    assert list(axes.get_yticks()) == [0, 1, 2]
    *lines, chance = segments(axes)
    assert lines == [((low, height[spec]), (high, height[spec])) for spec, (low, _, high) in SCORES.items()]
    assert {x for x, _ in chance} == {0.1}
    (dots,) = axes.collections
    assert dots.get_offsets().tolist() == [[mean, height[spec]] for spec, (_, mean, _) in SCORES.items()]


def test_bars_by_width_and_by_state_span_the_seeds():
    tables = [scores(width=width) for width in (16, 64)]
    axes = drawn(*tables, picture="widths")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["16", "64"]
    assert list(axes.get_xticks()) == [16, 64]
    for bars, (low, mean, high) in zip(axes.containers, SCORES.values(), strict=True):
        points, _, (upright,) = bars
        assert points.get_xydata().tolist() == [[16, mean], [64, mean]]
        found = [segment.tolist() for segment in upright.get_segments()]
        assert found == [[[width, pytest.approx(low)], [width, pytest.approx(high)]] for width in (16, 64)]
    states = dict(zip(SCORES, (4000, 500, 80), strict=True))
    axes = drawn(scores(), rows=[cost(spec, state_bytes=size) for spec, size in states.items()], picture="state")
    # from the smallest state to the largest
    for bars, spec in zip(axes.containers, sorted(states, key=states.__getitem__), strict=True):
        points, _, (upright,) = bars
        low, mean, high = SCORES[spec]
        assert points.get_xydata().tolist() == [[states[spec], mean]]
        assert upright.get_segments()[0].tolist() == [
            [states[spec], pytest.approx(low)],
            [states[spec], pytest.approx(high)],
        ]
    assert {text.get_text(): text.xy[0] for text in axes.texts} == states
