"""Tables as wide as the terminal."""

import dataclasses
import os
import re
import sys
from collections.abc import Collection
from typing import Any, NoReturn

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


class Pipe(Console):
    """A console that raises BrokenPipeError for a closed pipe, which `main` handles."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def open_console(wide: int) -> Console:
    """A console as wide as the terminal or COLUMNS; `wide` if the output goes to a file or pipe."""
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Pipe(width=None if known else wide, highlight=False, markup=False, emoji=False)


def plain_table(*titles: str, wrapped: Collection[str] = ()) -> Table:
    """A table with one rule, below its titles. Cells of the columns named in `wrapped` may take several lines."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold", no_wrap=title not in wrapped)
    return table


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line per row if there is room, and always into a pipe; a narrow terminal gets stacked cells."""
    # a column of its own only if packages of other people are installed
    packages = ("package",) if any(row.get("package") for row in rows) else ()
    titles = ("name", "kind", "family", "time", "memory", "state", "causal", "cross", "decodes", *packages, "paper")
    stacked = ("name", "paper", "kind\nfamily", "time", "memory", "state", "does")
    whole, narrow = [], []
    for row in rows:
        costs = [row[cost]["text"] if row.get(cost) else "-" for cost in ("time", "memory", "state")]
        flags = [{True: "yes", False: "no", None: "-"}[row[flag]] for flag in ("causal", "cross", "decodes")]
        does = " ".join(flag for flag in ("causal", "cross", "decodes") if row[flag])
        # authors and year, or all of it if there is no year
        year = re.search(r"\b\d{4}\b", row["paper"])
        citation = row["paper"] if year is None else row["paper"][: year.end()]
        package = row.get("package")
        whole.append(
            (row["name"], row["kind"], row["family"], *costs, *flags, *(package or "-" for _ in packages), row["paper"])
        )
        where = f"{row['kind']}\n{row['family']}" + (f"\n{package}" if package else "")
        narrow.append((row["name"], citation, where, *costs, does or "self"))
    console = open_console(10_000)
    # all but the papers, which may wrap into 32 columns
    room = sum(2 + max(map(len, column)) for column in list(zip(titles, *whole, strict=True))[:-1]) + 32
    wide = room <= console.width
    gap = (0, 1, 0, 0) if wide else 0
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=gap, pad_edge=False, header_style="bold")
    for title in titles if wide else stacked:
        most = None if wide or title not in ("time", "memory", "state") else 8
        table.add_column(title, no_wrap=title == "name" or (wide and title != "paper"), overflow="fold", max_width=most)
    for name, *cells in whole if wide else narrow:
        table.add_row(Text(name, style="bold cyan"), *map(Text, cells))
    console.print(table)


def fact_items(facts: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(facts, field.name)) for field in dataclasses.fields(facts)]


def list_known(names: list[str]) -> str:
    return f"known: {', '.join(names)}"
