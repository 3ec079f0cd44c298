"""The factorised patterns of the Sparse Transformer."""

from dataclasses import replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.reference import Row
from regard.core.rows import Mask
from regard.core.shape import Order, Shape
from regard.kernels import runs
from regard.kernels.band import band_parts
from regard.kernels.compiling import count_blocks, is_dynamic
from regard.kernels.parts import Part, Runs, union
from regard.kernels.runs import ALL, Bound, Far, Pass
from regard.layers.attention.base import Facts
from regard.layers.attention.cached import Cached


class Sparse(Cached):
    """Child et al. 2019, merged heads: query i sees the union of A1 and A2, each key once. Their l is our stride, their
    c our summary.

    strided: A1 = {j : i - l <= j <= i},              A2 = {j <= i : (i - j) mod l = 0}
    fixed:   A1 = {j <= i : floor(j/l) = floor(i/l)}, A2 = {j <= i : j mod l in {l - c, ..., l - 1}}

    For role "self" the condition j <= i falls away and A1 of the strided pattern is |i - j| <= l. Time N l + N^2 / l
    (fixed: N^2 c / l), which is N sqrt(N) for l near sqrt(N), as `longest` chooses it; memory N. Different
    patterns on different heads are `heads(local(...), strided(...))`; in alternating layers, a list of specs. The
    authors' code works on blocks of tokens, has l keys in A1 of the strided pattern, i - j < l, and can give each head
    of the fixed one its own place for a summary.
    """

    facts = Facts(
        name="sparse",
        paper="Child et al. 2019, Generating Long Sequences with Sparse Transformers",
        link="arXiv 1904.10509",
        family="patterns",
        formula="o_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j over A1 and A2: a window and every stride-th key, or "
        "the block of i and the last `summary` keys of each block",
        time=Order("N stride + N^2 / stride", 2),
        memory=Order("N", 1),
        state=Order("N", 1),
        roles=("self", "causal"),
        refusals=(("cross", "windows and strides of positions have no meaning between two sequences"),),
        positions=("rotation",),
    )
    examples = ("sparse(stride=2)", "sparse(pattern='fixed', stride=5, summary=3)", "sparse(longest=33)")
    reduces_to = (
        ("sparse(stride=64)", "softmax"),
        ("sparse(stride=1)", "softmax"),
        ("sparse(pattern='fixed', stride=64)", "softmax"),
        ("sparse(pattern='fixed', stride=4, summary=4)", "softmax"),
    )
    grouped = True
    piece = 256  # queries at a time in decoding: the mask of a piece stays linear in the length

    def __init__(
        self,
        shape: Shape,
        *,
        pattern: Annotated[
            Literal["strided", "fixed"], "'strided' for data with a period (images), 'fixed' for data without (text)"
        ] = "strided",
        stride: Annotated[
            int | None, "l in the paper: the width of the window or block, and the step of the far keys; default 128"
        ] = None,
        summary: Annotated[int, "c in the paper, for 'fixed': keys at the end of each block that other blocks see"] = 8,
        longest: Annotated[int | None, "maximum input length in tokens, instead of stride: l is near its root"] = None,
    ):
        if longest is not None:
            self.facts = replace(self.facts, time=Order("N sqrt(N)", 1.5))
        super().__init__(shape)
        if stride is not None and longest is not None:
            raise ValueError(f"'sparse' takes stride or longest, got stride={stride} and longest={longest}")
        for name, size in (("stride", stride), ("longest", longest)):
            if size is not None and size < 1:
                raise ValueError(f"option {name!r} of 'sparse' must be at least 1, got {size}")
        stride = round(longest**0.5) if longest is not None else 128 if stride is None else stride
        if pattern == "fixed" and not 1 <= summary <= stride:
            raise ValueError(
                f"option 'summary' of 'sparse' must be from 1 to stride={stride}, got {summary}: "
                f"give summary={min(8, max(1, stride // 4))}, say, or a larger stride"
            )
        self.pattern, self.stride, self.summary = pattern, stride, summary

    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inside = self.stride > 1 and (is_dynamic(mask.S) or self.stride < mask.S)
        if mask.T > 1 and inside and runs.takes(q, k, v):
            return runs.attend(q, k, v, self._passes(mask.S, mask.causal), scale=self.scale, where=mask.where())
        # slot = position, so as many queries as keys are a whole sequence
        if mask.T == mask.S:
            return self._whole(mask, q, k, v)
        if mask.T == 1:
            return self._step(mask, q, k, v)
        visible = ((at, self._visible(part)[:, None]) for at, part in mask.pieces(self.piece))
        return torch.cat([self._softmax(q[:, :, at], k, v, seen) for at, seen in visible], 2)

    def _whole(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        N, l = mask.T, self.stride
        if l == 1 or l >= N:
            return self.product(mask, q, k, v, self.scale)
        pad, real = -N % l, None
        if pad:
            q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
        at = torch.arange(N + pad, device=q.device)
        if self.pattern == "fixed":
            # a copy of the summaries behind the keys, where they stand side by side
            k, v = (torch.cat([x, self._summaries(x, 2)], 2) for x in (k, v))
            at = torch.cat([at, self._summaries(at, 0)])
        if not mask.causal and (pad or not mask.full):
            real = at < mask.end[:, None]
        parts = self._strided_parts if self.pattern == "strided" else self._fixed_parts
        return union(q, k, v, parts(N + pad, mask.causal, q.device), scale=self.scale, real=real)[:, :, :N]

    def _passes(self, S: int, causal: bool) -> list[Pass]:
        """The pattern for kernels that compare positions."""
        l, c = self.stride, self.summary
        if self.pattern == "strided":
            # the class of a query has the keys 0, l, 2 l ... away
            after = Bound() if causal else Bound(plus=l)
            return [
                Pass(Bound(plus=1 - l), after, hole=not causal),
                Pass(high=Bound(plus=1) if causal else ALL, fold=l),
            ]
        block = Bound(every=l, times=l)
        if causal:
            return [Pass(block, Bound(plus=1), Far(S // l * c, Bound(every=l, times=c), l - c, c, l))]
        return [Pass(block, block._replace(plus=l - c), Far(count_blocks(S, l) * c, ALL, l - c, c, l))]

    def _strided_parts(self, N: int, causal: bool, device: torch.device) -> list[Part]:
        """Every l-th key, and what else is in the window: 1 to l - 1 away."""
        l = self.stride
        classes, after = Runs(0, N // l, l, 1, l), 0 if causal else l - 1
        away = torch.arange(1 - l, after + 1, device=device)
        others = torch.where(away == 0, -torch.inf, 0.0)[None]
        near = band_parts(N, before=l - 1, after=after, bias=others, device=device)
        return [Part(classes, classes, causal), *near]

    def _fixed_parts(self, N: int, causal: bool, device: torch.device) -> list[Part]:
        """The block of a query, and the summaries of the other blocks, which are the keys from N on."""
        l, c = self.stride, self.summary
        blocks = Runs(0, l, N // l, l)
        if causal:
            parts = [Part(blocks, blocks, causal=True)]
        else:
            parts = [Part(blocks, blocks._replace(length=l - c))] if c < l else []
        # summaries that come too late are masked in a group of queries: few against all, and never a large mask
        size = l * max(1, min(max(N // 16, 64), 1024) // l)
        earlier = torch.arange(size // l * c, device=device) // c < torch.arange(size, device=device)[:, None] // l
        for start in range(0, N, size):
            rows = Runs(start, min(size, N - start))
            seen = start // l * c if causal else N // l * c
            if seen:
                parts.append(Part(rows, Runs(N, seen)))
            if causal and size > l:
                cols = Runs(N + seen, rows.length // l * c)
                parts.append(Part(rows, cols, mask=earlier[: rows.length, : cols.length]))
        return parts

    def _summaries(self, x: Tensor, dim: int) -> Tensor:
        """The last c of each l along an axis."""
        l, c = self.stride, self.summary
        return x.unflatten(dim, (-1, l)).narrow(dim + 1, l - c, c).flatten(dim, dim + 1)

    def _step(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One query per row, over a copy of the keys it sees; what it sees has margin >= 0."""
        l, S, i, device = self.stride, mask.S, mask.q0[:, None], q.device
        # enough blocks for all slots, and never a single one, for which a compiler would make a graph of its own
        blocks = S // l + 2
        margin = at = i - torch.arange(l, device=device)
        if self.pattern == "strided":
            margin = at = torch.cat([at, i - l - l * torch.arange(blocks, device=device)], 1)
        batch = torch.arange(q.shape[0], device=device)[:, None]
        k_seen, v_seen = (x.transpose(1, 2)[batch, at.clamp(0, S - 1)].transpose(1, 2) for x in (k, v))
        if self.pattern == "fixed":
            first, far = i // l * l, self._summaries(torch.arange(blocks * l, device=device), 0)
            margin = torch.cat([at - first, first - 1 - far], 1)
            far = far.clamp(max=S - 1)
            k_seen, v_seen = (torch.cat([near, x.index_select(2, far)], 2) for near, x in ((k_seen, k), (v_seen, v)))
        return self._softmax(q, k_seen, v_seen, (margin >= 0)[:, None, None])

    def _visible(self, mask: Mask) -> Tensor:
        """[B, T, S] for any queries of role "causal"."""
        l, device = self.stride, mask.q0.device
        i = mask.q0[:, None, None] + torch.arange(mask.T, device=device)[:, None]
        j = torch.arange(mask.S, device=device)
        if self.pattern == "strided":
            pattern = (j >= i - l) | (j % l == i % l)
        else:
            pattern = (j >= i // l * l) | (j % l >= l - self.summary)
        return pattern & (j <= i)

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self.scale, enable_gqa=grouped)

    def plain(self, row: Row) -> Tensor:
        def sees(i: int, j: int) -> bool:
            if self.pattern == "strided":
                return abs(i - j) <= self.stride or (i - j) % self.stride == 0
            return i // self.stride == j // self.stride or j % self.stride >= self.stride - self.summary

        seen = ([j for j in row.past(i) if sees(i, j)] for i in range(row.T))
        return torch.stack([row.attend(i, keys, self.scale) for i, keys in enumerate(seen)])
