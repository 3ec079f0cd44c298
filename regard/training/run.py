"""A run folder: what a model was made of, its tokenizer, its checkpoints and its log.

RUN/config.yaml      the resolved config; `regard train TASK --config` takes it
RUN/run.json         task, sizes of the model, facts of the data
RUN/source.json      tokenizer of the source, and RUN/target.json where the target has its own
RUN/published/       of an imported model: the files its tokenizer came from
RUN/checkpoints/     step-00001000/ ..., average/
RUN/log.jsonl        a line an event; what lies behind the checkpoint a run goes on from is cut off
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regard.training import checkpoint


class Run:
    """The paths of a run, and reading and writing what is small."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.checkpoints = self.folder / "checkpoints"
        self.log = self.folder / "log.jsonl"

    @classmethod
    def create(cls, folder: str | Path) -> "Run":
        """A new run folder."""
        run = cls.vacant(folder)
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        return run

    @classmethod
    def vacant(cls, folder: str | Path) -> "Run":
        """A place for a new run; one that holds a run already is refused."""
        run = cls(folder)
        if (run.folder / "run.json").exists():
            raise ValueError(
                f"{run.folder} holds a run already: go on with 'regard resume {run.folder}', or choose another --out"
            )
        if run.folder.exists() and not run.folder.is_dir():
            raise ValueError(f"{run.folder} is a file, not a folder for a run")
        return run

    @classmethod
    def open(cls, folder: str | Path) -> "Run":
        run = cls(folder)
        if not run.folder.is_dir():
            raise ValueError(f"there is no run folder {run.folder}")
        if not (run.folder / "run.json").is_file():
            raise ValueError(f"{run.folder} is not a run: it has no run.json")
        return run

    def write_json(self, name: str, values: dict[str, Any]) -> None:
        self.write_text(name, json.dumps(values, indent=2, ensure_ascii=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """All of it or nothing: under another name first."""
        path = self.folder / name
        partial = path.with_name(f".{name}.partial")
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        checkpoint.sync(self.folder)

    def read_json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path} is not readable JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold a JSON object")
        return values

    def append(self, record: dict[str, Any]) -> None:
        """One line of the log, in one write."""
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """The log, without a last line that was cut off."""
        if not self.log.exists():
            return []
        found = []
        for line in self.log.read_text(encoding="utf-8").split("\n"):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return found

    def rewind(self, step: int) -> None:
        """Cuts from the log what happened after a step."""
        kept = [record for record in self.records() if record["step"] <= step]
        self.write_text(self.log.name, "".join(json.dumps(record) + "\n" for record in kept))

    def find(
        self, which: str | int | None = None, say: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
    ) -> checkpoint.Checkpoint:
        """A checkpoint by name: best, last, average or a step; None: the average, or the best where there is none or
        training went on after it. What is passed over is said."""
        names = checkpoint.names(self.checkpoints)
        if which is None:
            which = "best"
            if checkpoint.exists(self.checkpoints / "average"):
                found = checkpoint.read(self.checkpoints / "average", only=("model",))
                if not names or checkpoint.step_name(found.state["step"]) >= names[-1]:
                    return found
                say(f"{self.folder}: the average is older than {names[-1]}: the best checkpoint is used instead")
        if which == "average":
            if not checkpoint.exists(self.checkpoints / "average"):
                raise ValueError(
                    f"{self.folder} has no averaged checkpoint: make one with 'regard average {self.folder}'"
                )
            return checkpoint.read(self.checkpoints / "average", only=("model",))
        if which in ("best", "last"):
            last, skipped = checkpoint.newest(self.checkpoints, only=("model",))
            if last is None:
                other = checkpoint.exists(self.checkpoints / "average")
                raise ValueError(f"{self.folder} has " + ("only an average" if other else "no checkpoint yet"))
            for path, why in skipped:
                say(f"{path.name} is damaged ({why}): {last.path.name} is used instead")
            best = last.state.get("best_step")
            if which == "last" or best is None or best == last.state["step"]:
                return last
            return checkpoint.read(self.checkpoints / checkpoint.step_name(best), only=("model",))
        if not str(which).isdecimal():
            raise ValueError(f"a checkpoint is best, last, average or a step, got {which!r}")
        path = self.checkpoints / checkpoint.step_name(int(which))
        if not checkpoint.exists(path):
            there = ", ".join(names) or "none"
            raise ValueError(f"{self.folder} has no checkpoint of step {which}; it has {there}")
        return checkpoint.read(path, only=("model",))
