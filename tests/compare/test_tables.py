"""Tables with a name: counted complexity, published numbers, commands for what is not run; page and pictures."""

import csv
import io
import json
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
from planted import World

from regard import config as configs
from regard import recipes
from regard import tasks as run_tasks
from regard.cli import compare as compare_verb
from regard.cli import main, program
from regard.compare import budget, complexity, plot, recipe_tables, scaling, tables
from regard.compare.budget import Budget
from regard.compare.changes import changes, describe_changes
from regard.compare.filling import Filling, fill_quality
from regard.compare.page import html_report
from regard.compare.plan import CostPlan
from regard.compare.plot import Point, frontier, save_plot
from regard.compare.quality import ENSEMBLE, QualityPlan
from regard.compare.report import table_lines, text_report
from regard.compare.results import Results, write_plans
from regard.compare.store import Cell, Folder
from regard.data.tasks import given
from regard.layers.feedforward.base import FeedForward, active_parameters
from regard.spec import FEEDFORWARD

SIZES = {"lengths": (64,), "width": 16, "heads": 2, "threads": 1, "minutes": 600}


def filled(path, seconds: dict[str, float]) -> Results:
    plan = CostPlan(specs=tuple(seconds), **SIZES)
    write_plans(Folder(path), plan, ())
    World({"softmax": 1.0} | seconds).fill(plan, Folder(path))
    return Results.load(path)


# counted complexity, as in Table 1 of the paper


@pytest.mark.parametrize(
    ("spec", "role", "layers"),
    [
        ("softmax", "causal", [1, 1]),
        ("linear", "causal", [1, 1]),
        ("local(window=8)", "causal", [4, 8]),
        ("strided(stride=8)", "causal", [None, None]),
        ("convolution(kernel=3)", "causal", [16, 32]),
        # why the table has no row for it: its note says so
        ("convolution(kernel=3, dilation=2)", "causal", [None, None]),
        ("fnet", "self", [1, 1]),
    ],
)
def test_layers_between_two_tokens(spec, role, layers):
    assert [complexity.path(spec, role, length) for length in (32, 64)] == layers


def test_residual_connections_keep_what_a_token_has(monkeypatch):
    """A layer in which each token sees the one before it, and not itself."""

    class Previous(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0))

    monkeypatch.setattr(complexity, "_layer", lambda *_: Previous())
    assert complexity.path("previous", "causal", 5) == 4


def test_sequential_operations():
    """Attention has as many at every length; a recurrence has some for each token, also inside one kernel."""

    def counts(spec: str) -> list[int]:
        return [complexity.sequential_operations(spec, "causal", length) for length in (128, 256)]

    for spec in ("softmax", "local(window=16)"):
        short, long = counts(spec)
        assert short == long < 30
    short, long = counts("recurrent(cell='lstm')")
    assert long - short >= 128
    # a chunk of 64 tokens waits for the one before
    short, long = counts("linear")
    assert 0 < long - short < 16


def test_work():
    # two operations per multiply-add: 4 n^2 d, 16 n d^2 and 2 k n d^2, and the projections around them
    n, d = 96, 64
    assert complexity.work("softmax", "self", n, d) == 4 * n * n * d + 8 * n * d * d
    assert complexity.work("recurrent(cell='lstm')", "causal", n, d) == (16 + 2) * n * d * d
    assert complexity.work("convolution(kernel=3)", "causal", n, d) == (6 + 2) * n * d * d
    found = complexity.exponents("softmax", "causal")
    assert 1.8 < found["length"] <= 2
    assert 1 < found["width"] < 1.6
    found = complexity.exponents("local(window=16)", "causal")
    assert found["length"] == pytest.approx(1, abs=0.05)


# plans


