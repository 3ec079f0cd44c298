"""The training loop, one for every task.

Every draw is a function of the seed and the step, and every batch of the seed, the epoch and its index. A checkpoint
therefore needs weights, optimizer and a few numbers, and a run that goes on from one repeats the bits of a run that was
never interrupted. What is due at a step is decided from the step alone, and an evaluation that was cut short is done
again.
"""

import dataclasses
import hashlib
import math
import os
import reprlib
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.config import from_json
from regard.core.allocator import hand_back_memory
from regard.layers.attention.draws import drawn, redraw
from regard.layers.feedforward.experts import Routed
from regard.training import checkpoint
from regard.training import plan as plans
from regard.training.config import TrainingConfig
from regard.training.display import Display
from regard.training.graphs import Recorded
from regard.training.groups import parameter_groups
from regard.training.run import Run
from regard.training.schedule import learning_rate
from regard.training.task import TrainingTask

LOWER_IS_BETTER = ("loss",)
PLAIN = "plain"  # what a batch tells of its loss; layers tell theirs with their names before a dot
FIRST_SCALE, LEAST_SCALE, STEPS_TO_DOUBLE = 2.0**16, 2.0**-6, 2000  # of the loss, under float16


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what is left."""


class Stopped(Exception):
    """A signal came; the run was saved."""

    def __init__(self, number: int, step: int):
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}; saved")
        self.code = 128 + number


@dataclass
class State:
    """Where a run stands: all that a checkpoint holds besides tensors."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # the next one of the epoch
    evaluated: int = 0  # the last step that was
    best: float | None = None
    best_step: int | None = None
    since_best: int = 0  # evaluations
    scale: float = FIRST_SCALE
    steady: int = 0  # steps since the scale moved
    loss_sum: float = 0.0  # since the last line of the log
    loss_tokens: int = 0
    statistics: dict[str, Any] = field(default_factory=dict)  # sums of those of the layers, since the same line
    batches: int = 0  # that they are of
    seconds: float = 0.0
    threads: int | None = None  # of the CPU: another number gives other bits
    logged: int = 0  # the last step that a line of the log is of


def train(
    task: TrainingTask,
    config: TrainingConfig,
    run: Run,
    display: Display,
    *,
    before: float = 0.0,
    changes: dict[str, Any] | None = None,
) -> State:
    """Trains until the steps, the patience or stop_at is reached, going on from the newest good checkpoint. `before`
    are the seconds that were spent before, `changes` what the log is to say was changed."""
    loop = Loop(task, config, run, display)
    loop.restore()
    if changes:
        loop.append({"event": "change", "step": loop.state.step, "changes": changes})
    return loop.go(before)


def check_compiles(model: nn.Module) -> None:
    """Refuses what a compiler is known to fail at."""
    if torch.__version__ < "2.13" and any(isinstance(part, Routed) for part in model.modules()):
        raise ValueError(
            f"training.compile is for models without experts here: PyTorch {torch.__version__} fails at their sizes, "
            f"2.13 does not. On a GPU steps are recorded as graphs anyway"
        )


