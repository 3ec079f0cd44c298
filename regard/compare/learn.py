"""One quality cell: a small model of a mechanism is trained on a generated task, at one learning rate, from one seed.

The data is a function of the seed and the update; the sets that are scored are drawn from other seeds, one to choose
the learning rate by and one for the score that is reported. A cell that was killed continues from what it saved last,
and ends in the same bits.

On a GPU a whole update, from the forward pass to the optimizer, is replayed as a CUDA graph, a thread draws the
examples, and another the random buffers of layers: such small models would otherwise wait for the host. The threads
never call the GPU: what they did there during a capture could end it.
"""

import copy
import math
import os
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.compare.budget import Budget, equalize_parameters
from regard.core.ahead import Ahead
from regard.core.draws import RedrawnLayers, seed_generators
from regard.core.model import Model
from regard.core.tally import Tally
from regard.data import tasks
from regard.data.tasks import IGNORED, Examples, Task
from regard.models import ModelConfig, build, kinds
from regard.training.graphs import CudaGraphs

CURVE_POINTS = 8  # of the curve
SCORED_ROWS, SCORED_ROWS_OF_FILES = 512, 2048  # rows of a set that is scored: of a generated task, and of one on files
SOLVED = 0.9
WARM_UP = 12  # updates are this many times the warm-up
SCORING_SEEDS = {"valid": 1_000_000, "test": 2_000_000}  # of the sets that are scored
SCORING_BATCH = 128  # of them that are scored at a time
SAVE_INTERVAL = 15.0  # seconds between two saves of a cell
STEPS_AHEAD = 2  # updates for which is drawn early on a GPU
CHECK_INTERVAL = 64  # updates on a GPU between two looks at whether they were finite, for which it is waited
TIMED_UPDATES = 12  # updates of a copy, to learn what one takes


@dataclass(frozen=True)
class Trial:
    """The settings of one quality cell: task, model, learning rate, seed and budget."""

    spec: str
    task: str
    options: dict[str, Any] = field(default_factory=dict)
    length: int = 0  # 0: the length at which the task is usually asked
    batch: int = 32
    width: int = 64
    heads: int = 4
    inner: int = 128
    layers: int = 2
    position: str = "sinusoidal"
    rate: float = 3e-3
    seed: int = 1
    budget: Budget = field(default_factory=Budget)
    device: str = "cpu"
    dtype: str = "float32"  # or bfloat16: that of matrix products, by autocast; weights are float32
    equal: bool = True  # as many parameters as softmax
    kind: str = ""  # of another model than a Transformer with this attention
    model_options: dict[str, Any] = field(default_factory=dict)  # of that model
    pretrain: str = "none"  # "self": half of the budget goes to the task's own tokens, without answers
    saved: str = ""  # file from which a killed cell continues; empty: none
    graphs: bool = True  # on a GPU updates are CUDA graphs

    def find_task(self) -> Task:
        """The generator, with its options."""
        return tasks.build(self.task, **self.options)

    def config(self, spec: str, task: Task) -> Any:
        """The model with an attention, or of another kind, before its parameters are made equal."""
        sizes: dict[str, Any] = {name: getattr(self, name) for name in ("width", "heads", "inner", "layers")}
        # what is hidden has a token of its own
        sizes |= {"vocabulary": task.vocabulary + (self.pretrain == "self"), "norm": "pre", "dropout": 0.0}
        if self.kind and spec == self.spec:
            return kinds()[self.kind][0](kind=self.kind, **(sizes | self.model_options))
        kind = "decoder" if task.role == "causal" else "encoder"
        return ModelConfig(kind=kind, attention=spec, position=self.position, **sizes)


class Diverged(Exception):
    """The loss was not finite."""


class NotCaptured(Exception):
    """An update could not be captured as a CUDA graph. What a failed capture leaves behind is not sure: the cell needs
    a new process, and no graphs."""


