"""Measures one layer: a training step, a forward pass, a decoding step, peak memory. Each contestant has a process of
its own, in which a `MeasuredLayer` waits for its turns.

Before its turns a contestant tries shorter lengths. Where the length asked for would take more time or memory than
there is, going by them, nothing of that length runs, and the estimate is the answer.
"""

import ctypes
import math
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import regard
from regard.compare.count import count_parameters, count_training, state_bytes
from regard.core.allocator import return_large_blocks
from regard.core.rows import Memory, Rows
from regard.core.shape import Role
from regard.core.state import with_capacity
from regard.layers.attention.base import Attention

WARM_UP_LENGTH = 64  # tokens of the steps that start threads and libraries
WARM_UP_CALLS, WARM_UP_SECONDS = 3, 0.5  # before the first turn: both, unless calls are long
LONG_CALL = 1.0  # seconds: one call of this length is warm-up enough
TRIED_CALLS, TRIED_SECONDS = 10, 0.3  # training steps of a shorter length, of which the fastest counts: at most both
DECODING_STEPS = 5  # decoding steps of a turn, of which the median counts; one where a step is long
LENGTH_DIVISORS = (32, 8, 4)  # parts of the length that are tried first
ESTIMATE_MARGIN = 4  # margin of an estimate from a very short length
# margin of the time that the shortest one predicts: what a call costs beside its arithmetic does not grow
FIRST_ESTIMATE_MARGIN = 16
TABLES = 3  # times the bytes of the weights that a training step takes at any length, at most
MAX_EXPONENT = 3.0  # exponent that an estimate assumes at most
FLUSH_BYTES = 256 * 2**20  # bytes written between calls on a GPU, more than its L2 cache has


@dataclass(frozen=True)
class Setting:
    """What is measured, and how much it may take."""

    spec: str
    role: Role
    length: int
    width: int = 512
    heads: int = 8
    batch: int = 1
    part: str = "layer"  # or "mixing": from projected queries, keys and values on
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 0  # 0: as PyTorch chooses
    seconds: float = math.inf  # that a training step may take
    room: float = math.inf  # bytes it may take
    decodes: bool = True
    counts: bool = True  # False: only to take turns
    screened: bool = False  # shorter lengths were tried before


class CannotMeasure(Exception):
    """Why there is no number: a status, and a sentence."""

    def __init__(self, status: str, note: str):
        super().__init__(note)
        self.status, self.note = status, note


