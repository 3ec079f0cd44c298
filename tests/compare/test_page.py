"""What the page of a comparison says beside its rows: the commands that ask for them again."""

import json
import re
import shlex

import pytest

from regard.cli import compare as compare_verb
from regard.cli import main, program
from regard.compare import tables
from regard.compare.page import html_report
from regard.compare.quality import QualityPlan
from regard.compare.results import Results, write_plans
from regard.compare.store import Folder


def test_the_command_of_a_row_asks_for_its_cell(tmp_path):
    """Of a table that was filled with other widths, budgets, rates and seeds than those of its size."""

    def plans_of(words: list[str]) -> list[QualityPlan]:
        arguments = program._parser().parse_args(words)
        return compare_verb._plans(arguments, Folder(tmp_path / "out"))[1]

    asked = ["--width", "16,48", "--budget", "updates=7", "--rates", "0.01", "--seeds", "2", "--device", "meta"]
    plans = plans_of(["compare", "--table", "mqar", *asked])
    assert [(plan.width, plan.inner) for plan in plans] == [(16, 32), (48, 96)]
    folder = Folder(tmp_path)
    write_plans(folder, None, plans, ("mqar", "smoke"))
    page = html_report(Results(None, folder, plans, tables.build("mqar")))
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    for plan, table in zip(plans, data["tables"], strict=True):
        commands = {row["spec"]: shlex.split(row["command"]) for row in table["rows"]}
        assert len(commands) == 5
        for spec, (program_name, *words) in commands.items():
            assert program_name == "regard"
            (again,) = plans_of(words)
            assert again.question(spec, 0.01, 2) == plan.question(spec, 0.01, 2)
            assert again.seeds == 2


def test_widths_of_a_table(tmp_path, capsys):
    for words, says in (
        (["--table", "recall", "--width", "64"], "table 'recall' has widths of its own: --width is for --table mqar"),
        (["--length", "64", "--width", "64,128"], "--width takes one width, got 64,128: several are for --table mqar"),
        (["--table", "mqar", "--width", "wide"], "--width takes whole numbers such as 1024,8192, got 'wide'"),
    ):
        with pytest.raises(SystemExit):
            main(["compare", *words, "--out", str(tmp_path)])
        assert says in " ".join(capsys.readouterr().err.split())
