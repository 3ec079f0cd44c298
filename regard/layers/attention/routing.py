"""Tokens near the same centroid attend to each other."""

import dataclasses
import math
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.numeric import masked_softmax, wide_dtype
from regard.core.parallel import batch_sum
from regard.core.reference import Row, add_up, blend
from regard.core.rows import Mask, Memory, Rows
from regard.core.shape import Order, Shape
from regard.kernels import norm as row_norm
from regard.kernels.compiling import at_most, count_blocks, exporting, is_dynamic, surely_at_most
from regard.kernels.largest import largest
from regard.kernels.take import add_per_head, take_per_head
from regard.kernels.tiles import tiles
from regard.layers.attention.attending import recomputed
from regard.layers.attention.base import Facts
from regard.layers.attention.cached import Cached


class Routing(Cached):
    """Roy et al. 2020: q and k are normalised to length sqrt(D) (a layer norm without parameters), and each of k
    centroids mu_c, our `clusters`, picks the w tokens of a row with the largest mu_c . k (and, where queries have a
    projection of their own, mu_c . q). A picked query attends to the keys its centroid picked; the outputs of a query
    picked several times are averaged, and a query picked by none gives zeros:

        o_i = mean over c that picked i of sum_j softmax_j(q_i . k_j / sqrt(D)) v_j, j picked by c (causal: j <= i)

    strided=True is another kind of head in the authors' code, meant to stand for attention to the centroids: mu_c picks
    not the w nearest tokens, but of all n, sorted from near to far, every s-th, s = n // w. `heads(local(...),
    routing(...), routing(..., strided=True), strided(...))` has the four kinds of heads that a layer of theirs has.

    Role "cross": each centroid picks w tokens of the memory, and a query reads what the centroid nearest to it picked,
    o_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j, j picked by argmax_c mu_c . q_i: the formula of the paper. There the
    authors' code lets centroids pick among the queries too, whose outputs then depend on each other: no decoder that
    brings one token at a time, or beams of several sentences, gives the same.

    The authors' code leaves out the division by sqrt(D) (`scaled=False`), adds the relative positions of Shaw et al. by
    places among the picked tokens, and divides by 0.01 more than the number of times a query was picked. Its auxiliary
    loss adds a mean over queries and one over keys, where ours is one mean over both: `commitment` 2e-4 is their 1e-4.
    Its strided heads have queries of their own and are for one sequence only.

    In training, each centroid follows the tokens nearest to it by moving sums, sum <- decay sum + (1 - decay) sum of
    them, and likewise their count; one that is nearest to none stays. The auxiliary loss, `commitment` times the mean
    square of x - mu, draws tokens to their centroid; a large one draws them into one point, with equal weights.

    A centroid picks among all tokens of a row, so a later token may drive an earlier one out: outputs change as a row
    grows, though no token reads what comes after it. Decoding lets the centroids pick again among the tokens so far, as
    the authors do: a new token's output is that of the last token of a whole row.

    Time N k + k w^2, which is N^1.5 for k = w = sqrt(N); memory N k.
    """

    facts = Facts(
        name="routing",
        paper="Roy et al. 2020, Efficient Content-Based Sparse Attention with Routing Transformers",
        link="arXiv 2003.05997",
        family="clusters",
        formula="o_i = mean_c sum_j softmax_j(q_i . k_j / sqrt(D)) v_j, i and j among the w tokens nearest to mu_c",
        time=Order("N^2 / clusters", 2),
        memory=Order("N clusters", 1),
        state=Order("N", 1),
        roles=("self", "causal", "cross"),
        prefix_invariant=False,
        split_invariant=False,
        exact=False,
        signed=True,
        auxiliary_loss=True,
    )
    examples = (
        "routing(clusters=3)",
        "routing(clusters=4, window=6, scaled=False)",
        "routing(clusters=3, window=7, shared=False)",
        "routing(clusters=2, shared=False)",
        "routing(clusters=3, window=5, strided=True)",
        "routing(clusters=4, strided=True, shared=False)",
    )
    # each centroid picks all tokens
    reduces_to = (
        ("routing(clusters=3, window=64)", "routing(clusters=1)"),
        ("routing(clusters=3, window=33, shared=False)", "routing(clusters=1, shared=False)"),
        ("routing(clusters=3, window=33, strided=True)", "routing(clusters=1)"),
    )
    tile, largest_tile = 16, 128  # role "cross": queries of one centroid that read its keys together
    sums: Tensor  # [H, clusters, D]
    counts: Tensor  # [H, clusters]

    def __init__(
        self,
        shape: Shape,
        *,
        clusters: Annotated[int, "number of centroids per head (k in the paper)"] = 16,
        window: Annotated[
            int | None, "number of tokens that each centroid picks (w); None: N / clusters, rounded up"
        ] = None,
        shared: Annotated[
            bool, "one projection for queries and keys; False is not for role 'causal', and 'cross' has two"
        ] = True,
        strided: Annotated[bool, "a centroid picks every s-th of all tokens from near to far, not the nearest"] = False,
        scaled: Annotated[bool, "divide the logits by sqrt(D); False: as in the authors' code"] = True,
        decay: Annotated[float, "share of the old centroid that a training step keeps"] = 0.999,
        commitment: Annotated[float, "weight of the auxiliary loss (beta)"] = 1e-4,
    ):
        if window is not None:
            self.facts = dataclasses.replace(self.facts, time=Order("N clusters + clusters window^2", 1))
        if not shared:
            why = "a centroid must pick the same tokens as queries and as keys: build it with shared=True"
            roles = ("self", "cross")
            self.facts = dataclasses.replace(self.facts, roles=roles, refusals=(("causal", why),), state=None)
        if shape.role == "cross":
            # every query has a centroid, so none gives zeros
            self.facts = dataclasses.replace(self.facts, signed=False)
        elif shared:
            self.inputs = {"k": "key", "v": "value"}
        super().__init__(shape)
        for name, size in (("clusters", clusters), ("window", window)):
            if size is not None and size < 1:
                raise ValueError(f"option {name!r} of 'routing' must be at least 1, got {size}")
        if not 0 <= decay <= 1:
            raise ValueError(f"option 'decay' of 'routing' must be from 0 to 1, got {decay}")
        self.clusters, self.window, self.strided = clusters, window, strided
        self.decay, self.commitment = decay, commitment
        self.temper = self.scale if scaled else 1.0
        self.register_buffer("sums", norm(torch.randn(shape.heads, clusters, shape.head_width)))
        self.register_buffer("counts", torch.ones(shape.heads, clusters))

    @property
    def centroids(self) -> Tensor:
        """[H, clusters, D]"""
        return self.sums / self.counts[..., None]

    def attend(self, mask: Mask, k: Tensor, v: Tensor, q: Tensor | None = None) -> Tensor:
        k, q = norm(k), None if q is None else norm(q)
        if q is not None and self.shape.role == "cross":
            return self._across(mask, q, k, v)
        at = self._pick(mask, k, self.centroids)  # [B, H, C, w]
        keys, values = _take(k, at), _take(v, at)
        if mask.T == 1 and mask.S > 1:
            return self._step(mask, k, at, keys, values)
        rows, queries = at, keys
        if q is not None:
            rows = self._pick(mask, q, self.centroids, at.shape[3])
            queries = _take(q, rows)
        queries, keys, values = (x.flatten(1, 2) for x in (queries, keys, values))  # [B, H C, w, D]
        # sorted by position, with what stands for no token at the end: no causal query sees it
        visible = None if mask.causal or mask.full else (at < mask.S).flatten(1, 2)[:, :, None]
        if visible is not None and is_dynamic(at.shape[3]):
            # the kernel would ask whether the one row of a mask is all there is
            visible = visible.expand(-1, -1, at.shape[3], -1)
        o = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=visible, is_causal=mask.causal, scale=self.temper
        )
        rows, o = rows.flatten(2), o.unflatten(1, (-1, self.clusters)).flatten(2, 3)
        # behind the last token a place for what stands for none
        total = add_per_head(o, rows, mask.S + 1)
        times = add_per_head(torch.ones_like(o[..., :1]), rows, mask.S + 1)
        # a query that one centroid picked is as it is
        o = (total / times.clamp(min=1))[:, :, : mask.S]
        if mask.T == mask.S:
            return o
        here = (mask.q0[:, None] + torch.arange(mask.T, device=k.device))[:, None].expand(-1, o.shape[1], -1)
        return _take(o, here)

    def _pick(self, mask: Mask, x: Tensor, centroids: Tensor, w: int | None = None) -> Tensor:
        """The tokens that centroids [H or B, H, C, D] pick, sorted, and S in the place of those they lack:
        [B, H, C, w], where `w` is that of another pick from as many tokens."""
        S, end = mask.S, mask.end[:, None, None, None]
        x = x.detach().to(wide_dtype(x.dtype))
        near = centroids.to(x.dtype) @ x.mT
        if not mask.full:
            near = torch.where(torch.arange(S, device=x.device) < end, near, -torch.inf)
        if self.window is None:
            # by the real tokens of the row: padding makes no difference
            w = count_blocks(S, self.clusters) if w is None else w
            size = -(-end // self.clusters)
        else:
            w, size = at_most(self.window, S), end.clamp(max=self.window)
        if not self.strided:
            return largest(near, w, None if mask.full else size.flatten())
        rank = torch.arange(w, device=x.device)
        place = rank * (end // size.clamp(min=1))  # [B, 1, 1, w]
        at = near.argsort(-1, descending=True).gather(-1, place.clamp(max=S - 1).expand(*near.shape[:3], -1))
        return (at if mask.full else torch.where(rank < size, at, S)).sort(-1).values

    def _across(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Role "cross": each query reads the keys that the centroid nearest to it picked."""
        nearest = self._nearest(q)  # [B, H, T]
        if surely_at_most(mask.T, self.clusters):
            # a few queries, as in decoding: what their own centroids pick is all that is needed
            centroids = _take(self.centroids.expand(q.shape[0], -1, -1, -1), nearest)
            return self._gathered(q[:, :, :, None], k, v, self._pick(mask, k, centroids))[:, :, :, 0]
        at = self._pick(mask, k, self.centroids)
        tile = self._tile(mask.T)
        slot, cluster = tiles(nearest, self.clusters, tile)
        slots = slot[..., None].expand_as(q)
        room = q.new_zeros(*q.shape[:2], cluster.shape[2] * tile, q.shape[3])
        queries = room.scatter(2, slots, q).unflatten(2, (-1, tile))

        def read(q: Tensor, k: Tensor, v: Tensor, cluster: Tensor) -> Tensor:
            return self._gathered(q, k, v, _take(at, cluster))

        if exporting():
            return read(queries, k, v, cluster).flatten(2, 3).gather(2, slots)
        # as many tiles at a time as read about S keys
        size = max(1, mask.S // at.shape[3])
        pieces = zip(queries.split(size, 2), cluster.split(size, 2), strict=True)
        o = torch.cat([recomputed(read, some, k, v, theirs) for some, theirs in pieces], 2)
        return take_per_head(o.flatten(2, 3), slot)

    def _tile(self, T: int) -> int:
        """Keys are taken once for each tile: of many queries larger ones take fewer. A centroid fills several on
        average, so that few places of the last ones stay empty."""
        tile = self.tile
        while not exporting() and tile < self.largest_tile and 8 * tile * self.clusters <= T:
            tile *= 2
        return tile

    def _gathered(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        """Queries [B, H, n, t, D] over the keys at [B, H, n, w]."""
        visible = (at < k.shape[2]).flatten(1, 2)[:, :, None]
        q, k, v = (x.flatten(1, 2) for x in (q, _take(k, at), _take(v, at)))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self.temper)
        return o.unflatten(1, at.shape[1:3])

    def _nearest(self, x: Tensor) -> Tensor:
        """The centroid nearest to each token: [B, H, n, D] -> [B, H, n]"""
        x = x.detach().to(wide_dtype(x.dtype))
        # tokens last: a GPU looks for the largest of neighbours many times slower
        return (self.centroids.to(x.dtype) @ x.mT).argmax(-2)

    def _step(self, mask: Mask, k: Tensor, at: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One new token per row: it reads what the centroids that pick it picked."""
        here = mask.q0[:, None, None, None]
        q = _take(k, here[..., 0].expand(-1, k.shape[1], -1))[:, :, :, None]  # [B, H, 1, 1, D]
        logits = (q * self.temper @ keys.transpose(-1, -2))[:, :, :, 0]  # [B, H, C, w]
        member = (at == here).any(-1, keepdim=True)
        weights = masked_softmax(logits, member & (at <= here)).to(values.dtype)
        total = torch.einsum("bhcw,bhcwd->bhd", weights, values)[:, :, None]
        return total / member.sum(2, keepdim=True).clamp(min=1)

    def learn(
        self, rows: Rows, query: dict[str, Tensor], source: dict[str, Tensor], memory: Memory | None, state: Any
    ) -> Tensor | None:
        if not source:
            # steps over a memory that is projected already
            return None
        keys = self.repeat_heads({"k": source["k"]})
        x = norm(torch.cat([*query.values(), *keys.values()], 2))  # [B, H, n, D]
        centroids = self.centroids.to(x.dtype)
        hot = x.new_zeros(*x.shape[:3], self.clusters).scatter_(3, self._nearest(x)[..., None], 1)
        sides = [rows] * len(query) + [rows if memory is None else memory.rows()]
        if any(side.uniform_start is None for side in sides):
            real = torch.cat([torch.arange(side.T, device=x.device) < side.count[:, None] for side in sides], 1)
            real = real[:, None, :, None]
            x, hot = torch.where(real, x, 0), torch.where(real, hot, 0)
        wide = wide_dtype(x.dtype)
        count = batch_sum(hot.sum((0, 2), dtype=wide))  # [H, C]
        # padded tokens are zeros on both sides
        square = (x - hot @ centroids).to(wide).square()
        loss = self.commitment * batch_sum(square.sum()) / (count.sum() * x.shape[3]).clamp(min=1)
        with torch.no_grad():
            total = batch_sum((hot.mT @ x).sum(0, dtype=wide))
            share = torch.where(count > 0, 1 - self.decay, 0.0).to(self.sums.dtype)
            self.sums.lerp_(total.to(self.sums.dtype), share[..., None])
            self.counts.lerp_(count.to(self.counts.dtype), share)
        return loss

    def reference_loss(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        squares = []
        for head in range(self.shape.heads):
            row = self.plain_row(head, x, memory)
            for token in [*(plain_norm(row.q) if "q" in row.values else []), *plain_norm(row.k)]:
                nearest = max(self.centroids[head], key=lambda mu, token=token: float(mu @ token.detach()))
                squares.append(((token - nearest) ** 2).mean())
        return self.commitment * add_up(squares) / len(squares)

    def plain(self, row: Row) -> Tensor:
        keys = plain_norm(row.k)
        queries = plain_norm(row.q) if "q" in row.values else keys
        outs = [[] for _ in range(row.T)]
        across = self.shape.role == "cross"
        for c, mu in enumerate(self.centroids[row.head]):
            picked = self._plain_picks(mu, keys)
            if across:
                readers = [i for i, q in enumerate(queries) if self._plain_nearest(row.head, q) == c]
            else:
                readers = self._plain_picks(mu, queries)
            for i in readers:
                seen = [j for j in picked if j in row.past(i)]
                logits = torch.stack([self.temper * (queries[i] @ keys[j]) for j in seen])
                outs[i].append(blend(logits, [row.v[j] for j in seen]))
        return torch.stack([add_up(out) / len(out) if out else torch.zeros_like(row.v[0]) for out in outs])

    def _plain_picks(self, mu: Tensor, tokens: list[Tensor]) -> list[int]:
        n = len(tokens)
        w = min(math.ceil(n / self.clusters) if self.window is None else self.window, n)
        away = [-float(mu @ token.detach()) for token in tokens]
        ranked = sorted(range(n), key=away.__getitem__)
        return ranked[:: n // w][:w] if self.strided else ranked[:w]

    def _plain_nearest(self, head: int, token: Tensor) -> int:
        near = [float(mu @ token.detach()) for mu in self.centroids[head]]
        return near.index(max(near))


def norm(x: Tensor) -> Tensor:
    """Mean 0 and variance 1 over the last axis."""
    return row_norm.norm(x, 1e-6)


def plain_norm(vectors: Tensor) -> list[Tensor]:
    """`norm` for the reference."""
    centred = [x - x.mean() for x in vectors]
    return [x / torch.sqrt((x * x).mean() + 1e-6) for x in centred]


def _take(x: Tensor, at: Tensor) -> Tensor:
    """`take_per_head`, past the last token that one."""
    return take_per_head(x, at.clamp(max=x.shape[2] - 1))
