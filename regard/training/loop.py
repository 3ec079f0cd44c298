"""The training loop, one for every task.

Every draw is a function of the seed and the step, and every batch of the seed, the epoch and its index. A checkpoint
therefore needs weights, optimizer and a few numbers, and a run that resumes from one repeats the bits of a run that was
never interrupted. Whether a step is evaluated and saved follows from the step alone, and an interrupted evaluation is
repeated. `Loop._update` is one update of the weights.
"""

import dataclasses
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from regard.core.allocator import hand_back_memory
from regard.core.draws import RedrawnLayers, list_redrawn, seed_generators
from regard.core.numeric import NonFinite
from regard.training import checkpoint
from regard.training import plan as plans
from regard.training.averaging import average_run
from regard.training.compiling import compile_loss
from regard.training.config import TrainingConfig
from regard.training.display import Display
from regard.training.distributed.tensors import full, is_finite, placed_like
from regard.training.distributed.world import Alone, World
from regard.training.ema import Ema
from regard.training.graphs import CudaGraphs
from regard.training.loss import Loss
from regard.training.optimizer_state import pack_optimizer, unpack_optimizer
from regard.training.optimizers import build_optimizer
from regard.training.recomputing import recompute_layers
from regard.training.run import Run
from regard.training.schedule import learning_rate
from regard.training.signals import Signals, Stopped
from regard.training.state import State, read_state
from regard.training.sums import LogSums
from regard.training.task import TrainingTask

LOWER_IS_BETTER = ("loss",)
AHEAD = ("cuda",)  # devices at whose work the host does not stand by
REMEDY = "A smaller learning_rate, a longer warmup or a smaller clip"  # for training that diverges
PLAIN = "plain"  # the loss of a batch among its results; statistics of layers have a dot in their names


class TrainingError(RuntimeError):
    """Training cannot continue. The message says why, and which checkpoint remains."""


def train(
    task: TrainingTask,
    config: TrainingConfig,
    run: Run,
    display: Display,
    *,
    world: World | None = None,
    before: float = 0.0,
    changes: dict[str, Any] | None = None,
) -> State:
    """Trains until the steps, the patience or stop_at is reached, from the newest good checkpoint if there is one.
    `world` are the processes that share the work, `before` is the number of seconds that preparing took, `changes` are
    settings that were changed, for the log."""
    loop = Loop(task, config, run, display, world)
    loop.restore()
    if changes:
        loop.append({"event": "change", "step": loop.state.step, "changes": changes})
    return loop.train(before)


