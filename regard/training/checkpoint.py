"""Checkpoints: folders of safetensors and JSON, written as a whole or not at all, and verified before they are used.

    RUN/checkpoints/step-00001000/
        model.safetensors      any number of such files, each a dict of named tensors
        optimizer.safetensors
        state.json             plain values: step, place in the epoch, schedule, best so far
        manifest.json          format, the checkpoint's name, size and SHA-256 of every other file

**Atomic.** A checkpoint is written into the hidden folder `.writing-NAME`; every file and the folder are flushed to
the disk before the folder gets its name, and the name is flushed before `write` returns. So NAME is always complete.

**Replacing** a name takes two renames, since a folder cannot be renamed over a full one: NAME becomes
`.replaced-NAME`, then `.writing-NAME` becomes NAME. A crash between the two leaves the old one under its hidden name,
where all readers of this module look when NAME is missing; the next `write` or `clean` restores its name.

**Verified.** safetensors has no checksum: a flipped bit loads without an error. Here every byte is covered: the files
by the manifest; the manifest because it has only one valid spelling, and every value in it is checked.

**Inert.** Only safetensors and JSON are read: a checkpoint from a stranger can be wrong, but cannot run code.

Only one process at a time may write a name; different names may be written at the same time.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from regard.training.shards import CheckpointError, read_shards

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
SUFFIX = ".safetensors"

# Far above what a run writes, and low enough that a hostile file cannot fill the memory.
MANIFEST_LIMIT = 1 << 20
STATE_LIMIT = 1 << 26
DEPTH_LIMIT = 64

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
STEM = re.compile(r"[a-z][a-z0-9_-]{0,63}")
STEP = re.compile(r"step-([0-9]{8,18})")
SHARD = re.compile(r"shard-[0-9]+-model-[0-9]+-of-[0-9]+\.safetensors")  # as torch.distributed.checkpoint names them
HIDDEN = re.compile(rf"\.(?:writing|replaced|removing)-({NAME.pattern})")

WINDOWS = os.name == "nt"

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


Tensors = Mapping[str, Mapping[str, Tensor]]  # by file stem and name


class Checkpoint(NamedTuple):
    """What was read: tensors by file stem and name, the values of state.json, and the folder."""

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    path: Path


class Newest(NamedTuple):
    """The newest checkpoint that verifies (None: there is no checkpoint), and newer ones that do not, with why."""

    checkpoint: Checkpoint | None
    skipped: list[tuple[Path, str]]


class Content(NamedTuple):
    """A file to write: its size, known before a byte is written, and its bytes, made only while they are written."""

    size: int
    chunks: Iterable[bytes | memoryview]


def step_name(step: int) -> str:
    """The name of the checkpoint after `step` steps: step-00001000."""
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    """The step of a checkpoint, from its name."""
    return int(name.removeprefix("step-"))


def digest(path: Path) -> str:
    """SHA-256 of a file in hexadecimal, read piece by piece."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def listed_digest(path: Path, stem: str = "model") -> str:
    """SHA-256 of the tensors of a checkpoint, as its manifest lists it; the file itself is not read."""
    place = _place(Path(path))
    with _in_words(place, "could not be read"):
        files = _read_manifest(place / MANIFEST, Path(path).name)
    shards = [files[name]["sha256"] for name in sorted(files) if SHARD.fullmatch(name)]
    if shards:
        return hashlib.sha256("".join(shards).encode()).hexdigest()
    if stem + SUFFIX not in files:
        raise CheckpointError(f"{place / MANIFEST}: does not list {stem}{SUFFIX}")
    return files[stem + SUFFIX]["sha256"]