class MeasuredLayer:
    """A layer with its inputs, in the process that it has for itself."""

    def __init__(self, setting: Setting):
        self.setting = setting
        if setting.threads:
            torch.set_num_threads(setting.threads)
        torch.manual_seed(0)
        self.device, self.dtype = torch.device(setting.device), getattr(torch, setting.dtype)
        try:
            layer = regard.attention(setting.spec, width=setting.width, heads=setting.heads, role=setting.role)
        except ValueError as error:
            raise CannotMeasure("refused", str(error)) from error
        self.layer: Attention = layer.to(self.device, self.dtype)
        self.state: Any = None
        self.steps = DECODING_STEPS
        self.train_step = self.forward_pass = lambda: None

    # what is called

    def _call(self, length: int) -> tuple[Callable[[], tuple[Tensor, Tensor | None]], Tensor, list[Tensor]]:
        """The forward pass over `length` tokens, its input, and everything that gets a gradient."""
        if self.setting.part == "mixing":
            return self._mixing_call(length)
        B, E = self.setting.batch, self.setting.width
        x = torch.randn(B, length, E, device=self.device, dtype=self.dtype, requires_grad=True)
        memory = Memory(x, None) if self.setting.role == "cross" else None

        def forward() -> tuple[Tensor, Tensor | None]:
            out = self.layer.forward_packed(x, Rows.full(x), memory=memory)
            return out.y, out.auxiliary_loss

        return forward, x, [x, *self.layer.parameters()]

    def _mixing_call(self, length: int) -> tuple[Callable[[], tuple[Tensor, Tensor | None]], Tensor, list[Tensor]]:
        """Attention alone, on projected inputs in the memory layout of projections: tokens before heads."""
        layer: Any = self.layer
        if not hasattr(layer, "attend_projected"):
            raise CannotMeasure("refused", "it is no function of projected inputs: measure it as a layer")
        B, H, D = self.setting.batch, layer.shape.heads, layer.shape.head_width
        kinds = getattr(layer, "inputs", {"q": "query", "k": "key", "v": "value"})

        def leaf(kind: str) -> Tensor:
            size = (B, length, H) if kind == "gate" else (B, length, H, D)
            return torch.randn(*size, device=self.device, dtype=self.dtype).transpose(1, 2).requires_grad_()

        inputs = {name: leaf(kind) for name, kind in kinds.items()}
        query = {name: part for name, part in inputs.items() if kinds[name] == "query"}
        source = {name: part for name, part in inputs.items() if kinds[name] != "query"}
        tokens = torch.zeros(B, length, 1, device=self.device)
        rows, memory = Rows.full(tokens), Memory(tokens, None) if self.setting.role == "cross" else None

        def forward() -> tuple[Tensor, Tensor | None]:
            return layer.attend_projected(rows, query, source, None, memory)[0].transpose(1, 2), None

        values = next(part for name, part in inputs.items() if kinds[name] not in ("query", "gate"))
        return forward, values, [*inputs.values(), *layer.parameters()]

    def _training(self, length: int) -> Callable[[], None]:
        """A training step: forward and backward, from the input to all gradients."""
        forward, _, leaves = self._call(length)
        shape, B = self.layer.shape, self.setting.batch
        whole = self.setting.part == "layer"
        size = (B, length, shape.out_width) if whole else (B, length, shape.heads, shape.head_width)
        grad = torch.randn(*size, device=self.device, dtype=self.dtype)

        def step() -> None:
            y, auxiliary_loss = forward()
            # of a text of one segment there may be nothing to learn from
            if auxiliary_loss is None or not auxiliary_loss.requires_grad:
                y.backward(grad)
            else:
                torch.autograd.backward([y, auxiliary_loss], [grad, None])
            for leaf in leaves:
                leaf.grad = None

        return step

    # before the turns

    def prepare(self) -> dict[str, Any]:
        """Everything that is measured once: peak memory, counts, the size of the state. Ends warm."""
        setting = self.setting
        self.layer.train()
        self.seconds_of(self._training(min(WARM_UP_LENGTH, setting.length)))
        found: dict[str, Any] = {}
        if setting.counts:
            if not setting.screened:
                self._check_limits()
            found = self._measure_once()
        else:
            self.train_step = self._training(setting.length)
        self._evaluating(setting.length)
        if setting.decodes and setting.part == "layer":
            found["decodes"] = self._start()
            if found["decodes"] and setting.counts:
                found["counted"]["state_bytes"] = state_bytes(self.state)
            self.state = with_capacity(self.state, setting.length + DECODING_STEPS)
        found["seconds"] = self._warm_up()
        return found

    def _measure_once(self) -> dict[str, Any]:
        """Peak memory of a training step in a process that took only short ones, and what is counted of a step."""
        setting = self.setting
        release_memory()
        self.train_step = self._training(setting.length)
        cap_memory(setting.room, self.device)
        _, rise = self.cost_of(self.train_step)
        found: dict[str, Any] = {"peak": rise}
        forward, x, leaves = self._call(setting.length)
        at = setting.length - 1 if setting.role == "causal" else setting.length // 2
        with return_large_blocks():
            counted = count_training(forward, x, at)
        for leaf in leaves:
            leaf.grad = None
        return found | {
            "backend": counted.pop("backend"),
            "counted": counted | {"parameters": count_parameters(self.layer), "tokens": setting.length},
        }

    def _evaluating(self, length: int) -> None:
        forward, _, _ = self._call(length)

        def run() -> None:
            with torch.inference_mode():
                forward()

        self.forward_pass = run

    def estimate(self) -> dict[str, float]:
        """Seconds that a training step would take at least, going by the shorter ones of the shorter lengths; and the
        longest of these. What is hopeless is tried at the shortest alone."""
        setting, facts = self.setting, self.layer.facts
        self._check_input()
        self.layer.train()
        self.seconds_of(self._training(min(WARM_UP_LENGTH, setting.length)))
        found = {"seconds": 0.0, "length": 0.0}
        for tried in self._shorter_lengths(LENGTH_DIVISORS[:2]):
            length, step = tried[-1].length, tried[-1].seconds
            # as declared: over lengths of about a window, a window grows like everything else
            seconds = step * (setting.length / length) ** facts.time.exponent
            found = {"seconds": seconds, "length": float(length)}
            memory = self._estimate_memory(tried)
            if memory > ESTIMATE_MARGIN * setting.room:
                raise CannotMeasure("memory", f"needs about {_bytes(memory)}, {_bytes(setting.room)} here")
            if seconds > FIRST_ESTIMATE_MARGIN * setting.seconds:
                break
        return found

    def _check_input(self) -> None:
        """Refuses a length whose tokens alone take more memory than there is."""
        setting = self.setting
        needed = setting.batch * setting.length * setting.width * self.dtype.itemsize
        if needed > setting.room:
            raise CannotMeasure(
                "memory", f"needs about {_bytes(needed)} for its tokens alone, {_bytes(setting.room)} here"
            )

    def _check_limits(self) -> None:
        """Refuses a length that would take too long or too much memory, going by shorter ones."""
        setting, facts = self.setting, self.layer.facts
        self._check_input()
        for tried in self._shorter_lengths(LENGTH_DIVISORS):
            lengths, times = [each.length for each in tried], [each.seconds for each in tried]
            seconds = extrapolate(times, lengths, setting.length, facts.time.exponent)
            memory = self._estimate_memory(tried)
            # the first ones only exclude what is far too slow or too large
            margin = 1 if lengths[-1] == setting.length // LENGTH_DIVISORS[-1] else ESTIMATE_MARGIN
            if memory > margin * setting.room:
                raise CannotMeasure("memory", f"needs about {_bytes(memory)}, {_bytes(setting.room)} here")
            if seconds > margin * setting.seconds:
                share = f"its share of the time allows {_time(setting.seconds)}"
                raise CannotMeasure("slow", f"about {_time(seconds)} per training step; {share}")

    def _shorter_lengths(self, parts: Sequence[int]) -> Iterator[list["Tried"]]:
        """Tries a training step at one shorter length after another: all that were tried so far, each time."""
        setting = self.setting
        tried: list[Tried] = []
        for length in (setting.length // part for part in parts if setting.length // part >= WARM_UP_LENGTH):
            step = self._training(length)
            first, rise = self.cost_of(step)
            # the first call may compile its kernels, which takes seconds once, and short ones are often disturbed
            more = 1 if first > LONG_CALL else max(2, min(TRIED_CALLS, int(TRIED_SECONDS / max(first, 1e-9))))
            seconds = min(first, *(self.seconds_of(step) for _ in range(more)))
            tried.append(Tried(length, seconds, rise))
            yield tried

    def _estimate_memory(self, tried: list["Tried"]) -> float:
        """Bytes that a training step of the whole length would take."""
        exponent, last = self.layer.facts.memory.exponent, tried[-1]
        lengths, rises = [each.length for each in tried], [each.rise for each in tried]
        # tables, their gradients and one more of their size have one size at every length
        weights = count_parameters(self.layer) * self.dtype.itemsize
        fixed = min(last.rise, TABLES * weights)
        if len(tried) > 1 and rises[0] and growth(rises, lengths) < exponent:
            slope = max(0.0, (last.rise - rises[0]) / (last.length**exponent - lengths[0] ** exponent))
            fixed = last.rise - slope * last.length**exponent
        growing = [max(1.0, rise - fixed) for rise in rises]
        return fixed + extrapolate(growing, lengths, self.setting.length, exponent)

    def _start(self) -> bool:
        """Reads the whole length into a state. Returns whether there is one."""
        setting, layer = self.setting, self.layer
        if layer.facts.state is None or setting.role == "self":
            return False
        layer.eval()
        x = torch.randn(setting.batch, setting.length, setting.width, device=self.device, dtype=self.dtype)
        with torch.inference_mode():
            if setting.role == "cross":
                self.state = layer.start(setting.batch, memory=x)
            else:
                _, self.state = layer.extend(x, layer.start(setting.batch, capacity=setting.length))
        return True

    def _warm_up(self) -> float:
        """Calls everything until it is warm. Returns the seconds of the last training step."""
        seconds = 0.0
        for call in (self.forward, self.train, self.step):
            began, calls, taken = time.perf_counter(), 0, math.nan
            while calls < WARM_UP_CALLS or time.perf_counter() - began < WARM_UP_SECONDS:
                taken = call()
                calls += 1
                if math.isnan(taken) or time.perf_counter() - began > LONG_CALL:
                    break
            if call == self.step and taken > 0.01:
                self.steps = 1
            seconds = taken if call == self.train else seconds
        return seconds

    # turns

    def turn(self) -> dict[str, float]:
        """Seconds of a forward pass, a training step and a decoding step."""
        return {"forward": self.forward(), "train": self.train(), "step": self.step()}

    def forward(self) -> float:
        """Seconds of a forward pass for inference."""
        self.layer.eval()
        return self.seconds_of(self.forward_pass)

    def train(self) -> float:
        """Seconds of a training step."""
        self.layer.train()
        return self.seconds_of(self.train_step)

    def step(self) -> float:
        """Seconds of the median decoding step; not a number where nothing decodes."""
        if self.state is None:
            return math.nan
        self.layer.eval()
        token = torch.randn(self.setting.batch, 1, self.setting.width, device=self.device, dtype=self.dtype)

        state = self.state  # of the whole length in every turn: the places behind it are written again

        def extend() -> None:
            nonlocal state
            with torch.inference_mode():
                _, state = self.layer.extend(token, state)

        return sorted(self.seconds_of(extend) for _ in range(self.steps))[self.steps // 2]

    def seconds_of(self, call: Callable[[], None]) -> float:
        """The time of a call: by the clock, on a GPU by events, with a cold L2 cache."""
        self._flush()
        return self._timed(call)

    def cost_of(self, call: Callable[[], None]) -> tuple[float, int]:
        """The time of a call, and the bytes by which memory rose in it."""
        self._flush()  # what that takes is not the call's
        before = reset_peak(self.device)
        seconds = self._timed(call)
        return seconds, max(0, peak(self.device) - before)

    def _flush(self) -> None:
        """Empties the L2 cache of a GPU."""
        if self.device.type == "cuda":
            torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device).zero_()

    def _timed(self, call: Callable[[], None]) -> float:
        if self.device.type != "cuda":
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end) / 1e3


