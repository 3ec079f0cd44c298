"""Keys and values shortened by a convolution."""

from dataclasses import replace
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.numeric import masked_softmax
from regard.core.reference import Row, add_up, blend
from regard.core.rows import Memory, Rows
from regard.core.shape import Order, Shape
from regard.core.state import Progress, take_rows
from regard.kernels.compiling import count_blocks, is_dynamic
from regard.layers.attention.base import Facts
from regard.layers.attention.cached import put_slots
from regard.layers.attention.projected import CrossState, Projected


class CompressedState(NamedTuple):
    """The slots of each row, unfinished ones not read, and the tokens of its unfinished block."""

    slots: tuple[Tensor, Tensor]  # [B, G, C, D]
    tail: tuple[Tensor, Tensor]  # [B, G, factor - 1, D], from the left
    progress: Progress


class Compressed(Projected):
    """Liu et al. 2018, Memory-Compressed Attention: Attention(Q, Conv(K), Conv(V)), a convolution of width and stride f
    (our `factor`; 3 in the paper) over the keys of a head and another over its values. Slot t stands for the tokens
    t f, ..., t f + f - 1. Causal: query i sees the slots whose last token is at most i. Before the blocks stands one
    slot more, since the first queries see no finished block: the first token as it is, as in the authors' code.

    The last block is filled up with zeros. The authors' code convolves the layer's input and projects the result; the
    paper projects first, as here. In their code the last token of a block does not see it yet. The convolutions start
    as the mean of a block. The paper's stack, local layers in turn with compressed ones, is the list
    `[local(window=256), compressed]`. Time N^2 / f, memory N, state N / f.
    """

    facts = Facts(
        name="compressed",
        paper="Liu et al. 2018, Generating Wikipedia by Summarizing Long Sequences",
        link="arXiv 1801.10198",
        family="low rank",
        formula="o_i = sum_t softmax_t(q_i . k'_t / sqrt(D)) v'_t, k'_t = sum_{r < f} K_r k_{tf+r}, and v' likewise",
        time=Order("N^2 / factor", 2),
        memory=Order("N", 1),
        state=Order("N / factor", 1),
        columns="slots",
    )
    examples = (
        "compressed(factor=3)",
        "compressed(factor=4, first='learned')",
        "compressed(factor=2, first='none')",
    )
    reduces_to = (("compressed(factor=1, first='none')", "softmax"),)
    grouped = True
    piece = 256  # queries at a time in decoding: the mask of a piece stays linear in the length

    def __init__(
        self,
        shape: Shape,
        *,
        factor: Annotated[int, "compression factor: tokens per slot, the width and stride of the convolution"] = 3,
        first: Annotated[
            Literal["token", "learned", "none"],
            "the slot before the blocks: the first token as it is, or a learned key and value; with 'none' the first "
            "factor - 1 tokens of a causal layer see nothing and give zeros",
        ] = "token",
    ):
        if factor < 1:
            raise ValueError(f"option 'factor' of 'compressed' must be at least 1, got {factor}")
        if first == "none" and factor > 1 and shape.role == "causal":
            # the weights of a query that sees nothing sum to zero
            self.facts = replace(self.facts, signed=True)
        super().__init__(shape)
        self.factor, self.first, self.lead = factor, first, int(first != "none")
        G, D = shape.kv_heads, shape.head_width
        for name in ("k", "v"):
            mean = torch.eye(D).div(factor).repeat(G, factor, 1, 1)
            self.register_parameter(f"conv_{name}", nn.Parameter(mean))  # [G, factor, D in, D out]
            self.register_parameter(f"offset_{name}", nn.Parameter(torch.zeros(G, D)) if shape.input_bias else None)
            self.register_parameter(f"first_{name}", nn.Parameter(torch.zeros(G, D)) if first == "learned" else None)

    def attend_self(
        self, rows: Rows, query: dict[str, Tensor], source: dict[str, Tensor], state: CompressedState | None
    ) -> tuple[Tensor, CompressedState | None]:
        q = query["q"]
        if self.shape.role == "self":
            k, v = self._compress(rows.real(), source)
            return self._attend(q, k, v, None if rows.uniform_start is not None else self._filled(rows.count, k)), None
        if state is None:
            k, v = self._compress(None, source)
            # folded queries and slots would be two dynamic sizes, of which PyTorch 2.11 does not know that they agree
            return self._attend(q, k, v, self._finished(rows, k)) if is_dynamic(rows.T) else self._causal(q, k, v), None
        fresh = state.progress.longest == 0
        state, k, v = self._append(rows, source, state)
        if fresh:
            # every row starts at 0, ragged or not
            return self._causal(q, k, v), state
        visible = self._finished(rows, k)
        pieces = zip(q.split(self.piece, 2), visible.split(self.piece, 2), strict=True)
        return torch.cat([self._attend(some, k, v, slots) for some, slots in pieces], 2), state

    def project_memory(self, source: dict[str, Tensor], memory: Memory) -> CrossState:
        rows = memory.rows()
        slots = self._compress(rows.real(), source)
        return CrossState(slots, rows.count, memory.count is None, rows.T, mechanism=self.facts.name)

    def attend_memory(self, query: dict[str, Tensor], state: CrossState) -> Tensor:
        k, v = state.parts
        return self._attend(query["q"], k, v, None if state.full else self._filled(state.count, k))

    def map(self, x, rows=None, *, state=None, memory=None, stream=None) -> Tensor:
        """[B, H, T, slots]: the values of a slot are matrices away from those of its tokens."""
        rows = rows or Rows.full(x)
        query, source = self.project_inputs(x, rows, memory)
        if self.shape.role == "cross":
            if state is None:
                assert memory is not None, "role 'cross' reads a memory or a state"
                state = self.project_memory(source, memory)
            k, visible = state.parts[0], self._filled(state.count, state.parts[0])
        elif state is not None:
            copy = take_rows(state, torch.arange(len(x), device=x.device))
            k = self._append(rows, source, copy)[1]
            visible = self._finished(rows, k)
        else:
            k = self._compress(rows.real(), source)[0]
            visible = self._filled(rows.count, k) if self.shape.role == "self" else self._finished(rows, k)
        k = k.repeat_interleave(self.shape.heads // self.shape.kv_heads, 1)
        return masked_softmax(query["q"] * self.scale @ k.mT, visible)

    def attend_values(
        self, rows: Rows, query: dict[str, Tensor], source: dict[str, Tensor], memory: Memory | None
    ) -> Tensor:
        """Values [B, G, slots, D]."""
        read = rows if memory is None else memory.rows()
        k = self._compress_input("k", read.real(), source["k"])
        visible = self._finished(rows, k) if self.shape.role == "causal" else self._filled(read.count, k)
        return self._attend(query["q"], k, source["v"], visible)

    def slots(self, x, rows=None, *, memory=None) -> Tensor:
        rows = rows or Rows.full(x)
        source = self.project_inputs(x, rows, memory)[1]
        v = self._compress(rows.real(), source)[1] if memory is None else self.project_memory(source, memory).parts[1]
        return v.repeat_interleave(self.shape.heads // self.shape.kv_heads, 1)

    def empty_state(
        self, batch: int, capacity: int | None, dtype: torch.dtype, device: torch.device
    ) -> CompressedState:
        G, D, f = self.shape.kv_heads, self.shape.head_width, self.factor

        def zeros(slots: int) -> Tensor:
            return torch.zeros((batch, G, slots, D), dtype=dtype, device=device)

        room = 0 if capacity is None else capacity // f + 1
        k, v = (F.pad(self._first(name, zeros(1)), (0, 0, 0, room)) for name in "kv")
        return CompressedState((k, v), (zeros(f - 1), zeros(f - 1)), Progress.initial(batch, device))

    def _compress(self, real: Tensor | None, source: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The slots of whole rows, [B, G, lead + ceil(S / factor), D] of keys and of values."""
        return self._compress_input("k", real, source["k"]), self._compress_input("v", real, source["v"])

    def _compress_input(self, name: str, real: Tensor | None, x: Tensor) -> Tensor:
        if real is not None:
            # zero vectors in the padding still have keys and values: the biases
            x = torch.where(real[:, None, :, None], x, 0)
        S = x.shape[2]
        blocks = self._blocks(name, F.pad(x, (0, 0, 0, count_blocks(S, self.factor) * self.factor - S)))
        return torch.cat([self._first(name, x), blocks], 2)

    def _blocks(self, name: str, x: Tensor) -> Tensor:
        """[B, G, n factor, D] -> [B, G, n, D]"""
        blocks = x.unflatten(2, (-1, self.factor)).flatten(3) @ getattr(self, f"conv_{name}").flatten(1, 2)
        offset = getattr(self, f"offset_{name}")
        return blocks if offset is None else blocks + offset[:, None]

    def _first(self, name: str, x: Tensor) -> Tensor:
        """The slot before the blocks, [B, G, 1 or 0, D]."""
        if self.first == "learned":
            return getattr(self, f"first_{name}").to(x.dtype)[:, None].expand(len(x), -1, -1, -1)
        return x[:, :, : self.lead]

    def _filled(self, count: Tensor, k: Tensor) -> Tensor:
        """[B, 1, 1, slots]: what holds a real token; the first slot, where there is any."""
        at = (torch.arange(k.shape[2], device=k.device) - self.lead).clamp(min=0) * self.factor
        return (at < count[:, None])[:, None, None]

    def _finished(self, rows: Rows, k: Tensor) -> Tensor:
        """[1 or B, 1, T, slots]: the first slot, and the blocks that end at the query or before."""
        limit = self.lead + (rows.positions() + 1) // self.factor
        return (torch.arange(k.shape[2], device=k.device) < limit[..., None])[:, None]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self.scale, enable_gqa=gqa)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Whole rows. The queries i with i + 1 = c f + r see c blocks: for each r they are, in order of c, a causal
        attention like any other, so the remainders fold into the batch and no mask is made."""
        (B, _, T, _), f = q.shape, self.factor
        # without a first slot, c starts at 1
        before = 1 if self.lead else 1 - f
        if T + before <= 0:
            return torch.zeros_like(q)
        behind = count_blocks(T + before, f) * f - (T + before)
        folded = F.pad(q, (0, 0, before, behind)).unflatten(2, (-1, f)).movedim(3, 1).flatten(0, 1)  # [B f, H, C, D]
        C = folded.shape[2]
        k, v = (part[:, :, :C].repeat_interleave(f, 0) for part in (k, v))
        gqa = q.shape[1] != k.shape[1]
        o = F.scaled_dot_product_attention(folded, k, v, is_causal=True, scale=self.scale, enable_gqa=gqa)
        o = o.unflatten(0, (B, f)).movedim(1, 3).flatten(2, 3)
        return F.pad(o, (0, 0, -before, -behind))

    def _append(
        self, rows: Rows, source: dict[str, Tensor], state: CompressedState
    ) -> tuple[CompressedState, Tensor, Tensor]:
        """The state after the new tokens, and the keys and values of all slots, of which the last may be unfinished."""
        f, T, length = self.factor, rows.T, state.progress.length
        pending, done, device = length % f, length // f, length.device
        new = -(-T // f)  # slots that may end among the new tokens
        behind = pending[:, None] + torch.arange(T, device=device)
        at = self.lead + done[:, None] + torch.arange(new, device=device)
        rest = (pending + rows.count) // f * f
        rest = (rest[:, None] + torch.arange(f - 1, device=device)).clamp(max=T + f - 2)[:, None, :, None]
        top, begins = self.lead + state.progress.longest // f, (length == 0)[:, None, None, None]
        if self.first == "token":
            at = F.pad(at, (1, 0))
        slots: list[Tensor] = []
        tails: list[Tensor] = []
        for (name, part), old, tail in zip(source.items(), state.slots, state.tail, strict=True):
            joined = put_slots(F.pad(tail, (0, 0, 0, T)), part, behind)
            blocks = self._blocks(name, joined[:, :, : new * f])
            if self.first == "token":
                blocks = torch.cat([torch.where(begins, part[:, :, :1], old[:, :, :1]), blocks], 2)
            if torch.is_grad_enabled():
                slot = put_slots(F.pad(old[:, :, :top], (0, 0, 0, new)), blocks, at)
            else:
                room = old.shape[2]
                slot = old if room >= top + new else F.pad(old, (0, 0, 0, max(top + new - room, room)))
                slot.transpose(1, 2)[torch.arange(part.shape[0], device=device)[:, None], at] = blocks.transpose(1, 2)
            slots.append(slot)
            tails.append(joined.gather(2, rest.expand(-1, part.shape[1], -1, part.shape[3])))
        (k, v), (tail_k, tail_v) = slots, tails
        state = CompressedState((k, v), (tail_k, tail_v), state.progress.advance(rows))
        return state, k[:, :, : top + new], v[:, :, : top + new]

    def plain(self, row: Row) -> Tensor:
        f, head = self.factor, row.head * self.shape.kv_heads // self.shape.heads

        def slots(name: str, x: Tensor) -> list[Tensor]:
            made: list[Tensor] = []
            if self.first != "none":
                made.append(x[0] if self.first == "token" else getattr(self, f"first_{name}")[head])
            conv, offset = getattr(self, f"conv_{name}")[head], getattr(self, f"offset_{name}")
            for t in range(-(-row.S // f)):
                block = add_up(conv[r].T @ x[t * f + r] for r in range(f) if t * f + r < row.S)
                made.append(block if offset is None else block + offset[head])
            return made

        keys, values, outs = slots("k", row.k), slots("v", row.v), []
        for i in range(row.T):
            past = [t for t in range(len(keys)) if not row.causal or t < self.lead or (t - self.lead) * f + f - 1 <= i]
            logits = [self.scale * (row.q[i] @ keys[t]) for t in past]
            outs.append(blend(torch.stack(logits), [values[t] for t in past]) if past else torch.zeros_like(row.q[i]))
        return torch.stack(outs)
