"""Rows of matrices taken, weighted and added up by index, forward and backward.

Rows x [N, I] go to slots y [S, I], and back, where a row adds up what lies in its slots, each times a factor. Both are
each other's gradient, so that with k slots for each row, or with Triton, nothing is scattered and sums have one order.
Where a slot is empty, or a row has none, what lies in memory there is not read. With Triton, on a GPU, each of the
functions is one pass over memory (experts_triton.py).
"""

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.kernels.autograd import Function
from regard.kernels.choose import use_triton


def kernels(*tensors: Tensor) -> ModuleType | None:
    """The kernels in Triton, where they take these tensors; compilers generate their own."""
    compiling = "torch.compile makes kernels of its own in its place" if torch.compiler.is_compiling() else None
    if not use_triton("experts", *tensors, refusal=compiling):
        return None
    # imported late: not every PyTorch for a CPU comes with Triton
    from regard.kernels import experts_triton

    return experts_triton


class Places(NamedTuple):
    """Which row lies in which slot, and the other way round: k slots for each row, or any number."""

    row: Tensor  # [S] which row lies in a slot
    used: Tensor | None  # [S] whether one does; None: in all of them
    at: Tensor  # [k, N] the slots of each row; or [S], all slots by row
    kept: Tensor | None  # [k, N] whether the row has that slot; None: it has all
    starts: Tensor | None  # [N + 1] where those of a row begin in `at` [S]


def places_by_row(row: Tensor, used: Tensor, rows: int) -> Places:
    """Any number of slots for each of `rows` rows."""
    key = torch.where(used, row, rows)
    count = torch.zeros(rows + 1, dtype=torch.long, device=row.device).scatter_add_(0, key, torch.ones_like(key))
    return Places(row, used, torch.argsort(key, stable=True), None, count.cumsum(0) - count)


class Spread(Function):
    """y[s] = x[row[s]] in another dtype, zeros where not `used`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dtype: torch.dtype,
        row: Tensor,
        used: Tensor | None,
        at: Tensor,
        kept: Tensor | None,
        starts: Tensor | None,
    ) -> Tensor:
        places = Places(row, used, at, kept, starts)
        ctx.save_for_backward(*places)
        ctx.dtype = x.dtype
        return taken(x, places, None, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        places = Places(*ctx.saved_tensors)
        return added(grad, places, None, ctx.dtype), None, *[None] * len(places)


class Collect(Function):
    """out[n] = sum of gate[s] y[s] over the slots of row n."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        gate: Tensor,
        row: Tensor,
        used: Tensor | None,
        at: Tensor,
        kept: Tensor | None,
        starts: Tensor | None,
    ) -> Tensor:
        places = Places(row, used, at, kept, starts)
        ctx.save_for_backward(y, gate, *places)
        return added(y, places, gate, y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, gate, *places = ctx.saved_tensors
        places = Places(*places)
        of_y, of_gate = taken(grad, places, gate, y.dtype), products(y, places, grad, gate.dtype)
        return of_y, of_gate, *[None] * len(places)


class Narrow(Function):
    """A weight in the dtype of the products."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = weight.dtype
        return weight.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        kernel = kernels(grad)
        # PyTorch's own copy to a wider dtype reaches half of a GPU's bandwidth
        return kernel.copied(grad, ctx.dtype) if kernel else grad.to(ctx.dtype), None


def taken(x: Tensor, places: Places, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """factor[s] x[row[s]], [S, I]; zeros where not `used`."""
    if kernel := kernels(x):
        return kernel.taken(x, places, factor, dtype)
    row, used = places.row, places.used
    if len(x) == 0:
        return x.new_zeros(len(row), x.shape[1], dtype=dtype)
    y = x.to(dtype).index_select(0, row)
    y = y if factor is None else y.mul_(factor[:, None])
    return y if used is None else y.masked_fill_(~used[:, None], 0)


def added(y: Tensor, places: Places, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """sum of factor[s] y[s] over the slots of a row: [N, I]"""
    if kernel := kernels(y):
        return kernel.added(y, places, factor, dtype)
    _, used, at, kept, starts = places
    wide = torch.promote_types(y.dtype, torch.float32)
    if starts is not None:
        part = y.to(wide) if factor is None else y.to(wide) * factor[:, None]
        # what lies in a slot that is not used goes to one row more
        owner = places.row if used is None else torch.where(used, places.row, len(starts) - 1)
        return part.new_zeros(len(starts), y.shape[1]).index_add_(0, owner, part)[:-1].to(dtype)
    if len(y) == 0:
        return y.new_zeros(at.shape[1], y.shape[1], dtype=dtype)

    def copy(c: int) -> Tensor:
        """What lies in the c-th slot of each row."""
        part = y.index_select(0, at[c]).to(wide)
        part = part if factor is None else part.mul_(factor.index_select(0, at[c])[:, None])
        return part if kept is None else part.masked_fill_(~kept[c, :, None], 0)

    out = copy(0)
    for c in range(1, len(at)):
        out.add_(copy(c))
    return out.to(dtype)


def products(y: Tensor, places: Places, x: Tensor, dtype: torch.dtype) -> Tensor:
    """y[s] . x[row[s]], [S]; zeros where not `used`."""
    if kernel := kernels(y, x):
        return kernel.products(y, places, x, dtype)
    if len(x) == 0:
        return x.new_zeros(len(y), dtype=dtype)
    found = x.to(torch.promote_types(y.dtype, torch.float32)).index_select(0, places.row).mul_(y).sum(1).to(dtype)
    return found if places.used is None else found.masked_fill_(~places.used, 0)
