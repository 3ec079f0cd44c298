"""Checkpoints: whole or not there whatever interrupts them, verified to the last bit, inert."""

import builtins
import contextlib
import errno
import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import struct
from pathlib import Path

import pytest
import torch
from checkpoints import reseal
from forked import fork
from torch import nn

from regard.training import checkpoint, optimizer_state
from regard.training.averaging import average_tensors
from regard.training.checkpoint import CheckpointError

KILLED = 77
OLD, NEW, AVERAGE = checkpoint.step_name(1000), checkpoint.step_name(2000), "average"


def make(seed, step):
    """What a small run would save: tied weights, several dtypes, a second file."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 3, generator=generator)
    model = {
        "embedding": weight,
        "norm": torch.randn(3, generator=generator).to(torch.bfloat16),
        "output": weight,
        "mask": torch.tensor([True, False, True]),
        "seen": torch.tensor(seed),
    }
    optimizer = {"embedding/exp_avg": torch.randn(5, 3, generator=generator)}
    return {"model": model, "optimizer": optimizer}, {"step": step, "seed": seed, "best": None}


def save(folder, name, seed):
    return checkpoint.write(folder, name, *make(seed, int(name[5:]) if name.startswith("step-") else 0))


def assert_holds(found, seed):
    """`found` is, bit for bit, what `make(seed)` made."""
    tensors, state = make(seed, found.state["step"])
    assert found.state == state
    assert found.tensors.keys() == tensors.keys()
    for stem, named in tensors.items():
        assert found.tensors[stem].keys() == named.keys()
        for name, tensor in named.items():
            torch.testing.assert_close(found.tensors[stem][name], tensor, rtol=0, atol=0)


def hidden(folder):
    return sorted(entry for entry in os.listdir(folder) if entry.startswith("."))


def safetensors_bytes(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


class Calls:
    """Every call that touches the file system, in order; `act(index, call, path, go)` may stand in its way."""

    NAMES = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "open", "fsync", "scandir", "listdir")

    def __init__(self, act=None, flushing=False):
        self.log = []
        self.act = act
        self.flushing = flushing

    def step(self, call, path, go):
        self.log.append((call, path))
        return go() if self.act is None else self.act(len(self.log), call, path, go)

    def paths(self, call, values):
        if call == "fsync":
            status = os.fstat(values[0])
            return status.st_dev, status.st_ino
        return tuple(os.fspath(value) for value in values if isinstance(value, str | os.PathLike))

    @contextlib.contextmanager
    def watch(self):
        real = {name: getattr(os, name) for name in self.NAMES}

        def wrap(name):
            def call(*values, **options):
                def go():
                    # most tests here are about order and interruption: the disk itself would only cost time
                    return None if name == "fsync" and not self.flushing else real[name](*values, **options)

                return self.step(name, self.paths(name, values), go)

            return call

        def opened(path, mode="r"):
            call = "create" if "x" in mode else "open"
            file = self.step(call, (os.fspath(path),), lambda: builtins.open(path, mode))  # noqa: SIM115
            return Watched(file, path, self) if "x" in mode else file

        with pytest.MonkeyPatch.context() as patch:
            for name in self.NAMES:
                patch.setattr(os, name, wrap(name))
            patch.setattr(checkpoint, "open", opened, raising=False)
            yield self


class Watched:
    """A file being written, whose writes are calls too."""

    def __init__(self, file, path, calls):
        self.file, self.path, self.calls = file, os.fspath(path), calls

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def write(self, data):
        return self.calls.step("write", (self.path, self.file, bytes(data)), lambda: self.file.write(data))

    def flush(self):
        return self.calls.step("flush", (self.path,), self.file.flush)

    def fileno(self):
        return self.file.fileno()


def killed_at(number, work):
    """Run `work` in a child that dies, with no clean-up at all, at file-system call `number`; whether it did."""

    def act(index, call, path, go):
        if index == number:
            if call == "write":
                path[1].write(path[2][: len(path[2]) // 2])
                path[1].flush()
            os._exit(KILLED)
        return go()

    child = fork()
    if child == 0:
        try:
            with Calls(act).watch():
                work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


@pytest.fixture
def pair(tmp_path):
    """A folder with an old and a new checkpoint, of seeds 1 and 2."""
    save(tmp_path, OLD, 1)
    save(tmp_path, NEW, 2)
    return tmp_path


def test_round_trip_of_every_dtype_and_shape(tmp_path):
    base = torch.randn(4, 6, dtype=torch.float64)
    tensors = {str(dtype): (base * 50).to(dtype) for dtype in checkpoint.DTYPES}
    tensors |= {
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
        "odd": torch.tensor([True, False, True]),
        "transposed": base.t(),
        "part": base[1:3, ::2],
        "expanded": torch.tensor([1.0]).expand(7),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "parameter": nn.Parameter(torch.randn(2)),
        "a name/with: ünicode": torch.ones(1),
    }
    state = {"step": 3, "big": 2**127 + 1, "float": 0.1 + 0.2, "text": "ü\u2028\ud800", "none": None, "list": [1, []]}
    found = checkpoint.read(checkpoint.write(tmp_path, "x", {"model": tensors, "random": {}}, state))
    assert found.state == state
    assert found.tensors.keys() == {"model", "random"}
    assert found.tensors["model"].keys() == tensors.keys()
    for name, tensor in tensors.items():
        got = found.tensors["model"][name]
        torch.testing.assert_close(got, tensor.detach(), rtol=0, atol=0, equal_nan=True)
        assert got.is_contiguous()
        assert not got.requires_grad
    assert torch.signbit(found.tensors["model"]["special"][2])


def test_the_file_is_one_that_safetensors_reads(tmp_path):
    from safetensors.torch import load_file

    tensors = make(1, 0)[0]["model"]
    path = checkpoint.write(tmp_path, "x", {"model": tensors}, {})
    loaded = load_file(path / "model.safetensors")
    assert loaded.keys() == tensors.keys() - {"output"}
    for name, tensor in loaded.items():
        torch.testing.assert_close(tensor, tensors[name], rtol=0, atol=0)
    data = (path / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    for name, tensor in loaded.items():
        # where it can be mapped without a copy
        assert (8 + length + header[name]["data_offsets"][0]) % tensor.element_size() == 0


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path):
    weight = torch.randn(64, 64)
    tied = {"a": weight, "b": weight, "view": weight.view(64, 64), "transposed": weight.t(), "row": weight[:1]}
    path = checkpoint.write(tmp_path, "x", {"model": tied}, {})
    found = checkpoint.read(path).tensors["model"]
    assert found["a"] is found["b"]
    assert found["a"] is found["view"]
    # other views of the memory are tensors of their own
    torch.testing.assert_close(found["transposed"], weight.t(), rtol=0, atol=0)
    torch.testing.assert_close(found["row"], weight[:1], rtol=0, atol=0)
    assert found["transposed"].data_ptr() != found["a"].data_ptr()
    assert (path / "model.safetensors").stat().st_size < 3 * weight.nbytes


def test_same_content_gives_the_same_bytes(tmp_path):
    first, second = save(tmp_path / "a", OLD, 1), save(tmp_path / "b", OLD, 1)
    for file in os.listdir(first):
        assert (first / file).read_bytes() == (second / file).read_bytes()
    assert checkpoint.digest(first / "state.json") == hashlib.sha256((first / "state.json").read_bytes()).hexdigest()


def test_what_was_read_does_not_follow_the_file(tmp_path):
    path = save(tmp_path, OLD, 1)
    found = checkpoint.read(path)
    with open(path / "model.safetensors", "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        file.write(bytes(size))
    assert_holds(found, 1)


def test_only_the_wanted_tensors_are_loaded_but_all_is_verified(tmp_path):
    path = save(tmp_path, OLD, 1)
    assert checkpoint.read(path, only=["model"]).tensors.keys() == {"model"}
    assert checkpoint.read(path, only=[]).tensors == {}
    with pytest.raises(CheckpointError, match=r"has no average\.safetensors; it holds model, optimizer"):
        checkpoint.read(path, only=["average"])
    (path / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors: is 0 bytes long"):
        checkpoint.read(path, only=["model"])


def test_names_are_in_step_order_and_nothing_else(tmp_path):
    assert checkpoint.names(tmp_path / "nowhere") == []
    for step in (999, 100_000_000, 5, 20_000):
        save(tmp_path, checkpoint.step_name(step), 1)
    save(tmp_path, AVERAGE, 1)
    for entry in (".writing-step-00000007", ".removing-step-00000008", "step-9", "step-000000001", "step-00000010.bak"):
        (tmp_path / entry).mkdir()
    assert checkpoint.names(tmp_path) == [checkpoint.step_name(step) for step in (5, 999, 20_000, 100_000_000)]
    assert checkpoint.newest(tmp_path).checkpoint.state["step"] == 100_000_000


def test_newest_of_nothing_is_none_and_of_nothing_usable_an_error(tmp_path):
    assert checkpoint.newest(tmp_path / "nowhere") == (None, [])
    assert checkpoint.newest(tmp_path) == (None, [])
    for name, seed in ((OLD, 1), (NEW, 2)):
        (save(tmp_path, name, seed) / "state.json").unlink()
    with pytest.raises(CheckpointError, match=rf"none of its 2 checkpoints can be used: .*{NEW}.*{OLD}.*a new folder"):
        checkpoint.newest(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory"):
        checkpoint.newest(tmp_path / "file")


def test_prune_removes_only_other_steps_and_never_all(pair):
    save(pair, AVERAGE, 3)
    with pytest.raises(CheckpointError, match="none of the checkpoints to keep exists"):
        checkpoint.prune(pair, {"step-00000001"})
    assert checkpoint.prune(pair, {OLD, NEW}) == []
    assert checkpoint.prune(pair, {NEW}) == [OLD]
    assert sorted(os.listdir(pair)) == [AVERAGE, NEW]
    assert checkpoint.prune(pair, {NEW}) == []
    assert checkpoint.prune(pair / "nowhere", {NEW}) == []


def test_clean_settles_leftovers(pair):
    (pair / NEW).rename(pair / f".replaced-{NEW}")
    shutil.copytree(pair / OLD, pair / f".replaced-{OLD}")
    (pair / ".writing-average").mkdir()
    (pair / ".removing-step-00000003").mkdir()
    (pair / ".removing-step-00000003" / "model.safetensors").write_bytes(b"")
    (pair / ".mine").write_text("")
    checkpoint.clean(pair)
    assert sorted(os.listdir(pair)) == [".mine", OLD, NEW]
    assert_holds(checkpoint.newest(pair).checkpoint, 2)
    checkpoint.clean(pair / "nowhere")


def test_writing_one_name_leaves_another_writer_alone(pair):
    """`regard average` may run while the training writes its next step."""
    shutil.copytree(pair / OLD, pair / ".writing-step-00003000")
    save(pair, AVERAGE, 3)
    assert hidden(pair) == [".writing-step-00003000"]


def scenario_new(folder):
    """The next step is written and the one before pruned."""
    save(folder, NEW, 2)
    checkpoint.prune(folder, {NEW})


def scenario_replace(folder):
    """A name is written again."""
    save(folder, OLD, 2)


def scenario_average(folder):
    save(folder, AVERAGE, 2)


def count_calls(template, tmp_path, scenario):
    shutil.copytree(template, tmp_path / "counted")
    with Calls().watch() as calls:
        scenario(tmp_path / "counted")
    return calls.log


@pytest.mark.parametrize("scenario", [scenario_new, scenario_replace, scenario_average])
def test_r2_killed_at_every_file_system_call(tmp_path, scenario):
    template = tmp_path / "template"
    watched = AVERAGE if scenario is scenario_average else None
    save(template, watched or OLD, 1)
    log = count_calls(template, tmp_path, scenario)
    assert {call for call, _ in log} >= {"mkdir", "create", "write", "flush", "fsync", "rename", "unlink", "rmdir"}
    outcomes = []
    for number in range(1, len(log) + 2):
        folder = tmp_path / str(number)
        shutil.copytree(template, folder)
        assert killed_at(number, lambda folder=folder: scenario(folder)) == (number <= len(log))
        if watched:
            assert checkpoint.exists(folder / watched)
            found, skipped = checkpoint.read(folder / watched), []
        else:
            found, skipped = checkpoint.newest(folder)
        assert skipped == []
        assert_holds(found, found.state["seed"])
        outcomes.append(found.state["seed"])

        # the next write works on what was left, and leaves nothing behind
        with Calls().watch():
            save(folder, watched or NEW, 3)
            checkpoint.clean(folder)
        assert hidden(folder) == []
        assert_holds(checkpoint.read(folder / (watched or NEW)), 3)
        if not watched and scenario is scenario_replace:
            assert_holds(checkpoint.read(folder / OLD), outcomes[-1])
        shutil.rmtree(folder)
    # old up to one point, new from there on
    assert outcomes == sorted(outcomes)
    assert {outcomes[0], outcomes[-1]} == {1, 2}


def test_r2_killed_again_while_recovering(tmp_path):
    template = tmp_path / "template"
    save(template, OLD, 1)
    log = count_calls(template, tmp_path, scenario_replace)
    renames = [index for index, (call, _) in enumerate(log, 1) if call == "rename"]
    assert len(renames) == 2
    # with the old one hidden and the new one not yet named, and just after
    for first in (renames[1], renames[1] + 1):
        broken = tmp_path / f"broken-{first}"
        shutil.copytree(template, broken)
        assert killed_at(first, lambda broken=broken: scenario_replace(broken))
        known = checkpoint.newest(broken).checkpoint.state["seed"]
        number, alive = 0, False
        while not alive:
            number += 1
            folder = tmp_path / f"{first}-{number}"
            shutil.copytree(broken, folder)
            alive = not killed_at(number, lambda folder=folder: save(folder, OLD, 3))
            found = checkpoint.newest(folder)
            assert found.skipped == []
            assert found.checkpoint.state["seed"] in (known, 3)
            assert_holds(found.checkpoint, found.checkpoint.state["seed"])
            with Calls().watch():
                checkpoint.clean(folder)
            assert os.listdir(folder) == [OLD]
            assert_holds(checkpoint.read(folder / OLD), found.checkpoint.state["seed"])
            shutil.rmtree(folder)
        assert number > len(log) // 2


@pytest.mark.parametrize("scenario", [scenario_new, scenario_replace])
def test_r2_everything_is_flushed_before_it_is_counted_on(tmp_path, scenario):
    """What kill -9 cannot show: write, fsync(file), fsync(folder), rename, fsync(parent), and only then removal."""
    save(tmp_path, OLD, 1)
    final = tmp_path / (NEW if scenario is scenario_new else OLD)
    writing = tmp_path / f".writing-{final.name}"
    dirty, buffered, inodes, in_place, order = set(), set(), {}, False, []

    def act(index, call, path, go):
        nonlocal in_place
        if call == "fsync":
            # what Python still holds back does not reach the disk
            dirty.difference_update({inodes[path]} - buffered)
            order.append(("fsync", Path(inodes[path]).name))
            return go()
        if call in ("unlink", "rmdir") or (call == "rename" and path[1].startswith(str(tmp_path / ".removing-"))):
            assert in_place
            assert str(tmp_path) not in dirty, "removed before the new name, or the hidden one, was safe"
            if call != "rename":
                order.append(("remove", ""))
        if call == "rename" and path == (str(writing), str(final)):
            inside = {name for name in dirty if name.startswith(str(writing))}
            assert inside == set(), "named before all of it was on the disk"
            assert {Path(name).name for name in inodes.values()} >= {"manifest.json", "state.json", writing.name}
            in_place = True
        result = go()
        if call in ("mkdir", "create"):
            inodes[os.stat(path[0]).st_dev, os.stat(path[0]).st_ino] = path[0]
            dirty.update({path[0], str(Path(path[0]).parent)})
        elif call == "write":
            dirty.add(path[0])
            buffered.add(path[0])
        elif call == "flush":
            buffered.discard(path[0])
        elif call == "rename":
            dirty.add(str(tmp_path))
            order.append(("rename", Path(path[1]).name))
        return result

    inodes[os.stat(tmp_path).st_dev, os.stat(tmp_path).st_ino] = str(tmp_path)
    with Calls(act, flushing=True).watch():
        scenario(tmp_path)
    assert dirty <= {str(tmp_path)}
    files = [("fsync", name) for name in ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")]
    parent = ("fsync", tmp_path.name)
    if scenario is scenario_new:
        expected = [*files, ("fsync", writing.name), ("rename", NEW), parent, ("rename", f".removing-{OLD}"), parent]
    else:
        expected = [*files, ("fsync", writing.name), ("rename", f".replaced-{OLD}"), ("rename", OLD), parent]
    assert order[: len(expected)] == expected
    assert set(order[len(expected) :]) == {("remove", "")}


def test_a_new_folder_is_made_durably(tmp_path):
    with Calls(flushing=True).watch() as calls:
        save(tmp_path / "run" / "checkpoints", OLD, 1)
    known = {(os.stat(path).st_dev, os.stat(path).st_ino): path for path in (tmp_path, tmp_path / "run")}
    assert [known[path] for call, path in calls.log if call == "fsync" and path in known] == [
        tmp_path,
        tmp_path / "run",
    ]


def test_r3_any_flipped_bit_is_seen_and_the_last_good_one_used(pair):
    rng = random.Random(0)
    files = sorted(os.listdir(pair / NEW))
    assert len(files) == 4
    for file in files:
        path = pair / NEW / file
        data = path.read_bytes()
        bits = range(8 * len(data))
        for trial, bit in enumerate(rng.sample(bits, min(len(bits), 300))):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << (bit % 8)
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=str(pair / NEW)):
                checkpoint.read(pair / NEW)
            if trial % 50 == 0:
                found, ((skipped, why),) = checkpoint.newest(pair)
                assert_holds(found, 1)
                assert skipped == pair / NEW
                # a damaged manifest may show as a file that does not agree with it
                assert (str(path) if file != "manifest.json" else file) in why
        path.write_bytes(data)
    assert_holds(checkpoint.newest(pair).checkpoint, 2)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_r3_cut_lengthened_missing_and_swapped_files_are_seen(pair, file):
    path = pair / NEW / file
    data = path.read_bytes()
    other = (pair / OLD / file).read_bytes()
    assert other != data
    damages = [data[:0], data[:1], data[: len(data) // 2], data[:-1], data + b"\0", data + b"\n", b" " + data, other]
    for damaged in [*damages, None]:
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        found, ((skipped, why),) = checkpoint.newest(pair)
        assert_holds(found, 1)
        assert skipped == pair / NEW
        assert str(pair / NEW) in why
        if damaged is None:
            assert f"{path}: is missing" in why
            path.write_bytes(data)
    assert_holds(checkpoint.newest(pair).checkpoint, 2)


def test_r3_swapped_folders_are_seen(pair):
    (pair / OLD).rename(pair / "aside")
    (pair / NEW).rename(pair / OLD)
    (pair / "aside").rename(pair / NEW)
    with pytest.raises(CheckpointError, match=f"is of checkpoint '{OLD}', but the folder is called '{NEW}'"):
        checkpoint.read(pair / NEW)


def test_r3_extra_files_links_pipes_and_folders_are_refused(pair):
    path = pair / NEW
    for entry, put, words in (
        ("extra.safetensors", lambda at: at.write_bytes(b""), "is not in the manifest"),
        ("hook.py", lambda at: at.write_text("raise SystemExit"), "is not in the manifest"),
        ("folder", lambda at: at.mkdir(), "is not a plain file"),
        ("pipe", lambda at: os.mkfifo(at), "is not a plain file"),
        ("link", lambda at: at.symlink_to("/etc/hostname"), "is not a plain file"),
    ):
        put(path / entry)
        with pytest.raises(CheckpointError, match=f"{path / entry}: {words}"):
            checkpoint.read(path)
        checkpoint._remove(path / entry)
    # a link to the right bytes is still a link
    for file in os.listdir(path):
        shutil.move(path / file, pair / file)
        (path / file).symlink_to(pair / file)
        with pytest.raises(CheckpointError, match=f"{path / file}: is not a plain file"):
            checkpoint.read(path)
        (path / file).unlink()
        shutil.move(pair / file, path / file)
    assert_holds(checkpoint.read(path), 2)


def test_r3_recomputed_headers_are_seen(pair):
    path = pair / NEW / "model.safetensors"
    data = path.read_bytes()
    # a header that is valid in itself: the embedding with its sides exchanged
    path.write_bytes(data.replace(b'"shape": [5, 3]', b'"shape": [3, 5]'))
    assert path.read_bytes() != data
    with pytest.raises(CheckpointError, match=r"model\.safetensors: does not match its SHA-256"):
        checkpoint.read(pair / NEW)
    assert_holds(checkpoint.newest(pair).checkpoint, 1)


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 8),
        ("model.safetensors", struct.pack("<Q", 1 << 62) + b"{}"),
        ("model.safetensors", safetensors_bytes(b"{" * 50_000)),
        ("model.safetensors", safetensors_bytes({"a": ENTRY}, b"\0" * 3)),
        ("model.safetensors", safetensors_bytes({"a": ENTRY, "b": ENTRY}, b"\0" * 4)),
        ("model.safetensors", safetensors_bytes({"a": ENTRY | {"dtype": "F31"}}, b"\0" * 4)),
        ("model.safetensors", safetensors_bytes({"a": ENTRY | {"shape": [1 << 62, 4]}}, b"\0" * 4)),
        ("model.safetensors", safetensors_bytes({"a": ENTRY | {"data_offsets": [4, 0]}}, b"\0" * 4)),
        ("model.safetensors", safetensors_bytes({"__metadata__": {"aliases": '{"a": "b"}'}, "a": ENTRY}, b"\0" * 4)),
        ("model.safetensors", safetensors_bytes({"__metadata__": {"aliases": '{"b": "c"}'}, "a": ENTRY}, b"\0" * 4)),
        ("model.safetensors", safetensors_bytes({"__metadata__": {"aliases": '{"b": ["a"]}'}, "a": ENTRY}, b"\0" * 4)),
        ("model.safetensors", safetensors_bytes({"__metadata__": {"aliases": '["a"]'}, "a": ENTRY}, b"\0" * 4)),
        ("model.safetensors", safetensors_bytes({"__metadata__": {"aliases": "[" * 99_999}, "a": ENTRY}, b"\0" * 4)),
        ("state.json", b""),
        ("state.json", b"[1]"),
        ("state.json", b"\xff\xfe{}"),
        ("state.json", b"[" * 1_000_000),
        ("state.json", b'{"a":' * 100_000),
        ("state.json", b'{"step": ' + b"9" * 10_000 + b"}"),
        ("manifest.json", b"[" * 100_000),
        ("manifest.json", b" " * (1 << 21)),
        ("manifest.json", b"[]"),
        ("manifest.json", b"{}"),
        ("manifest.json", b"null"),
    ],
)
def test_r3_hostile_files_with_a_right_manifest_end_in_words(pair, file, data):
    (pair / NEW / file).write_bytes(data)
    if file != "manifest.json":
        reseal(pair / NEW)
    with pytest.raises(CheckpointError, match=str(pair / NEW / file)):
        checkpoint.read(pair / NEW)
    found, skipped = checkpoint.newest(pair)
    assert_holds(found, 1)
    assert len(skipped) == 1


def test_r3_a_state_too_long_to_be_one_is_not_parsed(pair, monkeypatch):
    monkeypatch.setattr(checkpoint, "STATE_LIMIT", 20)
    with pytest.raises(CheckpointError, match=r"state\.json: is longer than 20 bytes"):
        checkpoint.read(pair / NEW)
    with pytest.raises(CheckpointError, match="keep arrays as tensors"):
        save(pair, NEW, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda manifest: manifest.update(format=2), "has format 2, this version of Regard reads 1"),
        (lambda manifest: manifest.update(format="1"), "has format '1'"),
        (lambda manifest: manifest.update(format=True), "is not as Regard writes it"),
        (lambda manifest: manifest.update(more=1), "is not as Regard writes it"),
        (lambda manifest: manifest.update(name="../x"), "is of checkpoint '../x'"),
        (lambda manifest: manifest.pop("files"), "must list files"),
        (lambda manifest: manifest.update(files=[]), "must list files"),
        (lambda manifest: manifest["files"].pop("state.json"), "does not list state.json"),
        (lambda manifest: manifest["files"].pop("optimizer.safetensors"), "is not in the manifest"),
        (lambda manifest: manifest["files"]["state.json"].update(bytes="16"), "must list files"),
        (lambda manifest: manifest["files"]["state.json"].update(sha256=0), "must list files"),
        (lambda manifest: manifest["files"]["state.json"].update(more=0), "must list files"),
        (lambda manifest: manifest["files"].update({"../state.json": manifest["files"]["state.json"]}), "not the name"),
        (lambda manifest: manifest["files"].update({"/etc/passwd": manifest["files"]["state.json"]}), "not the name"),
        (lambda manifest: manifest["files"].update({"a/b.safetensors": {"bytes": 0, "sha256": ""}}), "not the name"),
        (lambda manifest: manifest["files"].update({"..safetensors": {"bytes": 0, "sha256": ""}}), "not the name"),
        (lambda manifest: manifest["files"].update({"x.bin": {"bytes": 0, "sha256": ""}}), "not the name"),
        (lambda manifest: manifest["files"].update({"x.safetensors": {"bytes": 0, "sha256": ""}}), "is missing"),
    ],
)
def test_r3_a_manifest_that_says_anything_else_is_refused(pair, change, words):
    path = pair / NEW / "manifest.json"
    manifest = json.loads(path.read_bytes())
    change(manifest)
    path.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    with pytest.raises(CheckpointError, match=words):
        checkpoint.read(pair / NEW)


def test_reseal_alone_changes_nothing(pair):
    """Or the tests that use it would pass for the wrong reason."""
    before = (pair / NEW / "manifest.json").read_bytes()
    reseal(pair / NEW)
    assert (pair / NEW / "manifest.json").read_bytes() == before


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("packed", ["pickle", "torch"])
def test_r4_pickles_under_every_name_run_nothing(pair, packed, sealed):
    marker = pair / "ran"
    if packed == "pickle":
        data = pickle.dumps(Payload(marker))
        pickle.loads(data)
    else:
        torch.save(Payload(marker), pair / "payload.pt")
        data = (pair / "payload.pt").read_bytes()
        torch.load(pair / "payload.pt", weights_only=False)
    # the payload does work, where it is let
    assert marker.exists()
    marker.unlink()

    for file in sorted(os.listdir(pair / NEW)):
        path = pair / NEW / file
        good = path.read_bytes()
        path.write_bytes(data)
        if sealed and file != "manifest.json":
            reseal(pair / NEW)
        with pytest.raises(CheckpointError, match=str(path)):
            checkpoint.read(pair / NEW)
        assert_holds(checkpoint.newest(pair).checkpoint, 1)
        path.write_bytes(good)
        reseal(pair / NEW)
    assert_holds(checkpoint.read(pair / NEW), 2)
    assert not marker.exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("replacing", [False, True])
def test_r5_any_call_that_fails_leaves_the_old_one_and_ends_in_words(tmp_path, number, replacing):
    name = OLD if replacing else NEW
    template = tmp_path / "template"
    save(template, OLD, 1)
    log = count_calls(template, tmp_path, lambda folder: save(folder, name, 2))
    safe = max(index for index, (call, _) in enumerate(log, 1) if call == "fsync")
    for failing in range(1, len(log) + 1):
        folder = tmp_path / str(failing)
        shutil.copytree(template, folder)

        def act(index, call, path, go, failing=failing):
            if index == failing:
                raise OSError(number, os.strerror(number))
            return go()

        named = any(call == "rename" and Path(path[1]).name == name for call, path in log[: failing - 1])
        with Calls(act).watch():
            if failing > safe:
                # only the removal of what was replaced failed: nothing is lost, it goes the next time
                save(folder, name, 2)
            else:
                with pytest.raises(CheckpointError) as caught:
                    save(folder, name, 2)
                assert str(folder / name) in str(caught.value)
                assert os.strerror(number) in str(caught.value)
                assert "bytes needed" in str(caught.value)
        found = checkpoint.newest(folder)
        assert found.skipped == []
        assert_holds(found.checkpoint, 2 if named else 1)
        if not named:
            assert os.listdir(folder) == [OLD], "the space of what failed is given back"
        with Calls().watch():
            save(folder, name, 3)
        assert hidden(folder) == []
        shutil.rmtree(folder)
    assert (safe < len(log)) == replacing


def test_r5_an_interrupt_at_any_call_leaves_one_or_the_other(tmp_path):
    """Control-C, and any other exception of ours, also cleans up."""
    template = tmp_path / "template"
    save(template, OLD, 1)
    log = count_calls(template, tmp_path, scenario_replace)
    for failing in range(1, len(log) + 1):
        folder = tmp_path / str(failing)
        shutil.copytree(template, folder)

        def act(index, call, path, go, failing=failing):
            if index == failing:
                raise KeyboardInterrupt
            return go()

        with Calls(act).watch(), pytest.raises(KeyboardInterrupt):
            scenario_replace(folder)
        found = checkpoint.newest(folder)
        assert found.skipped == []
        assert_holds(found.checkpoint, found.checkpoint.state["seed"])
        assert not any(entry.startswith(".writing") for entry in os.listdir(folder))
        shutil.rmtree(folder)


def test_r5_too_little_room_is_said_before_anything_is_written(pair, monkeypatch):
    usage = shutil.disk_usage(pair)
    big = {"model": {"weight": torch.zeros(250_000)}}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=999_999))
    with Calls().watch() as calls, pytest.raises(CheckpointError, match=r"1,0\d\d,\d\d\d bytes needed, 999,999 free"):
        checkpoint.write(pair, NEW, big, {})
    assert not {call for call, _ in calls.log} & {"create", "mkdir", "rename"}
    assert_holds(checkpoint.newest(pair).checkpoint, 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(total=0, used=0, free=0))
    checkpoint.write(pair, AVERAGE, big, {})


def test_r5_a_real_limit_of_the_system(pair):
    """The kernel cuts a write off in the middle; the child reports what it saw."""
    report = pair.parent / f"{pair.name}-report"
    child = fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            checkpoint.write(pair, NEW, {"model": {"weight": torch.zeros(250_000)}}, {})
        except CheckpointError as error:
            report.write_text(str(error))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert f"{pair / NEW}: could not be written (1,0" in report.read_text()
    assert os.strerror(errno.EFBIG) in report.read_text()
    assert sorted(os.listdir(pair)) == [OLD, NEW]
    assert_holds(checkpoint.newest(pair).checkpoint, 2)


def test_r5_a_disk_that_cannot_be_read_is_skipped_over(pair, monkeypatch):
    real = checkpoint.digest

    def failing(path):
        if path.parent.name == NEW:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path)

    monkeypatch.setattr(checkpoint, "digest", failing)
    found, ((path, why),) = checkpoint.newest(pair)
    assert_holds(found, 1)
    assert path == pair / NEW
    assert os.strerror(errno.EIO) in why
    assert ".safetensors" in why


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"best": float("inf")}, r"numbers must be finite, got inf at state\.best"),
        ({"a": [0, {"b": float("nan")}]}, r"got nan at state\.a\[1\]\.b"),
        ({"a": {1: 2}}, r"keys must be text, got 1 in state\.a"),
        ({"a": torch.ones(1)}, r"must be plain JSON, got Tensor at state\.a"),
        ({"a": {1, 2}}, r"got set at state\.a"),
        ({"a": b"bytes"}, r"got bytes at state\.a"),
    ],
)
def test_a_state_that_json_would_not_give_back_is_refused(pair, state, words):
    with pytest.raises(CheckpointError, match=words):
        checkpoint.write(pair, NEW, {}, state)
    assert_holds(checkpoint.newest(pair).checkpoint, 2)


def test_a_state_too_deep_is_refused(tmp_path):
    deep = []
    deep.append(deep)
    with pytest.raises(CheckpointError, match="levels deep"):
        checkpoint.write(tmp_path, OLD, {}, {"a": deep})


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"model": {"a": [1.0]}}, "'a' must be a dense tensor with values, got list"),
        ({"model": {"a": torch.eye(2).to_sparse()}}, "'a' must be a dense tensor"),
        ({"model": {"a": torch.ones(1, device="meta")}}, "'a' must be a dense tensor"),
        ({"model": {"a": torch.ones(1, dtype=torch.complex64)}}, "'a' has dtype torch.complex64"),
        ({"model": {"__metadata__": torch.ones(1)}}, "a tensor cannot be called '__metadata__'"),
        ({"../model": {}}, "a file stem is a lower-case word"),
        ({"a/b": {}}, "a file stem is a lower-case word"),
        ({"": {}}, "a file stem is a lower-case word"),
    ],
)
def test_tensors_that_cannot_be_stored_are_refused(pair, tensors, words):
    with pytest.raises(CheckpointError, match=words):
        checkpoint.write(pair, NEW, tensors, {})
    assert_holds(checkpoint.newest(pair).checkpoint, 2)


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "../a", "a\n", "x" * 101])
def test_names_that_are_no_names_are_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="a checkpoint's name is"):
        checkpoint.write(tmp_path / "folder", name, {}, {})
    assert not (tmp_path / "folder").exists()


def test_paths_that_are_no_checkpoints_end_in_words(tmp_path):
    with pytest.raises(CheckpointError, match="there is no such checkpoint"):
        checkpoint.read(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is not a folder"):
        checkpoint.read(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"manifest\.json: is missing"):
        checkpoint.read(tmp_path)
    with pytest.raises(CheckpointError, match=r"could not be written .*bytes needed\): File exists"):
        save(tmp_path / "file", OLD, 1)


def test_average_is_the_mean_in_float64(tmp_path):
    values = [torch.tensor([1e8, 1.0, 3.0]), torch.tensor([1.0, 1.0, 4.0]), torch.tensor([-1e8, 1.0, 5.0])]
    half = [torch.tensor([60000.0, 0.1]).half() for _ in values]
    paths = []
    for index, (value, small) in enumerate(zip(values, half, strict=True)):
        buffers = {"count": torch.tensor(index), "mask": torch.tensor([index == 2])}
        model = {"weight": value, "tied": value, "half": small, **buffers}
        paths.append(checkpoint.write(tmp_path, checkpoint.step_name(index), {"model": model}, {}))
    mean = average_tensors(paths)
    # in float32 the 1 would have gone under beside 1e8
    torch.testing.assert_close(mean["weight"], torch.tensor([1 / 3, 1.0, 4.0]), rtol=0, atol=0)
    # the sum is past what float16 holds, and equal values stay as they are
    torch.testing.assert_close(mean["half"], half[0], rtol=0, atol=0)
    assert mean["count"] == 2
    assert mean["mask"].tolist() == [True]
    assert mean["tied"] is mean["weight"]
    assert mean.keys() == model.keys()
    assert average_tensors(paths[::-1])["count"] == 0
    torch.testing.assert_close(average_tensors(paths[:1])["weight"], values[0], rtol=0, atol=0)


def test_average_refuses_what_does_not_agree(tmp_path):
    weight = torch.ones(2)
    first = checkpoint.write(tmp_path, "a", {"model": {"weight": weight, "other": weight}}, {})
    for tensors, words in (
        (
            {"weight": torch.ones(3), "other": weight},
            r"'weight' is torch.float32 of shape \(3,\) here, .*\(2,\).* there",
        ),
        ({"weight": weight.double(), "other": weight}, r"'weight' is torch.float64"),
        ({"weight": weight}, r"'other' is missing here"),
        ({"weight": weight, "other": weight, "third": weight}, r"'third' is .* here, missing there"),
        ({"weight": weight, "other": weight + 1}, r"'other' is .* here, .* tied to 'weight' there"),
    ):
        second = checkpoint.write(tmp_path, "b", {"model": tensors}, {})
        with pytest.raises(CheckpointError, match=words):
            average_tensors([first, second])
    with pytest.raises(CheckpointError, match="nothing to average"):
        average_tensors([])


class Tied(nn.Module):
    """Tied weights, a frozen parameter and one that never gets a gradient."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x):
        return self.output(torch.tanh(self.middle(self.embedding(x))))


