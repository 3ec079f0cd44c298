"""What a run shows while it trains: a live line in a terminal, plain lines elsewhere, and TensorBoard events."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text


class Display:
    """Progress on standard error: standard output is for results."""

    def __init__(self, *, quiet: bool = False, tensorboard: Path | None = None):
        self.console = Console(stderr=True, highlight=False, markup=False, emoji=False, quiet=quiet)
        self.live = self.console.is_terminal and not quiet
        self.progress: Progress | None = None
        self.events, self.writer = tensorboard, None
        self.unit = "tokens"  # what the speed is counted in

    def begin(self, step: int, steps: int | None) -> None:
        """`steps` is the number of steps in all; None: `planned` will tell."""
        self.steps, self.first, self.began = steps, step, time.monotonic()
        if self.events is not None:
            self.writer = _writer(self.events, step)
        if self.live:
            self.progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[facts]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(elapsed_when_finished=False),
                console=self.console,
                speed_estimate_period=120,
            )
            self.task = self.progress.add_task("train", total=steps, completed=step, facts="")
            self.progress.start()

    def planned(self, steps: int, text: str) -> None:
        """Tells the number of steps in all."""
        self.steps = steps
        self.note(text)
        if self.progress is not None:
            self.progress.update(self.task, total=steps)

    def advance(self, step: int) -> None:
        if self.progress is not None:
            self.progress.update(self.task, completed=step)

    def logged(self, record: dict[str, Any]) -> None:
        speed = f"{self.unit}_per_second"
        facts = (
            f"loss {record['loss']:.3f}  learning rate {record['learning_rate']:.2e}  "
            f"{record[speed]:,} {self.unit}/s  {record['memory'] / 2**20:,.0f} MiB"
        )
        facts += describe_experts(record.get("layers", {}))
        if self.progress is not None:
            self.progress.update(self.task, facts=facts)
        else:
            left = self._left(record["step"])
            self.console.print(f"step {record['step']:>6}  epoch {record['epoch']}  {facts}{left}", soft_wrap=True)
        self._scalars(record, "train", ("loss", "learning_rate", "norm", speed))
        for layer, statistics in record.get("layers", {}).items():
            numbers = {name: value for name, value in statistics.items() if not isinstance(value, list)}
            numbers |= {name: max(value) * len(value) for name, value in statistics.items() if isinstance(value, list)}
            self._scalars(numbers | {"step": record["step"]}, layer, tuple(numbers))

    def evaluated(self, record: dict[str, Any], samples: list[dict[str, str]], best: bool) -> None:
        metrics = {name: value for name, value in record.items() if name not in ("event", "step", "epoch")}
        line = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        what = "the average of checkpoints" if record["event"] == "average" else f"step {record['step']:>6}"
        self.console.print(Text(f"{what}  validation  {line}{'  best so far' if best else ''}", "bold"), soft_wrap=True)
        for sample in samples:
            for name, text in sample.items():
                self.console.print(Text(f"    {name:<12} {text}", "dim"), soft_wrap=True)
        self._scalars(record, record["event"], tuple(metrics))

    def note(self, text: str, fleeting: bool = False) -> None:
        """Prints a line; a fleeting one is only shown in a terminal, until the next."""
        if self.progress is not None and fleeting:
            self.progress.update(self.task, facts=text)
        elif not fleeting:
            self.console.print(text, soft_wrap=True)

    def end(self) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
        if self.writer is not None:
            self.writer.close()

    def _left(self, step: int) -> str:
        """The time that is left, at the pace of this process: an earlier one may have run on another machine."""
        if self.steps is None or step <= self.first:
            return ""
        pace = (time.monotonic() - self.began) / (step - self.first)
        return f"  {_clock(pace * max(0, self.steps - step))} left"

    def _scalars(self, record: dict[str, Any], group: str, names: tuple[str, ...]) -> None:
        if self.writer is not None:
            for name in names:
                self.writer.add_scalar(f"{group}/{name}", record[name], record["step"])


def summarize_experts(layers: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The share of choices that the experts dropped, and the load of the busiest one relative to an even share."""
    dropped = [statistics["dropped"] for statistics in layers.values() if "dropped" in statistics]
    loads = [statistics["load"] for statistics in layers.values() if "load" in statistics]
    found = {"dropped": sum(dropped) / len(dropped)} if dropped else {}
    return found | ({"busiest": max(max(load) * len(load) for load in loads)} if loads else {})


def describe_experts(layers: dict[str, dict[str, Any]]) -> str:
    """The same in the words of a progress line."""
    found = summarize_experts(layers)
    text = f"  dropped {found['dropped']:.1%}" if "dropped" in found else ""
    return text + (f"  busiest {found['busiest']:.1f}x" if "busiest" in found else "")


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def _writer(folder: Path, step: int) -> Any:
    """A TensorBoard writer that continues after a step, or None if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)