@pytest.mark.parametrize("size", tables.SIZES)
@pytest.mark.parametrize("name", tables.TABLES)
def test_every_table_is_a_plan_or_names_its_commands(name, size):
    table = tables.build(name, size)
    assert table.name == name
    assert table.costs or table.quality or table.commands
    for plan in table.quality:
        # the generator takes the length, and the rows are known mechanisms
        assert plan.rows()
        trial = plan.trial("softmax", 1.0, 0)
        assert trial.find_task().name == plan.name
    for _, command in table.commands:
        assert command.startswith(("regard ", "absent"))
    for published in table.published:
        assert published.tag in ("checked", "recalled")
        assert all(len(row.values) == len(published.columns) for row in published.rows)


def test_the_complexity_table_says_why_it_has_no_dilated_convolution(tmp_path):
    table = tables.build("complexity")
    assert not [spec for spec, _ in table.complexity if "dilation" in spec]
    said = " ".join(text_report(Results(None, Folder(tmp_path), (), table), 80).split())
    assert "Dilated convolutions have no row: log_k n layers" in said


def test_sizes_ask_for_more():
    smoke, small = (tables.build("recall", size).quality[0].amount for size in ("smoke", "small"))
    assert small > smoke
    with pytest.raises(ValueError, match="no table 'mda'; known: complexity"):
        tables.build("mda")


