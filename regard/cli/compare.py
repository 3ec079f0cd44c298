"""`regard compare`: which attention is fastest, which is best, at a length, a batch size, a device and a task."""

import argparse
import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.tasks.command import AddVerb, check_picture, notice

if TYPE_CHECKING:
    from regard.compare.results import Results

OUT = "runs/compare"
TRAINED = ("seeds", "rates", "budget", "jobs", "exclusive", "position", "task_length", "task_batch", "pretrain")
ASKED = ("length", "batch", "role", "width", "heads", "part", "device", "dtype", "threads", "minutes")


def add_verbs(verb: AddVerb) -> None:
    added = verb(
        "compare",
        compare,
        "compare mechanisms: what they cost at your length, and what they learn under an equal budget",
        [
            "regard compare --length 8192",
            'regard compare softmax "local(window=256)" linear performer --length 1024,8192 --batch 4',
            "regard compare softmax linear --task recall --seeds 3 --budget updates=600",
            "regard compare softmax linear --task language --data.text book.txt --budget minutes=5",
            "regard compare --out runs/compare",
            "regard compare --table recall --size smoke",
            "regard compare --report runs/compare --html report.html --plot pareto.png --csv table.csv",
        ],
    )
    added.add_argument(
        "specs",
        metavar="SPEC",
        nargs="*",
        help="mechanisms with their options; with --table, names of its rows (default: all)",
    )
    added.add_argument("--length", metavar="N,N", help="numbers of tokens (default: 2048)")
    added.add_argument("--batch", type=int, help="rows (default: 1)")
    added.add_argument("--role", choices=("causal", "self", "cross"), help="role of the layers (default: causal)")
    added.add_argument(
        "--width",
        metavar="N",
        help="model width, d_model (default: 512, with --task 64); with --table mqar its widths, such as 64,256",
    )
    added.add_argument("--heads", type=int, help="heads (default: 8)")
    added.add_argument(
        "--part",
        choices=("layer", "mixing"),
        help="whole layer, or attention alone without its projections (default: layer)",
    )
    added.add_argument("--device", help="device: cpu, cuda ... (default: cpu)")
    added.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of a layer; of a generated task that of matrix products, float32 or bfloat16 (default: float32)",
    )
    added.add_argument("--threads", type=int, help="CPU threads (default: chosen by PyTorch)")
    added.add_argument("--minutes", type=float, help="time limit; the next call continues (default: 10)")
    _add_training(added)
    added.add_argument("--out", metavar="FOLDER", help=f"folder of the results, which is continued (default: {OUT})")
    added.add_argument("--report", metavar="FOLDER", help="report on a folder of results, and measure nothing")
    added.add_argument(
        "--force",
        action="store_true",
        help="measure again what the folder has already, and train for a --budget of minutes also beside other work",
    )
    added.add_argument("--json", action="store_true", help="print one JSON object per row")
    added.add_argument("--markdown", action="store_true", help="print Markdown")
    added.add_argument("--csv", metavar="FILE", help="also write the table as CSV")
    added.add_argument("--html", metavar="FILE", help="also write one HTML page that needs no network")
    added.add_argument(
        "--plot", metavar="FILE", help="also draw the Pareto frontier, or the picture of a table: .png, .svg or .pdf"
    )
    added.add_argument("--against", metavar="FOLDER", help="also say what changed since other results")
    added.add_argument(
        "--table",
        help="fill a table by its name: complexity, tasks, recall, mqar, state, mad, survey; with your files arena, "
        "wmt, scaling, multi30k, experts, wikitext, imdb or cifar10; with --report, which table of the folder is shown",
    )
    added.add_argument(
        "--size", choices=("smoke", "small", "paper"), default="smoke", help="size of --table (default: smoke)"
    )


