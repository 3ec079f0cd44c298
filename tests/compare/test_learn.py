"""How a quality cell is trained: examples that are drawn early, updates that are replayed, and what an update takes."""

import dataclasses
import gc
import signal
import threading

import pytest
import torch

from regard.compare import filling, jobs
from regard.compare import learn as learning
from regard.compare.budget import Budget
from regard.compare.learn import Diverged, Trial, learn
from regard.compare.quality import QualityPlan
from regard.compare.run import Environment, Interrupted
from regard.compare.store import Folder
from regard.core.ahead import Ahead
from regard.core.draws import RedrawnLayers
from regard.data.tasks import Examples
from regard.models import build
from regard.training.graphs import CudaGraphs

SIZES = {"width": 16, "heads": 2, "inner": 32, "layers": 1}


class Gpu:
    """Stands in for a GPU. Work that is captured happens when it is replayed, on what its inputs hold then. Only the
    main thread may call it. The generator counts for a graph during a capture, and after one that failed."""

    def __init__(self, monkeypatch):
        self.capturing: FakeGraph | None = None
        self.modes: list[str] = []
        self.generator, self.counts = torch.Generator().manual_seed(5), False
        fakes = {
            "Stream": lambda device: None,
            "graph_pool_handle": lambda: (0, 0),
            "CUDAGraph": FakeGraph,
            "graph": lambda graph, **more: Capture(self, graph, **more),
            "synchronize": lambda device: None,
            "current_device": lambda: 0,
            "get_rng_state": lambda device: self.generator.get_state(),
            "default_generators": (self,),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.Tensor, "pin_memory", self.called(lambda part: part.clone()))
        monkeypatch.setattr(Examples, "to", self.called(Examples.to))

    def called(self, function):
        def call(*inputs):
            assert threading.current_thread() is threading.main_thread(), "a call from another thread"
            assert self.capturing is None, "a call during a capture"
            return function(*inputs)

        return call

    def graphsafe_set_state(self, fresh: torch.Generator) -> None:
        self.generator, self.counts = fresh, False

    def draw(self) -> torch.Tensor:
        if self.counts and self.capturing is None:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        return torch.rand((), generator=self.generator)

    def launch(self, work):
        """Work on the GPU."""

        def run(batch, weights):
            if self.capturing is None:
                return work(batch, weights)
            assert not gc.isenabled(), "garbage may be collected during a capture"
            results = {"finite": torch.zeros((), dtype=torch.bool)}
            self.capturing.replay = lambda: results["finite"].copy_(work(batch, weights)["finite"])
            return results

        return run


class FakeGraph:
    def replay(self):
        raise AssertionError("nothing was captured")


class Capture:
    """In place of `torch.cuda.graph`, the end of which raises too where the capture failed."""

    def __init__(self, gpu: Gpu, graph: FakeGraph, pool, stream, capture_error_mode):
        self.gpu, self.graph = gpu, graph
        gpu.modes.append(capture_error_mode)

    def __enter__(self):
        self.gpu.capturing, self.gpu.counts = self.graph, True

    def __exit__(self, kind, *error):
        self.gpu.capturing = None
        if kind is not None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture\nmore")
        self.gpu.counts = False


def wait_for_the_gpu(*inputs):
    raise RuntimeError("operation not permitted when stream is capturing\nmore")


@pytest.fixture
def gpu(monkeypatch) -> Gpu:
    return Gpu(monkeypatch)


def trainer(spec: str = "softmax", task: str = "listops", device: str = "cpu", **more) -> learning._Trainer:
    trial = Trial(spec, task, {}, 24, 4, device=device, **(SIZES | more))
    found = trial.find_task()
    torch.manual_seed(0)
    return learning._Trainer(trial, found, 24, build(trial.config(spec, found)).to(device))


def weights(found: learning._Trainer) -> list[torch.Tensor]:
    return [part.detach().clone() for part in found.model.parameters()]


def test_what_is_made_early_is_the_same():
    """In order, by another thread, no more than asked for, and nothing beyond the last step."""
    made = []

    def make(step: int, steps: int) -> tuple[int, str]:
        made.append(step)
        return step * steps, threading.current_thread().name

    early = Ahead(make, 2)
    assert early.get(3, 7)[0] == 21
    assert early.get(4, 7)[0] == 28
    early.get(5, 7)
    assert made[:3] == [3, 4, 5]
    value, thread = early.get(6, 7)
    assert (value, made) == (42, [3, 4, 5, 6])
    assert not early.made
    early.close()
    assert thread != threading.current_thread().name
    made.clear()
    assert Ahead(make, 0).get(3, 7) == (21, threading.current_thread().name)
    assert made == [3]


