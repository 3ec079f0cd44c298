"""A narrow window, and a wide one over pooled keys and values."""

from dataclasses import replace
from typing import Annotated, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.numeric import wide_dtype
from regard.core.reference import Row, add_up, blend
from regard.core.rows import Mask, Memory, Rows
from regard.core.shape import Order, Shape
from regard.core.state import Initial, Out, Progress, RingState
from regard.kernels import pool, runs
from regard.kernels.compiling import count_blocks, is_dynamic
from regard.kernels.parts import Part, Runs, union
from regard.kernels.runs import Bound, Pass, Where
from regard.layers.attention.base import Attention, Facts
from regard.layers.attention.projected import Projected
from regard.layers.attention.tailed import Tailed, TailState
from regard.spec import ATTENTION, POSITIONS

Pooling = Literal["mean", "max", "ldconv"]


class PoolingformerState(NamedTuple):
    """The last tokens of each row: as the first level reads them, and what it made of them."""

    levels: tuple[TailState | RingState, TailState | RingState]
    progress: Progress


class Poolingformer(Attention):
    """Zhang et al. 2021: two levels, the second with projections of its own over what the first one gives,

        Y_i = Attn(q_i, K, V over |i - j| <= w1),    Z_i = Attn(q'_i, K~, V~ over |i - c| <= w2),    (Y + Z) W_O,

    where q', k', v' are projected from Y, and K~, V~ are k', v' pooled around the tokens c = 0, x, 2 x, ...: each
    slot reads the kernel of n tokens that has c in its middle, as far as there are tokens. Pooling is their mean, their
    maximum, or a dynamic convolution (LDConv), sum_j d_j v_j with d = softmax(W_p v_c); one W_p [n, D] serves keys,
    values and all heads. The paper's kappa and xi are our kernel n and stride x.

    No code of the authors was found. The paper has no causal form; this one sees the past of the first window, and in
    the second one the slots that have read their last token. Where there is none yet, Z_i = 0. The map is A + A' P A,
    with the weights A and A' of the two levels and the shares P of the tokens in their slots (of a maximum: the part of
    the features that it comes from). Time N (w1 + w2 / x), memory N, state w1 + w2.
    """

    facts = Facts(
        name="poolingformer",
        paper="Zhang et al. 2021, Poolingformer: Long Document Modeling with Pooling Attention",
        link="arXiv 2105.04371",
        family="patterns",
        formula="o = Y + Z, Y_i = Attn(q_i, K, V; |i - j| <= w1), Z_i = Attn(q'_i, pool(K'), pool(V'); |i - c| <= w2)",
        time=Order("N (window + wide / stride)", 1),
        memory=Order("N", 1),
        state=Order("window + wide", 0),
        roles=("self", "causal"),
        refusals=(("cross", "both windows are around a query's own place, and a memory is another sequence"),),
        positions=("rotation", "bias"),
        exact=False,
        independent_heads=False,
        signed=True,
    )
    examples = (
        "poolingformer(window=2, wide=6, kernel=3, stride=2, pooling='mean')",
        "poolingformer(window=3, wide=7, kernel=2, stride=3, pooling='max')",
        "poolingformer(window=3, wide=6, kernel=5, stride=4)",
    )
    # slots of one token are that token, however they are pooled
    reduces_to = (
        (
            "poolingformer(window=2, wide=6, kernel=1, stride=1, pooling='max')",
            "poolingformer(window=2, wide=6, kernel=1, stride=1, pooling='mean')",
        ),
        (
            "poolingformer(window=2, wide=6, kernel=1, stride=3)",
            "poolingformer(window=2, wide=6, kernel=1, stride=3, pooling='mean')",
        ),
    )

    def __init__(
        self,
        shape: Shape,
        *,
        window: Annotated[int, "first level: tokens seen on each side, besides the query's own (w1)"] = 128,
        wide: Annotated[int, "second level: distance of the farthest middle of a slot that a query sees (w2)"] = 512,
        kernel: Annotated[int, "pooling kernel size in tokens (kappa)"] = 5,
        stride: Annotated[int, "pooling stride in tokens (xi)"] = 4,
        pooling: Annotated[Pooling, "pooling function; 'ldconv': weights made from the token in the middle"] = "ldconv",
    ):
        super().__init__(shape)
        for name, size in (("window", window), ("wide", wide), ("kernel", kernel), ("stride", stride)):
            if size < 1:
                raise ValueError(f"option {name!r} of 'poolingformer' must be at least 1, got {size}")
        kind = "input" if shape.position is None else POSITIONS.build(shape.position, shape).facts.kind
        if kind not in ("input", *self.facts.positions):
            raise ValueError(
                f"attention 'poolingformer' cannot take position {shape.position!r}: its first level is a window; use "
                f"one that local attention takes, such as rotary, alibi or sinusoidal"
            )
        wide_out = shape.heads * shape.head_width
        self.near: Tailed = ATTENTION.build(f"local(window={window})", shape)
        inner = replace(shape, width=wide_out, memory_width=wide_out, out_width=wide_out, position=None)
        self.far = Pooled(inner, self.facts, wide, kernel, stride, pooling)
        # the levels are added before they are projected: neither has a projection behind it
        self.near.output = self.far.output = cast(nn.Linear, nn.Identity())
        self.output = nn.Linear(wide_out, shape.out_width, bias=shape.output_bias)
        nn.init.xavier_uniform_(self.output.weight)
        if shape.output_bias:
            nn.init.zeros_(self.output.bias)

    def forward_packed(self, x, rows=None, *, state=None, memory=None, stream=None) -> Out:
        rows = rows or Rows.full(x)
        before = (None, None) if state is None else state.levels
        near = self.near.forward_packed(x, rows, state=before[0])
        far = self.far.forward_packed(near.y, rows, state=before[1])
        if state is not None:
            state = PoolingformerState((near.state, far.state), state.progress.advance(rows))
        return Out(self.output(near.y + far.y), state)

    def initial_state(self, batch, *, memory=None, stream=None, capacity=None, dtype, device) -> Initial:
        near, far = (level.initial_state(batch, dtype=dtype, device=device).state for level in (self.near, self.far))
        return Initial(PoolingformerState((near, far), Progress.initial(batch, device)))

    def fixed_state(self, state: PoolingformerState, capacity: int) -> PoolingformerState:
        near, far = cast(tuple[TailState, TailState], state.levels)  # rings come from here and do not come back
        levels = self.near.fixed_state(near, capacity), self.far.fixed_state(far, capacity)
        return PoolingformerState(levels, state.progress.bounded(capacity))

    def apply_map(self, values, x, rows=None, *, memory=None, stream=None) -> Tensor:
        rows = rows or Rows.full(x)
        near = self.near.apply_map(values, x, rows)
        return near + self.far.apply_map(near, self.near.forward_packed(x, rows).y, rows)

    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x if self.near.position is None else self.near.position.plain_add(x)
        near = self._plain(self.near, x)
        y = (near + self._plain(self.far, near)) @ self.output.weight.T
        return y if self.output.bias is None else y + self.output.bias

    def _plain(self, level: Projected, x: Tensor) -> Tensor:
        heads = []
        for head in range(self.shape.heads):
            values = {name: level.plain_input(name, head, x, x) for name in level.inputs}
            heads.append(level.plain(Row(head, self.shape.role == "causal", len(x), len(x), values, level.position)))
        return torch.cat(heads, -1)


