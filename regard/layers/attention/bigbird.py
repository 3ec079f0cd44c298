"""Blocks of tokens that see a window, a few global blocks and a few random ones."""

from functools import reduce
from typing import Annotated, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.reference import Row
from regard.core.rows import Mask
from regard.core.shape import Order, Shape
from regard.kernels import runs
from regard.kernels.compiling import count_blocks, exporting
from regard.kernels.parts import Blocks, Part, Runs, union
from regard.kernels.runs import Bound, Far, Lists, Pass, Where
from regard.layers.attention.base import Facts
from regard.layers.attention.cached import Cached
from regard.layers.attention.draws import RandomBuffer

Bits = TypeVar("Bits", int, Tensor)


class BigBird(RandomBuffer, Cached):
    """Zaheer et al. 2020, the ITC pattern: a row of N tokens is cut into blocks of b, the last one perhaps not full.

    Of the g global blocks half stand at the start of the row, half at its end; they see all tokens and are seen by all.
    Any other block sees, in one softmax and each token once, the global blocks, the w blocks around itself and r random
    blocks that are neither (fewer where fewer are left). The random ones are drawn uniformly for each head and block;
    they follow from the stored `seeds` of the heads and stay until `redraw()`. (The authors' code takes them from the
    first blocks of a row only, and near its end may draw a block that is seen already, which then counts twice.)
    Time N b (g + w + r), memory N.
    """

    random_buffer = "seeds"
    facts = Facts(
        name="bigbird",
        paper="Zaheer et al. 2020, Big Bird: Transformers for Longer Sequences",
        link="arXiv 2007.14062",
        family="patterns",
        formula="o_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j, j in the global, near and random blocks of i's block",
        time=Order("N b (g + w + r)", 1),
        memory=Order("N", 1),
        roles=("self",),
        refusals=(
            ("causal", "the global blocks, also those at the end, read the whole row and are read by every token"),
            ("cross", "near and global blocks are told by a query's own place, and a memory is another sequence"),
        ),
        positions=("rotation",),
    )
    examples = (
        "bigbird(block=2, random=2)",
        "bigbird(block=3, window=1, globals=3, random=1)",
        "bigbird(block=2, window=5, globals=0, random=0)",
        "bigbird(block=1, globals=1, random=4)",
    )
    reduces_to = (("bigbird(block=7)", "softmax"), ("bigbird(block=2, random=14)", "softmax"))
    grouped = True
    seeds: Tensor  # [H]

    def __init__(
        self,
        shape: Shape,
        *,
        block: Annotated[int, "block size in tokens (b)"] = 64,
        window: Annotated[int, "number of blocks seen around a block, itself included; odd (w)"] = 3,
        globals: Annotated[int, "number of global blocks: half at the start, half at the end (g)"] = 2,
        random: Annotated[int, "number of random blocks that each block sees (r)"] = 3,
    ):
        super().__init__(shape)
        sizes = (("block", block, 1), ("window", window, 1), ("globals", globals, 0), ("random", random, 0))
        for name, size, least in sizes:
            if size < least:
                raise ValueError(f"option {name!r} of 'bigbird' must be at least {least}, got {size}")
        if window % 2 == 0:
            raise ValueError(f"option 'window' of 'bigbird' must be odd, as many blocks on both sides, got {window}")
        self.block, self.side, self.random = block, window // 2, random
        self.front, self.back = globals - globals // 2, globals // 2
        self.register_buffer("seeds", torch.randint(2**31, (shape.heads,)))

    def draw_values(self, draw: torch.Generator | None = None) -> Tensor:
        """Seeds of other random blocks."""
        return torch.randint(2**31, self.seeds.shape, generator=draw)

    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (B, H, T, D), G, b, g = q.shape, k.shape[1], self.block, self.front + self.back
        fits = exporting() or (b >= 16 and b & (b - 1) == 0)
        if runs.takes(q, k, v, refusal=None if fits else f"it takes blocks of 16, 32, 64 ... tokens, got {b}"):
            return self._in_runs(mask, q, k, v)
        n = max(-(-T // b), g)
        wide, index = self.plan(-(-mask.end // b), n)
        # all rows and heads on one axis, where each block of queries has key blocks of its own
        first = torch.arange(B, device=q.device)[:, None] * G + torch.arange(H, device=q.device) // (H // G)
        keys = torch.where(index < 0, 0, index + first[:, :, None, None] * n).flatten(0, 2)
        visible = index.flatten(0, 2).repeat_interleave(b, 1)[:, None, None] >= 0
        part = Part(Runs(0, b, len(keys), b), Blocks(keys, b), mask=visible)
        real = None
        if not mask.full or n * b > T:
            real = torch.arange(n * b, device=q.device) < mask.end[:, None]
            real = real.repeat_interleave(G, 0).reshape(1, -1)
        flat_q, flat_k, flat_v = (F.pad(x, (0, 0, 0, n * b - T)).reshape(1, 1, -1, D) for x in (q, k, v))
        o = union(flat_q, flat_k, flat_v, [part], scale=self.scale, real=real).view(B, H, n, b, D)
        if g:
            at = wide[:, None, :, None, None].expand(-1, H, -1, b, D)
            rows = flat_q.view(B, H, n, b, D).gather(2, at).flatten(2, 3)
            o = o.scatter(2, at, self.product(mask._replace(T=g * b), rows, k, v, self.scale).unflatten(2, (g, b)))
        return o.flatten(2, 3)[:, :, :T]

    def _in_runs(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """By kernels that compare positions, and read the random blocks from a list."""
        (B, H, T, D), b, g, w = q.shape, self.block, self.front + self.back, 2 * self.side + 1
        blocks = count_blocks(T, b)
        n = count_blocks(T, b, g)
        count = -(-mask.end // b)
        wide, index = self.plan(count, n)
        # the near and the random blocks are those between the global ones
        last = (count - self.back).clamp(min=self.front) * b
        end = None if mask.full else mask.end
        where = Where(end=end, first=self.front * b, last=last, far_stride=last if self.back else None)
        far = Far(g * b, inner=self.front * b if self.back else 0) if g else None
        near = Bound(every=b, times=b, plus=-self.side * b)
        part = Pass(near, near._replace(plus=(self.side + 1) * b), far, block=b, listed=self.random)
        lists = Lists.of(index[:, :, :blocks, g + w :], inverse=torch.is_grad_enabled()) if self.random else None
        o = runs.attend(q, k, v, [part], scale=self.scale, where=where, lists=lists)
        if not g:
            return o
        o, q = (F.pad(x, (0, 0, 0, n * b - T)) for x in (o, q))
        at = (wide[:, :, None] * b + torch.arange(b, device=q.device)).view(B, 1, -1, 1).expand(-1, H, -1, D)
        rows = runs.attend(q.gather(2, at), k, v, [Pass()], scale=self.scale, where=Where(end=end))
        return o.scatter(2, at, rows)[:, :, :T]

    def plan(self, count: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """For rows of `count` [B] out of n blocks: the global blocks [B, g], and the blocks that each block sees,
        [B, H, n, g + w + r], none of them twice, with -1 for an entry that stands for none."""
        B, H, device = count.shape[0], self.shape.heads, count.device
        # a row of less than g blocks has padding among its global ones
        end = (count - self.back).clamp(min=self.front)[:, None]  # [B, 1]
        front = torch.arange(self.front, device=device).expand(B, -1)
        wide = torch.cat([front, end + torch.arange(self.back, device=device)], 1)
        near = torch.arange(n, device=device)[:, None] + torch.arange(-self.side, self.side + 1, device=device)
        near = torch.where((near >= self.front) & (near < end[..., None]), near, -1)  # [B, n, w]
        lists = (wide[:, None, None], near[:, None], self.draw(end[..., None], n))
        return wide, torch.cat([part.expand(B, H, n, -1) for part in lists], 3)

    def draw(self, end: Tensor, n: int) -> Tensor:
        """The random blocks of each block, [B, H, n, r], -1 where none is left: drawn without replacement among the
        blocks from `front` to `end` [B, 1, 1], without the near ones."""
        device = end.device
        block = torch.arange(n, device=device)
        low = (block - self.side).clamp(min=self.front)
        near = (torch.minimum(block + self.side + 1, end) - low).clamp(min=0)
        legal = end - self.front - near  # [B, 1, n]
        ranks: list[Tensor] = []
        # Floyd's way: at random one of the ranks up to `top`, or `top` itself where that one is taken already
        for i in range(self.random):
            top = legal - self.random + i
            rank = noise(self.seeds[:, None], block, i) % (top + 1).clamp(min=1)  # [B, H, n]
            taken = reduce(torch.logical_or, (earlier == rank for earlier in ranks), top < 0)
            ranks.append(torch.where(taken, top, rank))
        if not ranks:
            return legal.new_zeros(end.shape[0], self.shape.heads, n, 0)
        drawn = torch.stack(ranks, 3)
        far = self.front + drawn
        far = torch.where(far < low[:, None], far, far + near[..., None])
        return torch.where(drawn < 0, -1, far)

    def plain(self, row: Row) -> Tensor:
        b = self.block
        n = (row.T + b - 1) // b
        wide = {u for u in range(n) if u < self.front or u >= n - self.back}
        outs = []
        for u in range(n):
            blocks = {c for c in range(n) if u in wide or c in wide or abs(c - u) <= self.side}
            legal = [c for c in range(n) if c not in blocks]
            taken: list[int] = []
            for i in range(self.random):
                top = len(legal) - self.random + i
                if top >= 0:
                    rank = noise(int(self.seeds[row.head]), u, i) % (top + 1)
                    taken.append(top if rank in taken else rank)
            blocks |= {legal[rank] for rank in taken}
            for i in range(u * b, min(u * b + b, row.T)):
                outs.append(row.attend(i, [j for j in range(row.T) if j // b in blocks], self.scale))
        return torch.stack(outs)


def noise(seed: Bits, block: Bits, draw: int) -> Bits:
    """32 random bits that depend on these numbers and on nothing else: so lengths and batches need no table."""
    return _scramble(_scramble(_scramble(seed) ^ block) ^ draw)


def _scramble(x: Bits) -> Bits:
    # factors below 2^31: no product leaves the 63 bits of an integer tensor
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    return x ^ (x >> 15)
