"""Whether `regard compare` tells 5 % from nothing, with real clocks: softmax against itself, without and with a sleep.

    python bench/clock.py --tries 20
    python bench/clock.py --tries 20 --load 4      # beside so many processes that only compute

A try is a comparison of its own. Slower is who has an interval above 1; with the sleep at least 19 of 20 should be,
without it at most one. The tests have the same with planted clocks.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from dataclasses import replace
from typing import Any

from regard.compare.measure import Process, Setting
from regard.compare.plan import CostPlan
from regard.compare.results import Results
from regard.compare.run import Environment, fill_costs
from regard.compare.store import Folder

RIVAL = "dot"  # the row under whose name softmax runs once more
LENGTH = 512


class Sleeper(Process):
    """Softmax in a process of its own, which sleeps for a share of its training step."""

    def __init__(self, setting: Setting, share: float):
        super().__init__(replace(setting, spec="softmax"))
        self.share = share

    def turn(self) -> dict[str, float]:
        found = super().turn()
        began = time.perf_counter()
        time.sleep(self.share * found["train"])
        return found | {"train": found["train"] + (time.perf_counter() - began if self.share else 0.0)}


def compute() -> None:
    """Keeps a core busy."""
    while True:
        sum(range(10_000))


def try_once(share: float) -> dict[str, Any]:
    """The row of the sleeper in a comparison."""

    def contestant(setting: Setting) -> Process:
        return Sleeper(setting, share) if setting.spec == RIVAL else Process(setting)

    plan = CostPlan(specs=(RIVAL,), lengths=(LENGTH,), width=256, heads=4, threads=1, minutes=3)
    with tempfile.TemporaryDirectory() as folder:
        fill_costs(plan, Folder(folder), Environment(contestant=contestant, report=lambda line: None))
        return next(row for row in Results(plan, Folder(folder)).rows if row["spec"] == RIVAL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=20, help="comparisons of each kind (default: 20)")
    parser.add_argument("--load", type=int, default=0, help="processes that only compute (default: 0)")
    given = parser.parse_args()
    busy = [multiprocessing.Process(target=compute, daemon=True) for _ in range(given.load)]
    for process in busy:
        process.start()
    print(f"load {os.getloadavg()[0]:.1f}")
    print("| sleep | called slower | ratio and interval of the last try |\n|---|---:|---:|")
    for share in (0.05, 0.0):
        rows = [try_once(share) for _ in range(given.tries)]
        slower = sum(row["train_ratio_low"] > 1 for row in rows)
        last = rows[-1]
        shown = f"{last['train_ratio']:.3f} [{last['train_ratio_low']:.3f} {last['train_ratio_high']:.3f}]"
        print(f"| {share:.0%} | {slower} of {given.tries} | {shown} |", flush=True)
    for process in busy:
        process.kill()


if __name__ == "__main__":
    main()
