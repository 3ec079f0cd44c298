"""What is said of a table: sentences that follow from intervals, columns that fit, files, and a folder half done."""

import csv
import io
import itertools
import json
import random
import re
from dataclasses import replace

import pytest
from planted import World

from regard.cli import main
from regard.compare import Results, report
from regard.compare.advise import advise, leaders
from regard.compare.plan import BASELINE, CostPlan
from regard.compare.results import NOT_RUN, write_plans
from regard.compare.store import Cell, Folder

SPECS = ("linear", "local(window=8)", "efficient", "dot")


def filled(path, seconds, *, noise=0.0, seed=0, specs=SPECS) -> Results:
    plan = CostPlan(specs=specs, lengths=(64,), width=16, heads=2, threads=1, minutes=600)
    folder = Folder(path)
    write_plans(folder, plan, ())
    World({BASELINE: 1.0} | seconds, noise=noise, seed=seed).fill(plan, folder)
    return Results.load(path)


def test_no_sentence_ranks_rows_whose_intervals_overlap(tmp_path):
    """Tables with planted times that are near each other and noisy: the fastest is ahead of all others."""
    draw = random.Random(0)
    ranked = 0
    for seed in range(6):
        seconds = {spec: draw.choice([0.4, 0.5, 0.51]) for spec in SPECS}
        results = filled(tmp_path / str(seed), seconds, noise=0.05, seed=seed)
        first, _, ties = advise(results)[0].partition("not significantly slower: ")
        rivals = [row for row in results.rows if row["spec"] != BASELINE]
        best = min(rivals, key=lambda row: row["train_ratio"])
        assert first.startswith(f"Fastest to train here: {best['spec']}, ")
        overlapping = {row["spec"] for row in rivals if row["train_ratio_low"] <= best["train_ratio_high"]}
        assert set(re.split(", | and ", ties.rstrip("."))) - {""} == overlapping - {best["spec"]}
        ranked += not ties
    assert 0 < ranked < 6


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        ({"linear": 0.1, "dot": 1.0}, "Fastest to train here: linear, 10.0 times as fast as softmax (10.0 to 10.0)."),
        ({"linear": 2.0, "dot": 3.0}, "Fastest to train here: softmax."),
        ({"linear": 1.0, "dot": 3.0}, "None is clearly faster to train than softmax here."),
    ],
)
def test_sentences(tmp_path, seconds, says):
    assert says in advise(filled(tmp_path, seconds, specs=tuple(seconds)))


def test_a_faster_row_whose_interval_holds_one_is_not_called_faster(tmp_path):
    results = filled(tmp_path, {"linear": 0.9, "dot": 3.0}, specs=("linear", "dot"))
    row = next(row for row in results.rows if row["spec"] == "linear")
    row["train_ratio_low"], row["train_ratio_high"] = 0.7, 1.1
    assert "None is clearly faster to train than softmax here." in advise(results)
    row["train_ratio_high"] = 0.95
    assert "Fastest to train here: linear, 1.11 times as fast as softmax (1.05 to 1.43)." in advise(results)


def test_a_row_that_is_not_clearly_faster_may_still_be_the_fastest(tmp_path):
    """Its interval contains one, and overlaps that of the fastest: neither is significantly faster."""
    results = filled(tmp_path, {"linear": 0.8, "dot": 0.9}, specs=("linear", "dot"))
    ends = {"linear": (0.7, 0.95), "dot": (0.85, 1.1)}
    for row in results.rows:
        if row["spec"] in ends:
            row["train_ratio_low"], row["train_ratio_high"] = ends[row["spec"]]
    said = " ".join(advise(results))
    assert (
        "Fastest to train here: linear, 1.25 times as fast as softmax (1.05 to 1.43); not significantly slower: dot."
        in said
    )
    # a smaller ratio that is less sure is no better
    ends = {"linear": (0.3, 1.2), "dot": (0.85, 0.95)}
    for row in results.rows:
        if row["spec"] in ends:
            row["train_ratio_low"], row["train_ratio_high"] = ends[row["spec"]]
    said = " ".join(advise(results))
    assert (
        "Fastest to train here: dot, 1.11 times as fast as softmax (1.05 to 1.18); not significantly slower: linear."
        in said
    )