def test_a_table_without_plans_prints_what_was_published_and_how_to_fill_it(tmp_path, capsys):
    assert main(["compare", "--table", "wmt", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"GNMT \+ RL +24.6 +39.92", said)
    assert "not run: all rows, on pairs of yours: regard compare --table wmt" in said
    # and again, from the folder alone
    assert main(["compare", "--report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == said
    with pytest.raises(SystemExit):
        main(["compare", "--table", "wmt", "--length", "64", "--out", str(tmp_path)])
    assert "--table has settings of its own" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["compare", "--table", "recall", "--data.text", "a", "--out", str(tmp_path)])
    assert "table 'recall' generates its data, and takes no --data.text" in capsys.readouterr().err


def test_the_translators_of_table_2(tmp_path):
    """Every row is trained in both tables, and is there once more as an ensemble; other decoding trains nothing."""
    data = ("--data.source", "a", "--data.valid_source", "b", "--data.tokenizer", "units", "--test.source", "c")
    table = tables.build("wmt", "small", *data)
    assert [plan.axis for plan in table.quality] == ["epochs", "flops"]
    plan = table.quality[0]
    assert plan.test == ("--source", "c")
    trained = [variant for variant in plan.variants if not variant.of]
    assert len(trained) == 7
    assert sum(variant.ensemble for variant in plan.variants) == 8
    folder = Folder(tmp_path)
    trial = plan.run_trial("GNMT, ensemble", 0.001, ENSEMBLE, folder)
    assert trial.runs == tuple(plan.run_trial("GNMT", 0.001, seed, folder).run for seed in (1, 2, 3))
    assert not trial.trains
    replaced = plan.run_trial("Deep-Att on words, unknown replaced", 0.001, 1, folder)
    assert replaced.runs == plan.run_trial("Deep-Att on words", 0.001, 1, folder).runs
    assert replaced.test == ("--source", "c", "--replace-unknown")
    with pytest.raises(ValueError, match="needs pairs to validate on"):
        tables.build("wmt", "small", *data[:2])
    # what is not in units has no words to join
    assert not any(variant.words for variant in tables.build("wmt", "small", *data[:4]).quality[0].variants)


def test_the_arena_runs_what_it_has_files_for(tmp_path):
    """Every task stands twice, from scratch and self-pretrained; what has no file stands as not run."""
    alone = tables.build("arena", "small")
    assert [plan.title for plan in alone.quality[::2]] == ["ListOps, from scratch", "Path, from scratch"]
    assert {plan.pretrain for plan in alone.quality[1::2]} == {"self"}
    assert [what for what, _ in alone.commands] == ["Text", "Image", "Retrieval"]
    # each of the arena's eleven rows stands once, and has as many parameters as softmax
    rows = Filling(alone.quality[0], Folder(tmp_path), World({}).environment())
    rows.begin()
    assert len(rows.specs) == len({spec.partition("(")[0] for spec in rows.specs}) == 11
    with pytest.raises(ValueError, match="text needs both"):
        tables.build("arena", "small", "--data.text", "a.jsonl")
    with pytest.raises(ValueError, match=r"takes --data\.text, --test\.text, --data\.images"):
        tables.build("arena", "small", "--data.txt", "a.jsonl")


def test_some_tasks_of_a_table(tmp_path, capsys):
    """By name, and from scratch or self-pretrained; what a table does not have is said."""

    def plans(*words: str) -> list[QualityPlan]:
        arguments = program._parser().parse_args(["compare", "--table", "arena", *words])
        return compare_verb._plans(arguments, Folder(tmp_path / "out"))[1]

    names = [plan.name for plan in plans()]
    assert names == ["listops", "listops", "pathfinder", "pathfinder"]
    found = plans("--task", "listops", "--pretrain", "none", "--device", "cuda", "--dtype", "bfloat16")
    assert [(plan.name, plan.pretrain, plan.dtype) for plan in found] == [("listops", "none", "bfloat16")]
    assert plans("--task", "pathfinder,listops") == plans()
    assert {plan.amount for plan in plans("--budget", "updates=50")} == {50.0}
    for words, says in (
        (["arena", "--task", "lra-text"], "table 'arena' has no task 'lra-text'; it has listops, pathfinder"),
        (["recall", "--pretrain", "self"], "table 'recall' has no task with --pretrain self"),
        (
            ["recall", "--budget", "tokens=2k"],
            "table 'recall' has a budget of updates, such as --budget updates=100, got 2,000 tokens",
        ),
        (["recall", "--dtype", "float16"], "dtype must be float32 or bfloat16 for a task, got float16"),
        (["imdb", "--data.text", "a", "--dtype", "bfloat16"], "classify has --training.precision"),
    ):
        with pytest.raises(SystemExit):
            main(["compare", "--table", *words, "--out", str(tmp_path / "out")])
        assert says in capsys.readouterr().err


def test_some_rows_of_a_table(tmp_path, capsys):
    """By name, with what they need; what a table does not have is said."""

    def rows(*words: str) -> list[list[str]]:
        own, rest = compare_verb.split_flags(["compare", "--table", *words])
        arguments = program._parser().parse_args(own)
        arguments.rest = rest
        plans = compare_verb._plans(arguments, Folder(tmp_path / "out"))[1]
        return [[name for name, _ in plan.rows()] for plan in plans]

    images = ("--data.images", "a", "--test.data", "b")
    assert rows("cifar10", "fnet", "residual network without attention", "mixer", *images) == [
        ["mixer", "fnet", "residual network without attention"]
    ]
    # softmax is what the others have the parameters of
    assert rows("mad", "linear") == [["softmax", "linear"]] * 6
    assert rows("recall", "linear", "--task", "recall") == [["softmax", "linear"]]
    assert rows("tasks", "Feedback", "--task", "copy") == [["softmax", "Feedback"]]
    # costs are measured of these rows too
    for table in ("state", "arena"):
        arguments = program._parser().parse_args(["compare", "--table", table, "linear"])
        costs = compare_verb._plans(arguments, Folder(tmp_path / "out"))[0]
        assert [row.spec for row in costs.rows()] == ["softmax", "linear"]
    # lengths differ, and with them the options of a row
    assert rows("tasks", "gmlp(longest=64)") == [["softmax", "gmlp(longest=64)"]] * 2
    pairs = ("--data.source", "a", "--data.valid_source", "b", "--data.tokenizer", "units")
    name = "Deep-Att on words"
    assert rows("wmt", f"{name}, unknown replaced", *pairs) == [[name, f"{name}, unknown replaced"]] * 2
    for words, says in (
        (["cifar10", "mixr", *images], "table 'cifar10' has no row 'mixr'; it has softmax; local(window=[2, 2]);"),
        (["cifar10", "mixer"], "table 'cifar10' has no row 'mixer'; it trains none without the flags of its data"),
        (["complexity", "linear", "gmlp()"], "by themselves: regard compare linear 'gmlp()'"),
    ):
        with pytest.raises(SystemExit):
            main(["compare", "--table", *words, "--out", str(tmp_path / "out")])
        assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", recipe_tables.TABLES)
def test_every_row_of_a_recipe_is_a_model(name):
    """Or the row would fail after the others were trained."""
    table = recipe_tables.TABLES[name]
    plan = tables.build(name, "small", "--data.none", "x", "--test.data", "y").quality[0]
    assert plan.test == ("--data", "y")
    assert not plan.sweeps
    task = run_tasks.find(table.task)
    sizes = {"image": (32, 32), "channels": 3} if table.task == "images" else {"vocabulary": 300}
    sizes |= {} if table.task in ("translate", "language") else {"classes": 10}
    for row in table.rows:
        argv = recipes.with_paths(["--config", table.recipe, *row.flags, "--out", "unused"], task.name)
        config = configs.parse(task.config, argv, f"regard train {task.name}", "")
        inside, _ = budget.count(config.model.resolve(**sizes))
        assert inside > 10_000


def test_a_token_uses_as_many_parameters_in_every_row_of_experts():
    """With few words, whose embeddings would hide a difference."""
    table, active, found = recipe_tables.TABLES["experts"], {}, set()
    task = run_tasks.find(table.task)
    for row in table.rows:
        argv = recipes.with_paths(["--config", table.recipe, *row.flags, "--out", "unused"], task.name)
        config = configs.parse(task.config, argv, "regard train translate", "")
        with torch.device("meta"):
            model = task.build_model(config, config.model.resolve(vocabulary=300))
        active[row.name] = active_parameters(model)
        found |= {layer.facts.name for layer in model.modules() if isinstance(layer, FeedForward)}
    assert found == set(FEEDFORWARD.names())
    for name, count in active.items():
        assert count == pytest.approx(active["dense"], rel=0.01), name


def test_a_budget_in_place_of_that_of_a_size():
    """Warm-up and the like shrink with it; flags of the user have the last word."""
    data = ("--data.images", "x", "--training.warmup", "7")
    plan = tables.build("cifar10", "paper", *data, budget=Budget("epochs", 10)).quality[0]
    assert (plan.axis, plan.amount) == ("epochs", 10)
    assert plan.flags[:6] == ("--config", "cifar10-vit", "--training.warmup", "34", "--training.evaluate_every", "190")
    assert plan.flags[-4:] == data
    with pytest.raises(ValueError, match="has a budget of epochs, such as --budget epochs=15, got 5 updates"):
        tables.build("cifar10", "paper", *data, budget=Budget("updates", 5))
    assert {plan.amount for plan in tables.build("recall", budget=Budget("updates", 5)).quality} == {5}


def test_a_model_of_another_kind_is_a_row_of_a_generated_task():
    plan = tables.build("tasks").quality[0]
    refusals = dict(plan.rows())
    assert refusals["Perceiver, 64 latents"] == "no role 'causal'"
    assert refusals["Feedback"] == ""
    trial = plan.trial("Feedback", 0.003, 1)
    config = trial.config("Feedback", trial.find_task())
    assert (config.kind, config.width) == ("feedback", plan.width)
    assert trial.config("softmax", trial.find_task()).kind == "decoder"


# scaling


def test_a_power_law_is_found_and_its_interval_holds_it():
    sizes = [1e4, 3e4, 1e5, 3e5, 1e6]
    law = scaling.fit(sizes, [1.5 + 40 / size**0.3 for size in sizes])
    assert (law.floor, law.factor, law.exponent, law.r2) == pytest.approx((1.5, 40, 0.3, 1), rel=0.05)
    noisy = [scaling.Point(n, 1, n, tuple(1.5 + 40 / n**0.3 + shift for shift in (-0.01, 0.0, 0.01))) for n in sizes]
    found = scaling.fit_interval(noisy, lambda point: point.size)
    assert found.low < 0.3 < found.high
    assert found.high - found.low > 0.01
    assert scaling._law(noisy, "parameters").startswith("1.5")
    assert scaling._law(noisy[:3], "parameters") == "no exponent, 3 of the 4 points that it needs"
    bent = [point._replace(losses=(loss,)) for point, loss in zip(noisy, (3, 2, 3, 2, 3), strict=True)]
    assert "no exponent, R^2 of the best law is" in scaling._law(bent, "parameters")
    # nor has one that follows a law in part
    rough = [scaling.Point(size, 1e6, 1e9, (loss,)) for size, loss in ((1e5, 4.0), (1e6, 3.4), (1e7, 3.5), (1e8, 2.9))]
    law = scaling.fit([point.size for point in rough], [point.loss for point in rough])
    assert 0.8 < law.r2 < scaling.MIN_R2 == 0.98
    assert scaling._law(rough, "parameters").startswith("no exponent, R^2 of the best law is 0.")
    with mock.patch.object(scaling, "fit", return_value=scaling.Law(1.0, 2.0, 0.3, 0.9797)):
        assert scaling._law(noisy, "parameters") == "no exponent, R^2 of the best law is 0.979, below 0.98"
    assert scaling.hull([(1, 5.0), (2, 6.0), (3, 4.0), (3, 3.0)]) == [(1, 5.0), (3, 3.0)]


def test_the_ladder(tmp_path):
    """Sizes, then less data at one of them; rates are swept at the two smallest; runs that saw their data too often are
    on no curve."""
    table = tables.build("scaling", "smoke", "--data.text", "book.txt")
    plans = [replace(plan, specs=("linear",), seeds=2) for plan in table.quality]
    assert [len(plan.rates) for plan in plans] == [3, 3, 1, 1, 1, 1, 1]

    def trained(trial):
        width = int(trial.flags[trial.flags.index("--model.width") + 1])
        layers = int(trial.flags[trial.flags.index("--model.layers") + 1])
        size = width * width * layers
        loss = 1 + 10 / size**0.5 + 1e-4 * trial.seed
        answer = {"metric": "loss (validation)", "higher_is_better": False, "valid": loss, "score": loss, "curve": []}
        answer |= {"updates": 9, "epochs": 5 if size > 4096 else 1, "rising": False, "seconds": 1, "device_seconds": 1}
        return "done", "", (answer, {"parameters": size, "inside": size, "flops": size * 9})

    fill_quality(plans, Folder(tmp_path), World({}).environment(), trained)
    results = Results(None, Folder(tmp_path), plans, table)
    assert [point.size for point in scaling.points(results.scores, "linear")][:3] == [256, 1024, 4096]
    assert "linear, loss by parameters: no exponent, 3 of the 4 points" in text_report(results)
    assert len(plot.picture(results).axes) == 2


def test_tables_of_one_folder(tmp_path):
    """A folder has cells for several tables, each of which can be reported."""
    for name in ("recall", "mad", "recall"):
        table = tables.build(name)
        write_plans(Folder(tmp_path), table.costs, table.quality, (name, "smoke"))
    for name, plans in (("recall", 3), ("mad", 6), (None, 3)):
        assert len(Results.load(tmp_path, name).scores) == plans
    with pytest.raises(ValueError, match="has no table 'state'; it has recall, mad"):
        Results.load(tmp_path, "state")


def test_a_report_needs_no_data(tmp_path, capsys):
    """The folder of a task on files came from another machine, which has them."""
    files = [tmp_path / f"{name}.jsonl" for name in ("train", "test")]
    for path in files:
        lines = [{"text": f"text {number}", "label": "ab"[number % 2]} for number in range(8)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ("--data.text", str(files[0]), "--test.text", str(files[1]))
    table, folder = tables.build("arena", "smoke", *flags), Folder(tmp_path / "out")
    quality = [
        replace(plan, specs=("linear",), rates=(0.1,), seeds=1) for plan in table.quality if "Text" in plan.title
    ]
    write_plans(folder, None, quality, ("arena", "smoke", *flags))
    fill_quality(quality[:1], folder, World({}).environment(), answered)
    expected = text_report(Results(None, Folder(folder.path), quality, table))
    for path in files:
        path.unlink()
    given._read_text.cache_clear()
    assert text_report(Results.load(folder.path)) == expected
    assert "chance 0.50" in expected
    # a folder from before plans said what a report must know: its cells do, and where there is none, rows are not run
    plan = folder.read_plan()
    assert plan is not None
    for one in plan["quality"]:
        del one["described"]
    folder.write_plan(plan)
    tasks = Results.load(folder.path).scores
    assert [row["score"] for row in tasks[0].rows] == [0.628, 0.628]
    assert tasks[0].chance == (0.125, None)
    for cell in folder.cells.glob("*.json"):
        cell.unlink()
    assert {row["status"] for row in Results.load(folder.path).scores[0].rows} == {"not run"}
    # to continue they are needed
    with pytest.raises(SystemExit):
        main(["compare", "--out", str(folder.path)])
    assert str(files[0]) in capsys.readouterr().err


# page and pictures


def test_the_page_needs_no_network(tmp_path):
    page = html_report(filled(tmp_path, {"linear": 0.1, "dot": 1.0}))
    assert len(page) < 1_000_000
    assert "default-src 'none'" in page
    links = re.findall(r"(?:https?:)?//[\w.-]+", page)
    assert set(links) <= {"http://www.w3.org"}
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    assert {row["spec"] for row in data["tables"][0]["rows"]} == {"softmax", "linear", "dot"}
    assert "linear" in data["words"]
    # the fastest first, each with the command that measures it again
    assert data["tables"][0]["rows"][0]["spec"] == "linear"
    commands = {row["spec"]: row["command"] for row in data["tables"][0]["rows"]}
    assert commands["dot"] == "regard compare dot --length 64 --width 16 --heads 2 --threads 1 --out again"


def test_the_page_has_what_a_table_has_beside_its_plans(tmp_path):
    table = tables.build("wmt")
    page = html_report(Results(None, Folder(tmp_path), [], table))
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    assert data["lines"] == table_lines(Results(None, Folder(tmp_path), [], table))
    assert any(line.startswith("ConvS2S") for line in data["lines"])
    # and a score the command that trains it again, as the table asks for it
    plan = tables.build("recall", "small").quality[0]
    folder = Folder(tmp_path)
    write_plans(folder, None, [plan], ("recall", "small"))
    page = html_report(Results(None, folder, [plan], tables.build("recall", "small")))
    command = f"regard compare --table recall --size small --task {plan.name} --budget updates=6000 linear --out again"
    assert command in page
    page = html_report(Results(None, folder, [QualityPlan("recall", specs=("linear",), batch=8, seeds=2)]))
    assert "regard compare linear --task recall --budget updates=600 --task-batch 8 --seeds 2 --out again" in page


def test_no_text_ends_the_script(tmp_path):
    results = filled(tmp_path, {"linear": 0.1})
    results.rows[0]["note"] = "</script><script>alert(1)"
    assert "</script><script>alert" not in html_report(results)


def test_the_frontier():
    points = [Point("a", 1, 5, 1), Point("b", 2, 3, 1), Point("c", 2, 4, 1), Point("d", 3, 3, 1), Point("e", 4, 1, 1)]
    assert [point.name for point in frontier(points)] == ["a", "b", "e"]


def answered(trial):
    """A trainer that only pretends: wide and self-pretrained models are better."""
    score = 0.5 + 0.002 * trial.width + 0.1 * (trial.pretrain == "self")
    answer = {"metric": "accuracy", "higher_is_better": True, "valid": score, "score": score, "curve": [[600, score]]}
    answer |= {"right": 10, "asked": 1000, "groups": {}, "chance": 0.125, "items": [score], "rising": False}
    return "done", "", (answer | {"updates": 600, "solved_at": None, "seconds": 1}, {"parameters": 100})


@pytest.mark.parametrize(
    ("name", "panels", "label"),
    [
        ("mqar", 1, "width of the model"),
        ("state", 1, "bytes that decoding keeps after 64 tokens, one layer"),
        ("arena", 2, "speed of a training step at 64 tokens, softmax = 1"),
    ],
)
def test_pictures_of_tables(tmp_path, name, panels, label):
    """Score by width, by state, and as bubbles: hollow from scratch, joined to what self-pretraining makes of it."""
    table, folder = tables.build(name), Folder(tmp_path)
    plans = [replace(plan, specs=("linear",), seeds=1, rates=(0.1,)) for plan in table.quality]
    costs = None if table.costs is None else CostPlan(specs=("linear",), role=table.costs.role, **SIZES)
    world = World({"softmax": 1.0, "linear": 0.5})
    fill_quality(plans, folder, world.environment(), answered)
    if costs is not None:
        world.fill(costs, folder)
    drawn = plot.picture(Results(costs, folder, plans, table)).axes
    assert len(drawn) == panels
    assert {axes.get_xlabel() for axes in drawn} == {label}
    if name == "mqar":
        assert [list(line.get_ydata()) for line in drawn[0].lines[:1]] == [[0.5 + 0.002 * w for w in (16, 32, 64, 128)]]
    if name == "arena":
        # two rows, each twice and at its speed; hollow ones have no face
        points = [(*dots.get_offsets()[0], len(dots.get_facecolors())) for dots in drawn[0].collections]
        assert [(round(x, 6), round(float(y), 3), face) for x, y, face in points] == [
            (1.0, 0.628, 0), (1.0, 0.728, 1), (2.0, 0.628, 0), (2.0, 0.728, 1),
        ]  # fmt: skip
        # from scratch alone
        drawn = plot.picture(Results(costs, folder, plans[::2], table)).axes
        assert [len(axes.collections) for axes in drawn] == [2, 2]
        assert drawn[0].get_title() == "ListOps: hollow from scratch, area = memory, line = seeds"
        assert drawn[0].get_ylabel() == "accuracy (chance 0.10)"
        # from the lowest to the highest seed, at the row's speed
        ranges = [[(x, round(y, 3)) for x, y in line.get_xydata().tolist()] for line in drawn[0].lines[1::2]]
        assert ranges == [[(1.0, 0.628)] * 2, [(2.0, 0.628)] * 2]
        # without a speed for every row: their scores, beside what was published
        drawn = plot.picture(Results(None, folder, plans, table)).axes
        assert [text.get_text() for text in drawn[0].get_yticklabels()] == ["linear", "softmax"]
        published, scratch, pretrained = (dots.get_offsets().tolist() for dots in drawn[0].collections)
        assert published == [[pytest.approx(0.3637), 1], [pytest.approx(0.1613), 0]]
        assert [place for _, place in scratch] == [place for _, place in pretrained] == [1, 0]
        assert scratch[0][0] == pytest.approx(0.628)


def test_files(tmp_path, capsys):
    filled(tmp_path / "out", {"linear": 0.1})
    page, picture = tmp_path / "report.html", tmp_path / "pareto.svg"
    assert main(["compare", "--report", str(tmp_path / "out"), "--html", str(page), "--plot", str(picture)]) == 0
    assert "Regard: compare" in page.read_text()
    assert "linear" in picture.read_text()
    with pytest.raises(SystemExit):
        main(["compare", "--report", str(tmp_path / "out"), "--plot", str(tmp_path / "pareto.gif")])
    empty = Folder(tmp_path / "empty")
    write_plans(empty, None, ())
    with pytest.raises(ValueError, match="nothing to draw"):
        save_plot(Results.load(empty.path), picture)


def test_csv_and_json_have_what_is_counted_by_length(tmp_path, capsys):
    """In the row of costs of that length, where there is one."""
    asked, folder = tables.build("complexity"), Folder(tmp_path / "out")
    folder.cells.mkdir(parents=True)
    for number, (spec, role) in enumerate(asked.complexity):
        answer = {"spec": spec, "role": role, "work_length": 1.0, "work_width": 2.0}
        answer |= {"depth": [number + 1, number + 2, number + 3], "path": [number, 64, None]}
        folder.put(Cell(complexity.question(spec, role), answer=answer))
    write_plans(folder, asked.costs, (), ("complexity", "smoke"))
    assert main(["compare", "--report", str(folder.path), "--csv", str(tmp_path / "t.csv"), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    written = list(csv.DictReader(io.StringIO((tmp_path / "t.csv").read_text())))
    for rows in (lines, [{name: value for name, value in row.items() if value} for row in written]):
        linear = {int(row["length"]): row for row in rows if row["spec"] == "linear"}
        # one row per length: 512 and 1,024 are those of costs
        assert len(linear) == 6 == sum(row["spec"] == "linear" for row in rows)
        found = {at: tuple(str(row.get(name)) for name in ("depth", "hops")) for at, row in linear.items()}
        assert found == {
            32: ("None", "2"),
            64: ("None", "64"),
            128: ("3", "never"),
            256: ("4", "None"),
            512: ("5", "None"),
            1024: ("None", "None"),
        }


def test_csv_has_chance(tmp_path):
    plan = QualityPlan("mqar(pairs=4, vocabulary=64)", ("linear",), length=32)
    rows = list(csv.DictReader(io.StringIO(Results(None, Folder(tmp_path), [plan]).to_csv())))
    assert [float(row["chance"]) for row in rows] == [plan.find_task().chance] * 2
    assert 0 < plan.find_task().chance < 0.1


# two folders, and older results


def test_what_changed(tmp_path, capsys):
    filled(tmp_path / "old", {"linear": 0.1, "dot": 1.0})
    filled(tmp_path / "new", {"linear": 0.2, "dot": 1.0})
    found = {(change["spec"], change["metric"]): change for change in changes(*_folders(tmp_path))}
    assert found["linear", "train, x softmax"]["changed"]
    assert not found["dot", "train, x softmax"]["changed"]
    noisy = World({"softmax": 1.0, "linear": 0.1, "dot": 1.02}, noise=0.1)
    noisy.fill(CostPlan(specs=("linear", "dot"), **SIZES), Folder(tmp_path / "noisy"))
    found = {(one["spec"], one["metric"]): one for one in changes(Folder(tmp_path / "noisy"), Folder(tmp_path / "old"))}
    moved = found["dot", "train, x softmax"]
    assert moved["now"] != moved["before"]
    assert not moved["changed"]
    said = describe_changes(*_folders(tmp_path))
    assert "linear 64 train, x softmax: 0.1, now 0.2" in said
    assert "dot" not in said
    asked = ["compare", "--report", str(tmp_path / "new"), "--against", str(tmp_path / "old")]
    assert main([*asked, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert any(line.get("changed") for line in lines)
    assert main(asked) == 0
    assert said in capsys.readouterr().out


def _folders(path) -> tuple[Folder, Folder]:
    return Folder(path / "new"), Folder(path / "old")


def test_results_of_older_code_are_reported_as_such_and_measured_again(tmp_path, monkeypatch, capsys):
    filled(tmp_path, {"linear": 0.1})
    monkeypatch.setattr("regard.compare.plan.code_of", lambda spec: "changed")
    assert Results(CostPlan(specs=("linear",), **SIZES), Folder(tmp_path)).missing == 2
    assert main(["compare", "--report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "some rows are older: measured with other code" in said
    assert "linear   0.10 [0.10 0.10]" in said


def test_plans_are_read_back(tmp_path):
    costs, quality = CostPlan(specs=("linear",), **SIZES), QualityPlan("recall", specs=("linear",), rates=(0.1, 0.2))
    write_plans(Folder(tmp_path), costs, [quality], ("recall", "smoke"))
    results = Results.load(tmp_path)
    assert results.plan == costs
    assert results.scores[0].plan == quality
    assert results.table is not None


@pytest.mark.parametrize("size", tables.SIZES)
def test_all_rows_of_mad_have_equal_parameters(size):
    plan = tables.build("mad", size).quality[0]
    trial = plan.trial("softmax", 0.001, 1)
    task = trial.find_task()
    target, _ = budget.count(trial.config("softmax", task))
    for spec, _ in plan.rows():
        assert not budget.equalize_parameters(trial.config(spec, task), target).over, spec