class Pooled(Tailed):
    """The second level: attention to slots around every x-th token."""

    grouped = True
    tile = 64  # queries that share one run of slots, about

    def __init__(self, shape: Shape, facts: Facts, window: int, kernel: int, stride: int, pooling: Pooling):
        self.facts = facts
        super().__init__(shape)
        self.window, self.kernel, self.stride, self.pooling = window, kernel, stride, pooling
        # the tokens of the kernel before the one in the middle, and those behind it
        self.left, self.right = kernel // 2, kernel - 1 - kernel // 2
        self.reach = window + self.left
        self.weigh_tokens = nn.Linear(shape.head_width, kernel, bias=False) if pooling == "ldconv" else None

    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, carried: Tensor | None = None) -> Tensor:
        """`carried`: what to pool in the place of the values, [B, H, S, n]."""
        x, device = self.stride, q.device
        if mask.aligned and carried is None and mask.T > 1 and runs.takes(q, k, v):
            return self._in_runs(mask, q, k, v)
        # queries begin at a place where a slot has its middle
        inside = 0 if mask.aligned else mask.q0 % x
        blocks = -(-(mask.T + (0 if mask.aligned else x - 1)) // x)
        g = min(max(1, self.tile // x), blocks)
        tiles = -(-blocks // g)
        before, after = self.window // x, 0 if mask.causal else (x - 1 + self.window) // x
        if mask.aligned:
            before, after = min(before, blocks), min(after, blocks)
        slots = before + g * tiles + after
        first = mask.known_shift - inside - before * x - self.left
        k, v = (_shifted(part, first, (slots - 1) * x + self.kernel) for part in (k, v))
        at = torch.arange(-before * x - self.left, (slots - before - 1) * x + self.kernel - self.left, device=device)
        at = (mask.q0 - inside)[:, None] + at
        real = (at >= 0) & (at < mask.end[:, None])
        keys, values = self.pool(real, k), self.pool(real, v)
        if carried is not None:
            taken = self.pooling_of(real, v)[1].mean(3, keepdim=True)
            keys, taken = (part.repeat_interleave(len(q[0]) // len(part[0]), 1) for part in (keys, taken))
            windows = _shifted(carried, first, (slots - 1) * x + self.kernel).unfold(2, self.kernel, x)
            values = (windows * taken).sum(-1)
        rows = torch.arange(g * x, device=device)[:, None]
        middle = torch.arange(-before, g + after, device=device) * x
        visible = (middle - rows).abs() <= self.window
        if mask.causal:
            visible &= middle + self.right <= rows
        part = Part(Runs(0, g * x, tiles, g * x), Runs(0, before + g + after, tiles, g), mask=visible)
        o = union(
            _shifted(q, -inside, tiles * g * x),
            keys,
            values,
            [part],
            scale=self.scale,
            real=real[:, self.left :: x][:, :slots],
        )
        return _shifted(o, inside, mask.T)

    def _in_runs(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The queries of whole rows over slots as they come."""
        x, w = self.stride, self.window
        keys, values = self._slots(mask, k, v)
        # slot c has its middle at x c
        high = Bound(-self.right, x, 1, 1) if mask.causal else Bound(w, x, 1, 1)
        where = Where(end=None if mask.causal or mask.full else -(-mask.end // x))
        return runs.attend(q, keys, values, [Pass(Bound(x - 1 - w, x), high)], scale=self.scale, where=where)

    def _slots(self, mask: Mask, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The pooled keys and values of whole rows."""
        x, weight = self.stride, None if self.weigh_tokens is None else self.weigh_tokens.weight
        if self.pooling != "max" and pool.takes(k, weight, self.kernel):
            given = {"kernel": self.kernel, "stride": x, "end": None if mask.full else mask.end}
            return pool.pool(k, weight, **given), pool.pool(v, weight, **given)
        length = (count_blocks(mask.T, x) - 1) * x + self.kernel
        at = torch.arange(-self.left, length - self.left, device=k.device)
        real = (at >= 0) & (at < mask.end[:, None])
        keys, values = (self.pool(real, _shifted(part, -self.left, length)) for part in (k, v))
        return keys, values

    def pool(self, real: Tensor, part: Tensor) -> Tensor:
        """[B, G, (m - 1) x + n, D] -> [B, G, m, D]"""
        windows, shares = self.pooling_of(real, part)
        return (windows * shares).sum(-1)

    def pooling_of(self, real: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of each slot, [B, G, m, D, n], and how much of them it takes, [B or 1, G or 1, m, D or 1, n]."""
        windows = part.unfold(2, self.kernel, self.stride)
        real = real.unfold(1, self.kernel, self.stride)[:, None, :, None]  # [B, 1, m, 1, n]
        windows = torch.where(real, windows, 0)
        if self.pooling == "mean":
            return windows, real.to(part.dtype) / real.sum(-1, keepdim=True).clamp(min=1)
        if self.weigh_tokens is None:
            most = torch.where(real, windows, -torch.inf).argmax(-1, keepdim=True)
            return windows, (torch.arange(self.kernel, device=part.device) == most).to(part.dtype)
        logits = self.weigh_tokens(windows[..., self.left])[:, :, :, None]
        wide = wide_dtype(logits.dtype)
        logits = torch.where(real, logits.to(wide), torch.finfo(wide).min)
        return windows, torch.where(real, torch.softmax(logits, -1), 0).to(part.dtype)

    def read_values(
        self,
        rows: Rows,
        query: dict[str, Tensor],
        source: dict[str, Tensor],
        values: Tensor,
        memory: Memory | None,
    ) -> Tensor:
        """Values [B, H, T, n]: a slot takes of each token the mean share of its channels."""
        return self.attend(self.whole_mask(rows), **query, **source, carried=values)

    def plain(self, row: Row) -> Tensor:
        slots = []
        for middle in range(0, row.T, self.stride):
            tokens = range(max(0, middle - self.left), min(row.T, middle + self.right + 1))
            slots.append((middle, *(self._plain_pool(part, middle, tokens) for part in (row.k, row.v))))
        outs = []
        for i in range(row.T):
            near = [slot for slot in slots if abs(slot[0] - i) <= self.window]
            seen = [slot for slot in near if slot[0] + self.right <= i or not row.causal]
            if not seen:
                outs.append(torch.zeros_like(row.v[0]))
                continue
            logits = torch.stack([self.scale * (row.q[i] @ key) for _, key, _ in seen])
            outs.append(blend(logits, [value for _, _, value in seen]))
        return torch.stack(outs)

    def _plain_pool(self, part: Tensor, middle: int, tokens: range) -> Tensor:
        if self.pooling == "mean":
            return add_up(part[j] for j in tokens) / len(tokens)
        if self.weigh_tokens is None:
            most = part[tokens[0]]
            for j in tokens[1:]:
                most = torch.maximum(most, part[j])
            return most
        W = self.weigh_tokens.weight
        return blend(torch.stack([W[j - middle + self.left] @ part[middle] for j in tokens]), [part[j] for j in tokens])


def _shifted(part: Tensor, first: Tensor | int, length: int) -> Tensor:
    """`length` tokens of [B, G, n, D] from token `first` on, of all rows or [B] of each; past the ends, any number."""
    n = part.shape[2]
    if isinstance(first, int) and is_dynamic(n):
        # a pad or a cut, as the lengths will have it
        at = torch.arange(first, first + length, device=part.device).clamp(0, n - 1)
        return part[:, :, at]
    if isinstance(first, int):
        return F.pad(part, (0, 0, -first, first + length - n))
    at = (first[:, None] + torch.arange(length, device=part.device)).clamp(0, n - 1)
    return part.gather(2, at[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3]))
