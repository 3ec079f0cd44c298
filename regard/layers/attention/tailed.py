"""Mechanisms that keep the last tokens, and perhaps the first, while decoding: sliding windows."""

from collections.abc import Callable
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.rows import Mask, Rows
from regard.core.sequence import Split, last_tokens_before, tied, tokens_before
from regard.core.state import Progress, RingState, fix_bound
from regard.kernels.compiling import surely_at_most
from regard.layers.attention.attending import Attending
from regard.layers.attention.cached import put_slots

PAST = 256  # queries at a time that follow a past
# A grid of few cells is compared as a whole by one fused kernel, if that is at most this many times the work of its
# pattern: faster than to collect the keys of each block, and the mask of all pairs is small.
DENSE, FEW = 2, 1024


class TailState(NamedTuple):
    """The last tokens of each row, newest at the right, at most `reach`; and the first `front`, slot = position."""

    tail: tuple[Tensor, ...]  # [B, G, <= reach, D]
    front: tuple[Tensor, ...]  # [B, G, front + 1, D]; the last slot takes what belongs nowhere
    progress: Progress
    newest_last = ("tail",)


class Tailed(Attending):
    """State: the last `reach` tokens and the first `front`. With front > 0, `attend` also gets `front_k`, `front_v`
    (one for each key and value): the first tokens of the sequence, [B, G, <= front, D], slot = position, real while the
    slot < mask.end. The keys of a call with a state are the tail followed by the new tokens."""

    reach: int
    front: int = 0
    rings: bool = False  # True: a query reads its tail by a softmax of scaled products, which a step may do from a ring

    def fixed_state(self, state: TailState, capacity: int) -> TailState | RingState:
        # what stands before the first token is masked by its position
        tail = tuple(F.pad(part, (0, 0, self.reach - part.shape[2], 0)) for part in state.tail)
        if not (self.rings and self.reads_by_products):
            return fix_bound(state._replace(tail=tail), capacity)
        R, length = self.reach + 1, state.progress.length
        at = (length[:, None] + torch.arange(-self.reach, 0, device=length.device)) % R
        keys, values = (_in_slots(part, at, R) for part in tail)
        return RingState((keys, values), state.progress.bounded(capacity))

    @final
    def attend_self(
        self,
        rows: Rows,
        query: dict[str, Tensor],
        source: dict[str, Tensor],
        state: TailState | RingState | None,
    ) -> tuple[Tensor, TailState | RingState | None]:
        if isinstance(state, RingState):
            return self.attend_next(query, source, state)
        if state is None:
            front = {f"front_{name}": part[:, :, : self.front] for name, part in source.items()} if self.front else {}
            mask = self.whole_mask(rows)
            return self.attend(mask, **query, **self.repeat_heads(source), **self.repeat_heads(front)), None
        after = state.progress.advance(rows)
        joined = {name: torch.cat([old, source[name]], 2) for name, old in zip(source, state.tail, strict=True)}
        front = {
            f"front_{name}": self._fill_front(old, source[name], rows)
            for name, old in zip(source, state.front, strict=False)
        }
        shift = state.tail[0].shape[2]
        S = shift + rows.T
        mask = Mask(rows.start, rows.start - shift, after.length, rows.T, S, True, after.uniform, shift)
        seen_front = {name: part[:, :, : self.front] for name, part in front.items()}
        o = self.attend(mask, **query, **self.repeat_heads(joined), **self.repeat_heads(seen_front))
        W = min(self.reach, S)
        if after.uniform:
            # a copy, lest a window hold on to a whole prompt
            tail = tuple(part[:, :, S - W :].clone() for part in joined.values())
        else:
            at = (shift + rows.count[:, None] - W + torch.arange(W, device=rows.count.device)).clamp(min=0)
            at = at[:, None, :, None]
            tail = tuple(part.gather(2, at.expand(-1, part.shape[1], -1, part.shape[3])) for part in joined.values())
        return o, TailState(tail, tuple(front.values()), after)

    @final
    def attend_split(self, split: Split, rows: Rows, query: dict[str, Tensor], source: dict[str, Tensor]) -> Tensor:
        if self.shape.role != "causal":
            return super().attend_split(split, rows, query, source)
        tail = tuple(last_tokens_before(split, part, self.reach) for part in source.values())
        front: tuple[Tensor, ...] = ()
        if self.front:
            first = (tokens_before(split, part)[:, :, : self.front] for part in source.values())
            front = tuple(F.pad(part, (0, 0, 0, self.front + 1 - part.shape[2])) for part in first)
        length = split.rank * rows.T
        progress = Progress(torch.full_like(rows.count, length), length, True, self.facts.name)
        return tied(self.attend_self(rows, query, source, TailState(tail, front, progress))[0], *tail, *front)

    @final
    def takes_whole(self, mask: Mask, keys: int) -> bool:
        """Whether an aligned sequence is for `attend_whole`, whose pattern compares each query with `keys` keys."""
        return surely_at_most(mask.T, min(DENSE * keys, FEW))

    @final
    def attend_whole(
        self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, sees: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Softmax attention of an aligned sequence over the keys that are seen by their positions, of all pairs: `sees`
        of queries [T, 1] and keys [T]."""
        at = torch.arange(mask.T, device=q.device)
        return self.product(mask._replace(allowed=sees(at[:, None], at)[None]), q, k, v, self.scale)

    @final
    def attend_past(
        self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, sees: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Causal softmax attention of queries that follow a past, over the keys of their reach that they see by their
        positions: `sees` of queries [B, t, 1] and keys [B, 1, s]."""
        outs = []
        for at, part in mask.pieces(PAST):
            shift = part.known_shift
            near = slice(max(0, shift - self.reach), shift + part.T)
            i = (part.q0[:, None] + torch.arange(part.T, device=q.device))[:, :, None]
            j = (part.k0[:, None] + torch.arange(near.start, near.stop, device=q.device))[:, None]
            visible = (j >= 0) & (j <= i) & sees(i, j)
            outs.append(
                F.scaled_dot_product_attention(
                    q[:, :, at],
                    k[:, :, near],
                    v[:, :, near],
                    attn_mask=visible[:, None],
                    scale=self.scale,
                    enable_gqa=q.shape[1] != k.shape[1],
                )
            )
        return torch.cat(outs, 2)

    def _fill_front(self, front: Tensor, new: Tensor, rows: Rows) -> Tensor:
        """The first tokens with new ones among them, where these stand."""
        if rows.uniform_start is not None and rows.uniform_start >= self.front:
            return front
        # padded tokens land behind the real ones of their row, where the next token overwrites them
        return put_slots(front, new, rows.positions().clamp(max=self.front))

    @final
    def empty_state(self, batch: int, capacity: int | None, dtype: torch.dtype, device: torch.device) -> TailState:
        def zeros(slots: int) -> tuple[Tensor, ...]:
            size = (batch, self.shape.kv_heads, slots, self.shape.head_width)
            return tuple(torch.zeros(size, dtype=dtype, device=device) for _ in self.input_names("key", "value"))

        front = zeros(self.front + 1) if self.front else ()
        return TailState(zeros(0), front, Progress.initial(batch, device, self.facts.name))

    @final
    def probe_self_state(self, state: TailState, names: list[str], first: int) -> TailState:
        length = state.progress.length
        at = length[:, None] + torch.arange(-state.tail[0].shape[2], 0, device=length.device)
        front = torch.arange(self.front + 1, device=length.device)[None]
        fronts = self._with_units(names, state.front, front, first) if state.front else ()
        return state._replace(tail=self._with_units(names, state.tail, at, first), front=fronts)


def _in_slots(part: Tensor, at: Tensor, slots: int) -> Tensor:
    """Vectors [B, G, n, D] at the slots [B, n] of a new buffer, with zeros in the others."""
    room = part.new_zeros(*part.shape[:2], slots, part.shape[3])
    return room.scatter_(2, at[:, None, :, None].expand_as(part), part)
