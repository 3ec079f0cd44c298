"""What Transformer-XL and its successors have in common: rows in segments that read a memory before them."""

from collections.abc import Callable
from dataclasses import replace
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.rows import Mask, Rows
from regard.core.shape import Shape
from regard.kernels import runs
from regard.kernels.compiling import at_most, count_blocks, exporting
from regard.kernels.runs import Bound, Distances, Pass, Where
from regard.layers.attention.attending import Attending


class Segmented(Attending):
    """Queries of a segment read what `segment` and `memory` tokens hold: those of their own segment up to themselves,
    and those before it. Segments are counted from the first token of a row. Where the layer is given no other scheme of
    positions it has that of Transformer-XL, unless relative=False."""

    grouped = True

    def __init__(self, shape: Shape, *, segment: int, memory: int, relative: bool, clamp: int | None):
        name = self.facts.name
        if segment < 1:
            raise ValueError(f"option 'segment' of {name!r} must be at least 1, got {segment}")
        if clamp is not None and (not relative or shape.position is not None):
            raise ValueError(f"option 'clamp' of {name!r} is for its own relative positions: leave it out")
        if relative and shape.position is None:
            shape = replace(shape, position="xl" if clamp is None else f"xl(clamp={clamp})")
        super().__init__(shape)
        self.segment, self.memory, self.reach = segment, memory, segment + memory - 1

    @final
    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.product(mask, q, k, v, self.scale)

    @final
    def step_position(self, rows: Rows) -> int | None:
        """The position of the new token, where there is one in each row and the host knows that all stand there."""
        return rows.uniform_start if rows.T == 1 and not torch.compiler.is_compiling() else None

    @final
    def last(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One query per row over all the keys there are, of which the last is its own."""
        S, zero = k.shape[2], torch.zeros(len(q), dtype=torch.long, device=q.device)
        mask = Mask(zero + (S - 1), zero, zero + S, 1, S, causal=True, full=True, shift=S - 1)
        return self.attend(mask, q, k, v)

    @final
    def whole(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rows from their first token on. Segment and memory are padded no further than a row of T tokens needs."""
        n = at_most(self.segment, rows.T)
        near = Pass(Bound(every=n, times=n, plus=-self.memory), Bound(plus=1))
        if (o := self.in_runs(q, k, v, near, at_most(n + self.memory, rows.T))) is not None:
            return o
        M, room = at_most(self.memory, (rows.T - 1) // n * n), count_blocks(rows.T, n) * n - rows.T
        q, k, v = F.pad(q, (0, 0, 0, room)), F.pad(k, (0, 0, M, room)), F.pad(v, (0, 0, M, room))
        return self.segments(torch.zeros_like(rows.count), rows.count, q, k, v, n, M)[:, :, : rows.T]

    def in_runs(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        near: Pass,
        reach: int,
        where: Where | None = None,
        far: Callable[[], tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor | None:
        """The queries over runs of keys, none `reach` or more before them, by kernels that compare positions, where
        they take it; padding lies behind every real query. `far` makes the far keys and values of the pass."""
        content, bias_scheme = self.scheme("content"), self.scheme("bias")
        bias = None if bias_scheme is None else bias_scheme.run_bias(reach, 0)
        refusal = None
        if content is not None and (exporting() or not content.has_distances):
            refusal = f"it does not know the positions {content.facts.name!r}"
        if q.shape[2] == 1 or not runs.takes(q, k, v, bias, refusal):
            return None
        relations = None
        if content is not None:
            q, places, keys = content.by_distance(q, reach, self.scale)
            relations = Distances.of(places, keys)
        far_k, far_v = (None, None) if far is None else far()
        return runs.attend(
            *(q, k, v, [near]),
            scale=self.scale,
            where=where,
            bias=bias,
            far_k=far_k,
            far_v=far_v,
            relations=relations,
        )

    @final
    def segments(self, start: Tensor, end: Tensor, q: Tensor, k: Tensor, v: Tensor, n: int, M: int) -> Tensor:
        """Whole segments of n queries [B, H, N, D] from `start` [B] on, over keys and values from M before that on."""
        count = q.shape[2] // n
        folded = q.unflatten(2, (count, n)).transpose(1, 2).flatten(0, 1)
        k, v = (x.unfold(2, M + n, n).permute(0, 2, 1, 4, 3).flatten(0, 1) for x in (k, v))
        q0 = (start[:, None] + n * torch.arange(count, device=q.device)).flatten()
        mask = Mask(q0, q0 - M, end.repeat_interleave(count), n, M + n, causal=True, full=False, shift=M)
        return self.attend(mask, folded, k, v).unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)


def stretch(part: Tensor, first: Tensor | int, length: int) -> Tensor:
    """`length` slots of each row of [B, G, n, D] from slot `first` [B] on; beyond the ends, those at the ends. Where
    the host knows the first, and there are as many, they are not copied, unless that would keep alive many others."""
    if isinstance(first, int):
        slots = part[:, :, first : first + length]
        return slots if part.shape[2] <= length + 1 else slots.clone()
    at = (first[:, None] + torch.arange(length, device=part.device)).clamp(0, part.shape[2] - 1)
    return part.gather(2, at[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3]))