def write(folder: Path, name: str, tensors: Tensors, state: Mapping[str, Any]) -> Path:
    """Write checkpoint `name` into `folder`, durably, and return its path; a checkpoint of that name is replaced.

    `tensors` maps a file stem ("model") to named tensors, on any device. Tensors that are the same memory (tied
    weights) are stored once and come back as one tensor. `state` is plain JSON, without NaN or infinities.
    When anything fails, existing checkpoints stay, nothing partial has a final name, and the error says how many bytes
    were needed.
    """
    folder = Path(folder)
    if not NAME.fullmatch(name):
        raise CheckpointError(f"{folder}: a checkpoint's name is letters, digits, '.', '_' and '-', got {name!r}")
    contents = {}
    for stem, named in tensors.items():
        if not STEM.fullmatch(stem):
            raise CheckpointError(f"{folder / name}: a file stem is a lower-case word like 'model', got {stem!r}")
        contents[stem + SUFFIX] = _tensor_content(named, folder / name / (stem + SUFFIX))
    contents[STATE] = _state_content(state, folder / name / STATE)
    # each file takes whole blocks, and the manifest is one more
    needed = sum(content.size + 4096 for content in contents.values()) + 4096

    with _written(folder, name, needed) as (writing, files):
        files |= {file: _write_file(writing / file, content) for file, content in contents.items()}
    return folder / name


def write_shards(
    folder: Path, name: str, save: Callable[[Path], None], state: Mapping[str, Any], needed: int, is_main: bool
) -> Path:
    """Write checkpoint `name` of tensors in shards: every process calls it, and in `save` all of them write safetensors
    files with shards of tensors called STEM/NAME into the folder they are given, waiting for each other before and
    behind. The main process does the rest."""
    if not is_main:
        save(folder / f".writing-{name}")
        return folder / name
    content = _state_content(state, folder / name / STATE)
    with _written(folder, name, needed + content.size + 8192) as (writing, files):
        save(writing)
        files |= {path.name: _flush(path) for path in sorted(writing.iterdir())}
        files[STATE] = _write_file(writing / STATE, content)
    return folder / name


