"""Training speed of the rows of a table of `regard compare`, each alone on the device, one after the other.

    python bench/speed.py multi30k --workers 12 --json speed.json --data.source train.en --data.target train.de \\
      --data.valid_source valid.en --data.valid_target valid.de
    python bench/speed.py cifar10 --only softmax linear --data.images cifar-10-batches-bin

A row trains on a few batches of the first epoch again and again: on a GPU each shape runs, is captured as a CUDA graph,
and is replayed, as in a long run. Data is read once for all rows. Nothing is evaluated and nothing is saved.
With --split each row also has milliseconds per step, means of the last two rounds: of the whole step; of the host, to
wait for projections that a thread draws anew and to copy them; of the GPU, for the graph; for the graph of the slowest
batch; and of the host, from the arrival of a gradient's norm to the launch of the next graph, in which the GPU has
little to do.
"""

import argparse
import contextlib
import gc
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest import mock

import side
import torch
from torch import Tensor

from regard import config as configs
from regard import recipes, tasks
from regard.compare.recipe_tables import TABLES
from regard.core.draws import RedrawnLayers
from regard.tasks.load import pick_device
from regard.training import graphs, loop
from regard.training.display import Display
from regard.training.run import Run

BATCHES = 8  # of different shapes
WARMUP = 3  # rounds over them: without a graph, to capture it, and one replay


class Enough(Exception):
    """The steps that were asked for are done."""


