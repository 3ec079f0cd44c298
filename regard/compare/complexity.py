"""What Table 1 of Attention Is All You Need compares, counted on the layers themselves: how work grows with length and
width, how many operations must wait for each other, and how many layers lie between two tokens."""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard.compare.question import Question, code_of, short
from regard.compare.run import Environment, provenance
from regard.compare.store import DONE, Cell, Folder
from regard.core.shape import Role
from regard.core.tally import Tally, tensors_of

HEADS = 4
LENGTHS = (512, 1024, 2048)  # between which work grows with the length, at WIDTH
WIDTHS = (64, 128, 256)  # between which it grows with the width, at LENGTHS[0]
WIDTH = 64
DEPTH_LENGTHS = (128, 256, 512)
PATH_LENGTHS = (32, 64, 128)
MAX_LAYERS = 64


class Depth(TorchDispatchMode):
    """The longest chain of operations: a tensor is one deeper than the deepest it was made from, and views cost
    nothing. What one kernel does inside is one operation."""

    def __init__(self):
        super().__init__()
        self.depths: dict[int, int] = {}
        self.held: list[Tensor] = []  # so that no other tensor takes an address
        self.deepest = 0
        self.fused = False  # a recurrence in one kernel, which hides how deep it is

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.fused |= any(name in function.overloadpacket.__name__ for name in ("rnn", "lstm", "gru"))
        given = _tensors((*args, *(kwargs or {}).values()))
        below = max((self.depths.get(_place(tensor), 0) for tensor in given), default=0)
        places = {_place(tensor) for tensor in given}
        writes = {_place(args[0])} if function._schema.is_mutable and args and isinstance(args[0], Tensor) else set()
        for tensor in tensors_of(tuple(out) if isinstance(out, list | tuple) else out):
            place = _place(tensor)
            if place in places and place not in writes:
                continue  # a view
            self.held.append(tensor)
            # a table that depends on no input is made before
            self.depths[place] = below + 1 if below or place in self.depths else 0
            self.deepest = max(self.deepest, self.depths[place])
        return out


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [tensor for part in values for tensor in _tensors(part)] if isinstance(values, list | tuple) else []


def _layer(spec: str, role: Role, width: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return regard.attention(spec, width=width, heads=HEADS, role=role).eval()


def sequential_operations(spec: str, role: Role, length: int) -> int:
    """The depth of the graph of a forward pass; of a recurrence in one kernel, that of its steps one by one."""
    layer = _layer(spec, role, WIDTH)
    x = torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(0))
    depth = _depth_of(x, lambda: layer(x, memory=x if role == "cross" else None))
    if not depth.fused or role != "causal":
        return depth.deepest - 1

    def step_by_step() -> None:
        state = layer.start(1)
        for token in x.split(1, 1):
            _, state = layer.extend(token, state)

    return _depth_of(x, step_by_step).deepest - 1


def _depth_of(x: Tensor, call: Callable[[], Any]) -> Depth:
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), Depth() as depth:
        depth.held.append(x)
        depth.depths[_place(x)] = 1
        call()
    return depth


def work(spec: str, role: Role, length: int, width: int) -> int:
    """Counted operations of a forward pass, or elements written where they are more."""
    layer = _layer(spec, role, width)
    x = torch.randn(1, length, width, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), Tally() as tally:
        layer(x, memory=x if role == "cross" else None)
    return max(tally.flops, tally.written)


def exponents(spec: str, role: Role) -> dict[str, float]:
    """How work grows with the length and with the width: the exponent between the last two sizes."""
    by_length = [work(_at(spec, n), role, n, WIDTH) for n in LENGTHS[-2:]]
    by_width = [work(_at(spec, LENGTHS[0]), role, LENGTHS[0], d) for d in WIDTHS[-2:]]
    return {
        "length": math.log2(by_length[1] / by_length[0]),
        "width": math.log2(by_width[1] / by_width[0]),
    }


def path(spec: str, role: Role, length: int) -> int | None:
    """The number of layers after which every allowed pair of tokens is connected; None: never."""
    layer = _layer(_at(spec, length), role, 8 * HEADS).double()
    x = torch.randn(1, length, 8 * HEADS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    reaches = torch.zeros(length, length, dtype=torch.bool)
    y = layer(x) @ torch.randn(8 * HEADS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))  # [1, T]
    for at in range(length):
        (moved,) = torch.autograd.grad(y[0, at], x, retain_graph=True)
        reaches[at] = (moved[0] != 0).any(-1)
    # residual connections keep what a token has
    one = (reaches | torch.eye(length, dtype=torch.bool)).float()
    wanted = torch.ones(length, length).tril() if role == "causal" else torch.ones(length, length)
    connected = one
    for layers in range(1, MAX_LAYERS + 1):
        if bool((connected[wanted > 0] > 0).all()):
            return layers
        further = ((connected @ one) > 0).float()
        if torch.equal(further, connected):
            return None
        connected = further
    return None


def _at(spec: str, length: int) -> str:
    return spec.replace("{longest}", str(length))


def question(spec: str, role: str) -> Question:
    """The question of one row."""
    sizes = {"width": WIDTH, "heads": HEADS}
    code = code_of(spec, "compare/complexity.py")
    return Question(kind="path", spec=short(spec), role=role, length=LENGTHS[-1], model=sizes, code=code)


def fill_complexity(rows: Sequence[tuple[str, str]], folder: Folder, environment: Environment) -> None:
    """Counts the rows that have no answer yet."""
    with folder.writing("regard compare"), environment.listening():
        for spec, role in rows:
            environment.check_signals()
            asked = question(spec, role)
            if environment.force or folder.get(asked) is None:
                folder.put(
                    Cell(asked, DONE, "", describe(spec, cast(Role, role)), {}, provenance("cpu", environment.command))
                )
                environment.report(f"{spec}: counted")


def describe(spec: str, role: Role) -> dict[str, Any]:
    """One row of the table."""
    grown = exponents(spec, role)
    return {
        "spec": spec,
        "role": role,
        "work_length": grown["length"],
        "work_width": grown["width"],
        "depth": [sequential_operations(_at(spec, n), role, n) for n in DEPTH_LENGTHS],
        "path": [path(spec, role, n) for n in PATH_LENGTHS],
    }