def train(model, optimizer, steps, seed, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randint(7, (8,), generator=generator).to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x + 1) % 7).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9


def build(kind, options, device="cpu"):
    torch.manual_seed(0)
    model = Tied().to(device)
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
    return model, kind(groups, lr=0.01, betas=(0.9, 0.98), eps=1e-9, **options)


MANNERS = [{"foreach": False}, {"foreach": True}, {"fused": True}, {"amsgrad": True}, {"capturable": False}]


def check_resumed(folder, kind, options, device):
    straight, optimizer = build(kind, options, device)
    train(straight, optimizer, 3, seed=1, device=device)
    tensors, facts = optimizer_state.pack_optimizer(optimizer, straight)
    path = checkpoint.write(
        folder, OLD, {"model": straight.state_dict(), "optimizer": tensors}, {"step": 3, "optimizer": facts}
    )
    train(straight, optimizer, 3, seed=2, device=device)

    found = checkpoint.read(path)
    before = {name: tensor.clone() for name, tensor in found.tensors["optimizer"].items()}
    resumed, other = build(kind, options, device)
    train(resumed, other, 1, seed=5, device=device)
    resumed.load_state_dict(found.tensors["model"])
    optimizer_state.unpack_optimizer(other, resumed, found.tensors["optimizer"], found.state["optimizer"])
    again, facts_again = optimizer_state.pack_optimizer(other, resumed)
    assert facts_again == facts
    assert again.keys() == tensors.keys()
    train(resumed, other, 3, seed=2, device=device)
    for name, parameter in straight.named_parameters():
        torch.testing.assert_close(resumed.get_parameter(name), parameter, rtol=0, atol=0)
    end, _ = optimizer_state.pack_optimizer(optimizer, straight)
    for name, tensor in optimizer_state.pack_optimizer(other, resumed)[0].items():
        torch.testing.assert_close(tensor, end[name], rtol=0, atol=0)
        # training on does not write into what was read
        torch.testing.assert_close(found.tensors["optimizer"][name], before[name], rtol=0, atol=0)
    return tensors, facts


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("options", MANNERS, ids=str)
def test_a_resumed_optimizer_goes_on_bit_for_bit(tmp_path, kind, options):
    tensors, facts = check_resumed(tmp_path, kind, options, "cpu")
    entries = {"step", "exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if "amsgrad" in options else set())
    trained = ("embedding.weight", "middle.weight", "middle.bias")
    assert tensors.keys() == {f"{name}/{entry}" for name in trained for entry in entries}
    assert facts["kind"] == kind.__name__
    assert [group["parameters"] for group in facts["groups"]] == [
        ["embedding.weight", "middle.weight"],
        ["unused", "frozen", "middle.bias"],
    ]
    assert facts["groups"][1]["options"]["lr"] == 0.02
    assert not facts["groups"][0]["options"].keys() & {"foreach", "fused", "capturable"}


@pytest.mark.gpu
@pytest.mark.parametrize("options", [*MANNERS, {"capturable": True}], ids=str)
def test_a_resumed_optimizer_goes_on_bit_for_bit_on_a_gpu(tmp_path, options):
    check_resumed(tmp_path, torch.optim.AdamW, options, "cuda")
    found = checkpoint.read(tmp_path / OLD, device="cuda")
    assert {tensor.device.type for named in found.tensors.values() for tensor in named.values()} == {"cuda"}


def test_state_goes_from_one_manner_to_another():
    model, optimizer = build(torch.optim.AdamW, {"fused": True})
    train(model, optimizer, 2, seed=1)
    tensors, facts = optimizer_state.pack_optimizer(optimizer, model)
    other_model, other = build(torch.optim.AdamW, {"foreach": False})
    optimizer_state.unpack_optimizer(other, other_model, tensors, json.loads(json.dumps(facts)))
    assert other.param_groups[0]["foreach"] is False
    assert not other.param_groups[0]["fused"]
    assert other.param_groups[0]["betas"] == (0.9, 0.98)
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] != 0.01
    torch.testing.assert_close(other.state[other_model.middle.weight]["step"], torch.tensor(2.0))


