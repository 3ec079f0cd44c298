"""A run folder: what a model was made of, its tokenizer, its checkpoints and its log.

RUN/config.yaml      the resolved config; `regard train TASK --config` takes it
RUN/run.json         task, config of the model, facts of the data, settings that were changed later
RUN/source.json      tokenizer of the source, and RUN/target.json where the target has its own
RUN/published/       of an imported model: the files its tokenizer came from
RUN/manifest.json    size and SHA-256 of each of these files, which are checked when they are read
RUN/checkpoints/     step-00001000/ ..., average/, each with a manifest of its own
RUN/log.jsonl        one line per event; resuming cuts the lines after the checkpoint that it resumes from

**One writer.** Code that writes into a run does so within `writing`. Readers need no lock.

**Replaced as a whole.** A file is written under a hidden name, then the manifest gets its SHA-256, then it gets its
name. The manifest decides: a reader that comes between the last two steps finds the file under its hidden name.
"""

import hashlib
import json
import os
import reprlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Self

from regard.core.files import check_regular
from regard.training import checkpoint, lock

MANIFEST = "manifest.json"
FORMAT = 1  # of the manifest; run.json says that there is one
TRIES = 20  # to read a file that is being replaced at the same time

_warned_unchecked: set[Path] = set()  # runs without a manifest that the user was warned of
_warned_damaged: set[tuple[Path, int]] = set()  # logs, and their number of damaged lines, that the user was warned of