def learn(
    trial: Trial, clock: Callable[[], float] = time.monotonic, model: Model | None = None
) -> tuple[dict[str, Any], dict[str, int]]:
    """Trains, and returns the answer of the cell and its counts."""
    task = trial.find_task()
    length = trial.length or task.length
    torch.manual_seed(trial.seed)
    sized = None
    if model is None:
        from regard.compare import budget

        target, _ = budget.count(trial.config("softmax", task))
        config = trial.config(trial.spec, task)
        sized = (
            equalize_parameters(config, target) if trial.equal else budget.SizedConfig(config, *budget.count(config))
        )
        model = build(sized.config).to(trial.device)
    with _Trainer(trial, task, length, model) as trainer:
        if (trainer.draw(SCORING_BATCH, SCORING_SEEDS["valid"]).answers == IGNORED).all():
            raise ValueError(f"the task {trial.task} asks nothing in {length} tokens: give it more (--task-length)")
        began = clock()
        flops = trainer.count_update()
        progress = trainer.restore() or Progress(
            trial.budget.updates(
                tokens=trial.batch * length,
                flops=flops,
                seconds=trainer.time_update(clock) if trial.budget.axis == "minutes" else 1.0,
            )
        )
        trainer.train(progress, clock, began)
        updates, curve = progress.updates, progress.curve
        valid, test = curve[-1][1], trainer.score("test")
    answer = {
        "metric": "accuracy",
        "higher_is_better": True,
        "valid": valid,
        **test,
        "chance": task.chance,
        "shortcut": task.shortcut,
        "curve": curve,
        "updates": updates,
        "tokens": updates * trial.batch * length,
        "solved_at": next((step for step, score in curve if score >= SOLVED), None),
        "rising": _is_rising(curve, test["asked"]),
        "seconds": round(progress.seconds + clock() - began, 2),
    }
    counted = {"flops": flops * updates}
    if sized is not None:
        counted |= {"parameters": sized.parameters, "embedding": sized.embedding, "inner": sized.inner or 0}
    return answer, counted


@dataclass
class Progress:
    """How far the training of a cell is."""

    updates: int  # in all
    step: int = 0
    curve: list[list[float]] = field(default_factory=list)
    seconds: float = 0.0  # before it was interrupted


