"""Run folders: one writer and any number of readers, every file checked before it is read, the same on any system."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from checkpoints import reseal
from folders import RUNS
from torch.testing import assert_close
from training_runs import config, finish, in_child
from verbs import refused, told

from regard.cli.demo_content import small_translator
from regard.interop.runs import export_run
from regard.tasks.language import LanguageModel
from regard.tasks.train import resume
from regard.tasks.translate import ENGLISH_GERMAN, Translator, read_valid
from regard.training import checkpoint, lock
from regard.training import run as runs
from regard.training.display import Display
from regard.training.run import MANIFEST, Run

FILES = ("run.json", "config.yaml", "plan.json", "valid.jsonl", "source.json")
BEFORE = RUNS / "before-manifest"  # written by the commit before there was a manifest


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    settings = config(tmp_path_factory.mktemp("made"), steps=4, evaluate_every=2, save_every=1)
    finish(settings)
    return Path(settings.out)


@pytest.fixture
def run(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "run")


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A tiny GPT-2 in the form of Hugging Face."""
    return export_run(BEFORE / "run", tmp_path_factory.mktemp("published") / "gpt", "huggingface").folder


# one writer


def test_one_writer_at_a_time(tmp_path):
    run = Run(tmp_path)
    with run.writing("regard train language"):
        with pytest.raises(ValueError, match=rf"is being written by process {os.getpid()} .*\(regard train language, "):
            run.writing("regard resume").__enter__()
        # also from another process
        assert in_child(lambda: run.writing("regard resume").__enter__()) == 99
    assert os.listdir(tmp_path) == []
    with run.writing("regard resume"):
        pass


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path):
    run = Run(tmp_path)

    def die():
        with run.writing("regard train language"):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(die) == -signal.SIGKILL
    assert os.listdir(tmp_path) == [".lock"]
    with run.writing("regard resume"):
        assert json.loads((tmp_path / ".lock").read_text())["doing"] == "regard resume"


def test_a_lock_that_was_removed_meanwhile_is_none(tmp_path, monkeypatch):
    """Who waits at a file that its holder removes would hold the lock of a file that nobody else can find."""
    path, tries = tmp_path / ".lock", []
    original = lock._try

    def removed_first(handle, place):
        tries.append(handle)
        if len(tries) == 1:
            path.unlink()
        return original(handle, place)

    monkeypatch.setattr(lock, "_try", removed_first)
    with lock.hold(path, "a"), pytest.raises(ValueError, match="is being written"):
        lock.hold(path, "b").__enter__()
    assert len(tries) == 3


def test_a_lock_can_be_waited_for(tmp_path):
    """Until its holder ends; meanwhile the one that waits is not let in."""
    path, waiting, entered = tmp_path / "turn", threading.Event(), threading.Event()

    def wait():
        waiting.set()
        with lock.hold(path, "b", waits=True):
            entered.set()

    with lock.hold(path, "a"):
        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        assert not entered.wait(3 * lock.PAUSE)
    assert entered.wait(60)
    thread.join()
    assert not path.exists()


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with Run(tmp_path).writing("a"):
        assert "without locks" in capsys.readouterr().err


