"""What a layer returns, and what can be done with a state of any kind: select rows of it, detach it, trim it.

A state is a NamedTuple, batch first. `extend` consumes it; to branch or reorder, `select` copies rows.
"""

from typing import Any, NamedTuple

import torch
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
        """The same where the host knows of the rows that each has room for one more token of `capacity`, and no more
        than that."""
        return Progress(self.length, capacity - 1, False, self.mechanism)


class Out(NamedTuple):
    """What a mechanism returns, always."""

    y: Tensor | None
    state: Any = None
    stream: Tensor | None = None
    auxiliary_loss: Tensor | None = None  # a scalar, a mean over the real tokens
    statistics: dict[str, Tensor] | None = None  # what to log of it, by name


def select(state: Any, rows: Tensor) -> Any:
    """A copy of the rows of a state, in the order and as often as asked: to branch, to reorder beams. Rows that the
    state does not have are refused, but on a GPU, where looking would take a synchronisation."""
    check_rows(rows, state)
    return take_rows(state, rows)


def check_rows(rows: Any, state: Any) -> None:
    """Refuses what are no rows of a state."""
    if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype not in (torch.long, torch.int):
        got = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else repr(rows)
        raise ValueError(f"rows must be a tensor of row numbers [n], int64 or int32, got {got}")
    count = _rows_of(state)
    if count is not None and len(rows) and rows.device.type == "cpu" and not torch.compiler.is_compiling():
        least, most = rows.aminmax()
        if least < 0 or most >= count:
            wrong = int(least) if least < 0 else int(most)
            raise ValueError(f"the state has the rows 0 to {count - 1}, got {wrong}")


def _rows_of(state: Any) -> int | None:
    """How many rows a state has, where it says so."""
    named = (getattr(getattr(state, "progress", None), "length", None), getattr(state, "count", None))
    found = [part for part in (state, *named) if isinstance(part, Tensor)]
    return len(found[0]) if found else None


def take_rows(state: Any, rows: Tensor) -> Any:
    """`select` without looking at the rows. A state with a `select` of its own knows better than to index each part."""
    if isinstance(state, Tensor):
        return state[rows]
    if hasattr(state, "select"):
        return state.select(rows)
    if isinstance(state, tuple):
        return _rebuilt(state, [take_rows(part, rows) for part in state])
    return state


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


def trim(state: Any) -> Any:
    """The same state with the bound `longest` brought down to the longest row, so that padding takes no room."""
    if isinstance(state, Progress):
        return state._replace(longest=int(state.length.max()))
    return _rebuilt(state, [trim(part) for part in state]) if isinstance(state, tuple) else state


class RingState(NamedTuple):
    """Keys and values of the last R tokens, position p in slot p % R, for steps of one token: what `fixed_state` makes
    of the state of a mechanism whose steps are a softmax of scaled products."""

    parts: tuple[Tensor, Tensor]  # [B, G, R, D]
    progress: Progress


def fix_bound(state: Any, capacity: int) -> Any:
    """The same state where the host knows of its rows that they have room for one more token of `capacity`, and nothing
    else. A cache (`with_room`) gets its full size."""
    if isinstance(state, Progress):
        return state.bounded(capacity)
    if not isinstance(state, tuple):
        return state
    if hasattr(state, "with_room"):
        state = state.with_room(capacity)
    return _rebuilt(state, [fix_bound(part, capacity) for part in state])


def same_form(form: tuple, own: tuple) -> bool:
    """Whether two forms of states are the same, where a ring stands for any."""
    (kind, mechanism, *parts), (own_kind, own_mechanism, *own_parts) = form, own
    if mechanism and own_mechanism and mechanism != own_mechanism:
        return False
    if kind is RingState:
        return True
    return kind is own_kind and len(parts) == len(own_parts) and all(map(same_form, parts, own_parts))


def state_form(state: Any) -> tuple:
    """Of what kind a state is and of which mechanism, where it says so, and those inside it."""
    mechanism = getattr(getattr(state, "progress", None), "mechanism", "")
    return (
        type(state),
        mechanism,
        *(state_form(part) for part in getattr(state, "parts", ()) if hasattr(part, "_fields")),
    )
