"""Training in several processes: the same losses, the same weights and the same run folder as one process."""

import gc
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from painted import write_folders
from processes import in_processes
from reviews import write as write_reviews
from torch.distributed import DistStoreError, HashStore
from torch.distributed.distributed_c10d import _set_pg_timeout, default_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from training_runs import assert_same, dying, in_child, write_pairs

from regard import tasks
from regard.config import parse
from regard.layers.attention.cached import Cached
from regard.spec import ATTENTION, FEEDFORWARD
from regard.tasks.language.config import LanguageConfig
from regard.tasks.text import LanguageData
from regard.tasks.train import resume, train
from regard.training import checkpoint, loop
from regard.training.config import TrainingConfig
from regard.training.display import Display
from regard.training.distributed import join
from regard.training.distributed.join import count_starts
from regard.training.distributed.launch import _Loopback, launch
from regard.training.distributed.sharding import _layers
from regard.training.distributed.status import FOLDER, LOST, read_status, report_status
from regard.training.distributed.world import EndedElsewhere, LostProcess, Processes
from regard.training.run import Run

SMALL = "--model.width 16 --model.heads 2 --model.inner 32 --model.dropout 0 "
QUICK = (
    "--training.steps {steps} --training.evaluate_every 4 --training.log_every 1 --training.warmup 2 "
    "--training.tensorboard false --training.device cpu --training.metric loss --training.learning_rate 0.01 "
)
# batches of a few rows, the last ones of an epoch perhaps of one; padding; experts whose capacity drops tokens
CASES = {
    "translate": "--data.source pairs.tsv --data.vocabulary 300 --data.held_out 8 --training.tokens 100 "
    "--model.layers 1 --model.aligner true --training.accumulate 2 --training.ema 0.9 " + SMALL,
    "language": "--data.text book.txt --data.tokenizer characters --data.length 16 --training.tokens 48 "
    "--model.layers 3 "
    "--model.attention [routing(clusters=3),compressive(segment=4,memory=4,compressed=2,rate=2),softmax] "
    "--model.feedforward [gshard(experts=3,capacity=0.9,threshold=0.0,group=10),moe(experts=3,choices=2,noise=False),"
    "productkey(keys=4,heads=1,choices=2,key_width=4)] " + SMALL,
    "masked": "--data.text lines.txt --data.documents line --data.apart true --data.tokenizer words --data.length 16 "
    "--training.tokens 100 --model.layers 2 "
    "--model.attention [clusterformer(clusters=3,chunk=4,bank=64,every=2),softmax] "
    "--model.feedforward switch(experts=3,capacity=0.7,jitter=0.0) " + SMALL,
    "classify": "--data.text reviews.tsv --training.tokens 100 --model.layers 1 --init none --data.blanked 0.1 "
    "--model.attention performer(features=8,redraw=1) " + SMALL,
    "images": "--data.images colours --data.batch 9 --model.preset convnet --model.width 4 --model.layers [1,1] "
    "--model.dropout 0 --augment.mixup 0.8 ",
    "captions": "--data.captions captions.tsv --data.images images.npz --data.columns [0,1,2] --data.batch 7 "
    "--data.held_out 6 --data.tokenizer words --model.preset coca-nano --model.patch 8 --model.layers 1 "
    "--model.text_layers 1 --model.decoder_layers 1 --model.queries 3 " + SMALL,
}
# one of each kind of model that no case has
MODELS = {
    "images": ["coatnet-nano", "swin-nano", "vit-nano", "perceiver", "tokenlearner"],
    "translate": ["lstm", "gnmt", "deep-att", "bytenet", "convs2s", "moe-lstm"],
    "classify": ["perceiver", "funnel", "tokenlearner"],
    "language": ["feedback", "perceiver-ar"],
}
PLAIN = {
    "images": "--data.images colours --data.batch 9 --model.dropout 0 --model.preset ",
    "translate": "--data.source pairs.tsv --data.vocabulary 300 --data.held_out 8 --training.tokens 100 "
    "--model.dropout 0 --model.width 16 --model.preset ",
    "classify": "--data.text reviews.tsv --training.tokens 100 --init none --model.dropout 0 --model.preset ",
    "language": "--data.text book.txt --data.tokenizer characters --data.length 16 --training.tokens 48 "
    "--model.dropout 0 --model.preset ",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Data of every task."""
    folder = tmp_path_factory.mktemp("data")
    write_pairs(folder / "pairs.tsv")
    write_reviews(folder / "reviews.tsv")
    write_folders(folder / "colours", 8)
    draw = random.Random(0)
    words = ["the", "cat", "sees", "a", "small", "bird", "and", "an", "old", "dog", "eats", "it"]
    lines = [" ".join(draw.choices(words, k=draw.randint(3, 12))) for _ in range(80)]
    (folder / "lines.txt").write_text("\n".join(lines) + "\n")
    (folder / "book.txt").write_text("\n\n".join(lines) + "\n")
    images = np.random.default_rng(0).integers(0, 255, (40, 16, 16, 3)).astype(np.uint8)
    np.savez(folder / "images.npz", images=images)
    (folder / "captions.tsv").write_text("\n".join(f"{n}\t{lines[n]}\t{lines[n + 40]}" for n in range(40)) + "\n")
    return folder


def begin(folder: Path, case: str, out: str, flags: str = "", steps: int = 4, quiet: bool = True) -> None:
    """Trains in this process, which may be one of several."""
    name, _, preset = case.partition("-")
    task, plain = tasks.find(name), PLAIN[name] + preset + " " if preset else CASES[case]
    given = (QUICK.format(steps=steps) + plain + flags).split()
    given = [str(folder / word) if (folder / word).exists() and word != "." else word for word in given]
    config = parse(task.config, [*given, "--out", str(folder / out)], "regard", "")
    train(task, config, Display(quiet=quiet))


def losses(folder: Path) -> torch.Tensor:
    """Of every update and evaluation, and the norms of the gradients."""
    records = Run.open(folder).records()
    return torch.tensor([value for record in records for name in ("loss", "norm") if (value := record.get(name))])


def assert_like(one: Path, other: Path) -> None:
    """The same numbers but for rounding."""
    ours, theirs = losses(one), losses(other)
    assert_close(ours, theirs, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(folder, case, capfd):
    begin(folder, case, f"{case}-one")
    assert in_processes(2, lambda rank: begin(folder, case, f"{case}-two", quiet=False)) == [0, 0]
    assert capfd.readouterr().err.count("validation  loss") == 1, "the main process alone speaks"
    assert_like(folder / f"{case}-one", folder / f"{case}-two")


@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_that_recompute_train_as_one(folder, sharded):
    """Auxiliary losses, statistics and what layers learn without gradients are counted once."""
    if not Run(folder / "language-one").exists():
        begin(folder, "language", "language-one")
    out, flags = f"recomputed-{sharded}", f"--training.recompute true --training.sharded {sharded} "
    assert in_processes(2, lambda rank: begin(folder, "language", out, flags)) == [0, 0]
    assert_like(folder / "language-one", folder / out)


def test_experts_in_two_processes_train_as_in_one(folder):
    """Slots that are padded and not, dropped tokens, gates and scales, and an expert that no token chooses; also after
    an evaluation, in which each process has all experts."""
    flags = (
        "--model.layers 3 --model.attention softmax --model.feedforward [switch(experts=4,capacity=0.7,jitter=0.0),"
        "stmoe(experts=6,inner=3,threshold=0.0),moe(experts=2,choices=2,noise=False)] --training.evaluate_every 2 "
    )
    begin(folder, "language", "experts-one", flags)
    spread = "--training.sharded true --training.spread_experts true --training.save_every 3 --training.recompute true "
    assert in_processes(2, lambda rank: begin(folder, "language", "experts-two", flags + spread)) == [0, 0]
    assert_like(folder / "experts-one", folder / "experts-two")


class TestTokens:
    """Processes that share the tokens of every row."""

    FLAGS = "--model.feedforward dense --data.length 12 "
    MECHANISMS = "softmax,local(window=3),linear,sparse(stride=3)"

    @pytest.mark.parametrize(
        ("size", "attention", "more"),
        [
            pytest.param(
                2, f"[{MECHANISMS}]", "--model.layers 4 --training.recompute true ", marks=pytest.mark.exhaustive
            ),
            (3, f"[{MECHANISMS},local(window=5),longformer(window=2,globals=2)]", "--model.layers 6 "),
            (2, "[softmax,softmax]", "--model.layers 2 --model.position alibi --training.sharded true "),
        ],
    )
    def test_they_train_as_one(self, folder, size, attention, more):
        flags = f"{self.FLAGS} {more} --model.attention {attention} "
        one, several = (f"tokens-{size}-{len(attention)}-{name}" for name in ("one", "several"))
        begin(folder, "language", one, flags)
        work = partial(begin, folder, "language", several, f"{flags} --training.shares tokens ")
        assert in_processes(size, lambda rank: work()) == [0] * size
        assert_like(folder / one, folder / several)

    @pytest.mark.parametrize(
        ("case", "flags", "words"),
        [
            ("language", "--model.attention reformer(chunk=4,buckets=4)", "attention 'reformer' cannot read rows"),
            ("language", "--model.attention recurrent", "attention 'recurrent' cannot read rows"),
            ("language", "--model.attention xl(segment=4,memory=4)", "attention 'xl' cannot read rows"),
            ("language", "--model.attention softmax --data.length 15", "rows of 15 tokens cannot be shared evenly"),
            ("language", "--model.attention softmax --model.feedforward switch(experts=2)", "whose tokens compete"),
            ("masked", "--model.attention softmax", "for models of kind 'decoder', got 'encoder'"),
        ],
    )
    def test_what_cannot_says_so(self, folder, case, flags, words):
        def begin_here(rank: int) -> None:
            given = (self.FLAGS if case == "language" else "") + flags
            with pytest.raises((ValueError, EndedElsewhere)) as caught:
                begin(folder, case, out, f"{given} --training.shares tokens ")
            if caught.type is not EndedElsewhere:
                said.write_text(str(caught.value))

        out, said = f"refused-{words[:16]}", folder / f"said-{words[:16]}"
        assert in_processes(2, begin_here) == [0, 0]
        assert re.search(words, said.read_text())
        assert not (folder / out).exists(), "with other settings the command works"

    def test_rows_of_one_document_each_say_so(self):
        training = TrainingConfig(shares="tokens", metric="loss")
        with pytest.raises(ValueError, match="needs rows of running text"):
            LanguageConfig(data=LanguageData(apart=True), training=training)


@pytest.mark.parametrize(
    "case",
    ["translate", "language", *(pytest.param(case, marks=pytest.mark.exhaustive) for case in list(CASES)[2:])],
)
def test_two_processes_with_shards_train_as_one(folder, case):
    if not Run(folder / f"{case}-one").exists():
        begin(folder, case, f"{case}-one")
    flags = "--training.sharded true --training.save_every 3 "

    def begin_here(rank: int) -> None:
        reshard = FSDPModule.set_reshard_after_forward
        with mock.patch.object(FSDPModule, reshard.__name__, autospec=True, side_effect=reshard) as asked:
            begin(folder, case, f"{case}-sharded", flags)
        last = {call.args[0]: call.args[1] for call in asked.call_args_list}
        assert sorted(last.values()) == [False] + [True] * (len(last) - 1), "after an evaluation, all but the root"

    assert in_processes(2, begin_here) == [0, 0]
    assert_like(folder / f"{case}-one", folder / f"{case}-sharded")
    one, sharded = (Run.open(folder / f"{case}-{name}") for name in ("one", "sharded"))
    assert not any(checkpoint.is_sharded(sharded.checkpoints / name) for name in checkpoint.names(sharded.checkpoints))
    tensors = [checkpoint.read(run.checkpoints / "step-00000004").tensors for run in (one, sharded)]
    assert [named.keys() for named in tensors[0].values()] == [named.keys() for named in tensors[1].values()]
    assert checkpoint.find_ties(tensors[0]["model"]) == checkpoint.find_ties(tensors[1]["model"])


@pytest.mark.exhaustive
def test_a_process_that_has_no_row_of_some_tensors_writes_its_shards(folder):
    """The two rows of the output layer of two labels, in three processes."""
    flags = "--training.sharded true --training.save_every 1 "
    assert in_processes(3, lambda rank: begin(folder, "classify", "three", flags, steps=2)) == [0, 0, 0]
    begin(folder, "classify", "three-in-one", steps=2)
    assert_like(folder / "three", folder / "three-in-one")
    ours, theirs = (
        checkpoint.read(folder / out / "checkpoints" / "step-00000002") for out in ("three", "three-in-one")
    )
    assert ours.tensors["model"].keys() == theirs.tensors["model"].keys()
    for name, weight in ours.tensors["model"].items():
        assert_close(weight, theirs.tensors["model"][name], rtol=1e-3, atol=1e-3)


def test_a_run_goes_on_with_another_number_of_processes_sharded_or_not(folder):
    constant, quiet = "--training.schedule constant --training.average 2 ", Display(quiet=True)

    def go_on(rank: int, steps: int, **changes) -> None:
        resume(folder / "moved", quiet, steps=steps, changes={f"training.{name}": now for name, now in changes.items()})

    begin(folder, "translate", "unmoved", constant, steps=7)
    assert in_processes(2, lambda rank: begin(folder, "translate", "moved", constant, steps=2)) == [0, 0]
    go_on(0, 3)
    assert in_processes(2, partial(go_on, steps=5, sharded=True)) == [0, 0]
    go_on(0, 6, sharded=False)
    assert in_processes(2, partial(go_on, steps=7)) == [0, 0]
    found, wanted = (
        [record["loss"] for record in Run.open(folder / name).records() if record["event"] == "step"]
        for name in ("moved", "unmoved")
    )
    assert_close(found, wanted, rtol=2e-5, atol=1e-5)


def test_plan_and_end_follow_the_clock_and_the_metric_of_the_main_process(folder):
    """The other one has a clock that is three times as fast, and validation losses at which it would stop."""
    flags = "--training.steps null --training.minutes 0.01 --training.stop_at 0.01 --training.evaluate_every null "

    def begin_here(rank: int) -> None:
        task = tasks.find("classify")
        evaluate = task.evaluate

        def evaluate_with_a_given_loss(*arguments):
            metrics, samples = evaluate(*arguments)
            # the main process never stops early, however many steps it makes in its time
            return metrics | {"loss": [1.0, 0.0][rank]}, samples

        task.evaluate = evaluate_with_a_given_loss
        if rank == 1:
            loop.time = mock.Mock(monotonic=lambda: 3 * time.monotonic())
        begin(folder, "classify", "planned", flags)

    assert in_processes(2, begin_here) == [0, 0]
    records = Run.open(folder / "planned").records()
    planned = next(record["steps"] for record in records if record["event"] == "plan")
    assert records[-1]["step"] == planned


def test_each_process_draws_dropout_of_its_own():
    """Of a step: and the main process that of a process alone."""
    seeds = []
    for rank in range(3):
        stand_in = mock.Mock(config=mock.Mock(seed=1), state=mock.Mock(step=2), world=mock.Mock(rank=rank))
        stand_in.task.model = torch.nn.Linear(1, 1)
        with torch.random.fork_rng():
            loop.Loop._seed_draws(stand_in)
            seeds.append(torch.initial_seed())
    assert len(set(seeds)) == 3
    assert seeds[0] == loop.step_seed(1, 2)


def be_patient_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until they have connected, processes wait minutes for each other, however busy the machine is; from then on as
    long as they are told."""
    find, begin_all, begin_group = join._find_others, dist.init_process_group, dist.new_group
    patience = timedelta(seconds=300)

    def begin_all_later(*given: Any, timeout: timedelta, **options: Any) -> None:
        begin_all(*given, timeout=patience, **options)
        _set_pg_timeout(timeout)

    def begin_group_later(*given: Any, timeout: timedelta | None = None, **options: Any) -> Any:
        group = begin_group(*given, timeout=patience, **options)
        _set_pg_timeout(timeout or default_pg_timeout, group)
        return group

    monkeypatch.setattr(join, "_find_others", lambda _: find(patience))
    monkeypatch.setattr(dist, "init_process_group", begin_all_later)
    monkeypatch.setattr(dist, "new_group", begin_group_later)


class TestFaults:
    @pytest.mark.parametrize(("victim", "flags"), [(0, ""), (1, "--training.sharded true ")])
    def test_after_a_kill_the_others_end_and_a_restart_gives_the_same_bits(self, folder, victim, flags):
        def begin_here(rank: int) -> None:
            if rank == victim:
                dying(loop.Loop, "_update", 4)
            with pytest.raises(LostProcess, match="another process of the run has ended") as caught:
                begin_again(rank, f"killed-{victim}")
            # it could wait for the threads of the group for ever, while they wait for Python's lock
            held = any(isinstance(part, DistributedDataParallel) for part in gc.get_objects())
            assert not held, f"what communicates outlives the group, held by {caught}"

        def begin_again(rank: int, out: str) -> None:
            begin(folder, "masked", out, f"--training.save_every 2 {flags}", steps=5)

        assert in_processes(2, partial(begin_again, out=f"undisturbed-{victim}")) == [0, 0]
        assert in_processes(2, begin_here, kills=False) == [-9 * (rank == victim) for rank in range(2)]
        last = folder / f"killed-{victim}" / "checkpoints" / "step-00000002"
        assert checkpoint.names(last.parent)[-1] == last.name
        assert checkpoint.is_sharded(last) == bool(flags)
        assert in_processes(2, partial(begin_again, out=f"killed-{victim}"), again=True) == [0, 0]
        assert_same(folder / f"undisturbed-{victim}", folder / f"killed-{victim}")

    @pytest.mark.parametrize(("victim", "barrier"), [(0, 1), (1, 3)])
    def test_a_process_that_is_killed_before_a_barrier_is_lost(self, folder, victim, barrier):
        """The others wait there, for as long as it may take to read data or to write a checkpoint, and while the loop
        runs, SIGTERM would not end them."""

        def begin_here(rank: int) -> None:
            if rank == victim:
                dying(Processes, "barrier", barrier)
            with pytest.raises(LostProcess, match="another process of the run has ended"):
                begin(folder, "classify", f"met-{victim}", "--training.sharded true --training.save_every 1 ")

        assert in_processes(2, begin_here, kills=False) == [-9 * (rank == victim) for rank in range(2)]

    @pytest.mark.parametrize("shares", ["rows", "tokens"])
    def test_a_stuck_process_ends_the_others_in_words(self, folder, monkeypatch, shares):
        done = folder / f"stuck-is-known-{shares}"

        def get_stuck(*_: Any) -> None:
            while not done.exists():
                time.sleep(0.1)
            os._exit(0)

        def begin_here(rank: int) -> None:
            flags = f"{TestTokens.FLAGS} --model.attention sparse(stride=3) --training.shares {shares} "
            if rank == 1:
                # in a layer, the other one waits for it in another group
                monkeypatch.setattr(
                    *((loop.Loop, "_update") if shares == "rows" else (Cached, "attend_split")), get_stuck
                )
                with suppress(LostProcess):  # on a busy machine the other one may give up before
                    begin(folder, "language", f"stuck-{shares}", flags)
                return
            be_patient_at_first(monkeypatch)
            with pytest.raises(LostProcess, match=r"did not answer for 2 seconds \(training.timeout\)"):
                begin(folder, "language", f"stuck-{shares}", f"{flags} --training.timeout 2 ")
            done.touch()

        assert in_processes(2, begin_here) == [0, 0]

    def test_processes_wait_as_long_as_the_main_process_prepares(self, folder, monkeypatch):
        """Longer than training.timeout, and no longer if it fails."""

        def fail_slowly(*_: Any) -> None:
            time.sleep(2)
            raise ValueError("no such file")

        def begin_here(rank: int) -> None:
            if rank == 0:
                monkeypatch.setattr(tasks.find("classify"), "read_data", fail_slowly)
            be_patient_at_first(monkeypatch)
            with pytest.raises(EndedElsewhere if rank else ValueError):
                begin(folder, "classify", "prepared", "--training.timeout 1 ")

        assert in_processes(2, begin_here) == [0, 0]

    def test_an_error_of_all_processes_is_reported_by_one(self, folder):
        def begin_here(rank: int) -> None:
            flags = "--training.sharded true --training.spread_experts true --model.feedforward switch(experts=3) "
            try:
                begin(folder, "classify", "reported", flags)
            except ValueError:
                (folder / f"reported-by-{rank}").touch()
            except EndedElsewhere:
                pass

        assert in_processes(2, begin_here) == [0, 0]
        assert len(list(folder.glob("reported-by-*"))) == 1
        assert not (folder / "reported").exists(), "with other settings the command works"

    @pytest.mark.parametrize(("culprit", "broken"), [(0, "restore"), (1, "restore"), (1, "_update")])
    def test_an_error_in_one_process_ends_the_others_at_once(self, folder, culprit, broken):
        """They wait for it through the store (restore) or in a collective (_update)."""

        def begin_here(rank: int) -> None:
            if rank == culprit:
                setattr(loop.Loop, broken, mock.Mock(side_effect=ValueError("no store of this name")))
            with pytest.raises(ValueError if rank == culprit else EndedElsewhere):
                begin(folder, "classify", f"broken-{culprit}-{broken}")

        assert in_processes(2, begin_here) == [0, 0]

    def test_a_process_that_is_killed_before_they_connect_is_lost(self, folder):
        def begin_here(rank: int) -> None:
            with (
                mock.patch.object(torch.distributed, "init_process_group", side_effect=RuntimeError("connectFullMesh")),
                pytest.raises(LostProcess, match="could not connect to each other"),
            ):
                begin(folder, "classify", "unreached")

        assert in_processes(1, begin_here) == [0]

    def test_the_death_of_the_launcher_stops_a_process(self, monkeypatch):
        """As SIGTERM does; otherwise nobody would end it."""
        world: Any = SimpleNamespace(parent=os.getppid())
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda found, _: found)
        assert Processes.first_signal(world, None) is None
        assert Processes.first_signal(world, signal.SIGINT) == signal.SIGINT
        monkeypatch.setattr(os, "getppid", lambda: world.parent + 1)
        assert Processes.first_signal(world, None) == signal.SIGTERM

    @pytest.mark.parametrize("signalled", [(1,), (0, 1)])
    def test_a_signal_to_one_process_or_all_saves_and_stops_all_of_them(self, folder, signalled):
        out = f"stopped-{len(signalled)}"

        def begin_here(rank: int) -> None:
            update, calls = loop.Loop._update, itertools.count(1)

            def update_and_signal(self):
                update(self)
                if rank in signalled and next(calls) == 3:
                    os.kill(os.getpid(), signal.SIGTERM)

            loop.Loop._update = update_and_signal
            with pytest.raises(loop.Stopped, match="SIGTERM after step 3; saved"):
                begin(folder, "classify", out, steps=20)

        assert in_processes(2, begin_here) == [0, 0]
        assert checkpoint.names(folder / out / "checkpoints")[-1] == "step-00000003"