def test_what_was_made_for_steps_that_are_skipped_is_dropped():
    early = Ahead(lambda step, steps: step, 2)
    assert [early.get(step, 20) for step in (0, 9, 3)] == [0, 9, 3]
    assert set(early.made) == {4, 5}
    early.close()
    assert not early.made
    # closing it ends the thread, and another step begins one
    assert early.get(4, 20) == 4
    early.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]


def test_an_error_in_the_thread_is_that_of_the_step():
    def fail(step: int, steps: int) -> int:
        raise ValueError(f"step {step}")

    early = Ahead(fail, 2)
    with pytest.raises(ValueError, match="step 4"):
        early.get(4, 9)
    early.close()


@pytest.mark.parametrize("pretrain", ["none", "self"])
def test_examples_that_are_drawn_early_are_those_of_the_step(pretrain):
    """The same bits, whoever draws them, also those of self-pretraining."""
    plain = trainer(pretrain=pretrain)
    early = Ahead(plain.draw_step, 3)
    for step in range(6):
        for one, other in zip(plain.draw_step(step, 6), early.get(step, 6), strict=True):
            assert one is other is None or torch.equal(one, other)
    early.close()


@pytest.mark.parametrize(("spec", "pretrain"), [("performer(features=8)", "none"), ("linear", "self")])
def test_updates_are_captured_while_a_thread_draws(gpu, spec, pretrain):
    """The threads never call the GPU, each replay has the examples, the random features and the rate of its update, and
    the weights are those of a loop."""
    plain, replayed = trainer(spec, pretrain=pretrain), trainer(spec, pretrain=pretrain)
    replayed.examples = Ahead(replayed.draw_step, 2)
    replayed.redrawn = RedrawnLayers(replayed.model, seed=replayed.trial.seed, ahead=2)
    replayed.graphs = CudaGraphs(gpu.launch(replayed.learn_from), torch.device("cpu"), learning._give_up)
    with replayed:
        for step in range(6):
            plain.update(step, 6)
            replayed.update(step, 6)
            torch.testing.assert_close(list(replayed.model.buffers()), list(plain.model.buffers()), rtol=0, atol=0)
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]
        assert len(threads) == 1 + spec.startswith("performer")
    assert not any(thread.is_alive() for thread in threads)
    assert len(replayed.graphs.graphs) == 1
    # what other threads do does not end a capture
    assert gpu.modes == ["thread_local"]
    assert len(replayed.unchecked) == 6
    assert not plain.unchecked
    torch.testing.assert_close(weights(replayed), weights(plain), rtol=1e-6, atol=1e-7)
    replayed.check_finite()
    assert not replayed.unchecked


def test_a_capture_that_fails_leaves_a_loop_that_is_right(gpu):
    """The reason is the first one, random numbers are those without a capture, and no older graph is left: it would
    draw from a generator that nobody seeds."""
    expected = torch.Generator().manual_seed(5)
    waits, said = [], []

    def work(batch, weights):
        drawn = gpu.draw()
        if waits and gpu.capturing is not None:
            wait_for_the_gpu()
        return {"finite": drawn + batch.tokens.sum() * weights[0]}

    graphs = CudaGraphs(work, torch.device("cpu"), said.append)
    short, long = (Examples(torch.ones(1, size), torch.ones(1, size)) for size in (2, 3))
    for batch in (short, long):
        found = graphs(batch, [2.0])["finite"]
        assert found == torch.rand((), generator=expected) + 2 * batch.tokens.sum()
    graphs.graphs[None,] = None  # of another shape
    waits.append(True)
    for batch in (short, long, short):
        found = graphs(batch, [2.0])["finite"]
        assert found == torch.rand((), generator=expected) + 2 * batch.tokens.sum()
    assert said == ["training without CUDA graphs: operation not permitted when stream is capturing"]
    assert not graphs.graphs
    assert len(gpu.modes) == 1


def test_a_cell_that_cannot_be_captured_asks_for_another_process(gpu, monkeypatch):
    found = trainer()

    def work(batch, weights):
        return found.learn_from(batch, weights) if gpu.capturing is None else wait_for_the_gpu()

    def train(trial):
        for step in range(2):
            found.update(step, 4)

    found.graphs = CudaGraphs(work, torch.device("cpu"), learning._give_up)
    monkeypatch.setattr(jobs, "learn", train)
    note = "training without CUDA graphs: operation not permitted when stream is capturing"
    assert jobs.run_cell(found.trial) == (jobs.UNCAPTURED, note, ({}, {}))