class Tried(NamedTuple):
    """What a training step of a shorter length took."""

    length: int
    seconds: float
    rise: int  # bytes


def extrapolate(values: list[float], lengths: list[int], length: int, exponent: float) -> float:
    """The value at `length`: growth as measured over the last two lengths, at least as declared."""
    exponent = exponent if len(values) < 2 else min(MAX_EXPONENT, max(exponent, growth(values[-2:], lengths[-2:])))
    return values[-1] * (length / lengths[-1]) ** exponent


def growth(values: Sequence[float], lengths: Sequence[int]) -> float:
    """The exponent of the growth from the first to the last."""
    return math.log(max(values[-1], 1e-12) / max(values[0], 1e-12)) / math.log(lengths[-1] / lengths[0])


# memory


def release_memory() -> None:
    """Returns free memory to the system, so that what is taken next is seen as a rise."""
    if sys.platform.startswith("linux"):
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> int:
    """Lowers the high-water mark to what is held now, where the system can; what is held, in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return peak(device)


def peak(device: torch.device) -> int:
    """The most memory that was held since `reset_peak`, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        # not getrusage, whose mark a child takes over from the process that started it
        return _status("VmHWM")
    except OSError:
        import resource

        unit = 1 if platform.system() == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def cap_memory(room: float, device: torch.device) -> None:
    """Turns a request for more than `room` bytes into an error of this process instead of trouble for the machine."""
    if device.type == "cuda" or math.isinf(room):
        return
    # a ValueError: the user's own limit is lower, and stays
    with suppress(OSError, ImportError, ValueError):
        import resource

        # address space, of which allocators and threads take more than they touch
        limit = _status("VmData") + int(room) + 2**28
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def free_memory(device: str) -> float:
    """Bytes that are free on a device."""
    if torch.device(device).type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return math.inf


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