class TestLauncher:
    @pytest.mark.parametrize(
        ("restarts", "status", "end", "words"),
        [(1, 3, "kill -9 $$", ""), (0, 137, "kill -9 $$", "ended with SIGKILL:"), (0, 75, "exit 75", "status 75:")],
    )
    def test_it_starts_again_after_a_kill_and_not_after_an_end_in_words(
        self, tmp_path, capfd, restarts, status, end, words
    ):
        """With a stand-in for Python: process 1 is killed the first time, then process 0 ends in words."""
        stand_in = tmp_path / "python"
        wait = f"until grep -q '^0 0 ' {tmp_path}/calls; do sleep 0.1; done"  # until process 0 runs
        stand_in.write_text(
            "#!/bin/sh\necho $RANK $TORCHELASTIC_RESTART_COUNT $MASTER_ADDR $GLOO_SOCKET_IFNAME "
            f"$TORCH_ELASTIC_SHUTDOWN_TIMEOUT $* >> {tmp_path}/calls\n"
            f"test $RANK-$TORCHELASTIC_RESTART_COUNT = 1-0 && {{ {wait}; {end}; }}\n"
            "test $TORCHELASTIC_RESTART_COUNT = 0 && exec sleep 600\n"
            f"test $RANK = 0 && printf 3 > ${FOLDER}/0\nexit 0\n"
        )
        stand_in.chmod(0o755)

        def launch_here() -> None:
            sys.executable = str(stand_in)
            os._exit(launch(2, ["train", "x"], restarts=restarts))

        assert in_child(launch_here) == status
        said = capfd.readouterr().err
        assert words in said
        assert "elastic" not in said, "PyTorch has nothing to add"
        calls = sorted((tmp_path / "calls").read_text().splitlines())
        # the address and the interface that only this machine reaches, and seconds to save after SIGTERM
        given = "127.0.0.1 lo 600 -m regard train x"
        assert calls == [f"{rank} {n} {given}" for rank in range(2) for n in range(restarts + 1)]

    def test_its_store_listens_on_the_loopback_address_alone(self):
        handler = _Loopback(mock.Mock(run_id="test"))
        socket.create_connection(("127.0.0.1", handler.port)).close()
        # another address of the same machine
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", handler.port))


