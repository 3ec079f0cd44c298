"""What a layer returns, and what can be done with a state of any kind: select rows, merge two, detach it, trim it.

A state is a NamedTuple, batch first. `extend` consumes it; to branch or reorder, `select` copies rows; `merge` makes
one batch of two.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.rows import Rows


class Progress(NamedTuple):
    """How many tokens each row of a state has read."""

    length: Tensor  # [B]
    longest: int  # the largest length, or a bound of it
    uniform: bool  # the host knows: every row has read `longest` tokens
    mechanism: str = ""  # whose state it is, where several mechanisms keep the same things

    @classmethod
    def initial(cls, batch: int, device: torch.device, mechanism: str = "") -> "Progress":
        """Before the first token."""
        return cls(torch.zeros(batch, dtype=torch.long, device=device), 0, True, mechanism)

    def place(self, rows: Rows) -> Rows:
        """New rows, where they stand behind what was read."""
        unpadded = rows.unpadded or rows.uniform_start is not None
        at = self.longest if self.uniform and rows.uniform_start is not None else None
        return rows._replace(start=self.length, uniform_start=at, unpadded=unpadded)

    def advance(self, rows: Rows) -> "Progress":
        """After the tokens of these rows; padding leaves a row where it was."""
        uniform = self.uniform and rows.uniform_start is not None
        return Progress(self.length + rows.count, self.longest + rows.T, uniform, self.mechanism)

    def bounded(self, capacity: int) -> "Progress":
        """The same, where all that the host knows is that each row has room for one more token of `capacity`."""
        return Progress(self.length, capacity - 1, False, self.mechanism)

    def merge(self, other: "Progress", rows: Tensor | None) -> "Progress":
        length, longest = merge(self.length, other.length, rows), max(self.longest, other.longest)
        uniform = self.uniform and other.uniform and self.longest == other.longest
        return Progress(length, longest, uniform, self.mechanism)


class Initial(NamedTuple):
    """What a mechanism starts decoding from."""

    state: Any
    stream: Tensor | None = None


class Out(NamedTuple):
    """What a mechanism returns, always."""

    y: Tensor
    state: Any = None
    stream: Tensor | None = None
    auxiliary_loss: Tensor | None = None  # a scalar, a mean over the real tokens
    statistics: dict[str, Tensor] | None = None  # numbers to log, by name


def select(state: Any, rows: Tensor) -> Any:
    """A copy of rows of a state, in the order and as often as asked: to branch, to reorder beams. Rows that the state
    does not have are refused; not on a GPU, where looking at them would take a synchronisation."""
    check_rows(rows, state)
    return take_rows(state, rows)


def check_rows(rows: Any, state: Any) -> None:
    """Refuses anything but numbers of rows that the state has."""
    if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype not in (torch.long, torch.int):
        got = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else repr(rows)
        raise ValueError(f"rows must be a tensor of row numbers [n], int64 or int32, got {got}")
    count = _rows_of(state)
    if count is not None and len(rows) and rows.device.type == "cpu" and not torch.compiler.is_compiling():
        least, most = rows.aminmax()
        if least < 0 or most >= count:
            wrong = int(least) if least < 0 else int(most)
            raise ValueError(f"row {wrong} is not in the state, which has the rows 0 to {count - 1}")


def _rows_of(state: Any) -> int | None:
    """How many rows a state has, where it says so."""
    named = (getattr(getattr(state, "progress", None), "length", None), getattr(state, "count", None))
    tensors = [tensor for tensor in (state, *named) if isinstance(tensor, Tensor)]
    return len(tensors[0]) if tensors else None


def take_rows(state: Any, rows: Tensor) -> Any:
    """`select` without looking at the rows. A state with a `select` of its own knows better than to index each part;
    where it looks at the rows, its `copy_rows` does not."""
    if isinstance(state, Tensor):
        return state[rows]
    if hasattr(state, "copy_rows"):
        return state.copy_rows(rows)
    if hasattr(state, "select"):
        return state.select(rows)
    if isinstance(state, tuple):
        return _rebuilt(state, [take_rows(part, rows) for part in state])
    return state


def merge(state: Any, other: Any, rows: Tensor | None = None) -> Any:
    """One state with the rows of two, which may have read different numbers of tokens: those of `other` behind those of
    `state`, or in place of its `rows`. Both have read some token, or neither has. `state` is consumed.

    A dimension in which they differ counts tokens: the shorter one gets zeros at its end, or at its beginning in the
    fields that the class names `newest_last`. A state with a `merge` of its own knows better."""
    if type(state) is not type(other):
        raise ValueError(f"only states of one model can be merged, got {type(state).__name__}, {type(other).__name__}")
    if isinstance(state, Tensor):
        return _merge_tensors(state, other, rows, newest_last=False)
    if hasattr(state, "merge"):
        return state.merge(other, rows)
    return merge_fields(state, other, rows) if isinstance(state, tuple) else _merge_known(state, other)


def merge_all(states: Sequence[Any]) -> Any:
    """One state with the rows of several, in order: merged in pairs, so that no row is copied again and again."""
    while len(states) > 1:
        pairs = [states[first : first + 2] for first in range(0, len(states), 2)]
        states = [merge(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return states[0]


def merge_fields(state: Any, other: Any, rows: Tensor | None) -> Any:
    """`merge`, field by field."""
    last = getattr(state, "newest_last", ())
    names = getattr(state, "_fields", ("",) * len(state))
    triples = zip(names, state, other, strict=True)
    return _rebuilt(state, [(_merge_newest_last if name in last else merge)(a, b, rows) for name, a, b in triples])


def _merge_newest_last(state: Any, other: Any, rows: Tensor | None) -> Any:
    if isinstance(state, Tensor):
        return _merge_tensors(state, other, rows, newest_last=True)
    return _rebuilt(state, [_merge_newest_last(a, b, rows) for a, b in zip(state, other, strict=True)])


def _merge_tensors(state: Tensor, other: Tensor, rows: Tensor | None, newest_last: bool) -> Tensor:
    sizes = [max(pair) for pair in zip(state.shape[1:], other.shape[1:], strict=True)]
    state, other = (_padded(part, sizes, newest_last) for part in (state, other))
    if rows is None:
        return torch.cat([state, other])
    # a state may keep several entries per row, side by side
    each = len(other) // len(rows)
    at = rows if each == 1 else (rows[:, None] * each + torch.arange(each, device=rows.device)).flatten()
    return state.index_copy(0, at, other)


def _padded(part: Tensor, sizes: list[int], newest_last: bool) -> Tensor:
    room = [size - now for size, now in zip(sizes, part.shape[1:], strict=True)]
    if not any(room):
        return part
    return F.pad(part, [n for more in reversed(room) for n in ((more, 0) if newest_last else (0, more))])


def _merge_known(value: Any, other: Any) -> Any:
    """What the host knows of both: a fact that holds of each, the larger of two sizes."""
    if isinstance(value, bool):
        return value and other
    if isinstance(value, int):
        return max(value, other)
    if value != other:
        raise ValueError(f"only states of one model can be merged, got parts {value!r} and {other!r}")
    return value


def _rebuilt(state: tuple, parts: list) -> tuple:
    """A tuple, or a NamedTuple of the same class, with these parts."""
    return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)


def detach(state: Any) -> Any:
    """The same state with its history of gradients cut, between the segments of truncated training."""
    if isinstance(state, Tensor):
        return state.detach()
    if isinstance(state, tuple):
        return _rebuilt(state, [detach(part) for part in state])
    return state


def trim(state: Any, longest: int | None = None) -> Any:
    """The same state with the bound `longest` brought down to the longest row, so that padding takes no room. None: it
    is looked up, which synchronises with a GPU."""
    if isinstance(state, Progress):
        return state._replace(longest=int(state.length.max()) if longest is None else min(state.longest, longest))
    return _rebuilt(state, [trim(part, longest) for part in state]) if isinstance(state, tuple) else state


class RingState(NamedTuple):
    """Keys and values of the last R tokens, position p in slot p % R, for steps of one token: what `fixed_state` makes
    of the state of a mechanism whose steps are a softmax of scaled products."""

    parts: tuple[Tensor, Tensor]  # [B, G, R, D]
    progress: Progress


def fix_bound(state: Any, capacity: int) -> Any:
    """The same state, where all that the host knows is that each row has room for one more token of `capacity`. A cache
    (`with_room`) gets its full size."""
    return _bounded(with_capacity(state, capacity), capacity)


def _bounded(state: Any, capacity: int) -> Any:
    if isinstance(state, Progress):
        return state.bounded(capacity)
    return _rebuilt(state, [_bounded(part, capacity) for part in state]) if isinstance(state, tuple) else state


def with_capacity(state: Any, capacity: int) -> Any:
    """The same state, where caches (`with_room`) have room for this many tokens per row, and no more."""
    if isinstance(state, Progress) or not isinstance(state, tuple):
        return state
    with_room = getattr(state, "with_room", None)
    if with_room is not None:
        return with_room(capacity)
    return _rebuilt(state, [with_capacity(part, capacity) for part in state])


def state_bytes(state: Any) -> int:
    """The memory of the tensors of a state."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    return sum(map(state_bytes, state)) if isinstance(state, tuple) else 0


class StateForm(NamedTuple):
    """What a state is: its class, the mechanism it says it belongs to, and the forms of the states inside it."""

    kind: type
    mechanism: str
    parts: tuple["StateForm", ...]


def state_form(state: Any) -> StateForm:
    # a causal state says in its progress whose it is, a cross state has no progress and says it itself
    mechanism = getattr(getattr(state, "progress", state), "mechanism", "")
    parts = (state_form(part) for part in getattr(state, "parts", ()) if hasattr(part, "_fields"))
    return StateForm(type(state), mechanism, tuple(parts))


def same_form(form: StateForm, expected: StateForm) -> bool:
    """Whether two forms of states are the same. A ring, which `fixed_state` makes, stands for any kind."""
    if form.mechanism and expected.mechanism and form.mechanism != expected.mechanism:
        return False
    if form.kind is RingState:
        return True
    alike = form.kind is expected.kind and len(form.parts) == len(expected.parts)
    return alike and all(map(same_form, form.parts, expected.parts))
