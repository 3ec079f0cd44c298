"""Training: exact resume after any interruption, signals, numbers that are not finite, what a checkpoint stands for."""

import contextlib
import dataclasses
import errno
import json
import math
import os
import re
import signal
from pathlib import Path

import pytest
import torch
import yaml
from torch.testing import assert_close
from training_runs import assert_same, config, dying, finish, in_child, write_pairs

from regard import cli, models
from regard.config import from_json, parse
from regard.data.text import hold_out
from regard.tasks.load import read_config, read_parts
from regard.tasks.train import resume, train
from regard.tasks.translate import (
    Task,
    TranslateConfig,
    Translator,
    TranslatorOptions,
    read_corpus,
    read_valid,
)
from regard.training import checkpoint, loop, loss_scale
from regard.training.config import TrainingConfig
from regard.training.display import Display
from regard.training.run import Run
from regard.training.schedule import learning_rate


@pytest.fixture(autouse=True)
def _one_thread():
    """Children are forked, and threads do not survive that."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> TranslateConfig:
    """A run that nothing interrupts."""
    torch.set_num_threads(1)
    settings = config(tmp_path_factory.mktemp("whole"), accumulate=2)
    finish(settings)
    return settings


DEATHS = {
    "at the start": [(loop.Loop, "_load", 1)],
    "in the first step": [(loop.Loop, "_update", 1)],
    "before the first checkpoint": [(loop.Loop, "_update", 3)],
    "in a step": [(loop.Loop, "_update", 8)],
    "before the optimizer": [(torch.optim.AdamW, "step", 5)],
    "in a save, at a file": [(checkpoint, "_write_file", 5)],
    "in a save, at the name": [(os, "rename", 2)],
    "in a save, at the pruning": [(checkpoint, "prune", 3)],
    "in an evaluation": [(Translator, "loss", 1)],
    "in the last evaluation": [(Translator, "loss", 3)],
    "at the edge of an epoch": [(loop.Loop, "_update", 5), (loop.Loop, "_update", 3)],
    "twice, the second time while it resumes": [(loop.Loop, "_update", 9), (checkpoint, "newest", 1)],
    "three times": [(loop.Loop, "_update", 7), (loop.Loop, "_update", 2), (loop.Loop, "_log", 4)],
}


@pytest.mark.parametrize("deaths", DEATHS.values(), ids=DEATHS)
def test_R1_killed_runs_go_on_bit_for_bit(whole, tmp_path, deaths):
    (tmp_path / "pairs.tsv").write_bytes(Path(whole.data.source).read_bytes())
    settings = config(tmp_path, accumulate=2)
    for index, death in enumerate(deaths):

        def work(index=index, death=death):
            dying(*death)
            finish(settings) if index == 0 else resume(settings.out, Display(quiet=True))

        assert in_child(work) == -signal.SIGKILL
    resume(settings.out, Display(quiet=True))
    assert_same(whole.out, settings.out)


def test_R1_the_log_goes_on_within_a_line(tmp_path):
    """The loss of a line is over all its steps, also where the run died between them."""
    whole, other = (config(tmp_path, name, log_every=5) for name in ("whole", "other"))
    finish(whole)
    assert in_child(lambda: (dying(loop.Loop, "_update", 9), finish(other))) == -signal.SIGKILL
    resume(other.out, Display(quiet=True))
    assert_same(whole.out, other.out)


def test_R1_every_pair_once_an_epoch(tmp_path, monkeypatch):
    """The ledger: what the loop really asked for, over an interruption."""
    seen = []
    original = loop.Loop._next_batch

    def noting(self):
        where = (self.state.epoch, self.state.batch)
        batch = original(self)
        seen.append((*where, batch.indices.tolist()))
        return batch

    monkeypatch.setattr(loop.Loop, "_next_batch", noting)
    settings = config(tmp_path, steps=9, evaluate_every=9, save_every=4)
    # no pairs are added that teach copying: the epoch is the corpus
    settings = dataclasses.replace(settings, data=dataclasses.replace(settings.data, protect=False))
    with monkeypatch.context() as patch:
        patch.setattr(
            loop.Loop, "_log", lambda self, place: (_ for _ in ()).throw(MemoryError) if self.state.step == 6 else None
        )
        with pytest.raises(MemoryError):
            finish(settings)
    done = seen[:4]
    seen.clear()
    resume(settings.out, Display(quiet=True))
    ledger = done + seen
    assert [part[:2] for part in ledger] == sorted(part[:2] for part in ledger)
    last = ledger[-1][0]
    assert last >= 1
    pairs = len(read_corpus(settings.data, settings.training.seed).train)
    for epoch in range(last):
        index = [number for part in ledger if part[0] == epoch for number in part[2]]
        assert sorted(index) == list(range(pairs))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("during", ["step", "evaluation"])
def test_R6_signals_save_and_exit(whole, tmp_path, number, code, during):
    (tmp_path / "pairs.tsv").write_bytes(Path(whole.data.source).read_bytes())
    settings = config(tmp_path, accumulate=2)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(_values(settings)))

    def work():
        owner, name, call = (loop.Loop, "_update", 7) if during == "step" else (Translator, "loss", 1)
        original, calls = getattr(owner, name), [0]

        def wrapped(*arguments, **options):
            calls[0] += 1
            if calls[0] == call:
                os.kill(os.getpid(), number)
            return original(*arguments, **options)

        setattr(owner, name, wrapped)
        os._exit(cli.main(["train", "translate", "--config", str(tmp_path / "config.yaml")]))

    assert in_child(work) == code
    stopped = checkpoint.newest(Run(settings.out).checkpoints).checkpoint.state["step"]
    assert stopped == (7 if during == "step" else 5)
    resume(settings.out, Display(quiet=True))
    assert_same(whole.out, settings.out)


def test_R6_a_second_signal_exits_at_once(tmp_path):
    settings = config(tmp_path)

    def work():
        def slow(*_):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            # Python looks for signals between its instructions
            for _ in range(1000):
                pass
            os._exit(1)

        Translator.loss = slow
        finish(settings)

    assert in_child(work) == 143


def _values(settings: TranslateConfig) -> dict:
    return json.loads(json.dumps(dataclasses.asdict(settings)))


def test_R3_a_damaged_checkpoint_is_passed_over_and_said(whole, tmp_path, capsys):
    (tmp_path / "pairs.tsv").write_bytes(Path(whole.data.source).read_bytes())
    settings = config(tmp_path, accumulate=2)
    assert in_child(lambda: (dying(loop.Loop, "_update", 12), finish(settings))) == -signal.SIGKILL
    newest = Run(settings.out).checkpoints / checkpoint.names(Run(settings.out).checkpoints)[-1]
    with open(newest / "model.safetensors", "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\x55")
    resume(settings.out, Display())
    assert f"{newest.name} is damaged" in capsys.readouterr().err
    assert_same(whole.out, settings.out)


def test_R4_no_file_of_a_run_is_unpickled(tmp_path):
    settings = config(tmp_path, steps=2, evaluate_every=2)
    finish(settings)
    run, marker = Path(settings.out), tmp_path / "executed"
    payload = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    tagged = f"!!python/object/apply:os.system ['touch {marker}']".encode()
    for name in ("config.yaml", "run.json", "source.json", "valid.jsonl"):
        path = run / name
        before = path.read_bytes()
        for attack in (payload, tagged):
            path.write_bytes(attack)
            for work in (
                lambda: resume(run, Display(quiet=True)),
                lambda: Translator.load(run),
                lambda: read_valid(run),
            ):
                with contextlib.suppress(ValueError, yaml.YAMLError):
                    work()
        path.write_bytes(before)
    assert not marker.exists()


def test_R5_a_full_disk_ends_in_words(tmp_path, monkeypatch, capsys):
    settings = config(tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(_values(settings)))
    original = checkpoint._write_file

    def full(path, content):
        if "step-00000006" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return original(path, content)

    monkeypatch.setattr(checkpoint, "_write_file", full)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "translate", "--config", str(tmp_path / "config.yaml")])
    assert ended.value.code == 2
    words = capsys.readouterr().err
    assert "No space left" in words
    assert "step-00000006" in words
    assert checkpoint.newest(Run(settings.out).checkpoints).checkpoint.state["step"] == 5


@pytest.mark.parametrize("what", ["weight", "gradient", "loss"])
def test_R8_what_is_not_finite_is_caught_in_the_same_step(tmp_path, monkeypatch, what):
    settings = config(tmp_path)
    original = loop.Loop._update
    name = "decoder.blocks.0.feedforward.inner.weight"

    def poisoned(self):
        if self.state.step == 7:
            model = self.task.model
            if what == "weight":
                with torch.no_grad():
                    model.get_parameter(name)[0, 0] = math.inf
            elif what == "gradient":
                model.get_parameter(name).register_hook(lambda grad: grad * math.nan)
            else:
                loss = self.loss
                self.loss = lambda batch, smoothing: (found := loss(batch, smoothing))._replace(
                    total=found.total * math.inf
                )
        original(self)

    monkeypatch.setattr(loop.Loop, "_update", poisoned)
    with pytest.raises(loop.TrainingError) as caught:
        finish(settings)
    words = str(caught.value)
    assert "step 8:" in words
    assert re.search(rf"batch \d+, lines of {settings.data.source} \d+, ", words)
    assert "step-00000006" in words
    assert (name if what != "loss" else "gradient of") in words
    last = checkpoint.newest(Run(settings.out).checkpoints).checkpoint
    assert last.state["step"] == 6
    assert all(part.isfinite().all() for part in last.tensors["model"].values())


def test_R8_rows_have_the_lines_of_the_file(tmp_path):
    """Also where lines are bad, held out or too long."""
    settings = config(tmp_path)
    file = Path(settings.data.source)
    lines = file.read_text().split("\n")
    lines[3:3] = ["no translation", " ".join(["one"] * 50) + "\t" + " ".join(["eins"] * 50)]
    file.write_text("\n".join(lines))
    wishes = dataclasses.replace(settings.data, tokenizer="units", skip_bad=True, maximum_length=40)
    settings = dataclasses.replace(settings, data=wishes)
    data = Task.read_data(settings)
    tokenizers = Task.train_tokenizers(data, settings)
    ready = Task(settings, data, tokenizers, models.build(Task.model_config(settings, tokenizers, data)))
    assert len(data.lines) == len(data.train) == len(ready.batches) + 1
    for index in range(ready.batches.count(0)):
        batch = ready.batches.get(0, index)
        what, numbers = ready.describe_rows(batch.indices.tolist())
        assert what == f"lines of {file}"
        for ids, number in zip(batch.source.tolist(), numbers, strict=True):
            expected = ready.translator.source.encode(lines[number - 1].split("\t")[0])
            assert ids[: len(expected)] == expected


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_R8_an_evaluation_without_numbers_names_the_learning_rate(tmp_path, monkeypatch, precision):
    """The weights are still finite, and the logits no longer."""
    settings = config(tmp_path, evaluate_every=4)
    original = loop.Loop._evaluate

    def blown_up(self):
        with torch.no_grad():
            self.task.model.get_parameter("decoder.norm.weight").fill_(3e38)
        self.config = dataclasses.replace(self.config, precision=precision)
        original(self)

    monkeypatch.setattr(loop.Loop, "_evaluate", blown_up)
    with pytest.raises(loop.TrainingError, match=r"^step 4: .*NaN or infinite") as caught:
        finish(settings)
    words = str(caught.value)
    assert "The learning rate is probably too high; the last good checkpoint is step-00000003." in words
    assert "A smaller learning_rate" in words
    assert "take an earlier checkpoint" not in words
    assert ("float32 instead of float16" in words) == (precision == "float16")


def test_R8_no_poisoned_checkpoint(tmp_path, monkeypatch):
    """Weights that an update itself ruined are not saved, even where no loss has seen them yet."""
    settings = config(tmp_path, save_every=1)
    original = torch.optim.AdamW.step

    def ruin(self, *rest):
        original(self, *rest)
        if len(checkpoint.names(Run(settings.out).checkpoints)) == 2:
            with torch.no_grad():
                self.param_groups[0]["params"][0][0, 0] = math.nan

    monkeypatch.setattr(torch.optim.AdamW, "step", ruin)
    with pytest.raises(loop.TrainingError, match=r"step 3: .* is not finite; nothing was saved"):
        finish(settings)
    assert checkpoint.newest(Run(settings.out).checkpoints).checkpoint.state["step"] == 2


def test_accumulated_batches_are_one_large_batch(tmp_path, monkeypatch):
    """The update is that of the mean over all tokens, whatever the batches hold."""
    settings = config(tmp_path, accumulate=3, steps=1, evaluate_every=1, clip=None, weight_decay=0.0, auxiliary=0.7)
    settings = TranslateConfig(
        settings.out,
        settings.data,
        TranslatorOptions(width=16, heads=2, inner=32, layers=1, dropout=0.0, aligner=True),
        settings.training,
    )
    grads, batches = {}, []
    update, fetch, step = loop.Loop._update, loop.Loop._next_batch, torch.optim.AdamW.step

    def fetched(self):
        batches.append(fetch(self))
        return batches[-1]

    def noted(self, *rest):
        grads.update({id(part): part.grad.clone() for group in self.param_groups for part in group["params"]})
        return step(self, *rest)

    def checked(self):
        before = {name: part.detach().clone() for name, part in self.task.model.named_parameters()}
        update(self)
        model = self.task.model
        after = {name: part.detach().clone() for name, part in model.named_parameters()}
        model.load_state_dict(before, strict=False)
        parts = [self.task.loss(batch, self.config.label_smoothing) for batch in batches]
        assert len({int(part.tokens) for part in parts}) > 1
        mean = sum(part.total for part in parts) / sum(part.tokens for part in parts)
        mean = mean + 0.7 * sum(part.auxiliary_loss for part in parts) / 3
        for part, wanted in zip(model.parameters(), torch.autograd.grad(mean, list(model.parameters())), strict=True):
            assert_close(grads[id(part)], wanted)
        model.load_state_dict(after, strict=False)

    monkeypatch.setattr(loop.Loop, "_next_batch", fetched)
    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    monkeypatch.setattr(loop.Loop, "_update", checked)
    finish(settings)
    assert len(batches) == 3


def test_settings_reach_the_optimizer(tmp_path, monkeypatch):
    settings = config(
        tmp_path,
        clip=0.05,
        weight_decay=0.03,
        weight_decay_on="all",
        betas=(0.8, 0.9),
        epsilon=1e-7,
        schedule="cosine",
        learning_rate=0.01,
    )
    seen, step = [], torch.optim.AdamW.step

    def noted(self, *rest):
        (group,) = self.param_groups
        norm = torch.cat([part.grad.flatten() for part in group["params"]]).norm()
        seen.append((group["lr"], group["betas"], group["eps"], group["weight_decay"], float(norm)))
        return step(self, *rest)

    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    finish(settings)
    assert len(seen) == 12
    for number, (rate, betas, epsilon, decay, norm) in enumerate(seen, 1):
        assert_close(rate, learning_rate(settings.training, number, 16))
        assert (betas, epsilon, decay) == ((0.8, 0.9), 1e-7, 0.03)
        assert_close(norm, 0.05, rtol=1e-3, atol=0)
    log = [record for record in Run(settings.out).records() if record["event"] == "step"]
    assert_close([record["learning_rate"] for record in log], [part[0] for part in seen])
    assert all(record["norm"] > 0.05 for record in log)


def test_matrices_decay_and_nothing_else(tmp_path, monkeypatch):
    """With a learning rate too small to learn anything, what is left of a weight after a step is its decay."""
    monkeypatch.setattr(loop, "learning_rate", lambda *_: 0.5)
    monkeypatch.setattr(loop.Loop, "_clip_gradients", lambda self, norm: torch._foreach_zero_(self._gradients()))
    for rule in ("matrices", "all"):
        settings = config(tmp_path, rule, steps=1, weight_decay=0.2, weight_decay_on=rule)
        finish(settings)
        run = Run.open(settings.out)
        torch.manual_seed(settings.training.seed)
        before = models.build(read_parts(run).config).named_parameters()
        after = run.find("last").tensors["model"]
        decayed = set()
        for name, part in before:
            decays = rule == "all" or part.ndim >= 2
            assert_close(after[name], part.detach() * (0.9 if decays else 1.0))
            decayed.add(decays)
        assert decayed == ({True} if rule == "all" else {True, False})


def test_a_run_of_before_there_was_a_choice_keeps_its_rule(tmp_path):
    """Every parameter decays, bit for bit as if the run had not been interrupted."""
    whole, other = (config(tmp_path, name, weight_decay=0.2, weight_decay_on="all") for name in ("whole", "other"))
    finish(whole)
    assert in_child(lambda: (dying(loop.Loop, "_update", 9), finish(other))) == -signal.SIGKILL
    run = Run.open(other.out)
    written = run.read_text("config.yaml")
    run.write_text("config.yaml", written.replace("  weight_decay_on: all\n", ""))
    assert run.read_text("config.yaml") != written
    last = checkpoint.newest(run.checkpoints).checkpoint
    scale = last.state.pop("loss_scale")
    older = last.state | {"scale": scale["value"], "steady": scale["steps_since_rescale"]}
    checkpoint.write(run.checkpoints, last.path.name, last.tensors, older)
    resume(other.out, Display(quiet=True))
    assert_same(whole.out, other.out)


def test_the_logged_loss_is_over_all_its_tokens(tmp_path, monkeypatch):
    settings = config(tmp_path, log_every=4, accumulate=2)
    sums, backward = [], loop.Loop._backward

    def noted(self, batch, weights):
        found = backward(self, batch, weights)
        sums.append((float(found[loop.PLAIN]), self.task.count_tokens(batch)))
        return found

    monkeypatch.setattr(loop.Loop, "_backward", noted)
    finish(settings)
    log = [record for record in Run(settings.out).records() if record["event"] == "step"]
    assert [record["step"] for record in log] == [4, 8, 12]
    for index, record in enumerate(log):
        part = sums[8 * index : 8 * index + 8]
        assert_close(record["loss"], sum(plain for plain, _ in part) / sum(tokens for _, tokens in part))


def test_each_step_and_seed_draws_its_own(tmp_path):
    draws = {loop.step_seed(seed, step) for seed in (0, 1, 2, 1 + 2**24, 2**62) for step in range(50)}
    assert len(draws) == 250
    assert all(0 <= draw < 2**64 for draw in draws)
    settings = config(tmp_path, "one")
    other = config(tmp_path, "two", seed=2)
    finish(settings)
    finish(other)
    first, second = (Run(part.out).records()[0]["loss"] for part in (settings, other))
    assert first != second


def test_the_evaluation_uses_its_beam(tmp_path, monkeypatch):
    beams, translate = [], Translator.translate
    monkeypatch.setattr(
        Translator,
        "translate",
        lambda self, lines, decoding, **rest: (beams.append(decoding.beam), translate(self, lines, decoding, **rest))[
            1
        ],
    )
    finish(config(tmp_path, beam=3))
    assert set(beams) == {3}


def test_long_pairs_are_left_out_and_said(tmp_path, capsys):
    settings = config(tmp_path, steps=1)
    with open(settings.data.source, "a", encoding="utf-8") as file:
        file.write("one two\t" + "zwei " * 60 + "\n")
    data = dataclasses.replace(settings.data, maximum_length=50)
    train(Task, dataclasses.replace(settings, data=data), Display())
    assert "omitted 1 pairs of more than 50 tokens" in capsys.readouterr().err


def test_a_start_that_fails_leaves_nothing(tmp_path):
    for changes in ({"tokens": 1}, {"device": "meta"}):
        with pytest.raises(ValueError, match=r"raise training.tokens|cpu and cuda"):
            finish(config(tmp_path, **changes))
        assert not (tmp_path / "run").exists()
    for wrong in ({"betas": (0.9, 1.0)}, {"seed": -1}, {"epsilon": 0.0}, {"weight_decay": -1.0}):
        with pytest.raises(ValueError, match=f"training.{next(iter(wrong))}|weight_decay"):
            TrainingConfig(**wrong)


def test_the_average_is_scored_and_grows_old(tmp_path, capsys):
    settings = config(tmp_path, average=2)
    finish(settings)
    translator = Translator.load(settings.out, which="average")
    found = translator.loss(translator.batches(read_valid(settings.out), 100))
    assert_close(Run(settings.out).records()[-1]["loss"], found, rtol=1e-5, atol=1e-6)
    assert Run(settings.out).find().path.name == "average"
    run = yaml.safe_load((Path(settings.out) / "config.yaml").read_text())
    run["training"]["average"] = 0
    (Path(settings.out) / "config.yaml").write_text(yaml.safe_dump(run))
    Run(settings.out).record("config.yaml")
    resume(settings.out, Display(quiet=True), steps=15)
    assert Run(settings.out).find().path.name != "average"
    assert "the average is older than step-00000015" in capsys.readouterr().err


def test_float16_lowers_its_scale_and_goes_on(tmp_path, monkeypatch):
    """On a GPU an overflow asks for a smaller scale: the step is skipped, the scale halves, then grows again."""
    settings = config(tmp_path, steps=4, evaluate_every=4)
    monkeypatch.setattr(loss_scale, "STEPS_TO_DOUBLE", 2)
    scales = []
    update = loop.Loop._update

    def noted(self):
        self.config = TrainingConfig(**vars(self.config) | {"precision": "float16"})
        monkeypatch.setattr(self, "_precision", contextlib.nullcontext)
        if self.state.step == 1:
            loss = self.loss

            def overflowing(batch, smoothing):
                self.loss = loss
                found = loss(batch, smoothing)
                found.total.register_hook(lambda grad: grad * math.inf)
                return found

            self.loss = overflowing
        before = {name: part.detach().clone() for name, part in self.task.model.named_parameters()}
        update(self)
        scales.append(self.state.loss_scale.value)
        moved = any(not torch.equal(part, before[name]) for name, part in self.task.model.named_parameters())
        assert moved == (self.state.step != 2)

    monkeypatch.setattr(loop.Loop, "_update", noted)
    finish(settings)
    assert scales == [2.0**16, 2.0**15, 2.0**15, 2.0**16]


def test_the_best_checkpoint_and_patience(tmp_path, monkeypatch):
    values = iter([3.0, 5.0, 4.0, 5.0, 9.0])
    monkeypatch.setattr(
        "regard.tasks.translate.Task.evaluate",
        lambda self, check: ({"bleu": next(values)}, []),
    )
    settings = config(tmp_path, steps=100, evaluate_every=2, save_every=None, patience=2, keep=1)
    state = finish(settings)
    assert (state.step, state.best, state.best_step) == (8, 5.0, 4)
    run = Run.open(settings.out)
    assert checkpoint.names(run.checkpoints) == ["step-00000004", "step-00000008"]
    assert run.find("best").state["step"] == 4
    assert run.find("last").state["step"] == 8
    assert run.find().state["step"] == 4
    with pytest.raises(ValueError, match="no checkpoint of step 6"):
        run.find("6")
    with pytest.raises(ValueError, match="regard average"):
        run.find("average")
    with pytest.raises(ValueError, match="best, last, average or a step"):
        run.find("worst")


@pytest.mark.parametrize(("metric", "values", "steps"), [("bleu", [1.0, 7.0, 9.0], 4), ("loss", [3.0, 1.5, 0.5], 4)])
def test_stop_at(tmp_path, monkeypatch, metric, values, steps):
    found = iter(values)
    monkeypatch.setattr("regard.tasks.translate.Task.evaluate", lambda self, check: ({metric: next(found)}, []))
    stop_at = {"bleu": 6.0, "loss": 2.0}[metric]
    assert finish(config(tmp_path, steps=6, evaluate_every=2, metric=metric, stop_at=stop_at)).step == steps


def test_old_names_of_settings_are_read(tmp_path, monkeypatch):
    """In flags, config files, their sections and runs; what is written has the new ones."""

    def parsed(*argv):
        return parse(TranslateConfig, [*argv], "regard", "").training

    (tmp_path / "whole.yaml").write_text("training: {smoothing: 0.3, goal: 12, beam: 2}\ndata: {vocabulary: 77}\n")
    (tmp_path / "section.yaml").write_text("smoothing: 0.4\nsteps: 3\n")
    found = parsed("--config", str(tmp_path / "whole.yaml"), "--training.smoothing=0.2")
    assert (found.label_smoothing, found.stop_at, found.beam) == (0.2, 12.0, 2)
    assert parsed(f"--config={tmp_path / 'whole.yaml'}").label_smoothing == 0.3
    found = parsed("--training", str(tmp_path / "section.yaml"), "--training.goal", "5")
    assert (found.label_smoothing, found.steps, found.stop_at) == (0.4, 3, 5.0)
    with pytest.raises(ValueError, match="smoothing is the old name of label_smoothing: give one"):
        from_json(TrainingConfig, {"smoothing": 0.1, "label_smoothing": 0.1})

    settings = config(tmp_path, steps=4, label_smoothing=0.0, stop_at=1000.0)
    finish(settings)
    run = Run.open(settings.out)
    written = run.read_text("config.yaml")
    run.write_text("config.yaml", written.replace("label_smoothing:", "smoothing:").replace("stop_at:", "goal:"))
    assert read_config(run).training.label_smoothing == 0.0
    assert read_config(run).training.stop_at == 1000.0
    monkeypatch.chdir(tmp_path)
    assert cli.main(["resume", settings.out, "--steps", "6", "--training.goal", "0"]) == 0
    assert read_config(run).training.stop_at == 0
    assert "  stop_at: 0.0" in run.read_text("config.yaml")
    assert checkpoint.names(run.checkpoints)[-1] == "step-00000004"


def test_the_average_is_of_scheduled_checkpoints(tmp_path):
    settings = config(tmp_path, average=2, keep=3)
    finish(settings)
    run = Run.open(settings.out)
    assert checkpoint.names(run.checkpoints)[-2:] == ["step-00000010", "step-00000012"]
    parts = [run.find(step).tensors["model"] for step in (10, 12)]
    mean = run.find("average")
    assert mean.state["averaged"] == ["step-00000010", "step-00000012"]
    for name, part in mean.tensors["model"].items():
        assert_close(part, (parts[0][name] + parts[1][name]) / 2)
    assert run.records()[-1]["event"] == "average"
    assert cli.main(["average", settings.out, "--last", "3"]) == 0
    assert run.find("average").state["averaged"] == checkpoint.names(run.checkpoints)[-3:]


def test_schedules():
    paper = TrainingConfig(schedule="paper", warmup=4000)
    assert_close(learning_rate(paper, 4000, 512), 512**-0.5 * 4000**-0.5)
    assert_close(learning_rate(paper, 1, 512), 512**-0.5 * 4000**-1.5)
    assert_close(learning_rate(paper, 16000, 512), 512**-0.5 * 16000**-0.5)
    double = dataclasses.replace(paper, learning_rate=2.0)
    assert_close(learning_rate(double, 9, 512), 2 * learning_rate(paper, 9, 512))
    for name in ("inverse_root", "cosine", "constant"):
        config = TrainingConfig(schedule=name, learning_rate=0.01, warmup=100, steps=1100)
        assert_close(learning_rate(config, 50, 512), 0.005)
        assert_close(learning_rate(config, 100, 512), 0.01)
        assert_close(
            learning_rate(config, 1100, 512), {"inverse_root": 0.01 / 11**0.5, "cosine": 0.0, "constant": 0.01}[name]
        )
    assert_close(learning_rate(TrainingConfig(schedule="cosine", warmup=100, steps=1100), 600, 64), 0.0005)
    assert learning_rate(TrainingConfig(schedule="constant", warmup=0), 1, 64) == 0.001


def test_a_run_can_be_made_longer(tmp_path):
    settings = config(tmp_path, steps=4)
    finish(settings)
    state = resume(settings.out, Display(quiet=True), steps=7)
    assert state.step == 7
    assert yaml.safe_load((Path(settings.out) / "config.yaml").read_text())["training"]["steps"] == 7


def test_changed_data_is_refused(tmp_path):
    settings = config(tmp_path)
    finish(settings)
    write_pairs(tmp_path / "pairs.tsv", 91)
    with pytest.raises(ValueError, match="has changed"):
        resume(settings.out, Display(quiet=True))


def test_a_run_is_not_overwritten(tmp_path):
    settings = config(tmp_path, steps=1, evaluate_every=1)
    finish(settings)
    with pytest.raises(ValueError, match="regard resume"):
        finish(settings)


def test_held_out_sources_are_not_trained_on():
    pairs = [(f"s{number % 40}", f"t{number}") for number in range(100)]
    rest, held = hold_out(pairs, 10, seed=3)
    sources = [source for source, _ in held]
    assert len(held) == len(set(sources)) == 10
    assert not set(sources) & {source for source, _ in rest}
    assert len(rest) == sum(source not in sources for source, _ in pairs)
    assert hold_out(pairs, 10, seed=3) == (rest, held)
    assert hold_out(pairs, 10, seed=4)[1] != held


def test_no_precision_but_float32_on_the_cpu(tmp_path):
    with pytest.raises(ValueError, match="bfloat16 is for a GPU, and the device is the CPU"):
        finish(config(tmp_path, device="cpu", precision="bfloat16"))


def test_config_from_flags_and_files(tmp_path):
    def read(*flags: str) -> TranslateConfig:
        return parse(TranslateConfig, list(flags), "regard train translate", "")

    found = read("--data.source", "a", "--model.attention", '["local(window=4)", softmax]', "--training.clip", "null")
    assert found.model.attention == ["local(window=4)", "softmax"]
    assert found.training.clip is None
    assert read("--model.attention", "local(window=4)").model.attention == "local(window=4)"
    file = tmp_path / "a.yaml"
    file.write_text("training: {steps: 7, betas: [0.9, 0.99]}\nmodel: {preset: lstm}\n")
    found = read("--config", str(file), "--training.steps", "8")
    assert (found.training.steps, found.training.betas, found.model.preset) == (8, (0.9, 0.99), "lstm")
    assert from_json(TranslateConfig, _values(found)) == found
    for flags, words in (
        (["--model.atention", "x"], "did you mean 'model.attention'"),
        (["--training.steps", "many"], "training.steps"),
        (["--training.steps", "0"], "at least 1"),
        (["--training.schedule", "up"], "training.schedule"),
        (["--training.average", "9"], "training.keep"),
    ):
        with pytest.raises(ValueError, match=words):
            read(*flags)
    file.write_text("training: {stepz: 7}\n")
    with pytest.raises(ValueError, match="stepz"):
        read("--config", str(file))
    with pytest.raises(ValueError, match="has no stepz"):
        from_json(TrainingConfig, {"stepz": 1})
    with pytest.raises(ValueError, match="steps must be"):
        from_json(TrainingConfig, {"steps": "1"})


def test_presets_and_what_is_foreign_to_them():
    assert TranslatorOptions().resolve(vocabulary=100).width == 128
    assert TranslatorOptions(preset="gru", bottleneck=True).resolve(vocabulary=100).attention is None
    for options, words in (
        ({"preset": "huge"}, "tiny, base, big, mini, lstm, gru"),
        ({"preset": "lstm", "inner": 8}, "has no model.inner"),
        ({"bottleneck": True}, "lstm and gru"),
        (
            {"preset": "perceiver-ar"},
            "predicts next token, and this task trains models that predict translation",
        ),
        ({"preset": "lstm", "bottleneck": True, "attention": "dot"}, "no attention"),
    ):
        with pytest.raises(ValueError, match=words):
            TranslatorOptions(**options).resolve(vocabulary=100)
