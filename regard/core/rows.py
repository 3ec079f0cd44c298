"""Where the tokens of a call stand, and which of them a query may see.

Padding is met once: `pack` moves the real tokens of each row to the left, `unpack` puts the answers back. What lies
between the two only ever sees rows that are real from the left. `keep` is boolean, True = real token.

Tuples of ours have a field `count`. It hides the method `tuple.count`, which has no use here: hence the ignored rule.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.compiling import exporting
from regard.kernels.runs import Where
from regard.kernels.visible import Visible


class Rows(NamedTuple):
    """Where the tokens of a call stand: row b holds `count[b]` real tokens on the left, the first at `start[b]`."""

    start: Tensor  # [B]
    count: Tensor  # [B]  # pyright: ignore[reportIncompatibleMethodOverride]
    T: int
    uniform_start: int | None  # the host knows: no padding, and every row starts here
    allowed: Tensor | None = None  # [1 or B, T, T] which pairs may meet, beside what the role says
    unpadded: bool = False  # the host knows: every token is real, wherever the rows start

    @classmethod
    def full(cls, x: Tensor) -> "Rows":
        B, T = x.shape[:2]
        return cls(x.new_zeros(B, dtype=torch.long), x.new_full((B,), T, dtype=torch.long), T, 0)

    def real(self) -> Tensor | None:
        """[B, T], or None where the host knows that all are real."""
        if self.uniform_start is not None or self.unpadded:
            return None
        return torch.arange(self.T, device=self.count.device) < self.count[:, None]

    def positions(self) -> Tensor:
        """[1 or B, T]"""
        steps = torch.arange(self.T, device=self.start.device)[None]
        return steps + (self.start[:, None] if self.uniform_start is None else self.uniform_start)


class Memory(NamedTuple):
    """What cross-attention reads: [B, S, E] and how many of each row are real (None: all); and the stream of the layers
    it comes from."""

    x: Tensor
    count: Tensor | None  # pyright: ignore[reportIncompatibleMethodOverride]
    stream: Tensor | None = None
    allowed: Tensor | None = None  # [1 or B, T, S] which queries may read which tokens

    def rows(self) -> Rows:
        """Where its tokens stand."""
        full = Rows.full(self.x)
        return full if self.count is None else full._replace(count=self.count, uniform_start=None)


class Mask(NamedTuple):
    """Which key slots a query sees: query t of row b is at q0[b]+t, slot s at k0[b]+s; real: 0 <= position < end[b]."""

    q0: Tensor  # [B]
    k0: Tensor  # [B]
    end: Tensor  # [B]
    T: int
    S: int
    causal: bool
    full: bool  # the host knows: every slot is real
    shift: int | None  # the host knows: q0 - k0, the same in every row
    allowed: Tensor | None = None  # [1 or B, T, >= S] an explicit mask

    @property
    def aligned(self) -> bool:
        """The queries are the keys' own tokens: query t is slot t. Causal kernels then need no mask for padding."""
        return self.shift == 0 and self.T == self.S

    @property
    def known_shift(self) -> int:
        """`shift` for mechanisms whose masks always have one, because a gap is the same in every row."""
        assert self.shift is not None, "queries and keys stand at other distances in each row"
        return self.shift

    @property
    def count(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[B] real slots on the left (for k0 = 0), or None where all are."""
        return None if self.full else self.end - self.k0

    def real(self) -> Tensor:
        """[B, S]"""
        at = self.k0[:, None] + torch.arange(self.S, device=self.k0.device)
        return (at >= 0) & (at < self.end[:, None])

    def visible(self) -> Visible:
        """For kernels that compare slots; without an explicit mask, and with no slot before the first position."""
        return Visible(self.q0 - self.k0, self.end - self.k0, self.causal)

    def gap(self) -> Tensor:
        """Position of the key minus position of the query: [T, S], or [B, T, S] where rows differ."""
        device = self.k0.device
        steps = torch.arange(self.S, device=device) - torch.arange(self.T, device=device)[:, None]
        return steps - self.shift if self.shift is not None else steps + (self.k0 - self.q0)[:, None, None]

    def dense(self) -> Tensor | None:
        """What is visible, broadcastable to [B, 1, T, S]; None where all is."""
        visible = None if self.full else self.real()[:, None, None, :]
        if self.causal and not (self.T == 1 and self.shift == self.S - 1):
            # positions compared, not subtracted: a table of differences takes many times as long to make
            device = self.k0.device
            queries, keys = torch.arange(self.T, device=device), torch.arange(self.S, device=device)
            if self.shift is not None:
                past = (keys <= (queries + self.shift)[:, None])[None, None]
            else:
                at = (self.q0 - self.k0)[:, None] + queries  # [B, T]
                past = (keys <= at[..., None])[:, None]
            visible = past if visible is None else visible & past
        if self.allowed is not None:
            allowed = self.allowed[:, None, :, : self.S]
            visible = allowed if visible is None else visible & allowed
        return visible

    def safe(self) -> tuple[Tensor | None, Tensor | None]:
        """`dense`, where a query that an explicit mask leaves without keys sees all instead, and which queries see some
        [B, 1, T, 1] (None: no explicit mask): no kernel then divides by zero."""
        visible = self.dense()
        if self.allowed is None or visible is None:
            return visible, None
        some = visible.any(-1, keepdim=True)
        return visible | ~some, some

    def sdpa(self) -> tuple[Tensor | None, bool]:
        """(attn_mask, is_causal) in the cheapest form that PyTorch's SDPA takes. In an aligned row, padding lies behind
        every real query."""
        return (None, True) if self.causal and self.aligned and self.allowed is None else (self.dense(), False)

    def where(self, first: int = 0) -> Where:
        """The mask for kernels that compare positions; real keys stand at `first` or behind."""
        if self.aligned:
            # no causal query sees what stands behind it
            return Where(end=None if self.full or self.causal else self.count, first=first)
        return Where(q0=self.q0, k0=self.k0, end=self.end, first=first)

    def pieces(self, size: int) -> "Iterator[tuple[slice, Mask]]":
        """The masks of `size` queries at a time. While torch.export records a program, which cannot loop over a dynamic
        length, the one mask of all queries."""
        if exporting():
            yield slice(None), self
            return
        for first in range(0, self.T, size):
            T = min(size, self.T - first)
            shift = None if self.shift is None else self.shift + first
            allowed = None if self.allowed is None else self.allowed[:, first : first + T]
            yield slice(first, first + T), self._replace(q0=self.q0 + first, T=T, shift=shift, allowed=allowed)


def pack(x: Tensor, keep: Tensor) -> tuple[Tensor, Rows]:
    """The real tokens of each row moved to the left, zeros behind."""
    count = keep.sum(1)
    order = torch.argsort(keep.logical_not(), dim=1, stable=True)
    moved = x.gather(1, order[..., None].expand_as(x))
    real = torch.arange(x.shape[1], device=x.device) < count[:, None]
    rows = Rows(torch.zeros_like(count), count, x.shape[1], None)
    return torch.where(real[..., None], moved, 0), rows


def pack_memory(memory: Tensor, keep: Tensor | None, allowed: Tensor | None = None) -> Memory:
    """A memory with its real tokens moved to the left, and an explicit mask with them."""
    if keep is None:
        return Memory(memory, None, allowed=allowed)
    packed, rows = pack(memory, keep)
    return Memory(packed, rows.count, allowed=pack_pairs(allowed, None, keep))


def pack_pairs(allowed: Tensor | None, keep: Tensor | None, keys: Tensor | None = None) -> Tensor | None:
    """A mask of pairs [1 or B, T, S] moved with the tokens of either side; `keys` None: both sides are the same."""
    if allowed is None:
        return None
    for axis, real in ((1, keep), (2, keep if keys is None else keys)):
        if real is not None:
            order = torch.argsort(real.logical_not(), dim=1, stable=True)
            allowed = allowed.expand(len(order), -1, -1)
            index = order[:, :, None] if axis == 1 else order[:, None, :]
            allowed = allowed.gather(axis, index.expand_as(allowed))
    return allowed


def check_pairs(mask: Tensor, B: int, T: int, S: int) -> Tensor:
    """An explicit mask [T, S] or [B, T, S] as [1 or B, T, S]."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask must be boolean, True = may attend, got {got}")
    if tuple(mask.shape) not in ((T, S), (B, T, S)):
        raise ValueError(f"mask must be [{T}, {S}] or [{B}, {T}, {S}], queries by keys, got {list(mask.shape)}")
    return mask if mask.dim() == 3 else mask[None]


def unpack(y: Tensor, keep: Tensor, dim: int = 1) -> Tensor:
    """The inverse of `pack` along `dim`, where `keep` has its last axis: zeros where nothing was kept."""
    at = (keep.cumsum(-1) - 1).clamp(min=0)
    shape = (*keep.shape, *([1] * (y.dim() - keep.dim())))
    moved = y.gather(dim, at.view(shape).expand_as(y))
    return torch.where(keep.view(shape), moved, 0)


def reverse_rows(x: Tensor, rows: Rows) -> Tensor:
    """The real tokens [B, T, ...] of each row from the last to the first, padding behind them as it was."""
    if rows.real() is None:
        return x.flip(1)
    steps = torch.arange(rows.T, device=x.device)
    at = torch.where(steps < rows.count[:, None], rows.count[:, None] - 1 - steps, steps)
    return x.gather(1, at.view(*at.shape, *[1] * (x.dim() - 2)).expand_as(x))


def blank(x: Tensor, keep: Tensor | None) -> Tensor:
    """Zeros where nothing is kept: selected, so that not even NaN gets through."""
    return x if keep is None else torch.where(keep.view(*keep.shape, *([1] * (x.dim() - keep.dim()))), x, 0)