class Loop:
    """One run in progress."""

    def __init__(
        self, task: TrainingTask, config: TrainingConfig, run: Run, display: Display, world: World | None = None
    ):
        self.task, self.requested, self.run, self.display = task, config, run, display
        self.world: World = world or Alone()
        display.unit = task.speed_unit
        self.steps_per_epoch = task.batches.count(0) / config.accumulate
        self.plan = plans.read(run) or plans.plan_without_timing(config, self.steps_per_epoch)
        self.config = config if self.plan is None else self.plan.apply(config)
        self.step_seconds: list[float] = []  # of the steps that are timed for a plan
        self.device = next(task.model.parameters()).device
        self.width: int = task.model.config.width
        self.state = State()
        self.saved = -1  # the step of the newest checkpoint
        self.began = 0.0  # a reading of the clock: when the run would have begun without interruptions
        if config.recompute:
            recompute_layers(task.model)
        self.loss: Callable[[Any, float], Loss] = self.world.wrap(
            task.model, compile_loss(task) if config.compile else task.loss
        )
        # communication is not captured, and neither are the random numbers of a second computation
        communicates = self.world.size > 1 or config.sharded
        uses_graphs = config.graphs and self.device.type == "cuda" and not (communicates or config.recompute)
        self.optimizer = build_optimizer(task.model, config, captured=uses_graphs)
        # found once: a walk over all modules at each step would keep a GPU waiting
        self.parameters = list(task.model.parameters())
        ahead = 1 if self.device.type in AHEAD else 0
        self.redrawn = RedrawnLayers(task.model, seed=config.seed, ahead=ahead)
        self.ema = None if config.ema is None else Ema(task.model, config.ema)
        self.ahead: tuple[tuple[int, int], Any] | None = None  # a place in the data, and its batch
        self.drawn = -1  # the step whose projections were put into the model ahead of it
        self.sums = LogSums.zero(self.device, time.monotonic())
        self.signals = Signals()
        self.cuda_graphs: CudaGraphs | None = None
        if uses_graphs:
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
            self.cuda_graphs = CudaGraphs(self._backward, self.device, display.note)
            torch.cuda.synchronize(self.device)

    def train(self, before: float = 0.0) -> State:
        self.began = time.monotonic() - self.state.seconds - before
        if self.plan is not None and not self.run.has(plans.FILE):
            plans.write(self.run, self.plan)
        self.display.begin(self.state.step, self.config.steps)
        self.task.model.train()
        stream = nullcontext() if self.cuda_graphs is None else torch.cuda.stream(self.cuda_graphs.stream)
        try:
            deterministic = _deterministic(self.config.deterministic)
            with self.signals.remembered(), stream, deterministic, closing(self.redrawn):
                while True:
                    self._evaluate_and_save()
                    self._check_signals()
                    if self._is_finished():
                        break
                    self._update()
                self.world.finish(self.run)
                self._average()
        finally:
            self.display.end()
        return self.state

    # one update

    def _update(self) -> None:
        """One update of the weights, from the next batches to the line of the log."""
        began, place = time.monotonic(), (self.state.epoch, self.state.batch)
        self._seed_draws()
        batches = [self._next_batch() for _ in range(self.config.accumulate)]
        tokens = sum(map(self.task.count_tokens, batches))
        loss, statistics = self._accumulate_gradients(batches, tokens)
        unread_norm = self._gradient_norm()
        self.sums.accumulate_loss(loss, tokens, sum(map(self.task.count_tokens_read, batches)))
        self._read_ahead()
        # here the host waits for the GPU, and from here to the next step's graph the GPU waits for the host
        self.sums.gradient_norm = norm = float(unread_norm)
        if math.isfinite(norm):
            self._clip_gradients(norm)
            self._step_optimizer()
            if self.ema is not None:
                self.ema.update(self.state.step + 1)
            self._update_loss_scale()
            self.sums.accumulate_statistics(statistics)
        else:
            self._skip_update(place, batches, loss)
        self._zero_gradients()
        self.state.step += 1
        self.display.advance(self.state.step)
        if self.state.step % self.config.log_every == 0:
            self._log(place)
        self._plan_when_timed(time.monotonic() - began)

    def _seed_draws(self) -> None:
        """Makes all that is random in a step, dropout and redrawn projections, a function of the seed and the step."""
        if not self.task.model.training:
            self.task.model.train()
        seed_generators(step_seed(self.config.seed, self.state.step, self.world.rank), self.device)
        if self.drawn != self.state.step:
            self.redrawn.redraw(self.state.step, self.config.steps)

    def _next_batch(self) -> Any:
        state = self.state
        place, ahead = (state.epoch, state.batch), self.ahead
        batch = self.task.batches.get(*place) if ahead is None or ahead[0] != place else ahead[1]
        self.ahead = None
        state.batch += 1
        if state.batch == self.task.batches.count(state.epoch):
            state.epoch, state.batch = state.epoch + 1, 0
        return batch

    def _read_ahead(self) -> None:
        """Makes the next batch, and hands the GPU the projections that a thread has drawn for it, while the GPU is at
        work on the present one."""
        place, step = (self.state.epoch, self.state.batch), self.state.step + 1
        if self.device.type not in AHEAD or step == self.config.steps:
            return
        self.ahead = (place, self.task.batches.get(*place))
        # an evaluation and a checkpoint are of what the present step has drawn
        if not self._has_own_checkpoint(step):
            self.redrawn.redraw(step, self.config.steps)
            self.drawn = step

    def _accumulate_gradients(self, batches: list[Any], tokens: int) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """Adds the gradients of the mean loss over all tokens of the batches, of which this process computes some rows,
        times the loss scale. Returns the loss without label smoothing, summed over the tokens, and the statistics of
        the layers for each batch."""
        weights = (self._loss_scale / tokens, self._loss_scale * self.config.auxiliary / len(batches))
        if self.cuda_graphs is not None:
            results = [self.cuda_graphs(batch, weights) for batch in batches]
        else:
            results = []
            for number, batch in enumerate(batches, 1):
                with self.world.accumulating(is_last=number == len(batches)):
                    results.append(self._backward(batch.to(self.device), weights))
        first, *others = (result.pop(PLAIN) for result in results)
        return self.world.sum(sum(others, start=first)), results

    def _backward(self, batch: Any, weights: Sequence[float] | Tensor) -> dict[str, Tensor]:
        """Adds the gradients of a batch on the device. `weights` are those of a token's loss and of the auxiliary loss.
        Returns the loss without label smoothing, and the statistics of the layers."""
        share = self.world.share(self.task.prepare(batch))
        with self.world.spread(share):
            with self._precision():
                loss = self.loss(share.batch, self.config.label_smoothing)
            total = loss.total * (weights[0] * share.weight)
            (total if loss.auxiliary_loss is None else total + loss.auxiliary_loss * weights[1]).backward()
        plain = loss.plain if share.weight else torch.zeros_like(loss.plain)
        return {PLAIN: plain, **(loss.statistics or {})}

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def _gradient_norm(self) -> Tensor:
        """A number on the device, which may not have computed it yet."""
        return full(nn.utils.get_total_norm(self._gradients(), foreach=True)) / self._loss_scale

    def _clip_gradients(self, norm: float) -> None:
        """Undoes the loss scale, and scales a gradient down whose norm is above `clip`."""
        shrink = 1.0 if self.config.clip is None else min(1.0, self.config.clip / (norm + 1e-6))
        if shrink / self._loss_scale != 1:
            # PyTorch has no public name for one kernel over many tensors
            torch._foreach_mul_(self._gradients(), shrink / self._loss_scale)  # pyright: ignore[reportPrivateImportUsage]

    def _step_optimizer(self) -> None:
        learning_rate = self._learning_rate(self.state.step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("share", 1.0)
        self.optimizer.step()

    def _zero_gradients(self) -> None:
        if self.cuda_graphs is None:
            self.optimizer.zero_grad()
        else:
            # CUDA graphs write to where the gradients were when they were captured: these are filled with zeros
            torch._foreach_zero_(self._gradients())  # pyright: ignore[reportPrivateImportUsage]

    def _learning_rate(self, step: int) -> float:
        measured = 0 if self.plan is None else self.plan.measured
        return learning_rate(self.config, step, self.width, None if self.config.steps is None else measured)

    # precision

    def _precision(self) -> AbstractContextManager[Any]:
        if self.config.precision == "float32":
            return nullcontext()
        # a CUDA graph must cast the weights anew each time it is replayed
        caches = self.cuda_graphs is None
        return torch.autocast(self.device.type, getattr(torch, self.config.precision), cache_enabled=caches)

    def _uncompiled(self) -> AbstractContextManager[Any]:
        """For evaluations: the states of decoding would be compiled again and again."""
        return torch.compiler.set_stance("force_eager") if self.config.compile else nullcontext()

    @property
    def _loss_scale(self) -> float:
        return self.state.loss_scale.value if self.config.precision == "float16" else 1.0

    def _update_loss_scale(self) -> None:
        if self.config.precision == "float16":
            self.state.loss_scale.update()

    def _skip_update(self, place: tuple[int, int], batches: list[Any], loss: Tensor) -> None:
        """Halves the loss scale if a float16 gradient overflowed. Whatever else is not finite ends the training."""
        parameters = dict(self.task.model.named_parameters())
        weights = [name for name, parameter in parameters.items() if not is_finite(parameter)]
        may_shrink = self.config.precision == "float16" and self.state.loss_scale.can_shrink()
        if may_shrink and not weights and loss.isfinite():
            self.state.loss_scale.shrink()
            return
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        broken = [name for name, gradient in gradients.items() if not is_finite(gradient)]
        if not broken:
            # each is finite, but not the sum of their squares
            broken = [max(gradients, key=lambda name: float(full(gradients[name].norm())))]
        where = f"weight {weights[0]}" if weights else f"the gradient of {broken[0]}"
        others = len(weights or broken) - 1
        what, which = self.task.describe_rows([int(index) for batch in batches for index in batch.indices])
        shown = ", ".join(map(str, which[:10])) + (f" and {len(which) - 10} more" if len(which) > 10 else "")
        raise TrainingError(
            f"step {self.state.step + 1}: {where} is not finite{f' (and {others} more)' if others else ''}; "
            f"loss {float(loss):g}; epoch {place[0]}, batch {place[1]}, {what} {shown}. Nothing of this step was "
            f"saved, {self._describe_newest()}. {REMEDY} usually helps"
        )

    def _describe_newest(self) -> str:
        """Which checkpoint remains when training fails."""
        names = checkpoint.names(self.run.checkpoints)
        return f"the last good checkpoint is {names[-1]}" if names else "there is no checkpoint yet"

    # the plan of a run whose steps were left open

    def _plan_when_timed(self, seconds: float) -> None:
        """Makes the plan as soon as enough steps were timed; `seconds` are those of the latest. A resumed run has its
        plan, and only logs it again at the same step."""
        if self.config.steps is not None:
            if self.plan is not None and self.state.step == self.plan.measured:
                self.append(plans.log_record(self.plan))
            return
        self.step_seconds.append(self.world.broadcast(seconds))
        most = plans.most_steps(self.config, self.task.epochs, self.steps_per_epoch)
        # without the slowest, which may have waited for a compiler
        timed = sum(self.step_seconds) - max(self.step_seconds)
        if plans.is_timed_enough(len(self.step_seconds), timed, self.config, most):
            self._make_plan(most)

    def _make_plan(self, most: int) -> None:
        """Makes the plan from the later half of the timed steps, an evaluation and a checkpoint, with at most this
        number of steps unless minutes were asked for."""
        began = time.monotonic()
        self.display.note("timing an evaluation and a checkpoint for the plan ...", fleeting=True)
        evaluation, evaluated = self._time_validation(), time.monotonic()
        self._save()
        saved = time.monotonic()
        late = self.step_seconds[len(self.step_seconds) // 2 :]
        speed = plans.Speed(max(1e-9, sum(late) / len(late)), evaluation, saved - evaluated)
        plan = plans.make_plan(self.requested, self.state.step, saved - self.began, speed, most)
        self.plan = self.world.broadcast(plan)
        plans.write(self.run, self.plan)
        self.config = self.plan.apply(self.requested)
        self.append(plans.log_record(self.plan))
        self.display.planned(self.plan.steps, plans.describe(self.plan, self.steps_per_epoch))
        self.sums.since += time.monotonic() - began

    # what is due

    def _evaluation_due(self, step: int) -> bool:
        every = self.config.evaluate_every
        if step == 0 or every is None:
            return False
        # a run that resumes with a plan does at the steps before it what it did when there was none
        if self.plan is not None and self.requested.evaluate_every is None and step <= self.plan.measured:
            return False
        return step % every == 0 or step == self.config.steps

    def _has_own_checkpoint(self, step: int) -> bool:
        """Whether a step has a checkpoint of its own, however often the run was interrupted."""
        every = self.config.save_every
        return step > 0 and ((every is not None and step % every == 0) or self._evaluation_due(step))

    def _evaluate_and_save(self) -> None:
        state, began = self.state, time.monotonic()
        if self._evaluation_due(state.step) and state.evaluated != state.step:
            self._evaluate()
            self._save()
        elif state.step != self.saved and self._has_own_checkpoint(state.step):
            self._save()
        self.sums.since += time.monotonic() - began

    def _is_finished(self) -> bool:
        config, state = self.config, self.state
        if config.patience is not None and state.since_best >= config.patience:
            self.display.note(f"stopping: {state.since_best} evaluations without a better {config.metric}")
            return True
        goal, best = config.stop_at, state.best
        if goal is not None and best is not None and not is_better(config.metric, goal, best):
            self.display.note(f"stopping: {config.metric} {best:.4g} reaches stop_at {goal:g}")
            return True
        return config.steps is not None and state.step >= config.steps

    def _check_signals(self) -> None:
        """Saves the run and ends the training if a signal came."""
        received = self.world.first_signal(self.signals.received)
        if received is not None:
            if self.saved != self.state.step:
                self._save()
            raise Stopped(received, self.state.step)

    # evaluation

    def _measure_validation(
        self, check: Callable[[], None] | None = None
    ) -> tuple[dict[str, float], list[dict[str, str]]]:
        self.task.model.eval()
        averaged = nullcontext() if self.ema is None else self.ema.applied()
        try:
            with averaged, self.world.gathered(), torch.inference_mode(), self._precision(), self._uncompiled():
                # every process evaluates all of it, and what the main one found counts
                return self.world.broadcast(self.task.evaluate(check or self._check_signals))
        except NonFinite as error:
            also = "; so does float32 instead of float16" if self.config.precision == "float16" else ""
            raise TrainingError(
                f"step {self.state.step}: the evaluation failed: {error.what}. The learning rate is probably too "
                f"high; {self._describe_newest()}. {REMEDY} usually helps{also}"
            ) from error
        finally:
            self.task.model.train()

    def _time_validation(self) -> float:
        """Seconds that an evaluation takes. A long one is cut short, and counted as twice the time until then."""
        began, limit = time.monotonic(), plans.longest_trial_evaluation(self.requested)

        def check() -> None:
            self._check_signals()
            if self.world.broadcast(time.monotonic() - began > limit):
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
        if math.isfinite(value) and (state.best is None or is_better(config.metric, value, state.best)):
            state.best, state.best_step, state.since_best = value, state.step, 0
        else:
            state.since_best += 1
        record = {"event": "evaluation", "step": state.step, "epoch": state.epoch, **metrics}
        self.append(record)
        self.display.evaluated(record, samples, state.best_step == state.step)

    def _average(self) -> None:
        if self.config.average:
            if self.world.is_main:
                average_run(self.run, self.config.average, self._has_own_checkpoint)
            self.world.barrier()
            self._load_weights(self.run.find("average"))
            self.ema = None
            metrics, _ = self._measure_validation()
            record = {"event": "average", "step": self.state.step, "epoch": self.state.epoch, **metrics}
            self.append(record)
            self.display.evaluated(record, [], False)

    # the log

    def _log(self, place: tuple[int, int]) -> None:
        """Writes a line of the log. `place` is the epoch and the first batch of the latest update."""
        state, sums = self.state, self.sums
        now = time.monotonic()
        record = {
            "event": "step",
            "step": state.step,
            "epoch": place[0],
            "batch": place[1],
            "loss": float(sums.loss) / sums.tokens,
            "learning_rate": self._learning_rate(state.step),
            "norm": sums.gradient_norm if math.isfinite(sums.gradient_norm) else None,
            f"{self.task.speed_unit}_per_second": round(sums.tokens_read / max(1e-9, now - sums.since)),
            "memory": _memory(self.device),
            "seconds": round(now - self.began, 1),
        }
        if sums.statistics:
            record["layers"] = sums.means_by_layer()
        self.append(record)
        self.display.logged(record)
        hand_back_memory()
        self.sums = LogSums.zero(self.device, time.monotonic())

    def append(self, record: dict[str, Any]) -> None:
        """Adds a line to the log."""
        self.run.append(record)
        self.state.logged = max(self.state.logged, record["step"])

    # checkpoints

    def _save(self) -> None:
        model, state = self.task.model, self.state
        for name, part in model.state_dict().items():
            if not is_finite(part):
                raise TrainingError(f"step {state.step}: {name} is not finite; nothing was saved")
        state.seconds = time.monotonic() - self.began
        state.loss_sum, state.loss_tokens = float(self.sums.loss), self.sums.tokens
        state.statistics = {name: value.tolist() for name, value in self.sums.statistics.items()}
        state.batches = self.sums.batches
        moments, facts = pack_optimizer(self.optimizer, model)
        tensors = {"model": dict(model.state_dict()), "optimizer": moments}
        if self.ema is not None:
            # whoever uses the run takes `model`, and training resumes from `weights`
            tensors["weights"] = {name: tensors["model"][name] for name in self.ema.state_dict()}
            tensors["model"] |= self.ema.state_dict()
        self.world.save(
            self.run,
            checkpoint.step_name(state.step),
            tensors,
            dataclasses.asdict(state) | {"optimizer": facts, "drawn": list_redrawn(model)},
        )
        self.saved = state.step
        steps = [checkpoint.step_of(name) for name in checkpoint.names(self.run.checkpoints)]
        own = [step for step in steps if self._has_own_checkpoint(step) and step <= state.step][-self.config.keep :]
        kept = {checkpoint.step_name(step) for step in (*own, state.step, state.best_step) if step is not None}
        self.run.prune_checkpoints(kept)

    def restore(self) -> None:
        """Loads the newest good checkpoint, and warns of what will differ from an uninterrupted run."""
        self._load()
        threads = torch.get_num_threads()
        if self.device.type == "cpu" and self.state.threads not in (None, threads):
            self.display.note(
                f"trained with {self.state.threads} threads so far, now with {threads}: the last bits of all numbers "
                f"will differ from those of an uninterrupted run; --training.threads {self.state.threads} keeps them"
            )
        before, now = self.state.processes, self.world.size
        if self.state.step and before != now:
            self.display.note(f"processes: {now}, were {before}: the last bits of all numbers will differ, and dropout")
        self.state.threads, self.state.processes = threads, now

    def _load(self) -> None:
        """Loads the newest good checkpoint; none: the run begins, and its log is empty."""
        self.run.clean_checkpoints()
        self.world.barrier()
        found, skipped = checkpoint.newest(self.run.checkpoints)
        for path, why in skipped:
            self.display.note(f"{path.name} is damaged ({why}): resuming from an older one")
        if found is None:
            if self.run.log.exists():
                self.run.rewind(0)
            return
        self.state, facts = read_state(found, self.optimizer)
        self._load_weights(found)
        if self.ema is not None:
            self.ema.restore(found)
        says_states = any("states" in group for group in facts["groups"])
        if self.state.step and not found.tensors["optimizer"] and not says_states:
            raise checkpoint.CheckpointError(f"{found.path}: has no optimizer state: training cannot be resumed")
        unpack_optimizer(self.optimizer, self.task.model, found.tensors["optimizer"], facts)
        self._restore_sums()
        self._rewind_log()
        self.saved = self.state.step
        self.display.note(f"resuming from step {self.state.step}")

    def _load_weights(self, found: checkpoint.Checkpoint) -> None:
        weights, own = found.tensors["model"], self.task.model.state_dict()
        checkpoint.check_dtypes(weights, self.task.model, found.path)
        try:
            placed = {name: placed_like(x, own[name]) if name in own else x for name, x in weights.items()}
            self.task.model.load_state_dict(placed)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise checkpoint.CheckpointError(
                f"{found.path} does not fit the model config in run.json: {reason}"
            ) from error

    def _restore_sums(self) -> None:
        self.sums.loss += self.state.loss_sum
        self.sums.tokens += self.state.loss_tokens
        self.sums.batches += self.state.batches
        for name, value in self.state.statistics.items():
            self.sums.statistics[name] = torch.tensor(value, dtype=torch.float64, device=self.device)

    def _rewind_log(self) -> None:
        """Cuts the log at the step of the checkpoint, and warns if lines before that step are lost."""
        was_there = self.run.log.exists()
        kept = self.run.rewind(self.state.step)
        last = max((record["step"] for record in kept), default=0)
        if last < self.state.logged or (not was_there and self.state.step):
            what = f"ends at step {last}" if was_there else "is missing"
            self.display.note(
                f"{self.run.log} {what}, the checkpoint is of step {self.state.step}: the lines between are lost"
            )
        is_logged = any(record["event"] == "plan" for record in kept)
        if self.plan is not None and 0 < self.plan.measured <= self.state.step and not is_logged:
            self.append(plans.log_record(self.plan))


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """A seed for each step and process. Two steps, or two runs of different seeds, have the same one only by chance."""
    numbers = f"{seed} {step} {rank}" if rank else f"{seed} {step}"
    return int.from_bytes(hashlib.blake2b(numbers.encode(), digest_size=8).digest(), "little")


def is_better(metric: str, value: float, than: float) -> bool:
    """Whether a value of a metric is better than another."""
    return value < than if metric in LOWER_IS_BETTER else value > than


@contextmanager
def _deterministic(enabled: bool) -> Iterator[None]:
    if not enabled:
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
    """Bytes: the peak of a GPU's allocated memory, or what the process holds now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