@contextmanager
def _written(folder: Path, name: str, needed: int) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A hidden folder to write the files of a checkpoint into, and a dict for their entries in the manifest. After the
    block they have the name of the checkpoint, or, if anything failed, are gone."""
    final, writing, replaced = folder / name, folder / f".writing-{name}", folder / f".replaced-{name}"
    files: dict[str, Any] = {}
    with _in_words(final, f"could not be written ({needed:,} bytes needed)"):
        _make(folder)
        _finish_interrupted(folder, name)
        usage = shutil.disk_usage(folder)
        # some network file systems report no sizes at all
        if usage.total and usage.free < needed:
            raise CheckpointError(
                f"{final}: could not be written: {needed:,} bytes needed, {usage.free:,} free; "
                "make room, or keep fewer checkpoints"
            )
        try:
            os.mkdir(writing)
            yield writing, files
            manifest = canonical({"format": FORMAT, "name": name, "files": files})
            _write_file(writing / MANIFEST, Content(len(manifest), [manifest]))
            sync(writing)
            if os.path.lexists(final):
                os.rename(final, replaced)
            os.rename(writing, final)
        except BaseException:
            with suppress(OSError):
                _finish_interrupted(folder, name)
            raise
        sync(folder)
    # the new one is safe: if the old one cannot be removed now, the next write does it
    with suppress(OSError):
        _remove(replaced)


def read(path: Path, *, device: torch.device | str = "cpu", only: Collection[str] | None = None) -> Checkpoint:
    """Read a checkpoint after verifying all of it; `only` names the stems whose tensors are read."""
    path = Path(os.path.abspath(path))
    place = _place(path)
    with _in_words(place, "could not be read"):
        stems = _verify(place, path.name)
        state = _parse(_read_bytes(place / STATE, STATE_LIMIT), place / STATE)
        if not isinstance(state, dict):
            raise CheckpointError(f"{place / STATE}: must be a JSON object, got {type(state).__name__}")
        files = {stem: place / (stem + SUFFIX) for stem in sorted(stems)}
        if is_sharded(place):
            tensors = read_shards(files.values(), state.pop("aliases", {}), device, only)
        else:
            tensors = {stem: _read_tensors(files[stem], device) for stem in files if only is None or stem in only}
        missing = sorted(set(only or ()) - tensors.keys())
        if missing:
            raise CheckpointError(f"{place}: has no {missing[0] + SUFFIX}; it holds {', '.join(sorted(stems))}")
    return Checkpoint(tensors, state, path)


def is_sharded(path: Path) -> bool:
    """Whether the tensors of a checkpoint are in shards, as processes write them that share a model."""
    return any(SHARD.fullmatch(name) for name in _entries(_place(path)))


def exists(path: Path) -> bool:
    """Whether there is a checkpoint `path`, even one whose replacement was interrupted; it may still not verify."""
    return os.path.lexists(_place(Path(path)))


def names(folder: Path) -> list[str]:
    """The names of the step checkpoints in `folder`, oldest first, whether they verify or not."""
    found = {hidden[1] if (hidden := re.fullmatch(r"\.replaced-(.+)", entry)) else entry for entry in _entries(folder)}
    steps = {int(match[1]): name for name in found if (match := STEP.fullmatch(name))}
    return [name for step, name in sorted(steps.items()) if name == step_name(step)]


def newest(folder: Path, *, device: torch.device | str = "cpu", only: Collection[str] | None = None) -> Newest:
    """The newest step checkpoint that verifies, and newer ones that do not, for the caller to report.

    If there are checkpoints and none verifies, that is an error, never a silent start from scratch.
    """
    skipped = []
    for name in reversed(names(folder)):
        path = Path(folder) / name
        try:
            return Newest(read(path, device=device, only=only), skipped)
        except CheckpointError as error:
            skipped.append((path, str(error)))
    if skipped:
        reasons = "; ".join(why for _, why in skipped)
        raise CheckpointError(
            f"{folder}: none of its {len(skipped)} checkpoints can be used: {reasons}. "
            "Restore one from a copy, or start again in a new folder"
        )
    return Newest(None, skipped)


def clean(folder: Path) -> None:
    """Finish interrupted writes and removals. Only while no other process writes into `folder`."""
    with _in_words(Path(folder), "could not be cleaned"):
        for name in sorted({match[1] for entry in _entries(folder) if (match := HIDDEN.fullmatch(entry))}):
            _finish_interrupted(Path(folder), name)


def prune(folder: Path, keep: Collection[str]) -> list[str]:
    """Remove the step checkpoints not in `keep` and name them. Call it after `write` has returned.

    Each gets a hidden name, durably, before its files are deleted, so that a half-deleted one never looks like a
    checkpoint.
    Other names ("average") are left alone.
    """
    folder = Path(folder)
    present = names(folder)
    removed = [name for name in present if name not in keep]
    if removed and len(removed) == len(present):
        raise CheckpointError(f"{folder}: not pruned: none of the checkpoints to keep exists: {sorted(keep)}")
    with _in_words(folder, "could not be pruned"):
        for name in removed:
            _finish_interrupted(folder, name)
            os.rename(folder / name, folder / f".removing-{name}")
        if removed:
            sync(folder)
        for name in removed:
            _remove(folder / f".removing-{name}")
    return removed


def find_ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For each tensor that shares the memory of an earlier one (tied weights), the name of that one."""
    first: dict[Any, str] = {}
    ties = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            if first.setdefault(memory, name) != name:
                ties[name] = first[memory]
    return ties


def check_dtypes(tensors: Mapping[str, Tensor], model: nn.Module, path: Path) -> None:
    """Refuse tensors of another dtype than the model's, which loading would convert silently."""
    for name, own in model.state_dict().items():
        if name in tensors and tensors[name].dtype != own.dtype:
            raise CheckpointError(f"{path}: {name!r} is {tensors[name].dtype}, the model has {own.dtype}: damaged")


def _place(path: Path) -> Path:
    """Where the checkpoint is: under its name, or under a hidden one if its replacement was interrupted."""
    replaced = path.with_name(f".replaced-{path.name}")
    return replaced if not os.path.lexists(path) and os.path.lexists(replaced) else path


