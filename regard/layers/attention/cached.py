"""Mechanisms that keep every key and value while decoding: the KV cache."""

from abc import abstractmethod
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import ring
from regard.core.rows import Mask, Rows
from regard.core.sequence import Split, tied, tokens_before
from regard.core.state import Progress, RingState, check_rows, fix_bound, merge_fields, take_rows
from regard.layers.attention.attending import Attending


class CacheState(NamedTuple):
    """Every key and value so far: slot = position. Slots from the length of a row on are not read."""

    parts: tuple[Tensor, ...]  # [B, G, C, D]
    progress: Progress

    def select(self, rows: Tensor) -> "CacheState":
        check_rows(rows, self)
        return self.copy_rows(rows)

    def copy_rows(self, rows: Tensor) -> "CacheState":
        parts, filled_to = [], self.progress.longest
        for part in self.parts:
            copy = part.new_empty((len(rows), *part.shape[1:]))
            filled = part[:, :, :filled_to]
            if torch.is_grad_enabled():
                copy[:, :, :filled_to] = filled[rows]
            else:
                # without a copy in between
                torch.index_select(filled, 0, rows, out=copy[:, :, :filled_to])
            parts.append(copy)
        return self._replace(parts=tuple(parts), progress=take_rows(self.progress, rows))

    def merge(self, other: "CacheState", rows: Tensor | None) -> "CacheState":
        capacity = max(part.shape[2] for part in (*self.parts, *other.parts))
        before, filled, grows = self.progress.longest, other.progress.longest, capacity > self.parts[0].shape[2]
        if rows is None or grows or torch.is_grad_enabled():
            return merge_fields(self.with_room(capacity), other.with_room(capacity), rows)
        progress = self.progress.merge(other.progress, rows)
        for part, new in zip(self.parts, other.parts, strict=True):
            # slots up to the longest row hold numbers
            part[:, :, before : progress.longest] = 0
            part[rows, :, :filled] = new[:, :, :filled]
            part[rows, :, filled : progress.longest] = 0
        return self._replace(progress=progress)

    def with_room(self, capacity: int) -> "CacheState":
        """A copy with this many slots, zeros in those that are not filled."""
        filled = (part[:, :, : self.progress.longest] for part in self.parts)
        padded = (F.pad(part, (0, 0) * (part.dim() - 3) + (0, capacity - part.shape[2])) for part in filled)
        return self._replace(parts=tuple(padded))