def test_starts_are_counted_whatever_earlier_ones_left_in_the_store():
    """The store of torchrun is that of all starts; in some of them not every process came as far as to ask."""
    store = HashStore()

    def start(ranks: range, seconds: float = 60) -> list[int]:
        limit = timedelta(seconds=seconds)
        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(lambda rank: count_starts(store, rank, 3, limit), ranks))

    assert start(range(3)) == [1, 1, 1]
    for ranks in (range(2), range(1, 3)):
        with pytest.raises(DistStoreError):
            start(ranks, 0.3)
    # of the three starts so far the main process was there in two
    assert start(range(3)) == [3, 3, 3]


def test_each_start_has_a_store_of_its_own(monkeypatch):
    """Otherwise processes find the addresses of those that are gone."""
    kept, ends = HashStore(), mock.Mock(side_effect=RuntimeError("the test ends here"))
    monkeypatch.setattr(join, "is_launched", lambda: True)
    monkeypatch.setattr(join, "rendezvous", lambda *_, **options: iter([(kept, 0, 1)]))
    monkeypatch.setattr(dist, "init_process_group", ends)
    for _ in range(3):
        with pytest.raises(LostProcess, match="the test ends here"), join.joined(TrainingConfig(device="cpu")):
            pass
        given = ends.call_args.kwargs
        assert (given["rank"], given["world_size"]) == (0, 1)
        assert not given["store"].check(["address"])
        given["store"].set("address", "here")