class Loop:
    """One run in progress."""

    def __init__(self, task: TrainingTask, config: TrainingConfig, run: Run, display: Display):
        self.task, self.asked, self.run, self.display = task, config, run, display
        self.an_epoch = task.batches.count(0) / config.accumulate  # steps
        self.plan = plans.read(run) or plans.given(config, self.an_epoch)
        self.config = config if self.plan is None else self.plan.apply(config)
        self.durations: list[float] = []  # of the steps that are measured for a plan
        self.device = next(task.model.parameters()).device
        self.width = task.model.config.width
        self.state = State()
        self.optimizer = torch.optim.AdamW(
            parameter_groups(task.model, config.layer_decay or 1.0),
            lr=0.0,
            betas=config.betas,
            eps=config.epsilon,
            weight_decay=config.weight_decay or 0.0,
            fused=self.device.type in ("cpu", "cuda"),
        )
        self.sums = self._zero()
        self.signal: int | None = None
        if config.compile:
            check_compiles(task.model)
        self.loss = torch.compile(task.loss, dynamic=True) if config.compile else task.loss
        self.records = config.graphs and self.device.type == "cuda" and not config.compile
        self.backward, self.stream = self._backward, nullcontext()
        if self.records:
            for part in task.model.parameters():
                part.grad = torch.zeros_like(part)
            self.backward = Recorded(self._backward, self.device, display.note)
            self.stream = torch.cuda.stream(self.backward.stream)
            torch.cuda.synchronize(self.device)

    def go(self, before: float = 0.0) -> State:
        self.began = time.monotonic() - self.state.seconds - before
        if self.plan is not None and not self.run.has(plans.FILE):
            plans.write(self.run, self.plan)
        self.display.begin(self.state.step, self.config.steps)
        try:
            with self._signals(), self.stream, _deterministic(self.config.deterministic):
                while True:
                    self._evaluate_and_save()
                    self._heed()
                    if self._done():
                        break
                    self._update()
                self._average()
        finally:
            self.display.end()
        return self.state

    # one update

    def _update(self) -> None:
        config, state, began = self.config, self.state, time.monotonic()
        first = (state.epoch, state.batch)
        self.task.model.train()
        torch.manual_seed(_draw(config.seed, state.step))
        redraw(self.task.model, seed=config.seed, step=state.step)
        batches = [self._next_batch() for _ in range(config.accumulate)]
        tokens = sum(self.task.tokens(batch) for batch in batches)
        scale = state.scale if config.precision == "float16" else 1.0
        weights = [scale / tokens, scale * config.auxiliary / len(batches)]
        found = [self.backward(batch, weights) for batch in batches]
        plain = sum(part.pop(PLAIN) for part in found)
        parameters = [part for part in self.task.model.parameters() if part.grad is not None]
        norm = nn.utils.get_total_norm([part.grad for part in parameters], foreach=True) / scale
        size = float(norm)
        if not math.isfinite(size):
            self._not_finite(first, batches, plain, scale)
        else:
            if config.clip is not None or scale != 1:
                shrink = min(1.0, config.clip / (size + 1e-6)) if config.clip is not None else 1.0
                if shrink / scale != 1:
                    torch._foreach_mul_([part.grad for part in parameters], shrink / scale)
            rate = self._learning_rate(state.step + 1)
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group.get("share", 1.0)
            self.optimizer.step()
            self._steady()
            self._tell(found)
        self._clear()
        state.step += 1
        self.sums["plain"] += plain.double()
        self.sums["tokens"] += tokens
        self.sums["read"] += sum(self.task.tokens_read(batch) for batch in batches)
        self.sums["norm"] = size
        self.display.advance(state.step)
        if state.step % config.log_every == 0:
            self._log(first)
        if config.steps is None:
            self.durations.append(time.monotonic() - began)
            enough = plans.enough(config, self.task.epochs, self.an_epoch)
            # the slowest may have been compiled first
            seconds = sum(self.durations) - max(self.durations)
            if plans.measured_enough(len(self.durations), seconds, config, enough):
                self._make_plan(enough)
        elif self.plan is not None and state.step == self.plan.measured:
            self.append(plans.record(self.plan))

    def _learning_rate(self, step: int) -> float:
        measured = 0 if self.plan is None else self.plan.measured
        return learning_rate(self.config, step, self.width, None if self.config.steps is None else measured)

    def _make_plan(self, enough: int) -> None:
        """Fixes the plan, by the later half of the timed steps, an evaluation and a checkpoint; `enough` are the steps
        that the data are good for."""
        began = time.monotonic()
        self.display.note("timing an evaluation and a checkpoint for the plan ...", fleeting=True)
        evaluation, evaluated = self._time_validation(), time.monotonic()
        self._save()
        saved = time.monotonic()
        late = self.durations[len(self.durations) // 2 :]
        speed = plans.Speed(max(1e-9, sum(late) / len(late)), evaluation, saved - evaluated)
        self.plan = plans.make(self.asked, self.state.step, saved - self.began, speed, enough)
        plans.write(self.run, self.plan)
        self.config = self.plan.apply(self.asked)
        self.append(plans.record(self.plan))
        self.display.planned(self.plan.steps, plans.words(self.plan, self.an_epoch))
        self.sums["since"] += time.monotonic() - began

    def _backward(self, batch: Any, weights: list[float] | Tensor) -> dict[str, Tensor]:
        """Adds the gradients of a batch; weights are those of the loss and of the auxiliary losses. The plain loss
        comes back, and what the layers have to tell."""
        with self._precision():
            loss = self.loss(
                batch if isinstance(weights, Tensor) else batch.to(self.device), self.config.label_smoothing
            )
        total = loss.total * weights[0]
        (total if loss.auxiliary_loss is None else total + loss.auxiliary_loss * weights[1]).backward()
        return {PLAIN: loss.plain, **(loss.statistics or {})}

    def _tell(self, found: list[dict[str, Tensor]]) -> None:
        """Adds what the layers tell of each batch."""
        sums = self.sums["statistics"]
        for part in found:
            for name, value in part.items():
                sums[name] = sums.get(name, 0) + value.double()
        self.sums["batches"] += len(found)

    def _clear(self) -> None:
        if self.records:
            torch._foreach_zero_([part.grad for part in self.task.model.parameters()])
        else:
            self.optimizer.zero_grad(set_to_none=True)

    def _next_batch(self) -> Any:
        state = self.state
        batch = self.task.batches.get(state.epoch, state.batch)
        state.batch += 1
        if state.batch == self.task.batches.count(state.epoch):
            state.epoch, state.batch = state.epoch + 1, 0
        return batch

    def _precision(self) -> Any:
        if self.config.precision == "float32":
            return nullcontext()
        # a recorded step must cast the weights anew each time it is replayed
        return torch.autocast(self.device.type, getattr(torch, self.config.precision), cache_enabled=not self.records)

    def _steady(self) -> None:
        if self.config.precision == "float16":
            self.state.steady += 1
            if self.state.steady == STEPS_TO_DOUBLE:
                self.state.scale, self.state.steady = self.state.scale * 2, 0

    def _not_finite(self, first: tuple[int, int], batches: list[Any], plain: Tensor, scale: float) -> None:
        """Under float16 a gradient that overflows only asks for a smaller scale; all else ends the run in words."""
        weights = [name for name, part in self.task.model.named_parameters() if not part.isfinite().all()]
        if self.config.precision == "float16" and not weights and scale > LEAST_SCALE and plain.isfinite():
            self.state.scale, self.state.steady = scale / 2, 0
            return
        gradients = [
            name
            for name, part in self.task.model.named_parameters()
            if part.grad is not None and not part.grad.isfinite().all()
        ]
        if not gradients:
            # each is finite, but not the sum of their squares
            sizes = {
                name: part.grad.norm() for name, part in self.task.model.named_parameters() if part.grad is not None
            }
            gradients = [max(sizes, key=lambda name: sizes[name])]
        where = f"weight {weights[0]}" if weights else f"the gradient of {gradients[0]}"
        also = len(weights or gradients) - 1
        what, which = self.task.named([int(index) for batch in batches for index in batch.index])
        shown = ", ".join(map(str, which[:10])) + (f" and {len(which) - 10} more" if len(which) > 10 else "")
        names = checkpoint.names(self.run.checkpoints)
        left = f"the last good checkpoint is {names[-1]}" if names else "there is no checkpoint yet"
        raise TrainingError(
            f"step {self.state.step + 1}: {where} is not finite{f' (and {also} more)' if also else ''}; "
            f"loss {float(plain):g}; epoch {first[0]}, batch {first[1]}, {what} {shown}; nothing was saved of "
            f"this step, {left}. A smaller learning_rate, a longer warmup or a smaller clip usually helps"
        )

    # what is due

    def _evaluation_due(self, step: int) -> bool:
        every = self.config.evaluate_every
        if step == 0 or every is None:
            return False
        # a run that goes on with a plan does at the steps before it what it did when there was none
        if self.plan is not None and self.asked.evaluate_every is None and step <= self.plan.measured:
            return False
        return step % every == 0 or step == self.config.steps

    def _scheduled(self, step: int) -> bool:
        """Whether a step has a checkpoint of its own, however often the run was interrupted."""
        every = self.config.save_every
        return step > 0 and ((every is not None and step % every == 0) or self._evaluation_due(step))

    def _evaluate_and_save(self) -> None:
        state, began = self.state, time.monotonic()
        if self._evaluation_due(state.step) and state.evaluated != state.step:
            self._evaluate()
            self._save()
        elif state.step != self.saved and self._scheduled(state.step):
            self._save()
        self.sums["since"] += time.monotonic() - began

    def _done(self) -> bool:
        config, state = self.config, self.state
        if config.patience is not None and state.since_best >= config.patience:
            self.display.note(f"stopping: {state.since_best} evaluations without a better {config.metric}")
            return True
        if (
            config.stop_at is not None
            and state.best is not None
            and not _better(config.metric, config.stop_at, state.best)
        ):
            self.display.note(f"stopping: {config.metric} {state.best:.4g} reaches stop_at {config.stop_at:g}")
            return True
        return config.steps is not None and state.step >= config.steps

    def _measure_validation(
        self, check: Callable[[], None] | None = None
    ) -> tuple[dict[str, float], list[dict[str, str]]]:
        self.task.model.eval()
        try:
            with torch.inference_mode(), self._precision():
                return self.task.evaluate(check or self._heed)
        finally:
            self.task.model.train()

    def _time_validation(self) -> float:
        """Seconds of an evaluation. One that takes long is cut short: then it is twice as much, or more."""
        began, limit = time.monotonic(), plans.longest_trial(self.asked)

        def check() -> None:
            self._heed()
            if time.monotonic() - began > limit:
                raise TimeoutError

        try:
            self._measure_validation(check)
        except TimeoutError:
            return 2 * limit
        return time.monotonic() - began

    def _evaluate(self) -> None:
        config, state = self.config, self.state
        self.display.note(f"evaluating at step {state.step} ...", fleeting=True)
        metrics, samples = self._measure_validation()
        value = metrics[config.metric]
        state.evaluated = state.step
        if math.isfinite(value) and (state.best is None or _better(config.metric, value, state.best)):
            state.best, state.best_step, state.since_best = value, state.step, 0
        else:
            state.since_best += 1
        record = {"event": "evaluation", "step": state.step, "epoch": state.epoch, **metrics}
        self.append(record)
        self.display.evaluated(record, samples, state.best_step == state.step)

    def _log(self, first: tuple[int, int]) -> None:
        state, sums = self.state, self.sums
        now = time.monotonic()
        record = {
            "event": "step",
            "step": state.step,
            "epoch": first[0],
            "batch": first[1],
            "loss": float(sums["plain"]) / sums["tokens"],
            "learning_rate": self._learning_rate(state.step),
            "norm": sums["norm"] if math.isfinite(sums["norm"]) else None,
            "tokens_per_second": round(sums["read"] / max(1e-9, now - sums["since"])),
            "memory": _memory(self.device),
            "seconds": round(now - self.began, 1),
        }
        if sums["statistics"]:
            record["layers"] = _by_layer(sums["statistics"], sums["batches"])
        self.append(record)
        self.display.logged(record)
        hand_back_memory()
        self.sums = self._zero()

    def _zero(self) -> dict[str, Any]:
        plain = torch.zeros((), dtype=torch.float64, device=self.device)
        since = time.monotonic()
        return {"plain": plain, "tokens": 0, "read": 0, "norm": 0.0, "statistics": {}, "batches": 0, "since": since}

    def append(self, record: dict[str, Any]) -> None:
        """One line of the log."""
        self.run.append(record)
        self.state.logged = max(self.state.logged, record["step"])

    # checkpoints

    def _save(self) -> None:
        model, state = self.task.model, self.state
        for name, part in model.state_dict().items():
            if part.is_floating_point() and not part.isfinite().all():
                raise TrainingError(f"step {state.step}: {name} is not finite; nothing was saved")
        state.seconds = time.monotonic() - self.began
        state.loss_sum, state.loss_tokens = float(self.sums["plain"]), self.sums["tokens"]
        state.statistics = {name: value.tolist() for name, value in self.sums["statistics"].items()}
        state.batches = self.sums["batches"]
        moments, facts = checkpoint.pack_optimizer(self.optimizer, model)
        tensors = {"model": dict(model.state_dict()), "optimizer": moments}
        checkpoint.write(
            self.run.checkpoints,
            checkpoint.step_name(state.step),
            tensors,
            dataclasses.asdict(state) | {"optimizer": facts, "drawn": drawn(model)},
        )
        self.saved = state.step
        steps = [int(name.removeprefix("step-")) for name in checkpoint.names(self.run.checkpoints)]
        scheduled = [step for step in steps if self._scheduled(step) and step <= state.step][-self.config.keep :]
        kept = {checkpoint.step_name(step) for step in (*scheduled, state.step, state.best_step) if step is not None}
        checkpoint.prune(self.run.checkpoints, kept)

    def restore(self) -> None:
        """Goes to the newest good checkpoint, and says what of the run is not as it was."""
        self._load()
        threads = torch.get_num_threads()
        if self.device.type == "cpu" and self.state.threads not in (None, threads):
            self.display.note(
                f"trained with {self.state.threads} threads so far, now with {threads}: the last bits of all numbers "
                f"will differ from those of an uninterrupted run; --training.threads {self.state.threads} keeps them"
            )
        self.state.threads = threads

    def _load(self) -> None:
        checkpoint.clean(self.run.checkpoints)
        found, skipped = checkpoint.newest(self.run.checkpoints)
        for path, why in skipped:
            self.display.note(f"{path.name} is damaged ({why}): going on from an older one")
        self.saved = -1
        if found is None:
            if self.run.log.exists():
                self.run.rewind(0)
            return
        self.state, facts = _read_state(found, self.optimizer)
        checkpoint.check_dtypes(found.tensors["model"], self.task.model, found.path)
        try:
            self.task.model.load_state_dict(found.tensors["model"])
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise checkpoint.CheckpointError(f"{found.path} does not fit the sizes in run.json: {reason}") from error
        told = any("states" in group for group in facts["groups"])
        if self.state.step and not found.tensors["optimizer"] and not told:
            raise checkpoint.CheckpointError(f"{found.path}: has no optimizer state, which training needs to go on")
        checkpoint.unpack_optimizer(self.optimizer, self.task.model, found.tensors["optimizer"], facts)
        self.sums["plain"] += self.state.loss_sum
        self.sums["tokens"] += self.state.loss_tokens
        self.sums["batches"] += self.state.batches
        for name, value in self.state.statistics.items():
            self.sums["statistics"][name] = torch.tensor(value, dtype=torch.float64, device=self.device)
        self._rewind_log()
        self.saved = self.state.step
        self.display.note(f"going on from step {self.state.step}")

    def _rewind_log(self) -> None:
        """Cuts the log to the step of the checkpoint, and says what of it is lost."""
        was_there = self.run.log.exists()
        kept = self.run.rewind(self.state.step)
        last = max((record["step"] for record in kept), default=0)
        if last < self.state.logged or (not was_there and self.state.step):
            what = f"ends at step {last}" if was_there else "is missing"
            self.display.note(
                f"{self.run.log} {what}, the checkpoint is of step {self.state.step}: what was logged between is lost"
            )
        is_planned = self.plan is not None and 0 < self.plan.measured <= self.state.step
        if is_planned and not any(record["event"] == "plan" for record in kept):
            self.append(plans.record(self.plan))

    def _average(self) -> None:
        if self.config.average:
            average(self.run, self.config.average, self._scheduled)
            averaged = self.run.find("average").tensors["model"]
            self.task.model.load_state_dict(averaged)
            self.task.model.eval()
            with torch.inference_mode(), self._precision():
                metrics, _ = self.task.evaluate(self._heed)
            record = {"event": "average", "step": self.state.step, "epoch": self.state.epoch, **metrics}
            self.append(record)
            self.display.evaluated(record, [], False)

    # signals

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT are noted, and heeded between batches; the second one ends the program at once."""

        def note(number: int, _: Any) -> None:
            if self.signal is not None:
                os._exit(128 + number)
            self.signal = number

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heed(self) -> None:
        if self.signal is not None:
            if self.saved != self.state.step:
                self._save()
            raise Stopped(self.signal, self.state.step)


def average(run: Run, count: int, scheduled: Callable[[int], bool] = lambda step: True) -> list[str]:
    """Writes checkpoints/average, the mean of the newest `count` checkpoints; returns their names."""
    names = [name for name in checkpoint.names(run.checkpoints) if scheduled(int(name.removeprefix("step-")))]
    if count < 1:
        raise ValueError(f"give at least one checkpoint to average, got {count}")
    names = names[-count:]
    if not names:
        raise ValueError(f"{run.folder} has no checkpoints to average")
    tensors = checkpoint.average([run.checkpoints / name for name in names])
    step = int(names[-1].removeprefix("step-"))
    checkpoint.write(run.checkpoints, "average", {"model": tensors}, {"step": step, "averaged": names})
    return names


def _by_layer(sums: dict[str, Tensor], batches: int) -> dict[str, dict[str, Any]]:
    """Means of what the layers told, {layer: {name: a number or a list of them}}."""
    layers: dict[str, dict[str, Any]] = {}
    for whole, value in sums.items():
        layer, name = whole.rsplit(".", 1)
        layers.setdefault(layer, {})[name] = (value / batches).round(decimals=4).tolist()
    return layers


def _is_like(value: Any, own: Any) -> bool:
    """Whether an option of an optimizer may be what a file says: of the kind that it is now."""
    if isinstance(own, tuple | list):
        return isinstance(value, list) and len(value) == len(own) and all(map(_is_like, value, own))
    if isinstance(own, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(own, bool)
    return not isinstance(own, int | float) or (isinstance(value, int | float) and math.isfinite(value))


def _read_state(found: checkpoint.Checkpoint, optimizer: torch.optim.Optimizer) -> tuple[State, dict[str, Any]]:
    """Where a run stands, and what is said of its optimizer; a state that training cannot go on from is refused."""
    values = {name: value for name, value in found.state.items() if name not in ("optimizer", "drawn")}
    try:
        state = from_json(State, values)
        if found.path.name.lstrip(".") != checkpoint.step_name(state.step):
            raise ValueError(f"it is of step {state.step}, and the checkpoint is {found.path.name}")
        for field in dataclasses.fields(state):
            value = getattr(state, field.name)
            if isinstance(value, int | float) and not 0 <= value < math.inf and field.name != "best":
                raise ValueError(f"{field.name} must be a number from 0, got {value}")
        for name, value in state.statistics.items():
            numbers = value if isinstance(value, list) else [value]
            if "." not in name or not all(isinstance(number, int | float) for number in numbers):
                raise ValueError(f"statistics must be numbers by LAYER.NAME, got {name!r}: {reprlib.repr(value)}")
        facts = found.state.get("optimizer")
        groups = facts.get("groups") if isinstance(facts, dict) else None
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise ValueError("it does not say the groups of the optimizer")
        for name, value in (option for group in groups for option in dict(group.get("options", {})).items()):
            if not _is_like(value, optimizer.param_groups[0].get(name)):
                raise ValueError(f"{name} of the optimizer cannot be {reprlib.repr(value)}")
    except (ValueError, TypeError, OverflowError) as error:
        raise checkpoint.CheckpointError(f"{found.path}/state.json is damaged: {error}") from error
    return state, facts


def _better(metric: str, value: float, than: float) -> bool:
    return value < than if metric in LOWER_IS_BETTER else value > than


def _draw(seed: int, step: int) -> int:
    """A seed for each step: no two steps of a run, and no two runs, share one but by chance."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step}".encode(), digest_size=8).digest(), "little")


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _memory(device: torch.device) -> int:
    """Bytes: the most a GPU held, or what the process holds now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