class Cached(Attending):
    """State: all keys and values."""

    rings: bool = False  # True: `attend` is a softmax of scaled products, which a step may read from a ring

    def fixed_state(self, state: CacheState, capacity: int) -> CacheState | RingState:
        state = fix_bound(state, capacity)
        if not (self.rings and self.reads_by_products):
            return state
        keys, values = state.parts
        return RingState((keys, values), state.progress)

    @final
    def attend_self(
        self,
        rows: Rows,
        query: dict[str, Tensor],
        source: dict[str, Tensor],
        state: CacheState | RingState | None,
    ) -> tuple[Tensor, CacheState | RingState | None]:
        if state is None:
            return self.attend(self.whole_mask(rows), **query, **self.repeat_heads(source)), None
        if isinstance(state, RingState):
            return self.attend_next(query, source, state)
        before, after = state.progress.longest, state.progress.advance(rows)
        parts = tuple(
            append_to_cache(old, new, rows, before) for old, new in zip(state.parts, source.values(), strict=True)
        )
        # before the first token every row starts at 0, ragged or not
        shift, S, end = 0 if before == 0 else rows.uniform_start, after.longest, after.length
        mask = Mask(rows.start, torch.zeros_like(end), end, rows.T, S, True, after.uniform, shift)
        filled = dict(zip(source, (part[:, :, :S] for part in parts), strict=True))
        return self.attend(mask, **query, **self.repeat_heads(filled)), CacheState(parts, after)

    @final
    def attend_split(self, split: Split, rows: Rows, query: dict[str, Tensor], source: dict[str, Tensor]) -> Tensor:
        if self.shape.role != "causal":
            return super().attend_split(split, rows, query, source)
        if self.rings and self.reads_by_products and not self.has_dropout and ring.takes(query["q"]):
            k, v = (part.repeat_interleave(self.shape.heads // part.shape[1], 1) for part in source.values())
            return ring.attend_ring(split, query["q"], k, v, self.scale)
        parts = tuple(tokens_before(split, part) for part in source.values())
        length = parts[0].shape[2]
        state = CacheState(parts, Progress(torch.full_like(rows.count, length), length, True, self.facts.name))
        return tied(self.attend_self(rows, query, source, state)[0], *parts)

    @final
    def empty_state(self, batch: int, capacity: int | None, dtype: torch.dtype, device: torch.device) -> CacheState:
        G, D, C = self.shape.kv_heads, self.shape.head_width, capacity or 0
        sizes = {"gate": (batch, self.shape.heads, C)}
        parts = (
            torch.zeros(sizes.get(self.inputs[name], (batch, G, C, D)), dtype=dtype, device=device)
            for name in self.input_names("key", "value", "gate")
        )
        return CacheState(tuple(parts), Progress.initial(batch, device, self.facts.name))

    @final
    def probe_self_state(self, state: CacheState, names: list[str], first: int) -> CacheState:
        at = torch.arange(state.parts[0].shape[2], device=state.progress.length.device)[None]
        return state._replace(parts=self._with_units(names, state.parts, at, first))


class Scored(Cached):
    """A mechanism that writes the logits of a few queries at a time, with nothing random in them; softmax, masks and
    positions are added here."""

    independent_queries = True

    @abstractmethod
    def score(self, mask: Mask, *args: Any, **inputs: Any) -> Tensor:
        """Logits [B, H, T, S]. The arguments after the mask are the `inputs` by name, without the values: q and k by
        default."""

    def attend_fused(self, mask: Mask, *args: Any, **inputs: Any) -> Tensor | None:
        """`attend` by a kernel that has the score inside; None where it cannot. Default: there is none."""

    def attend(self, mask: Mask, q: Tensor, v: Tensor, **keys: Tensor) -> Tensor:
        fused = self.attend_fused(mask, q=q, v=v, **keys)
        if fused is not None:
            return fused

        def read(q: Tensor, part: Mask) -> Tensor:
            visible = {name: key[:, :, : part.S] for name, key in keys.items()}
            return self.softmax_average(part, self.score(part, q=q, **visible), v[:, :, : part.S])

        return self.in_pieces(mask, q, read)


def append_to_cache(buffer: Tensor, new: Tensor, rows: Rows, filled: int) -> Tensor:
    """New tokens written behind the old ones of each row, of which the longest has `filled`: in place, or as a new
    tensor where gradients flow."""
    need = filled + rows.T
    # with gradients on, what was read before must stay as it was, also where only the queries are trained
    if torch.is_grad_enabled():
        if rows.uniform_start is not None:
            return torch.cat([buffer[:, :, :filled], new], 2)
        buffer = F.pad(buffer[:, :, :filled], (0, 0) * (buffer.dim() - 3) + (0, rows.T))
        return put_slots(buffer, new, rows.positions())
    if buffer.shape[2] < need:
        room = buffer.new_empty((*buffer.shape[:2], max(need, 2 * buffer.shape[2], 64), *buffer.shape[3:]))
        room[:, :, :filled] = buffer[:, :, :filled]
        buffer = room
    if rows.uniform_start is not None:
        buffer[:, :, rows.uniform_start : need] = new
        return buffer
    # shorter rows leave new slots unwritten, which are masked later and must hold numbers until then
    buffer[:, :, filled:need] = 0
    # padded tokens land behind the real ones of their row, where the next token overwrites them
    _put(buffer, new, rows.positions())
    return buffer


def put_slots(buffer: Tensor, new: Tensor, at: Tensor) -> Tensor:
    """A copy of [B, G, C, ...] with the new vectors [B, G, n, ...] at their slots [1 or B, n]."""
    batch = torch.arange(new.shape[0], device=new.device)[:, None]
    new = new.to(buffer.dtype)
    return buffer.transpose(1, 2).index_put((batch, at), new.transpose(1, 2)).transpose(1, 2)


def write_slots(buffer: Tensor, new: Tensor, at: Tensor, need: int) -> Tensor:
    """New vectors [B, G, n, D] at their slots [B, n] of a buffer that is to have `need` slots: in place, or as a new
    tensor where gradients flow."""
    grad, room = torch.is_grad_enabled(), buffer.shape[2]
    if room < need:
        buffer = F.pad(buffer, (0, 0, 0, (need if grad else max(need, 2 * room)) - room))
    if grad:
        return put_slots(buffer, new, at)
    _put(buffer, new, at)
    return buffer


def _put(buffer: Tensor, new: Tensor, at: Tensor) -> None:
    """Writes new vectors [B, G, n, ...] to their slots [1 or B, n]."""
    batch = torch.arange(new.shape[0], device=new.device)[:, None]
    # under autocast new vectors are of half precision, while a model began its state in that of its weights
    buffer.transpose(1, 2)[batch, at] = new.to(buffer.dtype).transpose(1, 2)
