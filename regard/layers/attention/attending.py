"""Mechanisms that attend to keys and values one by one."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.core.rows import Mask, Memory, Rows
from regard.core.state import RingState, take_rows
from regard.kernels import backends, ragged, ring
from regard.kernels.compiling import exporting, is_dynamic, surely_at_most
from regard.layers.attention.projected import CrossState, Projected
from regard.layers.position.base import Position

ROOM = 2**27  # logits of a piece on a GPU


class Attending(Projected):
    """Mechanisms that attend to keys and values one by one: cross-attention keeps them as they are."""

    @abstractmethod
    def attend(self, mask: Mask, *args: Any, **inputs: Any) -> Tensor:
        """[B, H, T, D]. A mechanism names its `inputs` as the arguments after the mask, by default q, k and v; it is
        called with names, so that only the names count."""

    # True: what a query reads depends on no other query, so `attend` may be given some of them
    independent_queries: bool = False
    piece = 64  # queries at a time where logits are made
    few = 8  # queries for which two products beat the CPU's fused kernel, as in decoding

    @final
    def product(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """softmax(scale q K^T) V with the position scheme; keys and values may have G heads."""
        gqa, content, bias = q.shape[1] != k.shape[1], self.scheme("content"), self.scheme("bias")
        if content is not None:
            return self._product_with_content(content, mask, q, k, v, scale)
        if bias is not None:
            return self._product_with_bias(bias, mask, q, k, v, scale)
        if self.has_dropout and q.device.type == "cpu":
            # drawn a piece at a time and cheaply: PyTorch's own takes 18 times as long on a CPU
            k, v = (_repeat_heads(x, q.shape[1]) for x in (k, v))
            return self.in_pieces(
                mask, q, lambda q, part: self.softmax_average(part, q * scale @ k[:, :, : part.S].mT, v[:, :, : part.S])
            )
        p = self.shape.dropout if self.has_dropout else 0.0
        if mask.allowed is not None:
            visible, some = mask.safe()
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=p, scale=scale, enable_gqa=gqa)
            return o if some is None else torch.where(some, o, 0)
        if surely_at_most(mask.T, self.few) and not gqa and _plain_cpu(q):
            return self.softmax_average(mask, q * scale @ k.transpose(2, 3), v)
        count = mask.count if not mask.causal and mask.shift == 0 and p == 0 else None
        if count is not None and ragged.takes(q, k):
            same_tokens = self.shape.role == "self" and mask.T == mask.S
            return ragged.attend_ragged(q, k, v, count, scale, own=same_tokens)
        attn_mask, is_causal = mask.sdpa()
        if attn_mask is not None and is_dynamic(mask.T):
            # the kernel would ask whether the one row of a mask is all there is
            attn_mask = attn_mask.expand(-1, -1, mask.T, -1)
        with backends.for_few_queries(q, k, mask.T, masked=attn_mask is not None):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=attn_mask, dropout_p=p, is_causal=is_causal, scale=scale, enable_gqa=gqa
            )

    def _product_with_content(
        self, scheme: Position, mask: Mask, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        k, v = (_repeat_heads(x, q.shape[1]) for x in (k, v))

        def read(q: Tensor, part: Mask) -> Tensor:
            logits = scheme.scores(q, k[:, :, : part.S], part, scale)
            return self.softmax_average(part, logits, v[:, :, : part.S])

        return self.in_pieces(mask, q, read)

    def _product_with_bias(self, scheme: Position, mask: Mask, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        gqa = q.shape[1] != k.shape[1]

        def read(q: Tensor, part: Mask) -> Tensor:
            keys, values = k[:, :, : part.S], v[:, :, : part.S]
            if self.has_dropout:
                keys, values = (_repeat_heads(x, q.shape[1]) for x in (keys, values))
                return self.softmax_average(part, q * scale @ keys.mT, values)
            logits, (visible, some) = scheme.biases(part).to(q.dtype), part.safe()
            logits = logits if visible is None else torch.where(visible, logits, -torch.inf)
            o = F.scaled_dot_product_attention(q, keys, values, attn_mask=logits, scale=scale, enable_gqa=gqa)
            return o if some is None else torch.where(some, o, 0)

        return self.in_pieces(mask, q, read)

    @property
    def reads_by_products(self) -> bool:
        """No position scheme adds to logits or values."""
        return self.position is None or self.position.facts.kind in ("input", "rotation")

    @final
    def unfused(self, mask: Mask) -> str | None:
        """Why a kernel of a score and its softmax cannot take these: what would have to be inside it."""
        if not self.reads_by_products:
            return "positions add to its logits or values"
        if self.has_dropout:
            return "it drops no weights"
        return "it takes no explicit mask" if mask.allowed is not None else None

    @final
    def attend_next(
        self, query: dict[str, Tensor], source: dict[str, Tensor], state: RingState
    ) -> tuple[Tensor, RingState]:
        """One new token per row over a ring, which is written in place."""
        o = ring.attend_next(query["q"], source["k"], source["v"], *state.parts, state.progress.length, self.scale)
        progress = state.progress._replace(length=state.progress.length + 1)
        return o, state._replace(progress=progress)

    @final
    def piece_size(self, x: Tensor, S: int) -> int:
        """Queries at a time for x [B, H, T, D] and S keys. On a GPU more, where there is room for their logits: a small
        piece costs the host as much as a large one."""
        cells = x.shape[0] * x.shape[1] * S * 64 * max(1, 64 // self.piece)
        return self.piece * max(1, ROOM // cells) if x.device.type == "cuda" else self.piece

    @final
    def in_pieces(self, mask: Mask, q: Tensor, read: Callable[[Tensor, Mask], Tensor]) -> Tensor:
        """`read` for a few queries at a time, and again in the backward pass: nothing of size T x S is kept. A program
        that is exported has no loop over a length: there all queries are read at once."""
        if exporting():
            return read(q, mask)
        outs: list[Tensor] = []
        size = self.piece_size(q, mask.S)
        for piece, (_, part) in zip(q.split(size, 2), mask.pieces(size), strict=True):
            if part.causal and part.shift is not None:
                # the host knows that no query of the piece sees the keys behind its last one
                part = part._replace(S=min(part.S, part.shift + part.T))
            if torch.is_grad_enabled():
                outs.append(checkpoint(read, piece, part, use_reentrant=False, preserve_rng_state=self.has_dropout))
            else:
                outs.append(read(piece, part))
        return torch.cat(outs, 2)

    @final
    def project_memory(self, source: dict[str, Tensor], memory: Memory) -> CrossState:
        rows, parts = memory.rows(), tuple(source.values())
        return CrossState(parts, rows.count, memory.count is None, rows.T, memory.allowed, self.facts.name)

    @final
    def attend_memory(self, query: dict[str, Tensor], state: CrossState) -> Tensor:
        zero = torch.zeros_like(state.count)
        # the size of the keys and not `state.S`, a number of the host: a program that is exported leaves it open
        T, S = next(iter(query.values())).shape[2], state.parts[0].shape[2]
        mask = Mask(zero, zero, state.count, T, S, False, state.full, 0, state.allowed)
        source = dict(zip(self.input_names("key", "value", "gate"), state.parts, strict=True))
        return self.attend(mask, **query, **self.repeat_heads(source))

    def probe_state(self, state: Any, first: int) -> Any:
        crosses, names = self.shape.role == "cross", self.input_names("key", "value", "gate")
        state = take_rows(state, torch.arange(len(state.count if crosses else state.progress.length)))
        if crosses:
            at = torch.arange(state.S, device=state.count.device)[None]
            return state._replace(parts=self._with_units(names, state.parts, at, first))
        return self.probe_self_state(state, names, first)

    def probe_self_state(self, state: Any, names: list[str], first: int) -> Any:
        """`probe_state` for role "causal". Default: the mechanism does not take that role."""
        self.not_written("probe_self_state")

    @final
    def _with_units(self, names: list[str], parts: tuple[Tensor, ...], at: Tensor, first: int) -> tuple[Tensor, ...]:
        """The parts of a state by the names of their inputs, unit vectors of the positions `at` for the values."""
        values = self.input_names("value")
        return tuple(
            self.unit_vectors(at, first, len(part), part.dtype) if name in values else part
            for name, part in zip(names, parts, strict=True)
        )

    @final
    def whole_mask(self, rows: Rows) -> Mask:
        """The mask of a whole sequence over itself."""
        causal = self.shape.role == "causal"
        end, full = rows.start + rows.count, rows.uniform_start is not None
        return Mask(rows.start, rows.start, end, rows.T, rows.T, causal, full, 0, rows.allowed)


def recomputed(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """What a function without randomness returns. The backward pass computes it again, so that nothing inside is
    kept."""
    if not torch.is_grad_enabled():
        return function(*tensors)
    return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[B, G, S, D] -> [B, H, S, D]"""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _plain_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and not torch.is_grad_enabled()