def _add_training(added: argparse.ArgumentParser) -> None:
    group = added.add_argument_group(
        "what it learns",
        "With --task, small models are trained too. Flags of regard train, which have a dot, are passed on to it.",
    )
    group.add_argument(
        "--task",
        help='generated task, such as recall or "mqar(pairs=4, vocabulary=64)", or one of regard train; with --table, '
        "which of its tasks, by name, such as listops-long,lra-text (default: all)",
    )
    group.add_argument(
        "--budget",
        help="training budget of every row: updates=600, epochs=5, tokens=2M, flops=1P or minutes=10; with --table, in "
        "place of that of its size",
    )
    group.add_argument("--seeds", type=int, help="seeds at the best learning rate (default: 3)")
    group.add_argument("--rates", metavar="R,R", help="learning rates to try (default: three, by the width)")
    group.add_argument("--jobs", type=int, help="number of models that are trained at a time (default: 1)")
    group.add_argument(
        "--exclusive",
        action="store_true",
        default=None,
        help="tasks of regard train: one of the --jobs trains at a time, the others prepare and evaluate meanwhile; so "
        "speeds can be compared",
    )
    group.add_argument("--position", help="spec of the position scheme, the same for all rows (default: sinusoidal)")
    group.add_argument(
        "--pretrain",
        choices=("none", "self"),
        help="self: half of the budget goes to the tokens of a generated task, before its answers (default: none; with "
        "--table, both where it has both)",
    )
    group.add_argument("--task-length", type=int, help="tokens of the task (default: its own)")
    group.add_argument("--task-batch", type=int, help="rows per update (default: 32)")


def split_flags(argv: list[str]) -> tuple[list[str], list[str]]:
    """The words of `regard compare`, and the flags that are for `regard train`: dotted ones, --config and --init, each
    with its value."""
    own: list[str] = []
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, _ = word.partition("=")
        if flag.startswith("--") and ("." in flag or flag in ("--config", "--init")):
            rest += [word] if equals else [word, *([value] if (value := next(words, None)) is not None else [])]
        else:
            own.append(word)
    return own, rest


def compare(arguments: argparse.Namespace) -> int:
    """regard compare"""
    if arguments.against is not None and not (Path(arguments.against) / "plan.json").exists():
        raise ValueError(f"--against {arguments.against} has no plan.json: it is no folder of 'regard compare'")
    if arguments.plot is not None:
        check_picture(arguments.plot)
    if arguments.report is not None:
        return _report(arguments)
    from regard.compare.complexity import fill_complexity
    from regard.compare.filling import check_quality, fill_quality
    from regard.compare.results import Results, write_plans
    from regard.compare.run import Environment, Interrupted, fill_costs
    from regard.compare.store import Folder
    from regard.compare.tables import build
    from regard.tasks.load import pick_device

    folder = Folder(arguments.out or OUT)
    costs, quality, table = _plans(arguments, folder)
    for plan in (*quality, *([] if costs is None else [costs])):
        pick_device(plan.device)  # raises where there is no such device here
    command = shlex.join(["regard", *sys.argv[1:]])
    environment = Environment(force=arguments.force, command=command)
    check_quality(quality, folder, environment)
    for lost in dict.fromkeys(plan.lost_precision for plan in quality if plan.lost_precision):
        notice(lost)
    # held, lest a second process changes what the first one reports
    with folder.writing("regard compare"):
        replaced = write_plans(folder, costs, quality, table, command)
    if replaced is not None:
        again = f": {replaced}" if replaced else ""
        notice(f"{folder.path} held another comparison: its results stay, and the same call shows them again{again}")
    code = 0
    results = Results(costs, folder, quality, None if table is None else build(*table))
    try:
        if results.table is not None:
            fill_complexity(results.table.complexity, folder, environment)
        fill_quality(quality, folder, environment)
        if costs is not None:
            fill_costs(costs, folder, environment)
    except Interrupted as stopped:
        notice(f"{stopped}; continue with: regard compare --out {folder.path}")
        code = stopped.code
    _print(Results(costs, folder, quality, results.table), arguments)
    return code


