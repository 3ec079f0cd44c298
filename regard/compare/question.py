"""What a cell of a comparison asks, and the key that the question has: equal questions are never measured twice."""

import dataclasses
import functools
import hashlib
import inspect
import json
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

import regard
from regard.spec import ATTENTION, Spec, parse

SCHEMA = 1
MEASURE = 1  # raised where measurements change their meaning: then no older number answers
MEMORY = 2  # the same of peak memory; 2: on a GPU without what empties its cache
HOME = Path(regard.__file__).parent

Kind = Literal["speed", "memory", "decode", "count", "quality", "path"]
TIMED = ("speed", "memory", "decode")  # kinds whose answers depend on the machine
# what any mechanism runs on: a change there may change every number
SHARED = ("core", "kernels", "layers/position")
BASES = ("attending", "base", "cached", "checks", "digested", "draws", "mixing", "projected", "scanned", "tailed")


@dataclass(frozen=True)
class Question:
    """One question. Fields that do not matter to its kind are left at their defaults, so that they are in no key."""

    kind: Kind
    spec: str
    role: str
    length: int
    batch: int = 1
    model: dict[str, Any] = field(default_factory=dict)  # sizes: width, heads, of a quality cell the rest of a config
    part: Literal["layer", "mixing"] = "layer"  # with the projections, or attention alone
    device: str = "cpu"
    threads: int = 0
    dtype: str = "float32"
    task: dict[str, Any] | None = None  # name, version, options
    budget: dict[str, Any] | None = None  # axis, amount
    rate: float | None = None
    seed: int | None = None
    measure: int = MEASURE
    code: str = ""  # hash of the files that run
    machine: str = ""  # hash of the machine, for kinds that time

    @property
    def key(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of the canonical JSON."""
        return hashlib.sha256(canonical(dataclasses.asdict(self)).encode()).hexdigest()[:16]

    @property
    def asked(self) -> str:
        """What is asked, whoever answers: without the code, the machine and the version of the measurement."""
        whole = dataclasses.asdict(self)
        return canonical({name: value for name, value in whole.items() if name not in ("code", "machine", "measure")})


def canonical(values: Any) -> str:
    """JSON with one spelling for equal values."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def question_from(values: dict[str, Any]) -> Question:
    """A question as a cell's file has it."""
    known = {item.name for item in dataclasses.fields(Question)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"a question has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    return Question(**values)


# what ran


@functools.cache
def code_of(spec: str, *more: str) -> str:
    """A hash of the sources that a mechanism runs: its own files, the bases and kernels, and `more` files or folders of
    the package."""
    files = {_file_of(name) for name in _names(ATTENTION.canonical(spec))}
    files |= {HOME / "layers" / "attention" / f"{name}.py" for name in BASES}
    return _digest(files) + shared_code(*more)


def _file_of(name: str) -> Path:
    """The file of a mechanism."""
    try:
        return Path(inspect.getfile(ATTENTION.find(name)))
    except (OSError, TypeError):
        raise ValueError(
            f"attention {name!r} is defined in no file, as in a notebook: it is compared in other processes, which "
            "must import it. Put its class into a package whose entry point names it, as docs/adding.md says"
        ) from None


def shared_code(*more: str) -> str:
    """A hash of the sources that every mechanism runs, and of `more` files or folders of the package."""
    return _tree_digest((*SHARED, *more))


def _names(spec: Spec) -> Iterable[str]:
    yield spec.name
    for part in spec.parts:
        yield from _names(part)


@functools.cache
def _tree_digest(folders: tuple[str, ...]) -> str:
    files: set[Path] = set()
    for folder in folders:
        path = HOME / folder
        files |= set(path.rglob("*.py")) if path.is_dir() else {path}
    return _digest(files)


def _digest(files: Iterable[Path]) -> str:
    whole = hashlib.sha256()
    for path in sorted(files):
        whole.update(path.name.encode() + b"\0" + (path.read_bytes() if path.exists() else b"") + b"\0")
    return whole.hexdigest()[:8]


# where it ran


@functools.cache
def machine_facts(device: str) -> dict[str, Any]:
    """The machine as far as times depend on it."""
    facts = {"cpu": _cpu_name(), "cores": os.cpu_count() or 1, "torch": torch.__version__}
    if torch.device(device).type == "cuda" and torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda or ""}
    return facts


def machine_of(device: str) -> str:
    """A hash of the machine."""
    return hashlib.sha256(canonical(machine_facts(device)).encode()).hexdigest()[:8]


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


@functools.cache
def short(spec: str) -> str:
    """A spec in its canonical spelling."""
    return str(ATTENTION.canonical(parse(spec)))
