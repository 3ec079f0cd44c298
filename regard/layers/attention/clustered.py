"""Queries that are alike are answered together."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core.numeric import masked_softmax, wide_dtype
from regard.core.reference import Row, add_up, blend
from regard.core.rows import Mask
from regard.core.shape import Order, Shape
from regard.kernels.compiling import at_most, is_dynamic
from regard.kernels.largest import largest
from regard.kernels.take import take_per_head
from regard.kernels.tiles import tiles
from regard.kernels.votes import group_codes
from regard.layers.attention.base import Facts
from regard.layers.attention.cached import Cached
from regard.layers.attention.draws import RandomBuffer, check_redraw


class Clustered(RandomBuffer, Cached):
    """Vyas et al. 2020: the queries of a row form C clusters, and the mean q_c of a cluster attends for its members:
    A^c = softmax(q_c K^T / sqrt(D)), o_i = A^c V. Improved (`topk` above 0): of the keys T with the k largest A^c each
    member makes a softmax of its own, which shares the weight that A^c gives to T:

        o_i = sum_{j not in T} A^c_j v_j + m_c sum_{j in T} softmax_{j in T}(q_i . k_j / sqrt(D)) v_j,
        m_c = sum_{j in T} A^c_j

    A query's code is on which side of `bits` random planes it lies; the clusters are those of k-means on codes by their
    Hamming distance. The first C queries are the first centroids, a new centroid has the bits that most of its members
    have (no where they are as many), and one without members stays as it is. Clusters are constants to the gradient;
    the planes live in a buffer and are drawn anew at every training step (`redraw`; the authors draw at every call).
    Time N (C + k) D and N C bits an iteration, memory N C.
    """

    random_buffer = "planes"
    facts = Facts(
        name="clustered",
        paper="Vyas et al. 2020, Fast Transformers with Clustered Attention",
        link="arXiv 2007.04825",
        family="clusters",
        formula="o_i = sum_j softmax_j(q_c . k_j / sqrt(D)) v_j with q_c the mean of i's cluster; softmax_j(q_i . k_j "
        "/ sqrt(D)) among the topk keys of the cluster",
        time=Order("N (clusters + topk)", 1),
        memory=Order("N clusters", 1),
        roles=("self",),
        refusals=(
            ("causal", "a query is answered by the mean of its cluster, in which later queries are too"),
            ("cross", "queries are answered in clusters, and a decoder brings one at a time"),
        ),
        positions=("rotation",),
        exact=False,
    )
    examples = (
        "clustered(clusters=4, topk=5, bits=16)",
        "clustered(clusters=5, topk=0, bits=24, iterations=3)",
        "clustered(clusters=3, topk=1, bits=8, iterations=1)",
    )
    # all keys are in T; each query is a cluster
    reduces_to = (
        ("clustered(clusters=3, topk=64)", "softmax"),
        ("clustered(clusters=64, topk=0, bits=256)", "softmax"),
    )
    tile = 32  # queries of one cluster that read its topk keys together
    planes: Tensor  # [H, bits, D + 1]

    def __init__(
        self,
        shape: Shape,
        *,
        clusters: Annotated[int, "number of clusters of queries per head (C in the paper)"] = 64,
        topk: Annotated[int, "number of keys that each query weighs by itself (k); 0: plain clustered attention"] = 32,
        bits: Annotated[int, "number of random planes in the hash of a query"] = 32,
        iterations: Annotated[int, "number of k-means iterations"] = 10,
        redraw: Annotated[int, "training steps between draws of the planes; 0: drawn once"] = 1,
    ):
        super().__init__(shape)
        for name, size in (("clusters", clusters), ("bits", bits), ("iterations", iterations)):
            if size < 1:
                raise ValueError(f"option {name!r} of 'clustered' must be at least 1, got {size}")
        self.clusters, self.topk, self.iterations = clusters, topk, iterations
        self.redraw_every = check_redraw("clustered", redraw)
        # the last number of a plane is how far it lies from zero
        self.register_buffer("planes", torch.randn(shape.heads, bits, shape.head_width + 1))

    def draw_values(self, draw: torch.Generator | None = None) -> Tensor:
        """Other planes."""
        return torch.randn(self.planes.shape, generator=draw)

    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        real = None if mask.full else mask.real()[:, None, :, None]
        group = self.group(q, mask.count)  # [B, H, T]
        means = self._means(q, group, real)
        logits = (means * self.scale) @ k.transpose(2, 3)  # [B, H, C, S]
        weights = masked_softmax(logits, None if real is None else real.transpose(2, 3))
        if not self.topk:
            return take_per_head(weights.to(v.dtype) @ v, group)
        return self._improve(mask, q, k, v, group, weights)

    def _means(self, q: Tensor, group: Tensor, real: Tensor | None) -> Tensor:
        """The mean query of each cluster, [B, H, C, D]."""
        C, wide = at_most(self.clusters, q.shape[2]), wide_dtype(q.dtype)
        members = q.new_zeros(*group.shape, C).scatter_(3, group[..., None], 1)
        members = members if real is None else torch.where(real, members, 0)
        count = members.sum(2, dtype=wide)[..., None].clamp(min=1)
        queries = q if real is None else torch.where(real, q, 0)
        if not (q.device.type == "cuda" and q.dtype == torch.bfloat16):
            # elsewhere products may add up in less than float32, and sums of float16 overflow
            members, queries = members.to(wide), queries.to(wide)
        return (members.mT @ queries / count).to(q.dtype)

    def _improve(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, group: Tensor, weights: Tensor) -> Tensor:
        """The weight of the topk keys of each cluster shared out anew by each member."""
        top = largest(weights.detach(), at_most(self.topk, mask.S))  # [B, H, C, K]
        weight = weights.gather(3, top)
        rest = weights.scatter(3, top, 0).to(v.dtype) @ v  # [B, H, C, D]
        mass = weight.sum(3, keepdim=True).to(v.dtype)
        slot, cluster = tiles(group, weights.shape[2], self.tile)
        slots = slot[..., None].expand_as(q)
        sorted_q = q.new_zeros(*q.shape[:2], cluster.shape[2] * self.tile, q.shape[3]).scatter(2, slots, q)
        keys = take_per_head(top, cluster)  # [B, H, n, K]
        tiled_q, tiled_k, tiled_v = (
            x.flatten(1, 2)
            for x in (sorted_q.unflatten(2, (-1, self.tile)), take_per_head(k, keys), take_per_head(v, keys))
        )
        visible = None if mask.full else (keys < mask.end[:, None, None, None]).flatten(1, 2)[:, :, None]
        o = F.scaled_dot_product_attention(tiled_q, tiled_k, tiled_v, attn_mask=visible, scale=self.scale)
        o = o.unflatten(1, cluster.shape[1:]).flatten(2, 3).gather(2, slots)
        return take_per_head(rest, group) + take_per_head(mass, group) * o

    @torch.no_grad()
    def group(self, q: Tensor, count: Tensor | None) -> Tensor:
        """The cluster of each query, [B, H, T], of which the first count[b] of row b are real."""
        planes = self.planes.float()
        sides = torch.einsum("bhtd,hnd->bhtn", q.float(), planes[..., :-1]) + planes[:, None, :, -1]
        # products of codes are whole numbers, so there are true ties; bfloat16 holds those up to 256
        short = q.device.type == "cuda" and len(planes[0]) <= 256
        codes = torch.where(sides > 0, 1.0, -1.0).to(torch.bfloat16 if short else torch.float32).contiguous()
        if count is not None:
            # padding has no say in a centroid, and is none
            real = torch.arange(q.shape[2], device=q.device) < count[:, None]
            codes = torch.where(real[:, None, :, None], codes, 0)
        if is_dynamic(q.shape[2]):
            # a row may have fewer queries than there are clusters
            first = F.pad(codes, (0, 0, 0, self.clusters))[:, :, : self.clusters]
            count = planes.new_full((len(q),), q.shape[2]) if count is None else count
        else:
            first = codes[:, :, : self.clusters]
        return group_codes(codes, first, count, self.iterations)

    def plain(self, row: Row) -> Tensor:
        group = self._plain_groups(row)
        outs = []
        for i in range(row.T):
            members = [t for t in range(row.T) if group[t] == group[i]]
            mean = add_up(row.q[t] for t in members) / len(members)
            logits = torch.stack([self.scale * (mean @ row.k[j]) for j in range(row.S)])
            weights = torch.exp(logits - logits.max()) / torch.exp(logits - logits.max()).sum()
            top = sorted(range(row.S), key=(-weights).tolist().__getitem__)[: self.topk]
            out = sum((weights[j] * row.v[j] for j in range(row.S) if j not in top), torch.zeros_like(row.v[0]))
            if top:
                logits = torch.stack([self.scale * (row.q[i] @ row.k[j]) for j in top])
                out = out + add_up(weights[j] for j in top) * blend(logits, [row.v[j] for j in top])
            outs.append(out)
        return torch.stack(outs)

    def _plain_groups(self, row: Row) -> list[int]:
        codes = []
        for vector in row.q.detach():
            codes.append([bool(plane[:-1] @ vector + plane[-1] > 0) for plane in self.planes[row.head]])
        centroids = codes[: self.clusters]

        def nearest(code: list[bool]) -> int:
            away = [sum(x != y for x, y in zip(code, centroid, strict=True)) for centroid in centroids]
            return away.index(min(away))

        for _ in range(self.iterations - 1):
            group = [nearest(code) for code in codes]
            for c in range(len(centroids)):
                members = [code for code, cluster in zip(codes, group, strict=True) if cluster == c]
                if members:
                    centroids[c] = [2 * sum(bits) > len(members) for bits in zip(*members, strict=True)]
        return [nearest(code) for code in codes]
