"""`regard compare`: which attention is fastest, at a length, a batch size and on a device."""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.tasks.command import AddVerb, notice

if TYPE_CHECKING:
    from regard.compare.results import Results

OUT = "runs/compare"
ASKED = ("length", "batch", "role", "width", "heads", "part", "device", "dtype", "threads", "minutes")


def add_verbs(verb: AddVerb) -> None:
    added = verb(
        "compare",
        compare,
        "measure what mechanisms cost at your length: time, memory, decoding, counted operations",
        [
            "regard compare --length 8192",
            'regard compare softmax "local(window=256)" linear performer --length 1024,8192 --batch 4',
            "regard compare --out runs/compare",
            "regard compare --report runs/compare --csv table.csv --markdown",
        ],
    )
    added.add_argument("specs", metavar="SPEC", nargs="*", help="mechanisms with their options (default: all)")
    added.add_argument("--length", metavar="N,N", help="numbers of tokens (default: 2048)")
    added.add_argument("--batch", type=int, help="rows (default: 1)")
    added.add_argument("--role", choices=("causal", "self", "cross"), help="role of the layers (default: causal)")
    added.add_argument("--width", type=int, help="model width, d_model (default: 512)")
    added.add_argument("--heads", type=int, help="heads (default: 8)")
    added.add_argument(
        "--part",
        choices=("layer", "mixing"),
        help="whole layer, or attention alone without its projections (default: layer)",
    )
    added.add_argument("--device", help="device: cpu, cuda ... (default: cpu)")
    added.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="dtype (default: float32)")
    added.add_argument("--threads", type=int, help="CPU threads (default: chosen by PyTorch)")
    added.add_argument("--minutes", type=float, help="time limit; the next call continues (default: 10)")
    added.add_argument("--out", metavar="FOLDER", help=f"folder of the results, which is continued (default: {OUT})")
    added.add_argument("--report", metavar="FOLDER", help="report on a folder of results, and measure nothing")
    added.add_argument("--force", action="store_true", help="measure again what the folder has already")
    added.add_argument("--json", action="store_true", help="print one JSON object per row")
    added.add_argument("--markdown", action="store_true", help="print Markdown")
    added.add_argument("--csv", metavar="FILE", help="also write the table as CSV")


def compare(arguments: argparse.Namespace) -> int:
    """regard compare"""
    if arguments.report is not None:
        return _report(arguments)
    from regard.compare.results import Results
    from regard.compare.run import Interrupted, Tools, fill_costs
    from regard.compare.store import Folder

    folder = Folder(arguments.out or OUT)
    plan = _plan(arguments, folder)
    folder.write_plan(plan.to_json())
    tools = Tools(force=arguments.force, command=shlex.join(["regard", *sys.argv[1:]]))
    code = 0
    try:
        fill_costs(plan, folder, tools)
    except Interrupted as stopped:
        notice(f"{stopped}; continue with: regard compare --out {folder.path}")
        code = stopped.code
    _print(Results(plan, folder), arguments)
    return code


def _plan(arguments: argparse.Namespace, folder: Any) -> Any:
    """The plan that the flags ask for; without flags, the one that the folder has."""
    from regard.compare.plan import CostPlan, cost_plan, lengths_from
    from regard.compare.run import with_threads

    given = {name: value for name in ASKED if (value := getattr(arguments, name)) is not None}
    if "length" in given:
        given["lengths"] = lengths_from(given.pop("length"))
    known = folder.read_plan()
    if known is not None and not arguments.specs and set(given) <= {"minutes"}:
        return cost_plan(known | given)
    return with_threads(CostPlan(specs=tuple(arguments.specs), **given))


def _report(arguments: argparse.Namespace) -> int:
    from regard.compare.results import Results

    asked = [f"--{name}" for name in ASKED if getattr(arguments, name) is not None]
    if asked or arguments.specs or arguments.out or arguments.force:
        what = ", ".join([*asked, *arguments.specs]) or ("--out" if arguments.out else "--force")
        raise ValueError(f"--report measures nothing, so it takes no {what}: leave it out, or leave --report out")
    _print(Results.load(arguments.report), arguments)
    return 0


def _print(results: "Results", arguments: argparse.Namespace) -> None:
    """The report, in the forms that were asked for."""
    from regard.cli.console import open_console
    from regard.compare.report import markdown_report, text_report

    if arguments.csv is not None:
        try:
            Path(arguments.csv).write_text(results.to_csv(), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot write {arguments.csv}: {error.strerror}") from error
    if arguments.json:
        for row in results.rows:
            print(json.dumps(row))
    elif arguments.markdown:
        print(markdown_report(results))
    else:
        print(text_report(results, open_console(120).width))