def test_memory_and_states_are_ranked_where_the_gap_is_clear(tmp_path):
    results = filled(tmp_path, {"linear": 0.5, "dot": 0.5, "rfa": 0.5}, specs=("linear", "dot", "rfa"))
    sizes = {"softmax": (100.0, 1000), "linear": (10.0, 100), "dot": (12.0, 1000), "rfa": (20.0, 120)}
    for row in results.rows:
        row["peak_mib"], row["state_bytes"] = sizes[row["spec"]]
    said = " ".join(advise(results))
    assert "Least memory to train: linear and dot, 10 to 12 MiB." in said
    assert "Smallest state: linear and rfa, 10.0 times smaller than that of softmax." in said
    assert "sees all" not in said
    # who sees little is not the only answer
    for row in results.rows:
        row["sees"] = 64 if row["spec"] in ("softmax", "rfa") else 3
        if row["spec"] in ("linear", "rfa"):
            row["step_ratio"] = {"linear": 0.1, "rfa": 0.5}[row["spec"]]
            row["step_ratio_low"] = row["step_ratio_high"] = row["step_ratio"]
    said = " ".join(advise(results))
    assert "Of those in which a token sees all 64: rfa, 2.0 times as fast as softmax (2.0 to 2.0)." in said
    assert "Smallest state: linear and rfa, 10.0 times" in said
    next(row for row in results.rows if row["spec"] == "rfa")["state_bytes"] = 200
    assert "Of those in which a token sees all 64: rfa, 5.0 times smaller than that of softmax." in " ".join(
        advise(results)
    )
    for row in results.rows:
        row["peak_mib"] = 0.3
    assert "Least memory" not in " ".join(advise(results))


def test_what_a_token_does_not_see_is_said(tmp_path):
    results = filled(tmp_path, {"linear": 0.5, "local(window=8)": 0.1}, specs=("linear", "local(window=8)"))
    for row in results.rows:
        row["sees"] = 9 if row["spec"].startswith("local") else 64
    said = " ".join(advise(results))
    assert "In local(window=8) a token sees 9 of the 64." in said
    assert "Fastest of those in which a token sees all of them: linear, 2.0 times" in said


def test_of_several_leaders_the_first_has_the_number(tmp_path):
    times = {"linear": 0.5, "rfa": 0.5, "local(window=8)": 0.1}
    results = filled(tmp_path, times, specs=tuple(times))
    for row in results.rows:
        row["sees"] = 9 if row["spec"].startswith("local") else 64
        if row["spec"] == "rfa":
            row |= {"train_ratio": 0.52, "train_ratio_low": 0.4, "train_ratio_high": 0.6}
    said = " ".join(advise(results))
    assert "sees all of them: linear, 2.0 times as fast as softmax (2.0 to 2.0); not significantly slower: rfa." in said


def test_crossovers(tmp_path):
    """From the first length on at which it is faster and stays so; a table that follows the length is one mechanism."""
    plan = CostPlan(
        specs=("linear", "dot", "location"), lengths=(64, 128, 256), width=16, heads=2, threads=1, minutes=600
    )
    seconds = {"softmax": 1.0, "linear": 0.5, "dot": 1.0, **{f"location(longest={n + 5})": 0.5 for n in plan.lengths}}
    World(seconds).fill(plan, Folder(tmp_path))
    results = Results(plan, Folder(tmp_path))
    for row in results.rows:
        if row["spec"] == "linear" and row["length"] == 128:
            row["train_ratio_high"] = 1.1
    said = " ".join(advise(results))
    assert "Faster to train than softmax from 64 tokens on: location." in said
    assert "Faster to train than softmax from 256 tokens on: linear." in said
    # what is not known of shorter texts is not said
    next(row for row in results.rows if row["spec"] == "linear" and row["length"] == 64)["status"] = NOT_RUN
    assert "256 tokens on" not in " ".join(advise(results))


def test_leaders_are_the_first_and_all_that_overlap_it():
    rows = [{"x_ratio": m, "x_ratio_low": m - 0.1, "x_ratio_high": m + 0.1} for m in (0.5, 0.65, 0.8, 0.3)]
    assert [row["x_ratio"] for row in leaders(rows, "x")] == [0.3, 0.5]


FACTOR = re.compile(r"([\d,.]+) times as fast as softmax \(([\d,.]+) to ([\d,.]+)\)")