def _entries(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: could not be read: {error.strerror}") from error


def _finish_interrupted(folder: Path, name: str) -> None:
    """Leave one checkpoint of that name or none after an interruption, and nothing under a hidden name."""
    final, replaced = folder / name, folder / f".replaced-{name}"
    if os.path.lexists(replaced):
        if not os.path.lexists(final):
            os.rename(replaced, final)
        # also if the new one is in place: its name must have reached the disk before the old one is removed
        sync(folder)
        _remove(replaced)
    _remove(folder / f".writing-{name}")
    _remove(folder / f".removing-{name}")


def _remove(path: Path) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _make(folder: Path) -> None:
    """Make a folder and those above it, each durably."""
    if not os.path.isdir(folder):
        above = folder.absolute().parent
        _make(above)
        os.mkdir(folder)
        sync(above)


def sync(folder: Path) -> None:
    """Flush a folder's list of names to the disk. Windows cannot open a folder, and journals names by itself."""
    if WINDOWS:
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # file systems that cannot flush a folder say so; others fail
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def _write_file(path: Path, content: Content) -> dict[str, Any]:
    """Write one file, flush it to the disk, and return its entry for the manifest."""
    hasher, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for chunk in content.chunks:
            file.write(chunk)
            hasher.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": hasher.hexdigest()}


def _flush(path: Path) -> dict[str, Any]:
    """Flush a file that another writer made, and return its entry for the manifest."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


@contextmanager
def _in_words(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename and str(error.filename) != str(path) else ""
        raise CheckpointError(f"{path}: {what}: {error.strerror or error}{where}") from error


def canonical(value: Any) -> bytes:
    """The one spelling of a JSON value that we write."""
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode("ascii") + b"\n"


def _state_content(state: Mapping[str, Any], path: Path) -> Content:
    _check_plain(dict(state), "state", 0, path)
    data = canonical(dict(state))
    if len(data) > STATE_LIMIT:
        raise CheckpointError(f"{path}: at most {STATE_LIMIT:,} bytes, got {len(data):,}; keep arrays as tensors")
    return Content(len(data), [data])


def _check_plain(value: Any, where: str, depth: int, path: Path) -> None:
    """Refuse values that JSON would not restore exactly, and name the place."""
    if depth > DEPTH_LIMIT:
        raise CheckpointError(f"{path}: at most {DEPTH_LIMIT} levels deep, got more at {where}")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{path}: keys must be text, got {key!r} in {where}")
            _check_plain(item, f"{where}.{key}", depth + 1, path)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]", depth + 1, path)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise CheckpointError(f"{path}: numbers must be finite, got {value} at {where}; use null for 'none yet'")
    elif value is not None and not isinstance(value, bool | int | str):
        raise CheckpointError(f"{path}: must be plain JSON, got {type(value).__name__} at {where}")


def _tensor_content(tensors: Mapping[str, Tensor], path: Path) -> Content:
    """A safetensors file, written here so that it is hashed while it is written, one tensor in memory at a time."""
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == "__metadata__":
            raise CheckpointError(f"{path}: a tensor cannot be called {name!r}")
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
            raise CheckpointError(f"{path}: {name!r} must be a dense tensor with values, got {type(tensor).__name__}")
        if tensor.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise CheckpointError(f"{path}: {name!r} has dtype {tensor.dtype}; convert it to one of {known}")
    aliases = find_ties(tensors)
    # widest elements first, so that each tensor is aligned to its own
    order = sorted(tensors.keys() - aliases.keys(), key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "aliases": json.dumps(aliases, sort_keys=True)}}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text

    def chunks() -> Iterator[bytes | memoryview]:
        yield head
        for name in order:
            yield _raw(tensors[name])

    return Content(len(head) + end, chunks())


def _raw(tensor: Tensor) -> memoryview:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    # numpy's stubs declare the buffer protocol for Python 3.12 and later only
    return memoryview(data)  # pyright: ignore[reportArgumentType]


def _verify(folder: Path, name: str) -> set[str]:
    """Check a checkpoint against its manifest, byte for byte, and return its stems."""
    if not os.path.isdir(folder):
        problem = "is not a folder" if os.path.lexists(folder) else "there is no such checkpoint"
        raise CheckpointError(f"{folder}: {problem}")
    sizes = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            # a link could lead outside, a pipe would never end
            if not entry.is_file(follow_symlinks=False):
                raise CheckpointError(f"{entry.path}: is not a plain file; a checkpoint holds nothing else")
            sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
    if MANIFEST not in sizes:
        raise CheckpointError(f"{folder / MANIFEST}: is missing; the checkpoint cannot be verified")
    del sizes[MANIFEST]

    files = _read_manifest(folder / MANIFEST, name)
    for file in sorted(files.keys() | sizes.keys()):
        if file not in sizes:
            raise CheckpointError(f"{folder / file}: is missing")
        if file not in files:
            raise CheckpointError(f"{folder / file}: is not in the manifest")
        if sizes[file] != files[file]["bytes"]:
            raise CheckpointError(
                f"{folder / file}: is {sizes[file]:,} bytes long, the manifest says {files[file]['bytes']:,}"
            )
    for file, fact in files.items():
        if digest(folder / file) != fact["sha256"]:
            raise CheckpointError(f"{folder / file}: does not match its SHA-256 in {MANIFEST}: damaged")
    return {file.removesuffix(SUFFIX) for file in files if file != STATE}


def _read_manifest(path: Path, name: str) -> dict[str, dict[str, Any]]:
    data = _read_bytes(path, MANIFEST_LIMIT)
    manifest = _parse(data, path)
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{path}: must be a JSON object, got {type(manifest).__name__}")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: has format {manifest.get('format')!r}, this version of Regard reads {FORMAT}")
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(map(is_fact, files.values())):
        raise CheckpointError(f"{path}: must list files with their bytes and sha256")
    for file in files:
        if file != STATE and not (file.endswith(SUFFIX) and STEM.fullmatch(file.removesuffix(SUFFIX))):
            raise CheckpointError(f"{path}: lists {file!r}, which is not the name of a checkpoint's file")
    if STATE not in files:
        raise CheckpointError(f"{path}: does not list {STATE}")
    if manifest.get("name") != name:
        raise CheckpointError(
            f"{path}: is of checkpoint {manifest.get('name')!r}, but the folder is called {name!r}; "
            "give the folder its name back"
        )
    # only one spelling is valid, so any flipped bit is detected
    if data != canonical({"format": FORMAT, "name": name, "files": files}):
        raise CheckpointError(f"{path}: is not as Regard writes it: it was changed or damaged")
    return files


def is_fact(value: Any) -> bool:
    """Whether it is a manifest's entry for a file."""
    return (
        isinstance(value, dict)
        and value.keys() == {"bytes", "sha256"}
        and type(value["bytes"]) is int
        and type(value["sha256"]) is str
    )


def _read_bytes(path: Path, limit: int) -> bytes:
    with open(path, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CheckpointError(f"{path}: is longer than {limit:,} bytes: it is not a checkpoint of Regard")
    return data


def _parse(data: bytes, path: Path) -> Any:
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not readable JSON: {error}") from error


def _read_tensors(path: Path, device: torch.device | str) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            # a copy: safe_open gives views of the file, which would follow its changes
            tensors = {name: file.get_tensor(name).to(device, copy=True) for name in file.keys()}  # noqa: SIM118
            aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
    except (SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not a readable safetensors file: {error}") from error
    if not isinstance(aliases, dict):
        raise CheckpointError(f"{path}: its aliases must be a JSON object, got {type(aliases).__name__}")
    for alias, name in aliases.items():
        if not isinstance(name, str) or name not in tensors or alias in tensors:
            raise CheckpointError(f"{path}: says {alias!r} is the same as {name!r}, which is not so")
    return tensors | {alias: tensors[name] for alias, name in aliases.items()}
