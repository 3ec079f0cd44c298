"""Tokens that a random hash puts together attend to each other."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.numeric import to_wide, wide_dtype
from regard.core.reference import Row, blend
from regard.core.rows import Mask
from regard.core.shape import Order, Shape
from regard.kernels import chunks as sorted_chunks
from regard.kernels.compiling import count_blocks
from regard.kernels.take import take_per_head
from regard.layers.attention.base import Facts
from regard.layers.attention.cached import Cached
from regard.layers.attention.draws import RandomBuffer, check_redraw


class Reformer(RandomBuffer, Cached):
    """Kitaev et al. 2020: queries and keys are one projection, here k, and a round of hashing gives each token a bucket
    h(k_i) = argmax([k_i R; -k_i R]) with a random R [D, b / 2]. The tokens of a row are sorted by (bucket, position)
    and cut into chunks of m; a token attends to its chunk and the one before, which for the first chunk is the last one
    of the round before (of the last round, for the first). Rounds are merged by their softmax sums, so that

        o_i = sum_j N_ij exp(k_i . k_j / |k_j|) v_j / sum_j N_ij exp(k_i . k_j / |k_j|)

    with N_ij how often i meets j in all rounds, as in the authors' code (`once`: 1, as in the paper). No token reads
    itself, unless it meets no other. Several hashes may make one bucket, `buckets=[b1, b2]`: b1 b2 buckets at the cost
    of b1 + b2.

    Later tokens move the borders of the chunks, so a token's output changes as a row grows, though no token reads what
    comes after it. Decoding sorts all tokens so far at each step: a new token's output is that of the last token of a
    whole row, and earlier outputs stay as they were given. R lives in a buffer and is drawn anew at every training step
    (`redraw`; the authors draw at every call).
    Time N (m + b) per round, and the sorting; memory N m per round.
    """

    random_buffer = "directions"
    facts = Facts(
        name="reformer",
        paper="Kitaev et al. 2020, Reformer: The Efficient Transformer",
        link="arXiv 2001.04451",
        family="clusters",
        formula="o_i = sum_j softmax_j(k_i . k_j / |k_j|) v_j, j near i in rows sorted by argmax([k R; -k R])",
        time=Order("N chunk rounds", 1),
        memory=Order("N chunk rounds", 1),
        state=Order("N", 1),
        roles=("self", "causal"),
        refusals=(("cross", "a query and its key are one vector, and a memory has keys only"),),
        prefix_invariant=False,
        split_invariant=False,
        exact=False,
    )
    examples = (
        "reformer(chunk=4, buckets=4, rounds=1)",
        "reformer(chunk=3, buckets=[2, 4], rounds=3)",
        "reformer(chunk=5, buckets=6, rounds=3, once=True)",
    )
    # one chunk holds all: then neither the hash nor the number of rounds matters
    reduces_to = (
        ("reformer(chunk=64, buckets=8, rounds=3)", "reformer(chunk=33, buckets=2, rounds=1)"),
        ("reformer(chunk=17, buckets=2, rounds=1)", "reformer(chunk=33, buckets=2, rounds=1)"),
        ("reformer(chunk=11, buckets=6, rounds=1, once=True)", "reformer(chunk=11, buckets=6, rounds=1)"),
    )
    inputs = {"k": "key", "v": "value"}
    directions: Tensor  # R [H, rounds, D, b / 2]

    def __init__(
        self,
        shape: Shape,
        *,
        chunk: Annotated[int, "chunk size in tokens of the sorted row (m in the paper)"] = 64,
        buckets: Annotated[int | tuple[int, ...], "number of hash buckets, even (b); a list: its factors"] = 64,
        rounds: Annotated[int, "number of hashing rounds: more are closer to full attention"] = 2,
        once: Annotated[
            bool, "a key met in several rounds counts once (the paper); False: each time (its code, Hugging Face)"
        ] = False,
        redraw: Annotated[int, "training steps between draws of R; 0: drawn once"] = 1,
    ):
        super().__init__(shape)
        self.chunk, self.rounds, self.once = chunk, rounds, once
        self.redraw_every = check_redraw("reformer", redraw)
        self.buckets = (buckets,) if isinstance(buckets, int) else tuple(buckets)
        for name, size in (("chunk", chunk), ("rounds", rounds)):
            if size < 1:
                raise ValueError(f"option {name!r} of 'reformer' must be at least 1, got {size}")
        if not self.buckets or any(b < 2 or b % 2 for b in self.buckets):
            raise ValueError(
                f"option 'buckets' of 'reformer' must be even and at least 2, got {buckets}: "
                "each direction makes two buckets, one on either side"
            )
        size = (shape.heads, rounds, shape.head_width, sum(self.buckets) // 2)
        self.register_buffer("directions", torch.randn(size))

    def draw_values(self, draw: torch.Generator | None = None) -> Tensor:
        """Directions of other hashes."""
        return torch.randn(self.directions.shape, generator=draw)

    def attend(self, mask: Mask, k: Tensor, v: Tensor) -> Tensor:
        T, S, m, device = mask.T, mask.S, self.chunk, k.device
        refusal = "a key that several rounds meet counts once" if self.once else None
        refusal = "a few new tokens are read by themselves" if T < S else refusal
        if sorted_chunks.takes(k, v, m, self.rounds, refusal):
            order = self._sorted(mask, k, in_triton=True)
            return sorted_chunks.attend(k, v, order, m, causal=mask.causal, end=None if mask.full else mask.end)
        k, v = (F.pad(x, (0, 0, 0, count_blocks(S, m) * m - S)) for x in (k, v))
        order = self._sorted(mask, k)  # [B, H, R, N]
        place = torch.empty_like(order).scatter_(3, order, torch.arange(order.shape[3], device=device).expand_as(order))
        chunks = order.unflatten(3, (-1, m))  # [B, H, R, C, m]
        # the last chunk that holds real tokens: padding makes no difference
        last = (mask.end.clamp(min=1) - 1)[:, None, None, None] // m
        before = chunks.gather(3, last[..., None].expand(*chunks.shape[:3], 1, m)).roll(1, 2)
        keys = torch.cat([torch.cat([before, chunks[:, :, :, :-1]], 3), chunks], 4)  # [B, H, R, C, 2 m]
        queries = chunks
        if T < S:
            # a few new tokens, each with the chunks it falls into
            at = (mask.q0[:, None] + torch.arange(T, device=device))[:, None, None].expand(*chunks.shape[:3], -1)
            keys = keys.gather(3, (place.gather(3, at) // m)[..., None].expand(-1, -1, -1, -1, 2 * m))
            queries = at[..., None]
        times = self._times(place // m, last, queries, keys) if self.once else None
        o, total = self._read(mask, k, v, queries, keys, times)  # [B, H, R, T or N, D], [B, H, R, T or N]
        if T < S:
            v = take_per_head(v, queries[:, :, 0, :, 0])
        else:
            o, total = take_per_head(o.flatten(1, 2), place.flatten(1, 2)).view_as(o), total.gather(3, place)
        o = (o * torch.softmax(total, 2).to(o.dtype)[..., None]).sum(2)
        met = total.amax(2) > torch.finfo(total.dtype).min / 2
        return torch.where(met[..., None], o, v)[:, :, :T]

    def _sorted(self, mask: Mask, k: Tensor, *, in_triton: bool = False) -> Tensor:
        """The tokens of each round in the order of their buckets, padding behind them: [B, H, R, N]"""
        if in_triton and len(self.buckets) == 1:
            bucket, N = sorted_chunks.buckets(k.detach(), self.directions), mask.S + -mask.S % self.chunk
            at = torch.arange(N, device=k.device, dtype=torch.int32)
            bucket = F.pad(bucket, (0, N - mask.S), value=self.buckets[0])
            if not mask.full:
                bucket = torch.where(at < mask.end[:, None, None, None], bucket, self.buckets[0])
            rows = bucket.shape[:3].numel()
            if rows * (self.buckets[0] + 1) * N < 2**31:
                # one number for row, bucket and place: a single sort of them all, which need not be stable
                row = torch.arange(rows, device=k.device, dtype=torch.int32).view(*bucket.shape[:3], 1)
                key = (row * (self.buckets[0] + 1) + bucket) * N + at
                return (key.flatten().sort().values % N).view_as(key)
            return bucket.argsort(dim=-1, stable=True)
        if in_triton:
            k = F.pad(k, (0, 0, 0, -mask.S % self.chunk))
        k = k.detach().to(wide_dtype(k.dtype))
        turned = torch.einsum("bhsd,hrdn->bhrsn", k, self.directions.to(k.dtype))
        bucket, factor = 0, 1
        for b, part in zip(self.buckets, turned.split([b // 2 for b in self.buckets], -1), strict=True):
            bucket = bucket + factor * torch.cat([part, -part], -1).argmax(-1)
            factor *= b
        real = torch.arange(k.shape[2], device=k.device) < mask.end[:, None]
        return torch.where(real[:, None, None], bucket, factor).argsort(dim=-1, stable=True)

    def _times(self, chunk: Tensor, last: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """How often queries [B, H, R, C, t] meet their keys [B, H, R, C, s] in all rounds, given the chunk of each
        token, [B, H, R, N], and the last one of each row: [B, H, R, C, t, s]"""
        times = torch.zeros((), dtype=torch.int, device=chunk.device)
        for r in range(self.rounds):
            here, there, after = (
                chunk[:, :, turn % self.rounds].gather(2, at.flatten(2)).view_as(at)
                for turn, at in ((r, queries), (r, keys), (r + 1, queries))
            )
            here, there = here[..., None], there[..., None, :]
            times = times + (here == there).int() + (here == there + 1).int()
            times = times + ((after == 0)[..., None] & (there == last[..., None, None])).int()
        return times

    def _read(
        self, mask: Mask, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, times: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Each round by itself: [B, H, R, C t, D], and the logarithms of its softmax sums."""
        pointing = unit(take_per_head(k, keys)) if mask.T < mask.S else take_per_head(unit(k), keys)
        logits = take_per_head(k, queries) @ pointing.transpose(-1, -2)  # [B, H, R, C, t, s]
        logits = logits.to(wide_dtype(k.dtype))
        if times is not None:
            logits = logits - times.clamp(min=1).log()
        i, j = queries[..., None], keys[..., None, :]
        visible = j < i if mask.causal else (i != j) & (j < mask.end[:, None, None, None, None, None])
        logits = torch.where(visible, logits, torch.finfo(logits.dtype).min)
        total = logits.logsumexp(-1)
        weights = torch.where(visible, (logits - total[..., None]).exp(), 0)
        return (weights.to(v.dtype) @ take_per_head(v, keys)).flatten(3, 4), total.flatten(3)

    def plain(self, row: Row) -> Tensor:
        rounds, met = [], [[] for _ in range(row.T)]
        for directions in self.directions[row.head]:
            hashes = []
            for vector in row.k.detach():
                sides, first, code, factor = vector @ directions, 0, 0, 1
                for b in self.buckets:
                    part = sides[first : first + b // 2].tolist()
                    part += [-x for x in part]
                    first, code, factor = first + b // 2, code + factor * part.index(max(part)), factor * b
                hashes.append(code)
            order = sorted(range(row.T), key=lambda i: (hashes[i], i))
            rounds.append([order[first : first + self.chunk] for first in range(0, row.T, self.chunk)])
        for r, chunks in enumerate(rounds):
            for c, chunk in enumerate(chunks):
                for i in chunk:
                    met[i] += (chunks[c - 1] if c else rounds[r - 1][-1]) + chunk
        outs = []
        for i in range(row.T):
            seen = [j for j in (sorted(set(met[i])) if self.once else met[i]) if j != i and j in row.past(i)]
            lengths = [torch.sqrt(row.k[j] @ row.k[j] + 1e-6 * len(row.k[j])) for j in seen]
            logits = [row.k[i] @ row.k[j] / length for j, length in zip(seen, lengths, strict=True)]
            outs.append(blend(torch.stack(logits), [row.v[j] for j in seen]) if seen else row.v[i])
        return torch.stack(outs)


def unit(k: Tensor) -> Tensor:
    """k / |k|, with the small term of the authors' code for keys near zero."""
    wide = to_wide(k)
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * k.shape[-1] ** -0.5).to(k.dtype)