@pytest.mark.parametrize("look", ["score", "save", "count"])
def test_the_first_update_that_is_not_finite_is_named_later(look, gpu, monkeypatch, tmp_path):
    """A GPU is not asked after every update; before a score, a checkpoint, and every so many updates it is."""
    found = trainer(rate=1e30)
    with pytest.raises(Diverged) as early:
        found.train(learning.Progress(20), lambda: 0.0, 0.0)
    found = trainer(rate=1e30, saved=str(tmp_path / "cell.pt"))
    found.graphs = CudaGraphs(gpu.launch(found.learn_from), torch.device("cpu"), learning._give_up)
    monkeypatch.setattr(learning, "CHECK_INTERVAL", 12)
    for step in range(11):
        found.update(step, 20)
    looks = {
        "score": lambda: found.score("valid"),
        "save": lambda: found.save(learning.Progress(20)),
        "count": lambda: found.update(11, 20),
    }
    with pytest.raises(Diverged) as late:
        looks[look]()
    assert str(late.value) == str(early.value)
    assert not (tmp_path / "cell.pt").exists()


def test_minutes_pay_for_whole_updates(monkeypatch):
    """Drawing, both passes and the optimizer are timed, the first updates are not, and the weights stay."""
    now, taken = [0.0], {"draw": 0.25, "loss": 0.5, "step": 1.25}
    draw, loss, step = learning._Trainer.draw, learning._Trainer.loss, torch.optim.AdamW.step

    def timed(name, function):
        def call(*inputs):
            # the first updates compile
            now[0] += taken[name] * (100 if now[0] < 100 else 1)
            return function(*inputs)

        return call

    for owner, name, function in (
        (learning._Trainer, "draw", draw),
        (learning._Trainer, "loss", loss),
        (torch.optim.AdamW, "step", step),
    ):
        monkeypatch.setattr(owner, name, timed(name, function))
    found = trainer()
    before = weights(found)
    assert found.time_update(lambda: now[0]) == 2.0
    assert all(torch.equal(one, other) for one, other in zip(weights(found), before, strict=True))
    assert not found.optimizer.state
    answer, _ = learn(Trial("softmax", "recall", {}, 24, 4, budget=Budget("minutes", 0.1), **SIZES), lambda: now[0])
    assert answer["updates"] == 3