# processes


class Contestant(Protocol):
    """What takes turns: a process of its own, or in tests a planted one."""

    def estimate(self) -> dict[str, float]:
        """Seconds of a training step, going by shorter lengths; raises CannotMeasure."""
        ...

    def prepare(self) -> dict[str, Any]:
        """What is measured once; raises CannotMeasure."""
        ...

    def turn(self) -> dict[str, float]:
        """Seconds of one turn, by metric."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


class Process:
    """A `MeasuredLayer` in a process of its own, which idles between its turns."""

    def __init__(self, setting: Setting, patience: float = 600.0):
        context = process_context()
        self.patience = patience
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, asdict(setting)), daemon=True)
        self.process.start()
        theirs.close()

    def estimate(self) -> dict[str, float]:
        return self._ask("estimate")

    def prepare(self) -> dict[str, Any]:
        return self._ask("prepare")

    def turn(self) -> dict[str, float]:
        return self._ask("turn")

    def close(self) -> None:
        self.connection.close()
        self.process.join(1)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _ask(self, what: str) -> Any:
        try:
            self.connection.send(what)
            if not self.connection.poll(self.patience):
                raise CannotMeasure("slow", f"no answer within {_time(self.patience)}")
            status, answer = self.connection.recv()
        except (EOFError, OSError) as error:
            self.process.join(1)
            code = self.process.exitcode
            killed = " (killed: out of memory?)" if code == -9 else ""
            raise CannotMeasure("error", f"its process ended with status {code}{killed}") from error
        if status != "done":
            raise CannotMeasure(status, answer)
        return answer


def process_context(*modules: str) -> Any:
    """Processes that begin with PyTorch and these modules imported and nothing else, where the system can fork."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["regard.compare.measure", "regard.layers.attention.softmax", *modules])
    return context