class _Trainer:
    """A model with its optimizer on a task. Inside a `with` block its work on a GPU is in one order."""

    def __init__(self, trial: Trial, task: Task, length: int, model: Model):
        self.trial, self.task, self.length, self.model = trial, task, length, model
        self.device = torch.device(trial.device)
        self.scored: dict[tuple[str, int], Examples] = {}  # drawn once, as pictures take their time
        on_gpu = self.device.type == "cuda"
        ahead = STEPS_AHEAD if on_gpu else 0
        self.examples = Ahead(self.draw_step, ahead)
        self.redrawn = RedrawnLayers(model, seed=trial.seed, ahead=ahead)
        # one kernel for all weights, which reads the learning rate where a CUDA graph finds it
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01, fused=True if on_gpu else None
        )
        self.graphs = CudaGraphs(self.learn_from, self.device, _give_up) if on_gpu and trial.graphs else None
        self.stream: AbstractContextManager[Any] = nullcontext()
        self.unchecked: list[tuple[int, Tensor]] = []  # updates, and whether they were finite
        if self.graphs is not None:
            self.stream = torch.cuda.stream(self.graphs.stream)
            torch.cuda.synchronize(self.device)

    def __enter__(self) -> "_Trainer":
        self.stream.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stream.__exit__(*error)
        self.redrawn.close()
        self.examples.close()

    def train(self, progress: Progress, clock: Callable[[], float], began: float) -> None:
        """The updates that are left, with a point of the curve at every eighth, saved now and then."""
        updates, saved, before = progress.updates, clock(), progress.seconds
        while progress.step < updates:
            self.update(progress.step, updates)
            progress.step += 1
            if progress.step % math.ceil(updates / CURVE_POINTS) == 0 or progress.step == updates:
                progress.curve.append([progress.step, self.score("valid")["score"]])
            if self.trial.saved and clock() - saved > SAVE_INTERVAL:
                progress.seconds = before + clock() - began
                self.save(progress)
                saved = clock()
        progress.seconds = before

    def save(self, progress: Progress) -> None:
        """Writes everything that the next update needs, whole or not at all."""
        self.check_finite()
        path = Path(self.trial.saved)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state | {"progress": vars(progress)}, partial)
        os.replace(partial, path)

    def restore(self) -> Progress | None:
        """Loads what was saved; None: nothing was, or it cannot be read."""
        path = Path(self.trial.saved)
        if not self.trial.saved or not path.exists():
            return None
        try:
            state = torch.load(path, map_location=self.trial.device, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError):
            return None
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return Progress(**state["progress"])

    def draw(self, rows: int, seed: int, which: str = "train") -> Examples:
        """Examples that depend on the seed alone, on the host."""
        generator = torch.Generator().manual_seed(seed)
        if which == "train" or self.task.scored is None:
            return self.task.draw(rows, self.length, generator)
        return self.task.scored(which, rows, self.length, generator)

    def draw_step(self, step: int, updates: int) -> Examples:
        """The examples of an update, on the host."""
        seed = self.seed(step)
        batch = self.draw(self.trial.batch, seed)
        return self.hide(batch, seed) if step < self.pretraining(updates) else batch

    def seed(self, step: int) -> int:
        """The seed of everything that is drawn for an update."""
        return self.trial.seed * 10_000_019 + step

    def pretraining(self, updates: int) -> int:
        """The number of updates before the answers are learned."""
        return updates // 2 if self.trial.pretrain == "self" else 0

    def hide(self, batch: Examples, seed: int) -> Examples:
        """Self-pretraining (Amos et al. 2023, arXiv 2310.02980): a decoder predicts every next token, an encoder those
        that are hidden from it."""
        tokens = batch.tokens
        if self.task.role == "causal":
            answers = F.pad(tokens[:, 1:], (0, 1), value=IGNORED)
            keep = batch.keep
            return batch._replace(answers=answers if keep is None else answers.masked_fill(~keep, IGNORED))
        hidden = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < self.task.hidden
        hidden[:, 0] = False  # which only asks
        if batch.keep is not None:
            hidden &= batch.keep
        shown = tokens.masked_fill(hidden, self.task.vocabulary)
        return batch._replace(tokens=shown, answers=tokens.masked_fill(~hidden, IGNORED))

    def loss(self, batch: Examples) -> Tensor:
        """The mean loss of a batch."""
        with self.precision():
            prediction = self.model(batch.tokens, keep=batch.keep)
        answers = batch.answers
        if self.task.next_token:
            answers = F.pad(batch.tokens[:, 1:], (0, 1), value=IGNORED)
        loss = F.cross_entropy(prediction.logits.flatten(0, 1).float(), answers.flatten(), ignore_index=IGNORED)
        return loss if prediction.auxiliary_loss is None else loss + prediction.auxiliary_loss

    def precision(self) -> AbstractContextManager[Any]:
        """For what a model computes."""
        if self.trial.dtype == "float32":
            return nullcontext()
        # a CUDA graph must cast the weights anew each time it is replayed
        return torch.autocast(self.device.type, getattr(torch, self.trial.dtype), cache_enabled=self.graphs is None)

    def learning_rate(self, step: int, updates: int) -> float:
        """Each of the two trainings has a schedule of its own: it rises over a twelfth, and falls over a third."""
        before = self.pretraining(updates)
        at, count = (step, before) if step < before else (step - before, updates - before)
        return self.trial.rate * min(1, (at + 1) / max(1, count // WARM_UP), 3 * (1 - at / count))

    def update(self, step: int, updates: int) -> None:
        """One update of the weights."""
        if not self.model.training:
            self.model.train()
        seed_generators(self.seed(step), self.device)
        self.redrawn.redraw(step, updates)
        batch, rate = self.examples.get(step, updates), (self.learning_rate(step, updates),)
        if self.graphs is None:
            results = self.learn_from(batch.to(self.device), rate)
        else:
            results = self.graphs(batch.pinned(), rate)
        self.unchecked.append((step, results["finite"]))
        if self.graphs is None or len(self.unchecked) == CHECK_INTERVAL:
            self.check_finite()

    def learn_from(self, batch: Examples, rate: Sequence[float] | Tensor) -> dict[str, Tensor]:
        """An update from examples on the device, which does not wait for it. Returns whether it was finite."""
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate[0]
            group["capturable"] = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self.optimizer.step()
        return {"finite": loss.detach().isfinite() & norm.isfinite()}

    def check_finite(self) -> None:
        """Raises `Diverged` for the first of the latest updates that was not finite."""
        finite = torch.stack([one for _, one in self.unchecked]).tolist() if self.unchecked else []
        steps, self.unchecked = [step for step, _ in self.unchecked], []
        if not all(finite):
            step = steps[finite.index(False)]
            raise Diverged(f"not finite at update {step + 1} (learning rate {self.trial.rate:g})")

    def score(self, which: str) -> dict[str, Any]:
        """The share of answers that are right on fresh rows of the set "valid" or "test", also by group."""
        self.check_finite()
        seed = SCORING_SEEDS[which]
        self.model.eval()
        right = asked = 0
        groups: dict[str, list[int]] = {}
        items: list[float] = []
        with torch.inference_mode():
            for first in range(0, SCORED_ROWS if self.task.scored is None else SCORED_ROWS_OF_FILES, SCORING_BATCH):
                if (which, first) not in self.scored:
                    self.scored[which, first] = self.draw(SCORING_BATCH, seed + first, which).to(self.device)
                batch = self.scored[which, first]
                with self.precision():
                    best = self.model(batch.tokens, keep=batch.keep).logits.argmax(-1)
                counts = batch.answers != IGNORED
                hits = (best == batch.answers) & counts
                right, asked = right + int(hits.sum()), asked + int(counts.sum())
                items += (hits.sum(1) / counts.sum(1).clamp(min=1)).tolist()
                for at, name in enumerate(self.task.groups if batch.group is not None else ()):
                    in_group = counts & (batch.group == at)
                    sums = groups.setdefault(name, [0, 0])
                    sums[0], sums[1] = sums[0] + int((hits & in_group).sum()), sums[1] + int(in_group.sum())
        shares = {name: hits / count for name, (hits, count) in groups.items() if count}
        rounded = [round(item, 4) for item in items]
        return {"score": right / asked, "right": right, "asked": asked, "groups": shares, "items": rounded}

    def count_update(self) -> int:
        """Counted operations of an update; the weights stay as they are."""
        with torch.random.fork_rng(devices=[]), Tally() as tally:
            self.loss(self.draw(self.trial.batch, 0).to(self.device)).backward()
        self.optimizer.zero_grad()
        return tally.flops

    def time_update(self, clock: Callable[[], float]) -> float:
        """Seconds of an update with all that belongs to it, the mean over the later half of some: the first ones
        compile and capture. A copy is updated and thrown away."""
        times = []
        with _Trainer(self.trial, self.task, self.length, copy.deepcopy(self.model)) as trainer:
            for step in range(TIMED_UPDATES):
                trainer.update(step, TIMED_UPDATES)
                trainer.check_finite()
                times.append(clock())
        half = TIMED_UPDATES // 2
        return max(1e-9, (times[-1] - times[half - 1]) / (TIMED_UPDATES - half))


def _give_up(reason: str) -> None:
    raise NotCaptured(reason)


def _is_rising(curve: list[list[float]], asked: int) -> bool:
    """Whether the last eighth gained more than two standard errors."""
    if len(curve) < 2:
        return False
    before, last = curve[-2][1], curve[-1][1]
    return last - before > 2 * math.sqrt(max(last * (1 - last), 1e-9) / max(1, asked))