@pytest.mark.parametrize(("metric", "purpose"), [("train", "to train"), ("step", "to decode")])
@pytest.mark.parametrize("ratio", [(0.9, 0.85, 0.97), (0.4, 0.3, 0.6), (0.03, 0.025, 0.05), (0.0005, 0.0004, 0.001)])
def test_a_factor_of_speed_is_one_over_the_ratio_of_times(tmp_path, metric, purpose, ratio):
    """Each of training and decoding has its own, and its bounds are in the order of the factor."""
    results = filled(tmp_path, {"linear": 0.5}, specs=("linear",))
    for row in results.rows:
        row["sees"] = 64
        if row["spec"] == "linear":
            row |= {f"{name}_ratio{end}": 0.5 for name in ("train", "step") for end in ("", "_low", "_high")}
            row |= {f"{metric}_ratio{end}": value for end, value in zip(("", "_low", "_high"), ratio, strict=True)}
    (said,) = (sentence for sentence in advise(results) if sentence.startswith(f"Fastest {purpose} here: linear, "))
    factor, low, high = (float(part.replace(",", "")) for part in FACTOR.search(said).groups())
    assert 1 < low < factor < high
    for found, time in ((factor, ratio[0]), (low, ratio[2]), (high, ratio[1])):
        assert found == pytest.approx(1 / time, rel=0.03)
    # and where it takes longer, the baseline is the fastest
    for row in results.rows:
        if row["spec"] == "linear":
            row |= {f"{metric}_ratio{end}": 1 / value for end, value in zip(("", "_high", "_low"), ratio, strict=True)}
    assert f"Fastest {purpose} here: softmax." in advise(results)


def test_a_factor_of_states_is_that_of_their_bytes(tmp_path):
    results = filled(tmp_path, {"linear": 0.5}, specs=("linear",))
    for small, said in ((1000, "1.28 times smaller"), (10, "128 times smaller"), (1100, ""), (2560, "")):
        for row in results.rows:
            row["state_bytes"] = 1280 if row["spec"] == "softmax" else small
        found = [sentence for sentence in advise(results) if "state" in sentence]
        assert len(found) == bool(said)
        assert all(f"linear, {said} than that of softmax" in sentence for sentence in found)


def test_columns_say_what_was_measured():
    """In the units of their titles, bounds from the lower to the higher."""
    row = {"train_ratio": 0.5, "train_ratio_low": 0.4, "train_ratio_high": 0.625, "sees": 8192, "train_ms": 12.34}
    row |= {"forward_ms": 1.234, "step_ms": 123.4, "state_bytes": 4100, "peak_mib": 1234.4, "flops": 2.5e9}
    shown = {f"{title} {unit}".strip(): show(row) for title, unit, _, show in report.COLUMNS}
    assert shown == {
        "train x softmax [95 %]": "0.50 [0.40 0.62]",
        "sees tokens": "8,192",
        "train ms": "12.3",
        "forward ms": "1.23",
        "step ms": "123",
        "state": "4.10 kB",
        "peak MiB": "1,234",
        "counted GFLOP": "2.50",
    }
    state = next(show for title, *_, show in report.COLUMNS if title == "state")
    sizes = {1: "1 B", 999: "999 B", 1000: "1.00 kB", 33_600_000: "33.6 MB", 5e12: "5,000 GB"}
    assert {size: state({"state_bytes": size}) for size in sizes} == sizes


def test_columns_of_scores_say_what_was_found():
    row = {"score": 0.5, "score_min": 0.25, "score_max": 0.75, "solved": 0.5, "solved_at": None, "updates": 1200}
    row |= {"rate": 0.003, "rates_ok": 2, "rates": 3, "parameters": 12345, "active": 1234, "dropped": 0.015}
    row |= {"busiest": 1.25, "flops": 1.5e12, "speed": 12345.6, "speed_unit": "tokens", "device_seconds": 61.5}
    shown = {title: show(row | {"letters": "ab", "rising": True}) for title, _, show in report.SCORE_COLUMNS}
    assert shown == {
        "score": "0.500",
        "min, max": "0.250 0.750",
        "rank": "ab",
        "solved": "50%",
        "solved at": "> 1,200",
        "learning rate": "0.003",
        "learns at": "2 of 3",
        "parameters": "12,345",
        "active": "1,234",
        "dropped": "1.5%",
        "busiest": "1.2x",
        "counted FLOP": "1.50e+12",
        "trains at": "12,346 tokens/s",
        "device s": "61.5",
        "trend": "still improving",
    }
    columns = {title: show for title, _, show in report.SCORE_COLUMNS}
    assert columns["score"](row | {"at_chance": True}) == "0.500 ="
    assert columns["solved at"](row | {"solved_at": 640}) == "640"
    # what has solved it all cannot improve
    assert columns["trend"](row | {"rising": True, "solved": 1}) == columns["trend"](row | {"rising": False}) == ""