def test_processes_that_are_started_again_continue_only_what_they_began(folder):
    """torchrun starts them again after any error: they would train the run that they refused to replace."""

    def begin_and_continue(_: int) -> None:
        lost = mock.Mock(side_effect=LostProcess("another one"))
        with mock.patch.object(loop.Loop, "_update", lost), pytest.raises(LostProcess):
            begin(folder, "classify", "begun")
        begin(folder, "classify", "begun")

    def refuse_twice(_: int) -> None:
        for _ in range(2):
            with pytest.raises(ValueError, match="holds a run already"):
                begin(folder, "classify", "begun")

    assert in_processes(1, begin_and_continue) == [0]
    assert in_processes(1, refuse_twice) == [0]


@pytest.mark.parametrize(("code", "told"), [(0, "0"), (2, "2"), (143, "143"), (LOST, None), ("words", None)])
def test_a_process_leaves_its_status_to_the_launcher_unless_it_lost_another(tmp_path, monkeypatch, code, told):
    """Where it lost one, the launcher sees the failure, and starts all of them again."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended, report_status():
        raise SystemExit(code)
    assert ended.value.code == (code if told is None else 0)
    assert [path.read_text() for path in tmp_path.iterdir()] == ([] if told is None else [told])


def test_the_status_of_a_run_is_the_first_by_rank_that_is_not_zero(tmp_path):
    assert read_status(str(tmp_path)) == 0
    for rank, status in ((10, 4), (2, 3), (0, 0)):
        (tmp_path / str(rank)).write_text(str(status))
    assert read_status(str(tmp_path)) == 3


def test_layers_that_share_a_weight_are_not_gathered_by_themselves():
    """They would be cut into shards twice; so would a layer whose weight is also used outside of it."""
    model: Any = torch.nn.Module()
    model.config, model.outside = SimpleNamespace(), torch.nn.Linear(2, 2, bias=False)
    model.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False)) for _ in range(4))
    for layer in model.layers:
        layer.compiles_alone = True
    model.layers[1][0].weight = model.layers[0][0].weight
    model.layers[2][0].weight = model.outside.weight
    assert _layers(model) == [model.layers[3]]
    model.config.reversible = True
    assert _layers(model) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_fifty_updates_agree(folder, case):
    flags = "--training.learning_rate 0.001 --training.evaluate_every 25 "
    begin(folder, case, f"{case}-50", flags, steps=50)
    ours = losses(folder / f"{case}-50")
    assert len(ours) > 100
    for name, more in (("two", ""), ("sharded", "--training.sharded true ")):
        work = partial(begin, folder, case, f"{case}-50-{name}", flags + more, steps=50)
        assert in_processes(2, lambda rank, work=work: work()) == [0, 0]
        theirs = losses(folder / f"{case}-50-{name}")
        print(f"{case}, {name}: largest relative difference {((ours - theirs) / ours).abs().max():.1e}")
        assert_close(ours, theirs, rtol=2e-5, atol=1e-6)


WAYS = {
    "rows": "",
    "sharded": "--training.sharded true ",
    "tokens": "--training.shares tokens ",
}


@pytest.fixture
def exactly(monkeypatch):
    """In float64, in which rounding is no excuse, and without noise, which each process draws for its own rows."""
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda x, *_: x.fill_(1))
    monkeypatch.setattr(torch, "randn_like", lambda x, **_: torch.zeros_like(x))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def compare_exactly(folder: Path, name: str, case: str, flags: str) -> None:
    """In each way of sharing work that does not refuse it in words."""
    begin(folder, case, f"{name}-one", flags)
    ours = losses(folder / f"{name}-one")
    for way, more in WAYS.items():
        out = f"{name}-{way}"

        def begin_here(rank: int, out: str = out, more: str = more) -> None:
            try:
                begin(folder, case, out, flags + more)
            except EndedElsewhere:
                pass
            except ValueError as error:
                if not re.search(
                    "cannot read rows whose tokens|whose tokens compete|models of kind 'decoder'", str(error)
                ):
                    raise

        assert in_processes(2, begin_here) == [0, 0]
        if way == "tokens" and not (folder / out).exists():
            print(f"{name}: refused")
            continue
        theirs = losses(folder / out)
        print(f"{out}: largest relative difference {((ours - theirs) / ours).abs().max():.1e}")
        is_exact = torch.get_default_dtype() == torch.float64
        assert_close(ours, theirs, rtol=1e-7 if is_exact else 2e-5, atol=1e-9 if is_exact else 1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ATTENTION.names())
def test_every_mechanism_trains_as_in_one_process(folder, exactly, name):
    mechanism = ATTENTION.find(name)
    flags = f"--model.layers 2 --model.heads 4 --model.feedforward dense --model.attention {mechanism.examples[0]} "
    for role, case in (("causal", "language"), ("self", "masked")):
        if role in mechanism.facts.roles:
            compare_exactly(folder, f"{name}-{role}", case, flags.replace(", ", ","))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FEEDFORWARD.names())
def test_every_feedforward_layer_trains_as_in_one_process(folder, exactly, name):
    flags = f"--model.layers 2 --model.attention softmax --model.feedforward {FEEDFORWARD.find(name).examples[0]} "
    compare_exactly(folder, f"feedforward-{name}", "masked", flags.replace(", ", ","))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [f"{name}-{preset}" for name, presets in MODELS.items() for preset in presets])
def test_every_kind_of_model_trains_as_in_one_process(folder, exactly, case):
    if case.startswith("images"):
        torch.set_default_dtype(torch.float32)  # that of the pictures
    compare_exactly(folder, case, case, "")


KILLS = 20
SPREAD = "--training.sharded true --training.spread_experts true --model.feedforward switch(experts=6,capacity=0.7) "


def start_run(folder: Path, out: str, launcher: str, more: str = "", kills: int = KILLS) -> subprocess.Popen:
    """A run of two processes with a checkpoint every 20 updates, by --training.processes or by torchrun."""
    flags = f"--training.save_every 20 --training.evaluate_every 1000 --model.dropout 0.1 {more}"
    given = (QUICK.format(steps=kills * 100) + CASES["classify"] + flags).split()
    given = [str(folder / word) if (folder / word).exists() else word for word in given]
    by_torchrun = f"-m torch.distributed.run --standalone --nproc-per-node=2 --max-restarts={kills} -m regard".split()
    ours = ["--training.processes", "2", "--training.restarts", str(kills)]
    command = ["-m", "regard"] if launcher == "regard" else by_torchrun
    given += ours if launcher == "regard" else []
    return subprocess.Popen(
        [sys.executable, *command, "train", "classify", *given, "--out", str(folder / out)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def children(parent: int) -> list[int]:
    return list(map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("launcher", "flags", "kills"),
    [
        pytest.param("regard", "", KILLS, id="twenty"),
        pytest.param("torchrun", "", KILLS, id="twenty-torchrun"),
        pytest.param("regard", "--training.sharded true ", KILLS, id="twenty-sharded"),
        pytest.param("regard", SPREAD, 5, id="five-spread-experts"),
    ],
)
def test_after_kills_the_weights_are_those_of_an_undisturbed_run(folder, launcher, flags, kills):
    """Of random processes at random moments: while they start, and at most 40 updates later. The run is so long that
    all of them happen before it ends, whatever the speed of the machine."""
    draw, began = random.Random(launcher), time.monotonic()
    names = [f"kills-{launcher}-{len(flags)}-{name}" for name in ("none", "many")]
    logs = [folder / name / "log.jsonl" for name in names]
    undisturbed = start_run(folder, names[0], launcher, flags, kills)
    wait_until(logs[0].exists, "first update")
    seconds = time.monotonic() - began  # that a start takes
    assert undisturbed.wait() == 0

    def step() -> int:
        lines = logs[1].read_bytes().splitlines() if logs[1].exists() else []
        return max((json.loads(line)["step"] for line in lines[-2:] if line.endswith(b"}")), default=0)

    run, known, waits = start_run(folder, names[1], launcher, flags, kills), set[int](), list[float]()
    for _ in range(kills):
        began = time.monotonic()
        wait_until(lambda known=known: len(set(children(run.pid)) - known) == 2, "restart")
        known = set(children(run.pid))
        goal, moment = step() + draw.randint(1, 40), time.monotonic() + draw.choice([draw.uniform(0, seconds), 1000])
        wait_until(lambda goal=goal, moment=moment: step() >= goal or time.monotonic() > moment, "update")
        os.kill(draw.choice(sorted(known)), signal.SIGKILL)
        waits.append(time.monotonic() - began)
    while run.poll() is None:
        reached = step()
        wait_until(lambda reached=reached: run.poll() is not None or step() > reached, "update")
    assert run.wait() == 0
    print(f"{launcher}: {kills} kills, at most {max(waits):.0f} s between two")
    assert_same(folder / names[0], folder / names[1])


def wait_until(happens: Callable[[], bool], what: str) -> None:
    """Fails only where it would never happen: on a machine with much other work, a restart takes minutes."""
    limit = time.monotonic() + 900
    while not happens():
        assert time.monotonic() < limit, f"no {what} within 15 minutes"
        time.sleep(0.02)


@pytest.mark.exhaustive
def test_processes_whose_launcher_is_killed_stop(folder):
    launcher = start_run(folder, "kills-launcher", "regard")
    wait_until((folder / "kills-launcher" / "log.jsonl").exists, "first update")
    left = children(launcher.pid)
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not any(Path(f"/proc/{process}").exists() for process in left), "end")