def _plans(arguments: argparse.Namespace, folder: Any) -> tuple[Any, list[Any], tuple[str, ...] | None]:
    """The plans that the flags ask for, and the table they are of; without flags, those that the folder has."""
    from regard.compare.budget import budget_from
    from regard.compare.plan import whole_numbers
    from regard.compare.results import read_plans
    from regard.compare.run import with_threads
    from regard.compare.tables import build

    given = {name: value for name in (*ASKED, *TRAINED) if (value := getattr(arguments, name)) is not None}
    widths = whole_numbers("--width", given["width"]) if "width" in given else ()
    if len(widths) > 1 and arguments.table is None:
        raise ValueError(f"--width takes one width, got {arguments.width}: several are for --table mqar")
    given |= {"width": widths[0]} if widths else {}
    rest = getattr(arguments, "rest", [])
    known = folder.read_plan()
    names = ("minutes", "device", "dtype", "jobs", "exclusive", "seeds")
    common = {name: given[name] for name in names if name in given}
    rates = _rates(arguments)
    if arguments.table is not None:
        if set(given) - {*common, "rates", "pretrain", "budget", "width"}:
            raise ValueError(
                "--table has settings of its own: it takes names of its rows, --size, --task, --pretrain, --budget, "
                "--width of mqar, --minutes, --device, --dtype, --jobs, --exclusive, --seeds, --rates and the flags of "
                "its data"
            )
        asked = (arguments.table, arguments.size, *rest)
        budget = None if arguments.budget is None else budget_from(arguments.budget)
        table = build(*asked, budget=budget, widths=widths)
        if arguments.specs and not table.quality and (table.costs or table.complexity):
            raise ValueError(
                f"table {arguments.table!r} trains nothing, and is filled whole: leave out the names of rows, or "
                f"compare them by themselves: regard compare {shlex.join(arguments.specs)}"
            )
        costs = None if table.costs is None else _changed(with_threads(table.costs), common)
        if costs is not None and table.quality:
            costs = costs.only(arguments.specs)
        return costs, [_changed(plan, common | rates) for plan in _chosen(table.quality, arguments)], asked
    if (
        known is not None
        and not arguments.specs
        and not rest
        and arguments.task is None
        and set(given) <= {"minutes", "jobs", "exclusive"}
    ):
        costs, _, quality, _ = read_plans(known, folder)
        costs = None if costs is None else _changed(costs, common)
        table = known.get("table")
        return costs, [_changed(plan, common) for plan in quality], None if table is None else tuple(table)
    if arguments.task is None and (unused := [name for name in TRAINED if name in given] + rest):
        name = unused[0] if unused[0].startswith("--") else f"--{unused[0]}"
        raise ValueError(f"{name} is for training: name a task with --task, such as --task recall")
    costs = None if arguments.task is not None and arguments.length is None else _cost_plan(arguments, given)
    return costs, [] if arguments.task is None else [_quality_plan(arguments, given, rest)], None


def _chosen(plans: tuple[Any, ...], arguments: argparse.Namespace) -> list[Any]:
    """The plans of a table whose task and pretraining were asked for, with the rows that were."""
    names = list(dict.fromkeys(plan.name for plan in plans))
    asked = names if arguments.task is None else arguments.task.split(",")
    if unknown := [name for name in asked if name not in names]:
        known = f"it has {', '.join(names)}" if names else "it trains none without the flags of its data"
        raise ValueError(f"table {arguments.table!r} has no task {unknown[0]!r}; {known}")
    found = [plan for plan in plans if plan.name in asked and arguments.pretrain in (None, plan.pretrain)]
    if plans and not found:
        raise ValueError(f"table {arguments.table!r} has no task with --pretrain {arguments.pretrain}: leave it out")
    if not arguments.specs:
        return found
    rows = list(dict.fromkeys(name for plan in found for name, _ in plan.rows()))
    if unknown := [name for name in arguments.specs if name not in rows]:
        known = f"it has {'; '.join(rows)}" if rows else "it trains none without the flags of its data"
        raise ValueError(f"table {arguments.table!r} has no row {unknown[0]!r}; {known}")
    return [part for plan in found if (part := plan.only(arguments.specs)) is not None]