def test_an_optimizer_that_has_not_stepped_comes_back_so():
    model, optimizer = build(torch.optim.Adam, {})
    tensors, facts = optimizer_state.pack_optimizer(optimizer, model)
    assert tensors == {}
    other_model, other = build(torch.optim.Adam, {})
    train(other_model, other, 1, seed=1)
    optimizer_state.unpack_optimizer(other, other_model, tensors, facts)
    assert len(other.state) == 0
    assert other.param_groups[0]["lr"] == 0.01


def test_optimizer_state_lies_in_memory_like_its_parameter():
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    model(torch.ones(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    tensors, facts = optimizer_state.pack_optimizer(optimizer, model)
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    other = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    optimizer_state.unpack_optimizer(other, model, stored, json.loads(json.dumps(facts)))
    moment = other.state[model.weight]["exp_avg"]
    assert moment.stride() == model.weight.stride() != stored["weight/exp_avg"].stride()
    torch.testing.assert_close(moment, tensors["weight/exp_avg"], rtol=0, atol=0)
    # a learning rate that is a tensor stays the tensor that it was
    torch.testing.assert_close(other.param_groups[0]["lr"], torch.tensor(0.1), rtol=0, atol=0)


def test_optimizer_state_of_another_model_is_refused_and_changes_nothing():
    model, optimizer = build(torch.optim.AdamW, {})
    train(model, optimizer, 2, seed=1)
    tensors, facts = optimizer_state.pack_optimizer(optimizer, model)
    other_model, other = build(torch.optim.AdamW, {})
    train(other_model, other, 1, seed=2)
    before = optimizer_state.pack_optimizer(other, other_model)
    kept = {name: tensor.clone() for name, tensor in before[0].items()}

    def without(key):
        return {name: tensor for name, tensor in tensors.items() if name != key}

    groups = facts["groups"]
    for given, said, words in (
        (tensors, facts | {"kind": "Adam"}, "optimizer is 'Adam', this one is 'AdamW'"),
        (tensors, {}, "optimizer is None"),
        (tensors, facts | {"groups": 3}, "must be a list of groups"),
        (tensors, facts | {"groups": groups[:1]}, r"the checkpoint has 2 parameters, the model 2 \+ 3 parameters"),
        (tensors, facts | {"groups": groups[::-1]}, "groups do not match"),
        (without("middle.bias/exp_avg"), facts, "state of 'middle.bias' is not complete"),
        (tensors | {"middle.bias/exp_avg": torch.ones(5)}, facts, r"'exp_avg' of 'middle.bias' has shape \(5,\)"),
        (
            {name.replace("middle.bias", "more"): tensor for name, tensor in tensors.items()},
            facts,
            "state of 'more', which the optimizer lacks",
        ),
    ):
        with pytest.raises(CheckpointError, match=words):
            optimizer_state.unpack_optimizer(other, other_model, given, said)
        after = optimizer_state.pack_optimizer(other, other_model)
        assert after[1] == before[1]
        for name, tensor in kept.items():
            torch.testing.assert_close(after[0][name], tensor, rtol=0, atol=0)
    with pytest.raises(CheckpointError, match=r"parameter of shape .* not the model's"):
        optimizer_state.pack_optimizer(optimizer, nn.Linear(1, 1))


@pytest.mark.gpu
def test_gpu_tensors_are_stored_and_read_to_the_asked_device(tmp_path):
    weight = torch.randn(4, 5, device="cuda")
    path = checkpoint.write(tmp_path, OLD, {"model": {"a": weight.t(), "b": weight, "c": weight}}, {})
    for device in ("cpu", "cuda"):
        found = checkpoint.read(path, device=device).tensors["model"]
        assert found["b"].device.type == device
        assert found["b"] is found["c"]
        torch.testing.assert_close(found["a"], weight.t().to(device), rtol=0, atol=0)