def test_every_verb_that_writes_asks_for_the_lock(run, published, tmp_path, capsys, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    with Run(run).writing("regard train"), Run(empty).writing("regard train"):
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        for verb in (
            ("resume", str(run)),
            ("average", str(run)),
            ("compact", str(run), "--out", str(empty)),
            ("import", str(published), "--out", str(empty)),
        ):
            assert "is being written by process" in refused(capsys, *verb)
        with pytest.raises(ValueError, match="is being written"):
            small_translator(run)
        settings = config(tmp_path, "empty", steps=1)
        with pytest.raises(ValueError, match="is being written"):
            finish(settings)
        assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        assert sorted(os.listdir(empty)) == [".lock", "checkpoints"]
        # readers are welcome
        told(monkeypatch, capsys, "translate", str(run), stdin=b"one two\n")
        told(monkeypatch, capsys, "evaluate", str(run))


def test_a_run_that_began_meanwhile_is_not_overwritten(tmp_path, monkeypatch):
    original = Run.writing

    def late(self, doing):
        # between the first look at the folder and the lock
        (self.folder / "run.json").write_text("{}")
        return original(self, doing)

    monkeypatch.setattr(Run, "writing", late)
    with pytest.raises(ValueError, match="holds a run already"):
        finish(config(tmp_path, steps=1))
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_reader_follows_checkpoints_that_come_and_go(run, monkeypatch, capsys):
    """The best one is pruned after it was looked up: the next look finds what replaced it."""
    found, place = Run(run).find("best"), Run(run).checkpoints
    original, calls = checkpoint.read, []

    def replaced(path, **options):
        calls.append(path)
        if len(calls) == 2:
            for name in checkpoint.names(place):
                shutil.rmtree(place / name)
            checkpoint.write(place, checkpoint.step_name(9), found.tensors, {"step": 9, "best_step": 9})
        return original(path, **options)

    monkeypatch.setattr(checkpoint, "read", replaced)
    monkeypatch.setattr(Run, "_checkpoints", lambda self: (len(calls) > 1, None))
    last = checkpoint.newest(place).checkpoint.state
    state = last | {"best_step": 2}
    checkpoint.write(place, checkpoint.step_name(8), found.tensors, state | {"step": 8})
    calls.clear()
    assert Run(run).find("best").state["step"] == 9
    assert capsys.readouterr().err == ""


# what a run reads


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_checked_before_it_is_read(run, name):
    path = run / name
    good = path.read_bytes()
    damages = [good[:-1], b"", good + b"\n", good[: len(good) // 2]]
    for place in range(0, len(good), max(1, len(good) // 60)):
        damages.append(good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1 :])
    for damage in damages:
        path.write_bytes(damage)
        with pytest.raises(ValueError, match=r"was changed or damaged|was changed after Regard wrote it"):
            Run(run).read_bytes(name)
    path.unlink()
    with pytest.raises(ValueError, match=rf"{name} is missing, and manifest.json lists it"):
        Run(run).read_bytes(name)


def test_edits_that_would_change_results_are_refused(run, capsys, monkeypatch):
    """Nothing in these files can be told from what was meant: only their hash shows that they were changed."""
    for name, old, new, verb in (
        ("run.json", '"heads": 2', '"heads": 4', ("translate", str(run))),
        ("run.json", '"longest": 256', '"longest": 25', ("evaluate", str(run))),
        ("valid.jsonl", "one", "two", ("evaluate", str(run))),
        ("source.json", "[", "[ ", ("translate", str(run))),
    ):
        path = run / name
        before = path.read_text(encoding="utf-8")
        assert old in before
        path.write_text(before.replace(old, new, 1), encoding="utf-8")
        assert f"{name} does not match its SHA-256 in manifest.json" in refused(capsys, *verb)
        path.write_text(before, encoding="utf-8")
    told(monkeypatch, capsys, "evaluate", str(run))


def test_a_config_that_was_edited_or_cut_is_refused_with_the_way_to_change_it(run, capsys):
    path = run / "config.yaml"
    whole = path.read_text(encoding="utf-8")
    for text in (whole.replace("clip: 1.0", "clip: 2.0"), whole[: whole.index("training:")]):
        path.write_text(text, encoding="utf-8")
        said = refused(capsys, "resume", str(run))
        assert f"regard resume {run} --training.NAME VALUE" in said
        assert f"regard train TASK --config {path} --out NEW" in said
    path.write_text(whole, encoding="utf-8")
    assert resume(run, Display(quiet=True)).step == 4


def test_the_manifest_itself_is_covered(run):
    path = run / MANIFEST
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << place % 7]) + good[place + 1 :])
        with pytest.raises(ValueError, match=r"manifest|SHA-256|is missing"):
            [Run(run).read_bytes(name) for name in FILES]
    # one spelling of it only, also where another would mean the same
    for other in (good + b"\n", good.replace(b'"files"', b' "files"', 1), json.dumps(json.loads(good)).encode()):
        path.write_bytes(other)
        with pytest.raises(ValueError, match=r"manifest.json is not as Regard writes it"):
            Run(run).read_bytes("run.json")
    path.unlink()
    with pytest.raises(ValueError, match=r"manifest.json is missing, so no file of the run can be checked"):
        Run.open(run)
    path.write_bytes(good)
    (run / "target.json").write_bytes((run / "source.json").read_bytes())
    with pytest.raises(ValueError, match="was added by hand"):
        Run(run).read_bytes("target.json")


def test_a_file_is_replaced_as_a_whole_wherever_it_is_cut_short(run, monkeypatch):
    """Killed at any call: the old text or the new one, and never one that the manifest does not know."""
    names, done, seen = ("replace", "fsync"), False, set()
    for last in range(1, 20):
        if done:
            break
        calls = [0]

        def counted(original, calls=calls, last=last):
            def call(*values):
                calls[0] += 1
                if calls[0] == last:
                    raise KeyboardInterrupt
                return original(*values)

            return call

        Run(run).write_text("config.yaml", "old")
        with monkeypatch.context() as patch:
            for name in names:
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                Run(run).write_text("config.yaml", "new")
                done = True
            except KeyboardInterrupt:
                pass
        seen.add(Run(run).read_text("config.yaml"))
        assert Run(run).read_json("run.json")["task"] == "translate"
    assert done
    assert seen == {"old", "new"}


def test_a_reader_between_two_writes_tries_again(run, monkeypatch):
    """It has read the manifest when the writer replaces that and the file."""
    original, calls = Run._listed, []

    def late(self):
        found = original(self)
        calls.append(found)
        if len(calls) == 1:
            other = Run(run)
            monkeypatch.setattr(Run, "_listed", original)
            other.write_text("config.yaml", "new")
            monkeypatch.setattr(Run, "_listed", late)
        return found

    monkeypatch.setattr(Run, "_listed", late)
    assert Run(run).read_text("config.yaml") == "new"


def test_runs_of_before_are_read_with_one_warning(tmp_path, monkeypatch, capsys):
    place = shutil.copytree(BEFORE, tmp_path / "old")
    monkeypatch.chdir(place)
    monkeypatch.setattr(runs, "_warned_unchecked", set())
    for _ in range(2):
        LanguageModel.load("run", device="cpu")
    assert capsys.readouterr().err.count("files are read without being checked") == 1
    assert not (place / "run" / MANIFEST).exists()
    # training goes on as it would have then, and from now on the files are known
    assert resume("run", Display(quiet=True)).step == 8
    log = [(record["event"], record["step"], record["loss"]) for record in Run("run").records()]
    expected = [tuple(record.values()) for record in json.loads(Path("expected.json").read_text())]
    assert [part[:2] for part in log] == [part[:2] for part in expected]
    assert_close([part[2] for part in log], [part[2] for part in expected], rtol=1e-4, atol=1e-5)
    listed = json.loads((place / "run" / MANIFEST).read_text())["files"]
    assert sorted(listed) == ["config.yaml", "plan.json", "run.json", "tokenizer.json", "valid.jsonl"]
    (place / "run" / "valid.jsonl").write_text('{"text": "another"}\n')
    assert "does not match" in refused(capsys, "evaluate", "run")


def test_what_is_passed_on_and_shipped_has_a_manifest(run, published, tmp_path, capsys, monkeypatch):
    told(monkeypatch, capsys, "compact", str(run), "--out", str(tmp_path / "small"))
    told(monkeypatch, capsys, "import", str(published), "--out", str(tmp_path / "imported"))
    for folder in (ENGLISH_GERMAN, tmp_path / "small", tmp_path / "imported"):
        listed = set(json.loads((folder / MANIFEST).read_text())["files"])
        files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        unread = {name for name in files if name.startswith("checkpoints/")} | {MANIFEST, "README.md"}
        assert listed == files - unread
        for name in listed:
            Run.open(folder).read_bytes(name)
    assert capsys.readouterr().err == ""


def _rewritten(folder: Path, stem: str, change) -> None:
    """The newest checkpoint with other tensors, and a manifest that agrees."""
    found = checkpoint.newest(folder / "checkpoints").checkpoint
    tensors = found.tensors | {stem: change(found.tensors[stem])}
    checkpoint.write(folder / "checkpoints", found.path.name, tensors, found.state)
    reseal(found.path)


def test_tensors_of_another_dtype_are_refused(run):
    """Loading would convert them in silence."""
    _rewritten(run, "model", lambda named: {name: part.view(torch.int32) for name, part in named.items()})
    for work in (lambda: Translator.load(run, which="last"), lambda: resume(run, Display(quiet=True), steps=5)):
        with pytest.raises(ValueError, match=r"is torch.int32, the model has torch.float32"):
            work()


def test_optimizer_states_that_are_not_whole_are_refused(run):
    pristine = shutil.copytree(run, run.parent / "pristine")

    def halved(named):
        return {name: part.half() if name.endswith("exp_avg") else part for name, part in named.items()}

    def without_first(named):
        first = next(iter(named)).rpartition("/")[0]
        return {name: part for name, part in named.items() if not name.startswith(first + "/")}

    for change, words in (
        (lambda named: {}, r"optimizer state of .* is missing, and of \d+ more"),
        (without_first, "is missing, and of 0 more"),
        (halved, "is torch.float16, the parameter torch.float32"),
    ):
        shutil.rmtree(run)
        shutil.copytree(pristine, run)
        _rewritten(run, "optimizer", change)
        with pytest.raises(ValueError, match=words):
            resume(run, Display(quiet=True), steps=5)


def test_an_emptied_optimizer_of_before_is_refused(tmp_path, monkeypatch):
    """Its facts do not say which parameters have a state."""
    monkeypatch.chdir(shutil.copytree(BEFORE, tmp_path / "old"))
    _rewritten(Path("run"), "optimizer", lambda named: {})
    with pytest.raises(ValueError, match="has no optimizer state"):
        resume("run", Display(quiet=True))


# other systems


class Windows:
    """What differs there: a folder cannot be opened, nothing is renamed over what exists, an open file stays."""

    LK_NBLCK = 2

    def __init__(self):
        self.locked: set[tuple[int, int]] = set()
        self.handles: dict[int, Path] = {}

    @contextlib.contextmanager
    def here(self):
        os_open, rename, unlink, close = os.open, os.rename, os.unlink, os.close

        def opened(path, *rest, **options):
            if os.path.isdir(path):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            handle = os_open(path, *rest, **options)
            self.handles[handle] = Path(path)
            return handle

        def renamed(one, other):
            if os.path.lexists(other):
                raise FileExistsError(errno.EEXIST, "File exists", str(other))
            rename(one, other)

        def unlinked(path, **options):
            if Path(path) in self.handles.values():
                raise PermissionError(errno.EACCES, "is open", str(path))
            unlink(path, **options)

        def closed(handle):
            self.handles.pop(handle, None)
            status = os.fstat(handle)
            self.locked.discard((status.st_dev, status.st_ino))
            close(handle)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "WINDOWS", True)
            for name, call in (("open", opened), ("rename", renamed), ("unlink", unlinked), ("close", closed)):
                patch.setattr(os, name, call)
            patch.setitem(sys.modules, "fcntl", None)
            patch.setitem(sys.modules, "msvcrt", types.SimpleNamespace(locking=self.locking, LK_NBLCK=self.LK_NBLCK))
            patch.delattr(os, "O_NOFOLLOW")
            yield self

    def locking(self, handle, mode, count):
        assert (mode, count) == (self.LK_NBLCK, 1)
        assert os.lseek(handle, 0, os.SEEK_CUR) == lock.FAR
        status = os.fstat(handle)
        if (status.st_dev, status.st_ino) in self.locked:
            raise PermissionError(errno.EACCES, "Permission denied")
        self.locked.add((status.st_dev, status.st_ino))


