"""Rows of a matrix dealt out to groups, and the product of each group with a weight of its own.

Rows are sorted by group, so that the cost grows with the rows that are dealt, whatever the number of groups. Two
layouts give the same numbers. In "flat", groups of any size lie one behind the other, and the product is PyTorch's own
grouped one. In "padded", each has as much room as the largest may need, and the product is a batched one: it takes any
dtype and width, and where the room is known in advance the host never waits for a GPU.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels import moves
from regard.kernels.autograd import Function


class Deal(NamedTuple):
    """Where the rows lie: k groups for each of N rows, k N pairs, in S slots."""

    pair: Tensor  # [S] which pair, c N + n, lies in a slot
    places: moves.Places
    taken: Tensor  # [k, N] whether a pair has a place at all
    ends: Tensor | None  # [G] where each group ends; None: padded
    room: int | None  # slots of each group; None: flat

    def spread(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows [N, I] in their slots: [S, I], padded [G, room, I]; zeros in empty ones."""
        y = moves.Spread.apply(x, dtype, *self.places)
        return y if self.room is None else y.view(-1, self.room, x.shape[1])

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """What lies in the slots of group g times weight[g], [G, I, O]."""
        if self.ends is None:
            return torch.bmm(x, weight)
        return _Product.apply(x, weight, self.ends)

    def each(self, vectors: Tensor) -> Tensor:
        """For every slot the vector [G, O] of its group, to be added or multiplied."""
        if self.ends is None:
            return vectors[:, None]
        row, used = self.places[:2]
        group = torch.searchsorted(
            self.ends, torch.arange(len(row), device=vectors.device, dtype=torch.int32), right=True
        )
        found = vectors.index_select(0, group.clamp(max=len(vectors) - 1))
        # behind the last group nothing is written, and what is in memory there must not reach the gradient of a vector
        return found if used is None else torch.where(used[:, None], found, 0)

    def collect(self, y: Tensor, gate: Tensor) -> Tensor:
        """Back from the slots, times their gates [S], and added up: [N, O]; zeros from where a pair had no place."""
        return moves.Collect.apply(y.reshape(-1, y.shape[-1]), gate, *self.places)


def deal(
    group: Tensor, groups: int, dtype: torch.dtype, widths: tuple[int, ...], most: int | None, limit: Tensor | None
) -> Deal:
    """Deals rows to groups [k, N], 0 to groups - 1, or `groups` for nobody's.

    `limit` is the number of rows that each group takes, the first ones; `most`, known to the host, a bound of it.
    `dtype` and `widths` are those of the products to come.
    """
    shape, group = group.shape, group.flatten()
    M, device = len(group), group.device
    order = torch.argsort(group, stable=True)
    count = torch.zeros(groups + 1, dtype=torch.long, device=device).scatter_add_(0, group, torch.ones_like(group))
    first = count.cumsum(0) - count
    steps = torch.arange(M, device=device)
    rank = torch.empty_like(group).scatter_(0, order, steps - first[group[order]])
    taken, count = group < groups, count[:groups]
    if limit is not None:
        taken, count = taken & (rank < limit), count.clamp(max=limit)
    ends = count.cumsum(0)
    within = group.clamp(max=groups - 1)
    if _flat(device, dtype, widths, most):
        room, slot = None, (ends - count)[within] + rank
        S, used = (int(ends[-1]), None) if _counted(device) else (M, steps < ends[-1])
    else:
        room = max(1, int(count.max()) if most is None else most)
        slot, S = within * room + rank, groups * room
        used = torch.zeros(S + 1, dtype=torch.bool, device=device).scatter_(0, torch.where(taken, slot, S), True)[:S]
    # whatever has no place goes to one slot more, which is cut off
    pair = torch.zeros(S + 1, dtype=torch.long, device=device).scatter_(0, torch.where(taken, slot, S), steps)[:S]
    slot, taken = torch.where(taken, slot, 0).view(shape), taken.view(shape)
    kept = None if used is None and S == M else taken
    places = moves.Places(pair % max(1, shape[1]), used, slot, kept, None)
    return Deal(pair, places, taken, ends.to(torch.int32) if room is None else None, room)


def chosen(row: Tensor, took: Tensor, rows: int) -> Deal:
    """Groups that choose R of `rows` rows each, row [G, R], where they `took` one: padded, R slots per group."""
    places = moves.places_by_row(row.flatten(), took.flatten(), rows)
    return Deal(places.row, places, took, None, row.shape[1])


def _counted(device: torch.device) -> bool:
    """Whether the host may ask how many rows are dealt."""
    return device.type == "cpu"


def _flat(device: torch.device, dtype: torch.dtype, widths: tuple[int, ...], most: int | None) -> bool:
    """Whether PyTorch's grouped product takes these; on a GPU only where it does not make the host wait, unless the
    host has to anyway."""
    size = torch.empty((), dtype=dtype).element_size()
    if dtype not in (torch.float32, torch.bfloat16, torch.float16) or any(width * size % 16 for width in widths):
        return False
    if device.type == "cpu":
        return True
    waits = dtype != torch.bfloat16 or torch.cuda.get_device_capability(device) < (9, 0)
    return not waits or most is None


class _Product(Function):
    """PyTorch's grouped product, in which some GPUs leave the gradient of a group without rows as it was in memory.
    Rows behind the last group are not written, neither forward nor backward: whoever collects does not read them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _product(x, weight, ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        grad, needs_x, needs_weight = grad.contiguous(), *ctx.needs_input_grad[:2]
        of_x = _product(grad, weight.mT, ends) if needs_x else None
        of_weight = None
        if needs_weight:
            of_weight = _product(x.mT, grad, ends)
            if kernel := moves.kernels(of_weight):
                kernel.clear_empty(of_weight, ends)
            elif not _counted(x.device):
                empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
                of_weight.masked_fill_(empty[:, None, None], 0)
        return of_x, of_weight, None


def _product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Groups of the rows of a [S, I] times b [G, I, O]; or of the columns of a [I, S] times those of the rows of b
    [S, O]."""
    return _operator(a, b, ends) if torch.compiler.is_compiling() else F.grouped_mm(a, b, offs=ends)


@torch.library.custom_op("regard::grouped_product", mutates_args=())
def _operator(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """What compilers see: they know PyTorch's product in bfloat16 only."""
    return F.grouped_mm(a, b, offs=ends)


@_operator.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    shape = (a.shape[0], b.shape[-1])
    return a.new_empty(shape if b.dim() == 3 else (len(ends), *shape))