def _serve(connection: Connection, values: dict[str, Any]) -> None:
    """The process of a contestant: answers until the other end is closed."""
    import signal

    # the process that asks decides when to end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    subject: MeasuredLayer | None = None
    if torch.device(values["device"]).type == "cuda":
        # before it is asked, so that several start side by side; what fails is said when it is asked
        with suppress(Exception):
            subject = MeasuredLayer(Setting(**values))
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            what = connection.recv()
            try:
                if subject is None:
                    subject = MeasuredLayer(Setting(**values))
                calls = {"estimate": subject.estimate, "prepare": subject.prepare, "turn": subject.turn}
                answer = ("done", calls[what]())
            except CannotMeasure as error:
                answer = (error.status, error.note)
            except Exception as error:
                answer = describe_failure(error)
            connection.send(answer)


def describe_failure(error: Exception) -> tuple[str, str]:
    """The status of a contestant that failed, and a line about it."""
    said = " ".join(str(error).split())[:300] or type(error).__name__
    if isinstance(error, MemoryError) or "out of memory" in said or "can't allocate memory" in said:
        return "memory", "it asked for more memory than there is"
    if isinstance(error, ValueError):
        return "refused", said
    return "error", f"{type(error).__name__}: {said}"


def load_average() -> float:
    """Processes that wait for a core, of the last minute; not a number where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return math.nan


def load_per_core() -> float:
    """The load average over the number of cores: 1 where all of them were busy in the last minute."""
    return load_average() / (os.cpu_count() or 1)


def _bytes(amount: float) -> str:
    return f"{amount / 2**30:.3g} GiB" if amount >= 2**30 else f"{amount / 2**20:.0f} MiB"


def _time(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.2g} h"
    if seconds >= 90:
        return f"{seconds / 60:.2g} min"
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{1e3 * seconds:.2g} ms"