@pytest.mark.parametrize("width", [200, 70])
def test_the_table_fits_its_terminal(tmp_path, width):
    results = filled(tmp_path, dict(zip(SPECS, (0.1, 0.2, 0.3, 1.0), strict=True)))
    lines = report.text_report(results, width).splitlines()
    assert max(map(len, lines)) <= width
    titles = next(line for line in lines if "train" in line)
    assert "train" in titles
    dropped = [line for line in lines if line.startswith("Columns without room")]
    assert bool(dropped) == (width < 200)
    order = [line.split()[0] for line in lines if line.startswith(("linear", "local", "efficient", "dot", "softmax"))]
    assert order[:5] == ["linear", "local(window=8)", "efficient", "dot", "softmax"]


def test_files(tmp_path, capsys):
    """--report measures nothing, and writes what it is asked for."""
    results = filled(tmp_path / "out", dict(zip(SPECS, (0.1, 0.2, 0.3, 1.0), strict=True)))
    cells = sorted((tmp_path / "out" / "cells").iterdir())
    out = str(tmp_path / "out")
    assert main(["compare", "--report", out, "--csv", str(tmp_path / "t.csv"), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == json.loads(json.dumps(results.rows))
    written = list(csv.DictReader(io.StringIO((tmp_path / "t.csv").read_text())))
    assert [row["spec"] for row in written] == [row["spec"] for row in rows]
    assert float(written[1]["train_ratio"]) == pytest.approx(rows[1]["train_ratio"])
    assert main(["compare", "--report", out, "--markdown"]) == 0
    said = capsys.readouterr().out
    assert "| `linear` | 0.10 [0.10 0.10] |" in said
    assert sorted((tmp_path / "out" / "cells").iterdir()) == cells


def test_a_folder_half_done_says_what_is_missing(tmp_path, capsys):
    filled(tmp_path / "out", dict.fromkeys(SPECS, 0.5), specs=SPECS[:2])
    plan = CostPlan(specs=SPECS, lengths=(64,), width=16, heads=2, threads=1)
    write_plans(Folder(tmp_path / "out"), plan, ())
    assert main(["compare", "--report", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "3 of 5 rows measured, 2 not run yet" in said
    continues = f"not run: time limit 10 min; regard compare --out {tmp_path}/out continues"
    assert f"{continues}: efficient, dot" in " ".join(said.split())


def test_mistakes(tmp_path, capsys):
    for words, says in (
        (["--report", str(tmp_path)], "has no plan.json"),
        (["--report", str(tmp_path), "--length", "8"], "takes no --length"),
        (["--report", str(tmp_path), "--data.text", "x"], "takes no --data.text"),
        (["--report", str(tmp_path), "--against", str(tmp_path / "no")], "has no plan.json"),
        (["--length", "8", "--threads", "-1"], "threads must be 1 to 1,024"),
        (["--length", "8", "--threads", "1000000"], "threads must be 1 to 1,024"),
        (["--length", "8", "--minutes", "nan"], "minutes must be above 0 and finite"),
        (
            ["--task", "recall", "--minutes", "-1", "--out", str(tmp_path / "new")],
            "minutes must be above 0 and finite",
        ),
        (["bigbird", "--length", "64", "--out", str(tmp_path / "new")], "nothing to compare with softmax: bigbird"),
        (["--length", "8", "--device", "tpu", "--out", str(tmp_path / "new")], "no device is called 'tpu'"),
        (["--length", ""], "--length takes whole numbers such as 1024,8192, got ''"),
        (["--length", "8k"], "--length takes whole numbers such as 1024,8192, got '8k'"),
        (["nosuch", "--out", str(tmp_path / "new")], "unknown attention 'nosuch'"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["compare", *words])
        assert ended.value.code == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_damaged_files_are_named(tmp_path):
    """A cell that was cut, or lacks what tables read, is removed by hand and measured again."""
    filled(tmp_path, {"linear": 0.5}, specs=("linear",))
    for path in sorted((tmp_path / "cells").iterdir()):
        whole = json.loads(path.read_text())
        for part in ("answer", "question", "status"):
            path.write_text(json.dumps({name: value for name, value in whole.items() if name != part}))
            with pytest.raises(ValueError, match=f"{path.name} is damaged, it has no {part}: remove it"):
                Results.load(tmp_path)
        path.write_text(json.dumps(whole | {"answer": {}, "counted": {}}))
        with pytest.raises(ValueError, match=f"{path.name} is damaged, it has no"):
            Results.load(tmp_path)
        path.write_text("{")
        with pytest.raises(ValueError, match=r"is not readable JSON.*; remove the file, and it is measured again"):
            Results.load(tmp_path)
        path.write_text(json.dumps(whole))
    (tmp_path / "plan.json").write_text("[]")
    with pytest.raises(ValueError, match="is no plan of schema 1: remove it, and ask again"):
        Results.load(tmp_path)
    # the plan of a training run is another file, which nobody should remove
    (tmp_path / "plan.json").write_text('{"steps": 126}')
    with pytest.raises(ValueError, match="was not written by 'regard compare': give the folder of a comparison"):
        Results.load(tmp_path)


def test_a_comparison_that_takes_the_place_of_another_says_so(tmp_path):
    folder, plan = Folder(tmp_path), CostPlan(specs=("linear",), lengths=(64,))
    assert write_plans(folder, plan, (), command="regard compare linear --length 64") is None
    # the same with more time, or with nothing said, goes on
    assert write_plans(folder, replace(plan, minutes=1.0), (), command="regard compare") is None
    other = replace(plan, lengths=(128,))
    assert write_plans(folder, other, (), command="regard compare linear --length 128") == (
        "regard compare linear --length 64"
    )
    assert write_plans(folder, plan, ()) == "regard compare linear --length 128"


def test_what_an_estimate_left_out_is_named(tmp_path):
    """The sentences are about rows that were measured: whoever reads them alone is told of the others."""
    results = filled(tmp_path, {"linear": 0.5, "dot": 1.0}, specs=("linear", "dot"))
    assert "estimate" not in " ".join(advise(results))
    row = next(row for row in results.rows if row["spec"] == "dot")
    row |= {"status": "slow", "note": "about 2 times the time of softmax"}
    assert "Not measured, as too slow by an estimate: dot." in advise(results)


def test_a_second_process_leaves_the_plan_of_the_first(tmp_path, capsys):
    filled(tmp_path, {"linear": 0.5}, specs=("linear",))
    before = (tmp_path / "plan.json").read_text()
    with Folder(tmp_path).writing("regard compare"), pytest.raises(SystemExit):
        main(["compare", "dot", "--length", "64", "--out", str(tmp_path)])
    assert "is being written" in capsys.readouterr().err
    assert (tmp_path / "plan.json").read_text() == before


def test_rows_that_cannot_be_compared(tmp_path):
    """One row alone, and rows that all failed, are not told to continue."""
    alone = filled(tmp_path, {}, specs=(BASELINE,))
    assert advise(alone) == ["Nothing can be compared: fewer than two rows have numbers."]
    assert "continues" in advise(Results(alone.plan, Folder(tmp_path / "new")))[0]


def test_a_real_comparison(tmp_path, capsys):
    """Two layers in processes of their own, from the command line; the same folder again measures nothing."""
    out = str(tmp_path / "out")
    asked = ["linear", "--length", "64", "--width", "16", "--heads", "2", "--threads", "1"]
    assert main(["compare", *asked, "--out", out, "--minutes", "1"]) == 0
    said = capsys.readouterr()
    assert "softmax 64: " in said.err
    assert "In words. " in said.out
    assert main(["compare", "--out", out]) == 0
    again = capsys.readouterr()
    assert again.out == said.out
    assert again.err == ""
    assert all(list(itertools.islice(Folder(out).all(), 3)))


def test_of_several_older_answers_the_last_one_is_shown(tmp_path):
    """Whatever their keys are."""
    asked = CostPlan(specs=("linear",), lengths=(64,), width=16, heads=2, threads=1).question("speed", "linear", 64)
    codes = ["one", "two", "three", "four"]
    for last in codes:
        folder = Folder(tmp_path / last, keep_old=True)
        folder.cells.mkdir(parents=True)
        for code in codes:
            when = f"2026-01-0{2 if code == last else 1} 00:00:00"
            folder.put(Cell(replace(asked, code=code), "slow", code, provenance={"when": when}))
        found = folder.get(asked)
        assert found is not None
        assert found.note == last
        assert folder.old == {asked.key}
