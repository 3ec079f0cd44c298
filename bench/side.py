"""Runs side by side: rows of a table that differ in a few words, trained several at a time.

A row is a name and the flags it adds to the common ones. Every row is a run under --out, with a log next to it;
finished runs are not trained again, and runs that a time limit stopped are resumed the next time.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

Rows = dict[str, list[str]]
REGARD = [sys.executable, "-m", "regard"]


def arguments(about: str, rows: Rows, *, out: bool = True) -> argparse.ArgumentParser:
    """The flags that these benchmarks share; `out`: whether --out is always needed."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data")
    parser.add_argument("--out", type=Path, required=out, help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=1, help="rows trained at a time (default: 1)")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop all after this time; run again to resume")
    parser.add_argument("--only", nargs="+", choices=rows, metavar="ROW", help="only these rows")
    return parser


def slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def file(folder: Path, name: str) -> str:
    """A file that may be compressed."""
    found = [path for suffix in ("", ".gz", ".xz") if (path := folder / f"{name}{suffix}").exists()]
    if not found:
        raise SystemExit(f"{folder} has no {name}, {name}.gz or {name}.xz")
    return str(found[0])


def train(task: str, rows: Rows, common: list[str], out: Path, jobs: int, minutes: float) -> list[str]:
    """Trains `jobs` at a time, and returns the rows that are done. A run that is not done in time is stopped, and
    resumed the next time."""
    out.mkdir(parents=True, exist_ok=True)
    waiting, running, until = list(rows), {}, time.monotonic() + 60 * minutes
    done = []
    while waiting or running:
        while waiting and len(running) < jobs and time.monotonic() < until:
            name = waiting.pop(0)
            folder = out / slug(name)
            again = (folder / "run.json").exists()
            command = ["resume", str(folder)] if again else ["train", task, *common, "--out", str(folder), *rows[name]]
            with open(out / f"{slug(name)}.log", "a") as log:
                running[name] = subprocess.Popen([*REGARD, *command], stdout=log, stderr=log, env=alone())
        time.sleep(0.5)
        for name, job in list(running.items()):
            if job.poll() is not None:
                print(f"{name}: exit {job.returncode}", file=sys.stderr, flush=True)
                done += [] if job.returncode else [name]
                del running[name]
        if time.monotonic() > until:
            waiting.clear()
            for job in running.values():
                job.send_signal(signal.SIGTERM)
            until += 30
    return done


def evaluate(rows: list[str], out: Path, flags: list[str], jobs: int = 16) -> dict[str, dict[str, Any]]:
    """What `regard evaluate` gives for each run, or {"error": ...}."""
    found: dict[str, dict[str, Any]] = {}
    for first in range(0, len(rows), jobs):
        started = {
            name: subprocess.Popen(
                [*REGARD, "evaluate", str(out / slug(name)), *flags, "--json"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=alone(),
            )
            for name in rows[first : first + jobs]
        }
        for name, job in started.items():
            said, errors = job.communicate()
            found[name] = json.loads(said) if job.returncode == 0 else {"error": errors.strip().splitlines()[-1]}
    return found


def records(out: Path, name: str) -> list[dict[str, Any]]:
    """The log of a run."""
    return [json.loads(line) for line in (out / slug(name) / "log.jsonl").read_text().splitlines()]


def facts(out: Path, name: str) -> dict[str, Any]:
    """run.json, with the steps that were done."""
    return json.loads((out / slug(name) / "run.json").read_text()) | {
        "steps": max(record["step"] for record in records(out, name))
    }


def alone() -> dict[str, str]:
    """One thread for each of many processes."""
    return os.environ | {"OMP_NUM_THREADS": "1"}
