"""Blocks of keys and values, sorted by a learned soft permutation before each query reads one."""

import dataclasses
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.numeric import to_wide
from regard.core.reference import Row, add_up, blend
from regard.core.rows import Mask
from regard.core.shape import Order, Shape
from regard.kernels.compiling import count_blocks
from regard.layers.attention.base import Facts
from regard.layers.attention.cached import Cached


class Sinkhorn(Cached):
    """Tay et al. 2020: the row is cut into N_B blocks of b tokens, and a network of two layers gives block u, from the
    sum x_u of its tokens, a logit for each place: R_u = W_2 relu(W_1 x_u + b_1). Normalising rows and columns in turn,
    `iterations` times, makes S = Sinkhorn(R / temperature) a soft permutation of the blocks. Block u of the sorted keys
    is sum_u' S[u, u'] K_u', of the values likewise, and the queries of block u read, in one softmax, the sorted block u
    and their own block. In training Gumbel noise is added to R. Padded tokens count as zero vectors.

    Causal: x_u is the sum of all tokens up to the first of block u, and S[u, u'] is 0 unless u' < u; the first block
    reads itself alone. Rows are normalised, columns not: where each block is read once and only by later ones, the
    first is left to the second, the second to the third, and nothing to learn. `iterations` above 0 goes there step
    by step, with columns summed over their rows up to u, so that no later block changes anything, and rows at the end.
    SortCut (`cut` above 0): every query reads the first `cut` sorted blocks and nothing else, also of a memory.

    The only public code of the authors, in the Long Range Arena, adds the outputs of two softmaxes, and sums over all
    blocks in the place of sorting them. Here W_1 is a projection of each head (`s`), and W_2 has as many rows as a row
    of `longest` tokens has blocks.
    Time N b + N^2 / b for the sorting (SortCut: N cut b + (N / b)^2), memory N + (N / b)^2.
    """

    facts = Facts(
        name="sinkhorn",
        paper="Tay et al. 2020, Sparse Sinkhorn Attention",
        link="arXiv 2002.11296",
        family="clusters",
        formula="o_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j over the block of i and the same block of S K, S V",
        time=Order("N block + N^2 / block", 2),
        memory=Order("N + (N / block)^2", 2),
        state=Order("N", 1),
        roles=("self", "causal"),
        refusals=(
            ("cross", "a query reads the sorted block that stands where its own does: build it with cut above 0"),
        ),
        exact=False,
        signed=True,
    )
    examples = (
        "sinkhorn(block=3, longest=2048)",
        "sinkhorn(block=3, longest=2048, iterations=2, temperature=1.5, local='added')",
        "sinkhorn(block=4, longest=2048, local='none')",
        "sinkhorn(block=3, longest=2048, cut=2)",
    )
    reduces_to = (
        ("sinkhorn(block=64)", "softmax"),
        ("sinkhorn(block=64, local='none')", "softmax"),
        ("sinkhorn(block=64, cut=1)", "softmax"),
    )
    inputs = {"q": "query", "k": "key", "v": "value", "s": "key"}

    def __init__(
        self,
        shape: Shape,
        *,
        block: Annotated[int, "block size in tokens (b)"] = 64,
        longest: Annotated[int, "maximum input length in tokens"] = 4096,
        iterations: Annotated[int | None, "number of Sinkhorn iterations; None: 7, causal 0"] = None,
        temperature: Annotated[float, "temperature of the sorting: lower is closer to a permutation"] = 0.75,
        local: Annotated[
            Literal["joint", "added", "none"],
            "a query's own block: in one softmax with the sorted one, in a second softmax that is added, or not read",
        ] = "joint",
        cut: Annotated[int, "SortCut: number of sorted blocks that every query reads, and nothing else; 0: no cut"] = 0,
    ):
        if cut:
            why = "the sorted blocks hold the whole row, of which a query may see a part"
            self.facts = dataclasses.replace(
                self.facts,
                time=Order("N cut block + (N / block)^2", 2),
                roles=("self", "cross"),
                refusals=(("causal", why),),
                state=None,
            )
        elif local == "none":
            why = "the first block has none before it and could read itself only: choose local='joint'"
            refusals = (*self.facts.refusals, ("causal", why))
            self.facts = dataclasses.replace(self.facts, roles=("self",), refusals=refusals, state=None)
        elif shape.role == "causal" and local == "joint":
            self.facts = dataclasses.replace(self.facts, signed=False)
        super().__init__(shape)
        causal = shape.role == "causal"
        iterations = (0 if causal else 7) if iterations is None else iterations
        least = {"block": 1, "longest": 1, "iterations": 0 if causal else 1}
        for name, size in {"block": block, "longest": longest, "iterations": iterations}.items():
            if size < least[name]:
                raise ValueError(f"option {name!r} of 'sinkhorn' must be at least {least[name]}, got {size}")
        if temperature <= 0:
            raise ValueError(f"option 'temperature' of 'sinkhorn' must be above 0, got {temperature}")
        if cut and local != "joint":
            raise ValueError(f"option 'cut' of 'sinkhorn' reads sorted blocks only: leave out local={local!r}")
        self.block, self.longest, self.iterations = block, longest, iterations
        self.temperature, self.local, self.cut = temperature, local, cut
        self.place = nn.Parameter(torch.empty(shape.heads, -(-longest // block), shape.head_width))
        self.offset = nn.Parameter(torch.zeros(shape.heads, shape.head_width))
        nn.init.normal_(self.place, std=shape.head_width**-0.5)

    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
        T, S, b = mask.T, mask.S, self.block
        if self.longest < S:
            raise ValueError(
                f"'sinkhorn' got {S} tokens to sort (padding included), expected at most longest={self.longest}: "
                f"build it with longest={S} or more, or shorten the input"
            )
        if not mask.full:
            k, v, s = (torch.where(mask.real()[:, None, :, None], x, 0) for x in (k, v, s))
        room = count_blocks(S, b) * b - S
        k, v, s = (F.pad(x, (0, 0, 0, room)).unflatten(2, (-1, b)) for x in (k, v, s))  # [B, H, U, b, D]
        order = self._sort(mask, s).to(k.dtype)  # [B, H, U, U]
        if self.cut:
            return self._cut(mask, q, k, v, order[:, :, : self.cut])
        if T == 1 and S > 1:
            return self._step(mask, q, k, v, order)
        at = (mask.q0[:, None] + torch.arange(T, device=q.device))[:, None, :, None].expand_as(q)
        if T < S:
            # each query at its place in the row
            q = q.new_zeros(*q.shape[:2], S, q.shape[3]).scatter(2, at, q)
        q = F.pad(q, (0, 0, 0, room)).unflatten(2, (-1, b))
        U, slot = q.shape[2], torch.arange(b, device=q.device)
        if mask.causal:
            # padding stands behind all queries
            in_block = (slot <= slot[:, None])[None, None].expand(q.shape[0], U, -1, -1)
            far = (torch.arange(U, device=q.device) > 0)[None, :, None, None].expand(q.shape[0], -1, b, b)
        else:
            in_block = (slot + b * torch.arange(U, device=q.device)[:, None] < mask.end[:, None, None])[:, :, None]
            far = (slot < mask.end[:, None])[:, None, None].expand_as(in_block)
        sorted_k, sorted_v = (torch.einsum("bhuw,bhwsd->buhsd", order, x).flatten(0, 1) for x in (k, v))
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [B U, H, b, D]
        o = self._read(q, k, v, in_block.flatten(0, 1)[:, None], sorted_k, sorted_v, far.flatten(0, 1)[:, None])
        o = o.unflatten(0, (-1, U)).transpose(1, 2).flatten(2, 3)[:, :, :S]
        return o if T == S else o.gather(2, at)

    def _sort(self, mask: Mask, s: Tensor) -> Tensor:
        """The soft permutation S [B, H, U, U], zeros where a block may not be read."""
        s = to_wide(s)
        U = s.shape[2]
        blocks = torch.arange(U, device=s.device)
        total = s.sum(3)
        if mask.causal:
            total = F.pad(total.cumsum(2)[:, :, :-1], (0, 0, 1, 0)) + s[:, :, :, 0]
            allowed = blocks < blocks[:, None]
        else:
            allowed = (blocks * self.block < mask.end[:, None])[:, None, None]
            allowed = allowed & allowed.transpose(2, 3)
        hidden = torch.relu(total + self.offset[:, None].to(s.dtype))
        logits = torch.einsum("bhud,hwd->bhuw", hidden, self.place[:, :U].to(s.dtype))
        if self.training:
            logits = logits - torch.empty_like(logits).exponential_().log()
        least = torch.finfo(logits.dtype).min
        logits = torch.where(allowed, logits / self.temperature, least)
        for _ in range(self.iterations):
            logits = torch.where(allowed, logits - logits.logsumexp(3, keepdim=True), least)
            column = logits.logcumsumexp(2) if mask.causal else logits.logsumexp(2, keepdim=True)
            logits = torch.where(allowed, logits - column, least)
        if mask.causal:
            logits = torch.where(allowed, logits - logits.logsumexp(3, keepdim=True), least)
        return logits.exp()

    def _cut(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, order: Tensor) -> Tensor:
        sorted_k, sorted_v = (torch.einsum("bhuw,bhwsd->bhusd", order, x).flatten(2, 3) for x in (k, v))
        rows = torch.arange(order.shape[2], device=q.device) * self.block < mask.end[:, None]
        slots = torch.arange(self.block, device=q.device) < mask.end[:, None]
        visible = (rows[:, :, None] & slots[:, None]).flatten(1)[:, None, None]
        return F.scaled_dot_product_attention(q, sorted_k, sorted_v, attn_mask=visible, scale=self.scale)

    def _step(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, order: Tensor) -> Tensor:
        """One new token per row: its block, and the sorted one, of that block alone."""
        (H, U, b, D), block = k.shape[1:], mask.q0 // self.block
        order = order.gather(2, block[:, None, None, None].expand(-1, H, 1, U))
        sorted_k, sorted_v = (torch.einsum("bhuw,bhwsd->bhsd", order, x) for x in (k, v))
        at = block[:, None, None, None, None].expand(-1, H, 1, b, D)
        k, v = (x.gather(2, at)[:, :, 0] for x in (k, v))
        in_block = torch.arange(b, device=q.device) <= (mask.q0 % b)[:, None]
        far = (block > 0)[:, None].expand_as(in_block)
        return self._read(q, k, v, in_block[:, None, None], sorted_k, sorted_v, far[:, None, None])

    def _read(
        self, q: Tensor, k: Tensor, v: Tensor, in_block: Tensor, sorted_k: Tensor, sorted_v: Tensor, far: Tensor
    ) -> Tensor:
        """Queries over their own block and the sorted one, each with what is visible of it."""
        if self.local == "joint":
            k, v, in_block = torch.cat([sorted_k, k], 2), torch.cat([sorted_v, v], 2), torch.cat([far, in_block], 3)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=in_block, scale=self.scale)
        o = F.scaled_dot_product_attention(q, sorted_k, sorted_v, attn_mask=far, scale=self.scale)
        if self.local == "none":
            return o
        return F.scaled_dot_product_attention(q, k, v, attn_mask=in_block, scale=self.scale) + o

    def plain(self, row: Row) -> Tensor:
        b, zero = self.block, torch.zeros_like(row.v[0])
        blocks = [range(first, min(first + b, row.S)) for first in range(0, row.S, b)]
        order = self._plain_order(row, blocks)

        def mixed(u: int, slot: int, vectors: Tensor) -> Tensor:
            return sum((w * vectors[blocks[c][slot]] for c, w in order[u].items() if slot < len(blocks[c])), zero)

        outs = []
        for i in range(row.T):
            in_block = [] if self.cut or self.local == "none" else [j for j in blocks[i // b] if j in row.past(i)]
            places = range(min(self.cut, len(blocks))) if self.cut else [i // b]
            far = [(u, slot) for u in places if order[u] for slot in range(min(b, row.S))]
            keys = [[mixed(u, slot, row.k) for u, slot in far], [row.k[j] for j in in_block]]
            values = [[mixed(u, slot, row.v) for u, slot in far], [row.v[j] for j in in_block]]
            if self.local == "joint":
                keys, values = [keys[0] + keys[1]], [values[0] + values[1]]
            out = zero
            for some_keys, some_values in zip(keys, values, strict=True):
                if some_keys:
                    out = out + blend(torch.stack([self.scale * (row.q[i] @ k) for k in some_keys]), some_values)
            outs.append(out)
        return torch.stack(outs)

    def _plain_order(self, row: Row, blocks: list[range]) -> list[dict[int, Tensor]]:
        """S as the entries of each row that are not zero."""
        order = []
        for u, block in enumerate(blocks):
            tokens = range(block[0] + 1) if row.causal else block
            hidden = torch.relu(add_up(row.values["s"][i] for i in tokens) + self.offset[row.head])
            logits = [
                hidden @ self.place[row.head, c] / self.temperature for c in range(u if row.causal else len(blocks))
            ]
            order.append({c: torch.exp(x - max(logits).detach()) for c, x in enumerate(logits)})
        for _ in range(self.iterations):
            order = [{c: x / sum(entries.values()) for c, x in entries.items()} for entries in order]
            rows = range(len(order))
            above = [[t for t in rows if t <= u or not row.causal] for u in rows]
            order = [
                {c: x / sum(order[t][c] for t in above[u] if c in order[t]) for c, x in order[u].items()} for u in rows
            ]
        if row.causal:
            order = [{c: x / sum(entries.values()) for c, x in entries.items()} for entries in order]
        return order