def _changed(plan: Any, values: dict[str, Any]) -> Any:
    """A plan with the values that it has a field for."""
    known = {field.name for field in dataclasses.fields(plan)}
    return dataclasses.replace(plan, **{name: value for name, value in values.items() if name in known})


def _cost_plan(arguments: argparse.Namespace, given: dict[str, Any]) -> Any:
    from regard.compare.plan import BASELINE, CostPlan, whole_numbers
    from regard.compare.run import with_threads

    asked = {name: given[name] for name in ASKED if name in given}
    if "length" in asked:
        asked["lengths"] = whole_numbers("--length", asked.pop("length"))
    plan = with_threads(CostPlan(specs=tuple(arguments.specs), **asked))
    refused = [row for row in plan.rows() if row.refusal]
    if refused and len(refused) == sum(row.spec != BASELINE for row in plan.rows()):
        raise ValueError(f"nothing to compare with {BASELINE}: {refused[0].spec}: {refused[0].refusal}")
    return plan


def _quality_plan(arguments: argparse.Namespace, given: dict[str, Any], rest: list[str]) -> Any:
    from regard.compare.budget import budget_from
    from regard.compare.quality import QualityPlan
    from regard.compare.tables import split_test

    names = ("width", "heads", "device", "dtype", "minutes", "seeds", "jobs", "exclusive")
    asked = {name: given[name] for name in names if name in given} | _rates(arguments)
    if arguments.budget is not None:
        budget = budget_from(arguments.budget)
        asked |= {"axis": budget.axis, "amount": budget.amount}
    for flag, name in (
        ("task_length", "length"),
        ("task_batch", "batch"),
        ("position", "position"),
        ("pretrain", "pretrain"),
    ):
        if flag in given:
            asked[name] = given[flag]
    flags, test = split_test(rest)
    return QualityPlan(task=arguments.task, specs=tuple(arguments.specs), flags=flags, test=test, **asked)


def _rates(arguments: argparse.Namespace) -> dict[str, Any]:
    """The learning rates of --rates, if it is given."""
    if arguments.rates is None:
        return {}
    try:
        return {"rates": tuple(float(rate) for rate in arguments.rates.split(","))}
    except ValueError:
        raise ValueError(f"--rates takes numbers such as 0.001,0.003, got {arguments.rates!r}") from None


def _report(arguments: argparse.Namespace) -> int:
    from regard.compare.results import Results

    names = (*ASKED, *TRAINED, "task")
    asked = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is not None]
    asked += [word for word in getattr(arguments, "rest", []) if word.startswith("--")]
    if asked or arguments.specs or arguments.out or arguments.force:
        what = ", ".join([*asked, *arguments.specs]) or ("--out" if arguments.out else "--force")
        raise ValueError(f"--report measures nothing, so it takes no {what}: leave it out, or leave --report out")
    _print(Results.load(arguments.report, arguments.table), arguments)
    return 0


def _print(results: "Results", arguments: argparse.Namespace) -> None:
    """The report, in the forms that were asked for."""
    from regard.cli.console import open_console
    from regard.compare.page import html_report
    from regard.compare.report import markdown_report, text_report

    for path, text in ((arguments.csv, results.to_csv), (arguments.html, lambda: html_report(results))):
        if path is not None:
            try:
                Path(path).write_text(text(), encoding="utf-8")
            except OSError as error:
                raise ValueError(f"cannot write {path}: {error.strerror}") from error
    if arguments.plot is not None:
        from regard.compare.plot import save_plot

        save_plot(results, arguments.plot)
    if arguments.json:
        for row in results.all_rows():
            print(json.dumps(row))
    elif arguments.markdown:
        print(markdown_report(results))
    else:
        print(text_report(results, open_console(120).width))
    if arguments.against is not None:
        from regard.compare.changes import changes, describe_changes
        from regard.compare.store import Folder

        old = Folder(arguments.against)
        if arguments.json:
            for change in changes(results.folder, old):
                print(json.dumps(change))
        else:
            print(describe_changes(results.folder, old))