def test_runs_are_saved_and_resumed_on_windows(tmp_path, made):
    """A whole training, an average, and the lock between two of them."""
    with Windows().here():
        settings = config(tmp_path, steps=3, evaluate_every=2, average=1)
        finish(settings)
        run = Run(settings.out)
        with (
            run.writing("regard train"),
            pytest.raises(ValueError, match=r"is being written by process .*regard train"),
        ):
            resume(run.folder, Display(quiet=True))
        assert resume(run.folder, Display(quiet=True), steps=4).step == 4
        assert [name for name in checkpoint.names(run.checkpoints)] == [
            "step-00000002",
            "step-00000003",
            "step-00000004",
        ]
        assert len(read_valid(run.folder)) == 8


def test_damaged_lines_of_a_log_are_counted_once(tmp_path, capsys):
    """A last line that was cut off is no damage: a killed run leaves one."""
    run = Run(tmp_path)
    lines = [
        b'{"step": 1}',
        b"",
        b'{"step": 2',
        b"[" * 100_000,
        b'{"step": "3"}',
        b'{"step": 4, "a": "\xff"}',
        b'{"step": 5}',
    ]
    run.log.write_bytes(b"\n".join([*lines, b'{"step": 6']))
    assert [record["step"] for record in run.records()] == [1, 5]
    assert "log.jsonl: 5 lines are damaged and omitted, the first is line 2" in capsys.readouterr().err
    assert [record["step"] for record in Run(tmp_path).rewind(1)] == [1]
    assert not capsys.readouterr().err
    run.log.write_bytes(b'{"step": 1}\n{"step"')
    assert [record["step"] for record in run.records()] == [1]
    assert not capsys.readouterr().err