class Few:
    """A few batches, spread over the first epoch, until the steps are done."""

    def __init__(self, batches: Any, steps: int):
        count = batches.count(0)
        picks = sorted({index * count // BATCHES for index in range(BATCHES)})
        self.batches, self.steps = [batches.get(0, index) for index in picks], steps

    def count(self, epoch: int) -> int:
        return len(self.batches)

    def get(self, epoch: int, index: int) -> Any:
        if self.steps == 0:
            raise Enough
        self.steps -= 1
        return self.batches[index]


class Split:
    """Where the time of a step goes, on the host and on the GPU."""

    TITLES = ("step ms", "redraw ms", "graph ms", "slowest ms", "GPU waits ms")

    def __init__(self) -> None:
        self.draws: list[float] = []  # milliseconds
        self.launches: list[float] = []  # readings of the clock, in milliseconds
        self.waits: list[float] = []
        self.read = 0.0  # a reading of the clock: when the latest norm of the gradient had arrived
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measures the steps of a block of code."""
        redraw, replay, clip = RedrawnLayers.redraw, graphs.CudaGraphs.__call__, loop.Loop._clip_gradients

        def timed_redraw(self_: RedrawnLayers, step: int, steps: int | None = None) -> None:
            began = _clock()
            redraw(self_, step, steps)
            self.draws.append(_clock() - began)

        def timed_clip(self_: loop.Loop, norm: float) -> None:
            self.read = _clock()
            clip(self_, norm)

        def timed_replay(self_: graphs.CudaGraphs, batch: Any, weights: Any) -> dict[str, Tensor]:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            found = replay(self_, batch, weights)
            end.record()
            self.launches.append(_clock())
            self.waits.append(self.launches[-1] - self.read)
            self.events.append((begin, end))
            return found

        with (
            mock.patch.object(RedrawnLayers, "redraw", timed_redraw),
            mock.patch.object(graphs.CudaGraphs, "__call__", timed_replay),
            mock.patch.object(loop.Loop, "_clip_gradients", timed_clip),
        ):
            yield

    def columns(self) -> str:
        """Those of a row of the table. What only a GPU has is empty without one."""
        last = -2 * BATCHES
        if not self.events:
            return f"  | {mean(self.draws[last:]):.2f} |  |  |  |"
        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) for begin, end in self.events[last:]]
        steps = (self.launches[-1] - self.launches[last]) / (len(self.launches[last:]) - 1)
        numbers = (steps, mean(self.draws[last:]), mean(times), max(times), mean(self.waits[last:]))
        return "".join(f" {number:.2f} |" for number in numbers)


def _clock() -> float:
    return time.perf_counter() * 1e3


class Bench:
    """The rows of a task over the same data and the same tokenizers."""

    def __init__(self, task: str, common: list[str]):
        self.task, self.common = tasks.find(task), common
        self.data: Any = None
        self.tokenizers: Any = None
        self.parameters = 0  # of the last row's model

    def speed(self, flags: list[str], rounds: int) -> float:
        """Tokens per second: the median of rounds over the batches, after those of the warm-up."""
        config = self._config(flags)
        device = pick_device(config.training.device, config.training.precision)
        self.data = self.task.read_data(config) if self.data is None else self.data
        config, _ = self.task.complete_config(config, self.data)
        config, _ = self.task.choose_batch_size(config, device.type)
        if self.tokenizers is None:
            self.tokenizers = self.task.train_tokenizers(self.data, config)
        model_config = self.task.model_config(config, self.tokenizers, self.data)
        torch.manual_seed(config.training.seed)
        model = self.task.build_model(config, model_config).to(device)
        self.parameters = sum(part.numel() for part in model.parameters())
        task = self.task(config, self.data, self.tokenizers, model)
        # one more: the loop may read a batch ahead of its step
        task.batches = Few(task.batches, (WARMUP + rounds) * BATCHES + 1)
        with tempfile.TemporaryDirectory() as folder, Run.create(f"{folder}/run", "a benchmark of speed") as run:
            with contextlib.suppress(Enough):
                loop.Loop(task, config.training, run, Display(quiet=True)).train()
            log = [json.loads(line) for line in (run.folder / "log.jsonl").read_text().splitlines()]
        speeds = [record[f"{task.speed_unit}_per_second"] for record in log if record["event"] == "step"]
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return median(speeds[WARMUP:] or speeds)

    def _config(self, flags: list[str]) -> Any:
        every = ["--training.log_every", str(BATCHES), "--out", "unused"]
        every += [] if torch.cuda.is_available() else ["--training.precision", "float32"]
        argv = recipes.with_paths([*self.common, *flags, *every], self.task.name)
        return configs.parse(self.task.config, argv, f"regard train {self.task.name}", "")


def warm(job: tuple[str, list[str], list[str]]) -> float:
    """Compiles what a row needs: Triton keeps it on disk for the process that measures."""
    task, common, flags = job
    torch.set_num_threads(1)
    began = time.monotonic()
    # a row that fails is told of where it is measured
    with contextlib.suppress(RuntimeError, ValueError):
        Bench(task, common).speed(flags, 1 - WARMUP)
    return time.monotonic() - began


def measure(
    task: str,
    rows: side.Rows,
    common: list[str],
    *,
    rounds: int,
    workers: int,
    path: Path | None,
    is_split: bool = False,
) -> dict[str, float]:
    """Prints the rows in Markdown with their share of the first one's speed, and writes them as JSON after each."""
    if workers:
        with multiprocessing.get_context("spawn").Pool(min(workers, len(rows))) as pool:
            longest = max(pool.imap_unordered(warm, [(task, common, flags) for flags in rows.values()]))
        print(f"compiling took {longest:.0f} s", flush=True)
    bench, found = Bench(task, common), {}
    bench.speed(next(iter(rows.values())), 1)  # the clocks of a GPU, the allocator and the libraries warm up too
    more = (f" {' | '.join(Split.TITLES)} |", "---:|" * len(Split.TITLES)) if is_split else ("", "")
    print(f"| model | tokens/s | speed |{more[0]}\n|---|---:|---:|{more[1]}")
    for name, flags in rows.items():
        split = Split()
        try:
            with split.measured() if is_split else contextlib.nullcontext():
                found[name] = bench.speed(flags, rounds)
        except (RuntimeError, ValueError) as error:
            print(f"| {name} | omitted: {str(error).splitlines()[0][:100]} | |", flush=True)
            continue
        share = found[name] / next(iter(found.values()))
        print(f"| {name} | {found[name]:,.0f} | {share:.2f} |{split.columns() if is_split else ''}", flush=True)
        if path is not None:
            path.write_text(json.dumps(found, indent=1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES, help="table whose rows are measured")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="only these rows")
    parser.add_argument("--rounds", type=int, default=8, help="rounds over the batches that are timed (default: 8)")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile kernels first")
    parser.add_argument("--json", type=Path, help="file to write the speeds to")
    parser.add_argument("--split", action="store_true", help="also where the time of a step goes")
    given, data = parser.parse_known_args()
    table = TABLES[given.table]
    rows = {row.name: list(row.flags) for row in table.rows if given.only is None or row.name in given.only}
    common = ["--config", table.recipe, *data]
    options = {"rounds": given.rounds, "workers": given.workers, "path": given.json, "is_split": given.split}
    measure(table.task, rows, common, **options)


if __name__ == "__main__":
    main()