def _parse_record(line: bytes) -> dict[str, Any] | None:
    """A line of the log; None: it is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def _warn(text: str) -> None:
    print(text, file=sys.stderr)


class Run:
    """The paths of a run, and reading and writing what is small."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.checkpoints = self.folder / "checkpoints"
        self.log = self.folder / "log.jsonl"

    @classmethod
    @contextmanager
    def create(cls, folder: str | Path, doing: str) -> Iterator["Run"]:
        """A new run folder, held for writing. It is a run as soon as it has a run.json."""
        run = cls.vacant(folder)
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        with run.writing(doing):
            # another process may have begun one since
            cls.vacant(folder)
            run._write_manifest({})
            yield run

    @classmethod
    def vacant(cls, folder: str | Path, *, trains: bool = False) -> "Run":
        """A folder for a new run; one that has a run already is refused. `trains`: the caller wants to train in it."""
        run = cls(folder)
        if (run.folder / "run.json").exists():
            also = f"continue it with 'regard resume {run.folder}', or " if trains else ""
            raise ValueError(f"{run.folder} holds a run already: {also}choose another --out")
        if run.folder.exists() and not run.folder.is_dir():
            raise ValueError(f"{run.folder} is a file, expected a folder for a run: choose another --out")
        return run

    def exists(self) -> bool:
        """Whether a run was begun in the folder."""
        return (self.folder / "run.json").is_file()

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        run = cls(folder)
        if not run.folder.is_dir():
            raise ValueError(f"there is no run folder {run.folder}")
        if not run.exists():
            raise ValueError(f"{run.folder} is not a run: it has no run.json")
        run.warn_unchecked()
        return run

    def writing(self, doing: str) -> AbstractContextManager[None]:
        """The lock of whoever writes into the run, one at a time. `doing` is what others are told."""
        return lock.hold(self.folder / ".lock", doing)

    # files that the manifest lists

    def write_json(self, name: str, values: dict[str, Any]) -> None:
        self.write_text(name, json.dumps(values, indent=2, ensure_ascii=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Writes a file as a whole, with its entry in the manifest."""
        data = text.encode()
        partial = self._write_partial(name, data)
        self._write_manifest((self._listed() or {}) | {name: _fact(data)})
        self._give_name(partial, name)

    def write_files(self, contents: Mapping[str, bytes]) -> None:
        """Writes the files of a new run, with their entries in the manifest; a name may be in a folder."""
        for name, data in contents.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_bytes(data)
        self.record(*contents)

    def record(self, *names: str) -> None:
        """Adds existing files to the manifest."""
        facts = {name: _fact((self.folder / name).read_bytes()) for name in names}
        self._write_manifest((self._listed() or {}) | facts)

    def has(self, name: str) -> bool:
        """Whether the run has a file, or its manifest says so; the file may still be damaged."""
        return (self.folder / name).exists() or name in (self._listed() or ())

    def read_bytes(self, name: str) -> bytes:
        """A file of the run, checked against the manifest. Runs older than manifests are read without a check."""
        path, partial = self.folder / name, self._partial(name)
        for _ in range(TRIES):
            listed = self._listed()
            if listed is None:
                check_regular(path)
                return path.read_bytes()
            if name not in listed:
                raise ValueError(f"{path} is not in {MANIFEST}: it was added by hand, and is not part of the run")
            for place in (path, partial):
                if place.is_file() and _fact(data := place.read_bytes()) == listed[name]:
                    return data
            if self._listed() == listed:
                break
        raise ValueError(self._damaged(name))

    def read_text(self, name: str) -> str:
        try:
            return self.read_bytes(name).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.folder / name} is not UTF-8 text: {error}") from error

    def read_json(self, name: str) -> dict[str, Any]:
        return _parse(self.read_bytes(name), self.folder / name)

    def adopt(self) -> None:
        """Writes a manifest of the present files for a run older than manifests."""
        if self._listed() is None:
            names = [name for name in ("config.yaml", "valid.jsonl", "run.json") if (self.folder / name).exists()]
            tokenizers = self.read_json("run.json").get("tokenizers") or ("source.json", "target.json")
            names += [name for name in tokenizers if (self.folder / name).exists()]
            names += [str(path.relative_to(self.folder)) for path in sorted((self.folder / "published").glob("*"))]
            self._write_manifest({name: _fact((self.folder / name).read_bytes()) for name in names})

    def warn_unchecked(self) -> None:
        """Warns once that a run has no manifest."""
        place = self.folder.resolve()
        if place not in _warned_unchecked and self._listed() is None:
            _warned_unchecked.add(place)
            _warn(f"regard: {self.folder} is older than {MANIFEST} of runs: its files are read without being checked")

    def _listed(self) -> dict[str, Any] | None:
        """The manifest's entry for each file; None: there is no manifest, as in the first runs."""
        path = self.folder / MANIFEST
        try:
            check_regular(path)
            data = path.read_bytes()
        except FileNotFoundError:
            facts = self.folder / "run.json"
            if facts.exists() and "manifest" in _parse(facts.read_bytes(), facts):
                raise ValueError(
                    f"{path} is missing, so no file of the run can be checked: restore it from a copy"
                ) from None
            return None
        values = _parse(data, path)
        files = values.get("files")
        if values.get("format") != FORMAT:
            raise ValueError(f"{path} has format {values.get('format')!r}, this version of Regard reads {FORMAT}")
        whole = isinstance(files, dict) and all(map(checkpoint.is_fact, files.values()))
        # only one spelling is valid, so any flipped bit is detected
        if not whole or data != checkpoint.canonical({"format": FORMAT, "files": files}):
            raise ValueError(f"{path} is not as Regard writes it: it was changed or damaged; restore it from a copy")
        return files

    def _damaged(self, name: str) -> str:
        path = self.folder / name
        if not path.exists():
            return f"{path} is missing, and {MANIFEST} lists it: restore it from a copy"
        if name != "config.yaml":
            return f"{path} does not match its SHA-256 in {MANIFEST}: it was changed or damaged; restore it from a copy"
        return (
            f"{path} was changed after Regard wrote it. To change a setting of this run, undo that and use "
            f"'regard resume {self.folder} --training.NAME VALUE' ('regard resume --help' lists the names); other "
            f"settings need a new run: regard train TASK --config {path} --out NEW"
        )

    def _partial(self, name: str) -> Path:
        path = self.folder / name
        return path.with_name(f".{path.name}.partial")

    def _write_partial(self, name: str, data: bytes) -> Path:
        partial = self._partial(name)
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return partial

    def _give_name(self, partial: Path, name: str) -> None:
        os.replace(partial, self.folder / name)
        checkpoint.sync(self.folder)

    def _write_manifest(self, files: dict[str, Any]) -> None:
        data = checkpoint.canonical({"format": FORMAT, "files": files})
        self._give_name(self._write_partial(MANIFEST, data), MANIFEST)

    # the log

    def append(self, record: dict[str, Any]) -> None:
        """Adds a line to the log, in one write."""
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """The lines of the log. Damaged ones are omitted, with one warning for each log; a last line that was cut off,
        as by a kill, is not counted among them."""
        if not self.log.exists():
            return []
        check_regular(self.log)
        *lines, last = self.log.read_bytes().split(b"\n")
        parsed = [_parse_record(line) for line in lines]
        damaged = [number for number, record in enumerate(parsed, 1) if record is None]
        if damaged and (self.log.resolve(), len(damaged)) not in _warned_damaged:
            _warned_damaged.add((self.log.resolve(), len(damaged)))
            count = "1 line is" if len(damaged) == 1 else f"{len(damaged)} lines are"
            _warn(f"regard: {self.log}: {count} damaged and omitted, the first is line {damaged[0]}")
        return [record for record in (*parsed, _parse_record(last)) if record is not None]

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Cuts the lines after a step from the log, and returns the others."""
        kept = [record for record in self.records() if record["step"] <= step]
        data = "".join(json.dumps(record) + "\n" for record in kept).encode()
        self._give_name(self._write_partial(self.log.name, data), self.log.name)
        return kept

    # checkpoints

    def clean_checkpoints(self) -> None:
        """Finishes what an interrupted process was writing or removing."""
        checkpoint.clean(self.checkpoints)

    def write_checkpoint(self, name: str, tensors: checkpoint.Tensors, state: Mapping[str, Any]) -> None:
        """Writes a checkpoint as a whole; one of that name is replaced."""
        checkpoint.write(self.checkpoints, name, tensors, state)

    def prune_checkpoints(self, kept: Collection[str]) -> None:
        """Removes all step checkpoints but these."""
        checkpoint.prune(self.checkpoints, kept)

    def find(self, which: str | int | None = None, warn: Callable[[str], None] = _warn) -> checkpoint.Checkpoint:
        """A checkpoint by name: best, last, average or a step. None: the average; or the best, if there is no average
        or the run was trained further since. `warn` is told of damaged checkpoints. Training may write and remove
        checkpoints meanwhile: then the search is repeated."""
        for _ in range(TRIES - 1):
            before, warnings = self._checkpoints(), []
            try:
                found = self._find(which, warnings.append)
            except checkpoint.CheckpointError:
                if self._checkpoints() == before:
                    raise
                continue
            if not warnings or self._checkpoints() == before:
                for text in warnings:
                    warn(text)
                return found
        return self._find(which, warn)

    def _checkpoints(self) -> tuple[list[str], int | None]:
        """A value that changes when a checkpoint is written or removed."""
        try:
            average = os.stat(self.checkpoints / "average").st_ino
        except OSError:
            average = None
        return checkpoint.names(self.checkpoints), average

    def _find(self, which: str | int | None, warn: Callable[[str], None]) -> checkpoint.Checkpoint:
        names = checkpoint.names(self.checkpoints)
        if which is None:
            which = "best"
            if checkpoint.exists(self.checkpoints / "average"):
                found = checkpoint.read(self.checkpoints / "average", only=("model",))
                if not names or checkpoint.step_name(_step(found)) >= names[-1]:
                    return found
                warn(f"{self.folder}: the average is older than {names[-1]}: the best checkpoint is used instead")
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
                warn(f"{path.name} is damaged ({why}): {last.path.name} is used instead")
            best = last.state.get("best_step")
            if which == "last" or best is None or best == _step(last):
                return last
            if type(best) is not int or best < 0:
                got = reprlib.repr(best)
                raise ValueError(f"{last.path}/state.json is damaged: best_step must be a step, got {got}")
            return checkpoint.read(self.checkpoints / checkpoint.step_name(best), only=("model",))
        if not str(which).isdecimal():
            raise ValueError(f"a checkpoint is best, last, average or a step, got {which!r}")
        path = self.checkpoints / checkpoint.step_name(int(which))
        if not checkpoint.exists(path):
            there = ", ".join(names) or "none"
            raise ValueError(f"{self.folder} has no checkpoint of step {which}; it has {there}")
        return checkpoint.read(path, only=("model",))


class ReadOnlyRun(Run):
    """A run for the processes that leave the writing to the main one: what they would write is left out."""

    def write_text(self, name: str, text: str) -> None:
        pass

    def append(self, record: dict[str, Any]) -> None:
        pass

    def rewind(self, step: int) -> list[dict[str, Any]]:
        return [record for record in self.records() if record["step"] <= step]

    def clean_checkpoints(self) -> None:
        pass

    def write_checkpoint(self, name: str, tensors: checkpoint.Tensors, state: Mapping[str, Any]) -> None:
        pass

    def prune_checkpoints(self, kept: Collection[str]) -> None:
        pass


def _fact(data: bytes) -> dict[str, Any]:
    """The manifest's entry for a file."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _step(found: checkpoint.Checkpoint) -> int:
    """The step of a checkpoint, from its state."""
    step = found.state.get("step")
    if type(step) is not int or not 0 <= step < 10**12:
        raise ValueError(
            f"{found.path}/state.json is damaged: step must be a number of at least 0, got {reprlib.repr(step)}"
        )
    return step


def _parse(data: bytes, path: Path) -> dict[str, Any]:
    try:
        values = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values