def test_the_precision_is_part_of_the_question():
    plain, half = (QualityPlan("recall", ("linear",), dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert plain.question("linear", 0.001, 1) != half.question("linear", 0.001, 1)
    assert half.trial("linear", 0.001, 1).dtype == "bfloat16"
    context = trainer(dtype="bfloat16").precision()
    assert isinstance(context, torch.autocast)
    assert context.fast_dtype == torch.bfloat16
    with trainer().precision():
        assert not torch.is_autocast_enabled("cpu")


# rows of the tables, with a task of their role
CAPTURED = {
    "softmax": "recall",
    "linear": "recall",
    "local(window=8)": "recall",
    "performer(features=16)": "recall",
    "recurrent(cell='gru')": "recall",
    "convolution(kernel=4)": "recall",
    "reformer(chunk=8, buckets=4, rounds=2)": "listops",
    "sparse(pattern='fixed', stride=8, summary=2)": "listops",
    "sinkhorn(block=8, longest=24)": "listops",
    "linformer(rank=4, longest=24)": "listops",
    "synthesizer(longest=24)": "listops",
    "longformer(window=8, globals=2)": "listops",
    "bigbird(block=16, random=1)": "listops",  # a block that its kernels take
}


@pytest.mark.gpu
@pytest.mark.parametrize("spec", CAPTURED)
def test_cuda_graphs_train_as_a_loop_does(spec):
    """The second update is captured while a thread draws those to come. Where kernels add in any order, some elements
    go their own ways: what is compared is how far all of them went."""
    plain, replayed = (trainer(spec, CAPTURED[spec], "cuda", width=64, graphs=graphs) for graphs in (False, True))
    before = torch.cat([part.flatten() for part in weights(plain)])
    for found in (plain, replayed):
        with found:
            for step in range(8):
                if step == 1:
                    found.examples.close()
                    found.examples = Ahead(found.draw_step, 40)
                found.update(step, 48)
            found.check_finite()
    assert plain.graphs is None
    assert replayed.graphs is not None
    assert len(replayed.graphs.graphs) == 1
    one, other = (torch.cat([part.flatten() for part in weights(found)]) for found in (plain, replayed))
    assert (one - other).norm() < 0.1 * (one - before).norm()


@pytest.mark.gpu
def test_a_gpu_computes_after_a_capture_that_failed():
    """Also dropout, whose generator was the graph's."""
    said, device = [], torch.device("cuda")

    def work(batch, weights):
        noisy = torch.nn.functional.dropout(batch.tokens, 0.5) * weights[0]
        return {"sum": noisy.sum(), "waited": torch.tensor(noisy.sum().item())}

    graphs, found = CudaGraphs(work, device, said.append), []
    with torch.cuda.stream(graphs.stream):
        for _ in range(4):
            torch.manual_seed(3)
            found.append(graphs(Examples(torch.ones(64, 64), torch.ones(64, 64)), [1.0])["sum"].item())
    assert len(said) == 1
    assert not graphs.graphs
    assert found[1:] == found[:1] * 3


def test_a_process_trains_one_cell_after_another_until_one_fails():
    """With the answers that each has alone. A process whose cell failed has ended."""
    trial = Trial("softmax", "copy", length=8, batch=2, budget=Budget("updates", 3), **SIZES)
    others = [dataclasses.replace(trial, spec="linear", seed=2), dataclasses.replace(trial, length=1)]
    job = jobs.Job(trial)
    process, found = job.process, [job.outcome()]
    for other in others:
        assert job.is_free
        job.begin(other)
        found.append(job.outcome())
    assert [status for status, _, _ in found] == ["done", "done", "refused"]
    for asked, (_, _, (answer, counted)) in zip((trial, others[0]), found[:2], strict=True):
        alone, alone_counted = learn(asked)
        assert (answer | {"seconds": 0}, counted) == (alone | {"seconds": 0}, alone_counted)
    assert not job.is_free
    assert process.exitcode is not None


class FakeJob:
    """A process of which every second cell fails."""

    began: list["FakeJob"] = []

    def __init__(self, trial):
        self.trials, self.process, self.connection = [], self, None
        FakeJob.began.append(self)
        self.begin(trial)

    def begin(self, trial):
        self.trials.append(trial)

    def outcome(self):
        self.cells, trial = len(self.trials), self.trials[-1]
        self.is_free = self.cells == 1 and trial.spec != "linear"
        answer = {"score": 1.0, "valid": 1.0, "seconds": 1.0, "higher_is_better": True, "updates": 2, "curve": []}
        return "done" if self.is_free else "error", "", (answer, {})

    def fails_alone(self, outcome):
        return jobs.Job.fails_alone(self, outcome)  # type: ignore[arg-type]

    def is_alive(self):
        return True

    def terminate(self):
        pass

    close = terminate


def test_what_fails_in_a_process_that_was_used_is_tried_again_in_a_new_one(monkeypatch, tmp_path):
    """And what fails in a new one has failed."""
    monkeypatch.setattr(filling, "Job", FakeJob)
    monkeypatch.setattr(filling, "finished", lambda running, seconds: running[:1])
    monkeypatch.setattr(FakeJob, "began", [])
    plan = QualityPlan("copy", ("softmax", "linear"), length=8, batch=2, rates=(0.01,), seeds=2, amount=2.0, **SIZES)
    folder = Folder(tmp_path)
    filling.fill_quality([plan], folder, Environment(report=lambda line: None))
    cells = {(spec, seed): folder.get(plan.question(spec, 0.01, seed)) for spec in plan.specs for seed in (1, 2)}
    assert {asked: cell and cell.status for asked, cell in cells.items()} == {
        ("softmax", 1): "done",
        ("softmax", 2): "done",
        ("linear", 1): "error",
        ("linear", 2): "error",
    }
    # the first process fails at its second cell, which then gets one of its own
    used = [[(trial.spec, trial.seed) for trial in job.trials] for job in FakeJob.began]
    assert used[0] == [("softmax", 1), ("linear", 1)]
    assert used[1] == [("linear", 1)]


def test_a_signal_that_ends_the_processes_too_is_no_answer(monkeypatch, tmp_path):
    environment = Environment(report=lambda line: None)

    def finished(running, seconds):
        environment.received = signal.SIGTERM
        return running[:1]

    monkeypatch.setattr(filling, "Job", FakeJob)
    monkeypatch.setattr(filling, "finished", finished)
    monkeypatch.setattr(FakeJob, "outcome", lambda job: ("error", "its process ended with status 255", ({}, {})))
    plan = QualityPlan("copy", ("linear",), length=8, batch=2, rates=(0.01,), seeds=1, amount=2.0, **SIZES)
    with pytest.raises(Interrupted):
        filling.fill_quality([plan], Folder(tmp_path), environment)
    assert not list(Folder(tmp_path).all())
